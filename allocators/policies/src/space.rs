//! The memory that an allocator holds: segments from the device, cut into blocks.
//!
//! A [`Space`] knows where each block lies, what lies beside it, who owns it and what state it is in. It cuts blocks, joins
//! free neighbours and keeps the [`Account`]: PyTorch's statistics, the ledger and their exact peaks. Every policy that is
//! put together from [parts](crate::policy) stands on it. It decides nothing: which free block serves a request is the
//! policy's business. It works on integers, and knows neither a device nor a clock.
//!
//! ```
//! use vramlab_policies::space::{Account, FreeList, Owner, Space, State};
//! use vramlab_device::StreamId;
//!
//! // SAFETY: no driver is given this stream.
//! let stream = unsafe { StreamId::from_raw(7) };
//! let list = FreeList { owner: Owner::of(stream), pool: None };
//! let mut space = Space::new(Account::new());
//! let whole = space.add_segment(list, 0x1000, 4096); // one free block
//! let rest = space.take(whole, 1024, 1000).expect("3072 bytes are left");
//! assert_eq!(space[whole].state, State::Held);
//! assert_eq!((space[rest].addr, space[rest].bytes), (0x1400, 3072));
//! let joined = space.free(whole);
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
    /// Bytes of it that have memory behind them: all, unless it is [expandable](Self::expandable).
    pub mapped: u64,
    /// Who asked for it, and from which pool.
    pub list: FreeList,
    /// Whether it is a range of addresses whose memory comes and goes in parts.
    pub expandable: bool,
    /// The block at its first address.
    pub first: BlockId,
    /// Blocks that are held or pending.
    pub busy: u32,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Space {
    account: Account,
    blocks: Slab<Record>,
    segments: Slab<Segment>,
    /// Searches so far, by which free blocks age.
    searches: u64,
}

/// What a free block adds to the count and bytes of blocks that are parts of their segments.
fn counted(split: bool, bytes: u64) -> (i64, i64) {
    if split { (1, bytes.cast_signed()) } else { (0, 0) }
}

impl Index<BlockId> for Space {
    type Output = Record;

    /// # Panics
    /// When there is no such block any more.
    fn index(&self, block: BlockId) -> &Record {
        &self.blocks[block.key()]
    }
}

impl Index<SegmentId> for Space {
    type Output = Segment;

    /// # Panics
    /// When there is no such segment any more.
    fn index(&self, segment: SegmentId) -> &Segment {
        &self.segments[segment.0]
    }
}

impl Space {
    /// Nothing held. `account` says what is counted.
    #[must_use]
    pub fn new(account: Account) -> Self {
        Self { account, blocks: Slab::default(), segments: Slab::default(), searches: 0 }
    }

    /// What was counted.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// The account, to count what only the policy sees: retries, refusals, waits.
    pub fn account_mut(&mut self) -> &mut Account {
        &mut self.account
    }

    /// Counts a search of the free blocks, by which they grow older.
    pub fn count_search(&mut self) {
        self.searches += 1;
    }

    /// Searches that were counted since a free block became free.
    #[must_use]
    pub fn age(&self, block: BlockId) -> u64 {
        self.now().saturating_sub(self[block].idle_since).unsigned_abs()
    }

    /// Makes a free block as old as `age` searches.
    pub fn set_age(&mut self, block: BlockId, age: u64) {
        self.record(block).idle_since = self.now() - age.cast_signed();
    }

    /// Searches so far. Signed, because a block may have become free before the count began.
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
    fn add_whole(&mut self, list: FreeList, addr: u64, bytes: u64, state: State) -> BlockId {
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
        let segment = Segment { addr, bytes, mapped, list, expandable, first, busy: 0 };
        self.record(first).segment = SegmentId(self.segments.insert(segment));
        first
    }

    /// Adds a segment that the device gave: one free block, which is returned.
    pub fn add_segment(&mut self, list: FreeList, addr: u64, bytes: u64) -> BlockId {
        let block = self.add_whole(list, addr, bytes, State::Free);
        self.account.segment_added(list, bytes);
        block
    }

