//! Shared by the tests: short runs through the library, and their records.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Instant;
use tempfile::TempDir;
use trainer::data::DatasetName;
use trainer::data::Progress;
use trainer::observer::{Observer, Silent};
use trainer::settings::{DeviceChoice, SyncMode};
use trainer::{Outcome, Settings};

/// Two short epochs of iris on the simulated device.
pub(crate) fn iris() -> Settings {
    Settings {
        device: DeviceChoice::Named(vramlab::DeviceName::Sim(None)),
        dataset: DatasetName::Iris,
        offline: true,
        hidden: 24,
        epochs: 2,
        batch: 25,
        ..Settings::default()
    }
}

/// Ten steps of the generated digits on the simulated device.
pub(crate) fn digits() -> Settings {
    Settings { dataset: DatasetName::Digits, hidden: 40, batch: 64, steps: Some(10), ..iris() }
}

/// The allocators and the ways of using them that are compared everywhere.
pub(crate) fn arms(base: &Settings) -> Vec<(&'static str, Settings)> {
    let with = |text: &str| Settings { allocator: text.parse().unwrap(), ..base.clone() };
    let mut trimmed = with("stream-ordered:release_threshold=0");
    trimmed.sync = SyncMode::Step;
    let mut collecting = with("caching:garbage_collection_threshold=0.1");
    collecting.memory_limit = Some(64 << 20);
    vec![
        ("naive", with("naive")),
        ("caching", with("caching")),
        ("caching with a limit that collects", collecting),
        ("stream-ordered", with("stream-ordered")),
        ("stream-ordered that keeps nothing", trimmed),
    ]
}

/// A run and the directory with its record.
pub(crate) struct FinishedRun {
    pub(crate) outcome: Outcome,
    directory: TempDir,
}

impl FinishedRun {
    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("record")
    }

    /// `summary.json` as it is on disk.
    pub(crate) fn json(&self) -> serde_json::Value {
        read_json(&self.path().join("summary.json"))
    }

    /// A column of `steps.csv` as text.
    pub(crate) fn column(&self, name: &str) -> Vec<String> {
        column(&self.path().join("steps.csv"), name)
    }

    /// Asserts that the run succeeded.
    pub(crate) fn finished(self) -> Self {
        assert!(self.outcome.error.is_none(), "{:?}", self.outcome.error);
        self
    }
}

pub(crate) fn read_json(path: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(path).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn column(path: &Path, name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'), "the last row of {} should be whole", path.display());
    let mut lines = text.lines().map(|line| line.split(',').map(str::to_owned).collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let at = header.iter().position(|column| column == name).unwrap();
    lines
        .map(|row| {
            assert_eq!(row.len(), header.len());
            row[at].clone()
        })
        .collect()
}

/// Runs with an observer and a flag that it may set; what `run` gave, and the directory in which `record` may be.
pub(crate) fn attempt(
    settings: &Settings,
    stop: &AtomicBool,
    observer: Arc<dyn Observer>,
) -> (trainer::Result<Outcome>, TempDir) {
    let directory = TempDir::new().unwrap();
    let settings = Settings { out: Some(directory.path().join("record")), ..settings.clone() };
    let outcome = trainer::run(&settings, vec!["test".into()], Instant::now(), stop, &observer);
    (outcome, directory)
}

/// [`attempt`] that must leave a record, however the run ended.
pub(crate) fn train_with(settings: &Settings, stop: &AtomicBool, observer: Arc<dyn Observer>) -> FinishedRun {
    let (outcome, directory) = attempt(settings, stop, observer);
    FinishedRun { outcome: outcome.unwrap(), directory }
}

/// Runs to its end, good or bad, as long as there is a record.
pub(crate) fn train(settings: &Settings) -> FinishedRun {
    train_with(settings, &AtomicBool::new(false), Arc::new(Silent))
}

/// Sets the flag when notified of a step.
#[derive(Debug)]
pub(crate) struct StopAt(pub(crate) u64, pub(crate) Arc<AtomicBool>);

impl Progress for StopAt {}

impl Observer for StopAt {
    fn step(&self, _: u32, step: u64) {
        if step == self.0 {
            self.1.store(true, SeqCst);
        }
    }
}
