//! The checker: detects and names violations of contracts.
//!
//! Every byte of a block is filled with `0xFF`, a NaN in every float type, when the block is allocated and again when it is freed,
//! unless another stream may still read it. So reading memory that was never written, or was freed, returns NaN; and a write to
//! freed memory is detected when the block is allocated the next time and is no longer all `0xFF`.
//!
//! Nothing is filled or read on a stream that is captured, because the graph would do so at each launch, and memory of a capture is
//! never filled. For it only addresses are checked: no other block may have them until the capture is released.

use super::restored_streams;
use crate::contract::{
    AllocError, Block, BlockState, CaptureId, DeviceAllocator, Instrument, Path, PrivatePool, Request, RestoreError,
    Snapshot, Token,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::ranges::Ranges;
use vramlab_device::{DeviceAddr, Driver, StreamId};

/// The value of each byte of free memory.
pub const POISON: u8 = 0xFF;

/// The checker's findings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Number of checked operations.
    pub operations: u64,
    /// Bytes that were compared with the poison when they were allocated again.
    pub verified_bytes: u64,
    /// Violations, in order.
    pub violations: Vec<String>,
    /// Live blocks: address and bytes.
    pub live: Vec<(u64, u64)>,
}

/// Checks each operation and keeps memory poisoned. Slow: it fills each block twice and reads it back.
#[derive(Debug)]
pub struct Checker {
    inner: Arc<dyn DeviceAllocator>,
    driver: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    bytes: u64,
    /// The token of its allocator.
    token: Token,
    stream: StreamId,
    /// Whether work on another stream was announced. It may still read the block after the free, so that must not poison it.
    shared: bool,
    /// Whether it is memory of a capture.
    captured: bool,
}

/// The state of a capture.
#[derive(Debug)]
struct Captured {
    stream: StreamId,
    open: bool,
    /// Addresses of its blocks.
    ranges: Ranges,
}

#[derive(Debug, Default)]
struct State {
    /// Live blocks, by address.
    live: BTreeMap<u64, Held>,
    /// Ranges that were poisoned when they were freed and should be unchanged.
    poisoned: Ranges,
    captures: BTreeMap<CaptureId, Captured>,
    report: CheckReport,
}

impl State {
    fn violation(&mut self, text: String) -> AllocError {
        self.report.violations.push(text.clone());
        AllocError::Violation(text)
    }

    /// A violation if a block of `bytes` at `addr` shares a byte with a live one.
    fn overlap(&self, addr: u64, bytes: u64) -> Option<String> {
        let before = self.live.range(..addr + bytes).next_back().map(|(other, held)| (*other, held.bytes));
        let (other, len) = before.filter(|(other, len)| other + len > addr)?;
        Some(format!(
            "overlap: block at {addr:#x} ({bytes} bytes) was allocated while {other:#x} ({len} bytes) is live"
        ))
    }

    /// The open capture of a stream.
    fn open_on(&mut self, stream: StreamId) -> Option<&mut Captured> {
        self.captures.values_mut().find(|capture| capture.open && capture.stream == stream)
    }

    /// Finds a capture that pins the memory of a block.
    fn pinned_by(&self, addr: u64, bytes: u64, stream: StreamId) -> Option<CaptureId> {
        let others = self.captures.iter().filter(|(_, capture)| !(capture.open && capture.stream == stream));
        others.into_iter().find(|(_, capture)| capture.ranges.overlaps(addr, addr + bytes)).map(|(id, _)| *id)
    }
}

