//! Private pools in recordings: whatever a program did with them, the recorded placements suffice for a replay at every recorded
//! address.

use crate::common::{GIB, MIB};
use crate::recorder::Recorder;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::path::Path;
use std::sync::Arc;
use vramlab_device::{Driver, NullDriver};
use vramlab_histories::formats::{Action, Event, ReadError, ReadOptions, SegmentPool, read};
use vramlab_histories::replay::{
    Addresses, History, HistoryBuilder, ReplayReport, ReplaySettings, recorded_settings, replay,
};
use vramlab_policies::Selection;
use vramlab_policies::backends::{CachingSettings, caching, pytorch};

const STREAMS: usize = 3;

#[derive(Clone, Debug)]
enum Step {
    Alloc {
        bytes: u64,
        stream: usize,
    },
    Free {
        which: Index,
    },
    Use {
        which: Index,
        stream: usize,
    },
    Work {
        stream: usize,
        ns: u64,
    },
    EmptyCache,
    /// Switches a stream to one of the pools, to a new one, or back.
    Enter {
        stream: usize,
        which: Index,
    },
    Leave {
        stream: usize,
    },
    Release {
        which: Index,
        now: bool,
    },
}

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let sizes = prop_oneof![3 => 1..MIB, 3 => MIB..12 * MIB, 2 => 10 * MIB..50 * MIB];
    let stream = || prop_oneof![3 => Just(0usize), 1 => 1..STREAMS];
    let step = prop_oneof![
        24 => (sizes, stream()).prop_map(|(bytes, stream)| Step::Alloc { bytes, stream }),
        20 => any::<Index>().prop_map(|which| Step::Free { which }),
        2 => (any::<Index>(), 0..STREAMS).prop_map(|(which, stream)| Step::Use { which, stream }),
        4 => (0..STREAMS, 1_000..900_000u64).prop_map(|(stream, ns)| Step::Work { stream, ns }),
        1 => Just(Step::EmptyCache),
        3 => (stream(), any::<Index>()).prop_map(|(stream, which)| Step::Enter { stream, which }),
        2 => stream().prop_map(|stream| Step::Leave { stream }),
        1 => (any::<Index>(), any::<bool>()).prop_map(|(which, now)| Step::Release { which, now }),
    ];
    prop::collection::vec(step, 1..length)
}

fn record(backend: &Selection, steps: &[Step]) -> Recorder {
    let mut recorder = Recorder::of(backend, CachingSettings::default(), 64 * GIB, STREAMS);
    // Pools that are not released.
    let mut pools: Vec<usize> = Vec::new();
    for step in steps {
        match step {
            Step::Alloc { bytes, stream } => assert!(recorder.alloc(*bytes, *stream)),
            Step::Free { which } if !recorder.live.is_empty() => recorder.free(which.index(recorder.live.len())),
            Step::Use { which, stream } if !recorder.live.is_empty() => {
                recorder.record_use(which.index(recorder.live.len()), *stream);
            }
            Step::Work { stream, ns } => recorder.work(*stream, *ns),
            Step::EmptyCache => recorder.empty_cache(),
            Step::Enter { stream, which } => {
                let at = which.index(pools.len() + 1);
                if at == pools.len() {
                    pools.push(recorder.make_pool());
                }
                recorder.enter(*stream, Some(pools[at]));
            }
            Step::Leave { stream } => recorder.enter(*stream, None),
            Step::Release { which, now } if !pools.is_empty() => {
                let pool = pools.swap_remove(which.index(pools.len()));
                recorder.release_pool(pool, *now);
            }
            Step::Free { .. } | Step::Use { .. } | Step::Release { .. } => {}
        }
    }
    recorder
}

fn compile(recorder: &Recorder) -> History {
    let mut builder = HistoryBuilder::new(None);
    recorder.events().iter().try_for_each(|event| builder.push(event)).unwrap();
    builder.ends_with(&recorder.segments()).unwrap();
    builder.finish(&CachingSettings::default()).unwrap()
}

