//! Primitive and stitched blocks: the large pool of [`gmlake`](super).

use super::pages::Pages;
use crate::contract::Path;
use crate::policy::size::torch::segment_size;
use crate::space::{Account, FreeList};
use slab::Slab;
use std::collections::{BTreeMap, BTreeSet};
use vramlab_device::{DriverError, PhysicalHandle, StreamId};

mod release;

/// See the settings of the backend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) frag: u64,
    pub(super) reuse: u64,
    pub(super) stitched: u64,
}

/// A request: its free list, the size of its block, and the requested bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) list: FreeList,
    pub(super) bytes: u64,
    pub(super) requested: u64,
}

/// A range of addresses with a page behind each of its parts.
#[derive(Debug)]
struct Segment {
    bytes: u64,
    list: FreeList,
    pages: Vec<Page>,
    /// Number of its primitive blocks.
    blocks: i64,
    free_blocks: i64,
    free_bytes: i64,
}

impl Segment {
    fn is_idle(&self) -> bool {
        self.blocks == self.free_blocks
    }

    /// Number and bytes of the free blocks that are parts of it.
    fn splits(&self) -> (i64, i64) {
        if self.blocks > 1 { (self.free_blocks, self.free_bytes) } else { (0, 0) }
    }
}

#[derive(Debug)]
struct Page {
    handle: PhysicalHandle,
    /// The stitched blocks that map it.
    over: BTreeSet<usize>,
}

/// A primitive block, by its address: a part of a segment.
#[derive(Clone, Copy, Debug)]
struct Primitive {
    segment: u64,
    bytes: u64,
    busy: bool,
}

/// A stitched block: a second range of addresses for pages of several primitive blocks.
#[derive(Debug)]
struct Stitched {
    addr: u64,
    /// Mapped bytes, and bytes of the range.
    bytes: u64,
    reserved: u64,
    list: FreeList,
    /// The first address of each page.
    pages: Vec<u64>,
    /// Number of pages in use.
    busy: u64,
    /// Bytes of the live block at its front; 0 without one.
    live: u64,
}

/// A block that a client holds, or that waits for other streams after its free.
#[derive(Debug)]
struct Live {
    want: Want,
    /// The addresses and bytes of its primitive blocks.
    parts: Vec<(u64, u64)>,
    stitched: Option<usize>,
    pending: bool,
}

/// An address, and the path by which it was found.
pub(super) type Found = Option<(u64, Path)>;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Lake {
    memory: Pages,
    limits: Limits,
    segments: BTreeMap<u64, Segment>,
    blocks: BTreeMap<u64, Primitive>,
    /// Free primitive blocks, by list, size and address.
    free: BTreeSet<(FreeList, u64, u64)>,
    stitched: Slab<Stitched>,
    /// Stitched blocks without a page in use, by list, size and address.
    free_stitched: BTreeMap<(FreeList, u64, u64), usize>,
    live: BTreeMap<u64, Live>,
    /// Bytes of the addresses of stitched blocks.
    stitched_bytes: u64,
}

impl Lake {
    pub(super) fn new(memory: Pages, limits: Limits) -> Self {
        Self {
            memory,
            limits,
            segments: BTreeMap::new(),
            blocks: BTreeMap::new(),
            free: BTreeSet::new(),
            stitched: Slab::new(),
            free_stitched: BTreeMap::new(),
            live: BTreeMap::new(),
            stitched_bytes: 0,
        }
    }

