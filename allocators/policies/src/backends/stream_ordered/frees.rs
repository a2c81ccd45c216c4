//! Frees: in stream order, behind uses on other streams, in captures, and repeated where the driver refused.

use super::{ANY, LiveBlock, State, StreamOrdered};
use crate::contract::Path;
use vramlab_device::{DeviceAddr, DriverError, StreamId};

impl State {
    /// Keeps a block whose free the driver refused.
    fn refuse(&mut self, addr: DeviceAddr, block: LiveBlock) {
        self.decided(block.bytes);
        self.stranded.increase(block.bytes);
        self.refused.push_back((addr, block));
    }

    fn take_refused(&mut self) -> Option<(DeviceAddr, LiveBlock)> {
        let taken = self.refused.pop_front()?;
        self.stranded.decrease(taken.1.bytes);
        self.leave(taken.1.bytes);
        Some(taken)
    }
}

impl StreamOrdered {
    /// Makes `owner` wait for the work queued on `user`.
    fn order(&self, user: StreamId, owner: StreamId) -> Result<(), DriverError> {
        let event = self.driver.event_create(false)?;
        let ordered = self.driver.event_record(event, user).and_then(|()| self.driver.stream_wait_event(owner, event));
        // SAFETY: no other code has the event; destroying it does not undo the wait (CUDA frees it when it has completed).
        let destroyed = unsafe { self.driver.event_destroy(event) };
        ordered.and(destroyed)
    }

    /// Queues the free of a block behind its uses; the caller does the counting.
    fn queue_free(&self, addr: DeviceAddr, block: &LiveBlock) -> Result<(), DriverError> {
        // Without an event, waiting on the host gives the same order.
        let ordered = block
            .uses
            .iter()
            .try_for_each(|&user| self.order(user, block.stream).or_else(|_| self.driver.stream_synchronize(user)));
        // SAFETY: the address was live here; its uses on its own stream were queued before (the client's promise) and those on
        // other streams are ordered before this point by the waits above.
        ordered.and_then(|()| unsafe { self.pools().mem_free_async(addr, block.stream) })
    }

    /// Queues the free of a block that no work uses any more, also when its streams were destroyed.
    fn queue_idle_free(&self, addr: DeviceAddr, stream: StreamId) -> Result<(), DriverError> {
        // SAFETY: the address was live here, and the whole device was waited for after its last use.
        let freed = unsafe { self.pools().mem_free_async(addr, stream) };
        let Err(refused) = freed else { return Ok(()) };
        // Its stream may have been destroyed: any other stream works.
        let Ok(fresh) = self.driver.stream_create() else { return Err(refused) };
        // SAFETY: as above.
        let freed = unsafe { self.pools().mem_free_async(addr, fresh) };
        // SAFETY: made above and used by no other code; work queued on it completes first.
        let destroyed = unsafe { self.driver.stream_destroy(fresh) };
        freed.and(destroyed)
    }

    fn count_free(&self, bytes: u64) {
        let mut state = self.lock();
        state.decided(bytes);
        state.stats.num_device_free += 1;
        state.stats.count_reusable(ANY, bytes, bytes);
    }

    /// Queues the free of a block that is in no list, or puts it among the refused ones.
    pub(super) fn give_back(&self, addr: DeviceAddr, block: LiveBlock) -> Result<(), DriverError> {
        let freed = self.queue_free(addr, &block);
        if freed.is_ok() {
            self.count_free(block.bytes);
        } else {
            self.lock().refuse(addr, block);
        }
        freed
    }

    /// Whether a free on `stream`, ordered after the work of `uses`, would become a part of a graph.
    fn is_captured(&self, state: &State, block: &LiveBlock) -> Result<bool, DriverError> {
        if state.captures.all_ended() {
            return Ok(false);
        }
        for stream in block.uses.iter().chain([&block.stream]) {
            if state.captures.is_open_on(*stream) || self.driver.stream_is_capturing(*stream)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Frees a block of the pool that is in no list, or defers its free to the end of a capture.
    pub(super) fn free_now_or_later(&self, addr: DeviceAddr, block: LiveBlock) -> Result<Path, DriverError> {
        let path = if block.uses.is_empty() { Path::Pool } else { Path::WaitInserted };
        let mut state = self.lock();
        // A driver that does not report it counts as one that captures: late is safe.
        let captured = self.is_captured(&state, &block);
        if !matches!(captured, Ok(false))
            && let Some(kept) = state.captures.open_of(block.stream)
        {
            let bytes = block.bytes;
            kept.waiting.push((addr, block));
            state.decided(bytes);
            return captured.map(|_| Path::Deferred);
        }
        drop(state);
        self.give_back(addr, block)?;
        Ok(path)
    }

    /// Frees a block in the capture that it was allocated in.
    pub(super) fn free_in_capture(&self, addr: DeviceAddr, block: &LiveBlock) -> Result<Path, DriverError> {
        // Work of a joined stream is ordered before the free inside the graph.
        let ordered = block.uses.iter().try_for_each(|&user| self.order(user, block.stream));
        // SAFETY: the address was live here; its uses on its own stream were captured before (the client's promise), and
        // those on joined streams are ordered before this point.
        let freed = ordered.and_then(|()| unsafe { self.pools().mem_free_async(addr, block.stream) });
        let mut state = self.lock();
        state.decided(block.bytes);
        // A block that could not be freed in its graph is released with it, or with the next launch.
        state.stats.count_reusable(ANY, block.bytes, block.bytes);
        state.stats.num_device_free += u64::from(freed.is_ok());
        freed.map(|()| Path::Pool)
    }

    /// Repeats the frees that the driver refused; returns the first error.
    pub(super) fn retry_refused(&self) -> Result<(), DriverError> {
        self.again(|addr, block| self.free_now_or_later(addr, block).map(|_| ()))
    }

    /// Waits for the device, and frees the blocks that the driver refused before. A destroyed stream can be neither waited for nor
    /// freed on, which is not needed after that wait. Returns the first error that left a block refused.
    pub(super) fn wait_and_reclaim(&self) -> Result<(), DriverError> {
        // Before the wait, so that work that is queued now has completed after it.
        let retried = self.retry_refused();
        self.driver.device_synchronize()?;
        if retried.is_ok() {
            return Ok(());
        }
        let freed = self.again(|addr, block| {
            let freed = self.queue_idle_free(addr, block.stream);
            match freed {
                Ok(()) => self.count_free(block.bytes),
                Err(_) => self.lock().refuse(addr, block),
            }
            freed
        });
        self.driver.device_synchronize()?;
        freed
    }

    /// Applies a function to every block that was refused so far; returns the first error.
    fn again(&self, mut free: impl FnMut(DeviceAddr, LiveBlock) -> Result<(), DriverError>) -> Result<(), DriverError> {
        let (mut outcome, refused) = (Ok(()), self.lock().refused.len());
        // Blocks that are refused again are appended.
        for _ in 0..refused {
            let _streams = self.naming_streams();
            let Some((addr, block)) = self.lock().take_refused() else { break };
            outcome = outcome.and(free(addr, block));
        }
        outcome
    }
}
