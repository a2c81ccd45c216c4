//! What the tests of the program share.

#![allow(dead_code, unused_imports, reason = "each test program uses its part")]

mod place;
pub(crate) mod story;

pub(crate) use place::*;
