//! A byte limit on live blocks, the same for every backend.

use crate::contract::{
    AllocError, Block, DeviceAllocator, Instrument, OomReport, Path, PrivatePool, Request, RestoreError, Snapshot,
    Token,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::{DeviceAddr, StreamId};

/// Refuses an allocation that would raise the bytes in live blocks above the limit.
///
/// It does not bound reserved memory beyond them. Most backends have a limit of their own, on reserved bytes: the setting
/// `memory_limit`, under which they release idle segments before they give up. This one is for backends without it, see
/// [`Selection::set_memory_limit`](crate::Selection::set_memory_limit).
#[derive(Debug)]
pub struct Limit {
    inner: Arc<dyn DeviceAllocator>,
    limit: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes in `live` and in requests that are being served.
    held: u64,
    /// Allocated blocks: their bytes and tokens, which distinguish them from another allocator's block at the same address.
    live: HashMap<DeviceAddr, (u64, Token)>,
}

impl State {
    /// Adds `bytes` if they fit.
    fn take(&mut self, bytes: u64, limit: u64) -> bool {
        let sum = self.held.checked_add(bytes).filter(|sum| *sum <= limit);
        self.held = sum.unwrap_or(self.held);
        sum.is_some()
    }
}

impl Limit {
    /// Keeps the blocks that `inner` allocates through this wrapper at or below `limit` bytes. They are freed through it, too: the
    /// free of a block that was not allocated here is [`AllocError::ForeignBlock`].
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, limit: u64) -> Self {
        Self { inner, limit, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a request if the limit allows it.
    fn within(
        &self,
        request: Request,
        stream: StreamId,
        allocate: impl FnOnce(&dyn DeviceAllocator) -> Result<Block, AllocError>,
    ) -> Result<Block, AllocError> {
        let bytes = request.bytes;
        if !self.lock().take(bytes, self.limit) {
            return Err(self.refuse(bytes));
        }
        let block = match allocate(self.inner.as_ref()) {
            Ok(block) => block,
            Err(error) => {
                self.lock().held -= bytes;
                return Err(error);
            }
        };
        let mut state = self.lock();
        // The block may be larger than the request; its actual size is counted.
        if state.take(block.bytes() - bytes, self.limit) {
            // A block of a graph is released with the graph, and its address may be returned again.
            let previous = state.live.insert(block.addr(), (block.bytes(), block.token()));
            state.held -= previous.map_or(0, |(bytes, _)| bytes);
            return Ok(block);
        }
        state.held -= bytes;
        drop(state);
        // SAFETY: the block has not been used.
        unsafe { self.inner.deallocate(block, stream) }?;
        Err(self.refuse(bytes))
    }

    fn refuse(&self, bytes: u64) -> AllocError {
        let stats = self.inner.stats();
        let (reserved, active) = (stats.reserved_bytes.all.current, stats.active_bytes.all.current);
        OomReport::new(self.inner.name(), bytes).with_memory(reserved, active).with_limit(Some(self.limit)).into()
    }
}

impl Instrument for Limit {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.within(request, stream, |inner| inner.allocate(request, stream))
    }

    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.within(request, stream, |inner| inner.allocate_in(request, stream, pool))
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let addr = block.addr();
        {
            let mut state = self.lock();
            if state.live.get(&addr) != Some(&(block.bytes(), block.token())) {
                return Err(AllocError::foreign(self.inner.name(), "it was not allocated under this limit", block));
            }
            state.live.remove(&addr);
            // Before the release: afterwards another thread may be given the address immediately. Also after a failing free the
            // client has freed the block.
            state.held -= block.bytes();
        }
        // SAFETY: the caller's promise is the inner allocator's.
        unsafe { self.inner.deallocate(block, stream) }
    }

    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        let Some(blocks) = self.inner.restore(snapshot, age)? else { return Ok(None) };
        let bytes = blocks.iter().map(Block::bytes).sum();
        let mut state = self.lock();
        if state.take(bytes, self.limit) {
            state.live.extend(blocks.iter().map(|block| (block.addr(), (block.bytes(), block.token()))));
            return Ok(Some(blocks));
        }
        drop(state);
        for (block, stream) in blocks.into_iter().zip(super::restored_streams(snapshot)) {
            // SAFETY: the block has not been used.
            unsafe { self.inner.deallocate(block, stream) }?;
        }
        Err(self.refuse(bytes))
    }

    /// Blocks of the checkpoint are live again, also above the limit.
    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        let freed: Vec<DeviceAddr> = held.iter().map(|(block, _)| block.addr()).collect();
        // No other thread gets the freed blocks: they are of a pool that gets no request.
        // SAFETY: the caller's promise is passed on.
        let restored = unsafe { self.inner.pool_restore(pool, checkpoint, held) }?;
        let mut state = self.lock();
        for (bytes, _) in freed.iter().filter_map(|addr| state.live.remove(addr)).collect::<Vec<_>>() {
            state.held -= bytes;
        }
        state.held += restored.iter().map(Block::bytes).sum::<u64>();
        state.live.extend(restored.iter().map(|block| (block.addr(), (block.bytes(), block.token()))));
        Ok(restored)
    }
}
