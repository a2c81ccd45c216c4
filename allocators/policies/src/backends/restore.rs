//! Segments and blocks of another allocator, taken over before the first allocation.

use crate::contract::{AllocError, SegmentInfo, Snapshot};
use crate::policy::grow::Segments;
use crate::policy::size::Size;
use crate::space::{FreeList, Owner};
use vramlab_device::{DeviceAddr, DriverError, StreamId};

/// Segments that can be split like another allocator's.
pub(super) trait Restores: Segments {
    /// A live block.
    type Held;

    /// Releases a new segment.
    fn give_back(&mut self, segment: Self::Block) -> Result<(), DriverError>;

    /// Sets the age of a new segment to `age` searches, if it is one free block.
    fn leave_whole(&mut self, list: FreeList, segment: Self::Block, age: u64);

    /// Splits a new segment into blocks: their sizes, each with the requested bytes if it is live. Returns the live ones. No two
    /// free ones are adjacent.
    fn cut(&mut self, list: FreeList, segment: Self::Block, parts: &[(u64, Option<u64>)]) -> Vec<Self::Held>;
}

/// The allocator's name, its rounding, and the owner that the segments of a stream serve.
type Rules<'a> = (&'static str, &'a Size, &'a dyn Fn(StreamId) -> Owner);

/// See [`restore`](crate::contract::Takeover::restore). Returns the live blocks.
pub(super) fn restore<S: Restores>(
    segments: &mut S,
    rules: Rules<'_>,
    snapshot: &Snapshot,
    age: &dyn Fn(DeviceAddr) -> u64,
) -> Result<Vec<S::Held>, AllocError> {
    let (_, size, _) = rules;
    snapshot.segments.iter().try_for_each(|segment| check(segment, size))?;
    let mut live = Vec::new();
    for (segment, list, new) in make_segments(segments, rules, &snapshot.segments)? {
        if segment.is_idle() {
            segments.leave_whole(list, new, age(segment.addr));
            continue;
        }
        live.extend(segments.cut(list, new, &segment.parts()));
    }
    Ok(live)
}

/// A segment of the snapshot, the free list of its blocks, and the new segment.
type Made<'a, B> = (&'a SegmentInfo, FreeList, B);

/// Allocates the segments, the last first: drivers assign addresses from the top downwards, so the segments keep their order. Those
/// without an active block are allocated only if there is memory for all.
fn make_segments<'a, S: Restores>(
    segments: &mut S,
    (name, size, owner): Rules<'_>,
    snapshot: &'a [SegmentInfo],
) -> Result<Vec<Made<'a, S::Block>>, AllocError> {
    let mut made: Vec<Made<'_, S::Block>> = Vec::with_capacity(snapshot.len());
    let mut short = false;
    for segment in snapshot.iter().rev() {
        let list = FreeList { owner: owner(segment.stream), pool: size.pool_of_segment(segment.pool) };
        while !(short && segment.is_idle()) {
            match segments.new_segment(list, segment.bytes) {
                Ok(Some(block)) => {
                    made.push((segment, list, block));
                    break;
                }
                Ok(None) if !short => {
                    short = true;
                    let (idle, kept) = made.into_iter().partition(|(segment, ..)| segment.is_idle());
                    made = kept;
                    give_back(segments, idle)?;
                }
                Ok(None) => {
                    let report = segments.refusal(name, list, segment.bytes, segment.bytes);
                    give_back(segments, made)?;
                    return Err(AllocError::OutOfMemory(Box::new(report)));
                }
                Err(error) => {
                    give_back(segments, made)?;
                    return Err(error.into());
                }
            }
        }
    }
    made.reverse();
    Ok(made)
}

fn give_back<S: Restores>(segments: &mut S, made: Vec<Made<'_, S::Block>>) -> Result<(), DriverError> {
    made.into_iter().try_for_each(|(_, _, segment)| segments.give_back(segment))
}

/// Refuses a segment whose blocks do not fill it.
fn check(segment: &SegmentInfo, size: &Size) -> Result<(), AllocError> {
    let sizes = segment.blocks.iter().map(|block| block.bytes);
    let is_whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(size.granule());
    let sum = sizes.clone().try_fold(0u64, u64::checked_add);
    if segment.blocks.is_empty()
        || !sizes.clone().all(is_whole)
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
