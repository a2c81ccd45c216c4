//! Eighth stage: what the recorded allocator held at each request that it refused.

use super::memory::{self, When};
use super::transcript::Transcript;
use crate::history::{Beginning, Held, OutOfMemory, StreamHeld};
use crate::memory::{Contents, Memory};
use std::collections::{BTreeMap, VecDeque};
use vramlab_device::budget::OverBudget;
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::policy::size::torch::{round_size, segment_size};

/// Follows the history from its beginning up to each of its last refused requests. `streams` are the handles.
///
/// # Errors
/// [`OverBudget`] when following the memory takes more than there is.
pub(super) fn describe(
    transcript: &Transcript,
    beginning: &Beginning,
    streams: &[u64],
    settings: &CachingSettings,
) -> Result<Vec<OutOfMemory>, OverBudget> {
    let Transcript { timeline, frees, refusals, budget, .. } = transcript;
    let mut waiting = refusals.last.iter().peekable();
    let Some(last) = refusals.last.back() else { return Ok(Vec::new()) };
    let shown = !(timeline.segments.is_empty() && beginning.segments.is_empty());
    let mut found = Vec::new();
    memory::follow((timeline, frees), (beginning, streams), (settings, budget), last.op, |at, when, memory| {
        while let Some(refusal) = waiting.next_if(|refusal| when == When::After && refusal.op <= at) {
            found.push(describe_one(refusal, memory, settings, shown, beginning.unknown.is_none()));
        }
    })?;
    Ok(found)
}

/// What is held now, for a request that is refused; `shown` says whether the history shows segments,
/// `whole` whether it shows all of them. O(n) in the blocks.
fn describe_one(
    refusal: &Refusal,
    memory: &Memory,
    settings: &CachingSettings,
    shown: bool,
    whole: bool,
) -> OutOfMemory {
    let (mut all, mut streams) = (Held::default(), BTreeMap::<u64, Held>::new());
    for (start, segment) in memory.segments() {
        let contents = memory.contents(*start, segment);
        for held in [&mut all, streams.entry(segment.stream).or_default()] {
            add(held, segment.bytes, &contents);
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
        streams: if shown { streams.collect() } else { Vec::new() },
        complete: shown && whole && memory.is_whole(),
        against_fragmentation: (!expandable)
            .then(|| settings.against_fragmentation(Some("expandable_segments")))
            .flatten(),
    }
}

fn add(held: &mut Held, reserved: u64, contents: &Contents) {
    held.reserved_bytes += reserved;
    held.allocated_bytes += contents.active - contents.pending;
    held.pending_bytes += contents.pending;
    held.free_bytes += contents.free;
    held.free_blocks += contents.holes;
    held.largest_free_bytes = held.largest_free_bytes.max(contents.largest_hole);
}

/// Refused requests that are looked at; a history may have any number, and the last ones tell why a program ended.
const MOST: usize = 100;

/// A refused request as the log has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    pub(super) number: u64,
    pub(super) bytes: u64,
    pub(super) stream: u64,
    /// Bytes free on the device; 0 where the log does not say.
    pub(super) device_free: u64,
    /// Bytes reserved beyond those before the first event; below zero it wraps.
    pub(super) reserved: u64,
    /// The operation before which it was.
    pub(super) op: u32,
}

/// Refused requests.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// How many there were.
    pub(super) count: u64,
    /// The last of them.
    pub(super) last: VecDeque<Refusal>,
}

impl Refusals {
    pub(super) fn add(&mut self, refusal: Refusal) {
        self.count += 1;
        if self.last.len() == MOST {
            self.last.pop_front();
        }
        self.last.push_back(refusal);
    }

    /// From how many reserved bytes on the device refused, as far as refused requests tell: that many, and more than
    /// `most_reserved`, which were reserved at one time. Before the first event `before` bytes were held.
    pub(super) fn refused_from(&self, settings: &CachingSettings, before: u64, most_reserved: i64) -> Option<u64> {
        let lacked = |refusal: &Refusal| {
            let needed = segment_size(round_size(refusal.bytes, &settings.roundup_power2_divisions));
            let free = Some(refusal.device_free).filter(|free| *free > 0);
            refusal.reserved.wrapping_add(before).saturating_add(free.map_or(needed, |free| needed.min(free + 1)))
        };
        let least = self.last.iter().map(lacked).min()?;
        Some(least.max(most_reserved.wrapping_add_unsigned(before).cast_unsigned().saturating_add(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_device_refuses_from_the_least_that_was_refused_and_above_the_most_that_was_held() {
        let refusal =
            |bytes, device_free, reserved| Refusal { number: 1, bytes, stream: 0, device_free, reserved, op: 0 };
        let mut refusals = Refusals::default();
        assert_eq!(refusals.refused_from(&CachingSettings::default(), 0, 0), None);
        refusals.add(refusal(100 * MIB, 0, 900 * MIB));
        let from = |refusals: &Refusals, most| refusals.refused_from(&CachingSettings::default(), 0, most).unwrap();
        assert_eq!(from(&refusals, 0), 1000 * MIB);
        refusals.add(refusal(100 * MIB, 10 * MIB, 960 * MIB));
        assert_eq!(from(&refusals, 0), 970 * MIB + 1, "it said how much was free");
        assert_eq!(from(&refusals, (980 * MIB).cast_signed()), 980 * MIB + 1, "so much was there at one time");
        (0..200).for_each(|_| refusals.add(refusal(MIB, 0, 0)));
        assert_eq!((refusals.count, refusals.last.len()), (202, MOST));
    }
}
