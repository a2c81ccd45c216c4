//! Virtual memory management on CUDA: addresses and memory, separately.
//!
//! Memory is created so that other processes, NCCL and network adapters can use it, as far as the device allows: each property that
//! its attributes promise is requested. When the driver refuses, the [next best](MemoryProperties::next_best) set is requested; the
//! first granted set applies to all memory of the process.

use super::{CudaDriver, size};
use crate::{
    CallKind, DeviceAddr, DriverError, DriverResult, MemoryProperties, PhysicalHandle, ShareKind, Shareable, VmmDriver,
};
use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1 as AllocationFlags, CUmemAllocationType,
};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

const DESCRIPTOR: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;

/// The properties that memory is created with.
#[derive(Debug)]
pub(super) struct Requested(Mutex<(MemoryProperties, bool)>);

impl Requested {
    pub(super) fn new(properties: MemoryProperties) -> Self {
        Self(Mutex::new((properties, false)))
    }

    fn lock(&self) -> MutexGuard<'_, (MemoryProperties, bool)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The properties, and whether the driver has granted them.
    fn get(&self) -> (MemoryProperties, bool) {
        *self.lock()
    }

    fn granted(&self, properties: MemoryProperties) {
        *self.lock() = (properties, true);
    }

    /// Calls `create` with the properties, and with fewer when it refuses them. Lack of memory is not a refusal, nor is an error
    /// once the properties have been granted, or one that fewer properties do not fix.
    fn try_each<T>(&self, create: impl Fn(MemoryProperties) -> DriverResult<T>) -> DriverResult<T> {
        let (mut properties, granted) = self.get();
        let first = create(properties);
        if granted {
            return first;
        }
        let mut answer = first;
        loop {
            match answer {
                Ok(made) => {
                    self.granted(properties);
                    return Ok(made);
                }
                Err(error) => {
                    let Some(fewer) = properties.next_best().filter(|_| !error.is_out_of_memory()) else {
                        return Err(error);
                    };
                    properties = fewer;
                    answer = create(properties);
                }
            }
        }
    }
}

impl CudaDriver {
    /// Memory on this device, not compressed.
    fn allocation_properties(&self, properties: MemoryProperties) -> CUmemAllocationProp {
        let mut types = 0;
        if properties.file_descriptors {
            types |= DESCRIPTOR.0;
        }
        if properties.fabric {
            types |= FABRIC.0;
        }
        CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            // A mask of types.
            requestedHandleTypes: CUmemAllocationHandleType(types),
            location: self.location(),
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: AllocationFlags {
                compressionType: 0,
                gpuDirectRDMACapable: properties.rdma.into(),
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    /// Requests these properties for memory from now on, as far as the device claims to support them. Existing memory keeps its
    /// own. For measuring the cost of a property.
    pub fn request_memory(&self, properties: MemoryProperties) {
        *self.memory.lock() = (properties.and(self.info.memory), false);
    }
}

impl VmmDriver for CudaDriver {
    /// The recommended granularity, which is the minimum for speed.
    fn granularity(&self) -> DriverResult<u64> {
        let recommended = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        let ask = |properties: MemoryProperties| {
            let properties = self.allocation_properties(properties);
            let mut bytes = 0usize;
            // SAFETY: both pointers are to live values of the types that the call reads and writes.
            self.call(CallKind::DeviceQuery, || unsafe {
                sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, recommended)
            })?;
            // CAST: widening.
            Ok(bytes as u64)
        };
        let properties = self.memory.get().0;
        // A device that does not grant them may refuse this query, too.
        let fewer = std::iter::successors(properties.next_best(), |last| last.next_best());
        ask(properties).or_else(|error| fewer.map(ask).find_map(DriverResult::ok).ok_or(error))
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        // SAFETY: the pointer is to a live address of the type that the call writes. Zeros request the default alignment and any
        // address, and are the only valid flags.
        self.placing_call(CallKind::MemAddressReserve, bytes, |addr| unsafe {
            sys::cuMemAddressReserve(addr, size(bytes), 0, 0, 0)
        })
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        // SAFETY: the caller promises a whole range of `address_reserve` with nothing mapped in it.
        self.call(CallKind::MemAddressFree, || unsafe { sys::cuMemAddressFree(addr.get(), size(bytes)) })
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        let raw = self.memory.try_each(|properties| {
            let properties = self.allocation_properties(properties);
            let mut handle = 0;
            // SAFETY: both pointers are to live values of the types that the call reads and writes; there are no flags but
            // 0.
            self.sized_call(CallKind::MemCreate, bytes, || unsafe {
                sys::cuMemCreate(&raw mut handle, size(bytes), &raw const properties, 0)
            })?;
            Ok(handle)
        })?;
        Ok(PhysicalHandle::made(self.live.physical.insert_once(raw)))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        let handle = self.live.physical.get(CallKind::MemMap, handle.get())?;
        // SAFETY: the handle is live; the caller promises an unmapped piece of one reserved range and that it has this size; offset
        // and flags must be 0.
        self.call(CallKind::MemMap, || unsafe { sys::cuMemMap(addr.get(), size(bytes), 0, handle, 0) })
    }

    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: self.location(), flags };
        if self.is_open() {
            let all: Vec<CUmemAccessDesc> = std::iter::once(access).chain(self.access_of_peers()).collect();
            // SAFETY: the caller promises a mapped range; the pointer is to as many live descriptions as the count says.
            return self.call(CallKind::MemSetAccess, || unsafe {
                sys::cuMemSetAccess(addr.get(), size(bytes), all.as_ptr(), all.len())
            });
        }
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

