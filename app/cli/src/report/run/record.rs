//! The parts of `summary.json` that the page shows.

use super::{quantile, read_json, warm};
use anyhow::Result;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use vramlab::Bytes;

/// Settings that distinguish runs of one allocator; the allocator's own settings are part of its name.
pub(super) const DISTINGUISHING: [&str; 21] = [
    "device",
    "dataset",
    "hidden",
    "layers",
    "batch",
    "dtype",
    "accumulate",
    "weights",
    "loss_scale",
    "fuse",
    "launch",
    "streams",
    "sync",
    "loader",
    "init",
    "seed",
    "lr",
    "gpus",
    "buffers",
    "comm_streams",
    "rank",
];
/// Values of settings that a record omits.
const DEFAULTS: [(&str, &str); 5] =
    [("dtype", "f32"), ("accumulate", "f32"), ("fuse", "none"), ("launch", "eager"), ("streams", "1")];
/// Highest supported version.
const VERSION: u64 = 1;

/// A value with its name, for the table of all recordings.
pub(in crate::report) type Figure = (&'static str, String);

/// A run record. Keys added later are optional; keys that the page does not show are ignored.
#[derive(Debug, Deserialize)]
pub(in crate::report) struct Record {
    schema_version: u64,
    pub(super) status: String,
    pub(super) error: Option<String>,
    code_version: Option<String>,
    /// Its rank, of a run of several.
    rank: Option<u32>,
    clock: Option<String>,
    settings: Map<String, Value>,
    pub(super) device: Device,
    dataset: Option<Dataset>,
    #[serde(default)]
    pub(super) epochs: Vec<Epoch>,
    #[serde(default)]
    allocator_stats: BTreeMap<String, i64>,
    #[serde(default)]
    latency: Vec<Latency>,
    #[serde(default)]
    fragmentation: BTreeMap<String, Value>,
    #[serde(default = "steps_file")]
    pub(super) step_losses: String,
}

fn steps_file() -> String {
    "steps.csv".to_owned()
}

#[derive(Debug, Deserialize)]
pub(super) struct Device {
    pub(super) name: String,
    kind: Option<String>,
    #[serde(default)]
    virtual_time: bool,
}

#[derive(Debug, Deserialize)]
struct Dataset {
    name: Option<String>,
    source: Option<String>,
}

/// Driver calls by name.
pub(super) type Calls = BTreeMap<String, Call>;

#[derive(Debug, Deserialize)]
pub(super) struct Call {
    pub(super) count: u64,
    pub(super) total_ns: u64,
    pub(super) blocked_ns: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Epoch {
    pub(super) steps: u64,
    pub(super) wall_s: f64,
    train_s: Option<f64>,
    train_device_s: Option<f64>,
    pub(super) val_accuracy: Option<f64>,
    /// Driver calls of training and validation.
    pub(super) driver_calls: Option<Calls>,
    /// Driver calls of training only; absent in older records.
    pub(super) train_driver_calls: Option<Calls>,
}

#[derive(Debug, Deserialize)]
struct Latency {
    operation: String,
    count: u64,
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
}

impl Record {
    /// Reads the record in a directory.
    ///
    /// # Errors
    /// The record is missing, damaged or of a later version, or names a file in another directory.
    pub(in crate::report) fn read(directory: &Path) -> Result<Self> {
        let path = directory.join("summary.json");
        let record: Self = read_json(&path, "the record of a run")?;
        anyhow::ensure!(
            record.schema_version <= VERSION,
            "{}: schema version {} is not supported (at most {VERSION}); update vramlab",
            path.display(),
            record.schema_version
        );
        let name = Path::new(&record.step_losses);
        anyhow::ensure!(
            name.file_name().is_some_and(|file_name| file_name == name.as_os_str()),
            "{}: step_losses must name a file in the record's directory",
            path.display()
        );
        Ok(record)
    }

    pub(in crate::report) fn text(&self, key: &str) -> Option<&str> {
        self.settings.get(key).and_then(Value::as_str)
    }

    /// The allocator with its settings; for PyTorch's allocator also the program's mode.
    pub(super) fn allocator(&self) -> String {
        let name = self.text("alloc").or_else(|| self.text("allocator")).unwrap_or("unknown");
        match self.text("mode") {
            Some(mode) if name == "pytorch" => format!("pytorch-{mode}"),
            _ => name.to_owned(),
        }
    }

    /// The run's settings, data and program version, as text.
    pub(super) fn settings_text(&self) -> Vec<(String, String)> {
        let word = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Null | Value::Array(_) | Value::Object(_) => None,
            other => Some(other.to_string()),
        };
        let nested = self.settings.get("allocator_settings").and_then(Value::as_object);
        let mut out: Vec<(String, String)> = (self.settings.iter().chain(nested.into_iter().flatten()))
            .filter_map(|(key, value)| Some((key.clone(), word(value)?)))
            .collect();
        for (key, value) in DEFAULTS {
            if !self.settings.contains_key(key) {
                out.push((key.to_owned(), value.to_owned()));
            }
        }
        out.extend(self.rank.map(|rank| ("rank".to_owned(), rank.to_string())));
        let data = self.dataset.as_ref();
        let origin = [
            ("data", data.and_then(|data| data.source.as_ref().or(data.name.as_ref()))),
            ("version", self.code_version.as_ref()),
        ];
        out.extend(origin.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.clone()))));
        out
    }

    /// The main values; those missing from the record are omitted.
    pub(in crate::report) fn figures(&self) -> Vec<Figure> {
        let mut out: Vec<Figure> = Vec::new();
        let mut add = |name, value: Option<String>| out.extend(value.map(|value| (name, value)));
        add("allocator", self.text("alloc").or_else(|| self.text("allocator")).map(str::to_owned));
        add("device", Some(self.device.name.clone()));
        add("data", self.dataset.as_ref().and_then(|data| data.name.clone()));
        add("status", Some(self.status.clone()));
        if let Some(last) = self.epochs.last() {
            add("epochs", Some(self.epochs.len().to_string()));
            let step = (last.steps > 0).then(|| 1e6 * last.wall_s / last.steps as f64);
            add("mean step, last epoch", step.map(|us| format!("{us:.1} us")));
            add("validation accuracy", last.val_accuracy.map(|share| format!("{:.2} %", 100.0 * share)));
        }
        let peak = |level| self.stat(&format!("{level}_bytes.all.peak")).map(|bytes| Bytes(bytes).to_string());
        add("peak reserved, whole run", peak("reserved"));
        add("peak active, whole run", peak("active"));
        add("peak requested, whole run", peak("requested"));
        out
    }

    /// One of the allocator's statistics.
    pub(super) fn stat(&self, name: &str) -> Option<u64> {
        self.allocator_stats.get(name).and_then(|value| u64::try_from(*value).ok())
    }

    /// The settings that must be equal for losses to be comparable.
    pub(super) fn work(&self) -> [Option<&Value>; 7] {
        ["dataset", "hidden", "layers", "batch", "seed", "init", "lr"].map(|key| self.settings.get(key))
    }

    /// Whether its times are those of a simulated device, on which only driver calls and the device's work take time.
    pub(super) fn simulated(&self) -> bool {
        self.device.virtual_time || self.clock.as_deref() == Some("virtual")
    }

    /// Time of a training step in ns: median over the epochs after the first; on a GPU measured with GPU events.
    pub(super) fn pace(&self) -> Option<f64> {
        let epochs = warm(&self.epochs);
        let median = |seconds: fn(&Epoch) -> Option<f64>| {
            let all = epochs.iter().map(|epoch| Some(seconds(epoch)? * 1e9 / (epoch.steps.max(1) as f64)));
            quantile(&all.collect::<Option<Vec<f64>>>()?, 0.5)
        };
        let on_device = (self.device.kind.as_deref() == Some("cuda")).then(|| median(|epoch| epoch.train_device_s));
        on_device.flatten().or_else(|| median(|epoch| epoch.train_s))
    }

    /// Median and 99th percentile of an operation on its most frequent path.
    pub(super) fn latency_of(&self, operation: &str) -> Option<[f64; 2]> {
        let rows = self.latency.iter().filter(|row| row.operation == operation);
        let row = rows.max_by_key(|row| row.count)?;
        let timed = |value: Option<u64>| value.filter(|value| !self.simulated() || *value > 0);
        timed(row.p50_ns).zip(timed(row.p99_ns)).map(|(p50, p99)| [p50 as f64, p99 as f64])
    }

    /// Reserved-memory breakdown at its peak.
    pub(super) fn ledger(&self) -> BTreeMap<&'static str, u64> {
        let parts = ["requested", "internal", "pending", "hard", "stream", "soft"];
        let of = |part| Some((part, self.fragmentation.get(part)?.as_u64()?));
        parts.into_iter().filter_map(of).collect()
    }
}
