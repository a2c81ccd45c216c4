//! What the test binaries share: devices of a chosen size, blocks without ceremony, random numbers that repeat.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::sync::Arc;
use vramlab::instruments::Checker;
use vramlab::{
    AllocError, Backend, Block, DeviceAddr, DeviceAllocator, Driver, DriverError, Gauge, GraphDriver, GraphId, Path,
    PooledGauge, Profile, Request, Selection, SimDriver, SimMemory, Snapshot, Stats, StreamId,
};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// The H200's profile with `free` bytes left for clients.
pub(crate) fn profile(free: u64) -> Profile {
    let mut profile = Profile::h200();
    profile.total_bytes = profile.context_bytes + free;
    profile
}

/// A simulated device with `free` bytes left for clients.
pub(crate) fn sim(free: u64, memory: SimMemory) -> Arc<SimDriver> {
    Arc::new(SimDriver::new(profile(free), memory))
}

pub(crate) fn build(kind: &'static Backend, driver: &Arc<dyn Driver>) -> Arc<dyn DeviceAllocator> {
    Selection::of(kind).build(driver).unwrap()
}

/// Checks an allocator that was built on `driver`.
pub(crate) fn checker(inner: Arc<dyn DeviceAllocator>, driver: Arc<dyn Driver>) -> Checker {
    // SAFETY: as the sentence above says.
    unsafe { Checker::new(inner, driver) }
}

pub(crate) fn allocate(allocator: &dyn DeviceAllocator, bytes: u64, stream: StreamId) -> Result<Block, AllocError> {
    allocator.allocate(Request::new(bytes), stream)
}

pub(crate) fn free(allocator: &dyn DeviceAllocator, block: Block, stream: StreamId) -> Result<Path, AllocError> {
    // SAFETY: tests queue every use of a block before they free it, on its stream or on announced ones.
    unsafe { allocator.deallocate(block, stream) }
}

/// Launches a graph whose memory is pinned.
pub(crate) fn launch(graphs: &dyn GraphDriver, graph: GraphId, stream: StreamId) -> Result<(), DriverError> {
    // SAFETY: tests release a capture after its last launch.
    unsafe { graphs.graph_launch(graph, stream) }
}

pub(crate) fn write(driver: &dyn Driver, addr: DeviceAddr, bytes: &[u8], stream: StreamId) {
    // SAFETY: tests write inside blocks that they hold.
    unsafe { driver.copy_to_device(addr, bytes, stream) }.unwrap();
}

pub(crate) fn read(driver: &dyn Driver, addr: DeviceAddr, bytes: u64, stream: StreamId) -> Vec<u8> {
    let mut out = vec![0; bytes as usize];
    // SAFETY: tests read inside blocks that they hold, or on a device that checks each access.
    unsafe { driver.copy_to_host(&mut out, addr, stream) }.unwrap();
    out
}

pub(crate) fn fill(driver: &dyn Driver, addr: DeviceAddr, value: u8, bytes: u64, stream: StreamId) {
    // SAFETY: tests fill inside blocks that they hold.
    unsafe { driver.fill_bytes(addr, value, bytes, stream) }.unwrap();
}

pub(crate) fn free_bytes(driver: &dyn Driver) -> u64 {
    driver.mem_info().unwrap().free
}

/// A stream by its number, for devices that check none.
pub(crate) const fn stream(number: u64) -> StreamId {
    // SAFETY: given to the null device only, whose streams are numbers, or to allocators, which compare them.
    unsafe { StreamId::from_raw(number) }
}

/// Queues a kernel of about `ns` on a simulated stream.
pub(crate) fn work(sim: &SimDriver, stream: StreamId, ns: u64) {
    sim.launch(stream, "test", (1, 1), ns * 4300, &[]).unwrap();
}

/// The virtual time at which everything queued so far on `stream` is done.
pub(crate) fn ready_ns(sim: &SimDriver, stream: StreamId) -> u64 {
    let idle = sim.stream_create().unwrap();
    let (zero, end) = (sim.event_create(true).unwrap(), sim.event_create(true).unwrap());
    sim.event_record(zero, idle).unwrap();
    // On a stream without work an event completes as it is recorded.
    let now = sim.clock().now_ns();
    sim.event_record(end, stream).unwrap();
    let ns = now + sim.event_elapsed_ns(zero, end).unwrap();
    for event in [zero, end] {
        // SAFETY: made above, used by nobody else.
        unsafe { sim.event_destroy(event) }.unwrap();
    }
    // SAFETY: made above, used by nobody else.
    unsafe { sim.stream_destroy(idle) }.unwrap();
    ns
}

/// Numbers that look random and repeat (xorshift64*).
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Small and large sizes alike: a power of two at random, then a size below it.
    pub(crate) fn size(&mut self, largest_log2: u64) -> u64 {
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
pub(crate) fn check_stats(stats: &Stats) {
    for (name, gauge) in [
        ("allocation", Some(&stats.allocation)),
        ("segment", stats.segment.as_ref()),
        ("active", Some(&stats.active)),
        ("inactive_split", stats.inactive_split.as_ref()),
        ("allocated_bytes", Some(&stats.allocated_bytes)),
        ("reserved_bytes", stats.reserved_totals_known.then_some(&stats.reserved_bytes)),
        ("active_bytes", Some(&stats.active_bytes)),
        ("inactive_split_bytes", stats.inactive_split_bytes.as_ref()),
        ("requested_bytes", Some(&stats.requested_bytes)),
    ] {
        if let Some(gauge) = gauge {
            check_pooled(name, gauge);
        }
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

/// What holds once every block is back and no free is pending.
pub(crate) fn check_nothing_held(stats: &Stats) {
    check_stats(stats);
    for gauge in [stats.allocation, stats.active, stats.allocated_bytes, stats.active_bytes, stats.requested_bytes] {
        assert_eq!(gauge.all.current, 0, "{stats:#?}");
        assert_eq!(gauge.all.allocated, gauge.all.freed);
    }
}

/// Blocks as (offset in the segment, bytes, state's first letter), segment by segment.
pub(crate) fn layout(snapshot: &Snapshot) -> Vec<Vec<(u64, u64, char)>> {
    let letter = |state| match state {
        vramlab::BlockState::Allocated => 'A',
        vramlab::BlockState::PendingFree => 'P',
        vramlab::BlockState::Free => 'F',
    };
    let segment = |segment: &vramlab::SegmentInfo| {
        let base = segment.addr.get();
        segment.blocks.iter().map(|block| (block.addr.get() - base, block.bytes, letter(block.state))).collect()
    };
    snapshot.segments.iter().map(segment).collect()
}
