//! Tests of a heap's blocks, segments, private pools and arenas, on a simulated device whose calls can fail.

use super::*;
use crate::contract::PoolKind;
use crate::policy::grow::release_private;
use crate::policy::stream::LastFrees;
use crate::space::Account;
use vramlab_device::{CallKind, FaultyDriver, Profile, SimDriver, sim::SimMemory};

const MIB: u64 = 1 << 20;

struct Bench {
    heap: Heap,
    sim: Arc<SimDriver>,
    faulty: Arc<FaultyDriver>,
    streams: [StreamId; 2],
}

impl Bench {
    fn new(stream: Stream) -> Self {
        let sim = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
        let faulty = Arc::new(FaultyDriver::new(Arc::clone(&sim) as Arc<dyn Driver>));
        let driver: Arc<dyn Driver> = Arc::clone(&faulty) as _;
        let streams = [driver.stream_create().unwrap(), driver.stream_create().unwrap()];
        let source = Source::Plain { driver, limit: Some(1 << 30) };
        let heap = Heap::new(Space::new(Account::with_pools(u64::MAX)), Fit::best(), stream, source);
        Self { heap, sim, faulty, streams }
    }

    fn list(&self, stream: usize, pool: PoolKind) -> FreeList {
        FreeList { owner: Owner::of(self.streams[stream]), pool: Some(pool) }
    }

    /// The large blocks of the first stream.
    fn large(&self) -> FreeList {
        self.list(0, PoolKind::Large)
    }

    fn private(&self, private: CaptureId, pool: PoolKind) -> FreeList {
        FreeList { owner: Owner { stream: self.streams[0], private: Some(private) }, pool: Some(pool) }
    }

    fn segment(&mut self, list: FreeList, bytes: u64) -> BlockId {
        self.heap.new_segment(list, bytes).unwrap().unwrap()
    }

    /// A new segment as one live block.
    fn held(&mut self, list: FreeList, bytes: u64) -> BlockId {
        let block = self.segment(list, bytes);
        self.heap.take(block, list, bytes, bytes);
        block
    }

    fn addr(&self, block: BlockId) -> u64 {
        self.heap.space()[block].addr
    }

    /// Size of the block that a search finds.
    fn found(&mut self, list: FreeList, bytes: u64) -> Option<u64> {
        self.heap.find(list, bytes, u64::MAX).map(|block| self.heap.space()[block].bytes)
    }
}

#[test]
fn a_block_is_cut_at_either_end_and_comes_back_whole() {
    let mut bench = Bench::new(Stream::Own);
    let list = bench.large();
    let front = bench.segment(list, 8 * MIB);
    let start = bench.addr(front);
    bench.heap.take(front, list, 2 * MIB, 1);
    let rest = bench.heap.find(list, 1, u64::MAX).unwrap();
    let end = bench.heap.take_end(rest, list, MIB, 1);
    assert_eq!((bench.addr(front), bench.addr(rest), bench.addr(end)), (start, start + 2 * MIB, start + 7 * MIB));
    assert_eq!((bench.found(list, 1), bench.found(list, 5 * MIB + 1)), (Some(5 * MIB), None));
    // A block of the full size leaves no front.
    assert_eq!(bench.heap.take_end(rest, list, 5 * MIB, 1), rest);
    assert_eq!(bench.found(list, 1), None);
    assert!(!bench.heap.put(end), "its neighbour is live");
    assert!(bench.heap.put(rest) && bench.heap.put(front));
    assert_eq!(bench.found(list, 8 * MIB), Some(8 * MIB));
}

