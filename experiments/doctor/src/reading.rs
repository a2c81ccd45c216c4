//! What reading histories may take, and what becomes of those that cannot be read.

use clap::Args;
use serde::Serialize;
use std::path::Path;
use terminal::fail;
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

    /// The same for a reading that keeps all events: where nothing was chosen, up to one and a half times a file that is
    /// larger than the default.
    pub(crate) fn keeping(&self, file: &Path) -> ReadOptions {
        let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        self.within(Budget::DEFAULT.max(bytes.saturating_add(bytes / 2)))
    }

    fn within(&self, default: u64) -> ReadOptions {
        let bytes = self.read_memory.map_or(default, |bytes| bytes.0);
        ReadOptions { format: None, budget: Budget::new(bytes) }
    }
}

/// So much memory is for all readings together, and so much is taken by one of a small file.
const TOGETHER: u64 = 8 << 30;
const SMALL: u64 = 64 << 20;

/// How many of these files may be read at a time.
pub(crate) fn at_once<P: AsRef<Path>>(files: &[P]) -> usize {
    let need = |file: &P| {
        let file: &Path = file.as_ref();
        let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
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
    pub(crate) error: String,
}

impl Unread {
    pub(crate) fn of(file: &Path, error: &anyhow::Error) -> Self {
        Self { trace: file.display().to_string(), error: format!("{error:#}") }
    }
}

/// Says in a line each which histories are left out.
pub(crate) fn say_unread(unread: &[Unread]) {
    for unread in unread {
        fail(format_args!("{}; the others go on without it", unread.error));
    }
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
