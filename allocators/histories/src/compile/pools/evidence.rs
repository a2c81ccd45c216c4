//! Evidence of the recorded placements about pools: segments and ranges that cannot be of one pool.

use super::super::timeline::{Operation, Placements};
use super::{DEFAULT, Effort, NamedRange, PoolNames};
use crate::history::{Kind, Op, SegmentEvent};
use crate::memory::Rules;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use vramlab_device::budget::{Claim, OverBudget};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::contract::PoolKind;
use vramlab_policies::policy::size::torch::{LARGE_SEGMENT, SMALL_SEGMENT, pool_of, round_size, segment_size};

/// Unknown segment.
const NOWHERE: u32 = u32::MAX;

/// A segment, or an address range with mapped ranges, while it is reserved.
#[derive(Clone, Debug)]
pub(super) struct Region {
    /// Handle of its stream.
    pub(super) stream: u64,
    class: PoolKind,
    expandable: bool,
    addr: u64,
    end: u64,
    reserved: bool,
    /// Its pool, if the recording names it.
    pub(super) name: Option<(u64, u64)>,
    /// First and last operation that used it.
    pub(super) first: u32,
    pub(super) last: u32,
}

/// Released memory.
#[derive(Debug)]
pub(super) struct Returned {
    /// The operation that released it.
    pub(super) op: u32,
    /// Whether that was a call of `empty_cache`, and not the allocator itself.
    pub(super) trim: bool,
    /// Whether all free segments were released, in the order of pools.
    pub(super) ordered: bool,
    /// Released segments, in order.
    pub(super) released: Vec<ReleasedPart>,
    /// Retained free segments; only where they are evidence.
    pub(super) retained: Vec<u32>,
}

/// A released segment, or memory of a range.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReleasedPart {
    pub(super) region: u32,
    /// Whether it was released after the default pool, by the order.
    pub(super) private: bool,
    /// Number of its run: memory of one private pool is released in one run.
    pub(super) run: u32,
}

/// A released block: its class, and its sort key among those of its pool.
type Place = (PoolKind, (u64, u64, u64));

/// The default pool is released first, its large blocks before its small ones, then one private pool after another, each with its
/// small blocks first; `ordered` is whether this holds here.
fn in_order(parts: &[(u32, Place)], ordered: bool) -> Vec<ReleasedPart> {
    let (mut private, mut run) = (false, 0);
    let mut released: Vec<ReleasedPart> = Vec::with_capacity(parts.len());
    for (at, &(region, (class, key))) in parts.iter().enumerate() {
        if let Some((_, (before, last))) = at.checked_sub(1).filter(|_| ordered).map(|at| parts[at]) {
            let small = class == PoolKind::Small;
            let was_small = before == PoolKind::Small;
            private |= (small, key) < (was_small, last);
            run += u32::from((!small, key) < (!was_small, last));
        }
        released.push(ReleasedPart { region, private, run });
    }
    released
}

/// Free blocks of a stream's segments for small or large requests, by size and address.
#[derive(Debug, Default)]
struct FreeBlocks {
    all: BTreeSet<(u64, u64)>,
    of: BTreeMap<u32, BTreeSet<(u64, u64)>>,
}

/// Follows the placements and collects evidence.
#[derive(Debug)]
pub(super) struct Evidence<'a> {
    settings: &'a CachingSettings,
    names: &'a PoolNames,
    rules: Rules,
    /// Handles of streams by number.
    pub(super) streams: &'a [u64],
    pub(super) regions: Vec<Region>,
    /// Pairs of different pools, the lower number first.
    pub(super) different: BTreeSet<(u32, u32)>,
    /// How often a stream used one right after the other.
    pub(super) in_turn: HashMap<(u32, u32), u32>,
    pub(super) releases: Vec<Returned>,
    /// Segment of each allocation, in order.
    pub(super) allocations: Vec<u32>,
    /// Number of placements that PyTorch would not choose in any pool.
    strange: u64,
    by_address: BTreeMap<u64, u32>,
    free: BTreeMap<u64, (u64, u32)>,
    used: BTreeMap<u64, (u64, u32)>,
    free_blocks: BTreeMap<(u64, PoolKind), FreeBlocks>,
    /// The last region that each stream used.
    latest: HashMap<u32, u32>,
    /// Claim for the evidence.
    claim: &'a mut Claim,
    over: Option<OverBudget>,
    pub(super) effort: Effort,
    /// Number of pairs of segments with claimed memory.
    pairs: usize,
}

