//! Replays recorded histories on any backend and any device.
//!
//! A history (see [`formats`](crate::formats)) is compiled once into a [`History`]: a compact list of what the *client*
//! did, with slot numbers for blocks and stream numbers for handles. [`replay`] then runs that list: no address is
//! looked up, nothing is hashed and nothing is allocated while the clock runs. [`smallest_memory`] runs it on devices
//! of different sizes and finds by bisection the smallest one on which every allocation succeeds.
//!
//! # What is the client's and what is the allocator's
//! Allocations, frees, uses on other streams and calls of `empty_cache` are the client's and are replayed on every
//! backend. Segments, their order and their addresses are the recorded allocator's; with [`Addresses::Recorded`] the
//! device hands out the recorded addresses, and what the backend does is compared with what was recorded: each
//! block's address, each segment's address and size, and the order in which segments come and go.
//!
//! Logs of PyTorch do not name everything. What is missing is inferred:
//!
//! - **Uses on other streams.** A free that does not complete at once was held up by events of other streams. The
//!   replay announces a use on one other stream before the free and lets its event complete in exactly the allocation
//!   in which the history shows the free completed. Streams are chosen so that each one's events complete in order;
//!   where the recorded streams do not suffice, further ones are made. A log in which every free completes at once, as
//!   our own traces do, does not tell: there the uses that it announces are over when the device says so.
//! - **`empty_cache`.** Segments that go back without a retry under the limit are a call of the client; so are those
//!   of which one would have served the request in whose course they seem to go back. Where no limit is known, the device
//!   may have been full. Two things show that it was: a request was refused (`oom`), and as many bytes would have been
//!   reserved here as there; or what became free in the request would have served it, had it been free before. What
//!   neither shows is taken for `empty_cache`: events name a request only where it failed, and a retry that went well
//!   looks like `empty_cache` right before an allocation.
//!   With `garbage_collection_threshold` the allocator collects on its own above the threshold, and under
//!   `max_split_size` it releases oversize segments first.
//! - **What was held before the first event** (recording was switched on late, or the ring buffer overran). It is told
//!   backwards from what was held at the end ([`HistoryBuilder::ends_with`]), by undoing the events: segments, the blocks
//!   in them, and what lies free between those. [`Caching`](vramlab_policies::backends::Caching) starts with exactly that, other
//!   backends with the blocks in address order, and nothing of it is counted. The log does not always tell the sizes of
//!   blocks of the large pool, where a request may get up to 1 MiB more than it asked for: each is taken to be as small as
//!   later placements allow, and those of which nothing shows it are counted ([`History::undetermined_blocks`]). How long
//!   segments had been idle, by which garbage collection chooses, is told from what it chose; inside one collection they
//!   may go back in another order. In a log that is cut inside a retry under a limit, what the retry had waited for looks
//!   as if it had always been free. A log that does not say what was held at the end shows such blocks by their frees only, and cannot be compared address for
//!   address.
//! - **Private pools** of CUDA graphs and `MemPool`s, which events do not name. A block's pool is that of the segment, or the range of
//!   addresses, that it lies in, and of those that are gone at the end the placements tell which cannot be of one pool. Allocators
//!   that [have private pools](vramlab_policies::DeviceAllocator#private-pools) keep them apart. What fits more than one pool is counted
//!   ([`History::undetermined_pool_allocations`]). In a history that began late the segments that are held at the end have a name,
//!   and with it all blocks in them: so memory of graphs that were captured before is kept apart. Blocks in segments that are gone
//!   are taken for the default pool's, and counted.
//! - **Refused requests** (`oom`) never lived. They are replayed at recorded addresses, where they matter for what they made
//!   the allocator release, and where it is asked whether they would be refused again ([`ReplaySettings::ask_again`]).
//!
//! A log can be explained in more than one way:
//!
//! - Where a log announces uses and every free seems to complete at once, those with uses may have completed later, in
//!   a call of `empty_cache` that released nothing or in the next allocation. The device says when they do, so a replay
//!   may differ from the log.
//! - Under a limit or on a full device, what `empty_cache` right before an allocation released may as well have been released
//!   by a retry of that allocation. Blocks, segments and every other figure come out the same; only `num_alloc_retries` may differ.
//! - With `garbage_collection_threshold` or `max_split_size`, what `empty_cache` right before an allocation released may
//!   be taken for what the allocator released itself, and the point at which a free that was held up completed is not
//!   always told. Then a replay may differ from the log. Without `empty_cache` and without such frees it does not.
//!
//! Everything else is exact.
//!
//! # Limits
//! A backend's setting `memory_limit` is what PyTorch's memory fraction is: at most that many bytes are reserved. For
//! backends without it the caller takes a device of that size, or [`Limit`](vramlab_policies::instruments::Limit), which bounds the bytes
//! in live blocks, where a device's size is given.

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
pub use super::history::{Held, History, MAX_BYTES, MAX_STREAMS, OutOfMemory, ReplayError, StreamHeld};
pub use super::settings::{recorded_settings, snapshot_settings};
pub use capacity::{Capacity, Probe, smallest_in, smallest_memory};
pub use counting::Requests;
pub use run::{Addresses, ReplaySettings, replay, replay_against, replay_watched};
pub use watched::{LedgerAt, SegmentChange, Watched};

