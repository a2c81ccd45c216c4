//! Virtual memory management of the simulated device: reservations, physical handles and mappings.
//!
//! With host memory behind it, a reservation is a range of host addresses without access and a handle is a part
//! of an anonymous file that mappings share, so remapping keeps contents and two mappings of one handle alias,
//! as on a GPU. That needs Linux; elsewhere only the memory-less device has this capability.

use super::{SimDriver, SimMemory};
use crate::DriverError;
use crate::{CallKind, DeviceAddr, DriverResult, PhysicalHandle, VmmDriver};
use std::collections::BTreeMap;
use std::ptr::NonNull;

/// Whether host memory can stand behind mappings here.
pub(super) const CAN_BACK: bool = cfg!(target_os = "linux");

/// Where reservations start: above the ranges of thousands of pools, and still a whole number in a double.
const BASE: u64 = 1 << 52;

#[derive(Debug)]
struct Reservation {
    bytes: u64,
    host: Option<host::Range>,
}

#[derive(Debug)]
struct Handle {
    bytes: u64,
    mappings: usize,
    released: bool,
    host: Option<host::File>,
}

#[derive(Debug)]
struct Mapping {
    bytes: u64,
    handle: u64,
    accessible: bool,
}

#[derive(Debug, Default)]
pub(super) struct Space {
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    handles: BTreeMap<u64, Handle>,
    next_handle: u64,
    next_addr: u64,
    created: u64,
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
        self.created
    }

    /// Work that was queued at `now_ns` uses these buffers until `until_ns`.
    pub(super) fn note_use(&mut self, buffers: &[(u64, u64)], now_ns: u64, until_ns: u64) {
        for (addr, bytes) in buffers.iter().filter(|(addr, _)| *addr >= BASE) {
            self.uses.add((*addr, addr + bytes, until_ns), now_ns);
        }
    }

    fn reservation(&self, addr: u64, bytes: u64) -> Option<(u64, &Reservation)> {
        let (&start, reservation) = self.reservations.range(..=addr).next_back()?;
        (addr.checked_add(bytes)? <= start + reservation.bytes).then_some((start, reservation))
    }

    /// The mappings that tile `addr..addr + bytes` exactly; `None` when there is a gap or a partial one.
    fn tiled(&self, addr: u64, bytes: u64) -> Option<Vec<u64>> {
        let (mut at, mut found) = (addr, Vec::new());
        while at < addr.checked_add(bytes)? {
            at += self.mappings.get(&at)?.bytes;
            found.push(at);
        }
        let starts = self.mappings.range(addr..addr + bytes).map(|(start, _)| *start).collect();
        (at == addr + bytes).then_some(starts)
    }

    pub(super) fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        let (start, reservation) = self.reservation(addr, bytes)?;
        let range = reservation.host.as_ref()?;
        let (mut at, end) = (addr, addr.checked_add(bytes)?);
        while at < end {
            let (&first, mapping) = self.mappings.range(..=at).next_back()?;
            if !mapping.accessible || first + mapping.bytes <= at {
                return None;
            }
            at = first + mapping.bytes;
        }
        range.at(addr - start)
    }

    fn drop_if_unused(&mut self, id: u64) {
        if self.handles.get(&id).is_some_and(|handle| handle.released && handle.mappings == 0)
            && let Some(handle) = self.handles.remove(&id)
        {
            self.created -= handle.bytes;
        }
    }
}

impl SimDriver {
    fn vmm_costs(&self, call: CallKind) -> DriverResult<&super::VirtualMemory> {
        let costs = self.profile.vmm.as_ref();
        costs.ok_or_else(|| {
            DriverError::new(call, DriverError::NOT_SUPPORTED, "the profile has no virtual memory management")
        })
    }