impl Checker {
    /// Checks `inner`.
    ///
    /// # Safety
    /// The blocks of `inner` are memory of `driver`, which is filled and read here.
    #[must_use]
    pub unsafe fn new(inner: Arc<dyn DeviceAllocator>, driver: Arc<dyn Driver>) -> Self {
        Self { inner, driver, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The findings so far. At the end of a program every live block is a leak.
    #[must_use]
    pub fn report(&self) -> CheckReport {
        let state = self.lock();
        let live = state.live.iter().map(|(addr, held)| (*addr, held.bytes)).collect();
        CheckReport { live, ..state.report.clone() }
    }

    /// Whether work queued on the stream becomes a part of a graph. A driver that does not report it counts as one that captures.
    fn is_captured(&self, state: &mut State, stream: StreamId) -> bool {
        if state.open_on(stream).is_some() {
            return true;
        }
        let any = state.captures.values().any(|capture| capture.open);
        any && self.driver.stream_is_capturing(stream).unwrap_or(true)
    }

    /// Forgets the contents of a block, and of its whole segment if that is new: of everything where a backend does not show its
    /// segments.
    fn forget(&self, state: &mut State, block: &Block) {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        state.poisoned.remove(addr, addr + bytes);
        if matches!(block.path(), Path::Hit | Path::Split) {
            return;
        }
        let Some(snapshot) = self.inner.snapshot() else {
            state.poisoned = Ranges::default();
            return;
        };
        let segments = snapshot.segments.iter();
        for segment in
            segments.filter(|segment| (segment.addr.get()..segment.addr.get() + segment.bytes).contains(&addr))
        {
            state.poisoned.remove(segment.addr.get(), segment.addr.get() + segment.bytes);
        }
    }

    /// Contents are only kept by backends that show their segments; a CUDA memory pool may remap free memory.
    fn verify(&self, state: &mut State, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        if !matches!(block.path(), Path::Hit | Path::Split) {
            self.forget(state, block);
            return Ok(());
        }
        for (start, end) in state.poisoned.remove(addr, addr + bytes) {
            let Some(at) = DeviceAddr::new(start) else { continue };
            // CAST: the range was allocated by an allocator that owns it.
            let mut contents = vec![0u8; (end - start) as usize];
            // SAFETY: the range is in the block that was just allocated.
            unsafe { self.driver.copy_to_host(&mut contents, at, stream)? };
            state.report.verified_bytes += end - start;
            if let Some(offset) = contents.iter().position(|byte| *byte != POISON) {
                let text = format!(
                    "write after free: byte {:#x} of the block at {addr:#x} ({bytes} bytes) changed to {:#04x} while it was free",
                    start + offset as u64,
                    contents[offset]
                );
                return Err(state.violation(text));
            }
        }
        Ok(())
    }

    /// Checks an allocated block, and fills it.
    fn checked(
        &self,
        request: Request,
        stream: StreamId,
        allocate: impl FnOnce(&dyn DeviceAllocator) -> Result<Block, AllocError>,
    ) -> Result<Block, AllocError> {
        // Held during the allocation: another thread that gets a part of a new segment must not read it before this one has
        // forgotten the earlier contents of its addresses.
        let mut state = self.lock();
        let block = allocate(self.inner.as_ref())?;
        state.report.operations += 1;
        let (addr, bytes, token) = (block.addr().get(), block.bytes(), block.token());
        if bytes < request.bytes || !addr.is_multiple_of(request.align) {
            let text = format!("block at {addr:#x} ({bytes} bytes) does not satisfy {request:?}");
            return Err(state.violation(text));
        }
        if let Some(text) = state.overlap(addr, bytes) {
            return Err(state.violation(text));
        }
        if let Some(capture) = state.pinned_by(addr, bytes, stream) {
            let text = format!(
                "overlap: block at {addr:#x} ({bytes} bytes) was allocated while capture {} pins its memory",
                capture
            );
            return Err(state.violation(text));
        }
        if self.is_captured(&mut state, stream) {
            let captured = state.open_on(stream).map(|capture| capture.ranges.insert(addr, addr + bytes));
            state.live.insert(addr, Held { bytes, token, stream, shared: false, captured: captured.is_some() });
            self.forget(&mut state, &block);
            return Ok(block);
        }
        state.live.insert(addr, Held { bytes, token, stream, shared: false, captured: false });
        let checked = self.verify(&mut state, &block, stream);
        // SAFETY: the block was just allocated for use on this stream.
        let filled = unsafe { self.driver.fill_bytes(block.addr(), POISON, block.requested(), stream) };
        if let Err(error) = checked.and(filled.map_err(AllocError::from)) {
            state.live.remove(&addr);
            drop(state);
            // SAFETY: the block has not been used.
            let _ = unsafe { self.inner.deallocate(block, stream) };
            return Err(error);
        }
        Ok(block)
    }

    /// Notes live blocks that were taken over, which keep their earlier contents.
    fn note_restored(&self, state: &mut State, blocks: &[Block], snapshot: &Snapshot) {
        for (block, stream) in blocks.iter().zip(restored_streams(snapshot)) {
            let (addr, bytes, token) = (block.addr().get(), block.bytes(), block.token());
            state.report.operations += 1;
            if let Some(text) = state.overlap(addr, bytes) {
                state.report.violations.push(text);
            }
            state.poisoned.remove(addr, addr + bytes);
            state.live.insert(addr, Held { bytes, token, stream, shared: false, captured: false });
        }
    }
}

impl Instrument for Checker {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.checked(request, stream, |inner| inner.allocate(request, stream))
    }

    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.checked(request, stream, |inner| inner.allocate_in(request, stream, pool))
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let (addr, bytes, requested) = (block.addr().get(), block.bytes(), block.requested());
        let mut state = self.lock();
        state.report.operations += 1;
        // Another allocator can have a live block at the same address.
        let token = block.token();
        let record = state.live.get(&addr).is_some_and(|held| held.token == token).then(|| state.live.remove(&addr));
        let Some(record) = record.flatten() else {
            let text = format!("free of {addr:#x} ({bytes} bytes), which is not live");
            return Err(state.violation(text));
        };
        let owner = record.stream;
        if owner != stream {
            let text = format!("block at {addr:#x} of stream {} is freed on stream {}", owner.get(), stream.get());
            state.report.violations.push(text);
        }
        let quiet = record.shared || record.captured || self.is_captured(&mut state, stream);
        let filled = if quiet {
            Ok(())
        } else {
            // SAFETY: the block is still live and its uses were queued before (the caller's promise).
            unsafe { self.driver.fill_bytes(block.addr(), POISON, requested, stream) }
        };
        // SAFETY: the caller's promise is the inner allocator's.
        let path = unsafe { self.inner.deallocate(block, stream) }?;
        // The block was freed in either case; a failing fill only leaves it without poison.
        filled?;
        if !quiet && matches!(path, Path::Hit | Path::Coalesce) {
            state.poisoned.insert(addr, addr + requested);
        }
        Ok(path)
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        self.inner.record_use(block, stream)?;
        if let Some(held) = self.lock().live.get_mut(&block.addr().get()) {
            held.shared |= stream != held.stream;
        }
        Ok(())
    }

