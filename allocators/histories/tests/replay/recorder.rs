//! Records an allocator as PyTorch's snapshots do: recordings that a replay must reproduce.

use crate::common::{self, allocate, free, sim, work};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use vramlab_device::{CallArguments, CallOutcome, Hook, HookedDriver};
use vramlab_device::{
    CallKind, DeviceAddr, Driver, DriverResult, EventId, SimDriver, StreamId, VmmDriver, sim::SimMemory,
};
use vramlab_histories::formats::{Action, Event, Segment, SegmentPool};
use vramlab_policies::backends::{CachingSettings, caching};
use vramlab_policies::{Block, DeviceAllocator, PrivatePool, Selection, Snapshot};

/// An operation's effect on the allocator, from its calls.
#[derive(Debug, Default)]
struct Log {
    events: Vec<Event>,
    /// Pools of the events of segments.
    segment_pools: Vec<SegmentPool>,
    /// Number of allocations in private pools.
    pool_allocations: u64,
    /// Pending frees, by event.
    waiting: HashMap<EventId, u64>,
    /// By block: size, stream, missing events.
    pending: HashMap<u64, (u64, u64, usize)>,
    /// By segment: size, stream and pool.
    sizes: HashMap<u64, (u64, u64, u64)>,
    /// The same for address ranges, by first address.
    ranges: BTreeMap<u64, (u64, u64, u64)>,
    /// Their mapped ranges: end by first address.
    mapped: BTreeMap<u64, u64>,
    /// The stream and the pool of the current request.
    stream: u64,
    pool: u64,
    /// The block of the current free.
    freeing: Option<(u64, u64, u64)>,
}

fn event(action: Action, addr: u64, bytes: u64, stream: u64) -> Event {
    Event { action, device: 0, addr, bytes, stream, time_ns: 0 }
}

#[derive(Debug, Default)]
struct Watch(Mutex<Log>);