    fn need_multiple(&self, call: CallKind, bytes: u64) -> DriverResult<()> {
        let granularity = self.vmm_costs(call)?.granularity_bytes;
        if bytes > 0 && bytes.is_multiple_of(granularity) {
            return Ok(());
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
        self.need_multiple(call, bytes)?;
        let costs = self.vmm_costs(call)?;
        let mut state = self.charge(costs.reserve_ns.at(bytes));
        let host = match self.memory {
            SimMemory::None => None,
            SimMemory::Host => Some(host::Range::reserve(bytes).ok_or_else(|| DriverError::out_of_memory(call))?),
        };
        let space = &mut state.vmm;
        let addr = BASE + space.next_addr;
        space.next_addr += bytes;
        space.reservations.insert(addr, Reservation { bytes, host });
        Ok(DeviceAddr::new(addr).expect("simulated addresses start above zero"))
    }

    unsafe fn address_free(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let call = CallKind::MemAddressFree;
        let mut state = self.lock();
        let space = &mut state.vmm;
        if space.reservations.get(&addr.get()).is_none_or(|reservation| reservation.bytes != bytes) {
            return Err(DriverError::invalid_value(
                call,
                format!("no reservation of {bytes} bytes at {:#x}", addr.get()),
            ));
        }
        if space.mappings.range(addr.get()..addr.get() + bytes).next().is_some() {
            return Err(DriverError::invalid_value(call, "the range still holds mappings"));
        }
        space.reservations.remove(&addr.get());
        Ok(())
    }

    fn create(&self, bytes: u64) -> DriverResult<PhysicalHandle> {
        let call = CallKind::MemCreate;
        self.need_multiple(call, bytes)?;
        let costs = self.vmm_costs(call)?;
        let mut state = self.charge(costs.create_ns.at(bytes));
        if bytes > self.free_bytes(&state) {
            return Err(DriverError::out_of_memory(call));
        }
        let host = match self.memory {
            SimMemory::None => None,
            SimMemory::Host => Some(host::File::new(bytes).ok_or_else(|| DriverError::out_of_memory(call))?),
        };
        let space = &mut state.vmm;
        let id = space.next_handle;
        space.next_handle += 1;
        space.created += bytes;
        space.handles.insert(id, Handle { bytes, mappings: 0, released: false, host });
        Ok(PhysicalHandle::made(id))
    }

    unsafe fn map(&self, addr: DeviceAddr, bytes: u64, handle: PhysicalHandle) -> DriverResult<()> {
        let call = CallKind::MemMap;
        let costs = self.vmm_costs(call)?;
        let state = &mut *self.charge(costs.map_ns.at(bytes));
        let space = &mut state.vmm;
        let Some((start, reservation)) = space.reservation(addr.get(), bytes) else {
            return Err(DriverError::invalid_value(call, "the range is not reserved"));
        };
        let taken = space.mappings.range(..addr.get() + bytes).next_back();
        if taken.is_some_and(|(first, mapping)| first + mapping.bytes > addr.get()) {
            return Err(DriverError::invalid_value(call, "the range is mapped already"));
        }
        let known = space.handles.get(&handle.get()).filter(|known| !known.released && known.bytes == bytes);
        let Some(known) = known else {
            return Err(DriverError::new(call, DriverError::INVALID_HANDLE, "no such handle of that size"));
        };
        if let (Some(range), Some(file)) = (&reservation.host, &known.host)
            && !range.map(addr.get() - start, file)
        {
            return Err(DriverError::out_of_memory(call));
        }
        space.mappings.insert(addr.get(), Mapping { bytes, handle: handle.get(), accessible: false });
        if let Some(known) = space.handles.get_mut(&handle.get()) {
            known.mappings += 1;
        }
        Ok(())
    }

    unsafe fn set_access(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let call = CallKind::MemSetAccess;
        let costs = self.vmm_costs(call)?;
        let mut state = self.charge(costs.set_access_ns.at(bytes));
        let Some(starts) = state.vmm.tiled(addr.get(), bytes) else {
            return Err(DriverError::invalid_value(call, "the range does not consist of whole mappings"));
        };
        for start in starts {
            if let Some(mapping) = state.vmm.mappings.get_mut(&start) {
                mapping.accessible = true;
            }
        }
        Ok(())
    }

    unsafe fn unmap(&self, addr: DeviceAddr, bytes: u64) -> DriverResult<()> {
        let call = CallKind::MemUnmap;
        let costs = self.vmm_costs(call)?;
        let state = &mut *self.lock();
        let called_ns = state.time.now_ns();
        state.time.spend(costs.unmap_ns.at(bytes));
        let space = &mut state.vmm;
        let Some(starts) = space.tiled(addr.get(), bytes) else {
            return Err(DriverError::invalid_value(call, "the range does not consist of whole mappings"));
        };
        // The real call does not wait: a kernel that still runs would fault, and every later call report it.
        if space.uses.any(addr.get(), bytes, called_ns) {
            let text =
                format!("work that uses {:#x} + {bytes} has not finished, and unmapping does not wait", addr.get());
            return Err(DriverError::new(call, DriverError::ILLEGAL_ADDRESS, text));
        }
        if let Some((start, Reservation { host: Some(range), .. })) = space.reservation(addr.get(), bytes) {
            range.unmap(addr.get() - start, bytes);
        }
        for start in starts {
            if let Some(mapping) = space.mappings.remove(&start) {
                if let Some(handle) = space.handles.get_mut(&mapping.handle) {
                    handle.mappings -= 1;
                }
                space.drop_if_unused(mapping.handle);
            }
        }
        Ok(())
    }

    unsafe fn release(&self, handle: PhysicalHandle) -> DriverResult<()> {
        let call = CallKind::MemRelease;
        let costs = self.vmm_costs(call)?;
        let state = &mut *self.lock();
        let known = state.vmm.handles.get_mut(&handle.get()).filter(|known| !known.released);
        let Some(known) = known else {
            return Err(DriverError::new(call, DriverError::INVALID_HANDLE, "no such handle"));
        };
        known.released = true;
        let bytes = known.bytes;
        state.time.spend(costs.release_ns.at(bytes));
        state.vmm.drop_if_unused(handle.get());
        Ok(())
    }
}

#[cfg(target_os = "linux")]
mod host {
    use std::ptr::NonNull;

