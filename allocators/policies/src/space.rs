//! The memory of an allocator: segments from the device, split into blocks.
//!
//! A [`Space`] has each block's address, neighbours, owner and state. It splits and coalesces blocks and keeps the [`Account`]:
//! PyTorch's statistics, the breakdown of reserved memory and their exact peaks. Every policy that consists of
//! [parts](crate::policy) uses it. It decides nothing: the policy chooses the free block for a request. It works on integers,
//! without a device or a clock.
//!
//! ```
//! use vramlab_policies::space::{Account, FreeList, Owner, Space, State};
//! use vramlab_device::StreamId;
//!
//! // SAFETY: no driver gets this stream.
//! let stream = unsafe { StreamId::from_raw(7) };
//! let list = FreeList { owner: Owner::of(stream), pool: None };
//! let mut space = Space::new(Account::new());
//! let block = space.add_segment(list, 0x1000, 4096); // a segment of one free block
//! let remainder = space.take(block, 1024, 1000).expect("3072 bytes remain");
//! assert_eq!(space[block].state, State::Held);
//! assert_eq!((space[remainder].addr, space[remainder].bytes), (0x1400, 3072));
//! let joined = space.free(block);
//! assert_eq!(joined.block.bytes, 4096);
//! ```
#![forbid(unsafe_code)]

mod account;
mod block;
mod mapping;
mod view;

pub use account::Account;
pub use block::{BlockId, FreeBlock, FreeList, Joined, Owner, Record, SegmentId, State};
pub use mapping::Unmapped;

use slab::Slab;
use std::ops::Index;

/// A range from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First address.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Mapped bytes: all, unless it is [expandable](Self::expandable).
    pub mapped: u64,
    /// The stream and pool of the request that allocated it.
    pub list: FreeList,
    /// Whether it is a range of addresses in which memory is mapped and unmapped.
    pub expandable: bool,
    /// Bytes of a page: an expandable segment is mapped and unmapped in whole pages, every other one in one call.
    pub page: u64,
    /// The block at its first address.
    pub first: BlockId,
    /// Number of live or pending blocks.
    pub busy: u32,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Space {
    account: Account,
    blocks: Slab<Record>,
    segments: Slab<Segment>,
    /// Number of searches, the clock of free blocks' ages.
    searches: u64,
}

/// The contribution of a free block to the count and bytes of blocks that are parts of their segments.
fn counted(split: bool, bytes: u64) -> (i64, i64) {
    if split { (1, bytes.cast_signed()) } else { (0, 0) }
}

/// Bytes of the whole pages in a part of a segment.
#[must_use]
pub fn whole_pages(offset: u64, bytes: u64, page: u64) -> u64 {
    ((offset + bytes) / page * page).saturating_sub(offset.next_multiple_of(page))
}

impl Index<BlockId> for Space {
    type Output = Record;

    /// # Panics
    /// When the block does not exist any more.
    fn index(&self, block: BlockId) -> &Record {
        &self.blocks[block.key()]
    }
}

impl Index<SegmentId> for Space {
    type Output = Segment;

    /// # Panics
    /// When the segment does not exist any more.
    fn index(&self, segment: SegmentId) -> &Segment {
        &self.segments[segment.0]
    }
}

impl Space {
    /// An empty space. `account` decides which quantities are counted.
    #[must_use]
    pub fn new(account: Account) -> Self {
        Self { account, blocks: Slab::default(), segments: Slab::default(), searches: 0 }
    }

    /// The counted quantities.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// The account, to count events that only the policy sees: retries, refusals, waits.
    pub fn account_mut(&mut self) -> &mut Account {
        &mut self.account
    }

    /// Counts a search of the free blocks, which increases their age.
    pub fn count_search(&mut self) {
        self.searches += 1;
    }

    /// Number of searches since a free block became free.
    #[must_use]
    pub fn age(&self, block: BlockId) -> u64 {
        self.now().saturating_sub(self[block].idle_since).unsigned_abs()
    }

    /// Sets a free block's age to `age` searches.
    pub fn set_age(&mut self, block: BlockId, age: u64) {
        self.record(block).idle_since = self.now() - age.cast_signed();
    }

    /// Number of searches. Signed, because a block may have become free before the count began.
    fn now(&self) -> i64 {
        self.searches.cast_signed()
    }

    fn record(&mut self, block: BlockId) -> &mut Record {
        &mut self.blocks[block.key()]
    }

    fn segment(&mut self, segment: SegmentId) -> &mut Segment {
        &mut self.segments[segment.0]
    }

