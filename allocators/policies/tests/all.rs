//! The tests of policies and instruments as one program: it is linked once, and each core always has a test.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

mod captured_memory;
mod expandable;
mod frees_during_a_flush;
mod gone_streams;
mod host;
mod instruments;
mod instruments_threads_captures;
mod layout;
mod model;
mod models_of_libraries;
mod other_libraries;
mod registry;
mod rmm;
mod stats;
