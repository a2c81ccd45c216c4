//! Memory that is exported to other processes, imported from them, or registered elsewhere by its address.

use super::{Allocator, lock};
use crate::arguments::{allocator, c_text, give, missing, text};
use crate::device::Device;
use crate::error::{Failure, Outcome, Status, answer};
use serde_json::json;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex};
use vramlab_device::{DeviceAddr, Shareable, VmmDriver};
use vramlab_policies::Selection;
use vramlab_policies::backends::SegmentUse;
use vramlab_policies::contract::Exported;

/// A page has a fabric handle instead of a file descriptor.
pub const VRAMLAB_FABRIC: i32 = -2;

/// The pages around an exported block.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportedRecord {
    /// First address of the first page.
    pub address: u64,
    /// Bytes of each page.
    pub page_bytes: u64,
    /// Number of pages.
    pub pages: u64,
}

/// Memory of other processes that is mapped here, by its first address.
static IMPORTED: Mutex<BTreeMap<u64, Imported>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct Imported {
    device: Arc<Device>,
    bytes: u64,
    /// Closed by the program while it captured a graph: it is unmapped when the next one is opened or closed.
    closed: bool,
}

fn vmm(device: &Device) -> Outcome<&dyn VmmDriver> {
    let incapable = || Failure::new(Status::Incapable, "the device has no virtual memory management");
    device.driver().vmm().ok_or_else(incapable)
}

impl Allocator {
    /// The handles of a block's pages for other processes.
    fn export(&self, address: u64) -> Outcome<Exported> {
        let exported = self.held.with(address, |held| self.stacks[0].export(&held.block));
        Ok(exported.ok_or_else(|| self.foreign(address))??)
    }

    /// A copy of an exported file descriptor.
    fn exported_descriptor(&self, number: i32) -> Outcome<i32> {
        let unknown =
            || Failure::new(Status::Unknown, format!("file descriptor {number} does not belong to exported memory"));
        self.stacks[0].exported_descriptor(number).map(OwnedFd::into_raw_fd).ok_or_else(unknown)
    }

    fn pin(&self, address: u64, bytes: u64, on: bool) -> Outcome<()> {
        let zero = || Failure::new(Status::Invalid, "the range begins at address zero");
        let addr = DeviceAddr::new(address).ok_or_else(zero)?;
        let stack = &self.stacks[0];
        Ok(if on { stack.pin(addr, bytes) } else { stack.unpin(addr, bytes) }?)
    }

    /// Maps pages of another process next to each other. `page` returns the handle of each.
    fn import(&self, page_bytes: u64, pages: u64, mut page: impl FnMut(u64) -> Outcome<Shareable>) -> Outcome<u64> {
        close_what_waits()?;
        let vmm = vmm(&self.device)?;
        let granularity = vmm.granularity()?.max(1);
        let bytes = page_bytes.checked_mul(pages).filter(|bytes| *bytes > 0 && page_bytes.is_multiple_of(granularity));
        let bytes = bytes.ok_or_else(|| {
            let text = format!(
                "{pages} pages of {page_bytes} bytes are no memory of such a device, whose pages have {granularity}"
            );
            Failure::new(Status::Invalid, text)
        })?;
        let start = vmm.address_reserve(bytes)?;
        let mut mapped = 0;
        let mut outcome = Ok(());
        while mapped < pages && outcome.is_ok() {
            outcome = page(mapped).and_then(|shared| {
                let handle = vmm.import(&shared)?;
                // SAFETY: a part of the range, in which nothing is mapped; the driver checks the size.
                let mapping = unsafe { vmm.map(start.offset(mapped * page_bytes), page_bytes, handle) };
                // SAFETY: it was imported above and is released once; the mapping keeps the memory.
                let released = unsafe { vmm.release(handle) };
                Ok(mapping.and(released)?)
            });
            mapped += u64::from(outcome.is_ok());
        }
        let outcome = outcome.and_then(|()| {
            // SAFETY: all of it is mapped.
            Ok(unsafe { vmm.set_access(start, bytes) }?)
        });
        if let Err(failure) = outcome {
            // An error here would hide that one. Remaining mappings end with the device's context.
            let _ = unmap(vmm, start, mapped * page_bytes, bytes);
            return Err(failure);
        }
        lock(&IMPORTED).insert(start.get(), Imported { device: Arc::clone(&self.device), bytes, closed: false });
        Ok(start.get())
    }