    /// The size of the block for a request.
    pub(super) fn round(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.memory.page)
    }

    /// Whether a client holds the block at an address.
    pub(super) fn is_live(&self, addr: u64) -> bool {
        self.live.get(&addr).is_some_and(|live| !live.pending)
    }

    /// The stream of a live or pending block.
    pub(super) fn stream_of(&self, addr: u64) -> StreamId {
        self.live[&addr].want.list.owner.stream
    }

    /// Bytes of the addresses of stitched blocks.
    #[cfg(test)]
    pub(super) fn stitched_bytes(&self) -> u64 {
        self.stitched_bytes
    }

    /// The list and bytes of each free primitive block.
    pub(super) fn free_blocks(&self) -> impl Iterator<Item = (FreeList, u64)> {
        self.free.iter().map(|(list, bytes, _)| (*list, *bytes))
    }

    // Requests.

    /// Serves a request by the smallest free block that fits: a primitive one, else a stitched one.
    pub(super) fn reuse(&mut self, account: &mut Account, want: Want) -> Found {
        let Want { list, bytes, .. } = want;
        let path = |size| if size == bytes { Path::Hit } else { Path::Split };
        if let Some(&(_, size, addr)) = self.free.range((list, bytes, 0)..=(list, u64::MAX, u64::MAX)).next() {
            self.take(account, want, addr, vec![(addr, bytes)], None);
            return Some((addr, path(size)));
        }
        let largest = bytes.saturating_mul(self.limits.reuse);
        let mut fitting = self.free_stitched.range((list, bytes, 0)..=(list, largest, u64::MAX));
        let (&(_, size, addr), &id) = fitting.next()?;
        self.take_stitched(account, want, id);
        Some((addr, path(size)))
    }

    /// Serves a request by free primitive blocks, the largest first, which are mapped as one. Only the front of the last one is
    /// taken.
    ///
    /// # Errors
    /// Those of the driver; nothing is taken then.
    pub(super) fn stitch(&mut self, account: &mut Account, want: Want) -> Result<Found, DriverError> {
        let Want { list, bytes, .. } = want;
        let (mut pages, page) = (Vec::new(), self.memory.page);
        for &(_, size, addr) in self.free.range((list, 0, 0)..=(list, u64::MAX, u64::MAX)).rev() {
            // CAST: a number of pages.
            let missing = (bytes / page) as usize - pages.len();
            pages.extend((addr..addr + size).step_by(page as usize).take(missing));
        }
        if bytes < self.limits.frag || (pages.len() as u64) < bytes / page {
            return Ok(None);
        }
        if self.stitched_bytes.saturating_add(bytes) > self.limits.stitched {
            self.unmap_idle()?;
        }
        let handles: Vec<PhysicalHandle> = pages.iter().map(|page| self.page(*page).handle).collect();
        let addr = match self.memory.map(&handles)? {
            None if self.unmap_idle()? > 0 => self.memory.map(&handles)?,
            addr => addr,
        };
        let Some(addr) = addr else { return Ok(None) };
        let block = Stitched { addr, bytes, reserved: bytes, list, pages: pages.clone(), busy: 0, live: 0 };
        let id = self.stitched.insert(block);
        for page in &pages {
            self.page(*page).over.insert(id);
        }
        self.free_stitched.insert((list, bytes, addr), id);
        self.stitched_bytes += bytes;
        account.count_stolen(1, pages.len() as u64, bytes);
        self.take_stitched(account, want, id);
        Ok(Some((addr, Path::Steal)))
    }

    /// Serves a request by the front of a new segment. `None` when there is no memory, or `limit`, the maximum of reserved bytes,
    /// does not allow it.
    ///
    /// # Errors
    /// Those of the driver; nothing is allocated then.
    pub(super) fn grow(
        &mut self,
        account: &mut Account,
        limit: Option<u64>,
        want: Want,
    ) -> Result<Option<u64>, DriverError> {
        let bytes = self.round(segment_size(want.bytes));
        if limit.is_some_and(|limit| account.reserved().saturating_add(bytes) > limit) {
            return Ok(None);
        }
        let Some((addr, handles)) = self.memory.create(bytes)? else { return Ok(None) };
        account.segment_added(want.list, bytes);
        let pages = handles.into_iter().map(|handle| Page { handle, over: BTreeSet::new() }).collect();
        let free_bytes = bytes.cast_signed();
        let segment = Segment { bytes, list: want.list, pages, blocks: 1, free_blocks: 1, free_bytes };
        self.segments.insert(addr, segment);
        self.insert_free(addr, bytes, addr, want.list);
        self.take(account, want, addr, vec![(addr, want.bytes)], None);
        Ok(Some(addr))
    }

    fn take(&mut self, account: &mut Account, want: Want, addr: u64, parts: Vec<(u64, u64)>, stitched: Option<usize>) {
        for (addr, bytes) in &parts {
            self.occupy(account, *addr, *bytes);
        }
        account.taken(want.list, want.list, want.bytes, want.requested);
        self.live.insert(addr, Live { want, parts, stitched, pending: false });
    }

    /// Takes the front of a free stitched block.
    fn take_stitched(&mut self, account: &mut Account, want: Want, id: usize) {
        let (block, mut parts) = (&mut self.stitched[id], Vec::<(u64, u64)>::new());
        block.live = want.bytes;
        let addr = block.addr;
        // CAST: a number of pages.
        for &page in &block.pages[..(want.bytes / self.memory.page) as usize] {
            match parts.last_mut().filter(|(addr, bytes)| addr + *bytes == page && !self.segments.contains_key(&page)) {
                Some((_, bytes)) => *bytes += self.memory.page,
                None => parts.push((page, self.memory.page)),
            }
        }
        self.take(account, want, addr, parts, Some(id));
    }

    /// Notes that the client freed a block; returns its bytes.
    pub(super) fn defer(&mut self, account: &mut Account, addr: u64) -> u64 {
        let live = self.live.get_mut(&addr).expect("a freed block should have been live");
        live.pending = true;
        let Want { list, bytes, requested } = live.want;
        account.let_go(list, list, bytes, requested);
        bytes
    }

    /// Makes a pending block reusable.
    pub(super) fn put(&mut self, account: &mut Account, addr: u64) {
        let Live { want, parts, stitched, .. } =
            self.live.remove(&addr).expect("a pending block should have been live");
        account.freed(want.list, want.list, want.bytes, want.requested);
        if let Some(id) = stitched {
            self.stitched[id].live = 0;
        }
        for (addr, bytes) in parts {
            self.vacate(account, addr, bytes);
        }
    }

    // Primitive blocks.

    fn page(&mut self, addr: u64) -> &mut Page {
        let (start, segment) =
            self.segments.range_mut(..=addr).next_back().expect("a page should be a part of a segment");
        // CAST: a number of pages.
        &mut segment.pages[((addr - start) / self.memory.page) as usize]
    }

    fn insert_free(&mut self, addr: u64, bytes: u64, segment: u64, list: FreeList) {
        self.blocks.insert(addr, Primitive { segment, bytes, busy: false });
        self.free.insert((list, bytes, addr));
    }

    /// Changes the counts of a segment, by as many blocks, free blocks and free bytes.
    fn recount(&mut self, account: &mut Account, addr: u64, (blocks, free_blocks, free_bytes): (i64, i64, i64)) {
        let segment = self.segments.get_mut(&addr).expect("a block should be a part of a segment");
        let (before, idle) = (segment.splits(), segment.is_idle());
        segment.blocks += blocks;
        segment.free_blocks += free_blocks;
        segment.free_bytes += free_bytes;
        let after = segment.splits();
        account.split_changed(segment.list, after.0 - before.0, after.1 - before.1);
        match (idle, segment.is_idle()) {
            (true, false) => account.segment_busy(segment.list, segment.bytes),
            (false, true) => account.segment_idle(segment.list, segment.bytes),
            _ => {}
        }
    }

    /// Takes a range of one free block. What is before and behind it stays free.
    fn occupy(&mut self, account: &mut Account, addr: u64, bytes: u64) {
        let around = self.blocks.range(..=addr).next_back().map(|(start, block)| (*start, *block));
        let (start, block) = around.expect("a range should be a part of a block");
        debug_assert!(!block.busy && addr + bytes <= start + block.bytes, "a range should be a part of a free block");
        let list = self.segments[&block.segment].list;
        self.free.remove(&(list, block.bytes, start));
        let end = addr + bytes;
        let rests =
            [(start, addr - start), (end, start + block.bytes - end)].into_iter().filter(|(_, bytes)| *bytes > 0);
        let mut count = 0;
        for (addr, bytes) in rests {
            self.insert_free(addr, bytes, block.segment, list);
            count += 1;
        }
        self.blocks.insert(addr, Primitive { bytes, busy: true, ..block });
        self.recount(account, block.segment, (count, count - 1, -bytes.cast_signed()));
        for page in (addr..end).step_by(self.memory.page as usize) {
            for id in self.page(page).over.clone() {
                let stitched = &mut self.stitched[id];
                stitched.busy += 1;
                self.free_stitched.remove(&(stitched.list, stitched.bytes, stitched.addr));
            }
        }
    }

    /// Frees a block, and coalesces it with its free neighbours.
    fn vacate(&mut self, account: &mut Account, addr: u64, bytes: u64) {
        let block = self.blocks.remove(&addr).expect("a freed block should be in its segment");
        let list = self.segments[&block.segment].list;
        let (mut start, mut size, mut count) = (addr, bytes, 0);
        let front = self.blocks.range(..addr).next_back().map(|(addr, front)| (*addr, *front));
        let behind = self.blocks.get(&(addr + bytes)).map(|behind| (addr + bytes, *behind));
        for (addr, other) in front.into_iter().chain(behind).filter(|(_, other)| !other.busy) {
            if other.segment == block.segment {
                self.blocks.remove(&addr);
                self.free.remove(&(list, other.bytes, addr));
                (start, size, count) = (start.min(addr), size + other.bytes, count + 1);
            }
        }
        self.insert_free(start, size, block.segment, list);
        self.recount(account, block.segment, (-count, 1 - count, bytes.cast_signed()));
        for page in (addr..addr + bytes).step_by(self.memory.page as usize) {
            for id in self.page(page).over.clone() {
                let stitched = &mut self.stitched[id];
                stitched.busy -= 1;
                if stitched.busy == 0 {
                    self.free_stitched.insert((stitched.list, stitched.bytes, stitched.addr), id);
                }
            }
        }
    }
}
