//! Plans: no two conflicting blocks overlap, none is below the bound, and few are far from it.

use crate::common::cases;
use proptest::prelude::*;
use proptest::sample::Index;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use vramlab_device::budget::Budget;
use vramlab_device::{Driver, NullDriver};
use vramlab_histories::formats::{Action, Event, ReadError, ReadOptions, read_from};
use vramlab_histories::plan::{
    CrossStream, Lifetime, NEVER, Overlap, Plan, PlanSettings, SearchEnd, lower_bound, plan,
};
use vramlab_histories::replay::{History, HistoryBuilder, ReplaySettings, replay};
use vramlab_policies::Selection;
use vramlab_policies::backends::{CachingSettings, pytorch};

/// Written from the definition, without the library's helpers.
fn conflict(lifetimes: &[Lifetime], first: usize, second: usize, cross: CrossStream) -> bool {
    let (a, b) = (&lifetimes[first], &lifetimes[second]);
    let other_stream = cross == CrossStream::KnownOrder && a.stream != b.stream;
    let from_outside = a.pool != b.pool && (a.pool > 0 || cross == CrossStream::KnownOrder);
    let end = if other_stream || from_outside { a.end.max(a.end_elsewhere) } else { a.end };
    // A block that is freed before the next allocation does not conflict with it.
    second < end as usize
}

fn settings(cross_stream: CrossStream, steps: u64) -> PlanSettings {
    PlanSettings { cross_stream, steps, seed: 7 }
}

fn made(lifetimes: &[Lifetime], cross: CrossStream, steps: u64) -> Plan {
    plan(lifetimes, &settings(cross, steps), &Budget::default(), |_, _| ()).unwrap()
}

/// Lifetimes by (units of 512 bytes, stream plus three times the private pool, allocations until the end, further ones until
/// others can reuse it).
fn lifetimes(blocks: &[(u64, u32, u32, u32)]) -> Vec<Lifetime> {
    let end = |at: u32, length: u32| if length > 40 { NEVER } else { at + 1 + length };
    (0u32..)
        .zip(blocks)
        .map(|(at, &(units, stream, length, more))| {
            let own_end = end(at, length);
            let outside_end = if more > 40 || own_end == NEVER { NEVER } else { own_end + more };
            Lifetime {
                requested: 512 * units - 11,
                stream: stream % 3,
                pool: stream / 3,
                end: own_end,
                end_elsewhere: outside_end,
            }
        })
        .collect()
}

fn blocks(most: usize) -> impl Strategy<Value = Vec<Lifetime>> {
    // Half of them outside private pools.
    let kind = prop_oneof![0..3u32, 3..9u32];
    let block = (1..60u64, kind, 0..45u32, 0..45u32);
    prop::collection::vec(block, 0..most).prop_map(|blocks| lifetimes(&blocks))
}

/// Of one stream, outside private pools.
fn of_one_group(most: usize) -> impl Strategy<Value = Vec<Lifetime>> {
    let block = (1..60u64, 0..45u32, 0..45u32);
    let blocks = prop::collection::vec(block, 0..most);
    blocks.prop_map(|blocks| {
        lifetimes(&blocks.into_iter().map(|(units, length, more)| (units, 0, length, more)).collect::<Vec<_>>())
    })
}

fn crossings() -> impl Strategy<Value = CrossStream> {
    prop_oneof![Just(CrossStream::AfterWait), Just(CrossStream::KnownOrder)]
}