/// The history of a recording from an event on, whose events of segments name the pools; the segments at the end do not.
fn compile_named(recorder: &Recorder, from: usize) -> History {
    let mut builder = HistoryBuilder::new(None);
    recorder.events()[from..].iter().try_for_each(|event| builder.push(event)).unwrap();
    let (mut segments, mut pools) = (recorder.segments(), recorder.segment_pools());
    segments.iter_mut().for_each(|segment| segment.pool_id = None);
    builder.ends_with(&segments).unwrap();
    pools.retain(|named| named.event > from as u64);
    pools.iter_mut().for_each(|named| named.event -= from as u64);
    builder.names_pools(&pools).unwrap();
    builder.finish(&CachingSettings::default()).unwrap()
}

fn run(history: &History, backend: &Selection) -> ReplayReport {
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 50));
    let settings = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
    replay(history, backend, &driver, &settings).unwrap()
}

/// Numbers of blocks and segments at other addresses, if the recording can be compared.
fn differs(backend: &Selection, steps: &[Step]) -> Option<(u64, u64, u64, u64)> {
    let recorder = record(backend, steps);
    let history = compile(&recorder);
    history.check_comparable().ok()?;
    let report = run(&history, backend);
    let peak = |stats: &vramlab_policies::Stats| stats.reserved_bytes.all.peak;
    let (moved, segments) = (report.address_mismatches.unwrap(), report.segment_mismatches.unwrap());
    Some((moved, segments, peak(&report.stats), peak(&recorder.caching.stats())))
}

/// PyTorch 2.11 programs at their limit. `torch.compile` captured graphs until memory ran out in a capture, where no cached
/// memory is released; destroyed pools release their free segments; `torch.cuda.graph` empties the cache before a capture. One
/// program has no pools, but a setting that its snapshot contains only in the line that PyTorch parsed.
#[test]
fn programs_at_their_limit_are_reproduced() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pools");
    let list = std::fs::read_to_string(folder.join("recorded.json")).unwrap();
    let list: Vec<serde_json::Value> = serde_json::from_str(&list).unwrap();
    assert!(list.len() >= 5);
    for facts in list {
        let name = facts["file"].as_str().unwrap();
        let mut builder = HistoryBuilder::new(None);
        let mut sink = |event| builder.push(&event).map_err(ReadError::stop);
        let summary = read(&folder.join(name), &ReadOptions::default(), &mut sink).unwrap();
        builder.ends_with(&summary.segments).unwrap();
        let mut settings = recorded_settings(&summary.allocator_settings).unwrap();
        settings.memory_limit = facts["limit_bytes"].as_u64();
        let history = builder.finish(&settings).unwrap();
        assert_eq!(history.refused_allocations() > 0, facts["out_of_memory"].as_bool().unwrap(), "{name}");
        for backend in [&caching::BACKEND, &pytorch::BACKEND] {
            let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 50));
            let how = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
            let report = replay(&history, &Selection::with(backend, &settings), &driver, &how).unwrap();
            let mismatches = (report.address_mismatches, report.segment_mismatches);
            assert_eq!(mismatches, (Some(0), Some(0)), "{name} under {backend}");
            let peak = report.stats.reserved_bytes.all.peak;
            assert_eq!(Some(peak), facts["peak_reserved_bytes"].as_u64(), "{name} under {backend}");
        }
    }
}

/// Programs that switch streams between pools and release pools at random. Few of them are ambiguous: mostly if several calls are
/// between two events.
#[test]
fn programs_with_private_pools_are_reproduced() {
    for backend in following() {
        let (strategy, mut runner) = (steps(200), TestRunner::deterministic());
        let (mut compared, mut other) = (0, 0);
        for _ in 0..200 {
            let steps = strategy.new_tree(&mut runner).unwrap().current();
            let Some((moved, segments, replayed, recorded)) = differs(&backend, &steps) else { continue };
            compared += 1;
            other += u64::from((moved, segments) != (0, 0) || replayed != recorded);
        }
        assert!(compared > 150 && other * 33 < compared, "{backend}: {other} of {compared} differ");
    }
}

