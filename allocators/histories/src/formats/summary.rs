//! What is read from a file of events, and how.

use super::{Action, Event, Format, Keys, Origin, Origins, ReadError};
use serde_json::Value;
use std::fmt;
use vramlab_device::budget::{Budget, Claim, OverBudget};
use vramlab_policies::contract::{BlockState, PoolKind, Snapshot};
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

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

// What an allocator held at the end of a history, as PyTorch's snapshots list it.

/// A part of a [`Segment`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBlock {
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub size: u64,
    /// Bytes that the client asked for. PyTorch keeps those of the last owner in a block that is free again.
    pub requested_size: u64,
    /// State.
    pub state: BlockState,
}

/// Memory obtained from a device in one call, or one mapped range of an expandable segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Device, counted from 0.
    pub device: u16,
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub total_size: u64,
    /// Stream that owns its free blocks.
    pub stream: u64,
    /// Pool.
    pub segment_type: PoolKind,
    /// The pool that it is of, as PyTorch names it (`segment_pool_id`): both zero for the default pool. `None` where the file does
    /// not say.
    pub pool_id: Option<(u64, u64)>,
    /// Whether it is a range of an expandable segment.
    pub is_expandable: bool,
    /// Blocks in address order.
    pub blocks: Vec<SegmentBlock>,
}

impl Segment {
    /// Bytes in blocks that the client holds.
    #[must_use]
    pub fn allocated_size(&self) -> u64 {
        self.sum(|block| if block.state == BlockState::Allocated { block.size } else { 0 })
    }

    /// Bytes in blocks that the client holds or a stream still uses.
    #[must_use]
    pub fn active_size(&self) -> u64 {
        self.sum(|block| if block.state == BlockState::Free { 0 } else { block.size })
    }

    /// Bytes asked for in those blocks.
    #[must_use]
    pub fn requested_size(&self) -> u64 {
        self.sum(|block| if block.state == BlockState::Free { 0 } else { block.requested_size })
    }

    /// Older snapshots give no addresses of blocks, which are 0 then; they lie one behind the other.
    pub(super) fn place_blocks(&mut self) {
        let mut address = self.address;
        for block in &mut self.blocks {
            if block.address == 0 {
                block.address = address;
            }
            address = address.wrapping_add(block.size);
        }
    }

    fn sum(&self, of: impl Fn(&SegmentBlock) -> u64) -> u64 {
        self.blocks.iter().map(of).fold(0, u64::saturating_add)
    }

    /// The segments of an allocator of ours on `device`.
    ///
    /// A backend without two pools has its segments in the pool that PyTorch would have them in by their size.
    #[must_use]
    pub fn from_snapshot(snapshot: &Snapshot, device: u16) -> Vec<Segment> {
        // PyTorch's segments for small requests are of 2 MiB, and no others are that small.
        let by_size = |bytes: u64| if bytes <= SMALL_SEGMENT { PoolKind::Small } else { PoolKind::Large };
        let convert = |segment: &vramlab_policies::contract::SegmentInfo| Segment {
            device,
            address: segment.addr.get(),
            total_size: segment.bytes,
            stream: segment.stream.get(),
            segment_type: segment.pool.unwrap_or(by_size(segment.bytes)),
            pool_id: None,
            is_expandable: false,
            blocks: segment
                .blocks
                .iter()
                .map(|block| SegmentBlock {
                    address: block.addr.get(),
                    size: block.bytes,
                    requested_size: block.requested,
                    state: block.state,
                })
                .collect(),
        };
        snapshot.segments.iter().map(convert).collect()
    }
}

/// Name of a segment's pool in PyTorch's snapshots.
pub(super) fn pool_name(pool: PoolKind) -> &'static str {
    match pool {
        PoolKind::Small => "small",
        PoolKind::Large => "large",
    }
}

/// Name of a block's state in PyTorch's snapshots. Its documentation writes `active_awaiting_free`, its code and its
/// viewer `active_pending_free`.
pub(super) fn state_name(state: BlockState) -> &'static str {
    match state {
        BlockState::Allocated => "active_allocated",
        BlockState::PendingFree => "active_pending_free",
        BlockState::Free => "inactive",
    }
}

// Pinned memory of the host in a snapshot: `host_segments` and `host_traces`, which PyTorch 2.14 and newer write where
// `record_pinned_host_memory` is on.
//
// A segment holds one block. PyTorch rounds what is asked for to a power of two, and records the rounded size alone.

/// What a snapshot holds of pinned memory, summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// Segments at the end.
    pub segments: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Of these, in segments that the program holds or that a stream still uses.
    pub active_bytes: u64,
    /// Of `bytes`, in segments whose size is a power of two.
    pub rounded_bytes: u64,
    /// Events.
    pub events: u64,
    /// Bytes that the events took and did not give back, and the most of these at any time.
    level: i128,
    highest: i128,
}

impl HostMemory {
    /// Most bytes that were held, as far as the recording shows: what was there before it began stayed.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        let before = (i128::from(self.bytes) - self.level).max(0);
        u64::try_from(before + self.highest).unwrap_or(u64::MAX).max(self.bytes)
    }

    /// Whether a segment is in use, by what its dictionary says.
    pub(super) fn is_active(active: Option<u64>, allocated: Option<u64>, state: Option<BlockState>) -> bool {
        active.or(allocated).is_some_and(|bytes| bytes > 0) || state.is_some_and(|state| state != BlockState::Free)
    }

    /// Adds a segment of the end.
    pub(super) fn segment(&mut self, bytes: u64, active: bool) {
        self.segments += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if active {
            self.active_bytes = self.active_bytes.saturating_add(bytes);
        }
        if bytes.is_power_of_two() {
            self.rounded_bytes = self.rounded_bytes.saturating_add(bytes);
        }
    }

    /// Adds the next event.
    pub(super) fn event(&mut self, action: Option<Action>, bytes: u64) {
        self.events += 1;
        match action {
            Some(Action::SegmentAlloc) => self.level += i128::from(bytes),
            Some(Action::SegmentFree) => self.level -= i128::from(bytes),
            _ => {}
        }
        self.highest = self.highest.max(self.level);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_counts_what_was_there_before() {
        let mut host = HostMemory::default();
        for (action, bytes) in [
            (Action::SegmentAlloc, 100),
            (Action::Alloc, 100),
            (Action::SegmentAlloc, 50),
            (Action::SegmentFree, 100),
            (Action::SegmentFree, 8),
        ] {
            host.event(Some(action), bytes);
        }
        // 50 came and stayed, 8 of before went, 30 of before stayed.
        host.segment(50, true);
        host.segment(30, false);
        assert_eq!((host.peak_bytes(), host.active_bytes, host.segments), (150 + 38, 50, 2));
        // Without events the end is all that is known.
        let mut held = HostMemory::default();
        held.segment(64, true);
        held.segment(48, true);
        assert_eq!((held.peak_bytes(), held.rounded_bytes), (112, 64));
    }
}
