//! Pinned host memory from an allocator (`--host-alloc`), over the driver's own pinned memory as segments.
//!
//! Each context has an allocator for each way in which its memory was asked for, so blocks of different flags never share a segment. The
//! allocator sees one stream, the host: it reuses a block at once, because a block is returned to it only when no work can use it any
//! more. That is when the work of *all* contexts that was queued before the free has completed, since every GPU reads pinned memory
//! ([`Pending::everywhere`]). Work on the legacy stream makes no exception, as it does for device memory: the host does not wait for
//! that stream.
//!
//! A free does not wait, as the driver's does. A request that the free blocks cannot serve waits for freed blocks that can, before more is
//! pinned: the driver's free would have waited for the same work, and pinning is slow.
//!
//! PyTorch has an allocator of pinned memory of its own, which rounds to powers of two. Where the package for Python has replaced that
//! one (`--host-alloc` with PyTorch), its segments are the driver's: [`vramlab_inject_leave_host`].

mod blocks;

pub(crate) use blocks::range_of;

use crate::entries::Blocked;
use crate::real::real;
use crate::serve::{self, ALIGN, OUT_OF_MEMORY, Pending, SUCCESS, lock};
use crate::settings::{self, Free};
use crate::{record, streams};
use blocks::Held;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use vramlab_device::{
    CallArguments, CallKind, DeviceAddr, Driver, DriverError, DriverResult, Hook, HookedDriver, HostRoom, MemInfo,
    NullDriver, StreamId,
};
use vramlab_policies::{AllocError, Block, DeviceAllocator, Selection};

/// How memory was asked for. Memory of another kind has other properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// `cuMemAllocHost`.
    Plain,
    /// `cuMemHostAlloc` with these flags.
    Flags(u32),
}

/// `CU_MEMHOSTALLOC_PORTABLE`, `_DEVICEMAP` and `_WRITECOMBINED`. The driver judges others.
const KNOWN_FLAGS: u32 = 7;
/// Requests from here on look for completed frees each time: pinning as much costs far more than the look.
const LARGE: u64 = 1 << 20;

/// An allocator of pinned memory for a context and a kind. Never dropped: the driver may be gone before this library is.
#[derive(Debug)]
pub(crate) struct HostServed {
    context: u64,
    allocator: Arc<dyn DeviceAllocator>,
    /// The host.
    stream: StreamId,
    pending: Mutex<Pending<Block>>,
    /// Bytes of the blocks in `pending`.
    pending_bytes: AtomicU64,
    /// Bytes of the blocks that the program holds.
    live_bytes: AtomicU64,
}

type Allocators = HashMap<(u64, Kind), Option<&'static HostServed>>;

/// The allocators; `None` where one cannot be made.
static ALLOCATORS: Mutex<Option<Allocators>> = Mutex::new(None);
/// Whether PyTorch's pinned memory is served in this process, so that its segments are the driver's.
static LEFT: AtomicBool = AtomicBool::new(false);

/// Leaves new pinned memory of this process to the driver; blocks that were served are freed as before. The package for Python calls it
/// by its name when an allocator of this project serves PyTorch's pinned memory: two caches above each other would keep memory twice.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vramlab_inject_leave_host() {
    LEFT.store(true, Release);
}

/// Whether pinned memory is served.
pub(crate) fn is_on() -> bool {
    settings::get().host.is_some() && !LEFT.load(Acquire)
}

/// Pinned memory for the program, else the driver's code. `None`: the driver serves.
pub(crate) fn allocate(bytes: u64, kind: Kind) -> Option<Result<u64, i32>> {
    let selection = settings::get().host.as_ref()?;
    let known = matches!(kind, Kind::Plain | Kind::Flags(0..=KNOWN_FLAGS));
    if bytes == 0 || !known || !is_on() || serve::is_broken() || streams::is_capturing() {
        return None;
    }
    let context = serve::context();
    if context == 0 {
        return None;
    }
    let served = serve::whole(|| served(context, kind, selection))??;
    serve::whole(|| served.allocate(bytes))
}

/// The allocator of the current context, made when it is first asked for.
fn served(context: u64, kind: Kind, selection: &Selection) -> Option<&'static HostServed> {
    let mut allocators = lock(&ALLOCATORS);
    let allocators = allocators.get_or_insert_default();
    *allocators.entry((context, kind)).or_insert_with(|| {
        if !streams::follow(context) {
            return None;
        }
        let opened = open(context, kind, selection);
        opened.inspect_err(|why| settings::say(&format!("pinned memory stays the driver's: {why}"))).ok()
    })
}

