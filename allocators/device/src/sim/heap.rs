//! Addresses of the simulated device: blocks packed into granules that are reserved or not.
//!
//! Plain memory is one heap with 2 MiB granules that are released as soon as they are empty; a stream-ordered pool is one heap with
//! 32 MiB granules that stay until a synchronise releases them.
#![forbid(unsafe_code)]

use super::timeline::{Mark, Order};
use std::collections::{BTreeMap, BTreeSet};

/// The point of a stream at which memory was freed, while other streams may have to wait for it.
type FreedAt = Option<Mark>;

/// A free range that begins at its key.
#[derive(Clone, Copy, Debug)]
struct Free {
    len: u64,
    freed: FreedAt,
    /// Orders equal ranges of [`Packing::Within`] by age; 0 elsewhere.
    since: u64,
}

/// A range of addresses, split into free ranges and blocks. Offsets are relative to `base`.
#[derive(Debug)]
pub(super) struct Heap {
    base: u64,
    #[cfg(test)]
    limit: u64,
    granule: u64,
    align: u64,
    packing: Packing,
    /// Free ranges by offset. Adjacent ranges freed at the same mark are one, unless the packing keeps them separate.
    free: BTreeMap<u64, Free>,
    /// Free ranges by (length, `since`, offset), which is the order of best fit.
    by_room: BTreeSet<(u64, u64, u64)>,
    /// Number of free ranges created.
    ranges: u64,
    /// Free ranges that are marked with the time of their free.
    marked: usize,
    /// Blocks by offset: length.
    blocks: BTreeMap<u64, u64>,
    /// Bytes in blocks, for each reserved granule.
    held: BTreeMap<u64, u64>,
    /// Reserved granules without a block.
    empty: BTreeSet<u64>,
    /// Number of reserved granules that are not full.
    roomy: u64,
}

/// The placement of blocks in granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// Anywhere, across granules too (a CUDA memory pool).
    Across,
    /// Inside one granule, so blocks must not be larger (plain memory's small blocks). A free range ends where its granule does,
    /// and of equal ones the oldest is taken: so every small block of 14 recorded programs has the address that the driver returned
    /// (an H100's addresses, driver 580.159).
    Within,
}

/// A placed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) addr: u64,
    /// Granules that were reserved for it.
    pub(super) new_granules: u64,
    /// The allocating stream must wait for this point first.
    pub(super) wait_for: FreedAt,
}

