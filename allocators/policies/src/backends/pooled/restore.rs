//! Segments and blocks of another allocator, taken over before the first allocation.

use crate::contract::{AllocError, BlockInfo, BlockState, SegmentInfo, Snapshot};
use crate::policy::Heap;
use crate::policy::size::Size;
use crate::space::{BlockId, FreeList, Owner};
use vramlab_device::{DeviceAddr, StreamId};

fn in_use(block: &BlockInfo) -> bool {
    block.state != BlockState::Free
}

fn is_idle(segment: &SegmentInfo) -> bool {
    !segment.blocks.iter().any(in_use)
}

/// The allocator's name, how it rounds, and whom the segments of a stream serve.
type Rules<'a> = (&'static str, &'a Size, &'a dyn Fn(StreamId) -> Owner);

/// See [`restore`](crate::DeviceAllocator::restore). Returns the blocks that the client holds.
pub(super) fn restore(
    heap: &mut Heap,
    rules: Rules<'_>,
    snapshot: &Snapshot,
    age: &dyn Fn(DeviceAddr) -> u64,
) -> Result<Vec<BlockId>, AllocError> {
    let (_, size, _) = rules;
    snapshot.segments.iter().try_for_each(|segment| check(segment, size))?;
    let made = make_segments(heap, rules, &snapshot.segments)?;
    let mut held = Vec::new();
    for (segment, whole) in made {
        if is_idle(segment) {
            heap.space_mut().set_age(whole, age(segment.addr));
            continue;
        }
        let mut parts: Vec<(u64, Option<u64>)> = Vec::with_capacity(segment.blocks.len());
        for block in &segment.blocks {
            let requested = in_use(block).then_some(block.requested);
            match parts.last_mut() {
                // Free neighbours that were of different streams are of one now.
                Some((bytes, None)) if requested.is_none() => *bytes += block.bytes,
                _ => parts.push((block.bytes, requested)),
            }
        }
        let blocks = heap.carve(whole, &parts);
        held.extend(blocks.into_iter().zip(&parts).filter(|(_, part)| part.1.is_some()).map(|(id, _)| id));
    }
    Ok(held)
}

/// Takes the segments from the device, the last first: drivers hand addresses out from the top downwards, so they come to lie
/// in their order. Those without a block in use only if there is memory for all.
fn make_segments<'a>(
    heap: &mut Heap,
    (name, size, owner): Rules<'_>,
    segments: &'a [SegmentInfo],
) -> Result<Vec<(&'a SegmentInfo, BlockId)>, AllocError> {
    let mut made: Vec<(&SegmentInfo, BlockId)> = Vec::with_capacity(segments.len());
    let mut short = false;
    for segment in segments.iter().rev() {
        let list = FreeList { owner: owner(segment.stream), pool: size.pool_of_segment(segment.pool) };
        while !(short && is_idle(segment)) {
            match heap.new_segment(list, segment.bytes) {
                Ok(Some(block)) => {
                    made.push((segment, block));
                    break;
                }
                Ok(None) if !short => {
                    short = true;
                    let (idle, kept) = made.into_iter().partition(|(segment, _)| is_idle(segment));
                    made = kept;
                    give_back(heap, idle)?;
                }
                Ok(None) => {
                    let report = heap.refusal(name, list, segment.bytes, segment.bytes);
                    give_back(heap, made)?;
                    return Err(AllocError::OutOfMemory(Box::new(report)));
                }
                Err(error) => {
                    give_back(heap, made)?;
                    return Err(error.into());
                }
            }
        }
    }
    made.reverse();
    Ok(made)
}

fn give_back(heap: &mut Heap, made: Vec<(&SegmentInfo, BlockId)>) -> Result<(), AllocError> {
    for (_, block) in made {
        heap.release(heap.space()[block].segment)?;
    }
    Ok(())
}

/// Refuses what is no segment cut into blocks.
fn check(segment: &SegmentInfo, size: &Size) -> Result<(), AllocError> {
    let sizes = segment.blocks.iter().map(|block| block.bytes);
    let whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(size.granule());
    let sum = sizes.clone().try_fold(0u64, u64::checked_add);
    if segment.blocks.is_empty()
        || !sizes.clone().all(whole)
        || sum != Some(segment.bytes)
        || segment.blocks.iter().any(|block| block.requested > block.bytes)
    {
        return Err(AllocError::InvalidRequest {
            bytes: segment.bytes,
            align: 1,
            reason: "the blocks of a segment do not fill it",
        });
    }
    Ok(())
}
