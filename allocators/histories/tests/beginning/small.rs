//! Initial states small enough to infer by hand.

use super::{run, run_on};
use vramlab_histories::formats::{Action, Event, Segment, SegmentBlock};
use vramlab_histories::replay::{Addresses, History, HistoryBuilder};
use vramlab_policies::BlockState;
use vramlab_policies::PoolKind;
use vramlab_policies::backends::{CachingSettings, caching, pytorch};

const MIB: u64 = 1 << 20;
/// Address of the tests' segment.
const BASE: u64 = 64 * MIB;

fn event(action: Action, addr: u64, bytes: u64) -> Event {
    Event { action, device: 0, addr, bytes, stream: 0, time_ns: 0 }
}

fn free(addr: u64, bytes: u64) -> [Event; 2] {
    [Action::FreeRequested, Action::FreeCompleted].map(|action| event(action, addr, bytes))
}

fn alloc(addr: u64, bytes: u64) -> Event {
    event(Action::Alloc, addr, bytes)
}

/// A segment of 20 MiB with blocks of these sizes in KiB; negative ones are free.
fn segment(sizes: &[i64]) -> Segment {
    let mut address = BASE;
    let mut block = |kib: i64| {
        let size = kib.unsigned_abs() << 10;
        let state = if kib < 0 { BlockState::Free } else { BlockState::Allocated };
        address += size;
        SegmentBlock { address: address - size, size, requested_size: size, state }
    };
    Segment {
        address: BASE,
        total_size: 20 * MIB,
        segment_type: PoolKind::Large,
        blocks: sizes.iter().map(|kib| block(*kib)).collect(),
        ..Segment::default()
    }
}

fn compile(events: &[Event], segments: &[Segment]) -> History {
    let mut builder = HistoryBuilder::new(None);
    events.iter().for_each(|event| builder.push(event).unwrap());
    builder.ends_with(segments).unwrap();
    builder.finish(&CachingSettings::default()).unwrap()
}

fn moved(history: &History) -> (Option<u64>, Option<u64>) {
    let report = run(history, CachingSettings::default(), Addresses::Recorded);
    (report.address_mismatches, report.segment_mismatches)
}

#[test]
fn a_gap_of_a_private_pool_serves_only_that_pool() {
    // Initially: 4 MiB of a private pool active and 16 MiB free.
    let other = BASE + 512 * MIB;
    let events = [
        event(Action::SegmentAlloc, other, 20 * MIB),
        alloc(other, 6 * MIB),
        // The graph is captured again.
        alloc(BASE + 4 * MIB, 5 * MIB),
    ];
    let moved = |names: [Option<(u64, u64)>; 2]| {
        let mut segments = [segment(&[4096, 5120, -11264]), segment(&[6144, -14336])];
        segments[1].address = other;
        let mut at = other;
        for block in &mut segments[1].blocks {
            (block.address, at) = (at, at + block.size);
        }
        segments.iter_mut().zip(names).for_each(|(segment, name)| segment.pool_id = name);
        let history = compile(&events, &segments);
        let pools = (history.private_pools(), history.private_pool_allocations());
        let reports = [&caching::BACKEND, &pytorch::BACKEND]
            .map(|backend| run_on(backend, &history, CachingSettings::default(), Addresses::Recorded));
        (pools, history.undetermined_pool_allocations(), reports.map(|report| report.address_mismatches.unwrap()))
    };
    assert_eq!(moved([Some((0, 1)), Some((0, 0))]), ((1, 1), 0, [0, 0]));
    assert_eq!(moved([None, None]), ((0, 0), 0, [2, 2]), "without names the gap serves anybody");
}

