//! What the recorded placements say of pools: segments and ranges that cannot be of one.

use super::super::timeline::{Operation, Placements};
use super::{DEFAULT, Effort, NamedRange};
use crate::history::{Kind, Op, SegmentEvent};
use crate::memory::Rules;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use vramlab_device::budget::{Claim, OverBudget};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::contract::PoolKind;
use vramlab_policies::policy::size::torch::{LARGE_SEGMENT, SMALL_SEGMENT, pool_of, round_size, segment_size};

/// No segment is known.
const NOWHERE: u32 = u32::MAX;

/// A segment, or a range of addresses whose memory came and went in parts, while it was held.
#[derive(Clone, Debug)]
pub(super) struct Region {
    /// Handle of its stream.
    pub(super) stream: u64,
    class: PoolKind,
    expandable: bool,
    addr: u64,
    end: u64,
    held: bool,
    /// Its pool, if the snapshot names it.
    pub(super) name: Option<(u64, u64)>,
    /// First and last operation that took a block of it.
    pub(super) first: u32,
    pub(super) last: u32,
}

/// Memory that went back.
#[derive(Debug)]
pub(super) struct Returned {
    /// The operation in which it did.
    pub(super) op: u32,
    /// Whether that was a call of `empty_cache`, and not the allocator in need.
    pub(super) trim: bool,
    /// Whether all that was idle went, in the order of pools.
    pub(super) ordered: bool,
    /// What it was of, in order.
    pub(super) gone: Vec<Gone>,
    /// What was idle and stayed; only where that says something.
    pub(super) stayed: Vec<u32>,
}

/// A segment, or memory of a range, that went back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gone {
    pub(super) region: u32,
    /// Whether it went after the default pool had, by the order.
    pub(super) private: bool,
    /// What is of one private pool goes in one run.
    pub(super) run: u32,
}

/// A block that went back: its class, and by what it is ordered among those of its pool.
type Place = (PoolKind, (u64, u64, u64));

/// The default pool goes first, its large blocks before its small ones, then one private pool after another, each with its small
/// blocks first; `tells` says whether this is how it went.
fn in_order(parts: &[(u32, Place)], tells: bool) -> Vec<Gone> {
    let (mut private, mut run) = (false, 0);
    let mut gone: Vec<Gone> = Vec::with_capacity(parts.len());
    for (at, &(region, (class, key))) in parts.iter().enumerate() {
        if let Some((_, (before, last))) = at.checked_sub(1).filter(|_| tells).map(|at| parts[at]) {
            let small = class == PoolKind::Small;
            let was_small = before == PoolKind::Small;
            private |= (small, key) < (was_small, last);
            run += u32::from((!small, key) < (!was_small, last));
        }
        gone.push(Gone { region, private, run });
    }
    gone
}

/// Free blocks of a stream's segments for small or large requests, by size and address.
#[derive(Debug, Default)]
struct FreeBlocks {
    all: BTreeSet<(u64, u64)>,
    of: BTreeMap<u32, BTreeSet<(u64, u64)>>,
}

/// The placements while they are followed, and what they say.
#[derive(Debug)]
pub(super) struct Evidence<'a> {
    settings: &'a CachingSettings,
    rules: Rules,
    /// Handles of streams by number.
    pub(super) streams: &'a [u64],
    pub(super) regions: Vec<Region>,
    /// Pairs that are of different pools, the lower number first.
    pub(super) apart: BTreeSet<(u32, u32)>,
    /// How often a stream took a block of one right after a block of the other.
    pub(super) in_turn: HashMap<(u32, u32), u32>,
    pub(super) releases: Vec<Returned>,
    /// Where each allocation lies, in order.
    pub(super) allocations: Vec<u32>,
    /// What PyTorch would not have done in any pool.
    strange: u64,
    held: BTreeMap<u64, u32>,
    free: BTreeMap<u64, (u64, u32)>,
    used: BTreeMap<u64, (u64, u32)>,
    free_blocks: BTreeMap<(u64, PoolKind), FreeBlocks>,
    /// The last region that each stream took a block of.
    latest: HashMap<u32, u32>,
    /// For what the placements say.
    claim: &'a mut Claim,
    over: Option<OverBudget>,
    pub(super) effort: Effort,
    /// Pairs of segments for which memory is claimed.
    pairs: usize,
}

