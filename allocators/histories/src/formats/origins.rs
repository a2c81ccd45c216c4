//! Where in a program events came from: stack frames, categories, notes and annotations, each kept once.
//!
//! A snapshot repeats the same few thousand stacks in millions of events. Texts, frames and stacks are numbered by what
//! they say, and an event's [`Origin`] is three numbers.

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

/// Name of the frame that divides a stack of the backward pass: before it are the frames of that, behind it those of the
/// forward pass, where the node of autograd was made. PyTorch has them under `torch.autograd.set_detect_anomaly`.
pub const FORWARD_PASS: &str = "=== forward pass ===";

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
    texts: IndexSet<Box<str>>,
    frames: IndexSet<Frame>,
    /// Numbers of the frames of each stack.
    stacks: IndexSet<Box<[u32]>>,
    annotations: Vec<Annotation>,
    blocks: BTreeMap<(u16, u64), Origin>,
    segments: BTreeMap<(u16, u64), Origin>,
    claim: Claim,
}

/// Something in a table with numbers: its hash, and its place there. Both sizes are held for a moment when it doubles.
const ENTRY: usize = 4 * size_of::<(u64, usize)>();
/// What the system's allocator adds to a text or a stack, and its pointer.
const BOX_COST: usize = 64;
/// A block's origin in its tree.
const BLOCK_COST: usize = 64;

impl Origins {
    /// None yet, to be kept within a budget.
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
    /// [`OverBudget`] when there is no room for another.
    pub fn text(&mut self, text: &str) -> Result<TextId, OverBudget> {
        // Most events have no note, and say so.
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
    /// [`OverBudget`] when there is no room for another.
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
    /// [`OverBudget`] when there is no room for another.
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

    /// The number of a frame as Python prints it: `  File "train.py", line 12, in step`, and the source's line below it.
    /// `None` where it is none.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
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

    /// The number of a stack of the backward pass with the frames of the forward pass behind it, which Python printed from
    /// the outermost in.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub(super) fn with_forward(&mut self, stack: StackId, forward: StackId) -> Result<StackId, OverBudget> {
        if forward.is_empty() {
            return Ok(stack);
        }
        let mark = Frame { name: self.text(FORWARD_PASS)?, ..Frame::default() };
        let mark = self.frame(mark)?;
        let forward = self.frame_numbers(forward).iter().rev().copied();
        let whole: Vec<u32> = self.frame_numbers(stack).iter().copied().chain([mark]).chain(forward).collect();
        self.stack(&whole)
    }

    /// More than can be named is more than any budget has room for.
    fn next_number(&self, count: usize) -> Result<u32, OverBudget> {
        u32::try_from(count).map_err(|_| self.claim.refuse())
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
