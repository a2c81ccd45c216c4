//! # `snug`: blocks that are never split, built from the library's parts
//!
//! *Policy.* A request is rounded up to a multiple of 512 bytes. The smallest free block of its stream serves it,
//! unsplit, if the request fills three quarters of the block. Otherwise a segment of exactly the request's size is
//! allocated. If the device is out of memory, idle segments are released and the allocation is retried once. A freed
//! block is reusable on its stream immediately, or once the other streams that use it are done.
//!
//! *Good at* programs that request the same sizes repeatedly: no fragmentation. *Bad at* sizes that keep changing.

use std::sync::Arc;
use vramlab::backends::{Backend, Capabilities, Found, Policy, Pooled, Rules, With};
use vramlab::policy::grow::{Ladder, SegmentSize, Step};
use vramlab::policy::{Heap, fit::Fit, size::Size, split::Split};
use vramlab::settings::{NoSettings, Settings};
use vramlab::space::FreeList;
use vramlab::{Driver, DriverError, Path};

/// The backend's entry in the list: lists, help and tests read it.
pub static BACKEND: Backend = Backend {
    name: "snug",
    summary: "serves a request with a whole block of about its size, and cuts none",
    capabilities: Capabilities { coalesces: false, ..Pooled::<Snug>::CAPABILITIES },
    compared: true,
    constructor: &With(|driver, _: &NoSettings| Ok(Arc::new(Snug::on(driver)))),
};

/// See the [module](self).
#[derive(Debug)]
pub struct Snug(Rules);

impl Snug {
    /// An allocator with this policy on `driver`.
    pub fn on(driver: Arc<dyn Driver>) -> Pooled<Self> {
        let heap = Heap::plain(driver, None, Fit::best());
        let steps = vec![Step::Segment, Step::ReleaseCached, Step::SegmentAgain];
        let ladder = Ladder { steps, size: SegmentSize::Exact };
        let (size, split) = (Size::Multiple(512), Split::Never);
        let rules = Rules { name: BACKEND.name, settings: NoSettings::default().json(), size, split, ladder };
        // SAFETY: the heap is new. `find` is the only step that this policy implements, and it takes no block.
        unsafe { Pooled::new(heap, Self(rules)) }
    }
}

impl Policy for Snug {
    fn rules(&self) -> &Rules {
        &self.0
    }

    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        Ok(heap.find(list, bytes, bytes + bytes / 3).map(|block| (block, Path::Hit)))
    }
}
