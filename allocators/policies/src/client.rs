//! What programs hold: buffers that free themselves, and graphs that keep the memory that they use.

mod buffer;
mod graph;

pub use buffer::{DeviceBuffer, Memory, PinnedBuffer};
pub use graph::{Capture, Graph};
