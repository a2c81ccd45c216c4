//! Bookkeeping on plain integers: rounding rules, block records, the index of free blocks.
//!
//! Nothing here knows a device, reads a clock or needs `unsafe`.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod free_index;
pub mod rounding;
