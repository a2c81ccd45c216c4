//! Options and results of reading a file of events.

use super::{Action, Event, Format, HostMemory, HostRecord, Keys, Origin, Origins, ReadError, Segment};
use serde_json::Value;
use std::fmt;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Reader options.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// The format; `None` to detect it from the content.
    pub format: Option<Format>,
    /// Memory limit besides buffers, which take less than 2 MiB. Events of a snapshot are not kept, but values that it may refer
    /// to again are: some 20 bytes for each event. The [`Summary`] stays claimed. Default 1 GiB.
    pub budget: Budget,
}

/// Content of a file besides its events.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Detected format.
    pub format: Format,
    /// Number of events of each device.
    pub events: Vec<u64>,
    /// Number of events skipped because their action has no counterpart in [`Action`](super::Action).
    pub unknown_actions: u64,
    /// Names of these actions, as many as a sentence has room for.
    pub unknown_names: Vec<String>,
    /// Segments at the end; empty for formats without them.
    pub segments: Vec<Segment>,
    /// Pools of the events that allocate or release segments, in the order of the file: PyTorch 2.12 and later record them.
    pub segment_pools: Vec<SegmentPool>,
    /// PyTorch's `allocator_settings`, of a trace of pinned memory those of its host allocator; empty for other formats.
    pub allocator_settings: serde_json::Map<String, serde_json::Value>,
    /// Number of PyTorch's `external_annotations`.
    pub external_annotations: u64,
    /// Whether a trace is of requests of pinned host memory, as our recorder in PyTorch and `vramlab run` write them beside a GPU's.
    pub is_pinned: bool,
    /// Pinned host memory, in newer snapshots.
    pub host: HostMemory,
    /// Its events and segments.
    pub host_record: HostRecord,
    /// Keys of a snapshot's dictionaries.
    pub keys: Keys,
    /// Bytes read, after decompression.
    pub bytes: u64,
    /// Where the file was truncated, if it is a snapshot that can be read as far as possible.
    pub cut: Option<Cut>,
}

/// The pool of an event that allocates, maps, unmaps or releases a segment (`pool_id`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentPool {
    /// Device.
    pub device: u16,
    /// Number of the event, from 1 among those of the device.
    pub event: u64,
    /// The pool in PyTorch's notation: both zero for the default pool.
    pub pool: (u64, u64),
}

/// Number and length of the names of unknown actions that are kept; PyTorch's have some twenty letters.
const MOST_UNKNOWN: usize = 4;
const LONGEST_UNKNOWN: usize = 64;

/// Position at which a snapshot was truncated, because the program that wrote it was killed or a copy was incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Available bytes, after decompression.
    pub at: u64,
    /// Number of events read.
    pub events: u64,
    /// Whether all events and the segments after them were read. Otherwise [`Summary::segments`] is empty: segments at the end do
    /// not describe the moment of the truncation.
    pub ends_known: bool,
    /// Whether the allocator's settings were read.
    pub settings_known: bool,
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the file was cut short at byte {}: its first {} events were read", self.at, self.events)?;
        match (self.ends_known, self.settings_known) {
            (true, true) => write!(f, " and nothing that matters is missing"),
            (true, false) => write!(f, ", the allocator's settings are missing"),
            (false, true) => write!(f, ", later events and the segments at the end are missing"),
            (false, false) => write!(f, ", later events and the settings are missing"),
        }
    }
}

impl Summary {
    pub(crate) fn new(format: Format) -> Self {
        Self {
            format,
            events: Vec::new(),
            unknown_actions: 0,
            unknown_names: Vec::new(),
            segments: Vec::new(),
            segment_pools: Vec::new(),
            allocator_settings: serde_json::Map::new(),
            external_annotations: 0,
            is_pinned: false,
            host: HostMemory::default(),
            host_record: HostRecord::default(),
            keys: Keys::default(),
            bytes: 0,
            cut: None,
        }
    }

    /// Registers a device, with or without events.
    pub(super) fn has_device(&mut self, device: u16) {
        let devices = self.events.len().max(usize::from(device) + 1);
        self.events.resize(devices, 0);
    }

    /// Counts an event of a device.
    pub(super) fn count(&mut self, device: u16) {
        self.has_device(device);
        self.events[usize::from(device)] += 1;
    }

