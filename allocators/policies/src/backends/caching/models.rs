//! Models of concurrent threads, run through all interleavings by loom:
//! `RUSTFLAGS="--cfg loom" cargo test -p vramlab --lib --release models`.
//!
//! The code is the allocator's own, on loom's atomics and mutexes; the device is the null one. Interleavings are explored up to
//! three preemptions, where nearly all races occur (Musuvathi and Qadeer, *Iterative Context Bounding*, 2007);
//! `LOOM_MAX_PREEMPTIONS` sets another bound.

use super::watched_lock::WatchedLock;
use super::{Caching, CachingSettings};
use crate::contract::{Block, BlockState, DeviceAllocator, Request, Stats};
use crate::instruments::assert_layout;
use loom::sync::Arc;
use loom::thread;
use vramlab_device::{NullDriver, StreamId};

const MIB: u64 = 1 << 20;
const A: StreamId = crate::stream(1);
const B: StreamId = crate::stream(2);

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.max_branches = 20_000;
    builder.check(model);
}

fn caching(settings: CachingSettings) -> Arc<Caching> {
    Arc::new(Caching::new(std::sync::Arc::new(NullDriver::new(1 << 40)), settings))
}

fn take(caching: &Caching, bytes: u64, stream: StreamId) -> Block {
    caching.allocate(Request::new(bytes), stream).expect("there should be memory")
}

fn give(caching: &Caching, block: Block, stream: StreamId) {
    // SAFETY: the null device queues no work.
    unsafe { caching.deallocate(block, stream) }.expect("the block should be known");
}

fn overlap(a: &Block, b: &Block) -> bool {
    a.addr().get() < b.addr().get() + b.bytes() && b.addr().get() < a.addr().get() + a.bytes()
}

/// Invariants at every moment, and with `live` blocks at the end.
fn check(stats: &Stats) {
    let all = |gauge: &crate::contract::PooledGauge| gauge.all;
    for gauge in [stats.allocation, stats.allocated_bytes, stats.active_bytes, stats.requested_bytes] {
        assert!(all(&gauge).current <= all(&gauge).peak);
        assert_eq!(all(&gauge).allocated - all(&gauge).freed, all(&gauge).current);
    }
    assert!(stats.requested_bytes.all.current <= stats.active_bytes.all.current);
    assert!(stats.allocated_bytes.all.current <= stats.active_bytes.all.current);
    assert!(stats.active_bytes.all.current <= stats.reserved_bytes.all.current);
}

fn check_end(caching: &Caching, live: u64) {
    let stats = caching.stats();
    check(&stats);
    assert_eq!(stats.allocation.all.current, live);
    assert_layout(&caching.snapshot().expect("caching sees its blocks"));
}

#[test]
fn the_lock_lets_one_thread_in() {
    explore(|| {
        let lock = Arc::new(WatchedLock::new(0u32));
        // A holder, a watcher and one that polls.
        let others = [(); 2].map(|()| {
            let lock = Arc::clone(&lock);
            thread::spawn(move || *lock.lock() += 1)
        });
        *lock.lock() += 1;
        others.into_iter().for_each(|other| other.join().expect("the thread should end"));
        assert_eq!(*lock.lock(), 3);
    });
}

#[test]
fn threads_on_streams_of_their_own() {
    explore(|| {
        let caching = caching(CachingSettings::default());
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || {
                let block = take(&caching, 512, B);
                give(&caching, block, B);
            })
        };
        let block = take(&caching, 1024, A);
        other.join().expect("the thread should end");
        check_end(&caching, 1);
        let stats = caching.stats();
        // Both were live simultaneously in some interleavings, and the bound may assume so in all.
        assert!((1024..=1536).contains(&stats.allocated_bytes.all.peak), "{:?}", stats.allocated_bytes);
        assert_eq!((stats.allocation.all.allocated, stats.num_device_alloc), (2, 2));
        give(&caching, block, A);
    });
}

#[test]
fn the_peak_is_what_two_streams_held_together() {
    explore(|| {
        let caching = caching(CachingSettings::default());
        for stream in [A, B] {
            let block = take(&caching, 1024, stream);
            give(&caching, block, stream);
        }
        // B has the lease, which the other thread ends before, while or after this one takes a block.
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || take(&caching, 512, A))
        };
        let mine = take(&caching, 1024, B);
        let theirs = other.join().expect("the thread should end");
        give(&caching, theirs, A);
        give(&caching, mine, B);
        check_end(&caching, 0);
        let stats = caching.stats();
        assert_eq!((stats.allocated_bytes.all.peak, stats.allocation.all.peak), (1536, 2));
    });
}

#[test]
fn two_threads_on_one_stream_get_blocks_apart() {
    explore(|| {
        let caching = caching(CachingSettings::default());
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || take(&caching, 512, A))
        };
        let mine = take(&caching, 512, A);
        let theirs = other.join().expect("the thread should end");
        assert!(!overlap(&mine, &theirs), "{mine:?} {theirs:?}");
        check_end(&caching, 2);
        // The second thread waits for the segment of the first.
        assert_eq!(caching.stats().num_device_alloc, 1);
        for block in [mine, theirs] {
            give(&caching, block, A);
        }
    });
}

#[test]
fn block_is_freed_by_another_thread_while_stream_allocates() {
    explore(|| {
        let caching = caching(CachingSettings::default());
        let (sent, kept) = (take(&caching, 512, A), take(&caching, 512, A));
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || give(&caching, sent, A))
        };
        let again = take(&caching, 512, A);
        assert!(!overlap(&again, &kept));
        other.join().expect("the thread should end");
        check_end(&caching, 2);
        for block in [again, kept] {
            give(&caching, block, A);
        }
        assert_eq!(caching.snapshot().map(|snapshot| snapshot.segments[0].blocks.len()), Some(1));
    });
}

