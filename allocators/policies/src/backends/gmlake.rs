//! # `gmlake`: free memory of several blocks, mapped a second time as one
//!
//! The policy of GMLake, an allocator for PyTorch: virtual memory stitching.
//!
//! *Idea.* A large free block that does not exist can be made of several smaller ones, because their physical memory can be mapped
//! into a second, contiguous range of addresses. No live block moves, and no memory is released for it.
//!
//! *Memory.* A segment is a range of addresses with a handle of 2 MiB for each page. It consists of primitive blocks, which are split
//! and coalesce. A stitched block is a range of addresses over pages of several primitive blocks of one stream. It is free while all
//! of its pages are, and to take it is to take these pages. A page may be in any number of stitched blocks, of which at most one
//! uses it at a time.
//!
//! *A request* of more than 1 MiB is rounded up to 2 MiB. It is served by the first of
//! 1. the smallest primitive block of its stream that fits, split to its size (`get_free_block`);
//! 2. the front of the smallest free stitched block of its stream that fits and is at most `reuse_limit` times as large. The
//!    primitive blocks at its end are split;
//! 3. from `frag_limit` bytes on: free primitive blocks of its stream, the largest first, until their sum is sufficient, stitched.
//!    Only the front of the last one is taken (`get_fused_fragmented_blocks`);
//! 4. a new segment of the size that [`pytorch`](super::pytorch) has for it (`realloc_block`);
//! 5. after deferred frees were waited for and idle segments were released, a new segment; at last step 3 again.
//!
//! `defrag_level` 1 skips step 3 until memory is short, and 2 until idle segments were released as well.
//!
//! *A free* marks the pages as free, and primitive blocks coalesce. It makes no driver call.
//!
//! *Stitched blocks are kept* for later requests of their size, so a program that repeats itself soon makes no driver call. When
//! their addresses would exceed `auto_gc` bytes, all that are not live are unmapped after a wait for the device
//! (`garbage_collect_fused_blocks`), and so they are by `trim`. The release of a segment unmaps the stitched blocks over it.
//!
//! *Small requests* are those of PyTorch's small pool.
//!
//! *Differences from GMLake's program.* Access to a range is set by one call, not by one for each page. The program records an
//! event for each free and unmaps only stitched blocks whose event has completed; here the host waits for the device. A stitched
//! block that is live over a segment to be released loses the pages behind its live front at once. Its switch `reAlloc`, which is
//! off unless set, is absent: it allocates only the bytes that free blocks lack, as the paper describes it. So are graphs and
//! private pools.
//!
//! *Good at* fragmentation by large blocks of one stream. *Bad at* first steps: a new segment takes a create and a map for each
//! 2 MiB, and a stitched block a map for each. Requests below `frag_limit` are never stitched, and nothing is stitched across streams.
//!
//! *Cost.* O(log n) in the free blocks for a hit, and a step for each page of the request, times the stitched blocks over it.
//!
//! *Source.* Guo and others, *GMLake: Efficient and Transparent GPU Memory Defragmentation for Large-scale DNN Training with Virtual
//! Memory Stitching*, ASPLOS 2024 (arXiv 2401.08156), and its program: GLake at 0274a9c5, `GMLake/src/CUDACachingAllocator.cpp`, whose
//! functions are named where their rules are. The settings have the names and defaults of its environment variables.

use super::registry::{Backend, Capabilities, Needs, SegmentUse, StreamUse, With};
use super::{foreign, not_held};
use crate::contract::{
    AllocError, Block, Completions, DeviceAllocator, Ledger, MemoryLimit, Parts, Path, PoolKind, Request, Snapshot,
    Stats, Tokens,
};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::Segments as _;
use crate::policy::pending::Pending;
use crate::policy::size::Size;
use crate::policy::size::torch::{Divisions, SMALL_MAX, SMALL_SEGMENT, segment_size};
use crate::policy::source::Source;
use crate::policy::stream::Stream;
use crate::space::{Account, FreeList, Owner, Space};
use lake::{Lake, Limits, Want};
use pages::Pages;
use state::{Held, State};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::settings::{Settings as _, bytes, number};
use vramlab_device::{DeviceAddr, Driver, EventId, StreamId};