// SAFETY: changes no call.
unsafe impl Hook for Watch {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, _kind: CallKind, _arguments: CallArguments) -> DriverResult<()> {
        Ok(())
    }

    fn after(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments, (): (), outcome: CallOutcome) {
        let log = &mut *self.0.lock().unwrap();
        match (outcome.ok, kind) {
            (true, CallKind::MemAlloc) => {
                let addr = outcome.addr.unwrap().get();
                log.sizes.insert(addr, (arguments.bytes, log.stream, log.pool));
                log.segment(event(Action::SegmentAlloc, addr, arguments.bytes, log.stream), log.pool);
            }
            (true, CallKind::MemFree) => {
                let addr = arguments.addr.unwrap().get();
                let (bytes, stream, pool) = log.sizes.remove(&addr).unwrap();
                log.segment(event(Action::SegmentFree, addr, bytes, stream), pool);
            }
            (true, CallKind::MemSetAccess) => {
                let addr = arguments.addr.unwrap().get();
                log.segment(event(Action::SegmentMap, addr, arguments.bytes, log.stream), log.pool);
                log.map(addr, addr + arguments.bytes);
            }
            (true, CallKind::MemUnmap) => {
                let addr = arguments.addr.unwrap().get();
                log.unmap(addr, arguments.bytes);
            }
            (true, CallKind::EventRecord) => {
                let (addr, bytes, stream) = log.freeing.unwrap();
                log.waiting.insert(arguments.event.unwrap(), addr);
                log.pending.entry(addr).or_insert((bytes, stream, 0)).2 += 1;
            }
            (true, CallKind::EventQuery | CallKind::EventSynchronize) if outcome.answer != Some(false) => {
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
    }

    fn address_reserve(&self, inner: &dyn VmmDriver, bytes: u64) -> DriverResult<DeviceAddr> {
        let made = inner.address_reserve(bytes)?;
        let log = &mut *self.0.lock().unwrap();
        log.ranges.insert(made.get(), (bytes, log.stream, log.pool));
        Ok(made)
    }
}

impl Log {
    fn segment(&mut self, event: Event, pool: u64) {
        self.events.push(event);
        let number = self.events.len() as u64;
        self.segment_pools.push(SegmentPool { device: 0, event: number, pool: (0, pool) });
    }

    /// A range was mapped; adjacent ones coalesce.
    fn map(&mut self, mut addr: u64, mut end: u64) {
        if let Some(behind) = self.mapped.remove(&end) {
            end = behind;
        }
        if let Some((&before, _)) = self.mapped.range(..addr).next_back().filter(|(_, until)| **until == addr) {
            addr = before;
        }
        self.mapped.insert(addr, end);
    }

    /// A handle was unmapped; the handles of one block are one event.
    fn unmap(&mut self, addr: u64, bytes: u64) {
        let (&first, &until) = self.mapped.range(..=addr).next_back().unwrap();
        self.mapped.remove(&first);
        for (start, end) in [(first, addr), (addr + bytes, until)].into_iter().filter(|(start, end)| start < end) {
            self.mapped.insert(start, end);
        }
        let (_, &(_, stream, pool)) = self.ranges.range(..=addr).next_back().unwrap();
        match self.events.last_mut() {
            Some(last) if last.action == Action::SegmentUnmap && last.addr + last.bytes == addr => last.bytes += bytes,
            _ => self.segment(event(Action::SegmentUnmap, addr, bytes, stream), pool),
        }
    }
}

/// An observed allocator on a simulated device: `caching`, unless another is requested.
pub(crate) struct Recorder {
    sim: Arc<SimDriver>,
    watch: Arc<HookedDriver<Watch>>,
    pub(crate) caching: Arc<dyn DeviceAllocator>,
    /// Private pools, and the current one of each stream.
    pools: Vec<PrivatePool>,
    routes: Vec<Option<usize>>,
    streams: Vec<StreamId>,
    pub(crate) live: Vec<(Block, usize, bool)>,
    /// Memory state at each refusal, with the log's handles of streams.
    pub(crate) refusals: Vec<Snapshot>,
    /// Whether uses on other streams are recorded, as in our own traces and unlike PyTorch.
    pub(crate) writes_uses: bool,
}

impl Recorder {
    pub(crate) fn new(settings: CachingSettings, room: u64, streams: usize) -> Self {
        Self::of(&Selection::of(&caching::BACKEND), settings, room, streams)
    }

    pub(crate) fn of(backend: &Selection, settings: CachingSettings, room: u64, streams: usize) -> Self {
        let sim = sim(room, SimMemory::None);
        let routes = vec![None; streams];
        let streams = (0..streams).map(|_| sim.stream_create().unwrap()).collect();
        let inner = Arc::clone(&sim) as Arc<dyn Driver>;
        let watch = Arc::new(HookedDriver::with_hook(inner, Watch::default()));
        let mut backend = backend.clone();
        backend.adopt(&settings);
        let caching = backend.build(&(Arc::clone(&watch) as Arc<dyn Driver>)).unwrap();
        let (live, refusals, pools) = (Vec::new(), Vec::new(), Vec::new());
        Self { sim, watch, caching, pools, routes, streams, live, refusals, writes_uses: false }
    }

    /// Creates a private pool; returns its number.
    pub(crate) fn make_pool(&mut self) -> usize {
        self.pools.push(self.caching.pool_create().unwrap());
        self.pools.len() - 1
    }

    /// Directs a stream's requests to a pool, or to none.
    pub(crate) fn enter(&mut self, stream: usize, pool: Option<usize>) {
        let before = std::mem::replace(&mut self.routes[stream], pool);
        if before != pool {
            before.inspect(|_| self.caching.pool_end(self.streams[stream]).unwrap());
            pool.inspect(|pool| self.caching.pool_begin(self.pools[*pool], self.streams[stream]).unwrap());
        }
    }

    /// Releases a pool, and its free memory immediately or with the next release.
    pub(crate) fn release_pool(&mut self, pool: usize, now: bool) {
        for stream in 0..self.routes.len() {
            if self.routes[stream] == Some(pool) {
                self.enter(stream, None);
            }
        }
        self.caching.pool_release(self.pools[pool]).unwrap();
        if now {
            self.caching.pool_trim(self.pools[pool]).unwrap();
        }
    }

    fn log(&self, event: Event) {
        self.watch.hook().0.lock().unwrap().events.push(event);
    }

    /// The log's handle for a stream: ascending, but not the device's own.
    pub(crate) fn handle(stream: usize) -> u64 {
        if stream == 0 { 0 } else { 0x5000_0000 + 0x140 * stream as u64 }
    }

    pub(crate) fn alloc(&mut self, bytes: u64, stream: usize) -> bool {
        {
            let log = &mut *self.watch.hook().0.lock().unwrap();
            log.stream = Self::handle(stream);
            // PyTorch counts them from 1.
            log.pool = self.routes[stream].map_or(0, |pool| pool as u64 + 1);
        }
        match allocate(self.caching.as_ref(), bytes, self.streams[stream]) {
            Ok(block) => {
                self.log(event(Action::Alloc, block.addr().get(), bytes, Self::handle(stream)));
                self.watch.hook().0.lock().unwrap().pool_allocations += u64::from(self.routes[stream].is_some());
                self.live.push((block, stream, false));
                true
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                self.log(event(Action::Oom, 0, bytes, Self::handle(stream)));
                let mut snapshot = self.caching.snapshot().unwrap();
                for segment in &mut snapshot.segments {
                    let number = self.streams.iter().position(|stream| *stream == segment.stream).unwrap();
                    segment.stream = common::stream(Self::handle(number));
                }
                self.refusals.push(snapshot);
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
        free(self.caching.as_ref(), block, self.streams[stream]).unwrap();
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

    /// The memory state, with the log's handles.
    pub(crate) fn segments(&self) -> Vec<Segment> {
        let mut segments = Segment::from_snapshot(&self.caching.snapshot().unwrap(), 0);
        let log = &*self.watch.hook().0.lock().unwrap();
        for segment in &mut segments {
            let stream = self.streams.iter().position(|stream| stream.get() == segment.stream).unwrap();
            segment.stream = Self::handle(stream);
            let (_, _, pool) = match log.sizes.get(&segment.address) {
                Some(segment) => segment,
                None => log.ranges.range(..=segment.address).next_back().unwrap().1,
            };
            segment.is_expandable = !log.sizes.contains_key(&segment.address);
            segment.pool_id = Some((0, *pool));
        }
        segments
    }

    /// The pools of the events of segments, as PyTorch 2.12 records them.
    pub(crate) fn segment_pools(&self) -> Vec<SegmentPool> {
        self.watch.hook().0.lock().unwrap().segment_pools.clone()
    }

    /// Number of allocations in private pools.
    pub(crate) fn pool_allocations(&self) -> u64 {
        self.watch.hook().0.lock().unwrap().pool_allocations
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.watch.hook().0.lock().unwrap().events.clone()
    }

    pub(crate) fn event_count(&self) -> usize {
        self.watch.hook().0.lock().unwrap().events.len()
    }
}
