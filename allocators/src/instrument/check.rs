//! The checker: contracts that are broken are found and named.
//!
//! Every byte of a block is filled with `0xFF`, a NaN in every float type, when the block is handed out and again when
//! it comes back, unless another stream may still read it. So reading memory that was never written, or was freed,
//! gives NaN; and writing memory that was freed is found when the block is handed out the next time and is no longer
//! all `0xFF`.

use crate::allocator::{Block, DeviceAllocator, Path, Request};
use crate::device::{DeviceAddr, Driver, StreamId};
use crate::error::AllocError;
use crate::snapshot::{BlockState, Ledger, Snapshot};
use crate::stats::Stats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a byte of memory nobody owns looks like.
pub const POISON: u8 = 0xFF;

/// What the checker found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Operations that were checked.
    pub operations: u64,
    /// Bytes that were compared with the poison when they were handed out again.
    pub verified_bytes: u64,
    /// Broken contracts, in the order in which they were found.
    pub violations: Vec<String>,
    /// Blocks that are still held: address and bytes.
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
    stream: StreamId,
    /// Whether work on another stream was announced. It may still read the block after the free, so that must not
    /// poison it.
    shared: bool,
}

#[derive(Debug, Default)]
struct State {
    /// Blocks that the client holds, by address.
    live: BTreeMap<u64, Held>,
    /// Ranges that were poisoned when they came back and should be untouched: address, then bytes.
    poisoned: BTreeMap<u64, u64>,
    report: CheckReport,
}

impl State {
    fn violation(&mut self, text: String) -> AllocError {
        self.report.violations.push(text.clone());
        AllocError::Violation(text)
    }

    /// Takes the poisoned ranges inside `addr..addr + bytes` out and returns them, cut to it.
    fn take_poisoned(&mut self, addr: u64, bytes: u64) -> Vec<(u64, u64)> {
        let end = addr + bytes;
        let touching: Vec<(u64, u64)> = self.poisoned.range(..end).rev().map(|(start, len)| (*start, *len)).collect();
        let mut out = Vec::new();
        for (start, len) in touching {
            let stop = start + len;
            if stop <= addr {
                break;
            }
            self.poisoned.remove(&start);
            if start < addr {
                self.poisoned.insert(start, addr - start);
            }
            if stop > end {
                self.poisoned.insert(end, stop - end);
            }
            out.push((start.max(addr), stop.min(end) - start.max(addr)));
        }
        out
    }
}

