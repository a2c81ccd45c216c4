//! Host memory behind simulated addresses.
//!
//! Each block of the simulated driver has host memory of its own, so an access outside of a block is detected instead of reading a
//! neighbour. Memory is reused without clearing it: like a GPU's, it contains the data of its last owner. (Fresh memory is zero.)

use super::host_room::{Allowance, HostRoom};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;

const ALIGN: usize = 512;
/// Maximum of recycled bytes; beyond it they are freed on the host.
const RECYCLE_LIMIT: usize = 256 << 20;

#[derive(Debug)]
struct HostBlock {
    /// The memory of the host's allocator; the block starts at the first multiple of `ALIGN` in it.
    start: NonNull<u8>,
    ptr: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a HostBlock owns its memory; the pointer is only returned by `translate`, whose callers promise exclusive use while they
// write.
unsafe impl Send for HostBlock {}

impl HostBlock {
    /// Room for the block and its alignment. Requesting the alignment from the host would make it write every byte of zeroed
    /// memory; with a small alignment the pages of a large block are mapped when they are used.
    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes.checked_add(ALIGN)?, align_of::<u64>()).ok()
    }

    fn new(bytes: usize) -> Option<Self> {
        let layout = Self::layout(bytes)?;
        // SAFETY: the layout's size is at least `ALIGN`.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let offset = start.as_ptr().align_offset(ALIGN);
        // SAFETY: the offset is below `ALIGN`, and the layout has `ALIGN` bytes more than the block.
        let ptr = unsafe { start.add(offset) };
        Some(Self { start, ptr, bytes })
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.bytes) {
            // SAFETY: `start` came from `alloc_zeroed` with this layout and is freed here only.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}

/// Host memory by simulated address.
#[derive(Debug, Default)]
pub(super) struct HostMemoryMap {
    blocks: BTreeMap<u64, HostBlock>,
    spare: HashMap<usize, Vec<HostBlock>>,
    spare_bytes: usize,
    allowance: Allowance,
}

/// The host has no memory for a block. Contains the host's remaining memory, where that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom(pub(super) Option<HostRoom>);

impl HostMemoryMap {
    /// A map that takes at most `limit` bytes at a time.
    pub(super) fn limited(limit: u64) -> Self {
        Self { allowance: Allowance::limited(limit), ..Self::default() }
    }

    /// Adds `bytes` of host memory at `addr`, if the host has them.
    pub(super) fn back(&mut self, addr: u64, bytes: u64) -> Result<(), NoRoom> {
        // CAST: a size that no pointer could reach is refused like one without room.
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let block = match self.spare.get_mut(&size).and_then(Vec::pop) {
            Some(block) => {
                self.spare_bytes -= size;
                block
            }
            None => {
                self.ask(bytes)?;
                HostBlock::new(size).ok_or_else(|| {
                    self.allowance.give(bytes);
                    NoRoom(None)
                })?
            }
        };
        self.blocks.insert(addr, block);
        Ok(())
    }

    /// Takes `bytes` of the host's remaining memory, freeing spare blocks if that is not enough.
    pub(super) fn ask(&mut self, bytes: u64) -> Result<(), NoRoom> {
        if self.allowance.take(bytes).is_ok() {
            return Ok(());
        }
        self.spare.clear();
        self.allowance.give(std::mem::take(&mut self.spare_bytes) as u64);
        self.allowance.take(bytes).map_err(|room| NoRoom(Some(room)))
    }

    /// Returns the requested bytes.
    pub(super) fn give(&mut self, bytes: u64) {
        self.allowance.give(bytes);
    }

    /// Removes the host memory at `addr`.
    pub(super) fn unback(&mut self, addr: u64) {
        let Some(block) = self.blocks.remove(&addr) else { return };
        if self.spare_bytes + block.bytes <= RECYCLE_LIMIT {
            self.spare_bytes += block.bytes;
            self.spare.entry(block.bytes).or_default().push(block);
        } else {
            self.allowance.give(block.bytes as u64);
        }
    }

    /// The host address of `addr..addr + bytes`; `None` unless all of it is in one block.
    pub(super) fn translate(&self, addr: u64, bytes: u64) -> Option<NonNull<u8>> {
        let (&start, block) = self.blocks.range(..=addr).next_back()?;
        let offset = addr - start;
        let end = offset.checked_add(bytes)?;
        if end > block.bytes as u64 {
            return None;
        }
        // SAFETY: `offset` is at most the block's size, so the result stays within or one past the block.
        // CAST: it is below a size that was a usize.
        Some(unsafe { block.ptr.add(offset as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn translation_stays_inside_one_block() {
        let mut map = HostMemoryMap::default();
        map.back(1000, 64).unwrap();
        map.back(1064, 64).unwrap();
        let first = map.translate(1000, 64).unwrap();
        assert_eq!(map.translate(1010, 54).unwrap().as_ptr() as usize, first.as_ptr() as usize + 10);
        for (addr, bytes) in [(1000, 65), (999, 1), (1128, 1), (1010, u64::MAX)] {
            assert!(map.translate(addr, bytes).is_none(), "{addr} {bytes}");
        }
        map.unback(1000);
        assert!(map.translate(1000, 1).is_none());
    }

    #[test]
    fn blocks_are_backed_up_to_the_limit_and_spare_ones_freed_first() {
        let mut map = HostMemoryMap::limited(1000);
        map.back(0, 600).unwrap();
        let NoRoom(room) = map.back(600, 500).unwrap_err();
        assert_eq!(room.map(|room| room.bytes), Some(400));
        map.unback(0);
        // The 600 bytes are spare now, and another block needs them.
        map.back(600, 500).unwrap();
        map.back(1100, 500).unwrap();
        map.back(0, 1).unwrap_err();
        map.back(0, u64::MAX).unwrap_err();
    }
}
