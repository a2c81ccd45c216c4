//! The backends by name, with their settings and capabilities.
//!
//! To add a backend, write a file next to `naive.rs` that ends in its entry, declare it in `backends.rs`, and name the entry in `BUILT_IN`:
//!
//! ```
//! use vramlab_policies::backends::{Backend, Capabilities, With};
//! use vramlab_device::settings::NoSettings;
//! # use vramlab_policies::backends::Naive as Mine;
//! # use std::sync::Arc;
//!
//! pub static BACKEND: Backend = Backend {
//!     name: "mine",
//!     summary: "one line for help texts",
//!     capabilities: Capabilities { snapshot: true, ..Capabilities::LEAST },
//!     compared: true,
//!     constructor: &With(|driver, _: &NoSettings| Ok(Arc::new(Mine::new(driver)))),
//! };
//!
//! // Another crate registers it at its start; the library's own backends are in `BUILT_IN`.
//! vramlab_policies::backends::register(&BACKEND).unwrap();
//! assert!(vramlab_policies::backends::find("mine").is_ok());
//! ```
//!
//! After that, the lists of `trainer::cli::main` and `vramlab_cli::main` (the program `vramlab`) contain it:
//! `experiments/examples/out-of-tree` is such a crate.
//!
//! Help, commands, specs, records, comparisons and the tests of every backend read this list. None of them tests a backend's name:
//! backends differ by settings and [capabilities](Capabilities).

mod capabilities;
mod selection;

pub use capabilities::{Capabilities, GraphCapture, MemoryKind, Needs, SegmentUse, StreamUse};
pub use selection::{Selection, SelectionError, parse_host_list, parse_list};

use crate::contract::{AllocError, DeviceAllocator};
use serde::{Serialize, Serializer};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use vramlab_device::Driver;
use vramlab_device::settings::{Meant, Setting, Settings};

/// The backends of this library, in the order in which lists show them.
const BUILT_IN: &[&Backend] = &[
    &super::naive::BACKEND,
    &super::caching::BACKEND,
    &super::pytorch::BACKEND,
    &super::expandable::BACKEND,
    &super::remap::BACKEND,
    &super::gmlake::BACKEND,
    &super::lab::BACKEND,
    &super::stream_ordered::BACKEND,
    &super::rmm_pool::BACKEND,
    &super::rmm_arena::BACKEND,
    &super::bfc::BACKEND,
    &super::tlsf::BACKEND,
    &super::cupy::BACKEND,
    &super::paddle::BACKEND,
    &super::plan::BACKEND,
    &super::host_pytorch::BACKEND,
    &super::host_exact::BACKEND,
    &super::host_cupy::BACKEND,
    &super::host_rmm_pool::BACKEND,
];

/// The default backend of commands.
const DEFAULT: &Backend = &super::caching::BACKEND;

/// [Registered](register) backends.
static REGISTERED: RwLock<Vec<&'static Backend>> = RwLock::new(Vec::new());

/// An entry of the list of backends.
#[derive(Debug)]
pub struct Backend {
    /// Name on command lines and in records: lower-case letters, digits, `-` and `_`. The allocator's
    /// [`name`](DeviceAllocator::name) is the same.
    pub name: &'static str,
    /// One line of help.
    pub summary: &'static str,
    /// Its capabilities with its default settings; [`Selection::capabilities`] has those of other settings.
    pub capabilities: Capabilities,
    /// Whether comparisons include it when no allocators are named. False for one that would repeat another's column, or that few
    /// people choose between.
    pub compared: bool,
    /// Its settings, and its constructor.
    pub constructor: &'static dyn Constructor,
}

impl Backend {
    /// Its settings in their order, with their default values.
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        self.constructor.settings().list()
    }

    /// Whether it has a setting of this name.
    #[must_use]
    pub fn has_setting(&self, name: &str) -> bool {
        self.constructor.settings().get(name).is_some()
    }
}

impl PartialEq for Backend {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Backend {}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl Serialize for Backend {
    /// As its name.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

/// Makes an allocator from settings. Use [`With`] or [`Varying`].
pub trait Constructor: fmt::Debug + Sync {
    /// The default settings.
    fn settings(&self) -> Box<dyn Settings>;

    /// The capabilities of an allocator with these settings. `default` are those of the default settings.
    fn capabilities(&self, default: Capabilities, settings: &dyn Settings) -> Capabilities {
        let _ = settings;
        default
    }

    /// An allocator on `driver`. `settings` are of the type that [`settings`](Self::settings) returns.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] when the device lacks what the backend needs; [`AllocError::Driver`] when setting it up
    /// failed.
    fn build(&self, driver: Arc<dyn Driver>, settings: &dyn Settings) -> Result<Arc<dyn DeviceAllocator>, AllocError>;
}

/// The constructor of a backend with settings of type `S`.
type Build<S> = fn(Arc<dyn Driver>, &S) -> Result<Arc<dyn DeviceAllocator>, AllocError>;

/// A backend with settings of type `S`, whose defaults are the type's.
#[derive(Debug)]
pub struct With<S>(pub Build<S>);

impl<S: Settings + Default> Constructor for With<S> {
    fn settings(&self) -> Box<dyn Settings> {
        Box::new(S::default())
    }

