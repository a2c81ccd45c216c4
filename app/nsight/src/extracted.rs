//! The small tables of a capture for publication: a directory of compressed CSV files.
//!
//! | file | contents |
//! |---|---|
//! | `capture.json` | version, GPUs, span, names of threads and streams, times of the profiler, notes |
//! | `calls.csv.xz` | one row for each call |
//! | `work.csv.xz` | kernels, copies, fills |
//! | `ranges.csv.xz`, `marks.csv.xz` | NVTX ranges and marks; both may be missing |
//!
//! A report of Nsight Systems contains the environment, the processes and the name of the machine; these tables do not. Times count
//! from the first event. Threads and processes are numbered from 0 in the order in which they appear. Call stacks are left out. The
//! first column of each table, `after`, is the time since the row before, which compresses better.

use crate::capture::{Call, CallNames, Capture, Mark, Overhead, Range, Source, Texts, Work, WorkKind};
use crate::export::Error;
use liblzma::read::XzDecoder;
use liblzma::stream::PRESET_EXTREME;
use liblzma::write::XzEncoder;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::Path;

/// The file that describes the tables of a directory.
pub const DESCRIPTION: &str = "capture.json";
const CALLS: &str = "calls.csv.xz";
const WORK: &str = "work.csv.xz";
const RANGES: &str = "ranges.csv.xz";
const MARKS: &str = "marks.csv.xz";
const VERSION: u32 = 1;

#[derive(Debug, Deserialize, Serialize)]
struct TablesDescription {
    schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nsight_systems: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    export_schema: Option<String>,
    #[serde(default)]
    devices: Vec<String>,
    #[serde(default)]
    span_ns: i64,
    #[serde(default)]
    threads: BTreeMap<i64, String>,
    #[serde(default)]
    streams: BTreeMap<i64, String>,
    /// Start, end and thread.
    #[serde(default)]
    overhead: Vec<(i64, i64, i64)>,
    #[serde(default)]
    notes: Vec<String>,
}

#[derive(Debug, Deserialize, Serialize)]
struct CallLine<S> {
    after: i64,
    duration: i64,
    name: S,
    thread: i64,
    process: i64,
    correlation: i64,
    ok: u8,
    stream: Option<i64>,
    device: Option<i64>,
    bytes: Option<i64>,
    event: Option<i64>,
}

#[derive(Debug, Deserialize, Serialize)]
struct WorkLine<S> {
    after: i64,
    duration: i64,
    kind: WorkKind,
    name: S,
    device: i64,
    stream: i64,
    process: i64,
    correlation: i64,
    bytes: Option<i64>,
    pageable: u8,
}

#[derive(Debug, Deserialize, Serialize)]
struct RangeLine<S> {
    after: i64,
    duration: i64,
    text: S,
    thread: i64,
}

#[derive(Debug, Deserialize, Serialize)]
struct MarkLine<S> {
    after: i64,
    text: S,
    thread: i64,
}

/// Reads a directory that [`extract`] wrote.
pub(crate) fn read(directory: &Path) -> Result<Capture, Error> {
    let path = directory.join(DESCRIPTION);
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let problem = format!("the directory has no tables of a capture (no {DESCRIPTION})");
            return Err(Error::Extracted { path: directory.to_owned(), problem });
        }
        file => file.map_err(|problem| Error::Io { path: path.clone(), problem })?,
    };
    let about: TablesDescription = serde_json::from_reader(BufReader::new(file))
        .map_err(|error| Error::Extracted { path: path.clone(), problem: error.to_string() })?;
    if about.schema_version != VERSION {
        let problem = format!("has version {}, and this program reads {VERSION}", about.schema_version);
        return Err(Error::Extracted { path, problem });
    }
    let (mut call_names, mut work_names) = (CallNames::default(), Texts::default());
    let mut capture = Capture {
        threads: about.threads,
        streams: about.streams,
        overhead: about.overhead.into_iter().map(|(start, end, thread)| Overhead { start, end, thread }).collect(),
        notes: about.notes,
        source: Source {
            nsight_systems: about.nsight_systems,
            export_schema: about.export_schema,
            devices: about.devices,
        },
        ..Capture::default()
    };
    let mut clock = Clock::default();
    table(directory, CALLS, |row: CallLine<String>| {
        let (start, end) = clock.interval(row.after, row.duration)?;
        capture.calls.push(Call {
            start,
            end,
            name: call_names.number(&row.name),
            thread: row.thread,
            process: row.process,
            correlation: row.correlation,
            ok: row.ok != 0,
            stream: row.stream,
            device: row.device,
            bytes: row.bytes,
            event: row.event,
            range: None,
            stack: None,
        });
        Some(())
    })?;
    let mut clock = Clock::default();
    table(directory, WORK, |row: WorkLine<String>| {
        let (start, end) = clock.interval(row.after, row.duration)?;
        capture.work.push(Work {
            start,
            end,
            kind: row.kind,
            name: work_names.number(&row.name),
            device: row.device,
            stream: row.stream,
            process: row.process,
            correlation: row.correlation,
            bytes: row.bytes,
            pageable: row.pageable != 0,
            call: None,
            queued: start,
        });
        Some(())
    })?;
    if directory.join(RANGES).is_file() {
        let mut clock = Clock::default();
        table(directory, RANGES, |row: RangeLine<String>| {
            let (start, end) = clock.interval(row.after, row.duration)?;
            capture.ranges.push(Range { start, end, text: row.text, thread: row.thread, level: 0, parent: None });
            Some(())
        })?;
    } else {
        let note = "The capture was extracted without NVTX ranges, so a call has no place in the run.";
        capture.notes.push(note.to_owned());
    }
    if directory.join(MARKS).is_file() {
        let mut clock = Clock::default();
        table(directory, MARKS, |row: MarkLine<String>| {
            let (time, _) = clock.interval(row.after, 0)?;
            capture.marks.push(Mark { time, text: row.text, thread: row.thread });
            Some(())
        })?;
    }
    capture.call_names = call_names.list;
    capture.work_names = work_names.list;
    capture.join();
    Ok(capture)
}

