//! The recorded memory is PyTorch's: in every recording each block has the size of PyTorch's policy, sums and peaks are PyTorch's
//! statistics, and the final state is the snapshot's.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "common/facts.rs"]
mod facts;
#[path = "../../device/tests/common/trials.rs"]
mod trials;

use facts::{facts, limit};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use trials::trial;
use vramlab_device::budget::Budget;
use vramlab_device::{Driver, NullDriver};
use vramlab_histories::formats::{Action, Event, Origins, ReadError, ReadOptions, Segment, Summary, read_origins};
use vramlab_histories::memory::{Events, InitialState, Levels, Memory, Pool, RecordedEvent, Rules, Totals};
use vramlab_histories::replay::{
    Addresses, HistoryBuilder, ReplaySettings, Watched, recorded_settings, replay_watched,
};
use vramlab_policies::backends::{CachingSettings, parse_list};
use vramlab_policies::contract::BlockState;

/// Directories next to the checkout, which may be absent.
const BESIDE: [&str; 3] = ["traces", "traces/configs", "traces/heldout"];

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let repository =
        ["experiments/histories", "allocators/histories/tests/fixtures"].map(|directory| root.join(directory));
    let mut tests = Vec::new();
    for directory in repository {
        tests.extend(histories(&directory).into_iter().map(|path| trial(name(&path), None, move || check(&path))));
    }
    assert!(tests.len() >= 15, "the repository has more histories than {}", tests.len());
    for directory in BESIDE {
        let path = root.join("../shared").join(directory);
        match path.is_dir() {
            true => {
                let recordings = histories(&path).into_iter();
                tests.extend(
                    recordings.map(|path| trial(format!("shared/{}", name(&path)), None, move || check(&path))),
                );
            }
            false => tests.push(trial(format!("shared/{directory}"), Some("not beside the checkout"), || {
                panic!("there are no histories beside the checkout");
            })),
        }
    }
    tests.push(trial("initial_state_is_inferred_from_the_end", None, initial_state_is_inferred_from_the_end));
    tests.push(trial("mapped_memory_is_of_the_pool_that_the_end_shows", None, mapped_memory_is_of_the_pool_of_the_end));
    trials::run(tests)
}

fn histories(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = files.filter(|path| facts(path).is_some()).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().trim_end_matches(".pickle.xz").to_owned()
}

/// A recording in memory.
struct History {
    device: u16,
    events: Events,
    summary: Summary,
    origins: Origins,
    settings: CachingSettings,
    rules: Rules,
    builder: HistoryBuilder,
    levels: Levels,
}

impl History {
    fn read(path: &Path, facts: &Value, from: u64) -> Self {
        let device = u16::try_from(facts["rank"].as_u64().unwrap_or(0)).unwrap();
        let (mut events, mut builder) = (Events::new(&Budget::default()), HistoryBuilder::new(Some(device)));
        let mut levels = Levels::new(Some(device));
        let mut number = 0;
        let (summary, origins) = read_origins(path, &ReadOptions::default(), &mut |event, origin, _| {
            number += 1;
            if event.device != device || number <= from {
                return Ok(());
            }
            levels.take(&event);
            let Event { action, addr, bytes, stream, time_ns, .. } = event;
            events.push(RecordedEvent { addr, bytes, stream, time_ns, origin, action }).map_err(ReadError::stop)?;
            builder.push(&event).map_err(ReadError::stop)
        })
        .unwrap();
        let mut settings = recorded_settings(&summary.allocator_settings).unwrap();
        settings.memory_limit = limit(facts);
        let rules = Rules::new(&summary, device, &settings);
        builder.ends_with(&summary.segments).unwrap();
        let pending = summary.segments.iter().flat_map(|segment| &segment.blocks);
        if pending.into_iter().any(|block| block.state == BlockState::PendingFree) {
            events.waits_at_end();
        }
        Self { device, events, summary, origins, settings, rules, builder, levels }
    }

    fn beginning(&self) -> (InitialState, Memory) {
        let before = InitialState::new(&self.events, &self.rules, &self.summary, &self.origins, self.device);
        let memory = Memory::beginning(self.rules.clone(), &before, &Budget::default()).unwrap();
        (before, memory)
    }
}

