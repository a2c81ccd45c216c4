//! Locks of an experiment's directory: one runner holds it, or one for each shard.
//!
//! The locks are the operating system's, on files next to the directory: they are released when the process that holds
//! them ends for any reason. A file is removed at the end; one that a killed runner left has no effect. A runner holds
//! the directory's gate while it takes a lock or checks the others, so no other runner interferes.

use crate::repository;
use anyhow::{Context, Result, bail};
use fs4::{FileExt, TryLockError};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use terminal::Shard;
use trainer::provenance::Job;
use vramlab::input;

/// Number of tries for a lock that an observer may hold for a moment, and the interval between them.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(5);

/// The right to write to an experiment's directory, or to a shard's runs in it. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: File,
}

/// The process that holds a lock, as named in the lock's file.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Holder {
    pub(crate) process: u32,
    /// Host, as in a record's provenance.
    pub(crate) host_hash: Option<String>,
    pub(crate) started_at: String,
    /// The Slurm job, if any.
    pub(crate) job: Option<Job>,
}

impl Holder {
    fn this() -> Self {
        let provenance = super::record::provenance();
        let (host_hash, job) = (provenance.host_hash, provenance.job);
        Self { process: std::process::id(), host_hash, started_at: trainer::provenance::now(), job }
    }
}

/// A lock's file.
#[derive(Debug)]
pub(crate) struct Found {
    /// `None`: a runner of all runs.
    pub(crate) shard: Option<Shard>,
    /// Whether a runner holds the lock; if not, its runner was killed.
    pub(crate) held: bool,
    pub(crate) holder: Option<Holder>,
    path: PathBuf,
}

/// Result of locking a file.
enum Taken {
    Ours(File),
    Held,
    /// Another runner has removed the file meanwhile.
    Gone,
    /// The file system does not support locks.
    Unsupported,
}

/// `DIR` and `<name>` of `DIR/<name>`.
fn parts(folder: &Path) -> Result<(&Path, String)> {
    match (folder.parent(), folder.file_name()) {
        (Some(out), Some(name)) => Ok((out, name.to_string_lossy().into_owned())),
        _ => bail!("{} is not a directory that can be created", folder.display()),
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)
}

