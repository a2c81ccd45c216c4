//! All tests of `vramlab` as one program, which is linked once.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;
#[path = "../../../allocators/histories/tests/common/mutate.rs"]
#[allow(dead_code, reason = "no test mutates here")]
mod mutate;
#[path = "../../nsight/tests/common/mod.rs"]
#[allow(dead_code, reason = "these tests make few kinds of records")]
mod nsight_export;
#[cfg(unix)]
#[path = "../../../app/terminal/tests/common/pty.rs"]
mod pty;
#[cfg(unix)]
#[path = "../../../app/terminal/tests/common/signals.rs"]
mod signals;

mod advise;
mod advise_agreement;
mod advise_settings;
mod convert;
mod damaged_histories;
mod deep_stacks;
mod diff;
mod explain;
mod explain_causes_frames;
mod explain_moments;
mod foreign_files;
mod full_gpu;
mod gpus;
mod host;
mod nsight;
mod oom;
mod oom_engines;
mod output;
mod pools;
mod program;
mod program_changes;
mod replay;
mod report;
mod reserved_breakdown;
mod run;
mod strangers;
