//! The library that is put between a program and CUDA's driver (`app/inject`): where it is, and the environment that it needs.

use super::folder::{Folder, create_private};
use super::launch::{Launch, package};
use super::report_problem;
use super::unversioned;
use anyhow::{Context, Result, anyhow};
use clap::ValueEnum;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use terminal::RuntimeFailure;
use vramlab::Selection;
use vramlab::device::libcuda;
use vramlab::output::Existing;

/// Name of the library's file.
const FILE: &str = "libvramlab_inject.so";
/// Name of the second library's file, which the run writes.
pub(super) const UNVERSIONED: &str = "libcuda.so";
/// Parts of names of other libraries that replace functions of the driver: HAMi, nvshare, any copy of the driver, torch_memory_saver,
/// UCX.
const OTHERS: [&str; 5] = ["libvgpu", "libnvshare", "libcuda", "torch_memory_saver", "libucm"];
/// Libraries that the dynamic linker loads into every program of the machine.
const MACHINE_PRELOAD: &str = "/etc/ld.so.preload";

/// How memory is freed that any stream may use (`cudaFree`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Free {
    /// The driver frees: nothing is served, calls are only timed
    Driver,
    /// Waits for the device as the driver's does; memory is cached
    Waits,
    /// Does not wait; memory is used again when the work before the free has completed
    Ordered,
}

impl Free {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Waits => "waits",
            Self::Ordered => "ordered",
        }
    }
}

/// A kind of memory besides the device's that is kept for the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pool {
    /// Memory of cudaMallocManaged
    Managed,
    /// Memory of cudaMallocHost and cudaHostAlloc: --host-alloc host-exact
    Pinned,
}

/// Which memory calls have the call stack of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stacks {
    /// All
    On,
    /// None, which is faster
    Off,
}

/// How memory calls of a program are served and recorded at the driver's boundary.
#[derive(Debug)]
pub(crate) struct AtDriver {
    pub(super) library: PathBuf,
    pub(super) driver: PathBuf,
    pub(crate) free: Free,
    pub(crate) poison: bool,
    pub(crate) stacks: bool,
    pub(crate) pool: Vec<Pool>,
    /// The allocator of pinned host memory.
    pub(crate) host: Option<Selection>,
    /// Whether PyTorch's memory is served there too, and Python's start hook is left out.
    pub(crate) all: bool,
}

