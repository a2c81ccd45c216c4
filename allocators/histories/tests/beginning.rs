//! Recordings that begin late: the memory before recording started is inferred from the segments at the end.

mod cut;
mod small;

use crate::common::{GIB, MIB, cases};
use crate::recorder::Recorder;
use cut::{Complete, recordings};
use proptest::prelude::*;
use proptest::sample::Index;
use std::sync::Arc;
use vramlab_device::{Driver, NullDriver};
use vramlab_histories::formats::{Action, Event};
use vramlab_histories::replay::{Addresses, History, ReplayReport, ReplaySettings, replay, smallest_memory};
use vramlab_policies::Selection;
use vramlab_policies::backends::{self, Backend, CachingSettings, caching, lab, pytorch};

fn run(history: &History, caching: CachingSettings, addresses: Addresses) -> ReplayReport {
    run_on(&caching::BACKEND, history, caching, addresses)
}

fn run_on(
    backend: &'static Backend,
    history: &History,
    caching: CachingSettings,
    addresses: Addresses,
) -> ReplayReport {
    let allocator = Selection::with(backend, &caching);
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 50));
    replay(history, &allocator, &driver, &ReplaySettings { addresses, ..ReplaySettings::default() }).unwrap()
}

fn reserved(report: &ReplayReport) -> u64 {
    report.stats.reserved_bytes.all.peak
}

#[test]
fn truncated_recording_is_replayed_at_recorded_addresses() {
    for (name, complete) in recordings() {
        // If the device chooses addresses, ties between blocks of one size may resolve differently. If they do not in the
        // complete recording, they hardly do in a part of it, whose segments are in the same order, though at other distances.
        let reproduces = reserved(&run(&complete.cut(0), complete.settings, Addresses::Own)) == complete.peak(0);
        for percent in [10, 40, 70] {
            let name = format!("{name} without {percent} %");
            let skip = complete.events.len() * percent / 100;
            let history = complete.cut(skip);
            history.check_comparable().unwrap();
            let report = run(&history, complete.settings, Addresses::Recorded);
            for backend in [&pytorch::BACKEND, &lab::BACKEND] {
                let other = run_on(backend, &history, complete.settings, Addresses::Recorded);
                let figures =
                    |report: &ReplayReport| (report.address_mismatches, report.segment_mismatches, report.ledger);
                assert_eq!(
                    (figures(&other), &other.stats),
                    (figures(&report), &report.stats),
                    "{name} under {backend}"
                );
            }
            assert_eq!(report.address_mismatches, Some(0), "{name}");
            // One collection may release segments in another order.
            let collects = complete.settings.garbage_collection_threshold > 0.0;
            assert!(report.segment_mismatches == Some(0) || collects, "{name}: {:?}", report.segment_mismatches);
            assert_eq!((reserved(&report), report.failed_allocations), (complete.peak(skip), 0), "{name}");
            assert_eq!(report.ledger.reserved, complete.peak(skip), "{name}");
            assert_eq!(report.ledger.wasted(), report.ledger.reserved - report.ledger.requested, "{name}");
            let rest = &complete.events[skip..];
            let count = |action: Action| rest.iter().filter(|event| event.action == action).count() as u64;
            let segments = report.stats.segment.unwrap().all;
            assert_eq!(segments.allocated, count(Action::SegmentAlloc), "{name}");
            assert_eq!(segments.freed, count(Action::SegmentFree), "{name}");
            assert_eq!(report.stats.num_device_alloc, segments.allocated, "{name}");
            assert_eq!(report.stats.allocation.all.allocated, count(Action::Alloc), "{name}");
            if reproduces {
                let (replayed, recorded) =
                    (reserved(&run(&history, complete.settings, Addresses::Own)), complete.peak(skip));
                assert!(replayed.abs_diff(recorded) * 1000 <= 3 * recorded, "{name}: {replayed} and {recorded}");
            }
        }
    }
}

/// Graphs were captured before recording started. Their memory has a pool at the end and serves no other request.
#[test]
fn memory_of_earlier_graphs_stays_in_their_pool() {
    for (name, complete) in cut::graphs() {
        for percent in [25, 30, 45, 60, 80] {
            let (name, skip) = (format!("{name} without {percent} %"), complete.events.len() * percent / 100);
            let history = complete.cut(skip);
            history.check_comparable().unwrap();
            assert!(history.private_pools() > 0 && history.private_pool_allocations() == 0, "{name}");
            for backend in [&caching::BACKEND, &pytorch::BACKEND] {
                let report = run_on(backend, &history, complete.settings, Addresses::Recorded);
                let mismatches = (report.address_mismatches, report.segment_mismatches, report.private_pools);
                assert_eq!(mismatches, (Some(0), Some(0), true), "{name} under {backend}");
                assert_eq!((reserved(&report), report.failed_allocations), (complete.peak(skip), 0), "{name}");
            }
            // The other backends start with the same blocks.
            for kind in backends::all() {
                let report = run_on(kind, &history, CachingSettings::default(), Addresses::Own);
                assert_eq!(
                    (report.allocations, report.failed_allocations),
                    (history.allocations(), 0),
                    "{name} {kind}"
                );
            }
        }
    }
}

