//! Memory of buckets that are kept for a whole run: from the allocator or from NCCL, and registered with NCCL if that is chosen.

use super::{Device, Executor};
use crate::error::Result;
use crate::ranks::BucketSource;
use crate::tensor::Context;
use std::fmt;
use std::sync::Arc;
use vramlab::{DeviceAddr, DeviceBuffer};

/// What a buffer is freed by.
enum Memory {
    Allocator(DeviceBuffer),
    Nccl(DeviceAddr),
}

/// The buffer of a bucket.
pub(crate) struct KeptBuffer {
    executor: Arc<dyn Executor>,
    registered: bool,
    memory: Memory,
}

impl fmt::Debug for KeptBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptBuffer").field("addr", &self.addr()).field("registered", &self.registered).finish()
    }
}

impl KeptBuffer {
    /// A buffer of this size from a source, registered if that is chosen. Every rank calls this with the same size.
    ///
    /// # Errors
    /// Errors of the allocator, of the driver and of NCCL.
    pub(crate) fn new(context: &Context, bytes: u64, source: BucketSource, registers: bool) -> Result<Self> {
        let Device { executor, .. } = &context.device;
        let memory = match source {
            // CAST: far below the address space.
            BucketSource::Allocator => Memory::Allocator(context.allocate::<u8>(bytes as usize)?),
            BucketSource::Nccl => Memory::Nccl(executor.bucket_alloc(bytes)?),
        };
        let mut buffer = Self { executor: Arc::clone(executor), registered: false, memory };
        if registers {
            // SAFETY: this value frees the memory, and ends the registration before.
            buffer.registered = unsafe { buffer.executor.register(buffer.addr(), bytes)? };
        }
        Ok(buffer)
    }

    /// Whether NCCL has registered it.
    pub(crate) fn is_registered(&self) -> bool {
        self.registered
    }

    /// Its address.
    pub(crate) fn addr(&self) -> DeviceAddr {
        match &self.memory {
            Memory::Allocator(buffer) => buffer.addr(),
            Memory::Nccl(addr) => *addr,
        }
    }
}

impl Drop for KeptBuffer {
    fn drop(&mut self) {
        if self.registered {
            self.executor.deregister(self.addr());
        }
        if let Memory::Nccl(addr) = &self.memory {
            // SAFETY: allocated by `new`, freed once, and its registration has ended; the call waits for the device.
            unsafe { self.executor.bucket_free(*addr) };
        }
    }
}
