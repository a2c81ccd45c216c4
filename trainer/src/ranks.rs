//! Several GPUs: a run of several processes, one a GPU, that train one network on parts of each batch.
//!
//! [`Group`] connects the ranks on the host. Gradients are summed over the ranks on the devices: by NCCL on GPUs, over simulated
//! links on simulated ones (`Device::all_reduce`).

mod environment;
mod frame;
mod group;
#[cfg(unix)]
mod launch;
#[cfg(not(unix))]
#[path = "ranks/no_launch.rs"]
mod launch;
mod links;
pub(crate) mod nccl;
mod registration;
mod rendezvous;
mod sums;

use crate::data::Dataset;
use crate::error::{Result, TrainError};
use crate::settings::{DeviceChoice, Settings};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::net::TcpListener;
use std::ops::Range;
use std::time::Duration;
use vramlab::{CudaDriver, DeviceKind, DeviceName};

pub(crate) use environment::Part;
pub use group::Group;
pub(crate) use launch::launch;
pub use links::{SumTime, measure_sums};
pub use registration::{
    BufferMemory, CollectiveTime, CommunicatorMemory, KindMeasurement, MeasuringRank, Mode, Operation,
    RegistrationResult, measure_communicators, measure_registration,
};
pub(crate) use sums::Clocks;

/// Options that ranks may have each for itself.
const OF_A_RANK: [&str; 11] = [
    "alloc",
    "memory_limit",
    "device",
    "gpus",
    "nvtx",
    "nvtx_memory",
    "profile_steps",
    "latency",
    "trace",
    "export",
    "check",
];

/// Ends this process without its usual end, which could wait for a call of another thread that waits for a rank that has ended.
pub(crate) fn end_now(code: u8) -> ! {
    #[cfg(unix)]
    // SAFETY: takes a number and does not return; what was written to files and to the terminal is not buffered here.
    unsafe {
        libc::_exit(code.into())
    }
    #[cfg(not(unix))]
    std::process::exit(code.into())
}

/// Where ranks meet.
#[derive(Debug)]
pub(crate) enum Meeting {
    /// At a port of rank 0's host.
    At {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// At a socket that listens already: rank 0 of ranks that this program started.
    #[cfg_attr(not(unix), allow(dead_code, reason = "ranks are started on Unix alone"))]
    Inherited(TcpListener),
}

/// A process as a rank of a run.
#[derive(Debug)]
pub(crate) struct Membership {
    /// This rank.
    pub(crate) rank: u32,
    /// Number of ranks.
    pub(crate) size: u32,
    /// Its number among the ranks on this host, which is the number of its GPU.
    pub(crate) local_rank: u32,
    /// The run, where its launcher gives it a name.
    pub(crate) run: String,
    /// Where the ranks meet.
    pub(crate) meeting: Meeting,
    /// How long to wait for ranks that do not come or say nothing.
    pub(crate) patience: Duration,
}

impl Membership {
    /// Connects to the other ranks.
    ///
    /// # Errors
    /// [`TrainError::Input`] when they do not come in time or were started otherwise.
    pub(crate) fn join(&self, settings: &Settings) -> Result<Group> {
        rendezvous::join(self, &shared_settings(settings))
    }

