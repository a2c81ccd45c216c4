//! Replays: at recorded addresses nothing may differ, whatever the allocator did; contradictory recordings are refused.

mod full;

use crate::common::{GIB, MIB, sim};
use crate::recorder::Recorder;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::FileFailurePersistence;
use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab_device::{Driver, NullDriver, sim::SimMemory};
use vramlab_histories::formats::{Action, Event};
use vramlab_histories::replay::{
    Addresses, Held, History, HistoryBuilder, ReplayError, ReplayReport, ReplaySettings, StreamHeld, replay,
};
use vramlab_policies::backends::{self, CachingSettings, caching, expandable, naive, stream_ordered};
use vramlab_policies::{Backend, BlockState, Selection};

const STREAMS: usize = 3;

fn compile(events: &[Event], settings: &CachingSettings) -> Result<History, ReplayError> {
    let mut builder = HistoryBuilder::new(None);
    events.iter().try_for_each(|event| builder.push(event))?;
    builder.finish(settings)
}

fn null(bytes: u64) -> Arc<dyn Driver> {
    Arc::new(NullDriver::new(bytes))
}

fn run(history: &History, kind: &'static Backend, caching: CachingSettings, addresses: Addresses) -> ReplayReport {
    let allocator = Selection::with(kind, &caching);
    replay(history, &allocator, &null(1 << 50), &ReplaySettings { addresses, ..ReplaySettings::default() }).unwrap()
}

fn event(action: Action, addr: u64, bytes: u64) -> Event {
    Event { action, device: 0, addr, bytes, stream: 0, time_ns: 0 }
}

#[derive(Clone, Debug)]
enum Step {
    Alloc { bytes: u64, stream: usize },
    Free { which: Index },
    Use { which: Index, stream: usize },
    Work { stream: usize, ns: u64 },
    EmptyCache,
}

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let sizes = prop_oneof![3 => 1..MIB, 3 => MIB..12 * MIB, 2 => 10 * MIB..50 * MIB];
    let stream = || prop_oneof![3 => Just(0usize), 1 => 1..STREAMS];
    let step = prop_oneof![
        20 => (sizes, stream()).prop_map(|(bytes, stream)| Step::Alloc { bytes, stream }),
        16 => any::<Index>().prop_map(|which| Step::Free { which }),
        8 => (any::<Index>(), 0..STREAMS).prop_map(|(which, stream)| Step::Use { which, stream }),
        8 => (0..STREAMS, 1_000..900_000u64).prop_map(|(stream, ns)| Step::Work { stream, ns }),
        1 => Just(Step::EmptyCache),
    ];
    prop::collection::vec(step, 1..length)
}

fn record(settings: CachingSettings, writes_uses: bool, steps: &[Step]) -> Recorder {
    let mut recorder = Recorder::new(settings, 16 * GIB, STREAMS);
    recorder.writes_uses = writes_uses;
    play(&mut recorder, steps);
    recorder
}

fn play(recorder: &mut Recorder, steps: &[Step]) {
    for step in steps {
        match step {
            Step::Alloc { bytes, stream } => {
                recorder.alloc(*bytes, *stream);
            }
            Step::Free { which } if !recorder.live.is_empty() => recorder.free(which.index(recorder.live.len())),
            Step::Use { which, stream } if !recorder.live.is_empty() => {
                recorder.record_use(which.index(recorder.live.len()), *stream);
            }
            Step::Work { stream, ns } => recorder.work(*stream, *ns),
            Step::EmptyCache => recorder.empty_cache(),
            Step::Free { .. } | Step::Use { .. } => {}
        }
    }
}

/// All counters of the recorded allocator, except those that only its own driver calls decide.
fn figures(stats: &vramlab_policies::Stats) -> Vec<(String, u64)> {
    let mut entries = stats.entries();
    // Frees that complete in the same request coalesce in another order, so splits in between differ.
    let in_between = |key: &str| key.starts_with("inactive_split") && !key.ends_with("current");
    entries.retain(|(key, _)| key != "num_sync_all_streams" && !in_between(key));
    entries
}

