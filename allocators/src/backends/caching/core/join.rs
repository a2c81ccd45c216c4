//! What becomes of a block that the client lets go of: it is free, and one with the free blocks beside it.

use super::blocks::{BlockIndex, BlockSlab, Extent, record, record_mut, vacate};
use super::free_index::FreeIndex;
use super::tally::Tally;
use crate::contract::PoolKind;
use crate::policy::rounding::MIN_BLOCK;

/// Makes a block free and joins it with free neighbours; true when there were any. `now` counts lookups.
#[inline(always)]
pub(super) fn join(
    free: &mut impl FreeIndex,
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    pool: PoolKind,
    index: BlockIndex,
    block: Extent,
    now: u64,
) -> bool {
    let (prev, next) = (block.prev, block.next);
    let (records, vacant) = blocks.parts();
    let below = record(records, prev).is_free();
    let above = record(records, next).is_free();
    if !below && !above {
        record_mut(records, index).set_free();
        free.insert(records, index, block.units);
        blocks.set_freed_at(index, now);
        count(tally, pool, block, block.units, block.is_split(), 0);
        return false;
    }
    // A free neighbour takes the block in and keeps its record and, if it can, its place in the index.
    let (keeper, old_units, new_units) = if below {
        let (mut units, mut beyond) = (block.units, next);
        if above {
            let gone = *record(records, next);
            free.remove(records, next, gone.units());
            (units, beyond) = (units + gone.units(), gone.next());
            vacate(records, vacant, next);
        }
        let keeper = record_mut(records, prev);
        let old_units = keeper.units();
        keeper.extend_up(units, beyond);
        record_mut(records, beyond).set_prev(prev);
        (prev, old_units, old_units + units)
    } else {
        let keeper = record_mut(records, next);
        let old_units = keeper.units();
        keeper.extend_down(block.units, prev);
        record_mut(records, prev).set_next(next);
        (next, old_units, old_units + block.units)
    };
    vacate(records, vacant, index);
    free.resized(records, keeper, old_units, new_units);
    let is_part = record(records, keeper).is_split();
    count(tally, pool, block, new_units, is_part, u64::from(below) + u64::from(above));
    blocks.set_freed_at(keeper, now);
    true
}

/// Counts a block that became free, and one of `units` with `joined` neighbours. As PyTorch counts it: the neighbours were
/// free parts and are gone, the whole is one if it is still a part.
#[inline(always)]
fn count(tally: &mut Tally, pool: PoolKind, block: Extent, units: u32, is_part: bool, joined: u64) {
    if is_part {
        tally.join_splits(pool, block.bytes(), joined);
    } else {
        let bytes = u64::from(units) * MIN_BLOCK;
        tally.remove_splits(pool, joined, bytes - block.bytes());
        tally.end_segment(bytes);
    }
}