impl Checker {
    /// Checks `inner`, whose blocks are memory of `driver`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, driver: Arc<dyn Driver>) -> Self {
        Self { inner, driver, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was found so far. At the end of a program every block that is still live is a leak.
    #[must_use]
    pub fn report(&self) -> CheckReport {
        let state = self.lock();
        let live = state.live.iter().map(|(addr, held)| (*addr, held.bytes)).collect();
        CheckReport { live, ..state.report.clone() }
    }

    /// Contents are only kept by backends that show their segments; a driver's pool may remap what is free.
    fn verify(&self, state: &mut State, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let (addr, bytes) = (block.addr().get(), block.bytes());
        if !matches!(block.path(), Path::Hit | Path::Split) {
            // Fresh from the driver: nothing is known of the whole segment's contents.
            let snapshot = self.inner.snapshot();
            let segments = snapshot.iter().flat_map(|snapshot| &snapshot.segments);
            let ranges: Vec<(u64, u64)> = segments
                .filter(|segment| (segment.addr.get()..segment.addr.get() + segment.bytes).contains(&addr))
                .map(|segment| (segment.addr.get(), segment.bytes))
                .collect();
            for (start, len) in ranges.into_iter().chain([(addr, bytes)]) {
                state.take_poisoned(start, len);
            }
            return Ok(());
        }
        for (start, len) in state.take_poisoned(addr, bytes) {
            let Some(at) = DeviceAddr::new(start) else { continue };
            // CAST: the range was handed out by an allocator that holds it.
            let mut seen = vec![0u8; len as usize];
            // SAFETY: the range lies in the block that was just handed out.
            unsafe { self.driver.copy_to_host(&mut seen, at, stream)? };
            state.report.verified_bytes += len;
            if let Some(offset) = seen.iter().position(|byte| *byte != POISON) {
                let text = format!(
                    "write after free: byte {:#x} of the block at {addr:#x} ({bytes} bytes) changed to {:#04x} while nobody held it",
                    start + offset as u64,
                    seen[offset]
                );
                return Err(state.violation(text));
            }
        }
        Ok(())
    }
}

impl DeviceAllocator for Checker {
    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        let block = self.inner.allocate(request, stream)?;
        let mut state = self.lock();
        state.report.operations += 1;
        let (addr, bytes) = (block.addr().get(), block.bytes());
        if bytes < request.bytes || !addr.is_multiple_of(request.align) {
            let text = format!("block at {addr:#x} ({bytes} bytes) does not satisfy {request:?}");
            return Err(state.violation(text));
        }
        let before = state.live.range(..addr + bytes).next_back().map(|(other, held)| (*other, held.bytes));
        if let Some((other, len)) = before.filter(|(other, len)| other + len > addr) {
            let text = format!(
                "overlap: block at {addr:#x} ({bytes} bytes) was handed out while {other:#x} ({len} bytes) is held"
            );
            return Err(state.violation(text));
        }
        state.live.insert(addr, Held { bytes, stream, shared: false });
        let checked = self.verify(&mut state, &block, stream);
        // SAFETY: the block was just handed out for use on this stream.
        let filled = unsafe { self.driver.fill_bytes(block.addr(), POISON, block.requested(), stream) };
        if let Err(error) = checked.and(filled.map_err(AllocError::from)) {
            state.live.remove(&addr);
            drop(state);
            // SAFETY: nobody has used the block.
            let _ = unsafe { self.inner.deallocate(block, stream) };
            return Err(error);
        }
        Ok(block)
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let (addr, bytes, requested) = (block.addr().get(), block.bytes(), block.requested());
        let mut state = self.lock();
        state.report.operations += 1;
        let Some(held) = state.live.remove(&addr) else {
            let text = format!("free of {addr:#x} ({bytes} bytes), which is not held");
            return Err(state.violation(text));
        };
        let owner = held.stream;
        if owner != stream {
            let text = format!("block at {addr:#x} of stream {} is freed on stream {}", owner.0, stream.0);
            state.report.violations.push(text);
        }
        let filled = if held.shared {
            Ok(())
        } else {
            // SAFETY: the block is still ours and its uses were queued before (the caller's promise).
            unsafe { self.driver.fill_bytes(block.addr(), POISON, requested, stream) }
        };
        // SAFETY: the caller's promise is the inner allocator's.
        let path = unsafe { self.inner.deallocate(block, stream) }?;
        // The block is back in either case; a failing fill only leaves it without poison.
        filled?;
        if !held.shared && matches!(path, Path::Hit | Path::Coalesce) {
            state.poisoned.insert(addr, requested);
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

    super::pass_on!();
}

impl CheckReport {
    /// Whether nothing is wrong, given that the program has ended.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty() && self.live.is_empty()
    }
}

/// Panics unless a snapshot keeps the invariants of the whole layout.
///
/// # Panics
/// When blocks do not tile a segment, two free neighbours were not coalesced, segments overlap, or a block is
/// smaller than what was asked for.
pub fn assert_layout(snapshot: &Snapshot) {
    let mut end = 0;
    for segment in &snapshot.segments {
        assert!(segment.addr.get() >= end, "segments should not overlap and should be in address order");
        let mut at = segment.addr.get();
        let mut free_before = false;
        for block in &segment.blocks {
            assert_eq!(block.addr.get(), at, "blocks should tile their segment");
            assert!(block.bytes > 0 && block.requested <= block.bytes, "a block should hold what was asked for");
            let free = block.state == BlockState::Free;
            assert!(!(free && free_before), "two free neighbours should have been coalesced at {at:#x}");
            free_before = free;
            at += block.bytes;
        }
        end = segment.addr.get() + segment.bytes;
        assert_eq!(at, end, "blocks should fill their segment");
    }
}
