//! Virtual memory management of the null device: addresses and a budget.

use super::{NullDriver, PAGE, lock};
use crate::mappings::Mappings;
use crate::{CallKind, DeviceAddr, DriverError, DriverResult, PhysicalHandle, VmmDriver};
use std::sync::atomic::Ordering::Relaxed;

impl NullDriver {
    /// Makes a change that may let memory go, which then no longer counts as used.
    fn shrink<T>(&self, with: impl FnOnce(&mut Mappings<(), ()>) -> DriverResult<T>) -> DriverResult<T> {
        let mut vmm = lock(&self.vmm);
        let before = vmm.created_bytes();
        let result = with(&mut vmm);
        self.used.fetch_sub(before - vmm.created_bytes(), Relaxed);
        result
    }
}

fn need_pages(call: CallKind, bytes: u64) -> DriverResult<()> {
    let whole = bytes > 0 && bytes.is_multiple_of(PAGE);
    if whole { Ok(()) } else { Err(DriverError::invalid_value(call, "ranges and handles are whole pages")) }
}

impl VmmDriver for NullDriver {
    fn granularity(&self) -> DriverResult<u64> {
        Ok(PAGE)
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        need_pages(CallKind::MemAddressReserve, bytes)?;
        lock(&self.vmm).reserve(bytes, ())
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        lock(&self.vmm).free_reservation(addr.get(), bytes)
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        need_pages(CallKind::MemCreate, bytes)?;
        self.claim(CallKind::MemCreate, bytes)?;
        Ok(lock(&self.vmm).create(bytes, ()))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        lock(&self.vmm).map(addr.get(), bytes, handle, |(), _, ()| true)
    }

    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        lock(&self.vmm).set_access(addr.get(), bytes)
    }

    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        self.shrink(|vmm| vmm.unmap(addr.get(), bytes))
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        self.shrink(|vmm| vmm.release(handle)).map(|_| ())
    }
}
