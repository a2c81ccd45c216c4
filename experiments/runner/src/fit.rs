//! `experiments fit-kernels`: the kernel costs of a device profile from timed launches.
//!
//! `cargo run --release -p kernels --example time_kernels` times every kernel at many shapes on a GPU. This command
//! chooses each kernel's four parameters so that the profile's model (see [`KernelCost`]) fits those times best, by
//! the sum of squared logarithms: a factor of error has the same weight for short and long kernels. A kernel's cost
//! with its data in memory is fitted to the cold timings in the same way. Timings without cold ones have single
//! launches behind a fill of 1 GiB, which evicts everything from the cache: those are used instead, less the time that
//! two events around a launch add.

use crate::profile;
use crate::table::{percent, table};
use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use terminal::{Cell, Column, Page, command, quoted};
use vramlab::Profile;
use vramlab::device::sim::{KernelCost, MemoryCost};
use vramlab::input::{TABLE, read_text};
use vramlab::output::{Existing, OutputFile};

#[derive(Debug, Args)]
pub(crate) struct FitArgs {
    /// Output of `cargo run --release -p kernels --example time_kernels` on a GPU
    timings: PathBuf,
    /// Profile that supplies all other costs [default: the built-in H200]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Capacity of the L2 cache, as the profile's l2_bytes [default: as in the profile]
    #[arg(long, value_name = "BYTES")]
    l2_bytes: Option<u64>,
    /// Write the new profile to this file
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
}

/// A line of `time_kernels`; its other fields are ignored.
#[derive(Clone, Debug, Deserialize)]
struct Timing {
    kernel: String,
    blocks: u64,
    iterations: u64,
    bytes: u64,
    median_ns: f64,
    #[serde(default)]
    cold_median_ns: Option<f64>,
    #[serde(default)]
    single_median_ns: Option<f64>,
}

impl Timing {
    /// The time with all data in memory, given the time that events add to a single launch.
    fn cold_ns(&self, events_ns: f64) -> Option<f64> {
        let cold = self.cold_median_ns.or(self.single_median_ns.map(|single| single - events_ns));
        // Reading from memory is never faster than from the cache.
        cold.map(|cold| cold.max(self.median_ns))
    }
}

/// A kernel's fit, with its errors.
#[derive(Clone, Debug)]
struct Fit {
    kernel: String,
    timings: usize,
    cost: KernelCost,
    /// Largest of |model / measured - 1|.
    worst: f64,
    /// Largest error of the cold timings; absent without them.
    worst_cold: Option<f64>,
}

/// Candidate numbers of resident blocks in a wave: from one block for every second multiprocessor of a small GPU to
/// sixteen for each of a large one.
const WAVES: [u64; 8] = [16, 33, 66, 132, 264, 528, 1056, 2112];

/// Bandwidths in bytes a nanosecond from which a fit starts: a bandwidth that does not affect the fit keeps its start
/// value, so slow ones are tried as well, and of equal fits the first is taken.
const BANDWIDTHS: [f64; 4] = [6000.0, 2000.0, 500.0, 150.0];
/// An upper bound of 20 TB/s, so that a parameter without effect does not diverge.
const FASTEST: f64 = 20_000.0;

fn model(cost: &KernelCost, timing: &Timing, missed: f64) -> f64 {
    cost.ns(timing.blocks, timing.iterations, timing.bytes, missed)
}

/// Sum of the squared logarithms of the model's errors.
fn error(cost: &KernelCost, timings: &[(&Timing, f64)], missed: f64) -> f64 {
    timings.iter().map(|(timing, ns)| (model(cost, timing, missed) / ns).ln().powi(2)).sum()
}

/// Coordinate descent in logarithms, with no cost below `least`'s and no bandwidth above `fastest`. Deterministic.
fn descend(
    mut best: MemoryCost,
    least: MemoryCost,
    fastest: f64,
    error: impl Fn(MemoryCost) -> f64,
) -> (f64, MemoryCost) {
    let mut off = error(best);
    let mut step: f64 = 1.0;
    while step > 1e-4 {
        let mut improved = false;
        for parameter in 0..3 {
            for factor in [step.exp(), (-step).exp()] {
                let mut next = best;
                match parameter {
                    0 => next.fixed_ns = (next.fixed_ns * factor).max(least.fixed_ns),
                    1 => next.iteration_ns = (next.iteration_ns * factor).max(least.iteration_ns),
                    _ => next.bytes_per_ns = (next.bytes_per_ns * factor).clamp(least.bytes_per_ns, fastest),
                }
                let missed = error(next);
                if missed < off {
                    (best, off, improved) = (next, missed, true);
                }
            }
        }
        if !improved {
            step /= 2.0;
        }
    }
    (off, best)
}

