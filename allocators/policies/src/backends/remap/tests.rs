//! Tests of the driver calls of `remap` when its cache is emptied.

use super::{Remap, RemapSettings};
use crate::contract::{Block, DeviceAllocator, Request};
use std::sync::Arc;
use vramlab_device::{CallKind, Driver, MeteredDriver, Profile, SimDriver, StreamId, sim::SimMemory};

const MIB: u64 = 1 << 20;

struct Bench {
    sim: Arc<SimDriver>,
    metered: Arc<MeteredDriver>,
    stream: StreamId,
    allocator: super::Pooled<Remap>,
}

impl Bench {
    fn new(limit_mib: u64) -> Self {
        let sim = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
        let metered = Arc::new(MeteredDriver::new(Arc::clone(&sim) as Arc<dyn Driver>, None, None));
        let stream = sim.stream_create().unwrap();
        let settings = RemapSettings { memory_limit: Some(limit_mib * MIB), ..RemapSettings::default() };
        let allocator = Remap::new(Arc::clone(&metered) as Arc<dyn Driver>, settings).unwrap();
        Self { sim, metered, stream, allocator }
    }

    /// A block that work of some microseconds uses.
    fn allocate(&self, mib: u64) -> Block {
        let block = self.allocator.allocate(Request::new(mib * MIB), self.stream).unwrap();
        self.sim.launch(self.stream, "work", (1, 1), 1 << 30, &[(block.addr().get(), block.bytes())]).unwrap();
        block
    }

    fn free(&self, block: Block) {
        // SAFETY: only later work of the stream uses the memory.
        unsafe { self.allocator.deallocate(block, self.stream) }.unwrap();
    }

    fn count(&self, call: CallKind) -> u64 {
        self.metered.counts().get(call).count
    }

    /// Number of calls of these kinds during `work`.
    fn calls<const N: usize>(&self, kinds: [CallKind; N], act: impl FnOnce()) -> [u64; N] {
        let before = kinds.map(|kind| self.count(kind));
        act();
        let mut calls = kinds.map(|kind| self.count(kind));
        calls.iter_mut().zip(before).for_each(|(calls, before)| *calls -= before);
        calls
    }
}

#[test]
fn cache_flush_unmaps_adjacent_pages_by_one_call_and_waits_once() {
    let bench = Bench::new(1 << 20);
    let start = bench.sim.mem_info().unwrap().free;
    let weights = [6, 2].map(|mib| bench.allocate(mib));
    for step in 0..5 {
        // 40 MiB, blocks that live until the end of the program, and 60 MiB behind them.
        let step_blocks = [10, 30].map(|mib| bench.allocate(mib));
        let middle = bench.allocate(20);
        let end = [20, 40].map(|mib| bench.allocate(mib));
        step_blocks.into_iter().chain(end).for_each(|block| bench.free(block));
        let kinds = [CallKind::MemUnmap, CallKind::MemRelease, CallKind::StreamSynchronize];
        let calls = bench.calls(kinds, || {
            bench.allocator.trim(0).unwrap();
        });
        // Pages that the live blocks share stay mapped, as whole pages.
        let pages = (40 + 60 + if step == 0 { 12 } else { 0 }) / 2;
        assert_eq!(calls, [2, pages, 1], "step {step}");
        bench.free(middle);
        bench.allocator.trim(0).unwrap();
    }
    weights.into_iter().for_each(|block| bench.free(block));
    bench.allocator.trim(0).unwrap();
    assert_eq!(bench.sim.mem_info().unwrap().free, start);
}

#[test]
fn pages_that_stay_keep_their_mappings_when_others_go_back() {
    let bench = Bench::new(64);
    let start = bench.sim.mem_info().unwrap().free;
    let [first, second, third] = [20, 20, 20].map(|mib| bench.allocate(mib));
    bench.free(first);
    bench.free(third);
    // Pages of the first block move behind the third's, and stay mapped where they were.
    let moved = bench.allocate(40);
    assert!(bench.allocator.stats().steals.unwrap().pages > 0);
    let free = 64 * MIB - moved.bytes() - second.bytes();
    let calls = bench.calls([CallKind::MemUnmap, CallKind::MemRelease], || {
        assert_eq!(bench.allocator.trim(0).unwrap(), free);
    });
    assert_eq!(calls, [1, free / (2 * MIB)], "mappings of pages in use stay");
    // Nothing is mapped at an address whose page is released, and the device has all of its memory at the end.
    bench.free(moved);
    bench.allocator.trim(0).unwrap();
    assert_eq!(bench.allocator.stats().reserved_bytes.all.current, second.bytes());
    bench.free(second);
    bench.allocator.trim(0).unwrap();
    assert_eq!(bench.sim.mem_info().unwrap().free, start);
}

#[test]
fn repeating_program_maps_nothing_at_last_despite_cache_flushes() {
    let bench = Bench::new(60);
    for step in 0..8 {
        let before = bench.count(CallKind::MemMap);
        let [first, second, third] = [20, 20, 20].map(|mib| bench.allocate(mib));
        bench.free(first);
        bench.free(third);
        let moved = bench.allocate(40);
        assert!(step < 4 || bench.count(CallKind::MemMap) == before, "step {step}");
        // All of it is in use, so that nothing is released.
        let calls = bench.calls([CallKind::MemUnmap], || assert_eq!(bench.allocator.trim(0).unwrap(), 0));
        assert_eq!(calls, [0]);
        bench.free(moved);
        bench.free(second);
    }
    assert!(bench.allocator.stats().steals.unwrap().pages > 0);
}

#[test]
fn no_stream_is_named_when_the_allocator_ends() {
    let bench = Bench::new(64);
    let blocks = [20, 20, 20].map(|mib| bench.allocate(mib));
    blocks.into_iter().for_each(|block| bench.free(block));
    let moved = bench.allocate(62);
    bench.free(moved);
    let Bench { metered, allocator, .. } = bench;
    let kinds = [CallKind::StreamSynchronize, CallKind::EventRecord, CallKind::MemUnmap, CallKind::DeviceSynchronize];
    let before = kinds.map(|kind| metered.counts().get(kind).count);
    drop(allocator);
    let mut calls = kinds.map(|kind| metered.counts().get(kind).count);
    calls.iter_mut().zip(before).for_each(|(calls, before)| *calls -= before);
    assert_eq!(calls, [0, 0, 1, 1], "the program may have destroyed its streams");
}
