//! Fifth stage: the stream that delayed each deferred free.

use super::timeline::Timeline;
use crate::history::{BY_DEVICE, Beginning, Kind, MAX_STREAMS, NEVER, Release, ReplayError};
use crate::steps;
use std::collections::BTreeSet;

/// Numbers streams by their handles, as allocators order them, and returns the handles. `handles` are sorted, with the numbers
/// that operations use so far.
pub(super) fn sort(handles: &[(u64, u32)], timeline: &mut Timeline, beginning: &mut Beginning) -> Vec<u64> {
    let mut rank = vec![0; handles.len()];
    for (at, (_, number)) in (0u32..).zip(handles) {
        rank[*number as usize] = at;
    }
    let frees = timeline.pending.iter_mut().map(|pending| &mut pending.op);
    let ops = timeline.ops.iter_mut().filter(|op| !matches!(op.kind(), Kind::Trim | Kind::Nothing));
    for op in ops.chain(frees) {
        op.set_stream(rank[op.stream() as usize]);
        if op.kind() == Kind::Release {
            let release = op.release();
            op.set_release(Release { user: rank[release.user as usize], ..release });
        }
    }
    let segments = beginning.segments.iter_mut().map(|segment| &mut segment.stream);
    let blocks = beginning.blocks.iter_mut().map(|block| &mut block.stream);
    segments.chain(blocks).for_each(|stream| *stream = rank[*stream as usize]);
    handles.iter().map(|(handle, _)| *handle).collect()
}

/// Assigns each deferred free the stream that delayed it, and returns the number of streams that this needs in addition to the
/// `recorded` ones. Afterwards frees from before recording started come first in `deferred`.
///
/// Allocators poll a stream's pending frees in order and stop at the first whose event is not ready, so a stream fits if its
/// previous free completes no later. The stream with the last announced use is taken if it fits, otherwise the one with the
/// latest completion, which needs the fewest streams. Other announced uses are ignored: it is unknown which of them delayed the
/// block, and the wrong one would delay others.
pub(super) fn hold_up(deferred: &mut [u32], recorded: usize, timeline: &mut Timeline) -> Result<u32, ReplayError> {
    // Frees from before recording started come first, in the order of their completion.
    deferred.sort_unstable_by_key(|&number| match timeline.is_before(number) {
        true => (0, timeline.op_mut(number).release().ready),
        false => (1, number),
    });
    let mut announced = Vec::with_capacity(deferred.len());
    for &number in &*deferred {
        let op = timeline.op_mut(number);
        announced.push(op.kind() == Kind::Release);
        op.set_kind(Kind::Free);
    }
    // Frees that completed immediately had no running use.
    for op in &mut timeline.ops {
        match op.kind() {
            Kind::Release => op.set_kind(Kind::Free),
            Kind::Use => op.set_kind(Kind::Nothing),
            _ => {}
        }
    }
    let mut last = vec![0; recorded];
    // CAST: at most `MAX_STREAMS`.
    let mut ends: BTreeSet<(u32, u32)> = (0..recorded as u32).map(|stream| (0, stream)).collect();
    for (&number, announced) in deferred.iter().zip(announced) {
        let op = timeline.op_mut(number);
        let release = op.release();
        let ready = if release.ready == BY_DEVICE { NEVER } else { release.ready };
        let block_stream = op.stream();
        let other = |stream: &&(u32, u32)| {
            steps::count(1);
            stream.1 != block_stream
        };
        let fit = || ends.range(..=(ready, u32::MAX)).rev().find(other);
        let user = if announced && last[release.user as usize] <= ready {
            release.user
        } else if let Some((_, stream)) = fit() {
            *stream
        } else if last.len() - recorded >= MAX_STREAMS {
            let text = format!("its deferred frees complete in an order that needs {MAX_STREAMS} more streams");
            return Err(ReplayError::History(text));
        } else {
            last.push(0);
            last.len() as u32 - 1
        };
        ends.remove(&(last[user as usize], user));
        ends.insert((ready, user));
        last[user as usize] = ready;
        op.set_kind(Kind::Release);
        op.set_release(Release { ready, user });
    }
    // CAST: as above.
    Ok((last.len() - recorded) as u32)
}

#[cfg(test)]
mod tests {
    use super::super::timeline::free_op;
    use super::*;

    #[test]
    fn frees_that_complete_in_order_share_a_stream() {
        let completing = |ready: &[u32]| {
            let mut timeline = Timeline { ops: vec![free_op(0, 0); ready.len()], ..Timeline::default() };
            let mut deferred: Vec<u32> = (0..).zip(ready).map(|(free, _)| free).collect();
            for (free, ready) in (0..).zip(ready) {
                timeline.set_ready(free, *ready);
            }
            let more = hold_up(&mut deferred, 1, &mut timeline).unwrap();
            (more, timeline.ops.iter().map(|op| op.release().user).collect::<Vec<_>>())
        };
        assert_eq!(completing(&[]), (0, vec![]));
        assert_eq!(completing(&[5, 6, 6]), (1, vec![1, 1, 1]));
        assert_eq!(completing(&[6, 5, 7, BY_DEVICE]), (2, vec![1, 2, 1, 1]));
    }

    #[test]
    fn streams_are_numbered_by_handle() {
        let mut timeline = Timeline { ops: vec![free_op(1, 0), free_op(0, 1)], ..Timeline::default() };
        let handles = sort(&[(7, 1), (9, 0)], &mut timeline, &mut Beginning::default());
        assert_eq!((handles, timeline.ops[0].stream(), timeline.ops[1].stream()), (vec![7, 9], 0, 1));
    }
}
