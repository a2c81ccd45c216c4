//! Recordings of allocations: their formats, compilation, replays, offline placement, and synthetic workloads.

pub mod calls;
pub mod compile;
pub mod formats;
pub mod history;
pub mod host;
pub mod memory;
pub mod plan;
mod random;
pub mod replay;
pub mod settings;
mod steps;
pub mod workload;
