//! A run's history in the formats of others, from `trace.jsonl` and `driver_calls.jsonl`.
//!
//! The trace says what the allocator was asked for, the driver calls what it took from the device; both are on the
//! run's clock, and together they are a history with segments. They are read back from the record at the end, so a run
//! of any length takes no more memory than its live blocks.

mod roles;

use crate::calls::CallLine;
use crate::error::{Result, TrainError};
use crate::record::{DRIVER_CALLS, TRACE};
use roles::Roles;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use vramlab::budget::OverBudget;
use vramlab::histories::formats::{
    Action, Ending, Event, Export, Origin, ReadError, ReadOptions, Segment, TraceWriter, WriteError, WriteProblem,
    jsonl_placements, read,
};
use vramlab::histories::replay::snapshot_settings;
use vramlab::output::{OutputError, OutputProblem};
use vramlab::{CallKind, Snapshot};

/// Tracks of a timeline: the driver calls, and the ranges in which they were made, such as steps and layers.
const TRACK: &str = "driver calls";
const RANGES: &str = "steps and layers";

/// Merges a run's trace with its driver calls.
struct Merge<'a> {
    calls: Calls,
    /// Size and stream of the segments that are held.
    segments: BTreeMap<u64, (u64, u64)>,
    /// The ranges around the last call, from the outside in.
    ranges: Vec<Range>,
    /// Frees of segments by the operation under way, for after it.
    held_back: Vec<Event>,
    roles: Roles,
    writers: &'a mut [Box<dyn TraceWriter>],
}

/// A range of a run, from the first call in it to the last so far.
struct Range {
    name: String,
    start_ns: u64,
    end_ns: u64,
}

/// Maximum length of a driver call's line, in bytes; longer lines are truncated and are not calls.
const LONGEST_CALL: u64 = 1 << 16;

/// Maximum number of calls searched for the next work.
const MOST_AHEAD: usize = 256;

/// The calls in order, those that come next ahead.
struct Calls {
    lines: BufReader<File>,
    text: String,
    ahead: VecDeque<CallLine>,
}

impl Calls {
    fn open(path: &Path) -> std::io::Result<Self> {
        let lines = BufReader::new(File::open(path)?);
        Ok(Self { lines, text: String::new(), ahead: VecDeque::new() })
    }

    /// Reads one more; false at the end.
    fn read(&mut self) -> std::io::Result<bool> {
        self.text.clear();
        if (&mut self.lines).take(LONGEST_CALL).read_line(&mut self.text)? == 0 {
            return Ok(false);
        }
        self.ahead.push_back(serde_json::from_str(&self.text)?);
        Ok(true)
    }

    /// The next call that had ended by then.
    fn until(&mut self, time_ns: u64) -> std::io::Result<Option<CallLine>> {
        if self.ahead.is_empty() && !self.read()? {
            return Ok(None);
        }
        let ended = |call: &CallLine| call.start_ns.saturating_add(call.total_ns) <= time_ns;
        Ok(if self.ahead.front().is_some_and(ended) { self.ahead.pop_front() } else { None })
    }

    /// The first call that queues work and had not ended by then.
    fn work_after(&mut self, time_ns: u64) -> std::io::Result<Option<&CallLine>> {
        let mut at = 0;
        while at < MOST_AHEAD {
            if at == self.ahead.len() && !self.read()? {
                break;
            }
            let call = &self.ahead[at];
            if roles::is_work(call) && call.start_ns.saturating_add(call.total_ns) > time_ns {
                return Ok(self.ahead.get(at));
            }
            at += 1;
        }
        Ok(None)
    }
}

