//! Files that contain a recording: zip archives, which GitHub attaches and `torch.save` writes, and pages of PyTorch's memory viewer.

use super::error::{Place, Problem, ReadError};
use super::input::Input;
use base64::engine::general_purpose::STANDARD;
use base64::read::DecoderReader;
use flate2::read::DeflateDecoder;
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, ErrorKind, Read, Seek, SeekFrom};
use vramlab_device::Bytes;
use vramlab_device::budget::{Budget, Claim};
use zip::{CompressionMethod, ZipArchive};

/// Beginning of a zip file.
const ZIP: &[u8] = b"PK\x03\x04";
/// Maximum size of an archive's directory, some ten thousand files: its entries are kept in memory.
const MOST_DIRECTORY: u64 = 1 << 20;
/// Maximum size of an archive's end: a record of 22 bytes and a comment.
const MOST_END: u64 = 22 + (1 << 16);
/// Maximum factor of compression, beyond a constant. Recordings reach a fifth of it; a zip bomb is a file of zeros.
const MOST_FACTOR: u64 = 250;
const SMALL: u64 = 1 << 20;
/// Bytes of a pipe that are read together.
const STEP: usize = 1 << 16;
/// Endings of the names of recordings.
const ENDINGS: [&str; 10] = ["pickle", "pkl", "json", "jsonl", "csv", "log", "txt", "gz", "xz", "html"];
/// Number of names in an error.
const NAMED: usize = 3;

fn refused(problem: impl Into<String>) -> ReadError {
    ReadError::content(Place::Whole, problem)
}

fn io(error: std::io::Error) -> ReadError {
    ReadError::at(Place::Whole, Problem::Io(error))
}

/// The bytes of a file, or of the recording in it if it is a zip archive. An archive from a pipe is kept in memory: its directory is
/// at the end.
///
/// # Errors
/// The archive has no recording, several, or one that is encrypted or too large. One from a pipe exceeds the budget.
pub(super) fn opened(mut file: File, budget: &Budget) -> Result<Box<dyn Read>, ReadError> {
    let is_file = file.metadata().map_err(io)?.is_file();
    let mut begin = Vec::new();
    (&mut file).take(ZIP.len() as u64).read_to_end(&mut begin).map_err(io)?;
    match (begin == ZIP, is_file) {
        (true, true) => recording_in(file),
        (true, false) => recording_in(Kept::new(begin, file, budget)?),
        (false, true) => {
            file.rewind().map_err(io)?;
            Ok(Box::new(file))
        }
        (false, false) => Ok(Box::new(Cursor::new(begin).chain(file))),
    }
}

/// The content of a pipe, in claimed memory.
struct Kept {
    content: Cursor<Vec<u8>>,
    _claim: Claim,
}

impl Kept {
    fn new(mut content: Vec<u8>, mut pipe: File, budget: &Budget) -> Result<Self, ReadError> {
        let mut claim = budget.claim();
        loop {
            claim.reserve(&mut content, STEP).map_err(|over| ReadError::over(Place::Whole, over))?;
            // CAST: a constant.
            if (&mut pipe).take(STEP as u64).read_to_end(&mut content).map_err(io)? == 0 {
                return Ok(Self { content: Cursor::new(content), _claim: claim });
            }
        }
    }
}

impl Read for Kept {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        self.content.read(out)
    }
}

impl Seek for Kept {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.content.seek(to)
    }
}

/// A file in an archive.
struct Entry {
    name: String,
    index: usize,
}

fn recording_in<F: Read + Seek + 'static>(mut file: F) -> Result<Box<dyn Read>, ReadError> {
    check_directory(&mut file)?;
    let damaged = |error: zip::result::ZipError| refused(format!("the zip archive is damaged: {error}"));
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(damaged)?;
    let entry = chosen(&archive)?;
    let (start, packed, size, method, encrypted) = {
        let entry = archive.by_index_raw(entry.index).map_err(damaged)?;
        (entry.data_start(), entry.compressed_size(), entry.size(), entry.compression(), entry.encrypted())
    };
    let Entry { name, .. } = entry;
    if encrypted {
        return Err(refused(format!("{name} in the zip archive is encrypted; unpack it first")));
    }
    if size > packed.saturating_mul(MOST_FACTOR).saturating_add(SMALL) {
        let (packed, size) = (Bytes(packed), Bytes(size));
        return Err(refused(format!("{name} in the zip archive grows from {packed} to {size}; no recording does")));
    }
    let start = start.ok_or_else(|| refused("the zip archive is damaged: a file has no data"))?;
    let mut file = archive.into_inner();
    file.seek(SeekFrom::Start(start)).map_err(io)?;
    let data = file.take(packed);
    match method {
        CompressionMethod::Stored => Ok(Box::new(data)),
        CompressionMethod::Deflated => Ok(Box::new(DeflateDecoder::new(data).take(size))),
        other => Err(refused(format!("{name} in the zip archive is compressed with {other}; unpack it first"))),
    }
}

