//! What every allocator promises: requests, blocks, statistics, snapshots, errors.
//!
//! [`DeviceAllocator`] is the upper seam. Backends implement it, instruments wrap it, and programs use it through
//! [`Memory`](crate::Memory).

mod allocator;
mod block;
mod error;
mod event;
mod exported;
mod private_pool;
mod snapshot;
mod stats;
mod token;

pub(crate) use allocator::no_checkpoints;
pub use allocator::{DeviceAllocator, Request};
pub use block::{Block, GUARANTEED_ALIGN, Path};
pub use error::{AllocError, OomReport, Refused, RestoreError};
pub use event::{Action, Event};
pub use exported::Exported;
pub(crate) use exported::no_pages;
pub use private_pool::{CaptureId, PrivatePool};
pub use snapshot::{Attribution, BlockInfo, BlockState, Ledger, SegmentInfo, Snapshot};
pub use stats::{Gauge, PeakKind, PoolKind, PooledGauge, Stats, Steals};
pub use token::{Token, Tokens};