/// The smallest size of any plan: some order reaches it by placing each block at its lowest possible offset.
fn fewest(lifetimes: &[Lifetime], cross: CrossStream) -> u64 {
    fn go(lifetimes: &[Lifetime], cross: CrossStream, placed: &mut Vec<(usize, u64)>, highest: u64, best: &mut u64) {
        if highest >= *best {
            return;
        }
        if placed.len() == lifetimes.len() {
            *best = highest;
            return;
        }
        for block in 0..lifetimes.len() {
            if placed.iter().any(|(other, _)| *other == block) {
                continue;
            }
            let bytes = lifetimes[block].bytes();
            let mut taken: Vec<(u64, u64)> = placed
                .iter()
                .filter(|(other, _)| conflict(lifetimes, block.min(*other), block.max(*other), cross))
                .map(|(other, offset)| (*offset, offset + lifetimes[*other].bytes()))
                .collect();
            taken.sort_unstable();
            let mut offset = 0;
            for (start, end) in taken {
                if offset + bytes <= start {
                    break;
                }
                offset = offset.max(end);
            }
            placed.push((block, offset));
            go(lifetimes, cross, placed, highest.max(offset + bytes), best);
            placed.pop();
        }
    }
    let mut best = u64::MAX;
    go(lifetimes, cross, &mut Vec::new(), 0, &mut best);
    best
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn no_two_blocks_that_conflict_overlap(lifetimes in prop_oneof![blocks(120), of_one_group(120)], cross in crossings(), steps in 0..20_000u64) {
        let plan = made(&lifetimes, cross, steps);
        prop_assert_eq!(plan.offsets.len(), lifetimes.len());
        let top = |block: usize| plan.offsets[block] + lifetimes[block].bytes();
        for second in 0..lifetimes.len() {
            prop_assert!(top(second) <= plan.bytes && plan.offsets[second].is_multiple_of(512));
            for first in 0..second {
                let disjoint = top(first) <= plan.offsets[second] || top(second) <= plan.offsets[first];
                prop_assert!(disjoint || !conflict(&lifetimes, first, second, cross), "{} and {}", first, second);
            }
        }
        prop_assert_eq!(plan.overlap(&lifetimes, cross), None);
        prop_assert!(plan.bytes >= plan.least && plan.least >= plan.lower_bound);
        prop_assert_eq!(plan.lower_bound, lower_bound(&lifetimes, cross));
        // One attempt may exceed the limit.
        prop_assert_eq!(made(&lifetimes, cross, steps), plan, "the same again");
    }

    #[test]
    fn an_overlap_is_found(lifetimes in blocks(40), cross in crossings(), at in any::<Index>(), to in any::<Index>()) {
        let mut plan = made(&lifetimes, cross, 1 << 14);
        if !lifetimes.is_empty() {
            let count = lifetimes.len();
            plan.offsets[at.index(count)] = plan.offsets[to.index(count)];
        }
        let top = |block: usize| plan.offsets[block] + lifetimes[block].bytes();
        let pairs = (0..lifetimes.len()).flat_map(|second| (0..second).map(move |first| (first, second)));
        let overlapping = |&(first, second): &(usize, usize)| {
            top(first) > plan.offsets[second]
                && top(second) > plan.offsets[first]
                && conflict(&lifetimes, first, second, cross)
        };
        let expected: Vec<(usize, usize)> = pairs.filter(overlapping).collect();
        let reported = plan.overlap(&lifetimes, cross).map(|Overlap { first, second }| (first as usize, second as usize));
        prop_assert_eq!(reported.is_some(), !expected.is_empty());
        prop_assert!(reported.is_none_or(|pair| expected.contains(&pair)));
    }
}

proptest! {
    #![proptest_config(cases(150))]

    #[test]
    fn small_plans_are_as_small_as_can_be(lifetimes in prop_oneof![blocks(9), of_one_group(9)], cross in crossings()) {
        let (fewest, plan) = (fewest(&lifetimes, cross), made(&lifetimes, cross, 200_000));
        let fewest = if lifetimes.is_empty() { 0 } else { fewest };
        prop_assert!(plan.lower_bound <= fewest, "{} is no bound: {} will do", plan.lower_bound, fewest);
        prop_assert_eq!(plan.bytes, fewest);
        prop_assert!(plan.least <= fewest, "{} is not the least: {} will do", plan.least, fewest);
    }

    #[test]
    fn plans_of_one_stream_are_proved_to_be_the_best(lifetimes in of_one_group(9)) {
        let plan = made(&lifetimes, CrossStream::AfterWait, 200_000);
        prop_assert_eq!(plan.least, plan.bytes);
    }
}

