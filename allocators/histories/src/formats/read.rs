//! Entry point for all formats.

use super::archive;
use super::error::{Place, Problem, ReadError};
use super::input::Input;
use super::list::Start;
use super::summary::Receiver;
use super::{Format, OriginSink, Origins, ReadOptions, Sink, Summary, foreign, lines, minimalloc, rmm};
use std::io::Read;
use std::path::Path;

/// Reads a file of events, plain or compressed with gzip or xz, in a zip archive (also of `torch.save`) or in a page of PyTorch's memory
/// viewer, and passes them to `sink` in the order of the file: in a snapshot
/// of several devices, one device after the other. `-` is the standard input. A zip archive from a pipe is kept within the budget.
///
/// Format and compression are detected from the content. Reading takes bounded memory; the sink gets all events before an error.
/// A truncated snapshot is read as far as possible, and [`Summary::cut`] is set.
///
/// # Errors
/// [`ReadError`] for a file that cannot be opened, parsed or kept within `options`, and errors of the sink.
pub fn read(path: &Path, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    named(path, || read_from(archive::opened(open(path)?, &options.budget)?, options, sink))
}

/// As [`read`], from any source; the error names no file.
///
/// # Errors
/// Those of [`read`].
pub fn read_from(source: Box<dyn Read + '_>, options: &ReadOptions, sink: &mut Sink<'_>) -> Result<Summary, ReadError> {
    Ok(run(source, options, &mut |event, _, _| sink(event), false)?.0)
}

/// As [`read`], with the origin of each event: stack frames, categories, annotations. Only snapshots contain them.
///
/// # Errors
/// Those of [`read`].
pub fn read_origins(
    path: &Path,
    options: &ReadOptions,
    sink: &mut OriginSink<'_>,
) -> Result<(Summary, Origins), ReadError> {
    named(path, || read_origins_from(archive::opened(open(path)?, &options.budget)?, options, sink))
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

/// Opens a file of events, possibly a pipe: a budget limits reading. `-` is the standard input.
pub(super) fn open(path: &Path) -> Result<std::fs::File, ReadError> {
    let path = if cfg!(unix) && path == Path::new("-") { Path::new("/dev/stdin") } else { path };
    vramlab_device::input::open_stream(path).map_err(|error| ReadError::at(Place::Whole, Problem::of_opening(error)))
}

/// Adds the file to the error.
pub(super) fn named<T>(path: &Path, read: impl FnOnce() -> Result<T, ReadError>) -> Result<T, ReadError> {
    read().map_err(|error| ReadError { path: path.to_owned(), ..error })
}

fn run<'s>(
    source: Box<dyn Read + '_>,
    options: &ReadOptions,
    sink: &'s mut OriginSink<'s>,
    wants_origins: bool,
) -> Result<(Summary, Origins), ReadError> {
    let mut input = archive::page_content(Input::new(source, &options.budget)?, &options.budget)?;
    let format = match options.format {
        Some(format) => format,
        None => detect(&mut input)?,
    };
    let mut receiver = Receiver { sink, origins: Origins::new(&options.budget), wants_origins };
    let reader = format.reader();
    let result = (reader.read)(&mut input, options, &mut receiver);
    if !reader.snapshot {
        input.check_whole()?;
    }
    let mut summary = result?;
    summary.bytes = input.offset();
    Ok((summary, receiver.origins))
}

/// Whether a line may be the header of a table: names with commas between them.
fn is_header(line: &str) -> bool {
    let is_name = |name: &str| {
        let name = name.trim().trim_matches('"');
        name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
            && name.chars().all(|other| other.is_ascii_alphanumeric() || "_ -()/.".contains(other))
    };
    line.contains(',') && line.split(',').all(is_name)
}

fn detect(input: &mut Input<'_>) -> Result<Format, ReadError> {
    if !input.ensure(1)? {
        return Err(ReadError::at(Place::Whole, Problem::Empty));
    }
    // A pipe may return few bytes at a time; only a short file has less.
    input.ensure(lines::LONGEST_LINE)?;
    let bytes = &input.buffered()[..input.buffered().len().min(lines::LONGEST_LINE)];
    if let Some(problem) = foreign::foreign(bytes) {
        return Err(ReadError::at(Place::Whole, problem));
    }
    let text = bytes.trim_ascii_start();
    let start = Start { bytes, text: &String::from_utf8_lossy(text) };
    let format = Format::ALL.into_iter().find(|format| (format.reader().begins)(&start));
    format.ok_or_else(|| match start.header() {
        header if is_header(header) => ReadError::content(
            Place::Byte(0),
            format!(
                "the table has the columns {}; a log of RMM has {}, a table of buffers {}",
                lines::clip(header),
                rmm::COLUMNS.join(","),
                minimalloc::COLUMNS.join(",")
            ),
        ),
        _ => ReadError::at(Place::Whole, Problem::UnknownFormat),
    })
}