    /// A segment of one block.
    fn add_whole(&mut self, list: FreeList, addr: u64, bytes: u64, state: State, page: u64) -> BlockId {
        let expandable = state == State::Unmapped;
        let mapped = if expandable { 0 } else { bytes };
        let idle_since = self.now();
        let first = BlockId::of(self.blocks.insert(Record {
            addr,
            bytes,
            requested: 0,
            list,
            state,
            prev: None,
            next: None,
            segment: SegmentId(0),
            idle_since,
        }));
        let segment = Segment { addr, bytes, mapped, list, expandable, page, first, busy: 0 };
        self.record(first).segment = SegmentId(self.segments.insert(segment));
        first
    }

    /// Adds a new segment of the device: one free block, which is returned.
    pub fn add_segment(&mut self, list: FreeList, addr: u64, bytes: u64) -> BlockId {
        let block = self.add_whole(list, addr, bytes, State::Free, bytes);
        self.account.segment_added(list, bytes);
        block
    }

    /// Splits a segment that is one free block into known blocks: their sizes in address order, each with the requested bytes if it
    /// is live. Returns the blocks.
    ///
    /// # Panics
    /// When the segment is not one free block, or the parts do not fill it.
    pub fn carve(&mut self, whole: BlockId, parts: &[(u64, Option<u64>)]) -> Vec<BlockId> {
        let Record { state, bytes, list, .. } = self[whole];
        assert!(state == State::Free && !self[whole].is_split(), "only a segment that is one free block can be carved");
        assert_eq!(parts.iter().map(|(bytes, _)| bytes).sum::<u64>(), bytes, "blocks should fill their segment");
        let (mut at, mut blocks) = (whole, vec![whole]);
        for (size, _) in &parts[..parts.len() - 1] {
            at = self.cut(at, *size);
            blocks.push(at);
        }
        for (block, (bytes, requested)) in blocks.iter().zip(parts) {
            match requested {
                Some(requested) => self.hold(*block, *requested),
                None if parts.len() > 1 => self.account.split_changed(list, 1, bytes.cast_signed()),
                None => {}
            }
        }
        blocks
    }

    /// Removes a segment without live or pending blocks, after its release to the device. Returns its free blocks.
    ///
    /// # Panics
    /// When a block of it is live or pending.
    pub fn remove_segment(&mut self, segment: SegmentId) -> Vec<FreeBlock> {
        let Segment { list, bytes, mapped, busy, expandable, first, .. } = self[segment];
        assert_eq!(busy, 0, "a segment in use should not be released");
        let several = self[first].next.is_some();
        let (mut removed, mut next) = (Vec::new(), Some(first));
        while let Some(block) = next {
            self.remove_pages(block);
            let record = self.blocks.remove(block.key());
            next = record.next;
            if record.state == State::Free {
                if several && !expandable {
                    self.account.split_changed(list, -1, -record.bytes.cast_signed());
                }
                removed.push(FreeBlock::of(block, &record));
            }
        }
        self.segments.remove(segment.0);
        if expandable {
            self.account.unmapped(list, mapped);
        } else {
            self.account.segment_removed(list, bytes);
        }
        removed
    }

    /// Bytes of whole pages in a free block of an expandable segment: its releasable part. 0 for every other block.
    fn pages_of(&self, block: BlockId) -> u64 {
        let block = &self[block];
        let segment = &self[block.segment];
        let counts = segment.expandable && block.state == State::Free;
        if counts { whole_pages(block.addr - segment.addr, block.bytes, segment.page) } else { 0 }
    }

    /// Counts the pages of a block that became free, or that is free and changed its size.
    fn add_pages(&mut self, block: BlockId) {
        let pages = self.pages_of(block);
        if pages > 0 {
            let list = self[self[block].segment].list;
            self.account.pages_added(list, pages);
        }
    }

    /// Counts the pages of a free block no longer, before the block changes.
    fn remove_pages(&mut self, block: BlockId) {
        let pages = self.pages_of(block);
        if pages > 0 {
            let list = self[self[block].segment].list;
            self.account.pages_removed(list, pages);
        }
    }

    /// Splits the front of `bytes` off a block. Counts pages alone. Returns the remainder.
    fn cut(&mut self, block: BlockId, bytes: u64) -> BlockId {
        self.remove_pages(block);
        let now = self.now();
        let front = self.record(block);
        debug_assert!(0 < bytes && bytes < front.bytes, "both parts of a split should have bytes");
        let rest = Record {
            addr: front.addr + bytes,
            bytes: front.bytes - bytes,
            prev: Some(block),
            idle_since: now,
            ..front.clone()
        };
        front.bytes = bytes;
        let next = rest.next;
        let rest = BlockId::of(self.blocks.insert(rest));
        self.record(block).next = Some(rest);
        if let Some(next) = next {
            self.record(next).prev = Some(rest);
        }
        self.add_pages(block);
        self.add_pages(rest);
        rest
    }

