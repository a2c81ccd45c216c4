//! Where in a program events came from: stack frames, categories, notes and annotations, each kept once.
//!
//! A snapshot repeats the same few thousand stacks in millions of events. Texts, frames and stacks are numbered by what
//! they say, and an event's [`Origin`] is three numbers.

use crate::steps;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Number of a text in [`Origins`]; 0 is the empty text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TextId(pub(super) u32);

/// Number of a stack in [`Origins`]; 0 is the empty stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub(super) u32);

impl TextId {
    /// Whether nothing was said.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl StackId {
    /// Whether no frame was recorded.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The number itself, from 0 in the order of appearance.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A place in a program's source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Function.
    pub name: TextId,
    /// File; for C++ without symbols `??`.
    pub filename: TextId,
    /// Line in the file, 0 where it is not known.
    pub line: u32,
}

/// Where an event or a block came from. All parts may be empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Frames, the innermost first.
    pub stack: StackId,
    /// PyTorch's category of the memory.
    pub category: TextId,
    /// What the program said with `torch.cuda.memory._set_memory_metadata`.
    pub note: TextId,
}

/// The beginning or the end of a range that the program named, such as `torch.profiler.record_function` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// Name.
    pub name: TextId,
    /// Device, counted from 0; `None` where the history does not say.
    pub device: Option<u16>,
    /// Whether the range begins; it ends otherwise.
    pub start: bool,
    /// On the clock of the events.
    pub time_ns: u64,
}

/// What [`Origin`]s refer to, and the annotations of a history.
///
/// Memory is claimed from the budget of the reading and stays claimed.
#[derive(Debug)]
pub struct Origins {
    texts: Vec<Box<str>>,
    text_ids: Index,
    frames: Vec<Frame>,
    frame_ids: HashMap<Frame, u32>,
    /// Frames of all stacks, one after the other.
    in_stacks: Vec<u32>,
    /// End of each stack in that list.
    ends: Vec<u32>,
    stack_ids: Index,
    annotations: Vec<Annotation>,
    blocks: BTreeMap<(u16, u64), Origin>,
    segments: BTreeMap<(u16, u64), Origin>,
    claim: Claim,
}

/// Numbers by hash; those of one hash are a chain.
#[derive(Debug, Default)]
struct Index {
    first: HashMap<u64, u32>,
    /// For each number, the one before it with the same hash.
    next: Vec<u32>,
    state: RandomState,
}

const NONE: u32 = u32::MAX;
/// An entry in a table of numbers, which holds both sizes for a moment when it doubles at seven eighths.
const ENTRY: usize = 4 * (size_of::<(u64, u32)>() + 1);
/// Beside a text: its pointer in a list that doubles, and what the system's allocator adds.
const TEXT_COST: usize = 48;
/// A block's origin in its tree.
const BLOCK_COST: usize = 64;

impl Index {
    fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.first.get(&hash).copied()?;
        loop {
            steps::count(1);
            if is_it(at) {
                return Some(at);
            }
            at = self.next[at as usize];
            if at == NONE {
                return None;
            }
        }
    }

    /// Enters the number that comes next.
    fn enter(&mut self, hash: u64, number: u32) {
        let before = self.first.insert(hash, number);
        self.next.push(before.unwrap_or(NONE));
    }
}

impl Origins {
    /// None yet, to be kept within a budget.
    #[must_use]
    pub fn new(budget: &Budget) -> Self {
        let mut out = Self {
            texts: vec!["".into()],
            text_ids: Index::default(),
            frames: Vec::new(),
            frame_ids: HashMap::new(),
            in_stacks: Vec::new(),
            ends: vec![0],
            stack_ids: Index::default(),
            annotations: Vec::new(),
            blocks: BTreeMap::new(),
            segments: BTreeMap::new(),
            claim: budget.claim(),
        };
        let (text, stack) = (out.text_ids.state.hash_one(""), out.stack_ids.state.hash_one([0_u32; 0].as_slice()));
        out.text_ids.enter(text, 0);
        out.stack_ids.enter(stack, 0);
        out
    }

