//! Deferred frees: blocks that another stream was announced to use (`record_stream`) wait for an event on it, as in PyTorch.

use super::{Caching, not_held};
use crate::backends::caching::core::blocks::BlockIndex;
use crate::contract::{AllocError, Block, DeviceAllocator, Gauge, Path};
use crate::device::{CallKind, DriverError, EventId, StreamId};
use crate::policy::events::Events;
use crate::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::sync::TryLockError;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// A block that waits for an event.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    /// Missing where it could not be made or had to wait for the end of a capture; it is recorded later, which is late
    /// but safe.
    event: Option<EventId>,
    shard: u32,
    index: BlockIndex,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// By stream that is waited for, oldest first.
    queues: BTreeMap<StreamId, VecDeque<Waiting>>,
    events: Events,
    /// Blocks used by streams that take no event any more, by shard and record, and how many such streams each waits
    /// for. Nothing but a wait for the whole device tells that their work is over, so no request looks at them.
    stranded: BTreeMap<(u32, BlockIndex), u32>,
    stranded_bytes: Gauge,
    /// The first error by which a block was stranded when nobody was freeing it, until somebody takes it.
    error: Option<DriverError>,
}

impl Pending {
    /// Bytes of stranded blocks; `None` when there never were any.
    pub(super) fn stranded_bytes(&self) -> Option<Gauge> {
        Some(self.stranded_bytes).filter(|gauge| gauge.allocated > 0)
    }

    /// Lets the peak start again.
    pub(super) fn restart_peaks(&mut self) {
        self.stranded_bytes.reset_peak();
    }

    /// Every event that waits for its next use.
    pub(super) fn take_events(&mut self) -> Vec<EventId> {
        self.events.take()
    }
}

impl Caching {
    /// Queues an event behind the work that a pending free waits for; `None` while the stream is captured, when it would
    /// become a part of the graph.
    fn record_event(&self, pending: &mut Pending, stream: StreamId) -> Result<Option<EventId>, DriverError> {
        pending.events.record(self.driver.as_ref(), stream, self.any_capture())
    }

