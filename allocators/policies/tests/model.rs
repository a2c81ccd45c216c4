//! Random programs against models: a shadow account for every backend of the list, and `pytorch` compared with `caching`. About a
//! thousand programs for each by default; `PROPTEST_CASES` sets another number.

mod faulty;
mod twins;

use crate::common::{self, MIB, allocate, check_nothing_held, check_stats, free, free_bytes, ready_ns, sim, work};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;
use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab_device::settings::Settings as _;
use vramlab_device::{Driver, PoolSettings, SimDriver, StreamId, sim::SimMemory};
use vramlab_policies::backends::{self, CachingSettings, Capabilities, LabSettings, SegmentUse};
use vramlab_policies::instruments::assert_layout;
use vramlab_policies::{Block, BlockState, DeviceAllocator, Selection, Snapshot};

pub(crate) const STREAMS: usize = 3;
pub(crate) const ROOM: u64 = 192 * MIB;

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Allocate { bytes: u64, stream: usize },
    Free { which: Index },
    RecordUse { which: Index, stream: usize },
    Work { stream: usize, ns: u64 },
    Synchronize { stream: usize },
    Trim { keep: u64 },
}

/// Sizes around every boundary of the rules, and anything in between.
fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 1..4096u64,
        3 => 1..=MIB,
        3 => MIB..12 * MIB,
        2 => 10 * MIB..60 * MIB,
        1 => prop::sample::select(vec![512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 32 * MIB]),
    ]
}

pub(crate) fn ops(length: usize) -> impl Strategy<Value = Vec<Op>> {
    let stream = || prop_oneof![3 => Just(0usize), 1 => 1..STREAMS];
    let op = prop_oneof![
        10 => (sizes(), stream()).prop_map(|(bytes, stream)| Op::Allocate { bytes, stream }),
        8 => any::<Index>().prop_map(|which| Op::Free { which }),
        3 => (any::<Index>(), 0..STREAMS).prop_map(|(which, stream)| Op::RecordUse { which, stream }),
        3 => (0..STREAMS, 1_000..400_000u64).prop_map(|(stream, ns)| Op::Work { stream, ns }),
        1 => (0..STREAMS).prop_map(|stream| Op::Synchronize { stream }),
        1 => (0..4u64).prop_map(|part| Op::Trim { keep: part * 24 * MIB }),
    ];
    prop::collection::vec(op, 1..length)
}

struct Live {
    block: Block,
    stream: StreamId,
    /// Announced streams and the time at which their work so far completes.
    uses: Vec<(StreamId, u64)>,
}

/// Memory that was freed while some stream's work was still pending.
#[derive(Debug)]
struct Dirty {
    start: u64,
    end: u64,
    stream: StreamId,
    until_ns: u64,
}

struct World {
    sim: Arc<SimDriver>,
    allocator: Arc<dyn DeviceAllocator>,
    can: Capabilities,
    limit: Option<u64>,
    start: u64,
    streams: Vec<StreamId>,
    live: Vec<Live>,
    dirty: Vec<Dirty>,
    allocated: u64,
}

impl World {
    fn new(settings: &Selection) -> Self {
        let sim = sim(ROOM, SimMemory::None);
        let streams = (0..STREAMS).map(|_| sim.stream_create().unwrap()).collect();
        let start = free_bytes(sim.as_ref());
        let allocator = settings.build(&(Arc::clone(&sim) as Arc<dyn Driver>)).unwrap();
        Self {
            sim,
            allocator,
            can: settings.capabilities(),
            limit: settings.memory_limit(),
            start,
            streams,
            live: Vec::new(),
            dirty: Vec::new(),
            allocated: 0,
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Allocate { bytes, stream } => self.allocate(*bytes, self.streams[*stream]),
            Op::Free { which } if !self.live.is_empty() => self.free(which.index(self.live.len())),
            Op::RecordUse { which, stream } if !self.live.is_empty() => {
                let stream = self.streams[*stream];
                let until = ready_ns(&self.sim, stream);
                let live = which.get(&self.live);
                self.allocator.record_use(&live.block, stream).unwrap();
                let index = which.index(self.live.len());
                self.live[index].uses.push((stream, until));
            }
            Op::Work { stream, ns } => work(&self.sim, self.streams[*stream], *ns),
            Op::Synchronize { stream } => self.sim.stream_synchronize(self.streams[*stream]).unwrap(),
            Op::Trim { keep } => {
                let before = self.allocator.stats().reserved_bytes.all.current;
                let released = self.allocator.trim(*keep).unwrap();
                assert_eq!(before - released, self.allocator.stats().reserved_bytes.all.current);
            }
            Op::Free { .. } | Op::RecordUse { .. } => {}
        }
    }

