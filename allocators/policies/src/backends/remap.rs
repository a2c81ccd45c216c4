//! # `remap`: expandable segments whose free pages move to where a request needs memory
//!
//! *Idea.* With expandable segments ([`pytorch-expandable`](super::expandable)) free memory can serve a request only in one piece,
//! on its own stream and in its own pool. But only addresses are fixed; the memory behind them is not. So here memory consists of
//! pages, of 2 MiB unless `handle` sets another size, and a request that needs memory takes pages that are free elsewhere before it
//! is refused. No live block moves and no address changes; only the memory behind free addresses does.
//!
//! *A request* is placed as by `pytorch-expandable` until a page has moved. When no free block fits, a sufficient run of free
//! blocks and holes gets the missing memory (`grow`):
//! 1. New pages from the device, ten at a time in the large pool, so that with enough room there are as many mappings as there.
//! 2. When the limit or the device refuses, free pages: those that have been free longest, of any address, stream and pool. They
//!    are mapped here as well, with one `cuMemSetAccess` per run of pages. With `steal=always` this step comes first, with
//!    `steal=1.05` where reserved memory would exceed 1.05 times the peak of active bytes. The remainder is allocated by the
//!    device.
//! 3. When these are not sufficient, deferred frees and pages that are still in use are waited for, the oldest first.
//!
//! *Mappings are kept.* A page belongs to one address, and stays mapped at its earlier ones. If it is free when such an address is
//! to be filled again, it moves back without a driver call. To make this likely, the addresses of requests are remembered in their
//! order once a page has moved. A program that repeats itself is served at the same addresses again, if they are free; the pages
//! that it lacks there have kept mappings. After some training steps no page is mapped any more. An address has one mapping: where
//! its page is in use elsewhere, other addresses are used, of which there are plenty. A page has at most eight kept mappings;
//! beyond that those that were not used longest are removed. Pages that are released lose theirs, and adjacent pages are unmapped
//! by one call.
//!
//! *Safety.* Later work of the stream that freed a page follows the work that used it, so that stream may use the page at another
//! address immediately. Others take it when the host knows that the work has completed, by an event behind the last free of the
//! page. `cuMemUnmap` does not wait, so a mapping is removed only when the work that used its address has completed. Until the
//! first query for completion no event is recorded; then one behind all queued work of the stream, and from there on one for each
//! free that leaves whole pages free. A program with one stream queries only before it removes mappings. Nothing waits for the
//! whole device.
//!
//! *A free* is that of [`pytorch`](super::pytorch).
//!
//! *Graphs* write to their memory at each launch, so pages of a private pool are never taken. Such a pool gets no more pages than
//! it needs.
//!
//! *Good at* programs that nearly fill the device and repeat themselves. *Bad at* many small live blocks that each keep a page in
//! use. A page that moves for the first time costs a map, and its run the access: 0.7 and 22 µs on an H200 (`experiments
//! calibrate`).
//!
//! *Shared pages* stay. The pages of a block that was exported to other processes, and those of a range that was pinned because a
//! library registered its address, are neither moved nor unmapped until the block is free and the range unpinned.
//!
//! *Limits.* A page that is partly in use cannot be taken. With `steal=always` memory grows only when there is no free page, so
//! reserved memory exceeds active memory by about one page for each free piece between blocks. That is much for a small program,
//! and little for a large one.
//!
//! *Larger pages* (`handle=8M`) take fewer calls, because a page is one handle of the device, but one small block keeps all of a
//! page in use.
//!
//! *One pool* (`small_pool=off`) lets small blocks fill the remainders of pages with large ones. A small program gains most.
//!
//! *Cost.* As `pytorch-expandable`, a word for each page of a free, an event for each free after the first query for completion,
//! and O(n log n) in the free pages for a steal. Once a page has moved, a request of more than 1 MiB looks up its earlier
//! addresses, in O(log n) for each of its pages, and free blocks are indexed by address, too.
//!
//! *Related work.* GMLake maps the pages of several free blocks a second time into a new range and keeps both, so each page lists
//! the blocks over it; it does so for one stream, and for requests of at least 512 MiB. Here a page belongs to one address at a
//! time, whatever the size, and no kernel sees it twice. The VPMM of openvm's stark-backend also moves free regions into a hole,
//! but maps them twice until an event has completed, and allocates the missing bytes before it moves regions.

mod steal;

