//! The suite fails policies with one subtle fault each, which are otherwise PyTorch's policy and report nothing unusual.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use vramlab_conformance::{Device, conformance};
use vramlab_device::settings::NoSettings;
use vramlab_device::{Driver, StreamId};
use vramlab_policies::backends::pytorch::PyTorch;
use vramlab_policies::backends::{Backend, Capabilities, Pooled, Selection, StreamUse, With, pytorch};
use vramlab_policies::contract::{AllocError, Block, DeviceAllocator, Instrument, Path, Request, Snapshot, Stats};

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// None, for comparison.
    None,
    /// Every 50th block extends into the next one.
    Overlap,
    /// Every 50th free keeps the block, and reports a hit.
    LostBlock,
    /// Announced uses are ignored, although the path of the free is that of a deferred one.
    IgnoredUse,
    /// Freed memory serves every stream immediately.
    NoWaits,
    /// Memory of another allocator stays reserved at the end.
    Leak,
    /// A snapshot is the one from before.
    StaleSnapshot,
    /// Peaks are those of a moment ago.
    LatePeak,
}

/// PyTorch's policy with a fault.
#[derive(Debug)]
struct Wrong {
    inner: Arc<dyn DeviceAllocator>,
    fault: Fault,
    name: &'static str,
    calls: AtomicU64,
    /// The stream of all requests of [`Fault::NoWaits`].
    stream: OnceLock<StreamId>,
    /// The stream of each block, and whether a use was announced, by address.
    live: Mutex<BTreeMap<u64, (StreamId, bool)>>,
    lost: Mutex<Vec<Block>>,
    before: Mutex<Option<Snapshot>>,
}

impl Wrong {
    fn build(name: &'static str, fault: Fault, driver: Arc<dyn Driver>) -> Arc<dyn DeviceAllocator> {
        let build = || Selection::of(&pytorch::BACKEND).build(&driver).expect("PyTorch's policy needs nothing");
        if fault == Fault::Leak {
            let other = build();
            let stream = driver.stream_create().expect("a stream");
            std::mem::forget(other.allocate(Request::new(1 << 20), stream));
            std::mem::forget(other);
        }
        Arc::new(Self {
            inner: build(),
            fault,
            name,
            calls: AtomicU64::new(0),
            stream: OnceLock::new(),
            live: Mutex::default(),
            lost: Mutex::default(),
            before: Mutex::default(),
        })
    }

    fn is_due(&self) -> bool {
        self.calls.fetch_add(1, Relaxed) % 50 == 49
    }

    fn stream(&self, stream: StreamId) -> StreamId {
        if self.fault == Fault::NoWaits { *self.stream.get_or_init(|| stream) } else { stream }
    }
}

impl Instrument for Wrong {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        let block = self.inner.allocate(request, self.stream(stream))?;
        self.live.lock().expect("no test panics here").insert(block.addr().get(), (stream, false));
        if self.fault != Fault::Overlap || !self.is_due() {
            return Ok(block);
        }
        let (addr, bytes, requested) = (block.addr(), block.bytes(), block.requested());
        // SAFETY: none: the last bytes may be the next block's. Nothing uses them.
        Ok(unsafe { Block::new(addr, bytes + 512, requested, block.path(), block.token()) })
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let used =
            self.live.lock().expect("no test panics here").get(&block.addr().get()).is_some_and(|(_, used)| *used);
        if self.fault == Fault::LostBlock && self.is_due() {
            self.lost.lock().expect("no test panics here").push(block);
            return Ok(Path::Hit);
        }
        // SAFETY: the caller's promise is passed on.
        let path = unsafe { self.inner.deallocate(block, self.stream(stream)) }?;
        Ok(if used { Path::Deferred } else { path })
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        if self.fault != Fault::IgnoredUse {
            return self.inner.record_use(block, stream);
        }
        let mut live = self.live.lock().expect("no test panics here");
        let Some((own, used)) = live.get_mut(&block.addr().get()) else { return self.inner.record_use(block, stream) };
        *used = stream != *own;
        // On its own stream this changes nothing, but a foreign block is refused.
        self.inner.record_use(block, *own)
    }

    fn stats(&self) -> Stats {
        let mut stats = self.inner.stats();
        if self.fault == Fault::LatePeak {
            stats.allocated_bytes.all.peak = stats.allocated_bytes.all.current;
        }
        stats
    }

    fn snapshot(&self) -> Option<Snapshot> {
        let snapshot = self.inner.snapshot();
        if self.fault != Fault::StaleSnapshot {
            return snapshot;
        }
        let before = &mut *self.before.lock().expect("no test panics here");
        std::mem::replace(before, snapshot.clone()).or(snapshot)
    }
}

macro_rules! wrong {
    ($($entry:ident $name:literal $fault:ident)+) => { $(
        static $entry: Backend = Backend {
            name: $name,
            summary: "PyTorch's policy with a fault",
            capabilities: Capabilities {
                streams: if matches!(Fault::$fault, Fault::NoWaits) { StreamUse::Any } else { StreamUse::Own },
                ..Pooled::<PyTorch>::CAPABILITIES
            },
            compared: false,
            constructor: &With(|driver, _: &NoSettings| Ok(Wrong::build($name, Fault::$fault, driver))),
        };
    )+ };
}

wrong! {
    RIGHT "right" None
    OVERLAP "overlap" Overlap
    LOST_BLOCK "lost-block" LostBlock
    IGNORED_USE "ignored-use" IgnoredUse
    NO_WAITS "no-waits" NoWaits
    LEAK "leak" Leak
    STALE_SNAPSHOT "stale-snapshot" StaleSnapshot
    LATE_PEAK "late-peak" LatePeak
}

/// Names of the checks that fail, without the backend.
fn failures(backend: &'static Backend) -> BTreeSet<String> {
    let checks = conformance(backend, &[Device::SimWithoutMemory]);
    let failed = |check: vramlab_conformance::Check| {
        let name = check.name().split("::").nth(1).unwrap_or_default().to_owned();
        catch_unwind(AssertUnwindSafe(|| check.run())).err().map(|_| name)
    };
    checks.into_iter().filter_map(failed).collect()
}

#[test]
fn each_fault_fails_the_check_of_its_rule() {
    // The error names PyTorch's policy instead of the entry.
    let usual = failures(&RIGHT);
    assert_eq!(usual, BTreeSet::from(["reports_and_names_are_complete".to_owned()]));
    for (backend, check) in [
        (&OVERLAP, "live_blocks_are_disjoint"),
        (&LOST_BLOCK, "statistics_agree_with_what_was_done"),
        (&IGNORED_USE, "a_recorded_use_ends_before_the_memory_is_used_again"),
        (&NO_WAITS, "work_of_a_stream_ends_before_another_gets_its_memory"),
        (&LEAK, "dropping_returns_everything"),
        (&STALE_SNAPSHOT, "snapshots_are_whole"),
        (&LATE_PEAK, "peaks_are_kept_and_start_again"),
    ] {
        let found = failures(backend);
        assert!(found.contains(check), "{}: {found:?}", backend.name);
    }
}