mod lake;
mod pages;
mod state;

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "gmlake",
    summary: "GMLake's policy: free blocks are mapped a second time as one larger block",
    capabilities: Capabilities {
        needs: Needs::Vmm,
        streams: StreamUse::Own,
        segments: SegmentUse::Stitched,
        caches: true,
        retries: true,
        sets_aside: true,
        coalesces: true,
        snapshot: true,
        used_elsewhere: Path::Deferred,
        ..Capabilities::LEAST
    },
    compared: false,
    constructor: &With(|driver, settings: &GmLakeSettings| Ok(Arc::new(GmLake::new(driver, *settings)?))),
};

vramlab_device::settings! {
    /// Settings of `gmlake`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct GmLakeSettings {
        /// Smallest request that is stitched.
        pub frag_limit: u64 = 512 << 20, bytes();
        /// How many times as large as the request a stitched block may be that serves it.
        pub reuse_limit: u64 = 10, number(1..=1 << 20);
        /// When requests are stitched: 0 before new memory is allocated, 1 when that is refused, 2 when idle segments were released
        /// as well.
        pub defrag_level: u64 = 0, number(0..=2);
        /// Maximum of the addresses of stitched blocks.
        pub auto_gc: u64 = 1000 << 30, bytes();
        /// Maximum of reserved bytes.
        pub memory_limit: Option<u64> = None, bytes().or("none");
    }
}

/// The record number in the tokens of large blocks, which are identified by their addresses. No small block has it.
const LARGE: u32 = u32::MAX;

/// See the [module](self). One lock is held during every operation, driver calls included.
#[derive(Debug)]
pub struct GmLake {
    tokens: Tokens,
    settings: GmLakeSettings,
    state: Mutex<State>,
}

fn list(stream: StreamId, pool: PoolKind) -> FreeList {
    FreeList { owner: Owner::of(stream), pool: Some(pool) }
}

impl GmLake {
    /// An allocator on a device. A page is 2 MiB, or a multiple of the device's granularity.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] on a device without virtual memory management; [`AllocError::Driver`] when it does not report
    /// its granularity.
    pub fn new(driver: Arc<dyn Driver>, settings: GmLakeSettings) -> Result<Self, AllocError> {
        let GmLakeSettings { frag_limit: frag, reuse_limit: reuse, auto_gc: stitched, .. } = settings;
        let lake = Lake::new(Pages::new(BACKEND.name, Arc::clone(&driver))?, Limits { frag, reuse, stitched });
        let source = Source::Plain { driver, limit: settings.memory_limit };
        let heap = Heap::new(Space::new(Account::with_pools(u64::MAX)), Fit::best(), Stream::Own, source);
        let state = Mutex::new(State { heap, lake, pending: Pending::default() });
        Ok(Self { tokens: Tokens::next(), settings, state })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The live block of a client's block, if it belongs to this allocator.
    fn find(&self, state: &State, block: &Block) -> Option<Held> {
        let (record, addr) = (self.tokens.record(block.token())?, block.addr().get());
        if record == LARGE {
            return state.lake.is_live(addr).then_some(Held::Large(addr));
        }
        state.heap.space().find_held(record, addr).map(Held::Small)
    }
}

impl DeviceAllocator for GmLake {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        // The limit may have changed.
        GmLakeSettings { memory_limit: self.lock().heap.limit(), ..self.settings }.json()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        let state = &mut *self.lock();
        state.process_events()?;
        let requested = request.bytes;
        let bytes = Size::Torch(Divisions::default()).round(requested);
        let (addr, bytes, path, record) = if bytes <= SMALL_MAX {
            let list = list(stream, PoolKind::Small);
            let served = state.small(list, bytes, requested)?;
            let (block, path) = served.ok_or_else(|| state.refusal(list, requested, SMALL_SEGMENT))?;
            (state.heap.space()[block].addr, bytes, path, block.number())
        } else {
            let want = Want { list: list(stream, PoolKind::Large), bytes: state.lake.round(bytes), requested };
            let served = state.large(self.settings.defrag_level, want)?;
            let refusal = |state: &mut State| state.refusal(want.list, requested, segment_size(want.bytes));
            let (addr, path) = served.ok_or_else(|| refusal(state))?;
            (addr, want.bytes, path, LARGE)
        };
        state.heap.space_mut().account_mut().note_peak(stream);
        let (addr, token) = (DeviceAddr::handed_out(addr), self.tokens.of_record(record));
        // SAFETY: segments of the device are aligned and sizes are multiples of 512. Small blocks do not overlap; a large one is
        // over pages that no other live block has, and that are taken until it is freed and its uses have completed.
        Ok(unsafe { Block::new(addr, bytes, requested, path, token) })
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        let state = &mut *self.lock();
        let Some(held) = self.find(state, &block) else { return Err(foreign(self.name(), block)) };
        state.free(held)
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let state = &mut *self.lock();
        let Some(held) = self.find(state, block) else { return Err(not_held(self.name(), block)) };
        if state.stream_of(held) != stream {
            state.pending.announce(held, stream);
        }
        Ok(())
    }

