//! Real recordings: PyTorch 2.11 on an H200, with its statistics. At recorded addresses `pytorch` and `caching` must place every
//! block and allocate and release every segment as PyTorch did; `pytorch-expandable`, and `caching` with that setting, must map
//! and unmap the same ranges if the recording used expandable_segments.

mod pools;
mod remap;
mod twins;

use crate::facts::{facts, limit};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use vramlab_device::{Driver, NullDriver, Profile, SimDriver, sim::SimMemory};
use vramlab_histories::formats::{Action, Event, ReadError, ReadOptions, read};
use vramlab_histories::replay::{
    Addresses, History, HistoryBuilder, ReplayReport, ReplaySettings, recorded_settings, replay, smallest_memory,
};
use vramlab_policies::Selection;
use vramlab_policies::backends::{self, Backend, CachingSettings, caching, expandable};

const MIB: u64 = 1 << 20;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The repository's recordings, some under a limit and under other PyTorch settings, and those that may be next to the checkout.
fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let beside = ["../shared/traces", "../shared/traces/configs"].map(|folder| root.join(folder));
    let repository = [root.join("experiments/histories"), fixtures()];
    repository.into_iter().chain(beside.into_iter().filter(|folder| folder.is_dir())).collect()
}

/// A snapshot with PyTorch's statistics.
struct Recording {
    path: PathBuf,
    /// PyTorch's statistics of the program.
    facts: Value,
    /// Memory limit in bytes.
    limit: Option<u64>,
    /// Whether it was recorded under expandable_segments.
    expandable: bool,
}

impl Recording {
    fn at(path: PathBuf) -> Option<Self> {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let stem = name.strip_suffix(".pickle.xz")?;
        let facts = facts(&path).unwrap();
        let limit = limit(&facts);
        let expandable = stem.contains("expandable");
        Some(Self { path, facts, limit, expandable })
    }

    /// A rank of several has the GPUs of all.
    fn gpu(&self) -> Option<u16> {
        self.facts["rank"].as_u64().map(|rank| u16::try_from(rank).unwrap())
    }

    fn load(&self) -> (History, CachingSettings) {
        load(&self.path, self.gpu(), self.limit)
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.facts.get(key).or_else(|| self.facts.get("stats")?.get(key)).and_then(Value::as_u64)
    }
}

fn load(path: &Path, gpu: Option<u16>, limit: Option<u64>) -> (History, CachingSettings) {
    load_with(path, gpu, limit, &[])
}

/// A recording with additional events at its end.
fn load_with(path: &Path, gpu: Option<u16>, limit: Option<u64>, further: &[Event]) -> (History, CachingSettings) {
    let mut builder = HistoryBuilder::new(gpu);
    let summary =
        read(path, &ReadOptions::default(), &mut |event| builder.push(&event).map_err(ReadError::stop)).unwrap();
    let mut settings = recorded_settings(&summary.allocator_settings).unwrap();
    settings.memory_limit = limit;
    further.iter().for_each(|event| builder.push(event).unwrap());
    if further.is_empty() {
        builder.ends_with(&summary.segments).unwrap();
    }
    (builder.finish(&settings).unwrap(), settings)
}

fn run(
    backend: &'static Backend,
    history: &History,
    caching: CachingSettings,
    driver: Arc<dyn Driver>,
) -> ReplayReport {
    run_under(&Selection::with(backend, &caching), history, driver)
}

fn run_under(allocator: &Selection, history: &History, driver: Arc<dyn Driver>) -> ReplayReport {
    let settings = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
    replay(history, allocator, &driver, &settings).unwrap()
}

/// An allocator with the settings of a recording.
fn under(allocator: &str, settings: &CachingSettings) -> Selection {
    let mut allocator: Selection = allocator.parse().unwrap();
    allocator.adopt(settings);
    allocator
}

/// Recordings under PyTorch's native policy.
fn recordings() -> Vec<Recording> {
    let recordings: Vec<Recording> = all_recordings().filter(|recording| !recording.expandable).collect();
    assert!(recordings.len() >= 11, "the repository has eleven recordings");
    recordings
}

fn all_recordings() -> impl Iterator<Item = Recording> {
    let mut paths: Vec<PathBuf> = folders()
        .into_iter()
        .flat_map(|folder| std::fs::read_dir(folder).unwrap())
        .map(|at| at.unwrap().path())
        .collect();
    paths.sort();
    paths.into_iter().filter_map(Recording::at)
}

