//! When pages of free memory were last used, and whether that work is over.
//!
//! A page is a handle of an expandable source. It can be taken from one place and mapped at another when all of it is free and
//! the work that used it is over. The work of a stream is over up to a free when the event is that was recorded there.
#![forbid(unsafe_code)]

use super::events::Events;
use std::collections::{BTreeMap, VecDeque};
use vramlab_device::{Driver, DriverError, EventId, StreamId};

/// Events of a stream that wait for this many are looked at, so that there are never many more.
const MANY: usize = 256;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// Frees so far.
    frees: u64,
    /// By address of a page, the stream and the number of the last free that touched it. Pages that were never used are not here.
    last: BTreeMap<u64, (StreamId, u64)>,
    streams: BTreeMap<StreamId, Frees>,
    events: Events,
}

/// Frees on a stream.
#[derive(Debug, Default)]
struct Frees {
    /// Those whose work may not be over, oldest first. An event is missing where none could be recorded; it is recorded
    /// later, which is late but safe.
    waiting: VecDeque<(u64, Option<EventId>)>,
    /// The last one whose work is over.
    over: u64,
}

/// A stream that is gone takes no event.
fn unless_gone(error: DriverError) -> Result<(), DriverError> {
    if error.code == DriverError::INVALID_HANDLE { Ok(()) } else { Err(error) }
}

impl Pages {
    /// Notes that the pages from `start` to `end`, each `page` bytes, became free on a stream.
    ///
    /// # Errors
    /// Those of the driver: the pages are of no use for now.
    pub(super) fn freed(
        &mut self,
        driver: &dyn Driver,
        stream: StreamId,
        (start, end, page): (u64, u64, u64),
        capturing: bool,
    ) -> Result<(), DriverError> {
        self.frees += 1;
        let mut at = start;
        while at < end {
            self.last.insert(at, (stream, self.frees));
            at += page;
        }
        // A stream that is gone takes no event; its pages stay where they are.
        let event = self.events.record(driver, stream, capturing).or_else(|error| unless_gone(error).map(|()| None));
        let frees = self.streams.entry(stream).or_default();
        frees.waiting.push_back((self.frees, event.clone().unwrap_or(None)));
        if frees.waiting.len() > MANY {
            self.poll(driver, stream, capturing)?;
        }
        event.map(|_| ())
    }

    /// Finds out which frees of a stream are over by now.
    fn poll(&mut self, driver: &dyn Driver, stream: StreamId, capturing: bool) -> Result<(), DriverError> {
        while let Some(event) = self.oldest(driver, stream, capturing)? {
            if !driver.event_query(event)? {
                break;
            }
            self.pop(stream);
        }
        Ok(())
    }

    /// The event of the oldest free of a stream that may not be over, recorded now where it is missing.
    fn oldest(
        &mut self,
        driver: &dyn Driver,
        stream: StreamId,
        capturing: bool,
    ) -> Result<Option<EventId>, DriverError> {
        let front = |pages: &Self| pages.streams.get(&stream).and_then(|frees| frees.waiting.front().copied());
        let Some((_, event)) = front(self) else { return Ok(None) };
        if event.is_some() {
            return Ok(event);
        }
        let event = self.events.record(driver, stream, capturing)?;
        if let Some((_, missing)) = self.streams.get_mut(&stream).and_then(|frees| frees.waiting.front_mut()) {
            *missing = event;
        }
        Ok(event)
    }

    fn pop(&mut self, stream: StreamId) {
        if let Some(frees) = self.streams.get_mut(&stream)
            && let Some((number, event)) = frees.waiting.pop_front()
        {
            frees.over = number;
            event.into_iter().for_each(|event| self.events.reuse(event));
        }
    }

    /// Looks at every stream. One that is gone keeps its pages.
    ///
    /// # Errors
    /// The first of the driver; all were looked at.
    pub(super) fn poll_all(&mut self, driver: &dyn Driver, capturing: bool) -> Result<(), DriverError> {
        let streams: Vec<StreamId> = self.streams.keys().copied().collect();
        let mut outcome = Ok(());
        for stream in streams {
            let polled = self.poll(driver, stream, capturing);
            outcome = outcome.and(polled.or_else(unless_gone));
        }
        outcome
    }

    /// Number of the free that touched a page last; 0 for a page that was never used.
    pub(super) fn last_free(&self, page: u64) -> u64 {
        self.last.get(&page).map_or(0, |(_, number)| *number)
    }

