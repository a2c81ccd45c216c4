//! Records of blocks: where a block lies, its state and its neighbours, in 32 bytes.
//!
//! Records lie in one array and are linked by 32-bit indices: to their address neighbours inside one segment, and inside a
//! free list, whose links use the room in which a block that is held keeps what the client asked for. So a block needs no
//! memory of its own besides, two share a cache line, and a block that is handed out carries its record's number: a free
//! looks nothing up. Index 0 is no block; its record exists, so links may be followed and written without a branch.
//!
//! *Worth.* Nothing on the recorded histories: with 64 bytes a record they take the same time. Programs with more live blocks
//! gain: mixed sizes with 16,384 take 10 % longer with 64 bytes (`experiments/notes/caching.md`).

use crate::contract::BlockState;
use crate::contract::PoolKind;
use crate::policy::size::torch::MIN_BLOCK;

/// Index of a record in its [`BlockSlab`].
pub(crate) type BlockIndex = u32;
/// No block. Its record exists and is never live, so that a link may be followed, and its links be written, without asking
/// whether there is one. It lies above every block.
pub(crate) const NONE: BlockIndex = 0;
/// The largest block that a record can describe, in bytes: 2 TiB less one block.
pub(crate) const MAX_BLOCK: u64 = u32::MAX as u64 * MIN_BLOCK;

/// The low bits of an address, which are zero for every segment and block, hold what is small.
const FLAGS: u64 = 0xFF;
const STATE: u64 = 0b01_0011;
const VACANT: u64 = 0;
const FREE: u64 = 1;
const ALLOCATED: u64 = 2;
const PENDING: u64 = 3;
const HOLE: u64 = 0b01_0000;
const LARGE: u64 = 0b00_0100;
const SHARED: u64 = 0b00_1000;
const EXPANDABLE: u64 = 0b10_0000;

#[inline(always)]
fn pool_flag(pool: PoolKind) -> u64 {
    match pool {
        PoolKind::Small => 0,
        PoolKind::Large => LARGE,
    }
}

/// A block of a segment; two to a cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(32))]
pub(crate) struct BlockRecord {
    /// First address, and flags.
    place: u64,
    /// Size in units of [`MIN_BLOCK`].
    units: u32,
    prev: BlockIndex,
    next: BlockIndex,
    /// Of a free block: its links in the index of free blocks. Of another: the bytes that the client asked for, low
    /// half and high half, and the events that a pending free waits for.
    rest: Links,
}

/// In which free list a block belongs, by its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum List {
    /// That of the small pool.
    Small,
    /// That of the large pool.
    Large,
    /// That of the small pool, where segments are expandable and so have larger blocks.
    ExpandableSmall,
}

/// How a free block hangs in the index of free blocks; what the names mean is the index's affair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Links {
    pub(super) left: BlockIndex,
    pub(super) right: BlockIndex,
    pub(super) up: BlockIndex,
}

impl Links {
    pub(super) const ALONE: Self = Self { left: NONE, right: NONE, up: NONE };

    #[inline(always)]
    pub(super) fn are_alone(self) -> bool {
        self.left | self.right | self.up == NONE
    }
}

impl BlockRecord {
    /// A whole segment as one free block that no index knows yet. `addr` and `bytes` are multiples of 256 and of
    /// [`MIN_BLOCK`].
    ///
    /// # Panics
    /// For more than [`MAX_BLOCK`].
    #[must_use]
    pub(crate) fn segment(addr: u64, bytes: u64, pool: PoolKind) -> Self {
        debug_assert!(addr & FLAGS == 0 && bytes.is_multiple_of(MIN_BLOCK), "a device should align its segments");
        let units = u32::try_from(bytes / MIN_BLOCK).expect("no segment should be larger than a record can say");
        Self { place: addr | pool_flag(pool) | FREE, units, prev: NONE, next: NONE, rest: Links::ALONE }
    }

