//! The backend `plan`: a repeating program gets its planned addresses, and any other is served all the same.

use crate::common::{GIB, MIB, allocate, cases, check_nothing_held, checker, free, ready_ns, sim, work};
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;
use vramlab_device::budget::Budget;
use vramlab_device::{Driver, NullDriver, StreamId, sim::SimMemory};
use vramlab_histories::plan::{CrossStream, Lifetime, NEVER, plan as search};
use vramlab_policies::backends::{PlanFile, PlanSettings, plan};
use vramlab_policies::{AllocError, Block, DeviceAllocator, Path, Selection};

/// A plan in a file, and the allocator that uses it.
struct Followed {
    _folder: tempfile::TempDir,
    settings: PlanSettings,
}

impl Followed {
    fn new(table: &plan::PlanTable) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file: PathBuf = folder.path().join("plan.json");
        std::fs::write(&file, table.to_json()).unwrap();
        Self { _folder: folder, settings: PlanSettings { file: PlanFile(Some(file)), ..PlanSettings::default() } }
    }

    fn build(&self, driver: &Arc<dyn Driver>) -> Arc<dyn DeviceAllocator> {
        Selection::with(&plan::BACKEND, &self.settings).build(driver).unwrap()
    }
}

/// Number of requests that were served as planned, and of others.
fn served(allocator: &dyn DeviceAllocator) -> (u64, u64) {
    let stats = allocator.stats();
    (stats.num_planned.unwrap(), stats.num_unplanned.unwrap())
}

fn reserved(allocator: &dyn DeviceAllocator) -> u64 {
    allocator.stats().reserved_bytes.all.peak
}

/// Operations of a program: a block of this many units on a stream, possibly used by another one, freed after this many more.
#[derive(Clone, Debug)]
struct Step {
    bytes: u64,
    stream: usize,
    user: Option<usize>,
    keep: usize,
}

fn programs(most: usize) -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![3 => 1..4000u64, 2 => 1 << 16..1u64 << 18, 1 => Just(2 * MIB)];
    let step = (bytes, 0..3usize, prop::option::weighted(0.2, 0..3usize), 0..12usize);
    let step = step.prop_map(|(bytes, stream, user, keep)| Step { bytes, stream, user, keep });
    prop::collection::vec(step, 1..most)
}

fn planned(program: &[Step], cross_stream: CrossStream) -> plan::PlanTable {
    let lifetimes: Vec<Lifetime> = (0u32..)
        .zip(program)
        .map(|(at, step)| {
            let end = at + 1 + u32::try_from(step.keep).unwrap();
            let stream = u32::try_from(step.stream).unwrap();
            // No event shows when other streams are done.
            Lifetime { requested: step.bytes, stream, pool: 0, end, end_elsewhere: NEVER }
        })
        .collect();
    let settings = vramlab_histories::plan::PlanSettings { cross_stream, steps: 20_000, seed: 0 };
    search(&lifetimes, &settings, &Budget::default(), |_, _| ()).unwrap().table(&lifetimes)
}

/// Runs a program and frees the remaining blocks.
fn run(
    program: &[Step],
    allocator: &dyn DeviceAllocator,
    streams: &[StreamId],
    device: Option<&vramlab_device::SimDriver>,
) {
    let mut live: Vec<(usize, Block, StreamId)> = Vec::new();
    for (at, step) in program.iter().enumerate() {
        let (ended, left) = live.into_iter().partition(|(end, ..)| *end <= at);
        live = left;
        let ended: Vec<(usize, Block, StreamId)> = ended;
        ended.into_iter().for_each(|(_, block, stream)| {
            free(allocator, block, stream).unwrap();
        });
        let stream = streams[step.stream];
        let block = allocate(allocator, step.bytes, stream).unwrap();
        if let Some(user) = step.user {
            allocator.record_use(&block, streams[user]).unwrap();
        }
        if let Some(device) = device {
            work(device, stream, 1000);
        }
        live.push((at + 1 + step.keep, block, stream));
    }
    for (_, block, stream) in live {
        free(allocator, block, stream).unwrap();
    }
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn repeated_program_needs_its_planned_memory(program in programs(60), known_order in any::<bool>()) {
        let cross = if known_order { CrossStream::KnownOrder } else { CrossStream::AfterWait };
        let table = planned(&program, cross);
        let followed = Followed::new(&table);
        // Events complete immediately here, as the lifetimes above assume.
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 40));
        let streams = [(); 3].map(|()| driver.stream_create().unwrap());
        let allocator = followed.build(&driver);
        let allocator = allocator.as_ref();
        for round in 1..3 {
            run(&program, allocator, &streams, None);
            prop_assert_eq!(served(allocator), (round * program.len() as u64, 0));
            prop_assert_eq!(reserved(allocator), table.bytes);
        }
        // The arena is released when it is empty, and allocated again.
        allocator.trim(0).unwrap();
        check_nothing_held(&allocator.stats());
        run(&program, allocator, &streams, None);
        prop_assert_eq!((served(allocator).1, reserved(allocator)), (0, table.bytes));
    }

    #[test]
    fn another_program_gets_memory_of_its_own(
        program in programs(60), other in programs(60), edits in prop::collection::vec((0..60usize, 0..4u8), 0..8),
    ) {
        let followed = Followed::new(&planned(&program, CrossStream::AfterWait));
        let device = sim(GIB, SimMemory::Host);
        let driver: Arc<dyn Driver> = device.clone();
        let streams = [(); 3].map(|()| driver.stream_create().unwrap());
        // The checker refuses blocks that overlap.
        let allocator = checker(followed.build(&driver), Arc::clone(&driver));
        let mut edited = program.clone();
        for (at, edit) in edits {
            let at = at % edited.len();
            match edit {
                0 if edited.len() > 1 => drop(edited.remove(at)),
                1 => edited[at].bytes += 512,
                2 => edited[at].keep += 9,
                _ => edited.insert(at, other[at % other.len()].clone()),
            }
        }
        for program in [&edited, &other, &program] {
            run(program, &allocator, &streams, Some(&device));
        }
        let (planned, elsewhere) = served(&allocator);
        prop_assert_eq!(planned + elsewhere, (edited.len() + other.len() + program.len()) as u64);
        allocator.trim(0).unwrap();
        check_nothing_held(&allocator.stats());
    }
}

