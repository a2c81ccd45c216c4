//! What the recorded allocator held when it refused a request.

use serde::Serialize;
use std::fmt;
use vramlab_device::Bytes;
use vramlab_policies::contract::OomReport;

/// A request that the recorded allocator refused, and what it held then.
///
/// Sizes of blocks are the allocator's and not those that were asked for: rounded, and in the large pool with what was
/// too little to be split off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OutOfMemory {
    /// Number of the event, from 1.
    pub event: u64,
    /// Bytes asked for.
    pub requested_bytes: u64,
    /// Recorded handle of the stream.
    pub stream: u64,
    /// Bytes free on the device, if the history says so.
    pub device_free_bytes: Option<u64>,
    /// Memory limit, if it is known.
    pub limit_bytes: Option<u64>,
    /// Bytes asked for in all blocks that the client held.
    pub live_bytes: u64,
    /// What was held; `None` where the history does not show segments.
    pub held: Option<Held>,
    /// What each stream's segments held, by handle.
    pub streams: Vec<StreamHeld>,
    /// Whether the history shows all that was held. If not, there were blocks outside of the segments that it shows.
    pub complete: bool,
    /// What could be set against free memory in pieces; see [`OomReport`].
    #[serde(skip)]
    pub against_fragmentation: Option<String>,
}

/// Memory of an allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Bytes in segments.
    pub reserved_bytes: u64,
    /// Bytes in blocks that the client holds.
    pub allocated_bytes: u64,
    /// Bytes in blocks that the client has freed and other streams still use.
    pub pending_bytes: u64,
    /// Bytes in free blocks.
    pub free_bytes: u64,
    /// Number of free blocks.
    pub free_blocks: u64,
    /// Bytes of the largest free block.
    pub largest_free_bytes: u64,
}

/// Memory of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StreamHeld {
    /// Recorded handle.
    pub stream: u64,
    /// What its segments hold.
    #[serde(flatten)]
    pub held: Held,
}

impl OutOfMemory {
    /// The report that an allocator gives when it refuses a request, as far as the history tells it.
    #[must_use]
    pub fn report(&self) -> OomReport {
        let own = self.streams.iter().find(|held| held.stream == self.stream).map(|own| own.held).unwrap_or_default();
        let held = self.held.unwrap_or_default();
        let report = OomReport::new("the recorded allocator", self.requested_bytes)
            .with_memory(held.reserved_bytes, held.allocated_bytes + held.pending_bytes)
            .with_limit(self.limit_bytes)
            .with_setting(self.against_fragmentation.clone());
        match self.held {
            Some(held) => report.with_free(own.largest_free_bytes, held.free_bytes - own.free_bytes),
            None => report,
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, stream) = (Bytes(self.requested_bytes), self.stream);
        write!(f, "out of memory at event {}: {asked} asked for on stream {stream:#x}", self.event)?;
        if let Some(free) = self.device_free_bytes {
            write!(f, "\n  {} free on the device", Bytes(free))?;
        }
        if let Some(limit) = self.limit_bytes {
            write!(f, "\n  {} is the limit", Bytes(limit))?;
        }
        let Some(held) = &self.held else {
            return write!(f, "\n  {} live; the history does not show what was reserved", Bytes(self.live_bytes));
        };
        write!(f, "\n  {} reserved, {} allocated", Bytes(held.reserved_bytes), Bytes(held.allocated_bytes))?;
        if held.pending_bytes > 0 {
            write!(f, ", {} in use by other streams", Bytes(held.pending_bytes))?;
        }
        write!(f, "\n  ")?;
        held.free(f)?;
        if self.streams.len() > 1 {
            for StreamHeld { stream, held } in &self.streams {
                write!(f, "\n  stream {stream:#x}: {} reserved, ", Bytes(held.reserved_bytes))?;
                held.free(f)?;
            }
        }
        write!(f, "\n  {}", self.report().advice())?;
        if !self.complete {
            write!(f, "\n  the history does not show all that was held; this is what it shows")?;
        }
        Ok(())
    }
}

impl Held {
    fn free(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.free_blocks {
            0 => write!(f, "nothing free"),
            1 => write!(f, "{} free in one piece", Bytes(self.free_bytes)),
            pieces => {
                let (free, largest) = (Bytes(self.free_bytes), Bytes(self.largest_free_bytes));
                write!(f, "{free} free in {pieces} pieces, largest {largest}")
            }
        }
    }
}