impl AtDriver {
    /// Finds the library and the driver.
    ///
    /// # Errors
    /// Why calls cannot be seen on this machine, in one sentence.
    pub(crate) fn find() -> Result<Self, String> {
        if !cfg!(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))) {
            return Err("CUDA programs are recorded on Linux on x86-64 and aarch64 only".to_owned());
        }
        let library = library().ok_or_else(|| {
            let exe = std::env::current_exe().unwrap_or_default();
            format!("{FILE} is neither next to {} nor in ../lib", exe.display())
        })?;
        let named = std::env::var_os("VRAMLAB_CUDA").map(PathBuf::from);
        let candidates = libcuda::candidates(named.as_deref());
        let driver = candidates.into_iter().find(|path| is_for_this_machine(path));
        let driver = driver.ok_or("this machine has no CUDA driver: libcuda.so.1 was not found")?;
        let (free, poison, stacks, all) = (Free::Ordered, false, false, false);
        Ok(Self { library, driver, free, poison, stacks, pool: Vec::new(), host: None, all })
    }

    /// Puts the library in front of a command. A directory that is returned has a library for it, until it is dropped.
    ///
    /// # Errors
    /// The command's file cannot be started with it, or a file of the run cannot be written.
    pub(super) fn prepare(
        &self,
        command: &mut Command,
        launch: &Launch<'_>,
        folder: &Folder,
    ) -> Result<Option<TempDir>> {
        let own = folder.make_own().with_context(|| folder.shown.display().to_string())?;
        // It costs a temporary directory where the output's path cannot be named.
        let elsewhere = if is_preloadable(&own) { None } else { Some(tempfile::tempdir()?) };
        let unversioned = elsewhere.as_ref().map_or(own.as_path(), TempDir::path).join(UNVERSIONED);
        create_private(&unversioned, Existing::Replace)?.fill(unversioned::library())?;
        let theirs = std::env::var_os("LD_PRELOAD").unwrap_or_default();
        let machine = std::fs::read_to_string(MACHINE_PRELOAD).unwrap_or_default();
        let injection = std::env::var_os("CUDA_INJECTION64_PATH").unwrap_or_default();
        for warning in other_injectors(&theirs.to_string_lossy(), &machine, &injection.to_string_lossy()) {
            report_problem(warning);
        }
        let mut preload = OsString::new();
        for path in [&self.library, &unversioned] {
            if !is_preloadable(path) {
                return Err(anyhow!(
                    "{}: LD_PRELOAD takes no path with a space or a colon; {}",
                    path.display(),
                    if path == &self.library { "install vramlab elsewhere" } else { "set TMPDIR to another directory" }
                ));
            }
            preload.push(path);
            preload.push(":");
        }
        preload.push(theirs);
        command.env("LD_PRELOAD", preload).env("VRAMLAB_CUDA", &self.driver);
        command.env("VRAMLAB_INJECT_RECORD", &own).env("VRAMLAB_INJECT_FREE", self.free.name());
        if let Some(alloc) = launch.alloc {
            command.env("VRAMLAB_INJECT_ALLOC", alloc.to_string());
        }
        if self.poison {
            command.env("VRAMLAB_INJECT_POISON", "1");
        }
        if !self.pool.is_empty() {
            let name = |pool: &Pool| match pool {
                Pool::Managed => "managed",
                Pool::Pinned => "pinned",
            };
            command.env("VRAMLAB_INJECT_POOL", self.pool.iter().map(name).collect::<Vec<_>>().join(","));
        }
        if let Some(host) = &self.host {
            command.env("VRAMLAB_INJECT_HOST", host.to_string());
        }
        if self.stacks {
            command.env("VRAMLAB_INJECT_STACKS", "1");
        }
        if self.all {
            command.env("VRAMLAB_INJECT_TORCH", "1").env_remove("VRAMLAB_ALLOC");
        }
        Ok(elsewhere)
    }
}

/// Whether `LD_PRELOAD` can name a path: the dynamic linker has no way to quote what separates paths in it.
fn is_preloadable(path: &Path) -> bool {
    !path.as_os_str().as_encoded_bytes().iter().any(|byte| b" :".contains(byte))
}

/// One line for each other library that sees or replaces calls of the driver.
fn other_injectors(preload: &str, machine: &str, injection: &str) -> Vec<String> {
    let of = |text: &str, from: &str| {
        let found = OTHERS.iter().filter(|name| text.contains(*name));
        let line = |name: &&str| {
            format!(
                "{from} has {name}, which takes CUDA's functions too; it is loaded behind this one and sees what passes"
            )
        };
        found.map(line).collect::<Vec<_>>()
    };
    let mut out = of(preload, "LD_PRELOAD");
    out.extend(of(machine, MACHINE_PRELOAD));
    if !injection.is_empty() {
        out.push(format!(
            "CUDA_INJECTION64_PATH has CUDA's driver load {injection}, which sees only the calls that pass"
        ));
    }
    out
}

/// The library: next to this program, in the library directory beside it, or in the Python package.
fn library() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?.canonicalize().ok()?;
    let folder = exe.parent()?;
    let package = package().ok();
    let mut places = vec![folder.to_owned(), folder.join("../lib"), folder.join("../lib/vramlab")];
    // A test program is one directory below.
    places.extend(folder.parent().map(Path::to_owned));
    places.extend(package.iter().flat_map(|package| [package.clone(), package.join("lib")]));
    let found = places.iter().map(|place| place.join(FILE)).find(|path| path.is_file())?;
    found.canonicalize().ok()
}

