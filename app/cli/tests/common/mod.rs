//! Shared code of the program's tests.

mod place;
pub(crate) mod story;

pub(crate) use place::*;
