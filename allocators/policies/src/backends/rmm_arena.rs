//! # `rmm-arena`: RMM's arenas in one block of the device
//!
//! The policy of `rmm::mr::arena_memory_resource` of NVIDIA's RAPIDS, without its size classes. Given the same requests on the
//! same streams every block has the address that RMM returns (`vramlab replay HISTORY --alloc rmm-arena --against FILE`).
//!
//! *Idea.* The device allocates one large block, which is split into superblocks. Each stream has an arena of superblocks for its
//! small requests, so streams do not get in each other's way. Large requests are served from the global arena. Its memory
//! serves every stream, because the host waits for a stream before it frees a large block.
//!
//! *A request* (`allocate`):
//! 1. The size is rounded up to 256 bytes.
//! 2. Above 1 MiB the global arena serves it. The lowest free range that is large enough is chosen, in its superblock. If that
//!    superblock is empty and at least 1 MiB larger than the request, it is split, so that a superblock of the request's size
//!    remains. The request gets the front of the range.
//! 3. Up to 1 MiB the stream's arena serves it, also from the lowest free range that is large enough.
//! 4. If there is none, the stream's arena gets a superblock of the global arena. It is chosen as in 2; an empty and large one is
//!    split to 1 MiB. It may have live large blocks.
//! 5. If there is none, the host waits for the device. All superblocks of streams return to the global arena, also those with live
//!    blocks. Then the request is tried again.
//!
//! *A free* (`free`). A small block returns to its stream's arena immediately. The host waits for the stream first if the block is
//! large, or if its superblock is no longer in the stream's arena. Free ranges of one superblock coalesce. An empty superblock of
//! the global arena is joined with adjacent empty ones; streams keep theirs.
//!
//! *Differences from RMM.* The block is allocated by the device at the first request. As in RMM it is half of the free memory
//! unless `arena_size` sets another size. Where the device refuses that half, it is 1 GiB or less. (A simulated GPU that computes
//! has no more memory than its host.) RMM does not know uses on other streams: a free that was announced (`record_use`) waits for
//! them as in [`pytorch`](super::pytorch). RMM releases the block only at its end; here also when the program requests it (`trim`)
//! and no block is live. RMM has an arena for each thread that uses the per-thread default stream, which no driver here creates.
//! Private pools of graphs are [`Pooled`]'s.
//!
//! *Good at* small requests from many streams, and at driver calls: it makes one. *Bad at* asynchronous work, since each free
//! of more than 1 MiB waits for its stream, and at sharing the device: its size never changes.
//!
//! *Cost.* O(log n) in the free ranges, and a step for each lower range of the request's power of two that is too small. Giving a
//! superblock to another arena takes a step for each free range in it. (RMM searches its sets from the front.)
//!
//! *Source.* RMM 26.10: `detail/arena.hpp`, `detail/arena_memory_resource_impl.cpp`; its functions are named where their rules are.

use super::pooled::{Policy, Pooled, Rules, put_back, serve};
use super::registry::{Backend, Capabilities, StreamUse, With};
use crate::contract::{AllocError, GUARANTEED_ALIGN, Path};
use crate::policy::Heap;
use crate::policy::arena::Arena;
use crate::policy::fit::Fit;
use crate::policy::fit::lowest::Lowest;
use crate::policy::grow::{Ladder, SegmentSize, Segments as _, Step};
use crate::policy::size::Size;
use crate::policy::source::Source;
use crate::policy::split::Split;
use crate::policy::stream::Stream;
use crate::space::{Account, BlockId, FreeList, Owner, Space};
use std::collections::BTreeMap;
use std::sync::Arc;
use vramlab_device::settings::{Settings as _, bytes};
use vramlab_device::{Driver, DriverError, StreamId};

/// The entry in the [list of backends](super::registry).
pub static BACKEND: Backend = Backend {
    name: "rmm-arena",
    summary: "RMM's arenas: one block of the device, split into superblocks for each stream and for large requests",
    capabilities: Capabilities {
        streams: StreamUse::Any,
        coalesces: false,
        keeps_segments: true,
        restores: false,
        checkpoints: false,
        ..Pooled::<RmmArena>::CAPABILITIES
    },
    compared: false,
    constructor: &With(|driver, settings: &RmmArenaSettings| Ok(Arc::new(RmmArena::new(driver, *settings)))),
};

/// Maximum that is allocated where the device refuses half of the free memory.
const SMALLER: u64 = 1 << 30;

/// `superblock::minimum_size`, and the largest request that a stream's arena serves.
const SUPERBLOCK: u64 = 1 << 20;

vramlab_device::settings! {
    /// Settings of RMM's arenas.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RmmArenaSettings {
        /// Bytes that the device allocates at the first request; by default half of its free memory.
        pub arena_size: Option<u64> = None, bytes().at_least(SUPERBLOCK).at_most(1 << 48).or("auto");
    }
    check RmmArenaSettings::consistent;
}

