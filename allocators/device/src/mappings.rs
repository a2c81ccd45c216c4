//! State of virtual memory management: reserved ranges, created memory, and mappings.
//!
//! The simulated and the null device have one each. The costs of calls, and the memory behind addresses, are the device's.
#![forbid(unsafe_code)]

use crate::{CallKind, DeviceAddr, DriverError, DriverResult, PhysicalHandle};
use std::collections::BTreeMap;

/// First address of reservations: above all plain addresses and the ranges of thousands of pools, and still an exact integer in a
/// double.
pub(crate) const BASE: u64 = 1 << 52;
const END: u64 = 1 << 62;

/// Reservations, handles and mappings. The device stores an `R` with each reservation and an `H` with each handle.
#[derive(Debug)]
pub(crate) struct Mappings<R, H> {
    /// Bytes by first address.
    reservations: BTreeMap<u64, (u64, R)>,
    mappings: BTreeMap<u64, Mapping>,
    handles: BTreeMap<u64, Handle<H>>,
    next_addr: u64,
    next_handle: u64,
    created: u64,
}

#[derive(Debug)]
struct Handle<H> {
    bytes: u64,
    mappings: usize,
    released: bool,
    /// Memory of another process, which is counted there.
    imported: bool,
    behind: H,
}

#[derive(Debug)]
struct Mapping {
    bytes: u64,
    handle: u64,
    accessible: bool,
}

impl<R, H> Default for Mappings<R, H> {
    fn default() -> Self {
        let (reservations, mappings, handles) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { reservations, mappings, handles, next_addr: BASE, next_handle: 0, created: 0 }
    }
}

impl<R, H> Mappings<R, H> {
    /// Bytes of physical memory.
    pub(crate) fn created_bytes(&self) -> u64 {
        self.created
    }

    /// The reservation that contains all of a range, with its first address.
    pub(crate) fn reservation(&self, addr: u64, bytes: u64) -> Option<(u64, &R)> {
        let (&start, (length, behind)) = self.reservations.range(..=addr).next_back()?;
        (addr.checked_add(bytes)? <= start + length).then_some((start, behind))
    }

    /// Whether all of a range is mapped and accessible.
    pub(crate) fn is_accessible(&self, addr: u64, bytes: u64) -> bool {
        let Some(end) = addr.checked_add(bytes) else { return false };
        let mut at = addr;
        while at < end {
            match self.mappings.range(..=at).next_back() {
                Some((first, mapping)) if mapping.accessible && first + mapping.bytes > at => {
                    at = first + mapping.bytes
                }
                _ => return false,
            }
        }
        true
    }

    pub(crate) fn reserve(&mut self, bytes: u64, behind: R) -> DriverResult<DeviceAddr> {
        let end = self.next_addr.checked_add(bytes).filter(|end| *end <= END);
        let no_addresses = "no addresses are left";
        let end =
            end.ok_or_else(|| DriverError::new(CallKind::MemAddressReserve, DriverError::OUT_OF_MEMORY, no_addresses))?;
        let addr = std::mem::replace(&mut self.next_addr, end);
        self.reservations.insert(addr, (bytes, behind));
        Ok(DeviceAddr::handed_out(addr))
    }

    pub(crate) fn free_reservation(&mut self, addr: u64, bytes: u64) -> DriverResult<()> {
        let call = CallKind::MemAddressFree;
        if self.reservations.get(&addr).is_none_or(|(length, _)| *length != bytes) {
            return Err(DriverError::invalid_value(call, format!("no reservation of {bytes} bytes at {addr:#x}")));
        }
        if self.mappings.range(addr..addr + bytes).next().is_some() {
            return Err(DriverError::invalid_value(call, "the range still has mappings"));
        }
        self.reservations.remove(&addr);
        Ok(())
    }

    pub(crate) fn create(&mut self, bytes: u64, behind: H) -> PhysicalHandle {
        self.created += bytes;
        self.insert(Handle { bytes, mappings: 0, released: false, imported: false, behind })
    }

    /// Adds memory of another process, which is not counted here.
    pub(crate) fn import(&mut self, bytes: u64, behind: H) -> PhysicalHandle {
        self.insert(Handle { bytes, mappings: 0, released: false, imported: true, behind })
    }

