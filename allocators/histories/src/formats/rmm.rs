//! RMM's log: the CSV of `rmm::mr::logging_resource_adaptor`.
//!
//! Columns `Thread,Time,Action,Pointer,Size,Stream`. Pointer and stream are printed as pointers, in hexadecimal; RMM's own replay
//! parses the stream as a decimal number and takes `0x55d3c0a1b2c0` for the default stream. Times are of the day, without a date.
//! The log names no device, so all events are of device 0; the free bytes at a failed allocation are unknown and 0 here.
//!
//! Source: RMM `cpp/src/mr/detail/logging_resource_adaptor_impl.cpp`, `cpp/benchmarks/utilities/log_parser.hpp`.

use super::input::Input;
use super::lines::{Lines, clip, columns, fields};
use super::list::{Reader, Writer};
use super::summary::{Receiver, emit};
use super::write::{Ending, HistoryFile, TraceWriter, WriteError};
use super::{Action, Event, Format, ReadError, ReadOptions, Summary};
use std::collections::HashMap;
use std::io::Write;
use vramlab_device::output::OutputFile;

/// Names of the columns that are needed.
pub(super) const COLUMNS: [&str; 5] = ["Time", "Action", "Pointer", "Size", "Stream"];

const DAY_NS: u64 = 24 * 3600 * 1_000_000_000;

/// The entry in the [list](super::list).
pub(super) const READER: Reader =
    Reader { name: "rmm", begins: |start| columns(start.header(), COLUMNS).is_ok(), read, snapshot: false };

/// Reads a log. Times are relative to the midnight before the first event; a clock that goes back by more than half a day has
/// passed midnight.
fn read(input: &mut Input<'_>, _: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    let mut summary = Summary::new(Format::RmmCsv);
    let mut lines = Lines::new(input);
    let header = lines.next()?.unwrap_or_default().to_owned();
    let columns = columns(&header, COLUMNS).map_err(|text| lines.content(text))?;
    let (mut day, mut last) = (0_u64, 0_u64);
    let parse = |line: &str| parse(line, columns).map(Some);
    lines.each(parse, |event| {
        // Relative to midnight.
        let time = event.time_ns;
        if time + DAY_NS / 2 < last {
            day += 1;
        }
        last = time;
        emit(Event { time_ns: day.saturating_mul(DAY_NS).saturating_add(time), ..event }, &mut summary, receiver)
    })?;
    Ok(summary)
}

/// The event of a line, with the time of day.
fn parse(line: &str, columns: [usize; 5]) -> Result<Event, String> {
    let [time, action, pointer, size, stream] = fields(line, columns)
        .ok_or_else(|| format!("the line has too few columns: '{}'; it was truncated or damaged", clip(line)))?;
    let action = match action {
        "allocate" => Action::Alloc,
        "free" => Action::FreeRequested,
        "allocate failure" => Action::Oom,
        other => {
            return Err(format!("'{}' is not an action: expected allocate, allocate failure or free", clip(other)));
        }
    };
    let hexadecimal = |name: &str, text: &str| {
        if text == "(nil)" {
            return Ok(0);
        }
        let digits = text.strip_prefix("0x").unwrap_or(text);
        u64::from_str_radix(digits, 16)
            .map_err(|_| format!("{name} '{}' is not a hexadecimal number such as 0x7f7f38000000", clip(text)))
    };
    Ok(Event {
        action,
        device: 0,
        addr: hexadecimal("Pointer", pointer)?,
        bytes: size.parse().map_err(|_| format!("Size '{}' is not a number of bytes", clip(size)))?,
        stream: hexadecimal("Stream", stream)?,
        time_ns: time_of_day(time).ok_or_else(|| format!("Time '{}' is not of the form HH:MM:SS.µs", clip(time)))?,
    })
}

