//! The exact search: is there a plan of a [part](super::parts) with at most this many units?
//!
//! Blocks are stacked from the bottom up, like bricks. In a valley of the skyline some block is at the bottom, or the bottom
//! stays empty. So the search chooses a section of the valley, and tries each block of that section that fits into the valley; at
//! last the bottom stays empty at that section, and its blocks rest on other blocks higher up. The search backtracks when a
//! section's remaining blocks no longer fit. That finds a plan, or proves that there is none.
//!
//! - **Floors.** Each block has a lowest offset, that of the highest skyline below it. The floor of a section is the lowest such
//!   offset of its remaining blocks: memory beneath is lost. If floor and remaining blocks exceed the size, this is a dead end.
//!   So a section that is full at the peak loses nothing.
//! - **The section with the fewest choices is decided first,** in any valley. Valleys that are not the lowest count, too: a
//!   narrow one is filled or found impossible before the search spends its time elsewhere.
//! - **Dominance.** A block that should rest higher up, but would fit beneath all remaining blocks, could be there in any
//!   resulting plan: such plans are found elsewhere.
//! - **Parts.** Where no remaining block crosses a time, both sides are solved separately. If one of them is impossible, the
//!   search does not enumerate the other one's plans.
//!
//! *Source.* Sections, floors, dominance and parts are ideas of MiniMalloc (Moffitt, ASPLOS 2023), which places blocks in the
//! order of their offsets. Here a location is chosen first and then its block, by the fewest choices.

use super::parts::{Item, Part};
use std::cmp::Reverse;
use vramlab_device::budget::{Budget, Claim};

/// A change to undo when the search backtracks, with the previous value.
#[derive(Clone, Copy, Debug)]
pub(super) enum Undo {
    Skyline(u32, u64),
    Floor(u32, u64),
    Support(u32, u32),
    Lowest(u32, u64),
    Supports(u32, u32),
    Placed(u32),
    Lifted,
}

/// Maximum number of undo entries, of 16 bytes each. A search this deep has seldom been right all the way.
const MOST_UNDO: usize = 1 << 24;

/// Memory that grows with the depth of a search: changes to undo, and decisions to revise.
#[derive(Debug)]
pub(super) struct Room {
    undo: Vec<Undo>,
    of_undo: Claim,
    of_decisions: Claim,
    /// Whether a change could not be recorded. It cannot be undone, so the search stops there.
    full: bool,
}

impl Room {
    pub(super) fn new(budget: &Budget) -> Self {
        Self { undo: Vec::new(), of_undo: budget.claim(), of_decisions: budget.claim(), full: false }
    }

    #[inline]
    fn push(&mut self, undo: Undo) {
        if self.undo.len() < self.undo.capacity() || self.grow() {
            self.undo.push(undo);
        } else {
            self.full = true;
        }
    }

    #[cold]
    fn grow(&mut self) -> bool {
        self.undo.len() < MOST_UNDO && self.of_undo.reserve(&mut self.undo, 1).is_ok()
    }

    /// Whether there is room for this many bytes of decisions.
    #[inline]
    fn holds(&mut self, decisions: usize) -> bool {
        // In steps, so that most decisions claim nothing.
        self.full = self.full || self.of_decisions.set(decisions.next_multiple_of(1 << 16)).is_err();
        !self.full
    }
}

/// A part at the start of every search.
#[derive(Debug)]
pub(super) struct Start {
    /// Blocks by section.
    at: Vec<Vec<u32>>,
    /// The first block that starts in a section or later; one more than there are sections.
    starts: Vec<usize>,
    /// Active units in each section, and the number of blocks.
    left: Vec<u64>,
    count: Vec<u32>,
    /// Blocks that are active before a section and in it.
    crossing: Vec<u32>,
    /// Sections in which each block is active.
    widths: Vec<u32>,
}

impl Start {
    /// Bytes of it, and of each search of the part besides the claims of [`Room`].
    pub(super) fn bytes(part: &Part) -> usize {
        8 * part.pairs() + 128 * part.sections + 128 * part.items.len()
    }

