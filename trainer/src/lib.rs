//! Trains a multilayer perceptron under a chosen GPU memory allocator, and records the allocator's calls, times and memory.
//!
//! [`run`] is the program without its command line: it takes settings and writes a run record. Everything that
//! a training step computes goes through [`Context`](tensor::Context), which allocates from the allocator under
//! study and nowhere else.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod allocators;
pub mod arithmetic;
mod calls;
mod check;
pub mod cli;
pub mod data;
pub mod device;
pub mod doctor;
mod error;
pub mod export;
pub mod latency;
pub mod loader;
pub mod mlp;
pub mod observer;
mod pinned;
mod progress;
pub mod ranks;
pub mod record;
pub mod report;
pub mod settings;
mod stack;
pub mod start;
pub mod tensor;
mod train;

pub use error::{Result, TrainError};
pub use settings::Settings;
pub use terminal::{exit, provenance};
pub use train::{LastAllocation, Outcome, run};