/// The recording contains the allocator's state at each of the last failed requests.
fn check_refusals(history: &History, recorder: &Recorder) {
    let reports = history.out_of_memory();
    assert_eq!(reports.len(), recorder.refusals.len().min(100));
    for (report, snapshot) in reports.iter().rev().zip(recorder.refusals.iter().rev()) {
        let (mut all, mut live, mut streams) = (Held::default(), 0, BTreeMap::<u64, Held>::new());
        for segment in &snapshot.segments {
            for state in [&mut all, streams.entry(segment.stream.get()).or_default()] {
                state.reserved_bytes += segment.bytes;
                for block in &segment.blocks {
                    match block.state {
                        BlockState::Allocated => state.allocated_bytes += block.bytes,
                        BlockState::PendingFree => state.pending_bytes += block.bytes,
                        BlockState::Free => {
                            state.free_bytes += block.bytes;
                            state.free_blocks += 1;
                            state.largest_free_bytes = state.largest_free_bytes.max(block.bytes);
                        }
                    }
                }
            }
            let allocated = segment.blocks.iter().filter(|block| block.state == BlockState::Allocated);
            live += allocated.map(|block| block.requested).sum::<u64>();
        }
        let streams: Vec<StreamHeld> = streams.into_iter().map(|(stream, held)| StreamHeld { stream, held }).collect();
        assert!(report.complete, "{report}");
        assert_eq!((report.held, &report.streams, report.live_bytes), (Some(all), &streams, live), "{report}");
    }
}

#[test]
fn failed_request_shows_mapped_expandable_segments() {
    let (base, small) = (1 << 40, 1 << 50);
    let at = |mib: u64| base + mib * MIB;
    let freed = |addr, bytes| [Action::FreeRequested, Action::FreeCompleted].map(|action| event(action, addr, bytes));
    let [first, first_done] = freed(at(0), 12 * MIB);
    let [middle, middle_done] = freed(at(17), 10 * MIB);
    let events = [
        event(Action::SegmentMap, at(0), 20 * MIB),
        event(Action::Alloc, at(0), 12 * MIB),
        event(Action::Alloc, at(12), 5 * MIB),
        // The remaining block at the end and the range mapped behind it are one block.
        event(Action::SegmentMap, at(20), 20 * MIB),
        event(Action::Alloc, at(17), 10 * MIB),
        event(Action::SegmentMap, small, 2 * MIB),
        event(Action::Alloc, small, 1000),
        first,
        first_done,
        event(Action::Oom, 1 << 30, 30 * MIB),
        middle,
        middle_done,
        // Of the free memory behind 17 MiB a complete handle is released.
        event(Action::SegmentUnmap, at(20), 20 * MIB),
        event(Action::Oom, 1 << 30, 30 * MIB),
        // Any remainder of a block is split off.
        event(Action::Alloc, at(0), 12 * MIB - 512),
        event(Action::Oom, 1 << 30, 30 * MIB),
    ];
    let history = compile(&events, &CachingSettings::default()).unwrap();
    let reports = history.out_of_memory();
    let state = |reserved_bytes, allocated_bytes, free_blocks, largest_free_bytes| Held {
        reserved_bytes,
        allocated_bytes,
        pending_bytes: 0,
        free_bytes: reserved_bytes - allocated_bytes,
        free_blocks,
        largest_free_bytes,
    };
    let expected = [
        state(42 * MIB, 15 * MIB + 1024, 3, 13 * MIB),
        state(22 * MIB, 5 * MIB + 1024, 3, 12 * MIB),
        state(22 * MIB, 17 * MIB + 512, 3, 3 * MIB),
    ];
    assert_eq!(reports.iter().map(|report| report.held).collect::<Vec<_>>(), expected.map(Some));
    assert!(
        reports
            .iter()
            .all(|report| report.complete && report.streams == [StreamHeld { stream: 0, held: report.held.unwrap() }])
    );
    assert!(reports[0].to_string().contains("42 MiB reserved"), "{}", reports[0]);
}

