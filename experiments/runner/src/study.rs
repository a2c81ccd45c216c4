//! `experiments run`, `status`, `list` and `pack`: experiments that specs describe.
//!
//! A spec is a question and the runs that answer it: programs and options, crossed and repeated. Each run is a
//! separate process (a CUDA context and the allocators' caches belong to a process), in an order from the spec's seed.
//! A run's directory appears only when complete, so a killed runner can resume; shards merge by copying their
//! directories together, or work in one directory.

mod commands;
mod compared;
mod execute;
pub(crate) mod figures;
#[cfg(unix)]
mod forks;
mod hung;
mod inside;
mod list;
pub(crate) mod lock;
mod neighbours;
mod pack;
pub(crate) mod plan;
mod printed;
pub(crate) mod process;
mod programs;
pub(crate) mod record;
mod report;
pub(crate) mod run;
pub(crate) mod spec;
mod status;
mod turns;
mod work;

use std::process::ExitStatus;
use terminal::RuntimeFailure;

pub(crate) use list::{ListArgs, list};
pub(crate) use pack::{PackArgs, pack};
pub(crate) use run::{RunArgs, run};
pub(crate) use status::{StatusArgs, status};

/// The error of this program when a process that it waited for failed.
pub(crate) fn ended(status: ExitStatus, text: String) -> anyhow::Error {
    // A process that a signal ended has no exit code.
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    RuntimeFailure::with_code(code, text).into()
}
