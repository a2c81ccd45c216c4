//! Virtual memory management on CUDA: addresses and the memory behind them, each on its own.

use super::{CudaDriver, address, check, check_for, size};
use crate::bytes::Bytes;
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
        self.bind(CallKind::DeviceQuery)?;
        let properties = self.allocation_properties();
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0usize;
        // SAFETY: both pointers are to live values of the types that the call reads and writes.
        let result = unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, minimum) };
        check(CallKind::DeviceQuery, result)?;
        // CAST: widening.
        Ok(bytes as u64)
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        self.bind(CallKind::MemAddressReserve)?;
        let mut addr = 0;
        // SAFETY: the pointer is to a live address of the type that the call writes. Zeros ask for the default
        // alignment, for any address, and are the only flags there are.
        let result = unsafe { sys::cuMemAddressReserve(&raw mut addr, size(bytes), 0, 0, 0) };
        check_for(CallKind::MemAddressReserve, result, || Bytes(bytes).to_string())?;
        address(CallKind::MemAddressReserve, addr)
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        self.bind(CallKind::MemAddressFree)?;
        // SAFETY: the caller promises a whole range of `address_reserve` with nothing mapped in it.
        let result = unsafe { sys::cuMemAddressFree(addr.get(), size(bytes)) };
        check(CallKind::MemAddressFree, result)
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        self.bind(CallKind::MemCreate)?;
        let properties = self.allocation_properties();
        let mut handle = 0;
        // SAFETY: both pointers are to live values of the types that the call reads and writes; there are no flags but
        // 0.
        let result = unsafe { sys::cuMemCreate(&raw mut handle, size(bytes), &raw const properties, 0) };
        check_for(CallKind::MemCreate, result, || Bytes(bytes).to_string())?;
        Ok(PhysicalHandle::made(self.live.physical.insert(handle)))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        self.bind(CallKind::MemMap)?;
        let handle = self.live.physical.get(CallKind::MemMap, handle.get())?;
        // SAFETY: the handle is live; the caller promises an unmapped piece of one reserved range and that it has this size;
        // offset and flags have to be 0.
        let result = unsafe { sys::cuMemMap(addr.get(), size(bytes), 0, handle, 0) };
        check(CallKind::MemMap, result)
    }

    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        self.bind(CallKind::MemSetAccess)?;
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: the caller promises a mapped range; the pointer is to one live description, as the count says.
        let result = unsafe { sys::cuMemSetAccess(addr.get(), size(bytes), &raw const access, 1) };
        check(CallKind::MemSetAccess, result)
    }

    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        self.bind(CallKind::MemUnmap)?;
        // SAFETY: the caller promises whole mappings that no queued work uses.
        let result = unsafe { sys::cuMemUnmap(addr.get(), size(bytes)) };
        check(CallKind::MemUnmap, result)
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        self.bind(CallKind::MemRelease)?;
        self.live.physical.remove(CallKind::MemRelease, handle.get(), |raw| {
            // SAFETY: a live handle of this driver, which is released once: it is in no table any more.
            let result = unsafe { sys::cuMemRelease(raw) };
            check(CallKind::MemRelease, result)
        })
    }
}
