//! # `remap`: expandable segments whose free pages move to where memory is lacking
//!
//! *Idea.* With expandable segments ([`pytorch-expandable`](super::expandable)) free memory can serve a request only where it
//! lies: in one piece, on its own stream and in its own pool. The memory itself is not bound to a place, only its address is. So
//! here memory is pages of 2 MiB, and a request that lacks some takes pages that are free elsewhere before it is refused. No
//! live block moves and no address changes; only what lies behind free addresses does.
//!
//! *A request* is placed as `pytorch-expandable` places it. When no free block fits, the lowest run of free blocks and holes
//! that is large enough gets the memory it lacks (`grow`):
//! 1. New pages from the device, ten at a time in the large pool, so that with room to spare there are as many mappings as there.
//! 2. When the limit or the device refuses, pages that are free: those that have been free longest, wherever they lie,
//!    whichever stream and pool had them. They are unmapped there and mapped here, with one `cuMemSetAccess` a run of pages. With
//!    `steal=always` this comes first.
//! 3. When these do not suffice, frees that are pending and pages that are still in use are waited for, the oldest first.
//!
//! *Safe.* `cuMemUnmap` does not wait, and a wait on the device would not protect the old address. So a page is taken only when
//! the host knows that the work which used it is over. Each free that leaves whole pages free records an event; a page is known by
//! the last free that touched it. Nothing waits for the whole device.
//!
//! *A free* is that of [`pytorch`]. Memory of graphs is never taken.
//!
//! *Good at* programs that nearly fill the device. *Bad at* many small live blocks that each keep a page. A steal costs no
//! release or creation of memory, but an unmap and a map a page and the access of each run: 15, 0.7 and 22 µs on an H200
//! (`experiments calibrate`).
//!
//! *Cost.* As `pytorch-expandable`, an event a free, and O(n log n) in the free pages for a steal.
//!
//! *Others.* GMLake maps the pages of several free blocks a second time into a new range and keeps both, so each page lists the
//! blocks over it; it does so for one stream, and for requests of at least 512 MiB. Here a page has one place. The VPMM of
//! openvm's stark-backend also harvests free regions into a hole, but maps them twice until an event has passed, and grows by the
//! shortfall before it harvests.

use super::expandable::find;
use super::pooled::{Policy, Pooled};
use super::pytorch;
use super::registry::{Backend, Capabilities, Needs, SegmentUse, StreamUse, With};
use crate::contract::{AllocError, Path, PoolKind};
use crate::device::{Driver, DriverError, StreamId};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::Miss;
use crate::policy::size::Size;
use crate::policy::size::torch::{Divisions, LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT};
use crate::policy::source::{Expandable, Sizes, Source};
use crate::policy::stream::Stream;
use crate::settings::{Choice, Choices, Settings as _, bytes, choice, text};
use crate::space::{Account, BlockId, FreeList, Owner, Space};
use serde::Serialize;
use std::sync::Arc;

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "remap",
    summary: "expandable segments whose free pages are mapped where memory is lacking before a request is refused",
    capabilities: Capabilities {
        needs: Needs::Vmm,
        segments: SegmentUse::Expandable,
        streams: StreamUse::Any,
        restores: false,
        ..Pooled::<Remap>::CAPABILITIES
    },
    constructor: &With(|driver, settings: &RemapSettings| Ok(Arc::new(Remap::new(driver, *settings)?))),
};

/// When free pages are taken before new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Steal {
    /// When the limit or the device refuses new ones.
    #[serde(rename = "pressure")]
    Pressure,
    /// Always.
    #[serde(rename = "always")]
    Always,
}

impl Choices for Steal {
    const ALL: &'static [Choice<Self>] =
        &[Choice { name: "pressure", value: Self::Pressure }, Choice { name: "always", value: Self::Always }];
}

crate::settings! {
    /// Settings of `remap`.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct RemapSettings {
        /// When free pages are taken before new ones.
        pub steal: Steal = Steal::Pressure, choice();
        /// Rounding to equal steps between powers of two.
        pub roundup_power2_divisions: Divisions = Divisions::default(), text(Divisions::FORM);
        /// Most bytes that may be reserved.
        pub memory_limit: Option<u64> = None, bytes().or("none");
    }
}

/// The rules, see the [module](self).
#[derive(Debug)]
pub struct Remap {
    settings: RemapSettings,
    size: Size,
}

/// A page.
const PAGE: u64 = SMALL_SEGMENT;

impl Remap {
    /// An allocator with these rules on a device.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] on a device without virtual memory management.
    pub fn new(driver: Arc<dyn Driver>, settings: RemapSettings) -> Result<Pooled<Self>, AllocError> {
        let sizes = Sizes { small: PAGE, large: PAGE, reserve: None };
        let source = Expandable::new(BACKEND.name, driver, settings.memory_limit, sizes)?;
        let space = Space::new(Account::with_pools(u64::MAX));
        let heap = Heap::new(space, Fit::best(), Stream::Own, Source::Expandable(source)).with_pages();
        let size = Size::Torch(settings.roundup_power2_divisions);
        Ok(Pooled::over(heap, Self { settings, size }))
    }

