//! Compiling a history.

use super::{MANY, linear};
use crate::formats::{Action, Event};
use crate::replay::{History, HistoryBuilder};
use vramlab_policies::backends::CachingSettings;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Where the segments of the shapes begin.
const BASE: u64 = 1 << 40;

fn event(action: Action, addr: u64, bytes: u64) -> Event {
    Event { action, device: 0, addr, bytes, stream: 0, time_ns: 0 }
}

/// As many events as there are in `events` take a number of steps that is near their number.
fn compile(what: &str, limit: Option<u64>, events: impl Iterator<Item = Event>) -> History {
    let events: Vec<Event> = events.collect();
    linear(what, events.len() as u64, || {
        let mut builder = HistoryBuilder::new(None);
        for event in &events {
            builder.push(event).unwrap();
        }
        builder.finish(&CachingSettings { memory_limit: limit, ..CachingSettings::default() }).unwrap()
    })
}

/// Blocks of a KiB, each of which is asked for and given back before the first free completes.
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
    // One segment comes and goes, and every block that was held up lies in it.
    let end = BASE + MANY * KIB;
    let gone = (0..MANY / 2)
        .flat_map(|_| [Action::SegmentFree, Action::SegmentAlloc].map(|action| event(action, BASE, MANY * KIB)));
    let first = [event(Action::SegmentAlloc, BASE, MANY * KIB)];
    let last = [event(Action::SegmentAlloc, end, 2 * MIB), event(Action::Alloc, end, 2 * KIB)];
    let events = first.into_iter().chain(held_up(MANY)).chain(completed(MANY)).chain(gone).chain(last);
    // Each segment has to be looked at, because none has room.
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
    // Every other place first, so that what was seen is as many ranges, then what joins them.
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
        let place = move |at: u64| BASE + (thousand * 1000 + at) * KIB;
        let each = move |action| (0..1000).map(move |at| event(action, place(at), KIB));
        let back = (0..1000)
            .rev()
            .flat_map(move |at| [event(Action::FreeCompleted, place(at), KIB), event(Action::Snapshot, 0, 0)]);
        each(Action::Alloc).chain(each(Action::FreeRequested)).chain(back)
    });
    let history = compile("completions in reverse", None, orders);
    // The last free of each thousand completes at once.
    assert_eq!(history.deferred_frees(), MANY - MANY / 1000);
}

#[test]
fn uses_on_every_stream() {
    let events = (0..MANY).map(|at| Event { stream: 1 + at % 4000, ..event(Action::RecordUse, BASE, 0) });
    let first = [event(Action::Alloc, BASE, KIB)];
    let last = [event(Action::FreeRequested, BASE, KIB), event(Action::Snapshot, 0, 0)];
    compile("uses", None, first.into_iter().chain(events).chain(last));
}

/// As [`compile`], with an end that names the pools of all that is held then, which is nothing.
fn find_pools(what: &str, events: Vec<Event>) -> History {
    linear(what, events.len() as u64, || {
        let mut builder = HistoryBuilder::new(None);
        events.iter().for_each(|event| builder.push(event).unwrap());
        builder.ends_with(&[]).unwrap();
        builder.finish(&CachingSettings::default()).unwrap()
    })
}

#[test]
fn segments_that_cannot_be_of_one_pool() {
    // Each request gets a new segment, though all before it have room: any two are of different pools.
    let places = (0..MANY / 5).map(|at| BASE + at * 2 * MIB);
    let events = places.flat_map(|at| [(Action::SegmentAlloc, at, 2 * MIB), (Action::Alloc, at, 512 * KIB)]);
    let history = find_pools("pools", events.map(|(action, at, bytes)| event(action, at, bytes)).collect());
    assert_eq!(history.private_pools(), 0, "no more is told than what is held at the end");
}

#[test]
fn idle_segments_at_every_release() {
    // One segment comes and goes, and all others are idle and stay.
    let idle = (0..MANY / 10).map(|at| BASE + at * 2 * MIB);
    let idle = idle.flat_map(|at| {
        [(Action::SegmentAlloc, at, 2 * MIB), (Action::Alloc, at, MIB)]
            .map(|(action, at, bytes)| event(action, at, bytes))
    });
    let freed = (0..MANY / 10).flat_map(|at| {
        [Action::FreeRequested, Action::FreeCompleted].map(|action| event(action, BASE + at * 2 * MIB, MIB))
    });
    let place = BASE << 1;
    let released = (0..MANY / 10).flat_map(|_| {
        [Action::SegmentAlloc, Action::SegmentFree, Action::Snapshot].map(|action| event(action, place, 2 * MIB))
    });
    find_pools("releases", idle.chain(freed).chain(released).collect());
}