impl RmmArenaSettings {
    fn consistent(&self) -> Result<(), String> {
        match self.arena_size.filter(|size| !size.is_multiple_of(GUARANTEED_ALIGN)) {
            Some(size) => Err(format!("arena_size is {size}; RMM's arena takes multiples of {GUARANTEED_ALIGN}")),
            None => Ok(()),
        }
    }
}

/// RMM's rules, see the [module](self).
#[derive(Debug)]
pub struct RmmArena {
    settings: RmmArenaSettings,
    /// Those of requests in a capture.
    rules: Rules,
    /// The owner of the device's block in the heap.
    home: Option<FreeList>,
    arena: Option<Arena>,
    arenas: Arenas,
    /// Deferred frees, by offset: their bytes.
    pending: BTreeMap<u64, u64>,
}

impl RmmArena {
    /// An allocator with these rules on a device.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, settings: RmmArenaSettings) -> Pooled<Self> {
        let source = Source::Plain { driver, limit: None };
        let heap = Heap::new(Space::new(Account::new()), Fit::first(), Stream::Arena, source);
        let steps = vec![Step::Segment, Step::WaitForFrees, Step::FitAgain];
        let ladder = Ladder { steps, size: SegmentSize::OfClass };
        let (size, split) = (Size::Multiple(GUARANTEED_ALIGN), Split::Always);
        let rules = Rules { name: BACKEND.name, settings: settings.json(), size, split, ladder };
        let (arenas, pending) = (Arenas::default(), BTreeMap::new());
        Pooled::over(heap, Self { settings, rules, home: None, arena: None, arenas, pending })
    }

    /// `global_arena::initialize`: allocates the block. False when the device has no memory for it.
    fn begin(&mut self, heap: &mut Heap, list: FreeList) -> Result<bool, DriverError> {
        (self.home, self.arena, self.arenas) = (None, None, Arenas::default());
        self.pending.clear();
        let half = |bytes: u64| bytes / 2 / GUARANTEED_ALIGN * GUARANTEED_ALIGN;
        let mut bytes = match self.settings.arena_size {
            Some(bytes) => bytes,
            None => half(heap.driver().mem_info()?.free),
        };
        while bytes >= SUPERBLOCK {
            match Arena::reserve(heap, list, bytes) {
                Ok(Some(arena)) => {
                    (self.home, self.arena, self.arenas) = (Some(list), Some(arena), Arenas::new(bytes));
                    return Ok(true);
                }
                refused if self.settings.arena_size.is_some() => return refused.map(|_| false),
                // The error of a simulated GPU whose host has no memory.
                Err(error) if error.code != DriverError::OPERATING_SYSTEM => return Err(error),
                _ => bytes = half(bytes).min(SMALLER),
            }
        }
        Ok(false)
    }

    /// The arena, unless it was released.
    fn reserved_arena(&self, heap: &Heap) -> Option<Arena> {
        self.arena.filter(|arena| arena.is_reserved(heap))
    }

    /// Frees the blocks whose deferred free has completed.
    fn note_completed(&mut self, heap: &mut Heap) {
        let Some(arena) = self.reserved_arena(heap) else { return };
        self.pending.retain(|offset, bytes| {
            let completed = arena.find(heap, *offset, *bytes).is_some();
            if completed {
                self.arenas.free(*offset, *bytes);
            }
            !completed
        });
    }

    /// `arena_memory_resource_impl::defragment`: waits for the device and takes every superblock back from the streams.
    fn defragment(&mut self, heap: &mut Heap) -> Result<(), DriverError> {
        // While a graph is captured the device cannot be waited for.
        if !heap.is_capturing() {
            heap.synchronize()?;
            self.note_completed(heap);
            heap.driver().device_synchronize()?;
            self.arenas.clean();
        }
        Ok(())
    }

    fn refuse(&self, heap: &mut Heap, list: FreeList, requested: u64, needed: u64) -> AllocError {
        heap.space_mut().account_mut().count_refusal();
        let mut report = heap.refusal(BACKEND.name, self.home.unwrap_or(list), requested, needed);
        // Adjacent ranges in two superblocks do not count as one.
        report.largest_free_bytes = Some(self.arenas.largest_free());
        AllocError::OutOfMemory(Box::new(report))
    }
}

impl Policy for RmmArena {
    fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The arena's size is fixed when it is made.
    fn set_memory_limit(&mut self, _heap: &mut Heap, _bytes: Option<u64>) -> bool {
        false
    }

