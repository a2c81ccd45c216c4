//! The reader of recordings: its memory budget, one pass over a file, and several files in parallel.

use crate::gpus::{Gpus, Tallies};
use crate::words::counted;
use crate::{nsight, oom};
use anyhow::{Error, Result, anyhow, bail};
use clap::Args;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use terminal::{Bar, Shard, command, fail, quoted};
use vramlab::Bytes;
use vramlab::budget::Budget;
use vramlab::histories::formats::{
    Event, Origin, Origins, Problem, ReadError, ReadOptions, Summary, read, read_origins,
};
use vramlab::histories::replay::ReplayError;

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ReadArgs {
    /// Memory limit for reading the recording [default: 1GiB]
    #[arg(long, value_name = "BYTES")]
    read_memory: Option<Bytes>,
}

impl ReadArgs {
    /// Options for one recording, with a separate budget.
    pub(crate) fn options(&self) -> ReadOptions {
        self.within(Budget::DEFAULT)
    }

    /// Options for a reader that keeps all events: without `--read-memory`, one and a half times the file size if that is above
    /// the default.
    pub(crate) fn keeping(&self, file: &Path) -> ReadOptions {
        let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        self.within(Budget::DEFAULT.max(bytes.saturating_add(bytes / 2)))
    }

    fn within(&self, default: u64) -> ReadOptions {
        let bytes = self.read_memory.map_or(default, |bytes| bytes.0);
        ReadOptions { format: None, budget: Budget::new(bytes) }
    }
}

/// A value that [`read_gpu`] builds from the events of a GPU.
pub(crate) trait FromEvents: Sized {
    /// Whether it needs stack frames, categories and annotations, which only snapshots have.
    const ORIGINS: bool;

    /// Without events. Claims its memory from `budget`.
    fn begin(gpu: u16, budget: &Budget) -> Self;

    /// Takes the next event of the GPU.
    ///
    /// # Errors
    /// The event contradicts earlier ones, or the budget is used up.
    fn push(&mut self, event: &Event, origin: Origin) -> Result<(), ReplayError>;
}

/// One GPU of a file.
pub(crate) struct OneGpu<T> {
    pub(crate) summary: Summary,
    /// Empty unless [`FromEvents::ORIGINS`].
    pub(crate) origins: Origins,
    /// Which GPU it is and why, and the peaks of the others.
    pub(crate) gpus: Gpus,
    /// Built from its events, or the first event that contradicts earlier ones.
    pub(crate) events: Result<T, ReplayError>,
}

/// Reads a file once. Of several GPUs it returns `gpu`, or without that the one that [`Tallies::choose`] names. The choice is
/// made at the end, so until then the events of all candidates share the budget.
///
/// # Errors
/// The file cannot be read within the budget, or `gpu` was named and its events contradict each other.
pub(crate) fn read_gpu<T: FromEvents>(path: &Path, gpu: Option<u16>, options: &ReadOptions) -> Result<OneGpu<T>> {
    let budget = &options.budget;
    let mut tallies = Tallies::default();
    let mut candidates: BTreeMap<u16, Result<T, ReplayError>> = BTreeMap::new();
    let mut take = |event: Event, origin: Origin| {
        tallies.take(&event);
        if gpu.is_some_and(|gpu| gpu != event.device) {
            return Ok(());
        }
        let candidate = candidates.entry(event.device).or_insert_with(|| Ok(T::begin(event.device, budget)));
        let Ok(events) = candidate else { return Ok(()) };
        match events.push(&event, origin) {
            // A contradiction matters only if its GPU is chosen.
            Err(error @ ReplayError::Event { .. }) if gpu.is_none() => *candidate = Err(error),
            pushed => pushed.map_err(ReadError::stop)?,
        }
        Ok(())
    };
    let read = match T::ORIGINS {
        true => read_origins(path, options, &mut |event, origin, _| take(event, origin)),
        false => read(path, options, &mut |event| take(event, Origin::default()))
            .map(|summary| (summary, Origins::new(budget))),
    };
    let (summary, origins) = read.map_err(|error| other_command(path, error))?;
    warn_of_missing(path, &summary);
    let gpus = tallies.choose(gpu, &summary);
    let events = candidates.remove(&gpus.gpu).unwrap_or_else(|| Ok(T::begin(gpus.gpu, budget)));
    Ok(OneGpu { summary, origins, gpus, events })
}

/// The error of a file that cannot be read as a recording, with the command for it if it is something else that `vramlab` reads.
fn other_command(path: &Path, error: ReadError) -> Error {
    let (kind, name) = match nsight::Format::new(path) {
        Some(format) => (format.words(), "nsight"),
        None if oom::is_message(path) => ("an error text", "oom"),
        None if matches!(error.problem, Problem::UnknownFormat) => {
            return anyhow!("{error}; a capture of Nsight Systems (.sqlite, .nsys-rep) is for vramlab nsight");
        }
        None => return error.into(),
    };
    let next = command("vramlab", &format!("{name} {}", quoted(&path.display().to_string())));
    anyhow!("{}: {kind} and not a recording; use: {next}", path.display())
}

/// Warns once for each file that was cut short.
pub(crate) fn warn_of_cut(path: &Path, summary: &Summary) {
    warn_once(path, summary.cut.map(|cut| cut.to_string()));
}

