//! Ranges on the timeline of a profiler, by NVTX push and pop.
//!
//! On when a tool is attached: Nsight Systems sets `NVTX_INJECTION64_PATH` for the programs that it starts. Off, a range costs one
//! branch.

pub mod memory;
mod stream_names;

use crate::contract::{AllocError, Block, DeviceAllocator, Instrument, Path, PrivatePool, Request};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;
use vramlab_device::{Bytes, StreamId};

/// Whether ranges are emitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NvtxMode {
    /// When a tool is attached.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Whether a tool that understands NVTX is attached to this process.
#[must_use]
pub fn tool_attached() -> bool {
    std::env::var_os("NVTX_INJECTION64_PATH").is_some_and(|path| !path.is_empty())
}

/// Emits ranges, or does nothing.
#[derive(Clone, Copy, Debug)]
pub struct Ranges {
    on: bool,
}

/// Ends its range when dropped.
#[must_use = "the range ends when this is dropped"]
#[derive(Debug)]
pub struct RangeGuard {
    on: bool,
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        if self.on {
            ::nvtx::range_pop!();
        }
    }
}

impl Ranges {
    /// Decides once, for the run.
    #[must_use]
    pub fn new(mode: NvtxMode) -> Self {
        Self {
            on: match mode {
                NvtxMode::Auto => tool_attached(),
                NvtxMode::On => true,
                NvtxMode::Off => false,
            },
        }
    }

    /// Whether ranges are emitted.
    #[must_use]
    pub fn is_on(self) -> bool {
        self.on
    }

    /// Opens a range on this thread; the name is only formatted when ranges are on.
    pub fn range(self, name: fmt::Arguments<'_>) -> RangeGuard {
        if self.on {
            ::nvtx::range_push!("{name}");
        }
        RangeGuard { on: self.on }
    }

    /// Marks an instant on this thread.
    pub fn mark(self, name: fmt::Arguments<'_>) {
        if self.on {
            ::nvtx::mark!("{name}");
        }
    }

    /// Names the current thread.
    pub fn name_thread(self, name: &str) {
        if self.on {
            ::nvtx::name_thread!("{name}");
        }
    }

    /// Names a stream of the GPU, which a tool otherwise shows by number.
    ///
    /// # Safety
    /// `stream` is a live stream of a [`CudaDriver`](vramlab_device::CudaDriver): the tool takes its value as CUDA's handle.
    pub unsafe fn name_stream(self, stream: StreamId, name: &str) {
        if self.on {
            // SAFETY: the caller's promise.
            unsafe { stream_names::name(stream, name) };
        }
    }
}

/// A range `alloc 1.5 MiB` or `free 1.5 MiB` around each operation, with a mark inside that names the path when it is not a plain
/// hit. (NVTX needs a range's name before the path is known.)
#[derive(Debug)]
pub struct Nvtx {
    inner: Arc<dyn DeviceAllocator>,
    ranges: Ranges,
}

impl Nvtx {
    /// Marks the operations of `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn DeviceAllocator>, ranges: Ranges) -> Self {
        Self { inner, ranges }
    }

    fn around(
        &self,
        request: Request,
        allocate: impl FnOnce(&dyn DeviceAllocator) -> Result<Block, AllocError>,
    ) -> Result<Block, AllocError> {
        let _range = self.ranges.range(format_args!("alloc {}", Bytes(request.bytes)));
        let result = allocate(self.inner.as_ref());
        self.mark(result.as_ref().map_or(Path::Failed, Block::path));
        result
    }

    fn mark(&self, path: Path) {
        if path != Path::Hit {
            self.ranges.mark(format_args!("{}", path.name()));
        }
    }
}

impl Instrument for Nvtx {
    fn inner(&self) -> &dyn DeviceAllocator {
        self.inner.as_ref()
    }

    fn allocate(&self, request: Request, stream: StreamId) -> Result<Block, AllocError> {
        self.around(request, |inner| inner.allocate(request, stream))
    }

    fn allocate_in(&self, request: Request, stream: StreamId, pool: PrivatePool) -> Result<Block, AllocError> {
        self.around(request, |inner| inner.allocate_in(request, stream, pool))
    }

    unsafe fn deallocate(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        let _range = self.ranges.range(format_args!("free {}", Bytes(block.requested())));
        // SAFETY: the caller's promise is the inner allocator's.
        let result = unsafe { self.inner.deallocate(block, stream) };
        self.mark(*result.as_ref().unwrap_or(&Path::Failed));
        result
    }
}