/// Whether a file is a library that this machine's 64-bit programs load.
fn is_for_this_machine(path: &Path) -> bool {
    elf(path)
        .is_some_and(|header| header[4] == 2 && u16::from_le_bytes([header[18], header[19]]) == unversioned::MACHINE)
}

/// The header of an ELF file.
fn elf(path: &Path) -> Option<[u8; 64]> {
    use std::io::Read;
    let mut header = [0; 64];
    std::fs::File::open(path).ok()?.read_exact(&mut header).ok()?;
    header.starts_with(b"\x7fELF").then_some(header)
}

/// Why the dynamic linker loads no library in front of a program, if it does not.
pub(crate) fn why_unseen(program: &OsString) -> Option<String> {
    let path = find_program(program)?;
    let shown = program.to_string_lossy();
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        const SET_ID: u32 = 0o6000;
        if path.metadata().is_ok_and(|file| file.mode() & SET_ID != 0) {
            return Some(format!("{shown} is setuid, and the system loads no library in front of such a program"));
        }
    }
    let bytes = std::fs::read(&path).ok()?;
    if !bytes.starts_with(b"\x7fELF") {
        return None;
    }
    match interpreter(&bytes) {
        None => Some(format!("{shown} is linked statically, so that no library can be loaded in front of it")),
        Some(name) if name.contains("musl") => Some(format!("{shown} uses musl, and this library needs glibc")),
        Some(_) => None,
    }
}

/// The dynamic linker that a 64-bit program names.
fn interpreter(elf: &[u8]) -> Option<String> {
    const INTERPRETER: u32 = 3;
    let word = |at: usize| Some(u64::from_le_bytes(elf.get(at..at.checked_add(8)?)?.try_into().ok()?));
    let half = |at: usize| Some(u16::from_le_bytes(elf.get(at..at.checked_add(2)?)?.try_into().ok()?));
    let table = usize::try_from(word(32)?).ok()?;
    let (size, count) = (usize::from(half(54)?), usize::from(half(56)?));
    let entries = (0..count).filter_map(|number| table.checked_add(number * size));
    for at in entries {
        let kind = u32::from_le_bytes(elf.get(at..at.checked_add(4)?)?.try_into().ok()?);
        if kind == INTERPRETER {
            let from = usize::try_from(word(at + 8)?).ok()?;
            let bytes = elf.get(from..from.checked_add(usize::try_from(word(at + 32)?).ok()?)?)?;
            return Some(String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned());
        }
    }
    None
}

/// The file that a command names, as a shell finds it.
fn find_program(program: &OsString) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 || path.is_absolute() {
        return path.is_file().then(|| path.to_owned());
    }
    let listed = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&listed).map(|folder| folder.join(path)).find(|path| path.is_file())
}

/// Refuses options that need the library where it cannot be.
pub(crate) fn needed(found: Result<AtDriver, String>, option: &str) -> Result<AtDriver> {
    found.map_err(|why| RuntimeFailure::new(format_args!("{option}: {why}")).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_injectors_are_named_with_the_place_that_loads_them() {
        assert_eq!(other_injectors("/usr/lib/libjemalloc.so", "", ""), [""; 0]);
        let lines = other_injectors("/a/libucm.so:/b/libvgpu.so", "/usr/local/vgpu/libvgpu.so\n", "/opt/libtool.so");
        let starts = [
            "LD_PRELOAD has libvgpu",
            "LD_PRELOAD has libucm",
            "/etc/ld.so.preload has libvgpu",
            "CUDA_INJECTION64_PATH",
        ];
        assert_eq!(lines.len(), starts.len(), "{lines:?}");
        assert!(lines.iter().zip(starts).all(|(line, start)| line.starts_with(start)), "{lines:?}");
    }
}
