//! # `host-cupy`: CuPy's pool of pinned memory
//!
//! The policy of `cupy.cuda.PinnedMemoryPool`, through which `cupy.cuda.alloc_pinned_memory` and asynchronous copies go.
//!
//! *A request* (`allocate`):
//! 1. The size is rounded up to 512 bytes, then to a power of two.
//! 2. A free block of exactly this size is taken, the newest one. Others are not searched, and none is split.
//! 3. When there is none, memory of this size is pinned. If the host refuses, all free blocks are released and the host is asked
//!    again.
//!
//! *A free* (`free`). The block returns to the list of its size. Nothing coalesces.
//!
//! *Differences from CuPy.* CuPy does not know which copies use a block: its caller keeps the block until they have completed. A free
//! that was announced to streams (`record_use`) waits for them here. Python's garbage collector, which CuPy runs before it gives up, is
//! not modelled.
//!
//! *Good at* speed. *Bad at* memory: up to half of each block is rounding, and nothing is released before the host refuses.
//!
//! *Cost.* O(log n) in the number of lists.
//!
//! *Source.* CuPy `cupy/cuda/pinned_memory.pyx` at 6b6d9563, `PinnedMemoryPool`; its functions are named where their rules are.

use super::pooled::{Pooled, Rules};
use super::registry::{Backend, Capabilities, MemoryKind, With};
use crate::policy::Heap;
use crate::policy::fit::{Fit, FreeBlocks};
use crate::policy::grow::{Ladder, SegmentSize};
use crate::policy::size::Size;
use crate::policy::split::{Split, SplitRule};
use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab_device::Driver;
use vramlab_device::settings::{NoSettings, Settings as _};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "host-cupy",
    summary: "pinned host memory as CuPy's pool has it: powers of two, one list for each size",
    capabilities: Capabilities { memory: MemoryKind::Host, ..Pooled::<Rules>::CAPABILITIES },
    compared: true,
    constructor: &With(|driver, _: &NoSettings| Ok(Arc::new(build(driver)))),
};

/// An allocator over a driver of pinned memory.
#[must_use]
pub fn build(driver: Arc<dyn Driver>) -> Pooled<Rules> {
    let heap = Heap::plain(driver, None, Fit::by(Newest::default()));
    // 3. `malloc`: `free_all_blocks`, and the host again.
    let ladder = Ladder::releasing(SegmentSize::Exact);
    let rules = Rules {
        name: BACKEND.name,
        settings: NoSettings::default().json(),
        // 1. `_round_size`
        size: Size::PowerOfTwo,
        split: Split::Custom(&SameSize),
        ladder,
    };
    Pooled::over(heap, rules)
}

/// 2. Only a block of exactly the rounded size serves.
#[derive(Debug)]
struct SameSize;

impl SplitRule for SameSize {
    fn largest(&self, bytes: u64) -> u64 {
        bytes
    }

    fn cuts(&self, _bytes: u64, _size: u64) -> bool {
        false
    }
}

/// Free blocks by list and size, in the order in which they became free.
#[derive(Debug, Default)]
struct Newest(BTreeMap<(FreeList, u64), Vec<FreeBlock>>);

impl FreeBlocks for Newest {
    fn insert(&mut self, block: FreeBlock) {
        self.0.entry((block.list, block.bytes)).or_default().push(block);
    }

    fn remove(&mut self, block: FreeBlock) -> bool {
        let key = (block.list, block.bytes);
        let Some(blocks) = self.0.get_mut(&key) else { return false };
        // A request takes the last one.
        let Some(at) = blocks.iter().rposition(|known| known.id == block.id) else { return false };
        blocks.remove(at);
        if blocks.is_empty() {
            self.0.remove(&key);
        }
        true
    }

    /// `_free[size].pop()`
    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let mut sizes = self.0.range((list, bytes)..=(list, largest));
        Some(sizes.next()?.1.last()?.id)
    }

    fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        self.0.range((list, 0)..=(list, u64::MAX)).flat_map(|(_, blocks)| blocks).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{DeviceAllocator as _, Request};
    use vramlab_device::NullDriver;

    const GIB: u64 = 1 << 30;

    #[test]
    fn published_sizes_are_rounded_as_published() {
        // https://github.com/cupy/cupy/issues/7742: 234 and 10 GiB.
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(512 * GIB));
        let stream = driver.stream_create().unwrap();
        let pool = build(Arc::clone(&driver));
        let take = |bytes| pool.allocate(Request::new(bytes), stream).unwrap();
        let blocks = [234 * GIB, 10 * GIB].map(take);
        assert_eq!(blocks.each_ref().map(|block| block.bytes()), [256 * GIB, 16 * GIB]);
        assert_eq!(pool.stats().reserved_bytes.all.current, 272 * GIB);
    }

    #[test]
    fn the_newest_block_of_exactly_the_size_serves() {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(GIB));
        let stream = driver.stream_create().unwrap();
        let pool = build(Arc::clone(&driver));
        let take = |bytes| pool.allocate(Request::new(bytes), stream).unwrap();
        let blocks = [1000, 1000, 4000].map(take);
        let addresses = blocks.each_ref().map(|block| block.addr());
        for block in blocks {
            // SAFETY: no work uses it.
            unsafe { pool.deallocate(block, stream) }.unwrap();
        }
        let again = [700, 1024, 1024].map(take);
        assert_eq!(again.each_ref().map(|block| block.addr())[..2], [addresses[1], addresses[0]]);
        assert_ne!(again[2].addr(), addresses[2], "a block of another size is not searched");
    }
}
