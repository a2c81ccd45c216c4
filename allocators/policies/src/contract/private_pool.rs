//! Private pools: memory that only requests which name the pool are served from.

use super::CaptureId;
use std::fmt;

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
