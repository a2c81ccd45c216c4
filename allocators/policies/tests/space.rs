//! The memory of an allocator under random operations: blocks tile their segments, and every sum equals a naive recount, after each
//! step.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::{KIB, MIB, Random, check_stats};
use std::collections::BTreeMap;
use vramlab_device::StreamId;
use vramlab_policies::space::{Account, BlockId, FreeList, Owner, SegmentId, Space, State};
use vramlab_policies::{CaptureId, Gauge, Ledger, PoolKind};

const UNIT: u64 = 512;
/// Of expandable segments.
const PAGE: u64 = 4 * UNIT;
const OVERSIZE: u64 = 8 * KIB;

/// Steps in all; `SPACE_STEPS` sets another number.
fn steps() -> u64 {
    std::env::var("SPACE_STEPS").map_or(20_000, |steps| steps.parse().unwrap())
}

/// One gauge as it should be: its level follows from the blocks, its peak from the levels so far.
#[derive(Default)]
struct Peaks(BTreeMap<String, u64>);

fn stream(number: u64) -> StreamId {
    // SAFETY: no driver gets it.
    unsafe { StreamId::from_raw(number) }
}

struct World {
    space: Space,
    private: CaptureId,
    random: Random,
    next: u64,
    peaks: Peaks,
    /// The breakdown when reserved memory was highest, by the recount.
    peak: Ledger,
}

impl World {
    fn new(seed: u64) -> Self {
        let space = Space::new(Account::with_pools(OVERSIZE));
        let private = CaptureId::next();
        Self { space, private, random: Random::new(seed), next: MIB, peaks: Peaks::default(), peak: Ledger::default() }
    }

    fn list(&mut self) -> FreeList {
        let pool = if self.random.below(2) == 0 { PoolKind::Small } else { PoolKind::Large };
        let private = (self.random.below(5) == 0).then_some(self.private);
        let user = stream(1 + self.random.below(3));
        FreeList { owner: Owner { stream: user, private }, pool: Some(pool) }
    }

    fn blocks(&self, filter: impl Fn(State) -> bool) -> Vec<BlockId> {
        let all = self.space.segments().flat_map(|(id, _)| self.space.blocks_of(id));
        all.filter(|block| filter(self.space[*block].state)).collect()
    }

    fn any(&mut self, state: State) -> Option<BlockId> {
        let blocks = self.blocks(|other| other == state);
        (!blocks.is_empty()).then(|| blocks[self.random.below(blocks.len() as u64) as usize])
    }

