//! Free blocks of one pool in the order (stream, size, address), which makes best fit a search for the first
//! block at or above a key.

use super::blocks::BlockIndex;
use crate::device::StreamId;
use std::collections::BTreeSet;

/// A free block as the index orders it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FreeKey {
    /// Stream that may reuse the block.
    pub stream: StreamId,
    /// Size in bytes.
    pub bytes: u64,
    /// First address.
    pub addr: u64,
    /// Its record.
    pub index: BlockIndex,
}

/// The free blocks of one pool. Search, insertion and removal take O(log n).
#[derive(Clone, Debug, Default)]
pub struct FreeIndex(BTreeSet<FreeKey>);

impl FreeIndex {
    /// Adds a block.
    pub fn insert(&mut self, key: FreeKey) {
        let fresh = self.0.insert(key);
        debug_assert!(fresh, "a block should be free once");
    }

    /// Removes a block.
    pub fn remove(&mut self, key: FreeKey) {
        let there = self.0.remove(&key);
        debug_assert!(there, "a free block should be in the index");
    }

    /// Best fit: the smallest block of `stream` with at least `bytes`, ties to the lowest address.
    #[must_use]
    pub fn best_fit(&self, stream: StreamId, bytes: u64) -> Option<FreeKey> {
        let from = FreeKey { stream, bytes, addr: 0, index: 0 };
        self.0.range(from..).next().filter(|key| key.stream == stream).copied()
    }

    /// Blocks of `stream` that are smaller than `bytes`, largest first.
    pub fn below(&self, stream: StreamId, bytes: u64) -> impl Iterator<Item = FreeKey> {
        let first = FreeKey { stream, bytes: 0, addr: 0, index: 0 };
        let end = FreeKey { stream, bytes, addr: 0, index: 0 };
        self.0.range(first..end).rev().copied()
    }

    /// All blocks by (stream, size, address).
    pub fn iter(&self) -> impl Iterator<Item = FreeKey> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(stream: u64, bytes: u64, addr: u64) -> FreeKey {
        FreeKey { stream: StreamId(stream), bytes, addr, index: 0 }
    }

    #[test]
    fn best_fit_is_smallest_then_lowest_and_stays_on_its_stream() {
        let mut index = FreeIndex::default();
        for entry in [key(1, 300, 10), key(1, 200, 30), key(1, 200, 20), key(2, 100, 40)] {
            index.insert(entry);
        }
        assert_eq!(index.best_fit(StreamId(1), 150), Some(key(1, 200, 20)));
        assert_eq!(index.best_fit(StreamId(1), 201), Some(key(1, 300, 10)));
        assert_eq!(index.best_fit(StreamId(1), 301), None);
        let below: Vec<_> = index.below(StreamId(1), 300).map(|entry| entry.addr).collect();
        assert_eq!(below, [30, 20]);
        index.remove(key(1, 200, 20));
        assert_eq!(index.best_fit(StreamId(1), 150), Some(key(1, 200, 30)));
    }
}