    /// Counts an event of an unknown action.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub(super) fn count_unknown(&mut self, name: &str, claim: &mut Claim) -> Result<(), OverBudget> {
        self.unknown_actions += 1;
        let is_new = !self.unknown_names.iter().any(|other| other == name);
        if is_new && self.unknown_names.len() < MOST_UNKNOWN && (1..=LONGEST_UNKNOWN).contains(&name.len()) {
            claim.add(size_of::<String>() + name.len())?;
            self.unknown_names.push(name.to_owned());
        }
        Ok(())
    }

    /// A sentence about the events of unknown actions, if there are some.
    #[must_use]
    pub fn unknown_events(&self) -> Option<String> {
        let events = match self.unknown_actions {
            0 => return None,
            1 => "1 event of an action".to_owned(),
            count => format!("{count} events of actions"),
        };
        let names = match &self.unknown_names[..] {
            [] => String::new(),
            names => format!(" ({})", names.join(", ")),
        };
        Some(format!("{events} that this version does not know{names}: left out, and with them what they changed"))
    }

    /// Segments after the last event; `None` if unknown.
    #[must_use]
    pub fn ending(&self) -> Option<&[Segment]> {
        (self.format.is_snapshot() && self.cut.is_none_or(|cut| cut.ends_known)).then_some(&self.segments)
    }

    /// Whether the recording begins with its program; PyTorch's snapshots may begin in the middle.
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

// Allocator settings in a snapshot. A training run has some twenty of them.

/// Deepest nesting to keep.
pub(super) const DEEPEST: usize = 16;

/// Remaining budget for settings. Shared values could expand few bytes into many, and a file may contain settings more than once,
/// so it applies to the complete file.
#[derive(Debug)]
pub(super) struct Room {
    /// Values, including those in lists and dictionaries.
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
    /// Claims a value; false if the budget is used up.
    pub(super) fn take_node(&mut self) -> bool {
        self.nodes = self.nodes.saturating_sub(1);
        self.nodes > 0
    }

    /// Whether a list of `count` values may fit; they are claimed one by one.
    pub(super) fn fits(&self, count: usize) -> bool {
        count <= self.nodes
    }

    /// Claims a text.
    ///
    /// # Errors
    /// [`OverBudget`] if the settings have room but the reader's budget is used up.
    pub(super) fn take_text(&mut self, text: &str, claim: &mut Claim) -> Result<Option<String>, OverBudget> {
        let Some(left) = self.text.checked_sub(text.len() + 1) else { return Ok(None) };
        claim.add(text.len())?;
        self.text = left;
        Ok(Some(text.to_owned()))
    }
}

/// Memory of the next entry of a dictionary with `entries`: key, value, hash and position, while all of these double.
pub(super) fn entry_cost(entries: usize) -> usize {
    let entry = size_of::<Value>() + size_of::<String>() + 2 * size_of::<usize>();
    // The first entries are allocated together.
    if entries == 0 { 8 * entry } else { 4 * entry }
}

// Receivers of events.

/// Takes events during reading; its error stops the reader ([`ReadError::stop`]).
pub type Sink<'a> = dyn FnMut(Event) -> Result<(), ReadError> + 'a;

/// As [`Sink`], with the origin of each event.
pub type OriginSink<'a> = dyn FnMut(Event, Origin, &Origins) -> Result<(), ReadError> + 'a;

/// The sink of a reader, and the origins so far.
pub(super) struct Receiver<'s> {
    pub(super) sink: &'s mut OriginSink<'s>,
    pub(super) origins: Origins,
    /// Whether the caller needs origins.
    pub(super) wants_origins: bool,
}

impl Receiver<'_> {
    pub(super) fn take(&mut self, event: Event, origin: Origin) -> Result<(), ReadError> {
        (self.sink)(event, origin, &self.origins)
    }
}

/// Passes on an event of a format without completions of frees: a free completes immediately.
pub(super) fn emit(event: Event, summary: &mut Summary, receiver: &mut Receiver<'_>) -> Result<(), ReadError> {
    emit_from(event, Origin::default(), summary, receiver)
}

/// As [`emit`], with the event's origin.
pub(super) fn emit_from(
    event: Event,
    origin: Origin,
    summary: &mut Summary,
    receiver: &mut Receiver<'_>,
) -> Result<(), ReadError> {
    summary.count(event.device);
    receiver.take(event, origin)?;
    if event.action == Action::FreeRequested {
        summary.count(event.device);
        receiver.take(Event { action: Action::FreeCompleted, ..event }, Origin::default())?;
    }
    Ok(())
}