    /// Coalesces a block with its next neighbour. Counts pages alone.
    fn join_next(&mut self, block: BlockId) {
        let next = self[block].next.expect("there should be a neighbour to join with");
        self.remove_pages(block);
        self.remove_pages(next);
        let removed = self.blocks.remove(next.key());
        let record = self.record(block);
        (record.bytes, record.next) = (record.bytes + removed.bytes, removed.next);
        if let Some(after) = removed.next {
            self.record(after).prev = Some(block);
        }
        self.add_pages(block);
    }

    /// Makes a block live that is counted as free and not as split.
    fn hold(&mut self, block: BlockId, requested: u64) {
        self.remove_pages(block);
        let record = self.record(block);
        (record.state, record.requested) = (State::Held, requested);
        let Record { segment, list, bytes, .. } = *record;
        let owner = self.segment(segment);
        owner.busy += 1;
        let owner = *owner;
        if owner.busy == 1 && !owner.expandable {
            self.account.segment_busy(owner.list, owner.mapped);
        }
        self.account.taken(list, owner.list, bytes, requested);
    }

    /// Allocates the front `bytes` of a free block for a request of `requested` bytes. Returns the remainder, if there is one: it
    /// stays free.
    ///
    /// # Panics
    /// When the block is not free or too small.
    pub fn take(&mut self, block: BlockId, bytes: u64, requested: u64) -> Option<BlockId> {
        let rest = self.cut_free(block, bytes, bytes);
        self.hold(block, requested);
        rest
    }

    /// Allocates the last `bytes` of a free block for a request of `requested` bytes; its front stays free. Returns the live block.
    ///
    /// # Panics
    /// When the block is not free or too small.
    pub fn take_end(&mut self, block: BlockId, bytes: u64, requested: u64) -> BlockId {
        let end = self.cut_free(block, bytes, self[block].bytes.saturating_sub(bytes)).unwrap_or(block);
        self.hold(end, requested);
        end
    }

    /// Splits a free block in two: its front of `bytes`, and the remainder, which is returned.
    ///
    /// # Panics
    /// When the block is not free, or one of the two would be empty.
    pub fn cut_apart(&mut self, block: BlockId, bytes: u64) -> BlockId {
        let Record { state, bytes: size, .. } = self[block];
        assert!(state == State::Free && 0 < bytes && bytes < size, "both parts of a split should have bytes");
        let before = counted(self[block].is_split(), size);
        let behind = self.cut(block, bytes);
        self.recount(block, before, (2, size.cast_signed()));
        behind
    }

    /// Coalesces a free block with the one behind it, which is free too and of its list. Returns the removed block.
    ///
    /// # Panics
    /// When one of them is not free, or they are of different lists.
    pub fn join_behind(&mut self, block: BlockId) -> FreeBlock {
        let behind = self[block].next.expect("there should be a block behind the one that is joined");
        let alike = (State::Free, self[block].list);
        assert!([block, behind].iter().all(|id| (self[*id].state, self[*id].list) == alike), "both should be free");
        let removed = FreeBlock::of(behind, &self[behind]);
        self.join_next(block);
        let after = counted(self[block].is_split(), self[block].bytes);
        self.recount(block, (2, self[block].bytes.cast_signed()), after);
        removed
    }

    /// Splits a free block at an offset, from which `bytes` will be taken: the remainder is counted as free, if there is one.
    /// Returns the block behind the split.
    fn cut_free(&mut self, block: BlockId, bytes: u64, at: u64) -> Option<BlockId> {
        let Record { state, bytes: size, .. } = self[block];
        assert!(state == State::Free && bytes <= size, "a block should be free and large enough to be taken");
        let before = counted(self[block].is_split(), size);
        let behind = (bytes < size).then(|| self.cut(block, at));
        self.recount(block, before, counted(behind.is_some(), size - bytes));
        behind
    }

    /// Counts a change of the free blocks of a segment from `before` to `after`.
    fn recount(&mut self, block: BlockId, before: (i64, i64), after: (i64, i64)) {
        let Record { segment, list, .. } = self[block];
        if !self[segment].expandable {
            self.account.split_changed(list, after.0 - before.0, after.1 - before.1);
        }
    }