    /// Cuts a segment that is one free block into blocks that are known: their sizes in address order, each with the bytes
    /// that the client asked for if it is held. Returns the blocks.
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

    /// Takes out a segment of which no block is held or pending, once it has gone back to the device. Returns its blocks
    /// that were free.
    ///
    /// # Panics
    /// When a block of it is held or pending.
    pub fn remove_segment(&mut self, segment: SegmentId) -> Vec<FreeBlock> {
        let Segment { list, bytes, mapped, busy, expandable, first, .. } = self[segment];
        assert_eq!(busy, 0, "a segment in use should not go back");
        let several = self[first].next.is_some();
        let (mut gone, mut next) = (Vec::new(), Some(first));
        while let Some(block) = next {
            let record = self.blocks.remove(block.key());
            next = record.next;
            if record.state == State::Free {
                if several && !expandable {
                    self.account.split_changed(list, -1, -record.bytes.cast_signed());
                }
                gone.push(FreeBlock::of(block, &record));
            }
        }
        self.segments.remove(segment.0);
        if expandable {
            self.account.unmapped(list, mapped);
        } else {
            self.account.segment_removed(list, bytes);
        }
        gone
    }

    /// Cuts the front of `bytes` off a block, without counting anything. Returns the rest.
    fn cut(&mut self, block: BlockId, bytes: u64) -> BlockId {
        let now = self.now();
        let front = self.record(block);
        debug_assert!(0 < bytes && bytes < front.bytes, "a cut should leave something on both sides");
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
        rest
    }

    /// Joins a block with its next neighbour, without counting anything.
    fn join_next(&mut self, block: BlockId) {
        let next = self[block].next.expect("there should be a neighbour to join with");
        let gone = self.blocks.remove(next.key());
        let record = self.record(block);
        (record.bytes, record.next) = (record.bytes + gone.bytes, gone.next);
        if let Some(after) = gone.next {
            self.record(after).prev = Some(block);
        }
    }

    /// Makes a block held that is counted as free and not as split.
    fn hold(&mut self, block: BlockId, requested: u64) {
        let record = self.record(block);
        (record.state, record.requested) = (State::Held, requested);
        let Record { segment, list, bytes, .. } = *record;
        let owner = self.segment(segment);
        owner.busy += 1;
        let owner = *owner;
        if owner.busy == 1 {
            self.account.segment_busy(owner.list, owner.mapped);
        }
        self.account.taken(list, owner.list, bytes, requested);
    }

    /// Hands a free block to the client, who asked for `requested` bytes: the front `bytes` of it. Returns the rest, if
    /// there is one: it stays free.
    ///
    /// # Panics
    /// When the block is not free or too small.
    pub fn take(&mut self, block: BlockId, bytes: u64, requested: u64) -> Option<BlockId> {
        let rest = self.cut_free(block, bytes, bytes);
        self.hold(block, requested);
        rest
    }

    /// Hands the last `bytes` of a free block to the client, who asked for `requested` bytes; what lies in front of them stays
    /// free. Returns the block that is held.
    ///
    /// # Panics
    /// When the block is not free or too small.
    pub fn take_end(&mut self, block: BlockId, bytes: u64, requested: u64) -> BlockId {
        let held = self.cut_free(block, bytes, self[block].bytes.saturating_sub(bytes)).unwrap_or(block);
        self.hold(held, requested);
        held
    }

    /// Cuts a free block in two: its front of `bytes`, and the rest, which is returned.
    ///
    /// # Panics
    /// When the block is not free, or nothing would be left on a side.
    pub fn cut_apart(&mut self, block: BlockId, bytes: u64) -> BlockId {
        let Record { state, bytes: size, .. } = self[block];
        assert!(state == State::Free && 0 < bytes && bytes < size, "a cut should leave something free on both sides");
        let before = counted(self[block].is_split(), size);
        let behind = self.cut(block, bytes);
        self.recount(block, before, (2, size.cast_signed()));
        behind
    }