/// Adds up the column `after`.
#[derive(Default)]
struct Clock(i64);

impl Clock {
    /// The interval of a row; `None` if it is not one of a capture.
    fn interval(&mut self, after: i64, duration: i64) -> Option<(i64, i64)> {
        // Differences of such times cannot overflow.
        const LATEST: i64 = 1 << 60;
        self.0 = self.0.checked_add(after)?;
        let end = self.0.checked_add(duration)?;
        ((-LATEST..LATEST).contains(&self.0) && duration >= 0 && end < LATEST).then_some((self.0, end))
    }
}

/// Reads a table; `each` returns `None` for a row that is not of a capture.
fn table<R: DeserializeOwned>(
    directory: &Path,
    name: &str,
    mut each: impl FnMut(R) -> Option<()>,
) -> Result<(), Error> {
    let path = directory.join(name);
    let file = File::open(&path).map_err(|problem| Error::Io { path: path.clone(), problem })?;
    let mut reader = csv::Reader::from_reader(XzDecoder::new(BufReader::new(file)));
    let damaged = |problem: String| Error::Extracted { path: path.clone(), problem };
    // `deserialize` would drop an error in the first line.
    reader.headers().map_err(|error| damaged(error.to_string()))?;
    for (row, number) in reader.deserialize().zip(2..) {
        let row = row.map_err(|error: csv::Error| damaged(error.to_string()))?;
        each(row).ok_or_else(|| damaged(format!("the times of line {number} are out of range")))?;
    }
    Ok(())
}

/// Writes the tables of a capture into a directory that exists.
///
/// # Errors
/// A file cannot be written.
pub fn extract(capture: &Capture, directory: &Path) -> io::Result<()> {
    let (zero, last) = capture.span();
    let (mut threads, mut processes) = (Numbers::default(), Numbers::default());
    let name = |call: &Call| capture.call_name(call).name.as_str();
    let mut before = zero;
    let mut after = |time: i64| time - std::mem::replace(&mut before, time);
    write(directory, CALLS, capture.calls.iter(), |call| CallLine {
        after: after(call.start),
        duration: call.duration(),
        name: name(call),
        thread: threads.number(call.thread),
        process: processes.number(call.process),
        correlation: call.correlation,
        ok: u8::from(call.ok),
        stream: call.stream,
        device: call.device,
        bytes: call.bytes,
        event: call.event,
    })?;
    let mut before = zero;
    let mut after = |time: i64| time - std::mem::replace(&mut before, time);
    write(directory, WORK, capture.work.iter(), |work| WorkLine {
        after: after(work.start),
        duration: work.end - work.start,
        kind: work.kind,
        name: capture.work_name(work),
        device: work.device,
        stream: work.stream,
        process: processes.number(work.process),
        correlation: work.correlation,
        bytes: work.bytes,
        pageable: u8::from(work.pageable),
    })?;
    let mut before = zero;
    let mut after = |time: i64| time - std::mem::replace(&mut before, time);
    write(directory, RANGES, capture.ranges.iter(), |range| RangeLine {
        after: after(range.start),
        duration: range.end - range.start,
        text: range.text.as_str(),
        thread: threads.number(range.thread),
    })?;
    let mut before = zero;
    let mut after = |time: i64| time - std::mem::replace(&mut before, time);
    write(directory, MARKS, capture.marks.iter().filter(|mark| mark.time >= zero), |mark| MarkLine {
        after: after(mark.time),
        text: mark.text.as_str(),
        thread: threads.number(mark.thread),
    })?;
    let overhead = capture.overhead.iter().filter(|one| one.start >= zero);
    let about = TablesDescription {
        schema_version: VERSION,
        nsight_systems: capture.source.nsight_systems.clone(),
        export_schema: capture.source.export_schema.clone(),
        devices: capture.source.devices.clone(),
        span_ns: last - zero,
        overhead: overhead.map(|one| (one.start - zero, one.end - zero, threads.number(one.thread))).collect(),
        threads: capture.threads.iter().map(|(&id, name)| (threads.number(id), name.clone())).collect(),
        streams: capture.streams.clone(),
        notes: capture.notes.clone(),
    };
    let mut text = serde_json::to_vec_pretty(&about)?;
    text.push(b'\n');
    std::fs::write(directory.join(DESCRIPTION), text)
}

/// Writes a compressed table.
fn write<T, R: Serialize>(
    directory: &Path,
    name: &str,
    rows: impl Iterator<Item = T>,
    mut row: impl FnMut(T) -> R,
) -> io::Result<()> {
    // Preset 6 with the flag for the smallest output.
    let file = BufWriter::new(File::create(directory.join(name))?);
    let mut writer = csv::Writer::from_writer(XzEncoder::new(file, 6 | PRESET_EXTREME));
    for one in rows {
        writer.serialize(row(one)).map_err(io::Error::other)?;
    }
    let encoder = writer.into_inner().map_err(|error| error.into_error())?;
    io::Write::flush(&mut encoder.finish()?)
}

/// Small numbers instead of ids that identify the machine, in the order of first use.
#[derive(Default)]
struct Numbers(HashMap<i64, i64>);

impl Numbers {
    fn number(&mut self, id: i64) -> i64 {
        // CAST: a number of threads, below 2^63.
        let next = self.0.len() as i64;
        *self.0.entry(id).or_insert(next)
    }
}