fn check_faithful(settings: CachingSettings, recorder: &Recorder) {
    let mut events = recorder.events();
    if events.iter().all(|event| event.action != Action::FreeCompleted) {
        // A log without completions counts as one that does not record them, so add one.
        events.insert(0, event(Action::FreeCompleted, 1, 512));
    }
    let history = compile(&events, &settings).unwrap();
    if history.check_comparable().is_err() {
        assert_eq!(history.allocations(), 0, "only a history without segments cannot be compared");
        return;
    }
    check_refusals(&history, recorder);
    let report = run(&history, &caching::BACKEND, settings, Addresses::Recorded);
    // If every free seems to complete immediately, a log does not show when those with announced uses did.
    if history.deferred_frees() == 0 && events.iter().any(|event| event.action == Action::RecordUse) {
        assert_eq!(report.allocations, history.allocations());
        return;
    }
    assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(0), Some(0)), "{:?}", events);
    assert_eq!(report.failed_allocations, 0);
    // A retry of a request may look like `empty_cache` right before it, and vice versa; the result is the same except for this
    // count.
    let ambiguous = settings.memory_limit.is_some() || recorder.caching.stats().num_alloc_retries > 0;
    for (ours, recorded) in figures(&report.stats).iter().zip(figures(&recorder.caching.stats())) {
        assert!(*ours == recorded || ambiguous && ours.0 == "num_alloc_retries", "{ours:?}, recorded {recorded:?}");
    }
    assert_eq!(report.ledger, recorder.caching.ledger_at_peak());
}

fn cases(cases: u32) -> ProptestConfig {
    // A failed case is tried first from then on: the file is part of the repository.
    let file = FileFailurePersistence::Direct("tests/replay/failures.txt");
    ProptestConfig { cases, failure_persistence: Some(Box::new(file)), ..ProptestConfig::default() }
}

/// Two blocks with pending frees, of which the log shows the second complete immediately: it is the first event of the allocation
/// that waited for both. `limit` decides the interpretation.
fn waits_for_the_block_freed_last(limit: u64, refused: bool) {
    let settings = CachingSettings { memory_limit: Some(limit), ..CachingSettings::default() };
    let mut recorder = Recorder::new(settings, 16 * GIB, STREAMS);
    for bytes in [8 * MIB, 6 * MIB, 18 * MIB] {
        assert!(recorder.alloc(bytes, 0));
    }
    // Frees pending on stream 1 are polled before those pending on stream 2.
    for (block, stream) in [(8 * MIB, 2), (18 * MIB, 1)] {
        let which = recorder.live.iter().position(|(live, ..)| live.requested() == block).unwrap();
        recorder.work(stream, 1_000_000_000);
        recorder.record_use(which, stream);
        recorder.free(which);
    }
    let before = recorder.events().len();
    // It would fit in the place of the first block, and in the segment of the second.
    assert_eq!(recorder.alloc(7 * MIB, 0), !refused);
    let actions: Vec<Action> = recorder.events()[before..].iter().map(|event| event.action).collect();
    let last = if refused { &[Action::Oom][..] } else { &[Action::SegmentAlloc, Action::Alloc] };
    let released = [Action::FreeCompleted, Action::FreeCompleted, Action::SegmentFree];
    assert_eq!(actions, [&released, last].concat());
    check_faithful(settings, &recorder);
}

#[test]
fn retry_may_have_waited_for_the_last_freed_block() {
    waits_for_the_block_freed_last(50 * MIB, false);
}

#[test]
fn failed_request_may_have_waited_for_the_last_free() {
    waits_for_the_block_freed_last(39 * MIB, true);
}

/// A pending block had got a full free block that was 512 KiB larger. Together with that, the free block behind it would have
/// served the request; without it only a retry explains the releases.
#[test]
fn memory_behind_a_pending_block_may_belong_to_it() {
    let settings = CachingSettings { memory_limit: Some(45 * MIB), ..CachingSettings::default() };
    let mut recorder = Recorder::new(settings, 16 * GIB, STREAMS);
    let block = |recorder: &Recorder, bytes: u64| {
        recorder.live.iter().position(|(live, ..)| live.requested() == bytes).unwrap()
    };
    // A segment for the first two, another for the others.
    for bytes in [9 * MIB, 11 * MIB, 2 * MIB, 12 * MIB] {
        assert!(recorder.alloc(bytes, 0));
    }
    let (first, larger) = (recorder.live[0].0.addr(), 8 * MIB + MIB / 2);
    recorder.free(block(&recorder, 9 * MIB));
    assert!(recorder.alloc(larger, 0));
    assert_eq!(recorder.live.last().unwrap().0.addr(), first);
    recorder.free(block(&recorder, 11 * MIB));
    for (bytes, stream) in [(12 * MIB, 1), (larger, 2)] {
        recorder.work(stream, 1_000_000_000);
        recorder.record_use(block(&recorder, bytes), stream);
        recorder.free(block(&recorder, bytes));
    }
    let before = recorder.events().len();
    // If 12 MiB become free by waiting, the request would have fitted after a release before it.
    assert!(recorder.alloc(11 * MIB + MIB / 4, 0));
    let actions: Vec<Action> = recorder.events()[before..].iter().map(|event| event.action).collect();
    let completed = Action::FreeCompleted;
    assert_eq!(actions, [completed, completed, Action::SegmentFree, Action::SegmentAlloc, Action::Alloc]);
    check_faithful(settings, &recorder);
}

