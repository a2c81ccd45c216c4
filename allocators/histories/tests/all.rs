//! Tests of recordings, replays and plans as one program, which links once and keeps every core busy.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "../../policies/tests/common/mod.rs"]
mod common;
#[path = "common/facts.rs"]
mod facts;
#[path = "common/mutate.rs"]
mod mutate;
#[path = "replay/recorder.rs"]
mod recorder;

mod beginning;
mod host;
mod hostile_files;
mod plan;
mod plan_backend;
mod private_pools;
mod recorded_programs;
mod replay;
mod rmm;
mod trace;