/// Memory of a pair of segments in the emptiest tree nodes, and in the two lists of labelling.
const PAIR: usize = 3 * size_of::<(u32, u32)>() + 16;
const LISTED: usize = 2 * (2 * size_of::<u32>() + 3 * size_of::<u32>() + 16);

fn handle_bytes(class: PoolKind) -> u64 {
    if class == PoolKind::Small { SMALL_SEGMENT } else { LARGE_SEGMENT }
}

impl<'a> Evidence<'a> {
    pub(super) fn new(
        settings: &'a CachingSettings,
        names: &'a PoolNames,
        streams: &'a [u64],
        claim: &'a mut Claim,
    ) -> Self {
        Self {
            settings,
            names,
            rules: Rules::pytorch(settings),
            streams,
            regions: Vec::new(),
            different: BTreeSet::new(),
            in_turn: HashMap::new(),
            releases: Vec::new(),
            allocations: Vec::new(),
            strange: 0,
            by_address: BTreeMap::new(),
            free: BTreeMap::new(),
            used: BTreeMap::new(),
            free_blocks: BTreeMap::new(),
            latest: HashMap::new(),
            claim,
            over: None,
            effort: Effort::new(0),
            pairs: 0,
        }
    }

    /// Claims the minimum for this many segments and allocations.
    pub(super) fn make_room(&mut self, segments: usize, allocations: usize) -> Result<(), OverBudget> {
        self.effort = Effort::new(segments + allocations);
        self.claim.reserve(&mut self.regions, segments)?;
        self.claim.reserve(&mut self.allocations, allocations)
    }

    /// Claims memory for labelling: maps of released and retained segments, and lists of pairs.
    pub(super) fn make_room_to_label(&mut self) -> Result<(), OverBudget> {
        let returned: usize = self.releases.iter().map(|release| release.released.len() + release.retained.len()).sum();
        let maps = 4 * (3 * size_of::<(u32, usize)>() + 16);
        self.claim.add(self.pairs * LISTED + returned * maps + self.regions.len() * 8 * size_of::<Region>())
    }

    /// The error if the evidence exceeded the memory budget.
    pub(super) fn check(&self) -> Result<(), OverBudget> {
        self.over.map_or(Ok(()), Err)
    }

    /// Whether the recording names the pool of every segment.
    pub(super) fn is_named(&self) -> bool {
        self.names.has_events()
    }

    /// Whether there are private pools: a segment of one exists at the end, or PyTorch, if it was recorded, would have used the
    /// default pool otherwise.
    pub(super) fn tells_of_pools(&self) -> bool {
        let named = self.regions.iter().any(|region| region.name.is_some_and(|name| name != DEFAULT));
        let by_itself = |release: &Returned| {
            !release.retained.is_empty() || release.released.iter().any(|released| released.private)
        };
        let inferred = !self.is_named() && self.strange == 0;
        named || inferred && (!self.different.is_empty() || self.releases.iter().any(by_itself))
    }

    /// Assigns the known pools to segments at the end.
    pub(super) fn name(&mut self, names: &[NamedRange]) {
        for named in names {
            let Some(number) = self.region_at(named.addr) else { continue };
            let region = &mut self.regions[number as usize];
            if region.expandable || (region.addr, region.end) == (named.addr, named.end) {
                region.name = Some(named.pool);
            }
        }
    }

    fn region_at(&self, addr: u64) -> Option<u32> {
        let (_, &number) = self.by_address.range(..=addr).next_back()?;
        (addr < self.regions[number as usize].end).then_some(number)
    }

    fn add_free(&mut self, start: u64, end: u64, region: u32) {
        self.free.insert(start, (end, region));
        let Region { stream, class, expandable, .. } = self.regions[region as usize];
        if !expandable {
            let blocks = self.free_blocks.entry((stream, class)).or_default();
            blocks.all.insert((end - start, start));
            blocks.of.entry(region).or_default().insert((end - start, start));
        }
    }

    fn remove_free(&mut self, start: u64) -> Option<(u64, u32)> {
        let (end, region) = self.free.remove(&start)?;
        let Region { stream, class, .. } = self.regions[region as usize];
        if let Some(blocks) = self.free_blocks.get_mut(&(stream, class)) {
            blocks.all.remove(&(end - start, start));
            if let Some(free) = blocks.of.get_mut(&region) {
                free.remove(&(end - start, start));
                if free.is_empty() {
                    blocks.of.remove(&region);
                }
            }
        }
        Some((end, region))
    }

