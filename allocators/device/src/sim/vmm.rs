//! Virtual memory management of the simulated device.
//!
//! With host memory, a reservation is a range of host addresses without access and a handle is a part of an anonymous file that
//! mappings share, so remapping keeps contents and two mappings of one handle alias, as on a GPU. That needs Linux; elsewhere only
//! the memory-less device has this capability.

use super::{SimDriver, SimMemory, backing};
use crate::mappings::{BASE, Mappings};
use crate::{
    CallKind, DeviceAddr, DriverError, DriverResult, MemoryProperties, PhysicalHandle, ShareKind, Shareable, VmmDriver,
};
use std::ptr::NonNull;

/// Whether mappings can have host memory here.
pub(super) const CAN_BACK: bool = cfg!(target_os = "linux");

#[derive(Debug, Default)]
pub(super) struct Space {
    mappings: Mappings<Option<backing::Range>, Option<backing::File>>,
    /// Memory in use by queued work.
    uses: Uses,
}

/// Ranges that queued work uses, each until a virtual time.
#[derive(Debug, Default)]
struct Uses {
    /// First address, end, and the time at which the work completes.
    ranges: Vec<(u64, u64, u64)>,
    /// Length at which completed entries are removed next, so that each is visited only a few times.
    tidy_at: usize,
}

impl Uses {
    fn add(&mut self, range: (u64, u64, u64), now_ns: u64) {
        if self.ranges.len() >= self.tidy_at {
            self.ranges.retain(|(_, _, until)| *until > now_ns);
            self.tidy_at = 2 * self.ranges.len() + 64;
        }
        self.ranges.push(range);
    }

    /// Whether work that uses a part of a range has not finished.
    fn any(&self, addr: u64, bytes: u64, now_ns: u64) -> bool {
        self.ranges.iter().any(|(start, end, until)| *start < addr + bytes && addr < *end && *until > now_ns)
    }
}

impl Space {
    pub(super) fn created_bytes(&self) -> u64 {
        self.mappings.created_bytes()
    }

    /// Work that was queued at `now_ns` uses these buffers until `until_ns`.
    pub(super) fn note_use(&mut self, buffers: &[(u64, u64)], now_ns: u64, until_ns: u64) {
        for (addr, bytes) in buffers.iter().filter(|(addr, _)| *addr >= BASE) {
            self.uses.add((*addr, addr + bytes, until_ns), now_ns);
        }
    }

    pub(super) fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        let (start, range) = self.mappings.reservation(addr, bytes)?;
        let range = range.as_ref().filter(|_| self.mappings.is_accessible(addr, bytes))?;
        range.at(addr - start)
    }
}

impl SimDriver {
    fn vmm_costs(&self, call: CallKind) -> DriverResult<&super::VirtualMemory> {
        let costs = self.profile.vmm.as_ref();
        costs.ok_or_else(|| {
            DriverError::new(call, DriverError::NOT_SUPPORTED, "the profile has no virtual memory management")
        })
    }

    fn costs_of_whole(&self, call: CallKind, bytes: u64) -> DriverResult<&super::VirtualMemory> {
        let costs = self.vmm_costs(call)?;
        let granularity = costs.granularity_bytes;
        if bytes > 0 && bytes.is_multiple_of(granularity) {
            return Ok(costs);
        }
        Err(DriverError::invalid_value(call, format!("{bytes} is not a multiple of the granularity {granularity}")))
    }
}

impl VmmDriver for SimDriver {
    fn granularity(&self) -> DriverResult<u64> {
        Ok(self.vmm_costs(CallKind::DeviceQuery)?.granularity_bytes)
    }

