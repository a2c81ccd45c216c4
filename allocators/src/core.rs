//! Bookkeeping on plain integers: rounding rules, block records, the index of free blocks, and the cache that
//! they make up.
//!
//! Nothing here knows a device, reads a clock or needs `unsafe`.
#![forbid(unsafe_code)]

pub mod block_cache;
pub mod blocks;
pub mod exact_index;
pub mod free_index;
mod join;
pub mod ranged_index;
pub(crate) mod ranges;
mod repeat;
pub mod rounding;
pub mod tally;
