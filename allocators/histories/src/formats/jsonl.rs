//! Our own `trace.jsonl`, as `trainer --trace` writes it: one JSON object a line. It also says where and how requests were
//! served, for which PyTorch's form of a history has no place.
//!
//! It does not say when a deferred free completed, so each free completes at once here; for a refused request it does
//! not say what was free, which is 0 here. `analysis/schema.md` describes the fields.

use super::input::Input;
use super::lines::Lines;
use super::list::Reader;
use super::summary::{Receiver, emit};
use super::{Action, BlockPlace, Event, Format, ReadError, ReadOptions, Summary};
use serde::Deserialize;
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read};
use std::path::Path;
use vramlab_policies::contract::Path as Served;

/// The fields that are read.
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
        .map_err(|error| format!("the line is no event: {error}; it was cut short or damaged"))?;
    let unknown = || format!("'{}' is no action", super::lines::clip(&line.action));
    let action = Action::named(&line.action).ok_or_else(unknown)?;
    let addr = match line.addr {
        Some(addr) => addr,
        None if action == Action::Oom => 0,
        None => return Err(format!("the event '{action}' has no 'addr'")),
    };
    let bytes = if action == Action::RecordUse { 0 } else { line.size };
    Ok(Event { action, device: 0, addr, bytes, stream: line.stream, time_ns: line.time_ns })
}

/// The fields that say how a request was served.
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

/// Address, size and path of each allocation of a trace, plain or with gzip, in order.
///
/// # Errors
/// Those of reading; [`ErrorKind::InvalidData`] for a line that is no event.
pub fn jsonl_placements(path: &Path) -> std::io::Result<Vec<BlockPlace>> {
    let file = File::open(path)?;
    let packed = path.extension().is_some_and(|end| end == "gz");
    let source: Box<dyn Read> = if packed { Box::new(flate2::read::MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut out = Vec::new();
    for (number, text) in BufReader::new(source).lines().enumerate() {
        let text = text?;
        let line: Placement<'_> = serde_json::from_str(text.trim_start_matches('\u{feff}'))
            .map_err(|error| Error::new(ErrorKind::InvalidData, format!("line {} is no event: {error}", number + 1)))?;
        if line.action == "alloc" {
            let path = Served::ALL.into_iter().find(|path| path.name() == line.path);
            out.push(BlockPlace { addr: line.addr, bytes: line.block, path });
        }
    }
    Ok(out)
}
