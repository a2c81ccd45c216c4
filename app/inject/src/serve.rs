//! Memory from an allocator, for the primary context of each device.
//!
//! A context that the program makes by itself (`cuCtxCreate`) is left to the driver: the allocator's memory belongs to the
//! primary context, which is the one of the runtime API.

mod held;
mod pending;
mod segments;

pub(crate) use held::{Held, Range, holder, owns, range_of, take};

use crate::entries::Blocked;
use crate::host;
use crate::real::real;
use crate::settings::{self, Free};
use crate::streams;
use pending::Item;
pub(crate) use pending::Pending;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use vramlab_device::{CudaDriver, CudaVersion, Driver, HookedDriver, StreamId};
use vramlab_policies::{AllocError, DeviceAllocator, Request};

/// The driver's codes.
pub(crate) const SUCCESS: i32 = 0;
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;

/// Memory is a multiple of this address: what `cuMemAlloc` returns in fact, and what textures need.
pub(crate) const ALIGN: u64 = 512;

/// An allocator on a context. Never dropped: the driver may be gone before this library is.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) context: u64,
    pub(crate) device: i32,
    driver: Arc<dyn Driver>,
    allocator: Arc<dyn DeviceAllocator>,
    /// The legacy stream, on which memory that any stream may use is allocated.
    legacy: StreamId,
    /// Streams that had requests of their own.
    streams: Mutex<HashMap<u64, StreamId>>,
    pending: Mutex<Pending<Item>>,
    /// Blocks in `pending`.
    waiting: AtomicUsize,
    /// When the next look at them is due.
    due_ns: AtomicU64,
    /// Bytes of the blocks that the program holds.
    live: AtomicU64,
}

