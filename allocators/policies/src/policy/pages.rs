//! The last uses of pages of free memory, and whether that work has completed.
//!
//! A page is a handle of an expandable source. It can be unmapped and mapped at another address when all of it is free and the work
//! that used it has completed. The work of a stream before a free has completed when the event recorded at that free has.
#![forbid(unsafe_code)]

use super::events::Events;
use super::places::Places;
use std::collections::{BTreeMap, VecDeque};
use vramlab_device::{Driver, DriverError, EventId, StreamId};

/// A stream with this number of pending events is polled, so that there are never many more.
const MANY: usize = 64;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Pages {
    /// Bytes of a page.
    page: u64,
    /// Number of frees.
    frees: u64,
    /// The last frees of pages, by the first address of the range of addresses.
    ranges: BTreeMap<u64, LastFrees>,
    streams: BTreeMap<StreamId, Frees>,
    events: Events,
    /// Whether completion was queried. Until then no event is recorded: an event costs as much as the remainder of a free, and a
    /// program with one stream queries only before mappings are removed. From then on each free has an event of its own, so that no
    /// wait includes later work.
    asked: bool,
    /// Addresses of requests since pages were first moved.
    pub(super) places: Places,
}

/// The last frees of the pages of a range, all of whose blocks belong to one stream.
#[derive(Debug)]
struct LastFrees {
    stream: StreamId,
    /// Number of the last free of each page, up to the last page that was ever used; 0 for pages that were never used.
    frees: Vec<u64>,
}

/// Frees on a stream.
#[derive(Debug, Default)]
struct Frees {
    /// Number of a free, and the event whose completion shows that the work up to it has completed, oldest first. An event is
    /// missing where none could be recorded; it is recorded later, which is late but safe.
    waiting: VecDeque<(u64, Option<EventId>)>,
    /// Number of frees after the last of these, and the number of the latest one.
    without: u64,
    latest: u64,
    /// The last free whose work has completed.
    over: u64,
}

/// A destroyed stream records no event.
fn unless_destroyed(error: DriverError) -> Result<(), DriverError> {
    if error.code == DriverError::INVALID_HANDLE { Ok(()) } else { Err(error) }
}

impl Pages {
    /// Unused pages of `page` bytes.
    pub(super) fn new(page: u64) -> Self {
        let (ranges, streams) = (BTreeMap::new(), BTreeMap::new());
        let (events, places) = (Events::default(), Places::default());
        Self { page, frees: 0, ranges, streams, events, asked: false, places }
    }

    /// Notes that the pages from `start` to `end` became free on the stream of the range that begins at `base`. Writes one word for
    /// each of them.
    ///
    /// # Errors
    /// Those of the driver: the pages cannot be moved for now.
    pub(super) fn freed(
        &mut self,
        driver: &dyn Driver,
        stream: StreamId,
        base: u64,
        (start, end): (u64, u64),
        capturing: bool,
    ) -> Result<(), DriverError> {
        self.frees += 1;
        let range = self.ranges.entry(base).or_insert_with(|| LastFrees { stream, frees: Vec::new() });
        debug_assert_eq!(range.stream, stream, "a range should belong to one stream");
        // CAST: numbers of pages.
        let [first, behind] = [start, end].map(|addr| ((addr - base) / self.page) as usize);
        if range.frees.len() < behind {
            range.frees.resize(behind, 0);
        }
        range.frees[first..behind].fill(self.frees);
        let frees = self.streams.entry(stream).or_default();
        (frees.without, frees.latest) = (frees.without + 1, self.frees);
        if !self.asked {
            return Ok(());
        }
        let recorded = self.record(driver, stream, capturing);
        if self.streams.get(&stream).is_some_and(|frees| frees.waiting.len() > MANY) {
            self.poll(driver, stream, capturing)?;
        }
        recorded
    }