/// As [`warn_of_cut`], and of events of unknown actions.
fn warn_of_missing(path: &Path, summary: &Summary) {
    warn_once(path, summary.cut.map(|cut| cut.to_string()).into_iter().chain(summary.unknown_events()));
}

/// Warns of a file. Some commands read a file more than once.
fn warn_once(path: &Path, warnings: impl IntoIterator<Item = String>) {
    static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let mut warnings = warnings.into_iter().peekable();
    if warnings.peek().is_some() && WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned()) {
        warnings.for_each(|warning| terminal::say(&format!("warning: {}: {warning}", path.display())));
    }
}

/// The files of one shard, or all files.
///
/// # Errors
/// The shard has no file.
pub(crate) fn share_of(files: &[PathBuf], shard: Option<Shard>) -> Result<Vec<PathBuf>> {
    let Some(shard) = shard else { return Ok(files.to_vec()) };
    let share: Vec<PathBuf> =
        files.iter().enumerate().filter(|(at, _)| shard.holds(*at)).map(|(_, file)| file.clone()).collect();
    if share.is_empty() {
        let are = if files.len() == 1 { "is" } else { "are" };
        let recordings = counted(files.len() as u64, "recording");
        bail!("--shard {shard}: there {are} {recordings}; none is left for this share");
    }
    Ok(share)
}

/// Memory for all files that are read in parallel.
const TOTAL_MEMORY: u64 = 8 << 30;
/// Memory for a small file.
const SMALL: u64 = 64 << 20;

/// Number of files that may be read in parallel.
fn parallel_reads<P: AsRef<Path>>(files: &[P]) -> usize {
    let need = |file: &P| {
        let file: &Path = file.as_ref();
        let metadata = std::fs::metadata(file);
        // The size of a pipe or a virtual file is unknown.
        if metadata.as_ref().is_ok_and(|metadata| !metadata.is_file() || metadata.len() == 0) {
            return Budget::DEFAULT;
        }
        let bytes = metadata.map_or(0, |metadata| metadata.len());
        // Compressed snapshots have a tenth to a thirtieth of their size.
        let packed = file.extension().is_some_and(|end| end == "xz" || end == "gz");
        bytes.saturating_mul(if packed { 45 } else { 2 }).max(SMALL)
    };
    let largest = files.iter().map(need).max().unwrap_or(SMALL);
    usize::try_from(TOTAL_MEMORY / largest).unwrap_or(1).max(1)
}

/// A file that cannot be read, of several.
#[derive(Debug, Serialize)]
pub(crate) struct Unread {
    pub(crate) trace: String,
    /// Why it cannot be read.
    pub(crate) error: String,
}

/// Does `work` for each recording, as many in parallel as processors and memory allow. Reports and leaves out recordings for
/// which it fails.
///
/// # Errors
/// It fails for all of them.
pub(crate) fn each<T: Send>(
    message: &str,
    files: &[PathBuf],
    work: impl Fn(&Path) -> Result<T> + Sync,
) -> Result<(Vec<T>, Vec<Unread>)> {
    let bar = Bar::new(files.len() as u64, "{bar:30} {msg} {pos}/{len} [{elapsed} left {eta}]");
    bar.message(message);
    let results = in_parallel(cores().min(parallel_reads(files)), files, |file| {
        let result = work(file);
        bar.advance(1);
        Ok(result.map_err(|error| Unread { trace: file.display().to_string(), error: format!("{error:#}") }))
    })?;
    bar.clear();
    let (mut read, mut unread) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(value) => read.push(value),
            Err(error) => unread.push(error),
        }
    }
    if let (true, Some(first)) = (read.is_empty(), unread.first()) {
        bail!("none of the {} could be read; {}", counted(files.len() as u64, "recording"), first.error);
    }
    for unread in &unread {
        fail(format_args!("{}; continuing without it", unread.error));
    }
    Ok((read, unread))
}

/// Does `work` for each item on `threads` threads, until it fails for one. Returns the results in the order of the items.
pub(crate) fn in_parallel<T: Sync, R: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        while let Some((at, item)) = Some(next.fetch_add(1, Relaxed)).and_then(|at| Some((at, items.get(at)?))) {
            let result = work(item);
            if result.is_err() {
                next.store(items.len(), Relaxed);
            }
            results.lock().unwrap_or_else(PoisonError::into_inner).insert(at, result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, items.len().max(1)) {
            scope.spawn(work);
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// Number of threads of this machine.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_of_a_large_file_is_one_and_a_half_times_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let of = |bytes: u64| {
            let path = folder.path().join("history");
            // The file is sparse.
            std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
            ReadArgs::default().keeping(&path).budget.limit()
        };
        assert_eq!((of(0), of(3 << 20), of(4 << 30)), (1 << 30, 1 << 30, 6 << 30));
        let explicit = ReadArgs { read_memory: Some(Bytes(5 << 20)) };
        assert_eq!(explicit.keeping(folder.path()).budget.limit(), 5 << 20);
    }

    #[test]
    fn parallel_reads_are_limited_by_total_memory() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: u64| {
            let path = folder.path().join(name);
            std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
            path
        };
        let (small, large, packed) = (file("a.pickle", 9), file("b.pickle", 1 << 30), file("c.pickle.xz", 1 << 27));
        assert_eq!(parallel_reads(&[&small]), 128);
        assert_eq!(parallel_reads(&[&small, &large]), 4);
        assert_eq!(parallel_reads(&[&small, &packed]), 1);
    }
}
