//! Shared by the checks: devices of a chosen size, blocks without ceremony, random numbers that repeat, and what holds of
//! statistics at every moment.

use super::demand::{Asked, Outcome as _, demand, demand_eq};
use std::sync::Arc;
use vramlab_device::{
    DeviceAddr, Driver, DriverError, GraphDriver, GraphId, Profile, SimDriver, StreamId, sim::SimMemory,
};
use vramlab_policies::contract::{
    AllocError, Block, DeviceAllocator, Gauge, Ledger, Path, PooledGauge, Request, Snapshot, Stats,
};
use vramlab_policies::instruments::{Checker, assert_layout, assert_tiled};

pub(super) const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;

/// The H200's profile with `free` bytes left for clients.
pub(super) fn profile(free: u64) -> Profile {
    let mut profile = Profile::h200();
    profile.total_bytes = profile.context_bytes + free;
    profile
}

/// A simulated device with `free` bytes left for clients.
pub(super) fn sim(free: u64, memory: SimMemory) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(profile(free), memory))
}

/// Checks an allocator that was built on `driver`.
pub(super) fn checker(inner: Arc<dyn DeviceAllocator>, driver: Arc<dyn Driver>) -> Checker {
    // SAFETY: callers give the driver that the allocator was built on.
    unsafe { Checker::new(inner, driver) }
}

pub(super) fn allocate(allocator: &dyn DeviceAllocator, bytes: u64, stream: StreamId) -> Result<Block, AllocError> {
    Asked::Allocate { bytes, stream }.note();
    allocator.allocate(Request::new(bytes), stream)
}

pub(super) fn free(allocator: &dyn DeviceAllocator, block: Block, stream: StreamId) -> Result<Path, AllocError> {
    Asked::Free { addr: block.addr().get(), bytes: block.bytes(), stream }.note();
    // SAFETY: tests queue every use of a block before they free it, on its stream or on announced ones.
    unsafe { allocator.deallocate(block, stream) }
}

/// Launches a graph whose memory is pinned.
pub(super) fn launch(graphs: &dyn GraphDriver, graph: GraphId, stream: StreamId) -> Result<(), DriverError> {
    // SAFETY: tests release a capture after its last launch.
    unsafe { graphs.graph_launch(graph, stream) }
}

pub(super) fn write(driver: &dyn Driver, addr: DeviceAddr, bytes: &[u8], stream: StreamId) {
    // SAFETY: tests write inside blocks that they hold.
    unsafe { driver.copy_to_device(addr, bytes, stream) }.granted();
}

pub(super) fn read(driver: &dyn Driver, addr: DeviceAddr, bytes: u64, stream: StreamId) -> Vec<u8> {
    let mut out = vec![0; bytes as usize];
    // SAFETY: tests read inside blocks that they hold, or on a device that checks each access.
    unsafe { driver.copy_to_host(&mut out, addr, stream) }.granted();
    out
}

pub(super) fn fill(driver: &dyn Driver, addr: DeviceAddr, value: u8, bytes: u64, stream: StreamId) {
    // SAFETY: tests fill inside blocks that they hold.
    unsafe { driver.fill_bytes(addr, value, bytes, stream) }.granted();
}

pub(super) fn free_bytes(driver: &dyn Driver) -> u64 {
    driver.mem_info().granted().free
}

/// Queues a kernel of about `ns` on a simulated stream.
pub(super) fn work(sim: &SimDriver, stream: StreamId, ns: u64) {
    sim.launch(stream, "test", (1, 1), ns * 4300, &[]).granted();
}

/// The result of a thread; fails as the thread did.
pub(super) fn join<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Numbers that look random and repeat (xorshift64*).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Numbers of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// The next one, of 48 bits.
    #[expect(clippy::should_implement_trait, reason = "there is no end")]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Small and large sizes alike: a power of two at random, then a size below it.
    pub fn size(&mut self, largest_log2: u64) -> u64 {
        let log2 = self.below(largest_log2 + 1);
        1 + self.below(1 << log2)
    }
}

fn check_gauge(name: &str, gauge: &Gauge) {
    demand_eq!(gauge.current, gauge.allocated - gauge.freed, "{name}: the current value is allocated minus freed");
    demand!(
        gauge.peak >= gauge.current,
        came = format_args!("{gauge:?}"),
        "{name}: the peak is no less than the current value"
    );
}

fn check_pooled(name: &str, gauge: &PooledGauge) {
    check_gauge(name, &gauge.all);
    if let (Some(small), Some(large)) = (&gauge.small_pool, &gauge.large_pool) {
        check_gauge(name, small);
        check_gauge(name, large);
        demand_eq!(small.current + large.current, gauge.all.current, "{name}: the pools add up");
        demand_eq!(small.allocated + large.allocated, gauge.all.allocated, "{name}: the pools add up");
    }
}

/// Invariants of the statistics at every moment.
///
/// # Panics
/// When one is violated.
pub fn check_stats(stats: &Stats) {
    let adds_up = |name: &str| name != "reserved_bytes" || !stats.reserved_totals_unknown;
    for (name, gauge) in stats.pooled().into_iter().filter(|(name, _)| adds_up(name)) {
        gauge.into_iter().for_each(|gauge| check_pooled(name, gauge));
    }
    for (least, name, most, other) in [
        (stats.allocation, "allocation", stats.active, "active"),
        (stats.allocated_bytes, "allocated_bytes", stats.active_bytes, "active_bytes"),
        (stats.requested_bytes, "requested_bytes", stats.active_bytes, "active_bytes"),
        (stats.active_bytes, "active_bytes", stats.reserved_bytes, "reserved_bytes"),
    ] {
        let (least, most) = (least.all.current, most.all.current);
        demand!(least <= most, came = format_args!("{least} and {most}"), "{name} is at most {other}");
    }
    if let Some(inactive) = &stats.inactive_split_bytes {
        let used = inactive.all.current + stats.active_bytes.all.current;
        demand!(used <= stats.reserved_bytes.all.current, "inactive and active bytes are reserved");
    }
}

/// Invariants of a snapshot, and of its breakdown, at every moment.
pub(super) fn check_snapshot(snapshot: &Snapshot, coalesces: bool, stream: StreamId) {
    if coalesces {
        assert_layout(snapshot)
    } else {
        assert_tiled(snapshot)
    };
    check_ledger(&snapshot.ledger(stream));
}

pub(super) fn check_ledger(ledger: &Ledger) {
    demand_eq!(
        ledger.wasted(),
        ledger.reserved - ledger.requested,
        "the parts of the ledger are reserved minus requested"
    );
}

/// Invariants when no block is live and no free is deferred.
///
/// # Panics
/// When one is violated.
pub fn check_nothing_held(stats: &Stats) {
    check_stats(stats);
    let names = ["allocation", "active", "allocated_bytes", "active_bytes", "requested_bytes"];
    for (name, gauge) in stats.pooled().into_iter().filter(|(name, _)| names.contains(name)) {
        demand_eq!(gauge.map(|gauge| gauge.all.current), Some(0), "{name} is 0 when every block is freed");
    }
}
