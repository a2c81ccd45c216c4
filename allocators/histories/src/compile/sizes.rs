//! The sizes of blocks that were active before recording started.
//!
//! A block has the size of its rounded request, except in the large pool, where a request gets a full free block that is up to 1
//! MiB larger. Memory behind such a block may thus be free or part of it, and three rules of the allocator decide:
//!
//! - No free block of the large pool is as small as 1 MiB, so a gap of that size is part of the block before it.
//! - A free block is allocated from its front. The first block in a gap starts where the one before it ends.
//! - A request gets the best fit. A gap that would have fitted better than the block that it got was smaller.
//!
//! So the recorded placements are followed, and an extra that they contradict grows to the smallest one that they allow. As that
//! may contradict an earlier placement, they are followed again until nothing changes.

use super::pools::PoolNames;
use super::timeline::{Operation, Placements, Timeline};
use crate::history::{Beginning, Kind, Op, SegmentEvent, StartBlock, StartSegment};
use crate::memory::Rules;
use crate::steps;
use std::collections::{BTreeMap, BTreeSet};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::contract::PoolKind;
use vramlab_policies::policy::size::torch::{MIN_BLOCK, SMALL_MAX, pool_of, round_size};

/// Number of passes over the placements. In each pass only the changes of the last one matter.
const ROUNDS: u32 = 16;

/// A block followed by a gap that may be part of it.
#[derive(Clone, Copy, Debug)]
struct OpenEnd {
    /// The block.
    addr: u64,
    /// Its end if it has the size of its rounded request.
    base: u64,
    /// Bytes of the gap that are part of it.
    extra: u64,
    /// Whether a placement has shown that.
    shown: bool,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    end: u64,
    stream: u32,
    pool: PoolKind,
    /// The operation that allocated it.
    made: u32,
    /// Whether only requests of a private pool are served from it.
    private: bool,
}

/// A free block.
#[derive(Clone, Copy, Debug)]
struct Free {
    end: u64,
    /// The block before it, if that block's end is unknown.
    open_end: Option<usize>,
}

/// Blocks of every segment while the recorded placements are followed.
#[derive(Debug)]
struct Layout<'a> {
    settings: &'a CachingSettings,
    rules: Rules,
    /// The known private pools.
    names: Option<&'a PoolNames>,
    open_ends: &'a mut [OpenEnd],
    segments: BTreeMap<u64, Segment>,
    /// By first address.
    free: BTreeMap<u64, Free>,
    /// End of each active block, by first address.
    used: BTreeMap<u64, u64>,
    /// Free blocks with unknown start, in best-fit order: stream, size, address.
    open: BTreeSet<(u32, u64, u64)>,
    /// Number of allocations so far.
    allocations: u64,
    /// Whether an extra grew.
    changed: bool,
    /// Extras that may still grow, which bounds the time for every recording.
    budget: u64,
    /// The first allocation, from 1, outside every segment.
    outside: Option<u64>,
}

/// Sets the size of each block of `beginning` and counts those that remain unknown.
///
/// # Errors
/// Why the blocks contradict the segments.
pub(super) fn find(
    timeline: &Timeline,
    beginning: &mut Beginning,
    names: Option<&PoolNames>,
    settings: &CachingSettings,
) -> Result<(), String> {
    let mut open_ends = place_blocks(&beginning.segments, &mut beginning.blocks, settings)?;
    for _ in 0..ROUNDS {
        let budget = 8 * (timeline.ops.len() + open_ends.len()) as u64;
        let mut layout = Layout::new(settings, names, &mut open_ends, beginning, budget);
        timeline.follow(beginning, &mut layout);
        if let Some(number) = layout.outside {
            return Err(format!("allocation {number} is outside every known segment"));
        }
        if !layout.changed {
            break;
        }
    }
    let extras: BTreeMap<u64, u64> =
        open_ends.iter().map(|open_end| (open_end.addr, open_end.base + open_end.extra)).collect();
    for block in &mut beginning.blocks {
        if let Some(end) = extras.get(&block.addr) {
            block.bytes = Some(end - block.addr);
        }
    }
    beginning.undetermined = open_ends.iter().filter(|open_end| !open_end.shown).count() as u64;
    Ok(())
}