    fn build(&self, driver: Arc<dyn Driver>, settings: &dyn Settings) -> Result<Arc<dyn DeviceAllocator>, AllocError> {
        (self.0)(driver, typed(settings)?)
    }
}

/// A backend with settings of type `S`, some of which change its capabilities.
#[derive(Debug)]
pub struct Varying<S> {
    /// The capabilities with these settings, from those of the default ones.
    pub capabilities: fn(Capabilities, &S) -> Capabilities,
    /// Its constructor.
    pub build: Build<S>,
}

impl<S: Settings + Default> Constructor for Varying<S> {
    fn settings(&self) -> Box<dyn Settings> {
        Box::new(S::default())
    }

    fn capabilities(&self, default: Capabilities, settings: &dyn Settings) -> Capabilities {
        // Settings of another type are refused.
        settings.get_as().map_or(default, |settings| (self.capabilities)(default, settings))
    }

    fn build(&self, driver: Arc<dyn Driver>, settings: &dyn Settings) -> Result<Arc<dyn DeviceAllocator>, AllocError> {
        (self.build)(driver, typed(settings)?)
    }
}

/// Settings as their concrete type.
fn typed<S: Settings>(settings: &dyn Settings) -> Result<&S, AllocError> {
    settings.get_as().ok_or_else(|| AllocError::Settings { found: format!("{settings:?}") })
}

/// The reason why a backend cannot be registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// Another backend has the name.
    #[error("an allocator '{0}' already exists")]
    Taken(&'static str),
    /// The name cannot be written on a command line.
    #[error(
        "'{0}' is not a valid name for an allocator: write lower-case letters, digits, '-' and '_', a letter first"
    )]
    BadName(&'static str),
}

/// Registers a backend of another crate, so that every command and test that uses the list has it. Call it before arguments are
/// read. A second registration has no effect.
///
/// # Errors
/// [`RegisterError`] where another backend has its name or the name is not valid.
pub fn register(backend: &'static Backend) -> Result<(), RegisterError> {
    let name = backend.name;
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    // `all` stands for every backend in lists.
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(plain) || name == "all" {
        return Err(RegisterError::BadName(name));
    }
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    match BUILT_IN.iter().chain(registered.iter()).find(|other| other.name == name) {
        Some(other) if std::ptr::eq(*other, backend) => Ok(()),
        Some(_) => Err(RegisterError::Taken(name)),
        None => {
            registered.push(backend);
            Ok(())
        }
    }
}

/// The default backends of a comparison: those whose entries are [compared](Backend::compared).
#[must_use]
pub fn compared() -> Vec<&'static Backend> {
    all().into_iter().filter(|backend| backend.compared).collect()
}

/// Every backend of device memory: the library's own, then the registered ones, in order.
#[must_use]
pub fn all() -> Vec<&'static Backend> {
    of_memory(MemoryKind::Device)
}

/// Every backend of pinned host memory, in the same order.
#[must_use]
pub fn hosts() -> Vec<&'static Backend> {
    of_memory(MemoryKind::Host)
}

fn of_memory(memory: MemoryKind) -> Vec<&'static Backend> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    let entries = BUILT_IN.iter().chain(registered.iter()).copied();
    entries.filter(|backend| backend.capabilities.memory == memory).collect()
}

/// The allocator that PyTorch uses (`backend` and `expandable_segments` of `PYTORCH_ALLOC_CONF`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TorchAllocator {
    /// `backend:native`
    #[default]
    Native,
    /// `expandable_segments:True`
    Expandable,
    /// `backend:cudaMallocAsync`
    MallocAsync,
}

/// The backend that follows one of PyTorch's allocators.
#[must_use]
pub fn of_torch(allocator: TorchAllocator) -> &'static Backend {
    match allocator {
        TorchAllocator::Native => &super::caching::BACKEND,
        TorchAllocator::Expandable => &super::expandable::BACKEND,
        TorchAllocator::MallocAsync => &super::stream_ordered::BACKEND,
    }
}

/// No backend has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no allocator is called '{name}'{}", Meant { name, among })]
pub struct UnknownBackend {
    name: String,
    among: Vec<&'static str>,
}

/// The backend of a name, of device memory or of host memory.
///
/// # Errors
/// [`UnknownBackend`], which names the most similar name and all names of device memory.
pub fn find(name: &str) -> Result<&'static Backend, UnknownBackend> {
    find_in(name, all()).or_else(|unknown| find_in(name, hosts()).map_err(|_| unknown))
}

/// The backend of a name in a list.
fn find_in(name: &str, list: Vec<&'static Backend>) -> Result<&'static Backend, UnknownBackend> {
    let found = list.iter().find(|backend| backend.name == name).copied();
    found.ok_or_else(|| UnknownBackend {
        name: name.to_owned(),
        among: list.iter().map(|backend| backend.name).collect(),
    })
}
