//! Where and how a run's allocations were served, from its `trace.jsonl`. PyTorch's form of a history has no place for it.

use crate::replay::BlockPlace;
use serde::Deserialize;
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result};
use std::path::Path;
use vramlab_policies::contract::Path as Served;

#[derive(Deserialize)]
struct Line<'l> {
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
pub fn jsonl_placements(path: &Path) -> Result<Vec<BlockPlace>> {
    let file = File::open(path)?;
    let packed = path.extension().is_some_and(|end| end == "gz");
    let source: Box<dyn Read> = if packed { Box::new(flate2::read::MultiGzDecoder::new(file)) } else { Box::new(file) };
    let mut out = Vec::new();
    for (number, text) in BufReader::new(source).lines().enumerate() {
        let text = text?;
        let line: Line<'_> = serde_json::from_str(&text)
            .map_err(|error| Error::new(ErrorKind::InvalidData, format!("line {} is no event: {error}", number + 1)))?;
        if line.action == "alloc" {
            let path = Served::ALL.into_iter().find(|path| path.name() == line.path);
            out.push(BlockPlace { addr: line.addr, bytes: line.block, path });
        }
    }
    Ok(out)
}