/// By context: its allocator, or that it is left to the driver.
static CONTEXTS: Mutex<Vec<(u64, Option<&'static Served>)>> = Mutex::new(Vec::new());
/// Changes when a context is forgotten. Not 0.
static EPOCH: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The context that was looked up last, with the epoch.
    static LAST: Cell<(u64, u64, Option<&'static Served>)> = const { Cell::new((0, 0, None)) };
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The context that is current on this thread; 0 if none is.
pub(crate) fn context() -> u64 {
    let mut context = 0_u64;
    let code = real!(cuCtxGetCurrent(&raw mut context => *mut u64));
    if code == SUCCESS { context } else { 0 }
}

/// Makes calls with a context current; `None` where that cannot be.
pub(crate) fn within<T>(wanted: u64, calls: impl FnOnce() -> T) -> Option<T> {
    let pushed = context() != wanted;
    if pushed && real!(cuCtxPushCurrent_v2(wanted => u64)) != SUCCESS {
        return None;
    }
    let out = calls();
    if pushed {
        let mut popped = 0_u64;
        real!(cuCtxPopCurrent_v2(&raw mut popped => *mut u64));
    }
    Some(out)
}

/// Whether the current context is the primary one of its device.
pub(crate) fn is_primary(context: u64, device: i32) -> bool {
    if !crate::entries::is_active(device) {
        return false;
    }
    let mut primary = 0_u64;
    if real!(cuDevicePrimaryCtxRetain(&raw mut primary => *mut u64, device => i32)) != SUCCESS {
        return false;
    }
    real!(cuDevicePrimaryCtxRelease_v2(device => i32));
    primary == context
}

/// The device of the current context.
pub(crate) fn device() -> i32 {
    let mut device = 0;
    let code = real!(cuCtxGetDevice(&raw mut device => *mut i32));
    if code == SUCCESS { device } else { 0 }
}

/// The allocator of the current context, made when it is first asked for. `None`: the driver serves.
pub(crate) fn current() -> Option<&'static Served> {
    settings::get().alloc.as_ref()?;
    let context = context();
    if context == 0 || is_broken() {
        return None;
    }
    let epoch = EPOCH.load(Acquire);
    if let Ok((last, then, served)) = LAST.try_with(Cell::get)
        && (last, then) == (context, epoch)
    {
        return served;
    }
    let mut contexts = lock(&CONTEXTS);
    let known = contexts.iter().find(|(one, _)| *one == context).map(|(_, served)| *served);
    let served = known.unwrap_or_else(|| {
        let served = whole(|| open(context)).unwrap_or(Ok(None)).unwrap_or_else(|why| {
            settings::say(&format!("memory stays the driver's: {why}"));
            None
        });
        contexts.push((context, served));
        served
    });
    let _ = LAST.try_with(|last| last.set((context, epoch, served)));
    served
}

/// Whether the allocator had a fault, so that the driver serves from then on. What it has served can be freed.
static BROKEN: AtomicBool = AtomicBool::new(false);

/// Whether the driver serves from now on.
pub(crate) fn is_broken() -> bool {
    BROKEN.load(Acquire)
}

/// Makes a call of an allocator. `None` after a panic, which is said once.
pub(crate) fn whole<T>(call: impl FnOnce() -> T) -> Option<T> {
    static QUIET: Once = Once::new();
    // Only this library's panics come here, not the program's.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| ())));
    let done = catch_unwind(AssertUnwindSafe(call));
    let text = |fault: Box<dyn std::any::Any + Send>| match fault.downcast::<String>() {
        Ok(text) => *text,
        Err(fault) => fault.downcast::<&str>().map_or_else(|_| "a panic".to_owned(), |text| (*text).to_owned()),
    };
    done.map_err(|fault| {
        if !BROKEN.swap(true, AcqRel) {
            settings::say(&format!(
                "memory stays the driver's from here on, because the allocator failed: {}",
                text(fault)
            ));
        }
    })
    .ok()
}

/// An allocator for the current context, if that is the primary one of its device.
fn open(context: u64) -> Result<Option<&'static Served>, String> {
    let Some(selection) = &settings::get().alloc else { return Ok(None) };
    if is_served_by_shim() {
        return Ok(None);
    }
    let device = device();
    let mut primary = 0_u64;
    if real!(cuDevicePrimaryCtxRetain(&raw mut primary => *mut u64, device => i32)) != SUCCESS {
        return Ok(None);
    }
    let release = || real!(cuDevicePrimaryCtxRelease_v2(device => i32));
    if primary != context {
        release();
        return Ok(None);
    }
    let ordinal = usize::try_from(device).map_err(|_| format!("device {device}"))?;
    let opened = CudaDriver::as_guest_since(ordinal, CudaVersion::NEEDED_FOR_MEMORY).map_err(|error| {
        let text = error.to_string();
        // The program has no such argument.
        text.strip_suffix(", or use --device sim").map_or(text.clone(), str::to_owned)
    });
    // The allocator's hold on the context ends, so that the program's last one ends the context, as without this library. The driver
    // object is never dropped.
    release();
    let driver = opened.inspect(|_| _ = release())?;
    let driver = HookedDriver::with_hook(Arc::new(driver) as Arc<dyn Driver>, segments::Watch);
    let driver: Arc<dyn Driver> = Arc::new(driver);
    // SAFETY: the legacy stream lives as long as its context.
    let legacy = unsafe { driver.stream_adopt(LEGACY_ID) }.map_err(|error| error.to_string())?;
    let allocator = selection.build(&driver).map_err(|error| error.to_string())?;
    let served = Served {
        context,
        device,
        driver,
        allocator,
        legacy,
        streams: Mutex::default(),
        pending: Mutex::default(),
        waiting: AtomicUsize::new(0),
        due_ns: AtomicU64::new(0),
        live: AtomicU64::new(0),
    };
    Ok(Some(Box::leak(Box::new(served))))
}

/// How [`Driver::stream_adopt`] names the legacy stream.
const LEGACY_ID: u64 = 0;

/// Whether PyTorch's memory is served by the shim in this process, which gets its segments from here.
fn is_served_by_shim() -> bool {
    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> libc::c_int {
        // SAFETY: the dynamic linker passes a live structure, whose name ends with a zero byte, and `found` is ours.
        unsafe {
            let name = (*info).dlpi_name;
            if !name.is_null()
                && std::ffi::CStr::from_ptr(name).to_bytes().windows(11).any(|part| part == b"libc10_cuda")
            {
                *found.cast::<bool>() = true;
            }
        }
        0
    }
    if !settings::get().shim || settings::get().torch {
        return false;
    }
    let mut found = false;
    // SAFETY: the function matches, and the flag lives until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut found).cast()) };
    found
}

pub(crate) fn code_of(error: &AllocError) -> i32 {
    match error {
        _ if error.is_out_of_memory() => OUT_OF_MEMORY,
        AllocError::Driver(error) => i32::try_from(error.code).unwrap_or(OUT_OF_MEMORY),
        _ => OUT_OF_MEMORY,
    }
}

/// A block, and the first address in it that is aligned.
pub(crate) fn aligned(
    allocator: &dyn DeviceAllocator,
    bytes: u64,
    stream: StreamId,
) -> Result<(vramlab_policies::Block, u64), AllocError> {
    let block = allocator.allocate(Request::new(bytes), stream)?;
    if block.addr().get().is_multiple_of(ALIGN) {
        let addr = block.addr().get();
        return Ok((block, addr));
    }
    // SAFETY: it was never used.
    unsafe { allocator.deallocate(block, stream)? };
    let block = allocator.allocate(Request::new(bytes.saturating_add(ALIGN)), stream)?;
    let addr = block.addr().get().next_multiple_of(ALIGN);
    Ok((block, addr))
}

