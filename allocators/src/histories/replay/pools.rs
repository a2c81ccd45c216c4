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
//! What fits that is not always one answer. Blocks whose segment fits another pool as well are counted. The placements are the
//! same in either case.

mod evidence;
mod labels;
mod refine;

use super::beginning::Beginning;
use super::builder::HistoryBuilder;
use super::op::{Kind, MAX_POOLS};
use crate::backends::CachingSettings;
use crate::budget::OverBudget;
use crate::histories::trace::Segment;
use crate::ordered::OrderedMap;
use crate::steps;
use evidence::Walk;
use labels::Labels;
use std::collections::{BTreeMap, BTreeSet};

/// The name of PyTorch's default pool.
const DEFAULT: (u64, u64) = (0, 0);

/// A range of addresses whose pool a snapshot names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    addr: u64,
    end: u64,
    pool: (u64, u64),
    /// The number of the private pool, from 1 in the order of names; 0 for the default pool.
    number: u32,
}

impl Named {
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
}

/// The number of the private pool that is named at an address; 0 where none is.
pub(super) fn number_at(names: &[Named], addr: u64) -> u32 {
    let before = names.partition_point(|named| named.addr <= addr);
    before.checked_sub(1).map(|at| names[at]).filter(|named| addr < named.end).map_or(0, |named| named.number)
}

/// What is known of the private pools of a history.
#[derive(Clone, Debug, Default)]
pub(super) struct PrivatePools {
    /// How many there are. Operations name them by number, from 1.
    pub(super) count: u32,
    /// From which operation on each that was released is asked for no more memory, in order.
    pub(super) released: Vec<(u32, u32)>,
    /// In which operation which of them gives back by itself what is idle, in order. An operation with the number of a pool empties
    /// no other cache.
    pub(super) trimmed: Vec<(u32, u32)>,
    /// Allocations from them.
    pub(super) allocations: u64,
    /// Allocations whose pool the history does not tell.
    pub(super) undetermined: u64,
}

impl HistoryBuilder {
    /// Tells the pool of each allocation and writes it into the operations. `streams` are the handles.
    ///
    /// # Errors
    /// [`OverBudget`] when following the placements needs more memory than there is.
    pub(super) fn tell_pools(
        &mut self,
        beginning: &Beginning,
        streams: &[u64],
        settings: &CachingSettings,
    ) -> Result<PrivatePools, OverBudget> {
        let Some(names) = self.pool_names.take() else { return Ok(PrivatePools::default()) };
        if !beginning.segments.is_empty() || !beginning.blocks.is_empty() {
            return self.tell_by_name(&names, beginning, streams);
        }
        self.make_room_to_follow(beginning)?;
        let mut walk = Walk::new(settings, streams);
        walk.follow(self)?;
        walk.name(&names);
        if !walk.tells_of_pools() {
            return Ok(PrivatePools::default());
        }
        let labels = Labels::of(&walk);
        Ok(self.write_pools(&walk.allocations, &labels, streams.len()))
    }

    /// Where recording began late, placements do not tell: what lay in which pool before is not known. Segments that are held at
    /// the end have a name, and with it all blocks in them. What lay in others is taken for the default pool's.
    fn tell_by_name(
        &mut self,
        names: &[Named],
        beginning: &Beginning,
        streams: &[u64],
    ) -> Result<PrivatePools, OverBudget> {
        let count = names.iter().map(|named| named.number).max().unwrap_or(0);
        if count == 0 {
            return Ok(PrivatePools::default());
        }
        let mut allocations: Vec<u32> = Vec::new();
        self.claim.reserve(&mut allocations, self.addresses.len())?;
        // Segments while they are held: end and number, from 1. 0 is where none is known.
        let mut held: OrderedMap<u64, (u64, u32)> = OrderedMap::new();
        let mut units = 1;
        let mut make = |held: &mut OrderedMap<u64, (u64, u32)>, addr, bytes| {
            held.insert(addr, (addr + bytes, units));
            units += 1;
            units
        };
        let mut made = 1;
        for segment in &beginning.segments {
            made = make(&mut held, segment.addr, segment.bytes);
        }
        let (mut addresses, mut segments) = (self.addresses.iter(), self.segments.iter().peekable());
        for number in 0..=self.next_op() {
            steps::count(1);
            while let Some(segment) = segments.next_if(|segment| segment.op <= number) {
                match segment.released {
                    true => drop(held.remove(&segment.addr)),
                    false => made = make(&mut held, segment.addr, segment.bytes),
                }
            }
            if self.ops.get(number as usize).is_some_and(|op| op.kind() == Kind::Alloc) {
                let Some(addr) = addresses.next() else { break };
                let unit = held.range(..=addr).next_back().filter(|(_, (end, _))| addr < end);
                allocations.push(unit.map_or(0, |(_, (_, unit))| *unit));
            }
        }
        let mut labels = Labels { count, of: vec![0; made as usize], ..Labels::default() };
        labels.undetermined = vec![true; made as usize];
        for (addr, (_, unit)) in held {
            labels.of[unit as usize] = number_at(names, addr);
            labels.undetermined[unit as usize] = false;
        }
        Ok(self.write_pools(&allocations, &labels, streams.len()))
    }

    fn write_pools(&mut self, allocations: &[u32], labels: &Labels, streams: usize) -> PrivatePools {
        let mut told = PrivatePools { count: labels.count.min(MAX_POOLS), ..PrivatePools::default() };
        let pool_of = |unit: u32| labels.of.get(unit as usize).copied().filter(|pool| *pool <= MAX_POOLS).unwrap_or(0);
        let mut units = allocations.iter();
        let mut last = vec![0; streams];
        for op in &mut self.ops {
            match op.kind() {
                Kind::Alloc => {
                    let Some(&unit) = units.next() else { break };
                    let pool = pool_of(unit);
                    told.allocations += u64::from(pool > 0);
                    told.undetermined += u64::from(labels.undetermined.get(unit as usize) == Some(&true));
                    last[op.stream() as usize] = pool;
                    *op = op.of_pool(pool);
                }
                // It was refused by the pool that the stream was in.
                Kind::Refused => *op = op.of_pool(last[op.stream() as usize]),
                _ => {}
            }
        }
        let known = |of: &[(u32, u32)]| of.iter().copied().filter(|(_, pool)| *pool <= MAX_POOLS).collect();
        (told.released, told.trimmed) = (known(&labels.released), known(&labels.trims));
        for &op in &labels.partial {
            let trim = &mut self.ops[op as usize];
            *trim = trim.of_pool(1);
        }
        told
    }
}
