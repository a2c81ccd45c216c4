//! An allocator on a device, for the functions of the library.

pub(crate) mod pinned;
pub(crate) mod shared;

use crate::device::Device;
use crate::driver::{SegmentEvent, Segments, serving};
use crate::error::{Failure, Outcome, Status};
use crate::held::{Held, HeldBlocks};
use crate::notices::{Callback, Notices};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path as FilePath;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::output::{Existing, OutputFile};
use vramlab_device::{Bytes, DeviceAddr, Driver, HookedDriver, MeteredDriver, StreamId};
use vramlab_histories::formats::{Ending, Export, Segment, SegmentBlock};
use vramlab_policies::backends::pytorch::conf::{AppliedConf, ParseConfError, TorchConf};
use vramlab_policies::backends::{SegmentUse, parse_host_list};
use vramlab_policies::contract::PoolKind;
use vramlab_policies::instruments::nvtx::Ranges;
use vramlab_policies::instruments::nvtx::memory::{Heaps, NvtxMemory};
use vramlab_policies::instruments::{EventTrace, Nvtx, NvtxMode, Timed, Traced, restored_streams};
use vramlab_policies::{
    AllocError, Block, DeviceAllocator, Path, PrivatePool, Request, RestoreError, Selection, Snapshot, Stats,
};

/// Active instruments, as bits of their number.
const LATENCY: usize = 1;
const TRACE: usize = 2;

/// An allocator on one device.
#[derive(Debug)]
pub struct Allocator {
    /// The allocator with the active instruments: none, latency, trace, both. All are the same allocator.
    stacks: [Arc<dyn DeviceAllocator>; 4],
    on: AtomicUsize,
    timed: Arc<Timed>,
    traces: [Arc<EventTrace>; 2],
    /// Records that left the traces and are in no file yet, in order.
    records: Mutex<Vec<Traced>>,
    selection: Selection,
    /// Live blocks.
    held: HeldBlocks,
    pools: Mutex<BTreeMap<u64, PrivatePool>>,
    /// Totals start at those of these statistics.
    since: Mutex<Option<Stats>>,
    segments: Arc<HookedDriver<Segments>>,
    calls: Arc<MeteredDriver>,
    device: Arc<Device>,
    /// The program's callbacks, and the events to deliver.
    notices: Arc<Notices>,
    /// Deferred frees whose completion must be delivered.
    deferred: AtomicUsize,
    /// Held while completed frees are moved to the notices, so that a thread that sees none has missed none.
    collecting: Mutex<()>,
}

/// The addresses of freed blocks, and the blocks that are live now: address, bytes, stream.
pub(crate) type Restored = (Vec<u64>, Vec<(u64, u64, u64)>);

/// The state of a private pool at one moment.
#[derive(Debug)]
pub struct Checkpoint {
    pool: u64,
    state: Snapshot,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The memory checker that is notified of blocks, if one is attached.
fn memory_checker() -> Option<Arc<Heaps>> {
    if is_off("VRAMLAB_NVTX_MEMORY") { None } else { Heaps::of_attached_tool() }
}

fn is_off(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|mode| mode == "off")
}

