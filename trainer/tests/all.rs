//! The tests of the trainer as one program: it is linked once, and each core always has a test.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;
#[path = "../../allocators/histories/tests/common/mutate.rs"]
mod mutate;
#[cfg(unix)]
#[path = "../../app/terminal/tests/common/pty.rs"]
mod pty;
#[cfg(unix)]
#[path = "../../app/terminal/tests/common/signals.rs"]
mod signals;

mod arithmetic;
mod cli;
mod data;
mod export;
mod gradient;
mod latency;
mod launch;
mod pinned;
mod readme;
mod same_loss;
mod schema;
mod screen;
mod start;
