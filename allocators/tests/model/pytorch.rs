//! A second `caching`, slow and simple, written from PyTorch's rules alone: one list of blocks, every search from
//! its start to its end. It is told which addresses the driver gave and must ask for the same segments, give the
//! same ones back, and place every block at the same address.

use super::common::{GIB, MIB, allocate, free, ready_ns, sim, work};
use super::{Op, STREAMS, caching_settings, config, ops};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use vramlab::backends::{Caching, CachingSettings};
use vramlab::{Block, CallEvent, CallKind, DeviceAllocator, Driver, MeteredDriver, SimDriver, SimMemory, StreamId};

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Free,
    Held,
    Pending,
}

#[derive(Clone, Debug)]
struct Part {
    addr: u64,
    size: u64,
    segment: u64,
    stream: StreamId,
    small: bool,
    state: State,
    events: usize,
    freed_at: u64,
}

#[derive(Debug)]
struct Model {
    settings: CachingSettings,
    /// In address order.
    parts: Vec<Part>,
    reserved: u64,
    searches: [u64; 2],
    /// By stream: when its work is done, and the block that waits for it.
    pending: BTreeMap<StreamId, VecDeque<(u64, u64)>>,
    /// What the real one asked of the driver, in order.
    log: VecDeque<CallEvent>,
}

impl Model {
    fn call(&mut self, kind: CallKind) -> CallEvent {
        let event = self.log.pop_front().unwrap_or_else(|| panic!("the model makes a call of {kind}, caching none"));
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }

    fn round(&self, bytes: u64) -> u64 {
        let divisions = self.settings.roundup_power2_divisions.0[0];
        if divisions > 1 && bytes > 512 * divisions {
            let floor = 1u64 << (63 - bytes.leading_zeros());
            return bytes.div_ceil(floor / divisions) * (floor / divisions);
        }
        bytes.div_ceil(512) * 512
    }

    fn find(&self, addr: u64) -> usize {
        self.parts.iter().position(|part| part.addr == addr).expect("the model should know the block")
    }

    fn is_whole(&self, index: usize) -> bool {
        let segment = self.parts[index].segment;
        self.parts.iter().filter(|part| part.segment == segment).count() == 1
    }

    fn best_fit(&mut self, n: u64, small: bool, stream: StreamId) -> Option<usize> {
        if self.settings.memory_limit.is_some() && self.settings.garbage_collection_threshold > 0.0 {
            self.searches[usize::from(small)] += 1;
        }
        let fits = |part: &Part| part.state == State::Free && part.small == small && part.stream == stream;
        let candidates = self.parts.iter().enumerate().filter(|(_, part)| fits(part) && part.size >= n);
        let (index, part) = candidates.min_by_key(|(_, part)| (part.size, part.addr))?;
        let max_split = self.settings.max_split_size.unwrap_or(u64::MAX);
        let oversize = n < max_split && part.size >= max_split;
        let far = n >= max_split && part.size >= n + self.settings.max_non_split_rounding;
        (!oversize && !far).then_some(index)
    }

    fn new_segment(&mut self, n: u64, small: bool, stream: StreamId) -> Option<usize> {
        let size = match n {
            0..=0x10_0000 => 2 * MIB,
            _ if n < 10 * MIB => 20 * MIB,
            _ => n.div_ceil(2 * MIB) * 2 * MIB,
        };
        if self.settings.memory_limit.is_some_and(|limit| self.reserved + size > limit) {
            return None;
        }
        let event = self.call(CallKind::MemAlloc);
        assert_eq!(event.bytes, size, "segment size");
        let addr = event.addr.filter(|_| event.ok)?.get();
        self.reserved += size;
        let part = Part { addr, size, segment: addr, stream, small, state: State::Free, events: 0, freed_at: 0 };
        let index = self.parts.partition_point(|other| other.addr < addr);
        self.parts.insert(index, part);
        Some(index)
    }

    fn release(&mut self, addr: u64) -> u64 {
        let event = self.call(CallKind::MemFree);
        assert_eq!(event.addr.map(|addr| addr.get()), Some(addr), "which segment goes back");
        let index = self.find(addr);
        assert!(self.is_whole(index));
        let part = self.parts.remove(index);
        self.reserved -= part.size;
        part.size
    }

    /// Free whole segments of a pool in the order of the free list.
    fn idle(&self, small: bool) -> Vec<Part> {
        let whole = self.parts.iter().enumerate().filter(|(index, _)| self.is_whole(*index)).map(|(_, part)| part);
        let mut idle: Vec<Part> =
            whole.filter(|part| part.state == State::Free && part.small == small).cloned().collect();
        idle.sort_by_key(|part| (part.stream, part.size, part.addr));
        idle
    }

