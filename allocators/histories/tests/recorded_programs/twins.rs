//! `caching` compared with `pytorch` on every recording: each operation has the same result by the same path and makes the same
//! driver calls at the same time, and at a few hundred points both report the same state.
//!
//! The random operations of `model/twins.rs` reach rules that no recorded program does; here caches are as large and as old as
//! those of programs.

use super::{Recording, recordings, under};
use std::sync::{Arc, Mutex};
use vramlab_device::settings::Settings;
use vramlab_device::{
    CallEvent, CallKind, DeviceAddr, Driver, MeteredDriver, Profile, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_histories::replay::{Addresses, ReplaySettings, replay};
use vramlab_policies::backends::{Backend, Capabilities, Constructor};
use vramlab_policies::{AllocError, Block, DeviceAllocator, Ledger, Path, PrivatePool, Request, Selection, Snapshot};

/// Number of points at which the complete states are compared.
const LOOKS: u64 = 300;

/// Compared values of a driver call: kind, bytes, address, success, and start time.
type Call = (CallKind, u64, Option<u64>, bool, u64);

/// Result of an operation.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Placed(u64, u64, Path),
    Freed(Path),
    Trimmed(u64),
    Refused(String),
    Used,
}

/// An operation, with the number of driver calls by its end.
type Step = (Outcome, usize);

/// State that an allocator reports.
#[derive(Debug, PartialEq)]
struct Look {
    step: usize,
    stats: Vec<(String, u64)>,
    ledger: Ledger,
    snapshot: Option<Snapshot>,
    /// Whether each of its segments belongs to a private pool.
    private: Vec<bool>,
}

/// Log of one of the two.
#[derive(Debug, Default)]
struct Log {
    steps: Vec<Step>,
    calls: Vec<Call>,
    looks: Vec<Look>,
}

/// Constructs a backend that is observed.
#[derive(Debug)]
struct Watch {
    of: Selection,
    /// Operations between two comparisons.
    stride: usize,
    log: Arc<Mutex<Log>>,
}

impl Constructor for Watch {
    fn settings(&self) -> Box<dyn Settings> {
        self.of.settings().boxed()
    }

    fn capabilities(&self, default: Capabilities, settings: &dyn Settings) -> Capabilities {
        self.of.backend().constructor.capabilities(default, settings)
    }

    fn build(&self, driver: Arc<dyn Driver>, settings: &dyn Settings) -> Result<Arc<dyn DeviceAllocator>, AllocError> {
        let log = Arc::clone(&self.log);
        let observer = Box::new(move |event: &CallEvent| {
            let addr = event.addr.map(DeviceAddr::get);
            log.lock().unwrap().calls.push((event.kind, event.bytes, addr, event.ok, event.start_ns));
        });
        let driver: Arc<dyn Driver> = Arc::new(MeteredDriver::new(driver, None, Some(observer)));
        let inner = self.of.backend().constructor.build(driver, settings)?;
        Ok(Arc::new(Watched { inner, stride: self.stride, log: Arc::clone(&self.log) }))
    }
}

/// An allocator that logs its operations.
#[derive(Debug)]
struct Watched {
    inner: Arc<dyn DeviceAllocator>,
    stride: usize,
    log: Arc<Mutex<Log>>,
}

impl Watched {
    fn step(&self, outcome: Outcome) {
        let log = &mut *self.log.lock().unwrap();
        let step = log.steps.len();
        log.steps.push((outcome, log.calls.len()));
        if step.is_multiple_of(self.stride) {
            log.looks.push(self.look(step));
        }
    }

    fn look(&self, step: usize) -> Look {
        let (stats, mut snapshot) = (self.inner.stats(), self.inner.snapshot());
        // Numbers of pools differ between the allocators of a process.
        let segments = snapshot.iter_mut().flat_map(|snapshot| &mut snapshot.segments);
        let private = segments.map(|segment| segment.private.take().is_some()).collect();
        Look { step, stats: stats.entries(), ledger: self.inner.ledger_at_peak(), snapshot, private }
    }

    /// The report contains the allocator's name.
    fn refused(&self, error: &AllocError) -> Outcome {
        Outcome::Refused(error.to_string().replacen(self.inner.name(), "either", 1))
    }
}

impl vramlab_policies::Instrument for Watched {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        let result = self.inner.allocate(request, stream);
        self.step(match &result {
            Ok(block) => Outcome::Placed(block.addr().get(), block.bytes(), block.path()),
            Err(error) => self.refused(error),
        });
        result
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        // SAFETY: the caller's promise is the inner allocator's.
        let result = unsafe { self.inner.deallocate(block, stream) };
        self.step(result.as_ref().map_or_else(|error| self.refused(error), |path| Outcome::Freed(*path)));
        result
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let result = self.inner.record_use(block, stream);
        self.step(result.as_ref().map_or_else(|error| self.refused(error), |()| Outcome::Used));
        result
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        let result = self.inner.trim(keep_bytes);
        self.step(result.as_ref().map_or_else(|error| self.refused(error), |bytes| Outcome::Trimmed(*bytes)));
        result
    }

    fn pool_trim(&self, pool: PrivatePool) -> Result<u64, AllocError> {
        let result = self.inner.pool_trim(pool);
        self.step(result.as_ref().map_or_else(|error| self.refused(error), |bytes| Outcome::Trimmed(*bytes)));
        result
    }
}

impl Drop for Watched {
    /// After the replay, when everything has been freed.
    fn drop(&mut self) {
        let log = &mut *self.log.lock().unwrap();
        log.looks.push(self.look(log.steps.len()));
    }
}

/// Log of a backend's replay.
fn watch(of: &str, recording: &Recording) -> Log {
    let (history, settings) = recording.load();
    let of = under(of, &settings);
    let Backend { name, summary, capabilities, compared, .. } = *of.backend();
    let stride = usize::try_from((history.events() / LOOKS).max(1)).unwrap();
    let log = Arc::new(Mutex::new(Log::default()));
    // An entry of the list lives as long as the program: some hundred bytes each are leaked.
    let constructor = Box::leak(Box::new(Watch { of, stride, log: Arc::clone(&log) }));
    let backend: &'static Backend = Box::leak(Box::new(Backend { name, summary, capabilities, compared, constructor }));
    let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
    let run = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
    replay(&history, &Selection::of(backend), &driver, &run).unwrap();
    std::mem::take(&mut *log.lock().unwrap())
}

/// Fails at the first difference between two lists.
fn assert_same<T: PartialEq + std::fmt::Debug>(what: &str, rules: &[T], fast: &[T]) {
    if let Some(at) = rules.iter().zip(fast).position(|(rules, fast)| rules != fast) {
        panic!("{what} {at}: rules {:#?}, caching {:#?}", rules[at], fast[at]);
    }
    assert_eq!(rules.len(), fast.len(), "{what}");
}

/// Fails at the first difference between the two on a recording.
fn assert_twins(recording: &Recording) {
    let name = recording.path.display();
    let [rules, fast] = ["pytorch", "caching"].map(|of| watch(of, recording));
    assert_same(&format!("{name}: step"), &rules.steps, &fast.steps);
    assert_same(&format!("{name}: driver call"), &rules.calls, &fast.calls);
    assert_same(&format!("{name}: look"), &rules.looks, &fast.looks);
    assert!(!rules.calls.is_empty() && rules.looks.len() as u64 > LOOKS / 2, "{name}: {} looks", rules.looks.len());
}

#[test]
fn caching_matches_pytorch_on_every_recording() {
    recordings().iter().for_each(assert_twins);
}