/// Memory of a pair of segments as its tree's nodes are as empty as they get, and where labelling lists it twice.
const PAIR: usize = 3 * size_of::<(u32, u32)>() + 16;
const LISTED: usize = 2 * (2 * size_of::<u32>() + 3 * size_of::<u32>() + 16);

fn handle_bytes(class: PoolKind) -> u64 {
    if class == PoolKind::Small { SMALL_SEGMENT } else { LARGE_SEGMENT }
}

impl<'a> Evidence<'a> {
    pub(super) fn new(settings: &'a CachingSettings, streams: &'a [u64], claim: &'a mut Claim) -> Self {
        Self {
            settings,
            rules: Rules::pytorch(settings),
            streams,
            regions: Vec::new(),
            apart: BTreeSet::new(),
            in_turn: HashMap::new(),
            releases: Vec::new(),
            allocations: Vec::new(),
            strange: 0,
            held: BTreeMap::new(),
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

    /// Makes room for what following so many segments and allocations finds at least.
    pub(super) fn make_room(&mut self, segments: usize, allocations: usize) -> Result<(), OverBudget> {
        self.effort = Effort::new(segments + allocations);
        self.claim.reserve(&mut self.regions, segments)?;
        self.claim.reserve(&mut self.allocations, allocations)
    }

    /// Claims what labelling takes: maps of what went and stayed, and lists of pairs.
    pub(super) fn make_room_to_label(&mut self) -> Result<(), OverBudget> {
        let returned: usize = self.releases.iter().map(|one| one.gone.len() + one.stayed.len()).sum();
        let maps = 4 * (3 * size_of::<(u32, usize)>() + 16);
        self.claim.add(self.pairs * LISTED + returned * maps + self.regions.len() * 8 * size_of::<Region>())
    }

    /// What the placements say took too much memory, if it did.
    pub(super) fn check(&self) -> Result<(), OverBudget> {
        self.over.map_or(Ok(()), Err)
    }

    /// Whether there are private pools: a segment of one is held at the end, or the default pool alone would have been used
    /// otherwise by PyTorch, which is what was recorded.
    pub(super) fn tells_of_pools(&self) -> bool {
        let named = self.regions.iter().any(|region| region.name.is_some_and(|name| name != DEFAULT));
        let by_itself = |release: &Returned| !release.stayed.is_empty() || release.gone.iter().any(|gone| gone.private);
        named || self.strange == 0 && (!self.apart.is_empty() || self.releases.iter().any(by_itself))
    }

    /// Gives what is held at the end its name.
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
        let (_, &number) = self.held.range(..=addr).next_back()?;
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
            if let Some(own) = blocks.of.get_mut(&region) {
                own.remove(&(end - start, start));
                if own.is_empty() {
                    blocks.of.remove(&region);
                }
            }
        }
        Some((end, region))
    }

    /// Adds free memory, joined with what is free beside it.
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

    /// A segment came, or a part of a range: its number, if it is new.
    fn make(&mut self, event: &SegmentEvent) -> Option<u32> {
        let (addr, end) = (event.addr, event.addr + event.bytes);
        let class = event.pool();
        if event.part.is_some()
            && let Some((_, &number)) = self.held.range(..=addr).next_back()
        {
            let region = &mut self.regions[number as usize];
            if region.expandable && (region.stream, region.class) == (event.stream, class) && addr <= region.end {
                region.end = region.end.max(end);
                self.join_free(addr, end, number);
                return None;
            }
        }
        // CAST: fewer than operations.
        let number = self.regions.len() as u32;
        let expandable = event.part.is_some();
        if expandable {
            let others = self.held.values().copied().filter(|other| {
                let other = &self.regions[*other as usize];
                other.expandable && (other.stream, other.class) == (event.stream, class)
            });
            let effort = &self.effort;
            self.apart.extend(others.take_while(|_| effort.take(1)).map(|other| (other, number)));
        }
        let (first, last) = (event.op, event.op);
        let stream = event.stream;
        self.regions.push(Region { stream, class, expandable, addr, end, held: true, name: None, first, last });
        self.held.insert(addr, number);
        self.add_free(addr, end, number);
        Some(number)
    }