    /// Addresses of an expandable segment without memory behind them.
    ///
    /// # Panics
    /// For more than [`MAX_BLOCK`].
    #[must_use]
    pub(super) fn hole(addr: u64, bytes: u64, pool: PoolKind) -> Self {
        let free = Self::segment(addr, bytes, pool);
        Self { place: free.place & !STATE | HOLE | EXPANDABLE, ..free }
    }

    /// First address.
    #[must_use]
    #[inline(always)]
    pub(crate) fn addr(&self) -> u64 {
        self.place & !FLAGS
    }

    /// Size in bytes.
    #[must_use]
    #[inline(always)]
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.units) * MIN_BLOCK
    }

    /// Size in units of [`MIN_BLOCK`].
    #[inline(always)]
    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// Pool of its segment.
    #[must_use]
    #[inline(always)]
    pub(crate) fn pool(&self) -> PoolKind {
        if self.place & LARGE == 0 { PoolKind::Small } else { PoolKind::Large }
    }

    /// The free list that it belongs in.
    #[inline(always)]
    pub(super) fn list(&self) -> List {
        match self.place & (LARGE | EXPANDABLE) {
            0 => List::Small,
            EXPANDABLE => List::ExpandableSmall,
            _ => List::Large,
        }
    }

    /// Neighbour at the lower address in the same segment, or [`NONE`].
    #[must_use]
    #[inline(always)]
    pub(crate) fn prev(&self) -> BlockIndex {
        self.prev
    }

    /// Neighbour at the higher address in the same segment, or [`NONE`].
    #[must_use]
    #[inline(always)]
    pub(crate) fn next(&self) -> BlockIndex {
        self.next
    }

    /// Whether the block is only a part of its segment.
    #[must_use]
    #[inline(always)]
    pub(crate) fn is_split(&self) -> bool {
        self.prev | self.next != NONE
    }

    /// Whether the client holds the block.
    #[cfg(test)]
    pub(crate) fn is_allocated(&self) -> bool {
        self.place & STATE == ALLOCATED
    }

    /// Whether the record is that of a block that the client holds and that begins at `addr`.
    #[must_use]
    #[inline(always)]
    pub(crate) fn is_held_at(&self, addr: u64) -> bool {
        self.place & !(LARGE | SHARED | EXPANDABLE) == addr | ALLOCATED
    }

    /// Whether the block is free.
    #[must_use]
    #[inline(always)]
    pub(crate) fn is_free(&self) -> bool {
        self.place & STATE == FREE
    }

    /// Whether there is no memory behind the block.
    #[inline(always)]
    pub(super) fn is_hole(&self) -> bool {
        self.place & STATE == HOLE
    }

    /// The same, and it is no head of a range.
    #[inline(always)]
    pub(super) fn is_hole_of_some_size(&self) -> bool {
        self.is_hole() && self.units > 0
    }

    /// Whether the record describes a block.
    #[must_use]
    #[inline(always)]
    pub(crate) fn is_live(&self) -> bool {
        self.place & STATE != VACANT
    }

    /// State of a block that has memory.
    #[must_use]
    pub(crate) fn state(&self) -> BlockState {
        match self.place & STATE {
            ALLOCATED => BlockState::Allocated,
            PENDING => BlockState::PendingFree,
            _ => BlockState::Free,
        }
    }

    /// Whether other streams were announced to use the block.
    #[must_use]
    #[inline(always)]
    pub(crate) fn is_shared(&self) -> bool {
        self.place & SHARED != 0
    }

    /// Sets [`is_shared`](Self::is_shared).
    pub(super) fn set_shared(&mut self, shared: bool) {
        self.place = if shared { self.place | SHARED } else { self.place & !SHARED };
    }

    /// Bytes that the client asked for; 0 when free.
    #[must_use]
    pub(crate) fn requested(&self) -> u64 {
        if self.is_free() { 0 } else { u64::from(self.rest.right) << 32 | u64::from(self.rest.left) }
    }

    #[inline(always)]
    pub(super) fn links(&self) -> Links {
        debug_assert!(self.is_free(), "only free blocks are in an index");
        self.rest
    }

    /// Changes the upward link of a free block, or of no block.
    #[inline(always)]
    pub(super) fn set_up(&mut self, up: BlockIndex) {
        debug_assert!(self.is_free() || !self.is_live(), "only free blocks are in an index");
        self.rest.up = up;
    }

    #[inline(always)]
    pub(super) fn links_mut(&mut self) -> &mut Links {
        debug_assert!(self.is_free() || !self.is_live(), "only free blocks are in an index");
        &mut self.rest
    }

    /// The client has the block, which is in no index any more.
    #[inline(always)]
    pub(super) fn set_allocated(&mut self, requested: u64) {
        self.place = self.place & !STATE | ALLOCATED;
        // CAST: low half and high half.
        self.rest = Links { left: requested as u32, right: (requested >> 32) as u32, up: 0 };
    }

    /// The client let go, and `events` events are waited for.
    pub(super) fn set_pending(&mut self, events: u32) {
        self.place = self.place & !(STATE | SHARED) | PENDING;
        self.rest.up = events;
    }

    /// One of the events is over; says how many are left.
    pub(crate) fn event_done(&mut self) -> u32 {
        debug_assert_eq!(self.place & STATE, PENDING);
        self.rest.up -= 1;
        self.rest.up
    }

    #[inline(always)]
    pub(super) fn set_free(&mut self) {
        self.place = self.place & !STATE | FREE;
        self.rest = Links::ALONE;
    }

    /// The block, which is in no index any more, has no memory, or nobody may see it until it has more.
    pub(super) fn set_hole(&mut self) {
        self.place = self.place & !STATE | HOLE;
        self.rest = Links::ALONE;
    }
}

