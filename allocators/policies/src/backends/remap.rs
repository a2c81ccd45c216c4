//! # `remap`: expandable segments whose free pages move to where memory is lacking
//!
//! *Idea.* With expandable segments ([`pytorch-expandable`](super::expandable)) free memory can serve a request only where it
//! lies: in one piece, on its own stream and in its own pool. The memory itself is not bound to a place, only its address is. So
//! here memory is pages, of 2 MiB unless `handle` says otherwise, and a request that lacks some takes pages that are free
//! elsewhere before it is refused. No live block moves and no address changes; only what lies behind free addresses does.
//!
//! *A request* is placed as `pytorch-expandable` places it until a page has moved. When no free block fits, a run of free blocks
//! and holes that is large enough gets the memory it lacks (`grow`):
//! 1. New pages from the device, ten at a time in the large pool, so that with room to spare there are as many mappings as there.
//! 2. When the limit or the device refuses, pages that are free: those that have been free longest, wherever they lie,
//!    whichever stream and pool had them. They are mapped here as well, with one `cuMemSetAccess` a run of pages. With
//!    `steal=always` this comes first, with `steal=1.05` where reserved memory would pass 1.05 times the most bytes that were
//!    active. What is lacking then comes from the device.
//! 3. When these do not suffice, frees that are pending and pages that are still in use are waited for, the oldest first.
//!
//! *Mappings are kept.* A page belongs to one place, and stays mapped where it was before. If it is free when such a place is to be
//! filled again, it goes back there without a call of the driver. So that this happens, the places of requests are
//! remembered in their order once a page has moved. A program that repeats itself is served where it was served before, if
//! what lies there is free; what it lacks are pages that are mapped there. After some steps of training no page is mapped any
//! more. An address has one mapping: where its page is in use elsewhere, other addresses are taken, of which there are plenty. There
//! are at most eight kept mappings a page; then those that were not used longest are undone. Pages that go back to the device
//! lose theirs, and pages that lie side by side are unmapped by one call.
//!
//! *Safe.* Later work of the stream that freed a page comes after what used it, so that stream may use the page at another
//! address at once. Others take it when the host knows that the work is over, by an event behind the last free that touched
//! it. `cuMemUnmap` does not wait, so a mapping is undone only when the work that used its address is over. Until it is asked whether
//! work is over, no event is recorded; then one behind all that its stream was given, and from there on one by each free that
//! leaves whole pages free. A program with one stream never asks before it undoes mappings. Nothing waits for the whole device.
//!
//! *A free* is that of [`pytorch`](super::pytorch).
//!
//! *Graphs* write to their memory at each launch, so that of a private pool is never taken. Such a pool gets no more pages than it
//! lacks.
//!
//! *Good at* programs that nearly fill the device and repeat themselves. *Bad at* many small live blocks that each keep a page. A
//! page that moves for the first time costs a map, and its run the access: 0.7 and 22 µs on an H200 (`experiments calibrate`).
//!
//! *Shared pages* stay. The pages of a block that was exported to other processes, and those of a range that was pinned because something
//! registered it by its address, are neither moved nor unmapped until the block is free and the pin is undone.
//!
//! *What is left.* A page that is partly in use cannot be taken. With `steal=always` memory grows only when there is no other, so
//! what is reserved beyond active is about one page for each free piece between blocks. That is much of a small program, and
//! little of a large one.
//!
//! *Larger pages* (`handle=8M`) take fewer calls, because a page is one handle of the device, and serve less well, because one
//! small block keeps all of a page.
//!
//! *One pool* (`small_pool=off`) lets small blocks fill what large ones leave of their pages. A small program gains most.
//!
//! *Cost.* As `pytorch-expandable`, a word for each page that a free touches, an event a free once it was asked whether work is
//! over, and O(n log n) in the free pages for a steal. Once a page moved, a request of more than 1 MiB
//! looks up where it was served before, in O(log n) for each of its pages, and free blocks are listed by their addresses, too.
//!
//! *Others.* GMLake maps the pages of several free blocks a second time into a new range and keeps both, so each page lists the
//! blocks over it; it does so for one stream, and for requests of at least 512 MiB. Here a page belongs to one place at a
//! time, whatever the size, and no kernel sees it twice. The VPMM of openvm's stark-backend also harvests free regions into a
//! hole, but maps them twice until an event has passed, and grows by the shortfall before it harvests.

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
    summary: "expandable segments whose free pages are mapped where memory is lacking before a request is refused",
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
        /// When free pages are taken before new ones: when those are refused, always, or when reserved memory would pass so
        /// many times the most bytes that were active.
        pub steal: Steal = Steal::Pressure, text(steal::FORM);
        /// Bytes of a page, which is one handle of the device; multiples of 2M.
        pub handle: u64 = PAGE, bytes().at_least(PAGE).at_most(1 << 30);
        /// A pool of their own for blocks of at most 1 MiB. Without it they may lie between large ones, and fill what is left of
        /// their pages.
        pub small_pool: bool = true, switch();
        /// Rounding to equal steps between powers of two.
        pub roundup_power2_divisions: Divisions = Divisions::default(), text(Divisions::FORM);
        /// Most bytes that may be reserved.
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
    /// Handles that are mapped at a time in the large pool: as much memory as one of `pytorch-expandable`.
    large: u64,
}

