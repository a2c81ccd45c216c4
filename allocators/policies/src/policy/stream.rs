//! Part `stream`: which streams' free blocks a stream may take, and the cost of that.

use std::collections::BTreeMap;
use vramlab_device::{Driver, DriverError, EventId, StreamId};

/// A rule for streams.
#[derive(Debug)]
pub enum Stream {
    /// A stream takes only blocks that were freed on it, so no stream waits (PyTorch).
    Own,
    /// A stream without a fitting block takes one of another stream, and its later work waits on the device for that stream's last
    /// free (RMM's pool). Each free records an event.
    Steal(LastFrees),
    /// The policy decides which stream takes memory of its arena, and orders the streams itself. A freed block returns to the
    /// stream of its segment.
    Arena,
}

/// By stream, an event behind the work before its last free.
#[derive(Debug, Default)]
pub struct LastFrees {
    last: BTreeMap<StreamId, LastFree>,
    /// The streams in the order of their first request, in which their blocks are searched.
    order: Vec<StreamId>,
}

/// The last free of a stream.
#[derive(Clone, Copy, Debug, Default)]
struct LastFree {
    /// Missing until a block is freed on the stream: until then all its memory is new from the device.
    event: Option<EventId>,
    /// True where the event is not behind that free, because the driver refused it or the stream was destroyed or is captured. Then
    /// no other stream takes this stream's blocks until its next free, or until a wait for the whole device.
    unordered: bool,
}

impl LastFrees {
    fn of(&mut self, stream: StreamId) -> &mut LastFree {
        let order = &mut self.order;
        self.last.entry(stream).or_insert_with(|| {
            order.push(stream);
            LastFree::default()
        })
    }