    /// Gives a live block to another owner, who took it over.
    pub fn hand_over(&mut self, block: BlockId, owner: Owner) {
        debug_assert_eq!(self[block].state, State::Held);
        self.record(block).list.owner = owner;
    }

    /// Gives a live or pending block back to the owner of its segment, so that it coalesces with free neighbours there.
    pub fn hand_back(&mut self, block: BlockId) {
        let list = self[self[block].segment].list;
        let record = self.record(block);
        debug_assert!(matches!(record.state, State::Held | State::Pending));
        record.list = list;
    }

    /// Gives a free block to an owner, possibly its current one, and coalesces it with that owner's free neighbours.
    ///
    /// # Panics
    /// When the block is not free.
    pub fn give(&mut self, block: BlockId, owner: Owner) -> Joined {
        let Record { state, bytes, .. } = self[block];
        assert_eq!(state, State::Free, "only a free block can change its owner");
        let before = counted(self[block].is_split(), bytes);
        self.record(block).list.owner = owner;
        let (joined, count, size) = self.join_around(block);
        let after = counted(self[joined.block.id].is_split(), joined.block.bytes);
        self.recount(joined.block.id, before, (count + after.0, size + after.1));
        joined
    }

    /// Notes the client's free of a live block, while streams may still use it.
    ///
    /// # Panics
    /// When the block is not live.
    pub fn defer(&mut self, block: BlockId) {
        let record = self.record(block);
        assert_eq!(record.state, State::Held, "only a live block should be freed");
        record.state = State::Pending;
        let Record { list, bytes, requested, segment, .. } = *record;
        let owner = self[segment].list;
        self.account.let_go(list, owner, bytes, requested);
    }

    /// Makes a live or pending block reusable, and coalesces it with free neighbours of the same free list.
    ///
    /// # Panics
    /// When the block is neither live nor pending.
    pub fn free(&mut self, block: BlockId) -> Joined {
        self.make_free(block, true)
    }

    /// Makes a live or pending block reusable without coalescing it, see [`give`](Self::give).
    ///
    /// # Panics
    /// When the block is neither live nor pending.
    pub fn free_apart(&mut self, block: BlockId) -> FreeBlock {
        self.make_free(block, false).block
    }

    fn make_free(&mut self, block: BlockId, join: bool) -> Joined {
        if self[block].state == State::Held {
            self.defer(block);
        }
        let Record { state, list, bytes, requested, segment, .. } = self[block];
        assert_eq!(state, State::Pending, "only a live or pending block should become free");
        let now = self.now();
        let record = self.record(block);
        (record.state, record.requested, record.idle_since) = (State::Free, 0, now);
        self.add_pages(block);
        let (joined, mut count, mut size) = if join {
            self.join_around(block)
        } else {
            (Joined { absorbed: [None, None], block: FreeBlock::of(block, &self[block]) }, 0, 0)
        };
        if self[joined.block.id].is_split() {
            (count, size) = (count + 1, size + joined.block.bytes.cast_signed());
        }
        let owner = self.segment(segment);
        owner.busy -= 1;
        let owner = *owner;
        if !owner.expandable {
            self.account.split_changed(list, count, size);
        }
        self.account.freed(list, owner.list, bytes, requested);
        if owner.busy == 0 && !owner.expandable {
            self.account.segment_idle(owner.list, owner.mapped);
        }
        joined
    }

    /// Coalesces a block with neighbours of its list and state. Also returns the counts of the neighbours.
    fn join_around(&mut self, block: BlockId) -> (Joined, i64, i64) {
        let like = |space: &Self, a: BlockId, b: BlockId| {
            let (a, b) = (&space[a], &space[b]);
            a.state == b.state && a.list == b.list
        };
        let (mut block, mut absorbed, mut count, mut size) = (block, [None, None], 0, 0);
        let now = self.now();
        if let Some(next) = self[block].next.filter(|next| like(self, block, *next)) {
            absorbed[1] = Some(FreeBlock::of(next, &self[next]));
            (count, size) = (count - 1, size - self[next].bytes.cast_signed());
            self.join_next(block);
        }
        if let Some(prev) = self[block].prev.filter(|prev| like(self, block, *prev)) {
            absorbed[0] = Some(FreeBlock::of(prev, &self[prev]));
            (count, size) = (count - 1, size - self[prev].bytes.cast_signed());
            self.join_next(prev);
            self.record(prev).idle_since = now;
            block = prev;
        }
        (Joined { absorbed, block: FreeBlock::of(block, &self[block]) }, count, size)
    }
}