    /// Whether the work that used a page is over. With `wait` the host waits for it, and for nothing that was queued later.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn is_over(&mut self, driver: &dyn Driver, page: u64, wait: bool) -> Result<bool, DriverError> {
        let Some(&(stream, number)) = self.last.get(&page) else { return Ok(true) };
        while self.streams.get(&stream).is_some_and(|frees| frees.over < number) {
            let oldest = self.oldest(driver, stream, false);
            let Some(event) = oldest.or_else(|error| unless_gone(error).map(|()| None))? else { return Ok(false) };
            if !wait {
                return Ok(false);
            }
            driver.event_synchronize(event)?;
            self.pop(stream);
        }
        Ok(true)
    }

    /// A page is somewhere else now.
    pub(super) fn forget(&mut self, page: u64) {
        self.last.remove(&page);
    }

    /// Every event, for the end.
    pub(super) fn take_events(&mut self) -> Vec<EventId> {
        let waiting = std::mem::take(&mut self.streams).into_values().flat_map(|frees| frees.waiting);
        let waiting: Vec<EventId> = waiting.filter_map(|(_, event)| event).collect();
        self.events.take().into_iter().chain(waiting).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use vramlab_device::{CallKind, FaultyDriver, NullDriver, Profile, SimDriver, sim::SimMemory};

    const PAGE: u64 = 2 << 20;

    /// Work of some microseconds.
    fn work(driver: &SimDriver, stream: StreamId) {
        driver.launch(stream, "work", (1, 1), 1 << 20, &[]).unwrap();
    }

    #[test]
    fn a_page_is_over_when_the_work_before_its_last_free_is() {
        let driver = SimDriver::new(Profile::h200(), SimMemory::None);
        let stream = driver.stream_create().unwrap();
        let mut pages = Pages::default();
        work(&driver, stream);
        pages.freed(&driver, stream, (0, 2 * PAGE, PAGE), false).unwrap();
        work(&driver, stream);
        pages.freed(&driver, stream, (PAGE, 3 * PAGE, PAGE), false).unwrap();
        assert_eq!([0, PAGE, 2 * PAGE, 3 * PAGE].map(|page| pages.last_free(page)), [1, 2, 2, 0]);

        assert!(pages.is_over(&driver, 3 * PAGE, false).unwrap(), "nothing ever used it");
        assert!(!pages.is_over(&driver, 0, false).unwrap());
        // Waiting for the first page waits for nothing that was queued later.
        assert!(pages.is_over(&driver, 0, true).unwrap());
        assert!(!pages.is_over(&driver, PAGE, false).unwrap());
        driver.device_synchronize().unwrap();
        pages.poll_all(&driver, false).unwrap();
        assert!(pages.is_over(&driver, 2 * PAGE, false).unwrap());
        pages.forget(PAGE);
        assert_eq!(pages.last_free(PAGE), 0);
        assert_eq!(pages.take_events().len(), 2);
    }

    #[test]
    fn an_event_that_could_not_be_made_is_made_later() {
        let driver = FaultyDriver::new(Arc::new(NullDriver::new(1 << 30)));
        let stream = driver.stream_create().unwrap();
        let mut pages = Pages::default();
        driver.fail(CallKind::EventRecord, 0, DriverError::ILLEGAL_STATE);
        assert!(pages.freed(&driver, stream, (0, PAGE, PAGE), false).is_err());
        assert!(!pages.is_over(&driver, 0, false).unwrap(), "no event says so");
        pages.poll_all(&driver, false).unwrap();
        assert!(pages.is_over(&driver, 0, false).unwrap());
    }

    #[test]
    fn pages_of_a_stream_that_is_gone_are_never_over() {
        let driver = FaultyDriver::new(Arc::new(NullDriver::new(1 << 30)));
        let stream = driver.stream_create().unwrap();
        let gone = || driver.fail(CallKind::EventRecord, 0, DriverError::INVALID_HANDLE);
        let mut pages = Pages::default();
        gone();
        pages.freed(&driver, stream, (0, PAGE, PAGE), false).unwrap();
        gone();
        pages.poll_all(&driver, false).unwrap();
        gone();
        assert!(!pages.is_over(&driver, 0, true).unwrap());
    }

    #[test]
    fn there_are_never_many_events() {
        let driver = NullDriver::new(1 << 30);
        let stream = driver.stream_create().unwrap();
        let mut pages = Pages::default();
        for free in 0..10 * MANY as u64 {
            pages.freed(&driver, stream, (free % 7 * PAGE, (free % 7 + 1) * PAGE, PAGE), false).unwrap();
        }
        assert!(pages.take_events().len() <= MANY + 1);
    }
}