#[test]
fn gap_below_1_mib_belongs_to_the_block_before_it() {
    // Initially: 4 MiB active, 512 KiB unknown, 15.5 MiB active to the end.
    let mut events = free(BASE, 4 * MIB).to_vec();
    events.push(alloc(BASE, 4 * MIB + (400 << 10)));
    let history = compile(&events, &[segment(&[4608, 15872])]);
    assert_eq!((history.prologue_allocations(), history.undetermined_blocks()), (2, 0));
    assert_eq!(history.prologue_segments(), (1, 20 * MIB));
    assert_eq!(moved(&history), (Some(0), Some(0)));
    let report = run(&history, CachingSettings::default(), Addresses::Recorded);
    assert_eq!(report.stats.allocated_bytes.all.peak, 20 * MIB, "the gap is a part of the block");
}

#[test]
fn first_block_in_a_gap_shows_the_end_of_the_previous_one() {
    // Initially: 4 MiB active, 6 MiB unknown, 10 MiB active to the end.
    let extra = 700 << 10;
    let mut events = vec![alloc(BASE + 4 * MIB + extra, 2 * MIB)];
    events.extend(free(BASE, 4 * MIB));
    let history = compile(&events, &[segment(&[-4796, 2048, -3396, 10240])]);
    assert_eq!((history.undetermined_blocks(), moved(&history)), (0, (Some(0), Some(0))));
}

#[test]
fn request_that_skips_a_gap_shows_its_size() {
    // Initially: 4 MiB active, 3 MiB unknown, 3 MiB active, 10 MiB free. A request of 2.5 MiB goes to the larger gap, so the
    // other one has less room than that.
    let mut events = vec![alloc(BASE + 10 * MIB, 5 * MIB / 2)];
    events.extend(free(BASE, 4 * MIB));
    let end = [segment(&[-7168, 3072, 2560, -7680])];
    let history = compile(&events, &end);
    assert_eq!((history.undetermined_blocks(), moved(&history)), (1, (Some(0), Some(0))));
    // A placement in the smaller one would have shown nothing.
    let mut events = vec![alloc(BASE + 4 * MIB, 5 * MIB / 2)];
    events.extend(free(BASE, 4 * MIB));
    let history = compile(&events, &[segment(&[-4096, 3072, 3072, -10240])]);
    assert_eq!((history.undetermined_blocks(), moved(&history)), (0, (Some(0), Some(0))));
}

#[test]
fn pending_free_keeps_its_block_until_completion() {
    // Initially: 4 MiB pending, 16 MiB active. Requests in the meantime need another segment.
    let mut events = vec![
        event(Action::SegmentAlloc, 128 * MIB, 20 * MIB),
        alloc(128 * MIB, 3 * MIB),
        event(Action::FreeCompleted, BASE, 4 * MIB),
        alloc(BASE, 3 * MIB),
    ];
    events.extend(free(BASE, 3 * MIB));
    let mut other = segment(&[3072, -17408]);
    other.address = 128 * MIB;
    other.blocks.iter_mut().for_each(|block| block.address += 64 * MIB);
    let history = compile(&events, &[segment(&[-4096, 16384]), other]);
    assert_eq!((history.prologue_allocations(), moved(&history)), (2, (Some(0), Some(0))));
}

#[test]
fn contradictory_end_is_not_used() {
    let events = [free(BASE, 4 * MIB).to_vec(), vec![alloc(BASE, 4 * MIB)]].concat();
    let refusal = |segments: &[Segment]| {
        let history = compile(&events, segments);
        assert_eq!((history.prologue_allocations(), history.prologue_segments()), (1, (0, 0)));
        assert!(run(&history, CachingSettings::default(), Addresses::Own).failed_allocations == 0);
        history.check_comparable().unwrap_err().to_string()
    };
    let overlap = [segment(&[4096, -16384]), segment(&[4096, -16384])];
    for segments in [&[segment(&[-20480])][..], &overlap, &[segment(&[8192, 8192, 8192])]] {
        let text = refusal(segments);
        assert!(text.contains("contradict its events"), "{text}");
    }
    let events = free(BASE / 2, 4 * MIB);
    let text = compile(&events, &[segment(&[-20480])]).check_comparable().unwrap_err().to_string();
    assert!(text.contains("the block at 0x2000000 is outside every known segment"), "{text}");
}