    /// Joins a free block with the one behind it, which is free too and of its list. Returns what that was.
    ///
    /// # Panics
    /// When one of them is not free, or they are of different lists.
    pub fn join_behind(&mut self, block: BlockId) -> FreeBlock {
        let behind = self[block].next.expect("there should be a block behind the one that is joined");
        let alike = (State::Free, self[block].list);
        assert!([block, behind].iter().all(|one| (self[*one].state, self[*one].list) == alike), "both should be free");
        let gone = FreeBlock::of(behind, &self[behind]);
        self.join_next(block);
        let after = counted(self[block].is_split(), self[block].bytes);
        self.recount(block, (2, self[block].bytes.cast_signed()), after);
        gone
    }

    /// Cuts a free block at an offset, of which `bytes` will be taken: the rest of them is counted as free, if there is one.
    /// Returns what lies behind the cut.
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

    /// Lets a held block belong to another owner from now on, who took it over.
    pub fn hand_over(&mut self, block: BlockId, owner: Owner) {
        debug_assert_eq!(self[block].state, State::Held);
        self.record(block).list.owner = owner;
    }

    /// Lets a held or pending block belong to the owner of its segment again, so that it joins what is free there.
    pub fn hand_back(&mut self, block: BlockId) {
        let list = self[self[block].segment].list;
        let record = self.record(block);
        debug_assert!(matches!(record.state, State::Held | State::Pending));
        record.list = list;
    }

    /// Lets a free block belong to an owner from now on, who may have had it before, and joins it with that owner's free
    /// neighbours.
    ///
    /// # Panics
    /// When the block is not free.
    pub fn give(&mut self, block: BlockId, owner: Owner) -> Joined {
        let Record { state, bytes, .. } = self[block];
        assert_eq!(state, State::Free, "only a free block can be given away");
        let before = counted(self[block].is_split(), bytes);
        self.record(block).list.owner = owner;
        let (joined, count, size) = self.join_around(block);
        let after = counted(self[joined.block.id].is_split(), joined.block.bytes);
        self.recount(joined.block.id, before, (count + after.0, size + after.1));
        joined
    }

    /// Takes a held block back from the client, while streams may still use it.
    ///
    /// # Panics
    /// When the block is not held.
    pub fn defer(&mut self, block: BlockId) {
        let record = self.record(block);
        assert_eq!(record.state, State::Held, "only what is held should be freed");
        record.state = State::Pending;
        let Record { list, bytes, requested, segment, .. } = *record;
        let owner = self[segment].list;
        self.account.let_go(list, owner, bytes, requested);
    }

    /// Makes a block reusable that was held or pending, and joins it with free neighbours of the same free list.
    ///
    /// # Panics
    /// When the block is neither held nor pending.
    pub fn free(&mut self, block: BlockId) -> Joined {
        self.make_free(block, true)
    }

    /// Makes a block reusable that was held or pending, and leaves it apart from its neighbours, see [`give`](Self::give).
    ///
    /// # Panics
    /// When the block is neither held nor pending.
    pub fn free_apart(&mut self, block: BlockId) -> FreeBlock {
        self.make_free(block, false).block
    }

    fn make_free(&mut self, block: BlockId, join: bool) -> Joined {
        if self[block].state == State::Held {
            self.defer(block);
        }
        let Record { state, list, bytes, requested, segment, .. } = self[block];
        assert_eq!(state, State::Pending, "only what is held or pending should become free");
        let now = self.now();
        let record = self.record(block);
        (record.state, record.requested, record.idle_since) = (State::Free, 0, now);
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
        if owner.busy == 0 {
            self.account.segment_idle(owner.list, owner.mapped);
        }
        joined
    }

    /// Joins a block with neighbours of its list and state. Also what the neighbours counted for.
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
