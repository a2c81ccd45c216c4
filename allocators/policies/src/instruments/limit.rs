//! A byte limit on what the client holds, the same for every backend.

use crate::contract::{
    AllocError, Block, DeviceAllocator, Instrument, OomReport, Path, PrivatePool, Request, RestoreError, Snapshot,
    Token,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::{DeviceAddr, StreamId};

/// Refuses an allocation that would take the bytes in live blocks over the limit.
///
/// What the backend reserves beyond them, it does not bound. Most backends have a limit of their own, on reserved bytes:
/// the setting `memory_limit`, under which they release what is idle before they give up. This one is for backends without,
/// see [`Selection::set_memory_limit`](crate::Selection::set_memory_limit).
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
    /// Blocks that were handed out: their bytes and what the backend calls them, by which one of another allocator at the
    /// same address is told apart.
    live: HashMap<DeviceAddr, (u64, Token)>,
}

impl State {
    /// Takes `bytes` if they fit.
    fn take(&mut self, bytes: u64, limit: u64) -> bool {
        let sum = self.held.checked_add(bytes).filter(|sum| *sum <= limit);
        self.held = sum.unwrap_or(self.held);
        sum.is_some()
    }
}

impl Limit {
    /// Keeps the blocks that `inner` has handed out through this decorator at or below `limit` bytes. They come back the
    /// same way: a block that was not handed out here is [`AllocError::ForeignBlock`].
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, limit: u64) -> Self {
        Self { inner, limit, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a request if it keeps to the limit.
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
        // The block may be larger than the request; what it really takes is counted.
        if state.take(block.bytes() - bytes, self.limit) {
            // A block of a graph goes with the graph, and its address may come again.
            let gone = state.live.insert(block.addr(), (block.bytes(), block.token()));
            state.held -= gone.map_or(0, |(bytes, _)| bytes);
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
                return Err(AllocError::foreign(self.inner.name(), "it was not handed out under this limit", block));
            }
            state.live.remove(&addr);
            // Before the memory goes: another thread may be given the address at once. After a failing free, too, the
            // block is gone from the client's side.
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

    /// What was held at the checkpoint is held again, also above the limit.
    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        let gone: Vec<DeviceAddr> = held.iter().map(|(block, _)| block.addr()).collect();
        // No other thread is handed what goes: it is of a pool that is asked for no memory.
        // SAFETY: passed on.
        let restored = unsafe { self.inner.pool_restore(pool, checkpoint, held) }?;
        let mut state = self.lock();
        for (bytes, _) in gone.iter().filter_map(|addr| state.live.remove(addr)).collect::<Vec<_>>() {
            state.held -= bytes;
        }
        state.held += restored.iter().map(Block::bytes).sum::<u64>();
        state.live.extend(restored.iter().map(|block| (block.addr(), (block.bytes(), block.token()))));
        Ok(restored)
    }
}
