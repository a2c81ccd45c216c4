//! minimalloc's problems and solutions: `id,lower,upper,size` and, in a solution, `offset`. A buffer is live in `[lower, upper)`.
//!
//! Rows are in any order, so the complete table is kept, 40 bytes for each row, and sorted. Buffers without offset get
//! consecutive addresses. Times are the file's, relative to its earliest if that is negative; at equal times ends precede starts.
//! Source: minimalloc `src/converter.cc`.

use super::error::Place;
use super::input::Input;
use super::lines::{Lines, clip, columns, fields};
use super::list::{Reader, Writer};
use super::summary::{Receiver, emit};
use super::write::{Ending, HistoryFile, TraceWriter, WriteError};
use super::{Action, Event, Format, ReadError, ReadOptions, Summary};
use crate::steps;
use std::collections::BTreeMap;
use std::io::Write;
use vramlab_device::output::OutputFile;

/// Names of the columns that are needed.
pub(super) const COLUMNS: [&str; 3] = ["lower", "upper", "size"];

/// One buffer.
struct Row {
    lower: i64,
    upper: i64,
    size: u64,
    addr: u64,
}

/// The entry in the [list](super::list).
pub(super) const READER: Reader =
    Reader { name: "minimalloc", begins: |start| columns(start.header(), COLUMNS).is_ok(), read, snapshot: false };

/// Reads a table.
fn read(input: &mut Input<'_>, options: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    let mut lines = Lines::new(input);
    let header = lines.next()?.unwrap_or_default().to_owned();
    let needed = columns(&header, COLUMNS).map_err(|text| lines.content(text))?;
    let offset = header.split(',').position(|column| column.trim() == "offset");
    let mut claim = options.budget.claim();
    let mut rows: Vec<Row> = Vec::new();
    let mut next = 0_u64;
    while let Some(line) = lines.next()? {
        let row = parse(line, needed, offset, &mut next);
        let row = row.map_err(|text| lines.content(text))?;
        let pushed = claim.push(&mut rows, row);
        pushed.map_err(|over| ReadError::over(lines.place(), over))?;
    }
    let order = 2 * rows.len() * size_of::<(i64, bool, u32)>();
    claim.add(order).map_err(|over| ReadError::over(Place::Whole, over))?;
    emit_rows(&rows, receiver)
}

fn parse(line: &str, needed: [usize; 3], offset: Option<usize>, next: &mut u64) -> Result<Row, String> {
    let short = || format!("the line has too few columns: '{}'; it was truncated or damaged", clip(line));
    let [lower, upper, size] = fields(line, needed).ok_or_else(short)?;
    let time = |name: &str, text: &str| {
        text.parse::<i64>().map_err(|_| format!("{name} '{}' is not a time: expected an integer", clip(text)))
    };
    let (lower, upper) = (time("lower", lower)?, time("upper", upper)?);
    if lower >= upper {
        return Err(format!("the life [{lower}, {upper}) is empty: upper must be above lower"));
    }
    let size = size.parse::<u64>().map_err(|_| format!("size '{}' is not a number of bytes", clip(size)))?;
    let addr = match offset {
        Some(column) => {
            let [text] = fields(line, [column]).ok_or_else(short)?;
            text.parse().map_err(|_| format!("offset '{}' is not a number of bytes", clip(text)))?
        }
        None => {
            let addr = *next;
            *next = addr
                .checked_add(size.max(1))
                .ok_or("the sizes add up to more than 2^64 bytes; give offsets, or fewer buffers")?;
            addr
        }
    };
    Ok(Row { lower, upper, size, addr })
}

fn emit_rows(rows: &[Row], receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    let mut summary = Summary::new(Format::MinimallocCsv);
    let mut order: Vec<(i64, bool, u32)> = Vec::with_capacity(2 * rows.len());
    steps::count(rows.len());
    for (number, row) in (0_u32..).zip(rows) {
        order.push((row.lower, true, number));
        order.push((row.upper, false, number));
    }
    order.sort_unstable();
    let start = order.first().map_or(0, |first| first.0.min(0));
    for (time, begins, number) in order {
        let row = &rows[number as usize];
        // CAST: `start` is the minimum, so the difference is not negative, and it fits 64 bits.
        let time_ns = time.wrapping_sub(start) as u64;
        let action = if begins { Action::Alloc } else { Action::FreeRequested };
        let event = Event { action, device: 0, addr: row.addr, bytes: row.size, stream: 0, time_ns };
        emit(event, &mut summary, receiver)?;
    }
    if rows.is_empty() {
        return Err(ReadError::content(Place::Whole, "the table has a header and no rows"));
    }
    Ok(summary)
}

// minimalloc's table of buffers, `id,lower,upper,size`, in the order of their ends.
//
// Time is counted in allocations and completed frees, so the table has the recording's order, whatever the clock's resolution.
// Blocks from before recording started have lifetimes from 0; blocks that are never freed live to the end. Memory is proportional
// to live buffers.

/// The entry in the [list](super::list).
pub(super) const WRITER: Writer = Writer {
    name: "minimalloc",
    file_name: "minimalloc.csv",
    summary: "buffers and their lifetimes for minimalloc",
    holds: MinimallocWriter::holds,
    begin: |file| Ok(Box::new(MinimallocWriter::begin(file)?)),
};

/// Writes a table.
#[derive(Debug)]
pub struct MinimallocWriter {
    file: HistoryFile,
    /// Start and size of live buffers, by device and address.
    live: BTreeMap<(u16, u64), (u64, u64)>,
    /// Number of allocations and frees so far.
    now: u64,
    written: u64,
    device: Option<u16>,
}

impl MinimallocWriter {
    /// Begins a table.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn begin(file: OutputFile) -> Result<Self, WriteError> {
        let mut file = HistoryFile::new(file);
        file.put(|out| out.write_all(b"id,lower,upper,size\n"))?;
        Ok(Self { file, live: BTreeMap::new(), now: 0, written: 0, device: None })
    }

    /// Whether a table has events of an action.
    fn holds(action: Action) -> bool {
        matches!(action, Action::Alloc | Action::FreeCompleted)
    }

    fn row(&mut self, lower: u64, upper: u64, size: u64) -> Result<(), WriteError> {
        let id = self.written;
        self.written += 1;
        self.file.put(|out| writeln!(out, "b{id},{lower},{upper},{size}"))
    }
}

impl TraceWriter for MinimallocWriter {
    fn event(&mut self, event: &Event) -> Result<(), WriteError> {
        if !Self::holds(event.action) {
            return Ok(());
        }
        if *self.device.get_or_insert(event.device) != event.device {
            return Err(self.file.unfit("the recording has several devices, but a minimalloc table has one"));
        }
        self.now += 1;
        let key = (event.device, event.addr);
        let ended = if event.action == Action::Alloc {
            // If the address is taken, the previous block's free was lost.
            self.live.insert(key, (self.now, event.bytes))
        } else {
            Some(self.live.remove(&key).unwrap_or((0, event.bytes)))
        };
        match ended {
            Some((lower, size)) => self.row(lower, self.now, size),
            None => Ok(()),
        }
    }

    fn finish(mut self: Box<Self>, _ending: &Ending<'_>) -> Result<(), WriteError> {
        let end = self.now + 1;
        for (lower, size) in std::mem::take(&mut self.live).into_values() {
            self.row(lower, end, size)?;
        }
        self.file.finish()
    }
}
