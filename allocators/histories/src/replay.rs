//! Replays recordings on any backend and any device.
//!
//! A recording (see [`formats`](crate::formats)) is compiled once into a [`History`]: a compact list of the *client's*
//! operations, with slot numbers for blocks and stream numbers for handles. [`replay`] runs that list: while the clock runs, it
//! looks up no address, hashes nothing and allocates nothing. [`smallest_memory`] runs it on devices of different sizes and finds
//! by bisection the smallest one on which every allocation succeeds.
//!
//! # The client and the allocator
//! Allocations, frees, uses on other streams and calls of `empty_cache` are the client's and are replayed on every backend.
//! Segments, their order and their addresses are the recorded allocator's; with [`Addresses::Recorded`] the device returns the
//! recorded addresses, and the backend is compared with the recording: each block's address, each segment's address and size, and
//! the order in which segments are allocated and released.
//!
//! PyTorch's logs do not contain everything. The following is inferred:
//!
//! - **Uses on other streams.** Events of other streams delayed a free that does not complete immediately. The replay announces a
//!   use on one other stream before the free and lets its event complete in exactly the allocation in which the recording shows
//!   the completion. Streams are chosen so that each one's events complete in order; if the recorded streams do not suffice, more
//!   are created. A log in which every free completes immediately, such as our own traces, shows no completions: there the device
//!   decides when announced uses complete.
//! - **`empty_cache`.** Segments that are released without a retry under the limit are a call of the client; so are those of
//!   which one would have served the request during which they seem to be released. If no limit is known, the device may have
//!   been full. Two things show that it was: a request failed (`oom`), and as many bytes would have been reserved here as there;
//!   or memory that became free during the request would have served it, had it been free before. Other releases are taken for
//!   `empty_cache`: events name a request only if it failed, and a successful retry looks like `empty_cache` right before an
//!   allocation. With `garbage_collection_threshold` the allocator collects by itself above the threshold, and under
//!   `max_split_size` it releases oversize segments first.
//! - **Memory before recording started** (the recording was started late, or the ring buffer overran). It is inferred backwards
//!   from the segments at the end ([`HistoryBuilder::ends_with`]), by undoing the events: segments, their blocks, and the free
//!   blocks between those. [`Caching`](vramlab_policies::backends::Caching) starts with exactly that state, other backends with
//!   the blocks in address order, and none of it is counted. The log does not always show the sizes of blocks of the large pool,
//!   where a request may get up to 1 MiB more than requested: each is assumed to be as small as later placements allow, and those
//!   without evidence are counted ([`History::undetermined_blocks`]). The idle time of segments, by which garbage collection
//!   chooses, is inferred from its choices; inside one collection segments may be released in another order. In a log that begins
//!   inside a retry under a limit, frees for which the retry waited look as if they had completed before. A log without the
//!   segments at the end shows such blocks only by their frees, and cannot be compared address for address.
//! - **Private pools** of CUDA graphs and `MemPool`s, which events do not name. A block's pool is that of its segment or address
//!   range; for segments that do not exist at the end the placements show which cannot share a pool. Allocators that [have
//!   private pools](vramlab_policies::DeviceAllocator#private-pools) use them. Ambiguous blocks are counted
//!   ([`History::undetermined_pool_allocations`]). In a recording that began late the segments at the end have a pool, and with
//!   it all their blocks: so memory of graphs that were captured before stays separate. Blocks in other segments are assigned to
//!   the default pool and counted.
//! - **Failed requests** (`oom`) never allocated a block. They are replayed at recorded addresses, where they matter for the
//!   memory that they made the allocator release, and where [`ReplaySettings::ask_again`] asks whether they would fail again.
//!
//! Some logs have more than one explanation:
//!
//! - If a log announces uses and every free seems to complete immediately, frees with uses may have completed later, in a call of
//!   `empty_cache` that released nothing or in the next allocation. The device decides when they do, so a replay may differ from
//!   the log.
//! - Under a limit or on a full device, a release by `empty_cache` right before an allocation may also be a retry of that
//!   allocation. Blocks, segments and all other values are the same; only `num_alloc_retries` may differ.
//! - With `garbage_collection_threshold` or `max_split_size`, a release by `empty_cache` right before an allocation may be taken
//!   for the allocator's own, and the completion of a deferred free is not always known. Then a replay may differ from the log.
//!   Without `empty_cache` and deferred frees it does not.
//!
//! Everything else is exact.
//!
//! # Limits
//! A backend's setting `memory_limit` is PyTorch's memory fraction: at most that many bytes are reserved. For backends without it
//! the caller uses a device of that size, or, on a real GPU, [`Limit`](vramlab_policies::instruments::Limit), which bounds the
//! bytes in live blocks.

