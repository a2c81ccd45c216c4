//! The backends: one file each, and the [list](registry) of their names, settings and capabilities.

pub mod bfc;
pub mod caching;
mod captures;
pub mod cupy;
pub mod expandable;
pub mod gmlake;
pub mod host_cupy;
pub mod host_exact;
pub mod host_pytorch;
pub mod host_rmm_pool;
pub mod lab;
pub mod naive;
pub mod paddle;
pub mod plan;
pub mod pooled;
mod private_pools;
pub mod pytorch;
pub mod registry;
pub mod remap;
mod restore;
pub mod rmm_arena;
pub mod rmm_pool;
pub mod stream_ordered;
pub mod tlsf;

pub use bfc::{Bfc, BfcSettings};
pub use caching::{Caching, CachingSettings};
pub use cupy::CuPySettings;
pub use expandable::{ExpandableSettings, PyTorchExpandable};
pub use gmlake::{GmLake, GmLakeSettings};
pub use host_exact::{HostExact, HostExactSettings};
pub use host_pytorch::{HostPyTorch, HostPyTorchSettings, HostRelease};
pub use lab::{Lab, LabSettings};
pub use naive::Naive;
pub use paddle::{Paddle, PaddleSettings};
pub use plan::{Plan, PlanFile, PlanSettings, PlanTable};
pub use pooled::{Found, Policy, Pooled, Rules};
pub use pytorch::{PyTorch, PyTorchSettings};
pub use registry::{
    Backend, Capabilities, Constructor, GraphCapture, MemoryKind, Needs, RegisterError, SegmentUse, Selection,
    SelectionError, StreamUse, TorchAllocator, UnknownBackend, Varying, With, all, compared, find, hosts, of_torch,
    parse_host_list, parse_list, register,
};
pub use remap::{Remap, RemapSettings};
pub use rmm_arena::{RmmArena, RmmArenaSettings};
pub use rmm_pool::{RmmPool, RmmPoolSettings};
pub use stream_ordered::StreamOrdered;
pub use tlsf::TlsfSettings;

use crate::contract::{AllocError, Block};

const NOT_LIVE: &str = "it is not among the live blocks";

/// The error for a block that is not live here; it contains the block.
#[cold]
fn foreign(allocator: &str, block: Block) -> AllocError {
    AllocError::foreign(allocator, NOT_LIVE, block)
}

/// The error for a block that is not live here and that the caller keeps.
#[cold]
fn not_held(allocator: &str, block: &Block) -> AllocError {
    AllocError::not_held(allocator, NOT_LIVE, block)
}
