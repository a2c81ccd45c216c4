//! Pages that other processes map or libraries have registered: they are neither moved nor unmapped.
//!
//! A page has a count of pins: one for each exported block around it, until that block is free, and one for each pinned range. Its
//! handle for other processes is made once and kept as long as a block needs it.

use super::Heap;
use crate::contract::{AllocError, Exported, PoolKind};
use crate::policy::source::Source;
use crate::space::BlockId;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use vramlab_device::{DriverError, ShareKind, Shareable};

/// See the [module](self).
#[derive(Debug, Default)]
pub(in crate::policy) struct Shared {
    /// Pins by the first address of a page.
    pins: BTreeMap<u64, usize>,
    /// Handles of pages, by their first address, and the exported blocks that need each.
    handles: BTreeMap<u64, (Arc<Shareable>, usize)>,
    /// The pages of exported blocks: first address, end, and size.
    blocks: BTreeMap<BlockId, (u64, u64, u64)>,
}

impl Shared {
    /// Whether the page that begins at an address must stay mapped.
    pub(in crate::policy) fn is_pinned(&self, page: u64) -> bool {
        !self.pins.is_empty() && self.pins.contains_key(&page)
    }

    fn pin(&mut self, page: u64) {
        *self.pins.entry(page).or_default() += 1;
    }

    fn unpin(&mut self, page: u64) {
        if let Some(pins) = self.pins.get_mut(&page) {
            *pins -= 1;
            if *pins == 0 {
                self.pins.remove(&page);
            }
        }
    }

    fn end_export(&mut self, block: BlockId) {
        let Some((start, end, page)) = self.blocks.remove(&block) else { return };
        for at in pages(start, end, page) {
            self.unpin(at);
            if let Some((_, blocks)) = self.handles.get_mut(&at) {
                *blocks -= 1;
                if *blocks == 0 {
                    self.handles.remove(&at);
                }
            }
        }
    }
}

/// First addresses of the pages from `start` to `end`.
fn pages(start: u64, end: u64, page: u64) -> impl Iterator<Item = u64> {
    (0..(end - start) / page).map(move |number| start + number * page)
}

impl Heap {
    /// Handles of the pages around a live block.
    ///
    /// # Errors
    /// Those of [`Pages::export`](crate::contract::Pages::export) but for a foreign block. No page is pinned then.
    pub(crate) fn export(&mut self, name: &'static str, block: BlockId) -> Result<Exported, AllocError> {
        if !self.source.is_expandable() {
            return Err(crate::contract::no_pages(name));
        }
        let (start, end, page) = self.pages_around(block);
        let known = self.source.shared().blocks.contains_key(&block);
        if !known {
            let vmm = self.source.expandable().vmm();
            let Some(kind) = vmm.memory_properties().handle() else {
                let device = self.source.driver().describe().name;
                let capability = "memory with handles for other processes";
                return Err(AllocError::Unsupported { allocator: name, capability, device });
            };
            let made = pages(start, end, page).map(|at| self.handle_for_others(at, kind));
            let made: Vec<Arc<Shareable>> = made.collect::<Result<_, DriverError>>()?;
            for (at, handle) in pages(start, end, page).zip(made) {
                self.source.expandable().shared.handles.entry(at).or_insert((handle, 0)).1 += 1;
                self.source.expandable().shared.pin(at);
            }
            self.source.expandable().shared.blocks.insert(block, (start, end, page));
        }
        let handle = |at: u64| self.source.shared().handles.get(&at).map(|(handle, _)| Arc::clone(handle));
        Ok(Exported { addr: start, page_bytes: page, pages: pages(start, end, page).filter_map(handle).collect() })
    }

    /// The pages around a block: first address, end, and the size of a page.
    fn pages_around(&self, block: BlockId) -> (u64, u64, u64) {
        let (addr, bytes) = (self.space[block].addr, self.space[block].bytes);
        let segment = &self.space[self.space[block].segment];
        // A range begins with a whole page.
        let (base, page) = (segment.addr, self.source.handle_bytes(segment.list.pool));
        (base + (addr - base) / page * page, base + (addr + bytes - base).next_multiple_of(page), page)
    }

    /// The handle of a page that is mapped at the address that it belongs to.
    fn handle_for_others(&self, page: u64, kind: ShareKind) -> Result<Arc<Shareable>, DriverError> {
        if let Some((handle, _)) = self.source.shared().handles.get(&page) {
            return Ok(Arc::clone(handle));
        }
        let memory = self.source.mapped().handle(page).expect("a live block should be mapped");
        let vmm = self.source.driver().vmm().expect("a device should not lose its virtual memory management");
        vmm.export(memory, kind).map(Arc::new)
    }

