//! Compiling a recording, following the recorded memory as `explain` and `report` do, and replaying.

use super::{MANY, linear};
use crate::formats::{Action, Event, Format, Origin, Origins, Summary};
use crate::memory::{Events, InitialState, Memory, Pool, PriorCache, RecordedEvent, Rules};
use crate::replay::{Addresses, History, HistoryBuilder, ReplaySettings, replay};
use std::sync::Arc;
use vramlab_device::budget::Budget;
use vramlab_device::{Driver, NullDriver};
use vramlab_policies::Selection;
use vramlab_policies::backends::CachingSettings;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Where the segments of the shapes begin.
const BASE: u64 = 1 << 40;

fn event(action: Action, addr: u64, bytes: u64) -> Event {
    Event { action, device: 0, addr, bytes, stream: 0, time_ns: 0 }
}

/// Compiles `events` in about as many steps as events.
fn compile(name: &str, limit: Option<u64>, events: impl Iterator<Item = Event>) -> History {
    let events: Vec<Event> = events.collect();
    linear(name, events.len() as u64, || {
        let mut builder = HistoryBuilder::new(None);
        for event in &events {
            builder.push(event).unwrap();
        }
        builder.finish(&CachingSettings { memory_limit: limit, ..CachingSettings::default() }).unwrap()
    })
}

/// Blocks of a KiB, all allocated and freed before the first free completes.
fn held_up(count: u64) -> impl Iterator<Item = Event> {
    let each = move |action| (0..count).map(move |at| event(action, BASE + at * KIB, KIB));
    each(Action::Alloc).chain(each(Action::FreeRequested))
}

fn completed(count: u64) -> impl Iterator<Item = Event> {
    (0..count).map(|at| event(Action::FreeCompleted, BASE + at * KIB, KIB))
}

#[test]
fn frees_that_complete_after_segments_came() {
    let segments = (0..MANY).map(|at| event(Action::SegmentAlloc, (BASE << 1) + at * MIB, MIB));
    compile("completions after segments", None, held_up(MANY).chain(segments).chain(completed(MANY)));
}

#[test]
fn frees_that_complete_before_segments_go() {
    // One segment is allocated and released, and contains every block with a deferred free.
    let end = BASE + MANY * KIB;
    let removed = (0..MANY / 2)
        .flat_map(|_| [Action::SegmentFree, Action::SegmentAlloc].map(|action| event(action, BASE, MANY * KIB)));
    let first = [event(Action::SegmentAlloc, BASE, MANY * KIB)];
    let last = [event(Action::SegmentAlloc, end, 2 * MIB), event(Action::Alloc, end, 2 * KIB)];
    let events = first.into_iter().chain(held_up(MANY)).chain(completed(MANY)).chain(removed).chain(last);
    // Each segment is examined, because none has room.
    compile("segments that go after completions", Some(MIB), events);
}

#[test]
fn a_window_for_each_free() {
    let events = (0..MANY).flat_map(|at| {
        let segment = BASE + (at % 7) * 2 * MIB;
        [
            event(Action::SegmentAlloc, segment, 2 * MIB),
            event(Action::Alloc, segment, KIB),
            event(Action::FreeRequested, segment, KIB),
            event(Action::Snapshot, 0, 0),
            event(Action::FreeCompleted, segment, KIB),
            event(Action::SegmentFree, segment, 2 * MIB),
        ]
    });
    compile("windows", Some(MIB), events);
}

#[test]
fn blocks_that_were_there_before() {
    // Every other address first, which makes as many ranges, then those that join them.
    let places = (0..MANY).step_by(2).chain((1..MANY).step_by(2));
    let frees = places.flat_map(|at| {
        [Action::FreeRequested, Action::FreeCompleted].map(|action| event(action, BASE + at * KIB, KIB))
    });
    let history = compile("blocks from before", None, frees);
    assert_eq!(history.prologue_allocations(), MANY);
}

#[test]
fn frees_that_complete_in_another_order() {
    // In reverse within each thousand, so that no two of them can wait for one stream.
    let orders = (0..MANY / 1000).flat_map(|thousand| {
        let address = move |at: u64| BASE + (thousand * 1000 + at) * KIB;
        let each = move |action| (0..1000).map(move |at| event(action, address(at), KIB));
        let back = (0..1000)
            .rev()
            .flat_map(move |at| [event(Action::FreeCompleted, address(at), KIB), event(Action::Snapshot, 0, 0)]);
        each(Action::Alloc).chain(each(Action::FreeRequested)).chain(back)
    });
    let history = compile("completions in reverse", None, orders);
    // The last free of each thousand completes immediately.
    assert_eq!(history.deferred_frees(), MANY - MANY / 1000);
}

#[test]
fn uses_on_every_stream() {
    let events = (0..MANY).map(|at| Event { stream: 1 + at % 4000, ..event(Action::RecordUse, BASE, 0) });
    let first = [event(Action::Alloc, BASE, KIB)];
    let last = [event(Action::FreeRequested, BASE, KIB), event(Action::Snapshot, 0, 0)];
    compile("uses", None, first.into_iter().chain(events).chain(last));
}

/// As [`compile`], with an end without segments.
fn find_pools(name: &str, events: Vec<Event>) -> History {
    linear(name, events.len() as u64, || {
        let mut builder = HistoryBuilder::new(None);
        events.iter().for_each(|event| builder.push(event).unwrap());
        builder.ends_with(&[]).unwrap();
        builder.finish(&CachingSettings::default()).unwrap()
    })
}

