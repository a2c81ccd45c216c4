//! The links between GPUs: all-reduces by size, and the latencies and bandwidth of a profile that follow from them.

use super::Engine;
use anyhow::{Result, bail};
use std::sync::Arc;
use terminal::{Cell, Column, Table, duration, exit};
use trainer::TrainError;
use trainer::ranks::{SumTime, measure_sums};
use vramlab::device::DriverResult;
use vramlab::device::sim::{LinkCosts, Ranks};
use vramlab::{Bytes, CudaDriver, DeviceName, Driver, Profile, SimDriver, SimMemory};

/// Bytes of each all-reduce, ascending. The first gives the latency, the last two the bandwidth.
const SIZES: [u64; 9] = [1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20];

/// Ranks of one simulated GPU that all do the same at the same time.
#[derive(Debug)]
struct Alike(u64);

impl Ranks for Alike {
    fn count(&self) -> u64 {
        self.0
    }

    fn last_start(&self, ready_ns: u64) -> DriverResult<u64> {
        Ok(ready_ns)
    }
}

/// The numbers of ranks to measure: two, and all GPUs where there are more. `requested` are those of the command line.
///
/// # Errors
/// Fewer GPUs than requested.
pub(super) fn counts(device: &DeviceName, requested: Option<u32>) -> Result<Vec<u32>> {
    let gpus = match device {
        DeviceName::Cuda(_) => CudaDriver::probe()?.len(),
        // Simulated GPUs are as many as one wants.
        _ => requested.unwrap_or(1) as usize,
    };
    let count = requested.map_or(gpus, |requested| requested as usize);
    if count > gpus {
        bail!("--gpus {count} needs {count} GPUs, and this machine has {gpus}; lower --gpus");
    }
    // CAST: a number of GPUs of one host.
    let count = count as u32;
    Ok(if count < 2 {
        Vec::new()
    } else if count == 2 {
        vec![2]
    } else {
        vec![2, count]
    })
}

/// Measures all-reduces of every size over each number of ranks.
pub(super) fn times(engine: &Engine, profile: &Profile, counts: &[u32]) -> Result<Vec<SumTime>> {
    let mut out = Vec::new();
    for count in counts {
        match engine {
            Engine::Cuda(..) => out.extend(measure_sums(*count, &SIZES).map_err(with_code)?),
            Engine::Sim(_) => out.extend(simulated(profile, (*count).into())?),
        }
    }
    Ok(out)
}

/// An error with the exit code that the trainer gives it.
fn with_code(error: TrainError) -> anyhow::Error {
    match error.exit_code() {
        exit::BAD_INPUT => error.into(),
        code => exit::RuntimeFailure::with_code(code, error).into(),
    }
}

/// The times on a simulated GPU, each behind the largest sum.
fn simulated(profile: &Profile, ranks: u64) -> Result<Vec<SumTime>> {
    let driver = SimDriver::new(profile.clone(), SimMemory::None);
    driver.join(Arc::new(Alike(ranks)));
    let largest = SIZES[SIZES.len() - 1];
    let (stream, memory) = (driver.stream_create()?, driver.mem_alloc(largest)?);
    let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
    let time = |bytes: &u64| -> Result<SumTime> {
        driver.all_reduce(stream, memory, largest)?;
        driver.event_record(start, stream)?;
        driver.all_reduce(stream, memory, *bytes)?;
        driver.event_record(end, stream)?;
        driver.stream_synchronize(stream)?;
        Ok(SumTime::from_means(ranks, *bytes, vec![driver.event_elapsed_ns(start, end)?]))
    };
    SIZES.iter().map(time).collect()
}

/// Share of the bytes of an all-reduce that each link carries, over a ring.
fn carried(ranks: u64) -> f64 {
    // CAST: a number of ranks.
    2.0 * (ranks - 1) as f64 / ranks as f64
}

