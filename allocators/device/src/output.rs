//! Output files: each appears under its name when it is complete, or not at all.
//!
//! The output is written to a new file next to the target, `.NAME.xxxxxxxxxx.part`, which is renamed to the target at the end. A
//! writer that fails, or is dropped, removes it. Nothing else in the directory changes: the name of the part is random, and no
//! existing file is opened for it. A killed program leaves it; [`remove_abandoned`] removes those that no program writes any more.
//!
//! Only regular files are replaced, and only where the caller allows it; the new file keeps the permission bits of the old one, and
//! other hard links keep the old contents. Directories, device nodes, pipes, sockets and streams such as `/dev/stdout` or `-` are
//! refused. So are symbolic links, dangling ones too: replacing the link would leave its target unchanged, and following it would
//! write a file that the user did not name. The message contains the link's target. Links among the directories of a path are
//! followed.
//!
//! Of several programs that write one file at the same time, one succeeds and the others get [`OutputProblem::Taken`]. A file that
//! is replaced is locked from the beginning. A new name is created without replacing any. Directories have the same two forms:
//! [`OutputFolder`] appears complete, [`OwnFolder`] is filled in place.
//!
//! ```
//! use vramlab_device::output::{Existing, OutputFile};
//! use std::io::Write;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("table.csv");
//! let mut out = OutputFile::create(&path, Existing::Refuse)?;
//! writeln!(out, "bytes,calls").map_err(|error| out.failed(error))?;
//! assert!(!path.exists());
//! out.finish()?;
//! assert!(path.exists());
//! # Ok(()) }
//! ```

mod abandoned;
mod folder;
mod room;

pub use abandoned::remove_abandoned;
pub use folder::{OutputFolder, OwnFolder};
pub use room::{NoRoom, Reserve};

use fs4::{FileExt, TryLockError};
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

/// The treatment of an existing regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and writing is refused.
    Refuse,
    /// It is replaced when the new file is complete, if its permissions allow writing to it.
    Replace,
}

/// A file that cannot be written, in one line: the file, the fault and the fix.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct OutputError {
    /// The file, as the caller named it.
    pub path: PathBuf,
    /// The fault. The message contains it, so it is not an error source.
    pub problem: OutputProblem,
}

/// A fault of a file to be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputProblem {
    /// A directory, or a path that ends like one.
    #[error("is a directory; name a file in it")]
    Directory,
    /// The empty path.
    #[error("an empty path names no file; name one")]
    NoName,
    /// Standard output and similar streams.
    #[error("is a stream, and this output is a file that appears when it is whole; name a file")]
    Stream,
    /// A device node, a pipe or a socket.
    #[error("is a {0}, and the output would take its place; name a file")]
    Special(&'static str),
    /// A symbolic link, and its target.
    #[error("is a symbolic link to {}; name the file itself", .0.display())]
    Link(PathBuf),
    /// The file exists, and the caller does not allow replacing it.
    #[error("already exists; remove it or name another file")]
    Exists,
    /// Another program replaces the file too, or has created it meanwhile.
    #[error("another program writes it at the same time; wait until that has ended, or name another file")]
    Taken,
    /// The directory of the file does not exist.
    #[error("there is no folder {}; make it first", .0.display())]
    NoFolder(PathBuf),
    /// The operating system allows no file there, or no change of the existing one.
    #[error("cannot be made: {0}; name another file")]
    Denied(io::Error),
    /// The disk, a quota or a limit on the length of files has no room for it.
    #[error("cannot be written: {0}")]
    NoRoom(NoRoom),
    /// The operating system failed while it was written.
    #[error("cannot be written: {0}")]
    Io(io::Error),
}

impl OutputProblem {
    /// Whether the name cannot be used at all, as opposed to a failure while writing.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::NoRoom(_) | Self::Io(_))
    }
}

impl OutputError {
    /// For a file that is written in place: the error of writing at least `needed` more bytes.
    #[must_use]
    pub fn appending(path: &Path, needed: u64, error: io::Error) -> Self {
        let problem = NoRoom::problem(folder(path), needed, false, 0, error);
        Self { path: path.to_owned(), problem }
    }
}

