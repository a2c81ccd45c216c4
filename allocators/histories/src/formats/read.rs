//! One entry for every format.

use super::error::{Place, Problem, ReadError};
use super::input::Input;
use super::{Action, Event, Origin, Origins, Segment, jsonl, lines, minimalloc, pickle, rmm, snapshot_json, stalloc};
use crate::budget::Budget;
use std::fmt;
use std::io::Read;
use std::path::Path;

/// Formats of histories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// PyTorch's memory snapshot as `torch.cuda.memory._dump_snapshot` writes it.
    SnapshotPickle,
    /// The same dictionary as JSON.
    SnapshotJson,
    /// RMM's log.
    RmmCsv,
    /// STAlloc's trace.
    Stalloc,
    /// minimalloc's table of buffers, which is read as a whole before the first event.
    MinimallocCsv,
    /// Our own trace, as `trainer --trace` writes it.
    Jsonl,
}

impl Format {
    /// Name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Format::SnapshotPickle => "snapshot",
            Format::SnapshotJson => "snapshot-json",
            Format::RmmCsv => "rmm",
            Format::Stalloc => "stalloc",
            Format::MinimallocCsv => "minimalloc",
            Format::Jsonl => "trace",
        }
    }
}

/// How to read.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// The format; `None` tells it by the content.
    pub format: Option<Format>,
    /// What a reader may keep besides its buffers, which take less than 2 MiB. A snapshot's events are not kept, but
    /// what it may refer back to is: some 20 bytes an event. What the [`Summary`] holds stays claimed. Default 1 GiB.
    pub budget: Budget,
}

/// What a file held besides its events.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Format it was read as.
    pub format: Format,
    /// Events of each device.
    pub events: Vec<u64>,
    /// Events left out because their action has no counterpart in [`Action`](super::Action).
    pub unknown_actions: u64,
    /// What was held when the history ended; empty for formats that do not say.
    pub segments: Vec<Segment>,
    /// PyTorch's `allocator_settings`; empty for other formats.
    pub allocator_settings: serde_json::Map<String, serde_json::Value>,
    /// Number of PyTorch's `external_annotations`.
    pub external_annotations: u64,
    /// Bytes read, after unpacking.
    pub bytes: u64,
    /// Where the file was cut short, if it was and is a snapshot that is read as far as it is whole.
    pub cut: Option<Cut>,
}

/// Where a snapshot ends before its end, because the program that wrote it was killed or the copy was not completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes that are there, after unpacking.
    pub at: u64,
    /// Events that were read.
    pub events: u64,
    /// Whether all events are there and what was held after them. If not, [`Summary::segments`] is empty: what was held
    /// at the end says nothing of the moment at which the events break off.
    pub ends_known: bool,
    /// Whether the allocator's settings are there.
    pub settings_known: bool,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the file was cut short at byte {}: its first {} events were read", self.at, self.events)?;
        match (self.ends_known, self.settings_known) {
            (true, true) => write!(f, " and nothing that matters is missing"),
            (true, false) => write!(f, ", the allocator's settings are missing and taken to be PyTorch's defaults"),
            (false, true) => write!(f, ", what came after them and what was held at the end is missing"),
            (false, false) => write!(
                f,
                ", what came after them and the settings are missing; the settings are taken to be PyTorch's defaults"
            ),
        }
    }
}

impl Summary {
    pub(super) fn new(format: Format) -> Self {
        Self {
            format,
            events: Vec::new(),
            unknown_actions: 0,
            segments: Vec::new(),
            allocator_settings: serde_json::Map::new(),
            external_annotations: 0,
            bytes: 0,
            cut: None,
        }
    }

    /// Takes note of a device, with or without events.
    pub(super) fn has_device(&mut self, device: u16) {
        let devices = self.events.len().max(usize::from(device) + 1);
        self.events.resize(devices, 0);
    }

    /// Counts an event of a device.
    pub(super) fn count(&mut self, device: u16) {
        self.has_device(device);
        self.events[usize::from(device)] += 1;
    }

    /// What was held when the events ended; `None` where the file does not say.
    #[must_use]
    pub fn ending(&self) -> Option<&[Segment]> {
        let snapshot = matches!(self.format, Format::SnapshotPickle | Format::SnapshotJson);
        (snapshot && self.cut.is_none_or(|cut| cut.ends_known)).then_some(&self.segments)
    }

    /// Events of all devices.
    #[must_use]
    pub fn all_events(&self) -> u64 {
        self.events.iter().sum()
    }
}

/// Takes events as they are read; its error ends the reading ([`ReadError::stop`]).
pub type Sink<'a> = dyn FnMut(Event) -> Result<(), ReadError> + 'a;

/// As [`Sink`], with where each event came from.
pub type OriginSink<'a> = dyn FnMut(Event, Origin, &Origins) -> Result<(), ReadError> + 'a;

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

fn open(path: &Path) -> Result<std::fs::File, ReadError> {
    let file = std::fs::File::open(path).map_err(|error| ReadError::at(Place::Whole, Problem::Io(error)))?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(ReadError::at(Place::Whole, Problem::Directory));
    }
    Ok(file)
}

fn named<T>(path: &Path, read: impl FnOnce() -> Result<T, ReadError>) -> Result<T, ReadError> {
    read().map_err(|error| ReadError { path: path.to_owned(), ..error })
}

/// Who takes the events, and what is kept of where they came from.
pub(super) struct Receiver<'s> {
    sink: &'s mut OriginSink<'s>,
    pub(super) origins: Origins,
    /// Whether anybody wants to know where they came from.
    pub(super) wants_origins: bool,
}

impl Receiver<'_> {
    pub(super) fn take(&mut self, event: Event, origin: Origin) -> Result<(), ReadError> {
        (self.sink)(event, origin, &self.origins)
    }
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

/// A free in a format that does not say when it completed: at once.
pub(super) fn emit_free(event: Event, summary: &mut Summary, sink: &mut Sink<'_>) -> Result<(), ReadError> {
    for action in [Action::FreeRequested, Action::FreeCompleted] {
        summary.count(event.device);
        sink(Event { action, ..event })?;
    }
    Ok(())
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
    } else if text.lines().any(|line| matches!(stalloc::parse(line), Some(Ok(_)))) {
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
