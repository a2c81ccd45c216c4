//! The addresses of plain memory (`cuMemAlloc`), as observed with an H200's driver.
//!
//! Memory is in chunks, which are multiples of 32 MiB. A new chunk is as high as it fits, directly below the existing ones: the
//! range of addresses is filled from the top downwards, and a released gap is filled from its top. A request starts at the bottom
//! of its chunk. The remainder serves later requests, which are smaller: they use the newest chunk that has room, at its lowest
//! address. A chunk is released with its last block.
//!
//! This decides between free blocks of one size: allocators take the one with the lowest address, so a replay needs segments in the
//! driver's order. Other memory of the driver in the range (modules, contexts of libraries) leaves unknown gaps, which are not
//! modelled.
//!
//! *Source.* Segments in recordings of PyTorch on an H200, driver 580.159, CUDA 13.0: the addresses of requests inside chunks, and
//! of chunks inside gaps, agree with this model except for some in the driver's own gaps.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

/// Chunks are multiples of this.
const GRANULE: u64 = 32 << 20;

/// A range of addresses for plain memory.
#[derive(Debug)]
pub(crate) struct PlainRange {
    granule: u64,
    /// Blocks are multiples of this.
    page: u64,
    /// Addresses without a chunk, by start: length.
    gaps: BTreeMap<u64, u64>,
    /// By start.
    chunks: BTreeMap<u64, Chunk>,
    /// Chunks by their largest free range, and of equal ones by age: number and start.
    by_room: BTreeMap<u64, BTreeSet<(u64, u64)>>,
    /// Blocks by start: length.
    blocks: BTreeMap<u64, u64>,
    held: u64,
    /// The number of the next chunk.
    next: u64,
}

#[derive(Debug)]
struct Chunk {
    number: u64,
    bytes: u64,
    /// Free ranges by start: length.
    free: BTreeMap<u64, u64>,
}

impl Chunk {
    /// Its largest free range.
    fn room(&self) -> u64 {
        self.free.values().copied().max().unwrap_or(0)
    }
}

impl PlainRange {
    /// `bytes` of addresses from `base` on. Blocks are multiples of `page`.
    pub(crate) fn new(base: u64, bytes: u64, page: u64) -> Self {
        let granule = GRANULE.next_multiple_of(page);
        let start = base.next_multiple_of(granule);
        Self {
            granule,
            page,
            gaps: BTreeMap::from([(start, (base + bytes - start) / granule * granule)]),
            chunks: BTreeMap::new(),
            by_room: BTreeMap::new(),
            blocks: BTreeMap::new(),
            held: 0,
            next: 0,
        }
    }

    /// Bytes in blocks.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held
    }

    /// Places a block; `None` when it needs more than `budget`, or there is no gap for it.
    ///
    /// O(log n) in chunks and gaps, and a step for each size of free range that is large enough (free ranges are mostly below 32
    /// MiB, in pages of 2) and, for a new chunk, each gap above its own.
    pub(crate) fn place(&mut self, bytes: u64, budget: u64) -> Option<u64> {
        let len = bytes.checked_next_multiple_of(self.page).filter(|len| *len > 0 && *len <= budget)?;
        let newest = self.by_room.range(len..).filter_map(|(_, chunks)| chunks.last()).max().copied();
        let start = match newest {
            Some((_, start)) => start,
            None => self.add_chunk(len)?,
        };
        let at = self.change(start, |chunk| {
            let (&at, &room) = chunk.free.iter().find(|(_, room)| **room >= len)?;
            chunk.free.remove(&at);
            if room > len {
                chunk.free.insert(at + len, room - len);
            }
            Some(at)
        })?;
        self.blocks.insert(at, len);
        self.held += len;
        Some(at)
    }

    /// Removes a block and returns its length; `None` when there is none at `addr`.
    pub(crate) fn free(&mut self, addr: u64) -> Option<u64> {
        let len = self.blocks.remove(&addr)?;
        self.held -= len;
        let (&start, _) = self.chunks.range(..=addr).next_back()?;
        let empty = self.change(start, |chunk| {
            let room = give_back(&mut chunk.free, addr, len);
            Some(room == chunk.bytes)
        })?;
        if empty {
            self.remove_chunk(start);
        }
        Some(len)
    }

    /// A chunk for a block, at the top of the highest gap that is large enough.
    fn add_chunk(&mut self, len: u64) -> Option<u64> {
        let bytes = len.checked_next_multiple_of(self.granule)?;
        let (&gap, &room) = self.gaps.iter().rev().find(|(_, room)| **room >= bytes)?;
        self.gaps.remove(&gap);
        let start = gap + room - bytes;
        if room > bytes {
            self.gaps.insert(gap, room - bytes);
        }
        let number = self.next;
        self.next += 1;
        self.chunks.insert(start, Chunk { number, bytes, free: BTreeMap::from([(start, bytes)]) });
        self.by_room.entry(bytes).or_default().insert((number, start));
        Some(start)
    }

    fn remove_chunk(&mut self, start: u64) {
        let Some(chunk) = self.chunks.remove(&start) else { return };
        self.forget_room(chunk.room(), (chunk.number, start));
        give_back(&mut self.gaps, start, chunk.bytes);
    }

    /// Changes the free ranges of a chunk, and keeps the index of chunks by their largest range current.
    fn change<T>(&mut self, start: u64, with: impl FnOnce(&mut Chunk) -> Option<T>) -> Option<T> {
        let chunk = self.chunks.get_mut(&start)?;
        let (number, before) = (chunk.number, chunk.room());
        let result = with(chunk);
        let after = chunk.room();
        if before != after {
            self.forget_room(before, (number, start));
            if after > 0 {
                self.by_room.entry(after).or_default().insert((number, start));
            }
        }
        result
    }

    fn forget_room(&mut self, room: u64, chunk: (u64, u64)) {
        if let Some(chunks) = self.by_room.get_mut(&room) {
            chunks.remove(&chunk);
            if chunks.is_empty() {
                self.by_room.remove(&room);
            }
        }
    }
}

