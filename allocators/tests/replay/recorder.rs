//! Records what `caching` does in the words of PyTorch's snapshots: the histories that a replay has to follow.

use super::common::{self, allocate, free, sim, work};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use vramlab::backends::{Caching, CachingSettings};
use vramlab::device::{CallArguments, CallResult, Hook, HookedDriver};
use vramlab::histories::trace::{Action, Event, Segment};
use vramlab::{
    Block, CallKind, DeviceAllocator, Driver, DriverResult, EventId, SimDriver, SimMemory, Snapshot, StreamId,
};

/// What one operation made the allocator do, by the calls that it makes.
#[derive(Debug, Default)]
struct Log {
    events: Vec<Event>,
    /// Frees that wait, by event.
    waiting: HashMap<EventId, u64>,
    /// By block: size, stream, events that are missing.
    pending: HashMap<u64, (u64, u64, usize)>,
    /// By segment: size and stream.
    sizes: HashMap<u64, (u64, u64)>,
    /// The stream of the request that is being served.
    stream: u64,
    /// The block that is being freed.
    freeing: Option<(u64, u64, u64)>,
}

fn event(action: Action, addr: u64, bytes: u64, stream: u64) -> Event {
    Event { action, device: 0, addr, bytes, stream, time_ns: 0 }
}

#[derive(Debug, Default)]
struct Watch(Mutex<Log>);

// SAFETY: changes no call.
unsafe impl Hook for Watch {
    fn around<T: CallResult>(
        &self,
        _inner: &dyn Driver,
        kind: CallKind,
        arguments: CallArguments,
        call: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        let result = call();
        let log = &mut *self.0.lock().unwrap();
        match (&result, kind) {
            (Ok(made), CallKind::MemAlloc) => {
                let addr = made.addr().unwrap().get();
                log.sizes.insert(addr, (arguments.bytes, log.stream));
                log.events.push(event(Action::SegmentAlloc, addr, arguments.bytes, log.stream));
            }
            (Ok(_), CallKind::MemFree) => {
                let addr = arguments.addr.unwrap().get();
                let (bytes, stream) = log.sizes.remove(&addr).unwrap();
                log.events.push(event(Action::SegmentFree, addr, bytes, stream));
            }
            (Ok(_), CallKind::EventRecord) => {
                let (addr, bytes, stream) = log.freeing.unwrap();
                log.waiting.insert(arguments.event.unwrap(), addr);
                log.pending.entry(addr).or_insert((bytes, stream, 0)).2 += 1;
            }
            (Ok(answer), CallKind::EventQuery | CallKind::EventSynchronize) if answer.answer() != Some(false) => {
                let addr = log.waiting.remove(&arguments.event.unwrap()).unwrap();
                let pending = log.pending.get_mut(&addr).unwrap();
                pending.2 -= 1;
                if pending.2 == 0 {
                    let (bytes, stream, _) = log.pending.remove(&addr).unwrap();
                    log.events.push(event(Action::FreeCompleted, addr, bytes, stream));
                }
            }
            _ => {}
        }
        result
    }
}

/// `caching` on a simulated device, watched.
pub(crate) struct Recorder {
    sim: Arc<SimDriver>,
    watch: Arc<HookedDriver<Watch>>,
    pub(crate) caching: Caching,
    streams: Vec<StreamId>,
    pub(crate) live: Vec<(Block, usize, bool)>,
    /// What was held at each refusal, with the log's handles of streams.
    pub(crate) refusals: Vec<Snapshot>,
    /// Whether uses on other streams are written down, as our own traces do and PyTorch does not.
    pub(crate) writes_uses: bool,
}

impl Recorder {
    pub(crate) fn new(settings: CachingSettings, room: u64, streams: usize) -> Self {
        let sim = sim(room, SimMemory::None);
        let streams = (0..streams).map(|_| sim.stream_create().unwrap()).collect();
        let inner = Arc::clone(&sim) as Arc<dyn Driver>;
        let watch = Arc::new(HookedDriver::with_hook(inner, Watch::default()));
        let caching = Caching::new(Arc::clone(&watch) as Arc<dyn Driver>, settings);
        Self { sim, watch, caching, streams, live: Vec::new(), refusals: Vec::new(), writes_uses: false }
    }

    fn log(&self, event: Event) {
        self.watch.hook().0.lock().unwrap().events.push(event);
    }

    /// The handle that the log has for a stream: ascending, but not the device's own.
    pub(crate) fn handle(stream: usize) -> u64 {
        if stream == 0 { 0 } else { 0x5000_0000 + 0x140 * stream as u64 }
    }

    pub(crate) fn alloc(&mut self, bytes: u64, stream: usize) -> bool {
        self.watch.hook().0.lock().unwrap().stream = Self::handle(stream);
        match allocate(&self.caching, bytes, self.streams[stream]) {
            Ok(block) => {
                self.log(event(Action::Alloc, block.addr().get(), bytes, Self::handle(stream)));
                self.live.push((block, stream, false));
                true
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                self.log(event(Action::Oom, 0, bytes, Self::handle(stream)));
                let mut held = self.caching.snapshot().unwrap();
                for segment in &mut held.segments {
                    let number = self.streams.iter().position(|stream| *stream == segment.stream).unwrap();
                    segment.stream = common::stream(Self::handle(number));
                }
                self.refusals.push(held);
                false
            }
        }
    }

    pub(crate) fn free(&mut self, which: usize) {
        let (block, stream, shared) = self.live.swap_remove(which);
        let (addr, bytes) = (block.addr().get(), block.requested());
        let handle = Self::handle(stream);
        self.log(event(Action::FreeRequested, addr, bytes, handle));
        self.watch.hook().0.lock().unwrap().freeing = Some((addr, bytes, handle));
        free(&self.caching, block, self.streams[stream]).unwrap();
        self.watch.hook().0.lock().unwrap().freeing = None;
        if !shared {
            self.log(event(Action::FreeCompleted, addr, bytes, handle));
        }
    }

    pub(crate) fn record_use(&mut self, which: usize, user: usize) {
        let stream = self.streams[user];
        let (block, owner, shared) = &mut self.live[which];
        self.caching.record_use(block, stream).unwrap();
        *shared |= user != *owner;
        let addr = block.addr().get();
        if self.writes_uses {
            self.log(event(Action::RecordUse, addr, 0, Self::handle(user)));
        }
    }

    pub(crate) fn work(&self, stream: usize, ns: u64) {
        work(&self.sim, self.streams[stream], ns);
    }

    pub(crate) fn empty_cache(&self) {
        self.caching.trim(0).unwrap();
    }

    /// What is held now, with the log's handles.
    pub(crate) fn segments(&self) -> Vec<Segment> {
        let mut segments = Segment::from_snapshot(&self.caching.snapshot().unwrap(), 0);
        for segment in &mut segments {
            let stream = self.streams.iter().position(|stream| stream.get() == segment.stream).unwrap();
            segment.stream = Self::handle(stream);
        }
        segments
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.watch.hook().0.lock().unwrap().events.clone()
    }
}
