//! Virtual memory management of the null device: addresses and a budget.

use super::{NullDriver, PAGE, lock};
use crate::DriverError;
use crate::{CallKind, DeviceAddr, DriverResult, PhysicalHandle, VmmDriver};
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

/// Ranges lie above plain addresses, of which no program takes so many.
const BASE: u64 = 1 << 52;

/// Ranges and handles that are out.
#[derive(Debug, Default)]
pub(super) struct Vmm {
    ranges: HashMap<u64, u64>,
    reserved: u64,
    /// Bytes of each handle, and whether it was released.
    handles: HashMap<u64, Handle>,
    /// Bytes and handle of each mapping.
    mappings: HashMap<u64, (u64, u64)>,
}

#[derive(Debug)]
struct Handle {
    bytes: u64,
    released: bool,
    mappings: usize,
}

impl NullDriver {
    /// Takes a handle's memory back when nothing stands for it any more.
    fn drop_handle(&self, vmm: &mut Vmm, id: u64) {
        if vmm.handles.get(&id).is_some_and(|handle| handle.released && handle.mappings == 0)
            && let Some(handle) = vmm.handles.remove(&id)
        {
            self.used.fetch_sub(handle.bytes, Relaxed);
        }
    }
}

impl VmmDriver for NullDriver {
    fn granularity(&self) -> DriverResult<u64> {
        Ok(PAGE)
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        let call = CallKind::MemAddressReserve;
        let mut vmm = lock(&self.vmm);
        let fits = vmm.reserved.checked_add(bytes).filter(|end| bytes.is_multiple_of(PAGE) && *end <= 1 << 62);
        let Some(end) = fits.filter(|_| bytes > 0) else {
            return Err(DriverError::new(call, DriverError::OUT_OF_MEMORY, "no addresses are left"));
        };
        let addr = BASE + std::mem::replace(&mut vmm.reserved, end);
        vmm.ranges.insert(addr, bytes);
        Ok(DeviceAddr::new(addr).expect("addresses start above zero"))
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let mut vmm = lock(&self.vmm);
        if vmm.ranges.get(&addr.get()) != Some(&bytes) {
            return Err(DriverError::invalid_value(CallKind::MemAddressFree, "no such range"));
        }
        vmm.ranges.remove(&addr.get());
        Ok(())
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        let call = CallKind::MemCreate;
        if bytes == 0 || !bytes.is_multiple_of(PAGE) {
            return Err(DriverError::invalid_value(call, "handles are whole pages"));
        }
        self.claim(call, bytes)?;
        let id = self.handle();
        lock(&self.vmm).handles.insert(id, Handle { bytes, released: false, mappings: 0 });
        Ok(PhysicalHandle::made(id))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        let vmm = &mut *lock(&self.vmm);
        let known = vmm.handles.get_mut(&handle.get()).filter(|known| !known.released && known.bytes == bytes);
        let Some(known) = known else {
            return Err(DriverError::new(CallKind::MemMap, DriverError::INVALID_HANDLE, "no such handle of that size"));
        };
        if vmm.mappings.contains_key(&addr.get()) {
            return Err(DriverError::invalid_value(CallKind::MemMap, "the range is mapped already"));
        }
        known.mappings += 1;
        vmm.mappings.insert(addr.get(), (bytes, handle.get()));
        Ok(())
    }

    unsafe fn set_access(&self, _addr: DeviceAddr, _bytes: u64) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let vmm = &mut *lock(&self.vmm);
        let mut at = addr.get();
        while at < addr.get() + bytes {
            let Some((size, handle)) = vmm.mappings.remove(&at) else {
                return Err(DriverError::invalid_value(
                    CallKind::MemUnmap,
                    "the range does not consist of whole mappings",
                ));
            };
            if let Some(known) = vmm.handles.get_mut(&handle) {
                known.mappings -= 1;
            }
            self.drop_handle(vmm, handle);
            at += size;
        }
        Ok(())
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        let vmm = &mut *lock(&self.vmm);
        let known = vmm.handles.get_mut(&handle.get()).filter(|known| !known.released);
        let Some(known) = known else {
            return Err(DriverError::new(CallKind::MemRelease, DriverError::INVALID_HANDLE, "no such handle"));
        };
        known.released = true;
        self.drop_handle(vmm, handle.get());
        Ok(())
    }
}