    fn sharing_json(&self) -> String {
        let pages = self.selection.capabilities().segments == SegmentUse::Expandable;
        let vmm = self.device.driver().vmm().filter(|_| pages);
        let memory = vmm.map(|vmm| {
            let properties = vmm.memory_properties();
            json!({
                "file_descriptors": properties.file_descriptors,
                "fabric": properties.fabric,
                "rdma": properties.rdma,
                "granularity": vmm.granularity().ok(),
            })
        });
        json!({ "pages": memory }).to_string()
    }
}

/// Unmaps the front of a range, and releases its addresses.
fn unmap(vmm: &dyn VmmDriver, start: DeviceAddr, mapped: u64, bytes: u64) -> Outcome<()> {
    if mapped > 0 {
        // SAFETY: whole mappings, which `import` made. No work uses them: they were not returned to the program, or the device was
        // waited for after the program had closed them.
        unsafe { vmm.unmap(start, mapped) }?;
    }
    // SAFETY: the whole range, in which nothing is mapped any more; it is released once.
    Ok(unsafe { vmm.address_free(start, bytes) }?)
}

/// Closes memory that the program imported: waits for the device first, which a capture does not allow.
fn close(address: u64) -> Outcome<()> {
    let unknown = || Failure::new(Status::Foreign, format!("no imported memory begins at {address:#x}"));
    match lock(&IMPORTED).get_mut(&address) {
        Some(imported) if !imported.closed => imported.closed = true,
        _ => return Err(unknown()),
    }
    close_what_waits()
}

/// Unmaps closed memory, where the device can be waited for.
fn close_what_waits() -> Outcome<()> {
    let idle = |imported: &Imported| imported.closed && !imported.device.driver().is_capture_noted();
    // Removed from the table first, so that no wait happens under its lock.
    let closed: Vec<(u64, Imported)> = {
        let table = &mut *lock(&IMPORTED);
        let addresses: Vec<u64> = table.iter().filter(|(_, imported)| idle(imported)).map(|(at, _)| *at).collect();
        addresses.into_iter().filter_map(|at| table.remove_entry(&at)).collect()
    };
    let mut outcome = Ok(());
    for (address, Imported { device, bytes, .. }) in closed {
        let start = DeviceAddr::handed_out(address);
        let result = device.driver().device_synchronize().map_err(Failure::from).and_then(|()| {
            let vmm = vmm(&device)?;
            unmap(vmm, start, bytes, bytes)
        });
        outcome = outcome.and(result);
    }
    outcome
}

/// Exports the memory around the live block that begins at an address, so that other processes can map it: calls `page` for each
/// page in the order of their addresses, with a file descriptor, or with `VRAMLAB_FABRIC` and the 64 bytes of a fabric handle.
/// Descriptors belong to the library: they stay the same until the block is free, and are closed then. Until then the pages stay
/// mapped where they are. The status is `VRAMLAB_STATUS_INCAPABLE` where the block is in an allocation of the driver, which has
/// handles of its own (`vramlab_base`), or where memory of the device has no handles.
///
/// # Safety
/// See the top of this file; the callback may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_export_block(
    vramlab: *mut Allocator,
    address: u64,
    context: *mut c_void,
    page: Option<unsafe extern "C" fn(*mut c_void, i32, *const u8)>,
    out: *mut ExportedRecord,
) -> Status {
    answer(|| {
        // SAFETY: as promised.
        let exported = unsafe { allocator(vramlab) }?.export(address)?;
        for shared in &exported.pages {
            let (number, fabric) = match shared.as_ref() {
                Shareable::Descriptor(descriptor) => (descriptor.as_raw_fd(), std::ptr::null()),
                Shareable::Fabric(bytes) => (VRAMLAB_FABRIC, bytes.as_ptr()),
            };
            // SAFETY: may be called (the program's promise); the bytes live until it returns.
            page.inspect(|page| unsafe { page(context, number, fabric) });
        }
        let Exported { addr, page_bytes, ref pages } = exported;
        let record = ExportedRecord { address: addr, page_bytes, pages: pages.len() as u64 };
        // SAFETY: as promised.
        unsafe { give(out, "the result", || Ok(record)) }
    })
}

