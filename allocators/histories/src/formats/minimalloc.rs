//! minimalloc's problems and solutions: `id,lower,upper,size` and, in a solution, `offset`. A buffer lives in
//! `[lower, upper)`.
//!
//! The rows are in any order, so the whole table is kept, 40 bytes a row, and sorted. A buffer without an offset gets
//! an address of its own, one behind the other. Times are the file's, counted from its earliest if that is negative;
//! at equal times what ends goes before what begins. Source: minimalloc `src/converter.cc`.

use super::error::Place;
use super::input::Input;
use super::lines::{Lines, clip, columns, fields};
use super::list::Reader;
use super::summary::{Receiver, emit};
use super::{Action, Event, Format, ReadError, ReadOptions, Summary};
use crate::steps;

/// Names of the columns that are read.
const COLUMNS: [&str; 3] = ["lower", "upper", "size"];

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
        let kept = claim.push(&mut rows, row);
        kept.map_err(|over| ReadError::over(lines.place(), over))?;
    }
    let order = 2 * rows.len() * size_of::<(i64, bool, u32)>();
    claim.add(order).map_err(|over| ReadError::over(Place::Whole, over))?;
    emit_rows(&rows, receiver)
}

fn parse(line: &str, needed: [usize; 3], offset: Option<usize>, next: &mut u64) -> Result<Row, String> {
    let short = || format!("the line has too few columns: '{}'; it was cut short or damaged", clip(line));
    let [lower, upper, size] = fields(line, needed).ok_or_else(short)?;
    let time = |name: &str, text: &str| {
        text.parse::<i64>().map_err(|_| format!("{name} '{}' is no time: expected an integer", clip(text)))
    };
    let (lower, upper) = (time("lower", lower)?, time("upper", upper)?);
    if lower >= upper {
        return Err(format!("the life [{lower}, {upper}) is empty: upper must be above lower"));
    }
    let size = size.parse::<u64>().map_err(|_| format!("size '{}' is no number of bytes", clip(size)))?;
    let addr = match offset {
        Some(column) => {
            let [text] = fields(line, [column]).ok_or_else(short)?;
            text.parse().map_err(|_| format!("offset '{}' is no number of bytes", clip(text)))?
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
        // CAST: `start` is the least, so the difference is not negative, and it fits 64 bits.
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
