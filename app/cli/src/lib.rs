//! The program `vramlab`, which runs and records CUDA programs and analyzes recordings of GPU memory, and the functions of it that
//! `experiments` calls.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod advise;
mod capacity;
mod command_line;
mod convert;
mod curves;
mod diff;
mod explain;
mod gpus;
mod history;
mod host;
mod nsight;
mod oom;
mod output;
mod plan;
mod python;
mod reading;
mod recording;
mod replay;
mod report;
mod run;
mod tried;
mod words;

pub use advise::{Predicted, Predictions, predict};
pub use command_line::{command, main};
pub use history::read_history;