/// Errors of an export: reading the run's files, or writing.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Calls(#[from] std::io::Error),
    #[error(transparent)]
    Origins(#[from] OverBudget),
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl Merge<'_> {
    fn write(&mut self, event: &Event, origin: Origin) -> std::result::Result<(), Fault> {
        for writer in self.writers.iter_mut() {
            writer.event_from(event, origin, &self.roles.origins)?;
        }
        Ok(())
    }

    /// Passes on the calls that were made by the end of an operation. A call takes time, so those that ended by the
    /// end of this operation and not by the end of the one before were made in this one.
    fn calls_until(&mut self, operation: &Event, origin: Origin) -> std::result::Result<(), Fault> {
        while let Some(call) = self.calls.until(operation.time_ns)? {
            let name = call.kernel.as_ref().unwrap_or(&call.call);
            for writer in self.writers.iter_mut() {
                writer.slice(TRACK, name, call.start_ns, call.total_ns)?;
            }
            self.range(&call)?;
            let Some(addr) = call.addr.filter(|_| call.ok) else { continue };
            let time_ns = call.start_ns.saturating_add(call.total_ns);
            let segment = Event { action: Action::SegmentAlloc, addr, time_ns, ..*operation };
            if call.call == CallKind::MemAlloc.name() {
                let bytes = call.bytes.unwrap_or(0);
                self.segments.insert(addr, (bytes, operation.stream));
                self.write(&Event { bytes, ..segment }, origin)?;
            } else if call.call == CallKind::MemFree.name() {
                let Some((bytes, stream)) = self.segments.remove(&addr) else { continue };
                let free = Event { action: Action::SegmentFree, bytes, stream, ..segment };
                // An allocator that gives memory back in a free does so after it has let go of the block.
                let inside = operation.action == Action::FreeRequested
                    && operation.addr.checked_sub(addr).is_some_and(|offset| offset < bytes);
                if inside {
                    self.held_back.push(Event { time_ns: operation.time_ns, ..free });
                } else {
                    self.write(&free, Origin::default())?;
                }
            }
        }
        Ok(())
    }

    /// Takes note of the ranges around a call, and writes those that ended before it.
    fn range(&mut self, call: &CallLine) -> std::result::Result<(), Fault> {
        let names: Vec<&str> = call.path.split('/').filter(|name| !name.is_empty()).collect();
        let same = self.ranges.iter().zip(&names).take_while(|(range, name)| range.name == **name).count();
        self.close(same)?;
        let (start_ns, end_ns) = (call.start_ns, call.start_ns.saturating_add(call.total_ns));
        self.ranges.iter_mut().for_each(|range| range.end_ns = end_ns);
        let opened = names[same..].iter().map(|name| Range { name: (*name).to_owned(), start_ns, end_ns });
        self.ranges.extend(opened);
        Ok(())
    }

    /// Writes the innermost ranges, until this many remain.
    fn close(&mut self, left: usize) -> std::result::Result<(), Fault> {
        for range in self.ranges.drain(left..).rev() {
            for writer in self.writers.iter_mut() {
                writer.slice(RANGES, &range.name, range.start_ns, range.end_ns - range.start_ns)?;
            }
        }
        Ok(())
    }

    /// Writes the range in which a block was requested: the range of the next driver call, which is mostly its first
    /// use.
    fn say_where(&mut self) {
        let path = self.calls.ahead.front().map_or("", |call| call.path.as_str());
        let of = |kind: &str| path.split('/').find(|name| name.starts_with(kind));
        let (step, layer) = (of("step"), of("layer"));
        let mut arguments = vec![("range", path)];
        arguments.extend(step.map(|step| ("step", step)));
        arguments.extend(layer.map(|layer| ("layer", layer)));
        // The step is an argument; blocks of the same part of each step go by the same name.
        let part: Vec<&str> =
            path.split('/').filter(|name| !name.starts_with("step") && !name.starts_with("epoch")).collect();
        let part = part.join("/");
        if !path.is_empty() {
            self.writers.iter_mut().for_each(|writer| writer.say(&part, &arguments));
        }
    }

    fn event(&mut self, event: &Event) -> std::result::Result<(), Fault> {
        let mut origin = Origin::default();
        match event.action {
            Action::Alloc => {
                let work = self.calls.work_after(event.time_ns)?;
                origin = self.roles.allocated(event, work)?;
            }
            Action::FreeRequested => self.roles.freed(event.addr),
            _ => {}
        }
        if event.action != Action::FreeCompleted {
            self.calls_until(event, origin)?;
        }
        if event.action == Action::Alloc {
            self.say_where();
        }
        self.write(event, origin)?;
        if event.action == Action::FreeCompleted {
            for free in std::mem::take(&mut self.held_back) {
                self.write(&free, Origin::default())?;
            }
        }
        Ok(())
    }
}

