//! One measurement: a fresh allocator, a warm-up, and one clock reading on either side of a loop.

use super::cases::{Case, Instrument, Job, Named, THREAD_LIVE};
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use vramlab::contract::{Completions, GraphMemory, PrivatePools, RestoreError};
use vramlab::histories::workload::{self, Sequence, Slots};
use vramlab::instruments::{EventTrace, Timed};
use vramlab::{
    AllocError, Block, CaptureId, DeviceAddr, DeviceAllocator, DeviceKind, Driver, Ledger, Parts, Path, PrivatePool,
    Request, Selection, Snapshot, Stats, StreamId,
};

/// Minimum number of allocations over all passes of a case `history`.
const HISTORY_ALLOCATIONS: u64 = 300_000;
/// Operations of one pass of the cases `mixed`; the second pass is timed.
const MIXED_PASS: usize = 300_000;
/// Run time of the threads of a case `threads`.
const WINDOW: Duration = Duration::from_millis(300);
/// Steps that a thread draws beforehand and repeats: 128 KiB.
const THREAD_STEPS: usize = 16_384;
/// Steps between checks for the end of the window.
const BATCH: usize = 128;
/// Pairs of each thread under an instrument.
const INSTRUMENT_PAIRS: u64 = 100_000;
/// Events of the cases `trace/events`, over all threads.
const EVENTS: u64 = 10_000_000;
const SEED: u64 = 1;

/// A value and the number of operations behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// In the case's unit.
    pub(crate) value: f64,
    /// Operations in the timed part.
    pub(crate) operations: u64,
}

/// The device and a stream for each thread.
#[derive(Debug)]
pub(crate) struct Setup {
    driver: Arc<dyn Driver>,
    streams: Vec<StreamId>,
    kind: DeviceKind,
    /// Steps by case: identical in every repeat and under every allocator.
    mixed: BTreeMap<u32, Sequence>,
    threads: Vec<Sequence>,
    histories: Vec<Named>,
}

impl Setup {
    /// Creates the streams and draws the random numbers.
    pub(crate) fn new(driver: &Arc<dyn Driver>, threads: u32, histories: Vec<Named>) -> Result<Self> {
        let most = histories.iter().map(|history| history.calls.streams()).max().unwrap_or(0).max(threads);
        let streams = (0..most).map(|_| driver.stream_create()).collect::<Result<_, _>>()?;
        let mixed = [64, 1_024, 16_384].map(|live| (live, Sequence::new(SEED, live, 2 * MIXED_PASS)));
        Ok(Self {
            driver: Arc::clone(driver),
            streams,
            kind: driver.describe().kind,
            mixed: mixed.into_iter().collect(),
            threads: (0..u64::from(threads)).map(|at| Sequence::new(SEED + at, THREAD_LIVE, THREAD_STEPS)).collect(),
            histories,
        })
    }

    /// The recordings whose calls are timed.
    pub(crate) fn histories(&self) -> &[Named] {
        &self.histories
    }

    /// The device's kind, for the report's rows.
    pub(crate) fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Every operation is a driver call of tens of microseconds, so fewer are timed.
    fn is_slow(&self, alloc: &Selection) -> bool {
        self.kind == DeviceKind::Cuda && alloc.capabilities().slow_calls
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        for stream in self.streams.drain(..) {
            // The streams are destroyed with the process in any case.
            // SAFETY: created by `new`; the allocators that used it are dropped.
            let _ = unsafe { self.driver.stream_destroy(stream) };
        }
    }
}

