//! Expandable segments: ranges of addresses in which memory is mapped and unmapped (`cuMemAddressReserve`, `cuMemCreate`,
//! `cuMemMap`).
//!
//! All handles of a range have one size. Each mapped or unmapped part of a range is a whole number of handles.

use super::mapped::Mapped;
use crate::contract::{AllocError, PoolKind};
use crate::policy::heap::shared::Shared;
use crate::policy::pages::Pages;
use crate::space::{BlockId, FreeList};
use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab_device::{DeviceAddr, Driver, DriverError, PhysicalHandle, VmmDriver};

/// Maximum size of a range, whatever memory size the device reports: no GPU has more memory.
const MOST_RESERVED: u64 = 1 << 43;

/// Sizes of ranges and handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of a handle in ranges of the small pool.
    pub small: u64,
    /// Bytes of a handle in all others.
    pub large: u64,
    /// Size of a range of addresses; `None` for nine eighths of the device's memory, as PyTorch has it.
    pub reserve: Option<u64>,
}

/// Ranges of addresses, and their mapped handles.
#[derive(Debug)]
pub struct Expandable {
    driver: Arc<dyn Driver>,
    /// Maximum of mapped bytes.
    pub(super) limit: Option<u64>,
    sizes: Sizes,
    /// Mapped handles.
    pub(crate) mapped: Mapped,
    /// Unmapped ranges of segments, by free list and address.
    pub(in crate::policy) holes: BTreeMap<(FreeList, u64), BlockId>,
    /// The last uses of pages, for a policy that moves them.
    pub(in crate::policy) pages: Option<Pages>,
    /// Pages that stay mapped, because another process maps them or a library has registered them.
    pub(in crate::policy) shared: Shared,
    /// Unmapped handles for the next mappings, by size; `None` when they are released instead.
    spare: Option<BTreeMap<u64, Vec<PhysicalHandle>>>,
    /// Handles that the driver refused to release.
    unreleased: Vec<PhysicalHandle>,
}

/// An out-of-memory error is false; every other error stays an error.
fn unless_full(error: DriverError) -> Result<bool, DriverError> {
    if error.is_out_of_memory() { Ok(false) } else { Err(error) }
}

