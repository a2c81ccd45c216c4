//! A backend with settings, in the form of a command line: `NAME` or `NAME:key=value,key=value`.
//!
//! In a list, a comma also separates allocators. The text between two commas is a setting of the preceding allocator if it has a
//! `=`, and another allocator if it has none or has a `:` before the `=`. So
//! `naive,caching:max_split_size=32M,memory_limit=1G,stream-ordered` names three. Commas in brackets belong to a value:
//! `caching:roundup_power2_divisions=[1:4,64:8]`. `all` stands for every backend.

use super::{Backend, Capabilities, MemoryKind, UnknownBackend, all, find, find_in, hosts};
use crate::contract::{AllocError, DeviceAllocator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use vramlab_device::Driver;
use vramlab_device::settings::{Setting, SettingError, Settings, list_parts};

/// A backend with settings.
///
/// Its text names the settings that were given or differ from the default, in the backend's order. Reading it returns the same
/// selection.
#[derive(Debug)]
pub struct Selection {
    backend: &'static Backend,
    settings: Box<dyn Settings>,
    /// Settings that were set by name, even if to their default: [`adopt`](Self::adopt) skips them.
    given: BTreeSet<&'static str>,
}

/// Setting of backends with a limit of their own.
const MEMORY_LIMIT: &str = "memory_limit";

/// An error in a text that selects a backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectionError {
    /// No backend has this name.
    #[error(transparent)]
    Unknown(#[from] UnknownBackend),
    /// The backend allocates pinned host memory, where one of device memory is needed.
    #[error("{0} allocates pinned host memory, not a GPU's; compare it with `vramlab replay FILE --host --alloc {0}`")]
    HostMemory(&'static str),
    /// A setting's name or value is wrong.
    #[error("{backend}: {error}")]
    Setting {
        /// The backend.
        backend: &'static str,
        /// The fault.
        error: SettingError,
    },
    /// A setting is given twice.
    #[error("{backend}: '{name}' is given twice")]
    Twice {
        /// The backend.
        backend: &'static str,
        /// The setting.
        name: &'static str,
    },
    /// The settings contradict each other.
    #[error("{backend}: {reason}")]
    Together {
        /// The backend.
        backend: &'static str,
        /// Which settings, and the fix.
        reason: String,
    },
    /// The text has another form.
    #[error("'{text}' is not an allocator: {reason}; write NAME or NAME:key=value,key=value")]
    Form {
        /// The text.
        text: String,
        /// The fault.
        reason: &'static str,
    },
}

impl Selection {
    /// A backend with its defaults.
    #[must_use]
    pub fn of(backend: &'static Backend) -> Self {
        Self { backend, settings: backend.constructor.settings(), given: BTreeSet::new() }
    }

    /// A backend with these settings as far as it has them; the others have their defaults.
    #[must_use]
    pub fn with(backend: &'static Backend, settings: &dyn Settings) -> Self {
        let mut out = Self::of(backend);
        out.adopt(settings);
        out
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &'static Backend {
        self.backend
    }

    /// The backend's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.backend.name
    }

    /// The capabilities of the allocator with these settings.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.backend.constructor.capabilities(self.backend.capabilities, self.settings())
    }

    /// The settings.
    #[must_use]
    pub fn settings(&self) -> &dyn Settings {
        self.settings.as_ref()
    }

    /// Sets one by name.
    ///
    /// # Errors
    /// [`SelectionError::Setting`] where the name or the value is wrong.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), SelectionError> {
        let backend = self.backend.name;
        self.settings.set(name, value).map_err(|error| SelectionError::Setting { backend, error })?;
        self.given.extend(self.settings.list().iter().map(|setting| setting.name).filter(|known| *known == name));
        Ok(())
    }

    /// Copies the settings of the same names from another allocator, such as that of a recording. Settings that were set by name
    /// stay. Settings that this backend does not have, or would refuse, are skipped.
    pub fn adopt(&mut self, other: &dyn Settings) {
        let (same, before) =
            ((other as &dyn Any).type_id() == (self.settings() as &dyn Any).type_id(), self.settings.boxed());
        if same {
            self.settings = other.boxed();
        }
        if same || self.settings.take_over(other) {
            for name in &self.given {
                let _ = before.get(name).map(|value| self.settings.set(name, &value));
            }
            return;
        }
        for Setting { name, value, .. } in other.list() {
            if !self.given.contains(name) {
                let _ = self.settings.set(name, &value);
            }
        }
    }

    /// Sets the maximum of reserved bytes, and returns whether the allocator enforces it: whether it has the setting
    /// `memory_limit`. For others put a [`Limit`](crate::instruments::Limit) around it or make the device smaller. A limit that was
    /// set by name stays.
    pub fn set_memory_limit(&mut self, bytes: Option<u64>) -> bool {
        let has = self.backend.has_setting(MEMORY_LIMIT);
        if let Some(bytes) = bytes.filter(|_| has && !self.is_given(MEMORY_LIMIT)) {
            // The setting accepts any number of bytes.
            let _ = self.settings.set(MEMORY_LIMIT, &bytes.to_string());
        }
        has
    }

    /// The maximum of reserved bytes, where the allocator has such a setting.
    #[must_use]
    pub fn memory_limit(&self) -> Option<u64> {
        self.settings.json().get(MEMORY_LIMIT)?.as_u64()
    }

    /// Whether a setting was set by name.
    #[must_use]
    pub fn is_given(&self, name: &str) -> bool {
        self.given.contains(name)
    }

    /// Checks that the settings do not contradict each other, for commands that take them from a person. [`build`](Self::build)
    /// does not: a recording contains only the known settings of its allocator.
    ///
    /// # Errors
    /// [`SelectionError::Together`].
    pub fn check(&self) -> Result<(), SelectionError> {
        let together = |reason| SelectionError::Together { backend: self.backend.name, reason };
        self.settings.check().map_err(together)
    }

    /// Builds the allocator on a driver.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] when the device lacks what the backend needs; [`AllocError::Driver`] when setting it up
    /// failed.
    pub fn build(&self, driver: &Arc<dyn Driver>) -> Result<Arc<dyn DeviceAllocator>, AllocError> {
        self.backend.constructor.build(Arc::clone(driver), self.settings.as_ref())
    }
}