/// Sets the sizes that do not depend on later placements; other ends stay unknown.
fn place_blocks(
    segments: &[StartSegment],
    blocks: &mut [StartBlock],
    settings: &CachingSettings,
) -> Result<Vec<OpenEnd>, String> {
    let mut open_ends = Vec::new();
    let mut at = 0;
    let mut last = 0;
    for segment in segments {
        let end = segment.addr + segment.bytes;
        if segment.addr < last {
            return Err(format!("two segments overlap at {:#x}", segment.addr));
        }
        last = end;
        while let Some(block) = blocks.get(at).copied().filter(|block| block.addr < end) {
            let next = blocks.get(at + 1).map_or(end, |next| next.addr.min(end));
            let rounded = round_size(block.requested, &settings.roundup_power2_divisions);
            let base = block.addr + rounded;
            if block.addr < segment.addr {
                return Err(outside(block.addr));
            }
            if base > next || block.bytes.is_some_and(|bytes| block.addr + bytes > next) {
                return Err(format!("the block of {} bytes at {:#x} does not fit", block.requested, block.addr));
            }
            let gap = next - base;
            let size = match (segment.pool, block.bytes) {
                (_, Some(bytes)) => bytes,
                (PoolKind::Small, _) => rounded,
                _ if gap <= SMALL_MAX || rounded >= settings.max_split_size.unwrap_or(u64::MAX) => rounded + gap,
                _ => {
                    open_ends.push(OpenEnd { addr: block.addr, base, extra: 0, shown: false });
                    rounded
                }
            };
            blocks[at].bytes = Some(size);
            blocks[at].stream = segment.stream;
            at += 1;
        }
    }
    match blocks.get(at) {
        Some(block) => Err(outside(block.addr)),
        None => Ok(open_ends),
    }
}

fn outside(addr: u64) -> String {
    format!("the block at {addr:#x} is outside every known segment")
}

impl<'a> Layout<'a> {
    fn new(
        settings: &'a CachingSettings,
        names: Option<&'a PoolNames>,
        open_ends: &'a mut [OpenEnd],
        beginning: &Beginning,
        budget: u64,
    ) -> Self {
        let mut layout = Self {
            settings,
            rules: Rules::pytorch(settings),
            names,
            open_ends,
            segments: BTreeMap::new(),
            free: BTreeMap::new(),
            used: BTreeMap::new(),
            open: BTreeSet::new(),
            allocations: 0,
            changed: false,
            budget,
            outside: None,
        };
        let mut blocks = beginning.blocks.iter().peekable();
        let mut number = 0;
        for segment in &beginning.segments {
            let private = segment.private > 0;
            let (end, made) = (segment.addr + segment.bytes, u32::MAX);
            layout
                .add_segment(segment.addr, Segment { end, stream: segment.stream, pool: segment.pool, made, private });
            layout.free.remove(&segment.addr);
            let (mut at, mut open_end) = (segment.addr, None);
            while let Some(block) = blocks.next_if(|block| block.addr < end) {
                if block.addr > at {
                    layout.add_free(at, Free { end: block.addr, open_end });
                }
                at = block.addr + block.bytes.unwrap_or(block.requested);
                open_end = None;
                if let Some(known) = layout.open_ends.get(number).filter(|open_end| open_end.addr == block.addr) {
                    at = known.base + known.extra;
                    open_end = Some(number).filter(|_| !known.shown && !private);
                    number += 1;
                }
                layout.used.insert(block.addr, at);
            }
            if end > at {
                layout.add_free(at, Free { end, open_end });
            }
        }
        layout
    }

    fn add_segment(&mut self, addr: u64, segment: Segment) {
        self.segments.insert(addr, segment);
        self.free.insert(addr, Free { end: segment.end, open_end: None });
    }

    fn segment_event(&mut self, event: &SegmentEvent, stream: u32, private: bool) {
        let (addr, end) = (event.addr, event.addr + event.bytes);
        let lost: Vec<u64> = self.free.range(addr..end).map(|(start, _)| *start).collect();
        for start in lost {
            self.remove_free(start);
        }
        let lost: Vec<u64> = self.used.range(addr..end).map(|(start, _)| *start).collect();
        for start in lost {
            self.used.remove(&start);
        }
        self.segments.remove(&addr);
        if !event.released {
            self.add_segment(addr, Segment { end, stream, pool: event.pool(), made: event.op, private });
        }
    }

    fn segment_of(&self, addr: u64) -> Option<(u64, Segment)> {
        let (start, segment) = self.segments.range(..=addr).next_back()?;
        (addr < segment.end).then_some((*start, *segment))
    }

    fn add_free(&mut self, start: u64, free: Free) {
        if free.open_end.is_some()
            && let Some((_, segment)) = self.segment_of(start)
        {
            self.open.insert((segment.stream, free.end - start, start));
        }
        self.free.insert(start, free);
    }

    fn remove_free(&mut self, start: u64) -> Option<Free> {
        let free = self.free.remove(&start)?;
        if free.open_end.is_some()
            && let Some((_, segment)) = self.segment_of(start)
        {
            self.open.remove(&(segment.stream, free.end - start, start));
        }
        Some(free)
    }

