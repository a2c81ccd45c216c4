//! Several threads: streams of their own, and blocks that are freed by other threads.

use super::Bench;
use super::demand::{Outcome as _, demand, demand_eq};
use super::subject::Subject;
use super::support::{Random, check_nothing_held, join, read, write};
use std::sync::mpsc;
use std::thread;
use vramlab_policies::contract::Block;
use vramlab_policies::restless;

const THREADS: u64 = 8;
const OPERATIONS: u64 = 2_000;

/// The first and last bytes of a block, which identify it.
fn stamp(owner: u64, serial: u64, bytes: u64) -> Vec<u8> {
    let word = (owner << 56 | serial).to_le_bytes();
    word.iter().cycle().take(bytes.min(32) as usize).copied().collect()
}

pub(super) fn threads_on_streams_of_their_own(bench: &Bench) {
    let allocator = bench.build();
    thread::scope(|scope| {
        let allocator = &allocator;
        let threads: Vec<_> = (0..THREADS).map(|owner| scope.spawn(move || work(bench, allocator, owner))).collect();
        threads.into_iter().for_each(join);
    });
    // The last frees may be deferred; trim waits for them.
    allocator.trim(0).granted();
    let stats = allocator.stats();
    check_nothing_held(&stats);
    demand!(stats.allocation.all.allocated > THREADS * OPERATIONS / 4, "most requests are served");
    demand_eq!(stats.reserved_bytes.all.current, 0, "trim releases all when nothing is held");
    allocator.check_drop_returns_all();
}

fn work(bench: &Bench, allocator: &Subject, owner: u64) {
    restless::begin(owner + 100);
    let (driver, mut random) = (bench.driver.as_ref(), Random::new(owner + 100));
    let [stream, other] = bench.streams();
    let mut live: Vec<(Block, Vec<u8>)> = Vec::new();
    let check = |block: &Block, stamp: &[u8]| {
        if bench.has_memory() {
            let tail = block.addr().offset(block.requested() - stamp.len() as u64);
            for at in [block.addr(), tail] {
                demand_eq!(read(driver, at, stamp.len() as u64, stream), stamp, "a live block keeps its contents");
            }
        }
    };
    for serial in 0..OPERATIONS {
        if live.len() < 4 || (live.len() < 24 && random.below(2) == 0) {
            let block = allocator.take(random.size(16).max(64), stream);
            let stamp = stamp(owner, serial, block.requested());
            if bench.has_memory() {
                let tail = block.addr().offset(block.requested() - stamp.len() as u64);
                write(driver, block.addr(), &stamp, stream);
                write(driver, tail, &stamp, stream);
            }
            live.push((block, stamp));
        } else {
            let (block, stamp) = live.swap_remove(random.below(live.len() as u64) as usize);
            check(&block, &stamp);
            if random.below(8) == 0 {
                allocator.record_use(&block, other).granted();
            }
            allocator.give(block, stream);
        }
        if serial % 500 == 0 {
            driver.stream_synchronize(stream).granted();
            allocator.trim(0).granted();
        }
    }
    for (block, stamp) in live {
        check(&block, &stamp);
        allocator.give(block, stream);
    }
    driver.stream_synchronize(stream).granted();
    driver.stream_synchronize(other).granted();
}

pub(super) fn a_block_may_be_freed_on_another_thread(bench: &Bench) {
    let allocator = bench.build();
    let stream = bench.stream();
    let (sender, receiver) = mpsc::sync_channel::<Block>(32);
    thread::scope(|scope| {
        let allocator = &allocator;
        let taking = scope.spawn(move || {
            let mut random = Random::new(55);
            for _ in 0..OPERATIONS {
                sender.send(allocator.take(random.size(22), stream)).granted();
            }
        });
        allocator.give_all(receiver, stream);
        join(taking);
    });
    let stats = allocator.stats();
    check_nothing_held(&stats);
    demand_eq!(stats.allocation.all.allocated, OPERATIONS, "every allocation is counted once");
}
