//! PyTorch's memory snapshot as a pickle, protocols 2 to 5.
//!
//! A pickle is a program for a stack machine that can call any Python function. This machine has only the instructions that build
//! data, and refuses those that name or call something. [`snapshot`](super::snapshot) interprets the values and drops them. Only
//! the memo stays, eight bytes for each value that the file may refer to again, claimed from the budget. A truncated file is read
//! as far as possible.
//!
//! Source: Python's `Lib/pickle.py` and `pickletools.py`; the structure is that of `torch/csrc/cuda/Module.cpp`, whose two
//! writers (Python's pickler and PyTorch's own) are both supported.

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