/// PyTorch 2.12 records the pool of each event, so nothing is ambiguous.
#[test]
fn pools_that_events_name_are_exact() {
    for backend in following() {
        let (strategy, mut runner) = (steps(200), TestRunner::deterministic());
        let (mut inferred, mut other) = (0, 0);
        for _ in 0..200 {
            let steps = strategy.new_tree(&mut runner).unwrap().current();
            let recorder = record(&backend, &steps);
            let history = compile_named(&recorder, 0);
            assert_eq!(history.private_pool_allocations(), recorder.pool_allocations(), "{backend}: {steps:?}");
            assert_eq!(history.undetermined_pool_allocations(), 0);
            if history.check_comparable().is_ok() {
                let report = run(&history, &backend);
                other += u64::from(report.address_mismatches != Some(0) || report.segment_mismatches != Some(0));
            }
            inferred += u64::from(compile(&recorder).private_pool_allocations() != recorder.pool_allocations());
        }
        assert!(inferred > 0 && other < inferred, "{backend}: {other} differ, {inferred} are inferred differently");
    }
}

/// The recording begins after the pool, and the pool is released before it ends.
#[test]
fn pool_of_a_late_recording_is_known_by_its_events() {
    // Such a recording of expandable segments does not show where memory was mapped before.
    let mut program = programs().next().unwrap();
    program.take(MAIN, None, &[100, 5_000]);
    let pool = program.0.make_pool();
    program.take(MAIN, Some(pool), &[5_000]);
    let from = program.0.events().len();
    program.take(MAIN, Some(pool), &[200, 6_000]);
    program.drop_last(3);
    program.0.release_pool(pool, true);
    let history = compile_named(&program.0, from);
    assert_eq!((history.private_pools(), history.undetermined_pool_allocations()), (1, 0));
    assert_eq!(history.private_pool_allocations(), 2);
}

/// A program with pools that can be inferred completely from its recording.
struct Program(Recorder, Selection);

/// Stream of an operation: the program's, and two for captures.
const MAIN: usize = 0;
const CAPTURE: usize = 1;
const SIDE: usize = 2;

impl Program {
    /// Allocates blocks of these sizes in KiB on a stream, possibly in a pool; returns their indices among live ones.
    fn take(&mut self, stream: usize, pool: Option<usize>, kib: &[u64]) {
        self.0.enter(stream, pool);
        for kib in kib {
            assert!(self.0.alloc(kib << 10, stream));
        }
        self.0.enter(stream, None);
    }

    /// Frees the last blocks.
    fn drop_last(&mut self, count: usize) {
        for _ in 0..count {
            self.0.free(self.0.live.len() - 1);
        }
    }

    fn check(&self, pools: u64, allocations: u64, undetermined: u64) {
        let history = compile(&self.0);
        let counts =
            (history.private_pools(), history.private_pool_allocations(), history.undetermined_pool_allocations());
        assert_eq!(counts, (pools, allocations, undetermined), "{}", self.1);
        let named = compile_named(&self.0, 0);
        assert_eq!((named.private_pools(), named.private_pool_allocations()), (pools, allocations), "{}", self.1);
        for history in [history, named] {
            let report = run(&history, &self.1);
            assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(0), Some(0)), "{}", self.1);
            assert_eq!(report.stats.reserved_bytes, self.0.caching.stats().reserved_bytes, "{}", self.1);
        }
    }
}

/// PyTorch's native policy, and that with expandable segments.
fn following() -> impl Iterator<Item = Selection> {
    ["caching", "pytorch-expandable"].into_iter().map(|text| text.parse().unwrap())
}

fn programs() -> impl Iterator<Item = Program> {
    following().map(|backend| Program(Recorder::of(&backend, CachingSettings::default(), 64 * GIB, STREAMS), backend))
}

#[test]
fn pool_of_a_final_segment_is_known() {
    for mut program in programs() {
        program.take(MAIN, None, &[100, 5_000]);
        program.drop_last(2);
        let pool = program.0.make_pool();
        program.take(MAIN, Some(pool), &[100, 5_000, 30_000]);
        program.take(MAIN, None, &[100, 5_000]);
        program.check(1, 3, 0);
    }
}