/// Records with stable indices; vacant ones are used again, the last first.
#[derive(Clone, Debug)]
pub(crate) struct BlockSlab {
    records: Vec<BlockRecord>,
    vacant: BlockIndex,
    /// By index, how many searches there were when the block became free; empty while nobody counts them.
    freed_at: Vec<u64>,
}

impl Default for BlockSlab {
    fn default() -> Self {
        let nothing = BlockRecord { place: !FLAGS | VACANT, units: 0, prev: NONE, next: NONE, rest: Links::ALONE };
        Self { records: vec![nothing], vacant: NONE, freed_at: Vec::new() }
    }
}

impl BlockSlab {
    /// Stores a record.
    ///
    /// # Panics
    /// With 2^32 live records.
    #[inline(always)]
    pub(crate) fn insert(&mut self, record: BlockRecord) -> BlockIndex {
        let index = self.vacant;
        if index == NONE {
            return self.push(record);
        }
        let slot = self.get_mut(index);
        let vacant = slot.next;
        *slot = record;
        self.vacant = vacant;
        index
    }

    #[cold]
    fn push(&mut self, record: BlockRecord) -> BlockIndex {
        let index = BlockIndex::try_from(self.records.len());
        self.records.push(record);
        index.expect("there should be fewer than 2^32 blocks")
    }

    /// All records to change, the vacant ones included.
    #[inline(always)]
    pub(super) fn records_mut(&mut self) -> &mut [BlockRecord] {
        &mut self.records
    }

    /// Makes a live record vacant.
    #[inline(always)]
    pub(crate) fn remove(&mut self, index: BlockIndex) {
        let next = std::mem::replace(&mut self.vacant, index);
        let record = self.get_mut(index);
        debug_assert!(record.is_live(), "a record should be removed once");
        record.place = VACANT;
        record.next = next;
    }

    /// A record, if the index is live.
    #[must_use]
    #[inline(always)]
    pub(crate) fn find(&self, index: BlockIndex) -> Option<&BlockRecord> {
        self.records.get(index as usize).filter(|record| record.is_live())
    }

