//! A simulated GPU.
//!
//! *Memory* is host memory, so that kernels really compute, or none, for replays of recordings that are larger than the machine.
//! *Time* is virtual: a host clock and one clock for each stream. Each call costs the time in the [`Profile`] and blocks as the
//! real call blocks: a free of plain memory waits for the whole device, a pool above its release threshold releases memory at a
//! synchronise, a launch blocks when the queue is full, a graph is one call however many kernels it has. Nothing reads a real
//! clock, so a run repeats exactly.
//!
//! Kernels and copies take effect when they are queued, in the host's order; a correctly synchronised program cannot observe that.

#[cfg_attr(not(target_os = "linux"), path = "sim/no_backing.rs")]
mod backing;
mod driver;
mod graphs;
mod heap;
mod host_memory;
mod host_room;
mod l2;
mod links;
mod pools;
mod profile;
mod timeline;
mod vmm;

pub use host_room::{HostBound, HostRoom};
pub use links::Ranks;
pub use profile::{
    Copies, CostBySize, GraphCosts, KernelCost, LinkCosts, MemoryCost, PlainMemory, PoolMemory, Profile, ProfileError,
    Queues, VirtualMemory,
};

use super::plain_range::PlainRange;
use super::{CallKind, DeviceAddr, DriverResult, EventId, StreamId};
use crate::Clock;
use crate::DriverError;
use crate::bytes::Bytes;
use crate::graph::NotedCaptures;
use crate::host::HostCosts;
use graphs::{Graphs, Node};
use heap::{Heap, Packing};
use host_memory::{HostMemoryMap, NoRoom};
use l2::L2;
use pools::Pool;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use timeline::{Recorded, Timeline};

/// First address of plain memory; pools and reservations have ranges of their own above it.
const SMALL_BASE: u64 = 1 << 41;
const LARGE_BASE: u64 = 1 << 42;
/// Size of each range.
const RANGE: u64 = 1 << 40;
/// Threads that are taken to touch host memory before it is registered: the fewest of the published times.
pub const SIM_REGISTER_THREADS: u32 = 4;

/// The memory behind the simulated addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimMemory {
    /// Host memory: kernels compute on it.
    Host,
    /// None: only addresses, for replays.
    None,
}

/// The simulated GPU. See the [module](self) for what it simulates.
#[derive(Debug)]
pub struct SimDriver {
    profile: Profile,
    memory: SimMemory,
    /// What registering host memory costs, which no profile has.
    host_costs: HostCosts,
    state: Arc<Mutex<State>>,
    noted_captures: NotedCaptures,
    /// The other GPUs, once they are known.
    ranks: OnceLock<Arc<dyn Ranks>>,
}

#[derive(Debug)]
struct State {
    time: Timeline,
    /// Plain memory smaller than a page, packed into pages.
    small: Heap,
    /// Plain memory in pages of its own.
    large: PlainRange,
    pools: BTreeMap<u64, Pool>,
    next_pool: u64,
    events: BTreeMap<u64, Option<Recorded>>,
    next_event: u64,
    host: HostMemoryMap,
    /// Bytes of registered host memory by its address.
    registered: BTreeMap<usize, usize>,
    vmm: vmm::Space,
    graphs: Graphs,
    /// Absent where the profile has no cache, and where there is no memory.
    l2: Option<L2>,
    /// End of the last collective.
    links_free_ns: u64,
}

/// The virtual host clock.
#[derive(Debug)]
struct VirtualClock(Arc<Mutex<State>>);

impl Clock for VirtualClock {
    fn now_ns(&self) -> u64 {
        lock(&self.0).time.now_ns()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A panic while the lock was held is a bug that has been reported already; the state stays usable.
    state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl State {
    fn held(&self) -> u64 {
        self.small.held_bytes()
            + self.large.held_bytes()
            + self.pools.values().map(|pool| pool.heap.held_bytes()).sum::<u64>()
            + self.vmm.created_bytes()
            + self.graphs.held_bytes()
    }

    fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        self.host.translate(addr, bytes).or_else(|| self.vmm.translate(addr, bytes))
    }

    /// Notes the buffers of the last work on a stream.
    fn note_use(&mut self, stream: StreamId, buffers: &[(u64, u64)]) {
        let (now, end) = (self.time.now_ns(), self.time.mark(stream.get()).time_ns);
        self.vmm.note_use(buffers, now, end);
    }

    /// Marks buffers as used in the cache; returns the share of their bytes that was not in it.
    fn access(&mut self, buffers: &[(u64, u64)]) -> f64 {
        self.l2.as_mut().map_or(0.0, |cache| cache.access(buffers))
    }

    /// Frees plain memory; returns its bytes, and whether pages were released to the device.
    fn free_plain(&mut self, addr: u64) -> Option<(u64, bool)> {
        if addr >= LARGE_BASE {
            return Some((self.large.free(addr)?, true));
        }
        let bytes = self.small.free(addr, None)?;
        Some((bytes, self.small.release(0) > 0))
    }

    fn need_stream(&self, call: CallKind, stream: StreamId) -> DriverResult<()> {
        if self.time.has_stream(stream.get()) {
            return Ok(());
        }
        Err(DriverError::no_such(call, "stream", stream.get()))
    }

    fn recorded(&self, call: CallKind, event: EventId) -> DriverResult<Option<&Recorded>> {
        let known = self.events.get(&event.get()).map(Option::as_ref);
        known.ok_or_else(|| DriverError::no_such(call, "event", event.get()))
    }
}

impl SimDriver {
    /// A simulated GPU with the given profile.
    #[must_use]
    pub fn new(profile: Profile, memory: SimMemory) -> Self {
        let page = profile.plain.page_bytes;
        let state = State {
            time: Timeline::new(profile.queues.depth),
            small: Heap::new(SMALL_BASE, RANGE, page, profile.plain.align_bytes, Packing::Within),
            large: PlainRange::new(LARGE_BASE, RANGE, page),
            pools: BTreeMap::new(),
            next_pool: 0,
            events: BTreeMap::new(),
            next_event: 1,
            host: HostMemoryMap::default(),
            registered: BTreeMap::new(),
            vmm: vmm::Space::default(),
            graphs: Graphs::default(),
            l2: profile.l2_bytes.filter(|_| memory == SimMemory::Host).map(L2::new),
            links_free_ns: 0,
        };
        let (state, noted_captures) = (Arc::new(Mutex::new(state)), NotedCaptures::default());
        let host_costs = HostCosts::h100x8();
        Self { profile, memory, host_costs, state, noted_captures, ranks: OnceLock::new() }
    }

