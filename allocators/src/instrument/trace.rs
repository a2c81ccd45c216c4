//! Every operation in order, with times.

use crate::allocator::{Block, DeviceAllocator, Path, Request};
use crate::device::StreamId;
use crate::error::AllocError;
use crate::instrument::Clock;
use crate::snapshot::{Ledger, Snapshot};
use crate::stats::Stats;
use serde::Serialize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TraceAction {
    /// A block was handed out.
    Alloc,
    /// A block came back.
    FreeRequested,
    /// Work on another stream was announced.
    RecordUse,
    /// A request was refused for lack of memory.
    Oom,
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TraceEvent {
    /// End of the operation on the device's clock.
    pub time_ns: u64,
    /// What happened.
    pub action: TraceAction,
    /// First address; absent for a refused request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<u64>,
    /// Bytes that were asked for.
    pub size: u64,
    /// Size of the block in bytes; 0 for a refused request.
    pub block: u64,
    /// Stream.
    pub stream: u64,
    /// How it was served.
    pub path: &'static str,
}

/// Keeps the operations in memory until they are taken.
#[derive(Debug)]
pub struct EventTrace {
    inner: Arc<dyn DeviceAllocator>,
    clock: Arc<dyn Clock>,
    events: Mutex<Vec<TraceEvent>>,
}

impl EventTrace {
    /// Records the operations of `inner` by `clock`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, clock: Arc<dyn Clock>) -> Self {
        Self { inner, clock, events: Mutex::default() }
    }

    /// The events since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<TraceEvent> {
        std::mem::take(&mut self.events.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<TraceEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, action: TraceAction, addr: Option<u64>, size: u64, block: u64, stream: StreamId, path: Path) {
        let mut events = self.lock();
        // Under the lock, so that times do not go back from one event to the next.
        let time_ns = self.clock.now_ns();
        events.push(TraceEvent { time_ns, action, addr, size, block, stream: stream.0, path: path.name() });
    }
}

impl DeviceAllocator for EventTrace {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        let result = self.inner.allocate(request, stream);
        match &result {
            Ok(block) => {
                self.push(
                    TraceAction::Alloc,
                    Some(block.addr().get()),
                    request.bytes,
                    block.bytes(),
                    stream,
                    block.path(),
                );
            }
            Err(error) if error.is_out_of_memory() => {
                self.push(TraceAction::Oom, None, request.bytes, 0, stream, Path::Failed)
            }
            Err(_) => {}
        }
        result
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let (addr, size, bytes) = (block.addr().get(), block.requested(), block.bytes());
        // Held over the free: once the block is back, another thread may be handed its address, and that must not be
        // recorded first.
        let mut events = self.lock();
        // SAFETY: the caller's promise is the inner allocator's.
        let result = unsafe { self.inner.deallocate(block, stream) };
        let path = result.as_ref().unwrap_or(&Path::Failed).name();
        events.push(TraceEvent {
            time_ns: self.clock.now_ns(),
            action: TraceAction::FreeRequested,
            addr: Some(addr),
            size,
            block: bytes,
            stream: stream.0,
            path,
        });
        result
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.inner.record_use(block, stream)?;
        self.push(
            TraceAction::RecordUse,
            Some(block.addr().get()),
            block.requested(),
            block.bytes(),
            stream,
            Path::Deferred,
        );
        Ok(())
    }

    super::pass_on!();
}