/// Costs of links by these times. Where one number of ranks was measured, both latencies of `base` change by the same factor.
pub(super) fn costs(times: &[SumTime], base: LinkCosts) -> LinkCosts {
    let of = |ranks: u64| times.iter().filter(move |time| time.ranks == ranks);
    let Some(most) = times.iter().map(|time| time.ranks).max() else { return base };
    let least = times.iter().map(|time| time.ranks).min().unwrap_or(most);
    // CAST: bytes and nanoseconds below 2^53, here and below.
    let rate = |ranks: u64| -> Option<f64> {
        let (small, large) = of(ranks).zip(of(ranks).skip(1)).last()?;
        let (bytes, ns) = (large.bytes.checked_sub(small.bytes)?, large.p50_ns.checked_sub(small.p50_ns)?);
        (bytes > 0 && ns > 0).then(|| carried(ranks) * bytes as f64 / ns as f64)
    };
    let bytes_per_ns = rate(most).unwrap_or(base.bytes_per_ns);
    let latency = |ranks: u64| -> f64 {
        let Some(smallest) = of(ranks).min_by_key(|time| time.bytes) else { return 0.0 };
        (smallest.p50_ns as f64 - carried(ranks) * smallest.bytes as f64 / bytes_per_ns).max(0.0)
    };
    let hops = |ranks: u64| 2.0 * (ranks - 1) as f64;
    let (base_ns, hop_ns) = if least < most {
        let hop = ((latency(most) - latency(least)) / (hops(most) - hops(least))).max(0.0);
        ((latency(least) - hops(least) * hop).max(0.0), hop)
    } else {
        let factor = latency(most) / (base.base_ns as f64 + hops(most) * base.hop_ns as f64).max(1.0);
        (factor * base.base_ns as f64, factor * base.hop_ns as f64)
    };
    LinkCosts { base_ns: base_ns.round() as u64, hop_ns: hop_ns.round() as u64, bytes_per_ns }
}

/// The times, next to those of a profile with these links.
pub(super) fn table(times: &[SumTime], links: LinkCosts) -> Table {
    let mut table = Table::new([
        Column::right("ranks"),
        Column::right("size"),
        Column::right("all-reduce"),
        Column::right("GB/s").priority(1),
        Column::right("profile"),
        Column::right("difference").priority(2),
    ]);
    for time in times {
        let model = links.all_reduce_ns(time.ranks, time.bytes);
        // CAST: display values.
        let (measured, modelled) = (time.p50_ns.max(1) as f64, model as f64);
        table.row([
            Cell::from(time.ranks.to_string()),
            Cell::from(Bytes(time.bytes).to_string()),
            Cell::from(duration(time.p50_ns)),
            Cell::from(format!("{:.1}", carried(time.ranks) * time.bytes as f64 / measured)),
            Cell::from(duration(model)),
            Cell::from(format!("{:+.0} %", 100.0 * (modelled / measured - 1.0))),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_links_give_back_their_costs() {
        let links = LinkCosts { base_ns: 9_000, hop_ns: 1_250, bytes_per_ns: 123.0 };
        let profile = Profile { links, ..Profile::h200() };
        for (counts, base) in [(vec![2, 4], Profile::h200().links), (vec![2], links), (vec![8], links)] {
            let engine = Engine::Sim(Arc::new(SimDriver::new(profile.clone(), SimMemory::None)));
            let times = times(&engine, &profile, &counts).unwrap();
            assert_eq!(times.len(), counts.len() * SIZES.len());
            let fitted = costs(&times, base);
            assert!(
                fitted.base_ns.abs_diff(links.base_ns) <= 5 && fitted.hop_ns.abs_diff(links.hop_ns) <= 2,
                "{fitted:?}"
            );
            assert!((fitted.bytes_per_ns / links.bytes_per_ns - 1.0).abs() < 1e-3, "{fitted:?}");
        }
    }

    #[test]
    fn times_that_say_nothing_keep_the_base() {
        let base = Profile::h200().links;
        assert_eq!(costs(&[], base), base);
        let one = SumTime::from_means(2, 1 << 20, vec![base.all_reduce_ns(2, 1 << 20)]);
        assert_eq!(costs(&[one], base).bytes_per_ns, base.bytes_per_ns, "one size has no slope");
        // Noise in which more ranks are faster gives no negative cost.
        let times: Vec<SumTime> = [(2, 10, 9_000), (2, 1 << 20, 8_000), (4, 10, 5_000), (4, 1 << 20, 4_000)]
            .map(|(ranks, bytes, ns)| SumTime::from_means(ranks, bytes, vec![ns]))
            .to_vec();
        let fitted = costs(&times, base);
        assert!(fitted.hop_ns == 0 && fitted.base_ns > 0 && fitted.bytes_per_ns == base.bytes_per_ns, "{fitted:?}");
    }

    #[test]
    fn failures_keep_their_exit_code() {
        let code = |error| exit::end(Err(with_code(error).context("links")));
        assert_eq!(code(TrainError::Input("no NCCL".into())), exit::BAD_INPUT);
        let failure = TrainError::Nccl { call: "ncclAllReduce", reason: "a link failed".into() };
        assert_eq!(code(failure), exit::FAILED);
    }

    #[test]
    fn two_ranks_and_all_are_measured() {
        let sim = DeviceName::Sim(None);
        for (requested, expected) in [(None, vec![]), (Some(1), vec![]), (Some(2), vec![2]), (Some(8), vec![2, 8])] {
            assert_eq!(counts(&sim, requested).unwrap(), expected);
        }
    }
}
