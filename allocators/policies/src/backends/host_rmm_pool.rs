//! # `host-rmm-pool`: RMM's pool over pinned host memory
//!
//! The policy of `rmm::mr::pool_memory_resource<rmm::mr::pinned_host_memory_resource>`. The resource below has no cache: each of its
//! requests is one `cudaHostAlloc`. The pool is the one of device memory: sizes in steps of 256 bytes, splits, coalesces, and growth
//! by doubling or, with a maximum, by half of what remains. [`rmm_pool`] has its rules.
//!
//! *Differences from RMM.* Those of [`rmm_pool`]. RMM names no default for the first block; here it is that of the
//! pool of device memory. With a first block the pool may refuse a request below its maximum, as RMM's does
//! (<https://github.com/rapidsai/rmm/issues/1664>, <https://github.com/rapidsai/rmm/issues/1957>): what remains is pinned in halves.
//!
//! *Good at* few pinning calls. *Bad at* memory: doubling pins up to twice what is needed, and nothing is released before the end.
//!
//! *Cost.* That of [`rmm_pool`].
//!
//! *Source.* RMM at 5d50a37b: `mr/pinned_host_memory_resource.hpp`, `mr/pool_memory_resource.hpp`.

use super::registry::{Backend, Capabilities, MemoryKind, With};
use super::rmm_pool::{self, RmmPool, RmmPoolSettings};
use std::sync::Arc;

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "host-rmm-pool",
    summary: "pinned host memory as RMM's pool has it: exact splits, a pool that doubles",
    capabilities: Capabilities { memory: MemoryKind::Host, ..rmm_pool::BACKEND.capabilities },
    compared: true,
    constructor: &With(|driver, settings: &RmmPoolSettings| {
        Ok(Arc::new(RmmPool::named(BACKEND.name, driver, *settings)))
    }),
};
