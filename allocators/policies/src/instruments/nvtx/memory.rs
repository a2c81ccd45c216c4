//! Reports the blocks of an allocator to a memory checker, by NVTX's memory extension.
//!
//! compute-sanitizer knows memory from `cuMemAlloc`. An allocator gets segments there and splits blocks from them, so a write
//! beyond a block into its neighbour is not detected. Here each segment is registered as a heap, whose memory is out of bounds
//! except for regions, and each block as a region of the requested bytes. A write between blocks is detected: one that jumps from a
//! block into another stays inside of regions.
//!
//! Only segments of `cuMemAlloc` are reported, so expandable memory is not checked: compute-sanitizer of CUDA 13.0 refuses a heap
//! in memory that `cuMemMap` mapped, and counts the refusal as an error of the program.
//!
//! Regions are added and removed in the host's order, not in stream order: work that is still queued when its block is freed looks
//! like a use after free. Run the checker with `--force-blocking-launches`. Without a tool that has the extension nothing is
//! wrapped and there is no cost; with one, an allocation takes a lock, a look-up and the tool's time.
//!
//! Source: `nvToolsExtMem.h` and `nvtxDetail/nvtxExtImplMem_v1.h` of NVTX 3, <https://github.com/NVIDIA/NVTX>;
//! <https://docs.nvidia.com/compute-sanitizer/SanitizerNvtxGuide/index.html>.

use crate::contract::{
    AllocError, Block, DeviceAllocator, Instrument, Path, PrivatePool, Request, RestoreError, Snapshot,
};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use vramlab_device::{
    CallArguments, CallKind, CallOutcome, DeviceAddr, Driver, DriverResult, Hook, HookedDriver, StreamId,
};

/// `NVTX_VERSION`, `NVTX_EXT_MODULEID_MEM`, `NVTX_EXT_COMPATID_MEM`.
const VERSION: u16 = 3;
const MODULE: u16 = 1;
const COMPATIBLE: u16 = 0x0102;
/// `NVTX_EXT_MEM_SLOT_COUNT`, and the slots that are used.
const SLOT_COUNT: usize = 63;
const HEAP_REGISTER: usize = 0;
const HEAP_UNREGISTER: usize = 1;
const REGIONS_REGISTER: usize = 3;
const REGIONS_UNREGISTER: usize = 5;
/// `NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR`, `NVTX_MEM_TYPE_VIRTUAL_ADDRESS`, `NVTX_MEM_REGION_REF_TYPE_POINTER`.
const SUB_ALLOCATOR: u32 = 1;
const VIRTUAL_ADDRESS: u32 = 1;
const BY_POINTER: u32 = 1;

/// `nvtxMemVirtualRangeDesc_v1`.
#[repr(C)]
struct Range {
    bytes: usize,
    start: *const c_void,
}

/// `nvtxMemHeapDesc_v1`.
#[repr(C)]
struct HeapDesc {
    compatible: u16,
    size: u16,
    reserved: u32,
    usage: u32,
    kind: u32,
    range_size: usize,
    range: *const Range,
    category: u32,
    message_type: u32,
    message: *const c_void,
}

/// `nvtxMemRegionsRegisterBatch_v1`.
#[repr(C)]
struct Registered {
    compatible: u16,
    size: u16,
    kind: u32,
    heap: *mut c_void,
    count: usize,
    range_size: usize,
    ranges: *const Range,
    handles: *mut c_void,
}

/// `nvtxMemRegionsUnregisterBatch_v1`.
#[repr(C)]
struct Unregistered {
    compatible: u16,
    size: u16,
    by: u32,
    count: usize,
    reference_size: usize,
    references: *const *const c_void,
}

/// `nvtxExtModuleSegment_t`.
#[repr(C)]
struct Slots {
    id: usize,
    count: usize,
    functions: *const AtomicPtr<c_void>,
}

/// `nvtxExtModuleInfo_t`.
#[repr(C)]
struct Module {
    version: u16,
    size: u16,
    module: u16,
    compatible: u16,
    count: usize,
    slots: *const Slots,
    export: *const c_void,
    extra: *const c_void,
}

