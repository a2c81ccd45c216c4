//! One entry for every format.

use super::error::{Place, Problem, ReadError};
use super::input::Input;
use super::receiver::Receiver;
use super::{
    Format, Origin, OriginSink, Origins, ReadOptions, Sink, Summary, jsonl, lines, minimalloc, pickle, rmm,
    snapshot_json, stalloc,
};
use std::io::Read;
use std::path::Path;

/// Reads a file of events, plain or compressed with gzip or xz, and hands them to `sink` in the order of the file:
/// those of one device after those of another in a snapshot of several.
///
/// The format and the compression are told by the content. Events pass through bounded memory; the sink has got all
/// events before an error by the time it is returned. A snapshot that was cut short is read as far as it is whole, and
/// [`Summary::cut`] says so.
///
/// # Errors
/// [`ReadError`] for what cannot be opened, understood or kept within `options`, and what the sink returns.
pub fn read(path: &Path, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    named(path, || read_from(Box::new(open(path)?), options, sink))
}

/// As [`read`], from any source; the error names no file.
///
/// # Errors
/// Those of [`read`].
pub fn read_from(source: Box<dyn Read + '_>, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    Ok(run(source, options, &mut |event, _, _| sink(event), false)?.0)
}

/// As [`read`], with where each event came from: stack frames, categories, annotations. Only snapshots say that.
///
/// # Errors
/// Those of [`read`].
pub fn read_origins(
    path: &Path,
    options: &ReadOptions,
    sink: &mut OriginSink<'_>,
) -> Result<(Summary, Origins), ReadError> {
    named(path, || read_origins_from(Box::new(open(path)?), options, sink))
}

/// As [`read_origins`], from any source; the error names no file.
///
/// # Errors
/// Those of [`read`].
pub fn read_origins_from(
    source: Box<dyn Read + '_>,
    options: &ReadOptions,
    sink: &mut OriginSink<'_>,
) -> Result<(Summary, Origins), ReadError> {
    run(source, options, sink, true)
}

pub(super) fn open(path: &Path) -> Result<std::fs::File, ReadError> {
    let file = std::fs::File::open(path).map_err(|error| ReadError::at(Place::Whole, Problem::Io(error)))?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(ReadError::at(Place::Whole, Problem::Directory));
    }
    Ok(file)
}

/// Puts the file into the error of a reading.
pub(super) fn named<T>(path: &Path, read: impl FnOnce() -> Result<T, ReadError>) -> Result<T, ReadError> {
    read().map_err(|error| ReadError { path: path.to_owned(), ..error })
}

fn run<'s>(
    source: Box<dyn Read + '_>,
    options: &ReadOptions,
    sink: &'s mut OriginSink<'s>,
    wants_origins: bool,
) -> Result<(Summary, Origins), ReadError> {
    let mut input = Input::new(source, &options.budget)?;
    let format = match options.format {
        Some(format) => format,
        None => detect(&mut input)?,
    };
    let mut receiver = Receiver { sink, origins: Origins::new(&options.budget), wants_origins };
    let mut plain = |event| receiver.take(event, Origin::default());
    let result = match format {
        Format::SnapshotPickle => pickle::read(&mut input, options, &mut receiver),
        Format::SnapshotJson => snapshot_json::read(&mut input, options, &mut receiver),
        Format::RmmCsv => rmm::read(&mut input, &mut plain),
        Format::Stalloc => stalloc::read(&mut input, &mut plain),
        Format::MinimallocCsv => minimalloc::read(&mut input, options, &mut plain),
        Format::Jsonl => jsonl::read(&mut input, &mut plain),
    };
    if !matches!(format, Format::SnapshotPickle | Format::SnapshotJson) {
        input.check_whole()?;
    }
    let mut summary = result?;
    summary.bytes = input.offset();
    Ok((summary, receiver.origins))
}

fn detect(input: &mut Input<'_>) -> Result<Format, ReadError> {
    if !input.ensure(1)? {
        return Err(ReadError::at(Place::Whole, Problem::Empty));
    }
    // However little a pipe gives at once; less is there when the file is shorter.
    input.ensure(lines::LONGEST_LINE)?;
    let start = &input.buffered()[..input.buffered().len().min(lines::LONGEST_LINE)];
    let unknown = || ReadError::at(Place::Whole, Problem::UnknownFormat);
    if start[0] == 0x80 {
        return Ok(Format::SnapshotPickle);
    }
    let start = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    match start.first() {
        Some(b'{') => return Ok(detect_json(start)),
        Some(b'[') => {
            return Err(ReadError::content(
                Place::Byte(0),
                "the JSON document is a list, not a snapshot: dump torch.cuda.memory._snapshot(), not memory_snapshot()",
            ));
        }
        _ => {}
    }
    // The last line may be cut.
    let text = String::from_utf8_lossy(start);
    let header = text.lines().next().unwrap_or_default();
    if lines::columns(header, rmm::COLUMNS).is_ok() {
        Ok(Format::RmmCsv)
    } else if lines::columns(header, minimalloc::COLUMNS).is_ok() {
        Ok(Format::MinimallocCsv)
    } else if text.lines().any(|line| matches!(stalloc::parse(line), Ok(Some(_)))) {
        Ok(Format::Stalloc)
    } else {
        Err(unknown())
    }
}

/// A snapshot or our own trace, by the first key.
fn detect_json(start: &[u8]) -> Format {
    let key = start.split(|byte| *byte == b'"').nth(1).unwrap_or_default();
    let ours: [&[u8]; 7] = [b"time_ns", b"action", b"addr", b"size", b"block", b"stream", b"path"];
    if ours.contains(&key) { Format::Jsonl } else { Format::SnapshotJson }
}