/// What a replay found. Figures are those right after the last operation; blocks that the history leaves live are
/// still held then.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayReport {
    /// Allocations that were tried, the prologue included.
    pub allocations: u64,
    /// Allocations that failed for lack of memory; what the history does with their blocks is left out.
    pub failed_allocations: u64,
    /// Number of the first allocation that failed, from 1, and the allocator's words.
    pub first_failure: Option<(u64, String)>,
    /// Allocations that came at another address than the recorded one, or the one that another allocator put them at, failed
    /// ones included; `None` when addresses are the device's own.
    pub address_mismatches: Option<u64>,
    /// Segment events that differ from the recorded ones, or from what another allocator took from its device, in kind, order,
    /// address or size; `None` when addresses are the device's own.
    pub segment_mismatches: Option<u64>,
    /// The backend's settings in effect.
    pub settings: serde_json::Value,
    /// The backend's statistics.
    pub stats: Stats,
    /// Where reserved minus requested went when reserved was highest.
    pub ledger: Ledger,
    /// Driver calls made while the history was replayed, by name; streams and teardown are not counted.
    pub driver_calls: BTreeMap<&'static str, u64>,
    /// The host's time in these calls by the device's clock, waits included; `None` on a device whose calls cost nothing.
    pub driver_ns: Option<u64>,
    /// Requests by how they were served ([`Path::name`](vramlab_policies::Path::name)), each with the driver calls inside it.
    pub requests: BTreeMap<&'static str, Requests>,
    /// Time spent in driver calls by the simulated clock; `None` on a device with real time.
    pub simulated_ns: Option<u64>,
    /// The machine's time for the whole list of operations.
    pub host_ns: u64,
    /// Operations: allocations, frees, uses and trims.
    pub operations: u64,
    /// Whether the allocator kept the private pools of the history apart. If not, one pool served all.
    pub private_pools: bool,
}

impl ReplayReport {
    /// Peak active over peak reserved; `None` when nothing was reserved.
    #[must_use]
    pub fn utilisation(&self) -> Option<f64> {
        let reserved = self.stats.reserved_bytes.all.peak;
        // CAST: bytes of a device are below 2^53.
        (reserved > 0).then(|| self.stats.active_bytes.all.peak as f64 / reserved as f64)
    }

    /// The machine's time for one operation, in nanoseconds; `None` without operations.
    #[must_use]
    pub fn host_ns_per_op(&self) -> Option<f64> {
        // CAST: as above.
        (self.operations > 0).then(|| self.host_ns as f64 / self.operations as f64)
    }
}
