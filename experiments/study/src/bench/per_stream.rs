//! An allocator for each stream behind one trait object: threads that use streams of their own then share nothing but
//! the instrument around it, and what it costs them is the instrument's.

use anyhow::{Result, ensure};
use std::sync::Arc;
use vramlab::{AllocError, Block, DeviceAllocator, Ledger, Path, Request, Snapshot, Stats, StreamId};

/// Sends each call to the allocator of its stream.
#[derive(Debug)]
pub(crate) struct PerStream(Vec<(StreamId, Arc<dyn DeviceAllocator>)>);

impl PerStream {
    /// An allocator made by `build` for each stream; there is at least one.
    pub(crate) fn new(
        streams: &[StreamId],
        build: impl Fn() -> Result<Arc<dyn DeviceAllocator>, AllocError>,
    ) -> Result<Self> {
        ensure!(!streams.is_empty(), "no stream to work on");
        Ok(Self(streams.iter().map(|stream| Ok((*stream, build()?))).collect::<Result<_, AllocError>>()?))
    }

    /// Of the first stream, for a stream that is none of ours.
    fn of(&self, stream: StreamId) -> &dyn DeviceAllocator {
        self.0.iter().find(|(own, _)| *own == stream).unwrap_or(&self.0[0]).1.as_ref()
    }
}

impl DeviceAllocator for PerStream {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.of(stream).allocate(request, stream)
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        // SAFETY: the caller's promise is the inner allocator's; `stream` is the block's, so it is the one that made it.
        unsafe { self.of(stream).deallocate(block, stream) }
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.of(stream).record_use(block, stream)
    }

    fn name(&self) -> &'static str {
        self.0[0].1.name()
    }

    fn settings(&self) -> serde_json::Value {
        self.0[0].1.settings()
    }

    /// Of the first.
    fn stats(&self) -> Stats {
        self.0[0].1.stats()
    }

    fn reset_peaks(&self) {
        self.0.iter().for_each(|(_, inner)| inner.reset_peaks());
    }

    fn snapshot(&self) -> Option<Snapshot> {
        None
    }

    /// Of the first.
    fn ledger_at_peak(&self) -> Ledger {
        self.0[0].1.ledger_at_peak()
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        self.0.iter().map(|(_, inner)| inner.trim(keep_bytes)).sum()
    }
}