/// Nanoseconds since midnight.
fn time_of_day(text: &str) -> Option<u64> {
    let (hours, rest) = text.split_once(':')?;
    let (minutes, rest) = rest.split_once(':')?;
    // Releases before 0.14 wrote a colon before the fraction.
    let (seconds, fraction) = rest.split_once(['.', ':']).unwrap_or((rest, ""));
    let part = |text: &str, below: u64| {
        let sound = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>().ok().filter(|value| sound && *value < below)
    };
    // A leap second is the 61st.
    let seconds = (part(hours, 24)? * 60 + part(minutes, 60)?) * 60 + part(seconds, 61)?;
    if fraction.len() > 9 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanos: u64 = format!("{fraction:0<9}").parse().ok()?;
    Some(seconds * 1_000_000_000 + nanos)
}

// RMM's log, for its replay benchmark and other readers.
//
// Contains allocations, the client's frees and failed requests. If only the completion of a free was recorded, it is written as
// the free. Times are of the day, in UTC if the recording's times count from 1970. The thread is unknown and written as 0. A log
// is of one device and begins with its program: frees of blocks that it does not allocate are left out. Memory is proportional to
// live blocks.

/// The entry in the [list](super::list).
pub(super) const WRITER: Writer = Writer {
    name: "rmm",
    file_name: "rmm.csv",
    summary: "log for RMM's replay",
    holds: |action| matches!(action, Action::Alloc | Action::FreeRequested | Action::Oom),
    begin: |file| Ok(Box::new(RmmWriter::begin(file)?)),
};

/// Writes a log.
#[derive(Debug)]
pub struct RmmWriter {
    file: HistoryFile,
    device: Option<u16>,
    /// Sizes of the live blocks by address.
    live: HashMap<u64, u64>,
    passed_over: u64,
    stood_in: u64,
}

impl RmmWriter {
    /// Begins a log.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn begin(file: OutputFile) -> Result<Self, WriteError> {
        let mut file = HistoryFile::new(file);
        file.put(|out| out.write_all(b"Thread,Time,Action,Pointer,Size,Stream\n"))?;
        Ok(Self { file, device: None, live: HashMap::new(), passed_over: 0, stood_in: 0 })
    }
}

impl TraceWriter for RmmWriter {
    fn event(&mut self, event: &Event) -> Result<(), WriteError> {
        let action = match event.action {
            Action::Alloc => "allocate",
            Action::FreeRequested => "free",
            // The recording has no request for this free.
            Action::FreeCompleted if event.bytes > 0 && self.live.get(&event.addr) == Some(&event.bytes) => "free",
            Action::Oom => "allocate failure",
            _ => return Ok(()),
        };
        if *self.device.get_or_insert(event.device) != event.device {
            return Err(self.file.unfit("the recording has several devices, but an RMM log has one"));
        }
        match event.action {
            // Empty tensors have no block.
            Action::Alloc if event.bytes > 0 => {
                self.live.insert(event.addr, event.bytes);
            }
            Action::FreeRequested if self.live.remove(&event.addr).is_none() && event.bytes > 0 => {
                self.passed_over += 1;
                return Ok(());
            }
            Action::FreeCompleted => {
                self.live.remove(&event.addr);
                self.stood_in += 1;
            }
            _ => {}
        }
        let micros = event.time_ns / 1000;
        let (seconds, micros) = (micros / 1_000_000, micros % 1_000_000);
        let (hours, minutes, seconds) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        let (addr, bytes, stream) = (event.addr, event.bytes, event.stream);
        self.file.put(|out| {
            write!(out, "0,{hours:02}:{minutes:02}:{seconds:02}.{micros:06},{action},")?;
            // As printf's %p and C++'s streams print pointers.
            if addr == 0 || event.action == Action::Oom {
                write!(out, "(nil)")?;
            } else {
                write!(out, "{addr:#x}")?;
            }
            write!(out, ",{bytes},")?;
            if stream == 0 { writeln!(out, "0") } else { writeln!(out, "{stream:#x}") }
        })
    }

    fn passed_over(&self) -> u64 {
        self.passed_over
    }

    fn stood_in(&self) -> u64 {
        self.stood_in
    }

    fn finish(self: Box<Self>, _ending: &Ending<'_>) -> Result<(), WriteError> {
        self.file.finish()
    }
}
