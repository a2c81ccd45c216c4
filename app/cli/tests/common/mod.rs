//! Shared code of the program's tests.

pub(crate) mod story;
mod test_dir;

pub(crate) use test_dir::*;
