//! The recorded memory at a failed request.

use serde::Serialize;
use std::fmt;
use vramlab_device::Bytes;
use vramlab_policies::contract::OomReport;

/// A failed request of the recording, and the memory state then.
///
/// Sizes of blocks are the allocator's, not the requested ones: rounded, and in the large pool with remainders that were too
/// small to be split off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OutOfMemory {
    /// Number of the event, from 1.
    pub event: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Recorded handle of the stream.
    pub stream: u64,
    /// Free bytes of the device, if recorded.
    pub device_free_bytes: Option<u64>,
    /// Memory limit, if known.
    pub limit_bytes: Option<u64>,
    /// Requested bytes of all allocated blocks.
    pub live_bytes: u64,
    /// Memory state; `None` if the recording has no segments.
    pub held: Option<Held>,
    /// Free bytes in private pools (CUDA graphs, `MemPool`) whose segments the recording names: other requests cannot use them.
    pub private_free_bytes: u64,
    /// Memory state of each stream's segments, by handle.
    pub streams: Vec<StreamHeld>,
    /// Whether the recording shows all segments. If not, some blocks were outside those that it shows.
    pub complete: bool,
    /// Memory of the request's stream outside of private pools.
    #[serde(skip)]
    pub same_stream: Held,
    /// Setting against fragmentation; see [`OomReport`].
    #[serde(skip)]
    pub against_fragmentation: Option<String>,
}

/// Failed requests that no device could serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImpossibleRequests {
    /// Their number.
    pub count: u64,
    /// Number of the last one's event, from 1.
    pub last_event: u64,
    /// Its requested bytes.
    pub last_bytes: u64,
}

impl fmt::Display for ImpossibleRequests {
    /// One sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, last_event, last_bytes } = *self;
        match count {
            1 => write!(f, "The request of event {last_event} failed")?,
            _ => write!(f, "{count} requests failed, the last in event {last_event}")?,
        }
        write!(
            f,
            " because no GPU has {}: its size is wrong, such as a negative or overflowed number. It is left out here.",
            Bytes(last_bytes)
        )
    }
}

/// Memory of an allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Bytes in segments.
    pub reserved_bytes: u64,
    /// Bytes in allocated blocks.
    pub allocated_bytes: u64,
    /// Bytes in blocks that were freed and are pending on other streams.
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
    /// State of its segments.
    #[serde(flatten)]
    pub held: Held,
}

impl OutOfMemory {
    /// The report that an allocator gives for a failed request, as far as the recording shows it.
    #[must_use]
    pub fn report(&self) -> OomReport {
        let same_stream = self.same_stream;
        let total = self.held.unwrap_or_default();
        let report = OomReport::new("the recorded allocator", self.requested_bytes)
            .with_memory(total.reserved_bytes - self.private_free_bytes, total.allocated_bytes + total.pending_bytes)
            .with_limit(self.limit_bytes)
            .with_setting(self.against_fragmentation.clone());
        match self.held {
            Some(held) => report.with_free(
                same_stream.largest_free_bytes,
                held.free_bytes - self.private_free_bytes - same_stream.free_bytes,
            ),
            None => report,
        }
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, stream) = (Bytes(self.requested_bytes), self.stream);
        write!(f, "out of memory at event {}: {asked} requested on stream {stream:#x}", self.event)?;
        if let Some(free) = self.device_free_bytes {
            write!(f, "\n  {} free on the device", Bytes(free))?;
        }
        if let Some(limit) = self.limit_bytes {
            write!(f, "\n  {} is the limit", Bytes(limit))?;
        }
        let Some(held) = &self.held else {
            return write!(f, "\n  {} live; the recording does not show reserved memory", Bytes(self.live_bytes));
        };
        write!(f, "\n  {} reserved, {} allocated", Bytes(held.reserved_bytes), Bytes(held.allocated_bytes))?;
        if held.pending_bytes > 0 {
            write!(f, ", {} pending on other streams", Bytes(held.pending_bytes))?;
        }
        write!(f, "\n  ")?;
        held.free(f)?;
        if self.private_free_bytes > 0 {
            let free = Bytes(self.private_free_bytes);
            write!(
                f,
                "\n  {free} of it in private pools (CUDA graphs, MemPools), which serve only their own requests"
            )?;
        }
        if self.streams.len() > 1 {
            for StreamHeld { stream, held } in &self.streams {
                write!(f, "\n  stream {stream:#x}: {} reserved, ", Bytes(held.reserved_bytes))?;
                held.free(f)?;
            }
        }
        write!(f, "\n  {}", self.report().advice())?;
        if !self.complete {
            write!(f, "\n  the recording does not show all segments; these are the shown ones")?;
        }
        Ok(())
    }
}

impl Held {
    fn free(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.free_blocks {
            0 => write!(f, "nothing free"),
            1 => write!(f, "{} free in one block", Bytes(self.free_bytes)),
            pieces => {
                let (free, largest) = (Bytes(self.free_bytes), Bytes(self.largest_free_bytes));
                write!(f, "{free} free in {pieces} blocks, largest {largest}")
            }
        }
    }
}