/// An output file that is being written. It implements [`Write`], with a buffer.
///
/// Dropping it removes the part; a process that is killed leaves the part.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    existing: Existing,
    /// The file that is replaced, locked.
    there: Option<File>,
    out: BufWriter<NamedTempFile>,
    written: u64,
    /// Final size in bytes, if known.
    expected: Option<u64>,
    /// Dropped after the part is removed.
    listed: Listed,
}

impl OutputFile {
    /// Begins a file that will have the name `path`.
    ///
    /// # Errors
    /// A refusal where no such file can be created; nothing is left then.
    pub fn create(path: &Path, existing: Existing) -> Result<Self, OutputError> {
        let fails = |problem| OutputError { path: path.to_owned(), problem };
        let there = examine(path, existing).map_err(fails)?;
        // A file system without locks has none to wait for. The lock ends with the open file.
        if there.as_ref().is_some_and(|there| matches!(FileExt::try_lock(there), Err(TryLockError::WouldBlock))) {
            return Err(fails(OutputProblem::Taken));
        }
        let (part, listed) = part(path, there.as_ref()).map_err(|error| fails(OutputProblem::Denied(error)))?;
        let out = BufWriter::with_capacity(1 << 16, part);
        Ok(Self { path: path.to_owned(), existing, there, out, written: 0, expected: None, listed })
    }

    /// The final name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes other users' read permission, whatever the permissions of the replaced file.
    ///
    /// # Errors
    /// [`OutputProblem::Denied`] where the file system refuses that.
    pub fn keep_private(&self) -> Result<(), OutputError> {
        #[cfg(unix)]
        {
            let owner = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            let set = self.out.get_ref().as_file().set_permissions(owner);
            set.map_err(|error| OutputError { path: self.path.clone(), problem: OutputProblem::Denied(error) })?;
        }
        Ok(())
    }

    /// Announces the number of bytes and reserves space for them, where the file system can, so that a full disk is detected before
    /// the work.
    ///
    /// # Errors
    /// [`OutputProblem::NoRoom`].
    pub fn expect(&mut self, bytes: u64) -> Result<(), OutputError> {
        self.expected = Some(bytes);
        match FileExt::allocate(self.out.get_ref().as_file(), bytes) {
            Err(error) if room::is_full(&error) => Err(self.failed(error)),
            // Some file systems cannot reserve space; there a full disk is detected while the file is written.
            _ => Ok(()),
        }
    }

    /// The error of this file for a failed write. For a full disk it contains the required space.
    #[must_use]
    pub fn failed(&self, error: io::Error) -> OutputError {
        let (needed, whole) = self.expected.map_or((self.written, false), |bytes| (bytes, true));
        // The space of the part becomes free when it is removed.
        let bytes = self.out.get_ref().as_file().metadata().map_or(0, |part| room::held(&part));
        let problem = NoRoom::problem(folder(&self.path), needed, whole, bytes, error);
        OutputError { path: self.path.clone(), problem }
    }

    /// Writes the complete file, and renames it.
    ///
    /// # Errors
    /// Those of [`expect`](Self::expect) and [`finish`](Self::finish).
    pub fn fill(mut self, contents: impl AsRef<[u8]>) -> Result<(), OutputError> {
        let contents = contents.as_ref();
        self.expect(contents.len() as u64)?;
        self.write_all(contents).map_err(|error| self.failed(error))?;
        self.finish()
    }

    /// Renames the file, once its contents are on the disk.
    ///
    /// # Errors
    /// The error of writing the remainder, or a refusal if the name exists meanwhile; then nothing is left.
    pub fn finish(mut self) -> Result<(), OutputError> {
        // A disk may refuse now what it accepted before, and after a power cut no name should exist without its bytes.
        self.store().and_then(|()| self.out.get_ref().as_file().sync_all()).map_err(|error| self.failed(error))?;
        self.name()
    }

    /// [`finish`](Self::finish) without waiting for the disk, for files that are replaced often. After a power cut the
    /// file may be the old one, or empty.
    ///
    /// # Errors
    /// Those of [`finish`](Self::finish).
    pub fn finish_unsynced(mut self) -> Result<(), OutputError> {
        self.store().map_err(|error| self.failed(error))?;
        self.name()
    }

