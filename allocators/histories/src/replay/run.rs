//! The loop that runs a compiled recording.

use super::ReplayReport;
use super::against::{Against, DefaultStream};
use super::counting::{ByPath, CallCounter};
use super::driver::{ReplayDriver, Replaying};
use super::pools::Pools;
use super::watched::{SegmentWatch, Watched};
use crate::formats::Placements;
use crate::history::{BY_DEVICE, Beginning, History, Kind, NO_STREAM, Op, Release, ReplayError, StartBlock};
use crate::steps;
use std::sync::Arc;
use vramlab_device::{Clock, Driver, HookedDriver, MonotonicClock, StreamId};
use vramlab_policies::backends::Selection;
use vramlab_policies::contract::{AllocError, Block, DeviceAllocator, Path, Request, Stats};
use vramlab_policies::instruments::Limit;

/// Source of segment addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Addresses {
    /// The device chooses them.
    #[default]
    Own,
    /// The recorded addresses.
    Recorded,
    /// The address of the recorded program's next segment of the same size, others below: for settings other than the recorded
    /// ones, under which the driver's choice is unknown. As [`Addresses::Own`] if the recording cannot be compared, and for
    /// ranges of addresses (expandable segments).
    Near,
}

/// Options of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplaySettings {
    /// Source of segment addresses.
    pub addresses: Addresses,
    /// Fill each block with a byte on its stream, and again on each stream that uses it, so that memory is really used and
    /// streams are really busy.
    pub touch: bool,
    /// Limit the bytes in live blocks, with [`Limit`]: for backends without a limit of their own on real devices. Costs two
    /// atomic additions for each operation.
    pub limit: Option<u64>,
    /// Stop at the first failed allocation; times are then meaningless.
    pub stop_at_failure: bool,
    /// Repeat requests that failed in the recording, also where the device chooses addresses: those that fail now count as
    /// failed, and the others are freed immediately.
    pub ask_again: bool,
}

/// Fill value of touched blocks.
const TOUCH: u8 = 0xA5;

/// Replays a recording on a backend built on `driver`, from an empty cache to the last event; then frees everything.
///
/// A recording that began late starts from its initial memory. That is set up before anything is counted: statistics, driver
/// calls and times are those of the recording, and peaks start at the initial memory.
///
/// Time is measured around the list of operations alone: `host_ns` contains the backend, the device's part of its driver calls,
/// and an indirect call, a store and a few additions for each operation.
///
/// # Errors
/// [`ReplayError::History`] when recorded addresses are requested and cannot be used; [`ReplayError::Alloc`] when the backend
/// fails for another reason than memory; [`ReplayError::Driver`] when a stream cannot be created.
pub fn replay(
    history: &History,
    allocator: &Selection,
    driver: &Arc<dyn Driver>,
    settings: &ReplaySettings,
) -> Result<ReplayReport, ReplayError> {
    run(history, allocator, driver, settings, None, None)
}

/// As [`replay`], and records block addresses and memory in `watched`. Blocks are not filled.
///
/// # Errors
/// Those of [`replay`].
pub fn replay_watched(
    history: &History,
    allocator: &Selection,
    driver: &Arc<dyn Driver>,
    settings: &ReplaySettings,
    watched: &mut Watched,
) -> Result<ReplayReport, ReplayError> {
    run(history, allocator, driver, &ReplaySettings { touch: false, ..*settings }, None, Some(watched))
}

/// As [`replay`], compared with another allocator's address for each block.
///
/// The device returns the memory that the other allocator got from its device, at the same distances. `empty_cache`, which RMM
/// does not have, is left out; so are requests that failed in the recording.
///
/// # Errors
/// Those of [`replay`], and [`ReplayError::History`] when the placements belong to another recording.
pub fn replay_against(
    history: &History,
    allocator: &Selection,
    driver: &Arc<dyn Driver>,
    settings: &ReplaySettings,
    placements: &Placements,
) -> Result<ReplayReport, ReplayError> {
    run(history, allocator, driver, settings, Some(&Against::new(history, placements)?), None)
}