#[test]
fn a_shared_block_is_freed_while_another_stream_allocates() {
    explore(|| {
        let caching = caching(CachingSettings::default());
        let shared = take(&caching, 512, A);
        caching.record_use(&shared, B).expect("the block should be known");
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || take(&caching, 512, B))
        };
        give(&caching, shared, A);
        let theirs = other.join().expect("the thread should end");
        check_end(&caching, 1);
        // The null device completes immediately, so the next request finds the event completed.
        let again = take(&caching, 512, A);
        check_end(&caching, 2);
        let stats = caching.stats();
        assert_eq!((stats.active.all.current, stats.num_device_alloc), (2, 2));
        give(&caching, again, A);
        give(&caching, theirs, B);
    });
}

#[test]
fn pending_block_is_found_while_another_thread_frees_it() {
    explore(|| {
        let caching = caching(CachingSettings::default());
        // A whole segment, so that its stream has no other free block.
        let shared = take(&caching, 10 * MIB, A);
        caching.record_use(&shared, B).expect("the block should be known");
        give(&caching, shared, A);
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || take(&caching, 512, B))
        };
        let mine = take(&caching, 10 * MIB, A);
        let theirs = other.join().expect("the thread should end");
        check_end(&caching, 2);
        assert_eq!(caching.stats().num_device_alloc, 2, "the free block should have been found");
        give(&caching, mine, A);
        give(&caching, theirs, B);
    });
}

#[test]
fn statistics_are_read_while_others_work() {
    explore(|| {
        let caching = caching(CachingSettings::default());
        let first = take(&caching, 512, A);
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || {
                let second = take(&caching, 2 * MIB, B);
                give(&caching, second, B);
            })
        };
        check(&caching.stats());
        assert_layout(&caching.snapshot().expect("caching sees its blocks"));
        give(&caching, first, A);
        check(&caching.stats());
        other.join().expect("the thread should end");
        check_end(&caching, 0);
    });
}

/// `read` counts the live blocks, of which there is one at most: another thread frees it on a stream and allocates on the other.
fn read_one_moment(read: impl Fn(&Caching) -> u64 + Copy + Sync + Send + 'static) {
    explore(move || {
        let caching = caching(CachingSettings::default());
        // After enough turns every stream has a lease, so that levels change while they are added up.
        let turn = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || give(&caching, take(&caching, 512, A), A))
        };
        turn.join().expect("the thread should end");
        give(&caching, take(&caching, 512, B), B);
        let turn = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || take(&caching, 512, A))
        };
        let first = turn.join().expect("the thread should end");
        give(&caching, take(&caching, 512, B), B);
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || {
                give(&caching, first, A);
                take(&caching, 512, B)
            })
        };
        assert!(read(&caching) <= 1);
        let second = other.join().expect("the thread should end");
        assert_eq!(read(&caching), 1);
        give(&caching, second, B);
    });
}

#[test]
fn statistics_are_of_one_moment() {
    read_one_moment(|caching| caching.stats().allocation.all.current);
}

#[test]
fn a_snapshot_is_of_one_moment() {
    read_one_moment(|caching| {
        let snapshot = caching.snapshot().expect("caching sees its blocks");
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| block.state == BlockState::Allocated).count() as u64
    });
}

/// Trims while another thread requests `bytes`, which are served from a segment of `segment` bytes.
fn trim_against_allocation(bytes: u64, segment: u64) {
    explore(move || {
        let caching = caching(CachingSettings::default());
        let block = take(&caching, bytes, A);
        give(&caching, block, A);
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || caching.trim(0).expect("the null device should take memory back"))
        };
        let block = take(&caching, bytes, A);
        let released = other.join().expect("the thread should end");
        check_end(&caching, 1);
        let stats = caching.stats();
        assert_eq!(stats.reserved_bytes.all.current, segment);
        assert_eq!((stats.num_device_alloc, released), (1 + stats.num_device_free, stats.num_device_free * segment));
        give(&caching, block, A);
    });
}

#[test]
fn idle_memory_goes_back_while_others_allocate_a_part_of_it() {
    trim_against_allocation(512, 2 * MIB);
}

#[test]
fn idle_memory_goes_back_while_others_allocate_all_of_it() {
    trim_against_allocation(10 * MIB, 10 * MIB);
}

#[test]
fn a_limit_holds_while_two_streams_press_against_it() {
    explore(|| {
        let settings = CachingSettings { memory_limit: Some(2 * MIB), ..CachingSettings::default() };
        let caching = caching(settings);
        let cycle = |caching: &Caching, stream: StreamId| {
            let block = caching.allocate(Request::new(512), stream);
            assert!(caching.stats().reserved_bytes.all.current <= 2 * MIB);
            match block {
                Ok(block) => {
                    give(caching, block, stream);
                    true
                }
                Err(error) => {
                    assert!(error.is_out_of_memory(), "{error}");
                    false
                }
            }
        };
        let other = {
            let caching = Arc::clone(&caching);
            thread::spawn(move || cycle(&caching, B))
        };
        let mine = cycle(&caching, A);
        let theirs = other.join().expect("the thread should end");
        assert!(mine || theirs, "one of them should have been served");
        check_end(&caching, 0);
    });
}
