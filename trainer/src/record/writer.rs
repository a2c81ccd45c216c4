//! Writing a record.
//!
//! The summary is replaced as a whole after each epoch, so a killed run leaves the record of what it had done. Step rows
//! are appended after each epoch. Room for the next summary is kept on the disk: a run that fills it still says how it
//! ended. What can no longer be appended is taken back to its last whole piece.

use super::{DRIVER_CALLS, LATENCY, STEPS, SUMMARY, Status, StepRow, Summary, TRACE};
use crate::error::{Result, TrainError};
use crate::export::CallLine;
use crate::latency::Interval;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, Tag};
use serde::Serialize;
use serde_json::Value;
use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::path::Path;
use std::time::SystemTime;
use vramlab::instruments::Traced;
use vramlab::output::{Existing, OutputError, OutputFile, OwnFolder, Reserve};

/// Room that is kept for what a summary grows by from one time to the next.
const GROWTH: u64 = 64 << 10;

/// The directory of a record.
#[derive(Debug)]
pub struct RecordWriter {
    folder: OwnFolder,
    /// Whether there has been a summary.
    begun: bool,
    /// Room for the next summary.
    reserve: Option<Reserve>,
    /// Whether something could not be appended. What would follow is not appended either: it would lack what is before.
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
            let (folder, steps) = OwnFolder::take(path, STEPS).map_err(|error| match error.kind() {
                ErrorKind::AlreadyExists => TrainError::Input(format!(
                    "{} exists already{}; choose another directory with --out, or remove it",
                    path.display(),
                    what_it_holds(path)
                )),
                _ => refused(path, error),
            })?;
            return Self::begin(folder, steps);
        }
        for attempt in 1.. {
            let suffix = if attempt == 1 { String::new() } else { format!("-{attempt}") };
            let path = Path::new("runs").join(format!("{stamp}-{label}{suffix}"));
            match OwnFolder::take(&path, STEPS) {
                Ok((folder, steps)) => return Self::begin(folder, steps),
                Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
                Err(error) => return Err(refused(&path, error)),
            }
        }
        unreachable!("an unused name is found before the numbers run out")
    }

    /// Begins the record in a folder that is this program's alone.
    fn begin(folder: OwnFolder, mut steps: File) -> Result<Self> {
        let mut record = Self { folder, begun: false, reserve: None, incomplete: Cell::new(false) };
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
        self.folder.give_back();
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.folder.path()
    }

    /// Whether something could not be appended to the record.
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

    /// Appends what a closure writes, or nothing. The closure hears whether the file is new.
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
            // Without what is still in the buffer, which would be written on the way out.
            let _ = out.out.into_parts();
            written.inspect_err(|_| {
                // A reader finds whole lines or none; a file that cannot be cut keeps a part of one.
                let _ = file.set_len(before);
            })
        })();
        appended.map_err(|error| {
            self.incomplete.set(true);
            failed(&path, needed)(error)
        })
    }
}

/// Why a record cannot be made there.
fn refused(path: &Path, error: io::Error) -> TrainError {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => failed(path, GROWTH)(error),
        _ => TrainError::Input(format!(
            "cannot write a run record to {}: {error}; choose another directory with --out",
            path.display()
        )),
    }
}

/// What lies where a record is to be, in words for a message.
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

/// Counts what is to be written.
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