    fn allocate(&mut self, bytes: u64, stream: StreamId) {
        let peak = self.allocator.ledger_at_peak().reserved;
        let block = match allocate(self.allocator.as_ref(), bytes, stream) {
            Ok(block) => block,
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                return;
            }
        };
        let (start, end) = (block.addr().get(), block.addr().get() + block.bytes());
        assert!(start.is_multiple_of(256) && block.requested() == bytes && block.bytes() >= bytes, "{block:?}");
        for other in &self.live {
            let other = &other.block;
            assert!(end <= other.addr().get() || other.addr().get() + other.bytes() <= start, "{block:?} {other:?}");
        }
        // Work that is queued from now on starts no earlier than this.
        let earliest = ready_ns(&self.sim, stream).max(self.sim.clock().now_ns());
        for dirty in self.dirty.iter().filter(|dirty| dirty.start < end && start < dirty.end) {
            assert!(
                dirty.stream == stream || dirty.until_ns <= earliest,
                "{block:?} is handed to {stream:?} at {earliest} ns, but is in use: {dirty:?}"
            );
        }
        let ledger = self.allocator.ledger_at_peak();
        if self.can.restores && ledger.reserved > peak {
            // It is updated by sums, and should equal a count over every block.
            assert_eq!(Some(ledger), self.allocator.snapshot().map(|snapshot| snapshot.ledger(stream)));
        }
        self.allocated += 1;
        self.live.push(Live { block, stream, uses: Vec::new() });
    }

    fn free(&mut self, index: usize) {
        let Live { block, stream, uses } = self.live.swap_remove(index);
        let (start, end) = (block.addr().get(), block.addr().get() + block.bytes());
        let ready = (stream, ready_ns(&self.sim, stream));
        let dirty = uses.into_iter().chain([ready]);
        self.dirty.extend(dirty.map(|(stream, until_ns)| Dirty { start, end, stream, until_ns }));
        free(self.allocator.as_ref(), block, stream).unwrap();
        let now = self.sim.clock().now_ns();
        self.dirty.retain(|dirty| dirty.until_ns > now);
    }

    fn check(&self) {
        let stats = self.allocator.stats();
        check_stats(&stats);
        let bytes: u64 = self.live.iter().map(|live| live.block.bytes()).sum();
        let requested: u64 = self.live.iter().map(|live| live.block.requested()).sum();
        assert_eq!(stats.allocation.all.current, self.live.len() as u64);
        assert_eq!(stats.allocation.all.allocated, self.allocated);
        assert_eq!(stats.allocated_bytes.all.current, bytes);
        let reserved = stats.reserved_bytes.all.current;
        assert!(requested <= bytes && bytes <= stats.active_bytes.all.current);
        let over = self.can.segments.over_limit();
        assert!(self.limit.is_none_or(|limit| stats.reserved_bytes.all.peak <= limit + over), "the limit was passed");
        // The device packs blocks below a page, so it may reserve slightly more; a pool reserves whole granules.
        let taken = self.start - free_bytes(self.sim.as_ref());
        let whole_pages =
            |snapshot: Snapshot| snapshot.segments.iter().all(|segment| segment.bytes.is_multiple_of(2 * MIB));
        let is_pool = self.can.segments == SegmentUse::Hidden;
        if self.allocator.snapshot().map_or(is_pool, whole_pages) {
            assert_eq!(taken, reserved, "the device and the account differ");
        }
        assert!(taken >= reserved, "the account holds more than the device");
        let peak = self.allocator.ledger_at_peak();
        assert_eq!(peak.wasted(), peak.reserved - peak.requested);
        let Some(snapshot) = self.allocator.snapshot() else { return };
        if self.can.coalesces {
            assert_layout(&snapshot);
        } else {
            assert_tiles(&snapshot);
        }
        let mut sums: BTreeMap<char, (u64, u64, u64)> = BTreeMap::new();
        for (segment, block) in snapshot.segments.iter().flat_map(|s| s.blocks.iter().map(move |block| (s, block))) {
            let letter = match block.state {
                BlockState::Allocated => 'A',
                BlockState::PendingFree => 'P',
                BlockState::Free if segment.blocks.len() > 1 => 'S',
                BlockState::Free => 'F',
            };
            let sum = sums.entry(letter).or_default();
            *sum = (sum.0 + 1, sum.1 + block.bytes, sum.2 + block.requested);
        }
        let sum = |letter| sums.get(&letter).copied().unwrap_or_default();
        let (allocated, pending, split) = (sum('A'), sum('P'), sum('S'));
        assert_eq!(allocated, (self.live.len() as u64, bytes, requested));
        assert_eq!(stats.active.all.current, allocated.0 + pending.0);
        assert_eq!(stats.active_bytes.all.current, allocated.1 + pending.1);
        assert_eq!(stats.requested_bytes.all.current, allocated.2 + pending.2);
        assert_eq!(reserved, allocated.1 + pending.1 + split.1 + sum('F').1);
        // PyTorch counts neither expandable segments nor their free blocks.
        let counted = self.can.segments != SegmentUse::Expandable;
        let if_counted = |value: u64| if counted { value } else { 0 };
        // In a snapshot a live stitched block is a segment of its own, and its segments are split.
        let stitched = self.can.segments == SegmentUse::Stitched && allocated.0 + pending.0 > 0;
        if !stitched {
            assert_eq!(stats.segment.unwrap().all.current, if_counted(snapshot.segments.len() as u64));
        }
        if let (Some(count), Some(bytes), false) = (stats.inactive_split, stats.inactive_split_bytes, stitched) {
            assert_eq!((count.all.current, bytes.all.current), (if_counted(split.0), if_counted(split.1)));
        }
        for stream in &self.streams {
            let ledger = snapshot.ledger(*stream);
            assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
            assert_eq!((ledger.reserved, ledger.requested, ledger.pending), (reserved, requested, pending.1));
        }
    }

    fn end(mut self) {
        while !self.live.is_empty() {
            self.free(0);
        }
        self.allocator.trim(0).unwrap();
        check_nothing_held(&self.allocator.stats());
        assert_eq!(self.allocator.stats().reserved_bytes.all.current, 0);
        drop(self.allocator);
        assert_eq!(free_bytes(self.sim.as_ref()), self.start);
    }
}