#[test]
fn pytorch_and_caching_reproduce_recorded_addresses() {
    let all = backends::all().into_iter();
    let following: Vec<_> = all.filter(|backend| backend.capabilities.follows_pytorch).collect();
    assert!(following.len() >= 3, "{following:?}");
    for recording in recordings() {
        let (history, settings) = recording.load();
        let name = recording.path.display();
        assert_eq!(Some(history.events()), recording.number("events"), "{name}");
        let ended = recording.facts["oom"].is_string();
        assert!(history.refused_allocations() > 0 || !ended, "{name}");
        assert_eq!(history.prologue_allocations(), 0, "{name}");
        let devices: [fn() -> Arc<dyn Driver>; 2] =
            [|| Arc::new(NullDriver::new(1 << 50)), || Arc::new(SimDriver::new(Profile::h200(), SimMemory::None))];
        for device in devices {
            // Both implement one policy, also beyond PyTorch's statistics.
            let mut first = None;
            for backend in &following {
                let report = run(backend, &history, settings, device());
                follows_pytorch(&report, &recording, &history, &format!("{name} under {backend}"));
                let outcome = (report.stats, report.ledger, report.driver_calls);
                assert_eq!(first.get_or_insert(outcome.clone()), &outcome, "{name} under {backend}");
            }
        }
    }
}

fn follows_pytorch(report: &ReplayReport, recording: &Recording, history: &History, name: &str) {
    assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(0), Some(0)), "{name}");
    assert_eq!(report.failed_allocations, 0, "{name}");
    let mut compared = 0;
    for (key, actual) in report.stats.entries() {
        if let Some(value) = recording.number(&key) {
            assert_eq!(actual, value, "{name}: {key}");
            compared += 1;
        }
    }
    assert!(compared >= 11, "{name}: only {compared} statistics to compare");
    let ledger = report.ledger;
    assert_eq!(ledger.reserved, report.stats.reserved_bytes.all.peak, "{name}");
    assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested, "{name}");
    assert!(history.max_live_bytes() <= report.stats.requested_bytes.all.peak, "{name}");
}

#[test]
fn pytorch_expandable_maps_what_pytorch_mapped() {
    let recordings: Vec<Recording> = all_recordings().filter(|recording| recording.expandable).collect();
    assert!(!recordings.is_empty(), "the repository has one");
    for recording in recordings {
        let (history, settings) = recording.load();
        let name = recording.path.display();
        let devices: [fn() -> Arc<dyn Driver>; 2] =
            [|| Arc::new(NullDriver::new(1 << 50)), || Arc::new(SimDriver::new(Profile::h200(), SimMemory::None))];
        let mut put_together = Selection::with(&backends::lab::BACKEND, &settings);
        put_together.set("source", "expandable").unwrap();
        for (device, allocator) in devices.into_iter().flat_map(|device| {
            [under("pytorch-expandable", &settings), put_together.clone()].map(|allocator| (device, allocator))
        }) {
            let report = run_under(&allocator, &history, device());
            follows_pytorch(&report, &recording, &history, &format!("{name} under {allocator}"));
            assert_eq!(report.stats.segment.map(|gauge| gauge.all.allocated), Some(0), "{name}: PyTorch counts none");
            assert_eq!(report.driver_calls["mem_set_access"], report.stats.num_device_alloc, "{name}: one a part");
        }
    }
}

/// The requests of a program under the native policy, replayed under expandable segments: PyTorch's statistics of the same
/// program contain the reserved bytes. With several streams the two runs differ in the completion of frees.
#[test]
fn expandable_replay_matches_the_expandable_recording() {
    for recording in recordings() {
        let name = recording.path.file_name().unwrap().to_str().unwrap();
        let other = recording.path.with_file_name(name.replace(".pickle.xz", ".expandable.json"));
        let (history, settings) = recording.load();
        if !other.is_file() || history.streams().len() > 1 {
            continue;
        }
        let facts: Value = serde_json::from_str(&std::fs::read_to_string(other).unwrap()).unwrap();
        let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
        let allocator = Selection::with(&expandable::BACKEND, &settings);
        let stats = replay(&history, &allocator, &driver, &ReplaySettings::default()).unwrap().stats;
        let mut compared = 0;
        for (key, actual) in stats.entries() {
            if let Some(value) = facts.get(&key).and_then(Value::as_u64) {
                assert_eq!(actual, value, "{name}: {key}");
                compared += 1;
            }
        }
        assert!(compared >= 3, "{name}: only {compared} statistics to compare");
    }
}

