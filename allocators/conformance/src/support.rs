//! What the checks share: devices of a chosen size, blocks without ceremony, random numbers that repeat, and what holds of
//! statistics at every moment.

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
    allocator.allocate(Request::new(bytes), stream)
}

pub(super) fn free(allocator: &dyn DeviceAllocator, block: Block, stream: StreamId) -> Result<Path, AllocError> {
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
    unsafe { driver.copy_to_device(addr, bytes, stream) }.unwrap();
}

pub(super) fn read(driver: &dyn Driver, addr: DeviceAddr, bytes: u64, stream: StreamId) -> Vec<u8> {
    let mut out = vec![0; bytes as usize];
    // SAFETY: tests read inside blocks that they hold, or on a device that checks each access.
    unsafe { driver.copy_to_host(&mut out, addr, stream) }.unwrap();
    out
}

pub(super) fn fill(driver: &dyn Driver, addr: DeviceAddr, value: u8, bytes: u64, stream: StreamId) {
    // SAFETY: tests fill inside blocks that they hold.
    unsafe { driver.fill_bytes(addr, value, bytes, stream) }.unwrap();
}

pub(super) fn free_bytes(driver: &dyn Driver) -> u64 {
    driver.mem_info().unwrap().free
}

/// Queues a kernel of about `ns` on a simulated stream.
pub(super) fn work(sim: &SimDriver, stream: StreamId, ns: u64) {
    sim.launch(stream, "test", (1, 1), ns * 4300, &[]).unwrap();
}

/// Numbers that look random and repeat (xorshift64*).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Numbers that a seed gives.
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

    /// One below `bound`, which is not 0.
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
    assert_eq!(gauge.allocated - gauge.freed, gauge.current, "{name}: {gauge:?}");
    assert!(gauge.peak >= gauge.current, "{name}: {gauge:?}");
}

fn check_pooled(name: &str, gauge: &PooledGauge) {
    check_gauge(name, &gauge.all);
    if let (Some(small), Some(large)) = (&gauge.small_pool, &gauge.large_pool) {
        check_gauge(name, small);
        check_gauge(name, large);
        assert_eq!(small.current + large.current, gauge.all.current, "{name}");
        assert_eq!(small.allocated + large.allocated, gauge.all.allocated, "{name}");
    }
}

/// What holds of the statistics at every moment.
///
/// # Panics
/// When it does not.
pub fn check_stats(stats: &Stats) {
    let adds_up = |name: &str| name != "reserved_bytes" || !stats.reserved_totals_unknown;
    for (name, gauge) in stats.pooled().into_iter().filter(|(name, _)| adds_up(name)) {
        gauge.into_iter().for_each(|gauge| check_pooled(name, gauge));
    }
    assert!(stats.allocation.all.current <= stats.active.all.current);
    assert!(stats.allocated_bytes.all.current <= stats.active_bytes.all.current);
    assert!(stats.requested_bytes.all.current <= stats.active_bytes.all.current);
    assert!(stats.active_bytes.all.current <= stats.reserved_bytes.all.current, "{stats:#?}");
    assert!(stats.reserved_bytes.all.current <= stats.reserved_bytes.all.peak);
    if let Some(inactive) = &stats.inactive_split_bytes {
        assert!(inactive.all.current + stats.active_bytes.all.current <= stats.reserved_bytes.all.current);
    }
}

/// What holds of a snapshot, and of its ledger, at every moment.
pub(super) fn check_snapshot(snapshot: &Snapshot, coalesces: bool, stream: StreamId) {
    if coalesces {
        assert_layout(snapshot)
    } else {
        assert_tiled(snapshot)
    };
    check_ledger(&snapshot.ledger(stream));
}

pub(super) fn check_ledger(ledger: &Ledger) {
    assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested, "{ledger:?}");
}

/// What holds once every block is back and no free is pending.
///
/// # Panics
/// When it does not.
pub fn check_nothing_held(stats: &Stats) {
    check_stats(stats);
    for gauge in [stats.allocation, stats.active, stats.allocated_bytes, stats.active_bytes, stats.requested_bytes] {
        assert_eq!(gauge.all.current, 0, "{stats:#?}");
        assert_eq!(gauge.all.allocated, gauge.all.freed);
    }
}