    /// A record.
    ///
    /// # Panics
    /// When the index was never given out, which is a bug in the caller.
    #[must_use]
    #[inline(always)]
    pub(crate) fn get(&self, index: BlockIndex) -> &BlockRecord {
        &self.records[index as usize]
    }

    /// A record to change.
    ///
    /// # Panics
    /// When the index was never given out, which is a bug in the caller.
    #[inline(always)]
    pub(crate) fn get_mut(&mut self, index: BlockIndex) -> &mut BlockRecord {
        &mut self.records[index as usize]
    }

    /// The record of a block that the client holds and that begins at `addr`; `None` when there is none at the index.
    #[must_use]
    #[inline(always)]
    pub(crate) fn find_held(&self, index: BlockIndex, addr: u64) -> Option<&BlockRecord> {
        self.records.get(index as usize).filter(|record| record.is_held_at(addr))
    }

    /// All records, the vacant ones included.
    #[must_use]
    #[inline(always)]
    pub(crate) fn records(&self) -> &[BlockRecord] {
        &self.records
    }

    /// All live records with their indices, in index order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockIndex, &BlockRecord)> {
        let live = self.records.iter().enumerate().filter(|(_, record)| record.is_live());
        // CAST: `insert` keeps the length below 2^32.
        live.map(|(index, record)| (index as BlockIndex, record))
    }

    /// Searches so far when the block became free.
    #[must_use]
    pub(crate) fn freed_at(&self, index: BlockIndex) -> u64 {
        self.freed_at.get(index as usize).copied().unwrap_or(0)
    }

    /// Notes how many searches there were when the block became free. Zero is not noted: the count only grows.
    #[inline(always)]
    pub(crate) fn set_freed_at(&mut self, index: BlockIndex, searches: u64) {
        if searches > 0 {
            self.note_freed_at(index, searches);
        }
    }

    #[cold]
    fn note_freed_at(&mut self, index: BlockIndex, searches: u64) {
        if self.freed_at.len() <= index as usize {
            self.freed_at.resize(self.records.len(), 0);
        }
        self.freed_at[index as usize] = searches;
    }

    /// Makes two blocks neighbours, the first at the lower address; either may be [`NONE`].
    #[inline(always)]
    pub(super) fn link(&mut self, low: BlockIndex, high: BlockIndex) {
        self.get_mut(low).next = high;
        self.get_mut(high).prev = low;
    }

    /// Cuts the first `units` off a block for the client. Returns the new block at the front, which is allocated; the rest
    /// keeps its record.
    ///
    /// # Panics
    /// With 2^32 live records.
    #[inline(always)]
    pub(super) fn split_front(&mut self, index: BlockIndex, units: u32, requested: u64) -> BlockIndex {
        let rest = self.get_mut(index);
        debug_assert!(units > 0 && units < rest.units);
        let mut first = BlockRecord { units, ..*rest };
        rest.place += u64::from(units) * MIN_BLOCK;
        rest.units -= units;
        first.set_allocated(requested);
        let front = self.insert(first);
        self.link(first.prev, front);
        self.link(front, index);
        front
    }

    /// Cuts a block that is in no index behind its first `bytes`. Returns the rest, in the same state.
    ///
    /// # Panics
    /// With 2^32 live records.
    pub(super) fn cut(&mut self, index: BlockIndex, bytes: u64) -> BlockIndex {
        let front = self.get_mut(index);
        // CAST: less than the block has.
        let units = (bytes / MIN_BLOCK) as u32;
        debug_assert!(units > 0 && units < front.units);
        let rest = BlockRecord { place: front.place + bytes, units: front.units - units, ..*front };
        front.units = units;
        let behind = self.insert(rest);
        self.link(behind, rest.next);
        self.link(index, behind);
        behind
    }

    /// Takes a neighbour of the same segment into a block; its record becomes vacant.
    #[inline(always)]
    pub(super) fn absorb(&mut self, index: BlockIndex, neighbour: BlockIndex) {
        let gone = self.get(neighbour);
        let (units, prev, next) = (gone.units, gone.prev, gone.next);
        let block = self.get_mut(index);
        block.units += units;
        if next == index {
            block.place -= u64::from(units) * MIN_BLOCK;
            self.link(prev, index);
        } else {
            debug_assert_eq!(prev, index, "only neighbours are joined");
            self.link(index, next);
        }
        self.remove(neighbour);
    }
}

