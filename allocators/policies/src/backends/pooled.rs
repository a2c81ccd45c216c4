//! The contract of an allocator over a heap, common to every policy that consists of parts.
//!
//! A [`Policy`] has the rules of a request and a free. [`Pooled`] makes a [`DeviceAllocator`] of it: one lock, tokens, announced
//! uses, graphs, reports, and teardown.

mod captures;
mod policy;

pub use policy::{Found, Policy, Rules, put_back, serve};

use super::captures::Captures;
use super::private_pools::{PrivatePools, obstacle};
use super::registry::{Capabilities, GraphCapture, SegmentUse, StreamUse};
use super::restore::{Restores, restore};
use super::{foreign, not_held};
use crate::contract::{
    AllocError, Block, CaptureId, Completions, DeviceAllocator, GraphMemory, Ledger, MemoryLimit, Pages, Parts, Path,
    PrivatePool, Request, RestoreError, Snapshot, Stats, Takeover, Tokens, no_checkpoints, no_private_pools,
};
use crate::policy::Heap;
use crate::policy::grow::{Segments as _, release_cached, release_private};
use crate::space::{BlockId, FreeList, Owner};
use captures::Kept;
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab_device::{DeviceAddr, DriverError, StreamId};

/// An allocator with the rules `P`.
///
/// One lock is held during every operation, driver calls included.
#[derive(Debug)]
pub struct Pooled<P: Policy> {
    tokens: Tokens,
    name: &'static str,
    state: Mutex<State<P>>,
}

#[derive(Debug)]
struct State<P> {
    policy: P,
    heap: Heap,
    captures: Captures<Kept>,
    pools: PrivatePools,
}

impl<P: Policy> Pooled<P> {
    /// Capabilities of every allocator over a heap.
    pub const CAPABILITIES: Capabilities = Capabilities {
        graph_capture: GraphCapture::Pinned,
        streams: StreamUse::Own,
        segments: SegmentUse::Many,
        caches: true,
        sets_aside: true,
        coalesces: true,
        retries: true,
        snapshot: true,
        restores: true,
        private_pools: true,
        checkpoints: true,
        used_elsewhere: Path::Deferred,
        ..Capabilities::LEAST
    };

    /// An allocator over a heap, with a policy of another crate.
    ///
    /// # Safety
    /// Clients get the blocks that the policy returns, without a further check. The policy promises:
    /// - The block that [`allocate`](Policy::allocate) returns was [taken](Heap::take) for `owner` in this call, with at least the
    ///   requested bytes, and was not put back.
    /// - A taken block is put back once, and only in the [`free`](Policy::free) of that block: by [`Heap::put`] if `users` is
    ///   empty or the owner's later work is behind theirs, else by [`Heap::put_after`] with all of them.
    /// - [`rules`](Policy::rules) always gives the same rule for sizes, and blocks are multiples of its granule.
    /// - A part of its own ([`Fit::by`](crate::policy::fit::Fit::by), `Size::Custom`, `Split::Custom`) does what its trait says.
    ///
    /// The heap is new: no block of it is taken, and no other heap uses its part `fit`.
    pub unsafe fn new(heap: Heap, policy: P) -> Self {
        Self::over(heap, policy)
    }