/// MiniMalloc's published instances (<https://github.com/google/minimalloc>, benchmarks of ASPLOS 2024), which are under the Apache
/// License 2.0; the archive has its text. Each fits into 1,048,576 bytes.
#[test]
fn published_minimalloc_instances_are_solved() {
    let packed = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/minimalloc.tar.xz");
    let mut archive = tar::Archive::new(liblzma::read::XzDecoder::new(File::open(packed).unwrap()));
    let mut planned = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().into_owned();
        if path.extension().is_none_or(|extension| extension != "csv") {
            continue;
        }
        let mut text = Vec::new();
        entry.read_to_end(&mut text).unwrap();
        let mut builder = HistoryBuilder::new(None);
        let mut push = |event: Event| builder.push(&event).map_err(ReadError::stop);
        read_from(Box::new(&text[..]), &ReadOptions::default(), &mut push).unwrap();
        let lifetimes = builder.finish(&CachingSettings::default()).unwrap().lifetimes();
        let plan = made(&lifetimes, CrossStream::AfterWait, PlanSettings::MOST_STEPS);
        assert_eq!(plan.overlap(&lifetimes, CrossStream::AfterWait), None);
        planned.push((path.file_stem().unwrap().to_str().unwrap().to_owned(), plan));
    }
    assert_eq!(planned.len(), 11);
    for (name, plan) in planned {
        assert!(plan.bytes <= 1 << 20, "{name}: {plan}");
    }
}

#[test]
fn search_stops_at_its_step_limit() {
    // Random lifetimes and sizes over eleven doublings: best fit leaves gaps, and the bound is not reached immediately.
    let blocks: Vec<(u64, u32, u32, u32)> = (0..400u64)
        .map(|at| ((1 << (at * 7919 % 11)) + at % 7, 0, u32::try_from(at * 104_729 % 31).unwrap(), 0))
        .collect();
    let lifetimes = lifetimes(&blocks);
    let mut heard = Vec::new();
    let listen = |steps, bytes| heard.push((steps, bytes));
    let planned = plan(&lifetimes, &settings(CrossStream::AfterWait, 600_000), &Budget::default(), listen).unwrap();
    assert!(planned.bytes > planned.lower_bound, "the bound was reached: {planned}");
    assert!((600_000..610_000).contains(&planned.steps), "{}", planned.steps);
    assert_eq!(heard.last(), Some(&(planned.steps, planned.bytes)));
    assert!(heard.windows(2).all(|pair| pair[0].0 <= pair[1].0 && pair[0].1 >= pair[1].1));
    assert_eq!(planned.end, SearchEnd::Steps);
    let first = made(&lifetimes, CrossStream::AfterWait, 0);
    assert!(planned.bytes < first.bytes, "searching is worth it: {planned} after {first}");
    assert!(planned.gap() < 0.02, "{planned}");
}

/// Training steps of a network with this many layers: activations that are freed in reverse order, gradients until the step ends,
/// and temporary blocks.
fn training(layers: usize, seed: u64) -> Vec<Lifetime> {
    const KIB: u64 = 1 << 10;
    let choices = [2, 160, 800, 1300, 5 << 10, 6 << 10, 13 << 10, 20 << 10, 39 << 10].map(|kib| kib * KIB);
    let mut state = seed;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    let sizes: Vec<u64> = (0..14).map(|_| choices[random(9)] + 512 * random(200) as u64).collect();
    let mut made: Vec<Lifetime> = Vec::new();
    let alloc = |made: &mut Vec<Lifetime>, requested| {
        made.push(Lifetime { requested, stream: 0, pool: 0, end: NEVER, end_elsewhere: NEVER });
        made.len() - 1
    };
    let free = |made: &mut Vec<Lifetime>, block: usize| {
        let now = u32::try_from(made.len()).unwrap();
        (made[block].end, made[block].end_elsewhere) = (now, now);
    };
    for _ in 0..layers {
        sizes[..5].iter().for_each(|size| {
            alloc(&mut made, *size);
        });
    }
    for _ in 0..3 {
        let (mut saved, mut gradients) = (Vec::new(), Vec::new());
        for _ in 0..layers {
            for &size in &sizes {
                let beside: Vec<usize> = (0..random(3)).map(|_| alloc(&mut made, sizes[random(14)])).collect();
                saved.push(alloc(&mut made, size));
                beside.into_iter().for_each(|block| free(&mut made, block));
            }
        }
        while let Some(block) = saved.pop() {
            let beside: Vec<usize> = (0..random(3)).map(|_| alloc(&mut made, sizes[random(14)])).collect();
            if random(3) == 0 {
                gradients.push(alloc(&mut made, sizes[random(5)]));
            }
            free(&mut made, block);
            beside.into_iter().for_each(|block| free(&mut made, block));
        }
        gradients.into_iter().for_each(|block| free(&mut made, block));
    }
    made
}

