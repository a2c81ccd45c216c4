//! Errors of allocators.

use crate::contract::Block;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use vramlab_device::{Bytes, Driver, DriverError, StreamId};

/// The facts about an allocation that could not be served. Made by [`new`](Self::new) and the methods that add to it; facts that
/// none of them adds are absent.
///
/// ```
/// use vramlab_policies::{AllocError, OomReport};
///
/// let report = OomReport::new("mine", 4 << 20).needing(20 << 20).with_memory(30 << 20, 28 << 20).with_limit(Some(32 << 20));
/// assert!(report.advice().starts_with("raise the limit by at least 18 MiB"));
/// assert!(AllocError::from(report).is_out_of_memory());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OomReport {
    /// Backend that gave up.
    pub allocator: String,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Bytes that the request needed from the device, after rounding.
    pub needed_bytes: u64,
    /// Reserved bytes at that moment.
    pub reserved_bytes: u64,
    /// Active bytes: in live blocks or still used by a stream.
    pub active_bytes: u64,
    /// Largest free block that the request's stream could use; absent when the backend cannot see its blocks.
    pub largest_free_bytes: Option<u64>,
    /// Free bytes kept for other streams; absent when the backend cannot see its blocks.
    pub other_streams_free_bytes: Option<u64>,
    /// Limit set by the user, if any.
    pub limit_bytes: Option<u64>,
    /// Free and total memory of the device, if it answered.
    pub device_bytes: Option<(u64, u64)>,
    /// Setting of the allocator that reduces fragmentation, such as `set max_split_size`; absent where it has no such setting.
    pub against_fragmentation: Option<String>,
}

impl OomReport {
    /// The report of an allocator that refused a request, with the bytes that the request needed from the device.
    #[must_use]
    pub fn new(allocator: &str, requested_bytes: u64) -> Self {
        Self { allocator: allocator.into(), requested_bytes, needed_bytes: requested_bytes, ..Self::default() }
    }

    /// Sets the bytes that the request needed from the device, after rounding.
    #[must_use]
    pub fn needing(self, needed_bytes: u64) -> Self {
        Self { needed_bytes, ..self }
    }

    /// Sets the reserved bytes and the active ones among them.
    #[must_use]
    pub fn with_memory(self, reserved_bytes: u64, active_bytes: u64) -> Self {
        Self { reserved_bytes, active_bytes, ..self }
    }

    /// Adds the largest free block that the request's stream could use, and the free bytes kept for other streams.
    #[must_use]
    pub fn with_free(self, largest: u64, other_streams: u64) -> Self {
        Self { largest_free_bytes: Some(largest), other_streams_free_bytes: Some(other_streams), ..self }
    }

    /// Adds the limit, if there is one.
    #[must_use]
    pub fn with_limit(self, limit_bytes: Option<u64>) -> Self {
        Self { limit_bytes, ..self }
    }

    /// Adds the device's free and total memory, if it answers. One call of the driver.
    #[must_use]
    pub fn with_device(self, driver: &dyn Driver) -> Self {
        Self { device_bytes: driver.mem_info().ok().map(|info| (info.free, info.total)), ..self }
    }

    /// Adds the setting that reduces fragmentation, if there is one.
    #[must_use]
    pub fn with_setting(self, against_fragmentation: Option<String>) -> Self {
        Self { against_fragmentation, ..self }
    }

