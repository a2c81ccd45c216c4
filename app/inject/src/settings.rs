//! Settings that `vramlab run` passes to the library in the environment.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::OnceLock;
use vramlab_policies::Selection;
use vramlab_policies::backends::{SelectionError, parse_host_list};

/// How memory is freed that is usable on every stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Free {
    /// Memory is the driver's: nothing is served, only timed.
    Driver,
    /// The free waits for the device, as the driver's does; then the memory is cached.
    Waits,
    /// The free does not wait; the memory is cached, and used again when the work before the free is done.
    Ordered,
}

/// The settings of this process.
#[derive(Debug)]
pub(crate) struct Settings {
    /// The real driver (`VRAMLAB_CUDA`).
    pub(crate) driver: Option<PathBuf>,
    /// The allocator that serves (`VRAMLAB_INJECT_ALLOC`).
    pub(crate) alloc: Option<Selection>,
    pub(crate) free: Free,
    /// The allocator that serves pinned host memory (`VRAMLAB_INJECT_HOST`).
    pub(crate) host: Option<Selection>,
    /// Keep managed memory for the next request (`VRAMLAB_INJECT_POOL`).
    pub(crate) pool_managed: bool,
    /// Fill new memory with bytes that are NaN as floats (`VRAMLAB_INJECT_POISON`).
    pub(crate) poison: bool,
    /// Where calls are recorded (`VRAMLAB_INJECT_RECORD`).
    pub(crate) record: Option<PathBuf>,
    /// Whether records have call stacks (`VRAMLAB_INJECT_STACKS`).
    pub(crate) stacks: bool,
    /// Whether memory of PyTorch is served here, not by PyTorch's shim (`VRAMLAB_INJECT_TORCH`).
    pub(crate) torch: bool,
    /// Whether an allocator is put under PyTorch in this process (`VRAMLAB_ALLOC`).
    pub(crate) shim: bool,
}

/// The environment's texts, and what standard error is, when the library was loaded. The program may change both before it first calls
/// CUDA, and reading its environment while another thread changes that is not safe.
struct AtLoad {
    texts: [OsString; NAMES.len()],
    stderr: Option<Identity>,
}

const NAMES: [&str; 10] = [
    "VRAMLAB_CUDA",
    "VRAMLAB_ALLOC",
    "VRAMLAB_INJECT_FREE",
    "VRAMLAB_INJECT_POOL",
    "VRAMLAB_INJECT_ALLOC",
    "VRAMLAB_INJECT_HOST",
    "VRAMLAB_INJECT_POISON",
    "VRAMLAB_INJECT_RECORD",
    "VRAMLAB_INJECT_STACKS",
    "VRAMLAB_INJECT_TORCH",
];

/// An open file, by what cannot be another one's while it exists.
type Identity = (libc::dev_t, libc::ino_t);

fn identity(descriptor: libc::c_int) -> Option<Identity> {
    let mut file = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the structure is this function's own and live.
    let code = unsafe { libc::fstat(descriptor, file.as_mut_ptr()) };
    // SAFETY: a structure of integers, which is filled or zero.
    let file = unsafe { file.assume_init() };
    (code == 0).then_some((file.st_dev, file.st_ino))
}

fn at_load() -> &'static AtLoad {
    static AT_LOAD: OnceLock<AtLoad> = OnceLock::new();
    AT_LOAD.get_or_init(|| AtLoad {
        texts: NAMES.map(|name| std::env::var_os(name).unwrap_or_default()),
        stderr: identity(libc::STDERR_FILENO),
    })
}

/// Runs before the program, when it has one thread.
#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: extern "C" fn() = load;

extern "C" fn load() {
    // A fault here is one again at the first call.
    let _ = std::panic::catch_unwind(|| _ = at_load());
}

/// The settings, read once.
pub(crate) fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let text =
            |name: &str| NAMES.iter().position(|one| *one == name).map_or(OsStr::new(""), |at| &at_load().texts[at]);
        let path = |name: &str| Some(text(name)).filter(|text| !text.is_empty()).map(PathBuf::from);
        let word = |name: &str| text(name).to_str().unwrap_or_default().to_owned();
        let free = match word("VRAMLAB_INJECT_FREE").as_str() {
            "driver" => Free::Driver,
            "waits" => Free::Waits,
            _ => Free::Ordered,
        };
        let pooled = |kind: &str| word("VRAMLAB_INJECT_POOL").split(',').any(|pooled| pooled == kind);
        let alloc = read("memory", &word("VRAMLAB_INJECT_ALLOC"), |name| name.parse().map(Some));
        let host = match word("VRAMLAB_INJECT_HOST") {
            none if none.is_empty() && pooled("pinned") => "host-exact".to_owned(),
            name => name,
        };
        let host = read("pinned memory", &host, |name| Ok(parse_host_list(name)?.pop()));
        Settings {
            driver: path("VRAMLAB_CUDA"),
            alloc: alloc.filter(|_| free != Free::Driver),
            host: host.filter(|_| free != Free::Driver),
            free,
            pool_managed: pooled("managed"),
            poison: word("VRAMLAB_INJECT_POISON") == "1",
            record: path("VRAMLAB_INJECT_RECORD"),
            stacks: word("VRAMLAB_INJECT_STACKS") == "1",
            torch: word("VRAMLAB_INJECT_TORCH") == "1",
            shim: !text("VRAMLAB_ALLOC").is_empty(),
        }
    })
}

/// Reads which allocator serves; `None` where none is named, or the text is wrong, which is said.
fn read(
    what: &str,
    text: &str,
    parse: impl FnOnce(&str) -> Result<Option<Selection>, SelectionError>,
) -> Option<Selection> {
    if text.is_empty() {
        return None;
    }
    parse(text).unwrap_or_else(|error| {
        say(&format!("{text}: {error}; {what} stays the driver's"));
        None
    })
}

/// Prints a line on standard error, as `vramlab run` does, if that is what it was when the library was loaded: the program may have closed
/// it, and have a file of its own under its number. Where nobody reads it, the line is lost, and no signal ends the program.
pub(crate) fn say(text: &str) {
    if at_load().stderr.is_none() || identity(libc::STDERR_FILENO) != at_load().stderr {
        return;
    }
    let line = format!("vramlab  {text}\n");
    // One call without a lock, which a thread might hold that a child process does not have.
    // SAFETY: the bytes are live.
    without_signals(|| unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) });
}

/// Writes while the signals of a failed write are blocked, and takes away those that it made.
fn without_signals(write: impl FnOnce() -> isize) {
    let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    let (mut before, mut pending) = (signals, signals);
    // SAFETY: this and the next calls write complete sets to this function's own places.
    unsafe { libc::sigemptyset(signals.as_mut_ptr()) };
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        // SAFETY: the set was initialised above.
        unsafe { libc::sigaddset(signals.as_mut_ptr(), signal) };
    }
    // SAFETY: as above. Of all threads only this one's mask changes.
    if unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), before.as_mut_ptr()) } != 0 {
        return;
    }
    // SAFETY: as above.
    unsafe { libc::sigpending(pending.as_mut_ptr()) };
    let failed = write() < 0;
    // SAFETY: the set was filled above, or is zero.
    let waited = |signal| unsafe { libc::sigismember(pending.as_ptr(), signal) } == 1;
    if failed && !waited(libc::SIGPIPE) && !waited(libc::SIGXFSZ) {
        let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the set and the time are live; a null pointer asks for no details.
        unsafe { libc::sigtimedwait(signals.as_ptr(), std::ptr::null_mut(), &raw const at_once) };
    }
    // SAFETY: filled by the call that changed the mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
}
