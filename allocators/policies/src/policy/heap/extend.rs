//! Expandable segments: holes are mapped for requests, and free memory is unmapped in whole handles.
//!
//! A segment is a range of addresses for one free list. Its blocks cover all of it: live, pending and free ones are mapped, holes
//! are not. These are PyTorch's rules (`CUDACachingAllocator.cpp`), each under the name of its function.

use super::Heap;
use crate::policy::grow::{Segments, release_order};
use crate::space::{BlockId, FreeBlock, FreeList, SegmentId, State, Unmapped};
use std::ops::Range;
use vramlab_device::DriverError;

impl Heap {
    /// The next free block in the order of best fit, see [`Fit::next_larger`](crate::policy::fit::Fit::next_larger).
    #[must_use]
    pub fn next_larger(&self, block: BlockId) -> Option<BlockId> {
        self.fit.next_larger(self.space.as_free(block))
    }

    /// The block behind `block`, if that is a hole.
    #[must_use]
    pub fn hole_behind(&self, block: BlockId) -> Option<BlockId> {
        self.space[block].next.filter(|next| self.space[*next].state == State::Unmapped)
    }

    /// Makes a free block of at least `bytes` by mapping memory in the lowest sufficient run. `None` when there is no memory, or
    /// the limit does not allow it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn extend(&mut self, list: FreeList, bytes: u64) -> Result<Option<BlockId>, DriverError> {
        let Some(first) = self.find_hole(list, bytes)? else { return Ok(None) };
        let reserved = self.space.account().reserved();
        if self.source.limit().is_some_and(|limit| reserved + self.shortfall(first, bytes, 1) > limit) {
            return Ok(None);
        }
        self.fill(first, bytes, 1, true)
    }

    /// The first block of a run of free blocks and holes with `bytes` in total, the lowest run of the list, or a new range of
    /// addresses where there is none. `None` when there are no addresses. Addresses with a kept mapping are in no run.
    ///
    /// PyTorch's `find_expandable_block`. Takes a step for each earlier hole, and for each block of the runs behind it.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn find_hole(&mut self, list: FreeList, bytes: u64) -> Result<Option<BlockId>, DriverError> {
        let holes = self.source.holes().range((list, 0)..=(list, u64::MAX));
        let run = holes.map(|(_, hole)| *hole).find_map(|hole| self.run_around(hole, bytes, |_| false));
        if let Some((block, addr)) = run {
            return Ok(Some(self.begin_hole(block, addr)));
        }
        let Some((addr, size)) = self.source.expandable().reserve(list.pool, bytes)? else { return Ok(None) };
        let page = self.source.handle_bytes(list.pool);
        let hole = self.space.add_addresses(list, addr, size, page);
        self.source.expandable().holes.insert((list, addr), hole);
        Ok(Some(hole))
    }

    /// The beginning of the first run of `bytes` around a hole: its first block, and an address in that block. A run has no address
    /// with a kept mapping, unless `can_be_had` is true for it.
    pub(super) fn run_around(
        &self,
        hole: BlockId,
        bytes: u64,
        can_be_had: impl Fn(u64) -> bool,
    ) -> Option<(BlockId, u64)> {
        let list = self.space[hole].list;
        let usable = |block: &BlockId| {
            let block = &self.space[*block];
            matches!(block.state, State::Free | State::Unmapped) && block.list == list
        };
        let first = self.space[hole].prev.filter(usable).unwrap_or(hole);
        let (mut start, mut room) = ((first, self.space[first].addr), 0);
        for id in std::iter::successors(Some(first), |block| self.space[*block].next).take_while(usable) {
            let block = &self.space[id];
            let (mut at, end) = (block.addr, block.addr + block.bytes);
            if room == 0 {
                start = (id, at);
            }
            if block.state == State::Unmapped && self.source.mapped().kept() > 0 {
                let page = self.source.handle_bytes(list.pool);
                for kept in self.source.mapped().kept_within(at, end).filter(|kept| !can_be_had(*kept)) {
                    if room + (kept - at) >= bytes {
                        return Some(start);
                    }
                    at = kept + page;
                    (start, room) = ((id, at), 0);
                }
            }
            room += end - at;
            if room >= bytes {
                return Some(start);
            }
        }
        None
    }

    /// The block that begins at an address in `block`: the remainder behind it, if a hole begins earlier.
    pub(super) fn begin_hole(&mut self, block: BlockId, addr: u64) -> BlockId {
        let front = addr - self.space[block].addr;
        if front == 0 {
            return block;
        }
        let rest = self.space.cut_hole(block, front);
        self.source.expandable().holes.insert((self.space[rest].list, addr), rest);
        rest
    }

    /// Bytes at the front of a hole without kept mappings.
    fn vacant(&self, hole: BlockId) -> u64 {
        let hole = &self.space[hole];
        let first_kept = self.source.mapped().kept_within(hole.addr, hole.addr + hole.bytes).next();
        first_kept.map_or(hole.bytes, |first_kept| first_kept - hole.addr)
    }

    /// Bytes that a run needs to map for a block of `bytes`, in multiples of `handles` handles.
    #[must_use]
    pub fn shortfall(&self, first: BlockId, bytes: u64, handles: u64) -> u64 {
        let (mut have, mut lacking, mut next) = (0, 0, Some(first));
        while let Some(id) = next.filter(|_| have < bytes) {
            let block = &self.space[id];
            let mut part = block.bytes;
            if block.state == State::Unmapped {
                part = self.whole_handles(block.list, bytes - have, handles).min(self.vacant(id));
                lacking += part;
            }
            (have, next) = (have + part, block.next);
        }
        lacking
    }

    /// Maps the holes of a run until its first block has `bytes`, in multiples of `handles` handles. `None` when the memory is not
    /// sufficient: new memory stays mapped then, free, unless `whole` is true.
    ///
    /// PyTorch's `try_allocate_expandable_block`.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn fill(
        &mut self,
        first: BlockId,
        bytes: u64,
        handles: u64,
        whole: bool,
    ) -> Result<Option<BlockId>, DriverError> {
        let (mut block, mut came) = (first, Vec::new());
        loop {
            let (have, hole) = match &self.space[block] {
                unmapped if unmapped.state == State::Unmapped => (0, block),
                free if free.bytes >= bytes => return Ok(Some(block)),
                free => (free.bytes, free.next.expect("a run should have the requested bytes")),
            };
            let addr = self.space[hole].addr;
            match self.map(hole, bytes - have, handles) {
                Ok(Some((grown, part))) => {
                    came.push((addr, part));
                    block = grown;
                }
                refused => {
                    // From the last to the first, so that the front of the block keeps its id.
                    while let Some((addr, part)) = came.pop().filter(|_| whole) {
                        self.unmap(self.space.as_free(block), addr, part)?;
                    }
                    return refused.map(|_| None);
                }
            }
        }
    }

    /// `bytes` rounded up to a multiple of `handles` handles.
    fn whole_handles(&self, list: FreeList, bytes: u64, handles: u64) -> u64 {
        bytes.next_multiple_of(self.source.handle_bytes(list.pool) * handles)
    }

    /// Maps the front of a hole: at least `bytes`, or all of it. Returns the free block that it is a part of now, and the mapped
    /// bytes; `None` when the device has no memory.
    ///
    /// PyTorch's `map_block`.
    fn map(&mut self, hole: BlockId, bytes: u64, handles: u64) -> Result<Option<(BlockId, u64)>, DriverError> {
        let (addr, list) = (self.space[hole].addr, self.space[hole].list);
        let (unit, part) =
            (self.source.handle_bytes(list.pool), self.whole_handles(list, bytes, handles).min(self.vacant(hole)));
        // SAFETY: a hole is a part of a range from `reserve`, without kept mappings in this part. Ranges are whole handles, and so
        // are all mapped and unmapped parts, so holes are, too.
        if !unsafe { self.source.expandable().map(addr, part, unit) }? {
            return Ok(None);
        }
        Ok(Some((self.fill_hole(hole, part), part)))
    }

    /// Notes that the front `bytes` of a hole are mapped now. Returns the free block that they are a part of.
    pub(super) fn fill_hole(&mut self, hole: BlockId, bytes: u64) -> BlockId {
        let (addr, list) = (self.space[hole].addr, self.space[hole].list);
        self.source.expandable().holes.remove(&(list, addr));
        let joined = self.space.map(hole, bytes);
        joined.absorbed.into_iter().flatten().for_each(|block| self.fit.remove(block));
        self.fit.insert(joined.block);
        if let Some(rest) = self.hole_behind(joined.block.id) {
            self.source.expandable().holes.insert((list, self.space[rest].addr), rest);
        }
        joined.block.id
    }

    /// The hole that contains an address, split so that it begins there.
    pub(super) fn hole_at(&mut self, list: FreeList, addr: u64) -> BlockId {
        let (_, &hole) =
            self.source.holes().range(..=(list, addr)).next_back().expect("there should be a hole to fill");
        self.begin_hole(hole, addr)
    }

    /// Unmaps a part of a free block, in whole handles. Returns the unmapped bytes.
    ///
    /// # Errors
    /// Those of the driver. Memory unmapped before that is accounted for.
    fn unmap(&mut self, block: FreeBlock, addr: u64, bytes: u64) -> Result<u64, DriverError> {
        let unit = self.source.handle_bytes(self.space[self.space[block.id].segment].list.pool);
        // PyTorch unmaps handle by handle. Pages are small, and a call costs the same for one as for all.
        let step = if self.source.pages().is_some() { bytes } else { unit };
        // SAFETY: free blocks are mapped, and the part is whole handles. The callers have waited for work that used it, or no work
        // did. Its pages are mapped nowhere else: new pages never were, and the others have no kept mapping by now.
        let (unmapped, outcome) = unsafe { self.source.expandable().unmap(addr, bytes, unit, step) };
        if unmapped > 0 {
            self.open_hole(block, addr, unmapped);
        }
        outcome.map(|()| unmapped)
    }

    /// Notes that a part of a free block is unmapped.
    pub(super) fn open_hole(&mut self, block: FreeBlock, addr: u64, bytes: u64) {
        self.fit.remove(block);
        let Unmapped { left, hole } = self.space.unmap(block.id, addr - block.addr, bytes);
        left.into_iter().flatten().for_each(|left| self.fit.insert(left));
        for part in hole.absorbed.into_iter().flatten() {
            self.source.expandable().holes.remove(&(part.list, part.addr));
        }
        self.source.expandable().holes.insert((hole.block.list, hole.block.addr), hole.block.id);
    }

    /// The whole handles of a free block, at its end, up to `most` bytes.
    ///
    /// PyTorch's `unmap_block`.
    fn whole_handles_of(&self, block: FreeBlock, most: u64) -> Range<u64> {
        let segment = self.space[self.space[block.id].segment];
        let unit = self.source.handle_bytes(segment.list.pool);
        let offset = block.addr - segment.addr;
        let (start, end) = (offset.next_multiple_of(unit), (offset + block.bytes) / unit * unit);
        let start = start.max(end.saturating_sub(most.next_multiple_of(unit)));
        segment.addr + start..segment.addr + end
    }

    /// Waits for work that uses free blocks of a list.
    fn wait_for_uses(&self, list: FreeList) -> Result<(), DriverError> {
        if self.ended {
            return Ok(());
        }
        let driver = self.source.driver();
        // A graph may have been launched on any stream.
        if list.owner.private.is_some() {
            return driver.device_synchronize();
        }
        match driver.stream_synchronize(list.owner.stream) {
            // The stream was destroyed, and its work may not have completed.
            Err(error) if error.code == DriverError::INVALID_HANDLE => driver.device_synchronize(),
            waited => waited,
        }
    }

    /// Unmaps free blocks of expandable segments, in lists that `filter` selects, while more than `keep` bytes are reserved, and
    /// releases ranges without mapped memory. Returns the unmapped bytes. Has no effect while a graph is captured, because no wait
    /// is allowed then.
    ///
    /// In PyTorch's [order](release_order) (`release_blocks`). `cuMemUnmap` does not wait for work that uses the memory, so the
    /// stream is waited for first: once for each block, as there, or once for all of its blocks where the last uses of pages are
    /// known.
    ///
    /// # Errors
    /// Those of the driver. Memory unmapped before that is accounted for.
    pub(super) fn unmap_free(&mut self, keep: u64, filter: impl Fn(&FreeList) -> bool) -> Result<u64, DriverError> {
        if !self.source.is_expandable() || self.is_capturing() {
            return Ok(0);
        }
        self.source.expandable().release_again()?;
        let goes = |list: &FreeList| !self.is_pinned(*list) && filter(list);
        let mut free: Vec<FreeBlock> = self.space.free_blocks().filter(|block| goes(&block.list)).collect();
        free.sort_unstable_by_key(|block| release_order(block.list, block.bytes, block.addr));
        let (mut most, mut parts) = (self.space.account().reserved().saturating_sub(keep), Vec::new());
        for block in free {
            if most == 0 {
                break;
            }
            // From the last to the first, so that the front of the block keeps its id.
            for part in self.unpinned(self.whole_handles_of(block, most), block.list.pool).into_iter().rev() {
                most = most.saturating_sub(part.end - part.start);
                parts.push((block, part));
            }
        }
        if self.source.pages().is_some() {
            let mut ranges: Vec<Range<u64>> = parts.iter().map(|(_, part)| part.clone()).collect();
            ranges.sort_unstable_by_key(|part| part.start);
            self.drop_kept_of(&ranges)?;
        }
        let (mut released, mut waited) = (0, None);
        for (block, part) in parts {
            if self.source.pages().is_none() || waited != Some(block.list.owner) {
                self.wait_for_uses(block.list)?;
                waited = Some(block.list.owner);
            }
            let left = self.space.as_free(block.id);
            released += self.unmap(left, part.start, part.end - part.start)?;
        }
        let empty: Vec<SegmentId> =
            self.space.segments().filter(|(_, segment)| segment.mapped == 0).map(|(id, _)| id).collect();
        for id in empty {
            let segment = self.space[id];
            // A page that belongs to another address may be mapped here, too.
            if self.source.pages().is_some()
                && self.source.mapped().kept_within(segment.addr, segment.addr + segment.bytes).next().is_some()
            {
                continue;
            }
            // SAFETY: every segment here came from `reserve`, nothing is mapped in it, and it is removed below, so it is released
            // once.
            unsafe { self.source.expandable().give_back(segment.addr, segment.bytes) }?;
            self.source.expandable().pages.iter_mut().for_each(|pages| pages.forget(segment.addr));
            while let Some((&at, _)) = self
                .source
                .holes()
                .range((segment.list, segment.addr)..(segment.list, segment.addr + segment.bytes))
                .next()
            {
                self.source.expandable().holes.remove(&at);
            }
            self.space.remove_segment(id);
        }
        Ok(released)
    }

    /// Keeps handles that are unmapped from now on for the next mappings, until [`release_handles`](Self::release_handles).
    pub fn keep_handles(&mut self) {
        self.source.expandable().keep_spare();
    }

    /// Releases the kept handles that were not mapped again.
    ///
    /// # Errors
    /// Those of the driver; a refused handle is released again with the next memory.
    pub fn release_handles(&mut self) -> Result<(), DriverError> {
        self.source.expandable().release_spare()
    }
}