    pub(super) fn new(part: &Part) -> Self {
        let sections = part.sections;
        let (mut at, mut starts, mut crossing) =
            (vec![Vec::new(); sections], vec![0; sections + 1], vec![0; sections + 1]);
        let mut left = vec![0; sections];
        // CAST: a recording has fewer than 2^32 allocations.
        for (number, item) in (0u32..).zip(&part.items) {
            at[item.from..item.to].iter_mut().for_each(|list| list.push(number));
            left[item.from..item.to].iter_mut().for_each(|left| *left += item.size);
            starts[item.from + 1] += 1;
            crossing[item.from + 1..item.to].iter_mut().for_each(|count| *count += 1);
        }
        for section in 0..sections {
            starts[section + 1] += starts[section];
        }
        // CAST: as above.
        let count = at.iter().map(|list: &Vec<u32>| list.len() as u32).collect();
        let widths = part.items.iter().map(|item| (item.to - item.from) as u32).collect();
        Self { at, starts, left, count, crossing, widths }
    }

    /// Active units in each section.
    pub(super) fn in_use(&self) -> &[u64] {
        &self.left
    }
}

/// A decision about a section of a valley.
#[derive(Debug)]
struct Decision {
    /// The stretch of sections that is solved; sections outside are ignored.
    stretch: (usize, usize),
    section: usize,
    /// Blocks that can be at the bottom, and the number of tried ones.
    choices: Vec<u32>,
    tried: usize,
    /// Whether the bottom may stay empty.
    empty: bool,
    /// Number of undo entries before.
    mark: usize,
    /// Stretches to solve after this one.
    after: Vec<(usize, usize)>,
}

impl Decision {
    /// Its bytes in a vector that doubles.
    fn bytes(&self) -> usize {
        2 * size_of::<Self>() + 4 * self.choices.capacity() + size_of::<(usize, usize)>() * self.after.capacity()
    }
}

/// Decisions that led to the current state.
#[derive(Debug, Default)]
struct Decisions {
    list: Vec<Decision>,
    bytes: usize,
}

impl Decisions {
    fn push(&mut self, decision: Decision) {
        self.bytes += decision.bytes();
        self.list.push(decision);
    }

    fn pop(&mut self) -> Option<Decision> {
        let decision = self.list.pop()?;
        self.bytes -= decision.bytes();
        Some(decision)
    }
}

/// Result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// A plan was found.
    Found,
    /// No plan exists.
    Impossible,
    /// The limit on its work was reached.
    Unknown,
    /// The limit on its memory was reached.
    Memory,
}

/// State of a search.
#[derive(Debug)]
pub(super) struct Skyline<'a> {
    items: &'a [Item],
    /// Blocks of each section.
    at: &'a [Vec<u32>],
    /// The first block that starts in a section or later; one more than there are sections.
    starts: &'a [usize],
    /// Priorities of blocks: the highest is tried first.
    priorities: &'a [u64],
    /// Available units.
    capacity: u64,
    skyline: Vec<u64>,
    floor: Vec<u64>,
    /// Blocks whose lowest offset is the floor.
    support: Vec<u32>,
    /// Units of remaining blocks, and their number.
    left: Vec<u64>,
    count: Vec<u32>,
    /// Remaining blocks that are active before a section and in it.
    crossing: Vec<u32>,
    /// Lowest offsets of blocks; the offsets of placed ones.
    lowest: Vec<u64>,
    /// Number of sections whose floor is the lowest offset of a block.
    supports: Vec<u32>,
    placed: Vec<bool>,
    /// Blocks that should rest higher up.
    lifted: Vec<u32>,
    /// Sections that lost their last support.
    unsupported: Vec<usize>,
    /// The change in which a section's number of supports was last recorded, and that of a block: once is enough to undo all of
    /// it.
    recorded_in: [Vec<u64>; 2],
    change: u64,
    room: &'a mut Room,
    /// Number of examined items, and its limit.
    pub(super) looked: u64,
    most_looked: u64,
}

impl<'a> Skyline<'a> {
    /// `priorities` are of the blocks in the order of the part.
    pub(super) fn new(
        part: &'a Part,
        start: &'a Start,
        priorities: &'a [u64],
        capacity: u64,
        room: &'a mut Room,
    ) -> Self {
        let (items, sections) = (&part.items[..], part.sections);
        room.undo.clear();
        room.full = false;
        Self {
            items,
            at: &start.at,
            starts: &start.starts,
            priorities,
            capacity,
            skyline: vec![0; sections],
            floor: vec![0; sections],
            support: start.count.clone(),
            left: start.left.clone(),
            count: start.count.clone(),
            crossing: start.crossing.clone(),
            lowest: vec![0; items.len()],
            supports: start.widths.clone(),
            placed: vec![false; items.len()],
            lifted: Vec::new(),
            unsupported: Vec::new(),
            recorded_in: [vec![0; sections], vec![0; items.len()]],
            change: 0,
            room,
            looked: (sections + items.len()) as u64,
            most_looked: u64::MAX,
        }
    }

