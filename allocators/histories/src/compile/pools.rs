//! Private pools: which blocks were in the separate memory of CUDA graphs or `MemPool`s.
//!
//! A block belongs to the pool of its segment, or of its expandable segment's address range. A snapshot names the pools of segments
//! at the end, and from PyTorch 2.12 on also those of the events that allocate and release segments. Earlier events do not name the
//! pool, so the placements are followed from the first event:
//!
//! - *Two segments are of different pools* if a request of one would have been served better from the other. PyTorch allocates a
//!   segment only if no free block of the pool fits, and otherwise takes the best fit.
//! - *Two ranges of a stream are of different pools* if both are mapped simultaneously: a pool has one for small blocks and one
//!   for large ones.
//! - *A segment is of a private pool* if it was idle and retained when the client emptied the cache. It is of another pool than
//!   the released segments.
//! - *Without such evidence*, segments that serve a stream in turn are of one pool, the default pool.
//!
//! If that takes more work than the [recording's length allows](effort::Effort), only segments at the end have a pool.
//!
//! Several answers may fit. Blocks whose segment also fits another pool are counted. The placements are the same in either case.

mod evidence;
mod groups;
mod order;

use super::timeline::{Operation, Placements, Timeline};
use super::transcript::Transcript;
use crate::formats::{Segment, SegmentPool};
use crate::history::{Beginning, Kind, MAX_POOLS, PrivatePools, SegmentEvent};
use crate::steps;
use evidence::Evidence;
use order::Labels;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use vramlab_device::budget::OverBudget;
use vramlab_policies::backends::CachingSettings;

/// Finds the pool of each allocation and writes it into the operations. `streams` are the handles.
///
/// # Errors
/// [`OverBudget`] when the budget is used up.
pub(super) fn find(
    transcript: &mut Transcript,
    names: Option<&PoolNames>,
    beginning: &Beginning,
    streams: &[u64],
    settings: &CachingSettings,
) -> Result<PrivatePools, OverBudget> {
    let Some(names) = names else { return Ok(PrivatePools::default()) };
    if !beginning.is_empty() {
        return find_by_name(transcript, names, beginning, streams.len());
    }
    transcript.make_room_to_follow(beginning)?;
    let Transcript { timeline, claim, .. } = transcript;
    let mut evidence = Evidence::new(settings, names, streams, claim);
    evidence.make_room(timeline.segments.len(), timeline.addresses.len())?;
    timeline.follow(beginning, &mut evidence);
    evidence.check()?;
    evidence.name(&names.ending);
    if !evidence.effort.is_spent() {
        if !evidence.tells_of_pools() {
            return Ok(PrivatePools::default());
        }
        evidence.make_room_to_label()?;
        let labels = groups::label(&evidence);
        if !evidence.effort.is_spent() {
            return Ok(write(timeline, &evidence.allocations, &labels, streams.len()));
        }
    }
    find_by_name(transcript, names, beginning, streams.len())
}

/// Segments while they are reserved.
#[derive(Debug)]
struct ReservedSegments<'a> {
    names: &'a PoolNames,
    /// End and number by first address. Numbers start at 1.
    segments: BTreeMap<u64, (u64, u32)>,
    /// The pool of each segment, by number; `None` if unknown.
    pools: Vec<Option<u32>>,
    /// Number of the segment of each allocation; 0 if unknown.
    allocations: Vec<u32>,
}

impl ReservedSegments<'_> {
    fn make(&mut self, addr: u64, bytes: u64, pool: Option<u32>) {
        // CAST: fewer than operations.
        let number = self.pools.len() as u32;
        self.pools.push(pool);
        self.segments.insert(addr, (addr + bytes, number));
    }
}

impl Placements for ReservedSegments<'_> {
    fn free(&mut self, _addr: u64) {}

    fn operation(&mut self, operation: Operation<'_>) -> bool {
        for segment in operation.segments {
            match segment.released {
                true => drop(self.segments.remove(&segment.addr)),
                false => {
                    let name = self.names.name_of_event(segment);
                    self.make(segment.addr, segment.bytes, name.map(|name| self.names.number(name)));
                }
            }
        }
        if let Some(addr) = operation.block {
            let segment = self.segments.range(..=addr).next_back().filter(|(_, (end, _))| addr < *end);
            self.allocations.push(segment.map_or(0, |(_, (_, number))| *number));
        }
        true
    }
}

