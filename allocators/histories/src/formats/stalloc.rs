//! STAlloc's trace: `1 POINTER SIZE STREAM` for an allocation, `0 POINTER SIZE STREAM` for a free, and lines of text that mark
//! iterations, micro-batches and layers, which are skipped.
//!
//! The trace has no times and names no device. Source: STAlloc `Allocator/trace.cpp`, `Synthesizer/trace_parser.py`.

use super::input::Input;
use super::lines::{Lines, clip};
use super::list::Reader;
use super::summary::{Receiver, emit};
use super::{Action, Event, Format, ReadError, ReadOptions, Summary};

/// The entry in the [list](super::list).
pub(super) const READER: Reader = Reader {
    name: "stalloc",
    begins: |start| start.text.lines().any(|line| matches!(parse(line), Ok(Some(_)))),
    read,
    snapshot: false,
};

/// Reads a trace.
fn read(input: &mut Input<'_>, _: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    let mut summary = Summary::new(Format::Stalloc);
    Lines::new(input).each(parse, |event| emit(event, &mut summary, receiver))?;
    Ok(summary)
}

/// The event of a line; `None` for a mark.
fn parse(line: &str) -> Result<Option<Event>, String> {
    let mut words = line.split_ascii_whitespace();
    let action = match words.next() {
        Some("1") => Action::Alloc,
        Some("0") => Action::FreeRequested,
        _ => return Ok(None),
    };
    let numbers = [words.next(), words.next(), words.next()].map(|word| word.and_then(number));
    let [Some(addr), Some(bytes), Some(stream)] = numbers else {
        return Err(format!("'{}' should be 0 or 1, then pointer, size and stream", clip(line)));
    };
    if words.next().is_some() {
        return Err(format!("'{}' has more than four numbers", clip(line)));
    }
    Ok(Some(Event { action, device: 0, addr, bytes, stream, time_ns: 0 }))
}

/// Decimal, or hexadecimal with `0x`.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}