    /// A block was placed at `addr`.
    fn place(&mut self, number: u32, allocation: u64, addr: u64, op: Op) {
        let Some((_, segment)) = self.segment_of(addr) else {
            self.outside.get_or_insert(allocation);
            return;
        };
        let Some((start, free)) = self.free.range(..=addr).next_back().map(|(start, free)| (*start, *free)) else {
            return;
        };
        if free.end <= addr {
            return;
        }
        let bytes = free.end - addr;
        let chosen = if segment.made == number { (u64::MAX, addr) } else { (bytes, addr) };
        self.remove_free(start);
        let mut front = None;
        match free.open_end.filter(|open_end| addr - self.open_ends[*open_end].base <= SMALL_MAX) {
            Some(open_end) => self.show(open_end, addr),
            // Another allocator placed it there.
            None if start < addr => front = Some(Free { end: addr, ..free }),
            None => {}
        }
        if !segment.private {
            self.search(op.stream(), op.value, chosen);
        }
        if let Some(front) = front {
            self.add_free(start, front);
        }
        let rounded = self.rounded(op.value);
        let split = bytes >= rounded && self.rules.cuts(segment.pool == PoolKind::Small, rounded, bytes);
        let end = if split { addr + rounded } else { free.end };
        self.used.insert(addr, end);
        if end < free.end {
            self.add_free(end, Free { end: free.end, open_end: None });
        }
    }

    fn rounded(&self, bytes: u64) -> u64 {
        round_size(bytes, &self.settings.roundup_power2_divisions)
    }

    /// A placement shows the end of the block before it.
    fn show(&mut self, open_end: usize, end: u64) {
        let open_end = &mut self.open_ends[open_end];
        let extra = end - open_end.base;
        self.changed |= open_end.extra != extra;
        (open_end.extra, open_end.shown) = (extra, true);
        if let Some(used) = self.used.get_mut(&open_end.addr) {
            *used = end;
        }
    }

    /// A request got the free block `chosen`, given by size and address: any gap that would have fitted better was smaller than
    /// it seems.
    fn search(&mut self, stream: u32, bytes: u64, chosen: (u64, u64)) {
        let rounded = self.rounded(bytes);
        let max_split = self.settings.max_split_size.unwrap_or(u64::MAX);
        if pool_of(rounded) == PoolKind::Small || rounded >= max_split {
            return;
        }
        while let Some(&(owner, size, start)) = self.open.range((stream, rounded, 0)..).next() {
            if owner != stream || (size, start) >= chosen || size >= max_split || self.budget == 0 {
                return;
            }
            self.budget -= 1;
            steps::count(1);
            let Some(free) = self.remove_free(start) else { return };
            let Some(number) = free.open_end else { return };
            let by = (size - rounded + 1).next_multiple_of(MIN_BLOCK);
            let open_end = &mut self.open_ends[number];
            if open_end.extra + by > SMALL_MAX || size - by <= SMALL_MAX {
                // Then this is not the reason, and no other is known.
                self.add_free(start, Free { open_end: None, ..free });
                continue;
            }
            open_end.extra += by;
            self.changed = true;
            if let Some(used) = self.used.get_mut(&open_end.addr) {
                *used += by;
            }
            self.add_free(start + by, free);
        }
    }
}

impl Placements for Layout<'_> {
    /// A block becomes free and coalesces with its free neighbours.
    fn free(&mut self, addr: u64) {
        let Some(end) = self.used.remove(&addr) else { return };
        let Some((first, segment)) = self.segment_of(addr) else { return };
        let mut joined = (addr, Free { end, open_end: None });
        // Its unknown end no longer matters.
        if end < segment.end
            && let Some(next) = self.remove_free(end)
        {
            joined.1.end = next.end;
        }
        let before = self.free.range(first..addr).next_back().filter(|(_, free)| free.end == addr);
        if let Some(start) = before.map(|(start, _)| *start)
            && let Some(before) = self.remove_free(start)
        {
            joined = (start, Free { open_end: before.open_end, ..joined.1 });
        }
        self.add_free(joined.0, joined.1);
    }

    fn operation(&mut self, Operation { number, op, segments, block }: Operation<'_>) -> bool {
        if op.kind() == Kind::Refused {
            self.search(op.stream(), op.value, (u64::MAX, u64::MAX));
        }
        for segment in segments.iter().filter(|event| event.part.is_none()) {
            let private = self.names.is_some_and(|names| names.number_of(segment) > 0);
            self.segment_event(segment, op.stream(), private);
        }
        if let Some(addr) = block {
            self.allocations += 1;
            self.place(number, self.allocations, addr, op);
        }
        true
    }
}