    /// Unpins the pages of an exported block that is about to be free. One comparison where nothing was exported.
    pub(super) fn end_export(&mut self, block: BlockId) {
        if let Source::Expandable(source) = &mut self.source
            && !source.shared.blocks.is_empty()
        {
            source.shared.end_export(block);
        }
    }

    /// See [`Pages::exported_descriptor`](crate::contract::Pages::exported_descriptor).
    pub(crate) fn exported_descriptor(&self, number: i32) -> Option<OwnedFd> {
        if !self.source.is_expandable() {
            return None;
        }
        self.source.shared().handles.values().find_map(|(handle, _)| match handle.as_ref() {
            Shareable::Descriptor(descriptor) if descriptor.as_raw_fd() == number => descriptor.try_clone().ok(),
            _ => None,
        })
    }

    /// Pins the pages of a range; false where memory is not mapped in pages.
    pub(crate) fn pin_pages(&mut self, addr: u64, bytes: u64) -> bool {
        let touched = self.touched(addr, bytes);
        touched.iter().flatten().for_each(|page| self.source.expandable().shared.pin(*page));
        touched.is_some()
    }

    /// Undoes one [`pin_pages`](Self::pin_pages).
    pub(crate) fn unpin_pages(&mut self, addr: u64, bytes: u64) -> bool {
        let touched = self.touched(addr, bytes);
        touched.iter().flatten().for_each(|page| self.source.expandable().shared.unpin(*page));
        touched.is_some()
    }

    /// First addresses of the pages in a range, as far as it is in segments.
    fn touched(&self, addr: u64, bytes: u64) -> Option<Vec<u64>> {
        if !self.source.is_expandable() {
            return None;
        }
        let (end, mut touched) = (addr.saturating_add(bytes), Vec::new());
        for (_, segment) in self.space.segments() {
            let (base, page) = (segment.addr, self.source.handle_bytes(segment.list.pool));
            let (from, to) = (addr.max(base), end.min(base + segment.bytes));
            if from < to {
                touched.extend(pages(
                    base + (from - base) / page * page,
                    base + (to - base).next_multiple_of(page),
                    page,
                ));
            }
        }
        Some(touched)
    }

    /// The unpinned parts of some whole pages of a list's pool, in address order.
    pub(super) fn unpinned(&self, part: Range<u64>, pool: Option<PoolKind>) -> Vec<Range<u64>> {
        if part.is_empty() {
            return Vec::new();
        }
        let page = self.source.handle_bytes(pool);
        let (mut parts, mut start) = (Vec::new(), part.start);
        for (&pinned, _) in self.source.shared().pins.range(part.clone()) {
            if start < pinned {
                parts.push(start..pinned);
            }
            start = pinned + page;
        }
        if start < part.end {
            parts.push(start..part.end);
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use crate::backends::expandable::{ExpandableSettings, PyTorchExpandable};
    use crate::contract::{AllocError, DeviceAllocator, Pages as _, Request};
    use std::sync::Arc;
    use vramlab_device::sim::SimMemory;
    use vramlab_device::{CallKind, Driver, DriverError, FaultyDriver, Profile, SimDriver};

    #[test]
    fn an_export_that_fails_pins_nothing() {
        let faulty = Arc::new(FaultyDriver::new(Arc::new(SimDriver::new(Profile::h200(), SimMemory::None))));
        let driver = Arc::clone(&faulty) as Arc<dyn Driver>;
        let stream = driver.stream_create().unwrap();
        let allocator = PyTorchExpandable::new(driver, ExpandableSettings::default()).unwrap();
        let block = allocator.allocate(Request::new(50 << 20), stream).unwrap();
        for page in 0..3 {
            faulty.fail(CallKind::MemExport, page, DriverError::OPERATING_SYSTEM);
            assert!(matches!(allocator.export(&block), Err(AllocError::Driver(_))), "page {page}");
        }
        assert_eq!(allocator.export(&block).unwrap().pages.len(), 3);
        assert_eq!(allocator.export(&block).unwrap().pages.len(), 3, "no page is exported twice");
        assert_eq!(faulty.injected(), 3);
        // SAFETY: no work uses it.
        unsafe { allocator.deallocate(block, stream) }.unwrap();
        assert_eq!(allocator.trim(0).unwrap(), 60 << 20, "nothing is pinned any more");
    }
}
