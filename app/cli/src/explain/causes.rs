//! Why a request was not served from what was free.

use serde::Serialize;
use vramlab::histories::memory::{Memory, Pool};
use vramlab::policy::size::torch::MIN_BLOCK;

/// Why a request was not served from memory that was held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Cause {
    /// Less was free than was asked for: the program had never needed as much.
    #[default]
    Growth,
    /// Enough was free, in pieces that are too small.
    Pieces,
    /// A free block was large enough for what was asked for, and not for what it is rounded to.
    Rounding,
    /// A free block was large enough, and a bound on splitting kept it.
    SplitLimit,
    /// A free block of the other pool was large enough: small and large requests do not share segments.
    Class,
    /// A free block of another stream was large enough.
    Stream,
    /// A block was large enough that was freed, and its free had not completed: it waited for other streams.
    Pending,
    /// A free block was large enough and was not taken: it is a private pool's, as that of a CUDA graph. Only where the history
    /// shows that there are such pools.
    Elsewhere,
    /// A free block was large enough and was not taken, and the history does not tell why.
    Untold,
}

impl Cause {
    pub(crate) const ALL: [Self; 9] = [
        Self::Growth,
        Self::Pieces,
        Self::Rounding,
        Self::SplitLimit,
        Self::Class,
        Self::Stream,
        Self::Pending,
        Self::Elsewhere,
        Self::Untold,
    ];

    /// Why a request of so many bytes on a stream finds nothing in this memory. `completed`: frees completed since the program
    /// asked. O(pools).
    pub(super) fn of(memory: &Memory, bytes: u64, stream: u64, completed: bool, private_pools: bool) -> Self {
        let rounded = memory.rules().rounded(bytes);
        let own = memory.pool_of(stream, bytes);
        if let Some(found) = memory.smallest_hole_from(own, rounded) {
            return match memory.rules().serves(found, rounded) {
                false => Self::SplitLimit,
                true if private_pools => Self::Elsewhere,
                // Frees that completed before the search would have served it; the allocator waited for these after it.
                true if completed => Self::Pending,
                true => Self::Untold,
            };
        }
        if memory.largest_hole(own) >= bytes.next_multiple_of(MIN_BLOCK) {
            return Self::Rounding;
        }
        if memory.largest_with_pending(own) >= rounded {
            return Self::Pending;
        }
        if memory.free_bytes(own) >= rounded {
            return Self::Pieces;
        }
        if memory.largest_hole(Pool { small: !own.small, ..own }) >= rounded {
            return Self::Class;
        }
        let mut elsewhere = memory.pools().filter(|pool| pool.stream != stream);
        if elsewhere.any(|pool| memory.largest_hole(pool) >= rounded) { Self::Stream } else { Self::Growth }
    }

    /// In a few words, for a table.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Growth => "too little was free",
            Self::Pieces => "free in pieces that are too small",
            Self::Rounding => "fits unrounded, not rounded",
            Self::SplitLimit => "max_split_size keeps the free block",
            Self::Class => "free in the other pool only",
            Self::Stream => "free in another stream only",
            Self::Pending => "freed, but not completed",
            Self::Elsewhere => "kept apart by a private pool",
            Self::Untold => "a free block fits; not told why unused",
        }
    }
}
