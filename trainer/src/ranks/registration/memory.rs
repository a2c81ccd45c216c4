//! Kinds of memory that hold buffers.

use crate::error::{Result, TrainError};
use crate::ranks::nccl::Nccl;
use serde::{Deserialize, Serialize};
use std::ptr::NonNull;
use std::sync::Arc;
use vramlab::device::{MemoryProperties, PhysicalHandle, PoolId};
use vramlab::{CudaDriver, DeviceAddr, Driver, PoolSettings, StreamId};

vramlab::device::named! {
    /// A kind of memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum BufferMemory {
        /// `cuMemAlloc`, as under `caching`.
        Device "device",
        /// A pool of this process and GPU, as under `stream-ordered`.
        Pool "pool",
        /// A pool that other processes can import, open to the other GPUs.
        PoolShared "pool-shared",
        /// One mapped handle without a shareable handle.
        Mapped "mapped",
        /// One mapped handle that other processes can import, open to the other GPUs.
        MappedShared "mapped-shared",
        /// As `mapped-shared`, in handles of the device's granularity, as under `pytorch-expandable` and `remap`.
        PagesShared "pages-shared",
        /// `ncclMemAlloc`.
        Nccl "nccl",
        /// Page-locked memory of the host.
        Pinned "pinned",
    }
}

impl BufferMemory {
    /// The largest collective to measure: sums over the host's memory take long.
    pub(super) fn largest(self) -> u64 {
        if self == Self::Pinned { 32 << 20 } else { u64::MAX }
    }
}

/// Memory of some kind, with what frees it.
#[derive(Debug)]
enum Held {
    Device(DeviceAddr),
    Pool(PoolId, DeviceAddr),
    Mapped(DeviceAddr, Vec<PhysicalHandle>, u64),
    Nccl(DeviceAddr),
    Pinned(NonNull<u8>, usize),
}

/// A piece of memory.
#[derive(Debug)]
pub(super) struct Memory {
    held: Held,
    bytes: u64,
}

impl Memory {
    /// New memory of this kind. It is not freed when dropped.
    ///
    /// # Errors
    /// Errors of the driver and of NCCL.
    pub(super) fn new(
        kind: BufferMemory,
        bytes: u64,
        driver: &Arc<CudaDriver>,
        (nccl, stream): (&Nccl, StreamId),
    ) -> Result<Self> {
        if matches!(kind, BufferMemory::PoolShared | BufferMemory::MappedShared | BufferMemory::PagesShared) {
            driver.open_to_peers()?;
        }
        let missing = |what: &str| TrainError::Input(format!("this GPU has no {what}"));
        let mut bytes = bytes;
        let held = match kind {
            BufferMemory::Device => Held::Device(driver.mem_alloc(bytes)?),
            BufferMemory::Pool | BufferMemory::PoolShared => {
                let pools = driver.pools().ok_or_else(|| missing("stream-ordered pools"))?;
                let pool = pools.pool_create(PoolSettings::default())?;
                let addr = pools.mem_alloc_async(pool, bytes, stream)?;
                driver.stream_synchronize(stream)?;
                Held::Pool(pool, addr)
            }
            BufferMemory::Mapped | BufferMemory::MappedShared | BufferMemory::PagesShared => {
                if kind == BufferMemory::Mapped {
                    driver.request_memory(MemoryProperties::NONE);
                }
                let vmm = driver.vmm().ok_or_else(|| missing("virtual memory management"))?;
                let granule = vmm.granularity()?;
                bytes = bytes.next_multiple_of(granule);
                let piece = if kind == BufferMemory::PagesShared { granule } else { bytes };
                let addr = vmm.address_reserve(bytes)?;
                let mut handles = Vec::new();
                for offset in (0..bytes).step_by(usize::try_from(piece).unwrap_or(usize::MAX)) {
                    let handle = vmm.create(piece)?;
                    let at = DeviceAddr::new(addr.get() + offset).ok_or_else(|| missing("such address"))?;
                    // SAFETY: a new range, unmapped from the offset on, and a handle of this size.
                    unsafe { vmm.map(at, piece, handle)? };
                    handles.push(handle);
                }
                // SAFETY: all of the range has been mapped above.
                unsafe { vmm.set_access(addr, bytes)? };
                Held::Mapped(addr, handles, piece)
            }
            BufferMemory::Nccl => {
                driver.bind_to_thread()?;
                Held::Nccl(nccl.mem_alloc(bytes)?)
            }
            BufferMemory::Pinned => {
                let size = usize::try_from(bytes).unwrap_or(usize::MAX);
                Held::Pinned(driver.host_alloc(size)?, size)
            }
        };
        Ok(Self { held, bytes })
    }

    /// Its address, as kernels see it: page-locked memory has the host's, by unified addressing.
    pub(super) fn addr(&self) -> u64 {
        match &self.held {
            Held::Device(addr) | Held::Pool(_, addr) | Held::Mapped(addr, ..) | Held::Nccl(addr) => addr.get(),
            // CAST: an address as a number.
            Held::Pinned(pointer, _) => pointer.as_ptr() as u64,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Addresses of its two halves.
    pub(super) fn halves(&self) -> (u64, u64) {
        (self.addr(), self.addr() + self.bytes / 2)
    }

    /// Frees it, once no work and no registration uses it.
    ///
    /// # Errors
    /// Errors of the driver and of NCCL.
    pub(super) fn free(self, driver: &Arc<CudaDriver>, (nccl, stream): (&Nccl, StreamId)) -> Result<()> {
        driver.stream_synchronize(stream)?;
        match self.held {
            // SAFETY (of each call below): allocated by `new`, freed once as this value is consumed, and its work has completed.
            // SAFETY: as above.
            Held::Device(addr) => unsafe { driver.mem_free(addr)? },
            Held::Pool(pool, addr) => {
                if let Some(pools) = driver.pools() {
                    // SAFETY: as above.
                    unsafe { pools.mem_free_async(addr, stream)? };
                    driver.stream_synchronize(stream)?;
                    // SAFETY: the pool is empty now and used no more.
                    unsafe { pools.pool_destroy(pool)? };
                }
            }
            Held::Mapped(addr, handles, piece) => {
                if let Some(vmm) = driver.vmm() {
                    for offset in (0..).take(handles.len()) {
                        let Some(at) = DeviceAddr::new(addr.get() + offset * piece) else { continue };
                        // SAFETY: one whole mapping, as above.
                        unsafe { vmm.unmap(at, piece)? };
                    }
                    for handle in handles {
                        // SAFETY: as above.
                        unsafe { vmm.release(handle)? };
                    }
                    // SAFETY: the range of `new`, in which nothing is mapped any more.
                    unsafe { vmm.address_free(addr, self.bytes)? };
                }
            }
            // SAFETY: as above; registrations have ended (the caller).
            Held::Nccl(addr) => unsafe { nccl.mem_free(addr)? },
            // SAFETY: as above, with the size of `new`.
            Held::Pinned(pointer, size) => unsafe { driver.host_free(pointer, size)? },
        }
        Ok(())
    }
}