impl Heap {
    pub(super) fn new(base: u64, limit: u64, granule: u64, align: u64, packing: Packing) -> Self {
        let mut heap = Self {
            base,
            #[cfg(test)]
            limit,
            granule,
            align,
            packing,
            free: BTreeMap::new(),
            by_room: BTreeSet::new(),
            ranges: 0,
            marked: 0,
            blocks: BTreeMap::new(),
            held: BTreeMap::new(),
            empty: BTreeSet::new(),
            roomy: 0,
        };
        heap.add_range(0, limit, None);
        heap
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held.len() as u64 * self.granule
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    fn granules(&self, offset: u64, len: u64) -> impl Iterator<Item = u64> + use<> {
        offset / self.granule..(offset + len).div_ceil(self.granule)
    }

    fn missing(&self, offset: u64, len: u64) -> u64 {
        let (first, end) = (offset / self.granule, (offset + len).div_ceil(self.granule));
        end - first - self.held.range(first..end).count() as u64
    }

    fn add_range(&mut self, start: u64, len: u64, freed: FreedAt) {
        self.ranges += 1;
        let since = if self.packing == Packing::Within { self.ranges } else { 0 };
        self.free.insert(start, Free { len, freed, since });
        self.by_room.insert((len, since, start));
        self.marked += usize::from(freed.is_some());
    }

    fn take_range(&mut self, start: u64) -> Option<(u64, FreedAt)> {
        let Free { len, freed, since } = self.free.remove(&start)?;
        self.by_room.remove(&(len, since, start));
        self.marked -= usize::from(freed.is_some());
        Some((len, freed))
    }

    /// Places `bytes`, reserving at most `budget` bytes of new granules; `None` when there is no room.
    ///
    /// Prefers reserved memory, then memory that needs no wait, then the smallest free range; ties go to the oldest range inside
    /// granules, else to the lowest address. `order` returns whether memory freed at some point may be used, and whether that needs
    /// a wait.
    ///
    /// O(log n) in the free ranges where the best one is known when it is found, as in a heap without holes in reserved granules or
    /// with one that fits; otherwise every range that is large enough is visited.
    pub(super) fn place(&mut self, bytes: u64, budget: u64, order: impl Fn(Mark) -> Order) -> Option<Placement> {
        let len = bytes.checked_next_multiple_of(self.align)?;
        let mut best: Option<(_, u64, FreedAt)> = None;
        // No range needs fewer new granules than this. Ranges are in the order of best fit, so the first that needs no more, and no
        // wait, is the best.
        let fewest = len.div_ceil(self.granule).saturating_sub(self.roomy);
        for &(room, since, start) in self.by_room.range((len, 0, 0)..) {
            let freed = self.free[&start].freed;
            let wait = match freed.map(&order) {
                None | Some(Order::Usable) => None,
                Some(Order::AfterWait) => freed,
                Some(Order::Unusable) => continue,
            };
            for at in self.positions(start, room, len) {
                let candidate = (self.missing(at, len), wait.is_some(), room, since, at);
                if best.is_none_or(|(best, ..)| candidate < best) {
                    best = Some((candidate, start, wait));
                }
            }
            if best.is_some_and(|((missing, waits, ..), ..)| missing == fewest && !waits) {
                break;
            }
        }
        let ((missing, _, room, _, at), start, wait_for) = best?;
        if missing * self.granule > budget {
            return None;
        }
        let (_, freed) = self.take_range(start)?;
        if at > start {
            self.add_range(start, at - start, freed);
        }
        let end = start + room;
        // Of a run of unreserved granules, this one is reserved from now on.
        let cut = if self.packing == Packing::Within { end.min((at / self.granule + 1) * self.granule) } else { end };
        for (from, to) in [(at + len, cut), (cut, end)] {
            if to > from {
                self.add_range(from, to - from, freed);
            }
        }
        self.blocks.insert(at, len);
        self.add_to_granules(at, len);
        Some(Placement { addr: self.base + at, new_granules: missing, wait_for })
    }

    /// Candidate positions of a block of `len` in a free range: its start and, if that needs new granules and blocks may cross
    /// them, the later granules that are reserved.
    fn positions(&self, start: u64, room: u64, len: u64) -> impl Iterator<Item = u64> {
        let (granule, end) = (self.granule, start + room);
        let next = start.next_multiple_of(granule);
        let grows = self.packing == Packing::Across && self.missing(start, len) > 0;
        let granules = grows.then(|| self.held.range(next / granule..end.div_ceil(granule)));
        let further = granules.into_iter().flatten().map(move |(index, _)| index * granule);
        std::iter::once(start).chain(further.filter(move |at| *at > start && at + len <= end))
    }

    fn add_to_granules(&mut self, start: u64, len: u64) {
        for granule in self.granules(start, len) {
            let before = self.held.get(&granule).copied();
            let used = before.unwrap_or(0) + overlap(granule * self.granule, self.granule, start, len);
            self.roomy -= u64::from(before.is_some());
            self.roomy += u64::from(used < self.granule);
            self.empty.remove(&granule);
            self.held.insert(granule, used);
        }
    }

    /// Frees a block; `None` when there is none at `addr`.
    pub(super) fn free(&mut self, addr: u64, freed: FreedAt) -> Option<u64> {
        let start = addr.checked_sub(self.base)?;
        let len = self.blocks.remove(&start)?;
        for granule in self.granules(start, len) {
            let used = self.held.get_mut(&granule).expect("a block's granules should be held");
            self.roomy += u64::from(*used == self.granule);
            *used -= overlap(granule * self.granule, self.granule, start, len);
            if *used == 0 {
                self.empty.insert(granule);
            }
        }
        self.insert_free(start, len, freed);
        Some(len)
    }

    fn insert_free(&mut self, mut start: u64, mut len: u64, mut freed: FreedAt) {
        // Ranges freed on one stream join and keep the later point; ranges of two streams stay separate.
        let joins = |a: FreedAt, b: FreedAt| match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => a.stream == b.stream,
            _ => false,
        };
        let later =
            |a: FreedAt, b: FreedAt| if a.map(|mark| mark.sequence) >= b.map(|mark| mark.sequence) { a } else { b };
        if let Some((&before, &Free { len: room, freed: at, .. })) = self.free.range(..start).next_back()
            && before + room == start
            && joins(at, freed)
            && self.is_one(start)
        {
            self.take_range(before);
            (start, len, freed) = (before, len + room, later(at, freed));
        }
        if let Some(&Free { len: room, freed: at, .. }) = self.free.get(&(start + len))
            && joins(at, freed)
            && self.is_one(start + len)
        {
            self.take_range(start + len);
            (len, freed) = (len + room, later(at, freed));
        }
        self.add_range(start, len, freed);
    }