/// Garbage collection goes by age. Without the memory limit a collection looks like a call of `empty_cache`, which goes by size
/// and releases private pools last.
#[test]
fn garbage_collection_spares_private_pools() {
    let event = |action, addr: u64, mib: u64| Event {
        action,
        device: 0,
        addr: addr << 30,
        bytes: mib * MIB,
        stream: 0,
        time_ns: 0,
    };
    let mut events = Vec::new();
    for (addr, mib) in [(1, 36), (2, 20), (3, 30)] {
        events.extend([Action::SegmentAlloc, Action::Alloc].map(|action| event(action, addr, mib)));
    }
    for (addr, mib) in [(1, 36), (2, 20)] {
        events.extend([Action::FreeRequested, Action::FreeCompleted].map(|action| event(action, addr, mib)));
    }
    events.extend([(1, 36), (2, 20)].map(|(addr, mib)| event(Action::SegmentFree, addr, mib)));
    events.extend([Action::SegmentAlloc, Action::Alloc].map(|action| event(action, 4, 40)));
    let in_pools = |garbage_collection_threshold, pools: &[SegmentPool]| {
        let mut builder = HistoryBuilder::new(None);
        events.iter().try_for_each(|event| builder.push(event)).unwrap();
        builder.ends_with(&[]).unwrap();
        builder.names_pools(pools).unwrap();
        let settings = CachingSettings { garbage_collection_threshold, ..CachingSettings::default() };
        builder.finish(&settings).unwrap().private_pool_allocations()
    };
    assert_eq!(in_pools(0.5, &[]), 0);
    // Without a collection, the first released segments were not of the pool with which `empty_cache` begins.
    assert_ne!(in_pools(0.0, &[]), 0);
    // Events that name the default pool are believed, if all have a name.
    let default = [1, 3, 5, 11, 12, 13].map(|event| SegmentPool { device: 0, event, pool: (0, 0) });
    assert_eq!(in_pools(0.0, &default), 0);
    assert_ne!(in_pools(0.0, &default[1..]), 0);
}

#[test]
fn released_pool_is_inferred_from_new_segments() {
    for mut program in programs() {
        program.take(MAIN, None, &[100, 5_000]);
        let pool = program.0.make_pool();
        // The default pool has room for all of it.
        program.take(MAIN, Some(pool), &[100, 5_000, 200, 6_000]);
        program.drop_last(4);
        program.take(MAIN, None, &[100]);
        program.0.release_pool(pool, false);
        program.0.empty_cache();
        program.take(MAIN, None, &[5_000]);
        program.check(1, 4, 0);
    }
}

#[test]
fn pool_releases_its_memory_without_a_cache_flush() {
    for mut program in programs() {
        program.take(MAIN, None, &[100, 5_000, 40_000]);
        program.drop_last(1);
        let pool = program.0.make_pool();
        program.take(MAIN, Some(pool), &[100, 5_000, 30_000]);
        program.drop_last(3);
        program.0.release_pool(pool, true);
        // Memory that was free then still exists.
        program.take(MAIN, None, &[40_000]);
        program.check(1, 3, 0);
    }
}

#[test]
fn graphs_share_a_pool_across_streams() {
    for mut program in programs() {
        program.take(MAIN, None, &[300, 7_000, 25_000]);
        // Requests of a capture before it begins are served by the default pool.
        program.take(CAPTURE, None, &[1]);
        let pool = program.0.make_pool();
        program.take(CAPTURE, Some(pool), &[100, 5_000, 30_000]);
        program.drop_last(2);
        program.take(SIDE, Some(pool), &[900]);
        program.take(CAPTURE, None, &[1]);
        program.take(MAIN, None, &[600]);
        program.0.empty_cache();
        program.take(CAPTURE, Some(pool), &[5_000, 2_000, 100]);
        program.check(1, 7, 0);
    }
}

#[test]
fn two_pools_of_a_stream_are_distinguished() {
    for mut program in programs() {
        program.take(MAIN, None, &[300, 7_000]);
        let pools = [0, 1].map(|_| program.0.make_pool());
        for pool in pools {
            program.take(CAPTURE, Some(pool), &[100, 5_000, 6_000]);
            program.drop_last(1);
        }
        for pool in pools {
            program.take(CAPTURE, Some(pool), &[300, 6_000]);
        }
        program.0.empty_cache();
        // The first one's blocks are freed, and released with the next cache flush.
        for _ in 0..2 {
            program.0.free(2);
        }
        program.0.release_pool(pools[0], false);
        program.0.empty_cache();
        program.take(MAIN, None, &[7_000]);
        program.check(2, 10, 0);
    }
}
