//! # `buddy`: powers of two, halved and coalesced
//!
//! *Policy.* A request is rounded up to a power of two of at least 4 KiB. The smallest free block of its stream serves
//! it, and is halved until it is as large as the request. If no block is large enough, free buddies (the two halves of
//! one block) are coalesced. If that fails, a segment of 32 MiB, or of the request size if larger, is allocated.
//!
//! The example shows a custom rule for sizes, and custom steps that split and coalesce free blocks.

use std::sync::Arc;
use vramlab::backends::{Backend, Capabilities, Found, Policy, Pooled, Rules, With};
use vramlab::policy::grow::{Ladder, SegmentSize};
use vramlab::policy::size::{Size, SizeRule};
use vramlab::policy::{Heap, fit::Fit, join::Join, split::Split};
use vramlab::settings::{NoSettings, Settings};
use vramlab::space::{BlockId, FreeList, State};
use vramlab::{Driver, DriverError, Path};

/// The backend's entry in the list: lists, help and tests read it.
pub static BACKEND: Backend = Backend {
    name: "buddy",
    summary: "a buddy allocator: powers of two, halved for a request and joined when none is large enough",
    // Block sizes differ from those in a snapshot.
    capabilities: Capabilities {
        coalesces: false,
        restores: false,
        checkpoints: false,
        ..Pooled::<Buddy>::CAPABILITIES
    },
    compared: true,
    constructor: &With(|driver, _: &NoSettings| Ok(Arc::new(Buddy::on(driver)))),
};

/// Powers of two, at least 4 KiB.
#[derive(Debug)]
struct Powers;

impl SizeRule for Powers {
    fn granule(&self) -> u64 {
        4 << 10
    }

    fn round(&self, bytes: u64) -> u64 {
        bytes.next_power_of_two().max(self.granule())
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct Buddy(Rules);

impl Buddy {
    /// An allocator with this policy on `driver`.
    pub fn on(driver: Arc<dyn Driver>) -> Pooled<Self> {
        let heap = Heap::plain(driver, None, Fit::best()).with_join(Join::OnMiss);
        let (size, split) = (Size::Custom(&Powers), Split::Always);
        let ladder = Ladder::releasing(SegmentSize::Fixed(32 << 20));
        let rules = Rules { name: BACKEND.name, settings: NoSettings::default().json(), size, split, ladder };
        // SAFETY: the heap is new, `Powers` keeps the promise of its trait, and `take` takes a full block once it is
        // small enough.
        unsafe { Pooled::new(heap, Self(rules)) }
    }
}

/// Coalesces free halves of one block repeatedly, until no such pair is left.
fn join_buddies(heap: &mut Heap, list: FreeList) {
    let segments = heap.space().segments().filter(|(_, segment)| segment.list == list);
    for (segment, base) in segments.map(|(id, segment)| (id, segment.addr)).collect::<Vec<_>>() {
        let mut fronts: Vec<BlockId> = Vec::new();
        for mut block in heap.space().blocks_of(segment).collect::<Vec<_>>() {
            while let Some(&front) = fronts.last() {
                let (one, two) = (&heap.space()[front], &heap.space()[block]);
                let halves = one.bytes == two.bytes && (one.addr - base).is_multiple_of(2 * one.bytes);
                if !halves || one.state != State::Free || two.state != State::Free {
                    break;
                }
                heap.join_behind(front);
                block = front;
                fronts.pop();
            }
            fronts.push(block);
        }
    }
}

impl Policy for Buddy {
    fn rules(&self) -> &Rules {
        &self.0
    }

    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        let mut block = heap.find(list, bytes, u64::MAX);
        if block.is_none() {
            join_buddies(heap, list);
            block = heap.find(list, bytes, u64::MAX);
        }
        Ok(block.map(|block| (block, Path::Hit)))
    }

    fn take(&self, heap: &mut Heap, block: BlockId, list: FreeList, bytes: u64, requested: u64) -> (BlockId, bool) {
        let cut = heap.space()[block].bytes > bytes;
        while heap.space()[block].bytes > bytes {
            heap.cut(block, heap.space()[block].bytes / 2);
        }
        heap.take(block, list, bytes, requested);
        (block, cut)
    }

    fn restores(&self) -> bool {
        false
    }
}