proptest! {
    #![proptest_config(cases(400))]

    /// Frees delayed by other streams, calls of `empty_cache`, retries under a limit and refusals: inferred from the log, which
    /// names none of them.
    #[test]
    fn caching_follows_its_history(
        steps in steps(300),
        limit in prop_oneof![1 => Just(None), 3 => (60..200u64).prop_map(|mib| Some(mib * MIB))],
        writes_uses in any::<bool>(),
    ) {
        let settings = CachingSettings { memory_limit: limit, ..CachingSettings::default() };
        check_faithful(settings, &record(settings, writes_uses, &steps));
    }
    /// The same with garbage collection and with oversize blocks.
    #[test]
    fn caching_follows_its_history_under_other_settings(
        steps in steps(300),
        limit in 60..200u64,
        garbage_collection_threshold in prop_oneof![1 => Just(0.0), 2 => 0.3..0.9],
        max_split_size in prop_oneof![1 => Just(None), 1 => (21..40u64).prop_map(|mib| Some(mib * MIB))],
    ) {
        // Under these settings a log does not always distinguish `empty_cache`, and the completion of a deferred free, from the
        // allocator's own releases.
        let mut steps = steps;
        steps.retain(|step| !matches!(step, Step::EmptyCache | Step::Use { .. }));
        let memory_limit = Some(limit * MIB);
        let settings =
            CachingSettings { memory_limit, garbage_collection_threshold, max_split_size, ..CachingSettings::default() };
        check_faithful(settings, &record(settings, false, &steps));
    }
}

