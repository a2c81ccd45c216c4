//! Real histories: PyTorch 2.11 on an H200, with the statistics that it gave. At the recorded addresses `caching` has to
//! place every block and to make and release every segment as PyTorch did.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use allocators::backend::CachingSettings;
use allocators::replay::{
    Addresses, History, HistoryBuilder, ReplayReport, ReplaySettings, recorded_settings, replay, smallest_memory,
};
use allocators::trace::{ReadError, ReadOptions, read};
use allocators::{AllocatorSettings, BackendKind, Driver, NullDriver, Profile, SimDriver, SimMemory};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// The repository's histories, and those that may lie beside the checkout.
fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let beside = root.join("../shared/traces");
    if !beside.is_dir() {
        eprintln!("without {}, which is not there", beside.display());
    }
    [root.join("experiments/histories"), beside].into_iter().filter(|folder| folder.is_dir()).collect()
}

fn load(path: &Path, limit: Option<u64>) -> (History, CachingSettings) {
    let mut builder = HistoryBuilder::new(None);
    let summary =
        read(path, &ReadOptions::default(), &mut |event| builder.push(&event).map_err(ReadError::stop)).unwrap();
    let mut settings = recorded_settings(&summary.allocator_settings).unwrap();
    settings.memory_limit = limit;
    (builder.finish(&settings).unwrap(), settings)
}

fn caching(history: &History, caching: CachingSettings, driver: Arc<dyn Driver>) -> ReplayReport {
    let allocator = AllocatorSettings { caching, ..AllocatorSettings::new(BackendKind::Caching) };
    let settings = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
    replay(history, &allocator, &driver, &settings).unwrap()
}

/// Every snapshot with the JSON of its statistics and the limit in it.
fn recordings() -> Vec<(PathBuf, Value, Option<u64>)> {
    let mut found = Vec::new();
    for entry in folders().into_iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let Some(stem) = name.strip_suffix(".pickle.xz") else { continue };
        let beside = |name: String| Some(path.with_file_name(name)).filter(|path| path.is_file());
        let statistics = beside(format!("{stem}.json")).or_else(|| beside(format!("{stem}.default.json"))).unwrap();
        let text = std::fs::read_to_string(statistics).unwrap();
        let statistics: Value = serde_json::from_str(&text).unwrap();
        // PyTorch is given the limit as a share of the memory and cuts the product to whole bytes.
        let limit = statistics["limit_mib"].as_f64().map(|mib| {
            let total = statistics["total_memory"].as_f64().unwrap();
            (mib * MIB as f64 / total * total) as u64
        });
        found.push((path, statistics, limit));
    }
    assert!(found.len() >= 4, "the repository has four recordings");
    found
}

#[test]
fn caching_is_pytorch_address_for_address() {
    for (path, statistics, limit) in recordings() {
        let (history, settings) = load(&path, limit);
        let name = path.display();
        assert_eq!(history.events(), statistics["events"].as_u64().unwrap(), "{name}");
        let devices: [Arc<dyn Driver>; 2] =
            [Arc::new(NullDriver::new(1 << 50)), Arc::new(SimDriver::new(Profile::h200(), SimMemory::None))];
        for driver in devices {
            let report = caching(&history, settings, driver);
            assert_eq!((report.address_mismatches, report.segment_mismatches), (Some(0), Some(0)), "{name}");
            assert_eq!((report.failed_allocations, history.prologue_allocations()), (0, 0), "{name}");
            let ours: std::collections::BTreeMap<String, u64> = report.stats.entries().into_iter().collect();
            let mut compared = 0;
            for (key, value) in statistics.as_object().unwrap() {
                if let (Some(ours), Some(value)) = (ours.get(key), value.as_u64()) {
                    assert_eq!(*ours, value, "{name}: {key}");
                    compared += 1;
                }
            }
            assert!(compared >= 11, "{name}: only {compared} statistics to compare");
            let ledger = report.ledger;
            assert_eq!(ledger.reserved, report.stats.reserved_bytes.all.peak, "{name}");
            assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested, "{name}");
            assert!(history.max_live_bytes() <= report.stats.requested_bytes.all.peak, "{name}");
        }
    }
}

#[test]
fn a_wrong_limit_is_noticed() {
    let Some((path, ..)) = recordings().into_iter().find(|(path, ..)| path.ends_with("resnet50.limit.pickle.xz"))
    else {
        return;
    };
    // Under a higher limit there is no reason to release what PyTorch released.
    let (history, mut settings) = load(&path, Some(6000 * MIB));
    settings.memory_limit = Some(7000 * MIB);
    let report = caching(&history, settings, Arc::new(NullDriver::new(1 << 50)));
    assert!(report.segment_mismatches > Some(0) && report.address_mismatches > Some(0), "{report:#?}");
}

#[test]
fn every_backend_runs_every_recording() {
    for (path, _, limit) in recordings() {
        let (history, caching) = load(&path, limit);
        for kind in BackendKind::ALL {
            let allocator = AllocatorSettings { caching, ..AllocatorSettings::new(kind) };
            let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
            let report = replay(&history, &allocator, &driver, &ReplaySettings::default()).unwrap();
            assert_eq!((report.failed_allocations, report.address_mismatches), (0, None), "{} {kind}", path.display());
            assert_eq!(report.allocations, history.allocations());
            assert!(report.stats.requested_bytes.all.peak >= history.max_live_bytes());
            assert_eq!(report.ledger.wasted(), report.ledger.reserved - report.ledger.requested);
            assert!(report.simulated_ns > Some(0));
        }
    }
}

#[test]
fn the_smallest_memory_runs_and_less_does_not() {
    let Some((path, ..)) = recordings().into_iter().find(|(path, ..)| path.ends_with("streams.pickle.xz")) else {
        return;
    };
    let (history, _) = load(&path, None);
    let device = |bytes: u64| Ok(Arc::new(NullDriver::new(bytes)) as Arc<dyn Driver>);
    for kind in BackendKind::ALL {
        let allocator = AllocatorSettings::new(kind);
        let found = smallest_memory(&history, &allocator, 2 * MIB, 1 << 40, device, |_| {}).unwrap();
        assert!(found.bytes >= history.max_live_bytes(), "{kind}");
        let runs = |bytes: u64| {
            let driver = device(bytes).unwrap();
            replay(&history, &allocator, &driver, &ReplaySettings::default()).unwrap().failed_allocations == 0
        };
        assert!(runs(found.bytes) && !runs(found.bytes - 2 * MIB), "{kind}: {found:#?}");
    }
}