    /// Records an event behind the frees of a stream that have none.
    fn record(&mut self, driver: &dyn Driver, stream: StreamId, capturing: bool) -> Result<(), DriverError> {
        let Some(frees) = self.streams.get_mut(&stream).filter(|frees| frees.without > 0) else { return Ok(()) };
        // A destroyed stream records no event; its pages are not moved.
        let event =
            self.events.record(driver, stream, capturing).or_else(|error| unless_destroyed(error).map(|()| None));
        frees.waiting.push_back((frees.latest, event.clone().unwrap_or(None)));
        frees.without = 0;
        event.map(|_| ())
    }

    /// Forgets the pages of a range that is released.
    pub(super) fn forget(&mut self, base: u64) {
        self.ranges.remove(&base);
    }

    /// The last free of a page, and its stream.
    fn last(&self, page: u64) -> Option<(StreamId, u64)> {
        let (base, range) = self.ranges.range(..=page).next_back()?;
        // CAST: number of a page. Nothing is noted of the range behind this one, and it begins behind the last page of this one.
        let free = *range.frees.get(((page - base) / self.page) as usize)?;
        (free > 0).then_some((range.stream, free))
    }

    /// Finds the frees of a stream whose work has completed.
    fn poll(&mut self, driver: &dyn Driver, stream: StreamId, capturing: bool) -> Result<(), DriverError> {
        while let Some(event) = self.oldest(driver, stream, capturing)? {
            if !driver.event_query(event)? {
                break;
            }
            self.pop(stream);
        }
        Ok(())
    }

    /// The event of the oldest frees of a stream that may not have completed, recorded now where it is missing.
    fn oldest(
        &mut self,
        driver: &dyn Driver,
        stream: StreamId,
        capturing: bool,
    ) -> Result<Option<EventId>, DriverError> {
        let front = |pages: &Self| pages.streams.get(&stream).and_then(|frees| frees.waiting.front().copied());
        let Some((_, event)) = front(self) else {
            self.record(driver, stream, capturing)?;
            return Ok(front(self).and_then(|(_, event)| event));
        };
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

    /// Number of the last free of a page; 0 for a page that was never used.
    pub(super) fn last_free(&self, page: u64) -> u64 {
        self.last(page).map_or(0, |(_, free)| free)
    }

    /// Number of a stream's latest free.
    pub(super) fn latest(&self, stream: StreamId) -> u64 {
        self.streams.get(&stream).map_or(0, |frees| frees.latest)
    }

    /// Whether the work before a free of a stream has completed. With `wait` the host waits for it, and for all work queued before
    /// its event. False also for a destroyed stream, for which this is unknown.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn is_over(
        &mut self,
        driver: &dyn Driver,
        stream: StreamId,
        free: u64,
        wait: bool,
    ) -> Result<bool, DriverError> {
        while self.streams.get(&stream).is_some_and(|frees| frees.over < free) {
            self.asked = true;
            let oldest = self.oldest(driver, stream, false);
            let Some(event) = oldest.or_else(|error| unless_destroyed(error).map(|()| None))? else { return Ok(false) };
            if wait {
                driver.event_synchronize(event)?;
            } else if !driver.event_query(event)? {
                return Ok(false);
            }
            self.pop(stream);
        }
        Ok(true)
    }

