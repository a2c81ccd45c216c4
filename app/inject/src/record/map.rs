//! The record's file as shared memory, and the text of notes beside it.
//!
//! No descriptor stays open. A program may close all descriptors, as daemons do, or put its own files under their numbers: a descriptor
//! of this library would then be one of the program's. Memory stays mapped, and it grows without a descriptor. The notes are opened for
//! each write, and written only if they are the same file still.

use super::{clock, now};
use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Result, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, PoisonError};
use vramlab_histories::calls::{HEADER, MAGIC};

/// Bytes of a record.
const RECORD: u64 = 64;
/// Most records of a process. The file takes room as it fills.
const MOST: u64 = 1 << 26;
/// Records for which room is made at a time.
const CHUNK: u64 = 1 << 14;
/// Part of a limit on addresses (`ulimit -v`) that the record may take: the program needs the remainder.
const PART_OF_ADDRESSES: u64 = 64;
/// Programs that one process may execute one after the other. Each has a record of its own.
const PROGRAMS: u32 = 10_000;

/// A file, by what cannot be another one's while it exists.
type Identity = (u64, u64);

/// The file, mapped.
pub(super) struct Map {
    words: *const AtomicU64,
    bytes: usize,
    /// Records that fit at most.
    most: u64,
    /// Records for which the file has room.
    room: AtomicU64,
    /// Whether the file can have no more room.
    is_full: AtomicBool,
    growing: Mutex<()>,
    file: (PathBuf, Identity),
    notes: Option<(PathBuf, Identity)>,
}

/// A limit of this process.
fn limit(which: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is this function's own and live.
    unsafe { libc::getrlimit(which, &raw mut limit) };
    limit.rlim_cur
}

fn identity(file: &File) -> Result<Identity> {
    file.metadata().map(|file| (file.dev(), file.ino()))
}

