//! # `bump`: segments filled from front to back
//!
//! *Policy.* Requests are placed one behind the other in shared segments; a segment has the size of its first request,
//! or the configured size if larger. Freed memory is reused once no later block of its segment is live. If the device
//! is out of memory, idle segments are released and the allocation is retried once.
//!
//! *Good at* speed, and phases that end with no live block. *Bad at* a long-lived block: it keeps all memory in front
//! of it reserved.
//!
//! *Streams.* A segment belongs to the stream that it was allocated for. If another stream was announced as a user of
//! a block, the owner waits for that stream when the block is freed.
//!
//! The library's [`Space`] stores the blocks and counts them; this module makes all decisions. [`snug`] is a policy
//! that leaves everything else to the library, [`worst`] has custom parts, and [`buddy`] has custom steps. [`census`]
//! is an instrument around any of them.

pub mod buddy;
pub mod census;
pub mod snug;
pub mod worst;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab::backends::{Backend, Capabilities, SegmentUse, StreamUse, With};
use vramlab::settings::{Settings, bytes};
use vramlab::space::{Account, BlockId, FreeList, Owner, SegmentId, Space, State as BlockState};
use vramlab::{
    AllocError, Block, DeviceAddr, DeviceAllocator, Driver, DriverError, Ledger, OomReport, Parts, Path, Request,
    Snapshot, Stats, StreamId, Tokens,
};

vramlab::settings! {
    /// Settings of [`Bump`].
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct BumpSettings {
        /// Bytes of a segment, unless its first request is larger.
        pub segment: u64 = 8 << 20, bytes().at_least(1 << 20);
    }
}

/// The backend's entry in the list: lists, help and tests read it.
pub static BACKEND: Backend = Backend {
    name: "bump",
    summary: "fills segments from front to back and starts again when one is idle",
    capabilities: Capabilities {
        streams: StreamUse::Own,
        segments: SegmentUse::Many,
        caches: true,
        retries: true,
        snapshot: true,
        used_elsewhere: Path::WaitInserted,
        ..Capabilities::LEAST
    },
    compared: true,
    constructor: &With(|driver, settings: &BumpSettings| Ok(Arc::new(Bump::new(driver, *settings)))),
};

/// All backends that this crate adds to the list.
pub static ALL: [&Backend; 4] = [&BACKEND, &snug::BACKEND, &worst::BACKEND, &buddy::BACKEND];

/// Block sizes are multiples of this, as in PyTorch.
const ROUND: u64 = 512;

/// See the [crate](self).
#[derive(Debug)]
pub struct Bump {
    /// Identifies this allocator's blocks among those of other allocators.
    tokens: Tokens,
    driver: Arc<dyn Driver>,
    settings: BumpSettings,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    space: Space,
    /// Other streams that use the block.
    users: BTreeMap<BlockId, Vec<StreamId>>,
    /// Freed blocks whose uses on other streams could not be ordered before later work.
    stranded: Vec<BlockId>,
}

impl State {
    /// The free end of the lowest segment with room for the request.
    fn find(&self, list: FreeList, bytes: u64) -> Option<BlockId> {
        let segments = self.space.segments().filter(|(_, segment)| segment.list == list);
        let ends = segments.filter_map(|(id, _)| self.space.blocks_of(id).last());
        let fit = ends.filter(|end| self.space[*end].state == BlockState::Free && self.space[*end].bytes >= bytes);
        fit.min_by_key(|end| self.space[*end].addr)
    }
}

impl Bump {
    /// A bump allocator on `driver`.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: BumpSettings) -> Self {
        let space = Space::new(Account::new());
        let state = Mutex::new(State { space, users: BTreeMap::new(), stranded: Vec::new() });
        Self { tokens: Tokens::next(), driver, settings, state }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The live block behind a client's block.
    fn held(&self, state: &State, block: &Block) -> Option<BlockId> {
        state.space.find_held(self.tokens.record(block.token())?, block.addr().get())
    }

