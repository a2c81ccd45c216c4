//! The run record: one type for `summary.json`, and the raw data beside it. `analysis/schema.md` describes it.

use crate::calls::CallLine;
use crate::data::{DatasetName, FileChecksum};
use crate::error::{Result, TrainError};
use crate::latency::{Interval, LatencyRecord};
use crate::mlp::LayerProducts;
use crate::provenance::Provenance;
use crate::ranks::{CommunicationRecord, RankRecord, RankSpread};
use crate::settings::Settings;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};
use serde::Serialize;
use serde_json::Value;
use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::path::Path;
use std::time::SystemTime;
use vramlab::device::InstrumentCost;
use vramlab::instruments::{CheckReport, Traced};
use vramlab::output::{Existing, OutputError, OutputFile, OwnFolder, Reserve};
use vramlab::{CallCounts, DeviceDescription, IdleCosts, Ledger, Stats};

pub use crate::pinned::{HostMemoryRecord, OffloadRecord};

/// Version of the record; raised when a field changes its meaning or goes away.
pub const SCHEMA_VERSION: u32 = 1;

/// Settings in effect.
#[derive(Clone, Debug, Serialize)]
pub struct EffectiveSettings {
    /// Allocator's name.
    pub allocator: String,
    /// Allocator's settings, as it reports them.
    pub allocator_settings: serde_json::Value,
    /// Precision of matrix products, by its name among the kernels.
    pub precision: &'static str,
    /// Requested settings, with defaults filled in and settings decided elsewhere read back.
    #[serde(flatten)]
    pub chosen: Settings,
}

/// The data set that was used.
#[derive(Clone, Debug, Serialize)]
pub struct DatasetRecord {
    /// Name.
    pub name: DatasetName,
    /// Source.
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
    /// Driver calls of its training only: made in the time of `train_s`.
    pub train_driver_calls: CallCounts,
}

/// The outcome of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Still running, or killed.
    Running,
    /// Completed.
    Finished,
    /// Ended by a signal.
    Interrupted,
    /// Ended by an error; see `error`.
    Failed,
}

/// Files of the record besides the summary.
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
    /// The program that wrote the record: `trainer`.
    pub program: &'static str,
    /// Outcome of the run.
    pub status: Status,
    /// The error that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Version of the program.
    pub code_version: String,
    /// Provenance of the record.
    pub provenance: Provenance,
    /// Start of the run, UTC.
    pub started_at: String,
    /// Arguments of the program.
    pub command: Vec<String>,
    /// Settings in effect.
    pub settings: EffectiveSettings,
    /// This rank, from 0, of a run on several GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
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
    /// Bytes of the weights and biases as they are held: those that products read, their padding, and master weights, also on the
    /// host.
    pub parameter_bytes: u64,
    /// Pinned host memory, where some was pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<HostMemoryRecord>,
    /// Epochs so far.
    pub epochs: Vec<EpochRecord>,
    /// How gradients travel between ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub communication: Option<CommunicationRecord>,
    /// Every rank up to the last epoch, in the record of rank 0.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankRecord>,
    /// The least and the most of `ranks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_spread: Option<RankSpread>,
    /// Name of the file in the record that holds the loss of each step.
    pub step_losses: &'static str,
    /// Driver calls from opening the device to now.
    pub driver_calls: CallCounts,
    /// Derivation of `blocked_ns`: `exact` or `beyond_idle_cost`.
    pub blocked_method: &'static str,
    /// The cost of each driver call on the idle device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_costs: Option<IdleCosts>,
    /// Launched kernels that the simulated device's profile has no cost of: each took the time of its default kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kernels_without_cost: Vec<&'static str>,
    /// Allocator statistics under PyTorch's names.
    pub allocator_stats: Stats,
    /// Gauges of `allocator_stats` whose peaks are upper bounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub upper_bounds: Vec<&'static str>,
    /// Latency of allocator operations.
    pub latency: Vec<LatencyRecord>,
    /// Breakdown of reserved minus requested at peak reserved.
    pub fragmentation: Ledger,
    /// The cost of the instruments.
    pub instruments: Vec<InstrumentCost>,
    /// The findings of the checker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<CheckReport>,
    /// The other files in the directory of this record.
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
    /// Driver calls that allocated memory, in this step.
    pub driver_allocations: u64,
    /// Reserved bytes after the step.
    pub reserved_bytes: u64,
    /// Bytes in blocks held by the client after the step.
    pub allocated_bytes: u64,
    /// The same, and in blocks that were freed and are not reusable yet.
    pub active_bytes: u64,
    /// Requested bytes in active blocks.
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

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastAllocation {
    /// A training step, both numbers from 1.
    Step {
        /// Epoch.
        epoch: u32,
        /// Step of the epoch.
        step: u64,
    },
    /// The validation after an epoch's steps.
    Validation {
        /// Epoch, from 1.
        epoch: u32,
    },
}

