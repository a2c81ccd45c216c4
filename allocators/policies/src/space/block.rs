//! Blocks: where they lie, what lies beside them, whose they are.

use crate::contract::{CaptureId, PoolKind};
use vramlab_device::StreamId;

/// Names a block of a [`Space`](super::Space) while it exists; names of blocks that are gone are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub(super) u32);

impl BlockId {
    /// The lowest name.
    pub(crate) const LOWEST: Self = Self(0);

    /// A name for tests of what keeps names.
    #[cfg(test)]
    pub(crate) fn numbered(number: u32) -> Self {
        Self(number)
    }

    /// The name as a number, to be written into a token.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// The name of what has this key.
    pub(super) fn of(key: usize) -> Self {
        Self(u32::try_from(key).expect("memory should end before 2^32 blocks"))
    }

    pub(super) fn key(self) -> usize {
        // CAST: it was a usize.
        self.0 as usize
    }
}

/// Names a segment while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub(super) usize);

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Can be handed out.
    Free,
    /// Held by the client.
    Held,
    /// Freed by the client and still used by a stream, so not yet reusable.
    Pending,
    /// Addresses without memory behind them.
    Unmapped,
}

/// Whose memory a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The stream that allocates it.
    pub stream: StreamId,
    /// The private pool that it belongs to, if it does: a capture's, or one that the program [made](crate::contract::PrivatePool).
    pub private: Option<CaptureId>,
}

impl Owner {
    /// A stream outside of any capture and private pool.
    #[must_use]
    pub fn of(stream: StreamId) -> Self {
        Self { stream, private: None }
    }
}

/// Free blocks that serve the same requests, and are joined when they lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FreeList {
    /// Whose they are.
    pub owner: Owner,
    /// Pool, for policies that have a small one and a large one.
    pub pool: Option<PoolKind>,
}

/// What is known of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Bytes that the client asked for; 0 unless it is held or pending.
    pub requested: u64,
    /// The free list that it is in, or goes to when it is freed.
    pub list: FreeList,
    /// State.
    pub state: State,
    /// The block before it in the segment.
    pub prev: Option<BlockId>,
    /// The block after it in the segment.
    pub next: Option<BlockId>,
    /// The segment that it is a part of.
    pub segment: SegmentId,
    /// Searches that had been counted when it became free.
    pub(super) idle_since: i64,
}

impl Record {
    /// Whether it is only a part of its segment.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }
}

/// A free block as an index of free blocks keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeBlock {
    /// Its list.
    pub list: FreeList,
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Its name.
    pub id: BlockId,
}

impl FreeBlock {
    pub(super) fn of(id: BlockId, record: &Record) -> Self {
        Self { list: record.list, addr: record.addr, bytes: record.bytes, id }
    }
}

/// What became of a block that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Free neighbours that are a part of it now, and no blocks any more.
    pub absorbed: [Option<FreeBlock>; 2],
    /// The free block.
    pub block: FreeBlock,
}

impl Joined {
    /// Whether there was a neighbour to join with.
    #[must_use]
    pub fn any(&self) -> bool {
        self.absorbed.iter().any(Option::is_some)
    }
}
