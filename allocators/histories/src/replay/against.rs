//! A recording and a file of placements: whether they belong together, and the address of each block.

use crate::formats::{Placed, Placements};
use crate::history::{DueFrees, History, Kind, Op, ReplayError, SegmentEvent};
use std::collections::HashMap;

/// Placements to compare a replay with.
#[derive(Debug)]
pub(super) struct Against {
    /// Address of each allocation, in order.
    pub(super) addresses: Vec<u64>,
    /// Memory allocated from the device, in order.
    pub(super) upstream: Vec<SegmentEvent>,
    /// RMM's pool knows the default stream from the beginning, and gives it the first block. Unless that stream makes the first
    /// request, it has to come first: a stream of the recording, or one that is not in it.
    pub(super) comes_before: Option<DefaultStream>,
}

/// The default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DefaultStream {
    /// The recording's first: the one with handle zero.
    Recorded,
    /// Not in the recording.
    Absent,
}

fn mismatch(problem: String) -> ReplayError {
    ReplayError::History(format!("{problem}: the placements belong to another recording"))
}

impl Against {
    /// # Errors
    /// [`ReplayError::History`] when the file belongs to another recording, or is incomplete.
    pub(super) fn new(history: &History, placements: &Placements) -> Result<Self, ReplayError> {
        if history.prologue_allocations() > 0 || !history.beginning.segments.is_empty() {
            let text = "the recording began late, and files of placements do not contain its first blocks";
            return Err(ReplayError::History(text.to_owned()));
        }
        let mut matching = Matching::default();
        let mut calls = placements.calls.iter().copied().peekable();
        for (number, op) in (0..).zip(&history.ops) {
            matching.request(number, *op);
            if op.kind() == Kind::Alloc {
                let freed = std::iter::from_fn(|| match calls.peek() {
                    Some(&Placed::Free(allocation)) => calls.next().map(|_| allocation),
                    _ => None,
                });
                matching.freed(freed.collect())?;
                matching.allocated(*op, calls.next())?;
            }
        }
        matching.request(u32::MAX, Op::new(Kind::Nothing, 0, 0, 0));
        let mut rest = Vec::new();
        for call in calls {
            match call {
                Placed::Free(allocation) => rest.push(allocation),
                Placed::Alloc { .. } => {
                    return Err(mismatch(format!(
                        "the recording has {} allocations and the file more",
                        matching.addresses.len()
                    )));
                }
            }
        }
        matching.freed(rest)?;
        let upstream = placements.upstream.iter().map(|&(addr, bytes)| SegmentEvent::made(addr, bytes, 0));
        let default = if history.streams.first() == Some(&0) { DefaultStream::Recorded } else { DefaultStream::Absent };
        let first = history.ops.iter().find(|op| op.kind() == Kind::Alloc).map(|op| op.stream());
        let comes = default == DefaultStream::Recorded && first == Some(0) || !placements.default_comes_first;
        let comes_before = (!comes).then_some(default);
        Ok(Self { addresses: matching.addresses, upstream: upstream.collect(), comes_before })
    }
}

/// The recording and the file, call by call.
#[derive(Debug, Default)]
struct Matching {
    addresses: Vec<u64>,
    /// The allocation in each slot of the recording.
    slots: HashMap<u32, u32>,
    /// Frees of the recording that have completed since the last allocation.
    completed: Vec<u32>,
    /// Deferred frees, by operation.
    due: DueFrees<u32>,
    /// Streams of the file by those of the recording, and vice versa.
    streams: [HashMap<u32, u32>; 2],
}

impl Matching {
    /// Records an operation's frees. The file has each at its completion.
    fn request(&mut self, number: u32, op: Op) {
        while let Some(freed) = self.due.complete(number) {
            self.completed.extend(freed);
        }
        if let (Kind::Free | Kind::Release, Some(&allocation)) = (op.kind(), self.slots.get(&op.slot)) {
            self.completed.extend(self.due.request(number, op, allocation));
        }
    }

    /// Compares the frees between two allocations, in any order.
    fn freed(&mut self, mut by_file: Vec<u32>) -> Result<(), ReplayError> {
        let mut by_history = std::mem::take(&mut self.completed);
        by_history.sort_unstable();
        by_file.sort_unstable();
        if by_file == by_history {
            return Ok(());
        }
        let differs =
            |these: &[u32], others: &[u32]| these.iter().find(|free| !others.contains(free)).map(|free| free + 1);
        let problem = match (differs(&by_history, &by_file), differs(&by_file, &by_history)) {
            (Some(free), _) => format!("the recording frees allocation {free} there and the file does not"),
            (None, named) => {
                format!("the file frees allocation {} there and the recording does not", named.unwrap_or(0))
            }
        };
        Err(mismatch(format!("after allocation {}, {problem}", self.addresses.len())))
    }

    fn allocated(&mut self, op: Op, call: Option<Placed>) -> Result<(), ReplayError> {
        let number = self.addresses.len() + 1;
        let Some(Placed::Alloc { bytes, stream, addr }) = call else {
            return Err(mismatch(format!("the file has {} allocations and the recording more", number - 1)));
        };
        if bytes != op.value {
            let text =
                format!("allocation {number} is of {} bytes in the recording and of {bytes} in the file", op.value);
            return Err(mismatch(text));
        }
        let recorded_stream = op.stream();
        let [to, from] = &mut self.streams;
        if *to.entry(recorded_stream).or_insert(stream) != stream
            || *from.entry(stream).or_insert(recorded_stream) != recorded_stream
        {
            return Err(mismatch(format!("allocation {number} is of another stream in the file")));
        }
        // CAST: a recording has fewer than 2^32 operations.
        self.slots.insert(op.slot, (number - 1) as u32);
        self.addresses.push(addr);
        Ok(())
    }
}