impl Allocator {
    pub(crate) fn open(allocator: &str, device: &str) -> Outcome<Self> {
        let selection = selected(allocator, device)?;
        let device = Device::open(device)?;
        let calls = Arc::new(MeteredDriver::new(Arc::clone(device.driver()), None, None));
        let notices = Arc::new(Notices::default());
        let hook = Segments::new(Arc::clone(&notices));
        let hooked = HookedDriver::with_hook(Arc::clone(&calls) as Arc<dyn Driver>, hook);
        let segments = Arc::new(hooked);
        let mut driver: Arc<dyn Driver> = Arc::clone(&segments) as _;
        // It checks memory of GPUs.
        let checker = if device.host().is_some() { None } else { memory_checker() };
        if let Some(heaps) = &checker {
            driver = heaps.watch(driver);
        }
        let mut plain = selection.build(&driver)?;
        if let Some(heaps) = checker {
            plain = Arc::new(NvtxMemory::new(plain, heaps));
        } else {
            let ranges = Ranges::new(if is_off("VRAMLAB_NVTX") { NvtxMode::Off } else { NvtxMode::Auto });
            if ranges.is_on() {
                plain = Arc::new(Nvtx::new(plain, ranges));
            }
        }
        let timed = Arc::new(Timed::new(Arc::clone(&plain), driver.clock()));
        let inner: [Arc<dyn DeviceAllocator>; 2] = [Arc::clone(&plain), Arc::clone(&timed) as _];
        let traces = inner.clone().map(|inner| Arc::new(EventTrace::new(inner, driver.clock())));
        let [plain, timing] = inner;
        let traced = traces.clone().map(|trace| trace as Arc<dyn DeviceAllocator>);
        let [tracing, both] = traced;
        device.add(&plain);
        Ok(Self {
            stacks: [plain, timing, tracing, both],
            on: AtomicUsize::new(0),
            timed,
            traces,
            records: Mutex::default(),
            selection,
            held: HeldBlocks::new(),
            pools: Mutex::default(),
            since: Mutex::default(),
            segments,
            calls,
            device,
            notices,
            deferred: AtomicUsize::new(0),
            collecting: Mutex::default(),
        })
    }

    /// The allocator with the active instruments.
    #[inline]
    fn stack(&self) -> &dyn DeviceAllocator {
        self.stacks[self.on.load(Relaxed) % self.stacks.len()].as_ref()
    }

    /// Delivers the events of a call to the program, before the call returns; `block` is the memory that the call returns. No lock
    /// is held here. Nothing here or above needs to be dropped, see [`notices`](crate::notices).
    #[inline]
    pub(crate) fn deliver(&self, block: Option<Range<u64>>) {
        if self.deferred.load(Acquire) != 0 {
            self.collect_freed();
        }
        self.notices.deliver(block);
    }

    /// Moves completed deferred frees to the notices.
    #[cold]
    fn collect_freed(&self) {
        let _collecting = lock(&self.collecting);
        let freed: Vec<u64> = self.stacks[0].take_completed().into_iter().map(DeviceAddr::get).collect();
        self.notices.queue_freed(&freed);
        self.end_deferred(freed.len());
    }

    /// Counts `count` deferred frees as completed, or all that there are.
    fn end_deferred(&self, count: usize) {
        let _ = self.deferred.fetch_update(AcqRel, Acquire, |deferred| Some(deferred.saturating_sub(count)));
    }

    /// Whether this thread is in a callback of this allocator.
    pub(crate) fn is_calling_back(&self) -> bool {
        self.notices.is_running_here()
    }