    /// Offsets of the blocks, after a plan was found.
    pub(super) fn finish(self) -> Vec<u64> {
        self.lowest
    }

    /// Searches until a plan is found or impossible, or the limit on wrong decisions or examined items is reached.
    pub(super) fn search(&mut self, most_wrong: u64, most_looked: u64) -> Answer {
        if (0..self.floor.len()).any(|section| self.left[section] > self.capacity) {
            return Answer::Impossible;
        }
        self.most_looked = most_looked;
        let mut stack = Decisions::default();
        let mut wrong = 0;
        let stretches = self.stretches((0, self.floor.len()));
        self.open(&mut stack, stretches);
        while let Some(mut top) = stack.pop() {
            if wrong >= most_wrong || self.looked >= most_looked {
                return Answer::Unknown;
            }
            let next = self.next(&mut top);
            if self.looked >= most_looked {
                return Answer::Unknown;
            }
            if !self.room.holds(stack.bytes + top.bytes()) {
                return Answer::Memory;
            }
            let Some(stretches) = next else {
                // This stretch is impossible, and so are the consequences of the previous decision.
                let Some(before) = stack.list.last() else { return Answer::Impossible };
                self.back(before.mark);
                wrong += 1;
                continue;
            };
            if !stretches.is_empty() {
                stack.push(top);
                self.open(&mut stack, stretches);
                continue;
            }
            // The stretch is solved, and so are those of which it was the last.
            let mut solved = Some(top);
            while let Some(decision) = solved {
                if !decision.after.is_empty() {
                    self.open(&mut stack, decision.after);
                    break;
                }
                solved = stack.pop();
            }
        }
        Answer::Found
    }

    /// Starts with the first of these stretches.
    fn open(&mut self, stack: &mut Decisions, mut stretches: Vec<(usize, usize)>) {
        if let Some(stretch) = stretches.pop() {
            let decision = self.decide(stretch, stretches);
            stack.push(decision);
        }
    }

    /// The section of a stretch that has the fewest choices.
    fn decide(&mut self, stretch: (usize, usize), after: Vec<(usize, usize)>) -> Decision {
        let (from, to) = stretch;
        self.looked += (to - from) as u64;
        let mut best = (u32::MAX, u64::MAX, u64::MAX, from);
        let mut start = from;
        while start < to {
            let floor = self.floor[start];
            let level = self.floor[start..to].iter().take_while(|&&other| other == floor).count();
            let end = start + level;
            if (start == from || self.floor[start - 1] > floor) && (end == to || self.floor[end] > floor) {
                for section in start..end {
                    let spare = self.spare(section);
                    let choices = self.support[section] + u32::from(spare > 0);
                    best = best.min((choices, floor, spare, section));
                }
            }
            start = end;
        }
        let section = best.3;
        let mut choices = self.supporters(section);
        choices.sort_by_key(|&item| (Reverse(self.priorities[item as usize]), item));
        let empty = self.spare(section) > 0;
        Decision { stretch, section, choices, tried: 0, empty, mark: self.room.undo.len(), after }
    }

    /// Units that a section can lose.
    fn spare(&self, section: usize) -> u64 {
        self.capacity - self.floor[section] - self.left[section]
    }

    /// The blocks of a section that can be on its floor.
    fn supporters(&mut self, section: usize) -> Vec<u32> {
        self.looked += self.at[section].len() as u64;
        let left = self.at[section].iter().copied();
        left.filter(|&item| !self.placed[item as usize] && self.lowest[item as usize] == self.floor[section]).collect()
    }

