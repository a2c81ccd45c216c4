//! Private pools: which blocks of a history lay in memory that CUDA graphs or `MemPool`s kept apart.
//!
//! PyTorch's events do not name the pool. A block is of the pool of its segment, or of the range of addresses where segments
//! expand, and a snapshot names the pools of those that are held at the end. Of the others the placements tell, which are
//! followed from the first event on:
//!
//! - *Two segments are of different pools* if a request of one would have been served better from the other. A new segment is
//!   taken only if no free block of the pool fits, and of those that fit the best is taken.
//! - *Two ranges of a stream are of different pools* if both have memory at once: a pool has one for small blocks and one for
//!   large ones.
//! - *A segment is of a private pool* if it was idle and stayed when the client emptied the cache. It is of another pool than
//!   those that went.
//! - *Where nothing speaks against it*, segments that a stream takes blocks from in turn are of one pool, and that is the default
//!   pool.
//!
//! Where that takes more work than the [history is long](effort::Effort), only what is held at the end has its pool's name.
//!
//! What fits that is not always one answer. Blocks whose segment fits another pool as well are counted. The placements are the
//! same in either case.

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

/// Finds the pool of each allocation and writes it into the operations. `names` are the pools that the history's end names, if it
/// names all; `streams` are the handles.
///
/// # Errors
/// [`OverBudget`] when following the placements needs more memory than there is.
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

/// Segments while they are held.
#[derive(Debug, Default)]
struct Held {
    /// End and number by first address. Numbers count from 1.
    segments: BTreeMap<u64, (u64, u32)>,
    /// Segments so far.
    made: u32,
    /// The number of the segment in which each allocation lies; 0 where none is known.
    allocations: Vec<u32>,
}

impl Held {
    fn make(&mut self, addr: u64, bytes: u64) {
        self.made += 1;
        self.segments.insert(addr, (addr + bytes, self.made));
    }
}

impl Placements for Held {
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

/// Where recording began late, placements do not tell: what lay in which pool before is not known. Nor do they where it takes too
/// much work. Segments that are held at
/// the end have a name, and with it all blocks in them. What lay in others is taken for the default pool's.
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
    let mut held = Held::default();
    claim.reserve(&mut held.allocations, timeline.addresses.len())?;
    for segment in &beginning.segments {
        held.make(segment.addr, segment.bytes);
    }
    timeline.follow(beginning, &mut held);
    let all = held.made as usize + 1;
    let mut labels = Labels { count, of: vec![0; all], undetermined: vec![true; all], ..Labels::default() };
    for (addr, (_, number)) in held.segments {
        labels.of[number as usize] = NamedRange::number_at(names, addr);
        labels.undetermined[number as usize] = false;
    }
    Ok(write(timeline, &held.allocations, &labels, streams))
}

/// Writes pools into the operations. `allocations` says in which segment each lies, and `labels` which pool each is of.
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
            // It was refused by the pool that the stream was in.
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

/// Steps for each operation and segment, and some for all. Recorded histories take a small part of that.
const EACH: u64 = 16;
const SOME: u64 = 1 << 20;

/// How much work the search for pools may be: in proportion to the history, whatever that says. What says of pairs of segments
/// that they are of different pools can be as much as there are pairs.
#[derive(Debug)]
struct Effort(Cell<u64>);

impl Effort {
    fn new(items: usize) -> Self {
        Self(Cell::new(EACH * items as u64 + SOME))
    }

    /// Takes steps. Whether some are left.
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
    /// Those of some segments in address order; `None` unless all are named.
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

    /// The number of the private pool that is named at an address; 0 where none is.
    pub(super) fn number_at(names: &[Self], addr: u64) -> u32 {
        let before = names.partition_point(|named| named.addr <= addr);
        before.checked_sub(1).map(|at| names[at]).filter(|named| addr < named.end).map_or(0, |named| named.number)
    }

    /// How many private pools are named.
    fn private_pools(names: &[Self]) -> u32 {
        names.iter().map(|named| named.number).max().unwrap_or(0)
    }
}