impl Expandable {
    /// A source on a device, for the allocator `name`.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] on a device without virtual memory management; [`AllocError::Driver`] when it does not report
    /// its granularity.
    pub fn new(
        name: &'static str,
        driver: Arc<dyn Driver>,
        limit: Option<u64>,
        sizes: Sizes,
    ) -> Result<Self, AllocError> {
        let Some(vmm) = driver.vmm() else {
            return Err(AllocError::Unsupported {
                allocator: name,
                capability: "virtual memory management (pytorch and caching do without it)",
                device: driver.describe().name,
            });
        };
        let granularity = vmm.granularity()?.max(1);
        let round_up = |bytes: u64| bytes.max(1).next_multiple_of(granularity);
        let sizes = Sizes { small: round_up(sizes.small), large: round_up(sizes.large), ..sizes };
        Ok(Self {
            driver,
            limit,
            sizes,
            mapped: Mapped::default(),
            holes: BTreeMap::new(),
            pages: None,
            shared: Shared::default(),
            spare: None,
            unreleased: Vec::new(),
        })
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Bytes of a handle in the ranges of a pool.
    #[must_use]
    pub fn handle_bytes(&self, pool: Option<PoolKind>) -> u64 {
        if pool == Some(PoolKind::Small) { self.sizes.small } else { self.sizes.large }
    }

    pub(in crate::policy) fn vmm(&self) -> &dyn VmmDriver {
        self.driver.vmm().expect("a device should not lose its virtual memory management")
    }

    /// A new range of addresses and its size; `None` when there are no addresses, or a range would be smaller than `least`.
    ///
    /// # Errors
    /// Any other error of the driver.
    pub(crate) fn reserve(&self, pool: Option<PoolKind>, least: u64) -> Result<Option<(u64, u64)>, DriverError> {
        let total = self.driver.describe().total_bytes.min(MOST_RESERVED / 2);
        let bytes = self.sizes.reserve.unwrap_or(total + total / 8).min(MOST_RESERVED);
        let bytes = bytes.max(1).next_multiple_of(self.handle_bytes(pool));
        if least > bytes {
            return Ok(None);
        }
        match self.vmm().address_reserve(bytes) {
            Ok(addr) => Ok(Some((addr.get(), bytes))),
            Err(error) => unless_full(error).map(|_| None),
        }
    }

    /// Releases a range of addresses.
    ///
    /// # Errors
    /// Those of the driver: the range is still reserved then.
    ///
    /// # Safety
    /// The range came from [`reserve`](Self::reserve), nothing is mapped in it, and it is released once.
    pub(crate) unsafe fn give_back(&self, addr: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller promises it.
        unsafe { self.vmm().address_free(DeviceAddr::handed_out(addr), bytes) }
    }

    /// Maps a part of a range, in handles of `unit` bytes. All handles are created before the first is mapped, and access is set
    /// once for all of them. False when there is no memory: then nothing is mapped and no handle is kept.
    ///
    /// # Errors
    /// Any other error of the driver; nothing is mapped then either.
    ///
    /// # Safety
    /// The part is in a range of [`reserve`](Self::reserve) and not mapped. Its size is a multiple of `unit`.
    pub(crate) unsafe fn map(&mut self, addr: u64, bytes: u64, unit: u64) -> Result<bool, DriverError> {
        let mut made = Vec::new();
        for _ in 0..bytes / unit {
            match self.handle(unit) {
                Ok(handle) => made.push(handle),
                Err(error) => {
                    return self.undo(addr, 0, unit, made, error);
                }
            }
        }
        for (count, handle) in (0..).zip(&made) {
            // SAFETY: the caller promises the part, of which this is piece number `count`; the handle was created with this size.
            let mapped = unsafe { self.vmm().map(DeviceAddr::handed_out(addr + count * unit), unit, *handle) };
            if let Err(error) = mapped {
                return self.undo(addr, count, unit, made, error);
            }
        }
        // SAFETY: all of it was mapped above.
        if let Err(error) = unsafe { self.vmm().set_access(DeviceAddr::handed_out(addr), bytes) } {
            return self.undo(addr, made.len() as u64, unit, made, error);
        }
        (0..).zip(made).for_each(|(count, handle)| self.mapped.add(addr + count * unit, handle));
        Ok(true)
    }

    /// A handle to map: a spare one, or a new one. Spare handles of other sizes are released to make room for it.
    fn handle(&mut self, unit: u64) -> Result<PhysicalHandle, DriverError> {
        if let Some(handle) = self.spare.as_mut().and_then(|spare| spare.get_mut(&unit)?.pop()) {
            return Ok(handle);
        }
        loop {
            match self.vmm().create(unit) {
                Err(error) if error.is_out_of_memory() => {
                    let other = self.spare.as_mut().and_then(|spare| spare.values_mut().find_map(Vec::pop));
                    let Some(other) = other else { return Err(error) };
                    self.release(other)?;
                }
                made => return made,
            }
        }
    }

    /// Undoes a call that failed by `error`, with `mapped` of its handles mapped. Returns that error, or false for lack of memory,
    /// unless undoing fails by another error. A mapping that the driver does not remove stays with its context.
    fn undo(
        &mut self,
        addr: u64,
        mapped: u64,
        unit: u64,
        made: Vec<PhysicalHandle>,
        error: DriverError,
    ) -> Result<bool, DriverError> {
        let mut undone = Ok(());
        for count in 0..mapped {
            // SAFETY: `map` mapped exactly this piece, and its address was not returned to anyone.
            let unmapped = unsafe { self.vmm().unmap(DeviceAddr::handed_out(addr + count * unit), unit) };
            undone = undone.and(unmapped);
        }
        undone = undone.and(self.release_all(made));
        unless_full(error)?;
        undone.map(|()| false)
    }

    fn release(&mut self, handle: PhysicalHandle) -> Result<(), DriverError> {
        // SAFETY: the handle came from `create`. It is in none of our lists any more, and it enters one again only if the driver
        // did not release it, so it is released once.
        let released = unsafe { self.vmm().release(handle) };
        if released.is_err() {
            self.unreleased.push(handle);
        }
        released
    }

    /// Unmaps a part of a range, in pieces of `step` bytes by one driver call each. Also returns the unmapped bytes: fewer than
    /// `bytes` where the driver refused.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// The part is mapped, in handles of `unit` bytes that belong there and are mapped nowhere else, and no unfinished work uses
    /// it. `step` is a multiple of `unit`.
    pub(crate) unsafe fn unmap(
        &mut self,
        addr: u64,
        bytes: u64,
        unit: u64,
        step: u64,
    ) -> (u64, Result<(), DriverError>) {
        let (mut done, mut outcome) = (0, Ok(()));
        while done < bytes {
            let (at, piece) = (addr + done, step.min(bytes - done));
            // SAFETY: the caller promises that it is not used; it consists of whole mappings.
            if let Err(error) = unsafe { self.vmm().unmap(DeviceAddr::handed_out(at), piece) } {
                return (done, outcome.and(Err(error)));
            }
            done += piece;
            for count in 0..piece / unit {
                let handle = self.mapped.remove(at + count * unit);
                match &mut self.spare {
                    Some(spare) => spare.entry(unit).or_default().push(handle),
                    None => outcome = outcome.and(self.release(handle)),
                }
            }
        }
        (done, outcome)
    }

    /// Maps pages a second time: each `(to, from)` is the page that belongs to `from`, and its additional address, in address
    /// order. Access is set once for each run of contiguous addresses. False when there is no memory for it. The pages mapped
    /// before that stay mapped.
    ///
    /// # Errors
    /// Any other error of the driver; the pages mapped before that stay mapped, too.
    ///
    /// # Safety
    /// The addresses are in ranges of [`reserve`](Self::reserve) and not mapped, and the pages have `unit` bytes.
    pub(crate) unsafe fn map_again(&mut self, pages: &[(u64, u64)], unit: u64) -> Result<bool, DriverError> {
        for run in pages.chunk_by(|(one, _), (next, _)| one + unit == *next) {
            let start = run[0].0;
            let mut mapped = 0;
            let mut outcome = Ok(());
            for (to, from) in run {
                let handle = self.mapped.handle(*from).expect("a page should be mapped where it belongs");
                // SAFETY: the caller promises the address; the handle has this size.
                outcome = unsafe { self.vmm().map(DeviceAddr::handed_out(*to), unit, handle) };
                if outcome.is_err() {
                    break;
                }
                mapped += 1;
            }
            let outcome = outcome.and_then(|()| {
                // SAFETY: all of it was mapped above.
                unsafe { self.vmm().set_access(DeviceAddr::handed_out(start), mapped * unit) }
            });
            if let Err(error) = outcome {
                return self.undo(start, mapped, unit, Vec::new(), error);
            }
            run.iter().for_each(|(to, from)| self.mapped.keep(*to, *from));
        }
        Ok(true)
    }

    /// Removes kept mappings, at `bytes` of contiguous addresses, by one driver call.
    ///
    /// # Errors
    /// Those of the driver: the mappings still exist then.
    ///
    /// # Safety
    /// No unfinished work uses the addresses. A mapping is kept at each of them, of pages of `unit` bytes.
    pub(crate) unsafe fn drop_kept(&mut self, addr: u64, bytes: u64, unit: u64) -> Result<(), DriverError> {
        // SAFETY: the caller promises that they are not used; they are whole mappings.
        unsafe { self.vmm().unmap(DeviceAddr::handed_out(addr), bytes) }?;
        (0..bytes / unit).for_each(|count| self.mapped.drop_kept(addr + count * unit));
        Ok(())
    }

    /// Keeps handles that are unmapped from now on for the next mappings, until [`release_spare`](Self::release_spare).
    pub(crate) fn keep_spare(&mut self) {
        self.spare.get_or_insert_default();
    }

    /// Releases the spare handles.
    ///
    /// # Errors
    /// Those of the driver; a handle that it refuses is released again by [`release_again`](Self::release_again).
    pub(crate) fn release_spare(&mut self) -> Result<(), DriverError> {
        let spare = self.spare.take();
        self.release_all(spare.into_iter().flat_map(BTreeMap::into_values).flatten().collect())
    }

    /// Releases the handles that the driver refused before.
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn release_again(&mut self) -> Result<(), DriverError> {
        let refused = std::mem::take(&mut self.unreleased);
        self.release_all(refused)
    }

    fn release_all(&mut self, handles: Vec<PhysicalHandle>) -> Result<(), DriverError> {
        // Each is tried, whatever the result for the others.
        let mut outcome = Ok(());
        for handle in handles {
            outcome = outcome.and(self.release(handle));
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab_device::{CallKind, FaultyDriver, NullDriver};

    const MIB: u64 = 1 << 20;
    const UNIT: u64 = 2 * MIB;

    fn source(room: u64) -> (Expandable, Arc<FaultyDriver>) {
        let faulty = Arc::new(FaultyDriver::new(Arc::new(NullDriver::new(room))));
        let sizes = Sizes { small: UNIT, large: 10 * UNIT, reserve: Some(64 * MIB) };
        let driver = Arc::clone(&faulty) as Arc<dyn Driver>;
        (Expandable::new("test", driver, None, sizes).unwrap(), faulty)
    }

    fn free_bytes(source: &Expandable) -> u64 {
        source.driver().mem_info().unwrap().free
    }

    #[test]
    fn a_call_that_fails_leaves_nothing_mapped_and_nothing_held() {
        for (call, number) in
            [CallKind::MemCreate, CallKind::MemMap].into_iter().flat_map(|call| [0, 1, 2].map(|number| (call, number)))
        {
            fails_whole(call, number);
        }
        fails_whole(CallKind::MemSetAccess, 0);
    }

    fn fails_whole(call: CallKind, number: u64) {
        for code in [DriverError::OUT_OF_MEMORY, DriverError::ILLEGAL_ADDRESS] {
            let (mut source, faulty) = source(64 * MIB);
            let (addr, bytes) = source.reserve(Some(PoolKind::Small), UNIT).unwrap().unwrap();
            let before = free_bytes(&source);
            faulty.fail(call, number, code);
            // SAFETY: a part of the range, in which nothing is mapped.
            let mapped = unsafe { source.map(addr, 3 * UNIT, UNIT) };
            match code {
                DriverError::OUT_OF_MEMORY => assert_eq!(mapped, Ok(false), "{call} {number}"),
                _ => assert_eq!(mapped.unwrap_err().call, call),
            }
            assert_eq!((faulty.injected(), free_bytes(&source)), (1, before), "{call} {number}");
            // SAFETY: as above; it is not used, and afterwards nothing is mapped.
            unsafe {
                assert_eq!(source.map(addr, 3 * UNIT, UNIT), Ok(true), "{call} {number}: the addresses are free");
                assert_eq!(source.unmap(addr, 3 * UNIT, UNIT, UNIT), (3 * UNIT, Ok(())));
                source.give_back(addr, bytes).unwrap();
            }
            assert_eq!(free_bytes(&source), before);
        }
    }

    #[test]
    fn a_handle_that_the_driver_does_not_take_is_offered_again() {
        let (mut source, faulty) = source(64 * MIB);
        let (addr, _) = source.reserve(None, 1).unwrap().unwrap();
        let before = free_bytes(&source);
        // SAFETY: a part of the range, in which nothing is mapped; it is not used.
        unsafe {
            assert_eq!(source.map(addr, 20 * MIB, 20 * MIB), Ok(true));
            faulty.fail(CallKind::MemRelease, 0, DriverError::ILLEGAL_ADDRESS);
            let (done, outcome) = source.unmap(addr, 20 * MIB, 20 * MIB, 20 * MIB);
            assert_eq!((done, outcome.unwrap_err().call), (20 * MIB, CallKind::MemRelease));
        }
        assert_eq!(free_bytes(&source), before - 20 * MIB);
        source.release_again().unwrap();
        assert_eq!(free_bytes(&source), before);
    }

    #[test]
    fn spare_handles_are_mapped_first_and_make_room_for_others() {
        let (mut source, _) = source(4 * MIB);
        let (addr, _) = source.reserve(Some(PoolKind::Small), 1).unwrap().unwrap();
        // SAFETY: parts of the range, mapped where nothing is mapped and unmapped where they are not used.
        unsafe {
            assert_eq!(source.map(addr, 2 * UNIT, UNIT), Ok(true));
            source.keep_spare();
            source.unmap(addr, 2 * UNIT, UNIT, 2 * UNIT).1.unwrap();
            assert_eq!(free_bytes(&source), 0, "kept");
            assert_eq!(source.map(addr, UNIT, UNIT), Ok(true));
            assert_eq!(source.map(addr + UNIT, 2 * UNIT, 2 * UNIT), Ok(false), "one of two is in use");
            assert_eq!(free_bytes(&source), UNIT, "the other was released in vain");
        }
        source.release_spare().unwrap();
    }

    #[test]
    fn a_request_that_no_range_holds_takes_no_addresses() {
        let (source, _) = source(64 * MIB);
        assert_eq!(source.reserve(None, 81 * MIB).unwrap(), None);
        // Whole handles.
        assert_eq!(source.reserve(None, 80 * MIB).unwrap().unwrap().1, 80 * MIB);
    }
}