/// Blocks fill their segments, and segments do not overlap.
pub(crate) fn assert_tiles(snapshot: &Snapshot) {
    let mut end = 0;
    for segment in &snapshot.segments {
        assert!(segment.addr.get() >= end);
        end = segment.addr.get();
        for block in &segment.blocks {
            assert!(block.addr.get() == end && block.bytes > 0 && block.requested <= block.bytes);
            end += block.bytes;
        }
        assert_eq!(end, segment.addr.get() + segment.bytes);
    }
}

fn check_history(settings: &Selection, ops: &[Op]) {
    let mut world = World::new(settings);
    for op in ops {
        world.apply(op);
        world.check();
    }
    world.end();
}

pub(crate) fn caching_settings() -> impl Strategy<Value = CachingSettings> {
    let max_split = prop_oneof![2 => Just(None), 1 => (21..40u64).prop_map(|mib| Some(mib * MIB))];
    let limit = prop_oneof![1 => Just(None), 2 => (40..160u64).prop_map(|mib| Some(mib * MIB))];
    let threshold = prop_oneof![1 => Just(0.0), 1 => 0.2..0.9];
    let divisions = prop_oneof![2 => Just(0u64), 1 => prop::sample::select(vec![1, 2, 4, 8, 16])];
    (max_split, limit, threshold, divisions, any::<bool>(), 1..30u64).prop_map(
        |(max_split_size, memory_limit, garbage_collection_threshold, divisions, retry_fit_after_sync, rounding)| {
            CachingSettings {
                max_split_size,
                max_non_split_rounding: rounding * MIB,
                garbage_collection_threshold,
                roundup_power2_divisions: vramlab_policies::policy::size::torch::Divisions::uniform(divisions),
                memory_limit,
                retry_fit_after_sync,
            }
        },
    )
}

