//! Deferred frees: blocks that another stream was announced to use (`record_stream`) wait for an event on it, as in PyTorch.
//!
//! The queues are those of [`policy::pending`](crate::policy::pending). While they have any block, `waiting` is not zero, so that
//! every request processes them.

use super::blocks::BlockIndex;
use super::{Caching, not_held};
use crate::contract::{AllocError, Block, DeviceAllocator, Path};
use crate::policy::pending::{self, Freed};
use crate::sync::lock;
use std::sync::TryLockError;
use std::sync::atomic::Ordering::{Relaxed, Release};
use vramlab_device::{DeviceAddr, Driver, DriverError, StreamId};

/// A pending block, by the numbers of its shard and record.
type PendingBlock = (u32, BlockIndex);

/// Deferred frees.
pub(super) type Pending = pending::Pending<PendingBlock>;

impl Caching {
    /// Processes the queues with the device, and frees the blocks that the work puts into its list. Its last argument is true while
    /// any graph is captured.
    fn work_on(
        &self,
        pending: &mut Pending,
        work: impl FnOnce(&mut Pending, &dyn Driver, bool, &mut Vec<PendingBlock>) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let (was_empty, mut done) = (pending.is_empty(), Vec::new());
        let outcome = work(pending, self.driver.as_ref(), self.is_capturing(), &mut done);
        done.into_iter().for_each(|(shard_id, index)| self.complete(shard_id, index));
        // Before the lock is released, so that a thread that sees no pending block is right.
        match (was_empty, pending.is_empty()) {
            (true, false) => self.waiting.fetch_add(1, Release),
            (false, true) => self.waiting.fetch_sub(1, Relaxed),
            _ => 0,
        };
        outcome
    }

    /// Defers a pending block until the queued work of some streams has completed.
    fn wait_for(&self, pending: &mut Pending, freed: Freed<PendingBlock>) -> Result<(), DriverError> {
        self.work_on(pending, |pending, driver, capturing, _| pending.wait_for(driver, freed, capturing))
    }

    /// A free of a block that is flagged as shared.
    #[cold]
    pub(super) fn defer(&self, shard_id: u32, index: BlockIndex) -> Result<Path, AllocError> {
        let Some(shard) = self.shards.by_id(shard_id) else { return Ok(Path::Failed) };
        if self.any_capture() && self.defer_to_capture(shard, index) {
            return Ok(Path::Deferred);
        }
        let pending = &mut *lock(&self.pending);
        let now = self.searches.load(Relaxed);
        let freed = self.totals.step(shard, &self.shards, |counted, waiting| {
            let (cache, uses) = counted.parts();
            let users = uses.remove(&index).unwrap_or_default();
            if users.is_empty() {
                // Flagged for a capture that has ended meanwhile.
                cache.set_shared(index, false);
                return Err(cache.take_back(index, now));
            }
            let block = cache.blocks()[index];
            waiting.add_block(block.pool, block.bytes, block.requested);
            cache.defer(index);
            Ok((users, block.bytes))
        });
        match freed {
            Ok((users, bytes)) => {
                let (block, stream, private) = ((shard_id, index), shard.stream, self.shards.is_private(shard));
                self.wait_for(pending, Freed { block, bytes, stream, users, private })?;
                Ok(Path::Deferred)
            }
            Err(joined) => Ok(if joined { Path::Coalesce } else { Path::Hit }),
        }
    }

    /// Frees a block whose free was deferred to the end of a capture; uses on other streams are waited for now.
    pub(super) fn free_after_capture(&self, shard_id: u32, index: BlockIndex) -> Result<(), DriverError> {
        let Some(shard) = self.shards.by_id(shard_id) else { return Ok(()) };
        let pending = &mut *lock(&self.pending);
        let (users, bytes) = {
            let mut shard = shard.lock();
            (shard.uses().remove(&index).unwrap_or_default(), shard.cache().blocks()[index].bytes)
        };
        if users.is_empty() {
            self.complete(shard_id, index);
            return Ok(());
        }
        let (block, stream, private) = ((shard_id, index), shard.stream, self.shards.is_private(shard));
        self.wait_for(pending, Freed { block, bytes, stream, users, private })
    }

    /// PyTorch's `process_events`, for a request of a stream: frees blocks whose events have completed. False when another thread
    /// does it now.
    #[cold]
    pub(super) fn process_events_for(&self, stream: StreamId) -> Result<bool, DriverError> {
        match self.pending.try_lock() {
            Ok(mut pending) => self.process(&mut pending, Some(stream)).map(|()| true),
            Err(TryLockError::Poisoned(poisoned)) => {
                self.process(&mut poisoned.into_inner(), Some(stream)).map(|()| true)
            }
            Err(TryLockError::WouldBlock) => Ok(false),
        }
    }

    /// As [`process_events_for`](Self::process_events_for), but waits for another thread that does it now.
    pub(super) fn wait_and_process_events(&self, asking: Option<StreamId>) -> Result<(), DriverError> {
        self.process(&mut lock(&self.pending), asking)
    }

    fn process(&self, pending: &mut Pending, asking: Option<StreamId>) -> Result<(), DriverError> {
        self.work_on(pending, |pending, driver, capturing, done| pending.process(driver, capturing, asking, done))
    }

    /// Removes a stream whose work has completed from all blocks that wait for it.
    pub(super) fn end_pending_of(&self, stream: StreamId) {
        let forgotten = self.work_on(&mut lock(&self.pending), |pending, _, _, done| {
            pending.forget_stream(stream, done);
            Ok(())
        });
        debug_assert_eq!(forgotten, Ok(()));
    }

    /// Waits for every deferred free.
    pub(super) fn synchronize_pending(&self) -> Result<(), DriverError> {
        self.work_on(&mut lock(&self.pending), Pending::synchronize)
    }

    /// Makes a pending block that no stream uses any more reusable.
    fn complete(&self, shard_id: u32, index: BlockIndex) {
        let Some(shard) = self.shards.by_id(shard_id) else { return };
        let now = self.searches.load(Relaxed);
        self.totals.step(shard, &self.shards, |cache, waiting| {
            let block = cache.blocks()[index];
            if let Some(completed) = lock(&self.completed).as_mut() {
                completed.push(DeviceAddr::handed_out(block.addr));
            }
            cache.end_pending(index, now);
            waiting.remove_block(block.pool, block.bytes, block.requested);
        });
    }

    /// Announces a use of a live block by another stream.
    pub(super) fn announce(&self, block: &Block, user: StreamId) -> Result<(), AllocError> {
        let Some(shard) = self.shard_of(block) else { return Err(not_held(self.name(), block)) };
        let mut counted = self.totals.enter(shard, &self.shards);
        let Some(index) = Self::find(&counted, block) else { return Err(not_held(self.name(), block)) };
        if user != shard.stream {
            let (cache, uses) = counted.parts();
            let users = uses.entry(index).or_default();
            if !users.contains(&user) {
                users.push(user);
            }
            cache.set_shared(index, true);
        }
        Ok(())
    }
}