/// Joins a range with adjacent free ones; returns the total length.
fn give_back(free: &mut BTreeMap<u64, u64>, mut start: u64, mut bytes: u64) -> u64 {
    if let Some((&before, &room)) = free.range(..start).next_back()
        && before + room == start
    {
        free.remove(&before);
        (start, bytes) = (before, bytes + room);
    }
    if let Some(room) = free.remove(&(start + bytes)) {
        bytes += room;
    }
    free.insert(start, bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BASE: u64 = 1 << 40;
    const TOP: u64 = BASE + (1 << 30);

    fn range() -> PlainRange {
        PlainRange::new(BASE, 1 << 30, 2 * MIB)
    }

    /// MiB below the top of the range.
    fn below_top(range: &mut PlainRange, mib: u64) -> u64 {
        (TOP - range.place(mib * MIB, u64::MAX).unwrap()) / MIB
    }

    #[test]
    fn chunks_fill_from_the_top_and_the_newest_serves_first() {
        // The segments of a ResNet-50, in the order in which PyTorch allocated them, and their distances.
        let mut range = range();
        let sizes = [98, 98, 198, 98, 26, 50, 98, 98, 26, 26];
        let at: Vec<u64> = sizes.iter().map(|mib| below_top(&mut range, *mib)).collect();
        assert_eq!(at, [128, 256, 480, 608, 510, 672, 800, 928, 830, 702]);
        assert_eq!(range.held_bytes(), sizes.iter().sum::<u64>() * MIB);
        // Segments of 2 MiB are adjacent.
        assert_eq!([2, 2, 2].map(|mib| below_top(&mut range, mib)), [804, 802, 676]);
    }

    #[test]
    fn a_gap_is_filled_from_its_top_and_the_highest_first() {
        let mut range = range();
        let at: Vec<u64> = (0..6).map(|_| range.place(128 * MIB, u64::MAX).unwrap()).collect();
        for index in [1, 3, 4] {
            assert_eq!(range.free(at[index]), Some(128 * MIB));
        }
        // Two neighbours are one gap of 256.
        assert_eq!(below_top(&mut range, 192), 576);
        assert_eq!(below_top(&mut range, 64), 192);
        assert_eq!(below_top(&mut range, 96), 864);
        assert_eq!([64, 64].map(|mib| below_top(&mut range, mib)), [256, 640]);
    }

    #[test]
    fn a_chunk_goes_back_with_its_last_block() {
        let mut range = range();
        let first = range.place(20 * MIB, u64::MAX).unwrap();
        let second = range.place(2 * MIB, u64::MAX).unwrap();
        assert_eq!(second, first + 20 * MIB);
        assert_eq!((range.free(first), range.free(first)), (Some(20 * MIB), None));
        // Freed memory in the chunk is used again before another chunk is made, and joined.
        assert_eq!(range.place(16 * MIB, u64::MAX), Some(first));
        assert_eq!((range.free(first), range.free(second)), (Some(16 * MIB), Some(2 * MIB)));
        assert_eq!((range.chunks.len(), range.held_bytes()), (0, 0));
        assert_eq!(below_top(&mut range, 1000), 1024);
    }

    #[test]
    fn what_the_budget_or_the_range_has_no_room_for_is_refused() {
        let mut range = range();
        assert_eq!(
            (range.place(3 * MIB, 3 * MIB), range.place(0, MIB), range.place(u64::MAX, u64::MAX)),
            (None, None, None)
        );
        assert!(range.place(3 * MIB, 4 * MIB).is_some());
        assert_eq!(range.place(1 << 30, u64::MAX), None);
        assert_eq!(range.held_bytes(), 4 * MIB);
    }

    #[test]
    fn random_requests_never_overlap_and_all_goes_back() {
        let mut range = range();
        let mut live: Vec<(u64, u64)> = Vec::new();
        let mut state = 7_u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..4000 {
            if next(3) > 0 || live.is_empty() {
                let bytes = [MIB, 2 * MIB, 14 * MIB, 20 * MIB, 50 * MIB, 98 * MIB][next(6) as usize];
                let Some(at) = range.place(bytes, u64::MAX) else { continue };
                let len = bytes.next_multiple_of(2 * MIB);
                assert!(at >= BASE && at + len <= TOP && at.is_multiple_of(2 * MIB));
                assert!(live.iter().all(|(other, size)| at + len <= *other || other + size <= at));
                live.push((at, len));
            } else {
                let (at, len) = live.swap_remove(next(live.len() as u64) as usize);
                assert_eq!(range.free(at), Some(len));
            }
            assert_eq!(range.held_bytes(), live.iter().map(|(_, len)| len).sum::<u64>());
            let listed: usize = range.by_room.values().map(BTreeSet::len).sum();
            assert_eq!(listed, range.chunks.values().filter(|chunk| chunk.room() > 0).count());
        }
        for (at, _) in live {
            range.free(at);
        }
        assert_eq!((range.chunks.len(), range.gaps.len(), range.by_room.len()), (0, 1, 0));
    }
}