#[test]
fn idle_segments_go_back_in_pytorchs_order() {
    let mut bench = Bench::new(Stream::Own);
    let [one, other] = [CaptureId::next(), CaptureId::next()];
    let (large, small) = (PoolKind::Large, PoolKind::Small);
    // In the expected order, taken in reverse.
    let order = [
        (bench.list(0, large), 20 * MIB),
        (bench.list(0, large), 22 * MIB),
        (bench.list(1, large), 10 * MIB),
        (bench.list(0, small), 2 * MIB),
        (bench.private(one, small), 2 * MIB),
        (bench.private(one, large), 20 * MIB),
        (bench.private(other, small), 2 * MIB),
    ];
    for (list, bytes) in order.into_iter().rev() {
        bench.segment(list, bytes);
    }
    let busy = bench.held(bench.large(), 24 * MIB);
    let idle = |heap: &Heap| heap.idle_segments().iter().map(|idle| (idle.list, idle.bytes)).collect::<Vec<_>>();
    assert_eq!(idle(&bench.heap), order);
    bench.heap.pin(one);
    assert_eq!(idle(&bench.heap), [&order[..4], &order[6..]].concat());
    bench.heap.unpin(one);
    // The segments of one pool, and of no other.
    assert_eq!(release_private(&mut bench.heap, one).unwrap(), 22 * MIB);
    assert_eq!(idle(&bench.heap), [&order[..4], &order[6..]].concat());
    bench.heap.put(busy);
    assert!(idle(&bench.heap).contains(&(bench.large(), 24 * MIB)));
}

#[test]
fn a_segment_that_the_device_does_not_take_back_is_still_there() {
    let mut bench = Bench::new(Stream::Own);
    let list = bench.large();
    bench.segment(list, 4 * MIB);
    let idle = bench.heap.idle_segments()[0];
    bench.faulty.fail(CallKind::MemFree, 0, DriverError::ILLEGAL_ADDRESS);
    assert!(bench.heap.release(idle.segment).is_err());
    assert_eq!((bench.found(list, 1), bench.heap.space().account().reserved()), (Some(4 * MIB), 4 * MIB));
    assert_eq!(bench.heap.release(idle.segment).unwrap(), 4 * MIB);
    assert_eq!((bench.found(list, 1), bench.heap.space().account().reserved()), (None, 0));
}

#[test]
#[should_panic(expected = "only an idle segment")]
fn a_segment_in_use_never_goes_back() {
    let mut bench = Bench::new(Stream::Own);
    let block = bench.held(bench.large(), 2 * MIB);
    let segment = bench.heap.space()[block].segment;
    let _ = bench.heap.release(segment);
}

#[test]
fn uses_by_other_streams_are_kept_once_until_they_are_asked_for() {
    let mut bench = Bench::new(Stream::Own);
    let block = bench.held(bench.large(), 2 * MIB);
    let [own, other] = bench.streams;
    for user in [own, other, own, other] {
        bench.heap.announce(block, user);
    }
    assert_eq!(bench.heap.take_uses(block), [other]);
    assert_eq!(bench.heap.take_uses(block), []);
}

#[test]
fn a_block_that_waits_is_reusable_when_the_others_are_done() {
    let mut bench = Bench::new(Stream::Own);
    let (list, user) = (bench.large(), bench.streams[1]);
    for wait in [false, true] {
        let block = bench.held(list, 2 * MIB);
        bench.sim.launch(user, "work", (1, 1), 1 << 20, &[]).unwrap();
        bench.heap.put_after(block, &[user]).unwrap();
        bench.heap.process_events().unwrap();
        assert_eq!((bench.found(list, 1), bench.heap.idle_segments()), (None, vec![]));
        if wait {
            bench.heap.synchronize().unwrap();
        } else {
            bench.sim.device_synchronize().unwrap();
            bench.heap.process_events().unwrap();
        }
        assert_eq!(bench.found(list, 1), Some(2 * MIB));
        let idle = bench.heap.idle_segments()[0];
        bench.heap.release(idle.segment).unwrap();
    }
}

#[test]
fn the_memory_of_a_capture_is_its_own() {
    let mut bench = Bench::new(Stream::Steal(LastFrees::default()));
    let other = bench.list(1, PoolKind::Large);
    let private = FreeList { owner: Owner { private: Some(CaptureId::next()), ..other.owner }, ..other };
    let [theirs, ours] = [private, bench.large()].map(|list| bench.held(list, 2 * MIB));
    bench.heap.put(theirs);
    bench.heap.put(ours);
    assert_eq!(bench.heap.steal(private, 1, u64::MAX).unwrap(), None);
    assert_eq!(bench.heap.steal(other, 1, u64::MAX).unwrap(), Some(ours));
    assert_eq!(bench.heap.steal(bench.large(), 1, u64::MAX).unwrap(), None);
    assert_eq!(bench.found(private, 1), Some(2 * MIB));
}