/// Runs one case once.
pub(crate) fn measure(setup: &Setup, job: &Job) -> Result<Sample> {
    let build = || job.alloc.build(&setup.driver);
    // CAST: a number of threads.
    let streams = &setup.streams[..job.case.threads() as usize];
    let backend: Arc<dyn DeviceAllocator> = match job.case {
        Case::Instrument { .. } | Case::Events { .. } if streams.len() > 1 => Arc::new(PerStream::new(streams, build)?),
        _ => build()?,
    };
    let slow = setup.is_slow(&job.alloc);
    let (allocator, stream) = (backend.as_ref(), setup.streams[0]);
    match job.case {
        Case::History { number } => {
            let recorded = &setup.histories[number].calls;
            let passes = if slow { 1 } else { HISTORY_ALLOCATIONS.div_ceil(recorded.allocations()) };
            recorded.run(allocator, &setup.streams, 1)?;
            per_operation(passes * recorded.allocations(), || Ok(recorded.run(allocator, &setup.streams, passes)?))
        }
        Case::Alternate { bytes } => in_pairs(slow, |pairs| Ok(workload::alternate(allocator, stream, bytes, pairs)?)),
        Case::Pair { bytes } => in_pairs(slow, |pairs| Ok(workload::pair(allocator, stream, bytes, pairs)?)),
        Case::Mixed { live } => {
            let sequence = &setup.mixed[&live];
            let pass = if slow { 2_000 } else { MIXED_PASS };
            let mut slots = Slots::fill(allocator, stream, &sequence.fill)?;
            slots.run(&sequence.steps[..pass])?;
            let sample = per_operation(pass as u64, || Ok(slots.run(&sequence.steps[pass..2 * pass])?))?;
            slots.empty()?;
            Ok(sample)
        }
        Case::Threads { .. } => throughput(allocator, streams, &setup.threads),
        Case::Shared { .. } => throughput(allocator, &vec![stream; streams.len()], &setup.threads),
        Case::Instrument { instrument, threads } => {
            let clock = setup.driver.clock();
            let pairs = if slow { 1_000 } else { INSTRUMENT_PAIRS };
            let mut trace = None;
            let top: Arc<dyn DeviceAllocator> = match instrument {
                Instrument::Bare => backend,
                Instrument::Latency => Arc::new(Timed::new(backend, clock)),
                Instrument::Trace => Arc::clone(trace.insert(Arc::new(EventTrace::new(backend, clock)))) as _,
            };
            let round = || -> Result<Vec<Duration>> {
                let times = pairs_in_threads(top.as_ref(), streams, pairs)?;
                trace.as_ref().map_or(Ok(()), |trace| all_there(trace, 2 * pairs * u64::from(threads)))?;
                Ok(times)
            };
            // The warm-up also allocates the buffers; a trace keeps them when its events are taken.
            round()?;
            let times = round()?;
            // CAST: nanoseconds and counts far below 2^53.
            let calls = (2 * pairs) as f64;
            let ns = times.iter().map(|time| time.as_nanos() as f64 / calls).sum::<f64>() / times.len() as f64;
            Ok(Sample { value: ns, operations: 2 * pairs * u64::from(threads) })
        }
        Case::Events { threads } => {
            let trace = EventTrace::new(backend, setup.driver.clock());
            let pairs = if slow { 1_000 } else { EVENTS / 2 / u64::from(threads) };
            let start = Instant::now();
            pairs_in_threads(&trace, streams, pairs)?;
            let seconds = start.elapsed().as_secs_f64();
            let events = 2 * pairs * u64::from(threads);
            all_there(&trace, events)?;
            // CAST: a count far below 2^53.
            Ok(Sample { value: events as f64 / seconds / 1e6, operations: events })
        }
    }
}

/// Times a loop of `operations` operations.
fn per_operation(operations: u64, work: impl FnOnce() -> Result<()>) -> Result<Sample> {
    let start = Instant::now();
    work()?;
    // CAST: nanoseconds and counts far below 2^53.
    Ok(Sample { value: start.elapsed().as_nanos() as f64 / operations as f64, operations })
}

/// Times pairs of an allocation and its free, after a tenth of them that are not timed.
fn in_pairs(slow: bool, work: impl Fn(u64) -> Result<()>) -> Result<Sample> {
    let pairs = if slow { 1_000 } else { 300_000 };
    work(pairs / 10)?;
    per_operation(pairs, || work(pairs))
}

fn all_there(trace: &EventTrace, expected: u64) -> Result<()> {
    let events = trace.take().len() as u64;
    ensure!(events == expected, "the trace holds {events} of {expected} events");
    Ok(())
}