use super::expandable::find;
use super::pooled::{Found, Policy, Pooled, Rules};
use super::registry::{Backend, Capabilities, Needs, SegmentUse, StreamUse, With};
use crate::contract::{AllocError, Path, PoolKind};
use crate::policy::Heap;
use crate::policy::fit::Fit;
use crate::policy::grow::{Ladder, Miss, Segments as _};
use crate::policy::size::Size;
use crate::policy::size::torch::{Divisions, LARGE_SEGMENT, SMALL_MAX, SMALL_SEGMENT};
use crate::policy::source::{Expandable, Sizes, Source};
use crate::policy::split::Split;
use crate::policy::stream::Stream;
use crate::space::{Account, BlockId, FreeList, Space};
use std::sync::Arc;
pub use steal::{ParseStealError, Ratio, Steal};
use vramlab_device::settings::{Settings as _, bytes, switch, text};
use vramlab_device::{Driver, DriverError};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "remap",
    summary: "expandable segments whose free pages are remapped for requests before one is refused",
    capabilities: Capabilities {
        needs: Needs::Vmm,
        segments: SegmentUse::Expandable,
        streams: StreamUse::Any,
        restores: false,
        ..Pooled::<Remap>::CAPABILITIES
    },
    compared: false,
    constructor: &With(|driver, settings: &RemapSettings| Ok(Arc::new(Remap::new(driver, *settings)?))),
};

vramlab_device::settings! {
    /// Settings of `remap`.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct RemapSettings {
        /// When free pages are taken before new ones: when those are refused, always, or when reserved memory would exceed a
        /// multiple of the peak of active bytes.
        pub steal: Steal = Steal::Pressure, text(steal::FORM);
        /// Bytes of a page, which is one handle of the device; multiples of 2M.
        pub handle: u64 = PAGE, bytes().at_least(PAGE).at_most(1 << 30);
        /// A pool of their own for blocks of at most 1 MiB. Without it they may be between large ones, and fill the remainders of
        /// their pages.
        pub small_pool: bool = true, switch();
        /// Rounding to equal steps between powers of two.
        pub roundup_power2_divisions: Divisions = Divisions::default(), text(Divisions::FORM);
        /// Maximum of reserved bytes.
        pub memory_limit: Option<u64> = None, bytes().or("none");
    }
    check RemapSettings::consistent;
}

impl RemapSettings {
    fn consistent(&self) -> Result<(), String> {
        if self.handle.is_multiple_of(PAGE) {
            return Ok(());
        }
        let handle = self.handle;
        Err(format!("handle is {handle} bytes, and devices make handles of multiples of {PAGE}; write handle=4M or so"))
    }
}

/// The rules, see the [module](self).
#[derive(Debug)]
pub struct Remap {
    settings: RemapSettings,
    rules: Rules,
    /// Handles that are mapped together in the large pool: as much memory as one of `pytorch-expandable`.
    large: u64,
}

/// The smallest page, and the default.
const PAGE: u64 = SMALL_SEGMENT;

/// Blocks up to this size are served by best fit: they are next to others of their size, and hardly move pages.
const SMALL: u64 = SMALL_MAX;

impl Remap {
    /// An allocator with these rules on a device. A page is a multiple of the device's granularity.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] on a device without virtual memory management.
    pub fn new(driver: Arc<dyn Driver>, settings: RemapSettings) -> Result<Pooled<Self>, AllocError> {
        let sizes = Sizes { small: settings.handle, large: settings.handle, reserve: None };
        let source = Expandable::new(BACKEND.name, driver, settings.memory_limit, sizes)?;
        let handle = source.handle_bytes(Some(PoolKind::Large));
        let account = if settings.small_pool { Account::with_pools(u64::MAX) } else { Account::new() };
        let space = Space::new(account);
        let heap = Heap::new(space, Fit::best(), Stream::Own, Source::Expandable(source)).with_pages();
        let divisions = settings.roundup_power2_divisions;
        let size = if settings.small_pool { Size::Torch(divisions) } else { Size::TorchOnePool(divisions) };
        let settings = RemapSettings { handle, ..settings };
        // The smallest remainder is split off in both pools.
        let split = Split::TorchExpandable { max_split: u64::MAX, max_non_split_rounding: 0 };
        let (name, json, ladder) = (BACKEND.name, settings.json(), Ladder::default());
        let rules = Rules { name, settings: json, size, split, ladder };
        Ok(Pooled::over(heap, Self { settings, rules, large: LARGE_SEGMENT.div_ceil(handle) }))
    }