#[test]
fn failed_request_report_matches_pytorchs_message() {
    for recording in recordings() {
        let (history, _) = recording.load();
        let Some(words) = recording.facts["oom"].as_str() else {
            assert!(history.out_of_memory().is_empty(), "{}", recording.path.display());
            continue;
        };
        let report = history.out_of_memory().last().unwrap();
        let state = report.held.unwrap();
        assert!(report.complete && state.free_blocks > 0, "{report}");
        let mib = |bytes: u64| format!("{:.2} MiB", bytes as f64 / MIB as f64);
        let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / (1 << 30) as f64);
        for sentence in [
            format!("Tried to allocate {}.", mib(report.requested_bytes)),
            format!("of which {} is free.", gib(report.device_free_bytes.unwrap())),
            format!("{} allowed;", gib(report.limit_bytes.unwrap())),
            format!("{} is allocated by PyTorch", gib(state.allocated_bytes)),
            format!("{} is reserved by PyTorch", mib(state.reserved_bytes - state.allocated_bytes)),
        ] {
            assert!(words.contains(&sentence), "{}: '{sentence}' is not in '{words}'", recording.path.display());
        }
    }
}

/// A request that would fail after the last event finds the memory state of PyTorch's statistics.
#[test]
fn state_at_a_failed_request_matches_pytorchs_statistics() {
    let (mut expandable, mut native) = (0, 0);
    for recording in all_recordings().filter(|recording| recording.number("reserved_bytes.all.current").is_some()) {
        let name = recording.path.display();
        let device = recording.gpu().unwrap_or(0);
        let refused = Event { action: Action::Oom, device, addr: 0, bytes: 1 << 40, stream: 0, time_ns: 0 };
        let (history, _) = load_with(&recording.path, recording.gpu(), recording.limit, &[refused]);
        let report = history.out_of_memory().last().unwrap();
        let state = report.held.unwrap();
        assert!(report.complete, "{name}: {report}");
        for (key, actual) in [
            ("reserved_bytes.all.current", state.reserved_bytes),
            ("allocated_bytes.all.current", state.allocated_bytes),
            ("active_bytes.all.current", state.allocated_bytes + state.pending_bytes),
        ] {
            assert!(recording.number(key).is_none_or(|expected| expected == actual), "{name}: {key}: {report}");
        }
        assert_eq!(state.free_bytes, state.reserved_bytes - state.allocated_bytes - state.pending_bytes, "{name}");
        *(if recording.expandable { &mut expandable } else { &mut native }) += 1;
    }
    assert!(expandable > 0 && native > 0, "the repository has both");
}

#[test]
fn wrong_limit_causes_mismatches() {
    let recording = Recording::at(fixtures().join("resnet50.limit.pickle.xz")).unwrap();
    // Under a higher limit there is no reason for PyTorch's releases.
    let (history, mut settings) = recording.load();
    settings.memory_limit = Some(7000 * MIB);
    let report = run(&caching::BACKEND, &history, settings, Arc::new(NullDriver::new(1 << 50)));
    assert!(report.segment_mismatches > Some(0) && report.address_mismatches > Some(0), "{report:#?}");
}

#[test]
fn every_backend_runs_every_recording() {
    for recording in recordings() {
        let (history, caching) = recording.load();
        for kind in backends::all() {
            // Other policies' segments may not fit PyTorch's limit, so they get none.
            let like_pytorch = kind.has_setting("max_split_size");
            let allocator = if like_pytorch { Selection::with(kind, &caching) } else { Selection::of(kind) };
            let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
            let report = replay(&history, &allocator, &driver, &ReplaySettings::default()).unwrap();
            assert_eq!(
                (report.failed_allocations, report.address_mismatches),
                (0, None),
                "{} {kind}",
                recording.path.display()
            );
            assert_eq!(report.allocations, history.allocations());
            assert!(report.stats.requested_bytes.all.peak >= history.max_live_bytes());
            assert_eq!(report.ledger.wasted(), report.ledger.reserved - report.ledger.requested);
            assert!(report.simulated_ns > Some(0));
        }
    }
}

#[test]
fn smallest_memory_is_minimal() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories/streams.pickle.xz");
    let (history, _) = load(&path, None, None);
    let device = |bytes: u64| Ok(Arc::new(NullDriver::new(bytes)) as Arc<dyn Driver>);
    for kind in backends::all() {
        let allocator = Selection::of(kind);
        let minimum = smallest_memory(&history, &allocator, 2 * MIB, 1 << 40, device, |_| {}).unwrap();
        assert!(minimum.bytes >= history.max_live_bytes(), "{kind}");
        let runs = |bytes: u64| {
            let driver = device(bytes).unwrap();
            replay(&history, &allocator, &driver, &ReplaySettings::default()).unwrap().failed_allocations == 0
        };
        assert!(runs(minimum.bytes) && !runs(minimum.bytes - 2 * MIB), "{kind}: {minimum:#?}");
    }
}
