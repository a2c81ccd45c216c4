//! What becomes of a block that the client lets go of: it is free, and one with the free blocks beside it.
//!
//! Twice, for the same result. Which neighbours are free is anybody's guess at every call, and a wrong guess throws away
//! what a processor has begun, so [`join_blindly`] does the work for both whether they are free or not. With many blocks it
//! is the other way round: free ones share their bins, which is a branch in any case, and what is read and written in vain
//! is not in the nearest cache.

use super::blocks::{BlockIndex, BlockSlab, Extent, NONE, record, record_mut, vacate, vacate_if};
use super::exact_index::ExactIndex;
use super::free_index::FreeIndex;
use super::tally::Tally;
use crate::contract::PoolKind;
use crate::policy::rounding::MIN_BLOCK;
use std::hint::select_unpredictable;

/// Up to as many records [`join_blindly`] is the faster. With mixed sizes on a Xeon (builds in turn in one run): 58.8 instead
/// of 61.5 ns for a free and an allocation with 64 live blocks (least of 22 times), 74.0 instead of 70.7 with 1,024 and 100.5
/// instead of 91.7 with 16,384 (of 8).
pub(super) const FEW: usize = 512;

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

/// The same for the small pool without a branch on which neighbours are free, nor a count of lookups. The joined block has
/// the record of the one above, if that was free.
#[inline(always)]
pub(super) fn join_blindly(
    free: &mut ExactIndex,
    blocks: &mut BlockSlab,
    tally: &mut Tally,
    index: BlockIndex,
    block: Extent,
) -> bool {
    let (records, vacant) = blocks.parts();
    let (prev, next) = (block.prev, block.next);
    free.remove_if_free(records, prev);
    free.remove_if_free(records, next);
    let (below, above) = (record(records, prev), record(records, next));
    let (joins_below, joins_above) = (below.is_free(), above.is_free());
    let keeper = select_unpredictable(joins_above, next, index);
    let addr = select_unpredictable(joins_below, below.addr(), block.addr);
    let units = block.units
        + select_unpredictable(joins_below, below.units(), 0)
        + select_unpredictable(joins_above, above.units(), 0);
    let outer_prev = select_unpredictable(joins_below, below.prev(), prev);
    let outer_next = select_unpredictable(joins_above, above.next(), next);
    let mut last_vacant = *vacant;
    vacate_if(records, &mut last_vacant, prev, joins_below);
    vacate_if(records, &mut last_vacant, index, joins_above);
    *vacant = last_vacant;
    record_mut(records, keeper).set_small_free(addr, units, outer_prev, outer_next);
    record_mut(records, outer_prev).set_next(keeper);
    record_mut(records, outer_next).set_prev(keeper);
    free.insert(records, keeper, units);
    let joined = u64::from(joins_below) + u64::from(joins_above);
    count(tally, PoolKind::Small, block, units, outer_prev | outer_next != NONE, joined);
    joined != 0
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

#[cfg(test)]
mod tests {
    use super::super::block_cache::{BlockCache, Served, SplitRules, Wanted};
    use super::super::blocks::BlockRecord;
    use super::*;
    use crate::device::StreamId;
    use crate::policy::rounding::SMALL_SEGMENT;

    /// What a block is to its client.
    fn seen(served: &Served) -> (u64, u64, bool) {
        (served.addr, served.bytes, served.split)
    }

    fn assert_alike(blind: &mut BlockCache, guided: &BlockCache) {
        blind.settle();
        let segments = |cache: &BlockCache| {
            let mut segments = cache.segments(StreamId::numbered(1));
            segments.sort_by_key(|segment| segment.addr);
            segments
        };
        assert_eq!(segments(blind), segments(guided));
        let figures = |cache: &BlockCache| [cache.tally.current(), cache.tally.peak(), cache.tally.increases()];
        assert_eq!(figures(blind), figures(guided));
        assert_eq!(blind.tally.ledger(true), guided.tally.ledger(true));
    }

    /// One cache joins without branches, as long as its blocks are few, and the other with them.
    #[test]
    fn with_and_without_branches_the_same_becomes_of_blocks() {
        let (mut blind, mut guided) = (BlockCache::default(), BlockCache::default());
        let (mut live, mut joins, mut segments) = (Vec::new(), [0; 2], 0);
        let mut seed = 7u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 11) % below
        };
        for step in 0..20_000 {
            // Grows, then shrinks, and so on.
            if random(100) < if step / 500 % 2 == 0 { 45 } else { 55 } && !live.is_empty() {
                // CAST: below a length.
                let (one, other, requested): (Served, Served, u64) =
                    live.swap_remove(random(live.len() as u64) as usize);
                let joined = blind.take_back_small(one.index, one.addr, requested).expect("the block is live");
                assert_eq!(guided.take_back(other.index, requested, 0), joined);
                joins[usize::from(joined)] += 1;
            } else if live.len() < 200 {
                let most = 512 << random(11);
                let requested = 1 + random(most);
                let wanted = Wanted { rounded: requested.next_multiple_of(MIN_BLOCK), requested, now: 0 };
                let rules = &SplitRules::NONE;
                let one = blind.serve_small(wanted.rounded, requested);
                let other = guided.serve(PoolKind::Small, wanted, rules);
                let (one, other) = one.zip(other).unwrap_or_else(|| {
                    segments += 1;
                    let segment = BlockRecord::segment(segments * SMALL_SEGMENT, SMALL_SEGMENT, PoolKind::Small);
                    blind.settle();
                    let serve = |cache: &mut BlockCache| cache.serve_from_segment(segment, wanted, rules);
                    (serve(&mut blind), serve(&mut guided))
                });
                assert_eq!(seen(&one), seen(&other), "step {step}");
                live.push((one, other, requested));
            }
            if step % 100 == 0 {
                assert_alike(&mut blind, &guided);
            }
        }
        assert!(blind.blocks.records().len() <= FEW && segments > 2 && joins.iter().all(|joins| *joins > 1_000));
        for (one, other, requested) in live {
            blind.take_back_small(one.index, one.addr, requested).expect("the block is live");
            guided.take_back(other.index, requested, 0);
        }
        assert_alike(&mut blind, &guided);
    }
}
