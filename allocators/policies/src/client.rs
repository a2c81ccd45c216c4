//! Owners of memory in programs: buffers that free themselves, and graphs that keep their memory.

mod buffer;
mod graph;

pub use buffer::{DeviceBuffer, Memory, PinnedBuffer};
pub use graph::{Capture, Graph};
