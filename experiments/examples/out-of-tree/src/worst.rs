//! # `worst`: the largest free block serves, so the remainder is large, too
//!
//! *Policy.* A request is rounded up to a multiple of 512 bytes. The largest free block of its stream serves it; of
//! equal blocks, the one with the highest address. A remainder of at least 64 KiB is split off. Everything else
//! follows PyTorch's fallback steps.
//!
//! The example shows custom parts: an index of free blocks, and a rule for splitting.

use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab::Driver;
use vramlab::backends::{Backend, Pooled, Rules, With};
use vramlab::policy::fit::{Fit, FreeBlocks};
use vramlab::policy::grow::{Ladder, SegmentSize};
use vramlab::policy::split::{Split, SplitRule};
use vramlab::policy::{Heap, size::Size};
use vramlab::settings::{NoSettings, Settings};
use vramlab::space::{BlockId, FreeBlock, FreeList};

/// The backend's entry in the list: lists, help and tests read it.
pub static BACKEND: Backend = Backend {
    name: "worst",
    summary: "worst fit: the largest free block serves",
    capabilities: Pooled::<Rules>::CAPABILITIES,
    compared: true,
    constructor: &With(|driver, _: &NoSettings| Ok(Arc::new(on(driver)))),
};

/// An allocator with this policy on `driver`.
pub fn on(driver: Arc<dyn Driver>) -> Pooled<Rules> {
    let heap = Heap::plain(driver, None, Fit::by(Worst::default()));
    let (size, split) = (Size::Multiple(512), Split::Custom(&KeepLarge));
    let ladder = Ladder::releasing(SegmentSize::Fixed(32 << 20));
    let rules = Rules { name: BACKEND.name, settings: NoSettings::default().json(), size, split, ladder };
    // SAFETY: the heap is new, the rules are the library's own policy, and both parts below keep the promises of their
    // traits.
    unsafe { Pooled::new(heap, rules) }
}

/// Free blocks by list, size and address.
#[derive(Debug, Default)]
struct Worst(BTreeMap<(FreeList, u64, u64), BlockId>);

impl FreeBlocks for Worst {
    fn insert(&mut self, block: FreeBlock) {
        self.0.insert((block.list, block.bytes, block.addr), block.id);
    }

    fn remove(&mut self, block: FreeBlock) -> bool {
        self.0.remove(&(block.list, block.bytes, block.addr)).is_some()
    }

    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        self.0.range((list, bytes, 0)..=(list, largest, u64::MAX)).next_back().map(|(_, id)| *id)
    }

    fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        let blocks = self.0.range((list, 0, 0)..=(list, u64::MAX, u64::MAX));
        blocks.map(|(&(list, bytes, addr), &id)| FreeBlock { list, addr, bytes, id }).collect()
    }
}

/// Remainders of at least 64 KiB are split off.
#[derive(Debug)]
struct KeepLarge;

impl SplitRule for KeepLarge {
    fn cuts(&self, bytes: u64, size: u64) -> bool {
        size - bytes >= 64 << 10
    }
}