    /// Renames the part.
    fn name(self) -> Result<(), OutputError> {
        // The work may have taken long.
        let fails = |path: &Path, problem| OutputError { path: path.to_owned(), problem };
        let now = examine(&self.path, self.existing).map_err(|problem| fails(&self.path, problem))?;
        let Self { path, existing, there, out, listed, .. } = self;
        // A program that replaces a file has its lock, so the file that is locked here stays until it is replaced.
        let replaces = match (&there, &now) {
            (Some(locked), Some(now)) if is_same(locked, now) => true,
            (_, Some(_)) => return Err(fails(&path, OutputProblem::Taken)),
            (_, None) => false,
        };
        // Everything has been written, so removing the buffer writes nothing.
        let part = out.into_inner().map_err(|error| fails(&path, OutputProblem::Io(error.into_error())))?;
        let named = if replaces { part.persist(&path) } else { part.persist_noclobber(&path) };
        drop(listed);
        match named {
            // The next program that replaces it should find it unlocked, even if a child process has it open.
            Ok(file) => {
                let _ = FileExt::unlock(&file);
                Ok(())
            }
            Err(refused) if refused.error.kind() == ErrorKind::AlreadyExists => {
                let refuses = existing == Existing::Refuse;
                Err(fails(&path, if refuses { OutputProblem::Exists } else { OutputProblem::Taken }))
            }
            Err(refused) => Err(fails(&path, OutputProblem::Io(refused.error))),
        }
    }

    /// Writes everything to the system.
    fn store(&mut self) -> io::Result<()> {
        self.out.flush()?;
        if self.expected.is_some_and(|expected| expected != self.written) {
            self.out.get_ref().as_file().set_len(self.written)?;
        }
        Ok(())
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.written += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes a complete file.
///
/// # Errors
/// Those of [`OutputFile::create`] and [`OutputFile::fill`].
pub fn write(path: &Path, existing: Existing, contents: impl AsRef<[u8]>) -> Result<(), OutputError> {
    OutputFile::create(path, existing)?.fill(contents)
}

/// Whether a file could be created at `path`, for programs that work long before they write. Nothing is left there.
///
/// # Errors
/// Those of [`OutputFile::create`].
pub fn check(path: &Path, existing: Existing) -> Result<(), OutputError> {
    OutputFile::create(path, existing).map(drop)
}

/// Removes the parts of all files and directories that are being written, for a process that ends immediately, by a signal. They
/// are never renamed then, and nothing more is [added](add) to them.
pub fn discard_unfinished() {
    /// A panic in what adds never ends it.
    const PATIENCE: Duration = Duration::from_secs(1);
    const TRIES: u32 = 16;
    let since = Instant::now();
    while let Err(std::sync::TryLockError::WouldBlock) = ADDING.try_lock().map(std::mem::forget)
        && since.elapsed() < PATIENCE
    {
        std::thread::sleep(Duration::from_millis(1));
    }
    for part in unfinished().drain(..) {
        let remove = || std::fs::remove_file(&part).or_else(|_| std::fs::remove_dir_all(&part));
        // A failure cannot be reported here; the name shows that it is a part. What is written without `add` may need more tries.
        let _ = (0..TRIES).any(|_| remove().is_ok() || !part.exists());
    }
}

/// Adds one of many files to an [`OutputFolder`]. [`discard_unfinished`] waits for the end of it, and lets no other begin: removing a
/// directory fails while files appear in it.
pub fn add<T>(write: impl FnOnce() -> T) -> T {
    let _adding = ADDING.lock().unwrap_or_else(PoisonError::into_inner);
    write()
}

/// Held while a file is added to a directory, and for ever once parts are removed.
static ADDING: Mutex<()> = Mutex::new(());

/// Parts of files and directories that are being written.
fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    static PARTS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    PARTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part's entry in that list.
#[derive(Debug)]
struct Listed(PathBuf);

impl Listed {
    /// Creates a part and its entry in one step: [`discard_unfinished`] finds either both or none.
    fn create<P: AsRef<Path>>(create: impl FnOnce() -> io::Result<P>) -> io::Result<(P, Self)> {
        let mut parts = unfinished();
        let part = create()?;
        parts.push(part.as_ref().to_owned());
        let listed = Self(part.as_ref().to_owned());
        Ok((part, listed))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        unfinished().retain(|part| *part != self.0);
    }
}

/// The file at `path`, if it may be replaced.
fn examine(path: &Path, existing: Existing) -> Result<Option<File>, OutputProblem> {
    if path.as_os_str().is_empty() {
        return Err(OutputProblem::NoName);
    }
    if path == Path::new("-") || is_stream(path) {
        return Err(OutputProblem::Stream);
    }
    let there = match path.symlink_metadata() {
        Ok(there) => there,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // The file name drops a slash at the end.
            return match path.as_os_str().as_encoded_bytes().last() {
                Some(b'/') => Err(OutputProblem::Directory),
                _ if folder(path).metadata().is_err() => Err(OutputProblem::NoFolder(folder(path).to_owned())),
                _ => Ok(None),
            };
        }
        Err(error) => return Err(OutputProblem::Denied(error)),
    };
    let kind = there.file_type();
    if kind.is_dir() {
        return Err(OutputProblem::Directory);
    }
    if kind.is_symlink() {
        return Err(OutputProblem::Link(path.read_link().map_err(OutputProblem::Denied)?));
    }
    if !kind.is_file() {
        return Err(OutputProblem::Special(special(kind)));
    }
    match existing {
        Existing::Refuse => Err(OutputProblem::Exists),
        // A user who may write to the directory may replace a file that must not be written to; only opening it detects that.
        Existing::Replace => open_to_replace(path).map(Some).map_err(OutputProblem::Denied),
    }
}

/// Opens the file that is replaced. It may have become a link or a pipe meanwhile: a link is not followed, and a pipe not waited
/// for.
fn open_to_replace(path: &Path) -> io::Result<File> {
    not_followed(OpenOptions::new().write(true)).open(path)
}

/// For a file that is neither a link nor a pipe to wait for.
fn not_followed(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

/// Whether both are open on the same file.
fn is_same(one: &File, other: &File) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |file: &File| file.metadata().map(|file| (file.dev(), file.ino())).ok();
        id(one).is_some() && id(one) == id(other)
    }
    // Other systems do not replace an open file.
    #[cfg(not(unix))]
    true
}

