//! First stage: numbers instead of addresses and handles.

use super::timeline::Timeline;
use crate::history::{MAX_STREAMS, NO_STREAM};
use indexmap::IndexSet;
use std::collections::BTreeMap;
use vramlab_device::ranges::Ranges;

/// A live block of the client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    pub(super) bytes: u64,
    pub(super) stream: u32,
    pub(super) slot: u32,
    /// The last stream whose use the recording announces.
    pub(super) user: u32,
}

/// Numbers of streams, and slots of blocks.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    /// Recorded handles in order of appearance.
    streams: IndexSet<u64>,
    live: BTreeMap<u64, Live>,
    /// Addresses of all blocks so far.
    used: Ranges,
    pub(super) spare: Vec<u32>,
}

impl Slots {
    pub(super) fn new() -> Self {
        Self { streams: IndexSet::new(), live: BTreeMap::new(), used: Ranges::default(), spare: Vec::new() }
    }

    /// The number of a stream.
    pub(super) fn stream(&mut self, handle: u64) -> Result<u32, String> {
        if self.streams.len() == MAX_STREAMS && !self.streams.contains(&handle) {
            return Err(format!("the history has more than {MAX_STREAMS} streams"));
        }
        // CAST: at most `MAX_STREAMS`.
        Ok(self.streams.insert_full(handle).0 as u32)
    }

    /// Handles and numbers of streams, by handle.
    pub(super) fn streams(&self) -> Vec<(u64, u32)> {
        let mut handles: Vec<(u64, u32)> = self.streams.iter().copied().zip(0..).collect();
        handles.sort_unstable();
        handles
    }

    pub(super) fn stream_count(&self) -> usize {
        self.streams.len()
    }

    pub(super) fn live(&self) -> usize {
        self.live.len()
    }

    pub(super) fn used_ranges(&self) -> usize {
        self.used.len()
    }

    /// The live block at an address.
    pub(super) fn at(&self, addr: u64) -> Option<&Live> {
        self.live.get(&addr)
    }

    /// Whether a block was in a range of addresses at any time.
    pub(super) fn was_used(&self, addr: u64, bytes: u64) -> bool {
        self.used.overlaps(addr, addr + bytes)
    }

    /// Records a block from before recording started.
    pub(super) fn note_used(&mut self, addr: u64, bytes: u64) {
        self.used.insert(addr, addr + bytes);
    }

    /// The live block that overlaps a range of addresses.
    pub(super) fn overlapping(&self, addr: u64, bytes: u64) -> Option<(u64, u64)> {
        let (start, block) = self.live.range(..addr + bytes).next_back()?;
        (start + block.bytes > addr).then_some((*start, block.bytes))
    }

    /// Assigns a slot to a block, which overlaps no other.
    pub(super) fn allocate(&mut self, addr: u64, bytes: u64, stream: u32, timeline: &mut Timeline) -> u32 {
        let slot = self.spare.pop().unwrap_or_else(|| timeline.fresh_slot());
        self.used.insert(addr, addr + bytes);
        self.live.insert(addr, Live { bytes, stream, slot, user: NO_STREAM });
        slot
    }

    /// Removes the block at an address.
    pub(super) fn free(&mut self, addr: u64) -> Option<Live> {
        self.live.remove(&addr)
    }

    /// The addresses around a freed block up to the nearest live blocks.
    pub(super) fn gap_at(&self, addr: u64) -> (u64, u64) {
        let before = self.live.range(..addr).next_back().map_or(0, |(start, live)| start + live.bytes);
        let behind = self.live.range(addr..).next().map_or(u64::MAX, |(start, _)| *start);
        (before, behind)
    }

    /// The live block that contains an address.
    pub(super) fn around(&mut self, addr: u64) -> Option<&mut Live> {
        let (start, live) = self.live.range_mut(..=addr).next_back()?;
        (addr < start + live.bytes).then_some(live)
    }
}
