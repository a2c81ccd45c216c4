//! # `host-pytorch`: PyTorch's allocator of pinned host memory, written to be read
//!
//! This is the policy behind `torch.empty(…, pin_memory=True)`, `.pin_memory()` and the loaders' pin threads, from PyTorch 2.6 to 2.15;
//! `release` chooses the rules. Given the same requests, announced uses and completions it pins the same segments of the same sizes and
//! serves the same blocks.
//!
//! *Idea.* `cudaHostAlloc` takes 0.3 to 0.5 s a GiB and `cudaFreeHost` waits for the device, so memory that was pinned stays pinned. All
//! sizes are powers of two, so a freed block fits the next request of its class.
//!
//! *A request* (`allocate`):
//! 1. The queue of events is drained: from its front, the oldest event, up to the first that has not completed. A stuck event therefore
//!    holds everything behind it, also what waits for other streams (<https://github.com/pytorch/pytorch/pull/183501> is not in 2.15).
//! 2. The size is rounded up to a power of two; above `pinned_max_round_threshold_mb` or `pinned_max_cached_size_mb` it stays exact.
//! 3. The free list of the size's bucket, `ceil(log2 size)`, is searched from its newest block. Up to 2.14 the newest block is taken
//!    whatever its size, which is too small where exact sizes are cached (<https://github.com/pytorch/pytorch/pull/192722>): the request
//!    fails here with [`AllocError::Overrun`], where PyTorch returns the block. From 2.15 on the newest one that is large enough is taken.
//! 4. Otherwise memory is pinned: from the reserved segment if it has room, in steps of 4 KiB, else by a call. If the host refuses, the
//!    request fails: nothing is released and no second attempt is made.
//!
//! *A free* (`free`). Without an announced use the block returns to its list immediately. Otherwise an event is recorded on each stream
//! and put into the queue, and the block returns when its last event was drained. A block above `pinned_max_cached_size_mb` is released
//! instead. Blocks are never split or coalesced.
//!
//! *Background thread* (`pinned_use_background_threads`). From the first miss on a thread drains the queue every 100 us, and requests do
//! not. Here the queue is drained before each request after the first miss, so a block can return 100 us earlier than in PyTorch. Up to
//! 2.9 a request that misses also drains the events of blocks of its own size, whichever is at the front.
//!
//! *Reserved segment* (`pinned_reserve_segment_size_mb`). It is pinned at the first miss and never released. Blocks of it that are
//! trimmed are lost: their bytes serve no later request.
//!
//! *Differences from PyTorch.* PyTorch's blocks have no stream. Here a request names one, the host's, and a block serves that stream
//! again: a program that uses one stream for the host's requests gets PyTorch's blocks. If an event cannot be recorded, PyTorch never
//! reuses the block; here it is reusable when the whole device has been waited for. `trim` waits for deferred frees, `empty_cache` does
//! not. The private pools of captures (2.11 on) are not modelled.
//!
//! *Good at* programs that repeat their sizes, and whose sizes are powers of two. *Bad at* memory: sizes spread evenly over their
//! logarithm take 1.39 times what was asked for, and the worst nearly twice.
//!
//! *Cost.* O(log n) in the blocks; the drain takes a query for each completed event. One lock for all threads, also over the driver's
//! calls.
//!
//! *Source.* PyTorch 2.11, `aten/src/ATen/core/CachingHostAllocator.h`, and its history; its functions are named where their rules are.

mod blocks;
mod settings;

pub use settings::{HostPyTorchSettings, HostRelease};