/// A kind for each part of `lab`, as they are written on a command line.
fn lab_parts() -> impl Strategy<Value = Vec<(&'static str, String)>> {
    let part = |name: &'static str| {
        let setting = LabSettings::default().list().into_iter().find(|setting| setting.name == name).unwrap();
        let kinds: Vec<String> = setting.takes.replace(" or ", ", ").split(", ").map(str::to_owned).collect();
        prop::sample::select(kinds).prop_map(move |kind| (name, kind))
    };
    let segment = (21..28u32).prop_map(|log2| ("segment", (1u64 << log2).to_string()));
    let placing = (part("size"), part("fit"), part("split"), part("join"));
    (placing, part("stream"), part("grow"), part("source"), segment).prop_map(
        |((size, fit, split, join), stream, grow, source, segment)| {
            let mut parts = vec![source, size, fit, split, segment];
            // Ranges of addresses require these.
            let with_ranges = |grow: &str| if grow == "torch" { grow.to_owned() } else { "exact".to_owned() };
            match parts[0].1.as_str() {
                "expandable" => parts.push(("grow", with_ranges(&grow.1))),
                _ => parts.extend([join, stream, grow]),
            }
            parts
        },
    )
}

pub(crate) fn pool_settings() -> impl Strategy<Value = PoolSettings> {
    let threshold = prop::sample::select(vec![0, 64 * MIB, u64::MAX]);
    (threshold, any::<[bool; 3]>()).prop_map(|(release_threshold, [events, opportunistic, internal])| PoolSettings {
        release_threshold,
        reuse_follow_event_dependencies: events,
        reuse_allow_opportunistic: opportunistic,
        reuse_allow_internal_dependencies: internal,
    })
}

/// How pages move, and how large they are: also such as no range of addresses begins at a multiple of.
fn pages() -> impl Strategy<Value = [(&'static str, &'static str); 3]> {
    let steal = prop::sample::select(vec!["pressure", "always", "1", "1.2"]);
    let handle = prop::sample::select(vec!["2M", "4M", "6M"]);
    let small_pool = prop::sample::select(vec!["on", "off"]);
    (steal, handle, small_pool)
        .prop_map(|(steal, handle, small)| [("steal", steal), ("handle", handle), ("small_pool", small)])
}

/// A backend with further settings at random, where it has some of the settings that are drawn here.
pub(crate) fn selections(of: &Selection) -> impl Strategy<Value = Selection> {
    let of = of.clone();
    // A named policy keeps its own parts in half of the cases.
    let parts = prop::option::of(lab_parts());
    (caching_settings(), pool_settings(), parts, pages()).prop_map(move |(torch, pool, parts, pages)| {
        let mut selection = of.clone();
        selection.adopt(&torch);
        selection.adopt(&pool);
        let is_lab = selection.settings().get_as::<LabSettings>().is_some();
        for (name, kind) in parts.iter().flatten().filter(|_| is_lab) {
            selection.set(name, kind).unwrap();
        }
        for (name, kind) in pages.into_iter().filter(|(name, _)| of.backend().has_setting(name)) {
            selection.set(name, kind).unwrap();
        }
        selection
    })
}

/// Runs a check of every backend of the list.
pub(crate) fn of_every_backend<S: Strategy>(
    cases: u32,
    history: impl Fn() -> S,
    check: impl Fn(&Selection, &S::Value),
) {
    for of in backends::all().into_iter().map(Selection::of) {
        let outcome =
            TestRunner::new(common::cases(cases)).run(&(history(), selections(&of)), |(history, selection)| {
                check(&selection, &history);
                Ok(())
            });
        outcome.unwrap_or_else(|error| panic!("{of}: {error}"));
    }
}

#[test]
fn every_backend_keeps_the_account() {
    of_every_backend(1_000, || ops(120), |selection, ops| check_history(selection, ops));
}