impl Served {
    /// Makes calls with this context current.
    fn inside<T>(&self, calls: impl FnOnce() -> T) -> T {
        let pushed = context() != self.context;
        if pushed {
            real!(cuCtxPushCurrent_v2(self.context => u64));
        }
        let out = calls();
        if pushed {
            let mut popped = 0_u64;
            real!(cuCtxPopCurrent_v2(&raw mut popped => *mut u64));
        }
        out
    }

    fn stream(&self, handle: u64) -> Result<StreamId, i32> {
        if handle <= streams::LEGACY {
            return Ok(self.legacy);
        }
        let mut streams = lock(&self.streams);
        if let Some(known) = streams.get(&handle) {
            return Ok(*known);
        }
        // SAFETY: the program names a live stream of this context; `stream_gone` forgets it before it is destroyed.
        let adopted = unsafe { self.driver.stream_adopt(handle) }.map_err(|_| INVALID_VALUE)?;
        streams.insert(handle, adopted);
        Ok(adopted)
    }

    /// Memory for the program, on the stream `handle`, or for all streams where that is the legacy one; else the driver's code. `None`
    /// after a fault of the allocator. `now`: the time, or 0 if it was not read.
    pub(crate) fn allocate(&'static self, bytes: u64, handle: u64, now: u64) -> Option<Result<u64, i32>> {
        whole(|| self.allocate_unguarded(bytes, handle, now))
    }

    fn allocate_unguarded(&'static self, bytes: u64, handle: u64, now: u64) -> Result<u64, i32> {
        if self.waiting.load(Acquire) > 0 && !streams::is_capturing() && time(now) >= self.due_ns.load(Acquire) {
            self.collect(false);
        }
        let stream = self.stream(handle)?;
        let first = match aligned(&*self.allocator, bytes, stream) {
            Err(error) if error.is_out_of_memory() => {
                self.collect(true);
                aligned(&*self.allocator, bytes, stream)
            }
            other => other,
        };
        let (block, addr) = first.map_err(|error| code_of(&error))?;
        if settings::get().poison {
            self.inside(|| poison(addr, bytes, handle));
        }
        self.live.fetch_add(block.bytes(), Relaxed);
        held::insert(addr, Held::new(block, self, stream, handle, bytes));
        Ok(addr)
    }

    /// Takes memory back that any stream may have used. Returns how long it waited. `now`: the time, or 0 if it was not read.
    pub(crate) fn free(&self, held: Held, now: u64) -> Blocked {
        self.live.fetch_sub(held.block.bytes(), Relaxed);
        let item = Item { block: held.block, stream: held.stream };
        if settings::get().free == Free::Waits && !streams::is_capturing() {
            let waited = self.inside(streams::wait_always);
            self.give_back(item);
            return waited;
        }
        if streams::is_single() && item.stream == self.legacy {
            self.give_back(item);
            return Blocked::default();
        }
        self.waiting.fetch_add(1, AcqRel);
        let full = self.wait_for_all(&mut lock(&self.pending), item, now);
        // Requests look at what waits; here only the number of events is limited.
        if full {
            self.collect(false);
        }
        Blocked::default()
    }

    /// Takes memory back once the stream `handle` has passed this point.
    pub(crate) fn free_on(&self, held: Held, handle: u64) {
        self.live.fetch_sub(held.block.bytes(), Relaxed);
        let same = held.handle == handle || (held.handle.max(handle) <= streams::LEGACY);
        let item = Item { block: held.block, stream: held.stream };
        // Memory of the legacy stream serves requests for all streams too, so that order on that stream is not enough.
        if same && (item.stream != self.legacy || streams::is_single()) {
            return self.give_back(item);
        }
        self.waiting.fetch_add(1, AcqRel);
        let sealed = match streams::is_capturing() {
            true => Err(item),
            false => self.inside(|| lock(&self.pending).add_on(item, self.context, handle)),
        };
        if let Err(item) = sealed {
            self.wait_for_all(&mut lock(&self.pending), item, 0);
        }
    }

    /// Lets a block wait for all streams. Returns whether as many wait without events as may.
    fn wait_for_all(&self, pending: &mut Pending<Item>, item: Item, now: u64) -> bool {
        pending.add_at(item, || time(now));
        self.due_ns.store(pending.due_ns(), Release);
        pending.is_full()
    }

