//! Moves pages of free memory to holes. Their old mappings are kept, so that they can move back without a driver call.

use super::Heap;
use crate::policy::grow::Segments as _;
use crate::policy::pages::Pages;
use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::BTreeSet;
use std::ops::Range;
use vramlab_device::{Driver, DriverError};

/// Maximum of kept mappings for each mapped page. Device and host store a few words for each.
const MOST_KEPT: usize = 8;

/// A page to be moved.
#[derive(Clone, Copy, Debug)]
struct Move {
    from: u64,
    to: u64,
    /// The free block that it is a part of.
    block: FreeBlock,
}

/// The pages that a run needs.
#[derive(Debug, Default)]
struct Lacking {
    /// Pages that have a kept mapping in the run and move back.
    kept: Vec<Move>,
    /// Addresses of pages without a mapping.
    vacant: Vec<u64>,
}

impl Lacking {
    fn pages(&self) -> usize {
        self.kept.len() + self.vacant.len()
    }
}

impl Heap {
    /// Makes the heap note the last use of each page, so that pages [can move](Self::move_pages). After the first query for the
    /// work of another stream, frees that leave whole pages free record an event each.
    #[must_use]
    pub fn with_pages(self) -> Self {
        let mut heap = self;
        let page = heap.source.handle_bytes(None);
        heap.source.expandable().pages = Some(Pages::new(page));
        heap.space.account_mut().count_stolen(0, 0, 0);
        heap
    }

    /// Notes that `freed`, which is a part of `block` now, became free.
    pub(super) fn note_pages(&mut self, freed: Range<u64>, block: FreeBlock) {
        if self.source.pages().is_none() {
            return;
        }
        let capturing = self.is_capturing();
        let segment = &self.space[self.space[block.id].segment];
        let page = self.source.handle_bytes(segment.list.pool);
        if block.bytes < page {
            return;
        }
        // A range begins with a whole page.
        let base = segment.addr;
        let offset = block.addr - base;
        let start = ((freed.start - base) / page * page).max(offset.next_multiple_of(page)) + base;
        let end = (freed.end - base).next_multiple_of(page).min((offset + block.bytes) / page * page) + base;
        if start < end && block.list.owner.private.is_none() {
            let driver = self.driver();
            let Some(pages) = &mut self.source.expandable().pages else { return };
            let noted = pages.freed(driver.as_ref(), block.list.owner.stream, base, (start, end), capturing);
            self.event_error = self.event_error.take().or(noted.err());
        }
    }

    /// The addresses of earlier requests like this one in the program's order, the latest first; none as long as no page was moved.
    pub fn places_before(&mut self, list: FreeList, bytes: u64) -> Vec<u64> {
        if self.source.mapped().kept() == 0 {
            return Vec::new();
        }
        self.source.expandable().pages.as_mut().map_or_else(Vec::new, |pages| pages.places.before(list, bytes))
    }

    /// Notes the address of a request, once pages were moved.
    pub fn note_place(&mut self, list: FreeList, bytes: u64, block: BlockId) {
        if self.source.mapped().kept() > 0 {
            let addr = self.space[block].addr;
            self.source.expandable().pages.iter_mut().for_each(|pages| pages.places.served(list, bytes, addr));
        }
    }

