//! The names of pools at the end of a history.

use crate::formats::Segment;
use crate::history::MAX_POOLS;
use std::collections::{BTreeMap, BTreeSet};

/// The name of PyTorch's default pool.
pub(super) const DEFAULT: (u64, u64) = (0, 0);

/// A range of addresses whose pool a snapshot names.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct NamedRange {
    pub(super) addr: u64,
    pub(super) end: u64,
    pub(super) pool: (u64, u64),
    /// The number of the private pool, from 1 in the order of names; 0 for the default pool.
    number: u32,
}

impl NamedRange {
    /// Those of some segments in address order; `None` unless all are named.
    pub(in super::super) fn of(segments: &[Segment]) -> Option<Vec<Self>> {
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
    pub(in super::super) fn number_at(names: &[Self], addr: u64) -> u32 {
        let before = names.partition_point(|named| named.addr <= addr);
        before.checked_sub(1).map(|at| names[at]).filter(|named| addr < named.end).map_or(0, |named| named.number)
    }

    /// How many private pools are named.
    pub(super) fn private_pools(names: &[Self]) -> u32 {
        names.iter().map(|named| named.number).max().unwrap_or(0)
    }
}
