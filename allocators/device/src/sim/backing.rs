//! Host memory behind the reserved ranges of the simulated device, on Linux.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
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
    file: std::fs::File,
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
        // SAFETY: the offset is within the range or one past it.
        Some(unsafe { self.base.add(offset) })
    }

    /// The beginning of a part that is entirely in this range.
    fn part(&self, offset: u64, bytes: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(bytes as u64)?;
        self.at(end)?;
        self.at(offset)
    }

    pub(super) fn map(&self, offset: u64, file: &File) -> bool {
        let Some(target) = self.part(offset, file.bytes) else { return false };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: `offset..offset + file.bytes` is in this range, which is ours, so the fixed mapping replaces nothing else.
        let got = unsafe { libc::mmap(target.as_ptr().cast(), file.bytes, access, flags, file.file.as_raw_fd(), 0) };
        got != libc::MAP_FAILED
    }

    pub(super) fn unmap(&self, offset: u64, bytes: u64) {
        let Ok(bytes) = usize::try_from(bytes) else { return };
        let Some(target) = self.part(offset, bytes) else { return };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the part is in this range, which is ours; replacing a mapping by one without access cannot fail for lack of
        // memory, and a failure would leave the old mapping.
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
        // SAFETY: the name is a valid C string.
        let descriptor = unsafe { libc::memfd_create(c"simulated-device".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return None;
        }
        // SAFETY: the descriptor was made above, is open, and has no other owner. Mappings keep the memory alive.
        let file = unsafe { std::fs::File::from_raw_fd(descriptor) };
        file.set_len(bytes).ok()?;
        Some(Self { file, bytes: usize::try_from(bytes).ok()? })
    }

    /// The memory behind another device's descriptor.
    pub(super) fn import(descriptor: &OwnedFd) -> Option<Self> {
        let file = std::fs::File::from(descriptor.try_clone().ok()?);
        let about = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
        Some(Self { file, bytes: usize::try_from(about.len()).ok()? })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// A descriptor of it; `None` when the process may open no more.
    pub(super) fn descriptor(&self) -> Option<OwnedFd> {
        self.file.try_clone().ok().map(OwnedFd::from)
    }
}
