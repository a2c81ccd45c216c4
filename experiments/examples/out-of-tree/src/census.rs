//! `Census`: an instrument that counts requests by size around any allocator.
//!
//! It implements only [`inner`](Instrument::inner) and the events that it counts. All other calls pass through: frees,
//! captures, private pools, notices of streams.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use vramlab::{AllocError, Block, DeviceAllocator, Instrument, PrivatePool, Request, StreamId};

/// See the [module](self).
///
/// *Cost.* A lock and a map lookup per request.
#[derive(Debug)]
pub struct Census {
    inner: Arc<dyn DeviceAllocator>,
    sizes: Mutex<BTreeMap<u64, u64>>,
}

impl Census {
    /// Counts the requests of `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>) -> Self {
        Self { inner, sizes: Mutex::default() }
    }

    /// Number of requests so far, by size in bytes.
    #[must_use]
    pub fn sizes(&self) -> BTreeMap<u64, u64> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn count(&self, request: Request) {
        *self.sizes.lock().unwrap_or_else(PoisonError::into_inner).entry(request.bytes).or_default() += 1;
    }
}

impl Instrument for Census {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.count(request);
        self.inner.allocate(request, stream)
    }

    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.count(request);
        self.inner.allocate_in(request, stream, pool)
    }
}