    fn forget_stream(&self, stream: StreamId) {
        let (state, mut done) = (&mut *self.lock(), Vec::new());
        state.pending.forget_stream(stream, &mut done);
        state.put_completed(done);
    }

    fn stats(&self) -> Stats {
        let state = self.lock();
        let stranded_bytes = state.pending.stranded_bytes();
        Stats { stranded_bytes, ..state.heap.space().account().stats().clone() }
    }

    fn reset_peaks(&self) {
        let state = &mut *self.lock();
        state.heap.reset_peaks();
        state.pending.reset_peaks();
    }

    fn snapshot(&self) -> Option<Snapshot> {
        let state = self.lock();
        let mut segments = state.heap.space().snapshot().segments;
        segments.extend(state.lake.segments());
        segments.sort_unstable_by_key(|segment| segment.addr);
        Some(Snapshot { segments })
    }

    fn ledger_at_peak(&self) -> Ledger {
        self.lock().heap.space().account().ledger_at_peak()
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        let state = &mut *self.lock();
        let released = state.synchronize().and_then(|()| state.release(keep_bytes));
        let released = released.and_then(|bytes| state.lake.unmap_idle().map(|_| bytes));
        state.pending.take_error().map_or(Ok(()), Err)?;
        Ok(released?)
    }

    fn parts(&self) -> Parts<'_> {
        Parts { limit: Some(self), completions: Some(self), ..Parts::NONE }
    }
}

impl Completions for GmLake {
    fn tell_completed(&self, on: bool) {
        self.lock().pending.completed = on.then(Vec::new);
    }

    fn take_completed(&self) -> Vec<DeviceAddr> {
        self.lock().pending.completed.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl MemoryLimit for GmLake {
    fn set_memory_limit(&self, bytes: Option<u64>) -> bool {
        self.lock().heap.set_limit(bytes);
        true
    }
}

impl Drop for GmLake {
    fn drop(&mut self) {
        let state = &mut *self.lock();
        // An error cannot be returned here. It ends a round, so a call that fails once does not keep the remainder reserved;
        // segments that remain are released with the device's context.
        for _ in 0..3 {
            // Live blocks stay: their clients may still use them.
            if state.synchronize().and_then(|()| state.release(0)).is_ok() {
                break;
            }
        }
        let driver = state.heap.driver();
        let events: Vec<EventId> = state.pending.events().take();
        for event in events {
            // SAFETY: the event is in no queue any more and belongs to this allocator only.
            let _ = unsafe { driver.event_destroy(event) };
        }
        state.heap.destroy_events();
    }
}

#[cfg(test)]
mod tests;
