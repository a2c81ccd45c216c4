//! The order of work and reuse: memory serves no stream before the work that used it. On the simulated device, whose clocks tell when
//! work ends, as its kernels take effect when they are queued.

use super::Bench;
use super::demand::{Outcome as _, demand};
use super::subject::{overlap, range};
use super::support::{GIB, KIB, MIB, allocate, free, sim, work};
use std::sync::Arc;
use vramlab_device::{Driver, SimDriver, StreamId, sim::SimMemory};
use vramlab_policies::contract::{Block, DeviceAllocator};

/// Duration of the work, which no call of an allocator takes unless it waits.
const LONG_NS: u64 = 50_000_000;

/// Sizes of blocks, for a backend with usual segments.
const SIZES: [u64; 4] = [700, 300 * KIB, 3 * MIB, 40 * MIB];

/// Requests after the free: the first ones may be served from other memory.
const REQUESTS: usize = 4;

/// Whether the work that was queued on a stream has completed.
fn is_idle(sim: &SimDriver, stream: StreamId) -> bool {
    let event = sim.event_create(false).granted();
    sim.event_record(event, stream).granted();
    let idle = sim.event_query(event).granted();
    // SAFETY: it was made above and is in no wait.
    unsafe { sim.event_destroy(event) }.granted();
    idle
}

/// Frees a block while `user` works, which uses it, and requests memory on `next`: a block in the same memory is ordered after the
/// work, unless the allocator waited for its end.
fn check(bench: &Bench, rule: &str, users: impl Fn([StreamId; 2]) -> (StreamId, StreamId)) {
    let sim = sim(bench.scaled(64 * GIB), SimMemory::None);
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as _;
    let allocator = bench.selection.build(&driver).granted();
    let allocator: &dyn DeviceAllocator = allocator.as_ref();
    for bytes in SIZES {
        let streams = [0, 1].map(|_| sim.stream_create().granted());
        let (owner, (user, next)) = (streams[0], users(streams));
        let block = allocate(allocator, bytes, owner).granted();
        work(&sim, user, LONG_NS);
        if user != owner {
            allocator.record_use(&block, user).granted();
        }
        let used = range(&block);
        free(allocator, block, owner).granted();
        let served: Vec<Block> = (0..REQUESTS).map(|_| allocate(allocator, bytes, next).granted()).collect();
        let reused = served.iter().find(|block| overlap(range(block), used));
        demand!(
            reused.is_none() || is_idle(&sim, user) || !is_idle(&sim, next),
            came = format_args!("{reused:?}, while the other stream works"),
            "{rule}"
        );
        served.into_iter().for_each(|block| _ = free(allocator, block, next).granted());
        sim.device_synchronize().granted();
    }
}

pub(super) fn a_recorded_use_ends_before_the_memory_is_used_again(bench: &Bench) {
    check(bench, "memory is not reused before the work of a recorded stream", |[owner, other]| (other, owner));
}

pub(super) fn work_of_a_stream_ends_before_another_gets_its_memory(bench: &Bench) {
    check(bench, "memory serves no other stream before the work of its own", |[owner, other]| (owner, other));
}