    fn record(&mut self, driver: &dyn Driver, stream: StreamId, capturing: bool) -> Result<(), DriverError> {
        let last = self.of(stream);
        last.unordered = true;
        // An event that is recorded in a capture becomes a part of the graph.
        if capturing && driver.stream_is_capturing(stream)? {
            return Ok(());
        }
        let event = match last.event {
            Some(event) => event,
            None => *last.event.insert(driver.event_create(false)?),
        };
        match driver.event_record(event, stream) {
            Ok(()) => last.unordered = false,
            // The stream was destroyed, which is not an error of the client: its blocks wait for the whole device.
            Err(error) if error.code == DriverError::INVALID_HANDLE => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl Stream {
    /// Notes a stream, unless it is known.
    pub(super) fn came(&mut self, stream: StreamId) {
        if let Self::Steal(last) = self {
            last.of(stream);
        }
    }

    /// Whether there are streams whose blocks no other stream may take.
    pub(super) fn sets_aside(&self) -> bool {
        matches!(self, Self::Steal(last) if last.last.values().any(|last| last.unordered))
    }

    /// Notes that all work on the device has completed, so the blocks of every stream can be taken.
    pub(super) fn synchronized(&mut self) {
        if let Self::Steal(last) = self {
            last.last.values_mut().for_each(|last| last.unordered = false);
        }
    }

    /// Notes that a block was freed on a stream. `capturing` is true while any capture is open.
    ///
    /// # Errors
    /// Those of the driver: then no other stream takes this stream's blocks for now.
    pub(super) fn freed(&mut self, driver: &dyn Driver, stream: StreamId, capturing: bool) -> Result<(), DriverError> {
        match self {
            Self::Own | Self::Arena => Ok(()),
            Self::Steal(last) => last.record(driver, stream, capturing),
        }
    }

    /// The streams whose blocks a stream may take, in the order of their first request.
    #[must_use]
    pub fn others(&self, taker: StreamId) -> Vec<StreamId> {
        let Self::Steal(last) = self else { return Vec::new() };
        let free = |stream: &&StreamId| **stream != taker && !last.last.get(stream).is_some_and(|last| last.unordered);
        last.order.iter().filter(free).copied().collect()
    }

    /// Makes later work of `taker` wait for the work queued on `owner` before its last free.
    ///
    /// # Errors
    /// Those of the driver: then no block may be taken.
    pub(super) fn order(&self, driver: &dyn Driver, owner: StreamId, taker: StreamId) -> Result<(), DriverError> {
        let Self::Steal(last) = self else { return Ok(()) };
        let event = last.last.get(&owner).and_then(|last| last.event);
        event.map_or(Ok(()), |event| driver.stream_wait_event(taker, event))
    }

    /// Every event, for destruction.
    pub(super) fn take_events(&mut self) -> Vec<EventId> {
        match self {
            Self::Own | Self::Arena => Vec::new(),
            Self::Steal(last) => {
                last.order.clear();
                std::mem::take(&mut last.last).into_values().filter_map(|last| last.event).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::PoolKind;
    use crate::policy::Heap;
    use crate::policy::fit::Fit;
    use crate::policy::grow::Segments as _;
    use crate::policy::source::Source;
    use crate::space::{Account, FreeList, Owner, Space};
    use std::sync::Arc;
    use vramlab_device::{CallKind, FaultyDriver, NullDriver};

    const BYTES: u64 = 2 << 20;

    /// A heap with one block that was freed on the first of two streams.
    fn freed(rule: Stream) -> (Heap, [FreeList; 2], Arc<FaultyDriver>) {
        let faulty = Arc::new(FaultyDriver::new(Arc::new(NullDriver::new(1 << 30))));
        let driver: Arc<dyn Driver> = Arc::clone(&faulty) as _;
        let lists = [driver.stream_create().unwrap(), driver.stream_create().unwrap()]
            .map(|stream| FreeList { owner: Owner::of(stream), pool: None });
        let source = Source::Plain { driver, limit: None };
        let mut heap = Heap::new(Space::new(Account::new()), Fit::best(), rule, source);
        let block = heap.new_segment(lists[0], BYTES).unwrap().unwrap();
        heap.take(block, lists[0], BYTES, BYTES);
        heap.put(block);
        (heap, lists, faulty)
    }

    #[test]
    fn a_stolen_block_is_the_takers_and_its_rest_the_owners() {
        let (mut heap, [owner, taker], _) = freed(Stream::Steal(LastFrees::default()));
        let block = heap.steal(taker, BYTES / 4, u64::MAX).unwrap().unwrap();
        heap.take(block, taker, BYTES / 4, 1);
        assert_eq!(heap.space()[block].list, taker);
        let rest = heap.find(owner, 1, u64::MAX).unwrap();
        assert_eq!((heap.space()[rest].bytes, heap.find(taker, 1, u64::MAX)), (BYTES / 4 * 3, None));
        heap.put(block);
        assert_eq!(heap.find(taker, 1, u64::MAX), Some(block), "it stays with the taker");
    }

    #[test]
    fn nothing_is_taken_without_an_order() {
        let (mut heap, [_, taker], _) = freed(Stream::Own);
        assert_eq!(heap.steal(taker, 1, u64::MAX).unwrap(), None, "this rule never takes one");
        let (mut heap, [owner, taker], faulty) = freed(Stream::Steal(LastFrees::default()));
        faulty.fail(CallKind::StreamWaitEvent, 0, DriverError::ILLEGAL_STATE);
        assert!(heap.steal(taker, 1, u64::MAX).is_err());
        let block = heap.find(owner, 1, u64::MAX).unwrap();
        heap.take(block, owner, BYTES, 1);
        faulty.fail(CallKind::EventRecord, 0, DriverError::ILLEGAL_STATE);
        heap.put(block);
        assert_eq!(heap.steal(taker, 1, u64::MAX).unwrap(), None, "the last free has no event");
    }

    #[test]
    fn pools_are_not_mixed() {
        let (mut heap, [_, taker], _) = freed(Stream::Steal(LastFrees::default()));
        let other = FreeList { pool: Some(PoolKind::Small), ..taker };
        assert_eq!(heap.steal(other, 1, u64::MAX).unwrap(), None);
    }

    #[test]
    fn the_stream_that_came_first_is_asked_first() {
        let (mut heap, [first, second], faulty) = freed(Stream::Steal(LastFrees::default()));
        let lists = [second, first].map(|list| (list, heap.new_segment(list, BYTES).unwrap().unwrap()));
        for (list, block) in lists {
            heap.take(block, list, BYTES, 1);
            heap.put(block);
        }
        let third = FreeList { owner: Owner::of(faulty.stream_create().unwrap()), pool: None };
        let stolen = heap.steal(third, BYTES, u64::MAX).unwrap().unwrap();
        assert_eq!(heap.space()[stolen].list, first);
    }

    #[test]
    fn what_is_taken_over_is_joined_with_what_the_stream_has() {
        let (mut heap, [owner, taker], _) = freed(Stream::Steal(LastFrees::default()));
        let block = heap.find(owner, BYTES, u64::MAX).unwrap();
        // Each stream has one half, and neither half is sufficient.
        heap.take(block, taker, BYTES / 2, 1);
        heap.put(block);
        assert_eq!(heap.steal(taker, BYTES, u64::MAX).unwrap(), None);
        let block = heap.take_over(taker, BYTES, u64::MAX, false).unwrap().unwrap();
        assert_eq!((heap.space()[block].bytes, heap.space()[block].list), (BYTES, taker));
        let split = heap.space().account().stats().inactive_split_bytes.unwrap();
        assert_eq!((split.all.current, heap.find(owner, 1, u64::MAX)), (0, None));
    }
}