/// A record among all.
#[inline(always)]
pub(super) fn record(records: &[BlockRecord], index: BlockIndex) -> &BlockRecord {
    &records[index as usize]
}

/// A record among all, to change.
#[inline(always)]
pub(super) fn record_mut(records: &mut [BlockRecord], index: BlockIndex) -> &mut BlockRecord {
    &mut records[index as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks of the segment that contains `index`, in address order.
    fn layout(slab: &BlockSlab, mut index: BlockIndex) -> Vec<(u64, u64)> {
        while slab.get(index).prev() != NONE {
            index = slab.get(index).prev();
        }
        let mut out = Vec::new();
        while index != NONE {
            let block = slab.get(index);
            if block.next() != NONE {
                assert_eq!(slab.get(block.next()).prev(), index);
            }
            out.push((block.addr(), block.bytes()));
            index = block.next();
        }
        out
    }

    #[test]
    fn two_records_are_a_cache_line() {
        assert_eq!(size_of::<BlockRecord>(), 32);
    }

    #[test]
    fn splitting_keeps_the_segment_tiled() {
        let mut slab = BlockSlab::default();
        let whole = slab.insert(BlockRecord::segment(1 << 20, 100 * MIN_BLOCK, PoolKind::Small));
        assert!(!slab.get(whole).is_split());
        let mut cut = |units: u32, requested: u64| slab.split_front(whole, units, requested);
        let (first, middle) = (cut(10, (1 << 32) + 7), cut(20, 3));
        let at = |units: u64| (1 << 20) + units * MIN_BLOCK;
        let expected = [(at(0), 10 * MIN_BLOCK), (at(10), 20 * MIN_BLOCK), (at(30), 70 * MIN_BLOCK)];
        assert_eq!(layout(&slab, middle), expected);
        assert!(slab.get(whole).is_split() && slab.get(whole).is_free() && slab.get(middle).is_allocated());
        assert_eq!([first, middle, whole].map(|index| slab.get(index).requested()), [(1 << 32) + 7, 3, 0]);
        assert_eq!(slab.iter().count(), 3);
        assert!(slab.find(7).is_none() && slab.find(NONE).is_none());
    }

    #[test]
    fn a_record_keeps_its_address_in_every_state() {
        let mut record = BlockRecord::segment(0x7f12_3456_7800, 2 << 20, PoolKind::Large);
        record.set_allocated(99);
        record.set_shared(true);
        assert!(record.is_allocated() && record.is_shared() && record.requested() == 99);
        record.set_pending(2);
        assert!(!record.is_shared() && record.state() == BlockState::PendingFree && record.requested() == 99);
        assert_eq!((record.event_done(), record.event_done()), (1, 0));
        record.set_free();
        assert_eq!((record.addr(), record.bytes(), record.pool()), (0x7f12_3456_7800, 2 << 20, PoolKind::Large));
    }

    #[test]
    fn vacant_records_are_used_again() {
        let mut slab = BlockSlab::default();
        let record = BlockRecord::segment(512, 512, PoolKind::Small);
        let indices: Vec<BlockIndex> = (0..4).map(|_| slab.insert(record)).collect();
        for index in [indices[1], indices[3]] {
            slab.remove(index);
        }
        assert_eq!([slab.insert(record), slab.insert(record), slab.insert(record)], [indices[3], indices[1], 5]);
    }
}