fn run(
    history: &History,
    allocator: &Selection,
    driver: &Arc<dyn Driver>,
    settings: &ReplaySettings,
    against: Option<&Against>,
    watched: Option<&mut Watched>,
) -> Result<ReplayReport, ReplayError> {
    let recorded = against.is_some() || settings.addresses == Addresses::Recorded;
    let keeps = allocator.capabilities().private_pools;
    let pooled = against.is_none() && keeps && history.private_pools() > 0;
    let counting = Arc::new(HookedDriver::with_hook(Arc::clone(driver), CallCounter::new(driver.as_ref())));
    let replaying = match against {
        Some(against) => Replaying::in_order(against.upstream.clone()),
        None if recorded => {
            history.check_comparable()?;
            Replaying::new(Some(
                history.beginning.segment_events(pooled).chain(history.segments.iter().copied()).collect(),
            ))
        }
        None if settings.addresses == Addresses::Near && history.check_comparable().is_ok() => {
            Replaying::near(history.beginning.segment_events(pooled).chain(history.segments.iter().copied()))
        }
        None => Replaying::new(None),
    };
    let device = Arc::new(ReplayDriver::with_hook(Arc::clone(&counting) as Arc<dyn Driver>, replaying));
    let as_driver = Arc::clone(&device) as Arc<dyn Driver>;
    let segments =
        watched.is_some().then(|| Arc::new(HookedDriver::with_hook(Arc::clone(&as_driver), SegmentWatch::default())));
    let as_driver = segments.as_ref().map_or(as_driver, |segments| Arc::clone(segments) as Arc<dyn Driver>);
    let streams = Streams::new(Arc::clone(driver), history.streams.len() + history.further_streams as usize)?;
    let before = against.and_then(|against| against.comes_before);
    let absent = Streams::new(Arc::clone(driver), usize::from(before == Some(DefaultStream::Absent)))?;
    let mut backend = allocator.build(&as_driver)?;
    if let Some(limit) = settings.limit {
        backend = Arc::new(Limit::new(backend, limit));
    }
    let mut run = Run {
        allocator: backend.as_ref(),
        driver: device.as_ref(),
        calls: counting.hook(),
        streams: &streams.ids,
        // Touches the slots, so that the first use of each costs the same as later ones.
        live: (0..history.slots).map(|_| None).collect(),
        addresses: recorded.then(|| against.map_or(&history.addresses, |against| &against.addresses).iter()),
        touch: settings.touch,
        against: against.is_some(),
        stop: settings.stop_at_failure,
        ask_again: settings.ask_again,
        pools: None,
        tally: Tally::default(),
        watched,
        segments: segments.as_ref().map(|segments| segments.hook()),
    };
    if let Some(default) = before {
        run.come(if default == DefaultStream::Recorded { streams.ids[0] } else { absent.ids[0] })?;
    }
    if pooled {
        run.pools = Some(Pools::new(history, backend.as_ref(), &streams.ids)?);
    }
    let start = run.begin(history)?;
    counting.hook().reset();
    let virtual_clock = driver.describe().virtual_time.then(|| driver.clock());
    let simulated = || virtual_clock.as_ref().map(|clock| clock.now_ns());
    let (clock, simulated_start) = (MonotonicClock::new(), simulated());
    let started = clock.now_ns();
    let outcome = if start.stopped { Ok(()) } else { run.all(&history.ops) };
    let private_pools = run.pools.is_some();
    let host_ns = clock.now_ns() - started;
    let simulated_ns = simulated().zip(simulated_start).map(|(end, start)| end - start);
    let (driver_calls, spent) = (counting.hook().read(), counting.hook().spent());
    let driver_ns = counting.hook().measures().then_some(spent.ns);
    let segment_mismatches = device.hook().segment_mismatches();
    let (stats, ledger) = (backend.stats().since(&start.stats), backend.ledger_at_peak());
    let tally = std::mem::take(&mut run.tally);
    if let (Some(watched), Some(segments)) = (run.watched.take(), run.segments) {
        watched.segments = segments.take();
        if let Some(stream) = run.streams.first() {
            watched.end(run.allocator, *stream);
        }
    }
    let freed = run.free_all(history);
    outcome?;
    freed?;
    Ok(ReplayReport {
        allocations: tally.allocations,
        failed_allocations: tally.failed,
        first_failure: tally.first_failure,
        address_mismatches: recorded.then_some(tally.moved),
        segment_mismatches,
        stats,
        ledger,
        driver_calls,
        driver_ns,
        requests: tally.requests.read(),
        simulated_ns,
        host_ns,
        settings: backend.settings(),
        operations: history.operations,
        private_pools,
    })
}