fn open(context: u64, kind: Kind, selection: &Selection) -> Result<&'static HostServed, AllocError> {
    // No more than addresses and events that are complete at once: nothing is freed to the allocator before its work is over.
    let nothing: Arc<dyn Driver> = Arc::new(NullDriver::new(u64::MAX >> 1));
    let driver: Arc<dyn Driver> = Arc::new(HookedDriver::with_hook(nothing, Segments { context, kind }));
    let stream = driver.stream_create().map_err(AllocError::Driver)?;
    let allocator = selection.build(&driver)?;
    Ok(Box::leak(Box::new(HostServed {
        context,
        allocator,
        stream,
        pending: Mutex::new(Pending::everywhere()),
        pending_bytes: AtomicU64::new(0),
        live_bytes: AtomicU64::new(0),
    })))
}

/// What became of a free.
pub(crate) enum FreeOutcome {
    /// The block is free; how long the free waited. `before` has returned a value.
    Block(u64, Blocked),
    /// The address lies in a segment, and no block of the program begins there.
    NoBlock,
    /// The memory is the driver's.
    Foreign,
}

/// Frees a block. `before` is called before another request can have it.
pub(crate) fn free<T>(addr: u64, before: impl FnOnce() -> T) -> (FreeOutcome, Option<T>) {
    if settings::get().host.is_none() {
        return (FreeOutcome::Foreign, None);
    }
    let Some(held) = blocks::take(addr) else {
        return (if blocks::owns(addr) { FreeOutcome::NoBlock } else { FreeOutcome::Foreign }, None);
    };
    let placed = before();
    let (bytes, served) = (held.bytes, held.served);
    let blocked = served.free(held.block);
    (FreeOutcome::Block(bytes, blocked), Some(placed))
}

/// An address to ask the driver about: where a freed block was, one that CUDA does not know, so that the answer is that about freed
/// memory; else the address itself.
pub(crate) fn address_for_driver(addr: u64) -> u64 {
    if settings::get().host.is_some() && blocks::owns(addr) && range_of(addr).is_none() {
        foreign_address()
    } else {
        addr
    }
}

/// The address of memory that is not CUDA's.
pub(crate) fn foreign_address() -> u64 {
    static NOTHING: u64 = 0;
    // CAST: an address.
    (&raw const NOTHING) as u64
}

impl HostServed {
    fn allocate(&'static self, bytes: u64) -> Result<u64, i32> {
        // Blocks that are multiples of it follow each other without a gap.
        let rounded = bytes.checked_next_multiple_of(ALIGN).ok_or(OUT_OF_MEMORY)?;
        self.make_ready(rounded);
        let request = || serve::within(self.context, || serve::aligned(&*self.allocator, rounded, self.stream));
        let first = match request() {
            Some(Err(error)) if error.is_out_of_memory() => {
                trim();
                request()
            }
            other => other,
        };
        let (block, addr) = first.ok_or(OUT_OF_MEMORY)?.map_err(|error| serve::code_of(&error))?;
        self.live_bytes.fetch_add(block.bytes(), Relaxed);
        blocks::insert(addr, Held::new(block, self, bytes));
        Ok(addr)
    }

    /// Takes back what a request of these bytes may need.
    fn make_ready(&self, bytes: u64) {
        if self.pending_bytes.load(Acquire) == 0 {
            return;
        }
        if bytes >= LARGE || lock(&self.pending).is_due() {
            self.collect(false);
        }
        let pending = self.pending_bytes.load(Acquire);
        if pending < bytes {
            return;
        }
        let reserved = self.allocator.stats().reserved_bytes.all.current;
        if reserved.saturating_sub(self.live_bytes.load(Relaxed)).saturating_sub(pending) < bytes {
            self.collect(true);
        }
    }

    fn free(&self, block: Block) -> Blocked {
        self.live_bytes.fetch_sub(block.bytes(), Relaxed);
        if settings::get().free == Free::Waits && !streams::is_capturing() {
            let mut waited = Blocked::default();
            for context in streams::contexts(self.context) {
                if let Some(Blocked { ns, behind }) = serve::within(context, streams::wait_always) {
                    waited.ns += ns;
                    waited.behind = waited.behind.max(behind);
                }
            }
            self.give_back(block);
            return waited;
        }
        self.pending_bytes.fetch_add(block.bytes(), Relaxed);
        let full = {
            let mut pending = lock(&self.pending);
            pending.add(block);
            pending.is_full()
        };
        if full {
            self.collect(false);
        }
        Blocked::default()
    }