    /// An allocator over a heap, with a policy of this library, which keeps the promises of [`new`](Self::new).
    pub(super) fn over(heap: Heap, policy: P) -> Self {
        let name = policy.rules().name;
        let state = State { policy, heap, captures: Captures::default(), pools: PrivatePools::default() };
        Self { tokens: Tokens::next(), name, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The block for the client. Its token names the record.
    fn mint(&self, heap: &Heap, block: BlockId, path: Path) -> Block {
        let record = &heap.space()[block];
        let addr = DeviceAddr::handed_out(record.addr);
        let token = self.tokens.of_record(block.number());
        // SAFETY: segments of the device are aligned, and part `size` rounds to multiples of 256. Blocks of a space do not overlap,
        // and the policy promises (see `new`) that this one was just taken, and that it stays taken until it is freed and its uses
        // have completed.
        unsafe { Block::new(addr, record.bytes, record.requested, path, token) }
    }

    fn serve(&self, state: &mut State<P>, owner: Owner, request: Request) -> Result<Block, AllocError> {
        let served = state.policy.allocate(&mut state.heap, owner, request.bytes);
        let (block, path) = served.map_err(|error| error.with_setting(|| state.policy.against_fragmentation()))?;
        state.heap.space_mut().account_mut().note_peak(owner.stream);
        Ok(self.mint(&state.heap, block, path))
    }

    /// Whether a private pool can be restored to a checkpoint when some blocks are freed; returns these blocks.
    fn check_restore(
        &self,
        state: &mut State<P>,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: &[(Block, StreamId)],
    ) -> Result<Vec<BlockId>, AllocError> {
        state.pools.need(self.name, pool)?;
        if !state.policy.restores() {
            return Err(no_checkpoints(self.name));
        }
        state.heap.process_events()?;
        let (mut ids, mut given) = (Vec::new(), BTreeSet::new());
        for (block, _) in held {
            let Some(id) = self.find(&state.heap, block) else { return Err(not_held(self.name, block)) };
            // A block that another stream uses is deferred once it is freed.
            if !state.heap.is_used_elsewhere(id) {
                given.insert(block.addr());
            }
            ids.push(id);
        }
        let now = state.heap.space().snapshot_where(|list| list.owner.private == Some(pool.id()));
        let checked = obstacle(&now, checkpoint, |addr| given.contains(&addr));
        checked.map_err(|reason| AllocError::PrivatePool { allocator: self.name, reason })?;
        Ok(ids)
    }

    /// The live block of a client's block, if it belongs to this allocator.
    fn find(&self, heap: &Heap, block: &Block) -> Option<BlockId> {
        heap.space().find_held(self.tokens.record(block.token())?, block.addr().get())
    }
}

impl<P: Policy> DeviceAllocator for Pooled<P> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn settings(&self) -> serde_json::Value {
        let state = self.lock();
        let mut settings = state.policy.rules().settings.clone();
        // The limit may have changed.
        if let Some(limit) = settings.get_mut("memory_limit") {
            *limit = state.heap.limit().into();
        }
        settings
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        let state = &mut *self.lock();
        let captured = state.captures.open_on(stream).and_then(|kept| kept.private);
        let private = captured.or_else(|| state.pools.pool_of(stream).map(PrivatePool::id));
        self.serve(state, Owner { stream, private }, request)
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        let state = &mut *self.lock();
        let Some(held) = self.find(&state.heap, &block) else { return Err(foreign(self.name, block)) };
        if state.defer_to_capture(held) {
            return Ok(Path::Deferred);
        }
        let users = state.heap.take_uses(held);
        state.policy.free(&mut state.heap, held, &users)
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let state = &mut *self.lock();
        let Some(held) = self.find(&state.heap, block) else { return Err(not_held(self.name, block)) };
        state.heap.announce(held, stream);
        Ok(())
    }

    fn forget_stream(&self, stream: StreamId) {
        self.lock().heap.forget_stream(stream);
    }

    fn stats(&self) -> Stats {
        let state = self.lock();
        let stranded_bytes = state.heap.pending().stranded_bytes();
        let mut stats = Stats { stranded_bytes, ..state.heap.space().account().stats().clone() };
        state.policy.count(&mut stats);
        stats
    }

    fn reset_peaks(&self) {
        self.lock().heap.reset_peaks();
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(self.lock().heap.space().snapshot())
    }

    fn ledger_at_peak(&self) -> Ledger {
        self.lock().heap.space().account().ledger_at_peak()
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        let state = &mut *self.lock();
        let released = release_cached(&mut state.heap, keep_bytes);
        state.heap.take_pending_error()?;
        Ok(released?)
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            graphs: Some(self),
            private_pools: Some(self),
            pages: Some(self),
            limit: Some(self),
            takeover: Some(self),
            completions: Some(self),
        }
    }
}

impl<P: Policy> GraphMemory for Pooled<P> {
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        self.lock().begin_capture(self.name, stream)
    }

    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.lock().end_capture(self.name, capture)
    }

    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.lock().release_capture(self.name, capture)
    }

    fn set_reuse_in_captures(&self, on: bool) -> bool {
        self.lock().heap.reuse_in_captures(on);
        true
    }
}