impl LastAllocation {
    /// The last in an epoch, of which there are the steps and, if it ended well, the record; `None` where there was none.
    pub(crate) fn of_epoch(epoch: u32, rows: &[StepRow], record: Option<&EpochRecord>) -> Option<Self> {
        let in_steps: u64 = rows.iter().map(|row| row.driver_allocations).sum();
        if record.is_some_and(|record| record.driver_calls.driver_allocations() > in_steps) {
            return Some(Self::Validation { epoch });
        }
        let last = rows.iter().rfind(|row| row.driver_allocations > 0);
        last.map(|row| Self::Step { epoch, step: row.step })
    }
}

// Writing a record.
//
// The summary is replaced as a whole after each epoch, so a killed run leaves the record of what it had done. Step rows
// are appended after each epoch. Room for the next summary is kept on the disk: a run that fills it still says how it
// ended. After a failed append the file is truncated to its last complete piece.

/// Disk space reserved for the growth of the next summary.
const GROWTH: u64 = 64 << 10;

/// The directory of a record.
#[derive(Debug)]
pub struct RecordWriter {
    directory: OwnFolder,
    /// True once a summary was written.
    begun: bool,
    /// Room for the next summary.
    reserve: Option<Reserve>,
    /// True after a failed append. Later appends are skipped, because the data before them is missing.
    incomplete: Cell<bool>,
}

fn failed(path: &Path, needed: u64) -> impl FnOnce(io::Error) -> TrainError {
    let path = path.to_owned();
    move |error| TrainError::Output(OutputError::appending(&path, needed, error))
}

impl RecordWriter {
    /// Makes the directory: `out`, which must be new or empty, or a new one under `runs/`. Of several programs that name one
    /// directory at the same time, one gets it.
    ///
    /// # Errors
    /// [`TrainError::Input`] when it holds something or cannot be made, [`TrainError::Output`] when the disk is full;
    /// then nothing is left.
    pub fn create(out: Option<&Path>, stamp: &str, label: &str) -> Result<Self> {
        if let Some(path) = out {
            let (directory, steps) = OwnFolder::take(path, STEPS).map_err(|error| match error.kind() {
                ErrorKind::AlreadyExists => TrainError::Input(format!(
                    "{} exists already{}; choose another directory with --out, or remove it",
                    path.display(),
                    what_it_holds(path)
                )),
                _ => refused(path, error),
            })?;
            return Self::begin(directory, steps);
        }
        for attempt in 1.. {
            let suffix = if attempt == 1 { String::new() } else { format!("-{attempt}") };
            let path = Path::new("runs").join(format!("{stamp}-{label}{suffix}"));
            match OwnFolder::take(&path, STEPS) {
                Ok((directory, steps)) => return Self::begin(directory, steps),
                Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
                Err(error) => return Err(refused(&path, error)),
            }
        }
        unreachable!("an unused name is found before the numbers run out")
    }

    /// Begins the record in a directory that only this program uses.
    fn begin(directory: OwnFolder, mut steps: File) -> Result<Self> {
        let mut record = Self { directory, begun: false, reserve: None, incomplete: Cell::new(false) };
        let opened = (|| {
            writeln!(
                steps,
                "epoch,step,rows,loss,host_ns,driver_allocations,reserved_bytes,allocated_bytes,active_bytes,\
                 requested_bytes"
            )?;
            Reserve::keep(record.directory(), GROWTH)
        })();
        match opened {
            Ok(reserve) => record.reserve = Some(reserve),
            Err(error) => {
                let refused = refused(record.directory(), error);
                record.take_back();
                return Err(refused);
            }
        }
        Ok(record)
    }

    /// Removes a record in which nothing was recorded, so that the same command can be given again.
    fn take_back(&mut self) {
        self.reserve = None;
        self.directory.give_back();
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns true after a failed append.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.incomplete.get()
    }

    /// Replaces the summary. A reader sees the old one or the new one, never a part.
    ///
    /// # Errors
    /// [`TrainError::Output`] when the file cannot be written. If it is the first, the record is removed.
    pub fn write_summary(&mut self, summary: &Summary) -> Result<()> {
        let path = self.directory().join(SUMMARY);
        let mut text = serde_json::to_string_pretty(summary).map_err(|error| failed(&path, 0)(error.into()))?;
        text.push('\n');
        // The last one waits for the disk.
        let ended = summary.status != Status::Running;
        let mut written = replace(&path, &text, ended);
        if written.is_err() && self.reserve.take().is_some() {
            written = replace(&path, &text, ended);
        }
        if let Err(error) = written {
            if !self.begun {
                self.take_back();
            }
            return Err(TrainError::Output(error));
        }
        self.begun = true;
        let next = text.len() as u64 + GROWTH;
        self.reserve = match self.reserve.take() {
            _ if ended => None,
            None => Reserve::keep(self.directory(), next).ok(),
            // With less than is wanted, most of what may come still goes.
            Some(mut reserve) => {
                let _ = reserve.extend(next);
                Some(reserve)
            }
        };
        Ok(())
    }