/// Writes the history of a run into its record, in each of these formats.
///
/// # Errors
/// [`TrainError::Record`] when the run's own files cannot be read back, [`TrainError::Output`] when the exports cannot be
/// written; none of them is then left half-written.
pub(crate) fn write(
    directory: &Path,
    exports: &[Export],
    end_ns: u64,
    snapshot: Option<&Snapshot>,
    settings: &serde_json::Value,
) -> Result<()> {
    let failed = |path: &Path, error: std::io::Error| TrainError::Record { path: path.display().to_string(), error };
    let unwritten = |WriteError { path, problem }: WriteError| {
        let problem = match problem {
            WriteProblem::Output(problem) => problem,
            other => OutputProblem::Io(std::io::Error::other(other)),
        };
        TrainError::Output(OutputError { path, problem })
    };
    let paths: Vec<_> = exports.iter().map(|export| directory.join(export.file_name())).collect();
    let mut writers = Vec::new();
    for (export, path) in exports.iter().zip(&paths) {
        writers.push(export.create(path).map_err(unwritten)?);
    }
    let calls = directory.join(DRIVER_CALLS);
    let mut merge = Merge {
        calls: Calls::open(&calls).map_err(|error| failed(&calls, error))?,
        segments: BTreeMap::new(),
        ranges: Vec::new(),
        held_back: Vec::new(),
        roles: Roles::new(),
        writers: &mut writers,
    };
    let mut fault = None;
    let read = read(&directory.join(TRACE), &ReadOptions::default(), &mut |event| {
        merge.event(&event).map_err(|error| {
            fault = Some(error);
            ReadError::stop("not written")
        })
    });
    let last = Event { action: Action::Snapshot, device: 0, addr: 0, bytes: 0, stream: 0, time_ns: end_ns };
    let ended = match (fault, read) {
        (Some(fault), _) => Err(fault),
        // A run that ended before its first operation has an empty trace.
        (None, Err(error)) if !matches!(error.problem, vramlab::histories::formats::Problem::Empty) => {
            return Err(failed(&error.path.clone(), std::io::Error::other(error)));
        }
        _ => merge
            .calls_until(&last, Origin::default())
            .and_then(|()| merge.close(0))
            .and_then(|()| Ok(merge.roles.finish(end_ns)?)),
    };
    ended.map_err(|fault| match fault {
        Fault::Calls(error) => failed(&calls, error),
        Fault::Origins(over) => failed(&calls, std::io::Error::other(over)),
        Fault::Write(error) => unwritten(error),
    })?;
    let origins = merge.roles.origins;
    let segments = snapshot.map(|snapshot| Segment::from_snapshot(snapshot, 0)).unwrap_or_default();
    let settings = snapshot_settings(settings);
    let ending =
        Ending { segments: &segments, allocator_settings: Some(&settings), devices: 1, origins: Some(&origins) };
    if exports.contains(&Export::Perfetto) {
        let trace = directory.join(TRACE);
        let served = jsonl_placements(&trace).map_err(|error| failed(&trace, error))?;
        writers.iter_mut().for_each(|writer| writer.served(0, served.clone()));
    }
    for writer in writers {
        writer.finish(&ending).map_err(unwritten)?;
    }
    Ok(())
}
