//! Bookkeeping on plain integers: block records, the index of free blocks, and the cache that
//! they make up.
//!
//! Nothing here knows a device, reads a clock or needs `unsafe`.
#![forbid(unsafe_code)]

pub(crate) mod block_cache;
pub(crate) mod blocks;
pub(crate) mod exact_index;
pub(crate) mod free_index;
mod join;
pub(crate) mod ranged_index;
pub(crate) mod tally;