fn rounded(cost: MemoryCost) -> MemoryCost {
    let tenth = |value: f64| (value * 10.0).round() / 10.0;
    MemoryCost {
        fixed_ns: tenth(cost.fixed_ns),
        iteration_ns: tenth(cost.iteration_ns),
        bytes_per_ns: tenth(cost.bytes_per_ns).max(0.1),
    }
}

/// Fits the costs of data in the cache, from a start for each wave size and bandwidth.
fn fit(timings: &[Timing]) -> KernelCost {
    let timings: Vec<(&Timing, f64)> = timings.iter().map(|timing| (timing, timing.median_ns)).collect();
    let shortest = timings.iter().map(|(_, ns)| *ns).fold(f64::INFINITY, f64::min);
    let cost = |MemoryCost { fixed_ns, iteration_ns, bytes_per_ns }, blocks_per_wave| KernelCost {
        fixed_ns,
        iteration_ns,
        blocks_per_wave,
        bytes_per_ns,
        from_memory: None,
    };
    let least = MemoryCost { fixed_ns: 0.0, iteration_ns: 0.0, bytes_per_ns: 1.0 };
    let fits =
        WAVES.into_iter().flat_map(|waves| BANDWIDTHS.map(|bandwidth| (waves, bandwidth))).map(|(waves, bandwidth)| {
            let start = MemoryCost { fixed_ns: 0.8 * shortest, iteration_ns: 0.2 * shortest, bytes_per_ns: bandwidth };
            let (off, best) = descend(start, least, FASTEST, |from| error(&cost(from, waves), &timings, 0.0));
            (off, best, waves)
        });
    let (_, best, waves) = fits.min_by(|a, b| a.0.total_cmp(&b.0)).expect("there is at least one start");
    cost(rounded(best), waves)
}

/// The costs of data in memory, each at least as high as from the cache.
fn fit_from_memory(hot: &KernelCost, timings: &[(&Timing, f64)]) -> MemoryCost {
    let with = |cold: MemoryCost| KernelCost { from_memory: Some(cold), ..hot.clone() };
    let least = MemoryCost { fixed_ns: hot.fixed_ns, iteration_ns: hot.iteration_ns, bytes_per_ns: 0.1 };
    let start = |slower: f64| MemoryCost {
        // A kernel without a fixed cost can have one from memory; zero would stay zero.
        fixed_ns: hot.fixed_ns.max(1.0),
        iteration_ns: hot.iteration_ns.max(1.0),
        bytes_per_ns: (hot.bytes_per_ns / slower).max(0.1),
    };
    let starts = [1.0, 1.5, 2.0, 4.0, 8.0].map(start);
    let fits =
        starts.into_iter().map(|from| descend(from, least, hot.bytes_per_ns, |cold| error(&with(cold), timings, 1.0)));
    rounded(fits.min_by(|a, b| a.0.total_cmp(&b.0)).expect("there is at least one start").1)
}