    /// One to `most` units.
    fn units(&mut self, most: u64) -> u64 {
        (1 + self.random.below(most / UNIT)) * UNIT
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0 if self.space.segments().count() < 8 => {
                let (list, bytes) = (self.list(), self.units(96 * KIB));
                let block = if self.random.below(4) == 0 {
                    self.space.add_addresses(list, self.next, bytes, PAGE)
                } else {
                    self.space.add_segment(list, self.next, bytes)
                };
                assert_eq!(self.space[block].bytes, bytes);
                // Sometimes adjacent to the last one, with which it must not coalesce.
                self.next += bytes + UNIT * self.random.below(2);
                if self.space[block].state == State::Free && self.random.below(4) == 0 {
                    self.carve(block);
                }
            }
            1 => {
                let idle: Vec<SegmentId> =
                    self.space.segments().filter(|(_, segment)| segment.busy == 0).map(|(id, _)| id).collect();
                if !idle.is_empty() {
                    self.space.remove_segment(idle[self.random.below(idle.len() as u64) as usize]);
                }
            }
            2..=8 => {
                if let Some(block) = self.any(State::Free) {
                    let bytes = self.space[block].bytes;
                    let bytes = if self.random.below(4) == 0 { bytes } else { self.units(bytes) };
                    let requested = 1 + self.random.below(bytes);
                    self.space.take(block, bytes, requested);
                    if self.random.below(8) == 0 {
                        let owner = self.list().owner;
                        self.space.hand_over(block, owner);
                    }
                }
            }
            9..=11 => {
                if let Some(block) = self.any(State::Held) {
                    self.space.defer(block);
                }
            }
            12..=17 => {
                let state = if self.random.below(2) == 0 { State::Held } else { State::Pending };
                if let Some(block) = self.any(state) {
                    let (bytes, list) = (self.space[block].bytes, self.space[block].list);
                    let joined = self.space.free(block);
                    let absorbed: u64 = joined.absorbed.iter().flatten().map(|block| block.bytes).sum();
                    assert_eq!((joined.block.bytes, joined.block.list), (bytes + absorbed, list));
                }
            }
            18 => {
                if let Some(block) = self.any(State::Unmapped) {
                    let bytes = self.units(self.space[block].bytes);
                    self.space.map(block, bytes);
                }
            }
            _ => {
                let mut parts = self.blocks(|state| state == State::Free);
                parts.retain(|block| self.space[self.space[*block].segment].expandable);
                if let Some(&block) = parts.first() {
                    let offset = UNIT * self.random.below(self.space[block].bytes / UNIT);
                    let bytes = self.units(self.space[block].bytes - offset);
                    self.space.unmap(block, offset, bytes);
                }
            }
        }
        let user = stream(1 + self.random.below(3));
        self.space.account_mut().note_peak(user);
        self.check(user);
    }

    fn carve(&mut self, whole: BlockId) {
        let (mut left, mut parts) = (self.space[whole].bytes, Vec::new());
        while left > 0 {
            let bytes = self.units(left);
            let is_live = parts.len() % 2 == 0;
            parts.push((bytes, is_live.then_some(bytes - 1)));
            left -= bytes;
        }
        self.space.carve(whole, &parts);
    }

    fn check(&mut self, stream: StreamId) {
        let mut levels: BTreeMap<(&str, PoolKind), u64> = BTreeMap::new();
        let (mut ledger, mut held_oversize, mut oversize_segments) = (Ledger::default(), 0, 0);
        for (id, segment) in self.space.segments() {
            let (mut at, mut mapped, mut busy, mut prev): (_, _, _, Option<BlockId>) = (segment.addr, 0, 0, None);
            let several = self.space.blocks_of(id).count() > 1;
            for block in self.space.blocks_of(id) {
                let record = &self.space[block];
                assert_eq!(
                    (record.addr, record.prev, record.segment),
                    (at, prev, id),
                    "blocks should tile their segment"
                );
                assert!(record.bytes > 0 && record.bytes.is_multiple_of(UNIT));
                if let Some(prev) = prev.map(|prev| &self.space[prev]) {
                    let alike = prev.state == record.state && prev.list == record.list;
                    assert!(!alike || !matches!(record.state, State::Free | State::Unmapped), "free neighbours join");
                }
                (at, prev) = (at + record.bytes, Some(block));
                let pool = record.list.pool.unwrap();
                let mut add = |name, amount| *levels.entry((name, pool)).or_default() += amount;
                if record.state != State::Unmapped {
                    mapped += record.bytes;
                }
                match record.state {
                    State::Held | State::Pending => {
                        busy += 1;
                        add("active", 1);
                        add("active_bytes", record.bytes);
                        add("requested_bytes", record.requested);
                        if record.state == State::Held {
                            held_oversize += u64::from(record.bytes >= OVERSIZE);
                            add("allocation", 1);
                            add("allocated_bytes", record.bytes);
                            ledger.requested += record.requested;
                            ledger.internal += record.bytes - record.requested;
                        } else {
                            ledger.pending += record.bytes;
                        }
                    }
                    State::Free => {
                        if several && !segment.expandable {
                            add("inactive_split", 1);
                            add("inactive_split_bytes", record.bytes);
                        }
                    }
                    State::Unmapped => assert!(segment.expandable),
                }
            }
            assert_eq!((at, mapped, busy), (segment.addr + segment.bytes, segment.mapped, segment.busy));
            let pool = segment.list.pool.unwrap();
            *levels.entry(("reserved_bytes", pool)).or_default() += mapped;
            *levels.entry(("segment", pool)).or_default() += u64::from(!segment.expandable);
            oversize_segments += u64::from(!segment.expandable && segment.bytes >= OVERSIZE);
            ledger.reserved += mapped;
            for block in self.space.blocks_of(id).map(|block| &self.space[block]) {
                match block.state {
                    State::Free if segment.list.owner.stream != stream => ledger.stream += block.bytes,
                    State::Free if segment.expandable => {
                        let is_whole = |page: &u64| *page >= block.addr && page + PAGE <= block.addr + block.bytes;
                        let pages =
                            (segment.addr..segment.addr + segment.bytes).step_by(PAGE as usize).filter(is_whole);
                        let pages = PAGE * pages.count() as u64;
                        ledger.soft += pages;
                        ledger.hard += block.bytes - pages;
                    }
                    State::Free if busy == 0 => ledger.soft += block.bytes,
                    State::Free => ledger.hard += block.bytes,
                    _ => {}
                }
            }
        }
        assert_eq!(ledger.wasted(), ledger.reserved - ledger.requested);
        assert_eq!(self.space.account().ledger(stream), ledger);
        if ledger.reserved > self.peak.reserved {
            self.peak = ledger;
        }
        assert_eq!(self.space.account().ledger_at_peak(), self.peak);
        self.check_gauges(&levels);
        let stats = self.space.account().stats();
        let oversize = [stats.oversize_allocations, stats.oversize_segments].map(|gauge| gauge.unwrap().current);
        assert_eq!(oversize, [held_oversize, oversize_segments]);
        let snapshot = self.space.snapshot();
        assert_eq!(snapshot.segments.iter().map(|segment| segment.bytes).sum::<u64>(), ledger.reserved);
        assert!(snapshot.segments.windows(2).all(|pair| pair[0].addr.get() + pair[0].bytes <= pair[1].addr.get()));
    }

    fn check_gauges(&mut self, levels: &BTreeMap<(&str, PoolKind), u64>) {
        let stats = self.space.account().stats();
        check_stats(stats);
        for (name, gauge) in [
            ("allocation", &stats.allocation),
            ("active", &stats.active),
            ("allocated_bytes", &stats.allocated_bytes),
            ("active_bytes", &stats.active_bytes),
            ("requested_bytes", &stats.requested_bytes),
            ("reserved_bytes", &stats.reserved_bytes),
            ("segment", &stats.segment.unwrap()),
            ("inactive_split", &stats.inactive_split.unwrap()),
            ("inactive_split_bytes", &stats.inactive_split_bytes.unwrap()),
        ] {
            let [small, large] = [PoolKind::Small, PoolKind::Large].map(|pool| levels.get(&(name, pool)).copied());
            let [small, large] = [small.unwrap_or(0), large.unwrap_or(0)];
            let scopes = [("all", &gauge.all, small + large)];
            let pools = [("small", &gauge.small_pool.unwrap(), small), ("large", &gauge.large_pool.unwrap(), large)];
            for (scope, gauge, level) in scopes.into_iter().chain(pools) {
                let Gauge { current, peak, .. } = *gauge;
                let highest = self.peaks.0.entry(format!("{name}.{scope}")).or_default();
                *highest = level.max(*highest);
                assert_eq!((current, peak), (level, *highest), "{name}.{scope}");
            }
        }
    }
}

