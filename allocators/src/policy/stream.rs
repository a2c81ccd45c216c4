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
