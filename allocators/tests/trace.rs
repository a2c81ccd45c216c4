//! Histories: what is read from the formats of others, and what is written for them.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "trace/common.rs"]
mod common;
#[path = "common/facts.rs"]
mod facts;
#[path = "trace/hostile_pickle.rs"]
mod hostile_pickle;
#[path = "trace/origins.rs"]
mod origins;
#[path = "trace/pieces.rs"]
mod pieces;
#[path = "trace/round_trip.rs"]
mod round_trip;
#[path = "trace/schema.rs"]
mod schema;
#[path = "trace/snapshots.rs"]
mod snapshots;
#[path = "trace/text.rs"]
mod text;
