//! Following the recorded memory, as `explain` and `report` do.

use super::{MANY, linear};
use crate::formats::{Action, Format, Origin, Origins, Summary};
use crate::memory::{Before, Events, Leftover, Memory, Pool, Recorded, Rules};
use vramlab_device::budget::Budget;
use vramlab_policies::backends::CachingSettings;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const BASE: u64 = 1 << 40;

/// Following as many events as there are takes a number of steps that is near their number, with a look at what is free after each.
fn follow(what: &str, history: impl Iterator<Item = (Action, u64, u64, u64)>) {
    let mut events = Events::new(&Budget::default());
    for (action, addr, bytes, stream) in history {
        let event = Recorded { addr, bytes, stream, time_ns: 0, origin: Origin::default(), action };
        events.push(event).unwrap();
    }
    let (budget, summary) = (Budget::new(u64::MAX), Summary::new(Format::SnapshotPickle));
    let rules = Rules::new(&summary, 0, &CachingSettings::default());
    linear(what, events.len() as u64, || {
        let before = Before::new(&events, &rules, &summary, &Origins::new(&budget), 0);
        let _ = Leftover::of(&events, &before);
        let mut memory = Memory::beginning(rules, &before, &budget).unwrap();
        for (index, event, at_once) in events.walk(0) {
            memory.apply(&event, index as u32, at_once).unwrap();
            let pool = Pool { stream: event.stream, small: false };
            assert!(memory.largest_hole(pool) <= memory.largest_with_pending(pool));
        }
    });
}

fn blocks(action: Action, count: u64) -> impl Iterator<Item = (Action, u64, u64, u64)> {
    (0..count).map(move |at| (action, BASE + at * KIB, KIB, 0))
}

#[test]
fn frees_that_wait() {
    let segment = [(Action::SegmentAlloc, BASE, MANY * KIB, 0)];
    let all = [Action::Alloc, Action::FreeRequested, Action::FreeCompleted].map(|action| blocks(action, MANY / 4));
    follow("frees that wait", segment.into_iter().chain(all.into_iter().flatten()));
}

#[test]
fn segments_that_come_and_go() {
    let each = |at: u64| {
        let (addr, stream) = (BASE + at * 2 * MIB, at % 4000);
        [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested, Action::FreeCompleted, Action::SegmentFree]
            .map(|action| (action, addr, 2 * MIB, stream))
    };
    follow("segments on many streams", (0..MANY / 5).flat_map(each));
}

#[test]
fn parts_that_join() {
    // Every second part first, so that each of the others joins two.
    let part = |action, at: u64| (action, BASE + at * 2 * MIB, 2 * MIB, 0);
    let even = (0..MANY / 4).map(|at| part(Action::SegmentMap, 2 * at));
    let odd = (0..MANY / 4).map(|at| part(Action::SegmentMap, 2 * at + 1));
    let gone = (0..MANY / 2).map(|at| part(Action::SegmentUnmap, at));
    follow("parts of an expandable segment", even.chain(odd).chain(gone));
}

#[test]
fn blocks_over_frees_that_wait() {
    // The completions are missing, and one block comes where many lay.
    let segment = [(Action::SegmentAlloc, BASE, MANY * KIB, 0)];
    let waiting = [Action::Alloc, Action::FreeRequested].map(|action| blocks(action, MANY / 4));
    let whole = (0..MANY / 4)
        .flat_map(|_| [Action::Alloc, Action::FreeRequested].map(|action| (action, BASE, MANY / 4 * KIB, 0)));
    follow("blocks over many", segment.into_iter().chain(waiting.into_iter().flatten()).chain(whole));
}
