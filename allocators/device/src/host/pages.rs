//! Ordinary memory of the host in pages of its own, as programs register it.

use super::HOST_PAGE;
use std::ptr::NonNull;

/// Start of a mapping that may consist of huge pages.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed memory that belongs to its owner and is released when dropped.
#[derive(Debug)]
pub struct HostPages {
    /// The mapping; the memory starts at the first multiple of a huge page in it, where huge pages were requested.
    mapping: NonNull<u8>,
    mapped: usize,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory, and only a mutable borrow writes it.
unsafe impl Send for HostPages {}
// SAFETY: as above.
unsafe impl Sync for HostPages {}

impl HostPages {
    /// Memory for `bytes`. On Linux no page of it is resident before it is touched; `huge` asks the system for huge pages there
    /// (`madvise`), which it may ignore. `None` for zero bytes, and where the system has no such memory.
    #[must_use]
    pub fn new(bytes: usize, huge: bool) -> Option<Self> {
        let whole = bytes.checked_next_multiple_of(HOST_PAGE as usize).filter(|whole| *whole > 0)?;
        let mapped = if huge { whole.checked_add(HUGE_PAGE)? } else { whole };
        let mapping = memory::map(mapped)?;
        let offset = if huge { mapping.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        // SAFETY: the offset is below the huge page by which the mapping is larger.
        let start = unsafe { mapping.add(offset) };
        if huge {
            memory::advise_huge(start, whole);
        }
        Some(Self { mapping, mapped, start, bytes })
    }

    /// First address, a multiple of a page.
    #[must_use]
    pub fn addr(&self) -> NonNull<u8> {
        self.start
    }

    /// The requested size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The memory.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `bytes` from `start` on are inside the mapping, initialised (zero), and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// Writes a byte of each page, so that all are resident, by this number of threads (at least one), each of which has a part.
    pub fn touch(&mut self, threads: u32) {
        let page = HOST_PAGE as usize;
        // CAST: a number of threads.
        let part = self.bytes.div_ceil(threads.max(1) as usize).next_multiple_of(page).max(page);
        let write = |part: &mut [u8]| {
            for byte in part.iter_mut().step_by(page) {
                *std::hint::black_box(byte) = 0;
            }
        };
        let memory = self.as_mut_slice();
        if threads <= 1 {
            return write(memory);
        }
        std::thread::scope(|scope| memory.chunks_mut(part).for_each(|part| _ = scope.spawn(move || write(part))));
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: mapped with this size by `new`, and released only here.
        unsafe { memory::unmap(self.mapping, self.mapped) };
    }
}

#[cfg(target_os = "linux")]
mod memory {
    use std::ptr::NonNull;

    pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if base == libc::MAP_FAILED { None } else { NonNull::new(base.cast()) }
    }

    pub(super) fn advise_huge(start: NonNull<u8>, bytes: usize) {
        // SAFETY: the range is inside a mapping of the caller; the advice changes no contents. A kernel without huge pages refuses it.
        let _ = unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
    }

    /// # Safety
    /// The memory came from [`map`] with this size and is used nowhere else.
    pub(super) unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
        // SAFETY: promised by the caller. A mapping that the kernel refuses to end stays until the process ends.
        let _ = unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
    }
}

#[cfg(not(target_os = "linux"))]
mod memory {
    use super::HOST_PAGE;
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::ptr::NonNull;

    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes, HOST_PAGE as usize).ok().filter(|layout| layout.size() > 0)
    }

    pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
        // SAFETY: the size is not zero.
        layout(bytes).and_then(|layout| NonNull::new(unsafe { alloc_zeroed(layout) }))
    }

    pub(super) fn advise_huge(_start: NonNull<u8>, _bytes: usize) {}

    /// # Safety
    /// The memory came from [`map`] with this size and is used nowhere else.
    pub(super) unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
        if let Some(layout) = layout(bytes) {
            // SAFETY: promised by the caller.
            unsafe { dealloc(start.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zero_and_touched_by_any_number_of_threads() {
        for (bytes, huge) in [(1, false), (4096, false), (10_000_001, false), (5 << 20, true)] {
            for threads in [0, 1, 3, 32] {
                let mut pages = HostPages::new(bytes, huge).unwrap();
                pages.touch(threads);
                assert_eq!(pages.as_mut_slice().len(), bytes);
                assert!(pages.as_mut_slice().iter().all(|byte| *byte == 0));
                pages.as_mut_slice()[bytes - 1] = 7;
                let align = if huge { HUGE_PAGE } else { 4096 };
                assert_eq!(pages.addr().as_ptr().align_offset(align), 0, "{bytes} {huge}");
            }
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for huge in [false, true] {
            assert!(HostPages::new(0, huge).is_none());
            assert!(HostPages::new(usize::MAX, huge).is_none());
            assert!(HostPages::new(usize::MAX / 2, huge).is_none());
        }
    }
}