    /// One sentence with the remedy, from the known values.
    #[must_use]
    pub fn advice(&self) -> String {
        let free = self.reserved_bytes.saturating_sub(self.active_bytes);
        if let Some(limit) = self.limit_bytes {
            let short = (self.reserved_bytes + self.needed_bytes).saturating_sub(limit);
            if short > 0 && self.requested_bytes > free {
                return format!("raise the limit by at least {}, or use a smaller batch or model", Bytes(short));
            }
        }
        let others = self.other_streams_free_bytes.unwrap_or(0);
        let in_pieces = self.largest_free_bytes.is_some_and(|largest| largest < self.requested_bytes);
        let fragmented = |free: u64| in_pieces && free >= self.requested_bytes;
        if !fragmented(free.saturating_sub(others)) && others >= self.requested_bytes {
            return "another stream's free blocks would have sufficed: allocate on fewer streams, or trim before this point".into();
        }
        if fragmented(free) {
            let advice = "the free bytes would have sufficed but no single block does (fragmentation): allocate large tensors first";
            let setting = self.against_fragmentation.iter();
            return setting.fold(advice.to_owned(), |text, setting| format!("{text}, or {setting}"));
        }
        "use a smaller batch or model, or free tensors earlier".into()
    }
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory: {} requested from '{}' (needs {} from the device), {} reserved, {} active",
            Bytes(self.requested_bytes),
            self.allocator,
            Bytes(self.needed_bytes),
            Bytes(self.reserved_bytes),
            Bytes(self.active_bytes)
        )?;
        if let Some(largest) = self.largest_free_bytes {
            write!(f, ", largest free block {}", Bytes(largest))?;
        }
        if let Some(limit) = self.limit_bytes {
            write!(f, ", limit {}", Bytes(limit))?;
        }
        if let Some((free, total)) = self.device_bytes {
            write!(f, ", device {} free of {}", Bytes(free), Bytes(total))?;
        }
        write!(f, "; {}", self.advice())
    }
}

/// A block that an allocator refused to free, for its owner to take back. Clones of an error share it, so it is returned once.
#[derive(Clone, Debug, Default)]
pub struct Refused(Arc<Mutex<Option<Block>>>);

impl Refused {
    fn new(block: Block) -> Self {
        Self(Arc::new(Mutex::new(Some(block))))
    }

    /// The block; `None` when it was taken before, or the caller kept it.
    #[must_use]
    pub fn take(&self) -> Option<Block> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl PartialEq for Refused {
    /// The other fields identify the block.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Refused {}

/// An allocator's error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// Neither the backend nor the device has the memory, after everything releasable was released.
    #[error("{0}")]
    OutOfMemory(Box<OomReport>),
    /// No allocator can serve the request, however much memory is free.
    #[error("invalid request of {bytes} bytes aligned to {align}: {reason}")]
    InvalidRequest {
        /// Requested bytes.
        bytes: u64,
        /// Requested alignment, in bytes.
        align: u64,
        /// The fault.
        reason: &'static str,
    },
    /// A block was passed to an allocator that did not make it, or in which it is no longer live.
    #[error("block at {addr:#x} ({bytes} bytes) is not live in '{allocator}': {reason}")]
    ForeignBlock {
        /// Address of the block.
        addr: u64,
        /// Size of the block in bytes.
        bytes: u64,
        /// The allocator of the call.
        allocator: String,
        /// The evidence.
        reason: &'static str,
        /// The block, if it was to be freed: it is still live, and its owner can free it.
        block: Refused,
    },
    /// The device has no such API.
    #[error("'{allocator}' needs {capability}, which {device} does not have")]
    Unsupported {
        /// The selected backend.
        allocator: &'static str,
        /// Missing capability.
        capability: &'static str,
        /// Device that lacks it.
        device: String,
    },
    /// The allocator does not do this on any device; its [`Capabilities`](crate::backends::Capabilities) say so.
    #[error("'{allocator}' has no {capability}")]
    Incapable {
        /// Allocator of the call.
        allocator: &'static str,
        /// The missing capability.
        capability: &'static str,
    },
    /// An allocator was given settings that are not of its type.
    #[error("these are settings of another allocator: {found}")]
    Settings {
        /// The settings.
        found: String,
    },
    /// A file in the settings cannot be used.
    #[error("'{allocator}' cannot use {}: {reason}", path.display())]
    File {
        /// The selected backend.
        allocator: &'static str,
        /// The file.
        path: std::path::PathBuf,
        /// The fault in it, and its fix.
        reason: String,
    },
    /// A capture ended while blocks that were allocated in it were live.
    #[error(
        "{bytes} bytes in {blocks} block(s) of '{allocator}' are still held at the end of the capture that they were allocated in: \
         free them before the capture ends, or allocate them before it begins"
    )]
    CaptureLive {
        /// Allocator of the capture.
        allocator: &'static str,
        /// Number of live blocks.
        blocks: usize,
        /// Their size in bytes.
        bytes: u64,
    },
    /// A private pool cannot be used or released in this state.
    #[error("private pool of '{allocator}': {reason}")]
    PrivatePool {
        /// Allocator of the call.
        allocator: &'static str,
        /// The reason.
        reason: String,
    },
    /// A capture cannot begin, end or be released in this state.
    #[error("graph capture with '{allocator}': {reason}")]
    Capture {
        /// Allocator of the call.
        allocator: &'static str,
        /// The fault.
        reason: String,
    },
    /// The allocator that is modelled would return a block that is smaller than the request.
    #[error(
        "'{allocator}' would serve a request of {requested} bytes with a block of {bytes}, an overrun of {} bytes; a program \
         would write behind its block",
        requested - bytes
    )]
    Overrun {
        /// Allocator of the call.
        allocator: &'static str,
        /// Requested bytes.
        requested: u64,
        /// Bytes of the block.
        bytes: u64,
    },
    /// The checker found a violation of the contract.
    #[error("checker: {0}")]
    Violation(String),
    /// A driver call failed for another reason than lack of memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl From<OomReport> for AllocError {
    fn from(report: OomReport) -> Self {
        Self::OutOfMemory(Box::new(report))
    }
}