#[test]
fn exact_search_takes_kilobytes_for_each_block() {
    for (layers, seed) in [(16, 3), (24, 5)] {
        let lifetimes = training(layers, seed);
        let budget = Budget::default();
        let settings = settings(CrossStream::AfterWait, 1 << 22);
        let planned = plan(&lifetimes, &settings, &budget, |_, _| ()).unwrap();
        let each = budget.peak() / lifetimes.len() as u64;
        assert!(each < 16 << 10, "{each} bytes for each of {} blocks", lifetimes.len());
        assert!(planned.steps < settings.steps + (1 << 16), "{} steps", planned.steps);
        assert_eq!(budget.held(), 0);
    }
}

#[test]
fn search_out_of_memory_returns_the_best_plan_so_far() {
    let of_streams =
        |(at, lifetime): (usize, Lifetime)| Lifetime { stream: u32::try_from(at % 3).unwrap(), ..lifetime };
    let one_group = training(12, 1);
    let groups: Vec<Lifetime> = one_group.iter().copied().enumerate().map(of_streams).collect();
    for (lifetimes, cross) in [(one_group, CrossStream::AfterWait), (groups, CrossStream::KnownOrder)] {
        let at_first = plan(&lifetimes, &settings(cross, 0), &Budget::default(), |_, _| ()).unwrap();
        let (mut refused, mut ended) = (0, 0);
        for power in 10..28 {
            let budget = Budget::new(1 << power);
            let Ok(planned) = plan(&lifetimes, &settings(cross, 1 << 21), &budget, |_, _| ()) else {
                refused += 1;
                continue;
            };
            assert!(budget.peak() <= budget.limit() && budget.held() == 0);
            assert_eq!(planned.overlap(&lifetimes, cross), None);
            assert!((planned.lower_bound..=at_first.bytes).contains(&planned.bytes));
            ended += u32::from(planned.end == SearchEnd::Memory);
        }
        assert!(refused > 0 && ended > 0, "{refused} and {ended}");
        let plan = made(&lifetimes, cross, 1 << 21);
        assert!(plan.end != SearchEnd::Memory && plan.bytes < at_first.bytes);
    }
}

#[test]
fn streams_share_memory_only_in_known_order() {
    let block = |stream, end, end_elsewhere| Lifetime { requested: 1 << 20, stream, pool: 0, end, end_elsewhere };
    let lifetimes = [block(0, 1, NEVER), block(1, 2, NEVER), block(0, NEVER, NEVER)];
    assert_eq!(made(&lifetimes, CrossStream::AfterWait, 1000).bytes, 1 << 20);
    let plan = made(&lifetimes, CrossStream::KnownOrder, 1000);
    assert_eq!((plan.bytes, plan.lower_bound), (2 << 20, 2 << 20));
    assert_eq!(plan.offsets[0], plan.offsets[2], "its own stream reuses it immediately");
}

#[test]
fn private_pool_keeps_its_memory_until_its_release() {
    let block = |pool, end, end_elsewhere| Lifetime { requested: 1 << 20, stream: 0, pool, end, end_elsewhere };
    for cross in [CrossStream::AfterWait, CrossStream::KnownOrder] {
        let blocks = [block(1, 1, 3), block(0, 2, 2), block(1, 3, 3), block(0, 4, 4)];
        let plan = made(&blocks, cross, 1000);
        assert_eq!((plan.bytes, plan.lower_bound), (2 << 20, 2 << 20));
        assert_eq!(plan.offsets[0], plan.offsets[2], "its own pool reuses it immediately");
        let released = [block(1, 1, 1), blocks[1]];
        assert_eq!(made(&released, cross, 1000).bytes, 1 << 20);
    }
}