/// The compiled recording, or the one-line error.
fn refused(events: &[Event]) -> String {
    let mut builder = HistoryBuilder::new(None);
    builder.expect_complete();
    let pushed = events.iter().try_for_each(|event| builder.push(event));
    let error = pushed.and_then(|()| builder.finish(&CachingSettings::default()).map(|_| ())).unwrap_err();
    assert!(error.is_bad_input());
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn contradictions_are_refused_in_one_line() {
    let alloc = |addr, bytes| event(Action::Alloc, addr, bytes);
    let free = |addr, bytes| event(Action::FreeRequested, addr, bytes);
    let segment = |addr, bytes| event(Action::SegmentAlloc, addr, bytes);
    let cases: [(&[Event], &str); 12] = [
        (&[alloc(4096, 512), alloc(4352, 512)], "event 2: alloc of 512 bytes at 0x1100 overlaps"),
        (&[alloc(4096, 512), free(4096, 512), free(4096, 512)], "event 3: free of 512 bytes at 0x1000, where no block"),
        (&[alloc(4096, 512), free(4096, 1024)], "event 2: free of 1024 bytes at 0x1000, where 512 bytes"),
        (&[free(4096, 512)], "event 1: free of 512 bytes at 0x1000, which were never allocated"),
        (&[segment(4096, 2 * MIB), free(4096, 512)], "event 2: free of 512 bytes at 0x1000, in a segment"),
        (&[alloc(4096, 1 << 62)], "event 1: alloc of 4611686018427387904 bytes: no device has more than 256 TiB"),
        (&[alloc(u64::MAX - 5, 512)], "event 1: 0xfffffffffffffffa + 512 is not a range of addresses"),
        (
            &[segment(4099, 2 * MIB)],
            "event 1: the segment of 2097152 bytes at 0x1003 does not begin at a multiple of 256",
        ),
        (&[segment(4096, 2 * MIB), segment(8192, 2 * MIB)], "event 2: the segment of 2097152 bytes at 0x2000 overlaps"),
        (&[segment(4096, 0)], "event 1: a segment of 0 bytes"),
        (&[alloc(4096, 512), free(4096, 512), event(Action::RecordUse, 4096, 0)], "event 3: use of 0x1000"),
        (
            &[alloc(4096, 512), Event { device: 1, ..alloc(8192, 512) }],
            "event 2: the recording contains devices 0 and 1",
        ),
    ];
    for (events, words) in cases {
        let text = refused(events);
        assert!(text.starts_with(words), "{text}\n{words}");
    }
    let streams: Vec<Event> =
        (0..5000).map(|at| Event { stream: at, ..event(Action::Alloc, 4096 * (at + 1), 512) }).collect();
    assert!(refused(&streams).contains("event 4097: the history has more than 4096 streams"));
    let huge: Vec<Event> = (0..1 << 15).map(|at| event(Action::Alloc, at << 48 | 512, (1 << 48) - 512)).collect();
    assert!(refused(&huge).contains("allocates more than 4 EiB in total"));
}

#[test]
fn recording_without_an_end_is_replayed_but_not_compared() {
    let events = [
        event(Action::SegmentAlloc, 64 * MIB, 2 * MIB),
        event(Action::Alloc, 64 * MIB, 1000),
        event(Action::FreeRequested, 32 * MIB, MIB),
        event(Action::FreeCompleted, 32 * MIB, MIB),
        event(Action::FreeRequested, 16 * MIB, 3 * MIB),
        event(Action::FreeCompleted, 16 * MIB, 3 * MIB),
    ];
    let history = compile(&events, &CachingSettings::default()).unwrap();
    assert_eq!((history.prologue_allocations(), history.allocations()), (2, 3));
    assert_eq!(history.max_live_bytes(), 4 * MIB + 1000);
    let report = run(&history, &naive::BACKEND, CachingSettings::default(), Addresses::Own);
    assert_eq!(report.stats.requested_bytes.all.peak, history.max_live_bytes());
    assert_eq!(report.stats.allocation.all.current, 1);
    let error = history.check_comparable().unwrap_err().to_string();
    assert!(error.contains("event 3 frees a block from before recording started"), "{error}");

    let outside = [
        event(Action::Alloc, 4096, 512),
        event(Action::SegmentAlloc, 64 * MIB, 2 * MIB),
        event(Action::Alloc, 64 * MIB, 512),
    ];
    let history = compile(&outside, &CachingSettings::default()).unwrap();
    assert!(history.check_comparable().unwrap_err().to_string().contains("event 1 is outside every segment"));
    let mapped = [event(Action::SegmentMap, 2 * MIB, 2 * MIB), event(Action::Alloc, 2 * MIB, 512)];
    let history = compile(&mapped, &CachingSettings::default()).unwrap();
    history.check_comparable().unwrap();
    let unmapped = [mapped[0], mapped[1], event(Action::SegmentUnmap, 64 * MIB, 2 * MIB)];
    let history = compile(&unmapped, &CachingSettings::default()).unwrap();
    assert!(history.check_comparable().unwrap_err().to_string().contains("event 3 is outside every segment"));
}

/// Two free blocks of one size, in segments of 40 and of 20 MiB. The one at the lower address is used; only the other's segment
/// may be released when it is empty.
#[test]
fn near_replay_takes_the_lower_of_two_equal_blocks() {
    for (first, second, reserved) in [(64 * MIB, 128 * MIB, 80 * MIB), (128 * MIB, 64 * MIB, 100 * MIB)] {
        let free = |addr, bytes| [event(Action::FreeRequested, addr, bytes), event(Action::FreeCompleted, addr, bytes)];
        let mut events = vec![
            event(Action::SegmentAlloc, first, 40 * MIB),
            event(Action::Alloc, first, 40 * MIB),
            event(Action::SegmentAlloc, second, 20 * MIB),
            event(Action::Alloc, second, 20 * MIB),
        ];
        events.extend(free(first, 40 * MIB));
        events.push(event(Action::Alloc, first, 20 * MIB));
        events.extend(free(second, 20 * MIB));
        if first < second {
            events.push(event(Action::Alloc, first + 20 * MIB, 20 * MIB));
            events.push(event(Action::SegmentFree, second, 20 * MIB));
        } else {
            events.push(event(Action::Alloc, second, 20 * MIB));
        }
        events.push(event(Action::SegmentAlloc, 256 * MIB, 40 * MIB));
        events.push(event(Action::Alloc, 256 * MIB, 40 * MIB));
        let history = compile(&events, &CachingSettings::default()).unwrap();
        let report = run(&history, &caching::BACKEND, CachingSettings::default(), Addresses::Near);
        assert_eq!((report.stats.reserved_bytes.all.peak, report.failed_allocations), (reserved, 0));
        // An allocator that requests sizes which were not recorded gets addresses below.
        let report = run(&history, &naive::BACKEND, CachingSettings::default(), Addresses::Near);
        assert_eq!((report.failed_allocations, report.stats.reserved_bytes.all.current), (0, 80 * MIB));
    }
}

#[test]
fn ranges_mapped_elsewhere_are_counted() {
    let events = [
        event(Action::SegmentMap, 64 * MIB, 2 * MIB),
        event(Action::Alloc, 64 * MIB, 1000),
        event(Action::SegmentMap, 1 << 40, 40 * MIB), // 20 are mapped
        event(Action::Alloc, 1 << 40, 2 * MIB),
        event(Action::FreeRequested, 1 << 40, 2 * MIB),
        event(Action::FreeCompleted, 1 << 40, 2 * MIB),
        event(Action::SegmentUnmap, (1 << 40) + 20 * MIB, 20 * MIB), // where nothing is mapped
        event(Action::Snapshot, 0, 0),
        event(Action::SegmentMap, (1 << 40) + 20 * MIB, 20 * MIB),
        event(Action::Alloc, 1 << 40, 30 * MIB), // nothing is mapped at its front
    ];
    let history = compile(&events, &CachingSettings::default()).unwrap();
    let report = run(&history, &expandable::BACKEND, CachingSettings::default(), Addresses::Recorded);
    // The second mapping, the range unmapped instead, and the last mapping: 40 MiB at the front of the range.
    assert_eq!((report.segment_mismatches, report.address_mismatches), (Some(3), Some(1)));
    // Full segments are not ranges.
    let report = run(&history, &caching::BACKEND, CachingSettings::default(), Addresses::Recorded);
    assert!(report.segment_mismatches >= Some(4) && report.address_mismatches >= Some(2), "{report:?}");
}

#[test]
fn different_segments_are_counted_and_replay_continues() {
    let events = [
        event(Action::SegmentAlloc, 64 * MIB, 4 * MIB), // caching takes 2 MiB
        event(Action::Alloc, 64 * MIB, 1000),
        event(Action::Alloc, 64 * MIB + 2048, 1000), // caching puts it at 1024
        event(Action::SegmentAlloc, 80 * MIB, 20 * MIB),
        event(Action::Alloc, 80 * MIB, 2 * MIB),
        event(Action::SegmentAlloc, 128 * MIB, 2 * MIB), // caching has room
        event(Action::Alloc, 128 * MIB, 500),
    ];
    let history = compile(&events, &CachingSettings::default()).unwrap();
    let report = run(&history, &caching::BACKEND, CachingSettings::default(), Addresses::Recorded);
    assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(3), Some(2)));
    assert_eq!((report.failed_allocations, report.allocations), (0, 4));
    // Every tensor gets a separate segment: one matches by chance, one is too many.
    let report = run(&history, &naive::BACKEND, CachingSettings::default(), Addresses::Recorded);
    assert!(report.segment_mismatches >= Some(3) && report.failed_allocations == 0, "{report:#?}");
}

