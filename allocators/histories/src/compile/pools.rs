//! Private pools: which blocks were in the separate memory of CUDA graphs or `MemPool`s.
//!
//! PyTorch's events do not name the pool. A block belongs to the pool of its segment, or of its expandable segment's address
//! range, and a snapshot names the pools of segments at the end. For the others the placements are followed from the first event:
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
use crate::formats::Segment;
use crate::history::{Beginning, Kind, MAX_POOLS, PrivatePools};
use crate::steps;
use evidence::Evidence;
use order::Labels;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use vramlab_device::budget::OverBudget;
use vramlab_policies::backends::CachingSettings;

/// Finds the pool of each allocation and writes it into the operations. `names` are the pools that the end names, if it names
/// all; `streams` are the handles.
///
/// # Errors
/// [`OverBudget`] when the budget is used up.
pub(super) fn find(
    transcript: &mut Transcript,
    names: Option<&[NamedRange]>,
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
    let mut evidence = Evidence::new(settings, streams, claim);
    evidence.make_room(timeline.segments.len(), timeline.addresses.len())?;
    timeline.follow(beginning, &mut evidence);
    evidence.check()?;
    evidence.name(names);
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
#[derive(Debug, Default)]
struct ReservedSegments {
    /// End and number by first address. Numbers start at 1.
    segments: BTreeMap<u64, (u64, u32)>,
    /// Number of segments so far.
    made: u32,
    /// Number of the segment of each allocation; 0 if unknown.
    allocations: Vec<u32>,
}

impl ReservedSegments {
    fn make(&mut self, addr: u64, bytes: u64) {
        self.made += 1;
        self.segments.insert(addr, (addr + bytes, self.made));
    }
}

impl Placements for ReservedSegments {
    fn free(&mut self, _addr: u64) {}

    fn operation(&mut self, operation: Operation<'_>) -> bool {
        for segment in operation.segments {
            match segment.released {
                true => drop(self.segments.remove(&segment.addr)),
                false => self.make(segment.addr, segment.bytes),
            }
        }
        if let Some(addr) = operation.block {
            let segment = self.segments.range(..=addr).next_back().filter(|(_, (end, _))| addr < *end);
            self.allocations.push(segment.map_or(0, |(_, (_, number))| *number));
        }
        true
    }
}

/// For recordings that began late, or that take too much work: the placements do not show the pools from before. Segments at the
/// end have a name, and with it all their blocks. Blocks in other segments are assigned to the default pool.
fn find_by_name(
    transcript: &mut Transcript,
    names: &[NamedRange],
    beginning: &Beginning,
    streams: usize,
) -> Result<PrivatePools, OverBudget> {
    let count = NamedRange::private_pools(names);
    if count == 0 {
        return Ok(PrivatePools::default());
    }
    let Transcript { timeline, claim, .. } = transcript;
    let mut segments = ReservedSegments::default();
    claim.reserve(&mut segments.allocations, timeline.addresses.len())?;
    for segment in &beginning.segments {
        segments.make(segment.addr, segment.bytes);
    }
    timeline.follow(beginning, &mut segments);
    let all = segments.made as usize + 1;
    let mut labels = Labels { count, of: vec![0; all], undetermined: vec![true; all], ..Labels::default() };
    for (addr, (_, number)) in segments.segments {
        labels.of[number as usize] = NamedRange::number_at(names, addr);
        labels.undetermined[number as usize] = false;
    }
    Ok(write(timeline, &segments.allocations, &labels, streams))
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
pub(super) struct NamedRange {
    addr: u64,
    end: u64,
    pool: (u64, u64),
    /// The number of the private pool, from 1 in the order of names; 0 for the default pool.
    number: u32,
}

impl NamedRange {
    /// The ranges of some segments in address order; `None` unless all are named.
    pub(super) fn of(segments: &[Segment]) -> Option<Vec<Self>> {
        let pools: BTreeSet<(u64, u64)> = segments.iter().filter_map(|segment| segment.pool_id).collect();
        let private = pools.into_iter().filter(|pool| *pool != DEFAULT);
        let numbers: BTreeMap<(u64, u64), u32> = private.zip(1..=MAX_POOLS).collect();
        let named = |segment: &Segment| {
            let (addr, end) = (segment.address, segment.address.saturating_add(segment.total_size));
            let number = |pool| numbers.get(&pool).copied().unwrap_or(0);
            segment.pool_id.map(|pool| Self { addr, end, pool, number: number(pool) })
        };
        segments.iter().map(named).collect()
    }

    /// The number of the private pool at an address; 0 if none.
    pub(super) fn number_at(names: &[Self], addr: u64) -> u32 {
        let before = names.partition_point(|named| named.addr <= addr);
        before.checked_sub(1).map(|at| names[at]).filter(|named| addr < named.end).map_or(0, |named| named.number)
    }

    /// Number of named private pools.
    fn private_pools(names: &[Self]) -> u32 {
        names.iter().map(|named| named.number).max().unwrap_or(0)
    }
}
