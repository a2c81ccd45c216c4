//! Pinned host memory: what a program requested and used, and its replay under other allocators.
//!
//! Three kinds of files have it: PyTorch's snapshots from 2.14 on (`host_traces`), traces of pinned calls that `vramlab run` writes, and
//! any other trace, read as requests of host memory. [`HostTrace`] is what they have in common; [`replay_host`] sends it to an allocator
//! over a simulated host.

mod replay;
mod trace;

pub use replay::{HostReplay, HostReport, Overruns, Side, replay_host};
pub use trace::{HostBlock, HostOp, HostTrace, HostTraceBuilder, RecordedLimits, Sizes};
