//! Part `stream`: which streams' free blocks a stream may take, and what that costs.

use crate::device::{Driver, DriverError, EventId, StreamId};
use std::collections::{BTreeMap, BTreeSet};

/// A rule for streams.
#[derive(Debug)]
pub enum Stream {
    /// A stream takes blocks that were freed on it and no others, so that nobody waits (PyTorch).
    Own,
    /// A stream that finds nothing among its own blocks takes one of another stream, and its later work waits on the device
    /// for that stream's last free (RMM's pool). Each free records an event.
    Steal(LastFrees),
}

/// By stream, an event behind the work that came before its last free.
#[derive(Debug, Default)]
pub struct LastFrees {
    events: BTreeMap<StreamId, EventId>,
    /// Streams whose last free has no event, because the driver refused one: nobody takes their blocks.
    unordered: BTreeSet<StreamId>,
}

impl Stream {
    /// Notes that a block was freed on a stream.
    pub(super) fn freed(&mut self, driver: &dyn Driver, stream: StreamId) {
        let Self::Steal(last) = self else { return };
        let event = match last.events.get(&stream) {
            Some(event) => Ok(*event),
            None => driver.event_create(false),
        };
        let recorded = event.and_then(|event| {
            last.events.insert(stream, event);
            driver.event_record(event, stream)
        });
        if recorded.is_ok() {
            last.unordered.remove(&stream);
        } else {
            last.unordered.insert(stream);
        }
    }

    /// Whether a stream's free blocks can be taken by others.
    #[must_use]
    pub fn may_steal_from(&self, stream: StreamId) -> bool {
        match self {
            Self::Own => false,
            Self::Steal(last) => !last.unordered.contains(&stream),
        }
    }

    /// Lets later work of `taker` wait for what was queued on `owner` before its last free.
    ///
    /// # Errors
    /// Those of the driver: then nothing may be taken.
    pub(super) fn order(&self, driver: &dyn Driver, owner: StreamId, taker: StreamId) -> Result<(), DriverError> {
        let Self::Steal(last) = self else { return Ok(()) };
        // Without a free, all that the stream has is fresh from the device.
        last.events.get(&owner).map_or(Ok(()), |event| driver.stream_wait_event(taker, *event))
    }

    /// Every event, for the end.
    pub(super) fn take_events(&mut self) -> Vec<EventId> {
        match self {
            Self::Own => Vec::new(),
            Self::Steal(last) => std::mem::take(&mut last.events).into_values().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::PoolKind;
    use crate::device::{CallKind, FaultyDriver, NullDriver};
    use crate::policy::Heap;
    use crate::policy::fit::Fit;
    use crate::policy::source::Source;
    use crate::space::{Account, FreeList, Owner, Space};
    use std::sync::Arc;

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
        assert_eq!(heap.find(taker, 1, u64::MAX), Some(block), "it stays the taker's");
    }

    #[test]
    fn nothing_is_taken_without_an_order() {
        let (mut heap, [_, taker], _) = freed(Stream::Own);
        assert_eq!(heap.steal(taker, 1, u64::MAX).unwrap(), None, "by this rule never");
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
}