    /// A free block at an earlier address of the request in the program's order; else the best fit.
    fn find_as_before(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        let fits = find(heap, list, bytes, u64::MAX);
        let places = if bytes > SMALL { heap.places_before(list, bytes) } else { Vec::new() };
        for place in places {
            if fits.is_some_and(|block| heap.space()[block].addr == place) {
                break;
            }
            let Some((block, moved)) = heap.take_back(list, bytes, place)? else { continue };
            if moved == 0 {
                return Ok(Some((block, Path::Hit)));
            }
            heap.space_mut().account_mut().count_stolen(1, 0, 0);
            return Ok(Some((block, Path::Steal)));
        }
        Ok(fits.map(|block| (block, Path::Hit)))
    }

    fn note_place(heap: &mut Heap, list: FreeList, bytes: u64, block: BlockId) {
        if bytes > SMALL {
            heap.note_place(list, bytes, block);
        }
    }

    fn map_or_wait(&self, heap: &mut Heap, miss: &Miss) -> Result<Found, DriverError> {
        let limit = heap.limit().unwrap_or(u64::MAX);
        let active = heap.space().account().stats().active_bytes.all;
        let new_up_to = self.settings.steal.new_memory_up_to(active.peak.max(active.current + miss.bytes));
        if new_up_to < limit {
            if let Some(block) = self.map_new_pages(heap, miss, new_up_to)? {
                return Ok(Some((block, Path::DriverAlloc)));
            }
            if let Some(found) = self.map_free_pages(heap, miss, new_up_to, false)? {
                return Ok(Some(found));
            }
        }
        if let Some(block) = self.map_new_pages(heap, miss, limit)? {
            return Ok(Some((block, Path::DriverAlloc)));
        }
        if let Some(found) = self.map_free_pages(heap, miss, limit, false)? {
            return Ok(Some(found));
        }
        if heap.is_capturing() {
            return Ok(None);
        }
        heap.synchronize()?;
        if let Some(block) = find(heap, miss.list, miss.bytes, u64::MAX) {
            return Ok(Some((block, Path::Retry)));
        }
        heap.space_mut().account_mut().count_retry();
        Ok(self.map_free_pages(heap, miss, limit, true)?.map(|(block, _)| (block, Path::Retry)))
    }

    /// Maps new pages unless reserved memory would exceed `most` bytes: in the large pool as many together as a handle of
    /// `pytorch-expandable` has.
    fn map_new_pages(&self, heap: &mut Heap, miss: &Miss, most: u64) -> Result<Option<BlockId>, DriverError> {
        if passes(most, heap, self.settings.handle) > 0 {
            return Ok(None);
        }
        // Memory of a private pool stays there.
        let several = miss.list.pool != Some(PoolKind::Small) && miss.list.owner.private.is_none();
        let pages = if several { self.large } else { 1 };
        let Some(first) = heap.find_hole(miss.list, miss.bytes)? else { return Ok(None) };
        if passes(most, heap, heap.shortfall(first, miss.bytes, pages)) > 0 {
            return Ok(None);
        }
        heap.fill(first, miss.bytes, pages, true)
    }

    /// Moves free pages for the bytes that would exceed `most`, and maps new ones for the remainder. If fewer are free, new ones
    /// replace them as far as the limit allows.
    fn map_free_pages(&self, heap: &mut Heap, miss: &Miss, most: u64, wait: bool) -> Result<Found, DriverError> {
        // A device does not report how much it could still allocate.
        let bytes_to_move = |heap: &Heap, lacking| if most == u64::MAX { lacking } else { passes(most, heap, lacking) };
        let block = heap.move_pages(miss.list, miss.bytes, bytes_to_move, wait)?;
        Ok(block.map(|(block, moved)| (block, if moved > 0 { Path::Steal } else { Path::DriverAlloc })))
    }
}

/// By how much `more` bytes would exceed `most`.
fn passes(most: u64, heap: &Heap, more: u64) -> u64 {
    (heap.space().account().reserved() + more).saturating_sub(most)
}

/// Number of moved pages.
fn stolen_pages(heap: &Heap) -> u64 {
    heap.space().account().stats().steals.map_or(0, |steals| steals.pages)
}

impl Policy for Remap {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        let block = self.find_as_before(heap, list, bytes)?;
        if let Some((block, _)) = block {
            Self::note_place(heap, list, bytes, block);
        }
        Ok(block)
    }

    fn segment(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.settings.handle)
    }

    fn grow(&self, heap: &mut Heap, miss: &Miss) -> Result<Found, DriverError> {
        let before = stolen_pages(heap);
        let grown = self.map_or_wait(heap, miss);
        if stolen_pages(heap) > before {
            heap.space_mut().account_mut().count_stolen(1, 0, 0);
        }
        if let Ok(Some((block, _))) = grown {
            Self::note_place(heap, miss.list, miss.bytes, block);
        }
        grown
    }
}

#[cfg(test)]
mod tests;
