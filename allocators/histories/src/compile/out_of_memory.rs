//! Eighth stage: the recorded memory at each failed request.

use super::memory::{self, When};
use super::pools::PoolNames;
use super::timeline::Refusal;
use super::transcript::Transcript;
use crate::history::{Beginning, Held, OutOfMemory, StreamHeld};
use crate::memory::{Contents, Memory};
use std::collections::BTreeMap;
use vramlab_device::budget::OverBudget;
use vramlab_policies::backends::CachingSettings;

/// Follows the recording from its beginning to each of its last failed requests. `streams` are the handles, `names` those of pools.
///
/// # Errors
/// [`OverBudget`] when the budget is used up.
pub(super) fn describe(
    transcript: &Transcript,
    beginning: &Beginning,
    streams: &[u64],
    names: Option<&PoolNames>,
    settings: &CachingSettings,
) -> Result<Vec<OutOfMemory>, OverBudget> {
    let Transcript { timeline, frees, refusals, budget, .. } = transcript;
    let mut waiting = refusals.last.iter().peekable();
    let Some(last) = refusals.last.back() else { return Ok(Vec::new()) };
    let shown = !(timeline.segments.is_empty() && beginning.segments.is_empty());
    let mut reports = Vec::new();
    memory::follow((timeline, frees), (beginning, streams), (settings, budget), last.op, |at, when, memory| {
        while let Some(refusal) = waiting.next_if(|refusal| when == When::After && refusal.op <= at) {
            let complete = beginning.unknown.is_none();
            reports.push(describe_refusal(refusal, memory, (names, settings), shown, complete));
        }
    })?;
    Ok(reports)
}

/// The memory state for a failed request; `shown` is whether the recording has segments, `complete` whether it has all of them.
/// O(n) in the blocks.
fn describe_refusal(
    refusal: &Refusal,
    memory: &Memory,
    (names, settings): (Option<&PoolNames>, &CachingSettings),
    shown: bool,
    complete: bool,
) -> OutOfMemory {
    let (mut all, mut streams) = (Held::default(), BTreeMap::<u64, Held>::new());
    let (mut same_stream, mut private_free_bytes) = (Held::default(), 0);
    for (start, segment) in memory.segments() {
        let contents = memory.contents(*start, segment);
        if names.is_some_and(|names| names.number_at(*start) > 0) {
            private_free_bytes += contents.free;
        } else if segment.stream == refusal.stream {
            add(&mut same_stream, segment.bytes, &contents);
        }
        for state in [&mut all, streams.entry(segment.stream).or_default()] {
            add(state, segment.bytes, &contents);
        }
    }
    let streams = streams.into_iter().map(|(stream, held)| StreamHeld { stream, held });
    let expandable = memory.segments().values().any(|segment| segment.expandable);
    OutOfMemory {
        event: refusal.number,
        requested_bytes: refusal.bytes,
        stream: refusal.stream,
        device_free_bytes: Some(refusal.device_free).filter(|free| *free > 0),
        limit_bytes: settings.memory_limit,
        live_bytes: memory.totals().requested,
        held: shown.then_some(all),
        private_free_bytes,
        same_stream,
        streams: if shown { streams.collect() } else { Vec::new() },
        complete: shown && complete && memory.is_whole(),
        against_fragmentation: (!expandable)
            .then(|| settings.against_fragmentation(Some("expandable_segments")))
            .flatten(),
    }
}

fn add(state: &mut Held, reserved: u64, contents: &Contents) {
    state.reserved_bytes += reserved;
    state.allocated_bytes += contents.active - contents.pending;
    state.pending_bytes += contents.pending;
    state.free_bytes += contents.free;
    state.free_blocks += contents.holes;
    state.largest_free_bytes = state.largest_free_bytes.max(contents.largest_hole);
}