    /// Whether a free range may cross this offset: everywhere except at the end of a reserved granule, with blocks inside one.
    fn is_one(&self, offset: u64) -> bool {
        let (after, inside) = (offset / self.granule, !offset.is_multiple_of(self.granule));
        let is_held = |granule: u64| self.held.contains_key(&granule);
        self.packing == Packing::Across || inside || !(is_held(after) || is_held(after - 1))
    }

    /// Forgets which stream freed a range once that point has passed, so that neighbours join.
    pub(super) fn settle(&mut self, passed: impl Fn(Mark) -> bool) {
        if self.marked == 0 || self.free.values().all(|range| range.freed.is_none_or(|mark| !passed(mark))) {
            return;
        }
        self.by_room.clear();
        self.marked = 0;
        for (start, Free { len, freed, .. }) in std::mem::take(&mut self.free) {
            self.insert_free(start, len, freed.filter(|&mark| !passed(mark)));
        }
    }

    /// Releases empty granules, highest address first, as long as at least `keep` bytes stay reserved (an H200's pool trimmed from
    /// 352 to 176 MiB keeps 192); memory whose free has not passed stays. Returns the number of released granules.
    pub(super) fn release(&mut self, keep: u64) -> u64 {
        let mut released = 0;
        let empty: Vec<u64> = self.empty.iter().rev().copied().collect();
        for granule in empty {
            if self.held_bytes() - self.granule < keep {
                break;
            }
            let (start, end) = (granule * self.granule, (granule + 1) * self.granule);
            let pending = self.free.range(..end).rev().take_while(|(offset, range)| **offset + range.len > start);
            if pending.into_iter().any(|(_, range)| range.freed.is_some()) {
                continue;
            }
            self.held.remove(&granule);
            self.empty.remove(&granule);
            self.roomy -= 1;
            released += 1;
            if self.packing == Packing::Within
                && let Some((len, freed)) = self.take_range(start)
            {
                // It joins with adjacent unreserved granules.
                self.insert_free(start, len, freed);
            }
        }
        released
    }

    /// The block that contains `addr`: its first address and length.
    #[cfg(test)]
    pub(super) fn block_at(&self, addr: u64) -> Option<(u64, u64)> {
        let offset = addr.checked_sub(self.base)?;
        let (&start, &len) = self.blocks.range(..=offset).next_back()?;
        (offset < start + len).then_some((self.base + start, len))
    }

    /// Panics when the ranges do not tile the heap or a count is off.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut ranges: Vec<(u64, u64)> = self.free.iter().map(|(start, range)| (*start, range.len)).collect();
        ranges.extend(self.blocks.iter().map(|(start, len)| (*start, *len)));
        ranges.sort_unstable();
        let end = ranges.iter().fold(0, |at, (start, len)| {
            assert_eq!(at, *start, "ranges should tile the heap");
            at + len
        });
        assert_eq!(end, self.limit);
        let mut used: BTreeMap<u64, u64> = self.held.keys().map(|granule| (*granule, 0)).collect();
        for (&start, &len) in &self.blocks {
            for granule in self.granules(start, len) {
                *used.get_mut(&granule).expect("a block lies in held granules") +=
                    overlap(granule * self.granule, self.granule, start, len);
            }
        }
        assert_eq!(used, self.held);
        let by_room: BTreeSet<(u64, u64, u64)> =
            self.free.iter().map(|(start, range)| (range.len, range.since, *start)).collect();
        assert_eq!(by_room, self.by_room);
        assert_eq!(self.marked, self.free.values().filter(|range| range.freed.is_some()).count());
        if self.packing == Packing::Within {
            for (start, range) in &self.free {
                let one = self.granules(*start, range.len).count() == 1;
                let separate = one
                    || self
                        .held
                        .range(start / self.granule..(start + range.len).div_ceil(self.granule))
                        .next()
                        .is_none();
                assert!(separate, "a free range ends where its granule does");
            }
        }
        let empty: BTreeSet<u64> = used.iter().filter(|(_, used)| **used == 0).map(|(granule, _)| *granule).collect();
        assert_eq!(empty, self.empty);
        assert_eq!(self.roomy, used.values().filter(|used| **used < self.granule).count() as u64);
    }
}

