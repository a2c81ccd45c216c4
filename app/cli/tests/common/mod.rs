//! What the tests of the program share.

mod place;
pub(crate) mod story;

pub(crate) use place::*;
