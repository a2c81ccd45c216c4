//! Deferred frees: blocks that other streams use when they are freed (PyTorch's `record_stream`).
//!
//! A block that other streams were announced to use is not reusable when the client frees it. An event is recorded on each of those
//! streams, and the block is reusable when the last event has completed.

use super::captured::Captured;
use super::events::Events;
use crate::contract::Gauge;
use crate::space::BlockId;
use std::collections::{BTreeMap, VecDeque};
use vramlab_device::{CallKind, DeviceAddr, Driver, DriverError, EventId, StreamId};

/// A block that the client freed.
#[derive(Clone, Debug)]
pub(crate) struct Freed<B> {
    pub(crate) block: B,
    pub(crate) bytes: u64,
    /// Its own stream.
    pub(crate) stream: StreamId,
    /// The other streams that were announced to use it.
    pub(crate) users: Vec<StreamId>,
    /// Whether it belongs to a private pool. Captures are served from private pools, so no other block is reusable within one.
    pub(crate) private: bool,
}

/// A deferred free in the queue of one stream.
#[derive(Clone, Copy, Debug)]
struct Waiting<B> {
    /// Missing where it could not be recorded, or the stream is being captured; it is recorded later, which is late but safe.
    event: Option<EventId>,
    block: B,
}

/// The state of a deferred free.
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    /// Number of streams that it still waits for.
    streams: u32,
    /// Number of these streams that were destroyed, so that they record no event any more.
    destroyed_streams: u32,
    bytes: u64,
}

/// Deferred frees, oldest first by stream. An allocator identifies its blocks by a `B`.
#[derive(Debug)]
pub struct Pending<B = BlockId> {
    queues: BTreeMap<StreamId, VecDeque<Waiting<B>>>,
    left: BTreeMap<B, Left>,
    /// Whether blocks that are freed in a capture may be reused within it; otherwise they wait for its end.
    reuses_in_captures: bool,
    captured: Captured<B>,
    events: Events,
    /// Bytes of deferred frees that wait for destroyed streams, which record no event. Only a wait for the whole device shows that
    /// their work has completed.
    stranded: Gauge,
    /// These deferred frees, oldest first: an order that does not depend on how the allocator numbers its blocks.
    stranded_blocks: Vec<B>,
    /// The first error of a deferred free that no free call returned, until it is taken.
    error: Option<DriverError>,
    /// Streams that were announced to use a live block.
    uses: BTreeMap<B, Vec<StreamId>>,
    /// Addresses of deferred frees that have completed since they were last read; `None` while nobody reads them.
    pub(crate) completed: Option<Vec<DeviceAddr>>,
}

impl<B> Default for Pending<B> {
    fn default() -> Self {
        Self {
            queues: BTreeMap::new(),
            left: BTreeMap::new(),
            reuses_in_captures: false,
            captured: Captured::default(),
            events: Events::default(),
            stranded: Gauge::default(),
            stranded_blocks: Vec::new(),
            error: None,
            uses: BTreeMap::new(),
            completed: None,
        }
    }
}