/// A tool's `InitializeInjectionNvtxExtension`; returns 0 when it does not support it.
type Entry = unsafe extern "C" fn(module: *const Module) -> c_int;
type HeapRegister = unsafe extern "C" fn(domain: *mut c_void, heap: *const HeapDesc) -> *mut c_void;
type HeapUnregister = unsafe extern "C" fn(domain: *mut c_void, heap: *mut c_void);
type RegionsRegister = unsafe extern "C" fn(domain: *mut c_void, regions: *const Registered);
type RegionsUnregister = unsafe extern "C" fn(domain: *mut c_void, regions: *const Unregistered);

/// The slots where a tool puts its functions.
static FUNCTIONS: [AtomicPtr<c_void>; SLOT_COUNT] = [const { AtomicPtr::new(ptr::null_mut()) }; SLOT_COUNT];

/// Size of a structure, as NVTX has it in the structure.
const fn size<T>() -> u16 {
    // CAST: they have some fifty bytes.
    size_of::<T>() as u16
}

/// The functions of a tool that has the memory extension.
#[derive(Clone, Copy, Debug)]
struct Tool {
    heap_register: HeapRegister,
    heap_unregister: HeapUnregister,
    regions_register: RegionsRegister,
    regions_unregister: RegionsUnregister,
}

impl Tool {
    /// Has a tool fill in its functions; `None` where it refuses, or lacks a required one.
    ///
    /// # Safety
    /// `entry` is the entry point of an NVTX 3 tool that stays loaded.
    unsafe fn attach(entry: Entry) -> Option<Self> {
        let slots = Slots { id: 1, count: SLOT_COUNT, functions: FUNCTIONS.as_ptr() };
        let module = Module {
            version: VERSION,
            size: size::<Module>(),
            module: MODULE,
            compatible: COMPATIBLE,
            count: 1,
            slots: &raw const slots,
            export: ptr::null(),
            extra: ptr::null(),
        };
        // SAFETY: the caller's promise; the structures live until it returns, and the slots of the functions always.
        if unsafe { entry(&raw const module) } == 0 {
            return None;
        }
        // Relaxed: the tool wrote on this thread. Values that are not addresses stand for missing functions in NVTX.
        let function = |place: usize| {
            let function = FUNCTIONS[place].load(Relaxed);
            (function.addr() > 4096 && function.addr() != usize::MAX).then_some(function)
        };
        let [register_heap, unregister_heap, register_regions, unregister_regions] =
            [HEAP_REGISTER, HEAP_UNREGISTER, REGIONS_REGISTER, REGIONS_UNREGISTER].map(function);
        // SAFETY: by NVTX's contract a tool puts functions of these types into these slots.
        unsafe {
            Some(Self {
                heap_register: std::mem::transmute::<*mut c_void, HeapRegister>(register_heap?),
                heap_unregister: std::mem::transmute::<*mut c_void, HeapUnregister>(unregister_heap?),
                regions_register: std::mem::transmute::<*mut c_void, RegionsRegister>(register_regions?),
                regions_unregister: std::mem::transmute::<*mut c_void, RegionsUnregister>(unregister_regions?),
            })
        }
    }

    /// The tool that is attached to this process, if it has the extension.
    fn attached() -> Option<Self> {
        static FOUND: OnceLock<Option<Tool>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let path = std::env::var_os("NVTX_INJECTION64_PATH").filter(|path| !path.is_empty())?;
            // Tools expect to be asked for plain NVTX first.
            let _ = super::stream_names::attached();
            // SAFETY: the tool's own library, which NVTX loads in the same way.
            let library = unsafe { libloading::Library::new(path) }.ok()?;
            // SAFETY: NVTX fixes the type behind this name.
            let entry = *unsafe { library.get::<Entry>(b"InitializeInjectionNvtxExtension\0") }.ok()?;
            // Its functions are called as long as the process lives.
            std::mem::forget(library);
            // SAFETY: an entry point of NVTX, in a library that is never unloaded.
            unsafe { Self::attach(entry) }
        })
    }
}