    fn collect_garbage(&mut self) {
        let limit = self.settings.memory_limit.unwrap_or(u64::MAX);
        let threshold = (self.settings.garbage_collection_threshold * limit as f64) as u64;
        if self.settings.memory_limit.is_none() || self.settings.garbage_collection_threshold <= 0.0 {
            return;
        }
        let (mut reclaimed, target) = (0, self.reserved.saturating_sub(threshold));
        while reclaimed < target {
            let idle = self.idle(false);
            let age = |part: &Part| self.searches[0] - part.freed_at;
            let mean = idle.iter().map(age).sum::<u64>() as f64 / idle.len() as f64;
            let old: Vec<u64> = idle.iter().filter(|part| age(part) as f64 >= mean).map(|part| part.addr).collect();
            if old.is_empty() {
                return;
            }
            reclaimed += old.into_iter().map(|addr| self.release(addr)).sum::<u64>();
        }
    }

    fn release_oversize(&mut self, n: u64, small: bool, stream: StreamId) -> bool {
        let Some(max_split) = self.settings.max_split_size else { return false };
        let wanted = n.max(max_split);
        let mut mine: Vec<Part> = self.parts.clone();
        mine.retain(|part| part.state == State::Free && part.small == small && part.stream == stream);
        mine.sort_by_key(|part| (part.size, part.addr));
        if let Some(part) = mine.iter().find(|part| part.size >= wanted) {
            self.release(part.addr);
            return true;
        }
        let mut released = 0;
        for part in mine.iter().rev().take_while(|part| part.size >= max_split) {
            if released < wanted {
                released += self.release(part.addr);
            }
        }
        released >= wanted
    }

    fn release_all(&mut self, keep: u64) {
        while let Some((&stream, queue)) = self.pending.iter().find(|(_, queue)| !queue.is_empty()) {
            let addr = queue[0].1;
            self.call(CallKind::EventSynchronize);
            self.complete(stream, addr);
        }
        for small in [false, true] {
            for part in self.idle(small) {
                if self.reserved > keep {
                    self.release(part.addr);
                }
            }
        }
    }

    fn complete(&mut self, stream: StreamId, addr: u64) {
        self.pending.get_mut(&stream).unwrap().pop_front();
        let index = self.find(addr);
        self.parts[index].events -= 1;
        if self.parts[index].events == 0 {
            self.give(index);
        }
    }

    fn process_events(&mut self) {
        for stream in self.pending.keys().copied().collect::<Vec<_>>() {
            while let Some(&(done_ns, addr)) = self.pending[&stream].front() {
                if done_ns > self.call(CallKind::EventQuery).start_ns {
                    break;
                }
                self.complete(stream, addr);
            }
        }
    }

    /// Puts a block into the free list, joined with its free neighbours.
    fn give(&mut self, mut index: usize) {
        let segment = self.parts[index].segment;
        let joins = |part: Option<&Part>| part.is_some_and(|part| part.segment == segment && part.state == State::Free);
        if index > 0 && joins(self.parts.get(index - 1)) {
            self.parts[index - 1].size += self.parts[index].size;
            self.parts.remove(index);
            index -= 1;
        }
        if joins(self.parts.get(index + 1)) {
            self.parts[index].size += self.parts[index + 1].size;
            self.parts.remove(index + 1);
        }
        let part = &mut self.parts[index];
        (part.state, part.freed_at) = (State::Free, self.searches[usize::from(part.small)]);
    }

    fn allocate(&mut self, bytes: u64, stream: StreamId) -> Option<(u64, u64)> {
        self.process_events();
        let n = self.round(bytes);
        let small = n <= MIB;
        let index = self.best_fit(n, small, stream).or_else(|| {
            self.collect_garbage();
            let mut found = self.new_segment(n, small, stream);
            if found.is_none() && self.release_oversize(n, small, stream) {
                found = self.new_segment(n, small, stream);
            }
            if found.is_none() {
                self.release_all(0);
                if self.settings.retry_fit_after_sync {
                    found = self.best_fit(n, small, stream);
                }
            }
            found.or_else(|| self.new_segment(n, small, stream))
        })?;
        let rest = self.parts[index].size - n;
        let max_split = self.settings.max_split_size.unwrap_or(u64::MAX);
        if if small { rest >= 512 } else { n < max_split && rest > MIB } {
            let mut tail = self.parts[index].clone();
            (tail.addr, tail.size, tail.freed_at) = (tail.addr + n, rest, self.searches[usize::from(small)]);
            self.parts.insert(index + 1, tail);
            self.parts[index].size = n;
        }
        self.parts[index].state = State::Held;
        Some((self.parts[index].addr, self.parts[index].size))
    }