    /// Appends rows for steps.
    ///
    /// # Errors
    /// [`TrainError::Output`] when the file cannot be written.
    pub fn append_steps(&self, rows: &[StepRow]) -> Result<()> {
        self.append(STEPS, |out, _| {
            for row in rows {
                writeln!(
                    out,
                    "{},{},{},{},{},{},{},{},{},{}",
                    row.epoch,
                    row.step,
                    row.rows,
                    row.loss.map_or_else(String::new, |loss| loss.to_string()),
                    row.host_ns,
                    row.driver_allocations,
                    row.reserved_bytes,
                    row.allocated_bytes,
                    row.active_bytes,
                    row.requested_bytes
                )?;
            }
            Ok(())
        })
    }

    /// Appends trace events.
    ///
    /// # Errors
    /// [`TrainError::Output`] when the file cannot be written.
    pub fn append_trace(&self, events: &[Traced]) -> Result<()> {
        self.append_lines(TRACE, events)
    }

    /// Appends driver calls.
    ///
    /// # Errors
    /// [`TrainError::Output`] when the file cannot be written.
    pub fn append_driver_calls(&self, calls: &[CallLine]) -> Result<()> {
        self.append_lines(DRIVER_CALLS, calls)
    }

    fn append_lines(&self, name: &str, lines: &[impl Serialize]) -> Result<()> {
        self.append(name, |out, _| {
            for line in lines {
                serde_json::to_writer(&mut *out, line)?;
                out.write_all(b"\n")?;
            }
            Ok(())
        })
    }

    /// Appends intervals of the latency histograms, tagged `operation.path`; values are nanoseconds. `began` is the start
    /// of the process, from which intervals count.
    ///
    /// # Errors
    /// [`TrainError::Output`] when the file cannot be written.
    pub fn append_latency(&self, began: SystemTime, intervals: &[Interval]) -> Result<()> {
        self.append(LATENCY, |out, is_new| {
            let mut serializer = V2DeflateSerializer::new();
            let mut head = IntervalLogWriterBuilder::new();
            // The file begins with what holds for all of its lines.
            if is_new {
                head.add_comment("allocator latency in nanoseconds, tag = operation.path").with_start_time(began);
            }
            let mut log = head.begin_log_with(out, &mut serializer)?;
            for interval in intervals {
                for (operation, path, histogram) in &interval.histograms {
                    let tag = format!("{}.{}", operation.name(), path.name());
                    log.write_histogram(histogram, interval.start, interval.length, Tag::new(&tag))
                        .map_err(|error| io::Error::other(format!("{error:?}")))?;
                }
            }
            Ok(())
        })
    }

    /// Appends the output of a closure, or nothing. The closure's argument is true for a new file.
    fn append(&self, name: &str, write: impl FnOnce(&mut Counted<'_>, bool) -> io::Result<()>) -> Result<()> {
        if self.incomplete.get() {
            return Ok(());
        }
        let path = self.directory().join(name);
        let mut needed = 0;
        let appended = (|| {
            let file = OpenOptions::new().create(true).append(true).open(&path)?;
            let before = file.metadata()?.len();
            let mut out = Counted { out: BufWriter::with_capacity(1 << 16, &file), bytes: 0 };
            let written = write(&mut out, before == 0).and_then(|()| out.flush());
            needed = out.bytes;
            // Discards the buffer, which would otherwise be written on drop.
            let _ = out.out.into_parts();
            written.inspect_err(|_| {
                // A reader finds only complete lines; a file that cannot be truncated keeps a partial one.
                let _ = file.set_len(before);
            })
        })();
        appended.map_err(|error| {
            self.incomplete.set(true);
            failed(&path, needed)(error)
        })
    }
}

/// The reason that a record cannot be created there.
fn refused(path: &Path, error: io::Error) -> TrainError {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => failed(path, GROWTH)(error),
        _ => TrainError::Input(format!(
            "cannot write a run record to {}: {error}; choose another directory with --out",
            path.display()
        )),
    }
}

/// Description of the existing contents of a record's directory, for a message.
fn what_it_holds(path: &Path) -> String {
    // More than any summary.
    const MOST: u64 = 64 << 20;
    let summary = File::open(path.join(SUMMARY)).and_then(|file| {
        let mut text = String::new();
        file.take(MOST).read_to_string(&mut text).map(|_| text)
    });
    let summary: Value = summary.ok().and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
    let how = match summary["status"].as_str().filter(|_| summary["program"] == "trainer") {
        Some("finished") => "finished",
        Some("failed") => "failed",
        Some("interrupted") => "was interrupted",
        Some("running") => "is under way or was killed",
        // A run that begins has no summary yet.
        _ if path.join(STEPS).is_file() => "begins at this moment or was killed",
        _ => return String::new(),
    };
    format!(" and holds a run that {how}")
}

fn replace(path: &Path, text: &str, sync: bool) -> std::result::Result<(), OutputError> {
    let mut out = OutputFile::create(path, Existing::Replace)?;
    out.expect(text.len() as u64)?;
    out.write_all(text.as_bytes()).map_err(|error| out.failed(error))?;
    if sync { out.finish() } else { out.finish_unsynced() }
}

/// Counts the bytes to write.
struct Counted<'a> {
    out: BufWriter<&'a File>,
    bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes += bytes.len() as u64;
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
