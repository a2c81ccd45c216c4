//! Measurement of sums over the GPUs of this machine, for the links of a simulated one.

use super::nccl::{Communicator, Id, Nccl};
use crate::error::{Result, TrainError};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use vramlab::{CudaDriver, DeviceAddr, Driver, StreamId};

/// Sums before those that are timed.
const WARM_UP: u64 = 5;
/// Timed series of each size.
const SAMPLES: usize = 11;
/// Sums in a series: few enough that the host queues them while the device works on one of the largest size.
const SUMS: u64 = 20;
/// Ranks that have not connected and measured after this time are given up.
const LIMIT: Duration = Duration::from_secs(120);

/// Device time of an all-reduce that is queued behind other work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SumTime {
    /// Number of ranks, one a GPU.
    pub ranks: u64,
    /// Bytes that each rank contributes.
    pub bytes: u64,
    /// Number of series, each of several sums.
    pub samples: u64,
    /// Mean of the shortest series.
    pub min_ns: u64,
    /// Median of the means.
    pub p50_ns: u64,
    /// Mean of the longest series.
    pub max_ns: u64,
}

impl SumTime {
    /// The time from the means of several series.
    #[must_use]
    pub fn from_means(ranks: u64, bytes: u64, mut means: Vec<u64>) -> Self {
        means.sort_unstable();
        let at = |index: usize| means.get(index).copied().unwrap_or_default();
        let (samples, last) = (means.len() as u64, means.len().saturating_sub(1));
        Self { ranks, bytes, samples, min_ns: at(0), p50_ns: at(means.len() / 2), max_ns: at(last) }
    }
}

/// One rank: a GPU with memory for the largest sum.
struct Rank {
    driver: Arc<CudaDriver>,
    stream: StreamId,
    memory: DeviceAddr,
}

impl Rank {
    fn new(device: usize, bytes: u64) -> Result<Self> {
        let driver = Arc::new(CudaDriver::new(device)?);
        driver.bind_to_thread()?;
        let (stream, memory) = (driver.stream_create()?, driver.mem_alloc(bytes)?);
        Ok(Self { driver, stream, memory })
    }

    /// The means of the series of each size.
    fn measure(&self, communicator: &Communicator, sizes: &[u64]) -> Result<Vec<Vec<u64>>> {
        let (driver, stream) = (self.driver.as_ref(), self.stream);
        let largest = sizes.iter().copied().max().unwrap_or_default();
        let sum = |bytes: u64| -> Result<()> {
            let raw = driver.raw_stream(stream)?;
            // SAFETY: the memory has room for the largest sum and is freed after all ranks have waited for their streams.
            unsafe { communicator.all_reduce(self.memory.get(), bytes / 4, raw.cast()) }
        };
        let (start, end) = (driver.event_create(true)?, driver.event_create(true)?);
        let series = |bytes: u64| -> Result<u64> {
            sum(largest)?;
            driver.event_record(start, stream)?;
            (0..SUMS).try_for_each(|_| sum(bytes))?;
            driver.event_record(end, stream)?;
            driver.event_synchronize(end)?;
            Ok(driver.event_elapsed_ns(start, end)? / SUMS)
        };
        let mut means = Vec::new();
        for bytes in sizes {
            (0..WARM_UP).try_for_each(|_| sum(*bytes))?;
            means.push((0..SAMPLES).map(|_| series(*bytes)).collect::<Result<Vec<u64>>>()?);
        }
        driver.stream_synchronize(stream)?;
        for event in [start, end] {
            // SAFETY: created above, completed and used nowhere else.
            unsafe { driver.event_destroy(event)? };
        }
        Ok(means)
    }

    fn release(self) -> Result<()> {
        self.driver.bind_to_thread()?;
        // SAFETY: allocated by `new`, freed once, and every rank has waited for its sums.
        unsafe { self.driver.mem_free(self.memory)? };
        // SAFETY: created by `new`; its work has completed.
        Ok(unsafe { self.driver.stream_destroy(self.stream) }?)
    }
}

/// Measures all-reduces of f32 over the first `ranks` GPUs by NCCL, a thread for each. `sizes` are in bytes. Takes seconds.
///
/// # Errors
/// [`TrainError::Input`] without NCCL, and when the GPUs do not connect; errors of the driver.
pub fn measure_sums(ranks: u32, sizes: &[u64]) -> Result<Vec<SumTime>> {
    let nccl = Nccl::load()?;
    let largest = sizes.iter().copied().max().unwrap_or(4).max(4);
    // All that can fail for one rank only is done before any of them waits for the others.
    let gpus = (0..ranks).map(|rank| Rank::new(rank as usize, largest)).collect::<Result<Vec<Rank>>>()?;
    let id = nccl.new_id()?;
    let (sender, receiver) = mpsc::channel();
    let gpus: Vec<Arc<Rank>> = gpus.into_iter().map(Arc::new).collect();
    for (rank, gpu) in (0..ranks).zip(&gpus) {
        let (nccl, gpu, sizes, sender) = (Arc::clone(&nccl), Arc::clone(gpu), sizes.to_vec(), sender.clone());
        let work = move || {
            let means = one_rank(nccl, id, (rank, ranks), &gpu, &sizes);
            drop(gpu);
            // The receiver has ended if another rank failed.
            let _ = sender.send((rank, means));
        };
        let thread = std::thread::Builder::new().name(format!("rank {rank}")).spawn(work);
        thread.map_err(|error| TrainError::Input(format!("cannot start a thread for a GPU: {error}")))?;
    }
    drop(sender);
    let mut times = Vec::new();
    for _ in 0..ranks {
        let (rank, means) = receiver.recv_timeout(LIMIT).map_err(|_| {
            let seconds = LIMIT.as_secs();
            TrainError::Input(format!(
                "the {ranks} GPUs did not complete their sums within {seconds} s; NCCL_DEBUG=WARN prints more"
            ))
        })?;
        let means = means?;
        if rank == 0 {
            let of_size = |(bytes, means): (&u64, Vec<u64>)| SumTime::from_means(ranks.into(), *bytes, means);
            times = sizes.iter().zip(means).map(of_size).collect();
        }
    }
    gpus.into_iter().filter_map(Arc::into_inner).try_for_each(Rank::release)?;
    Ok(times)
}

fn one_rank(nccl: Arc<Nccl>, id: Id, (rank, ranks): (u32, u32), gpu: &Rank, sizes: &[u64]) -> Result<Vec<Vec<u64>>> {
    gpu.driver.bind_to_thread()?;
    let communicator = Communicator::new(nccl, id, rank, ranks)?;
    gpu.measure(&communicator, sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_the_median_of_its_series() {
        let time = SumTime::from_means(2, 1 << 20, vec![9, 5, 7]);
        assert_eq!((time.min_ns, time.p50_ns, time.max_ns, time.samples), (5, 7, 9, 3));
    }

    #[test]
    #[ignore = "needs two GPUs and NCCL"]
    fn sums_of_two_gpus_are_measured() {
        let times = measure_sums(2, &[1 << 10, 64 << 20]).unwrap();
        assert_eq!(
            times.iter().map(|time| (time.ranks, time.bytes)).collect::<Vec<_>>(),
            [(2, 1 << 10), (2, 64 << 20)]
        );
        assert!(times[0].p50_ns > 0 && times[0].p50_ns < times[1].p50_ns, "{times:?}");
    }
}
