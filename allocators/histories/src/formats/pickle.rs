//! PyTorch's memory snapshot as a pickle, protocols 2 to 5.
//!
//! A pickle is a program for a stack machine that can call any Python function. This machine knows only the
//! instructions that build data; those that name or call something are refused by name. It runs through the file once:
//! an event becomes an [`Event`](super::Event) when it is appended to its device's list and is then forgotten. Stack frames
//! become numbers ([`Origins`](super::Origins)), or nothing where the receiver does not ask for them. What stays is the memo, eight bytes for
//! each thing that the file may refer back to, and it is claimed from the budget. A file that breaks off is read as far as
//! it is whole.
//!
//! Source: Python's `Lib/pickle.py` and `pickletools.py`; the structure is that of
//! `torch/csrc/cuda/Module.cpp`, whose two writers (Python's pickler and PyTorch's own) are both understood.

mod allocator_settings;
mod cut;
mod frames;
mod machine;
mod memo;
mod snapshot;
mod store;

use super::input::Input;
use super::list::Reader;
use super::summary::{Receiver, Room};
use super::{Format, Origin, ReadError, ReadOptions, Summary};
use vramlab_device::budget::{Budget, Claim};

/// The entry in the [list](super::list).
pub(super) const READER: Reader =
    Reader { name: "snapshot", begins: |start| start.bytes.first() == Some(&0x80), read, snapshot: true };

/// Reads a snapshot.
fn read(input: &mut Input<'_>, options: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    machine::Machine::new(input, options, receiver).run()
}

/// What was understood, and the receiver of the events.
struct Outcome<'r, 's> {
    receiver: &'r mut Receiver<'s>,
    summary: Summary,
    /// For the summary.
    claim: Claim,
    /// What the settings may still take.
    room: Room,
    /// Where the blocks of the segment under way came from, by address. No more than its list of blocks has.
    block_origins: Vec<(u64, Origin)>,
}

impl<'r, 's> Outcome<'r, 's> {
    fn new(receiver: &'r mut Receiver<'s>, budget: &Budget) -> Self {
        let summary = Summary::new(Format::SnapshotPickle);
        Self { receiver, summary, claim: budget.claim(), room: Room::default(), block_origins: Vec::new() }
    }

    /// The summary, which stays claimed.
    fn into_summary(self) -> Summary {
        self.claim.keep();
        self.summary
    }
}
