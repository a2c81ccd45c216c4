//! Histories of allocations: the formats they are kept in, compiling and replaying them, planning them, and made ones.

pub mod calls;
pub mod compile;
pub mod formats;
pub mod history;
pub mod memory;
pub mod plan;
mod random;
pub mod replay;
pub mod settings;
mod steps;
pub mod workload;
