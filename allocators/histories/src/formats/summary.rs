//! What is read from a file of events, and how.

use super::{Action, Event, Format, HostMemory, Keys, Origin, Origins, ReadError, Segment};
use serde_json::Value;
use std::fmt;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// How to read.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// The format; `None` tells it by the content.
    pub format: Option<Format>,
    /// What a reader may keep besides its buffers, which take less than 2 MiB. A snapshot's events are not kept, but
    /// what it may refer back to is: some 20 bytes an event. What the [`Summary`] holds stays claimed. Default 1 GiB.
    pub budget: Budget,
}

/// What a file held besides its events.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Format it was read as.
    pub format: Format,
    /// Events of each device.
    pub events: Vec<u64>,
    /// Events left out because their action has no counterpart in [`Action`](super::Action).
    pub unknown_actions: u64,
    /// What was held when the history ended; empty for formats that do not say.
    pub segments: Vec<Segment>,
    /// PyTorch's `allocator_settings`; empty for other formats.
    pub allocator_settings: serde_json::Map<String, serde_json::Value>,
    /// Number of PyTorch's `external_annotations`.
    pub external_annotations: u64,
    /// Pinned memory of the host, which newer snapshots may hold.
    pub host: HostMemory,
    /// The keys of a snapshot's dictionaries.
    pub keys: Keys,
    /// Bytes read, after unpacking.
    pub bytes: u64,
    /// Where the file was cut short, if it was and is a snapshot that is read as far as it is whole.
    pub cut: Option<Cut>,
}

/// Where a snapshot ends before its end, because the program that wrote it was killed or the copy was not completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Bytes that are there, after unpacking.
    pub at: u64,
    /// Events that were read.
    pub events: u64,
    /// Whether all events are there and what was held after them. If not, [`Summary::segments`] is empty: what was held
    /// at the end says nothing of the moment at which the events break off.
    pub ends_known: bool,
    /// Whether the allocator's settings are there.
    pub settings_known: bool,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the file was cut short at byte {}: its first {} events were read", self.at, self.events)?;
        match (self.ends_known, self.settings_known) {
            (true, true) => write!(f, " and nothing that matters is missing"),
            (true, false) => write!(f, ", the allocator's settings are missing and taken to be PyTorch's defaults"),
            (false, true) => write!(f, ", what came after them and what was held at the end is missing"),
            (false, false) => write!(
                f,
                ", what came after them and the settings are missing; the settings are taken to be PyTorch's defaults"
            ),
        }
    }
}

impl Summary {
    pub(crate) fn new(format: Format) -> Self {
        Self {
            format,
            events: Vec::new(),
            unknown_actions: 0,
            segments: Vec::new(),
            allocator_settings: serde_json::Map::new(),
            external_annotations: 0,
            host: HostMemory::default(),
            keys: Keys::default(),
            bytes: 0,
            cut: None,
        }
    }

    /// Takes note of a device, with or without events.
    pub(super) fn has_device(&mut self, device: u16) {
        let devices = self.events.len().max(usize::from(device) + 1);
        self.events.resize(devices, 0);
    }

    /// Counts an event of a device.
    pub(super) fn count(&mut self, device: u16) {
        self.has_device(device);
        self.events[usize::from(device)] += 1;
    }

    /// What was held when the events ended; `None` where the file does not say.
    #[must_use]
    pub fn ending(&self) -> Option<&[Segment]> {
        (self.format.is_snapshot() && self.cut.is_none_or(|cut| cut.ends_known)).then_some(&self.segments)
    }

    /// Whether the first event is the program's first: PyTorch's snapshots may begin in the middle.
    #[must_use]
    pub fn begins_with_program(&self) -> bool {
        self.ending().is_none() && self.cut.is_none()
    }

    /// Events of all devices.
    #[must_use]
    pub fn all_events(&self) -> u64 {
        self.events.iter().sum()
    }
}

// What is kept of the allocator's settings in a snapshot. A training run has some twenty of them.

/// Deepest nesting that is kept.
pub(super) const DEEPEST: usize = 16;

/// What the settings may still take. Sharing could make few bytes into many, and a file may hold settings more than
/// once, so it is counted over the whole file.
#[derive(Debug)]
pub(super) struct Room {
    /// Values, those in lists and dictionaries included.
    nodes: usize,
    /// Bytes of texts.
    text: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self { nodes: 1 << 14, text: 1 << 18 }
    }
}

impl Room {
    /// Takes room for a value; false when there is none.
    pub(super) fn take_node(&mut self) -> bool {
        self.nodes = self.nodes.saturating_sub(1);
        self.nodes > 0
    }

    /// Whether a list of `count` values may have room; they take it one by one.
    pub(super) fn fits(&self, count: usize) -> bool {
        count <= self.nodes
    }

    /// Takes room for a text.
    ///
    /// # Errors
    /// [`OverBudget`] where the settings would have room and the reading has none.
    pub(super) fn take_text(&mut self, text: &str, claim: &mut Claim) -> Result<Option<String>, OverBudget> {
        let Some(left) = self.text.checked_sub(text.len() + 1) else { return Ok(None) };
        claim.add(text.len())?;
        self.text = left;
        Ok(Some(text.to_owned()))
    }
}

/// Memory of the next entry of a dictionary that has `entries`: key, value, hash and place in the table, while all of
/// these double.
pub(super) fn entry_cost(entries: usize) -> usize {
    let entry = size_of::<Value>() + size_of::<String>() + 2 * size_of::<usize>();
    // Room for the first entries is made at once.
    if entries == 0 { 8 * entry } else { 4 * entry }
}

// What takes the events of a file as they are read.

/// Takes events as they are read; its error ends the reading ([`ReadError::stop`]).
pub type Sink<'a> = dyn FnMut(Event) -> Result<(), ReadError> + 'a;

/// As [`Sink`], with where each event came from.
pub type OriginSink<'a> = dyn FnMut(Event, Origin, &Origins) -> Result<(), ReadError> + 'a;

/// The sink of a reading, and what is kept of where events came from.
pub(super) struct Receiver<'s> {
    pub(super) sink: &'s mut OriginSink<'s>,
    pub(super) origins: Origins,
    /// Whether the caller asks where they came from.
    pub(super) wants_origins: bool,
}

impl Receiver<'_> {
    pub(super) fn take(&mut self, event: Event, origin: Origin) -> Result<(), ReadError> {
        (self.sink)(event, origin, &self.origins)
    }
}

/// Hands on an event of a format that does not say when a free completed: it completes at once.
pub(super) fn emit(event: Event, summary: &mut Summary, receiver: &mut Receiver<'_>) -> Result<(), ReadError> {
    summary.count(event.device);
    receiver.take(event, Origin::default())?;
    if event.action == Action::FreeRequested {
        summary.count(event.device);
        receiver.take(Event { action: Action::FreeCompleted, ..event }, Origin::default())?;
    }
    Ok(())
}
