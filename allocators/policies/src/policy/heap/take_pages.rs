//! Pages of free memory are taken from where they lie, to be mapped somewhere else.

use super::Heap;
use crate::policy::grow::Segments as _;
use crate::policy::pages::Pages;
use crate::space::{BlockId, FreeBlock, State};
use std::collections::BTreeMap;
use std::ops::Range;
use vramlab_device::DriverError;

impl Heap {
    /// Makes the heap note when each page is used last, so that pages [can be taken](Self::take_pages). Of the frees that leave
    /// whole pages free every sixteenth records an event, and each once pages were taken.
    #[must_use]
    pub fn with_pages(self) -> Self {
        let mut heap = Self { pages: Some(Pages::default()), ..self };
        heap.space.account_mut().count_stolen(0, 0, 0);
        heap
    }

    /// Notes that a block became free which lay at `freed` and is a part of `block` now.
    pub(super) fn note_pages(&mut self, freed: Range<u64>, block: FreeBlock) {
        let capturing = self.pages.is_some() && self.is_capturing();
        let Some(pages) = &mut self.pages else { return };
        let segment = &self.space[self.space[block.id].segment];
        let page = self.source.handle_bytes(segment.list.pool);
        // A range begins with a whole page, wherever it lies.
        let base = segment.addr;
        let offset = block.addr - base;
        let start = ((freed.start - base) / page * page).max(offset.next_multiple_of(page)) + base;
        let end = (freed.end - base).next_multiple_of(page).min((offset + block.bytes) / page * page) + base;
        if start < end && block.list.owner.private.is_none() {
            let driver = self.source.driver().as_ref();
            let noted = pages.freed(driver, block.list.owner.stream, (start, end), capturing);
            self.event_error = self.event_error.take().or(noted.err());
        }
    }

    /// Unmaps pages of at least `bytes`, those that have been free longest, wherever they lie but in `keep`. Only such as no work
    /// uses any more; with `wait` the host waits for the work that used them. Returns how many bytes it found.
    ///
    /// O(n log n) in the pages that are free.
    ///
    /// # Errors
    /// Those of the driver. What it did take is accounted for.
    pub fn take_pages(&mut self, bytes: u64, keep: &Range<u64>, wait: bool) -> Result<u64, DriverError> {
        if bytes == 0 || self.is_capturing() {
            return Ok(0);
        }
        let Some(mut pages) = self.pages.take() else { return Ok(0) };
        let driver = self.driver();
        let mut outcome = pages.poll_all(driver.as_ref(), false);
        let mut free: Vec<(u64, u64, u64, BlockId)> = Vec::new();
        let blocks = self.space.free_blocks().filter(|block| block.list.owner.private.is_none());
        for FreeBlock { list, addr, bytes, id } in blocks {
            let page = self.source.handle_bytes(list.pool);
            let base = self.space[self.space[id].segment].addr;
            let mut at = base + (addr - base).next_multiple_of(page);
            while at + page <= addr + bytes {
                if at + page <= keep.start || keep.end <= at {
                    free.push((pages.last_free(at), at, page, id));
                }
                at += page;
            }
        }
        free.sort_unstable();
        let (mut found, mut count) = (0, 0);
        let mut taken: BTreeMap<BlockId, Vec<(u64, u64)>> = BTreeMap::new();
        for (_, at, page, block) in free {
            if found >= bytes || outcome.is_err() {
                break;
            }
            match pages.is_over(driver.as_ref(), at, wait) {
                Ok(true) => {
                    pages.forget(at, at + page);
                    taken.entry(block).or_default().push((at, page));
                    (found, count) = (found + page, count + 1);
                }
                Ok(false) => {}
                Err(error) => outcome = Err(error),
            }
        }
        self.pages = Some(pages);
        outcome?;
        for (block, mut at) in taken {
            // From the last to the first, so that the block keeps its name: it is what is left in front.
            at.sort_unstable();
            while let Some((mut start, bytes)) = at.pop() {
                let end = start + bytes;
                while let Some((before, _)) = at.pop_if(|(before, bytes)| *before + *bytes == start) {
                    start = before;
                }
                debug_assert_eq!(self.space[block].state, State::Free);
                self.unmap(self.space.as_free(block), start, end - start)?;
            }
        }
        self.space.account_mut().count_stolen(0, count, found);
        Ok(found)
    }
}