    /// `arena_memory_resource_impl::allocate`.
    fn allocate(&mut self, heap: &mut Heap, owner: Owner, requested: u64) -> Result<(BlockId, Path), AllocError> {
        if owner.private.is_some() {
            return serve(self, heap, owner, requested);
        }
        let processed = heap.process_events();
        self.note_completed(heap);
        processed?;
        // 1.
        let bytes = self.rules.size.round(requested);
        let list = FreeList { owner, pool: None };
        // A trim may have released it.
        let begins = self.reserved_arena(heap).is_none();
        if begins && !self.begin(heap, list)? {
            let needed = self.settings.arena_size.unwrap_or(bytes).max(bytes);
            return Err(self.refuse(heap, list, requested, needed));
        }
        // 2. to 4.
        let mut path = if begins { Path::DriverAlloc } else { Path::Hit };
        let mut range = self.arenas.allocate(owner.stream, bytes);
        // 5.
        if range.is_none() {
            path = Path::Retry;
            self.defragment(heap)?;
            heap.space_mut().account_mut().count_retry();
            range = self.arenas.allocate(owner.stream, bytes);
        }
        let Some((offset, cut)) = range else { return Err(self.refuse(heap, list, requested, bytes)) };
        let arena = self.arena.expect("an arena was reserved above");
        let block = arena.find(heap, offset, bytes).expect("a range of `arenas` is free on the heap, too");
        let block = arena.take(heap, block, (offset, bytes), owner, requested);
        Ok((block, if cut && path == Path::Hit { Path::Split } else { path }))
    }

    /// `arena_memory_resource_impl::deallocate`.
    fn free(&mut self, heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
        let record = &heap.space()[block];
        let (owner, bytes, addr) = (record.list.owner, record.bytes, record.addr);
        let Some(arena) = self.reserved_arena(heap).filter(|_| owner.private.is_none()) else {
            return put_back(heap, block, users);
        };
        let offset = addr - arena.addr();
        let stays_with_stream = bytes <= SUPERBLOCK && self.arenas.holder(offset) == Some(owner.stream);
        let waited = if stays_with_stream { Ok(()) } else { wait(heap.driver().as_ref(), owner.stream) };
        if waited.is_err() || !users.is_empty() {
            self.pending.insert(offset, bytes);
            // A wait that failed is one more use.
            let owner_use = waited.is_err().then_some(owner.stream);
            let users: Vec<StreamId> = users.iter().copied().chain(owner_use).collect();
            let put = heap.put_after(block, &users);
            waited.and(put)?;
            return Ok(Path::Deferred);
        }
        heap.put(block);
        let joined = self.arenas.free(offset, bytes);
        Ok(if joined { Path::Coalesce } else { Path::Hit })
    }

    /// Its superblocks are not another allocator's segments.
    fn restores(&self) -> bool {
        false
    }
}

/// Waits on the host for a stream, or for the whole device where the stream was destroyed.
fn wait(driver: &dyn Driver, stream: StreamId) -> Result<(), DriverError> {
    match driver.stream_synchronize(stream) {
        Err(error) if error.code == DriverError::INVALID_HANDLE => driver.device_synchronize(),
        outcome => outcome,
    }
}

/// Free ranges and their holders, as offsets from the beginning of the block.
#[derive(Debug, Default)]
struct Arenas {
    /// By offset. They cover the whole block.
    superblocks: BTreeMap<u64, Superblock>,
    /// Free ranges of each holder's superblocks.
    free: Lowest<Holder, ()>,
}

/// The stream whose arena has a superblock; `None` for the global arena.
type Holder = Option<StreamId>;

/// A part of the block.
#[derive(Debug)]
struct Superblock {
    bytes: u64,
    holder: Holder,
    /// Free ranges by offset: their bytes. No two of them are adjacent.
    free: BTreeMap<u64, u64>,
}

impl Superblock {
    fn is_empty(&self) -> bool {
        self.free.first_key_value().is_some_and(|(_, bytes)| *bytes == self.bytes)
    }
}

impl Arenas {
    /// A global arena of one superblock.
    fn new(bytes: u64) -> Self {
        let mut arenas = Self::default();
        arenas.insert_empty(0, bytes);
        arenas
    }

    fn insert_empty(&mut self, start: u64, bytes: u64) {
        self.superblocks.insert(start, Superblock { bytes, holder: None, free: BTreeMap::from([(start, bytes)]) });
        self.free.insert(None, start, bytes, ());
    }

    /// The superblock that contains an offset.
    fn start_of(&self, offset: u64) -> u64 {
        let below = self.superblocks.range(..=offset).next_back();
        *below.expect("superblocks should cover every block").0
    }

    fn superblock(&mut self, start: u64) -> &mut Superblock {
        self.superblocks.get_mut(&start).expect("a superblock should be there until it is joined with another")
    }

    /// The holder of an offset.
    fn holder(&self, offset: u64) -> Holder {
        self.superblocks[&self.start_of(offset)].holder
    }