#[test]
fn empty_tensors_and_failed_allocations_leave_no_trace() {
    let events = [
        event(Action::Alloc, 0, 0),
        event(Action::Alloc, 4096, 3 * MIB),
        event(Action::FreeRequested, 0, 0),
        event(Action::Alloc, 8 * MIB, 3 * MIB),
        event(Action::FreeRequested, 4096, 3 * MIB),
        event(Action::FreeRequested, 8 * MIB, 3 * MIB),
    ];
    let history = compile(&events, &CachingSettings::default()).unwrap();
    assert_eq!((history.allocations(), history.max_live_bytes()), (2, 6 * MIB));
    let allocator = Selection::of(&naive::BACKEND);
    let report = replay(&history, &allocator, &null(5 * MIB), &ReplaySettings::default()).unwrap();
    assert_eq!((report.allocations, report.failed_allocations), (2, 1));
    let (number, words) = report.first_failure.unwrap();
    assert!(number == 2 && words.contains("out of memory"), "{words}");
    assert_eq!((report.stats.num_device_alloc, report.stats.num_device_free), (1, 1));
}

#[test]
fn announced_uses_keep_blocks_until_the_device_is_done() {
    let mut events = Vec::new();
    for at in 1..=8u64 {
        events.push(event(Action::Alloc, at * 64 * MIB, 30 * MIB));
        events.push(Event { stream: 7, ..event(Action::RecordUse, at * 64 * MIB, 0) });
        // As in our own traces, without completions.
        events.push(event(Action::FreeRequested, at * 64 * MIB, 30 * MIB));
        events.push(event(Action::FreeCompleted, at * 64 * MIB, 30 * MIB));
    }
    let history = compile(&events, &CachingSettings::default()).unwrap();
    assert_eq!((history.streams(), history.deferred_frees()), (&[0, 7][..], 0));
    let peak = |touch| {
        let driver: Arc<dyn Driver> = sim(2 * GIB, SimMemory::None);
        let settings = ReplaySettings { touch, ..ReplaySettings::default() };
        let report = replay(&history, &Selection::of(&caching::BACKEND), &driver, &settings).unwrap();
        report.stats.active_bytes.all.peak
    };
    // On an idle stream the use completes immediately; behind the work of filling 30 MiB it does not.
    assert!(peak(false) < peak(true), "{} {}", peak(false), peak(true));
}