    /// Tries the next choice: returns the remaining stretches, or none if no choice remains or the search has to stop.
    fn next(&mut self, decision: &mut Decision) -> Option<Vec<(usize, usize)>> {
        while let Some(&item) = decision.choices.get(decision.tried) {
            decision.tried += 1;
            let alike = |&other: &u32| {
                let (item, other) = (&self.items[item as usize], &self.items[other as usize]);
                (item.from, item.to, item.size) == (other.from, other.to, other.size)
            };
            if decision.choices[..decision.tried - 1].iter().any(alike) {
                continue;
            }
            if self.place(item as usize) && !self.dominated(decision.stretch) {
                return Some(self.stretches(decision.stretch));
            }
            if self.room.full || self.looked >= self.most_looked {
                return None;
            }
            self.back(decision.mark);
        }
        if std::mem::take(&mut decision.empty) {
            if self.lift(decision.section, &decision.choices) && !self.dominated(decision.stretch) {
                return Some(vec![decision.stretch]);
            }
            if self.room.full {
                return None;
            }
            self.back(decision.mark);
        }
        None
    }

    /// Divides a stretch at times that no remaining block crosses, the last first.
    fn stretches(&mut self, (from, to): (usize, usize)) -> Vec<(usize, usize)> {
        self.looked += (to - from) as u64;
        let mut stretches = Vec::new();
        let mut end = to;
        for section in (from..to).rev() {
            if section > from && self.crossing[section] > 0 {
                continue;
            }
            if self.count[section] > 0 {
                stretches.push((section, end));
            }
            end = section;
        }
        stretches
    }
}

