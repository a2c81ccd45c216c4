//! How long segments had been idle before recording started, for an allocator that collects garbage by age.
//!
//! Garbage collection releases idle segments in rounds: those at least as old as the mean, each round by (stream, size, address).
//! So the released and retained segments of a collection show how their ages compare. The time at which a segment became idle is
//! counted in searches of the large pool since recording started, negative for earlier times. Any numbers that reproduce each
//! collection will do; each is chosen as high as possible, from the last collection to the first and from its last round to its
//! first.

use super::timeline::{Operation, Placements, Timeline};
use crate::history::{Beginning, Kind};
use crate::steps;
use std::collections::BTreeMap;
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::contract::PoolKind;
use vramlab_policies::policy::size::torch::{SMALL_SEGMENT, pool_of, round_size};

/// Highest age; sums of ages stay in 64 bits.
const OLDEST: i128 = 1 << 40;

/// Time at which a segment became idle.
#[derive(Clone, Copy, Debug)]
enum Since {
    /// After this number of searches.
    Searches(u64),
    /// Before recording started; the number of the segment.
    Before(usize),
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    end: u64,
    stream: u32,
    /// Number of active blocks.
    used: u32,
    since: Since,
}

/// Segments that one request made the allocator release.
#[derive(Debug)]
struct Collection {
    /// In order; each marked segment starts a new round.
    taken: Vec<(Since, bool)>,
    left: Vec<Since>,
}

/// Sets the ages of idle segments of the large pool. O(n log n) in the operations.
pub(super) fn find(timeline: &Timeline, beginning: &mut Beginning, settings: &CachingSettings) {
    if settings.memory_limit.is_none() || settings.garbage_collection_threshold <= 0.0 {
        return;
    }
    // Bounds the time for every recording.
    let budget = 64 * (timeline.ops.len() + beginning.segments.len());
    let mut idle = Idle::new(beginning, settings, budget);
    timeline.follow(beginning, &mut idle);
    let collections = idle.collections;
    let mut since: Vec<i128> = vec![0; beginning.segments.len()];
    let mut chosen = vec![false; since.len()];
    for collection in collections.iter().rev() {
        let Collection { taken, left } = collection;
        let mut end = taken.len();
        // Segments retained after the current round.
        let mut rest: Vec<Since> = left.clone();
        while end > 0 {
            let mut start = end - 1;
            while start > 0 && !taken[start].1 {
                start -= 1;
            }
            let mut round = &taken[start..end];
            if rest.is_empty() {
                // Segments from before recording started are the oldest, so a last round with other segments has none of them.
                let old = round
                    .iter()
                    .rposition(|(segment, _)| matches!(segment, Since::Before(_)))
                    .map_or(0, |last| last + 1);
                rest.extend(round[old..].iter().map(|(segment, _)| *segment));
                round = &round[..old];
            }
            choose(round, &rest, &mut since, &mut chosen);
            rest.extend(round.iter().map(|(segment, _)| *segment));
            end = start;
        }
    }
    for (segment, since) in beginning.segments.iter_mut().zip(since) {
        // CAST: at most `OLDEST`, and never above zero.
        segment.age = (-since) as u64;
    }
}

/// Chooses one time for a round's segments from before recording started: the latest that makes the mean age lower than the ages
/// of retained segments.
fn choose(round: &[(Since, bool)], rest: &[Since], since: &mut [i128], chosen: &mut [bool]) {
    steps::count(round.len() + rest.len());
    let value = |since_when: &Since| match *since_when {
        Since::Searches(searches) => i128::from(searches),
        Since::Before(number) => since[number],
    };
    let mut free = Vec::new();
    let mut sum = rest.iter().map(value).sum::<i128>();
    for (segment, _) in round {
        match segment {
            Since::Before(number) if !chosen[*number] => free.push(*number),
            segment => sum += value(segment),
        }
    }
    let (Some(lowest), false) = (rest.iter().map(value).min(), free.is_empty()) else { return };
    // CAST: numbers of segments.
    let (all, count) = ((round.len() + rest.len()) as i128, free.len() as i128);
    let highest = (all * lowest - sum - 1).div_euclid(count).clamp(-OLDEST, 0);
    for number in free {
        (since[number], chosen[number]) = (highest, true);
    }
}

/// Follows the recorded placements and keeps the idle segments.
#[derive(Debug)]
struct Idle<'a> {
    settings: &'a CachingSettings,
    segments: BTreeMap<u64, Segment>,
    searches: u64,
    collections: Vec<Collection>,
    /// Segments that may still be examined.
    budget: usize,
}

impl<'a> Idle<'a> {
    fn new(beginning: &Beginning, settings: &'a CachingSettings, budget: usize) -> Self {
        let mut idle = Self { settings, segments: BTreeMap::new(), searches: 0, collections: Vec::new(), budget };
        for (number, segment) in beginning.segments.iter().enumerate() {
            let (end, stream) = (segment.addr + segment.bytes, segment.stream);
            idle.segments.insert(segment.addr, Segment { end, stream, used: 0, since: Since::Before(number) });
        }
        beginning.blocks.iter().for_each(|block| idle.take(block.addr));
        idle
    }

    fn segment_of(&mut self, addr: u64) -> Option<&mut Segment> {
        self.segments.range_mut(..=addr).next_back().map(|(_, segment)| segment).filter(|segment| addr < segment.end)
    }

    fn take(&mut self, addr: u64) {
        if let Some(segment) = self.segment_of(addr) {
            segment.used += 1;
        }
    }
}

impl Placements for Idle<'_> {
    fn free(&mut self, addr: u64) {
        let searches = self.searches;
        if let Some(segment) = self.segment_of(addr) {
            segment.used = segment.used.saturating_sub(1);
            if segment.used == 0 {
                segment.since = Since::Searches(searches);
            }
        }
    }

    fn operation(&mut self, Operation { op, segments, block, .. }: Operation<'_>) -> bool {
        let asks = matches!(op.kind(), Kind::Alloc | Kind::Refused);
        let large = || pool_of(round_size(op.value, &self.settings.roundup_power2_divisions)) == PoolKind::Large;
        self.searches += u64::from(asks && large());
        let mut taken: Vec<(Since, bool)> = Vec::new();
        let mut last = None;
        for event in segments.iter().filter(|event| event.part.is_none()) {
            let removed = self.segments.remove(&event.addr);
            if !event.released {
                let (end, stream) = (event.end(), op.stream());
                let since = Since::Searches(self.searches);
                self.segments.insert(event.addr, Segment { end, stream, used: 0, since });
            } else if let Some(removed) = removed.filter(|_| event.bytes > SMALL_SEGMENT) {
                let key = (removed.stream, event.bytes, event.addr);
                taken.push((removed.since, last.replace(key).is_some_and(|last| last > key)));
            }
        }
        if asks && !taken.is_empty() {
            let idle = |segment: &&Segment| segment.used == 0;
            let left = self.segments.iter().filter(|(start, segment)| segment.end - *start > SMALL_SEGMENT);
            let left: Vec<Since> = left.map(|(_, segment)| segment).filter(idle).map(|segment| segment.since).collect();
            let rounds = 1 + taken.iter().filter(|(_, begins)| *begins).count();
            let Some(rest) = self.budget.checked_sub(rounds * (taken.len() + left.len())) else { return false };
            self.budget = rest;
            self.collections.push(Collection { taken, left });
        }
        if let Some(addr) = block {
            self.take(addr);
        }
        true
    }
}
