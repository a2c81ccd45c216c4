//! Virtual memory management of the simulated device.
//!
//! With host memory behind it, a reservation is a range of host addresses without access and a handle is a part
//! of an anonymous file that mappings share, so remapping keeps contents and two mappings of one handle alias,
//! as on a GPU. That needs Linux; elsewhere only the memory-less device has this capability.

use super::{SimDriver, SimMemory, backing};
use crate::mappings::{BASE, Mappings};
use crate::{CallKind, DeviceAddr, DriverError, DriverResult, PhysicalHandle, VmmDriver};
use std::ptr::NonNull;

/// Whether host memory can stand behind mappings here.
pub(super) const CAN_BACK: bool = cfg!(target_os = "linux");

#[derive(Debug, Default)]
pub(super) struct Space {
    mappings: Mappings<Option<backing::Range>, Option<backing::File>>,
    /// What queued work uses.
    uses: Uses,
}

/// Ranges that queued work uses, each until a virtual time.
#[derive(Debug, Default)]
struct Uses {
    /// First address, end, and when the work is done.
    ranges: Vec<(u64, u64, u64)>,
    /// Length at which those that are over are thrown out next, so that each is looked at a few times only.
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
        Err(DriverError::invalid_value(call, format!("{bytes} is no multiple of the granularity {granularity}")))
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
}
