//! Our own `trace.jsonl`, as `trainer --trace` writes it: one JSON object a line.
//!
//! It does not say when a deferred free completed, so each free completes at once here; for a refused request it does
//! not say what was free, which is 0 here. `analysis/schema.md` describes the fields.

use super::input::Input;
use super::lines::Lines;
use super::receiver::emit;
use super::{Action, Event, Format, ReadError, Sink, Summary};
use serde::Deserialize;

/// The fields that are read.
#[derive(Deserialize)]
struct Line<'l> {
    time_ns: u64,
    #[serde(borrow)]
    action: std::borrow::Cow<'l, str>,
    #[serde(default)]
    addr: Option<u64>,
    size: u64,
    stream: u64,
}

/// Reads a trace.
pub(super) fn read(input: &mut Input<'_>, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    let mut summary = Summary::new(Format::Jsonl);
    Lines::new(input).each(|line| parse(line).map(Some), |event| emit(event, &mut summary, sink))?;
    Ok(summary)
}

fn parse(text: &str) -> Result<Event, String> {
    let line: Line<'_> = serde_json::from_str(text)
        .map_err(|error| format!("the line is no event: {error}; it was cut short or damaged"))?;
    let action: Action =
        line.action.parse().map_err(|()| format!("'{}' is no action", super::lines::clip(&line.action)))?;
    let addr = match line.addr {
        Some(addr) => addr,
        None if action == Action::Oom => 0,
        None => return Err(format!("the event '{action}' has no 'addr'")),
    };
    let bytes = if action == Action::RecordUse { 0 } else { line.size };
    Ok(Event { action, device: 0, addr, bytes, stream: line.stream, time_ns: line.time_ns })
}