    /// The settings of this rank: its own GPU and allocator.
    pub(crate) fn settings(&self, settings: &Settings) -> Settings {
        let mut own = settings.clone();
        own.gpus = Some(self.size);
        if let Some(chosen) = settings.rank_alloc.iter().rfind(|chosen| chosen.rank == self.rank) {
            own.allocator = chosen.allocator.clone();
        }
        // CAST: a number of GPUs of one host.
        let local = self.local_rank as usize;
        own.device = match &settings.device {
            DeviceChoice::Named(DeviceName::Cuda(first)) => DeviceChoice::Named(DeviceName::Cuda(first + local)),
            DeviceChoice::Auto if CudaDriver::probe().is_ok() => DeviceChoice::Named(DeviceName::Cuda(local)),
            other => other.clone(),
        };
        if self.rank > 0 {
            own.save_start = None;
        }
        own
    }
}

/// The settings that all ranks must have, by the names of their options.
fn shared_settings(settings: &Settings) -> Map<String, Value> {
    // Settings are plain data. As text, because an f32 has other digits as a number of JSON's.
    let text = serde_json::to_string(settings).unwrap_or_default();
    let Ok(Value::Object(all)) = serde_json::from_str(&text) else { return Map::new() };
    all.into_iter()
        .filter(|(name, _)| !OF_A_RANK.contains(&name.as_str()))
        .map(|(name, value)| (name.replace('_', "-"), value))
        .collect()
}

/// The part of a batch that a rank has: `range` divided over the ranks in order, parts differing by one row at most.
#[must_use]
pub fn share(range: Range<usize>, rank: u32, size: u32) -> Range<usize> {
    let (rows, rank, size) = (range.len(), rank as usize, size as usize);
    range.start + rows * rank / size..range.start + rows * (rank + 1) / size
}

/// Refuses batches that do not split over the ranks.
pub(crate) fn check_batches(settings: &Settings, size: u32, rows: Option<usize>) -> Result<()> {
    let batch = settings.batch;
    if !batch.is_multiple_of(size) {
        let below = (batch / size * size).max(size);
        return Err(TrainError::Input(format!(
            "--batch {batch} does not split over {size} ranks; use a multiple of {size}, such as {below}"
        )));
    }
    let last = rows.map_or(0, |rows| rows % batch as usize);
    if last > 0 && last < size as usize {
        return Err(TrainError::Input(format!(
            "the last batch of an epoch has {last} of the data set's {} rows, fewer than {size} ranks; use another --batch",
            rows.unwrap_or_default()
        )));
    }
    Ok(())
}

/// Makes sure that all ranks have the same kind of device and the same data.
///
/// # Errors
/// [`TrainError::Input`] on all ranks when they have not; the failure of a rank.
pub(crate) fn check_alike(group: &Group, kind: DeviceKind, dataset: &Dataset) -> Result<()> {
    let own = serde_json::to_vec(&(kind, &dataset.name.to_string(), &dataset.checksum)).unwrap_or_default();
    let all_alike = |parts: Vec<Vec<u8>>| {
        let differing = parts.iter().position(|part| *part != parts[0]);
        match differing {
            None => Ok(Vec::new()),
            Some(rank) => {
                let show = |rank: usize| String::from_utf8_lossy(&parts[rank]).into_owned();
                Err(TrainError::Input(format!(
                    "rank {rank} has another device or data set than rank 0: {} and {}; give all ranks the same --device and \
                     --data-dir",
                    show(rank),
                    show(0)
                )))
            }
        }
    };
    group.exchange(own, all_alike).map(drop)
}

/// An allocator of one rank, as `--rank-alloc RANK=ALLOCATOR` has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankAllocator {
    /// The rank, from 0.
    pub rank: u32,
    /// Its allocator.
    #[serde(rename = "alloc")]
    pub allocator: vramlab::Selection,
}

impl std::str::FromStr for RankAllocator {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let (rank, allocator) =
            text.split_once('=').ok_or_else(|| format!("'{text}' is not RANK=ALLOCATOR, such as 0=naive"))?;
        let rank = rank.trim().parse().map_err(|_| format!("'{rank}' is not the number of a rank"))?;
        let allocator = allocator.parse().map_err(|error| format!("{error}"))?;
        Ok(Self { rank, allocator })
    }
}

vramlab::device::named! {
    /// How long the buffers of gradients live.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum BufferRule {
        /// For the whole run, as DDP's.
        #[default]
        Kept "kept",
        /// Allocated in each step and freed after the update; the allocator waits for the communication stream before it
        /// reuses them, as for FSDP 1's `record_stream`.
        RecordStream "record-stream",
        /// Allocated in each step and freed once the compute stream has waited for the event after the sum, as FSDP 2's.
        Events "events",
    }
}

vramlab::device::named! {
    /// Source of the memory of kept buffers of gradients.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum BucketSource {
        /// The allocator under study.
        #[default]
        Allocator "allocator",
        /// `ncclMemAlloc`; on simulated GPUs a segment of the driver.
        Nccl "nccl",
    }
}

impl BufferRule {
    /// The memory or stream that waits, and until when.
    #[must_use]
    pub fn waits(self) -> &'static str {
        match self {
            Self::Kept => "nothing waits; the buffers are freed at the end of the run",
            Self::RecordStream => {
                "a freed buffer stays pending until its sum on the communication stream has completed"
            }
            Self::Events => "the compute stream waits for the sum; the buffer can be reused after the update",
        }
    }
}

/// How gradients travel between the ranks.
#[derive(Clone, Debug, Serialize)]
pub struct CommunicationRecord {
    /// `nccl`, or `simulated`.
    pub backend: &'static str,
    /// Version of NCCL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// File of the library.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub library: Option<String>,
    /// Bytes of each bucket, in the order in which they are summed.
    pub bucket_bytes: Vec<u64>,
    /// Streams of the sums, each with a communicator of its own.
    pub streams: u32,
    /// Source of kept buffers.
    pub source: BucketSource,
    /// Number of buckets that NCCL has registered; absent without `--register on`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registered_buckets: Option<u64>,
    /// NCCL's reason for the first bucket that it refused to register.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// Device memory in use before the ranks connected, by the context and by other programs; absent where it cannot be measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_bytes: Option<u64>,
    /// Device memory that connecting the ranks took on this one; absent where it cannot be measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub library_bytes: Option<u64>,
    /// The library's own count of its device memory; absent where its version has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counted_bytes: Option<u64>,
    /// Time of the sum of each bucket before training, one behind the other on an idle device; absent on the simulated device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sum_s: Option<Vec<f64>>,
    /// Lifetime of the buckets' buffers.
    pub buffers: BufferRule,
    /// The memory or stream that waits under this lifetime, and until when.
    pub waits: &'static str,
}

