//! Virtual memory management on CUDA: addresses and the memory behind them, each on its own.

use super::{CudaDriver, size};
use crate::{CallKind, DeviceAddr, DriverResult, PhysicalHandle, VmmDriver};
use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1 as AllocationFlags, CUmemAllocationType,
};
use std::ptr;

impl CudaDriver {
    /// Plain memory on this device: neither compressed nor shared with other processes.
    fn allocation_properties(&self) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CUmemAllocationHandleType(0),
            location: self.location(),
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: AllocationFlags { compressionType: 0, gpuDirectRDMACapable: 0, usage: 0, reserved: [0; 4] },
        }
    }
}

impl VmmDriver for CudaDriver {
    fn granularity(&self) -> DriverResult<u64> {
        let properties = self.allocation_properties();
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0usize;
        // SAFETY: both pointers are to live values of the types that the call reads and writes.
        self.call(CallKind::DeviceQuery, || unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, minimum)
        })?;
        // CAST: widening.
        Ok(bytes as u64)
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        // SAFETY: the pointer is to a live address of the type that the call writes. Zeros ask for the default
        // alignment, for any address, and are the only flags there are.
        self.placing_call(CallKind::MemAddressReserve, bytes, |addr| unsafe {
            sys::cuMemAddressReserve(addr, size(bytes), 0, 0, 0)
        })
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        // SAFETY: the caller promises a whole range of `address_reserve` with nothing mapped in it.
        self.call(CallKind::MemAddressFree, || unsafe { sys::cuMemAddressFree(addr.get(), size(bytes)) })
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        let properties = self.allocation_properties();
        let mut handle = 0;
        // SAFETY: both pointers are to live values of the types that the call reads and writes; there are no flags but
        // 0.
        self.sized_call(CallKind::MemCreate, bytes, || unsafe {
            sys::cuMemCreate(&raw mut handle, size(bytes), &raw const properties, 0)
        })?;
        Ok(PhysicalHandle::made(self.live.physical.insert(handle)))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        let handle = self.live.physical.get(CallKind::MemMap, handle.get())?;
        // SAFETY: the handle is live; the caller promises an unmapped piece of one reserved range and that it has this size;
        // offset and flags have to be 0.
        self.call(CallKind::MemMap, || unsafe { sys::cuMemMap(addr.get(), size(bytes), 0, handle, 0) })
    }

    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: the caller promises a mapped range; the pointer is to one live description, as the count says.
        self.call(CallKind::MemSetAccess, || unsafe {
            sys::cuMemSetAccess(addr.get(), size(bytes), &raw const access, 1)
        })
    }

    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        // SAFETY: the caller promises whole mappings that no queued work uses.
        self.call(CallKind::MemUnmap, || unsafe { sys::cuMemUnmap(addr.get(), size(bytes)) })
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        self.live.physical.remove(CallKind::MemRelease, handle.get(), |raw| {
            // SAFETY: a live handle of this driver, which is released once: it is in no table any more.
            self.call(CallKind::MemRelease, || unsafe { sys::cuMemRelease(raw) })
        })
    }
}
