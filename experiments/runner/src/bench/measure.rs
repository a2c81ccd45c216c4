//! One measurement: an allocator of its own, a warm-up, and one look at the clock on either side of a loop.

use super::cases::{Case, Instrument, Job, Named, THREAD_LIVE};
use anyhow::{Result, ensure};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};
use vramlab::histories::workload::{self, Sequence, Slots};
use vramlab::instruments::{EventTrace, Timed};
use vramlab::{
    AllocError, Block, DeviceAllocator, DeviceKind, Driver, Ledger, Path, Request, Selection, Snapshot, Stats, StreamId,
};

/// Allocations that the passes of a case `history` come to at least.
const HISTORY_ALLOCATIONS: u64 = 300_000;
/// Operations of one pass of the cases `mixed`; the second pass is timed.
const MIXED_PASS: usize = 300_000;
/// How long the threads of a case `threads` run.
const WINDOW: Duration = Duration::from_millis(300);
/// Steps that a thread draws beforehand and takes in a circle: 128 KiB.
const THREAD_STEPS: usize = 16_384;
/// Steps between looks at the end of the window.
const BATCH: usize = 128;
/// Pairs of each thread under an instrument.
const INSTRUMENT_PAIRS: u64 = 100_000;
/// Events of the cases `trace/events`, in all threads together.
const EVENTS: u64 = 10_000_000;
const SEED: u64 = 1;

/// A figure and the operations that it was taken from.
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
    /// Steps by case: they are the same in every repeat and under every allocator.
    mixed: BTreeMap<u32, Sequence>,
    threads: Vec<Sequence>,
    histories: Vec<Named>,
}

impl Setup {
    /// Makes the streams and draws the numbers.
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

    /// The histories whose calls are timed.
    pub(crate) fn histories(&self) -> &[Named] {
        &self.histories
    }

    /// The device's kind, for the rows.
    pub(crate) fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Every operation is a driver call of tens of microseconds, so fewer do.
    fn is_slow(&self, alloc: &Selection) -> bool {
        self.kind == DeviceKind::Cuda && alloc.capabilities().slow_calls
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        for stream in self.streams.drain(..) {
            // The streams go with the process in any case.
            // SAFETY: made by `new`; the allocators that used it are gone.
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
            // The warm-up also makes the buffers; a trace keeps them when its events are taken.
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

/// Times a loop of this many operations.
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

/// Pairs of 4 KiB, by each thread on its stream; what each thread took.
fn pairs_in_threads(allocator: &dyn DeviceAllocator, streams: &[StreamId], pairs: u64) -> Result<Vec<Duration>> {
    let ready = Barrier::new(streams.len());
    let work = |stream: StreamId| -> Result<Duration, AllocError> {
        ready.wait();
        let start = Instant::now();
        workload::pair(allocator, stream, 4096, pairs)?;
        Ok(start.elapsed())
    };
    // One thread is this one, as in the cases without threads: another might start on a core that another program uses.
    let times = match streams {
        [stream] => vec![work(*stream)?],
        _ => in_threads(streams, |_, stream| work(stream))?,
    };
    Ok(times)
}

/// Mixed sizes by each thread on its stream, which others may share, with live blocks of its own, for a while; in million operations a second.
fn throughput(allocator: &dyn DeviceAllocator, streams: &[StreamId], sequences: &[Sequence]) -> Result<Sample> {
    let (ready, stop) = (Barrier::new(streams.len() + 1), AtomicBool::new(false));
    let work = |at: usize, stream: StreamId| -> Result<(u64, Instant, Instant), AllocError> {
        let sequence = &sequences[at];
        let filled = Slots::fill(allocator, stream, &sequence.fill);
        // Every thread must arrive, also one that has failed.
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

/// Runs `work` in a thread for each stream; the first error when there is one.
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

/// Sends each call to the allocator of its stream.
#[derive(Debug)]
pub(crate) struct PerStream(Vec<(StreamId, Arc<dyn DeviceAllocator>)>);

impl PerStream {
    /// An allocator made by `build` for each stream; there is at least one.
    pub(crate) fn new(
        streams: &[StreamId],
        build: impl Fn() -> Result<Arc<dyn DeviceAllocator>, AllocError>,
    ) -> Result<Self> {
        ensure!(!streams.is_empty(), "no stream to work on");
        Ok(Self(streams.iter().map(|stream| Ok((*stream, build()?))).collect::<Result<_, AllocError>>()?))
    }

    /// Of the first stream, for a stream that is none of ours.
    fn of(&self, stream: StreamId) -> &dyn DeviceAllocator {
        self.0.iter().find(|(own, _)| *own == stream).unwrap_or(&self.0[0]).1.as_ref()
    }
}

impl DeviceAllocator for PerStream {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.of(stream).allocate(request, stream)
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        // SAFETY: the caller's promise is the inner allocator's; `stream` is the block's, so it is the one that made it.
        unsafe { self.of(stream).deallocate(block, stream) }
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.of(stream).record_use(block, stream)
    }

    fn name(&self) -> &'static str {
        self.0[0].1.name()
    }

    fn settings(&self) -> serde_json::Value {
        self.0[0].1.settings()
    }

    /// Of the first.
    fn stats(&self) -> Stats {
        self.0[0].1.stats()
    }

    fn reset_peaks(&self) {
        self.0.iter().for_each(|(_, inner)| inner.reset_peaks());
    }

    fn snapshot(&self) -> Option<Snapshot> {
        None
    }

    /// Of the first.
    fn ledger_at_peak(&self) -> Ledger {
        self.0[0].1.ledger_at_peak()
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        self.0.iter().map(|(_, inner)| inner.trim(keep_bytes)).sum()
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
