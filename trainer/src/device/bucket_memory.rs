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
    /// Whether NCCL has registered it, and its reason for a refusal; absent where registration was not chosen.
    registration: Option<(bool, Option<String>)>,
    memory: Memory,
}

impl fmt::Debug for KeptBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptBuffer").field("addr", &self.addr()).field("registration", &self.registration).finish()
    }
}

impl KeptBuffer {
    /// A buffer of this size from a source, registered if that is chosen and NCCL does so. Every rank calls this with the same size.
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
        let mut buffer = Self { executor: Arc::clone(executor), registration: None, memory };
        if registers {
            // SAFETY: this value frees the memory, and ends the registration before.
            buffer.registration = Some(unsafe { buffer.executor.register(buffer.addr(), bytes) });
        }
        Ok(buffer)
    }

    /// Whether NCCL has registered it.
    pub(crate) fn is_registered(&self) -> bool {
        self.registration.as_ref().is_some_and(|(registered, _)| *registered)
    }

    /// NCCL's reason for refusing it.
    pub(crate) fn refusal(&self) -> Option<&str> {
        self.registration.as_ref().and_then(|(_, refusal)| refusal.as_deref())
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
        // Also where only one of two communicators registered it.
        if self.registration.is_some() {
            self.executor.deregister(self.addr());
        }
        if let Memory::Nccl(addr) = &self.memory {
            // SAFETY: allocated by `new`, freed once, and its registration has ended; the call waits for the device.
            unsafe { self.executor.bucket_free(*addr) };
        }
    }
}