fn create(path: &Path) -> Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// A new file `calls-PID.bin` of this process. A program that it executed earlier has left one, or a process of the same number in another
/// container: the next is `calls-PID-2.bin`.
fn create_next(folder: &Path) -> Result<(PathBuf, File)> {
    let pid = std::process::id();
    let first = std::iter::once(format!("calls-{pid}.bin"));
    for name in first.chain((2..=PROGRAMS).map(|number| format!("calls-{pid}-{number}.bin"))) {
        let path = folder.join(name);
        match create(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::other("the process executed too many programs"))
}

/// Maps a file. Pages of a program that locks all its future memory (`mlockall`) would be taken at once: memory that cannot be accessed is
/// not, so that it is mapped thus first.
fn map(file: &File, bytes: usize) -> Result<*mut c_void> {
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    // SAFETY: a new mapping of a file that is as long, at an address of the system's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, file.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    // SAFETY: the mapping was made above, and nothing else knows it.
    unsafe { libc::munlock(at, bytes) };
    // SAFETY: as above.
    if unsafe { libc::mprotect(at, bytes, libc::PROT_READ | libc::PROT_WRITE) } == 0 {
        return Ok(at);
    }
    let error = Error::last_os_error();
    // SAFETY: as above.
    unsafe { libc::munmap(at, bytes) };
    Err(error)
}

impl Map {
    /// Makes the record of this process.
    pub(super) fn make(folder: &Path) -> Result<Self> {
        // CAST: the header is a page. A file above the limit would end the program by a signal.
        let mut most = MOST.min(limit(libc::RLIMIT_FSIZE).saturating_sub(HEADER as u64) / RECORD);
        if most == 0 {
            return Err(Error::other("the limit on file sizes (ulimit -f) leaves no room"));
        }
        most = most.min((limit(libc::RLIMIT_AS) / PART_OF_ADDRESSES / RECORD).max(CHUNK));
        let (path, file) = create_next(folder)?;
        let made = Self::make_in(&path, &file, most);
        // An empty file would be taken for a damaged one.
        made.inspect_err(|_| {
            for path in [&path, &path.with_extension("txt")] {
                let _ = std::fs::remove_file(path);
            }
        })
    }

    fn make_in(path: &Path, file: &File, mut most: u64) -> Result<Self> {
        let (at, bytes) = loop {
            let bytes = HEADER as u64 + most * RECORD;
            file.set_len(bytes)?;
            let bytes = usize::try_from(bytes).map_err(Error::other)?;
            match map(file, bytes) {
                Ok(at) => break (at, bytes),
                // Limits on addresses or locked memory leave room for a shorter record.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN)) && most > CHUNK => {
                    most = CHUNK.max(most / 8);
                }
                Err(error) => return Err(error),
            }
        };
        let notes = path.with_extension("txt");
        let of_notes = create(&notes).and_then(|notes| identity(&notes));
        let map = Self {
            words: at.cast(),
            bytes,
            most,
            room: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            growing: Mutex::new(()),
            file: (path.to_owned(), identity(file)?),
            notes: of_notes.ok().map(|identity| (notes, identity)),
        };
        map.make_room(0, HEADER as u64)?;
        map.word(1).store(u64::from(std::process::id()), Relaxed);
        map.word(2).store(clock(libc::CLOCK_REALTIME).wrapping_sub(now()), Relaxed);
        map.word(0).store(MAGIC, Release);
        Ok(map)
    }

    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: callers name words of the header, or of a record for which there is room. Mapped for ever, aligned as a page is,
        // and never accessed but as atomics.
        unsafe { &*self.words.add(at) }
    }

    /// Whether the file has room for this record.
    pub(super) fn has_room(&self, record: u64) -> bool {
        if record < self.room.load(Acquire) {
            return true;
        }
        if record >= self.most || self.is_full.load(Acquire) {
            return false;
        }
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        while record >= self.room.load(Acquire) {
            let from = self.room.load(Acquire);
            let count = CHUNK.min(self.most - from);
            if self.is_full.load(Acquire) || self.make_room(HEADER as u64 + from * RECORD, count * RECORD).is_err() {
                self.is_full.store(true, Release);
                return false;
            }
            self.room.store(from + count, Release);
        }
        true
    }

    /// Makes room in the file, since a full disk would otherwise end the program by a signal at the first access. The system takes the
    /// pages in one call, which says whether the disk has them, and costs less than a fault for each in the program's calls.
    fn make_room(&self, at: u64, bytes: u64) -> Result<()> {
        let (start, length) = (usize::try_from(at), usize::try_from(bytes));
        let (Ok(start), Ok(length)) = (start, length) else { return Err(ErrorKind::InvalidInput.into()) };
        if start.saturating_add(length) > self.bytes {
            return Err(ErrorKind::InvalidInput.into());
        }
        loop {
            // SAFETY: the range is in the mapping, and the advice changes no contents.
            let code = unsafe {
                libc::madvise(
                    self.words.cast::<u8>().add(start).cast_mut().cast(),
                    length.next_multiple_of(HEADER),
                    libc::MADV_POPULATE_WRITE,
                )
            };
            let error = Error::last_os_error();
            match error.raw_os_error() {
                _ if code == 0 => return Ok(()),
                // A signal of the program came meanwhile.
                Some(libc::EINTR) => {}
                // A kernel before 5.14, or a sandbox that forbids it.
                Some(libc::EINVAL | libc::EPERM | libc::ENOSYS) => return self.make_room_on_disk(at, bytes),
                _ => return Err(error),
            }
        }
    }

    /// The same through the file.
    #[cold]
    fn make_room_on_disk(&self, at: u64, bytes: u64) -> Result<()> {
        let file = reopen(&self.file, OpenOptions::new().write(true))?;
        loop {
            // SAFETY: the descriptor is open and this function's own.
            if unsafe { libc::fallocate(file.as_raw_fd(), 0, at.cast_signed(), bytes.cast_signed()) } == 0 {
                return Ok(());
            }
            let error = Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // A file system without it. Nothing was written there yet.
                Some(libc::EOPNOTSUPP) => break,
                _ => return Err(error),
            }
        }
        let page = [0; HEADER];
        let step = page.len() as u64;
        (0..bytes.div_ceil(step)).try_for_each(|number| {
            let from = number * step;
            let length = usize::try_from((bytes - from).min(step)).unwrap_or(0);
            file.write_all_at(&page[..length], at + from)
        })
    }

    /// Writes lines into the notes, which costs the notes where that cannot be.
    pub(super) fn note(&self, lines: &str) {
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = self.notes.as_ref().and_then(|notes| reopen(notes, OpenOptions::new().append(true)).ok());
        let Some(mut file) = opened else { return };
        let length = file.metadata().map_or(u64::MAX, |file| file.len());
        // CAST: a length in memory. A file above the limit would end the program by a signal.
        if length.saturating_add(lines.len() as u64) <= limit(libc::RLIMIT_FSIZE) {
            let _ = file.write_all(lines.as_bytes());
        }
    }
}

/// Opens a file again. The program may see other files under the same path by now, as after `chroot`.
fn reopen((path, expected): &(PathBuf, Identity), how: &mut OpenOptions) -> Result<File> {
    let file = how.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if identity(&file)? == *expected { Ok(file) } else { Err(ErrorKind::NotFound.into()) }
}
