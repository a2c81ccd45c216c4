//! Why an allocator could not do what it was asked.

use crate::contract::Block;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use vramlab_device::{Bytes, Driver, DriverError, StreamId};

/// What was known when an allocation could not be served. Made by [`new`](Self::new) and the methods that add to it; what none of
/// them adds is absent.
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
    /// Bytes asked for.
    pub requested_bytes: u64,
    /// Bytes that would have been taken from the device to serve the request, after rounding.
    pub needed_bytes: u64,
    /// Bytes held from the device at that moment.
    pub reserved_bytes: u64,
    /// Bytes in blocks that the client holds or that a stream still uses.
    pub active_bytes: u64,
    /// Largest free block that the request's stream could use; absent when the backend cannot see its blocks.
    pub largest_free_bytes: Option<u64>,
    /// Free bytes kept for other streams; absent when the backend cannot see its blocks.
    pub other_streams_free_bytes: Option<u64>,
    /// Limit set by the user, if any.
    pub limit_bytes: Option<u64>,
    /// Free and total memory of the device, if it answered.
    pub device_bytes: Option<(u64, u64)>,
    /// What its user can change about the allocator against free memory in pieces, such as `set max_split_size`; absent
    /// where it has no such setting.
    pub against_fragmentation: Option<String>,
}

impl OomReport {
    /// The report of an allocator that refused a request, which would have needed as many bytes from the device.
    #[must_use]
    pub fn new(allocator: &str, requested_bytes: u64) -> Self {
        Self { allocator: allocator.into(), requested_bytes, needed_bytes: requested_bytes, ..Self::default() }
    }

    /// Sets the bytes that would have been taken from the device, after rounding.
    #[must_use]
    pub fn needing(self, needed_bytes: u64) -> Self {
        Self { needed_bytes, ..self }
    }

    /// Sets the bytes that were reserved, and those of them in blocks that the client held or a stream still used.
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

    /// Adds what can be changed about the allocator against free memory in pieces, if anything.
    #[must_use]
    pub fn with_setting(self, against_fragmentation: Option<String>) -> Self {
        Self { against_fragmentation, ..self }
    }

    /// One sentence that says what would have helped, from the figures at hand.
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
            let found = "the free bytes would have sufficed but no single block does (fragmentation): allocate large tensors first";
            let setting = self.against_fragmentation.iter();
            return setting.fold(found.to_owned(), |text, setting| format!("{text}, or {setting}"));
        }
        "use a smaller batch or model, or free tensors earlier".into()
    }
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "out of memory: {} asked of '{}' (needs {} from the device), {} reserved, {} active",
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

/// A block that an allocator would not take, for who has it to give it to its owner. Copies of an error share it, so it is
/// handed out once.
#[derive(Clone, Debug, Default)]
pub struct Refused(Arc<Mutex<Option<Block>>>);

impl Refused {
    fn new(block: Block) -> Self {
        Self(Arc::new(Mutex::new(Some(block))))
    }

    /// The block; `None` when it was taken before, or never given away.
    #[must_use]
    pub fn take(&self) -> Option<Block> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl PartialEq for Refused {
    /// What else an error says of a block tells it from others.
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Refused {}

/// Why an allocator could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// Neither the backend nor the device has the memory, after everything releasable was released.
    #[error("{0}")]
    OutOfMemory(Box<OomReport>),
    /// The request can never be served, whatever is free.
    #[error("invalid request of {bytes} bytes aligned to {align}: {reason}")]
    InvalidRequest {
        /// Bytes asked for.
        bytes: u64,
        /// Alignment asked for, in bytes.
        align: u64,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A block came to an allocator that did not make it, or that no longer holds it.
    #[error("block at {addr:#x} ({bytes} bytes) is not held by '{allocator}': {reason}")]
    ForeignBlock {
        /// Address of the block.
        addr: u64,
        /// Size of the block in bytes.
        bytes: u64,
        /// Allocator that was asked.
        allocator: String,
        /// What gave it away.
        reason: &'static str,
        /// The block, if it was to be freed: it is as live as before, and its owner can still free it.
        block: Refused,
    },
    /// The device has no such API.
    #[error("'{allocator}' needs {capability}, which {device} does not have")]
    Unsupported {
        /// Backend that was asked for.
        allocator: &'static str,
        /// Missing capability.
        capability: &'static str,
        /// Device that lacks it.
        device: String,
    },
    /// The allocator does not do this on any device; its [`Capabilities`](crate::backends::Capabilities) say so.
    #[error("'{allocator}' has no {capability}")]
    Incapable {
        /// Allocator that was asked.
        allocator: &'static str,
        /// What it lacks.
        capability: &'static str,
    },
    /// An allocator was given settings that are not of its type.
    #[error("these are settings of another allocator: {found}")]
    Settings {
        /// The settings.
        found: String,
    },
    /// A file that the settings name cannot be used.
    #[error("'{allocator}' cannot use {}: {reason}", path.display())]
    File {
        /// Backend that was asked for.
        allocator: &'static str,
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with it, and how to mend it.
        reason: String,
    },
    /// A capture ended while blocks that were allocated in it were held.
    #[error(
        "{bytes} bytes in {blocks} block(s) of '{allocator}' are still held at the end of the capture that they were allocated in: \
         free them before the capture ends, or allocate them before it begins"
    )]
    CaptureLive {
        /// Allocator whose capture ended.
        allocator: &'static str,
        /// Blocks that are held.
        blocks: usize,
        /// Their size in bytes.
        bytes: u64,
    },
    /// A private pool cannot be used or released as asked.
    #[error("private pool of '{allocator}': {reason}")]
    PrivatePool {
        /// Allocator that was asked.
        allocator: &'static str,
        /// Why not.
        reason: String,
    },
    /// A capture cannot begin, end or be released as asked.
    #[error("graph capture with '{allocator}': {reason}")]
    Capture {
        /// Allocator that was asked.
        allocator: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The checker found that a contract was broken.
    #[error("checker: {0}")]
    Violation(String),
    /// A driver call failed for another reason than memory.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl From<OomReport> for AllocError {
    fn from(report: OomReport) -> Self {
        Self::OutOfMemory(Box::new(report))
    }
}

impl AllocError {
    /// An error for a block that `allocator` does not hold and that was to be freed.
    #[must_use]
    pub fn foreign(allocator: &str, reason: &'static str, block: Block) -> Self {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        Self::ForeignBlock { addr, bytes, allocator: allocator.into(), reason, block: Refused::new(block) }
    }

    /// The error for a block that is not held here and that the caller keeps.
    #[must_use]
    pub fn not_held(allocator: &str, reason: &'static str, block: &Block) -> Self {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        Self::ForeignBlock { addr, bytes, allocator: allocator.into(), reason, block: Refused::default() }
    }

    /// Adds what can be changed about the allocator, if memory was free but in pieces.
    #[must_use]
    pub(crate) fn with_setting(mut self, against_fragmentation: impl FnOnce() -> Option<String>) -> Self {
        if let Self::OutOfMemory(report) = &mut self {
            report.against_fragmentation = against_fragmentation();
        }
        self
    }

    /// Whether memory was short, so that freeing some and asking again may help.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory(_) => true,
            Self::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}

/// Why a private pool did not go back to a checkpoint: nothing changed.
#[derive(Debug)]
pub struct RestoreError {
    /// The blocks that were given back, which the client holds as before.
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
        // 40 are free: 20 of its own stream in pieces, and as many of another.
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