    /// `arena::allocate_sync`: takes a range for a stream. Returns its offset, and whether it was split off a larger one.
    fn allocate(&mut self, stream: StreamId, bytes: u64) -> Option<(u64, bool)> {
        let holder = (bytes <= SUPERBLOCK).then_some(stream);
        let local = holder.and_then(|_| self.free.find(holder, bytes, u64::MAX)).map(|(offset, ())| offset);
        let offset = local.or_else(|| self.acquire(holder, bytes))?;
        // `superblock::first_fit`
        let start = self.start_of(offset);
        let size = self.superblock(start).free.remove(&offset).expect("what was found should be free");
        self.free.remove(holder, offset, size, ());
        if bytes < size {
            self.superblock(start).free.insert(offset + bytes, size - bytes);
            self.free.insert(holder, offset + bytes, size - bytes, ());
        }
        Some((offset, bytes < size))
    }

    /// `global_arena::acquire`, `first_fit`: gives the global arena's first sufficient superblock to a holder. Returns the offset
    /// of its first range that is large enough.
    fn acquire(&mut self, holder: Holder, bytes: u64) -> Option<u64> {
        let (offset, ()) = self.free.find(None, bytes, u64::MAX)?;
        let (start, due) = (self.start_of(offset), bytes.max(SUPERBLOCK));
        let superblock = &self.superblocks[&start];
        let size = superblock.bytes;
        if superblock.is_empty() && size >= due + SUPERBLOCK {
            self.free.remove(None, start, size, ());
            self.insert_empty(start, due);
            self.insert_empty(start + due, size - due);
        }
        self.hand(start, holder);
        Some(offset)
    }

    /// Gives a superblock to a holder, with all its ranges.
    fn hand(&mut self, start: u64, holder: Holder) {
        let superblock = self.superblocks.get_mut(&start).expect("only a superblock can be given away");
        let before = std::mem::replace(&mut superblock.holder, holder);
        if before != holder {
            for (&offset, &bytes) in &superblock.free {
                self.free.remove(before, offset, bytes, ());
                self.free.insert(holder, offset, bytes, ());
            }
        }
    }

    /// `superblock::coalesce`, `global_arena::deallocate_sync`: makes a range free. True when it was coalesced with another.
    fn free(&mut self, offset: u64, bytes: u64) -> bool {
        let start = self.start_of(offset);
        let superblock = self.superblocks.get_mut(&start).expect("what is freed should be in a superblock");
        let (mut low, mut high) = (offset, offset + bytes);
        if let Some(behind) = superblock.free.remove(&high) {
            self.free.remove(superblock.holder, high, behind, ());
            high += behind;
        }
        let front = superblock.free.range(..offset).next_back().map(|(at, bytes)| (*at, *bytes));
        if let Some((at, front)) = front.filter(|(at, bytes)| at + bytes == offset) {
            superblock.free.remove(&at);
            self.free.remove(superblock.holder, at, front, ());
            low = at;
        }
        superblock.free.insert(low, high - low);
        self.free.insert(superblock.holder, low, high - low, ());
        self.join(start);
        high - low > bytes
    }

    /// `global_arena::coalesce`: joins a superblock of the global arena with adjacent empty ones.
    fn join(&mut self, start: u64) {
        let empty = |superblock: &Superblock| superblock.holder.is_none() && superblock.is_empty();
        let Some(own) = self.superblocks.get(&start).filter(|own| empty(own)) else { return };
        let end = start + own.bytes;
        let before = self.superblocks.range(..start).next_back();
        let before = before.filter(|(_, before)| empty(before)).map(|(at, before)| (*at, before.bytes));
        let behind = self.superblocks.get(&end).filter(|behind| empty(behind)).map(|behind| (end, behind.bytes));
        let (mut low, mut high) = (start, end);
        for (at, bytes) in before.into_iter().chain(behind) {
            (low, high) = (low.min(at), high.max(at + bytes));
            self.superblocks.remove(&at);
            self.free.remove(None, at, bytes, ());
        }
        if (low, high) != (start, end) {
            self.superblocks.remove(&start);
            self.free.remove(None, start, end - start, ());
            self.insert_empty(low, high - low);
        }
    }

    /// `arena::clean` of every stream: the global arena gets all superblocks.
    fn clean(&mut self) {
        let assigned = self.superblocks.iter().filter(|(_, superblock)| superblock.holder.is_some());
        let assigned: Vec<u64> = assigned.map(|(start, _)| *start).collect();
        for start in assigned {
            self.hand(start, None);
            self.join(start);
        }
    }

    /// The largest free range.
    fn largest_free(&self) -> u64 {
        self.superblocks.values().flat_map(|superblock| superblock.free.values()).max().copied().unwrap_or(0)
    }
}