    /// A range of host addresses; without access where nothing is mapped.
    #[derive(Debug)]
    pub(super) struct Range {
        base: NonNull<u8>,
        bytes: usize,
    }

    // SAFETY: a Range owns its addresses; nothing about them is tied to a thread.
    unsafe impl Send for Range {}

    /// Host memory that can be mapped several times.
    #[derive(Debug)]
    pub(super) struct File {
        descriptor: i32,
        bytes: usize,
    }

    impl Range {
        pub(super) fn reserve(bytes: u64) -> Option<Self> {
            let bytes = usize::try_from(bytes).ok()?;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing of ours.
            let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
            if base == libc::MAP_FAILED {
                return None;
            }
            NonNull::new(base.cast()).map(|base| Self { base, bytes })
        }

        pub(super) fn at(&self, offset: u64) -> Option<NonNull<u8>> {
            let offset = usize::try_from(offset).ok().filter(|offset| *offset <= self.bytes)?;
            // SAFETY: the offset lies within the range or one past it.
            Some(unsafe { self.base.add(offset) })
        }

        /// Where a part begins that lies in this range as a whole.
        fn part(&self, offset: u64, bytes: usize) -> Option<NonNull<u8>> {
            let end = offset.checked_add(bytes as u64)?;
            self.at(end)?;
            self.at(offset)
        }

        pub(super) fn map(&self, offset: u64, file: &File) -> bool {
            let Some(target) = self.part(offset, file.bytes) else { return false };
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            // SAFETY: `offset..offset + file.bytes` lies in this range, which is ours, so the fixed mapping replaces nothing
            // else.
            let got = unsafe { libc::mmap(target.as_ptr().cast(), file.bytes, access, flags, file.descriptor, 0) };
            got != libc::MAP_FAILED
        }

        pub(super) fn unmap(&self, offset: u64, bytes: u64) {
            let Ok(bytes) = usize::try_from(bytes) else { return };
            let Some(target) = self.part(offset, bytes) else { return };
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            // SAFETY: the part lies in this range, which is ours; replacing a mapping by one without access cannot fail for
            // lack of memory, and a failure would leave the old mapping.
            unsafe { libc::mmap(target.as_ptr().cast(), bytes, libc::PROT_NONE, flags, -1, 0) };
        }
    }

    impl Drop for Range {
        fn drop(&mut self) {
            // SAFETY: the range is ours and no address is translated into it any more.
            unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        }
    }

    impl File {
        pub(super) fn new(bytes: u64) -> Option<Self> {
            let bytes = usize::try_from(bytes).ok()?;
            // SAFETY: the name is a valid C string.
            let descriptor = unsafe { libc::memfd_create(c"simulated-device".as_ptr(), libc::MFD_CLOEXEC) };
            if descriptor < 0 {
                return None;
            }
            let file = Self { descriptor, bytes };
            let length = libc::off_t::try_from(bytes).ok()?;
            // SAFETY: the descriptor is ours and open.
            let sized = unsafe { libc::ftruncate(descriptor, length) };
            (sized == 0).then_some(file)
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            // SAFETY: the descriptor is ours and closed here only; mappings keep the memory alive.
            unsafe { libc::close(self.descriptor) };
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod host {
    use std::ptr::NonNull;

    #[derive(Debug)]
    pub(super) enum Range {}

    #[derive(Debug)]
    pub(super) enum File {}

    impl Range {
        pub(super) fn reserve(_bytes: u64) -> Option<Self> {
            None
        }

        pub(super) fn at(&self, _offset: u64) -> Option<NonNull<u8>> {
            match *self {}
        }

        pub(super) fn map(&self, _offset: u64, _file: &File) -> bool {
            match *self {}
        }

        pub(super) fn unmap(&self, _offset: u64, _bytes: u64) {
            match *self {}
        }
    }

    impl File {
        pub(super) fn new(_bytes: u64) -> Option<Self> {
            None
        }
    }
}