    /// A simulated device with at most `bytes` of host memory behind its blocks at a time. Without this the device asks the system
    /// how much is left before it allocates more.
    #[must_use]
    pub fn with_host_limit(self, bytes: u64) -> Self {
        self.lock().host = HostMemoryMap::limited(bytes);
        self
    }

    /// The profile in use.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Locks the state for a call that costs the host `ns`, also when it fails.
    fn charge(&self, ns: u64) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.time.spend(ns);
        state
    }

    /// Queues a kernel of `geometry`, its blocks and the iterations of each, that works on `buffers`, each an address and bytes:
    /// the part of them in the L2 cache decides how long it takes. The caller computes its effect on host memory itself,
    /// immediately; see [`translate`](Self::translate).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` for an unknown stream.
    pub fn launch(
        &self,
        stream: StreamId,
        kernel: &str,
        geometry: (u64, u64),
        bytes: u64,
        buffers: &[(u64, u64)],
    ) -> DriverResult<()> {
        let mut state = self.lock();
        state.need_stream(CallKind::KernelLaunch, stream)?;
        state.time.spend(self.profile.queues.launch_ns);
        self.queue(&mut state, stream, Node::kernel(kernel, geometry, bytes, buffers));
        Ok(())
    }

    /// The host works on its own program for the time that the profile has for each driver call ([`Profile::program_ns_per_call`]
    /// and [`Profile::program_ns_per_memory_call`]), here for a call of this kind. The client calls this between its driver calls;
    /// a driver call does not include it, so a measurement of the call returns its own cost.
    pub fn run_program(&self, call: CallKind) {
        let memory = self.profile.program_ns_per_memory_call.filter(|_| call.moves_memory());
        self.lock().time.spend(memory.unwrap_or(self.profile.program_ns_per_call));
    }

    /// The host address of `addr..addr + bytes`; `None` unless all of it is in one live block with host memory. It is valid until
    /// the block is freed.
    #[must_use]
    pub fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        self.lock().translate(addr, bytes)
    }

    /// Device time spent in kernels and copies so far, over all streams, in nanoseconds.
    #[must_use]
    pub fn busy_ns(&self) -> u64 {
        self.lock().time.busy_ns()
    }

    fn need_memory(&self, call: CallKind, state: &State, addr: DeviceAddr, bytes: usize) -> DriverResult<NonNull<u8>> {
        state.translate(addr.get(), bytes as u64).ok_or_else(|| {
            let why = match self.memory {
                SimMemory::Host => "is not inside one live block",
                SimMemory::None => "has no host memory behind it on this device",
            };
            DriverError::new(call, DriverError::ILLEGAL_ADDRESS, format!("{:#x} + {bytes} {why}", addr.get()))
        })
    }

    /// Adds host memory to a new block. After an error the caller undoes the placement.
    fn back(&self, call: CallKind, host: &mut HostMemoryMap, addr: u64, bytes: u64) -> DriverResult<DeviceAddr> {
        if self.memory == SimMemory::Host {
            host.back(addr, bytes).map_err(|error| no_host_memory(call, bytes, error))?;
        }
        Ok(DeviceAddr::handed_out(addr))
    }

    fn free_bytes(&self, state: &State) -> u64 {
        self.profile.total_bytes - self.profile.context_bytes - state.held()
    }

    /// Ends a call that waited: the call itself costs `ns`, and each pool above its threshold releases empty granules.
    fn after_wait(&self, state: &mut State, ns: u64) {
        state.time.spend(ns);
        let Some(costs) = &self.profile.pool else { return };
        let mut released = 0;
        for pool in state.pools.values_mut() {
            pool.heap.settle(|mark| state.time.has_passed(mark));
            released += pool.heap.release(pool.settings.release_threshold);
        }
        state.time.spend(released * costs.release_ns_per_granule);
    }
}

/// The simulated device has room for a block and the simulating machine has not. That is not an out-of-memory of the device, under
/// which allocators would release their caches: the result of a run must not depend on the machine.
fn no_host_memory(call: CallKind, bytes: u64, NoRoom(room): NoRoom) -> DriverError {
    let left = room.map_or_else(|| "it was refused".to_owned(), |room| format!("there are {room}"));
    let context = format!(
        "the simulated GPU needs {} more of this machine's memory, and {left}; use a smaller model or batch, more memory, or a GPU",
        Bytes(bytes)
    );
    DriverError::new(call, DriverError::OPERATING_SYSTEM, context)
}