/// Fits every kernel in `timings` and puts its cost into `profile`.
fn fit_all(profile: &mut Profile, timings: &Path) -> Result<Vec<Fit>> {
    let text = read_text(timings, TABLE).with_context(|| format!("cannot read {}", timings.display()))?;
    let mut by_kernel: BTreeMap<String, Vec<Timing>> = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let timing: Timing = serde_json::from_str(line)
            .with_context(|| format!("{}, line {number}: not a line of time_kernels", timings.display()))?;
        // The upper bound is the one of a profile's times.
        if !(timing.median_ns > 0.0 && timing.median_ns < 1e12) {
            bail!("{}, line {number}: median_ns must be positive and below 1e12", timings.display());
        }
        by_kernel.entry(timing.kernel.clone()).or_default().push(timing);
    }
    if by_kernel.is_empty() {
        bail!("{} has no timings; write it with the example time_kernels on a GPU", timings.display());
    }
    // The time that events add to a single launch is visible at the shortest, which reads almost nothing.
    let singles = by_kernel.values().flatten().filter_map(|timing| Some((timing.median_ns, timing.single_median_ns?)));
    let shortest = singles.min_by(|a, b| a.0.total_cmp(&b.0));
    let events_ns = shortest.map_or(0.0, |(median, single)| (single - median).max(0.0));
    let mut fits = Vec::new();
    for (kernel, timings) in &by_kernel {
        let worst = |cost: &KernelCost, times: &[(&Timing, f64)], missed: f64| {
            times.iter().map(|(timing, ns)| (model(cost, timing, missed) / ns - 1.0).abs()).fold(0.0, f64::max)
        };
        let hot: Vec<(&Timing, f64)> = timings.iter().map(|timing| (timing, timing.median_ns)).collect();
        let cold: Vec<(&Timing, f64)> =
            timings.iter().filter_map(|timing| Some((timing, timing.cold_ns(events_ns)?))).collect();
        let mut cost = fit(timings);
        cost.from_memory = (!cold.is_empty()).then(|| fit_from_memory(&cost, &cold));
        profile.kernels.insert(kernel.clone(), cost.clone());
        fits.push(Fit {
            kernel: kernel.clone(),
            timings: timings.len(),
            worst: worst(&cost, &hot, 0.0),
            worst_cold: (!cold.is_empty()).then(|| worst(&cost, &cold, 1.0)),
            cost,
        });
    }
    Ok(fits)
}