    /// `uses`: streams that were announced, and when their work so far is done.
    fn free(&mut self, addr: u64, uses: &[(StreamId, u64)]) {
        let index = self.find(addr);
        if uses.is_empty() {
            return self.give(index);
        }
        (self.parts[index].state, self.parts[index].events) = (State::Pending, uses.len());
        for (stream, done_ns) in uses {
            self.pending.entry(*stream).or_default().push_back((*done_ns, addr));
        }
    }
}

struct Pair {
    sim: Arc<SimDriver>,
    caching: Caching,
    model: Model,
    calls: Arc<Mutex<Vec<CallEvent>>>,
    streams: Vec<StreamId>,
    live: Vec<(Block, StreamId, Vec<StreamId>)>,
}

impl Pair {
    fn new(settings: CachingSettings, room: u64) -> Self {
        let sim = sim(room, SimMemory::None);
        let streams = (0..STREAMS).map(|_| sim.stream_create().unwrap()).collect();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&calls);
        let observer = Box::new(move |event: &CallEvent| {
            let relevant = [CallKind::MemAlloc, CallKind::MemFree, CallKind::EventQuery, CallKind::EventSynchronize];
            if relevant.contains(&event.kind) {
                seen.lock().unwrap().push(*event);
            }
        });
        let driver = MeteredDriver::new(Arc::clone(&sim) as Arc<dyn Driver>, None, Some(observer));
        let model = Model {
            settings,
            parts: Vec::new(),
            reserved: 0,
            searches: [0; 2],
            pending: BTreeMap::new(),
            log: VecDeque::new(),
        };
        Self { sim, caching: Caching::new(Arc::new(driver), settings), model, calls, streams, live: Vec::new() }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Allocate { bytes, stream } => {
                let stream = self.streams[*stream];
                let real = allocate(&self.caching, *bytes, stream);
                self.model.log.extend(self.calls.lock().unwrap().drain(..));
                let real = match real {
                    Ok(block) => {
                        let placed = (block.addr().get(), block.bytes());
                        self.live.push((block, stream, Vec::new()));
                        Some(placed)
                    }
                    Err(error) => {
                        assert!(error.is_out_of_memory(), "{error}");
                        None
                    }
                };
                assert_eq!(self.model.allocate(*bytes, stream), real, "{bytes} bytes on {stream:?}");
            }
            Op::Free { which } if !self.live.is_empty() => {
                let (block, stream, mut uses) = self.live.swap_remove(which.index(self.live.len()));
                uses.retain(|user| *user != stream);
                let done: Vec<_> = uses.iter().map(|user| (*user, ready_ns(&self.sim, *user))).collect();
                self.model.free(block.addr().get(), &done);
                free(&self.caching, block, stream).unwrap();
            }
            Op::RecordUse { which, stream } if !self.live.is_empty() => {
                let index = which.index(self.live.len());
                let (block, _, uses) = &mut self.live[index];
                let stream = self.streams[*stream];
                self.caching.record_use(block, stream).unwrap();
                if !uses.contains(&stream) {
                    uses.push(stream);
                }
            }
            Op::Work { stream, ns } => work(&self.sim, self.streams[*stream], *ns),
            Op::Synchronize { stream } => self.sim.stream_synchronize(self.streams[*stream]).unwrap(),
            Op::Trim { keep } => {
                self.caching.trim(*keep).unwrap();
                self.model.log.extend(self.calls.lock().unwrap().drain(..));
                self.model.release_all(*keep);
            }
            Op::Free { .. } | Op::RecordUse { .. } => {}
        }
        self.model.log.extend(self.calls.lock().unwrap().drain(..));
        assert!(self.model.log.is_empty(), "caching makes calls that the model does not: {:?}", self.model.log);
        let snapshot = self.caching.snapshot().unwrap();
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let real: Vec<(u64, u64)> = blocks.map(|block| (block.addr.get(), block.bytes)).collect();
        let model: Vec<(u64, u64)> = self.model.parts.iter().map(|part| (part.addr, part.size)).collect();
        assert_eq!(model, real, "the layouts differ");
    }
}

proptest! {
    #![proptest_config(config(1_500))]

    /// On a device with room for everything and on one that is often full.
    #[test]
    fn caching_places_every_block_where_the_rules_say(
        ops in ops(200),
        settings in caching_settings(),
        tight in any::<bool>(),
    ) {
        let mut pair = Pair::new(settings, if tight { 96 * MIB } else { 8 * GIB });
        for op in &ops {
            pair.apply(op);
        }
    }
}
