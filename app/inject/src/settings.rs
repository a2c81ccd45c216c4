//! Settings that `vramlab run` passes to the library in the environment.

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
}

/// The settings, read once.
pub(crate) fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let path = |name: &str| std::env::var_os(name).filter(|text| !text.is_empty()).map(PathBuf::from);
        let word = |name: &str| std::env::var(name).unwrap_or_default();
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

/// Prints a line on standard error, as `vramlab run` does.
pub(crate) fn say(text: &str) {
    use std::io::Write;
    // Nobody is left to hear of it.
    let _ = writeln!(std::io::stderr(), "vramlab  {text}");
}
