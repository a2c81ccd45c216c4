//! Causes of cache misses.

use serde::Serialize;
use vramlab::histories::memory::{Memory, Pool};
use vramlab::histories::replay::MAX_BYTES;
use vramlab::policy::size::torch::MIN_BLOCK;

/// The reason why reserved memory did not serve a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Cause {
    /// Less memory was free than requested.
    #[default]
    Growth,
    /// Enough was free, but every free block was too small.
    Pieces,
    /// A free block was large enough for the request, but not for its rounded size.
    Rounding,
    /// A free block was large enough, but `max_split_size_mb` kept it for large requests.
    SplitLimit,
    /// A free block of the other pool was large enough; small and large requests do not share segments.
    Class,
    /// A free block of another stream was large enough.
    Stream,
    /// A freed block was large enough, but its deferred free had not completed.
    Pending,
    /// A free block was large enough but unused: it belongs to a private pool, such as a CUDA graph's. Only if the recording shows
    /// that private pools exist.
    Elsewhere,
    /// A free block was large enough but unused, and the recording does not show why.
    #[serde(rename = "untold")]
    Unexplained,
    /// No GPU has as much memory as was requested.
    Impossible,
    /// The request was to a private pool, which had too little free; only other memory was large enough.
    PrivatePool,
}

impl Cause {
    pub(crate) const ALL: [Self; 11] = [
        Self::Growth,
        Self::Pieces,
        Self::Rounding,
        Self::SplitLimit,
        Self::Class,
        Self::Stream,
        Self::Pending,
        Self::Elsewhere,
        Self::Unexplained,
        Self::Impossible,
        Self::PrivatePool,
    ];

    /// The reason why this memory does not serve a request of `bytes` on `stream`. `completed`: frees completed since the
    /// request. O(pools).
    pub(super) fn new(memory: &Memory, bytes: u64, stream: u64, completed: bool, private_pools: bool) -> Self {
        if bytes > MAX_BYTES {
            return Self::Impossible;
        }
        let rounded = memory.rules().rounded(bytes);
        let pool = memory.pool_of(stream, bytes);
        if let Some(free_block) = memory.smallest_hole_from(pool, rounded) {
            return match memory.rules().serves(free_block, rounded) {
                false => Self::SplitLimit,
                true if private_pools => Self::Elsewhere,
                // Had the frees completed before the search, they would have served it; the allocator waited for them later.
                true if completed => Self::Pending,
                true => Self::Unexplained,
            };
        }
        if memory.largest_hole(pool) >= bytes.next_multiple_of(MIN_BLOCK) {
            return Self::Rounding;
        }
        if memory.largest_with_pending(pool) >= rounded {
            return Self::Pending;
        }
        if memory.free_bytes(pool) >= rounded {
            return Self::Pieces;
        }
        if memory.largest_hole(Pool { small: !pool.small, ..pool }) >= rounded {
            return Self::Class;
        }
        let mut elsewhere = memory.pools().filter(|pool| pool.stream != stream);
        if elsewhere.any(|pool| memory.largest_hole(pool) >= rounded) { Self::Stream } else { Self::Growth }
    }

    /// The reason why a private pool, of which these bytes and this largest block are free, does not serve a request. O(pools).
    pub(super) fn in_private_pool(memory: &Memory, bytes: u64, (free, largest): (u64, u64)) -> Self {
        if bytes > MAX_BYTES {
            return Self::Impossible;
        }
        let rounded = memory.rules().rounded(bytes);
        match () {
            () if largest >= rounded => Self::Unexplained,
            () if free >= rounded => Self::Pieces,
            () if memory.pools().any(|pool| memory.largest_hole(pool) >= rounded) => Self::PrivatePool,
            () => Self::Growth,
        }
    }

    /// The cause in a few words, for a table.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Growth => "too little memory was free",
            Self::Pieces => "free memory fragmented",
            Self::Rounding => "a free block fits only without rounding",
            Self::SplitLimit => "max_split_size_mb reserves the free block",
            Self::Class => "free only in the other pool",
            Self::Stream => "free only on another stream",
            Self::Pending => "freed, but the free is pending",
            Self::Elsewhere => "free only in a private pool",
            Self::Unexplained => "a free block fits; unused for an unknown reason",
            Self::Impossible => "no GPU has as much memory",
            Self::PrivatePool => "too little free in its private pool, which no other memory serves",
        }
    }
}
