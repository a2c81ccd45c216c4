//! RMM's placements: every block at the address that RMM 26.10 chose on an H200.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use vramlab_device::budget::Budget;
use vramlab_device::{Driver, NullDriver};
use vramlab_histories::formats::{Placements, ReadError, ReadOptions, read};
use vramlab_histories::replay::{
    History, HistoryBuilder, ReplayError, ReplaySettings, recorded_settings, replay_against,
};
use vramlab_policies::Selection;

const MIB: u64 = 1 << 20;

fn null() -> Arc<dyn Driver> {
    Arc::new(NullDriver::new(64 * MIB))
}

/// Placements in the repository or next to it, each with its recording.
fn recordings(kind: &str) -> Vec<(PathBuf, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["tests/fixtures/rmm", "../../../shared/traces/rmm"].map(|folder| root.join(folder));
    let histories = ["tests/fixtures/rmm", "../../../shared/traces", "../../../shared/traces/configs"];
    let mut out = Vec::new();
    for file in folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten() {
        let file = file.unwrap().path();
        let Some(name) = file.file_name().unwrap().to_str().unwrap().strip_suffix(&format!(".{kind}.txt.xz")) else {
            continue;
        };
        let candidates = histories.map(|folder| root.join(folder).join(format!("{name}.pickle.xz")));
        out.push((candidates.into_iter().find(|path| path.is_file()).unwrap(), file));
    }
    out.sort();
    assert!(!out.is_empty(), "the repository has some");
    out
}

fn load(path: &Path) -> History {
    let rank = path.to_str().unwrap().split_once(".rank").and_then(|(_, rest)| rest.split('.').next()?.parse().ok());
    let mut builder = HistoryBuilder::new(rank);
    let summary =
        read(path, &ReadOptions::default(), &mut |event| builder.push(&event).map_err(ReadError::stop)).unwrap();
    builder.finish(&recorded_settings(&summary.allocator_settings).unwrap()).unwrap()
}

fn check(kind: &str) {
    for (history, file) in recordings(kind) {
        let placements = Placements::read(&file, &Budget::default()).unwrap();
        let mut allocator: Selection = format!("rmm-{kind}").parse().unwrap();
        let (name, bytes) = placements.setting();
        allocator.set(name, &bytes.to_string()).unwrap();
        let history = load(&history);
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 50));
        let report = replay_against(&history, &allocator, &driver, &ReplaySettings::default(), &placements).unwrap();
        let differences = (report.address_mismatches, report.segment_mismatches, report.failed_allocations);
        assert_eq!(differences, (Some(0), Some(0), 0), "{}", file.display());
        assert!(report.allocations > 2000, "{}", file.display());
    }
}

#[test]
fn rmm_pool_reproduces_every_address() {
    check("pool");
}

#[test]
fn rmm_arena_reproduces_every_address() {
    check("arena");
}

#[test]
fn another_pool_size_causes_counted_mismatches() {
    let (history, file) = recordings("pool").into_iter().find(|(path, _)| path.ends_with("streams.pickle.xz")).unwrap();
    let (history, placements) = (load(&history), Placements::read(&file, &Budget::default()).unwrap());
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 50));
    let other: Selection = "rmm-pool:initial_pool_size=128M".parse().unwrap();
    let report = replay_against(&history, &other, &driver, &ReplaySettings::default(), &placements).unwrap();
    assert!(report.address_mismatches.unwrap() > 100 && report.segment_mismatches.unwrap() > 1, "{report:?}");
}

#[test]
fn placements_of_another_recording_are_refused() {
    let files = recordings("pool");
    let (history, _) = files.iter().find(|(path, _)| path.ends_with("streams.pickle.xz")).unwrap();
    let history = load(history);
    let header = "# RMM 26.10 pool, x; upstream blocks, bytes@address: 268435456@0\n";
    let driver = null();
    for (calls, words) in [
        ("a 0 16777216 0 0 0\n", "the file has 1 allocations and the recording more"),
        ("a 0 1024 0 0 0\n", "allocation 1 is of 16777216 bytes in the recording and of 1024 in the file"),
        ("a 0 16777216 0 0 0\nf 0\na 0 8192 0 0 0\n", "after allocation 1, the file frees allocation 1 there"),
        ("a 0 16777216 0 0 0\na 1 8192 1 0 0\n", "allocation 2 is of another stream"),
    ] {
        let placements = Placements::read_from(Box::new(format!("{header}{calls}").as_bytes()), &Budget::default());
        let error = replay_against(
            &history,
            &"rmm-pool".parse().unwrap(),
            &driver,
            &ReplaySettings::default(),
            &placements.unwrap(),
        );
        let error = error.unwrap_err();
        assert!(matches!(error, ReplayError::History(_)) && error.is_bad_input(), "{error}");
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
}
