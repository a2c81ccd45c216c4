//! Other experiments on the GPUs of this host.
//!
//! Calls of the driver can take longer while another process calls it for another GPU of the host, so step times of two
//! experiments at once do not compare with those of one. Each runner on a GPU holds a shared lock on one
//! file of the host while it lives; who can lock it alone has no neighbours. The system releases the lock when its
//! process ends for any reason.

use fs4::FileExt;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// The file. TMPDIR can differ between the jobs of a host.
const FILE: &str = "/tmp/vramlab-experiments.lock";

/// This runner among those of the host.
#[derive(Debug)]
pub(crate) struct Neighbours {
    file: Mutex<File>,
    /// Runs that began beside others.
    met: AtomicUsize,
}

impl Neighbours {
    /// From now on others find this runner. `None` where the system has no such locks.
    pub(crate) fn new() -> Option<Self> {
        // Other systems cannot turn a shared lock into an exclusive one.
        if cfg!(unix) { Self::at(Path::new(FILE)) } else { None }
    }

    fn at(path: &Path) -> Option<Self> {
        // A file of another user can be locked, but not be opened for writing.
        let file = File::open(path)
            .or_else(|_| OpenOptions::new().create(true).truncate(false).write(true).open(path))
            .ok()?;
        FileExt::lock_shared(&file).ok()?;
        Some(Self { file: Mutex::new(file), met: AtomicUsize::new(0) })
    }

    /// Whether no other experiment is at work on this host's GPUs. Two runners that ask at the same instant may each
    /// miss the other.
    pub(crate) fn absent(&self) -> bool {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let alone = FileExt::try_lock(&*file).is_ok();
        // A failed attempt has given the shared lock up. If this fails, others no longer find this runner.
        let _ = FileExt::lock_shared(&*file);
        alone
    }

    /// [`Self::absent`], when a run begins.
    pub(crate) fn absent_at_start(&self) -> bool {
        let alone = self.absent();
        self.met.fetch_add(usize::from(!alone), Relaxed);
        alone
    }

    /// How many runs began beside others.
    pub(crate) fn met(&self) -> usize {
        self.met.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    #[test]
    fn a_runner_finds_others_while_they_live() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let one = Neighbours::at(&path).unwrap();
        assert!(one.absent());
        let other = Neighbours::at(&path).unwrap();
        assert!(!one.absent() && !other.absent());
        // A check does not hide the runner that makes it.
        assert!(!one.absent() && !other.absent_at_start());
        drop(one);
        assert!(other.absent_at_start());
        assert_eq!(other.met(), 1);
    }
}