/// Pairs of 4 KiB, by each thread on its stream; returns the time of each thread.
fn pairs_in_threads(allocator: &dyn DeviceAllocator, streams: &[StreamId], pairs: u64) -> Result<Vec<Duration>> {
    let ready = Barrier::new(streams.len());
    let work = |stream: StreamId| -> Result<Duration, AllocError> {
        ready.wait();
        let start = Instant::now();
        workload::pair(allocator, stream, 4096, pairs)?;
        Ok(start.elapsed())
    };
    // The first thread is this one, as in the cases without threads: another might start on a core that another
    // program uses.
    let times = match streams {
        [stream] => vec![work(*stream)?],
        _ => in_threads(streams, |_, stream| work(stream))?,
    };
    Ok(times)
}

/// Mixed sizes by each thread on its stream, which others may share, with its own live blocks, for a fixed time; in
/// million operations a second.
fn throughput(allocator: &dyn DeviceAllocator, streams: &[StreamId], sequences: &[Sequence]) -> Result<Sample> {
    let (ready, stop) = (Barrier::new(streams.len() + 1), AtomicBool::new(false));
    let work = |at: usize, stream: StreamId| -> Result<(u64, Instant, Instant), AllocError> {
        let sequence = &sequences[at];
        let filled = Slots::fill(allocator, stream, &sequence.fill);
        // Every thread must arrive, even one that has failed.
        let warm = filled.and_then(|mut slots| slots.run(&sequence.steps[..1_024]).map(|()| slots));
        ready.wait();
        let (mut slots, mut operations, start) = (warm?, 0, Instant::now());
        for batch in sequence.steps.chunks_exact(BATCH).cycle() {
            if stop.load(Relaxed) {
                break;
            }
            slots.run(batch)?;
            operations += batch.len() as u64;
        }
        let end = Instant::now();
        slots.empty()?;
        Ok((operations, start, end))
    };
    let counts = thread::scope(|scope| {
        scope.spawn(|| {
            ready.wait();
            thread::sleep(WINDOW);
            stop.store(true, Relaxed);
        });
        in_threads(streams, work)
    })?;
    let operations = counts.iter().map(|(operations, ..)| operations).sum::<u64>();
    let (start, end) = (counts.iter().map(|count| count.1).min(), counts.iter().map(|count| count.2).max());
    let seconds = start.zip(end).map_or(f64::NAN, |(start, end)| (end - start).as_secs_f64());
    // CAST: a count far below 2^53.
    Ok(Sample { value: operations as f64 / seconds / 1e6, operations })
}