/// For recordings that began late, or that take too much work: the placements do not show the pools from before. Segments with a
/// known name have it for all their blocks. Blocks in other segments are assigned to the default pool.
fn find_by_name(
    transcript: &mut Transcript,
    names: &PoolNames,
    beginning: &Beginning,
    streams: usize,
) -> Result<PrivatePools, OverBudget> {
    let count = names.private_pools();
    if count == 0 {
        return Ok(PrivatePools::default());
    }
    let Transcript { timeline, claim, .. } = transcript;
    // Allocations outside all segments have the first number.
    let mut segments =
        ReservedSegments { names, segments: BTreeMap::new(), pools: vec![None], allocations: Vec::new() };
    claim.reserve(&mut segments.allocations, timeline.addresses.len())?;
    claim.reserve(&mut segments.pools, beginning.segments.len() + timeline.segments.len())?;
    for segment in &beginning.segments {
        let known = names.has_events().then_some(segment.private);
        segments.make(segment.addr, segment.bytes, known);
    }
    timeline.follow(beginning, &mut segments);
    let ReservedSegments { segments, mut pools, allocations, .. } = segments;
    if !names.ending.is_empty() || !names.has_events() {
        for (addr, (_, number)) in segments {
            pools[number as usize] = Some(names.number_at(addr));
        }
    }
    let undetermined = pools.iter().map(Option::is_none).collect();
    let of = pools.into_iter().map(Option::unwrap_or_default).collect();
    Ok(write(timeline, &allocations, &Labels { count, of, undetermined, ..Labels::default() }, streams))
}

/// Writes pools into the operations. `allocations` has the segment of each, and `labels` the pool of each segment.
fn write(timeline: &mut Timeline, allocations: &[u32], labels: &Labels, streams: usize) -> PrivatePools {
    let mut pools = PrivatePools { count: labels.count.min(MAX_POOLS), ..PrivatePools::default() };
    let pool_of = |region: u32| labels.of.get(region as usize).copied().filter(|pool| *pool <= MAX_POOLS).unwrap_or(0);
    let mut regions = allocations.iter();
    let mut last = vec![0; streams];
    for op in &mut timeline.ops {
        match op.kind() {
            Kind::Alloc => {
                let Some(&region) = regions.next() else { break };
                let pool = pool_of(region);
                pools.allocations += u64::from(pool > 0);
                pools.undetermined += u64::from(labels.undetermined.get(region as usize) == Some(&true));
                last[op.stream() as usize] = pool;
                *op = op.of_pool(pool);
            }
            // The pool of the stream refused it.
            Kind::Refused => *op = op.of_pool(last[op.stream() as usize]),
            _ => {}
        }
    }
    let known = |of: &[(u32, u32)]| of.iter().copied().filter(|(_, pool)| *pool <= MAX_POOLS).collect();
    (pools.released, pools.trimmed) = (known(&labels.released), known(&labels.trims));
    for &op in &labels.partial {
        let trim = &mut timeline.ops[op as usize];
        *trim = trim.of_pool(1);
    }
    pools
}

/// Steps for each operation and segment, and a constant. Real recordings take a small share of it.
const EACH: u64 = 16;
const SOME: u64 = 1 << 20;

/// Limit on the work of the search for pools, in proportion to the recording. Evidence about pairs of segments can be as large as
/// the number of pairs.
#[derive(Debug)]
struct Effort(Cell<u64>);

impl Effort {
    fn new(items: usize) -> Self {
        Self(Cell::new(EACH * items as u64 + SOME))
    }

    /// Takes steps. Returns whether some remain.
    fn take(&self, steps: usize) -> bool {
        steps::count(if self.is_spent() { 0 } else { steps });
        self.0.set(self.0.get().saturating_sub(steps as u64));
        !self.is_spent()
    }