/// The segments that a tool has as heaps.
#[derive(Debug)]
pub struct Heaps {
    tool: Tool,
    /// Bytes and the tool's handle, by address.
    known: Mutex<BTreeMap<u64, (u64, usize)>>,
}

fn pointer(addr: u64) -> *const c_void {
    // CAST: addresses of the device have the width of the host's.
    ptr::without_provenance(addr as usize)
}

impl Heaps {
    /// For the tool that is attached to this process; `None` where there is none, or it has no memory extension.
    #[must_use]
    pub fn of_attached_tool() -> Option<Arc<Self>> {
        Tool::attached().map(Self::new)
    }

    fn new(tool: Tool) -> Arc<Self> {
        Arc::new(Self { tool, known: Mutex::default() })
    }

    /// The driver, with its segments registered as they are allocated and freed.
    #[must_use]
    pub fn watch(self: &Arc<Self>, driver: Arc<dyn Driver>) -> Arc<dyn Driver> {
        Arc::new(HookedDriver::with_hook(driver, Watch(Arc::clone(self))))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, usize)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heap(&self, addr: u64, bytes: u64) {
        // CAST: as for addresses.
        let range = Range { bytes: bytes as usize, start: pointer(addr) };
        let desc = HeapDesc {
            compatible: COMPATIBLE,
            size: size::<HeapDesc>(),
            reserved: 0,
            usage: SUB_ALLOCATOR,
            kind: VIRTUAL_ADDRESS,
            range_size: size_of::<Range>(),
            range: &raw const range,
            category: 0,
            message_type: 0,
            message: ptr::null(),
        };
        // SAFETY: the tool's function; the structures live until it returns. No domain is the default one.
        let handle = unsafe { (self.tool.heap_register)(ptr::null_mut(), &raw const desc) };
        if !handle.is_null() {
            self.lock().insert(addr, (bytes, handle.addr()));
        }
    }

    fn heap_destroyed(&self, addr: u64) {
        let heap = self.lock().remove(&addr);
        if let Some((_, handle)) = heap {
            // SAFETY: the tool's function, and a handle that it returned and that is used for the last time.
            unsafe { (self.tool.heap_unregister)(ptr::null_mut(), ptr::without_provenance_mut(handle)) };
        }
    }

    /// The handle of the heap around an address.
    fn around(&self, addr: u64) -> Option<usize> {
        let known = self.lock();
        let (start, (bytes, handle)) = known.range(..=addr).next_back()?;
        (addr - start < *bytes).then_some(*handle)
    }

    fn region(&self, block: &Block) {
        let addr = block.addr().get();
        let Some(heap) = self.around(addr) else { return };
        // CAST: as for addresses.
        let range = Range { bytes: block.requested() as usize, start: pointer(addr) };
        let regions = Registered {
            compatible: COMPATIBLE,
            size: size::<Registered>(),
            kind: VIRTUAL_ADDRESS,
            heap: ptr::without_provenance_mut(heap),
            count: 1,
            range_size: size_of::<Range>(),
            ranges: &raw const range,
            handles: ptr::null_mut(),
        };
        // SAFETY: the tool's function; the structures live until it returns.
        unsafe { (self.tool.regions_register)(ptr::null_mut(), &raw const regions) };
    }

    fn region_destroyed(&self, addr: DeviceAddr) {
        if self.around(addr.get()).is_none() {
            return;
        }
        let reference = pointer(addr.get());
        let regions = Unregistered {
            compatible: COMPATIBLE,
            size: size::<Unregistered>(),
            by: BY_POINTER,
            count: 1,
            reference_size: size_of::<*const c_void>(),
            references: &raw const reference,
        };
        // SAFETY: as above.
        unsafe { (self.tool.regions_unregister)(ptr::null_mut(), &raw const regions) };
    }
}

/// Observes segments in the calls of a driver.
#[derive(Debug)]
struct Watch(Arc<Heaps>);

// SAFETY: it observes calls and changes none.
unsafe impl Hook for Watch {
    type Before = ();