/// Runs `work` in a thread for each stream; returns the first error, if any.
fn in_threads<T: Send>(
    streams: &[StreamId],
    work: impl Fn(usize, StreamId) -> Result<T, AllocError> + Sync,
) -> Result<Vec<T>, AllocError> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> =
            streams.iter().enumerate().map(|(at, stream)| scope.spawn(move || work(at, *stream))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<T, AllocError>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Sends each call to the allocator of its stream. A capture belongs to its stream's allocator; a private pool is one
/// pool in each.
#[derive(Debug)]
pub(crate) struct PerStream {
    allocators: Vec<(StreamId, Arc<dyn DeviceAllocator>)>,
    /// The allocator of each capture, by index in the list.
    captures: Mutex<HashMap<CaptureId, usize>>,
    /// The pool of each allocator, in their order.
    pools: Mutex<HashMap<PrivatePool, Vec<PrivatePool>>>,
}

impl PerStream {
    /// Builds an allocator for each stream, at least one.
    pub(crate) fn new(
        streams: &[StreamId],
        build: impl Fn() -> Result<Arc<dyn DeviceAllocator>, AllocError>,
    ) -> Result<Self> {
        ensure!(!streams.is_empty(), "no stream to work on");
        let allocators = streams.iter().map(|stream| Ok((*stream, build()?))).collect::<Result<_, AllocError>>()?;
        Ok(Self { allocators, captures: Mutex::default(), pools: Mutex::default() })
    }

    /// The index of a stream's allocator; 0 for an unknown stream.
    fn place(&self, stream: StreamId) -> usize {
        self.allocators.iter().position(|(own, _)| *own == stream).unwrap_or(0)
    }

    fn of(&self, stream: StreamId) -> &dyn DeviceAllocator {
        self.allocators[self.place(stream)].1.as_ref()
    }

    fn all(&self) -> impl Iterator<Item = &dyn DeviceAllocator> {
        self.allocators.iter().map(|(_, inner)| inner.as_ref())
    }

    fn first(&self) -> &dyn DeviceAllocator {
        self.allocators[0].1.as_ref()
    }

    /// The allocator that began a capture; for an unknown capture the first, which refuses it.
    fn capturing(&self, capture: CaptureId) -> &dyn DeviceAllocator {
        let index = lock(&self.captures).get(&capture).copied().unwrap_or(0);
        self.allocators[index].1.as_ref()
    }

    /// The pools, one per allocator, behind a pool.
    fn pools(&self, pool: PrivatePool) -> Result<Vec<PrivatePool>, AllocError> {
        let unknown = || AllocError::PrivatePool { allocator: self.name(), reason: format!("there is no pool {pool}") };
        lock(&self.pools).get(&pool).cloned().ok_or_else(unknown)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DeviceAllocator for PerStream {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.of(stream).allocate(request, stream)
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        // SAFETY: the caller's promise is the inner allocator's; `stream` is the block's, so this allocator allocated
        // it.
        unsafe { self.of(stream).deallocate(block, stream) }
    }

    /// `stream` uses the block; one of the allocators owns it.
    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let mut refused = self.of(stream).record_use(block, stream);
        for inner in self.all() {
            if !matches!(refused, Err(AllocError::ForeignBlock { .. })) {
                break;
            }
            refused = inner.record_use(block, stream);
        }
        refused
    }

    fn forget_stream(&self, stream: StreamId) {
        self.all().for_each(|inner| inner.forget_stream(stream));
    }

    fn name(&self) -> &'static str {
        self.first().name()
    }

    fn settings(&self) -> serde_json::Value {
        self.first().settings()
    }

    /// The first allocator's.
    fn stats(&self) -> Stats {
        self.first().stats()
    }

    fn reset_peaks(&self) {
        self.all().for_each(DeviceAllocator::reset_peaks);
    }

    fn snapshot(&self) -> Option<Snapshot> {
        None
    }

    /// The first allocator's.
    fn ledger_at_peak(&self) -> Ledger {
        self.first().ledger_at_peak()
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        self.all().map(|inner| inner.trim(keep_bytes)).sum()
    }

    /// A limit, a takeover and pages would apply to one stream only, so they are not supported.
    fn parts(&self) -> Parts<'_> {
        let inner = self.first().parts();
        Parts {
            graphs: inner.graphs.map(|_| self as _),
            private_pools: inner.private_pools.map(|_| self as _),
            completions: inner.completions.map(|_| self as _),
            ..Parts::NONE
        }
    }
}

impl GraphMemory for PerStream {
    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        let capture = self.of(stream).capture_begin(stream)?;
        lock(&self.captures).insert(capture, self.place(stream));
        Ok(capture)
    }

    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.capturing(capture).capture_end(capture)
    }

    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        self.capturing(capture).capture_release(capture)
    }

    fn set_reuse_in_captures(&self, on: bool) -> bool {
        // Sets every one, even after a failure.
        self.all().filter(|inner| !inner.set_reuse_in_captures(on)).count() == 0
    }
}