    fn memory_properties(&self) -> MemoryProperties {
        self.memory.get().0
    }

    fn export(&self, handle: PhysicalHandle, kind: ShareKind) -> DriverResult<Shareable> {
        let call = CallKind::MemExport;
        let handle = self.live.physical.get(call, handle.get())?;
        match kind {
            ShareKind::Descriptor => {
                let mut raw: c_int = -1;
                // SAFETY: the handle is live; for this type the call writes an int; there are no flags but 0.
                self.call(call, || unsafe {
                    sys::cuMemExportToShareableHandle((&raw mut raw).cast(), handle, DESCRIPTOR, 0)
                })?;
                if raw < 0 {
                    return Err(DriverError::new(call, DriverError::OPERATING_SYSTEM, "the driver made no descriptor"));
                }
                // SAFETY: the driver has just opened it for the caller, and no other code knows of it.
                let made = unsafe { OwnedFd::from_raw_fd(raw) };
                // The duplicate closes in programs that this one starts.
                let duplicate = made.try_clone();
                let refused = |error| DriverError::new(call, DriverError::OPERATING_SYSTEM, format!("{error}"));
                duplicate.map(Shareable::Descriptor).map_err(refused)
            }
            ShareKind::Fabric => {
                let mut bytes = [0u8; 64];
                // SAFETY: the handle is live; for this type the call writes 64 bytes (`CUmemFabricHandle`).
                self.call(call, || unsafe {
                    sys::cuMemExportToShareableHandle(bytes.as_mut_ptr().cast(), handle, FABRIC, 0)
                })?;
                Ok(Shareable::Fabric(bytes))
            }
        }
    }

    fn import(&self, shared: &Shareable) -> DriverResult<PhysicalHandle> {
        let mut raw = 0;
        match shared {
            Shareable::Descriptor(descriptor) => {
                // CAST: the driver takes the descriptor's number instead of a pointer.
                let number = descriptor.as_raw_fd() as usize as *mut c_void;
                // SAFETY: the descriptor is open, and the pointer is to a live handle of the type that the call writes. The driver
                // checks whether the descriptor is one of its own.
                self.call(CallKind::MemImport, || unsafe {
                    sys::cuMemImportFromShareableHandle(&raw mut raw, number, DESCRIPTOR)
                })?;
            }
            Shareable::Fabric(bytes) => {
                let mut bytes = *bytes;
                // SAFETY: as above; for this type the call reads 64 bytes (`CUmemFabricHandle`).
                self.call(CallKind::MemImport, || unsafe {
                    sys::cuMemImportFromShareableHandle(&raw mut raw, bytes.as_mut_ptr().cast(), FABRIC)
                })?;
            }
        }
        Ok(PhysicalHandle::made(self.live.physical.insert_once(raw)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: MemoryProperties = MemoryProperties { file_descriptors: true, fabric: true, rdma: true };

    fn refused(code: u32) -> DriverResult<()> {
        Err(DriverError::new(CallKind::MemCreate, code, ""))
    }

    #[test]
    fn the_best_properties_that_the_driver_grants_are_kept() {
        let requested = Requested::new(ALL);
        let no_fabric = |properties: MemoryProperties| {
            if properties.fabric { refused(DriverError::NOT_SUPPORTED) } else { Ok(()) }
        };
        assert_eq!(requested.try_each(no_fabric), Ok(()));
        assert_eq!(requested.get(), (MemoryProperties { fabric: false, ..ALL }, true));
        // From then on a refusal is an error.
        assert!(requested.try_each(|_| refused(DriverError::NOT_SUPPORTED)).is_err());
        assert_eq!(requested.get().0, MemoryProperties { fabric: false, ..ALL });
    }

    #[test]
    fn an_error_that_fewer_properties_do_not_mend_drops_none() {
        for code in [DriverError::OUT_OF_MEMORY, DriverError::ILLEGAL_ADDRESS] {
            let requested = Requested::new(ALL);
            assert_eq!(requested.try_each(|_| refused(code)).unwrap_err().code, code);
            assert_eq!(requested.get(), (ALL, false));
        }
    }
}