impl<P: Policy> crate::contract::PrivatePools for Pooled<P> {
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        request.validate()?;
        let state = &mut *self.lock();
        state.pools.need(self.name, pool)?;
        self.serve(state, Owner { stream, private: Some(pool.id()) }, request)
    }

    fn pool_create(&self) -> Result<PrivatePool, AllocError> {
        let state = &mut *self.lock();
        if !state.policy.has_private_pools() {
            return Err(no_private_pools(self.name));
        }
        let pool = state.pools.create();
        state.heap.pin(pool.id());
        Ok(pool)
    }

    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        self.lock().pools.begin(self.name, pool, stream)
    }

    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
        self.lock().pools.end(self.name, stream)
    }

    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError> {
        let state = &mut *self.lock();
        let private = state.pools.release(self.name, pool)?;
        state.heap.unpin(private);
        Ok(())
    }

    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        let state = &mut *self.lock();
        state.pools.need_released(self.name, pool)?;
        state.heap.process_events()?;
        Ok(release_private(&mut state.heap, pool.id())?)
    }

    fn pool_checkpoint(&self, pool: PrivatePool) -> Result<Snapshot, AllocError> {
        let state = self.lock();
        // A policy that splits blocks by a scheme of its own cannot take over other blocks.
        if !state.policy.restores() {
            return Err(no_checkpoints(self.name));
        }
        Ok(state.heap.space().snapshot_where(|list| list.owner.private == Some(pool.id())))
    }

    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        let state = &mut *self.lock();
        let ids = match self.check_restore(state, pool, checkpoint, &held) {
            Ok(ids) => ids,
            Err(error) => return Err(RestoreError { held, error }),
        };
        for held in ids {
            let users = state.heap.take_uses(held);
            // Blocks elsewhere in the pool may wait for other streams. One whose stream records no event is stranded, and `trim`
            // reports it.
            if let Err(AllocError::Driver(error)) = state.policy.free(&mut state.heap, held, &users) {
                state.heap.note_pending_error(error);
            }
        }
        let cut = state.heap.cut_as_before(pool.id(), checkpoint);
        let blocks = cut.map_err(|reason| {
            debug_assert!(false, "this should have been found before: {reason}");
            RestoreError { held: Vec::new(), error: AllocError::PrivatePool { allocator: self.name, reason } }
        })?;
        Ok(blocks.into_iter().map(|block| self.mint(&state.heap, block, Path::Hit)).collect())
    }
}

impl<P: Policy> Pages for Pooled<P> {
    fn export(&self, block: &Block) -> Result<crate::contract::Exported, AllocError> {
        let state = &mut *self.lock();
        let Some(held) = self.find(&state.heap, block) else { return Err(not_held(self.name, block)) };
        state.heap.export(self.name, held)
    }

    fn exported_descriptor(&self, number: i32) -> Option<std::os::fd::OwnedFd> {
        self.lock().heap.exported_descriptor(number)
    }

    fn pin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        let pinned = self.lock().heap.pin_pages(addr.get(), bytes);
        if pinned { Ok(()) } else { Err(crate::contract::no_pages(self.name)) }
    }

    fn unpin(&self, addr: DeviceAddr, bytes: u64) -> Result<(), AllocError> {
        let unpinned = self.lock().heap.unpin_pages(addr.get(), bytes);
        if unpinned { Ok(()) } else { Err(crate::contract::no_pages(self.name)) }
    }
}

impl<P: Policy> MemoryLimit for Pooled<P> {
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        let state = &mut *self.lock();
        state.policy.set_memory_limit(&mut state.heap, bytes)
    }
}

impl<P: Policy> Takeover for Pooled<P> {
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        let state = &mut *self.lock();
        // A snapshot does not contain the beginning of ranges of addresses.
        if state.heap.source().is_expandable() || !state.policy.restores() {
            return Ok(None);
        }
        let pools = &state.pools;
        let owner = |stream| Owner { stream, private: pools.pool_of(stream).map(PrivatePool::id) };
        let blocks = restore(&mut state.heap, (self.name, &state.policy.rules().size, &owner), snapshot, age)?;
        Ok(Some(blocks.into_iter().map(|block| self.mint(&state.heap, block, Path::DriverAlloc)).collect()))
    }
}

impl<P: Policy> Completions for Pooled<P> {
    fn tell_completed(&self, on: bool) {
        *self.lock().heap.completed() = on.then(Vec::new);
    }

    fn take_completed(&self) -> Vec<DeviceAddr> {
        self.lock().heap.completed().as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Restores for Heap {
    type Held = BlockId;

    fn give_back(&mut self, segment: BlockId) -> Result<(), DriverError> {
        self.release(self.space()[segment].segment).map(|_| ())
    }

    fn leave_whole(&mut self, _list: FreeList, segment: BlockId, age: u64) {
        self.space_mut().set_age(segment, age);
    }

    fn cut(&mut self, _list: FreeList, segment: BlockId, parts: &[(u64, Option<u64>)]) -> Vec<BlockId> {
        let blocks = self.carve(segment, parts);
        blocks.into_iter().zip(parts).filter(|(_, part)| part.1.is_some()).map(|(id, _)| id).collect()
    }
}

impl<P: Policy> Drop for Pooled<P> {
    fn drop(&mut self) {
        let state = &mut *self.lock();
        state.end_all_captures();
        // Other segments are released by calls that wait for the device themselves.
        if state.heap.source().is_expandable() {
            state.heap.end();
        }
        // An error cannot be returned here. It ends a round, so one call that fails once does not keep the remainder reserved;
        // segments that remain are released with the device's context.
        for _ in 0..2 {
            if release_cached(&mut state.heap, 0).is_ok() {
                break;
            }
        }
        state.policy.end(&mut state.heap);
        state.heap.destroy_events();
    }
}