impl PrivatePools for PerStream {
    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.of(stream).allocate_in(request, stream, self.pools(pool)?[self.place(stream)])
    }

    fn pool_create(&self) -> Result<PrivatePool, AllocError> {
        let (pool, inner) =
            (PrivatePool::next(), self.all().map(<dyn DeviceAllocator>::pool_create).collect::<Result<_, _>>()?);
        lock(&self.pools).insert(pool, inner);
        Ok(pool)
    }

    fn pool_begin(&self, pool: PrivatePool, stream: StreamId) -> Result<(), AllocError> {
        self.of(stream).pool_begin(self.pools(pool)?[self.place(stream)], stream)
    }

    fn pool_end(&self, stream: StreamId) -> Result<(), AllocError> {
        self.of(stream).pool_end(stream)
    }

    fn pool_release(&self, pool: PrivatePool) -> Result<(), AllocError> {
        self.all().zip(self.pools(pool)?).try_for_each(|(inner, pool)| inner.pool_release(pool))
    }

    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        self.all().zip(self.pools(pool)?).map(|(inner, pool)| inner.pool_trim(pool)).sum()
    }

    /// A checkpoint would span several allocators.
    fn pool_checkpoint(&self, _pool: PrivatePool) -> Result<Snapshot, AllocError> {
        Err(self.no_checkpoints())
    }

    unsafe fn pool_restore(
        &self,
        _pool: PrivatePool,
        _checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        Err(RestoreError { held, error: self.no_checkpoints() })
    }
}

impl PerStream {
    fn no_checkpoints(&self) -> AllocError {
        AllocError::Incapable { allocator: self.name(), capability: "checkpoints of private pools" }
    }
}

impl Completions for PerStream {
    fn tell_completed(&self, on: bool) {
        self.all().for_each(|inner| _ = inner.tell_completed(on));
    }

    fn take_completed(&self) -> Vec<DeviceAddr> {
        self.all().flat_map(<dyn DeviceAllocator>::take_completed).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cases::groups;
    use crate::bench::cases::read_histories;
    use vramlab::NullDriver;

    #[test]
    fn a_batch_divides_the_steps() {
        let steps = Sequence::new(SEED, THREAD_LIVE, THREAD_STEPS).steps;
        assert!(steps.chunks_exact(BATCH).remainder().is_empty());
    }

    #[test]
    fn captures_pools_and_uses_reach_the_allocator_of_a_stream() {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 36));
        let streams = [0, 1].map(|_| driver.stream_create().unwrap());
        let build = || Selection::of(&vramlab::backends::caching::BACKEND).build(&driver);
        let each = PerStream::new(&streams, build).unwrap();
        let all: &dyn DeviceAllocator = &each;
        // SAFETY: the null device queues no work.
        let free = |block, stream| unsafe { all.deallocate(block, stream) }.unwrap();
        for stream in streams {
            let capture = all.capture_begin(stream).unwrap();
            free(all.allocate(Request::new(700), stream).unwrap(), stream);
            all.capture_end(capture).unwrap();
            all.capture_release(capture).unwrap();
        }
        let pool = all.pool_create().unwrap();
        for (stream, other) in [(streams[0], streams[1]), (streams[1], streams[0])] {
            all.pool_begin(pool, stream).unwrap();
            let block = all.allocate(Request::new(700), stream).unwrap();
            all.pool_end(stream).unwrap();
            all.record_use(&block, other).unwrap();
            all.forget_stream(other);
            assert_ne!(free(block, stream), Path::Deferred, "no block waits for a forgotten stream");
            free(all.allocate_in(Request::new(9), stream, pool).unwrap(), stream);
        }
        all.pool_release(pool).unwrap();
        assert!(all.pool_trim(pool).unwrap() >= 2 * (2 << 20), "each has memory of its own");
        assert!(all.pool_begin(pool, streams[1]).is_err());
    }

    #[test]
    fn streams_and_blocks_go_back() {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 46));
        let setup = Setup::new(&driver, 2, read_histories(&[]).unwrap()).unwrap();
        let patterns =
            ["history", "alternate", "pair/512", "threads", "shared", "instrument/trace/1"].map(str::to_owned);
        for job in
            groups(&terminal::arguments::chosen(&[]), &[2], setup.histories(), &patterns).unwrap().into_iter().flatten()
        {
            let sample = measure(&setup, &job).unwrap();
            let name = job.case.name(setup.histories());
            assert!(sample.value.is_finite() && sample.value > 0.0 && sample.operations > 0, "{name}");
            let info = driver.mem_info().unwrap();
            assert_eq!(info.free, info.total, "{name} under {}", job.alloc);
        }
    }
}