/// The lifetimes of a recording as (bytes, stream, end, end elsewhere).
fn lifetimes_of(events: &[Event]) -> Vec<(u64, u32, u32, u32)> {
    let mut builder = HistoryBuilder::new(None);
    events.iter().try_for_each(|event| builder.push(event)).unwrap();
    let history = builder.finish(&CachingSettings::default()).unwrap();
    let lifetimes = history.lifetimes();
    assert_eq!(lifetimes.len() as u64, history.allocations());
    lifetimes.iter().map(|life| (life.bytes(), life.stream, life.end, life.end_elsewhere)).collect()
}

fn event(action: Action, block: u64, bytes: u64, stream: u64) -> Event {
    Event { action, device: 0, addr: block << 20, bytes, stream, time_ns: 0 }
}

#[test]
fn lifetimes_follow_from_the_recording() {
    use Action::{Alloc, FreeCompleted, FreeRequested, Oom};
    let events = [
        // From before recording started: active from the beginning.
        event(FreeRequested, 1, 900, 0),
        event(FreeCompleted, 1, 900, 0),
        event(Alloc, 2, 100, 0), // 1
        event(Alloc, 3, 512, 9), // 2
        event(Alloc, 9, 0, 0),   // an empty tensor needs nothing
        event(FreeRequested, 2, 100, 0),
        event(FreeCompleted, 2, 100, 0),
        event(FreeRequested, 3, 512, 9), // stream 0 uses it, too
        event(Oom, 0, 1 << 40, 0),
        event(Alloc, 4, 513, 0), // 3
        event(FreeRequested, 4, 513, 0),
        event(FreeCompleted, 4, 513, 0),
        event(FreeCompleted, 3, 512, 9), // all that stream 0 was given before that free is over
        event(Alloc, 5, 1, 9),           // 4
        event(FreeRequested, 5, 1, 9),   // never completes
    ];
    assert_eq!(
        lifetimes_of(&events),
        [(1024, 0, 1, 4), (512, 0, 3, 4), (512, 1, 4, NEVER), (1024, 0, 4, NEVER), (512, 1, NEVER, NEVER)]
    );
}

#[test]
fn log_without_completions_shows_no_stream_order() {
    use Action::{Alloc, FreeRequested, RecordUse};
    let events = [
        event(Alloc, 1, 512, 1),
        event(RecordUse, 1, 0, 2),
        event(FreeRequested, 1, 512, 1),
        event(Alloc, 1, 512, 1),
        event(Alloc, 2, 512, 2),
    ];
    assert_eq!(lifetimes_of(&events), [(512, 0, 1, NEVER), (512, 0, NEVER, NEVER), (512, 1, NEVER, NEVER)]);
}

#[test]
fn immediate_completions_need_less_memory() {
    use Action::{Alloc, FreeCompleted, FreeRequested};
    let events = [
        event(Alloc, 1, 1 << 20, 0),
        event(FreeRequested, 1, 1 << 20, 0), // another stream uses it
        event(Alloc, 2, 1 << 20, 0),
        event(FreeRequested, 2, 1 << 20, 0),
        event(FreeCompleted, 2, 1 << 20, 0),
        event(FreeCompleted, 1, 1 << 20, 0),
        event(Alloc, 3, 1 << 20, 0),
    ];
    let mut builder = HistoryBuilder::new(None);
    events.iter().try_for_each(|event| builder.push(event)).unwrap();
    let mut history = builder.finish(&CachingSettings::default()).unwrap();
    let active = |history: &History| {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 30));
        let report = replay(history, &Selection::of(&pytorch::BACKEND), &driver, &ReplaySettings::default()).unwrap();
        (
            report.stats.active_bytes.all.peak,
            lower_bound(&history.lifetimes(), CrossStream::AfterWait),
            report.operations,
        )
    };
    assert_eq!((active(&history), history.deferred_frees()), ((2 << 20, 2 << 20, 5), 1));
    history.complete_at_once();
    // The first block is free when the second one is allocated.
    assert_eq!((active(&history), history.deferred_frees()), ((1 << 20, 1 << 20, 5), 0));
    assert_eq!(history.lifetimes()[0].end, 1);
    assert!(history.check_comparable().is_err());
}
