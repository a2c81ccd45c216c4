//! Captures and private pools: memory that only requests which name them are served from.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A capture of the allocator that began it. No two captures of a process share one, so who was not given it cannot end or
/// release a capture, and another allocator knows nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CaptureId(u64);

impl CaptureId {
    /// The next one, for an allocator that begins a capture.
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
/// No two pools of a process share one, so who was not given it cannot use or release a pool, and another allocator knows
/// nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrivatePool(CaptureId);

impl PrivatePool {
    /// The next one, for an allocator that makes a pool.
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