    /// A new segment; `None` if the device is out of memory.
    fn grow(&self, state: &mut State, list: FreeList, bytes: u64) -> Result<Option<BlockId>, DriverError> {
        let bytes = bytes.max(self.settings.segment).next_multiple_of(ROUND);
        match self.driver.mem_alloc(bytes) {
            Ok(addr) => Ok(Some(state.space.add_segment(list, addr.get(), bytes))),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Releases idle segments while more than `keep` bytes stay reserved; returns the number of segments released.
    fn release(&self, state: &mut State, keep: u64) -> Result<u64, DriverError> {
        if !state.stranded.is_empty() {
            self.driver.device_synchronize()?;
            for block in std::mem::take(&mut state.stranded) {
                state.space.free(block);
            }
        }
        let idle = state.space.segments().filter(|(_, segment)| segment.busy == 0);
        let idle: Vec<(SegmentId, u64)> = idle.map(|(id, segment)| (id, segment.addr)).collect();
        let before = state.space.account().reserved();
        for (segment, addr) in idle {
            if state.space.account().reserved() <= keep {
                break;
            }
            // SAFETY: from `mem_alloc` of this driver and forgotten below. It has no live block, and the driver waits
            // for the device before it takes the memory.
            unsafe { self.driver.mem_free(DeviceAddr::new(addr).expect("segments lie above zero")) }?;
            state.space.remove_segment(segment);
        }
        Ok(before - state.space.account().reserved())
    }

    /// Makes later work of `owner` wait for the work that `user` has queued so far.
    fn order(&self, owner: StreamId, user: StreamId) -> Result<(), DriverError> {
        let event = self.driver.event_create(false)?;
        let ordered = self.driver.event_record(event, user).and_then(|()| self.driver.stream_wait_event(owner, event));
        // SAFETY: created above and used nowhere else; the driver keeps it while work waits for it.
        let destroyed = unsafe { self.driver.event_destroy(event) };
        // If that fails, only the event leaks.
        let _ = destroyed;
        ordered
    }

    fn out_of_memory(&self, state: &mut State, list: FreeList, requested: u64) -> AllocError {
        let account = state.space.account_mut();
        account.count_refusal();
        let (reserved, active) = (account.reserved(), account.stats().active_bytes.all.current);
        let (own, others): (Vec<_>, Vec<_>) = state.space.free_blocks().partition(|block| block.list == list);
        let largest = own.iter().map(|block| block.bytes).max().unwrap_or(0);
        OomReport::new(BACKEND.name, requested)
            .needing(requested.max(self.settings.segment).next_multiple_of(ROUND))
            .with_memory(reserved, active)
            .with_free(largest, others.iter().map(|block| block.bytes).sum())
            .with_device(self.driver.as_ref())
            .into()
    }
}

impl DeviceAllocator for Bump {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        self.settings.json()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        request.validate()?;
        let bytes = request.bytes.next_multiple_of(ROUND);
        let list = FreeList { owner: Owner::of(stream), pool: None };
        let state = &mut *self.lock();
        let mut path = Path::Hit;
        let mut block = state.find(list, bytes);
        if block.is_none() {
            path = Path::DriverAlloc;
            block = self.grow(state, list, bytes)?;
        }
        if block.is_none() {
            path = Path::Retry;
            self.release(state, 0)?;
            state.space.account_mut().count_retry();
            block = self.grow(state, list, bytes)?;
        }
        let Some(block) = block else { return Err(self.out_of_memory(state, list, request.bytes)) };
        state.space.take(block, bytes, request.bytes);
        state.space.account_mut().note_peak(stream);
        let addr = DeviceAddr::new(state.space[block].addr).expect("segments lie above zero");
        // SAFETY: the driver allocates segments at multiples of 256, and block sizes are multiples of 512. Blocks of a
        // space do not overlap, and only idle segments are released to the driver.
        Ok(unsafe { Block::new(addr, bytes, request.bytes, path, self.tokens.of_record(block.number())) })
    }

    unsafe fn deallocate(&self, block: Block, _stream: StreamId) -> Result<Path, AllocError> {
        let state = &mut *self.lock();
        let Some(id) = self.held(state, &block) else {
            return Err(AllocError::foreign(self.name(), "it is not live here", block));
        };
        let owner = state.space[id].list.owner.stream;
        let users = state.users.remove(&id).unwrap_or_default();
        state.space.defer(id);
        let ordered = users.iter().try_for_each(|user| self.order(owner, *user));
        // A stream that cannot be waited for may be destroyed: wait for the whole device instead.
        if let Err(error) = ordered.or_else(|_| self.driver.device_synchronize()) {
            state.stranded.push(id);
            return Err(error.into());
        }
        state.space.free(id);
        Ok(if users.is_empty() { Path::Hit } else { Path::WaitInserted })
    }

    fn record_use(&self, block: &Block, stream: StreamId) -> Result<(), AllocError> {
        let state = &mut *self.lock();
        let id = self.held(state, block);
        let id = id.ok_or_else(|| AllocError::not_held(self.name(), "it is not live here", block))?;
        if state.space[id].list.owner.stream != stream {
            let users = state.users.entry(id).or_default();
            if !users.contains(&stream) {
                users.push(stream);
            }
        }
        Ok(())
    }

    /// Later frees do not wait for the stream.
    fn forget_stream(&self, stream: StreamId) {
        self.lock().users.values_mut().for_each(|users| users.retain(|user| *user != stream));
    }

    fn stats(&self) -> Stats {
        self.lock().space.account().stats().clone()
    }

    fn reset_peaks(&self) {
        self.lock().space.account_mut().reset_peaks();
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(self.lock().space.snapshot())
    }

    fn ledger_at_peak(&self) -> Ledger {
        self.lock().space.account().ledger_at_peak()
    }

    fn trim(&self, keep_bytes: u64) -> Result<u64, AllocError> {
        Ok(self.release(&mut self.lock(), keep_bytes)?)
    }

    /// No graphs, no private pools, and no other optional features.
    fn parts(&self) -> Parts<'_> {
        Parts::NONE
    }
}

impl Drop for Bump {
    fn drop(&mut self) {
        // Retry where the driver refused; memory that it refuses again is released with the device.
        let state = &mut *self.lock();
        let _ = self.release(state, 0).or_else(|_| self.release(state, 0));
    }
}