    fn insert(&mut self, handle: Handle<H>) -> PhysicalHandle {
        let id = self.next_handle;
        self.next_handle += 1;
        self.handles.insert(id, handle);
        PhysicalHandle::made(id)
    }

    /// The size of a live handle, and its `H`; `None` also for memory of another process.
    pub(crate) fn exportable(&self, handle: PhysicalHandle) -> Option<(u64, &H)> {
        let known = self.handles.get(&handle.get()).filter(|known| !known.released && !known.imported)?;
        Some((known.bytes, &known.behind))
    }

    /// Maps a handle, unless `back` fails to map its memory: the reservation, the offset in it, and the handle.
    pub(crate) fn map(
        &mut self,
        addr: u64,
        bytes: u64,
        handle: PhysicalHandle,
        back: impl FnOnce(&R, u64, &H) -> bool,
    ) -> DriverResult<()> {
        let call = CallKind::MemMap;
        let Some((start, reservation)) = self.reservation(addr, bytes) else {
            return Err(DriverError::invalid_value(call, "the range is not reserved"));
        };
        let before = self.mappings.range(..addr + bytes).next_back();
        if before.is_some_and(|(first, mapping)| first + mapping.bytes > addr) {
            return Err(DriverError::invalid_value(call, "the range is mapped already"));
        }
        let known = self.handles.get(&handle.get()).filter(|known| !known.released && known.bytes == bytes);
        let Some(known) = known else {
            return Err(DriverError::new(call, DriverError::INVALID_HANDLE, "no such handle of that size"));
        };
        if !back(reservation, addr - start, &known.behind) {
            return Err(DriverError::out_of_memory(call));
        }
        self.mappings.insert(addr, Mapping { bytes, handle: handle.get(), accessible: false });
        if let Some(known) = self.handles.get_mut(&handle.get()) {
            known.mappings += 1;
        }
        Ok(())
    }

    /// First addresses of the mappings that tile a range exactly.
    fn tiled(&self, call: CallKind, addr: u64, bytes: u64) -> DriverResult<Vec<u64>> {
        let (mut starts, mut at) = (Vec::new(), addr);
        while let Some(mapping) = self.mappings.get(&at).filter(|_| at - addr < bytes) {
            starts.push(at);
            at += mapping.bytes;
        }
        let partial = || DriverError::invalid_value(call, "the range does not consist of whole mappings");
        if at - addr == bytes { Ok(starts) } else { Err(partial()) }
    }

    pub(crate) fn set_access(&mut self, addr: u64, bytes: u64) -> DriverResult<()> {
        for start in self.tiled(CallKind::MemSetAccess, addr, bytes)? {
            if let Some(mapping) = self.mappings.get_mut(&start) {
                mapping.accessible = true;
            }
        }
        Ok(())
    }

    pub(crate) fn unmap(&mut self, addr: u64, bytes: u64) -> DriverResult<()> {
        for start in self.tiled(CallKind::MemUnmap, addr, bytes)? {
            if let Some(mapping) = self.mappings.remove(&start) {
                if let Some(handle) = self.handles.get_mut(&mapping.handle) {
                    handle.mappings -= 1;
                }
                self.drop_if_unused(mapping.handle);
            }
        }
        Ok(())
    }

    /// Releases a handle and returns its bytes.
    pub(crate) fn release(&mut self, handle: PhysicalHandle) -> DriverResult<u64> {
        let known = self.handles.get_mut(&handle.get()).filter(|known| !known.released);
        let Some(known) = known else {
            return Err(DriverError::new(CallKind::MemRelease, DriverError::INVALID_HANDLE, "no such handle"));
        };
        known.released = true;
        let bytes = known.bytes;
        self.drop_if_unused(handle.get());
        Ok(bytes)
    }

    fn drop_if_unused(&mut self, id: u64) {
        if self.handles.get(&id).is_some_and(|handle| handle.released && handle.mappings == 0)
            && let Some(handle) = self.handles.remove(&id)
        {
            self.created -= if handle.imported { 0 } else { handle.bytes };
        }
    }
}
