//! The backends: one file each, one list of their names.

pub mod caching;
mod captures;
pub mod naive;
pub mod stream_ordered;

pub use caching::{Caching, CachingSettings};
pub use naive::Naive;
pub use stream_ordered::StreamOrdered;

use crate::contract::AllocError;
use crate::contract::{Block, DeviceAllocator};
use crate::device::{Driver, PoolSettings};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Which allocator a block is from: no two of a process share one. Devices hand out the same addresses, so an address does
/// not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InstanceId(u64);

impl InstanceId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Relaxed))
    }

    /// As the token of a block.
    fn get(self) -> u64 {
        self.0
    }

    /// Where this allocator begins to number what it has, so that the numbers of two rarely meet: of `n` allocators that
    /// are made in a row no two begin closer than 2^32 / (3 n) to each other (multiples of the golden ratio).
    fn first_number(self) -> u32 {
        // CAST: the remainder is meant.
        (self.0 as u32).wrapping_mul(0x9E37_79B9)
    }
}

const NOT_LIVE: &str = "it is not among the live blocks";

/// The error for a block that is not held here; it holds the block.
#[cold]
fn foreign(allocator: &str, block: Block) -> AllocError {
    AllocError::foreign(allocator, NOT_LIVE, block)
}

/// The same for a block that the caller keeps.
#[cold]
fn not_held(allocator: &str, block: &Block) -> AllocError {
    AllocError::not_held(allocator, NOT_LIVE, block)
}

/// A backend by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// [`Naive`].
    Naive,
    /// [`Caching`].
    Caching,
    /// [`StreamOrdered`].
    StreamOrdered,
}

impl BackendKind {
    /// Every backend, in the order in which comparisons list them.
    pub const ALL: [BackendKind; 3] = [BackendKind::Naive, BackendKind::Caching, BackendKind::StreamOrdered];

    /// Name on the command line and in records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Caching => "caching",
            Self::StreamOrdered => "stream-ordered",
        }
    }

    /// One line of help.
    #[must_use]
    pub fn summary(self) -> &'static str {
        match self {
            Self::Naive => "asks the driver for each tensor and gives it back (cuMemAlloc, cuMemFree)",
            Self::Caching => "PyTorch's native policy: keeps segments, best fit by stream, size and address",
            Self::StreamOrdered => "the driver's own pool (cuMemAllocFromPoolAsync, cuMemFreeAsync)",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No backend has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no allocator is called '{0}'; there are naive, caching and stream-ordered")]
pub struct UnknownBackend(String);

impl FromStr for BackendKind {
    type Err = UnknownBackend;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| UnknownBackend(name.to_owned()))
    }
}

/// Which backend, with what settings.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocatorSettings {
    /// The backend.
    pub kind: BackendKind,
    /// Settings of [`Caching`].
    pub caching: CachingSettings,
    /// Settings of [`StreamOrdered`].
    pub pool: PoolSettings,
}

impl AllocatorSettings {
    /// A backend with its default settings.
    #[must_use]
    pub fn new(kind: BackendKind) -> Self {
        Self { kind, caching: CachingSettings::default(), pool: PoolSettings::default() }
    }

    /// Builds the backend on a driver.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] when the device lacks what the backend needs; [`AllocError::Driver`] when
    /// setting it up failed.
    pub fn build(&self, driver: &Arc<dyn Driver>) -> Result<Arc<dyn DeviceAllocator>, AllocError> {
        let driver = Arc::clone(driver);
        Ok(match self.kind {
            BackendKind::Naive => Arc::new(Naive::new(driver)),
            BackendKind::Caching => Arc::new(Caching::new(driver, self.caching)),
            BackendKind::StreamOrdered => Arc::new(StreamOrdered::new(driver, self.pool)?),
        })
    }
}