    fn give_back(&self, item: Item) {
        // SAFETY: all work that uses the block is done, or was queued before on the block's stream: see `streams`.
        let freed = unsafe { self.allocator.deallocate(item.block, item.stream) };
        if let Err(error) = freed {
            // The allocator keeps what the driver did not take.
            settings::say(&format!("a free failed in {}: {error}", self.allocator.name()));
        }
    }

    /// Frees the pending blocks whose work has completed. With `all` it waits for all pending blocks.
    fn collect(&self, all: bool) {
        let items = self.inside(|| {
            let mut pending = lock(&self.pending);
            let items = pending.collect(self.context, all);
            self.due_ns.store(pending.due_ns(), Release);
            items
        });
        self.waiting.fetch_sub(items.len(), AcqRel);
        items.into_iter().for_each(|item| self.give_back(item));
    }

    /// Bytes that the allocator holds and the program does not: they are given back when memory is short.
    pub(crate) fn cached(&self) -> u64 {
        self.allocator.stats().reserved_bytes.all.current.saturating_sub(self.live.load(Relaxed))
    }

    /// Returns unused memory to the driver; true if that was any.
    fn trim(&self) -> bool {
        self.collect(true);
        self.allocator.trim(0).is_ok_and(|bytes| bytes > 0)
    }

    /// Forgets a stream that is about to be destroyed.
    fn stream_gone(&self, handle: u64) {
        let Some(stream) = lock(&self.streams).remove(&handle) else { return };
        self.inside(|| real!(cuStreamSynchronize(handle => u64)));
        self.allocator.forget_stream(stream);
        let _ = self.driver.stream_forget(stream);
    }
}

/// The time, if it was not read yet.
fn time(now: u64) -> u64 {
    if now == 0 { crate::record::now() } else { now }
}

/// Fills memory with bytes that are NaN in every floating-point format, and waits.
fn poison(addr: u64, bytes: u64, handle: u64) {
    const NAN: u8 = 0xff;
    let length = usize::try_from(bytes).unwrap_or(usize::MAX);
    real!(cuMemsetD8Async(addr => u64, NAN => u8, length => usize, handle => u64));
    real!(cuStreamSynchronize(handle => u64));
}

fn all() -> Vec<&'static Served> {
    lock(&CONTEXTS).iter().filter_map(|(_, served)| *served).collect()
}

/// Waits for the work of every context that has an allocator.
pub(crate) fn synchronize_all() {
    for served in all() {
        served.inside(|| real!(cuCtxSynchronize()));
    }
}

/// Returns unused memory to the driver, which has refused a request; true if that was any.
pub(crate) fn trim_all() -> bool {
    !streams::is_capturing() && all().into_iter().fold(crate::pool::trim(), |any, served| served.trim() | any)
}

/// Forgets a stream that is about to be destroyed. Its work has to be over, since it gets no event any more.
pub(crate) fn stream_gone(handle: u64) {
    let reuses = settings::get().alloc.is_some() || host::is_on() || crate::pool::is_on();
    if reuses && streams::is_non_blocking(handle) && !streams::is_capturing() {
        real!(cuStreamSynchronize(handle => u64));
    }
    all().into_iter().for_each(|served| served.stream_gone(handle));
}

/// Forgets the kept and the pinned memory of a context that is gone.
fn context_gone(context: u64) {
    crate::pool::context_gone(context);
    host::context_gone(context);
    streams::context_gone(context);
}

/// Forgets a context that the program has destroyed.
pub(crate) fn context_destroyed(context: u64) {
    context_gone(context);
    // A context under the same handle may be a primary one.
    lock(&CONTEXTS).retain(|(known, served)| *known != context || served.is_some());
    EPOCH.fetch_add(1, Release);
}

/// Forgets the allocator of a device whose primary context is gone, and with it all memory of it.
pub(crate) fn device_gone(device: i32) {
    streams::primary_of(device).into_iter().for_each(context_gone);
    let mut contexts = lock(&CONTEXTS);
    contexts.retain(|(context, served)| match served {
        Some(served) if served.device == device => {
            held::context_gone(*context);
            context_gone(*context);
            false
        }
        // It may have been left to the driver because it was not yet the primary one.
        Some(_) => true,
        None => false,
    });
    EPOCH.fetch_add(1, Release);
}

/// A number that no other allocation of the process has had (`CU_POINTER_ATTRIBUTE_BUFFER_ID`). The driver's own are small.
pub(crate) fn next_buffer_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 48);
    NEXT.fetch_add(1, Relaxed)
}
