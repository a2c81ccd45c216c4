//! One reading of a file: its events, GPU by GPU, and which GPU the answer is about.

use crate::gpus::{Gpus, Tallies};
use crate::history::say_cut;
use crate::oom;
use anyhow::{Error, Result, anyhow};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use terminal::{command, quoted};
use vramlab::budget::Budget;
use vramlab::histories::formats::{Event, Origin, Origins, ReadError, ReadOptions, Summary, read, read_origins};
use vramlab::histories::replay::ReplayError;

/// What a command makes of the events of one GPU.
pub(crate) trait Sink: Sized {
    /// Whether it needs the origin of each event. Reading is cheaper without.
    const ORIGINS: bool;

    /// Before the first event. What it holds is claimed from the budget.
    fn new(gpu: u16, budget: &Budget) -> Self;

    /// Takes the next event.
    ///
    /// # Errors
    /// [`ReplayError::Event`] for an event that contradicts those before it; any other error ends the reading.
    fn take(&mut self, event: &Event, origin: Origin) -> Result<(), ReplayError>;
}

/// A file that was read.
pub(crate) struct Scan<S> {
    pub(crate) summary: Summary,
    /// Empty unless the sink needs them.
    pub(crate) origins: Origins,
    pub(crate) gpus: Gpus,
    /// The sink of that GPU, or the first event that contradicts those before it.
    pub(crate) sink: Result<S, ReplayError>,
}

impl<S: Sink> Scan<S> {
    /// Reads a file once. Without `gpu` the GPU is the only one, or of several the one that [`Tallies::choose`] names, which is known
    /// at the end: until then all share the budget of `options`. A file that was cut short gets a warning.
    ///
    /// # Errors
    /// Those of the format, and of a budget that is used up.
    pub(crate) fn read(path: &Path, gpu: Option<u16>, options: &ReadOptions) -> Result<Self> {
        Self::read_recording(path, gpu, options).map_err(|error| redirected(path).unwrap_or_else(|| error.into()))
    }

    fn read_recording(path: &Path, gpu: Option<u16>, options: &ReadOptions) -> Result<Self, ReadError> {
        let mut tallies = Tallies::default();
        let mut sinks: BTreeMap<u16, Result<S, ReplayError>> = BTreeMap::new();
        let mut take = |event: &Event, origin: Origin| {
            tallies.take(event);
            if gpu.is_some_and(|gpu| gpu != event.device) {
                return Ok(());
            }
            let sink = sinks.entry(event.device).or_insert_with(|| Ok(S::new(event.device, &options.budget)));
            let Ok(taking) = sink else { return Ok(()) };
            match taking.take(event, origin) {
                // A contradiction matters only if its GPU is chosen.
                Err(error @ ReplayError::Event { .. }) => *sink = Err(error),
                taken => taken.map_err(ReadError::stop)?,
            }
            Ok(())
        };
        let (summary, origins) = if S::ORIGINS {
            read_origins(path, options, &mut |event, origin, _| take(&event, origin))?
        } else {
            (read(path, options, &mut |event| take(&event, Origin::default()))?, Origins::new(&options.budget))
        };
        say_cut(path, &summary);
        let gpus = tallies.choose(gpu, &summary);
        let sink = sinks.remove(&gpus.gpu).unwrap_or_else(|| Ok(S::new(gpus.gpu, &options.budget)));
        Ok(Self { summary, origins, gpus, sink })
    }
}

/// The command for a file that cannot be read as a recording, because it is something else that `vramlab` knows.
fn redirected(path: &Path) -> Option<Error> {
    let mut magic = [0; 16];
    let sqlite = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file())
        && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
        && &magic == b"SQLite format 3\0";
    let extension = path.extension().and_then(|extension| extension.to_str());
    let (what, name) = match extension {
        _ if sqlite => ("an SQLite database, as Nsight Systems exports captures", "nsight"),
        Some("nsys-rep" | "qdrep") => ("a capture of Nsight Systems", "nsight"),
        _ if oom::is_message(path) => ("an error text", "oom"),
        _ => return None,
    };
    let next = command("vramlab", &format!("{name} {}", quoted(&path.display().to_string())));
    Some(anyhow!("{}: {what} and not a recording; use: {next}", path.display()))
}