    /// Adds free memory, coalesced with adjacent free memory.
    fn join_free(&mut self, mut start: u64, mut end: u64, region: u32) {
        if let Some((behind, _)) = self.free.get(&end).copied().filter(|(_, of)| *of == region) {
            self.remove_free(end);
            end = behind;
        }
        let before = self.free.range(..start).next_back().map(|(at, (end, of))| (*at, *end, *of));
        if let Some((at, ..)) = before.filter(|(_, until, of)| *until == start && *of == region) {
            self.remove_free(at);
            start = at;
        }
        self.add_free(start, end, region);
    }

    /// A segment or range was allocated; returns its number if it is new.
    fn make(&mut self, event: &SegmentEvent) -> Option<u32> {
        let (addr, end) = (event.addr, event.addr + event.bytes);
        let (class, name) = (event.pool(), self.names.name_of_event(event));
        if event.part.is_some()
            && let Some((_, &number)) = self.by_address.range(..=addr).next_back()
        {
            let region = &mut self.regions[number as usize];
            let same = (region.stream, region.class, region.name) == (event.stream, class, name);
            if region.expandable && same && addr <= region.end {
                region.end = region.end.max(end);
                self.join_free(addr, end, number);
                return None;
            }
        }
        // CAST: fewer than operations.
        let number = self.regions.len() as u32;
        let expandable = event.part.is_some();
        if expandable {
            let others = self.by_address.values().copied().filter(|other| {
                let other = &self.regions[*other as usize];
                other.expandable && (other.stream, other.class) == (event.stream, class)
            });
            let effort = &self.effort;
            self.different.extend(others.take_while(|_| effort.take(1)).map(|other| (other, number)));
        }
        let (first, last) = (event.op, event.op);
        let stream = event.stream;
        self.regions.push(Region { stream, class, expandable, addr, end, reserved: true, name, first, last });
        self.by_address.insert(addr, number);
        self.add_free(addr, end, number);
        Some(number)
    }

    /// A segment or range was released; returns its number, and its position among released memory.
    fn release(&mut self, event: &SegmentEvent) -> Option<(u32, Place)> {
        let (addr, end) = (event.addr, event.addr + event.bytes);
        let number = self.region_at(addr)?;
        let lost: Vec<u64> = self.used.range(addr..end).map(|(start, _)| *start).collect();
        self.strange += lost.len() as u64;
        for start in lost {
            self.used.remove(&start);
        }
        let around = self.free.range(..=addr).next_back().filter(|(_, (until, _))| *until > addr);
        let (first, size) = around.map_or((addr, event.bytes), |(start, (until, _))| (*start, until - start));
        let lost: Vec<u64> = self.free.range(first..end).map(|(start, _)| *start).collect();
        for start in lost {
            let Some((until, region)) = self.remove_free(start) else { continue };
            if start < addr {
                self.add_free(start, addr, region);
            }
            if until > end {
                self.add_free(end, until, region);
            }
        }
        let Region { addr, end, class, stream, .. } = self.regions[number as usize];
        if self.free.range(addr..end).next().is_none() && self.used.range(addr..end).next().is_none() {
            self.regions[number as usize].reserved = false;
            self.by_address.remove(&addr);
        }
        Some((number, (class, (stream, size, first))))
    }

    /// Whether a request that needs memory releases all free segments in the order of pools, as `empty_cache` does. Oversize
    /// segments and garbage are released separately.
    fn retries_in_order(&self) -> bool {
        self.settings.max_split_size.is_none() && self.settings.garbage_collection_threshold == 0.0
    }

    /// Whether an apparent `empty_cache` may have been a garbage collection, which retains young segments: PyTorch collects under
    /// a memory limit, which is unknown.
    fn may_be_garbage(&self) -> bool {
        self.settings.garbage_collection_threshold > 0.0 && self.settings.memory_limit.is_none()
    }

    /// Free segments that could have been released and were retained.
    fn idle(&self) -> Vec<u32> {
        let idle = |number: &u32| {
            let Region { addr, end, expandable, class, .. } = self.regions[*number as usize];
            if !expandable {
                return self.used.range(addr..end).next().is_none();
            }
            let granule = handle_bytes(class);
            self.free
                .range(addr..end)
                .take_while(|_| self.effort.take(1))
                .any(|(start, (until, _))| addr + (start - addr).next_multiple_of(granule) + granule <= *until)
        };
        self.by_address.values().copied().take_while(|_| self.effort.take(1)).filter(idle).collect()
    }