impl Clone for Selection {
    fn clone(&self) -> Self {
        Self { backend: self.backend, settings: self.settings.boxed(), given: self.given.clone() }
    }
}

impl PartialEq for Selection {
    /// Same backend, same values: a default that is written out makes no difference.
    fn eq(&self, other: &Self) -> bool {
        self.backend == other.backend && self.settings.list() == other.settings.list()
    }
}

impl Default for Selection {
    /// The default allocator of commands.
    fn default() -> Self {
        Self::of(super::DEFAULT)
    }
}

impl From<&'static Backend> for Selection {
    fn from(backend: &'static Backend) -> Self {
        Self::of(backend)
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (now, defaults) = (self.settings.list(), self.backend.settings());
        let chosen = now.iter().zip(&defaults).filter(|(now, default)| now != default || self.given.contains(now.name));
        let mut out = self.backend.name.to_owned();
        for (number, (setting, _)) in chosen.enumerate() {
            out.push(if number == 0 { ':' } else { ',' });
            out.push_str(&format!("{}={}", setting.name, setting.value));
        }
        f.pad(&out)
    }
}

impl FromStr for Selection {
    type Err = SelectionError;

    /// One of device memory.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text, MemoryKind::Device)
    }
}

impl Selection {
    /// Reads one of device memory, or of host memory.
    fn parse(text: &str, memory: MemoryKind) -> Result<Self, SelectionError> {
        let form = |reason| SelectionError::Form { text: text.to_owned(), reason };
        let (name, settings) = match text.split_once(':') {
            None => (text, None),
            Some((name, settings)) => (name, Some(settings)),
        };
        if name.contains('=') || name.contains(',') {
            return Err(form("a ':' comes before the settings"));
        }
        let backend = match memory {
            MemoryKind::Device => find(name.trim())?,
            MemoryKind::Host => find_in(name.trim(), hosts())?,
        };
        if backend.capabilities.memory != memory {
            return Err(SelectionError::HostMemory(backend.name));
        }
        let mut out = Self::of(backend);
        for part in settings.map(list_parts).into_iter().flatten() {
            let (name, value) = part.split_once('=').ok_or_else(|| form("a setting has a '='"))?;
            let (name, value) = (name.trim(), value.trim());
            if let Some(name) = out.given.get(name) {
                return Err(SelectionError::Twice { backend: out.backend.name, name });
            }
            out.set(name, value)?;
        }
        Ok(out)
    }
}

impl Serialize for Selection {
    /// As its text.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Selection {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Whether a part of a list is a setting: it has a `=`, and no `:` before it.
fn is_setting(part: &str) -> bool {
    part.find('=').is_some_and(|equals| !part[..equals].contains(':'))
}

/// Reads a list of allocators, separated by commas, as `--alloc` takes it.
///
/// # Errors
/// [`SelectionError`] for the first wrong one.
pub fn parse_list(text: &str) -> Result<Vec<Selection>, SelectionError> {
    parse_list_of(text, MemoryKind::Device)
}

/// Reads a list of allocators of pinned host memory, in the same form.
///
/// # Errors
/// [`SelectionError`] for the first wrong one.
pub fn parse_host_list(text: &str) -> Result<Vec<Selection>, SelectionError> {
    parse_list_of(text, MemoryKind::Host)
}

fn parse_list_of(text: &str, memory: MemoryKind) -> Result<Vec<Selection>, SelectionError> {
    let mut written: Vec<String> = Vec::new();
    for part in list_parts(text) {
        match written.last_mut() {
            Some(before) if is_setting(part) => {
                before.push(',');
                before.push_str(part);
            }
            _ => written.push(part.to_owned()),
        }
    }
    let mut out = Vec::new();
    for selection in written {
        if selection.trim() == "all" {
            let every = if memory == MemoryKind::Host { hosts() } else { all() };
            out.extend(every.into_iter().map(Selection::of));
        } else {
            out.push(Selection::parse(selection.trim(), memory)?);
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