/// Refuses an archive whose directory takes much memory.
fn check_directory(file: &mut (impl Read + Seek)) -> Result<(), ReadError> {
    let length = file.seek(SeekFrom::End(0)).map_err(io)?;
    file.seek(SeekFrom::Start(length.saturating_sub(MOST_END))).map_err(io)?;
    let mut end = Vec::new();
    file.read_to_end(&mut end).map_err(io)?;
    file.rewind().map_err(io)?;
    let record = end.windows(4).rposition(|bytes| bytes == b"PK\x05\x06");
    let size = record.and_then(|at| end.get(at + 12..at + 16)).and_then(|bytes| bytes.try_into().ok());
    let size = size.map(u32::from_le_bytes).ok_or_else(|| refused("the zip archive was cut short; copy it again"))?;
    if u64::from(size) > MOST_DIRECTORY {
        return Err(refused("the zip archive has too many files; unpack it and name the recording"));
    }
    Ok(())
}

/// The only recording of an archive. In one of `torch.save` it is `data.pkl`.
fn chosen<R: Read + Seek>(archive: &ZipArchive<R>) -> Result<Entry, ReadError> {
    let entries = || {
        archive
            .file_names()
            .enumerate()
            .map(|(index, name)| Entry { name: name.map_or_else(|_| String::new(), Into::into), index })
    };
    if let Some(saved) = entries().find(|entry| entry.name.ends_with("/data.pkl")) {
        return Ok(saved);
    }
    let is_recording = |entry: &Entry| {
        let file = entry.name.rsplit('/').next().unwrap_or_default();
        let hidden = file.is_empty() || file.starts_with('.') || entry.name.starts_with("__MACOSX/");
        let ending = file.rsplit_once('.').map_or("pickle", |(_, ending)| ending).to_ascii_lowercase();
        !hidden && ENDINGS.contains(&&*ending)
    };
    let mut found: Vec<Entry> = entries().filter(is_recording).collect();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(refused("the zip archive contains no recording (.pickle, .json, .csv and others)")),
        count => {
            let names: Vec<&str> = found.iter().take(NAMED).map(|entry| &*entry.name).collect();
            let more = if count > NAMED { " and others" } else { "" };
            let names = names.join(", ");
            Err(refused(format!("the zip archive contains {count} files: {names}{more}; unpack it and name one")))
        }
    }
}

/// The text before a snapshot in a page that `torch/cuda/_memory_viz.py` writes.
const EMBEDDED: &[u8] = b"\"base64\": \"";
/// The snapshot begins within this many bytes.
const MOST_BEFORE: usize = 1 << 20;

/// The snapshot in a page of the memory viewer; other input is returned as it is.
///
/// # Errors
/// The page contains no snapshot.
pub(super) fn page_content<'a>(mut input: Input<'a>, budget: &Budget) -> Result<Input<'a>, ReadError> {
    input.ensure(EMBEDDED.len())?;
    let begin = input.buffered().trim_ascii_start();
    let is_page = |word: &[u8]| begin.get(..word.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(word));
    if !is_page(b"<!DOCTYPE") && !is_page(b"<html") {
        return Ok(input);
    }
    let mut passed = 0;
    while !input.buffered().starts_with(EMBEDDED) {
        let next = input.buffered().iter().skip(1).position(|byte| *byte == EMBEDDED[0]);
        let step = next.map_or(input.buffered().len(), |at| at + 1);
        input.advance(step);
        passed += step;
        if passed > MOST_BEFORE || !input.ensure(EMBEDDED.len())? {
            return Err(refused("the page contains no snapshot of PyTorch; name the snapshot's own file"));
        }
    }
    input.advance(EMBEDDED.len());
    Input::new(Box::new(DecoderReader::new(Quoted(input), &STANDARD)), budget)
}

/// Reads up to a quotation mark.
struct Quoted<'a>(Input<'a>);

impl Read for Quoted<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let from = self.0.fill_buf()?;
        if from.is_empty() {
            return Err(std::io::Error::new(ErrorKind::UnexpectedEof, "the page was cut short"));
        }
        let end = from.iter().take(out.len()).position(|byte| *byte == b'"').unwrap_or(from.len().min(out.len()));
        out[..end].copy_from_slice(&from[..end]);
        self.0.consume(end);
        Ok(end)
    }
}
