//! # `snug`: blocks that are never cut, put together from the library's parts
//!
//! *Policy.* A request is rounded up to a multiple of 512 bytes. The smallest free block of its stream serves it, as a whole, if
//! the request fills three quarters of it. Else it gets a segment of exactly its size. When the device has no memory left, idle
//! segments go back to it, and it is asked once more. A free makes the block reusable for its stream: at once, or when the
//! other streams that use it are done.
//!
//! *Good at* programs that ask for the same sizes over and over: nothing fragments. *Bad at* sizes that keep changing.

use std::sync::Arc;
use vramlab::backends::{Backend, Capabilities, Found, Policy, Pooled, Rules, With};
use vramlab::policy::grow::{Ladder, SegmentSize, Step};
use vramlab::policy::{Heap, fit::Fit, size::Size, split::Split};
use vramlab::settings::{NoSettings, Settings};
use vramlab::space::FreeList;
use vramlab::{Driver, DriverError, Path};

/// The entry: what lists, help and tests know of this backend.
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
        // SAFETY: the heap is new. `find` is the only step that this policy says by itself, and it takes no block.
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
