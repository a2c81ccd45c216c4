//! # `tlsf`: two-level segregated fit
//!
//! The allocator of real-time systems: a request and a free search one class, however many blocks there are. (The original finds it
//! in two bitmaps, this one in an ordered map.)
//!
//! *Idea.* Free blocks are in lists by size class, each a power of two divided into 32 parts. A request takes a block of the first
//! list in which *every* block is large enough, so it searches no second one.
//!
//! *A request* (`allocate`):
//! 1. The size is rounded up to 512 bytes.
//! 2. In the first non-empty class whose blocks all fit, the block that became free last is taken. A block of exactly the requested
//!    size may be missed, if its class also has smaller ones.
//! 3. The remainder is split off.
//! 4. When none fits, a segment of `segment` bytes is allocated, or, if that is less than the request needs, of the size from which
//!    on its search finds a block. If the device has no memory, deferred frees are waited for, idle segments are released, and the
//!    device is asked again.
//!
//! *A free* (`free`). The block is coalesced with the free blocks in front of it and behind it, and put first in its list. Blocks
//! of different segments never coalesce.
//!
//! *Differences from the original.* The lists are in host memory and blocks have no headers, because the host cannot write the
//! device's memory; so a block has no overhead and the smallest is one unit of 512 bytes. Sizes are not bounded by 4 GiB. Each
//! stream has lists of its own.
//!
//! *Good at* constant times. *Bad at* memory that is nearly full: missed blocks, up to 3 % below each size, matter then.
//!
//! *Cost.* O(log n) in the non-empty classes, of which there are at most some hundreds, and in the blocks of one.
//!
//! *Source.* M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", 2004;
//! <https://github.com/mattconte/tlsf>. The classes are in [`fit::tlsf`](crate::policy::fit::tlsf).

use super::pooled::{Pooled, Rules};
use super::registry::{Backend, With};
use crate::policy::Heap;
use crate::policy::fit::{Fit, tlsf::UNIT};
use crate::policy::grow::{Ladder, SegmentSize};
use crate::policy::size::Size;
use crate::policy::split::Split;
use std::sync::Arc;
use vramlab_device::Driver;
use vramlab_device::settings::{Settings as _, bytes};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "tlsf",
    summary: "two-level segregated fit: a few steps however many blocks there are",
    capabilities: Pooled::<Rules>::CAPABILITIES,
    compared: false,
    constructor: &With(|driver, settings: &TlsfSettings| Ok(Arc::new(settings.build(driver)))),
};

vramlab_device::settings! {
    /// Settings of two-level segregated fit.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TlsfSettings {
        /// Bytes of a segment, if the request does not need more.
        pub segment: u64 = 32 << 20, bytes().at_least(2 << 20).at_most(1 << 48);
        /// Maximum of reserved bytes.
        pub memory_limit: Option<u64> = None, bytes().or("none");
    }
    check TlsfSettings::consistent;
}

impl TlsfSettings {
    fn consistent(&self) -> Result<(), String> {
        match self.segment.is_multiple_of(UNIT) {
            true => Ok(()),
            false => Err(format!("segment is {}; blocks are multiples of {UNIT} bytes", self.segment)),
        }
    }

    /// An allocator with these settings on a device.
    #[must_use]
    pub fn build(&self, driver: Arc<dyn Driver>) -> Pooled<Rules> {
        // 2. `search_suitable_block`
        let heap = Heap::plain(driver, self.memory_limit, Fit::tlsf());
        // 4.
        let ladder = Ladder::releasing(SegmentSize::Fixed(self.segment));
        let (name, settings, size) = (BACKEND.name, self.json(), Size::Multiple(UNIT));
        // 3. `block_trim_free`. A free is `block_merge_prev`, `block_merge_next`, `block_insert`.
        Pooled::over(heap, Rules { name, settings, size, split: Split::Always, ladder })
    }
}
