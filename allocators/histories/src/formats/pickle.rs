//! PyTorch's memory snapshot as a pickle, protocols 2 to 5.
//!
//! A pickle is a program for a stack machine that can call any Python function. This machine knows only the
//! instructions that build data; those that name or call something are refused by name. What it builds is understood by
//! [`snapshot`](super::snapshot) and forgotten. What stays is the memo, eight bytes for each thing that the file may refer
//! back to, and it is claimed from the budget. A file that breaks off is read as far as it is whole.
//!
//! Source: Python's `Lib/pickle.py` and `pickletools.py`; the structure is that of
//! `torch/csrc/cuda/Module.cpp`, whose two writers (Python's pickler and PyTorch's own) are both understood.

mod machine;
mod memo;

use super::input::Input;
use super::list::Reader;
use super::summary::Receiver;
use super::{ReadError, ReadOptions, Summary};

/// The entry in the [list](super::list).
pub(super) const READER: Reader =
    Reader { name: "snapshot", begins: |start| start.bytes.first() == Some(&0x80), read, snapshot: true };

/// Reads a snapshot.
fn read(input: &mut Input<'_>, options: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    machine::Machine::new(input, options, receiver).run()
}
