//! The exact search: is there a plan of a [part](super::parts) that needs no more than so many units?
//!
//! Blocks are laid from the bottom up, as bricks. Where the skyline has a valley, some block lies at its bottom, or the
//! bottom stays empty. So a section of the valley is chosen, and each block of that section that fits into the valley is tried
//! there; at last the bottom stays empty at that section, and its blocks rest on other blocks higher up. The search goes
//! back where a section cannot hold any more what is left of it. That finds a plan, or proves that there is none.
//!
//! - **Floors.** Each block has a lowest offset, which is that of the highest skyline below it. The floor of a section is
//!   the lowest such offset of its blocks that are left: what lies beneath is lost. If floor and blocks that are left need more
//!   than there is, this is a dead end. So a section that is full at the fullest time loses nothing.
//! - **The section with the fewest choices is decided first,** in any valley. Valleys that are not the lowest count, too: a
//!   narrow one is filled or found impossible before the search has spent its time elsewhere.
//! - **Dominance.** A block that was to rest higher up, but would fit as a whole beneath all that is left, could lie there in
//!   any plan that comes of this: such plans are found elsewhere.
//! - **Parts.** Where no block that is left crosses a point of time, both sides are solved by themselves. If one of them is
//!   impossible, the search does not try the other one's plans one by one.
//!
//! *Source.* Sections, floors, dominance and parts are ideas of MiniMalloc (Moffitt, ASPLOS 2023), which places blocks in the
//! order of their offsets. Here a place is chosen first and then its block, by the fewest choices.

use super::parts::{Item, Part};
use std::cmp::Reverse;
use vramlab_device::budget::{Budget, Claim};

/// What is undone when the search goes back, with the value before.
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

/// Entries that a search can undo at most, of 16 bytes each. A search that has come so deep has seldom been right all the way.
const MOST_UNDO: usize = 1 << 24;

/// Memory of a search that grows as it goes deeper: the changes that it can undo, and the decisions that it can change.
#[derive(Debug)]
pub(super) struct Room {
    undo: Vec<Undo>,
    of_undo: Claim,
    of_decisions: Claim,
    /// Whether a change could not be kept. What it changed cannot be undone, so the search ends there.
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

    /// Whether there is room for so many bytes of decisions.
    #[inline]
    fn holds(&mut self, decisions: usize) -> bool {
        // In steps, so that most decisions claim nothing.
        self.full = self.full || self.of_decisions.set(decisions.next_multiple_of(1 << 16)).is_err();
        !self.full
    }
}

/// A part as every search of it begins.
#[derive(Debug)]
pub(super) struct Start {
    /// Blocks by section.
    at: Vec<Vec<u32>>,
    /// The first block that starts in a section or later; one more than there are sections.
    starts: Vec<usize>,
    /// Units in use in each section, and the number of blocks.
    left: Vec<u64>,
    count: Vec<u32>,
    /// Blocks that are in use before a section and in it.
    crossing: Vec<u32>,
    /// Sections in which each block is in use.
    widths: Vec<u32>,
}

impl Start {
    /// Bytes that it takes, and each search of the part besides what [`Room`] claims.
    pub(super) fn bytes(part: &Part) -> usize {
        8 * part.pairs() + 128 * part.sections + 128 * part.items.len()
    }

    pub(super) fn new(part: &Part) -> Self {
        let sections = part.sections;
        let (mut at, mut starts, mut crossing) =
            (vec![Vec::new(); sections], vec![0; sections + 1], vec![0; sections + 1]);
        let mut left = vec![0; sections];
        // CAST: a history has fewer than 2^32 allocations.
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

    /// Units in use in each section.
    pub(super) fn in_use(&self) -> &[u64] {
        &self.left
    }
}

/// A valley's section that is decided.
#[derive(Debug)]
struct Decision {
    /// The stretch of sections that is solved: all that lies outside is none of its business.
    stretch: (usize, usize),
    section: usize,
    /// Blocks that can lie at the bottom, and how many were tried.
    choices: Vec<u32>,
    tried: usize,
    /// Whether the bottom may stay empty.
    empty: bool,
    /// How much was to be undone before.
    mark: usize,
    /// Stretches that are solved after this one.
    after: Vec<(usize, usize)>,
}

impl Decision {
    /// Bytes that it takes in a vector that doubles.
    fn bytes(&self) -> usize {
        2 * size_of::<Self>() + 4 * self.choices.capacity() + size_of::<(usize, usize)>() * self.after.capacity()
    }
}

/// Decisions that led to where a search is.
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

/// What a search came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// There is a plan.
    Found,
    /// There is none.
    Impossible,
    /// It took too long.
    Unknown,
    /// It took too much memory.
    Memory,
}

