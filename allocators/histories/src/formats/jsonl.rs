//! Our own `trace.jsonl`, as written by `trainer --trace`: one JSON object per line. It also contains how requests were served,
//! which PyTorch's format does not.
//!
//! It does not contain when a deferred free completed, so each free completes immediately here; for a failed request the free
//! bytes are unknown and 0 here. `analysis/schema.md` describes the fields.

use super::error::Place;
use super::input::Input;
use super::lines::{Lines, clip};
use super::list::Reader;
use super::summary::{Receiver, emit};
use super::{Action, BlockPlace, Event, Format, ReadError, ReadOptions, Summary, read as file};
use serde::Deserialize;
use std::borrow::Cow;
use std::io::{Error, ErrorKind};
use std::path::Path;
use vramlab_device::budget::Budget;
use vramlab_policies::contract::Path as Served;

/// The fields that are needed.
#[derive(Deserialize)]
struct Line<'l> {
    time_ns: u64,
    #[serde(borrow)]
    action: Cow<'l, str>,
    #[serde(default)]
    addr: Option<u64>,
    size: u64,
    stream: u64,
}

/// The entry in the [list](super::list).
pub(super) const READER: Reader = Reader {
    name: "trace",
    begins: |start| {
        let first_key = start.text.split('"').nth(1).unwrap_or_default();
        start.text.starts_with('{')
            && ["time_ns", "action", "addr", "size", "block", "stream", "path"].contains(&first_key)
    },
    read,
    snapshot: false,
};

/// Reads a trace.
fn read(input: &mut Input<'_>, _: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    let mut summary = Summary::new(Format::Jsonl);
    Lines::new(input).each(|line| parse(line).map(Some), |event| emit(event, &mut summary, receiver))?;
    Ok(summary)
}

fn parse(text: &str) -> Result<Event, String> {
    let line: Line<'_> = serde_json::from_str(text)
        .map_err(|error| format!("the line is not an event: {error}; it was truncated or damaged"))?;
    let unknown = || format!("'{}' is not an action", super::lines::clip(&line.action));
    let action = Action::named(&line.action).ok_or_else(unknown)?;
    let addr = match line.addr {
        Some(addr) => addr,
        None if action == Action::Oom => 0,
        None => return Err(format!("the event '{action}' has no 'addr'")),
    };
    let bytes = if action == Action::RecordUse { 0 } else { line.size };
    Ok(Event { action, device: 0, addr, bytes, stream: line.stream, time_ns: line.time_ns })
}

/// The fields on how a request was served.
#[derive(Deserialize)]
struct Placement<'l> {
    #[serde(borrow)]
    action: Cow<'l, str>,
    #[serde(default)]
    addr: u64,
    block: u64,
    #[serde(borrow)]
    path: Cow<'l, str>,
}

/// Address, size and path of each allocation of a trace, plain or compressed, in order. Takes at most [`Budget::default`].
///
/// # Errors
/// Those of reading; [`ErrorKind::InvalidData`] for a line that is not an event.
pub fn jsonl_placements(path: &Path) -> std::io::Result<Vec<BlockPlace>> {
    let failed = |error: ReadError| {
        let ReadError { place, problem, .. } = error;
        let text = match place {
            Place::Line(line) => format!("line {line}: {problem}"),
            _ => problem.to_string(),
        };
        Error::new(ErrorKind::InvalidData, text)
    };
    let budget = Budget::default();
    let mut claim = budget.claim();
    let mut input = Input::new(Box::new(file::open(path).map_err(failed)?), &budget).map_err(failed)?;
    let mut out = Vec::new();
    let mut lines = Lines::new(&mut input);
    while let Some(text) = lines.next().map_err(failed)? {
        let line: Placement<'_> = match serde_json::from_str(text) {
            Ok(line) => line,
            Err(error) => return Err(failed(lines.content(format!("not an event: {}", clip(&error.to_string()))))),
        };
        if line.action == "alloc" {
            let path = Served::ALL.into_iter().find(|path| path.name() == line.path);
            let place = BlockPlace { addr: line.addr, bytes: line.block, path };
            claim.push(&mut out, place).map_err(|over| failed(ReadError::over(lines.place(), over)))?;
        }
    }
    input.check_whole().map_err(failed)?;
    Ok(out)
}