/// Locks an open file. By a trait: the standard library's method is newer than the oldest Rust that builds this.
fn take(file: File, path: &Path, lock: impl Fn(&File) -> Result<(), TryLockError>) -> Result<Taken> {
    match lock(&file) {
        // The previous holder may have removed the file between the two calls; a lock on that one is not a lock.
        Ok(()) if !is_there(&file, path) => Ok(Taken::Gone),
        Ok(()) => Ok(Taken::Ours(file)),
        Err(TryLockError::WouldBlock) => Ok(Taken::Held),
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => Ok(Taken::Unsupported),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

/// The directory's gate, once it is free: a runner holds it while it checks the locks. `None` on a file system without
/// locks.
fn gate(folder: &Path) -> Result<Option<Lock>> {
    let (out, name) = parts(folder)?;
    let path = out.join(format!(".{name}.gate"));
    loop {
        let file = open(&path).with_context(|| format!("cannot write {}", path.display()))?;
        match take(file, &path, |file| FileExt::lock(file).map_err(TryLockError::Error))? {
            Taken::Ours(file) => return Ok(Some(Lock { path, _file: file })),
            Taken::Gone | Taken::Held => {}
            Taken::Unsupported => {
                // If removing fails, the only effect is a leftover file.
                let _ = std::fs::remove_file(&path);
                return Ok(None);
            }
        }
    }
}

/// Does something to an experiment's directory that no other runner should see incomplete.
pub(crate) fn alone<T>(folder: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _gate = gate(folder)?;
    work()
}

/// Takes the lock of `DIR/<name>`, or of a shard of it, and creates `DIR` for it; `None` on a file system without
/// locks.
///
/// # Errors
///
/// Another runner of the same runs is active, or one with another number of shards; or the lock's file cannot be
/// created.
pub(crate) fn lock(folder: &Path, shard: Option<Shard>) -> Result<Option<Lock>> {
    let (out, name) = parts(folder)?;
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let Some(_gate) = gate(folder)? else { return Ok(None) };
    let Some(found) = look(folder)? else { return Ok(None) };
    let locked: Vec<Option<Shard>> = found.iter().filter(|found| found.held).map(|found| found.shard).collect();
    if let Some(who) = in_the_way(&locked, shard) {
        bail!(
            "another run is at work in {}{who}; wait until it has ended, or choose another directory with -o",
            folder.display()
        );
    }
    // Files that killed runners left for this number of shards show `status` which shards exist; others are removed.
    let stays = |found: &Found| found.held || shard.is_some_and(|new| found.shard.is_some_and(|old| old.of == new.of));
    for left in found.iter().filter(|found| !stays(found)) {
        // If removing fails, the only effect is a leftover file.
        let _ = std::fs::remove_file(&left.path);
    }
    let path = out.join(file_name(&name, shard));
    let fails = || format!("cannot write {}", path.display());
    // The gate excludes other runners; `status` without write permission has no gate and holds the lock for a moment.
    for _ in 0..TRIES {
        match take(open(&path).with_context(fails)?, &path, FileExt::try_lock)? {
            Taken::Ours(mut file) => {
                let text = serde_json::to_string(&Holder::this()).with_context(fails)?;
                file.set_len(0).and_then(|()| file.write_all(text.as_bytes())).with_context(fails)?;
                return Ok(Some(Lock { path, _file: file }));
            }
            Taken::Unsupported => return Ok(None),
            Taken::Held | Taken::Gone => std::thread::sleep(PAUSE),
        }
    }
    bail!("cannot lock {}: another program holds it", path.display())
}

fn file_name(name: &str, shard: Option<Shard>) -> String {
    shard.map_or_else(|| format!(".{name}.lock"), |shard| format!(".{name}.{}-of-{}.lock", shard.number, shard.of))
}

/// The active runners that conflict with a new one; words that follow the directory's name.
fn in_the_way(held: &[Option<Shard>], shard: Option<Shard>) -> Option<String> {
    let list = |shards: &[Shard]| shards.iter().map(ToString::to_string).collect::<Vec<String>>().join(", ");
    let shards: Vec<Shard> = held.iter().copied().flatten().collect();
    let has_unsharded = shards.len() < held.len();
    match shard {
        None if has_unsharded => Some(String::new()),
        None if !shards.is_empty() => Some(format!(", on shard {}", list(&shards))),
        Some(_) if has_unsharded => Some(", on all of its runs".into()),
        Some(new) if shards.contains(&new) => Some(format!(", on the same shard {new}")),
        Some(new) if shards.iter().any(|shard| shard.of != new.of) => Some(format!(
            ", on shard {}: runners that share a directory divide it by the same number, not by {}",
            list(&shards),
            new.of
        )),
        _ => None,
    }
}

/// The files of all locks of a directory.
fn files(folder: &Path) -> Result<Vec<(Option<Shard>, PathBuf)>> {
    let (out, name) = parts(folder)?;
    let entries = if out.exists() { repository::entries(out)? } else { Vec::new() };
    let lock = |path: PathBuf| Some((shard_of(path.file_name()?.to_str()?, &name)?, path));
    let mut files: Vec<(Option<Shard>, PathBuf)> = entries.into_iter().filter_map(lock).collect();
    files.sort_by_key(|(shard, _)| shard.map(|shard| (shard.of, shard.number)));
    Ok(files)
}

/// All locks of a directory, to be called within its gate; `None` where the file system has no locks.
fn look(folder: &Path) -> Result<Option<Vec<Found>>> {
    /// Longer than any holder's text.
    const LONGEST: u64 = 4096;
    let mut locks = Vec::new();
    for (shard, path) in files(folder)? {
        let file = match input::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            file => file.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let mut text = String::new();
        let read = Read::take(&file, LONGEST).read_to_string(&mut text);
        // A file that is being written has no holder yet.
        let holder = read.ok().and_then(|_| serde_json::from_str(&text).ok());
        // A shared lock, for which a read-only file is enough.
        let held = match take(file, &path, FileExt::try_lock_shared)? {
            Taken::Gone => continue,
            Taken::Unsupported => return Ok(None),
            Taken::Held => true,
            Taken::Ours(_) => false,
        };
        locks.push(Found { shard, held, holder, path });
    }
    Ok(Some(locks))
}

/// The shard in a lock file's name; `None` if the file is not of this experiment.
fn shard_of(file_name: &str, name: &str) -> Option<Option<Shard>> {
    let rest = file_name.strip_prefix('.')?.strip_prefix(name)?.strip_suffix(".lock")?;
    if rest.is_empty() {
        return Some(None);
    }
    rest.strip_prefix('.')?.replacen("-of-", "/", 1).parse().ok().map(Some)
}

/// Runners of an experiment's directory: locks that are held, and lock files that killed runners left. `None` where
/// the file system has no locks.
///
/// # Errors
///
/// The directory cannot be read.
pub(crate) fn at_work(folder: &Path) -> Result<Option<Vec<Found>>> {
    // A reader of an idle directory writes nothing to it.
    if files(folder)?.is_empty() {
        return Ok(Some(Vec::new()));
    }
    // A user without write permission reads without the gate.
    let _gate = gate(folder);
    look(folder)
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Remove it before unlocking, so that another runner's file is not removed. A leftover file does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether the path still leads to this open file.
#[cfg(unix)]
fn is_there(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |metadata: &std::fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((file.metadata(), std::fs::metadata(path)), (Ok(open), Ok(named)) if id(&open) == id(&named))
}

/// Other systems do not remove an open file.
#[cfg(not(unix))]
fn is_there(_: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    fn shard(text: &str) -> Option<Shard> {
        Some(text.parse().unwrap())
    }

    fn refused(folder: &Path, shard: Option<Shard>) -> String {
        lock(folder, shard).unwrap_err().to_string()
    }

    #[test]
    fn a_lock_is_held_once_and_leaves_nothing() {
        let temp_dir = tempfile::TempDir::new().unwrap();
        let (folder, other) = (temp_dir.path().join("out/one"), temp_dir.path().join("out/two"));
        let held = lock(&folder, None).unwrap().unwrap();
        let text = refused(&folder, None);
        assert!(text.starts_with("another run is at work in") && text.contains("-o"), "{text}");
        drop(lock(&other, None).unwrap().unwrap());
        drop(held);
        drop(lock(&folder, None).unwrap().unwrap());
        // A file as killed runners leave it.
        std::fs::write(temp_dir.path().join("out/.one.lock"), "").unwrap();
        std::fs::write(temp_dir.path().join("out/.one.2-of-3.lock"), "").unwrap();
        drop(lock(&folder, None).unwrap().unwrap());
        assert_eq!(std::fs::read_dir(temp_dir.path().join("out")).unwrap().count(), 0);
    }

    #[test]
    fn shards_of_one_count_share_a_folder() {
        let temp_dir = tempfile::TempDir::new().unwrap();
        let folder = temp_dir.path().join("one");
        let held: Vec<Lock> = ["1/4", "3/4", "4/4"].map(|text| lock(&folder, shard(text)).unwrap().unwrap()).into();
        for (new, words) in [
            (None, ", on shard 1/4, 3/4, 4/4; "),
            (shard("3/4"), ", on the same shard 3/4; "),
            (shard("2/3"), "divide it by the same number, not by 3; "),
        ] {
            let text = refused(&folder, new);
            assert!(text.contains(words) && text.starts_with("another run is at work in"), "{text}");
        }
        // A directory next to it whose name begins alike.
        drop(lock(&temp_dir.path().join("one.2-of-9"), None).unwrap().unwrap());
        drop(held);
        let whole = lock(&folder, None).unwrap().unwrap();
        assert!(refused(&folder, shard("1/4")).contains(", on all of its runs; "));
        drop(whole);
        drop(lock(&folder, shard("2/3")).unwrap().unwrap());
        assert_eq!(std::fs::read_dir(temp_dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn who_is_at_work_is_told_from_who_was() {
        let temp_dir = tempfile::TempDir::new().unwrap();
        let folder = temp_dir.path().join("one");
        assert!(at_work(&folder).unwrap().unwrap().is_empty());
        let held = lock(&folder, shard("2/3")).unwrap().unwrap();
        std::fs::write(temp_dir.path().join(".one.1-of-3.lock"), "").unwrap();
        for name in [".one.lock.part", ".one.x-of-3.lock", ".one.4-of-3.lock", "one.lock", ".two.lock"] {
            std::fs::write(temp_dir.path().join(name), "").unwrap();
        }
        let found = at_work(&folder).unwrap().unwrap();
        let of: Vec<(Option<Shard>, bool)> = found.iter().map(|found| (found.shard, found.held)).collect();
        assert_eq!(of, [(shard("1/3"), false), (shard("2/3"), true)]);
        assert_eq!(found[1].holder.as_ref().unwrap().process, std::process::id());
        assert!(found[0].holder.is_none());
        // Reading removes nothing.
        assert!(refused(&folder, shard("2/3")).contains("the same shard"));
        drop(held);
    }

    #[test]
    fn of_many_that_come_and_go_one_has_it() {
        let temp_dir = tempfile::TempDir::new().unwrap();
        let (folder, inside) = (temp_dir.path().join("one"), AtomicU32::new(0));
        let had: u32 = std::thread::scope(|scope| {
            let contend = |sharded: bool| {
                let (folder, inside) = (&folder, &inside);
                move || {
                    let mut had = 0;
                    for _ in 0..100 {
                        let Ok(held) = lock(folder, sharded.then(|| "1/2".parse().unwrap())) else { continue };
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "two have it");
                        had += 1;
                        inside.fetch_sub(1, SeqCst);
                        drop(held);
                    }
                    had
                }
            };
            let threads: Vec<_> = (0..4).map(|number| scope.spawn(contend(number % 2 == 0))).collect();
            // An observer does not stop a runner.
            let onlooker = scope.spawn(|| (0..100).for_each(|_| drop(at_work(&folder).unwrap())));
            onlooker.join().unwrap();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(had > 0);
    }
}