/// A sum of PyTorch's statistics: `current`, `peak` and `allocated`.
#[derive(Default)]
struct Gauge {
    current: u64,
    peak: u64,
    allocated: u64,
}

impl Gauge {
    fn set(&mut self, now: u64) {
        self.allocated += now.saturating_sub(self.current);
        self.peak = self.peak.max(now);
        self.current = now;
    }
}

fn check(path: &Path) {
    let facts = facts(path).unwrap();
    let history = History::read(path, &facts, 0);
    let (before, mut memory) = history.beginning();
    assert!(before.blocks.is_empty() && before.segments.is_empty(), "it is whole");
    let [mut reserved, mut active, mut allocated] = [(); 3].map(|()| Gauge::default());
    let mut sizes = Vec::new();
    for (index, event, at_once) in history.events.walk(0) {
        memory.apply(&event, u32::try_from(index).unwrap(), at_once).unwrap();
        let totals = memory.totals();
        reserved.set(totals.reserved);
        active.set(totals.active);
        allocated.set(totals.allocated());
        if event.action == Action::Alloc {
            sizes.push(memory.blocks()[&event.addr].bytes);
        }
        // Checking every event of a long recording would take long.
        if index < 200 || index % 997 == 0 {
            adds_up(&memory);
        }
    }
    let stats = facts.get("stats").unwrap_or(&facts);
    for (name, gauge) in [("reserved_bytes", &reserved), ("active_bytes", &active), ("allocated_bytes", &allocated)] {
        let known = |key: &str, actual: u64| {
            if let Some(expected) = stats[format!("{name}.all.{key}")].as_u64() {
                assert_eq!(actual, expected, "{name}.{key}");
            }
        };
        known("current", gauge.current);
        known("peak", gauge.peak);
        known("allocated", gauge.allocated);
    }
    let peaks = history.levels.peaks(&history.summary).unwrap();
    assert_eq!(peaks.reserved, reserved.peak, "counted back from the end");
    let ending = history.summary.ending().unwrap().iter().filter(|segment| segment.device == history.device);
    assert_eq!(listed(memory.snapshot(history.device)), listed(ending.cloned().collect()), "at the end");
    assert_eq!(sizes, sizes_of_policy(history), "sizes of blocks in the order of their allocation");
}

/// The size of each block under PyTorch's policy, which reproduces all recorded addresses.
fn sizes_of_policy(history: History) -> Vec<u64> {
    let compiled = history.builder.finish(&history.settings).unwrap();
    let how = ReplaySettings { addresses: Addresses::Recorded, ..ReplaySettings::default() };
    for mut policy in parse_list("pytorch,pytorch-expandable").unwrap() {
        policy.adopt(&history.settings);
        policy.set_memory_limit(history.settings.memory_limit);
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 62));
        let mut watched = Watched::default();
        let report = replay_watched(&compiled, &policy, &driver, &how, &mut watched).unwrap();
        if report.address_mismatches == Some(0) && report.segment_mismatches.unwrap_or(0) == 0 {
            let served = watched.places.into_iter().filter(|place| place.bytes > 0);
            return served.map(|place| place.bytes).collect();
        }
    }
    panic!("no policy of PyTorch puts every block where it was recorded");
}

/// A segment for comparison: address, bytes, stream, whether it is expandable, and its blocks.
type Listed = (u64, u64, u64, bool, Vec<(u64, u64, BlockState)>);

fn listed(segments: Vec<Segment>) -> Vec<Listed> {
    let mut out: Vec<Listed> = segments
        .into_iter()
        .map(|segment| {
            let blocks = segment.blocks.iter().map(|block| (block.address, block.size, block.state)).collect();
            (segment.address, segment.total_size, segment.stream, segment.is_expandable, blocks)
        })
        .collect();
    out.sort_unstable_by_key(|(address, ..)| *address);
    out
}

