//! Recordings: reading other projects' formats, and writing them.

mod archives;
mod hostile_pickle;
mod origins;
mod round_trip;
mod snapshots;
mod text;

use std::io::Cursor;
use std::path::{Path, PathBuf};
use vramlab_histories::formats::{Event, ReadError, ReadOptions, Summary, read, read_from};

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// All events of a file.
pub(crate) fn read_all(path: &Path) -> Result<(Vec<Event>, Summary), ReadError> {
    let mut events = Vec::new();
    let summary = read(path, &ReadOptions::default(), &mut |event| {
        events.push(event);
        Ok(())
    })?;
    Ok((events, summary))
}

/// All events of some bytes.
pub(crate) fn read_bytes(bytes: &[u8]) -> Result<(Vec<Event>, Summary), ReadError> {
    let mut events = Vec::new();
    let summary = read_from(Box::new(Cursor::new(bytes)), &ReadOptions::default(), &mut |event| {
        events.push(event);
        Ok(())
    })?;
    Ok((events, summary))
}

/// The error line that a user sees.
pub(crate) fn message(bytes: &[u8]) -> String {
    let text = read_bytes(bytes).expect_err("should be refused").to_string();
    assert!(!text.contains('\n'), "one line: {text}");
    text
}
