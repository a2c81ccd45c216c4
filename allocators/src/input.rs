//! Small files that a user names, such as profiles, specs and records, read as a whole but never without bound.
//!
//! What a name stands for may be a device or a pipe that never ends, and a compressed file unpacks to a thousand times
//! its size. A reader says how long its files can sensibly be, and what is longer is refused in one line.

use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{BufReader, Error, ErrorKind, Read, Result};
use std::path::Path;

/// Most bytes of a file that people write: a device profile, a spec. 1 MiB.
pub const WRITTEN: u64 = 1 << 20;

/// Most bytes of a file that a run leaves for a program to read whole, such as its summary or its table of steps: 256
/// MiB.
pub const RECORDED: u64 = 256 << 20;

/// The bytes of a file, of which there may be at most `limit`.
///
/// # Errors
/// What the operating system says, [`ErrorKind::IsADirectory`], and [`ErrorKind::FileTooLarge`] for what is longer, each
/// in one line that does not name the file.
pub fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>> {
    read_whole(open(path)?, limit)
}

/// The text in a file of at most `limit` bytes.
///
/// # Errors
/// Those of [`read_bytes`], and [`ErrorKind::InvalidData`] for what is no UTF-8.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    text(read_bytes(path, limit)?)
}

/// The text in a file that may be compressed with gzip, of at most `limit` bytes as a file and unpacked.
///
/// # Errors
/// Those of [`read_text`], and what the decoder says of a file that was damaged.
pub fn read_unpacked(path: &Path, limit: u64) -> Result<String> {
    let mut file = BufReader::new(open(path)?);
    let packed = std::io::BufRead::fill_buf(&mut file)?.starts_with(&[0x1f, 0x8b]);
    text(if packed { read_whole(MultiGzDecoder::new(file), limit) } else { read_whole(file, limit) }?)
}

fn open(path: &Path) -> Result<File> {
    let file = File::open(path)?;
    if file.metadata()?.is_dir() {
        return Err(Error::new(ErrorKind::IsADirectory, "is a directory; name a file in it"));
    }
    Ok(file)
}

/// Everything in `source`, of which there may be at most `limit` bytes.
///
/// # Errors
/// Those of [`read_bytes`].
pub fn read_whole(source: impl Read, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    // CAST: a length in memory.
    if bytes.len() as u64 > limit {
        let text =
            format!("is longer than {}, which no such file is; see whether it is the right one", crate::Bytes(limit));
        return Err(Error::new(ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

fn text(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::InvalidData, "is no text in UTF-8"))
}