    #[inline]
    pub(crate) fn allocate(&self, pool: u64, bytes: u64, stream: u64) -> Outcome<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        let stream = self.device.request_stream(stream)?;
        serving(stream.get());
        let request = Request::new(bytes);
        let served = match pool {
            0 => self.stack().allocate(request, stream),
            _ => self.stack().allocate_in(request, stream, self.pool(pool)?),
        };
        let block = served.map_err(|error| self.refused(error))?;
        let address = block.addr().get();
        self.held.insert(Held { block, stream, pool, shared: false });
        Ok(address)
    }

    /// Names the limit of an allocator that does not know its limit.
    #[cold]
    fn refused(&self, error: AllocError) -> Failure {
        let limit = self.segments.hook().limit().filter(|_| error.is_out_of_memory());
        let mut failure = Failure::from(error);
        if let Some(limit) = limit {
            failure.text.push_str(&format!("; the limit is {}", Bytes(limit)));
        }
        failure
    }

    #[inline]
    pub(crate) fn free(&self, address: u64) -> Outcome<()> {
        if address == 0 {
            return Ok(());
        }
        let Held { block, stream, shared, .. } = self.held.take(address).ok_or_else(|| self.foreign(address))?;
        let notifies = shared && self.notices.wants_frees();
        if notifies {
            // Before the free, so that another thread that sees it completed counts it down.
            self.deferred.fetch_add(1, AcqRel);
        }
        // SAFETY: every use of the block is queued, on its stream or on those that it was recorded on: the program promises it, see
        // `vramlab_free`.
        let freed = unsafe { self.stack().deallocate(block, stream) };
        // A block whose free failed is deferred, too.
        if notifies && matches!(freed, Ok(path) if path != Path::Deferred) {
            self.notices.queue_freed(&[address]);
            self.end_deferred(1);
        }
        freed?;
        Ok(())
    }

    fn foreign(&self, address: u64) -> Failure {
        let inside = self.stacks[0].snapshot().is_some_and(|snapshot| {
            let addr = |segment: &vramlab_policies::SegmentInfo| segment.addr.get()..segment.addr.get() + segment.bytes;
            snapshot.segments.iter().any(|segment| addr(segment).contains(&address))
        });
        let why = match inside {
            true => "it is in its memory, but no live block begins there: it was freed before, or is inside a block",
            false => "it is memory of another allocator or device, or its segment was released after it was freed",
        };
        Failure::new(Status::Foreign, format!("'{}' holds no block at {address:#x}: {why}", self.selection.name()))
    }

    pub(crate) fn record_stream(&self, address: u64, stream: u64) -> Outcome<()> {
        if address == 0 {
            return Ok(());
        }
        self.record_use(address, self.device.stream(stream)?)
    }

    fn record_use(&self, address: u64, stream: StreamId) -> Outcome<()> {
        let recorded = self.held.with(address, |held| match held.stream == stream {
            true => Ok(()),
            false => {
                held.shared = true;
                self.stack().record_use(&held.block, stream)
            }
        });
        Ok(recorded.ok_or_else(|| self.foreign(address))??)
    }

    pub(crate) fn stream_gone(&self, stream: u64) -> Outcome<()> {
        self.device.forget(stream)
    }

    pub(crate) fn capturing(&self, open: bool) {
        self.device.driver().note_capture(open);
    }

    pub(crate) fn reuse_in_captures(&self, on: bool) -> Outcome<()> {
        if self.stack().set_reuse_in_captures(on) {
            return Ok(());
        }
        Err(AllocError::Incapable { allocator: self.selection.name(), capability: "reuse within a capture" }.into())
    }

    fn pool(&self, pool: u64) -> Outcome<PrivatePool> {
        let unknown = || Failure::new(Status::Unknown, format!("there is no private pool {pool}, or it was released"));
        lock(&self.pools).get(&pool).copied().ok_or_else(unknown)
    }

    pub(crate) fn pool_create(&self) -> Outcome<u64> {
        let pool = self.stack().pool_create()?;
        lock(&self.pools).insert(pool.id().get(), pool);
        Ok(pool.id().get())
    }

    pub(crate) fn pool_release(&self, pool: u64) -> Outcome<()> {
        self.stack().pool_release(self.pool(pool)?)?;
        Ok(())
    }

    pub(crate) fn pool_trim(&self, pool: u64) -> Outcome<u64> {
        Ok(self.stack().pool_trim(self.pool(pool)?)?)
    }

    pub(crate) fn pool_checkpoint(&self, pool: u64) -> Outcome<Checkpoint> {
        let state = self.stack().pool_checkpoint(self.pool(pool)?)?;
        Ok(Checkpoint { pool, state })
    }

    /// Restores a pool to a checkpoint. Other threads' calls that name a block wait meanwhile.
    pub(crate) fn pool_restore(&self, checkpoint: &Checkpoint) -> Outcome<Restored> {
        let (pool, of_pool) = (checkpoint.pool, |held: &Held| held.pool == checkpoint.pool);
        let known = self.pool(pool)?;
        let mut tables = self.held.lock_all();
        let taken = tables.take_where(of_pool);
        let freed = taken.iter().map(|held| held.block.addr().get()).collect();
        let shared: BTreeSet<u64> =
            taken.iter().filter(|held| held.shared).map(|held| held.block.addr().get()).collect();
        let given = taken.into_iter().map(|held| (held.block, held.stream)).collect();
        // SAFETY: these are all live blocks of the pool, whose uses are queued: the program promises that, see
        // `vramlab_pool_restore`.
        let restored = unsafe { self.stack().pool_restore(known, &checkpoint.state, given) };
        let (blocks, error) = match restored {
            Ok(blocks) => (blocks.into_iter().zip(restored_streams(&checkpoint.state)).collect(), None),
            Err(RestoreError { held, error }) => (held, Some(error)),
        };
        let mut created = Vec::new();
        for (block, stream) in blocks {
            let address = block.addr().get();
            created.push((address, block.bytes(), stream.get()));
            let shared = error.is_some() && shared.contains(&address);
            tables.insert(Held { block, stream, pool, shared });
        }
        error.map_or(Ok((freed, created)), |error| Err(error.into()))
    }

    pub(crate) fn trim(&self, keep: u64) -> Outcome<u64> {
        Ok(self.stack().trim(keep)?)
    }

    pub(crate) fn set_limit(&self, bytes: u64) {
        let has_limit = self.stack().set_memory_limit((bytes != u64::MAX).then_some(bytes));
        // An allocator with a limit of its own releases its cache first.
        self.segments.hook().set_limit(if has_limit { u64::MAX } else { bytes });
    }

    pub(crate) fn memory(&self) -> Outcome<(u64, u64)> {
        let info = self.segments.mem_info()?;
        Ok((info.free, info.total))
    }

    pub(crate) fn stats(&self) -> Stats {
        // Locked first, so that no other thread's restart is later than these statistics.
        let since = lock(&self.since);
        let stats = self.stack().stats();
        match &*since {
            Some(before) => stats.since(before),
            None => stats,
        }
    }

    pub(crate) fn stats_json(&self) -> String {
        let entries = self.stats().entries().into_iter();
        let map: serde_json::Map<String, serde_json::Value> =
            entries.map(|(name, value)| (name, value.into())).collect();
        serde_json::Value::Object(map).to_string()
    }

    pub(crate) fn reset_peaks(&self) {
        self.stack().reset_peaks();
        self.device.host().inspect(|host| host.reset_longest());
    }

    pub(crate) fn reset_accumulated(&self) {
        let mut since = lock(&self.since);
        *since = Some(self.stack().stats());
        drop(since);
        self.device.host().inspect(|host| host.reset_sums());
    }

    /// The effective setting; `None` where the allocator has no such setting or it is not set.
    pub(crate) fn setting(&self, name: &str) -> Option<u64> {
        self.stacks[0].settings().get(name)?.as_u64()
    }

    pub(crate) fn settings_json(&self) -> String {
        json!({ "allocator": self.selection.name(), "settings": self.stacks[0].settings() }).to_string()
    }

    pub(crate) fn snapshot(&self) -> Outcome<Snapshot> {
        let incapable = || AllocError::Incapable { allocator: self.selection.name(), capability: "snapshots" };
        Ok(self.stacks[0].snapshot().ok_or_else(incapable)?)
    }

    /// Writes segments and blocks in PyTorch's layout: JSON for a name that ends in `.json`, else a pickle.
    pub(crate) fn write_snapshot(&self, path: &FilePath) -> Outcome<()> {
        let segments: Vec<Segment> = self.snapshot()?.segments.iter().map(written).collect();
        let json = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
        let export = if json { Export::SnapshotJson } else { Export::Snapshot };
        let settings = self.stacks[0].settings();
        let ending = Ending { segments: &segments, allocator_settings: settings.as_object(), ..Ending::default() };
        export.begin(OutputFile::create(path, Existing::Replace)?)?.finish(&ending)?;
        Ok(())
    }

    /// The segment around an address: its begin and its size.
    pub(crate) fn base(&self, address: u64) -> Outcome<(u64, u64)> {
        let snapshot = self.snapshot()?;
        let around = snapshot.segments.iter().find(|segment| {
            let start = segment.addr.get();
            (start..start + segment.bytes).contains(&address)
        });
        let segment = around.ok_or_else(|| self.foreign(address))?;
        if segment.expandable {
            let text = format!("the memory at {address:#x} is expandable and not in an allocation of the driver");
            return Err(Failure::new(Status::Incapable, text));
        }
        Ok((segment.addr.get(), segment.bytes))
    }

    /// Moves the records of both traces to `records`, behind earlier ones.
    fn collect_records(&self, records: &mut Vec<Traced>) {
        let earlier = records.len();
        records.extend(self.traces.iter().flat_map(|trace| trace.take()));
        records[earlier..].sort_by_key(|traced| traced.event.time_ns);
    }

    fn turn(&self, instrument: usize, on: bool) {
        if on {
            self.on.fetch_or(instrument, Relaxed);
        } else {
            self.on.fetch_and(!instrument, Relaxed);
        }
    }

    pub(crate) fn latency(&self, on: bool) {
        // The other trace records from now on. The simulated clock may stand still, so times alone do not order the two.
        let records = &mut *lock(&self.records);
        self.collect_records(records);
        self.turn(LATENCY, on);
    }

    pub(crate) fn latency_json(&self) -> Outcome<String> {
        to_json(&self.timed.rows())
    }

    pub(crate) fn trace(&self, on: bool) {
        self.turn(TRACE, on);
    }

    /// Writes the events since the last time, one per line. Where that fails, they are part of the next file.
    pub(crate) fn write_trace(&self, path: &FilePath) -> Outcome<()> {
        let file = OutputFile::create(path, Existing::Replace)?;
        let records = &mut *lock(&self.records);
        self.collect_records(records);
        let mut lines = String::new();
        for record in records.iter() {
            lines.push_str(&to_json(record)?);
            lines.push('\n');
        }
        file.fill(lines)?;
        records.clear();
        Ok(())
    }

    pub(crate) fn calls_json(&self) -> Outcome<String> {
        to_json(&self.calls.counts())
    }

    pub(crate) fn can(&self) -> u32 {
        let capabilities = self.selection.capabilities();
        let bits = [
            (capabilities.private_pools, super::VRAMLAB_CAN_POOLS),
            (capabilities.checkpoints, super::VRAMLAB_CAN_CHECKPOINT),
            (capabilities.snapshot, super::VRAMLAB_CAN_SNAPSHOT),
            (capabilities.segments == SegmentUse::Expandable, super::VRAMLAB_CAN_EXPAND),
            (capabilities.follows_pytorch, super::VRAMLAB_FOLLOWS_PYTORCH),
        ];
        bits.into_iter().filter(|(can, _)| *can).map(|(_, bit)| bit).sum()
    }

    pub(crate) fn on_free(&self, callback: Option<Callback<u64>>) {
        let _collecting = lock(&self.collecting);
        // Deferred frees stay in the table where one callback replaces another.
        if callback.is_some() != self.notices.wants_frees() {
            // False where deferred frees are not observed: then each completes with its request.
            let _ = self.stacks[0].tell_completed(callback.is_some());
            self.deferred.store(0, Release);
        }
        self.notices.set_on_free(callback);
    }

    /// The live block that begins at an address.
    pub(crate) fn block(&self, address: u64) -> Outcome<super::BlockRecord> {
        let record = |held: &mut Held| super::BlockRecord {
            address,
            bytes: held.block.bytes(),
            requested: held.block.requested(),
            state: super::BlockStateRecord::Allocated,
        };
        self.held.with(address, record).ok_or_else(|| self.foreign(address))
    }

    pub(crate) fn on_segment(&self, callback: Option<Callback<*const SegmentEvent>>) {
        self.notices.set_on_segment(callback);
    }

    /// Releases everything, also live blocks, once the device is idle.
    pub(crate) fn close(self) -> Outcome<()> {
        self.on_segment(None);
        self.on_free(None);
        self.device.remove(&self.stacks[0]);
        let synchronized = self.device.driver().device_synchronize();
        for Held { block, stream, .. } in self.held.lock_all().take_where(|_| true) {
            // SAFETY: the device is idle, or broken, and the program promises that it does not use the block any more.
            let _ = unsafe { self.stacks[0].deallocate(block, stream) };
        }
        Ok(synchronized?)
    }
}

