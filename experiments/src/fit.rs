//! `experiments fit-kernels`: the kernel costs of a device profile from timed launches.
//!
//! `cargo run --release -p kernels --example time_kernels` times every kernel at many shapes on a GPU. Here each
//! kernel's four parameters are chosen so that the profile's model (see
//! [`KernelCost`]) misses those times least, by the sum of squared logarithms:
//! being wrong by a factor counts the same for short and long kernels.

use allocators::Profile;
use allocators::device::sim::KernelCost;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A line of `time_kernels`; what else it holds does not matter here.
#[derive(Clone, Debug, Deserialize)]
struct Timing {
    kernel: String,
    blocks: u64,
    iterations: u64,
    bytes: u64,
    median_ns: f64,
}

/// How well a kernel's model meets its timings.
#[derive(Clone, Debug)]
pub(crate) struct Fit {
    pub(crate) kernel: String,
    pub(crate) timings: usize,
    pub(crate) cost: KernelCost,
    /// Largest of |model / measured - 1|.
    pub(crate) worst: f64,
}

/// Resident blocks that are tried for a wave: from one block for every second multiprocessor of a small GPU to
/// sixteen for each of a large one.
const WAVES: [u64; 8] = [16, 33, 66, 132, 264, 528, 1056, 2112];

fn model(cost: &KernelCost, timing: &Timing) -> f64 {
    // CAST: counts far below 2^53.
    let waves = timing.blocks.div_ceil(cost.blocks_per_wave) as f64;
    let compute = waves * timing.iterations as f64 * cost.iteration_ns;
    cost.fixed_ns + compute.max(timing.bytes as f64 / cost.bytes_per_ns)
}

fn error(cost: &KernelCost, timings: &[Timing]) -> f64 {
    timings.iter().map(|timing| (model(cost, timing) / timing.median_ns).ln().powi(2)).sum()
}

/// Coordinate descent in logarithms, from a start for each wave size. Deterministic.
fn fit(timings: &[Timing]) -> KernelCost {
    let shortest = timings.iter().map(|timing| timing.median_ns).fold(f64::INFINITY, f64::min);
    let start = |blocks_per_wave| KernelCost {
        fixed_ns: 0.8 * shortest,
        iteration_ns: 0.2 * shortest,
        blocks_per_wave,
        bytes_per_ns: 2000.0,
    };
    let descend = |blocks_per_wave: u64| {
        let mut best = start(blocks_per_wave);
        let mut least = error(&best, timings);
        let mut step: f64 = 1.0;
        while step > 1e-4 {
            let mut improved = false;
            for parameter in 0..3 {
                for factor in [step.exp(), (-step).exp()] {
                    let mut next = best.clone();
                    match parameter {
                        0 => next.fixed_ns *= factor,
                        1 => next.iteration_ns *= factor,
                        // Nothing moves faster than 20 TB/s, and a parameter that does not matter should not run away.
                        _ => next.bytes_per_ns = (next.bytes_per_ns * factor).clamp(1.0, 20_000.0),
                    }
                    let missed = error(&next, timings);
                    if missed < least {
                        (best, least, improved) = (next, missed, true);
                    }
                }
            }
            if !improved {
                step /= 2.0;
            }
        }
        (least, best)
    };
    let fits = WAVES.into_iter().map(descend);
    let best = fits.min_by(|a, b| a.0.total_cmp(&b.0)).expect("there is at least one wave size");
    let rounded = |value: f64| (value * 10.0).round() / 10.0;
    KernelCost {
        fixed_ns: rounded(best.1.fixed_ns),
        iteration_ns: rounded(best.1.iteration_ns),
        blocks_per_wave: best.1.blocks_per_wave,
        bytes_per_ns: rounded(best.1.bytes_per_ns).max(0.1),
    }
}

/// Fits every kernel in `timings` and puts its cost into `profile`.
pub(crate) fn fit_kernels(profile: &mut Profile, timings: &Path) -> Result<Vec<Fit>> {
    let text = std::fs::read_to_string(timings).with_context(|| format!("cannot read {}", timings.display()))?;
    let mut by_kernel: BTreeMap<String, Vec<Timing>> = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let timing: Timing = serde_json::from_str(line)
            .with_context(|| format!("{}, line {number}: not a line of time_kernels", timings.display()))?;
        // The upper bound is that of a profile's times.
        if !(timing.median_ns > 0.0 && timing.median_ns < 1e12) {
            bail!("{}, line {number}: median_ns must be positive and below 1e12", timings.display());
        }
        by_kernel.entry(timing.kernel.clone()).or_default().push(timing);
    }
    if by_kernel.is_empty() {
        bail!("{} holds no timings; write it with the example time_kernels on a GPU", timings.display());
    }
    let mut fits = Vec::new();
    for (kernel, timings) in by_kernel {
        let cost = fit(&timings);
        let misses = timings.iter().map(|timing| (model(&cost, timing) / timing.median_ns - 1.0).abs());
        let worst = misses.fold(0.0, f64::max);
        profile.kernels.insert(kernel.clone(), cost.clone());
        fits.push(Fit { kernel, timings: timings.len(), cost, worst });
    }
    Ok(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_parameters_that_made_the_timings() {
        let truth = KernelCost { fixed_ns: 1500.0, iteration_ns: 800.0, blocks_per_wave: 132, bytes_per_ns: 3000.0 };
        let shapes =
            [(10, 7, 100_000), (132, 49, 500_000), (133, 49, 600_000), (900, 3, 9_000_000), (4, 1, 80_000_000)];
        let timings: Vec<Timing> = shapes
            .into_iter()
            .map(|(blocks, iterations, bytes)| {
                let mut timing = Timing { kernel: "k".into(), blocks, iterations, bytes, median_ns: 0.0 };
                timing.median_ns = model(&truth, &timing);
                timing
            })
            .collect();
        let found = fit(&timings);
        for timing in &timings {
            assert!((model(&found, timing) / timing.median_ns - 1.0).abs() < 0.02, "{timing:?} {found:?}");
        }
    }
}