impl AllocError {
    /// An error for a block that is not live in `allocator` and that was to be freed.
    #[must_use]
    pub fn foreign(allocator: &str, reason: &'static str, block: Block) -> Self {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        Self::ForeignBlock { addr, bytes, allocator: allocator.into(), reason, block: Refused::new(block) }
    }

    /// The error for a block that is not live here and that the caller keeps.
    #[must_use]
    pub fn not_held(allocator: &str, reason: &'static str, block: &Block) -> Self {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        Self::ForeignBlock { addr, bytes, allocator: allocator.into(), reason, block: Refused::default() }
    }

    /// Adds the setting that reduces fragmentation, if enough memory was free but fragmented.
    #[must_use]
    pub(crate) fn with_setting(mut self, against_fragmentation: impl FnOnce() -> Option<String>) -> Self {
        if let Self::OutOfMemory(report) = &mut self {
            report.against_fragmentation = against_fragmentation();
        }
        self
    }

    /// Whether the device had too little memory, so that freeing some and trying again may help.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) => true,
            Self::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}

/// Error of a private pool that could not be restored to a checkpoint: nothing changed.
#[derive(Debug)]
pub struct RestoreError {
    /// The blocks that were passed in, which are still live.
    pub held: Vec<(Block, StreamId)>,
    /// The reason.
    pub error: AllocError,
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for RestoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_of_what_was_in_the_way() {
        let advice = |largest, others, limit_bytes| {
            OomReport::new("a", 20).with_memory(100, 60).with_free(largest, others).with_limit(limit_bytes).advice()
        };
        // 40 are free: 20 of its own stream in fragments, and 20 of another stream.
        assert!(advice(10, 20, None).contains("fragmentation"));
        assert!(advice(10, 30, None).contains("another stream"));
        assert!(advice(10, 15, None).ends_with("(fragmentation): allocate large tensors first"));
        assert!(advice(20, 0, None).contains("smaller batch"));
        let pieces =
            OomReport::new("a", 20).with_memory(100, 0).with_free(10, 0).with_setting(Some("set a bound".into()));
        assert!(pieces.advice().ends_with("(fragmentation): allocate large tensors first, or set a bound"));
        let short = OomReport::new("a", 50).with_memory(100, 100).with_limit(Some(120));
        assert!(short.advice().contains("raise the limit by at least 30 B"));
    }
}