/// The allocator that a text names, of the memory of a device.
fn selected(text: &str, device: &str) -> Outcome<Selection> {
    if !Device::is_host(device) {
        return Ok(text.parse()?);
    }
    let mut listed = parse_host_list(text).map_err(|error| match text.parse::<Selection>() {
        Ok(_) => {
            let remedy = "open it on cuda or sim, or name an allocator such as host-exact";
            let text = format!("'{text}' allocates a GPU's memory, not pinned host memory; {remedy}");
            Failure::new(Status::Unknown, text)
        }
        Err(_) => error.into(),
    })?;
    let selection = listed.pop().filter(|_| listed.is_empty());
    selection.ok_or_else(|| Failure::new(Status::Unknown, format!("'{text}': name one allocator, such as host-exact")))
}

/// Refuses a text that names no allocator of the device's memory, or unknown settings or values.
pub(crate) fn check(text: &str, device: &str) -> Outcome<()> {
    Ok(selected(text, device)?.check()?)
}

fn to_json(value: &impl serde::Serialize) -> Outcome<String> {
    serde_json::to_string(value).map_err(|error| Failure::new(Status::Internal, error.to_string()))
}

/// A segment in the form of files.
fn written(segment: &vramlab_policies::SegmentInfo) -> Segment {
    let block = |block: &vramlab_policies::BlockInfo| SegmentBlock {
        address: block.addr.get(),
        size: block.bytes,
        requested_size: block.requested,
        state: block.state,
    };
    Segment {
        device: 0,
        address: segment.addr.get(),
        total_size: segment.bytes,
        stream: segment.stream.get(),
        segment_type: segment.pool.unwrap_or(PoolKind::Large),
        pool_id: Some((0, segment.private.map_or(0, |private| private.get()))),
        is_expandable: segment.expandable,
        blocks: segment.blocks.iter().map(block).collect(),
    }
}

