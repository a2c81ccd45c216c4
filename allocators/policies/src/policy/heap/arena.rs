//! A segment in which a policy says where each block lies.

use super::Heap;
use crate::space::{BlockId, FreeList, Owner, SegmentId};
use std::collections::BTreeMap;
use vramlab_device::DriverError;

/// The segment, and its free blocks by address: sizes and names. No other search finds them.
#[derive(Debug)]
pub(super) struct Arena {
    segment: SegmentId,
    addr: u64,
    free: BTreeMap<u64, (u64, BlockId)>,
}

impl Heap {
    /// Takes a segment for an arena; false when there is no memory. There is one arena at a time.
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn new_arena(&mut self, list: FreeList, bytes: u64) -> Result<bool, DriverError> {
        let Some(addr) = self.source.allocate(bytes, self.space.account().reserved())? else { return Ok(false) };
        let block = self.space.add_segment(list, addr, bytes);
        let segment = self.space[block].segment;
        self.arena = Some(Arena { segment, addr, free: BTreeMap::from([(addr, (bytes, block))]) });
        Ok(true)
    }

    /// Where the arena begins. There is none before it is taken, and after it has gone back because nothing of it was used.
    pub(crate) fn arena(&self) -> Option<u64> {
        self.arena.as_ref().map(|arena| arena.addr)
    }

    /// Whether `bytes` from `offset` on are free in the arena.
    pub(crate) fn is_free_in_arena(&self, offset: u64, bytes: u64) -> bool {
        let around = |arena: &Arena| {
            let (start, (size, _)) = arena.free.range(..=arena.addr + offset).next_back()?;
            Some(start + size >= arena.addr + offset + bytes)
        };
        self.arena.as_ref().and_then(around).unwrap_or(false)
    }

    /// Hands `bytes` of the arena from `offset` on to `owner`, who asked for `requested` of them.
    ///
    /// # Panics
    /// When they are [not free](Self::is_free_in_arena).
    pub(crate) fn take_in_arena(&mut self, offset: u64, bytes: u64, owner: Owner, requested: u64) -> BlockId {
        let arena = self.arena.as_mut().expect("an arena should be there to take from");
        let addr = arena.addr + offset;
        let (&start, &(size, mut block)) =
            arena.free.range(..=addr).next_back().expect("only what is free should be taken");
        assert!(start + size >= addr + bytes, "only what is free should be taken");
        arena.free.remove(&start);
        if start < addr {
            let rest = self.space.cut_apart(block, addr - start);
            arena.free.insert(start, (addr - start, block));
            block = rest;
        }
        if let Some(rest) = self.space.take(block, bytes, requested) {
            arena.free.insert(addr + bytes, (self.space[rest].bytes, rest));
        }
        if self.space[block].list.owner != owner {
            self.space.hand_over(block, owner);
        }
        block
    }

    /// Puts a block back that is of the arena; `None` for others. True when it was joined with free neighbours.
    pub(super) fn put_in_arena(&mut self, block: BlockId) -> Option<bool> {
        let arena = self.arena.as_mut().filter(|arena| self.space[block].segment == arena.segment)?;
        self.space.hand_back(block);
        let joined = self.space.free(block);
        joined.absorbed.iter().flatten().for_each(|gone| {
            arena.free.remove(&gone.addr);
        });
        arena.free.insert(joined.block.addr, (joined.block.bytes, joined.block.id));
        Some(joined.any())
    }

    /// Forgets the arena if this is its segment, which went back; false if not.
    pub(super) fn forget_arena(&mut self, segment: SegmentId) -> bool {
        self.arena.take_if(|arena| arena.segment == segment).is_some()
    }
}
