//! Histories of allocations: the formats they are kept in, replaying them under any allocator, and made ones.

pub mod replay;
pub mod trace;
pub mod workload;