/// The settings that an allocator follows of a text of `PYTORCH_CUDA_ALLOC_CONF`, as JSON.
pub(crate) fn torch_conf_json(name: &str, conf: &str, limit: Option<u64>) -> Outcome<String> {
    let allocator: Selection = name.parse()?;
    let conf: TorchConf =
        conf.parse().map_err(|error: ParseConfError| Failure::new(Status::Unknown, error.to_string()))?;
    let AppliedConf { settings, ignored } = conf.applied_to(&allocator, limit);
    let settings: serde_json::Map<_, _> =
        settings.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    let fixed: Vec<&str> = conf.fixed_keys().collect();
    Ok(json!({ "settings": settings, "ignored": ignored, "fixed": fixed }).to_string())
}

/// Every allocator with its settings, as JSON.
pub(crate) fn allocators_json() -> String {
    let each = vramlab_policies::backends::all().into_iter().map(|backend| {
        let settings: Vec<_> = backend
            .settings()
            .iter()
            .map(|setting| json!({ "name": setting.name, "default": setting.value }))
            .collect();
        json!({ "name": backend.name, "summary": backend.summary, "settings": settings })
    });
    serde_json::Value::Array(each.collect()).to_string()
}

/// No block has the address that is C's null.
const _: () = assert!(std::mem::size_of::<Option<DeviceAddr>>() == 8 && std::mem::size_of::<Block>() == 32);