impl<B: Copy + Ord> Pending<B> {
    /// Whether no block waits, except for destroyed streams.
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.captured.is_empty()
    }

    /// Sets whether blocks that are freed in a capture may be reused within it.
    pub(crate) fn reuse_in_captures(&mut self, on: bool) {
        self.reuses_in_captures = on;
    }

    pub(crate) fn reuses_in_captures(&self) -> bool {
        self.reuses_in_captures
    }

    /// Bytes of blocks that wait for destroyed streams; `None` when there never were any.
    #[must_use]
    pub fn stranded_bytes(&self) -> Option<Gauge> {
        Some(self.stranded).filter(|gauge| gauge.allocated > 0)
    }

    /// Notes that work on another stream uses a live block.
    pub(crate) fn announce(&mut self, block: B, user: StreamId) {
        let users = self.uses.entry(block).or_default();
        if !users.contains(&user) {
            users.push(user);
        }
    }

    /// Whether another stream was announced to use a live block.
    pub(super) fn is_used_elsewhere(&self, block: B) -> bool {
        self.uses.get(&block).is_some_and(|users| !users.is_empty())
    }

    /// Removes and returns the streams that were announced to use a block.
    pub(crate) fn take_uses(&mut self, block: B) -> Vec<StreamId> {
        if self.uses.is_empty() {
            return Vec::new();
        }
        self.uses.remove(&block).unwrap_or_default()
    }

    /// Restarts the peak.
    pub(crate) fn reset_peaks(&mut self) {
        self.stranded.reset_peak();
    }

    /// Keeps an error that the current call cannot return.
    pub(crate) fn note_error(&mut self, error: DriverError) {
        self.error.get_or_insert(error);
    }

    /// Removes a stream whose work has completed; adds the blocks that waited only for it to `done`.
    pub(crate) fn forget_stream(&mut self, stream: StreamId, done: &mut Vec<B>) {
        self.captured.forget_stream(stream);
        self.uses.values_mut().for_each(|users| users.retain(|user| *user != stream));
        for Waiting { event, block } in self.queues.remove(&stream).into_iter().flatten() {
            event.into_iter().for_each(|event| self.events.reuse(event));
            self.complete(block, done);
        }
    }

    /// The error that an earlier call could not return, once.
    pub(crate) fn take_error(&mut self) -> Option<DriverError> {
        self.error.take()
    }

    /// The idle events.
    pub(crate) fn events(&mut self) -> &mut Events {
        &mut self.events
    }

    /// Defers a block until the queued work of the streams that use it has completed. `capturing` is true while any capture is
    /// open.
    ///
    /// # Errors
    /// Those of the driver. The block waits nevertheless: for the whole device, where a stream records no event.
    pub(crate) fn wait_for(
        &mut self,
        driver: &dyn Driver,
        freed: Freed<B>,
        capturing: bool,
    ) -> Result<(), DriverError> {
        let in_capture = match capturing && self.reuses_in_captures && freed.private {
            true => self.captured.add(driver, &freed),
            false => Ok(false),
        };
        match in_capture {
            Ok(true) => Ok(()),
            other => other.map(|_| ()).and(self.wait_for_events(driver, &freed, capturing)),
        }
    }

    fn wait_for_events(&mut self, driver: &dyn Driver, freed: &Freed<B>, capturing: bool) -> Result<(), DriverError> {
        debug_assert!(!freed.users.is_empty(), "a block that waits for nothing is free");
        let Freed { block, bytes, ref users, .. } = *freed;
        // CAST: one for each stream.
        self.left.insert(block, Left { streams: users.len() as u32, destroyed_streams: 0, bytes });
        let mut outcome = Ok(());
        for &user in users {
            let event = match self.events.record(driver, user, capturing) {
                Ok(event) => event,
                Err(error) => {
                    let may_be_made_later = error.call == CallKind::EventCreate;
                    outcome = Err(error);
                    if !may_be_made_later {
                        self.strand(block);
                        continue;
                    }
                    None
                }
            };
            self.queues.entry(user).or_default().push_back(Waiting { event, block });
        }
        outcome
    }

    fn strand(&mut self, block: B) {
        let left = self.left.entry(block).or_default();
        left.destroyed_streams += 1;
        if left.destroyed_streams == 1 {
            self.stranded.increase(left.bytes);
            self.stranded_blocks.push(block);
        }
    }

    /// Counts one stream of a block as completed; true when it was the last.
    fn complete(&mut self, block: B, done: &mut Vec<B>) {
        let left = self.left.entry(block).or_default();
        left.streams -= 1;
        if left.streams == 0 {
            self.left.remove(&block);
            done.push(block);
        }
    }

    /// PyTorch's `process_events`: adds the blocks whose events have completed to `done`. Each stream's queue is read up to its
    /// first pending event. `asking` is the stream of the request that needs memory, if there is one.
    ///
    /// # Errors
    /// Those of the driver; `done` is correct nevertheless.
    pub(crate) fn process(
        &mut self,
        driver: &dyn Driver,
        capturing: bool,
        asking: Option<StreamId>,
        done: &mut Vec<B>,
    ) -> Result<(), DriverError> {
        let captured = match asking {
            Some(stream) if capturing => self.captured.find_reusable(driver, stream, done),
            _ => self.after_captures(driver, capturing, done),
        };
        captured.and(self.drain(driver, capturing, false, done, |event| driver.event_query(event)))
    }

    /// Records events for blocks that were freed in captures once these have ended.
    fn after_captures(&mut self, driver: &dyn Driver, capturing: bool, done: &mut Vec<B>) -> Result<(), DriverError> {
        if capturing || self.captured.is_empty() {
            return Ok(());
        }
        let mut outcome = Ok(());
        for freed in self.captured.take() {
            if freed.users.is_empty() {
                // All streams that it waited for were destroyed.
                done.push(freed.block);
                continue;
            }
            // Each waits, whatever the result for the others.
            outcome = outcome.and(self.wait_for_events(driver, &freed, false));
        }
        outcome
    }

    /// Waits for every deferred free, and for the whole device where necessary.
    ///
    /// # Errors
    /// Those of the driver; `done` is correct nevertheless.
    pub(crate) fn synchronize(
        &mut self,
        driver: &dyn Driver,
        capturing: bool,
        done: &mut Vec<B>,
    ) -> Result<(), DriverError> {
        let captured = self.after_captures(driver, capturing, done);
        captured
            .and(self.drain(driver, capturing, true, done, |event| driver.event_synchronize(event).map(|()| true)))?;
        // A device with an open capture cannot be waited for; if the wait is refused, the state does not change.
        if self.stranded_blocks.is_empty() || capturing || driver.device_synchronize().is_err() {
            return Ok(());
        }
        for block in std::mem::take(&mut self.stranded_blocks) {
            let left = self.left.entry(block).or_default();
            let destroyed = std::mem::take(&mut left.destroyed_streams);
            self.stranded.decrease(left.bytes);
            (0..destroyed).for_each(|_| self.complete(block, done));
        }
        Ok(())
    }

    /// Completes frees from the front of each queue while `is_done` returns true. A stream that records no event strands the blocks
    /// that wait for it; `all` strands them also when no event can be recorded for it now.
    fn drain(
        &mut self,
        driver: &dyn Driver,
        capturing: bool,
        all: bool,
        done: &mut Vec<B>,
        is_done: impl Fn(EventId) -> Result<bool, DriverError>,
    ) -> Result<(), DriverError> {
        if self.queues.is_empty() {
            return Ok(());
        }
        let streams: Vec<StreamId> = self.queues.keys().copied().collect();
        for stream in streams {
            while let Some(&Waiting { event, block }) = self.queues.get(&stream).and_then(VecDeque::front) {
                let recorded = match event {
                    Some(event) => Ok(Some(event)),
                    None => self.events.record(driver, stream, capturing),
                };
                let Some(queue) = self.queues.get_mut(&stream) else { break };
                match recorded {
                    Ok(Some(event)) => {
                        queue[0].event = Some(event);
                        if !is_done(event)? {
                            break;
                        }
                        queue.pop_front();
                        self.events.reuse(event);
                        self.complete(block, done);
                    }
                    Ok(None) => break,
                    Err(error) if error.call == CallKind::EventCreate && !all => break,
                    Err(error) => {
                        queue.pop_front();
                        self.error.get_or_insert(error);
                        self.strand(block);
                    }
                }
            }
        }
        self.queues.retain(|_, queue| !queue.is_empty());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use vramlab_device::{FaultyDriver, NullDriver};

    const BYTES: u64 = 1 << 20;

    struct Bench {
        driver: FaultyDriver,
        streams: [StreamId; 2],
        pending: Pending,
    }

    impl Bench {
        fn new() -> Self {
            let driver = FaultyDriver::new(Arc::new(NullDriver::new(1 << 30)));
            let streams = [driver.stream_create().unwrap(), driver.stream_create().unwrap()];
            Self { driver, streams, pending: Pending::default() }
        }

        /// Completed blocks.
        fn process(&mut self) -> Vec<u32> {
            let mut completed = Vec::new();
            self.pending.process(&self.driver, false, None, &mut completed).unwrap();
            completed.into_iter().map(BlockId::number).collect()
        }

        /// A free of a block of another stream that both use.
        fn free(&mut self, block: BlockId) -> Result<(), DriverError> {
            let (stream, users) = (crate::stream(9), self.streams.to_vec());
            self.pending.wait_for(&self.driver, Freed { block, bytes: BYTES, stream, users, private: false }, false)
        }

        fn stranded(&self) -> Option<u64> {
            self.pending.stranded_bytes().map(|gauge| gauge.current)
        }
    }

    #[test]
    fn block_completes_with_its_last_stream_and_events_are_reused() {
        let mut bench = Bench::new();
        for number in 0..3 {
            let block = BlockId::numbered(number);
            bench.free(block).unwrap();
            assert_eq!(bench.process(), [number]);
        }
        assert_eq!((bench.process(), bench.pending.events().take().len()), (vec![], 2));
        assert_eq!(bench.stranded(), None);
    }

    #[test]
    fn an_event_that_cannot_be_made_is_made_later() {
        let mut bench = Bench::new();
        bench.driver.fail(CallKind::EventCreate, 1, DriverError::OUT_OF_MEMORY);
        let block = BlockId::numbered(4);
        assert!(bench.free(block).is_err());
        assert_eq!((bench.process(), bench.stranded()), (vec![4], None));
    }

    #[test]
    fn a_stream_that_takes_no_event_is_waited_for_with_the_device() {
        let mut bench = Bench::new();
        bench.driver.fail(CallKind::EventRecord, 0, DriverError::INVALID_HANDLE);
        let block = BlockId::numbered(4);
        assert!(bench.free(block).is_err());
        assert_eq!((bench.process(), bench.stranded()), (vec![], Some(BYTES)));
        let mut completed = Vec::new();
        bench.pending.synchronize(&bench.driver, true, &mut completed).unwrap();
        assert_eq!((completed.len(), bench.stranded()), (0, Some(BYTES)), "not while a graph is captured");
        bench.pending.synchronize(&bench.driver, false, &mut completed).unwrap();
        assert_eq!((completed, bench.stranded()), (vec![block], Some(0)));
    }

    /// Allocators that number their blocks differently must still complete them in the same order.
    #[test]
    fn blocks_that_waited_for_the_device_complete_in_the_order_of_their_frees() {
        let mut bench = Bench::new();
        for number in [9, 4] {
            bench.driver.fail(CallKind::EventRecord, 0, DriverError::OUT_OF_MEMORY);
            assert!(bench.free(BlockId::numbered(number)).is_err());
        }
        let mut completed = Vec::new();
        bench.pending.synchronize(&bench.driver, false, &mut completed).unwrap();
        assert_eq!(completed, [9, 4].map(BlockId::numbered));
    }
}