    /// The number of a text.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub fn text(&mut self, text: &str) -> Result<TextId, OverBudget> {
        if text.is_empty() {
            return Ok(TextId::default());
        }
        let hash = self.text_ids.state.hash_one(text);
        if let Some(known) = self.text_ids.find(hash, |at| &*self.texts[at as usize] == text) {
            return Ok(TextId(known));
        }
        self.claim.add(text.len() + TEXT_COST + ENTRY)?;
        let number = self.next_number(self.texts.len())?;
        self.texts.push(text.into());
        self.text_ids.enter(hash, number);
        Ok(TextId(number))
    }

    /// The number of a frame, for [`stack`](Self::stack).
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub fn frame(&mut self, frame: Frame) -> Result<u32, OverBudget> {
        if let Some(&known) = self.frame_ids.get(&frame) {
            return Ok(known);
        }
        self.claim.add(ENTRY + size_of::<Frame>())?;
        let number = self.next_number(self.frames.len())?;
        self.claim.push(&mut self.frames, frame)?;
        self.frame_ids.insert(frame, number);
        Ok(number)
    }

    /// The number of a stack of frames, the innermost first.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub fn stack(&mut self, frames: &[u32]) -> Result<StackId, OverBudget> {
        let hash = self.stack_ids.state.hash_one(frames);
        if let Some(known) = self.stack_ids.find(hash, |at| self.stack_numbers(at) == frames) {
            return Ok(StackId(known));
        }
        self.claim.add(ENTRY)?;
        let number = self.next_number(self.ends.len())?;
        self.claim.reserve(&mut self.in_stacks, frames.len())?;
        let end = self.next_number(self.in_stacks.len() + frames.len())?;
        self.claim.push(&mut self.ends, end)?;
        self.in_stacks.extend_from_slice(frames);
        self.stack_ids.enter(hash, number);
        Ok(StackId(number))
    }

    /// More than can be named is more than any budget has room for.
    fn next_number(&self, count: usize) -> Result<u32, OverBudget> {
        u32::try_from(count).ok().filter(|number| *number < NONE).ok_or_else(|| self.claim.refuse())
    }

    fn stack_numbers(&self, stack: u32) -> &[u32] {
        let at = stack as usize;
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.in_stacks[start as usize..self.ends[at] as usize]
    }

    /// Adds an annotation.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub fn annotate(&mut self, annotation: Annotation) -> Result<(), OverBudget> {
        self.claim.push(&mut self.annotations, annotation)
    }

    /// Says where a block came from that is held at the end.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub fn set_block(&mut self, device: u16, address: u64, origin: Origin) -> Result<(), OverBudget> {
        if origin != Origin::default() {
            self.claim.add(BLOCK_COST)?;
            self.blocks.insert((device, address), origin);
        }
        Ok(())
    }

    /// Says where the request came from that made a segment that is held at the end.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub fn set_segment(&mut self, device: u16, address: u64, origin: Origin) -> Result<(), OverBudget> {
        if origin != Origin::default() {
            self.claim.add(BLOCK_COST)?;
            self.segments.insert((device, address), origin);
        }
        Ok(())
    }

    /// What a text says.
    #[must_use]
    pub fn spelt(&self, text: TextId) -> &str {
        self.texts.get(text.0 as usize).map_or("", |text| text)
    }

    /// The frames of a stack, the innermost first.
    pub fn frames(&self, stack: StackId) -> impl DoubleEndedIterator<Item = Frame> + '_ {
        self.stack_numbers(stack.0).iter().map(|frame| self.frames[*frame as usize])
    }

    /// The numbers of the frames of a stack.
    pub(super) fn frame_numbers(&self, stack: StackId) -> &[u32] {
        self.stack_numbers(stack.0)
    }

    /// Number of different stacks, the empty one included.
    #[must_use]
    pub fn stacks(&self) -> usize {
        self.ends.len()
    }

    /// Whether any event or block has a frame.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.ends.len() > 1
    }

    /// Annotations in the order of the file.
    #[must_use]
    pub fn annotations(&self) -> &[Annotation] {
        &self.annotations
    }

    /// Where a block came from that is held at the end; nothing is known of others.
    #[must_use]
    pub fn block(&self, device: u16, address: u64) -> Origin {
        self.blocks.get(&(device, address)).copied().unwrap_or_default()
    }

    /// Where the request came from that made a segment that is held at the end.
    #[must_use]
    pub fn segment(&self, device: u16, address: u64) -> Origin {
        self.segments.get(&(device, address)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_the_same_is_one() {
        let mut origins = Origins::new(&Budget::default());
        let mut frame = |name: &str, line| {
            let frame = Frame { name: origins.text(name).unwrap(), filename: origins.text("train.py").unwrap(), line };
            origins.frame(frame).unwrap()
        };
        let frames = [frame("step", 3), frame("main", 9), frame("step", 3)];
        assert_eq!(frames, [0, 1, 0]);
        let [empty, one, two] = [&[][..], &[0], &[0, 1]].map(|frames| origins.stack(frames).unwrap());
        assert!(empty.is_empty() && !one.is_empty() && one != two);
        assert_eq!(origins.stack(&[0, 1]).unwrap(), two);
        let lines: Vec<u32> = origins.frames(two).map(|frame| frame.line).collect();
        assert_eq!(lines, [3, 9]);
        let first = origins.frames(two).next().unwrap();
        assert_eq!((origins.spelt(first.name), origins.spelt(first.filename)), ("step", "train.py"));
        assert_eq!(origins.frames(empty).count(), 0);
        assert!(origins.text("").unwrap().is_empty());
    }

    #[test]
    fn they_end_with_the_budget() {
        let budget = Budget::new(1 << 16);
        let mut origins = Origins::new(&budget);
        let error = (0..).find_map(|at: u32| origins.stack(&[at, at + 1]).err()).unwrap();
        assert_eq!(error.limit, 1 << 16);
        assert!(budget.peak() <= 1 << 16);
    }
}