    /// A free of a block that was announced to other streams.
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
            let block = *cache.blocks().get(index);
            if users.is_empty() {
                // Flagged for a capture that has ended meanwhile.
                cache.set_shared(index, false);
                return Err(cache.take_back(index, block.requested(), now));
            }
            waiting.add_block(block.pool(), block.bytes(), block.requested());
            // CAST: one entry for each stream.
            cache.defer(index, users.len() as u32);
            Ok(users)
        });
        match freed {
            Ok(uses) => {
                self.wait_for(pending, shard_id, index, uses).map(|()| Path::Deferred).map_err(AllocError::from)
            }
            Err(joined) => Ok(if joined { Path::Coalesce } else { Path::Hit }),
        }
    }

    /// Sets a pending block aside because of a stream that takes no event.
    fn strand(&self, pending: &mut Pending, shard_id: u32, index: BlockIndex) {
        let streams = pending.stranded.entry((shard_id, index)).or_insert(0);
        *streams += 1;
        if *streams == 1
            && let Some(shard) = self.shards.by_id(shard_id)
        {
            pending.stranded_bytes.increase(shard.lock().cache().blocks().get(index).bytes());
        }
    }

    /// Frees stranded blocks once the whole device has been waited for. What cannot be waited for stays aside: while a
    /// capture is open, and when the device refuses.
    fn reclaim_stranded(&self, pending: &mut Pending) {
        if pending.stranded.is_empty() || self.any_capture() || self.driver.device_synchronize().is_err() {
            return;
        }
        for ((shard_id, index), streams) in std::mem::take(&mut pending.stranded) {
            if let Some(shard) = self.shards.by_id(shard_id) {
                pending.stranded_bytes.decrease(shard.lock().cache().blocks().get(index).bytes());
            }
            (0..streams).for_each(|_| self.complete(shard_id, index));
        }
    }

    /// Lets a pending block wait for what is queued on some streams. Where a stream takes no event, because it is gone,
    /// the block is set aside and the error says so.
    fn wait_for(
        &self,
        pending: &mut Pending,
        shard: u32,
        index: BlockIndex,
        uses: Vec<StreamId>,
    ) -> Result<(), DriverError> {
        let mut outcome = Ok(());
        for user in uses {
            let event = match self.record_event(pending, user) {
                Ok(event) => event,
                Err(error) => {
                    let may_be_made_later = error.call == CallKind::EventCreate;
                    outcome = Err(error);
                    if !may_be_made_later {
                        self.strand(pending, shard, index);
                        continue;
                    }
                    None
                }
            };
            pending.queues.entry(user).or_default().push_back(Waiting { event, shard, index });
            // Before the lock is let go, so that who sees none finds none.
            self.waiting.fetch_add(1, Release);
        }
        outcome
    }

    /// Frees a block whose free waited for the end of a capture; streams that it was announced to are waited for now.
    pub(super) fn free_after_capture(&self, shard_id: u32, index: BlockIndex) -> Result<(), DriverError> {
        let Some(shard) = self.shards.by_id(shard_id) else { return Ok(()) };
        let pending = &mut *lock(&self.pending);
        let uses = shard.lock().uses().remove(&index).unwrap_or_default();
        if uses.is_empty() {
            self.complete(shard_id, index);
            return Ok(());
        }
        self.wait_for(pending, shard_id, index, uses)
    }

    /// PyTorch's `process_events`: frees blocks whose events have completed. Each stream's queue is looked at until its
    /// first event that has not. False when another thread is at it.
    #[cold]
    pub(super) fn process_events(&self) -> Result<bool, DriverError> {
        match self.pending.try_lock() {
            Ok(mut pending) => self.process(&mut pending).map(|()| true),
            Err(TryLockError::Poisoned(poisoned)) => self.process(&mut poisoned.into_inner()).map(|()| true),
            Err(TryLockError::WouldBlock) => Ok(false),
        }
    }

    /// The same, waiting for a thread that is at it.
    pub(super) fn wait_and_process_events(&self) -> Result<(), DriverError> {
        self.process(&mut lock(&self.pending))
    }

    fn process(&self, pending: &mut Pending) -> Result<(), DriverError> {
        self.drain(pending, false, |caching, event| caching.driver.event_query(event))
    }

    /// Waits for every pending free.
    pub(super) fn synchronize_pending(&self) -> Result<(), DriverError> {
        let pending = &mut *lock(&self.pending);
        self.drain(pending, true, |caching, event| caching.driver.event_synchronize(event).map(|()| true))?;
        self.reclaim_stranded(pending);
        Ok(())
    }

    /// An error that a request would not have been the place to tell, once.
    pub(super) fn take_pending_error(&self) -> Result<(), DriverError> {
        lock(&self.pending).error.take().map_or(Ok(()), Err)
    }

    /// Completes frees from the front of each queue while `done` says so. A stream that takes no event strands the blocks
    /// that wait for it; `all` says whether it does as well when no event can be made for it now.
    fn drain(
        &self,
        pending: &mut Pending,
        all: bool,
        done: impl Fn(&Self, EventId) -> Result<bool, DriverError>,
    ) -> Result<(), DriverError> {
        let streams: Vec<StreamId> = pending.queues.keys().copied().collect();
        for stream in streams {
            while let Some(&Waiting { event, shard, index }) = pending.queues.get(&stream).and_then(VecDeque::front) {
                let recorded = event.map_or_else(|| self.record_event(pending, stream), |event| Ok(Some(event)));
                let Some(queue) = pending.queues.get_mut(&stream) else { break };
                match recorded {
                    Ok(Some(event)) => {
                        if let Some(front) = queue.front_mut() {
                            front.event = Some(event);
                        }
                        if !done(self, event)? {
                            break;
                        }
                        queue.pop_front();
                        pending.events.reuse(event);
                        self.complete(shard, index);
                    }
                    Ok(None) => break,
                    Err(error) if error.call == CallKind::EventCreate && !all => break,
                    Err(error) => {
                        queue.pop_front();
                        pending.error.get_or_insert(error);
                        self.strand(pending, shard, index);
                    }
                }
                self.waiting.fetch_sub(1, Relaxed);
            }
        }
        pending.queues.retain(|_, queue| !queue.is_empty());
        Ok(())
    }

    /// One of the events of a pending block is over; the block is free after the last.
    fn complete(&self, shard_id: u32, index: BlockIndex) {
        let Some(shard) = self.shards.by_id(shard_id) else { return };
        let now = self.searches.load(Relaxed);
        self.totals.step(shard, &self.shards, |cache, waiting| {
            let block = *cache.blocks().get(index);
            if cache.event_done(index, now) {
                waiting.remove_block(block.pool(), block.bytes(), block.requested());
            }
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