    /// Frees the pending blocks whose work has completed. With `all` it waits for all pending blocks.
    fn collect(&self, all: bool) {
        let blocks = lock(&self.pending).collect(self.context, all);
        for block in blocks {
            self.pending_bytes.fetch_sub(block.bytes(), Relaxed);
            self.give_back(block);
        }
    }

    fn give_back(&self, block: Block) {
        // SAFETY: all work that was queued before the free has completed.
        let free = || unsafe { self.allocator.deallocate(block, self.stream) };
        if let Some(Err(error)) = serve::within(self.context, free) {
            // The allocator keeps what the driver did not take.
            settings::say(&format!("a free of pinned memory failed in {}: {error}", self.allocator.name()));
        }
    }

    fn trim(&self) -> bool {
        self.collect(true);
        serve::within(self.context, || self.allocator.trim(0)).is_some_and(|freed| freed.is_ok_and(|bytes| bytes > 0))
    }
}

fn all() -> Vec<&'static HostServed> {
    lock(&ALLOCATORS).iter().flat_map(HashMap::values).filter_map(|served| *served).collect()
}

/// Returns unused pinned memory to the driver, which has refused a request; true if that was any.
pub(crate) fn trim() -> bool {
    !streams::is_capturing() && all().into_iter().fold(false, |any, served| served.trim() | any)
}

/// Forgets all pinned memory of a context that is gone.
pub(crate) fn context_gone(context: u64) {
    if let Some(allocators) = lock(&ALLOCATORS).as_mut() {
        allocators.retain(|(of, _), _| *of != context);
    }
    record::host_reserve(0, blocks::context_gone(context));
    for served in all() {
        lock(&served.pending).forget(context);
    }
}

/// The driver's pinned memory as segments.
#[derive(Debug)]
struct Segments {
    context: u64,
    kind: Kind,
}

// SAFETY: a segment is pinned memory that the driver gives to no other caller until it is freed. It is freed once, by the allocator that
// asked for it, whose blocks come back when their work has completed.
unsafe impl Hook for Segments {
    type Before = ();

    fn before(&self, _: &dyn Driver, _: CallKind, _: CallArguments) -> DriverResult<()> {
        Ok(())
    }

    /// The host's.
    fn mem_info(&self, _: &dyn Driver) -> DriverResult<MemInfo> {
        let text = "the system does not report its memory";
        let unknown = || DriverError::new(CallKind::MemGetInfo, DriverError::NOT_SUPPORTED, text);
        let free = HostRoom::now().ok_or_else(unknown)?.bytes;
        Ok(MemInfo { free, total: free })
    }

    fn mem_alloc(&self, _: &dyn Driver, bytes: u64) -> DriverResult<DeviceAddr> {
        let failed = |code: i32| {
            let what = format!("{} of pinned memory", vramlab_device::Bytes(bytes));
            // CAST: codes are not negative.
            DriverError::new(CallKind::HostAlloc, code as u32, what)
        };
        let length = usize::try_from(bytes).map_err(|_| failed(OUT_OF_MEMORY))?;
        let mut out: *mut c_void = std::ptr::null_mut();
        let start = record::start();
        let code = match self.kind {
            Kind::Plain => real!(cuMemAllocHost_v2(&raw mut out => *mut *mut c_void, length => usize)),
            Kind::Flags(flags) => {
                real!(cuMemHostAlloc(&raw mut out => *mut *mut c_void, length => usize, flags => u32))
            }
        };
        record::host_driver_call(start);
        if code != SUCCESS || out.is_null() {
            return Err(failed(code));
        }
        // CAST: an address.
        let addr = out as u64;
        blocks::segment_made(addr, bytes, self.context);
        record::host_reserve(bytes, 0);
        Ok(DeviceAddr::handed_out(addr))
    }

    unsafe fn mem_free(&self, _: &dyn Driver, addr: DeviceAddr) -> DriverResult<()> {
        let addr = addr.get();
        // Before the call, because the driver may give the address out at once.
        let bytes = blocks::segment_gone(addr).unwrap_or(0);
        let start = record::start();
        let code = real!(cuMemFreeHost(addr => u64));
        record::host_driver_call(start);
        if code != SUCCESS {
            blocks::segment_made(addr, bytes, self.context);
            // CAST: as above.
            return Err(DriverError::new(CallKind::HostFree, code as u32, format!("pinned memory at {addr:#x}")));
        }
        record::host_reserve(0, bytes);
        Ok(())
    }
}