/// Two streams; the second gets memory of the first.
fn handed_over(wait: bool, pause: bool) -> (Path, u64, (u64, u64)) {
    let table = plan::PlanTable::new(2 * MIB, vec![(2 * MIB, 0, 0), (2 * MIB, 1, 0)]);
    let mut followed = Followed::new(&table);
    followed.settings.wait = wait;
    let device = sim(GIB, SimMemory::None);
    let driver: Arc<dyn Driver> = device.clone();
    let [first, second] = [(); 2].map(|()| driver.stream_create().unwrap());
    let allocator = followed.build(&driver);
    let block = allocate(allocator.as_ref(), 2 * MIB, first).unwrap();
    let addr = block.addr();
    work(&device, first, 1_000_000);
    free(allocator.as_ref(), block, first).unwrap();
    if pause {
        driver.device_synchronize().unwrap();
    }
    let block = allocate(allocator.as_ref(), 2 * MIB, second).unwrap();
    let (path, same) = (block.path(), block.addr() == addr);
    let (waits, over) = (ready_ns(&device, second) >= ready_ns(&device, first), served(allocator.as_ref()));
    assert_eq!(same, over.1 == 0);
    assert!(!same || pause || waits, "the second stream has to wait for the first");
    free(allocator.as_ref(), block, second).unwrap();
    (path, reserved(allocator.as_ref()), over)
}

#[test]
fn stream_waits_for_the_previous_owner_of_its_memory() {
    assert_eq!(handed_over(true, false), (Path::WaitInserted, 2 * MIB, (2, 0)));
    assert_eq!(handed_over(true, true), (Path::Hit, 2 * MIB, (2, 0)), "nobody waits for what is over");
    let (path, reserved, counts) = handed_over(false, false);
    assert_eq!((path, counts), (Path::DriverAlloc, (1, 1)), "not planned for: {reserved}");
    assert_eq!(handed_over(false, true), (Path::Hit, 2 * MIB, (2, 0)));
}

#[test]
fn plan_without_room_for_its_arena_still_serves() {
    let table = plan::PlanTable::new(64 * MIB, vec![(1000, 0, 0), (2000, 0, 1024), (1000, 0, 0)]);
    let followed = Followed::new(&table);
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(32 * MIB));
    let stream = driver.stream_create().unwrap();
    let allocator = followed.build(&driver);
    for bytes in [1000, 2000] {
        let block = allocate(allocator.as_ref(), bytes, stream).unwrap();
        free(allocator.as_ref(), block, stream).unwrap();
    }
    assert_eq!((served(allocator.as_ref()), reserved(allocator.as_ref())), ((0, 2), 2 * MIB));
    let error = allocate(allocator.as_ref(), GIB, stream).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains("'plan'"), "{error}");
}

#[test]
fn unreadable_plan_is_one_line() {
    let chosen: Selection = "plan:file=/nowhere/plan.json".parse().unwrap();
    assert_eq!(chosen.to_string(), "plan:file=/nowhere/plan.json");
    let error = chosen.check().unwrap_err().to_string();
    assert!(error.contains("/nowhere/plan.json") && !error.contains('\n'), "{error}");
    let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(MIB));
    assert!(matches!(chosen.build(&driver), Err(AllocError::File { allocator: "plan", .. })));
    let stats = Selection::of(&plan::BACKEND).build(&driver).unwrap().stats();
    assert_eq!((stats.num_planned, stats.num_unplanned), (None, None), "nothing is counted without a plan");
}