/// A copy of a file descriptor that `vramlab_export_block` returned, which the program closes. The status is
/// `VRAMLAB_STATUS_UNKNOWN` where it does not belong to a live block: the number may be that of another file by now.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_exported_descriptor(vramlab: *mut Allocator, number: i32, out: *mut i32) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the descriptor", || allocator(vramlab)?.exported_descriptor(number)) })
}

/// Maps `pages` pages of another process next to each other, and gives the allocator's device access. `page` is called for each
/// with its number, from 0 on, and room for 64 bytes. It returns a file descriptor, which the library closes; or writes a fabric
/// handle and returns `VRAMLAB_FABRIC`. Any other number ends the call with `VRAMLAB_STATUS_INVALID`. Other GPUs need access of
/// their own.
///
/// # Safety
/// See the top of this file; the callback may be called with `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_import_pages(
    vramlab: *mut Allocator,
    page_bytes: u64,
    pages: u64,
    context: *mut c_void,
    page: Option<unsafe extern "C" fn(*mut c_void, u64, *mut u8) -> i32>,
    out: *mut u64,
) -> Status {
    answer(|| {
        let page = page.ok_or_else(|| missing("the callback"))?;
        let handle = |number: u64| {
            let mut fabric = [0u8; 64];
            // SAFETY: may be called (the program's promise); there is room for 64 bytes until it returns.
            match unsafe { page(context, number, fabric.as_mut_ptr()) } {
                VRAMLAB_FABRIC => Ok(Shareable::Fabric(fabric)),
                // SAFETY: an open file descriptor, which belongs to the library from here on (the program's promise).
                descriptor @ 0.. => Ok(Shareable::Descriptor(unsafe { OwnedFd::from_raw_fd(descriptor) })),
                _ => Err(Failure::new(Status::Invalid, format!("the program has no handle for page {number}"))),
            }
        };
        // SAFETY: as promised.
        unsafe { give(out, "the address", || allocator(vramlab)?.import(page_bytes, pages, handle)) }
    })
}

/// Closes memory that was imported at an address: waits for the device, then unmaps it. While the program captures a graph it stays
/// mapped until a later call of this function or of `vramlab_import_pages`. The allocator may be closed by then.
#[unsafe(no_mangle)]
pub extern "C" fn vramlab_import_close(address: u64) -> Status {
    answer(|| close(address))
}

/// Pins (`on`) or unpins the memory of a range of addresses, also while it is free: its pages are neither moved nor unmapped. For
/// memory that a library has registered by its address, as `ncclCommRegister` and network adapters do. Calls are counted. The
/// status is `VRAMLAB_STATUS_INCAPABLE` where memory is not mapped in pages: then a segment stays reserved while a block of it is
/// live.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_pin(vramlab: *mut Allocator, address: u64, bytes: u64, on: bool) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { allocator(vramlab) }?.pin(address, bytes, on))
}

/// The properties of the allocator's memory, as JSON: under `pages`, null where memory is not mapped in pages, whether other
/// processes can map it by `file_descriptors` or `fabric` handles, whether network adapters can use it (`rdma`), and its
/// `granularity` in bytes.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_sharing_json(vramlab: *mut Allocator, out: *mut *mut c_char) -> Status {
    // SAFETY: as promised.
    answer(|| unsafe { give(out, "the result", || c_text(allocator(vramlab)?.sharing_json())) })
}

/// Whether an allocator of this name and settings maps its memory in pages. Opens nothing.
///
/// # Safety
/// See the top of this file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramlab_has_pages(name: *const c_char, out: *mut bool) -> Status {
    answer(|| {
        // SAFETY: as promised.
        let selection: Selection = unsafe { text(name, "the allocator's name") }?.parse()?;
        let pages = selection.capabilities().segments == SegmentUse::Expandable;
        // SAFETY: as promised.
        unsafe { give(out, "the result", || Ok(pages)) }
    })
}