use super::registry::{Backend, Capabilities, MemoryKind, SegmentUse, StreamUse, Varying};
use super::{foreign, not_held};
use crate::contract::{
    AllocError, Block, BlockState, DeviceAllocator, Ledger, OomReport, Parts, Path, Request, Snapshot, Stats, Tokens,
};
use blocks::{ANY, Blocks, Record, Reserve};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::settings::Settings as _;
use vramlab_device::{CallKind, DeviceAddr, Driver, DriverError, HOST_PAGE, StreamId};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "host-pytorch",
    summary: "pinned host memory as PyTorch has it, by release: powers of two, cached, never split",
    capabilities: Capabilities {
        memory: MemoryKind::Host,
        streams: StreamUse::Own,
        // The reserved segment; every other block is one.
        segments: SegmentUse::Many,
        caches: true,
        keeps_segments: true,
        snapshot: true,
        used_elsewhere: Path::Deferred,
        ..Capabilities::LEAST
    },
    compared: true,
    constructor: &Varying {
        capabilities: |default, settings: &HostPyTorchSettings| match settings.pinned_max_cached_size_mb {
            None => default,
            // Released memory is pinned again for any stream.
            Some(_) => Capabilities { caches: false, streams: StreamUse::Any, ..default },
        },
        build: |driver, settings| Ok(Arc::new(HostPyTorch::new(driver, *settings))),
    },
};

/// See the [module](self).
#[derive(Debug)]
pub struct HostPyTorch {
    tokens: Tokens,
    driver: Arc<dyn Driver>,
    settings: HostPyTorchSettings,
    blocks: Mutex<Blocks>,
}

