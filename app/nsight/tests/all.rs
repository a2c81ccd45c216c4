//! The tests of `vramlab-nsight` as one program.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test reports a failure by panicking")]

mod common;

mod attribution;
mod export;
mod extracted;
mod idle;
mod names;
