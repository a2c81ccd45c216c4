//! Histories of allocations: the formats they are kept in, replaying them under any allocator, planning them, and made ones.

pub mod plan;
pub mod recorded;
pub mod replay;
pub mod trace;
pub mod workload;