    fn before(&self, _inner: &dyn Driver, kind: CallKind, arguments: CallArguments) -> DriverResult<()> {
        // Before the memory is released, as another thread may be given the addresses immediately.
        if let (CallKind::MemFree, Some(addr)) = (kind, arguments.addr) {
            self.0.heap_destroyed(addr.get());
        }
        Ok(())
    }

    fn after(&self, _: &dyn Driver, kind: CallKind, arguments: CallArguments, (): (), outcome: CallOutcome) {
        if let (true, CallKind::MemAlloc, Some(addr)) = (outcome.ok, kind, outcome.addr) {
            self.0.heap(addr.get(), arguments.bytes);
        }
    }
}

/// Registers the blocks of an allocator whose driver [`Heaps::watch`] has wrapped. See the [module](self).
#[derive(Debug)]
pub struct NvtxMemory {
    inner: Arc<dyn DeviceAllocator>,
    heaps: Arc<Heaps>,
}

impl NvtxMemory {
    /// Registers the blocks of `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, heaps: Arc<Heaps>) -> Self {
        Self { inner, heaps }
    }

    fn known(&self, result: Result<Block, AllocError>) -> Result<Block, AllocError> {
        result.inspect(|block| self.heaps.region(block))
    }
}

impl Instrument for NvtxMemory {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.known(self.inner.allocate(request, stream))
    }

    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.known(self.inner.allocate_in(request, stream, pool))
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        self.heaps.region_destroyed(block.addr());
        // SAFETY: the caller's promise is the inner allocator's.
        unsafe { self.inner.deallocate(block, stream) }
    }

    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        let restored = self.inner.restore(snapshot, age)?;
        restored.iter().flatten().for_each(|block| self.heaps.region(block));
        Ok(restored)
    }

    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        let freed: Vec<_> = held.iter().map(|(block, _)| block.addr()).collect();
        // SAFETY: the caller's promise is passed on.
        let restored = unsafe { self.inner.pool_restore(pool, checkpoint, held) }?;
        freed.into_iter().for_each(|addr| self.heaps.region_destroyed(addr));
        restored.iter().for_each(|block| self.heaps.region(block));
        Ok(restored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Selection;
    use vramlab_device::NullDriver;

    /// A call that the tool below received.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum ToolCall {
        Heap(usize, usize),
        HeapDestroyed(usize),
        Region(usize, usize, usize),
        RegionDestroyed(usize),
    }

    static TOOL_CALLS: Mutex<Vec<ToolCall>> = Mutex::new(Vec::new());

    fn take_tool_calls() -> Vec<ToolCall> {
        std::mem::take(&mut TOOL_CALLS.lock().unwrap())
    }

    unsafe extern "C" fn heap(_: *mut c_void, heap: *const HeapDesc) -> *mut c_void {
        // SAFETY: structures of the caller, which live until this returns.
        let (desc, range) = unsafe { (&*heap, &*(*heap).range) };
        assert_eq!((desc.compatible, desc.size, desc.usage, desc.kind, desc.range_size), (0x0102, 48, 1, 1, 16));
        TOOL_CALLS.lock().unwrap().push(ToolCall::Heap(range.start.addr(), range.bytes));
        range.start.cast_mut()
    }

    unsafe extern "C" fn heap_destroyed(_: *mut c_void, heap: *mut c_void) {
        TOOL_CALLS.lock().unwrap().push(ToolCall::HeapDestroyed(heap.addr()));
    }

    unsafe extern "C" fn regions(_: *mut c_void, regions: *const Registered) {
        // SAFETY: as above.
        let (batch, range) = unsafe { (&*regions, &*(*regions).ranges) };
        assert_eq!((batch.compatible, batch.size, batch.kind, batch.count, batch.range_size), (0x0102, 48, 1, 1, 16));
        TOOL_CALLS.lock().unwrap().push(ToolCall::Region(batch.heap.addr(), range.start.addr(), range.bytes));
    }

    unsafe extern "C" fn regions_destroyed(_: *mut c_void, regions: *const Unregistered) {
        // SAFETY: as above.
        let (batch, reference) = unsafe { (&*regions, *(*regions).references) };
        assert_eq!((batch.compatible, batch.size, batch.by, batch.count, batch.reference_size), (0x0102, 32, 1, 1, 8));
        TOOL_CALLS.lock().unwrap().push(ToolCall::RegionDestroyed(reference.addr()));
    }

    /// A tool as NVTX describes it.
    unsafe extern "C" fn tool(module: *const Module) -> c_int {
        // SAFETY: as above.
        let (module, slots) = unsafe { (&*module, &*(*module).slots) };
        assert_eq!((module.version, module.size, module.module, module.compatible), (3, 40, 1, 0x0102));
        assert_eq!((module.count, slots.id, slots.count), (1, 1, 63));
        let functions = [
            (0, heap as *mut c_void),
            (1, heap_destroyed as *mut c_void),
            (3, regions as *mut c_void),
            (5, regions_destroyed as *mut c_void),
        ];
        for (place, function) in functions {
            // SAFETY: there are 63 places.
            unsafe { &*slots.functions.add(place) }.store(function, Relaxed);
        }
        1
    }

    unsafe extern "C" fn unwilling(_: *const Module) -> c_int {
        0
    }

    unsafe extern "C" fn without_functions(_: *const Module) -> c_int {
        1
    }

    #[test]
    fn a_tool_hears_of_segments_and_of_what_was_asked_for() {
        // SAFETY: entry points, of this test.
        assert!(unsafe { Tool::attach(unwilling) }.is_none());
        // SAFETY: as above.
        assert!(unsafe { Tool::attach(without_functions) }.is_none(), "it fills no place");
        // SAFETY: as above.
        let heaps = Heaps::new(unsafe { Tool::attach(tool) }.unwrap());
        let driver = heaps.watch(Arc::new(NullDriver::new(1 << 30)));
        let stream = driver.stream_create().unwrap();
        for (name, told_of) in [("caching", true), ("pytorch-expandable", false), ("remap", false)] {
            let plain = name.parse::<Selection>().unwrap().build(&driver).unwrap();
            let allocator: Arc<dyn DeviceAllocator> = Arc::new(NvtxMemory::new(plain, Arc::clone(&heaps)));
            let (first, second) = (1000, 5000);
            let blocks = [first, second].map(|bytes| allocator.allocate(Request::new(bytes), stream).unwrap());
            let addrs = [0, 1].map(|at| usize::try_from(blocks[at].addr().get()).unwrap());
            let calls = take_tool_calls();
            if !told_of {
                assert_eq!(calls, [], "{name}: its memory is mapped");
                for block in blocks {
                    // SAFETY: no work uses the block.
                    unsafe { allocator.deallocate(block, stream) }.unwrap();
                }
                drop(allocator);
                assert_eq!(take_tool_calls(), [], "{name}");
                continue;
            }
            let [ToolCall::Heap(start, bytes), regions @ ..] = calls.as_slice() else { panic!("{name}: {calls:?}") };
            assert_eq!(
                regions,
                [ToolCall::Region(*start, addrs[0], 1000), ToolCall::Region(*start, addrs[1], 5000)],
                "{name}"
            );
            assert!(addrs.iter().all(|addr| (*start..start + bytes).contains(addr)));
            for block in blocks {
                // SAFETY: no work uses the block.
                unsafe { allocator.deallocate(block, stream) }.unwrap();
            }
            assert_eq!(take_tool_calls(), addrs.map(ToolCall::RegionDestroyed), "{name}");
            allocator.trim(0).unwrap();
            drop(allocator);
            assert_eq!(take_tool_calls(), [ToolCall::HeapDestroyed(*start)], "{name}");
        }
        // Memory outside of the known heaps is not reported to the tool.
        let elsewhere: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 30));
        let stream = elsewhere.stream_create().unwrap();
        let plain = "caching".parse::<Selection>().unwrap().build(&elsewhere).unwrap();
        let allocator = Arc::new(NvtxMemory::new(plain, heaps)) as Arc<dyn DeviceAllocator>;
        let block = allocator.allocate(Request::new(1), stream).unwrap();
        // SAFETY: no work uses the block.
        unsafe { allocator.deallocate(block, stream) }.unwrap();
        assert_eq!(take_tool_calls(), []);
    }
}