    /// A block was placed; returns its segment. `comparable` is whether the free blocks are those of the request's search.
    fn place(&mut self, number: u32, addr: u64, op: Op, made: &[u32], comparable: bool) -> u32 {
        let rounded = round_size(op.value, &self.settings.roundup_power2_divisions);
        let Some(number_of) = self.region_at(addr) else {
            self.strange += 1;
            return NOWHERE;
        };
        let region = &mut self.regions[number_of as usize];
        region.last = number;
        let (expandable, class, bytes) = (region.expandable, region.class, region.end - region.addr);
        let fits = class == pool_of(rounded) && region.stream == self.streams[op.stream() as usize];
        let new = made.contains(&number_of);
        self.strange += u64::from(!fits || new && !expandable && bytes != segment_size(rounded));
        let block = self.free.range(..=addr).next_back().map(|(start, (end, _))| (*start, *end));
        let Some((start, end)) = block.filter(|(_, end)| *end > addr) else {
            self.strange += 1;
            return number_of;
        };
        if !expandable && comparable && fits {
            self.compare(number_of, rounded, if new { (u64::MAX, addr) } else { (end - start, start) });
        }
        self.remove_free(start);
        if start < addr {
            self.strange += 1;
            self.add_free(start, addr, number_of);
        }
        let (room, keeps_small) = (end - addr, expandable || class == PoolKind::Small);
        let split = room >= rounded && self.rules.cuts(keeps_small, rounded, room);
        let until = if split { addr + rounded } else { end };
        self.used.insert(addr, (until, number_of));
        if until < end {
            self.add_free(until, end, number_of);
        }
        number_of
    }

    /// A request got the free block `chosen`, by size and address; the size is `u64::MAX` for a new segment. Segments that had a
    /// better one are of other pools.
    fn compare(&mut self, region: u32, rounded: u64, chosen: (u64, u64)) {
        let Region { stream, class, .. } = self.regions[region as usize];
        // Another allocator's log with a block that does not fit.
        if chosen < (rounded, 0) {
            self.strange += 1;
            return;
        }
        let Some(blocks) = self.free_blocks.get(&(stream, class)) else { return };
        let max_split = self.settings.max_split_size.unwrap_or(u64::MAX);
        // PyTorch has further rules for oversize blocks, so they are not evidence.
        let tells = |(size, _): &&(u64, u64)| *size < max_split && rounded < max_split;
        // The new segment's own block precedes the larger ones.
        let better = |free: &BTreeSet<(u64, u64)>| {
            free.range((rounded, 0)..chosen).find(|block| block.1 != chosen.1).filter(tells).copied()
        };
        if better(&blocks.all).is_none() {
            return;
        }
        for (&other, free) in &blocks.of {
            if !self.effort.take(1) {
                return;
            }
            if other == region {
                self.strange += u64::from(better(free).is_some());
            } else if better(free).is_some() {
                self.different.insert((region.min(other), region.max(other)));
            }
        }
    }
}

impl Placements for Evidence<'_> {
    fn free(&mut self, addr: u64) {
        if let Some((end, region)) = self.used.remove(&addr) {
            self.join_free(addr, end, region);
        }
    }

    fn operation(&mut self, operation: Operation<'_>) -> bool {
        self.over = self.take(operation).err();
        self.over.is_none() && !self.effort.is_spent()
    }
}

impl Evidence<'_> {
    fn take(&mut self, Operation { number, op, segments, block }: Operation<'_>) -> Result<(), OverBudget> {
        let (mut released, mut made) = (Vec::new(), Vec::new());
        for segment in segments {
            if segment.released {
                released.extend(self.release(segment));
            } else {
                made.extend(self.make(segment));
            }
        }
        if let Some(addr) = block {
            // Blocks for which a retry waited could not serve the request during its search.
            let region = self.place(number, addr, op, &made, released.is_empty());
            self.allocations.push(region);
            let before = if region == NOWHERE { None } else { self.latest.insert(op.stream(), region) };
            if let Some(before) = before.filter(|before| *before != region) {
                *self.in_turn.entry((before.min(region), before.max(region))).or_insert(0) += 1;
            }
        }
        if !released.is_empty() {
            let trim = op.kind() == Kind::Trim && !self.may_be_garbage();
            let ordered = trim || self.retries_in_order();
            let retained = if trim && ordered { self.idle() } else { Vec::new() };
            let released = in_order(&released, ordered);
            self.claim
                .add((4 * released.len() + retained.len()) * size_of::<ReleasedPart>() + size_of::<Returned>())?;
            self.releases.push(Returned { op: number, trim, ordered, released, retained });
        }
        // One operation may be evidence for any number of pairs.
        let pairs = self.different.len() + self.in_turn.len();
        self.claim.add((pairs - self.pairs) * PAIR)?;
        self.pairs = pairs;
        Ok(())
    }
}