/// The state of a search.
#[derive(Debug)]
pub(super) struct Skyline<'a> {
    items: &'a [Item],
    /// Blocks of each section.
    at: &'a [Vec<u32>],
    /// The first block that starts in a section or later; one more than there are sections.
    starts: &'a [usize],
    /// Which block is tried first: that with the highest.
    priorities: &'a [u64],
    /// Units that there are.
    capacity: u64,
    skyline: Vec<u64>,
    floor: Vec<u64>,
    /// Blocks whose lowest offset is the floor.
    support: Vec<u32>,
    /// Units of blocks that are left, and their number.
    left: Vec<u64>,
    count: Vec<u32>,
    /// Blocks that are left and in use before a section and in it.
    crossing: Vec<u32>,
    /// Lowest offsets of blocks; where those lie that are placed.
    lowest: Vec<u64>,
    /// Sections whose floor is the lowest offset of a block.
    supports: Vec<u32>,
    placed: Vec<bool>,
    /// Blocks that were to rest higher up.
    lifted: Vec<u32>,
    /// Sections that lost their last support.
    unsupported: Vec<usize>,
    /// The change in which a section's number of supports was last kept, and that of a block: once is enough to undo all of it.
    kept: [Vec<u64>; 2],
    change: u64,
    room: &'a mut Room,
    /// What was looked at, and what may be.
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
            kept: [vec![0; sections], vec![0; items.len()]],
            change: 0,
            room,
            looked: (sections + items.len()) as u64,
            most_looked: u64::MAX,
        }
    }

    /// Where the blocks lie, after a plan was found.
    pub(super) fn finish(self) -> Vec<u64> {
        self.lowest
    }

    /// Searches until a plan is found or impossible, so many decisions were wrong, or so much was looked at.
    pub(super) fn search(&mut self, most_wrong: u64, most_looked: u64) -> Answer {
        if (0..self.floor.len()).any(|section| self.left[section] > self.capacity) {
            return Answer::Impossible;
        }
        self.most_looked = most_looked;
        let mut stack = Decisions::default();
        let mut wrong = 0;
        let whole = self.stretches((0, self.floor.len()));
        self.open(&mut stack, whole);
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
                // Whatever lies there, this stretch does not work out, and neither does what came of the decision before it.
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

    /// Begins with the first of these stretches.
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

    /// The blocks of a section that can lie on its floor.
    fn supporters(&mut self, section: usize) -> Vec<u32> {
        self.looked += self.at[section].len() as u64;
        let left = self.at[section].iter().copied();
        left.filter(|&item| !self.placed[item as usize] && self.lowest[item as usize] == self.floor[section]).collect()
    }

    /// Tries what has not been tried: the stretches that are left then, or none if nothing is left to try, or the search has to end.
    fn next(&mut self, decision: &mut Decision) -> Option<Vec<(usize, usize)>> {
        while let Some(&item) = decision.choices.get(decision.tried) {
            decision.tried += 1;
            let alike = |&other: &u32| {
                let (one, other) = (&self.items[item as usize], &self.items[other as usize]);
                (one.from, one.to, one.size) == (other.from, other.to, other.size)
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

    /// Divides a stretch where no block that is left crosses, the last first.
    fn stretches(&mut self, (from, to): (usize, usize)) -> Vec<(usize, usize)> {
        self.looked += (to - from) as u64;
        let mut found = Vec::new();
        let mut end = to;
        for section in (from..to).rev() {
            if section > from && self.crossing[section] > 0 {
                continue;
            }
            if self.count[section] > 0 {
                found.push((section, end));
            }
            end = section;
        }
        found
    }
}

/// Changes that can be undone.
impl Skyline<'_> {
    /// Places a block at its lowest offset. False if that leads nowhere.
    fn place(&mut self, item: usize) -> bool {
        let Item { from, to, size, .. } = self.items[item];
        let offset = self.lowest[item];
        if self.skyline[from..to].iter().all(|&top| top < offset) {
            // It was to rest on something, and now there is nothing.
            return false;
        }
        let top = offset + size;
        self.change += 1;
        self.placed[item] = true;
        // CAST: a history has fewer than 2^32 allocations, and no more sections.
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

    /// The blocks of a section that can lie on its floor are to rest higher up. False if that leads nowhere.
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

    /// The lowest top of a block that another one can rest on, if those that could lie on the floor of a section do not.
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

    /// A block that is left does not lie lower than this. False if it does not fit then.
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

    /// Keeps how many supports a section had before this change.
    fn keep_support(&mut self, section: usize) {
        if std::mem::replace(&mut self.kept[0][section], self.change) != self.change {
            // CAST: as above.
            self.room.push(Undo::Support(section as u32, self.support[section]));
        }
    }

    /// Keeps how many sections a block supported before this change.
    fn keep_supports(&mut self, item: usize) {
        if std::mem::replace(&mut self.kept[1][item], self.change) != self.change {
            // CAST: as above.
            self.room.push(Undo::Supports(item as u32, self.supports[item]));
        }
    }

    /// Raises the floors of sections that lost their last support. False if there is not enough left above one.
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

    /// Whether a block that was to rest higher up would fit beneath all that is left.
    fn dominated(&mut self, (first, last): (usize, usize)) -> bool {
        let mut looked = self.lifted.len();
        let found = self.lifted.iter().any(|&item| {
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
        found
    }

    /// Goes back to where so much was to be undone.
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
