//! libvramlab: the allocators as a C library, without knowledge of PyTorch or Python.
//!
//! A program opens an allocator on a device by name, allocates and frees on streams that it made itself, and asks for
//! statistics and snapshots. The header `include/vramlab.h` is made from these sources.
//!
//! # Safety
//! These promises of the program apply to every function. The comments of functions refer to them by their copy at the top of the
//! header, and `SAFETY` lines refer to them as well:
//! - a `vramlab` pointer is null, or came from `vramlab_open` and was not closed; the same applies to checkpoints. Null is an
//!   error.
//! - other pointers are null or point to memory of their type, which no other thread uses during the call. Texts end with a zero
//!   byte.
//! - a stream is the handle of a live CUDA stream of the device, until `vramlab_stream_gone`; on a simulated device any number. No
//!   thread ends a capture of it while another thread's call names it.
//! - work that uses a block is queued before its free, on the block's stream or on streams that were recorded for it.
//!
//! Any thread may call, at any time of its life and the process's, also in handlers of `atexit` and destructors of thread-specific
//! data, but not in handlers of signals, because calls take locks. In a child after `fork` every call is an error.

// First, because the header lists functions in the order of modules.
mod functions;

mod allocator;
mod arguments;
mod device;
mod driver;
mod error;
mod held;
mod host;
mod notices;
mod records;

pub use allocator::pinned::*;
pub use allocator::shared::*;
pub use allocator::{Allocator, Checkpoint};
pub use driver::{SegmentAction, SegmentEvent};
pub use error::Status;
pub use functions::*;
pub use host::{Durations, Pinning};
pub use records::{BlockRecord, BlockStateRecord, Gauge, Pooled, SegmentRecord, StatsRecord};

/// Number of this interface. It changes when a program that was built with an older header no longer works.
pub const VRAMLAB_ABI: u32 = 1;
/// No limit, for `vramlab_set_limit`.
pub const VRAMLAB_NO_LIMIT: u64 = u64::MAX;
/// The allocator has private pools.
pub const VRAMLAB_CAN_POOLS: u32 = 1;
/// Private pools can be restored to a checkpoint.
pub const VRAMLAB_CAN_CHECKPOINT: u32 = 2;
/// The allocator knows its segments and blocks.
pub const VRAMLAB_CAN_SNAPSHOT: u32 = 4;
/// Segments are ranges of addresses that are mapped in parts.
pub const VRAMLAB_CAN_EXPAND: u32 = 8;
/// Every block has the address that PyTorch's allocator would return.
pub const VRAMLAB_FOLLOWS_PYTORCH: u32 = 16;