#[test]
fn every_backend_starts_with_the_live_blocks() {
    let (_, complete) = recordings().into_iter().find(|(name, _)| name.ends_with("mlp.pickle.xz")).unwrap();
    let skip = complete.events.len() / 2;
    let history = complete.cut(skip);
    let (blocks, live) = complete.live(skip);
    assert!(blocks > 10 && history.prologue_allocations() == blocks);
    for kind in backends::all() {
        let device = || Arc::new(NullDriver::new(1 << 50)) as Arc<dyn Driver>;
        let report = replay(&history, &Selection::of(kind), &device(), &ReplaySettings::default()).unwrap();
        let rest = &complete.events[skip..];
        let allocations = rest.iter().filter(|event| event.action == Action::Alloc).count() as u64;
        assert_eq!(report.allocations, history.allocations(), "{kind}");
        assert_eq!(report.allocations, blocks + allocations, "{kind}");
        assert_eq!(report.stats.allocation.all.allocated, allocations, "{kind}: only those of the history are counted");
        assert!(report.stats.requested_bytes.all.peak >= live && history.max_live_bytes() >= live, "{kind}");
        let device = |bytes: u64| Ok(Arc::new(NullDriver::new(bytes)) as Arc<dyn Driver>);
        let minimum = smallest_memory(&history, &Selection::of(kind), 2 * MIB, 1 << 40, device, |_| {}).unwrap();
        assert!(minimum.bytes >= history.max_live_bytes(), "{kind}: what was live takes memory, too");
    }
}

const STREAMS: usize = 3;

#[derive(Clone, Debug)]
enum Step {
    Alloc { bytes: u64, stream: usize },
    Free { which: Index },
    Use { which: Index, stream: usize },
    Work { stream: usize, ns: u64 },
    EmptyCache,
}

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let sizes = prop_oneof![2 => 1..MIB, 4 => MIB..6 * MIB, 2 => 6 * MIB..30 * MIB];
    let stream = || prop_oneof![3 => Just(0usize), 1 => 1..STREAMS];
    let step = prop_oneof![
        20 => (sizes, stream()).prop_map(|(bytes, stream)| Step::Alloc { bytes, stream }),
        16 => any::<Index>().prop_map(|which| Step::Free { which }),
        4 => (any::<Index>(), 0..STREAMS).prop_map(|(which, stream)| Step::Use { which, stream }),
        8 => (0..STREAMS, 1_000..900_000u64).prop_map(|(stream, ns)| Step::Work { stream, ns }),
        1 => Just(Step::EmptyCache),
    ];
    prop::collection::vec(step, 1..length)
}

/// Records the steps; with the recording comes its number of events after each of them, in order.
fn record(settings: CachingSettings, steps: &[Step]) -> (Recorder, Vec<usize>) {
    let mut recorder = Recorder::new(settings, 16 * GIB, STREAMS);
    let mut ends = vec![0];
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
        ends.push(recorder.event_count());
    }
    (recorder, ends)
}

fn check_cut(settings: CachingSettings, steps: &[Step], at: Index) {
    let (recorder, ends) = record(settings, steps);
    let mut events = recorder.events();
    let mut skip = at.index(events.len() + 1);
    if settings.memory_limit.is_some() {
        // Frees for which a retry waited before the truncation would look as if they had completed before the request.
        skip = ends[ends.partition_point(|end| *end < skip)];
    }
    if events[skip..].iter().all(|event| event.action != Action::FreeCompleted) {
        // A log without completions counts as one that does not record them, so add one.
        let completed = Event { action: Action::FreeCompleted, device: 0, addr: 1, bytes: 512, stream: 0, time_ns: 0 };
        events.insert(skip, completed);
    }
    let complete = Complete { events, segments: recorder.segments(), settings };
    let history = complete.cut(skip);
    if let Err(error) = history.check_comparable() {
        let silent = history.events() == 0 || complete.peak(skip) == 0;
        assert!(silent, "only a history without segments cannot be compared: {error}");
        return;
    }
    let report = run(&history, settings, Addresses::Recorded);
    let line = |event: &Event| {
        let Event { action, addr, bytes, stream, .. } = *event;
        format!("{action} {addr:#x} {bytes} on {stream}")
    };
    let log: Vec<String> = complete.events.iter().map(line).collect();
    let log = format!("cut at {skip}:\n{}", log.join("\n"));
    assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(0), Some(0)), "{log}");
    assert_eq!(reserved(&report), complete.peak(skip), "{log}");
    for (ours, recorded) in report.stats.entries().iter().zip(recorder.caching.stats().entries()) {
        assert!(!ours.0.ends_with(".current") || *ours == recorded, "{ours:?}, recorded {recorded:?}, {log}");
    }
}

proptest! {
    #![proptest_config(cases(400))]

    /// Any operations, with the log truncated anywhere, also between the events of one operation.
    #[test]
    fn a_log_that_is_cut_anywhere_is_followed(
        steps in steps(300),
        divisions in prop_oneof![2 => Just(0u64), 1 => Just(4)],
        at in any::<Index>(),
    ) {
        let roundup_power2_divisions = vramlab_policies::policy::size::torch::Divisions::uniform(divisions);
        check_cut(CachingSettings { roundup_power2_divisions, ..CachingSettings::default() }, &steps, at);
    }

    /// With retries and refusals, truncated between operations.
    #[test]
    fn a_log_under_a_limit_that_is_cut_is_followed(
        steps in steps(300),
        limit in 60..200u64,
        at in any::<Index>(),
    ) {
        let memory_limit = Some(limit * MIB);
        check_cut(CachingSettings { memory_limit, ..CachingSettings::default() }, &steps, at);
    }
}
