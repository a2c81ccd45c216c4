//! The blocks of one stream on plain integers: records, free lists, counts, and the two rules that use them.
//!
//! Nothing here knows a device, reads a clock or needs `unsafe`.
#![forbid(unsafe_code)]

pub(crate) mod block_cache;
pub(crate) mod blocks;
pub(crate) mod exact_index;
pub(crate) mod free_index;
pub(crate) mod ranged_index;
pub(crate) mod small_index;
pub(crate) mod tally;