#[test]
fn a_free_without_an_event_is_told_once() {
    let mut bench = Bench::new(Stream::Steal(LastFrees::default()));
    let block = bench.held(bench.large(), 2 * MIB);
    bench.faulty.fail(CallKind::EventRecord, 0, DriverError::ILLEGAL_STATE);
    bench.heap.put(block);
    assert!(bench.heap.take_event_error().is_err());
    bench.heap.take_event_error().unwrap();
    assert_eq!(bench.found(bench.large(), 1), Some(2 * MIB), "its own stream needs none");
}

#[test]
fn a_refusal_says_what_is_free_and_for_whom() {
    let mut bench = Bench::new(Stream::Own);
    let (list, captured) = (bench.large(), CaptureId::next());
    bench.segment(list, 2 * MIB);
    bench.segment(list, 6 * MIB);
    bench.held(list, 8 * MIB);
    bench.segment(bench.list(0, PoolKind::Small), 16 * MIB);
    bench.segment(bench.list(1, PoolKind::Large), 3 * MIB);
    bench.segment(bench.private(captured, PoolKind::Large), 5 * MIB);
    let of = |heap: &Heap| {
        let report = heap.refusal("one", list, 9, 10);
        assert_eq!((report.requested_bytes, report.needed_bytes, report.limit_bytes), (9, 10, Some(1 << 30)));
        assert_eq!((report.reserved_bytes, report.active_bytes), (40 * MIB, 8 * MIB));
        assert_eq!(report.largest_free_bytes, Some(6 * MIB));
        report.other_streams_free_bytes.unwrap()
    };
    assert_eq!(of(&bench.heap), 8 * MIB);
    bench.heap.pin(captured);
    assert_eq!(of(&bench.heap), 3 * MIB, "a graph may use the rest");
}

#[test]
fn free_blocks_of_a_carved_segment_are_found() {
    let mut bench = Bench::new(Stream::Own);
    let list = bench.large();
    let segment = bench.segment(list, 8 * MIB);
    let blocks = bench.heap.carve(segment, &[(3 * MIB, None), (4 * MIB, Some(1)), (MIB, None)]);
    assert_eq!((blocks.len(), bench.found(list, 1), bench.found(list, 2 * MIB)), (3, Some(MIB), Some(3 * MIB)));
    assert_eq!(bench.found(list, 4 * MIB), None);
    assert!(bench.heap.put(blocks[1]));
    assert_eq!(bench.found(list, 8 * MIB), Some(8 * MIB));
}

#[test]
fn arena_blocks_are_taken_at_addresses_and_return() {
    let mut bench = Bench::new(Stream::Arena);
    let list = FreeList { pool: None, ..bench.large() };
    let other = FreeList { owner: Owner::of(bench.streams[1]), ..list };
    let segment = bench.segment(list, 8 * MIB);
    let start = bench.addr(segment);
    let free = |bench: &mut Bench, offset, bytes| bench.heap.free_around(start + offset * MIB, bytes * MIB);
    assert_eq!(free(&mut bench, 0, 8), Some(segment));
    let middle = bench.heap.take_at(segment, start + 2 * MIB, list, 2 * MIB, 1);
    let rest = free(&mut bench, 6, 2).unwrap();
    let end = bench.heap.take_at(rest, start + 6 * MIB, other, 2 * MIB, 1);
    assert_eq!([middle, end].map(|block| bench.addr(block) - start), [2 * MIB, 6 * MIB]);
    assert_eq!(bench.heap.space()[end].list.owner, other.owner);
    let is_free = [(0, 2), (0, 3), (1, 1), (3, 1), (4, 2), (4, 3), (6, 1)]
        .map(|(offset, bytes)| free(&mut bench, offset, bytes).is_some());
    assert_eq!(is_free, [true, false, true, false, true, false, false]);
    assert_eq!(bench.found(bench.large(), 1), None, "a search of a pool does not find it");
    assert!(bench.heap.put(end) && bench.heap.put(middle));
    assert!(free(&mut bench, 0, 8).is_some());
    let idle = bench.heap.idle_segments()[0];
    assert_eq!(bench.heap.release(idle.segment).unwrap(), 8 * MIB);
    assert_eq!(free(&mut bench, 0, 1), None);
}

#[test]
fn heap_of_whole_segments_has_no_exported_descriptor() {
    let bench = Bench::new(Stream::Own);
    assert!(bench.heap.exported_descriptor(3).is_none());
}
