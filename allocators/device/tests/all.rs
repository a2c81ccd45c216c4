//! The tests of devices and of what they share as one program: it is linked once, and each core always has a test.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

mod links;
mod metered;
mod output;
mod sim;
mod sim_graphs;
