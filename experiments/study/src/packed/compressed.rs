//! The tables' files, compressed: the same bytes for the same table.

use anyhow::{Context, Result, bail};
use liblzma::read::XzDecoder;
use liblzma::write::XzEncoder;
use std::io::{Read, Write};
use std::path::Path;

/// Most bytes of a table when it is unpacked: no experiment comes near.
const MOST_BYTES: u64 = 1 << 30;
/// As `xz -6e`: the bytes of this level do not depend on the machine, and a reader needs 9 MiB.
const LEVEL: u32 = 6 | (1 << 31);

/// A table's file.
pub(super) fn write(text: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = XzEncoder::new(Vec::new(), LEVEL);
    encoder.write_all(text)?;
    Ok(encoder.finish()?)
}

/// The text of a table, whose file `path` has these bytes.
///
/// # Errors
/// It is damaged, no text, or too long.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<String> {
    let mut text = String::new();
    let mut decoder = XzDecoder::new(bytes).take(MOST_BYTES + 1);
    decoder.read_to_string(&mut text).with_context(|| format!("{} is damaged", path.display()))?;
    // CAST: a length in memory.
    if text.len() as u64 > MOST_BYTES {
        bail!("{} unpacks to more than 1 GiB, which no experiment does", path.display());
    }
    Ok(text)
}