    /// What happens when no free block fits.
    fn grow(&self, heap: &mut Heap, miss: &Miss) -> Result<Option<(BlockId, Path)>, DriverError> {
        if self.settings.steal == Steal::Always
            && let Some(block) = self.map_free_pages(heap, miss, true, false)?
        {
            return Ok(Some((block, Path::DriverAlloc)));
        }
        if let Some(block) = self.map_new_pages(heap, miss)? {
            return Ok(Some((block, Path::DriverAlloc)));
        }
        if let Some(block) = self.map_free_pages(heap, miss, false, false)? {
            return Ok(Some((block, Path::Collect)));
        }
        if heap.is_capturing() {
            return Ok(None);
        }
        heap.synchronize()?;
        if let Some(block) = find(heap, miss.list, miss.bytes, u64::MAX) {
            return Ok(Some((block, Path::Retry)));
        }
        heap.space_mut().account_mut().count_retry();
        Ok(self.map_free_pages(heap, miss, false, true)?.map(|block| (block, Path::Retry)))
    }

    /// Maps new pages: in the large pool as many at a time as a handle of `pytorch-expandable` has.
    fn map_new_pages(&self, heap: &mut Heap, miss: &Miss) -> Result<Option<BlockId>, DriverError> {
        let pages = if miss.list.pool == Some(PoolKind::Large) { LARGE_SEGMENT / PAGE } else { 1 };
        let Some(first) = heap.find_hole(miss.list, miss.bytes)? else { return Ok(None) };
        if self.lacks(heap, heap.shortfall(first, miss.bytes, pages)) > 0 {
            return Ok(None);
        }
        heap.fill(first, miss.bytes, pages, true)
    }

    /// Maps pages that are free elsewhere, and new ones where these do not suffice. With `all` every page that is lacking is
    /// taken from elsewhere if it can, else only those that the limit or the device refuses.
    fn map_free_pages(
        &self,
        heap: &mut Heap,
        miss: &Miss,
        all: bool,
        wait: bool,
    ) -> Result<Option<BlockId>, DriverError> {
        let Some(first) = heap.find_hole(miss.list, miss.bytes)? else { return Ok(None) };
        let shortfall = heap.shortfall(first, miss.bytes, 1);
        // A device does not say how much of it it would give.
        let wanted = if all || self.settings.memory_limit.is_none() { shortfall } else { self.lacks(heap, shortfall) };
        let start = heap.space()[first].addr;
        heap.keep_handles();
        let mapped = self.map_taken(heap, miss, wanted, start, wait);
        heap.release_handles()?;
        mapped
    }

    fn map_taken(
        &self,
        heap: &mut Heap,
        miss: &Miss,
        wanted: u64,
        start: u64,
        wait: bool,
    ) -> Result<Option<BlockId>, DriverError> {
        heap.take_pages(wanted, &(start..start + miss.bytes), wait)?;
        // The run is the same, but its first block may have another name.
        let Some(first) = heap.find_hole(miss.list, miss.bytes)? else { return Ok(None) };
        if self.lacks(heap, heap.shortfall(first, miss.bytes, 1)) > 0 {
            return Ok(None);
        }
        heap.fill(first, miss.bytes, 1, true)
    }

    /// By how much `more` bytes would pass the limit.
    fn lacks(&self, heap: &Heap, more: u64) -> u64 {
        let reserved = heap.space().account().reserved();
        self.settings.memory_limit.map_or(0, |limit| (reserved + more).saturating_sub(limit))
    }
}

impl Policy for Remap {
    fn name(&self) -> &'static str {
        BACKEND.name
    }

    fn settings(&self) -> serde_json::Value {
        self.settings.json()
    }

    fn size(&self) -> &Size {
        &self.size
    }

    fn allocate(&mut self, heap: &mut Heap, owner: Owner, requested: u64) -> Result<(BlockId, Path), AllocError> {
        heap.process_events()?;
        let bytes = self.size.round(requested);
        let list = FreeList { owner, pool: self.size.pool(bytes) };
        let miss = Miss { list, bytes, segment: bytes.next_multiple_of(PAGE) };
        let found = match find(heap, list, bytes, u64::MAX) {
            Some(block) => Some((block, Path::Hit)),
            None => self.grow(heap, &miss)?,
        };
        let Some((block, path)) = found else {
            heap.space_mut().account_mut().count_refusal();
            return Err(heap.out_of_memory(BACKEND.name, &miss, requested));
        };
        let size = heap.space()[block].bytes;
        let cut = size - bytes >= MIN_BLOCK;
        heap.take(block, list, if cut { bytes } else { size }, requested);
        Ok((block, if cut && path == Path::Hit { Path::Split } else { path }))
    }

    fn free(&mut self, heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
        pytorch::free(heap, block, users)
    }
}