/// The smallest page, and the default.
const PAGE: u64 = SMALL_SEGMENT;

/// Blocks up to this size are served by the best fit: they lie beside others of their size, and hardly move pages.
const SMALL: u64 = SMALL_MAX;

impl Remap {
    /// An allocator with these rules on a device. A page is a multiple of what the device makes handles of.
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
        // The smallest rest is cut off in both pools.
        let split = Split::TorchExpandable { max_split: u64::MAX, max_non_split_rounding: 0 };
        let (name, json, ladder) = (BACKEND.name, settings.json(), Ladder::default());
        let rules = Rules { name, settings: json, size, split, ladder };
        Ok(Pooled::over(heap, Self { settings, rules, large: LARGE_SEGMENT.div_ceil(handle) }))
    }

    /// A free block in the place where the request was served when the program came here before; else the best fit.
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

    /// Maps new pages where no more than `most` bytes are reserved then: in the large pool as many at a time as a handle of
    /// `pytorch-expandable` has.
    fn map_new_pages(&self, heap: &mut Heap, miss: &Miss, most: u64) -> Result<Option<BlockId>, DriverError> {
        if passes(most, heap, self.settings.handle) > 0 {
            return Ok(None);
        }
        // What a private pool has stays there.
        let several = miss.list.pool != Some(PoolKind::Small) && miss.list.owner.private.is_none();
        let pages = if several { self.large } else { 1 };
        let Some(first) = heap.find_hole(miss.list, miss.bytes)? else { return Ok(None) };
        if passes(most, heap, heap.shortfall(first, miss.bytes, pages)) > 0 {
            return Ok(None);
        }
        heap.fill(first, miss.bytes, pages, true)
    }

    /// Moves pages that are free elsewhere for what would pass `most` bytes, and maps new ones for the rest. Fewer may be found;
    /// then new ones take their place as far as the limit allows.
    fn map_free_pages(&self, heap: &mut Heap, miss: &Miss, most: u64, wait: bool) -> Result<Found, DriverError> {
        // A device does not say how much of it it would give.
        let wanted = |heap: &Heap, lacking| if most == u64::MAX { lacking } else { passes(most, heap, lacking) };
        let found = heap.move_pages(miss.list, miss.bytes, wanted, wait)?;
        Ok(found.map(|(block, moved)| (block, if moved > 0 { Path::Steal } else { Path::DriverAlloc })))
    }
}

/// By how much `more` bytes would pass `most`.
fn passes(most: u64, heap: &Heap, more: u64) -> u64 {
    (heap.space().account().reserved() + more).saturating_sub(most)
}

/// Pages that were taken so far.
fn stolen_pages(heap: &Heap) -> u64 {
    heap.space().account().stats().steals.map_or(0, |steals| steals.pages)
}

impl Policy for Remap {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        let found = self.find_as_before(heap, list, bytes)?;
        if let Some((block, _)) = found {
            Self::note_place(heap, list, bytes, block);
        }
        Ok(found)
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
