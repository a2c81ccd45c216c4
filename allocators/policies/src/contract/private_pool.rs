//! Captures and private pools: memory that serves only requests which name it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A capture of the allocator that began it. Captures are unique in the process, so only code that was given one can end or release
/// it, and another allocator does not know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CaptureId(u64);

impl CaptureId {
    /// The next capture, for an allocator that begins one.
    #[must_use]
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only uniqueness matters.
        Self(NEXT.fetch_add(1, Relaxed))
    }

    /// As a number, which is never 0.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for CaptureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A private pool of the allocator that made it (PyTorch's `torch.cuda.MemPool`, and the pool that CUDA graphs share).
///
/// Pools are unique in the process, so only code that was given one can use or release it, and another allocator does not know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrivatePool(CaptureId);

impl PrivatePool {
    /// The next pool, for an allocator that makes one.
    #[must_use]
    pub fn next() -> Self {
        Self(CaptureId::next())
    }

    /// As an [`Owner`](crate::space::Owner) names it: captures and private pools are numbered together.
    #[must_use]
    pub fn id(self) -> CaptureId {
        self.0
    }
}

impl fmt::Display for PrivatePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
