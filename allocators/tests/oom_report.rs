//! What an out-of-memory error says of the memory that there was, and of what would have helped.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::{MIB, allocate, build, free, sim};
use std::sync::Arc;
use vramlab::backends::caching;
use vramlab::{AllocError, Block, Driver, OomReport, Selection, SimMemory};

fn report(error: AllocError) -> OomReport {
    let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    *report
}

#[test]
fn the_largest_free_block_and_the_bytes_of_other_streams_are_named() {
    let driver: Arc<dyn Driver> = sim(64 * MIB, SimMemory::None);
    let caching = build(&caching::BACKEND, &driver);
    let [own, other] = [(); 2].map(|()| driver.stream_create().unwrap());
    let take = |bytes, stream| allocate(caching.as_ref(), bytes, stream).unwrap();
    // In segments of 20 MiB: free parts of 3, 5 and 4 MiB between blocks that are held.
    let blocks = [3, 6, 5, 2, 4].map(|mib| take(mib * MIB, own));
    let elsewhere = [7, 2].map(|mib| take(mib * MIB, other));
    let small = take(1000, own);
    let mut kept = Vec::new();
    for (number, block) in blocks.into_iter().enumerate() {
        if number % 2 == 0 { assert!(free(caching.as_ref(), block, own).is_ok()) } else { kept.push((block, own)) }
    }
    let [freed, held] = elsewhere;
    free(caching.as_ref(), freed, other).unwrap();
    kept.extend([(held, other), (small, own)]);
    let found = report(allocate(caching.as_ref(), 30 * MIB, own).unwrap_err());
    assert_eq!(found.reserved_bytes, 42 * MIB);
    assert_eq!(found.active_bytes, 10 * MIB + 1024);
    assert_eq!(found.largest_free_bytes, Some(5 * MIB), "{found:?}");
    // 7 MiB before what is held, 11 behind it.
    assert_eq!(found.other_streams_free_bytes, Some(18 * MIB));
    assert_eq!((found.requested_bytes, found.needed_bytes), (30 * MIB, 30 * MIB));
    assert!(found.to_string().contains("largest free block 5 MiB"), "{found}");
    for (block, stream) in kept {
        free(caching.as_ref(), block, stream).unwrap();
    }
}

/// A segment of 20 MiB is cut in five, and every other piece is freed: 12 MiB in three, of which 10 are asked for.
fn in_pieces(text: &str, room: u64) -> String {
    let driver: Arc<dyn Driver> = sim(room, SimMemory::None);
    let allocator = text.parse::<Selection>().unwrap().build(&driver).unwrap();
    let stream = driver.stream_create().unwrap();
    let blocks = [(); 5].map(|()| allocate(allocator.as_ref(), 4 * MIB, stream).unwrap());
    let (odd, even): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(number, _)| number % 2 == 1);
    let give_back = |blocks: Vec<(usize, Block)>| {
        assert!(blocks.into_iter().all(|(_, block)| free(allocator.as_ref(), block, stream).is_ok()));
    };
    give_back(even);
    let advice = report(allocate(allocator.as_ref(), 10 * MIB, stream).unwrap_err()).advice();
    give_back(odd);
    let (_, advice) = advice.split_once("(fragmentation): ").unwrap_or_else(|| panic!("{text}: {advice}"));
    advice.to_owned()
}

#[test]
fn the_advice_names_settings_that_the_allocator_has() {
    for (alloc, settings) in [
        ("caching", ", or set max_split_size, or use expandable segments (pytorch-expandable)"),
        ("caching:max_split_size=32M", ", or lower max_split_size, or use expandable segments (pytorch-expandable)"),
        ("pytorch", ", or set max_split_size, or use expandable segments (pytorch-expandable)"),
        ("lab", ", or set max_split_size, or use expandable segments (source=expandable)"),
        ("lab:split=always", ", or use expandable segments (source=expandable)"),
        ("lab:stream=steal", ", or set max_split_size"),
    ] {
        assert_eq!(in_pieces(alloc, 22 * MIB), format!("allocate large tensors first{settings}"), "{alloc}");
    }
    let pool = "rmm-pool:initial_pool_size=20M,maximum_pool_size=20M";
    assert_eq!(in_pieces(pool, 64 * MIB), "allocate large tensors first");
}
