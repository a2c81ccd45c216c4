//! Which CUDA calls waited for the device, for how long, and behind which work: from a capture of Nsight Systems.
//!
//! [`read`] loads an SQLite export (`nsys export --type sqlite`) into a [`Capture`], and the tables that
//! [`extract`] wrote for publication. [`attribute`] finds the wait in each call.
//! [`idle`] explains why the device had nothing to do, and [`places`] groups memory calls by NVTX range.

mod attribution;
mod capture;
mod export;
mod extracted;
pub mod idle;
pub mod names;
pub mod places;
pub mod python;
mod queue;
mod tables;

pub use attribution::{Attribution, Evidence, Wait, attribute};
pub use capture::{Call, CallName, Capture, Mark, Overhead, Range, Source, Work, WorkKind, steps};
pub use export::{Error, read};
pub use extracted::{DESCRIPTION, extract};