/// One rank of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankRecord {
    /// Rank, from 0.
    pub rank: u32,
    /// Its device.
    pub device: String,
    /// Allocator, with its settings as it was chosen.
    pub alloc: String,
    /// Directory of its own record, relative to this one.
    pub directory: String,
    /// Training steps so far.
    pub steps: u64,
    /// Time on the rank's clock in the steps of all epochs so far.
    pub train_s: f64,
    /// Mean time of a step.
    pub step_s: f64,
    /// Mean time of a step between two events on the device.
    pub step_device_s: f64,
    /// Mean device time of a step in which the compute stream waited for sums, of every eighth step; absent when steps are graphs
    /// or fewer than eight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exposed_communication_s: Option<f64>,
    /// Host time spent waiting for the device in driver calls of the training.
    pub blocked_s: f64,
    /// Driver calls that allocated memory, of the training.
    pub driver_allocations: u64,
    /// Peak of reserved bytes.
    pub peak_reserved_bytes: u64,
    /// Peak of active bytes.
    pub peak_active_bytes: u64,
    /// Most bytes in blocks that were freed and still waited for other streams, after a step.
    pub peak_pending_bytes: u64,
}

/// The least and the most of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread<T> {
    /// Least.
    pub least: T,
    /// Most.
    pub most: T,
}

impl<T: Copy + PartialOrd> Spread<T> {
    fn over(values: impl Iterator<Item = T>) -> Option<Self> {
        values.fold(None, |spread, value| {
            let Some(Self { least, most }) = spread else { return Some(Self { least: value, most: value }) };
            Some(Self {
                least: if value < least { value } else { least },
                most: if value > most { value } else { most },
            })
        })
    }
}

/// How far the ranks differ.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RankSpread {
    /// Mean time of a step.
    pub step_s: Spread<f64>,
    /// Host time spent waiting for the device.
    pub blocked_s: Spread<f64>,
    /// Peak of reserved bytes.
    pub peak_reserved_bytes: Spread<u64>,
}

impl RankSpread {
    /// The spread over these ranks; `None` if there are none.
    #[must_use]
    pub fn over(ranks: &[RankRecord]) -> Option<Self> {
        Some(Self {
            step_s: Spread::over(ranks.iter().map(|rank| rank.step_s))?,
            blocked_s: Spread::over(ranks.iter().map(|rank| rank.blocked_s))?,
            peak_reserved_bytes: Spread::over(ranks.iter().map(|rank| rank.peak_reserved_bytes))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_a_batch_in_order() {
        for (rows, size) in [(64, 4), (7, 2), (5, 3), (2, 2), (100, 7)] {
            let shares: Vec<Range<usize>> = (0..size).map(|rank| share(10..10 + rows, rank, size)).collect();
            assert_eq!((shares[0].start, shares[size as usize - 1].end), (10, 10 + rows));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{shares:?}");
            let lengths = Spread::over(shares.iter().map(Range::len)).unwrap();
            assert!(lengths.most - lengths.least <= 1 && lengths.least > 0, "{shares:?}");
        }
    }

    #[test]
    fn batches_that_do_not_split_are_refused() {
        let settings = |batch| Settings { batch, ..Settings::default() };
        let error = check_batches(&settings(25), 2, None).unwrap_err().to_string();
        assert_eq!(error, "--batch 25 does not split over 2 ranks; use a multiple of 2, such as 24");
        let error = check_batches(&settings(40), 4, Some(121)).unwrap_err().to_string();
        assert!(error.contains("has 1 of the data set's 121 rows, fewer than 4 ranks"), "{error}");
        for rows in [120, 122, 160] {
            assert!(check_batches(&settings(40), 2, Some(rows)).is_ok());
        }
    }

    #[test]
    fn an_allocator_of_a_rank_is_read_as_it_is_written() {
        let parsed: RankAllocator = "1=naive".parse().unwrap();
        assert_eq!((parsed.rank, parsed.allocator.name()), (1, "naive"));
        for (text, words) in
            [("naive", "is not RANK=ALLOCATOR"), ("x=naive", "'x' is not the number"), ("0=nave", "naive")]
        {
            let error = text.parse::<RankAllocator>().unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
