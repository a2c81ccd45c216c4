//! Replays: at recorded addresses nothing may differ, whatever the allocator had to do; histories that contradict
//! themselves are refused.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;
#[path = "replay/recorder.rs"]
mod recorder;

use allocators::backend::CachingSettings;
use allocators::replay::{
    Addresses, History, HistoryBuilder, ReplayError, ReplayReport, ReplaySettings, replay, smallest_memory,
};
use allocators::trace::{Action, Event};
use allocators::{AllocatorSettings, BackendKind, DeviceAllocator, Driver, NullDriver, SimMemory};
use common::{GIB, KIB, MIB, sim};
use proptest::prelude::*;
use proptest::sample::Index;
use recorder::Recorder;
use std::sync::Arc;

const STREAMS: usize = 3;

fn compile(events: &[Event], settings: &CachingSettings) -> Result<History, ReplayError> {
    let mut builder = HistoryBuilder::new(None);
    events.iter().try_for_each(|event| builder.push(event))?;
    builder.finish(settings)
}

fn null(bytes: u64) -> Arc<dyn Driver> {
    Arc::new(NullDriver::new(bytes))
}

fn run(history: &History, kind: BackendKind, caching: CachingSettings, addresses: Addresses) -> ReplayReport {
    let allocator = AllocatorSettings { caching, ..AllocatorSettings::new(kind) };
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
    recorder
}

/// Everything that the recorded allocator counted, but for what only its own driver calls decide.
fn figures(stats: &allocators::Stats) -> Vec<(String, u64)> {
    let mut entries = stats.entries();
    // Frees that complete in the same request join in another order, so what is split in between differs.
    let in_between = |key: &str| key.starts_with("inactive_split") && !key.ends_with("current");
    entries.retain(|(key, _)| key != "num_sync_all_streams" && !in_between(key));
    entries
}

fn check_faithful(settings: CachingSettings, writes_uses: bool, steps: &[Step]) {
    let recorder = record(settings, writes_uses, steps);
    let mut events = recorder.events();
    if events.iter().all(|event| event.action != Action::FreeCompleted) {
        // A log without completions is one that does not record them, so let there be one.
        events.insert(0, event(Action::FreeCompleted, 1, 512));
    }
    let history = compile(&events, &settings).unwrap();
    if history.check_comparable().is_err() {
        assert_eq!(history.allocations(), 0, "only a history without segments cannot be compared");
        return;
    }
    let report = run(&history, BackendKind::Caching, settings, Addresses::Recorded);
    assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(0), Some(0)), "{:?}", events);
    assert_eq!(report.failed_allocations, 0);
    // What `empty_cache` right before a request released may as well have been released by a retry of that request, and
    // the other way round; the outcome is the same but for this count.
    let ambiguous = settings.memory_limit.is_some();
    for (ours, recorded) in figures(&report.stats).iter().zip(figures(&recorder.caching.stats())) {
        assert!(*ours == recorded || ambiguous && ours.0 == "num_alloc_retries", "{ours:?}, recorded {recorded:?}");
    }
    assert_eq!(report.ledger, recorder.caching.ledger_at_peak());
}

fn cases(cases: u32) -> ProptestConfig {
    let cases = match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default().cases,
        None => cases,
    };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(400))]

    /// Frees held up by other streams, calls of `empty_cache`, retries under a limit and refusals: from the log alone,
    /// which names none of them.
    #[test]
    fn caching_follows_its_history(
        steps in steps(300),
        limit in prop_oneof![1 => Just(None), 3 => (60..200u64).prop_map(|mib| Some(mib * MIB))],
        writes_uses in any::<bool>(),
    ) {
        let settings = CachingSettings { memory_limit: limit, ..CachingSettings::default() };
        check_faithful(settings, writes_uses, &steps);
    }
    /// The same with garbage collection and with blocks that are too large to split.
    #[test]
    fn caching_follows_its_history_under_other_settings(
        steps in steps(300),
        limit in 60..200u64,
        garbage_collection_threshold in prop_oneof![1 => Just(0.0), 2 => 0.3..0.9],
        max_split_size in prop_oneof![1 => Just(None), 1 => (21..40u64).prop_map(|mib| Some(mib * MIB))],
    ) {
        // Under these settings a log does not always tell `empty_cache`, and the point at which a free that was held up
        // completed, from what the allocator released itself.
        let mut steps = steps;
        steps.retain(|step| !matches!(step, Step::EmptyCache | Step::Use { .. }));
        let memory_limit = Some(limit * MIB);
        let settings =
            CachingSettings { memory_limit, garbage_collection_threshold, max_split_size, ..CachingSettings::default() };
        check_faithful(settings, false, &steps);
    }
}