/// Streams of the device in ascending order; destroyed on drop.
#[derive(Debug)]
struct Streams {
    driver: Arc<dyn Driver>,
    ids: Vec<StreamId>,
}

impl Streams {
    fn new(driver: Arc<dyn Driver>, count: usize) -> Result<Self, ReplayError> {
        let mut streams = Self { driver, ids: Vec::with_capacity(count) };
        for _ in 0..count {
            let id = streams.driver.stream_create()?;
            streams.ids.push(id);
        }
        // Allocators order streams by handle, so the order must be the recorded one.
        streams.ids.sort_unstable();
        Ok(streams)
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for &stream in &self.ids {
            // SAFETY: created here, and declared before the backend, which has been dropped and was the only user. An error
            // cannot be returned; the stream is destroyed with the device's context.
            let _ = unsafe { self.driver.stream_destroy(stream) };
        }
    }
}

#[derive(Debug, Default)]
struct Tally {
    allocations: u64,
    failed: u64,
    moved: u64,
    first_failure: Option<(u64, String)>,
    requests: ByPath,
}

#[derive(Debug)]
struct Run<'a> {
    allocator: &'a dyn DeviceAllocator,
    driver: &'a ReplayDriver,
    calls: &'a CallCounter,
    streams: &'a [StreamId],
    live: Vec<Option<Block>>,
    /// Expected addresses of blocks, if they are compared.
    addresses: Option<std::slice::Iter<'a, u64>>,
    /// Whether each block is written to.
    touch: bool,
    /// Whether the expected addresses are those of an allocator other than the recorded one.
    against: bool,
    stop: bool,
    ask_again: bool,
    /// The private pools of the recording, if the allocator has them.
    pools: Option<Pools<'a>>,
    tally: Tally,
    /// Records block addresses.
    watched: Option<&'a mut Watched>,
    segments: Option<&'a SegmentWatch>,
}

/// State at the start of a replay.
#[derive(Debug)]
struct Start {
    /// Statistics at the start.
    stats: Stats,
    /// Whether a failure ends the replay.
    stopped: bool,
}

