//! The device's side of the large pool of [`gmlake`](super): handles of one page, and the ranges of addresses that they are mapped to.

use crate::contract::AllocError;
use crate::policy::size::torch::SMALL_SEGMENT;
use std::sync::Arc;
use vramlab_device::{DeviceAddr, Driver, DriverError, PhysicalHandle, VmmDriver};

/// Makes and removes mappings of pages.
#[derive(Debug)]
pub(super) struct Pages {
    driver: Arc<dyn Driver>,
    /// Bytes of a page.
    pub(super) page: u64,
    /// Handles and unmapped ranges that the driver refused to release.
    unreleased: Vec<PhysicalHandle>,
    unfreed: Vec<(u64, u64)>,
}

/// An out-of-memory error is `None`; every other error stays an error.
fn unless_full<T>(outcome: Result<T, DriverError>) -> Result<Option<T>, DriverError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

impl Pages {
    pub(super) fn new(name: &'static str, driver: Arc<dyn Driver>) -> Result<Self, AllocError> {
        let Some(vmm) = driver.vmm() else {
            return Err(AllocError::Unsupported {
                allocator: name,
                capability: "virtual memory management (pytorch and caching do without it)",
                device: driver.describe().name,
            });
        };
        let page = SMALL_SEGMENT.next_multiple_of(vmm.granularity()?.max(1));
        Ok(Self { driver, page, unreleased: Vec::new(), unfreed: Vec::new() })
    }

    fn vmm(&self) -> &dyn VmmDriver {
        self.driver.vmm().expect("a device should not lose its virtual memory management")
    }

    pub(super) fn is_capturing(&self) -> bool {
        self.driver.is_capture_noted()
    }

    /// Waits for all work on the device.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        self.driver.device_synchronize()
    }

    /// New memory of whole pages at an address: a handle for each page. `None` when there is no memory.
    ///
    /// # Errors
    /// Any other error of the driver; nothing stays reserved then.
    pub(super) fn create(&mut self, bytes: u64) -> Result<Option<(u64, Vec<PhysicalHandle>)>, DriverError> {
        // A request above the device's memory would create handles for all of it.
        if bytes > self.driver.describe().total_bytes {
            return Ok(None);
        }
        let (mut handles, mut outcome) = (Vec::new(), Ok(()));
        for _ in 0..bytes / self.page {
            match self.vmm().create(self.page) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        let mapped = outcome.and_then(|()| self.map(&handles));
        if !matches!(mapped, Ok(Some(_))) {
            let released = self.release(handles);
            unless_full(mapped)?;
            return released.map(|()| None);
        }
        Ok(mapped?.map(|addr| (addr, handles)))
    }

    /// Maps a handle for each page into a new range of addresses, and sets access once for all of them. `None` when there is no
    /// memory for it, or there are no addresses.
    ///
    /// # Errors
    /// Any other error of the driver. Nothing is mapped then, unless the driver refuses to unmap it: that stays with its context.
    pub(super) fn map(&mut self, handles: &[PhysicalHandle]) -> Result<Option<u64>, DriverError> {
        let bytes = handles.len() as u64 * self.page;
        let Some(start) = unless_full(self.vmm().address_reserve(bytes))? else { return Ok(None) };
        let (start, mut mapped, mut outcome) = (start.get(), 0, Ok(()));
        for handle in handles {
            // SAFETY: the range was just reserved, and has a page for each handle, which was created with this size.
            outcome = unsafe { self.vmm().map(DeviceAddr::handed_out(start + mapped), self.page, *handle) };
            if outcome.is_err() {
                break;
            }
            mapped += self.page;
        }
        if outcome.is_ok() {
            // SAFETY: all of it was mapped above.
            outcome = unsafe { self.vmm().set_access(DeviceAddr::handed_out(start), bytes) };
        }
        if outcome.is_ok() {
            return Ok(Some(start));
        }
        if mapped > 0 {
            // SAFETY: it was mapped above, and its address was not returned to anyone.
            unsafe { self.vmm().unmap(DeviceAddr::handed_out(start), mapped) }?;
        }
        self.address_free(start, bytes)?;
        unless_full(outcome).map(|_| None)
    }

    /// Unmaps whole pages.
    ///
    /// # Safety
    /// They were mapped by [`map`](Self::map) or [`create`](Self::create) in one range, and no queued work uses their addresses.
    pub(super) unsafe fn unmap(&self, addr: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller promises it.
        unsafe { self.vmm().unmap(DeviceAddr::handed_out(addr), bytes) }
    }

    /// Releases a range of addresses in which nothing is mapped. One that the driver refuses is released later.
    pub(super) fn address_free(&mut self, addr: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: it was reserved with this size and is unmapped. It is released again only if the driver refused.
        let freed = unsafe { self.vmm().address_free(DeviceAddr::handed_out(addr), bytes) };
        if freed.is_err() {
            self.unfreed.push((addr, bytes));
        }
        freed
    }

    /// Releases handles. Those that the driver refuses are released later.
    pub(super) fn release(&mut self, handles: Vec<PhysicalHandle>) -> Result<(), DriverError> {
        let mut outcome = Ok(());
        for handle in handles {
            // SAFETY: it was created here, and is released again only if the driver refused.
            let released = unsafe { self.vmm().release(handle) };
            if released.is_err() {
                self.unreleased.push(handle);
            }
            outcome = outcome.and(released);
        }
        outcome
    }

    /// Releases what the driver refused to release before.
    pub(super) fn release_refused(&mut self) -> Result<(), DriverError> {
        let (handles, ranges) = (std::mem::take(&mut self.unreleased), std::mem::take(&mut self.unfreed));
        let mut outcome = self.release(handles);
        for (addr, bytes) in ranges {
            outcome = outcome.and(self.address_free(addr, bytes));
        }
        outcome
    }
}
