//! Blocks: their address, neighbours and owner.

use crate::contract::{CaptureId, PoolKind};
use vramlab_device::StreamId;

/// Identifies a block of a [`Space`](super::Space) while it exists; ids of removed blocks are reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub(super) u32);

impl BlockId {
    /// The lowest id.
    pub(crate) const LOWEST: Self = Self(0);

    /// An id for tests of indices.
    #[cfg(test)]
    pub(crate) fn numbered(number: u32) -> Self {
        Self(number)
    }

    /// The id as a number, to be written into a token.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// The id of the record with this key.
    pub(super) fn of(key: usize) -> Self {
        Self(u32::try_from(key).expect("memory should end before 2^32 blocks"))
    }

    pub(super) fn key(self) -> usize {
        // CAST: it was a usize.
        self.0 as usize
    }
}

/// Identifies a segment while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub(super) usize);

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Reusable.
    Free,
    /// Live.
    Held,
    /// Freed by the client and still used by a stream, so not yet reusable.
    Pending,
    /// Unmapped addresses.
    Unmapped,
}

/// The owner of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The stream that allocates it.
    pub stream: StreamId,
    /// The private pool that it belongs to, if any: a capture's, or one that the program [made](crate::contract::PrivatePool).
    pub private: Option<CaptureId>,
}

impl Owner {
    /// A stream outside of any capture and private pool.
    #[must_use]
    pub fn of(stream: StreamId) -> Self {
        Self { stream, private: None }
    }
}

/// Free blocks that serve the same requests, and coalesce when they are adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FreeList {
    /// Their owner.
    pub owner: Owner,
    /// Pool, for policies that have a small one and a large one.
    pub pool: Option<PoolKind>,
}

/// The record of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Requested bytes; 0 unless it is live or pending.
    pub requested: u64,
    /// Its free list, now or after its free.
    pub list: FreeList,
    /// State.
    pub state: State,
    /// The block before it in the segment.
    pub prev: Option<BlockId>,
    /// The block after it in the segment.
    pub next: Option<BlockId>,
    /// The segment that it is a part of.
    pub segment: SegmentId,
    /// Number of searches when it became free.
    pub(super) idle_since: i64,
}

impl Record {
    /// Whether it is only a part of its segment.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }
}

/// A free block, as the entry of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeBlock {
    /// Its list.
    pub list: FreeList,
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Its id.
    pub id: BlockId,
}

impl FreeBlock {
    pub(super) fn of(id: BlockId, record: &Record) -> Self {
        Self { list: record.list, addr: record.addr, bytes: record.bytes, id }
    }
}

/// The result of a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Former free neighbours that were coalesced into it.
    pub absorbed: [Option<FreeBlock>; 2],
    /// The free block.
    pub block: FreeBlock,
}

impl Joined {
    /// Whether a neighbour was coalesced.
    #[must_use]
    pub fn any(&self) -> bool {
        self.absorbed.iter().any(Option::is_some)
    }
}
