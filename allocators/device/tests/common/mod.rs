//! Devices of a chosen size, and calls on them without ceremony. The tests of policies and histories have these, too.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::sync::Arc;
#[allow(unused_imports, reason = "as above")]
pub(crate) use vramlab_conformance::Random;
use vramlab_device::sim::SimMemory;
use vramlab_device::{DeviceAddr, Driver, DriverError, GraphDriver, GraphId, Profile, SimDriver, StreamId};

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
        // SAFETY: made above, and used here alone.
        unsafe { sim.event_destroy(event) }.unwrap();
    }
    // SAFETY: made above, and used here alone.
    unsafe { sim.stream_destroy(idle) }.unwrap();
    ns
}