/// Changes that can be undone.
impl Skyline<'_> {
    /// Places a block at its lowest offset. False if that is a dead end.
    fn place(&mut self, item: usize) -> bool {
        let Item { from, to, size, .. } = self.items[item];
        let offset = self.lowest[item];
        if self.skyline[from..to].iter().all(|&top| top < offset) {
            // It should rest on a block, but there is none.
            return false;
        }
        let top = offset + size;
        self.change += 1;
        self.placed[item] = true;
        // CAST: a recording has fewer than 2^32 allocations, and no more sections.
        self.room.push(Undo::Placed(item as u32));
        for section in from..to {
            self.room.push(Undo::Skyline(section as u32, self.skyline[section]));
            self.skyline[section] = top;
            self.left[section] -= size;
            self.count[section] -= 1;
        }
        self.crossing[from + 1..to].iter_mut().for_each(|count| *count -= 1);
        self.unsupport(item, offset);
        let at = self.at;
        let possible = at[from].iter().all(|&other| self.raise(other as usize, top))
            && (self.starts[from + 1]..self.starts[to]).all(|other| self.raise(other, top));
        self.looked += (at[from].len() + self.starts[to] - self.starts[from + 1]) as u64;
        self.settle(possible)
    }

    /// The blocks of a section that can be on its floor should rest higher up. False if that is a dead end.
    fn lift(&mut self, section: usize, supporters: &[u32]) -> bool {
        let floor = self.floor[section];
        self.change += 1;
        let rests: Vec<u64> = supporters.iter().map(|&item| self.lowest_top(item as usize, section, floor)).collect();
        let possible = supporters.iter().zip(rests).all(|(&item, rest)| {
            self.lifted.push(item);
            self.room.push(Undo::Lifted);
            rest < u64::MAX && self.raise(item as usize, rest)
        });
        self.settle(possible)
    }

    /// The lowest top of a block on which another one can rest, if the blocks on the floor of a section do not.
    fn lowest_top(&mut self, item: usize, section: usize, floor: u64) -> u64 {
        let Item { from, to, .. } = self.items[item];
        let (at, items) = (self.at, self.items);
        let top = |other: usize| {
            let on_floor = self.lowest[other] == floor && (items[other].from..items[other].to).contains(&section);
            let left = other != item && !self.placed[other];
            left.then(|| self.lowest[other] + items[other].size + u64::from(on_floor))
        };
        let before = at[from].iter().filter_map(|&other| top(other as usize)).min();
        let later = (self.starts[from + 1]..self.starts[to]).filter_map(top).min();
        self.looked += (at[from].len() + self.starts[to] - self.starts[from + 1]) as u64;
        before.into_iter().chain(later).min().unwrap_or(u64::MAX)
    }

    /// Raises a remaining block's lowest offset. False if it does not fit then.
    fn raise(&mut self, item: usize, lowest: u64) -> bool {
        let before = self.lowest[item];
        if self.placed[item] || before >= lowest {
            return true;
        }
        // CAST: as above.
        self.room.push(Undo::Lowest(item as u32, before));
        self.lowest[item] = lowest;
        self.unsupport(item, before);
        lowest + self.items[item].size <= self.capacity
    }

    /// Sections lose a block whose lowest offset was this.
    fn unsupport(&mut self, item: usize, lowest: u64) {
        if self.supports[item] == 0 {
            return;
        }
        self.keep_supports(item);
        self.supports[item] = 0;
        let Item { from, to, .. } = self.items[item];
        self.looked += (to - from) as u64;
        for section in from..to {
            if self.floor[section] == lowest && self.support[section] > 0 {
                self.keep_support(section);
                self.support[section] -= 1;
                if self.support[section] == 0 && self.count[section] > 0 {
                    self.unsupported.push(section);
                }
            }
        }
    }

    /// Records how many supports a section had before this change.
    fn keep_support(&mut self, section: usize) {
        if std::mem::replace(&mut self.recorded_in[0][section], self.change) != self.change {
            // CAST: as above.
            self.room.push(Undo::Support(section as u32, self.support[section]));
        }
    }

    /// Records how many sections a block supported before this change.
    fn keep_supports(&mut self, item: usize) {
        if std::mem::replace(&mut self.recorded_in[1][item], self.change) != self.change {
            // CAST: as above.
            self.room.push(Undo::Supports(item as u32, self.supports[item]));
        }
    }

    /// Raises the floors of sections that lost their last support. False if the remaining room above one is too small.
    fn settle(&mut self, mut possible: bool) -> bool {
        while let Some(section) = self.unsupported.pop() {
            if !possible {
                continue;
            }
            let (mut floor, mut support) = (u64::MAX, 0);
            for &item in self.at[section].iter().filter(|&&item| !self.placed[item as usize]) {
                let lowest = self.lowest[item as usize];
                support = if lowest < floor { 1 } else { support + u32::from(lowest == floor) };
                floor = floor.min(lowest);
            }
            self.looked += self.at[section].len() as u64;
            self.keep_support(section);
            // CAST: as above.
            self.room.push(Undo::Floor(section as u32, self.floor[section]));
            (self.floor[section], self.support[section]) = (floor, support);
            for &item in &self.at[section] {
                if !self.placed[item as usize] && self.lowest[item as usize] == floor {
                    self.keep_supports(item as usize);
                    self.supports[item as usize] += 1;
                }
            }
            possible = floor + self.left[section] <= self.capacity;
        }
        possible
    }

    /// Whether a block that should rest higher up would fit beneath all remaining blocks.
    fn dominated(&mut self, (first, last): (usize, usize)) -> bool {
        let mut looked = self.lifted.len();
        let stretches = self.lifted.iter().any(|&item| {
            let Item { from, to, size, .. } = self.items[item as usize];
            if self.placed[item as usize] || from < first || to > last {
                return false;
            }
            looked += to - from;
            let bottom = self.skyline[from..to].iter().copied().max().unwrap_or(0);
            let beneath = |&other: &u32| {
                other == item || self.placed[other as usize] || self.lowest[other as usize] >= bottom + size
            };
            bottom < self.lowest[item as usize]
                && (from..to).all(|section| {
                    self.floor[section] >= bottom + size || {
                        looked += self.at[section].len();
                        self.at[section].iter().all(beneath)
                    }
                })
        });
        self.looked += looked as u64;
        stretches
    }

    /// Backtracks to this number of undo entries.
    fn back(&mut self, mark: usize) {
        for undo in self.room.undo.drain(mark..).rev() {
            match undo {
                Undo::Skyline(section, before) => self.skyline[section as usize] = before,
                Undo::Floor(section, before) => self.floor[section as usize] = before,
                Undo::Support(section, before) => self.support[section as usize] = before,
                Undo::Supports(item, before) => self.supports[item as usize] = before,
                Undo::Lowest(item, before) => self.lowest[item as usize] = before,
                Undo::Lifted => {
                    self.lifted.pop();
                }
                Undo::Placed(item) => {
                    let Item { from, to, size, .. } = self.items[item as usize];
                    self.placed[item as usize] = false;
                    self.left[from..to].iter_mut().for_each(|left| *left += size);
                    self.count[from..to].iter_mut().for_each(|count| *count += 1);
                    self.crossing[from + 1..to].iter_mut().for_each(|count| *count += 1);
                }
            }
        }
    }
}