    /// Waits on the host for the work that used an address. False where its stream was destroyed.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn wait_for_use_of(&mut self, driver: &dyn Driver, page: u64) -> Result<bool, DriverError> {
        let Some((stream, free)) = self.last(page) else { return Ok(true) };
        self.is_over(driver, stream, free, true)
    }

    /// Every event, for destruction.
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
        let mut pages = Pages::new(PAGE);
        work(&driver, stream);
        pages.freed(&driver, stream, 0, (8 * PAGE, 9 * PAGE), false).unwrap();
        pages.freed(&driver, stream, 0, (0, 2 * PAGE), false).unwrap();
        // From this query on the frees so far get an event, and later ones one each.
        assert!(!pages.is_over(&driver, stream, 2, false).unwrap());
        work(&driver, stream);
        pages.freed(&driver, stream, 0, (PAGE, 3 * PAGE), false).unwrap();
        let last = [0, PAGE, 2 * PAGE, 3 * PAGE, 8 * PAGE].map(|page| pages.last_free(page));
        assert_eq!(last, [2, 3, 3, 0, 1]);

        let mut is_over = |page, wait| {
            let free = pages.last_free(page);
            pages.is_over(&driver, stream, free, wait).unwrap()
        };
        assert!(is_over(3 * PAGE, false), "nothing ever used it");
        assert!(!is_over(0, false));
        // Waiting for the first page does not wait for work queued after its event.
        assert!(is_over(0, true));
        assert!(!is_over(PAGE, false));
        driver.device_synchronize().unwrap();
        assert!(is_over(2 * PAGE, false));
        assert_eq!(pages.latest(stream), 3);
        assert_eq!(pages.take_events().len(), 2, "all are returned");
    }

    #[test]
    fn an_event_that_could_not_be_made_is_made_later() {
        let driver = FaultyDriver::new(Arc::new(NullDriver::new(1 << 30)));
        let stream = driver.stream_create().unwrap();
        let mut pages = Pages::new(PAGE);
        let fail = || driver.fail(CallKind::EventRecord, 0, DriverError::ILLEGAL_STATE);
        pages.freed(&driver, stream, 0, (0, PAGE), false).unwrap();
        fail();
        assert!(pages.is_over(&driver, stream, 1, false).is_err(), "no event says so");
        assert!(pages.is_over(&driver, stream, 1, false).unwrap());
        fail();
        assert!(pages.freed(&driver, stream, 0, (0, PAGE), false).is_err());
        assert!(pages.is_over(&driver, stream, 2, false).unwrap());
    }

    #[test]
    fn pages_of_a_stream_that_is_gone_are_never_over() {
        let driver = FaultyDriver::new(Arc::new(NullDriver::new(1 << 30)));
        let stream = driver.stream_create().unwrap();
        let destroyed = || driver.fail(CallKind::EventRecord, 0, DriverError::INVALID_HANDLE);
        let mut pages = Pages::new(PAGE);
        destroyed();
        pages.freed(&driver, stream, 0, (0, PAGE), false).unwrap();
        destroyed();
        assert!(!pages.is_over(&driver, stream, 1, false).unwrap());
        destroyed();
        assert!(!pages.wait_for_use_of(&driver, 0).unwrap());
    }

    #[test]
    fn a_free_has_an_event_only_once_it_is_asked_what_is_over() {
        let driver = SimDriver::new(Profile::h200(), SimMemory::None);
        let stream = driver.stream_create().unwrap();
        let mut pages = Pages::new(PAGE);
        for _ in 0..3 * MANY {
            pages.freed(&driver, stream, 0, (0, PAGE), false).unwrap();
        }
        assert!(pages.take_events().is_empty());
        let mut pages = Pages::new(PAGE);
        pages.freed(&driver, stream, 0, (0, PAGE), false).unwrap();
        assert!(pages.is_over(&driver, stream, 1, true).unwrap());
        for page in 0..3 {
            work(&driver, stream);
            pages.freed(&driver, stream, 0, (page * PAGE, (page + 1) * PAGE), false).unwrap();
        }
        assert!(pages.wait_for_use_of(&driver, 0).unwrap());
        assert!(!pages.is_over(&driver, stream, 3, false).unwrap(), "nothing that was queued later was waited for");
        assert_eq!(pages.take_events().len(), 3);
    }

    #[test]
    fn there_are_never_many_events() {
        let driver = NullDriver::new(1 << 30);
        let stream = driver.stream_create().unwrap();
        let mut pages = Pages::new(PAGE);
        pages.freed(&driver, stream, 0, (0, PAGE), false).unwrap();
        assert!(pages.is_over(&driver, stream, 1, true).unwrap());
        for free in 0..10 * MANY as u64 {
            pages.freed(&driver, stream, 0, (free % 7 * PAGE, (free % 7 + 1) * PAGE), false).unwrap();
        }
        assert!(pages.take_events().len() <= MANY + 1);
    }
}
