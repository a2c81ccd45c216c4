//! A history beside a file of placements: whether the file is of this history, and where it puts each block.

use crate::formats::{Placed, Placements};
use crate::history::{DueFrees, History, Kind, Op, ReplayError, SegmentEvent};
use std::collections::HashMap;

/// What a replay is compared with.
#[derive(Debug)]
pub(super) struct Against {
    /// Address of each allocation, in order.
    pub(super) addresses: Vec<u64>,
    /// What comes from the device, in order.
    pub(super) upstream: Vec<SegmentEvent>,
    /// RMM's pool knows the default stream from the beginning, and gives it the first block. Unless that stream makes the
    /// first request it has to come before: a stream of the history, or one that is in none.
    pub(super) comes_before: Option<DefaultStream>,
}

/// The default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DefaultStream {
    /// The history's first: the one with handle zero.
    Recorded,
    /// Not in the history.
    Absent,
}

fn other(what: String) -> ReplayError {
    ReplayError::History(format!("{what}: the placements are those of another history"))
}

impl Against {
    /// # Errors
    /// [`ReplayError::History`] when the file is not of this history, or says too little of it.
    pub(super) fn new(history: &History, placements: &Placements) -> Result<Self, ReplayError> {
        if history.prologue_allocations() > 0 || !history.beginning.segments.is_empty() {
            let text = "the history began late, and where its first blocks lay is in no file of placements";
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
                    return Err(other(format!(
                        "the history has {} allocations and the file more",
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

/// The history and the file, call by call.
#[derive(Debug, Default)]
struct Matching {
    addresses: Vec<u64>,
    /// By slot of the history, the number of the allocation that is in it.
    slots: HashMap<u32, u32>,
    /// Frees of the history that have completed since the last allocation.
    completed: Vec<u32>,
    /// Those that complete later, by operation.
    due: DueFrees<u32>,
    /// Streams of the file by those of the history, and the other way round.
    streams: [HashMap<u32, u32>; 2],
}

impl Matching {
    /// Takes note of an operation's frees. The file has each where it completed.
    fn request(&mut self, number: u32, op: Op) {
        while let Some(freed) = self.due.complete(number) {
            self.completed.extend(freed);
        }
        if let (Kind::Free | Kind::Release, Some(&allocation)) = (op.kind(), self.slots.get(&op.slot)) {
            self.completed.extend(self.due.request(number, op, allocation));
        }
    }

    /// Compares what was freed between two allocations, in whatever order.
    fn freed(&mut self, mut by_file: Vec<u32>) -> Result<(), ReplayError> {
        let mut by_history = std::mem::take(&mut self.completed);
        by_history.sort_unstable();
        by_file.sort_unstable();
        if by_file == by_history {
            return Ok(());
        }
        let differs = |ours: &[u32], theirs: &[u32]| ours.iter().find(|own| !theirs.contains(own)).map(|own| own + 1);
        let what = match (differs(&by_history, &by_file), differs(&by_file, &by_history)) {
            (Some(own), _) => format!("the history frees allocation {own} there and the file does not"),
            (None, named) => format!("the file frees allocation {} there and the history does not", named.unwrap_or(0)),
        };
        Err(other(format!("after allocation {}, {what}", self.addresses.len())))
    }

    fn allocated(&mut self, op: Op, call: Option<Placed>) -> Result<(), ReplayError> {
        let number = self.addresses.len() + 1;
        let Some(Placed::Alloc { bytes, stream, addr }) = call else {
            return Err(other(format!("the file has {} allocations and the history more", number - 1)));
        };
        if bytes != op.value {
            let text =
                format!("allocation {number} is of {} bytes in the history and of {bytes} in the file", op.value);
            return Err(other(text));
        }
        let own = op.stream();
        let [to, from] = &mut self.streams;
        if *to.entry(own).or_insert(stream) != stream || *from.entry(stream).or_insert(own) != own {
            return Err(other(format!("allocation {number} is of another stream in the file")));
        }
        // CAST: a history has fewer than 2^32 operations.
        self.slots.insert(op.slot, (number - 1) as u32);
        self.addresses.push(addr);
        Ok(())
    }
}