fn is_stream(path: &Path) -> bool {
    ["/dev/stdout", "/dev/stderr", "/dev/stdin"].into_iter().any(|stream| path == Path::new(stream))
        || ["/dev/fd", "/proc/self/fd"].into_iter().any(|streams| path.starts_with(streams))
}

/// The kind of a file that is neither regular nor a directory nor a link.
fn special(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "pipe";
        }
        if kind.is_socket() {
            return "socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "device";
        }
    }
    let _ = kind;
    "special file"
}

/// The directory of a file.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Random characters in the name of a part.
const RANDOM: usize = 10;
/// End of the names of parts.
const END: &str = ".part";

/// The prefix of the names of parts: long enough to be recognised, and so short that every file system accepts the full name.
fn prefix(path: &Path) -> String {
    let name: String = path.file_name().unwrap_or_default().to_string_lossy().chars().take(32).collect();
    format!(".{name}.")
}

/// Opens a new file under a name that other users cannot predict.
fn part(path: &Path, there: Option<&File>) -> io::Result<(NamedTempFile, Listed)> {
    let prefix = prefix(path);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(END).rand_bytes(RANDOM);
    // By default the library denies read access to others, as is right for temporary files.
    let open = |part: &Path| OpenOptions::new().write(true).create_new(true).open(part);
    let (part, listed) = loop {
        let (part, listed) = Listed::create(|| builder.make_in(folder(path), open))?;
        if abandoned::claim(part.as_file(), part.path()) {
            break (part, listed);
        }
    };
    if let Some(there) = there {
        part.as_file().set_permissions(there.metadata()?.permissions())?;
    }
    Ok((part, listed))
}
