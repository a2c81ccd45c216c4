//! Events that are recorded behind the work of a stream, and reused when nothing waits for them any more.
#![forbid(unsafe_code)]

use vramlab_device::{Driver, DriverError, EventId, StreamId};

/// Idle events.
#[derive(Debug, Default)]
pub struct Events(Vec<EventId>);

impl Events {
    /// Records an event behind the queued work of a stream. `None` while the stream is captured, when the event would become a part
    /// of the graph; `capturing` is true while any capture is open. The event belongs to the caller until [`reuse`](Self::reuse).
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn record(
        &mut self,
        driver: &dyn Driver,
        stream: StreamId,
        capturing: bool,
    ) -> Result<Option<EventId>, DriverError> {
        if capturing && driver.stream_is_capturing(stream)? {
            return Ok(None);
        }
        let event = match self.0.pop() {
            Some(event) => event,
            None => driver.event_create(false)?,
        };
        match driver.event_record(event, stream) {
            Ok(()) => Ok(Some(event)),
            Err(error) => {
                self.0.push(event);
                Err(error)
            }
        }
    }

    /// Takes back an event that nothing waits for.
    pub(crate) fn reuse(&mut self, event: EventId) {
        self.0.push(event);
    }

    /// Every event, for destruction.
    pub(crate) fn take(&mut self) -> Vec<EventId> {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use vramlab_device::{CallKind, FaultyDriver, NullDriver};

    #[test]
    fn an_event_is_used_again_also_when_it_could_not_be_recorded() {
        let driver = FaultyDriver::new(Arc::new(NullDriver::new(1 << 30)));
        let stream = driver.stream_create().unwrap();
        let mut events = Events::default();
        driver.fail(CallKind::EventRecord, 0, DriverError::ILLEGAL_STATE);
        assert!(events.record(&driver, stream, false).is_err());
        // A second event would have to be created, which fails.
        driver.fail(CallKind::EventCreate, 0, DriverError::OUT_OF_MEMORY);
        let event = events.record(&driver, stream, false).unwrap().unwrap();
        events.reuse(event);
        assert_eq!(events.record(&driver, stream, false).unwrap(), Some(event));
        assert!(events.record(&driver, stream, false).is_err(), "that one is in use");
        assert_eq!(events.take(), []);
    }

    #[test]
    fn nothing_is_recorded_on_a_stream_that_is_captured() {
        let driver = NullDriver::new(1 << 30);
        let [captured, other] = [(); 2].map(|()| driver.stream_create().unwrap());
        driver.graphs().unwrap().capture_begin(captured).unwrap();
        let mut events = Events::default();
        assert_eq!(events.record(&driver, captured, true).unwrap(), None);
        assert!(events.record(&driver, other, true).unwrap().is_some());
    }
}