/// Fits, writes the profile and prints each kernel's errors.
pub(crate) fn fit_kernels(args: &FitArgs) -> Result<()> {
    let mut profile = profile::read(args.profile.as_deref())?;
    profile.l2_bytes = args.l2_bytes.or(profile.l2_bytes);
    let fits = fit_all(&mut profile, &args.timings)?;
    let of = |value: f64| Cell::from(value.to_string());
    let cold = |fit: &Fit, of: fn(&MemoryCost) -> f64| {
        Cell::or_dash(fit.cost.from_memory.as_ref().map(|cold| of(cold).to_string()))
    };
    let table = table(
        &fits,
        &[
            (Column::left("kernel"), &|fit| Cell::from(&fit.kernel)),
            (Column::right("timings").priority(3), &|fit| Cell::from(fit.timings.to_string())),
            (Column::right("fixed ns"), &|fit| of(fit.cost.fixed_ns)),
            (Column::right("iteration ns"), &|fit| of(fit.cost.iteration_ns)),
            (Column::right("blocks per wave").priority(2), &|fit| Cell::from(fit.cost.blocks_per_wave.to_string())),
            (Column::right("bytes per ns"), &|fit| of(fit.cost.bytes_per_ns)),
            (Column::right("worst miss"), &|fit| Cell::from(percent(fit.worst, 0))),
            (Column::right("from memory: fixed ns").priority(6), &|fit| cold(fit, |cold| cold.fixed_ns)),
            (Column::right("iteration ns").priority(5), &|fit| cold(fit, |cold| cold.iteration_ns)),
            (Column::right("bytes per ns").priority(4), &|fit| cold(fit, |cold| cold.bytes_per_ns)),
            (Column::right("worst miss").priority(1), &|fit| {
                Cell::or_dash(fit.worst_cold.map(|worst| percent(worst, 0)))
            }),
        ],
    );
    let off = fits.iter().map(|fit| fit.worst.max(fit.worst_cold.unwrap_or(0.0))).fold(0.0, f64::max);
    profile::write(&profile, OutputFile::create(&args.out, Existing::Replace)?)?;
    let mut page = Page::stdout();
    page.table(&table);
    let title = format!(
        "The costs of {} kernels went to {}; the worst misses a timing by {}.",
        fits.len(),
        args.out.display(),
        percent(off, 0)
    );
    let next = format!("fidelity --profile {}", quoted(&args.out.to_string_lossy()));
    page.end(title, &command("experiments", &next));
    page.print()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    const TRUTH: KernelCost = KernelCost {
        fixed_ns: 1500.0,
        iteration_ns: 800.0,
        blocks_per_wave: 132,
        bytes_per_ns: 3000.0,
        from_memory: Some(MemoryCost { fixed_ns: 2000.0, iteration_ns: 1300.0, bytes_per_ns: 900.0 }),
    };

    fn timings() -> Vec<Timing> {
        let shapes =
            [(10, 7, 100_000), (132, 49, 500_000), (133, 49, 600_000), (900, 3, 9_000_000), (4, 1, 80_000_000)];
        shapes
            .map(|(blocks, iterations, bytes)| {
                let mut timing = Timing {
                    kernel: "k".into(),
                    blocks,
                    iterations,
                    bytes,
                    median_ns: 0.0,
                    cold_median_ns: None,
                    single_median_ns: None,
                };
                timing.median_ns = model(&TRUTH, &timing, 0.0);
                timing
            })
            .into()
    }

    #[test]
    fn finds_the_parameters_that_made_the_timings() {
        let timings = timings();
        let cost = fit(&timings);
        for timing in &timings {
            assert!((model(&cost, timing, 0.0) / timing.median_ns - 1.0).abs() < 0.02, "{timing:?} {cost:?}");
        }
    }

    #[test]
    fn a_bandwidth_that_only_one_shape_shows_is_found() {
        // 220 bytes a nanosecond limit only the last shape, and its iterations are shorter than that from most starts.
        let truth = KernelCost { fixed_ns: 3000.0, iteration_ns: 4000.0, bytes_per_ns: 220.0, ..TRUTH };
        let mut timings = timings();
        timings.truncate(3);
        for (timing, (iterations, bytes)) in timings.iter_mut().zip([(1, 130_000), (7, 2_800_000), (16, 18_000_000)]) {
            (timing.blocks, timing.iterations, timing.bytes) = (100, iterations, bytes);
            timing.median_ns = model(&truth, timing, 0.0);
        }
        let cost = fit(&timings);
        for timing in &timings {
            assert!((model(&cost, timing, 0.0) / timing.median_ns - 1.0).abs() < 0.02, "{timing:?} {cost:?}");
        }
    }

    fn write(folder: &Path, line: impl Fn(&Timing) -> serde_json::Value) -> std::path::PathBuf {
        let path = folder.join("timings.jsonl");
        let lines: Vec<String> = self::timings().iter().map(|timing| line(timing).to_string()).collect();
        std::fs::write(&path, lines.join("\n")).unwrap();
        path
    }

    #[test]
    fn finds_cost_of_misses_from_cold_timings_or_single_launches() {
        let folder = tempfile::tempdir().unwrap();
        let line = |timing: &Timing| {
            serde_json::json!({"kernel": "k", "blocks": timing.blocks, "iterations": timing.iterations,
                "bytes": timing.bytes, "median_ns": timing.median_ns})
        };
        let with = |field: &'static str, added: f64| {
            move |timing: &Timing| {
                let mut line = line(timing);
                line[field] = (model(&TRUTH, timing, 1.0) + added).into();
                line
            }
        };
        let mut profile = Profile::h200();
        let cold = write(folder.path(), with("cold_median_ns", 0.0));
        let fits = fit_all(&mut profile, &cold).unwrap();
        assert!(fits[0].worst_cold.unwrap() < 0.02, "{fits:?}");
        assert_eq!(profile.kernels["k"], fits[0].cost);
        // Single launches are longer by the time that events add, which is visible at one that reads almost nothing.
        let single = write(folder.path(), with("single_median_ns", 1300.0));
        let mut text = std::fs::read_to_string(&single).unwrap();
        text += "\n{\"kernel\":\"empty\",\"blocks\":1,\"iterations\":1,\"bytes\":4,\"median_ns\":900,\"single_median_ns\":2200}";
        std::fs::write(&single, text).unwrap();
        let fits = fit_all(&mut profile, &single).unwrap();
        assert!(fits.iter().all(|fit| fit.worst_cold.unwrap() < 0.02), "{fits:?}");
        let none = fit_all(&mut profile, &write(folder.path(), line)).unwrap();
        assert!(none[0].worst_cold.is_none() && none[0].cost.from_memory.is_none());
    }
}