#[test]
fn blocks_tile_and_sums_are_what_a_recount_says() {
    let mut most_held = 0;
    for seed in 0..4 {
        let mut world = World::new(seed);
        for step in 0..steps() / 4 {
            world.step();
            most_held = most_held.max(world.blocks(|state| state == State::Held).len());
            if step % 1_000 == 999 {
                world.space.account_mut().reset_peaks();
                // From here on the recount's peaks restart from the levels, too.
                world.peaks = Peaks::default();
                world.peak = world.space.account().ledger_at_peak();
                world.check(stream(1));
            }
        }
    }
    assert!(most_held > 1, "something was checked");
}

#[test]
fn ages_count_searches() {
    let mut space = Space::new(Account::new());
    let list = FreeList { owner: Owner::of(stream(1)), pool: None };
    let block = space.add_segment(list, MIB, MIB);
    space.count_search();
    assert_eq!(space.age(block), 1);
    space.set_age(block, 40);
    space.count_search();
    assert_eq!(space.age(block), 41);
    space.take(block, MIB, 1);
    assert_eq!(space.find_held(block.number(), MIB), Some(block));
    assert_eq!(space.find_held(block.number(), MIB + 512), None);
    space.free(block);
    assert_eq!((space.age(block), space.find_held(block.number(), MIB)), (0, None));
}