    fn address_reserve(&self, bytes: u64) -> DriverResult<DeviceAddr> {
        let call = CallKind::MemAddressReserve;
        let costs = self.costs_of_whole(call, bytes)?;
        let mut state = self.charge(costs.reserve_ns.at(bytes));
        let behind = match self.memory {
            SimMemory::None => None,
            SimMemory::Host => Some(backing::Range::reserve(bytes).ok_or_else(|| DriverError::out_of_memory(call))?),
        };
        state.vmm.mappings.reserve(bytes, behind)
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        self.lock().vmm.mappings.free_reservation(addr.get(), bytes)
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        let call = CallKind::MemCreate;
        let costs = self.costs_of_whole(call, bytes)?;
        let mut state = self.charge(costs.create_ns.at(bytes));
        if bytes > self.free_bytes(&state) {
            return Err(DriverError::out_of_memory(call));
        }
        let behind = match self.memory {
            SimMemory::None => None,
            SimMemory::Host => Some(backing::File::new(bytes).ok_or_else(|| DriverError::out_of_memory(call))?),
        };
        Ok(state.vmm.mappings.create(bytes, behind))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        let costs = self.vmm_costs(CallKind::MemMap)?;
        let mut state = self.charge(costs.map_ns.at(bytes));
        state.vmm.mappings.map(addr.get(), bytes, handle, |range, offset, file| match (range, file) {
            (Some(range), Some(file)) => range.map(offset, file),
            _ => true,
        })
    }

    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let costs = self.vmm_costs(CallKind::MemSetAccess)?;
        self.charge(costs.set_access_ns.at(bytes)).vmm.mappings.set_access(addr.get(), bytes)
    }

    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let call = CallKind::MemUnmap;
        let costs = self.vmm_costs(call)?;
        let mut state = self.lock();
        let called_ns = state.time.now_ns();
        state.time.spend(costs.unmap_ns.at(bytes));
        let space = &mut state.vmm;
        // The real call does not wait: a kernel that still runs would fault, and every later call report it.
        if space.uses.any(addr.get(), bytes, called_ns) {
            let text =
                format!("work that uses {:#x} + {bytes} has not finished, and unmapping does not wait", addr.get());
            return Err(DriverError::new(call, DriverError::ILLEGAL_ADDRESS, text));
        }
        space.mappings.unmap(addr.get(), bytes)?;
        if let Some((start, Some(range))) = space.mappings.reservation(addr.get(), bytes) {
            range.unmap(addr.get() - start, bytes);
        }
        Ok(())
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        let costs = self.vmm_costs(CallKind::MemRelease)?;
        let mut state = self.lock();
        let bytes = state.vmm.mappings.release(handle)?;
        state.time.spend(costs.release_ns.at(bytes));
        Ok(())
    }

    fn memory_properties(&self) -> MemoryProperties {
        MemoryProperties { file_descriptors: CAN_BACK, ..MemoryProperties::NONE }
    }

    /// Without memory, the file has only the size.
    fn export(&self, handle: PhysicalHandle, kind: ShareKind) -> DriverResult<Shareable> {
        let call = CallKind::MemExport;
        if kind == ShareKind::Fabric {
            return Err(DriverError::new(call, DriverError::NOT_SUPPORTED, "the simulated device has no fabric"));
        }
        let state = self.lock();
        let Some((bytes, behind)) = state.vmm.mappings.exportable(handle) else {
            return Err(DriverError::new(call, DriverError::INVALID_HANDLE, "no such handle of this device's own"));
        };
        let descriptor = match behind {
            Some(file) => file.descriptor(),
            None => backing::File::new(bytes).and_then(|file| file.descriptor()),
        };
        let refused = || DriverError::new(call, DriverError::OPERATING_SYSTEM, "no file descriptor is left");
        descriptor.map(Shareable::Descriptor).ok_or_else(refused)
    }

    fn import(&self, shared: &Shareable) -> DriverResult<PhysicalHandle> {
        let call = CallKind::MemImport;
        let costs = self.vmm_costs(call)?;
        let Shareable::Descriptor(descriptor) = shared else {
            return Err(DriverError::new(call, DriverError::NOT_SUPPORTED, "the simulated device has no fabric"));
        };
        let file = backing::File::import(descriptor);
        let file = file.filter(|file| file.bytes() > 0 && file.bytes().is_multiple_of(costs.granularity_bytes));
        let file =
            file.ok_or_else(|| DriverError::invalid_value(call, "the descriptor does not belong to exported memory"))?;
        let bytes = file.bytes();
        let behind = match self.memory {
            SimMemory::None => None,
            SimMemory::Host => Some(file),
        };
        Ok(self.lock().vmm.mappings.import(bytes, behind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::SimMemory;
    use crate::{Driver, Profile};

    fn mapped(driver: &SimDriver, handle: PhysicalHandle, bytes: u64) -> DeviceAddr {
        let addr = driver.address_reserve(bytes).unwrap();
        // SAFETY: a whole range that was just reserved; the handle has its size.
        unsafe {
            driver.map(addr, bytes, handle).unwrap();
            driver.set_access(addr, bytes).unwrap();
        }
        addr
    }

    #[test]
    #[cfg_attr(not(target_os = "linux"), ignore = "host memory stands behind mappings on Linux only")]
    fn imported_memory_has_exported_bytes_and_outlives_handles() {
        let (sender, receiver) =
            (SimDriver::new(Profile::h200(), SimMemory::Host), SimDriver::new(Profile::h200(), SimMemory::Host));
        let bytes = sender.granularity().unwrap();
        let made = sender.create(bytes).unwrap();
        let shared = sender.export(made, ShareKind::Descriptor).unwrap();
        let got = receiver.import(&shared).unwrap();
        let free = receiver.mem_info().unwrap().free;
        let (here, there) = (mapped(&sender, made, bytes), mapped(&receiver, got, bytes));
        assert_eq!(receiver.mem_info().unwrap().free, free, "it is the sender's memory");
        drop(shared);
        let (write, read) = (sender.stream_create().unwrap(), receiver.stream_create().unwrap());
        let mut bytes_read = [0; 4];
        // SAFETY: both ranges are mapped and hold more than four bytes; each handle is released once and not used again.
        unsafe {
            sender.release(made).unwrap();
            receiver.release(got).unwrap();
            sender.copy_to_device(here.offset(bytes - 4), b"here", write).unwrap();
            sender.stream_synchronize(write).unwrap();
            sender.unmap(here, bytes).unwrap();
            receiver.copy_to_host(&mut bytes_read, there.offset(bytes - 4), read).unwrap();
        }
        assert_eq!(&bytes_read, b"here");
    }

    #[test]
    #[cfg_attr(not(target_os = "linux"), ignore = "host memory stands behind mappings on Linux only")]
    fn what_cannot_be_shared_is_refused() {
        let driver = SimDriver::new(Profile::h200(), SimMemory::None);
        let made = driver.create(driver.granularity().unwrap()).unwrap();
        assert_eq!(driver.export(made, ShareKind::Fabric).unwrap_err().code, DriverError::NOT_SUPPORTED);
        let shared = driver.export(made, ShareKind::Descriptor).unwrap();
        let imported = driver.import(&shared).unwrap();
        assert_eq!(driver.export(imported, ShareKind::Descriptor).unwrap_err().code, DriverError::INVALID_HANDLE);
        let other = Shareable::Descriptor(std::fs::File::open("/dev/null").unwrap().into());
        assert_eq!(driver.import(&other).unwrap_err().code, DriverError::INVALID_VALUE);
        assert_eq!(driver.import(&Shareable::Fabric([0; 64])).unwrap_err().code, DriverError::NOT_SUPPORTED);
    }
}