impl Run<'_> {
    /// Sets up the initial memory.
    fn begin(&mut self, history: &History) -> Result<Start, ReplayError> {
        let beginning = &history.beginning;
        let mut stopped = false;
        match self.pools.is_some() {
            true => {
                for pool in 0..=history.private_pools() {
                    // CAST: operations name the pools in 16 bits or fewer.
                    stopped |= self.begin_pool(beginning, Some(pool as u32), stopped)?;
                }
            }
            false => stopped = self.begin_pool(beginning, None, stopped)?,
        }
        for op in &beginning.frees {
            self.release(*op)?;
        }
        if !beginning.blocks.is_empty() || !beginning.segments.is_empty() {
            self.allocator.reset_peaks();
        }
        if !self.against {
            self.driver.hook().begin(beginning.segments.len());
        }
        Ok(Start { stats: self.allocator.stats(), stopped })
    }

    /// Sets up the initial memory of a pool (0: the default pool), or of all of them. Returns whether a failure ends the replay.
    fn begin_pool(&mut self, beginning: &Beginning, pool: Option<u32>, mut stopped: bool) -> Result<bool, ReplayError> {
        let in_pool = |block: &&StartBlock| pool.is_none_or(|pool| beginning.private_at(block.addr) == pool);
        let mut left: Vec<&StartBlock> = beginning.blocks.iter().filter(in_pool).collect();
        if let (Some(pool), Some(pools)) = (pool, &mut self.pools) {
            for segment in beginning.segments.iter().filter(|segment| segment.private == pool) {
                pools.enter(segment.stream as usize, pool)?;
            }
        }
        if let Some(snapshot) = beginning.snapshot(self.streams, pool) {
            match self.allocator.restore(&snapshot, &|segment| beginning.age(segment.get())) {
                Ok(None) => {}
                Ok(Some(blocks)) => {
                    self.tally.allocations += left.len() as u64;
                    for (start, block) in left.drain(..).zip(blocks) {
                        self.hold(start, block, None)?;
                    }
                }
                Err(error) => {
                    self.tally.allocations += 1;
                    self.failed(error)?;
                    self.tally.allocations -= 1;
                    stopped = self.stop;
                }
            }
        }
        for start in left {
            if stopped {
                break;
            }
            self.tally.allocations += 1;
            match self.allocator.allocate(Request::new(start.requested), self.streams[start.stream as usize]) {
                Ok(block) => {
                    let path = block.path();
                    self.hold(start, block, Some(path))?;
                }
                Err(error) => {
                    self.failed(error)?;
                    stopped = self.stop;
                }
            }
        }
        if let Some(pools) = &mut self.pools {
            pools.leave()?;
        }
        Ok(stopped)
    }

    /// Introduces a stream to the allocator before any other.
    fn come(&self, stream: StreamId) -> Result<(), ReplayError> {
        self.ask(1, stream)?.filter(|error| !error.is_out_of_memory()).map_or(Ok(()), |error| Err(error.into()))
    }

    /// Makes a request whose block is freed immediately; returns the error if it failed.
    fn ask(&self, bytes: u64, stream: StreamId) -> Result<Option<AllocError>, AllocError> {
        match self.allocator.allocate(Request::new(bytes), stream) {
            // SAFETY: the block was not passed on, so no work uses it.
            Ok(block) => unsafe { self.allocator.deallocate(block, stream) }.map(|_| None),
            Err(error) => Ok(Some(error)),
        }
    }

    fn hold(&mut self, start: &StartBlock, block: Block, path: Option<Path>) -> Result<(), ReplayError> {
        let stream = self.streams[start.stream as usize];
        self.record_block(&block, path, stream)?;
        self.live[start.slot as usize] = Some(block);
        Ok(())
    }

    /// Records an allocated block, and writes to it if requested.
    fn record_block(&mut self, block: &Block, path: Option<Path>, stream: StreamId) -> Result<(), ReplayError> {
        if let Some(watched) = &mut self.watched {
            watched.served(block, path, self.allocator, stream);
        }
        self.touch(block, stream)
    }

    fn all(&mut self, ops: &[Op]) -> Result<(), ReplayError> {
        for (at, op) in (0u32..).zip(ops) {
            steps::count(1);
            self.choose_pool(at, *op)?;
            match op.kind() {
                Kind::Alloc => {
                    self.driver.hook().at(at);
                    let stream = self.streams[op.stream() as usize];
                    self.tally.allocations += 1;
                    self.watch();
                    let before = self.calls.spent();
                    let served = self.allocator.allocate(Request::new(op.value), stream);
                    let path = served.as_ref().map_or(Path::Failed, Block::path);
                    self.tally.requests.add(path, before, self.calls.spent());
                    match served {
                        Ok(block) => {
                            self.compare(Some(block.addr().get()));
                            self.record_block(&block, Some(path), stream)?;
                            self.live[op.slot as usize] = Some(block);
                        }
                        Err(error) => {
                            self.compare(None);
                            self.failed(error)?;
                            if self.stop {
                                return Ok(());
                            }
                        }
                    }
                }
                Kind::Free => {
                    if let Some(block) = self.live[op.slot as usize].take() {
                        // SAFETY: the only uses are the touch, queued on this stream before, and those announced.
                        unsafe { self.allocator.deallocate(block, self.streams[op.stream() as usize]) }?;
                    }
                    self.freed(*op);
                }
                Kind::Release => {
                    self.release(*op)?;
                    self.freed(*op);
                }
                Kind::Use => {
                    if let Some(block) = &self.live[op.slot as usize] {
                        self.use_on(block, self.streams[op.stream() as usize])?;
                    }
                }
                Kind::Trim | Kind::Refused if self.against => {}
                Kind::Trim => {
                    self.driver.hook().at(at);
                    if let Some(pools) = &mut self.pools {
                        pools.trim(at)?;
                    }
                    // A release of a private pool alone is, without private pools, part of a cache that the client did not empty.
                    if op.pool() == 0 {
                        self.allocator.trim(0)?;
                    }
                }
                Kind::Refused if self.addresses.is_some() || self.ask_again => {
                    self.driver.hook().at_refused(at);
                    self.refused(*op)?;
                    if self.stop && self.tally.failed > 0 {
                        return Ok(());
                    }
                }
                Kind::Refused | Kind::Nothing => {}
            }
        }
        Ok(())
    }

    /// Compares the address of an allocation, or its absence, with the recorded one.
    fn compare(&mut self, addr: Option<u64>) {
        if let Some(addresses) = &mut self.addresses {
            let same = addresses.next().copied() == addr && addr.is_some();
            self.tally.moved += u64::from(!same);
        }
    }

    /// Records a request to free.
    fn freed(&mut self, op: Op) {
        if let Some(watched) = &mut self.watched {
            watched.freed(self.allocator, self.streams[op.stream() as usize]);
        }
    }

    /// Announces the next allocation.
    fn watch(&self) {
        if let (Some(watched), Some(segments)) = (&self.watched, self.segments) {
            segments.at(watched.places.len());
        }
    }

    /// Releases the pools that are due, and directs a request to its pool.
    fn choose_pool(&mut self, at: u32, op: Op) -> Result<(), ReplayError> {
        let Some(pools) = &mut self.pools else { return Ok(()) };
        pools.release_until(at)?;
        if matches!(op.kind(), Kind::Alloc | Kind::Refused) {
            pools.enter(op.stream() as usize, op.pool())?;
        }
        Ok(())
    }

    #[cold]
    fn failed(&mut self, error: AllocError) -> Result<(), ReplayError> {
        if !error.is_out_of_memory() {
            return Err(error.into());
        }
        if let Some(watched) = &mut self.watched {
            watched.failed();
        }
        self.tally.failed += 1;
        if self.tally.first_failure.is_none() {
            self.tally.first_failure = Some((self.tally.allocations, error.to_string()));
        }
        Ok(())
    }

    fn use_on(&self, block: &Block, stream: StreamId) -> Result<(), ReplayError> {
        self.allocator.record_use(block, stream)?;
        self.touch(block, stream)
    }

    fn touch(&self, block: &Block, stream: StreamId) -> Result<(), ReplayError> {
        if self.touch {
            // SAFETY: the block is held, and it is its own stream or one whose use was announced.
            unsafe { self.driver.fill_bytes(block.addr(), TOUCH, block.requested(), stream) }?;
        }
        Ok(())
    }

    /// A free whose completion the recording shows, or that is pending on announced uses.
    fn release(&mut self, op: Op) -> Result<(), ReplayError> {
        let Release { ready, user } = op.release();
        let Some(block) = self.live[op.slot as usize].take() else { return Ok(()) };
        if user != NO_STREAM {
            self.use_on(&block, self.streams[user as usize])?;
        }
        self.driver.hook().releasing(ready);
        // SAFETY: as for `Kind::Free`.
        let freed = unsafe { self.allocator.deallocate(block, self.streams[op.stream() as usize]) };
        self.driver.hook().releasing(BY_DEVICE);
        freed?;
        Ok(())
    }

    /// A failed request. The memory that it made the allocator release is part of the recording; if it succeeds now, its block is
    /// freed immediately.
    fn refused(&mut self, op: Op) -> Result<(), ReplayError> {
        match self.ask(op.value, self.streams[op.stream() as usize])? {
            Some(error) if self.ask_again => self.failed(error),
            Some(error) if !error.is_out_of_memory() => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Frees blocks that stay live.
    fn free_all(&mut self, history: &History) -> Result<(), ReplayError> {
        let mut owners = vec![0; self.live.len()];
        for block in &history.beginning.blocks {
            owners[block.slot as usize] = block.stream;
        }
        // The last allocation of a slot owns it.
        for op in history.ops.iter().filter(|op| op.kind() == Kind::Alloc) {
            owners[op.slot as usize] = op.stream();
        }
        for (slot, block) in self.live.iter_mut().enumerate() {
            if let Some(block) = block.take() {
                // SAFETY: as for `Kind::Free`.
                unsafe { self.allocator.deallocate(block, self.streams[owners[slot] as usize]) }?;
            }
        }
        Ok(())
    }
}