#[test]
fn segments_that_cannot_be_of_one_pool() {
    // Each request gets a new segment, although earlier ones have room: any two are of different pools.
    let places = (0..MANY / 5).map(|at| BASE + at * 2 * MIB);
    let events = places.flat_map(|at| [(Action::SegmentAlloc, at, 2 * MIB), (Action::Alloc, at, 512 * KIB)]);
    let history = find_pools("pools", events.map(|(action, at, bytes)| event(action, at, bytes)).collect());
    assert_eq!(history.private_pools(), 0, "no more is told than what is held at the end");
}

#[test]
fn idle_segments_at_every_release() {
    // One segment is allocated and released, and all others are free and retained.
    let idle = (0..MANY / 10).map(|at| BASE + at * 2 * MIB);
    let idle = idle.flat_map(|at| {
        [(Action::SegmentAlloc, at, 2 * MIB), (Action::Alloc, at, MIB)]
            .map(|(action, at, bytes)| event(action, at, bytes))
    });
    let freed = (0..MANY / 10).flat_map(|at| {
        [Action::FreeRequested, Action::FreeCompleted].map(|action| event(action, BASE + at * 2 * MIB, MIB))
    });
    let address = BASE << 1;
    let released = (0..MANY / 10).flat_map(|_| {
        [Action::SegmentAlloc, Action::SegmentFree, Action::Snapshot].map(|action| event(action, address, 2 * MIB))
    });
    find_pools("releases", idle.chain(freed).chain(released).collect());
}

// Replaying a recording. The allocator's own steps are not counted.

#[test]
fn segments_that_another_allocator_does_not_take() {
    // The recorded program allocated a segment for each block. The replay skips unused ones once.
    let each = |at: u64| {
        let (addr, stream) = (BASE + at * 2 * MIB, 1 + at % 8);
        [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested, Action::FreeCompleted, Action::SegmentFree]
            .map(|action| Event { action, device: 0, addr, bytes: 2 * MIB, stream, time_ns: 0 })
    };
    let mut builder = HistoryBuilder::new(None);
    (0..MANY / 5).flat_map(each).for_each(|event| builder.push(&event).unwrap());
    let history = builder.finish(&CachingSettings::default()).unwrap();
    for addresses in [Addresses::Recorded, Addresses::Near] {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 46));
        let settings = ReplaySettings { addresses, ..ReplaySettings::default() };
        let selection: Selection = "caching".parse().unwrap();
        let report = linear("replay", 2 * history.allocations(), || replay(&history, &selection, &driver, &settings));
        assert_eq!(report.unwrap().allocations, MANY / 5);
    }
}

#[test]
fn replays_near_recorded_segments_of_many_sizes() {
    // No segment has the size of its block, so each request takes a part of a larger segment.
    let segments = MANY / 20;
    let (size, at) = (|number: u64| (2 + number * 7919 % 5003) * MIB, |number: u64| BASE + number * (MIB << 13));
    let events: Vec<Event> = (0..segments)
        .flat_map(|number| {
            let (at, size) = (at(number), size(number));
            [event(Action::SegmentAlloc, at, size), event(Action::Alloc, at, size - MIB - KIB * (1 + number % 999))]
        })
        .collect();
    let history = compile("segments of many sizes", None, events.into_iter());
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(u64::MAX / 2));
    let settings = ReplaySettings { addresses: Addresses::Near, ..ReplaySettings::default() };
    let selection: Selection = "naive".parse().unwrap();
    let report = linear("near segments", 2 * segments, || replay(&history, &selection, &driver, &settings)).unwrap();
    assert_eq!((report.allocations, report.failed_allocations), (segments, 0));
}

// Following the recorded memory, as `explain` and `report` do.

/// Follows `history` in about as many steps as events, with a query of free memory after each.
fn follow(name: &str, history: impl Iterator<Item = (Action, u64, u64, u64)>) {
    let mut events = Events::new(&Budget::default());
    for (action, addr, bytes, stream) in history {
        let event = RecordedEvent { addr, bytes, stream, time_ns: 0, origin: Origin::default(), action };
        events.push(event).unwrap();
    }
    let (budget, summary) = (Budget::new(u64::MAX), Summary::new(Format::SnapshotPickle));
    let rules = Rules::new(&summary, 0, &CachingSettings::default());
    linear(name, events.len() as u64, || {
        let before = InitialState::new(&events, &rules, &summary, &Origins::new(&budget), 0);
        let _ = PriorCache::of(&events, &before);
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
    // Every second range first, so that each of the others joins two.
    let part = |action, at: u64| (action, BASE + at * 2 * MIB, 2 * MIB, 0);
    let even = (0..MANY / 4).map(|at| part(Action::SegmentMap, 2 * at));
    let odd = (0..MANY / 4).map(|at| part(Action::SegmentMap, 2 * at + 1));
    let removed = (0..MANY / 2).map(|at| part(Action::SegmentUnmap, at));
    follow("parts of an expandable segment", even.chain(odd).chain(removed));
}

#[test]
fn blocks_over_frees_that_wait() {
    // The completions are missing, and one block replaces many.
    let segment = [(Action::SegmentAlloc, BASE, MANY * KIB, 0)];
    let waiting = [Action::Alloc, Action::FreeRequested].map(|action| blocks(action, MANY / 4));
    let freed = (0..MANY / 4)
        .flat_map(|_| [Action::Alloc, Action::FreeRequested].map(|action| (action, BASE, MANY / 4 * KIB, 0)));
    follow("blocks over many", segment.into_iter().chain(waiting.into_iter().flatten()).chain(freed));
}
