//! The tests of the allocators that need nothing special of a harness, as one program: it is linked once, and each core always has a test.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;
#[path = "common/facts.rs"]
mod facts;
#[path = "common/mutate.rs"]
mod mutate;
#[path = "replay/recorder.rs"]
mod recorder;

mod expandable;
mod family;
mod golden;
mod gone_streams;
mod hostile_files;
mod instruments;
mod instruments_threads_captures;
mod late;
mod layout;
mod metered;
mod model;
mod output;
mod peaks;
mod plain;
mod plan;
mod plan_backend;
mod pools;
mod registry;
mod replay;
mod rmm;
mod sim;
mod sim_graphs;
mod trace;