fn overlap(a: u64, a_len: u64, b: u64, b_len: u64) -> u64 {
    (a + a_len).min(b + b_len).saturating_sub(a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn usable(_: Mark) -> Order {
        Order::Usable
    }

    #[test]
    fn grows_by_the_shortfall_like_a_driver_pool() {
        // Sizes and reserved bytes of an H200's pool: 33 MiB after 27.07 MiB in use needs one more granule, 64 MiB then two, 100
        // MiB then four.
        let mut heap = Heap::new(1 << 32, 1 << 40, 32 * MIB, 512, Packing::Across);
        let mut blocks = Vec::new();
        for bytes in [28_383_744, 33 * MIB, 64 * MIB, 100 * MIB] {
            heap.place(bytes, u64::MAX, usable).unwrap();
            blocks.push(heap.held_bytes() / MIB);
        }
        assert_eq!(blocks, [32, 64, 128, 256]);
        heap.check();
    }

    #[test]
    fn release_keeps_granules_in_use() {
        let mut heap = Heap::new(1 << 32, 1 << 40, 2 * MIB, 512, Packing::Across);
        let keep = heap.place(1000, u64::MAX, usable).unwrap();
        let block = heap.place(5 * MIB, u64::MAX, usable).unwrap();
        assert_eq!(heap.held_bytes(), 6 * MIB);
        heap.free(block.addr, None).unwrap();
        assert_eq!(heap.release(0), 2);
        heap.free(keep.addr, None).unwrap();
        assert_eq!(heap.release(4 * MIB), 0);
        assert_eq!((heap.release(0), heap.held_bytes()), (1, 0));
        heap.check();
    }

    #[test]
    fn memory_whose_free_has_not_passed_does_not_go_back() {
        let mut heap = Heap::new(1 << 32, 1 << 40, 2 * MIB, 512, Packing::Across);
        let block = heap.place(2 * MIB, u64::MAX, usable).unwrap();
        let mark = Mark { stream: 3, sequence: 9, time_ns: 70 };
        heap.free(block.addr, Some(mark)).unwrap();
        assert_eq!((heap.release(0), heap.held_bytes()), (0, 2 * MIB));
        heap.settle(|_| true);
        assert_eq!((heap.release(0), heap.held_bytes()), (1, 0));
        heap.check();
    }

    #[test]
    fn memory_of_another_stream_follows_the_order() {
        let mut heap = Heap::new(1 << 32, 1 << 40, 2 * MIB, 512, Packing::Across);
        let block = heap.place(2 * MIB, u64::MAX, usable).unwrap();
        let mark = Mark { stream: 3, sequence: 9, time_ns: 70 };
        heap.free(block.addr, Some(mark)).unwrap();
        let other = heap.place(2 * MIB, u64::MAX, |_| Order::Unusable).unwrap();
        assert_ne!(other.addr, block.addr);
        let waits = heap.place(2 * MIB, u64::MAX, |_| Order::AfterWait).unwrap();
        assert_eq!((waits.addr, waits.wait_for), (block.addr, Some(mark)));
        heap.check();
    }

    #[test]
    fn small_blocks_of_plain_memory_do_not_cross_pages() {
        let mut heap = Heap::new(1 << 32, 1 << 40, 2 * MIB, 512, Packing::Within);
        let allocate = |heap: &mut Heap, bytes| {
            let placed = heap.place(bytes, u64::MAX, usable).unwrap();
            heap.check();
            (placed.addr - (1 << 32), placed.new_granules)
        };
        assert_eq!(allocate(&mut heap, 1_500_000), (0, 1));
        assert_eq!(allocate(&mut heap, 1_500_000), (2 * MIB, 1));
        assert_eq!(allocate(&mut heap, 512), (1_500_160, 0));
        assert_eq!(allocate(&mut heap, 2 * MIB), (4 * MIB, 1));
    }

    #[test]
    fn free_range_ends_with_its_page_and_the_oldest_is_taken() {
        let mut heap = Heap::new(1 << 32, 1 << 40, 2 * MIB, 512, Packing::Within);
        let allocate = |heap: &mut Heap, bytes| heap.place(bytes, u64::MAX, usable).unwrap().addr - (1 << 32);
        // The parameters of a network and its data, as an H100 placed them: the remainder of the second page is smaller than that
        // of the first, so it is filled first.
        assert_eq!(allocate(&mut heap, 916_480), 0);
        assert_eq!(allocate(&mut heap, 1_568_000), 2 * MIB);
        assert_eq!(allocate(&mut heap, 2_000), 2 * MIB + 1_568_256);
        assert_eq!(allocate(&mut heap, 602_112), 916_480);
        heap.check();
        // Two holes of one size: the one that was free first is taken, though its address is the higher one.
        let mut heap = Heap::new(1 << 32, 1 << 40, 2 * MIB, 512, Packing::Within);
        let blocks: Vec<u64> = (0..4).map(|_| allocate(&mut heap, 4096)).collect();
        for at in [blocks[2], blocks[0]] {
            heap.free((1 << 32) + at, None).unwrap();
        }
        assert_eq!([allocate(&mut heap, 4096), allocate(&mut heap, 4096)], [blocks[2], blocks[0]]);
        // A released page joins those behind it that were never reserved.
        for at in blocks {
            heap.free((1 << 32) + at, None).unwrap();
        }
        assert_eq!((heap.release(0), heap.free.len()), (1, 1));
        heap.check();
    }

    #[test]
    fn a_budget_is_kept() {
        let mut heap = Heap::new(1 << 32, 1 << 40, 2 * MIB, 512, Packing::Across);
        assert!(heap.place(3 * MIB, 2 * MIB, usable).is_none());
        assert!(heap.place(2 * MIB, 2 * MIB, usable).is_some());
        assert_eq!(heap.block_at((1 << 32) + 5), Some((1 << 32, 2 * MIB)));
        assert_eq!(heap.block_at((1 << 32) + 2 * MIB), None);
        heap.check();
    }

    /// The expected result of `place`: every range and every position, without an index.
    fn search(heap: &Heap, bytes: u64, order: impl Fn(Mark) -> Order) -> Option<(u64, u64)> {
        let len = bytes.next_multiple_of(heap.align);
        let ranges = heap.free.iter().filter(|(_, range)| range.len >= len);
        let usable = ranges.filter_map(|(&start, &range)| match range.freed.map(&order) {
            None | Some(Order::Usable) => Some((start, range, false)),
            Some(Order::AfterWait) => Some((start, range, true)),
            Some(Order::Unusable) => None,
        });
        let all = usable.flat_map(|(start, Free { len: room, since, .. }, waits)| {
            heap.positions(start, room, len).map(move |at| (heap.missing(at, len), waits, room, since, at))
        });
        all.min().map(|(missing, .., at)| (at, missing))
    }

    #[test]
    fn the_index_finds_what_a_search_of_everything_finds() {
        let heaps =
            [(2 * MIB, 512, Packing::Within), (2 * MIB, 2 * MIB, Packing::Across), (32 * MIB, 512, Packing::Across)];
        for (granule, align, packing) in heaps {
            let mut heap = Heap::new(1 << 32, 1 << 40, granule, align, packing);
            let (mut live, mut random, mut time) = (Vec::new(), 88_172_645_463_325_252_u64, 0);
            for step in 0..4_000 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let largest = if packing == Packing::Within { granule } else { 3 * granule };
                let bytes = 1 + (random >> 20) % if random & 1 == 0 { largest } else { 64 << 10 };
                let stream = random >> 3 & 1;
                let order = |mark: Mark| match mark.stream {
                    2 => Order::AfterWait,
                    other if other == stream => Order::Usable,
                    _ => Order::Unusable,
                };
                if random & 6 != 0 && live.len() < 300 || live.is_empty() {
                    let best = search(&heap, bytes, order);
                    let placed = heap.place(bytes, u64::MAX, order).unwrap();
                    assert_eq!(Some((placed.addr - (1 << 32), placed.new_granules)), best, "step {step}");
                    live.push(placed.addr);
                } else {
                    let addr = live.swap_remove((random >> 9) as usize % live.len());
                    time += 1;
                    let mark = Mark { stream: random >> 5 & 3, sequence: time, time_ns: time };
                    heap.free(addr, (random & 1 << 40 != 0).then_some(mark)).unwrap();
                }
                if step % 100 == 99 {
                    heap.settle(|mark| mark.time_ns + 30 < time);
                    heap.release(if random & 1 == 0 { 0 } else { 20 * granule });
                    heap.check();
                }
            }
        }
    }
}
