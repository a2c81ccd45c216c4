//! The tests of `experiments` as one program: it is linked once, and every core stays busy with a test.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;
#[cfg(unix)]
#[path = "../../../app/terminal/tests/common/pty.rs"]
mod pty;
#[cfg(unix)]
#[path = "../../../app/terminal/tests/common/signals.rs"]
mod signals;

mod advise_truth;
mod bench_fidelity;
mod campaign;
mod cli;
mod commands;
mod forked_run;
mod pack;
mod register;
mod rooms;
mod run;
mod runners;
mod schema_document;
mod screen;
mod simulate_ranks;
mod specs;
