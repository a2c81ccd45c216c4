//! Origins of events in a program: stack frames, categories, notes and annotations, each stored once.
//!
//! A snapshot repeats a few thousand stacks in millions of events. Texts, frames and stacks have numbers, and an event's
//! [`Origin`] is three of them.

use indexmap::IndexSet;
use std::collections::BTreeMap;
use vramlab_device::budget::{Budget, Claim, OverBudget};

/// Number of a text in [`Origins`]; 0 is the empty text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TextId(pub(super) u32);

/// Number of a stack in [`Origins`]; 0 is the empty stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub(super) u32);

impl TextId {
    /// Whether it is empty.
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

    /// The number, from 0 in order of appearance.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A location in a program's source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Function.
    pub name: TextId,
    /// File; for C++ without symbols `??`.
    pub filename: TextId,
    /// Line in the file, 0 if unknown.
    pub line: u32,
}

/// Name of the frame that divides a stack of the backward pass: before it are that pass's frames, after it those of the forward
/// pass that created the autograd node. PyTorch records them under `torch.autograd.set_detect_anomaly`.
pub const FORWARD_PASS: &str = "=== forward pass ===";

/// Origin of an event or a block. All parts may be empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Frames, the innermost first.
    pub stack: StackId,
    /// PyTorch's category of the memory.
    pub category: TextId,
    /// Text that the program set with `torch.cuda.memory._set_memory_metadata`.
    pub note: TextId,
}

/// Start or end of a named range of the program, as from `torch.profiler.record_function`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// Name.
    pub name: TextId,
    /// Device, counted from 0; `None` if unknown.
    pub device: Option<u16>,
    /// Whether the range starts; otherwise it ends.
    pub start: bool,
    /// Time on the clock of the events.
    pub time_ns: u64,
}

/// The texts, frames and stacks of [`Origin`]s, and the annotations of a recording.
///
/// Memory is claimed from the reader's budget and stays claimed.
#[derive(Debug)]
pub struct Origins {
    texts: IndexSet<Box<str>>,
    frames: IndexSet<Frame>,
    /// Numbers of the frames of each stack.
    stacks: IndexSet<Box<[u32]>>,
    annotations: Vec<Annotation>,
    blocks: BTreeMap<(u16, u64), Origin>,
    segments: BTreeMap<(u16, u64), Origin>,
    claim: Claim,
}

/// An entry of a numbered table: its hash and position. While the table doubles, both sizes are allocated.
const ENTRY: usize = 4 * size_of::<(u64, usize)>();
/// Overhead of the system's allocator for a text or a stack, and its pointer.
const BOX_COST: usize = 64;
/// A block's origin in its tree.
const BLOCK_COST: usize = 64;

impl Origins {
    /// Without entries, within a budget.
    #[must_use]
    pub fn new(budget: &Budget) -> Self {
        Self {
            texts: IndexSet::from(["".into()]),
            frames: IndexSet::new(),
            stacks: IndexSet::from([Box::default()]),
            annotations: Vec::new(),
            blocks: BTreeMap::new(),
            segments: BTreeMap::new(),
            claim: budget.claim(),
        }
    }