    /// The free block of `bytes` at `start`, if all of it is free or can be filled by pages that have a kept mapping there and are
    /// free now: they move back, without a mapping call of the driver. Also the moved bytes.
    ///
    /// O(log n) for each page and for each free block there. The first call indexes all free blocks by address.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn take_back(&mut self, list: FreeList, bytes: u64, start: u64) -> Result<Option<(BlockId, u64)>, DriverError> {
        if list.owner.private.is_some() || self.is_capturing() {
            return Ok(None);
        }
        self.fit.list_addresses(self.space.free_blocks());
        let Some(Lacking { kept, vacant }) = self.lacking(list, &(start..start + bytes))? else {
            return Ok(None);
        };
        if !vacant.is_empty() {
            return Ok(None);
        }
        let moved = kept.len() as u64 * self.source.handle_bytes(list.pool);
        let Some(block) = self.carry_out(list, kept).or_else(|| self.fit.at(start).map(|block| block.id)) else {
            return Ok(None);
        };
        Ok(Some((self.begin_free(block, start), moved)))
    }

    /// The pages that a run needs; `None` where a part of it is in use, or has a kept mapping of a page that cannot move.
    fn lacking(&mut self, list: FreeList, run: &Range<u64>) -> Result<Option<Lacking>, DriverError> {
        let page = self.source.handle_bytes(list.pool);
        let (mut lacking, mut at) = (Lacking::default(), run.start);
        while at < run.end {
            if let Some(block) = self.fit.at(at) {
                if block.list != list {
                    return Ok(None);
                }
                at = block.addr + block.bytes;
                continue;
            }
            match self.source.mapped().place(at) {
                None if self.is_hole(list, at) => lacking.vacant.push(at),
                // The page is in use at the address that it belongs to.
                Some(from) if from != at => {
                    let around = |block: &FreeBlock| from + page <= block.addr + block.bytes;
                    let Some(block) = self.fit.at(from).filter(around) else { return Ok(None) };
                    let outside = from + page <= run.start || run.end <= from;
                    if !outside || self.source.shared().is_pinned(from) || !self.may_move(list, block, from, false)? {
                        return Ok(None);
                    }
                    lacking.kept.push(Move { from, to: at, block });
                }
                _ => return Ok(None),
            }
            at += page;
        }
        lacking.kept.sort_unstable_by_key(|page_move| page_move.from);
        let twice = lacking.kept.windows(2).any(|pair| pair[0].from == pair[1].from);
        Ok(Some(lacking).filter(|_| !twice))
    }

    /// Whether an address is in a hole of a list.
    fn is_hole(&self, list: FreeList, addr: u64) -> bool {
        let hole = self.source.holes().range((list, 0)..=(list, addr)).next_back().map(|(_, hole)| &self.space[*hole]);
        hole.is_some_and(|hole| addr < hole.addr + hole.bytes)
    }

    /// Makes a free block of `bytes` by moving pages into a run, those that have been free longest, and by mapping new ones for the
    /// remainder. `bytes_to_move` returns the bytes to move, given the bytes that the run needs. Pages of the same stream move
    /// immediately, because its later work follows the work that used them. Pages of other streams move when that work has
    /// completed; with `wait` the host waits for it. Returns the block, and the moved bytes; `None` when there is not enough
    /// memory.
    ///
    /// O(n log n) in the pages that are free.
    ///
    /// # Errors
    /// Those of the driver. Pages moved before that are accounted for.
    pub fn move_pages(
        &mut self,
        list: FreeList,
        bytes: u64,
        bytes_to_move: impl Fn(&Self, u64) -> u64,
        wait: bool,
    ) -> Result<Option<(BlockId, u64)>, DriverError> {
        let page = self.source.handle_bytes(list.pool);
        let Some((first, needed)) = self.find_run(list, bytes)? else { return Ok(None) };
        let start = self.space[first].addr;
        let lacking = needed.pages() as u64 * page;
        let bytes_to_move = bytes_to_move(self, lacking).min(lacking).saturating_sub(needed.kept.len() as u64 * page);
        let Lacking { mut kept, vacant } = needed;
        let back: BTreeSet<u64> = kept.iter().map(|page_move| page_move.from).collect();
        let mut moves =
            self.choose(list, bytes_to_move.min(vacant.len() as u64 * page), &(start..start + bytes), &back, wait)?;
        let moved = (kept.len() + moves.len()) as u64 * page;
        let limit = self.source.limit().unwrap_or(u64::MAX);
        if self.space.account().reserved() + (lacking - moved) > limit {
            return Ok(None);
        }
        moves.iter_mut().zip(vacant).for_each(|(one, to)| one.to = to);
        self.drop_oldest(moves.len(), &(start..start + bytes))?;
        let again: Vec<(u64, u64)> = moves.iter().map(|page_move| (page_move.to, page_move.from)).collect();
        // SAFETY: the addresses are in holes without kept mappings, and pages of all pools have one size.
        if !unsafe { self.source.expandable().map_again(&again, page) }? {
            return Ok(None);
        }
        moves.append(&mut kept);
        moves.sort_unstable_by_key(|page_move| page_move.from);
        self.carry_out(list, moves);
        let Some(first) = self.begins_at(list, start) else { return Ok(None) };
        Ok(self.fill(first, bytes, 1, true)?.map(|block| (block, moved)))
    }

    /// The free block or hole that begins at an address.
    fn begins_at(&self, list: FreeList, addr: u64) -> Option<BlockId> {
        let free = self.fit.at(addr).filter(|block| block.addr == addr);
        free.map(|block| block.id).or_else(|| self.source.holes().get(&(list, addr)).copied())
    }

    /// The run of a list for `bytes` that needs the fewest pages, the lowest of these, and the pages. Pages with a kept mapping in
    /// it can move.
    fn find_run(&mut self, list: FreeList, bytes: u64) -> Result<Option<(BlockId, Lacking)>, DriverError> {
        self.fit.list_addresses(self.space.free_blocks());
        let mut best: Option<(BlockId, u64, Lacking)> = None;
        for (block, start) in self.runs(list, bytes) {
            if let Some(lacking) = self.lacking(list, &(start..start + bytes))?
                && best.as_ref().is_none_or(|(_, _, least)| lacking.pages() < least.pages())
            {
                best = Some((block, start, lacking));
            }
        }
        if let Some((block, start, lacking)) = best {
            return Ok(Some((self.begin_hole(block, start), lacking)));
        }
        let Some(first) = self.find_hole(list, bytes)? else { return Ok(None) };
        let start = self.space[first].addr;
        Ok(self.lacking(list, &(start..start + bytes))?.map(|lacking| (first, lacking)))
    }

    /// The runs of a list for `bytes` whose holes have kept mappings of pages that can move; none while no mapping is kept.
    fn runs(&self, list: FreeList, bytes: u64) -> Vec<(BlockId, u64)> {
        if self.source.mapped().kept() == 0 || list.owner.private.is_some() || self.is_capturing() {
            return Vec::new();
        }
        let page = self.source.handle_bytes(list.pool);
        let can_be_had = |addr: u64| {
            let owner = self.source.mapped().place(addr);
            let block =
                owner.and_then(|owner| self.fit.at(owner).filter(|block| owner + page <= block.addr + block.bytes));
            block.is_some_and(|block| block.list.owner == list.owner)
                && !owner.is_some_and(|owner| self.source.shared().is_pinned(owner))
        };
        let holes = self.source.holes().range((list, 0)..=(list, u64::MAX)).map(|(_, hole)| *hole);
        let mut runs: Vec<(BlockId, u64)> = holes.filter_map(|hole| self.run_around(hole, bytes, can_be_had)).collect();
        runs.dedup();
        runs
    }

    /// Free pages of at least `bytes` outside of `keep`, those that have been free longest.
    fn choose(
        &mut self,
        list: FreeList,
        bytes: u64,
        keep: &Range<u64>,
        back: &BTreeSet<u64>,
        wait: bool,
    ) -> Result<Vec<Move>, DriverError> {
        let page = self.source.handle_bytes(list.pool);
        let Some(pages) = self.source.pages().filter(|_| bytes > 0 && !self.is_capturing()) else {
            return Ok(Vec::new());
        };
        let mut free: Vec<(u64, u64, FreeBlock)> = Vec::new();
        for block in self.space.free_blocks().filter(|block| block.list.owner.private.is_none()) {
            let base = self.space[self.space[block.id].segment].addr;
            let mut at = base + (block.addr - base).next_multiple_of(page);
            while at + page <= block.addr + block.bytes {
                let outside = at + page <= keep.start || keep.end <= at;
                if outside && !back.contains(&at) && !self.source.shared().is_pinned(at) {
                    free.push((pages.last_free(at), at, block));
                }
                at += page;
            }
        }
        free.sort_unstable_by_key(|(last, at, _)| (*last, *at));
        let (mut moves, mut busy) = (Vec::new(), BTreeSet::new());
        for (_, from, block) in free {
            if moves.len() as u64 * page >= bytes {
                break;
            }
            let stream = block.list.owner.stream;
            // Later frees of a stream complete after earlier ones.
            if busy.contains(&stream) {
                continue;
            }
            if self.may_move(list, block, from, wait)? {
                moves.push(Move { from, to: from, block });
            } else {
                busy.insert(stream);
            }
        }
        moves.sort_unstable_by_key(|page_move| page_move.from);
        Ok(moves)
    }

    /// Whether a page of a free block may serve a list. Later work of the same stream follows the work that used the page. A graph
    /// may be launched on any stream.
    fn may_move(&mut self, list: FreeList, block: FreeBlock, from: u64, wait: bool) -> Result<bool, DriverError> {
        let (owner, stream) = (list.owner, block.list.owner.stream);
        if owner == block.list.owner {
            return Ok(owner.private.is_none());
        }
        let (driver, used_until) = (self.driver(), self.source.mapped().used_until(from));
        let pages = self.source.expandable().pages.as_mut().filter(|_| block.list.owner.private.is_none());
        let Some(pages) = pages else { return Ok(false) };
        let free = pages.last_free(from).max(used_until);
        pages.is_over(driver.as_ref(), stream, free, wait)
    }

    /// Lets pages that are mapped at both addresses belong to the new one, in the order of the old ones. Returns the free block
    /// that the last of them is a part of.
    fn carry_out(&mut self, list: FreeList, mut moves: Vec<Move>) -> Option<BlockId> {
        let page = self.source.handle_bytes(list.pool);
        // From the last to the first, so that the front of a block keeps its id.
        for run in moves.chunk_by(|one, next| one.block.id == next.block.id && one.from + page == next.from).rev() {
            let block = self.space.as_free(run[0].block.id);
            self.open_hole(block, run[0].from, run.len() as u64 * page);
        }
        for page_move in &moves {
            let same = page_move.block.list.owner.stream == list.owner.stream;
            let used_until = self.source.pages().filter(|_| same).map_or(0, |pages| pages.latest(list.owner.stream));
            self.source.expandable().mapped.move_to(page_move.to, used_until);
        }
        moves.sort_unstable_by_key(|page_move| page_move.to);
        let mut last = None;
        for run in moves.chunk_by(|one, next| one.to + page == next.to) {
            let (mut at, end) = (run[0].to, run[0].to + run.len() as u64 * page);
            // Adjacent holes are not always one.
            while at < end {
                let hole = self.hole_at(list, at);
                let bytes = self.space[hole].bytes.min(end - at);
                last = Some(self.fill_hole(hole, bytes));
                at += bytes;
            }
        }
        let moved = moves.len() as u64;
        self.space.account_mut().count_stolen(0, moved, moved * page);
        last
    }

    /// The free block that begins at an address in `block`: the remainder behind it, if the block begins earlier.
    pub(super) fn begin_free(&mut self, block: BlockId, addr: u64) -> BlockId {
        let front = addr - self.space[block].addr;
        if front == 0 { block } else { self.cut(block, front) }
    }

    // Kept mappings.

    /// Removes the mappings whose addresses have not been used longest, if `more` would exceed the maximum. The host waits for work
    /// that used them and has not completed: it is the oldest work. Mappings in `but` stay.
    fn drop_oldest(&mut self, more: usize, but: &Range<u64>) -> Result<(), DriverError> {
        let source = self.source.mapped();
        let most = MOST_KEPT * source.pages();
        if more == 0 || source.kept() + more <= most {
            return Ok(());
        }
        // A quarter at a time, so that it is rare.
        let excess = source.kept() + more - most * 3 / 4;
        let pages = self.source.pages();
        let last_free = |addr: &u64| pages.map_or(0, |pages| pages.last_free(*addr));
        let mut mappings: Vec<(u64, u64)> = source
            .kept_of(|_| true)
            .into_iter()
            .filter(|addr| !but.contains(addr))
            .map(|addr| (last_free(&addr), addr))
            .collect();
        mappings.sort_unstable();
        mappings.truncate(excess);
        self.drop_kept(mappings.into_iter().map(|(_, addr)| addr))
    }

    /// Removes kept mappings of pages in `parts`, which are about to be released; parts are in address order. Pages that stay keep
    /// theirs.
    ///
    /// O(n log n) in the mappings, where any is kept.
    ///
    /// # Errors
    /// Those of the driver. The mappings that it did not remove are still kept.
    pub(super) fn drop_kept_of(&mut self, parts: &[Range<u64>]) -> Result<(), DriverError> {
        if self.source.mapped().kept() > 0 {
            let goes = |place: u64| {
                let behind = parts.partition_point(|part| part.end <= place);
                parts.get(behind).is_some_and(|part| part.start <= place)
            };
            let mappings = self.source.mapped().kept_of(goes);
            self.drop_kept(mappings.into_iter())?;
        }
        if self.source.mapped().kept() == 0 {
            self.source.expandable().pages.iter_mut().for_each(|pages| pages.places.clear());
            self.fit.forget_addresses();
        }
        Ok(())
    }

    /// Removes mappings once the work that used their addresses has completed, adjacent ones by one call.
    fn drop_kept(&mut self, addresses: impl Iterator<Item = u64>) -> Result<(), DriverError> {
        let (driver, page) = (self.driver(), self.source.handle_bytes(None));
        let mut addresses = addresses.peekable();
        while let Some(start) = addresses.next() {
            let mut end = start + page;
            self.wait_for_use_of(driver.as_ref(), start)?;
            while addresses.next_if_eq(&end).is_some() {
                self.wait_for_use_of(driver.as_ref(), end)?;
                end += page;
            }
            // SAFETY: work used these addresses only while their pages belonged there, as parts of blocks of one stream. Every free
            // of these is noted, and the work before the last ones has completed.
            unsafe { self.source.expandable().drop_kept(start, end - start, page) }?;
        }
        Ok(())
    }

    /// Waits for the work that used an address.
    fn wait_for_use_of(&mut self, driver: &dyn Driver, addr: u64) -> Result<(), DriverError> {
        if let Some(pages) = self.source.expandable().pages.as_mut().filter(|_| !self.ended)
            && !pages.wait_for_use_of(driver, addr)?
        {
            // The stream that used it was destroyed.
            driver.device_synchronize()?;
        }
        Ok(())
    }
}
