//! The run record: one type for `summary.json`, and the raw data beside it. `analysis/schema.md` describes it.

mod writer;

pub use writer::RecordWriter;

use crate::data::{DatasetName, FileChecksum};
use crate::latency::LatencyRecord;
use crate::mlp::LayerProducts;
use crate::provenance::Provenance;
use crate::settings::Settings;
use serde::Serialize;
use vramlab::device::InstrumentCost;
use vramlab::instruments::CheckReport;
use vramlab::{CallCounts, DeviceDescription, IdleCosts, Ledger, Stats};

/// Version of the record; raised when a field changes its meaning or goes away.
pub const SCHEMA_VERSION: u32 = 1;

/// Settings in effect.
#[derive(Clone, Debug, Serialize)]
pub struct EffectiveSettings {
    /// Allocator's name.
    pub allocator: String,
    /// Allocator's settings, as it reports them.
    pub allocator_settings: serde_json::Value,
    /// How a product is computed, by the name that it has among the kernels: `f32x3` is three products of tf32.
    pub precision: &'static str,
    /// What was asked for, with what was left open filled in and what something else decided read back.
    #[serde(flatten)]
    pub chosen: Settings,
}

/// The data set that was used.
#[derive(Clone, Debug, Serialize)]
pub struct DatasetRecord {
    /// Name.
    pub name: DatasetName,
    /// Where it came from.
    pub source: String,
    /// SHA-256 of the data.
    pub checksum: String,
    /// Files and their SHA-256.
    pub files: Vec<FileChecksum>,
    /// Values in a row.
    pub features: usize,
    /// Classes.
    pub classes: usize,
    /// Rows to train on.
    pub train_rows: usize,
    /// Rows to validate on.
    pub validation_rows: usize,
}

/// One epoch.
#[derive(Clone, Debug, Serialize)]
pub struct EpochRecord {
    /// Number, from 1.
    pub epoch: u32,
    /// Training steps in it.
    pub steps: u64,
    /// Mean loss over its training rows.
    pub train_loss: f64,
    /// Mean loss on the validation rows after it.
    pub val_loss: f64,
    /// Fraction of the validation rows classified correctly, 0 to 1.
    pub val_accuracy: f64,
    /// Time on the run's clock from its start to the end of its validation.
    pub wall_s: f64,
    /// Time between the device's first and last work of the epoch, by events on its stream.
    pub device_s: f64,
    /// Time on the run's clock from before its first step until the losses of its steps had been read.
    pub train_s: f64,
    /// Time between two events around its steps.
    pub train_device_s: f64,
    /// Device time in kernels and copies; absent where the device cannot tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_busy_s: Option<f64>,
    /// Driver calls made in it.
    pub driver_calls: CallCounts,
    /// Those of its training alone: made in the time of `train_s`.
    pub train_driver_calls: CallCounts,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Not yet, or it was killed.
    Running,
    /// It did what it was asked.
    Finished,
    /// By a signal.
    Interrupted,
    /// By an error; see `error`.
    Failed,
}

/// What was recorded beside the summary.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Files {
    /// One row for each step.
    pub steps: &'static str,
    /// Latency histograms in HdrHistogram's interval log format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<&'static str>,
    /// Every allocator operation, one JSON object a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<&'static str>,
    /// Every driver call, one JSON object a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_calls: Option<&'static str>,
    /// The history in other formats, written at the end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<&'static str>,
}

/// The record of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// What wrote the record: `trainer`.
    pub program: &'static str,
    /// How the run ended.
    pub status: Status,
    /// The error that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Version of the program.
    pub code_version: String,
    /// Where the record comes from.
    pub provenance: Provenance,
    /// Start of the run, UTC.
    pub started_at: String,
    /// Arguments of the program.
    pub command: Vec<String>,
    /// Settings in effect.
    pub settings: EffectiveSettings,
    /// Device.
    pub device: DeviceDescription,
    /// The kernels of each layer's products for whole batches, from the first layer to the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub products: Option<Vec<LayerProducts>>,
    /// `virtual` on the simulated device, `monotonic` otherwise; every time but `process_s` is on this clock.
    pub clock: &'static str,
    /// Real time of the whole process so far.
    pub process_s: f64,
    /// Real time from the start of the process to the first training step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_step_s: Option<f64>,
    /// Data set.
    pub dataset: DatasetRecord,
    /// The start file that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<FileChecksum>,
    /// Bytes of the weights and biases as they are held: those that products read, their padding, and master weights.
    pub parameter_bytes: u64,
    /// Epochs so far.
    pub epochs: Vec<EpochRecord>,
    /// Name of the file in the record that holds the loss of each step.
    pub step_losses: &'static str,
    /// Driver calls from opening the device to now.
    pub driver_calls: CallCounts,
    /// How `blocked_ns` came about: `exact` or `beyond_idle_cost`.
    pub blocked_method: &'static str,
    /// What calls cost on the idle device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_costs: Option<IdleCosts>,
    /// Allocator statistics under PyTorch's names.
    pub allocator_stats: Stats,
    /// Gauges of `allocator_stats` whose peaks are upper bounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub upper_bounds: Vec<&'static str>,
    /// Latency of allocator operations.
    pub latency: Vec<LatencyRecord>,
    /// Where reserved minus requested went at the peak of reserved.
    pub fragmentation: Ledger,
    /// What the instruments cost.
    pub instruments: Vec<InstrumentCost>,
    /// What the checker found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<CheckReport>,
    /// What is beside this file.
    pub files: Files,
}

/// One training step.
#[derive(Clone, Copy, Debug)]
pub struct StepRow {
    /// Epoch, from 1.
    pub epoch: u32,
    /// Step in the epoch, from 1.
    pub step: u64,
    /// Rows in its batch.
    pub rows: u32,
    /// Mean loss of the batch; `None`, and an empty cell, when the run failed before it was read.
    pub loss: Option<f32>,
    /// Run's clock when the host had queued the step.
    pub host_ns: u64,
    /// Driver calls that took memory, in this step.
    pub driver_allocations: u64,
    /// Bytes held from the device after the step.
    pub reserved_bytes: u64,
    /// Bytes in blocks held by the client after the step.
    pub allocated_bytes: u64,
    /// The same, and in blocks that were freed and are not reusable yet.
    pub active_bytes: u64,
    /// Bytes that were asked for in active blocks.
    pub requested_bytes: u64,
}

/// Names of the files in a record.
pub const SUMMARY: &str = "summary.json";
/// One row for each step.
pub const STEPS: &str = "steps.csv";
/// Latency histograms.
pub const LATENCY: &str = "latency.hlog";
/// Every allocator operation.
pub const TRACE: &str = "trace.jsonl";
/// Every driver call.
pub const DRIVER_CALLS: &str = "driver_calls.jsonl";
