//! Our own `trace.jsonl`, as written by `trainer --trace`, by `vramlab run` for CUDA programs, and for pinned memory by our recorder in
//! PyTorch: one JSON object per line. It also contains how requests were served, which PyTorch's format does not.
//!
//! A line may have a call stack: its number as `stack`, and in the first line with that number its `frames`, each with `name`,
//! `filename` and `line`, the innermost first.
//!
//! A free completes immediately, unless its line has `"deferred": true`: then a line `free_completed` follows where its last use has
//! completed. `trainer --trace` does not write when a deferred free completed. A trace is of pinned memory if its first line has the
//! settings of PyTorch's host allocator as `allocator_settings`, or if a line's `call` is `cuMemHostAlloc`. For a failed request the free
//! bytes are unknown and 0 here. `analysis/schema.md` describes the fields.

use super::error::Place;
use super::input::Input;
use super::lines::{Lines, clip};
use super::list::Reader;
use super::origins::{Frame, Origin, Origins, StackId};
use super::summary::{Receiver, emit_from};
use super::{Action, BlockPlace, Event, Format, ReadError, ReadOptions, Summary, read as file};
use crate::calls::Call;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{Error, ErrorKind};
use std::path::Path;
use vramlab_device::budget::{Budget, Claim, OverBudget};
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
    #[serde(default)]
    deferred: bool,
    #[serde(default)]
    stack: Option<u64>,
    #[serde(default, borrow)]
    frames: Option<Vec<LineFrame<'l>>>,
    #[serde(default)]
    allocator_settings: Option<Map<String, Value>>,
    #[serde(default, borrow)]
    call: Option<Cow<'l, str>>,
}

/// A frame of a call stack.
#[derive(Deserialize)]
struct LineFrame<'l> {
    #[serde(borrow)]
    name: Cow<'l, str>,
    #[serde(borrow)]
    filename: Cow<'l, str>,
    line: u32,
}

/// The call stacks of a trace.
struct Stacks {
    by_number: HashMap<u64, StackId>,
    claim: Claim,
}

impl Stacks {
    /// Memory of an entry while the table doubles.
    const ENTRY: usize = 4 * size_of::<(u64, StackId)>();

    /// The origin of a line.
    fn origin(&mut self, line: &Line<'_>, origins: &mut Origins) -> Result<Origin, OverBudget> {
        let Some(number) = line.stack else { return Ok(Origin::default()) };
        if let Some(frames) = &line.frames {
            let mut numbers = Vec::with_capacity(frames.len());
            for frame in frames {
                let (name, filename) = (origins.text(&frame.name)?, origins.text(&frame.filename)?);
                numbers.push(origins.frame(Frame { name, filename, line: frame.line })?);
            }
            self.claim.add(Self::ENTRY)?;
            self.by_number.insert(number, origins.stack(&numbers)?);
        }
        Ok(Origin { stack: self.by_number.get(&number).copied().unwrap_or_default(), ..Origin::default() })
    }
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
fn read(input: &mut Input<'_>, options: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    let mut summary = Summary::new(Format::Jsonl);
    let mut stacks = Stacks { by_number: HashMap::new(), claim: options.budget.claim() };
    let mut lines = Lines::new(input);
    while let Some(text) = lines.next()? {
        let parsed = parse(text).map(|(mut line, event)| {
            if let Some(settings) = line.allocator_settings.take() {
                summary.allocator_settings = settings;
                summary.is_pinned = true;
            }
            summary.is_pinned |= line.call.as_deref() == Some(Call::HostAlloc.name());
            let origin = receiver.wants_origins.then(|| stacks.origin(&line, &mut receiver.origins));
            (event, origin.unwrap_or_else(|| Ok(Origin::default())), line.deferred)
        });
        let (event, origin, deferred) = parsed.map_err(|text| lines.content(text))?;
        let origin = origin.map_err(|over| ReadError::over(lines.place(), over))?;
        if deferred {
            summary.count(event.device);
            receiver.take(event, origin)?;
        } else {
            emit_from(event, origin, &mut summary, receiver)?;
        }
    }
    Ok(summary)
}

fn parse(text: &str) -> Result<(Line<'_>, Event), String> {
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
    let event = Event { action, device: 0, addr, bytes, stream: line.stream, time_ns: line.time_ns };
    Ok((line, event))
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