/// Sums match the blocks, and blocks and free ranges fill the segments.
fn adds_up(memory: &Memory) {
    let mut totals = Totals::default();
    for block in memory.blocks().values() {
        totals.active += block.bytes;
        match block.pending {
            Some(_) => totals.pending += block.bytes,
            None => totals.requested += block.requested,
        }
    }
    let mut free: BTreeMap<Pool, Vec<u64>> = BTreeMap::new();
    for (&start, segment) in memory.segments() {
        totals.reserved += segment.bytes;
        let inside = memory.blocks_in(start, segment).map(|(at, block)| (at, block.bytes));
        let mut parts: Vec<(u64, u64)> = inside.chain(memory.free_in(start, segment)).collect();
        parts.sort_unstable();
        let end = parts.iter().fold(start, |at, (from, bytes)| if at == *from { at + bytes } else { at });
        assert_eq!(end, start + segment.bytes, "{parts:?}");
        free.entry(segment.pool()).or_default().extend(memory.free_in(start, segment).map(|(_, bytes)| bytes));
    }
    assert_eq!(memory.totals(), totals);
    for (pool, sizes) in free {
        assert_eq!(memory.free_bytes(pool), sizes.iter().sum::<u64>());
        assert_eq!(memory.largest_hole(pool), sizes.iter().copied().max().unwrap_or(0));
        for bytes in &sizes {
            assert_eq!(memory.smallest_hole_from(pool, *bytes), Some(*bytes));
            let next = sizes.iter().copied().filter(|other| other > bytes).min();
            assert_eq!(memory.smallest_hole_from(pool, bytes + 1), next);
        }
    }
    let ledger = memory.ledger(0);
    assert_eq!((ledger.reserved, ledger.pending), (totals.reserved, totals.pending));
    assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
}

/// The memory before recording started is inferred from releases and from the end, except the sizes of some blocks.
fn initial_state_is_inferred_from_the_end() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories/resnet50.pickle.xz");
    let facts = facts(&path).unwrap();
    let complete = History::read(&path, &facts, 0);
    // Between the two events of a free, that free would count as pending.
    let half = complete.events.len() / 2;
    let skipped = half + complete.events.iter_from(half).position(|event| event.action == Action::Alloc).unwrap();
    let late = History::read(&path, &facts, skipped as u64);
    let (_, mut memory) = complete.beginning();
    for (index, event, at_once) in complete.events.walk(0).take(skipped) {
        memory.apply(&event, u32::try_from(index).unwrap(), at_once).unwrap();
    }
    let (_, mut inferred) = late.beginning();
    adds_up(&inferred);
    assert!(inferred.is_whole());
    assert_eq!(inferred.segments(), memory.segments());
    assert!(inferred.blocks().keys().eq(memory.blocks().keys()));
    assert_eq!(inferred.totals().requested, memory.totals().requested);
    for (index, event, at_once) in late.events.walk(0) {
        inferred.apply(&event, u32::try_from(index).unwrap(), at_once).unwrap();
    }
    assert_eq!(inferred.totals().reserved, late.summary.segments.iter().map(|segment| segment.total_size).sum::<u64>());
    let peaks = |history: &History| history.levels.peaks(&history.summary).unwrap();
    assert_eq!(peaks(&late).reserved, peaks(&complete).reserved);
}

/// An allocator that stitches memory maps segments of any size, which are not expandable.
fn mapped_memory_is_of_the_pool_of_the_end() {
    const MIB: u64 = 1 << 20;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories/resnet50.pickle.xz");
    let mut history = History::read(&path, &facts(&path).unwrap(), 0);
    let end = history.summary.segments.iter().find(|segment| segment.total_size >= 12 * MIB).unwrap().clone();
    history.summary.segments = vec![Segment { total_size: 12 * MIB, is_expandable: false, blocks: Vec::new(), ..end }];
    let address = history.summary.segments[0].address;
    let event = history.events.walk(0).find(|(_, event, _)| event.action == Action::SegmentAlloc).unwrap().1;
    let mapped = |addr| RecordedEvent { action: Action::SegmentMap, addr, bytes: 12 * MIB, ..event };
    let rules = Rules::new(&history.summary, history.device, &history.settings);
    let mut memory = Memory::beginning(rules, &InitialState::default(), &Budget::default()).unwrap();
    // The second range is gone at the end, so its size tells: PyTorch maps multiples of 20 MiB for large requests.
    for (index, addr) in [address, address + (1 << 40)].into_iter().enumerate() {
        memory.apply(&mapped(addr), u32::try_from(index).unwrap(), true).unwrap();
    }
    let kinds: Vec<_> = memory.segments().values().map(|segment| (segment.small, segment.expandable)).collect();
    assert_eq!(kinds, [(false, false), (true, true)]);
}
