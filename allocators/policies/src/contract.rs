//! The contract of every allocator: requests, blocks, statistics, snapshots, errors.
//!
//! [`DeviceAllocator`] is the upper seam: a small core that every backend implements, and optional [`Parts`] that callers query. An
//! [`Instrument`] wraps an allocator; programs use one through [`Memory`](crate::Memory).

mod allocator;
mod block;
mod error;
mod event;
mod exported;
mod instrument;
mod parts;
mod private_pool;
mod snapshot;
mod stats;
mod token;

pub use allocator::{DeviceAllocator, Request};
pub use block::{Block, GUARANTEED_ALIGN, Path};
pub use error::{AllocError, OomReport, Refused, RestoreError};
pub use event::{Action, Event};
pub use exported::Exported;
pub use instrument::Instrument;
pub use parts::{Completions, GraphMemory, MemoryLimit, Pages, Parts, PrivatePools, Takeover};
pub(crate) use parts::{no_checkpoints, no_pages, no_private_pools};
pub use private_pool::{CaptureId, PrivatePool};
pub use snapshot::{Attribution, BlockInfo, BlockState, Ledger, SegmentInfo, Snapshot};
pub use stats::{Gauge, PeakKind, PoolKind, PooledGauge, Stats, Steals};
pub use token::{Token, Tokens};