    fn is_spent(&self) -> bool {
        self.0.get() == 0
    }
}

/// The name of PyTorch's default pool.
const DEFAULT: (u64, u64) = (0, 0);

/// A range of addresses whose pool a snapshot names.
#[derive(Clone, Copy, Debug)]
struct NamedRange {
    addr: u64,
    end: u64,
    pool: (u64, u64),
}

/// The pools of the events of segments, if every such event has one.
pub(super) fn named_by_events(pools: Vec<SegmentPool>, segments: &[SegmentEvent]) -> Option<Vec<SegmentPool>> {
    let has_name = |segment: &SegmentEvent| pools.binary_search_by_key(&segment.event, |named| named.event).is_ok();
    let all = !segments.is_empty() && segments.iter().all(has_name);
    all.then_some(pools)
}

/// The known names of pools.
#[derive(Debug)]
pub(super) struct PoolNames {
    /// Those of the segments at the end, in address order.
    ending: Vec<NamedRange>,
    /// Those of all events of segments, in order; empty if the recording lacks some.
    events: Vec<SegmentPool>,
    /// Numbers of the private pools, from 1 in the order of names.
    numbers: BTreeMap<(u64, u64), u32>,
}

impl PoolNames {
    /// The names of segments at the end in address order, and of events. `None` if neither names all its segments.
    pub(super) fn of(ending: Option<&[Segment]>, events: Option<Vec<SegmentPool>>) -> Option<Self> {
        let all_named = |ending: &&[Segment]| ending.iter().all(|segment| segment.pool_id.is_some());
        let ending = ending.filter(all_named);
        if ending.is_none() && events.is_none() {
            return None;
        }
        let (ending, events) = (ending.unwrap_or_default(), events.unwrap_or_default());
        let of_segments = ending.iter().filter_map(|segment| segment.pool_id);
        let pools: BTreeSet<(u64, u64)> = of_segments.chain(events.iter().map(|named| named.pool)).collect();
        let private = pools.into_iter().filter(|pool| *pool != DEFAULT);
        let numbers: BTreeMap<(u64, u64), u32> = private.zip(1..=MAX_POOLS).collect();
        let named = |segment: &Segment| {
            let (addr, end) = (segment.address, segment.address.saturating_add(segment.total_size));
            segment.pool_id.map(|pool| NamedRange { addr, end, pool })
        };
        Some(Self { ending: ending.iter().filter_map(named).collect(), events, numbers })
    }

    /// Whether every event of a segment has a name.
    fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// The number of a private pool; 0 for the default pool.
    fn number(&self, pool: (u64, u64)) -> u32 {
        self.numbers.get(&pool).copied().unwrap_or(0)
    }

    /// The name of the pool of an event's segment.
    fn name_of_event(&self, event: &SegmentEvent) -> Option<(u64, u64)> {
        let at = self.events.binary_search_by_key(&event.event, |named| named.event).ok()?;
        Some(self.events[at].pool)
    }

    /// The number of the private pool that an event names; 0 if none.
    pub(super) fn number_of_event(&self, event: &SegmentEvent) -> u32 {
        self.name_of_event(event).map_or(0, |pool| self.number(pool))
    }

    /// The number of the private pool of an event's segment, also if only the end names it; 0 if none.
    pub(super) fn number_of(&self, event: &SegmentEvent) -> u32 {
        self.name_of_event(event).map_or_else(|| self.number_at(event.addr), |pool| self.number(pool))
    }

    /// The number of the private pool that is at an address at the end; 0 if none.
    pub(super) fn number_at(&self, addr: u64) -> u32 {
        let before = self.ending.partition_point(|named| named.addr <= addr);
        let named = before.checked_sub(1).map(|at| self.ending[at]).filter(|named| addr < named.end);
        named.map_or(0, |named| self.number(named.pool))
    }

    /// Number of private pools.
    fn private_pools(&self) -> u32 {
        // CAST: at most `MAX_POOLS`.
        self.numbers.len() as u32
    }
}