    /// The contents of blocks that were taken over are from before, so they are not filled.
    fn restore(&self, snapshot: &Snapshot, age: &dyn Fn(DeviceAddr) -> u64) -> Result<Option<Vec<Block>>, AllocError> {
        let state = &mut *self.lock();
        let Some(blocks) = self.inner.restore(snapshot, age)? else { return Ok(None) };
        // Their segments are new.
        for segment in self.inner.snapshot().iter().flat_map(|snapshot| &snapshot.segments) {
            state.poisoned.remove(segment.addr.get(), segment.addr.get() + segment.bytes);
        }
        self.note_restored(state, &blocks, snapshot);
        Ok(Some(blocks))
    }

    unsafe fn pool_restore(
        &self,
        pool: PrivatePool,
        checkpoint: &Snapshot,
        held: Vec<(Block, StreamId)>,
    ) -> Result<Vec<Block>, RestoreError> {
        let state = &mut *self.lock();
        let mut removed = Vec::new();
        for (block, _) in &held {
            let addr = block.addr().get();
            if state.live.get(&addr).is_none_or(|known| known.token != block.token()) {
                let text = format!("restore of pool {pool} frees {addr:#x}, which is not live");
                state.report.violations.push(text);
            }
            removed.push(addr);
        }
        // SAFETY: the caller's promise is passed on.
        let restored = unsafe { self.inner.pool_restore(pool, checkpoint, held) }?;
        removed.iter().for_each(|addr| _ = state.live.remove(addr));
        self.note_restored(state, &restored, checkpoint);
        Ok(restored)
    }

    fn capture_begin(&self, stream: StreamId) -> Result<CaptureId, AllocError> {
        let id = self.inner.capture_begin(stream)?;
        self.lock().captures.insert(id, Captured { stream, open: true, ranges: Ranges::default() });
        Ok(id)
    }

    fn capture_end(&self, capture: CaptureId) -> Result<(), AllocError> {
        let ended = self.inner.capture_end(capture);
        if !matches!(ended, Err(AllocError::Capture { .. }))
            && let Some(known) = self.lock().captures.get_mut(&capture)
        {
            known.open = false;
        }
        ended
    }

    fn capture_release(&self, capture: CaptureId) -> Result<(), AllocError> {
        // Before the release: afterwards another thread may get the memory.
        let known = self.lock().captures.remove(&capture);
        let released = self.inner.capture_release(capture);
        if let (Err(AllocError::Capture { .. }), Some(known)) = (&released, known) {
            self.lock().captures.insert(capture, known);
        }
        released
    }
}

impl CheckReport {
    /// Whether there is no finding, given that the program has ended.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty() && self.live.is_empty()
    }
}

/// Panics unless a snapshot satisfies the invariants of the whole layout.
///
/// # Panics
/// As [`assert_tiled`], or when two free neighbours were not coalesced.
pub fn assert_layout(snapshot: &Snapshot) {
    assert_tiled(snapshot);
    for segment in &snapshot.segments {
        for pair in segment.blocks.windows(2) {
            let free = pair.iter().all(|block| block.state == BlockState::Free);
            assert!(!free, "two free neighbours should have been coalesced at {:#x}", pair[1].addr.get());
        }
    }
}

/// Checks a snapshot whose free neighbours may be uncoalesced, because they are of different streams.
///
/// # Panics
/// When blocks do not tile a segment, segments overlap, or a block is smaller than its request.
pub fn assert_tiled(snapshot: &Snapshot) {
    let mut end = 0;
    for segment in &snapshot.segments {
        assert!(segment.addr.get() >= end, "segments should not overlap and should be in address order");
        let mut at = segment.addr.get();
        for block in &segment.blocks {
            assert!(
                block.addr.get() == at,
                "blocks should tile their segment: one is at {:#x}, not {at:#x}",
                block.addr.get()
            );
            assert!(block.bytes > 0 && block.requested <= block.bytes, "a block should have the requested bytes");
            at += block.bytes;
        }
        end = segment.addr.get() + segment.bytes;
        assert!(at == end, "blocks should fill their segment: they end at {at:#x}, it ends at {end:#x}");
    }
}
