//! One runner at a time in an experiment's folder.
//!
//! The lock is the system's, on a file beside the folder: it goes with the process that holds it, however that ends. The file
//! itself is removed at the end; one that a killed runner has left means nothing.

use anyhow::{Context, Result, bail};
use fs4::{FileExt, TryLockError};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The right to write to an experiment's folder. Dropped, it is given up.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: File,
}

/// Takes the lock of `DIR/<name>`, and makes `DIR` for it; none on a file system that knows no locks.
///
/// # Errors
/// Another runner holds it, or its file cannot be made.
pub(crate) fn lock(folder: &Path) -> Result<Option<Lock>> {
    let (Some(out), Some(name)) = (folder.parent(), folder.file_name()) else {
        bail!("{} is no folder that can be made", folder.display());
    };
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let path = out.join(format!(".{}.lock", name.to_string_lossy()));
    loop {
        let fails = || format!("cannot write {}", path.display());
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path).with_context(fails)?;
        // By its trait: the standard library's own is newer than the oldest Rust that builds this.
        match FileExt::try_lock(&file) {
            // Whoever held it before may have removed the file between the two calls; a lock on that one is none.
            Ok(()) if !is_there(&file, &path) => {}
            Ok(()) => return Ok(Some(Lock { path, _file: file })),
            Err(TryLockError::WouldBlock) => bail!(
                "another run is at work in {}; wait until it has ended, or choose another folder with -o",
                folder.display()
            ),
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => return Ok(None),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
}

/// Whether the path still leads to this open file.
#[cfg(unix)]
fn is_there(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |metadata: &std::fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((file.metadata(), std::fs::metadata(path)), (Ok(open), Ok(named)) if id(&open) == id(&named))
}

/// Other systems do not remove a file that is open.
#[cfg(not(unix))]
fn is_there(_: &File, path: &Path) -> bool {
    path.exists()
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before it is unlocked, so that nobody's else is removed. A file that stays is no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    #[test]
    fn a_lock_is_held_once_and_leaves_nothing() {
        let place = tempfile::TempDir::new().unwrap();
        let (folder, other) = (place.path().join("out/one"), place.path().join("out/two"));
        let held = lock(&folder).unwrap().unwrap();
        let refused = lock(&folder).unwrap_err().to_string();
        assert!(refused.starts_with("another run is at work in") && refused.contains("-o"), "{refused}");
        drop(lock(&other).unwrap().unwrap());
        drop(held);
        drop(lock(&folder).unwrap().unwrap());
        // As a killed runner leaves it.
        std::fs::write(place.path().join("out/.one.lock"), "").unwrap();
        drop(lock(&folder).unwrap().unwrap());
        assert_eq!(std::fs::read_dir(place.path().join("out")).unwrap().count(), 0);
    }

    #[test]
    fn of_many_that_come_and_go_one_has_it() {
        let place = tempfile::TempDir::new().unwrap();
        let (folder, inside) = (place.path().join("one"), AtomicU32::new(0));
        let had: u32 = std::thread::scope(|scope| {
            let contend = || {
                let mut had = 0;
                for _ in 0..300 {
                    let Ok(held) = lock(&folder) else { continue };
                    assert_eq!(inside.fetch_add(1, SeqCst), 0, "two have it");
                    had += 1;
                    inside.fetch_sub(1, SeqCst);
                    drop(held);
                }
                had
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(contend)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(had > 0);
    }
}
