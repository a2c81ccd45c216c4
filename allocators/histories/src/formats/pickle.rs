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
use super::{Place, ReadError, ReadOptions, Summary};

/// The entry in the [list](super::list).
pub(super) const READER: Reader = Reader {
    name: "snapshot",
    begins: |start| start.bytes.first() == Some(&0x80) || old_form(start.bytes).is_some(),
    read,
    snapshot: true,
};

/// The beginning of pickles of protocols 0 and 1: an empty dictionary or list, and its number in the memo.
const OLD_PROTOCOLS: [&[u8]; 4] = [b"(dp", b"(lp", b"}q", b"]q"];
/// The number 0x1950a86a20f9469cfc6c, in a pickle before the others in files of `torch.save` before PyTorch 1.6: in binary, and as
/// protocols 0 and 1 write it.
const OLD_SAVE: [&[u8]; 2] = [b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L\n."];
/// That pickle ends within these bytes.
const OLD_SAVE_END: usize = 32;

/// What a pickle is that is not read, and how to convert it.
fn old_form(start: &[u8]) -> Option<&'static str> {
    let first = &start[..start.len().min(OLD_SAVE_END)];
    if OLD_SAVE.iter().any(|number| first.windows(number.len()).any(|bytes| bytes == *number)) {
        return Some(
            "is in the form of torch.save before PyTorch 1.6, which is not read; convert it: python3 -c 'import sys, torch; \
             torch.save(torch.load(sys.argv[1]), sys.argv[2])' OLD NEW",
        );
    }
    OLD_PROTOCOLS.iter().any(|begin| start.starts_with(begin)).then_some(
        "is a pickle of protocol 0 or 1, only 2 to 5 are read; if you trust it, convert it: python3 -c 'import pickle, sys; \
         pickle.dump(pickle.load(open(sys.argv[1], \"rb\")), open(sys.argv[2], \"wb\"), 4)' OLD NEW",
    )
}

/// Reads a snapshot.
fn read(input: &mut Input<'_>, options: &ReadOptions, receiver: &mut Receiver<'_>) -> Result<Summary, ReadError> {
    input.ensure(OLD_SAVE_END)?;
    if let Some(problem) = old_form(input.buffered()) {
        return Err(ReadError::content(Place::Whole, problem));
    }
    machine::Machine::new(input, options, receiver).run()
}