    /// A segment went, or a part of a range: its number, and its place among what goes.
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
            self.regions[number as usize].held = false;
            self.held.remove(&addr);
        }
        Some((number, (class, (stream, size, first))))
    }

    /// Whether a request that needs memory gives back all that is idle, in the order of pools, as `empty_cache` does. Oversize
    /// blocks and garbage go by themselves.
    fn retries_in_order(&self) -> bool {
        self.settings.max_split_size.is_none() && self.settings.garbage_collection_threshold == 0.0
    }

    /// Whether what looks like a call of `empty_cache` may have been a collection of garbage, which leaves young blocks: PyTorch
    /// collects under a memory limit, and that is not known.
    fn may_be_garbage(&self) -> bool {
        self.settings.garbage_collection_threshold > 0.0 && self.settings.memory_limit.is_none()
    }

    /// What has memory that could have gone back and did not.
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
        self.held.values().copied().take_while(|_| self.effort.take(1)).filter(idle).collect()
    }

    /// A block was placed; says where. `tells` says whether the free blocks are those that the request was looked up in.
    fn place(&mut self, number: u32, addr: u64, op: Op, made: &[u32], tells: bool) -> u32 {
        let rounded = round_size(op.value, &self.settings.roundup_power2_divisions);
        let Some(number_of) = self.region_at(addr) else {
            self.strange += 1;
            return NOWHERE;
        };
        let region = &mut self.regions[number_of as usize];
        region.last = number;
        let (expandable, class, bytes) = (region.expandable, region.class, region.end - region.addr);
        let own = class == pool_of(rounded) && region.stream == self.streams[op.stream() as usize];
        let new = made.contains(&number_of);
        self.strange += u64::from(!own || new && !expandable && bytes != segment_size(rounded));
        let found = self.free.range(..=addr).next_back().map(|(start, (end, _))| (*start, *end));
        let Some((start, end)) = found.filter(|(_, end)| *end > addr) else {
            self.strange += 1;
            return number_of;
        };
        if !expandable && tells && own {
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

    /// A request got the free block `found`, by size and address; the size is `u64::MAX` for that of a new segment. Segments that
    /// had a better one are of other pools.
    fn compare(&mut self, region: u32, rounded: u64, found: (u64, u64)) {
        let Region { stream, class, .. } = self.regions[region as usize];
        // A log that put a block where it does not fit.
        if found < (rounded, 0) {
            self.strange += 1;
            return;
        }
        let Some(blocks) = self.free_blocks.get(&(stream, class)) else { return };
        let max_split = self.settings.max_split_size.unwrap_or(u64::MAX);
        // Of oversize blocks PyTorch has more to say; they tell nothing here.
        let tells = |(size, _): &&(u64, u64)| *size < max_split && rounded < max_split;
        // The new segment's own block is in front of those that are larger.
        let better = |free: &BTreeSet<(u64, u64)>| {
            free.range((rounded, 0)..found).find(|block| block.1 != found.1).filter(tells).copied()
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
                self.apart.insert((region.min(other), region.max(other)));
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
        let (mut gone, mut made) = (Vec::new(), Vec::new());
        for segment in segments {
            if segment.released {
                gone.extend(self.release(segment));
            } else {
                made.extend(self.make(segment));
            }
        }
        if let Some(addr) = block {
            // What a retry waited for was of no use when the request was looked at.
            let region = self.place(number, addr, op, &made, gone.is_empty());
            self.allocations.push(region);
            let before = if region == NOWHERE { None } else { self.latest.insert(op.stream(), region) };
            if let Some(before) = before.filter(|before| *before != region) {
                *self.in_turn.entry((before.min(region), before.max(region))).or_insert(0) += 1;
            }
        }
        if !gone.is_empty() {
            let trim = op.kind() == Kind::Trim && !self.may_be_garbage();
            let ordered = trim || self.retries_in_order();
            let stayed = if trim && ordered { self.idle() } else { Vec::new() };
            let gone = in_order(&gone, ordered);
            self.claim.add((4 * gone.len() + stayed.len()) * size_of::<Gone>() + size_of::<Returned>())?;
            self.releases.push(Returned { op: number, trim, ordered, gone, stayed });
        }
        // One operation may tell of any number of pairs.
        let pairs = self.apart.len() + self.in_turn.len();
        self.claim.add((pairs - self.pairs) * PAIR)?;
        self.pairs = pairs;
        Ok(())
    }
}