impl HostPyTorch {
    /// An allocator over a driver of pinned memory.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: HostPyTorchSettings) -> Self {
        Self { tokens: Tokens::next(), driver, settings, blocks: Mutex::new(Blocks::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// 1. `process_events`
    fn drain(&self, blocks: &mut Blocks) -> Result<(), DriverError> {
        while let Some(event) = self.front(blocks)? {
            if !self.driver.event_query(event)? {
                break;
            }
            self.pop(blocks)?;
        }
        Ok(())
    }

    /// `process_events_for_specific_size`: each event is examined once, and those that stay move to the end. The order in which
    /// PyTorch leaves the queue is kept: it examines two more than the queue has.
    fn drain_size(&self, blocks: &mut Blocks, bytes: u64) -> Result<(), DriverError> {
        let most = blocks.queue.len();
        for count in 0.. {
            let Some(waiting) = blocks.queue.front().copied() else { return Ok(()) };
            let same = blocks.records.get(&waiting.addr).is_some_and(|record| record.bytes == bytes);
            let event = if count <= most && same { self.front(blocks)? } else { None };
            if let Some(event) = event
                && self.driver.event_query(event)?
            {
                if self.pop(blocks)? {
                    return Ok(());
                }
                continue;
            }
            blocks.queue.rotate_left(1);
            if count > most {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The event at the front of the queue; `None` for an empty queue, or while its stream is captured.
    fn front(&self, blocks: &mut Blocks) -> Result<Option<vramlab_device::EventId>, DriverError> {
        let Some(waiting) = blocks.queue.front().copied() else { return Ok(None) };
        if waiting.event.is_some() {
            return Ok(waiting.event);
        }
        let recorded = blocks.events.record(self.driver.as_ref(), waiting.stream, self.driver.is_capture_noted());
        match recorded {
            Ok(event) => blocks.queue[0].event = event,
            // It can be made later.
            Err(ref error) if error.call == CallKind::EventCreate => {}
            // The stream records no event any more.
            Err(_) => {
                blocks.queue.pop_front();
                blocks.strand(waiting.addr);
            }
        }
        recorded
    }

    /// Removes a completed event from the front; whether its block returned.
    fn pop(&self, blocks: &mut Blocks) -> Result<bool, DriverError> {
        let Some(waiting) = blocks.queue.pop_front() else { return Ok(false) };
        waiting.event.into_iter().for_each(|event| blocks.events.reuse(event));
        if !blocks.count_event(waiting.addr) {
            return Ok(false);
        }
        self.complete(blocks, waiting.addr)?;
        Ok(true)
    }

    /// A freed block that nothing uses any more returns to its list, or to the host. Returns the path.
    fn complete(&self, blocks: &mut Blocks, addr: DeviceAddr) -> Result<Path, DriverError> {
        let cached = blocks.complete(addr);
        if cached <= self.settings.max_cached() {
            return Ok(Path::Hit);
        }
        self.release(blocks, addr)?;
        Ok(Path::DriverFree)
    }

    /// `free_block`: releases a cached block. One of the reserved segment is lost.
    fn release(&self, blocks: &mut Blocks, addr: DeviceAddr) -> Result<u64, DriverError> {
        if blocks.is_reserved(addr) {
            blocks.remove(addr);
            return Ok(0);
        }
        // SAFETY: the block is a segment of this driver which is cached, so no client holds it and its uses have completed; its
        // record is removed below, so it is released once.
        unsafe { self.driver.mem_free(addr) }?;
        let bytes = blocks.remove(addr);
        blocks.stats.count_segment_released(ANY, bytes, u64::MAX);
        Ok(bytes)
    }

    /// 4. `allocate_host_memory`
    fn pin(&self, blocks: &mut Blocks, bytes: u64) -> Result<(DeviceAddr, bool), DriverError> {
        let reserve = self.settings.reserve();
        if reserve > 0 && blocks.reserve.is_none() {
            let start = self.driver.mem_alloc(reserve)?;
            blocks.reserve = Some(Reserve { start, bytes: reserve, used: 0 });
            blocks.stats.count_segment(ANY, reserve, u64::MAX);
        }
        if let Some(addr) = blocks.reserve.as_mut().and_then(|reserve| reserve.take(bytes)) {
            return Ok((addr, true));
        }
        let addr = self.driver.mem_alloc(bytes)?;
        blocks.stats.count_segment(ANY, bytes, u64::MAX);
        Ok((addr, false))
    }

    fn refusal(&self, blocks: &mut Blocks, request: u64, bytes: u64, stream: StreamId) -> AllocError {
        blocks.stats.num_ooms += 1;
        let (reserved, active) = (&blocks.stats.reserved_bytes.all, &blocks.stats.active_bytes.all);
        let (own, others) = blocks.free_of(stream);
        let largest = blocks.largest_free(stream).min(own);
        let report = OomReport::new(self.name(), request)
            .needing(bytes)
            .with_memory(reserved.current, active.current)
            .with_free(largest, others)
            .with_device(self.driver.as_ref());
        report.into()
    }

    /// Waits for every deferred free.
    fn wait(&self, blocks: &mut Blocks) -> Result<(), DriverError> {
        // A device with an open capture cannot be waited for.
        if self.driver.is_capture_noted() {
            return self.drain(blocks);
        }
        blocks.stats.num_sync_all_streams += 1;
        while let Some(event) = self.front(blocks)? {
            self.driver.event_synchronize(event)?;
            self.pop(blocks)?;
        }
        if !blocks.has_stranded() {
            return Ok(());
        }
        self.driver.device_synchronize()?;
        for addr in blocks.take_stranded() {
            self.complete(blocks, addr)?;
        }
        Ok(())
    }
}

impl DeviceAllocator for HostPyTorch {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        self.settings.json()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        let blocks = &mut *self.lock();
        let background = self.settings.pinned_use_background_threads;
        if !background || blocks.missed {
            self.drain(blocks)?;
        }
        // 2.
        let bytes = self.settings.round(request.bytes);
        // 3. `get_free_block`
        let checked = self.settings.release.checks_size();
        let mut cached = blocks.newest(stream, bytes, checked);
        if cached.is_none() && background && self.settings.release.drains_own_size() {
            self.drain_size(blocks, bytes)?;
            cached = blocks.newest(stream, bytes, checked);
        }
        if let Some((addr, size)) = cached {
            if size < request.bytes {
                let (allocator, requested) = (self.name(), request.bytes);
                return Err(AllocError::Overrun { allocator, requested, bytes: size });
            }
            blocks.take(addr, request.bytes);
            // SAFETY: the block was cached, so no client holds it and its uses have completed. It is as large as the request.
            return Ok(unsafe { Block::new(addr, size, request.bytes, Path::Hit, self.tokens.token()) });
        }
        blocks.missed = true;
        let (addr, reserved) = match self.pin(blocks, bytes) {
            Ok(pinned) => pinned,
            Err(error) if error.is_out_of_memory() => return Err(self.refusal(blocks, request.bytes, bytes, stream)),
            Err(error) => return Err(error.into()),
        };
        blocks.add(addr, Record::new(bytes, request.bytes, stream, reserved));
        // SAFETY: the driver has just allocated this memory, or it is a part of the reserved segment that no block had. It is aligned
        // to pages.
        Ok(unsafe { Block::new(addr, bytes, request.bytes, Path::DriverAlloc, self.tokens.token()) })
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        let addr = block.addr();
        let blocks = &mut *self.lock();
        if block.token() != self.tokens.token() || !blocks.is_live(addr) {
            return Err(foreign(self.name(), block));
        }
        let users = blocks.let_go(addr);
        if users.is_empty() {
            return Ok(self.complete(blocks, addr)?);
        }
        let (capturing, mut outcome) = (self.driver.is_capture_noted(), Ok(()));
        for stream in users {
            match blocks.events.record(self.driver.as_ref(), stream, capturing) {
                Ok(event) => blocks.wait_for(addr, stream, event),
                // It is recorded later, which is late but safe.
                Err(error) if error.call == CallKind::EventCreate => {
                    blocks.wait_for(addr, stream, None);
                    outcome = Err(error);
                }
                Err(error) => {
                    blocks.strand(addr);
                    outcome = Err(error);
                }
            }
        }
        Ok(outcome.map(|()| Path::Deferred)?)
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let blocks = &mut *self.lock();
        if block.token() != self.tokens.token() || !blocks.is_live(block.addr()) {
            return Err(not_held(self.name(), block));
        }
        blocks.announce(block.addr(), stream);
        Ok(())
    }

    fn forget_stream(&self, stream: StreamId) {
        let blocks = &mut *self.lock();
        for addr in blocks.forget(stream) {
            // A block that the host refuses to take back stays cached.
            let _ = self.complete(blocks, addr);
        }
    }

    fn stats(&self) -> Stats {
        self.lock().stats.clone()
    }

    fn reset_peaks(&self) {
        self.lock().reset_peaks();
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(self.lock().snapshot())
    }

    fn ledger_at_peak(&self) -> Ledger {
        self.lock().peak
    }

    /// `empty_cache`, bucket by bucket, after a wait.
    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        let blocks = &mut *self.lock();
        let waited = self.wait(blocks);
        let mut released = 0;
        for addr in blocks.cached() {
            if blocks.stats.reserved_bytes.all.current <= keep_bytes {
                break;
            }
            released += self.release(blocks, addr)?;
        }
        waited?;
        Ok(released)
    }

    fn parts(&self) -> Parts<'_> {
        Parts::NONE
    }
}

impl Drop for HostPyTorch {
    /// Releases everything that no client holds. The driver's free waits for the device, so deferred frees have completed by then.
    fn drop(&mut self) {
        let blocks = self.blocks.get_mut().unwrap_or_else(PoisonError::into_inner);
        let waiting: Vec<_> = blocks.queue.drain(..).filter_map(|waiting| waiting.event).collect();
        for event in waiting.into_iter().chain(blocks.events.take()) {
            // SAFETY: the event was made here, and nothing uses it any more. An event that the driver refuses to destroy stays.
            let _ = unsafe { self.driver.event_destroy(event) };
        }
        let segments = blocks.records.iter().filter(|(_, record)| !record.reserved);
        let idle = segments.filter(|(_, record)| record.state != BlockState::Allocated).map(|(addr, _)| *addr);
        let held = blocks.records.values().any(|record| record.reserved && record.state == BlockState::Allocated);
        let reserve = blocks.reserve.as_ref().filter(|_| !held).map(|reserve| reserve.start);
        for addr in idle.chain(reserve).collect::<Vec<_>>() {
            // SAFETY: a segment of this driver that no client holds, released once: a refused call released nothing. The driver waits
            // for work that still uses it.
            if unsafe { self.driver.mem_free(addr) }.is_err() {
                // SAFETY: as above. Memory that is refused again is released with the device context.
                let _ = unsafe { self.driver.mem_free(addr) };
            }
        }
    }
}

const _: () = assert!(HOST_PAGE.is_multiple_of(crate::contract::GUARANTEED_ALIGN), "reserved blocks are aligned");