#[test]
fn empty_cache_reaches_every_backend() {
    let events = [
        event(Action::SegmentAlloc, 64 * MIB, 20 * MIB),
        event(Action::Alloc, 64 * MIB, 2 * MIB),
        event(Action::FreeRequested, 64 * MIB, 2 * MIB),
        event(Action::FreeCompleted, 64 * MIB, 2 * MIB),
        event(Action::SegmentFree, 64 * MIB, 20 * MIB),
        event(Action::Snapshot, 0, 0),
    ];
    let history = compile(&events, &CachingSettings::default()).unwrap();
    let report = run(&history, &caching::BACKEND, CachingSettings::default(), Addresses::Recorded);
    assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(0), Some(0)));
    assert_eq!(report.stats.reserved_bytes.all.current, 0);
    let driver: Arc<dyn Driver> = sim(GIB, SimMemory::None);
    let pool = Selection::of(&stream_ordered::BACKEND);
    let report = replay(&history, &pool, &driver, &ReplaySettings::default()).unwrap();
    assert_eq!(report.driver_calls["pool_trim"], 1);
}

proptest! {
    #![proptest_config(cases(200))]

    /// On every backend, with and without enough memory: the parts of the breakdown add up, and no value is below the client's
    /// bytes.
    #[test]
    fn the_ledger_adds_up_on_every_backend(steps in steps(200), room in prop::sample::select(vec![100 * MIB, 4 * GIB])) {
        let recorder = record(CachingSettings::default(), false, &steps);
        let events = recorder.events();
        // The complete recording and each of its prefixes up to some length: the breakdown at every event.
        let lengths: Vec<usize> = if events.len() < 40 { (1..=events.len()).collect() } else { vec![events.len()] };
        for length in lengths {
            let history = compile(&events[..length], &CachingSettings::default()).unwrap();
            for kind in backends::all() {
                let driver: Arc<dyn Driver> = sim(room, SimMemory::None);
                let report = replay(&history, &Selection::of(kind), &driver, &ReplaySettings::default()).unwrap();
                let ledger = report.ledger;
                prop_assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
                prop_assert_eq!(ledger.internal + ledger.soft + ledger.hard + ledger.stream + ledger.pending, ledger.wasted());
                prop_assert!(ledger.reserved <= report.stats.reserved_bytes.all.peak);
                if report.failed_allocations == 0 {
                    prop_assert!(history.max_live_bytes() <= report.stats.requested_bytes.all.peak);
                    prop_assert!(report.stats.requested_bytes.all.peak <= report.stats.reserved_bytes.all.peak);
                }
            }
        }
    }
}
