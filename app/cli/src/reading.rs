//! What reading histories may take, how many are read at a time, and what becomes of those that cannot be read.

use crate::words::counted;
use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use terminal::{Bar, Shard, fail};
use vramlab::Bytes;
use vramlab::budget::Budget;
use vramlab::histories::formats::ReadOptions;

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ReadArgs {
    /// Most memory that reading the history may take [default: 1GiB]
    #[arg(long, value_name = "BYTES")]
    read_memory: Option<Bytes>,
}

impl ReadArgs {
    /// Options with a budget of their own: for one history.
    pub(crate) fn options(&self) -> ReadOptions {
        self.within(Budget::DEFAULT)
    }

    /// Options for a reading that keeps all events: where nothing was chosen, up to one and a half times a file that is larger
    /// than the default.
    pub(crate) fn keeping(&self, file: &Path) -> ReadOptions {
        let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        self.within(Budget::DEFAULT.max(bytes.saturating_add(bytes / 2)))
    }

    fn within(&self, default: u64) -> ReadOptions {
        let bytes = self.read_memory.map_or(default, |bytes| bytes.0);
        ReadOptions { format: None, budget: Budget::new(bytes) }
    }
}

/// The files that a share of the work holds; without one all.
pub(crate) fn share_of(files: &[PathBuf], shard: Option<Shard>) -> Vec<PathBuf> {
    let mine = |at: usize| shard.is_none_or(|shard| shard.holds(at));
    files.iter().enumerate().filter(|(at, _)| mine(*at)).map(|(_, file)| file.clone()).collect()
}

/// So much memory is for all readings together, and so much is taken by one of a small file.
const TOGETHER: u64 = 8 << 30;
const SMALL: u64 = 64 << 20;

/// How many of these files may be read at a time.
fn at_once<P: AsRef<Path>>(files: &[P]) -> usize {
    let need = |file: &P| {
        let file: &Path = file.as_ref();
        let metadata = std::fs::metadata(file);
        // How much comes through a pipe, or from what the system makes up, is not known.
        if metadata.as_ref().is_ok_and(|metadata| !metadata.is_file() || metadata.len() == 0) {
            return Budget::DEFAULT;
        }
        let bytes = metadata.map_or(0, |metadata| metadata.len());
        // Snapshots become a tenth to a thirtieth when they are packed.
        let packed = file.extension().is_some_and(|end| end == "xz" || end == "gz");
        bytes.saturating_mul(if packed { 45 } else { 2 }).max(SMALL)
    };
    let most = files.iter().map(need).max().unwrap_or(SMALL);
    usize::try_from(TOGETHER / most).unwrap_or(1).max(1)
}

/// One of several histories that cannot be read.
#[derive(Debug, Serialize)]
pub(crate) struct Unread {
    pub(crate) trace: String,
    /// What is wrong with it.
    pub(crate) error: String,
}

/// Does `work` for each history, at most as many at a time as there are processors and memory for. One for which it fails is
/// left out, with a line that says so.
///
/// # Errors
/// It fails for all of them.
pub(crate) fn each<T: Send>(
    what: &str,
    files: &[PathBuf],
    work: impl Fn(&Path) -> Result<T> + Sync,
) -> Result<(Vec<T>, Vec<Unread>)> {
    let bar = Bar::new(files.len() as u64, "{bar:30} {msg} {pos}/{len} [{elapsed} left {eta}]");
    bar.message(what);
    let done = in_parallel(cores().min(at_once(files)), files, |file| {
        let found = work(file);
        bar.advance(1);
        Ok(found.map_err(|error| Unread { trace: file.display().to_string(), error: format!("{error:#}") }))
    })?;
    bar.clear();
    let (mut read, mut unread) = (Vec::new(), Vec::new());
    for found in done {
        match found {
            Ok(found) => read.push(found),
            Err(error) => unread.push(error),
        }
    }
    if let (true, Some(first)) = (read.is_empty(), unread.first()) {
        bail!("none of the {} could be read; {}", counted(files.len() as u64, "history"), first.error);
    }
    for unread in &unread {
        fail(format_args!("{}; the others go on without it", unread.error));
    }
    Ok((read, unread))
}

/// Does `work` for each item on so many threads, until it fails for one; results in the order of the items.
pub(crate) fn in_parallel<T: Sync, R: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        while let Some((at, item)) = Some(next.fetch_add(1, Relaxed)).and_then(|at| Some((at, items.get(at)?))) {
            let result = work(item);
            if result.is_err() {
                next.store(items.len(), Relaxed);
            }
            done.lock().unwrap_or_else(PoisonError::into_inner).insert(at, result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, items.len().max(1)) {
            scope.spawn(work);
        }
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// Threads of this machine.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_file_may_take_half_of_it_more() {
        let folder = tempfile::tempdir().unwrap();
        let of = |bytes: u64| {
            let path = folder.path().join("history");
            // Nothing of it is written.
            std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
            ReadArgs::default().keeping(&path).budget.limit()
        };
        assert_eq!((of(0), of(3 << 20), of(4 << 30)), (1 << 30, 1 << 30, 6 << 30));
        let given = ReadArgs { read_memory: Some(Bytes(5 << 20)) };
        assert_eq!(given.keeping(folder.path()).budget.limit(), 5 << 20);
    }

    #[test]
    fn no_more_files_are_read_at_a_time_than_memory_is_there_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: u64| {
            let path = folder.path().join(name);
            std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
            path
        };
        let (small, large, packed) = (file("a.pickle", 9), file("b.pickle", 1 << 30), file("c.pickle.xz", 1 << 27));
        assert_eq!(at_once(&[&small]), 128);
        assert_eq!(at_once(&[&small, &large]), 4);
        assert_eq!(at_once(&[&small, &packed]), 1);
    }
}