mod against;
mod capacity;
mod counting;
mod driver;
mod near;
mod pools;
mod run;
mod watched;

use std::collections::BTreeMap;
use vramlab_policies::contract::{Ledger, Stats};

pub use super::compile::{HistoryBuilder, Soundness};
pub use super::formats::BlockPlace;
pub use super::history::{
    Held, History, ImpossibleRequests, MAX_BYTES, MAX_STREAMS, OutOfMemory, ReplayError, StreamHeld,
};
pub use super::settings::{recorded_settings, snapshot_settings};
pub use capacity::{Capacity, Probe, smallest_in, smallest_memory};
pub use counting::Requests;
pub use run::{Addresses, ReplaySettings, replay, replay_against, replay_watched};
pub use watched::{LedgerAt, SegmentChange, Watched};

/// Result of a replay. Values are those right after the last operation; blocks that stay live are still allocated then.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayReport {
    /// Attempted allocations, the prologue included.
    pub allocations: u64,
    /// Allocations that ran out of memory; operations on their blocks are left out.
    pub failed_allocations: u64,
    /// Number of the first failed allocation, from 1, and the allocator's error.
    pub first_failure: Option<(u64, String)>,
    /// Allocations at another address than recorded, or than another allocator's, failed ones included; `None` if the device
    /// chooses addresses.
    pub address_mismatches: Option<u64>,
    /// Segment events that differ from the recorded ones, or from another allocator's, in kind, order, address or size; `None` if
    /// the device chooses addresses.
    pub segment_mismatches: Option<u64>,
    /// The backend's settings in effect.
    pub settings: serde_json::Value,
    /// The backend's statistics.
    pub stats: Stats,
    /// Breakdown of reserved memory at its peak.
    pub ledger: Ledger,
    /// Driver calls during the replay, by name; streams and teardown are not counted.
    pub driver_calls: BTreeMap<&'static str, u64>,
    /// Host time in these calls by the device's clock, waits included; `None` on a device whose calls cost nothing.
    pub driver_ns: Option<u64>,
    /// Requests by the path that served them ([`Path::name`](vramlab_policies::Path::name)), each with its driver calls.
    pub requests: BTreeMap<&'static str, Requests>,
    /// Time spent in driver calls by the simulated clock; `None` on a device with real time.
    pub simulated_ns: Option<u64>,
    /// Real time for the whole list of operations.
    pub host_ns: u64,
    /// Operations: allocations, frees, uses and cache flushes.
    pub operations: u64,
    /// Whether the allocator has private pools. If not, one pool served all.
    pub private_pools: bool,
}

impl ReplayReport {
    /// Peak active over peak reserved; `None` if nothing was reserved.
    #[must_use]
    pub fn utilisation(&self) -> Option<f64> {
        let reserved = self.stats.reserved_bytes.all.peak;
        // CAST: bytes of a device are below 2^53.
        (reserved > 0).then(|| self.stats.active_bytes.all.peak as f64 / reserved as f64)
    }

    /// Real time for one operation, in nanoseconds; `None` without operations.
    #[must_use]
    pub fn host_ns_per_op(&self) -> Option<f64> {
        // CAST: as above.
        (self.operations > 0).then(|| self.host_ns as f64 / self.operations as f64)
    }
}