    /// The number of a text.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub fn text(&mut self, text: &str) -> Result<TextId, OverBudget> {
        // Most events have no note.
        if text.is_empty() {
            return Ok(TextId::default());
        }
        if let Some(known) = self.texts.get_index_of(text) {
            // CAST: it was numbered in 32 bits.
            return Ok(TextId(known as u32));
        }
        self.claim.add(text.len() + BOX_COST + ENTRY)?;
        let number = self.next_number(self.texts.len())?;
        self.texts.insert(text.into());
        Ok(TextId(number))
    }

    /// The number of a frame, for [`stack`](Self::stack).
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub fn frame(&mut self, frame: Frame) -> Result<u32, OverBudget> {
        if let Some(known) = self.frames.get_index_of(&frame) {
            // CAST: as above.
            return Ok(known as u32);
        }
        self.claim.add(ENTRY + 4 * size_of::<Frame>())?;
        let number = self.next_number(self.frames.len())?;
        self.frames.insert(frame);
        Ok(number)
    }

    /// The number of a stack of frames, the innermost first.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub fn stack(&mut self, frames: &[u32]) -> Result<StackId, OverBudget> {
        if let Some(known) = self.stacks.get_index_of(frames) {
            // CAST: as above.
            return Ok(StackId(known as u32));
        }
        self.claim.add(size_of_val(frames) + BOX_COST + ENTRY)?;
        let number = self.next_number(self.stacks.len())?;
        self.stacks.insert(frames.into());
        Ok(StackId(number))
    }

    /// The number of a frame in Python's syntax: `  File "train.py", line 12, in step`, followed by the source line. `None` for
    /// other texts.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub(super) fn printed_frame(&mut self, text: &str) -> Result<Option<u32>, OverBudget> {
        let Some((filename, rest)) =
            text.trim_start().strip_prefix("File \"").and_then(|rest| rest.split_once("\", line "))
        else {
            return Ok(None);
        };
        let rest = rest.lines().next().unwrap_or_default();
        let (line, name) = rest.split_once(", in ").unwrap_or((rest, ""));
        let frame =
            Frame { name: self.text(name)?, filename: self.text(filename)?, line: line.trim().parse().unwrap_or(0) };
        self.frame(frame).map(Some)
    }

    /// The number of a stack of the backward pass followed by the frames of the forward pass, which Python prints outermost
    /// first.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub(super) fn with_forward(&mut self, stack: StackId, forward: StackId) -> Result<StackId, OverBudget> {
        if forward.is_empty() {
            return Ok(stack);
        }
        let mark = Frame { name: self.text(FORWARD_PASS)?, ..Frame::default() };
        let mark = self.frame(mark)?;
        let forward = self.frame_numbers(forward).iter().rev().copied();
        let numbers: Vec<u32> = self.frame_numbers(stack).iter().copied().chain([mark]).chain(forward).collect();
        self.stack(&numbers)
    }

    /// No budget has room for more entries than 32 bits can number.
    fn next_number(&self, count: usize) -> Result<u32, OverBudget> {
        u32::try_from(count).map_err(|_| self.claim.refuse())
    }

    /// Adds an annotation.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub fn annotate(&mut self, annotation: Annotation) -> Result<(), OverBudget> {
        self.claim.push(&mut self.annotations, annotation)
    }

    /// Sets the origin of a block at the end.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub fn set_block(&mut self, device: u16, address: u64, origin: Origin) -> Result<(), OverBudget> {
        if origin != Origin::default() {
            self.claim.add(BLOCK_COST)?;
            self.blocks.insert((device, address), origin);
        }
        Ok(())
    }

    /// Sets the origin of the request that allocated a segment at the end.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub fn set_segment(&mut self, device: u16, address: u64, origin: Origin) -> Result<(), OverBudget> {
        if origin != Origin::default() {
            self.claim.add(BLOCK_COST)?;
            self.segments.insert((device, address), origin);
        }
        Ok(())
    }

    /// The text of a number.
    #[must_use]
    pub fn spelt(&self, text: TextId) -> &str {
        self.texts.get_index(text.0 as usize).map_or("", |text| text)
    }

    /// The frames of a stack, the innermost first.
    pub fn frames(&self, stack: StackId) -> impl DoubleEndedIterator<Item = Frame> + '_ {
        self.frame_numbers(stack).iter().map(|frame| self.frames[*frame as usize])
    }

    /// Every frame, each once.
    pub fn all_frames(&self) -> impl Iterator<Item = Frame> + '_ {
        self.frames.iter().copied()
    }

    /// The numbers of the frames of a stack.
    pub(super) fn frame_numbers(&self, stack: StackId) -> &[u32] {
        &self.stacks[stack.index()]
    }

    /// Number of different stacks, the empty one included.
    #[must_use]
    pub fn stacks(&self) -> usize {
        self.stacks.len()
    }

    /// Whether any event or block has a frame.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.stacks.len() > 1
    }

    /// Annotations in the order of the file.
    #[must_use]
    pub fn annotations(&self) -> &[Annotation] {
        &self.annotations
    }

    /// Origin of a block at the end; unknown for others.
    #[must_use]
    pub fn block(&self, device: u16, address: u64) -> Origin {
        self.blocks.get(&(device, address)).copied().unwrap_or_default()
    }

    /// Origin of the request that allocated a segment at the end.
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
        let [empty, first, second] = [&[][..], &[0], &[0, 1]].map(|frames| origins.stack(frames).unwrap());
        assert!(empty.is_empty() && !first.is_empty() && first != second);
        assert_eq!(origins.stack(&[0, 1]).unwrap(), second);
        let lines: Vec<u32> = origins.frames(second).map(|frame| frame.line).collect();
        assert_eq!(lines, [3, 9]);
        let first = origins.frames(second).next().unwrap();
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
