//! The policy's side: its [rules](Rules), and the steps of a request and a free that differ from the common ones.

use crate::contract::{AllocError, Path, Stats};
use crate::policy::Heap;
use crate::policy::grow::{Ladder, Miss, Segments as _};
use crate::policy::size::Size;
use crate::policy::split::Split;
use crate::space::{BlockId, FreeList, Owner};
use std::fmt;
use vramlab_device::{DriverError, StreamId};

/// The parts of a policy that are not in its [`Heap`]. They are a [`Policy`] by themselves.
#[derive(Debug)]
pub struct Rules {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// The settings in effect as a JSON object.
    pub settings: serde_json::Value,
    /// How requests are rounded.
    pub size: Size,
    /// Which free blocks may serve, and whether they are split.
    pub split: Split,
    /// The steps when no free block fits.
    pub ladder: Ladder,
}

/// A free block that serves a request, and its path.
pub type Found = Option<(BlockId, Path)>;

/// The rules of an allocator. The default of each method follows the [`Rules`].
pub trait Policy: fmt::Debug + Send {
    /// Its parts, always the same.
    fn rules(&self) -> &Rules;

    /// Runs before the search for a free block of `list`.
    ///
    /// # Errors
    /// Those of the driver.
    fn prepare(&mut self, _heap: &mut Heap, _list: FreeList) -> Result<(), DriverError> {
        Ok(())
    }

    /// Searches for a free block of at least `bytes`.
    ///
    /// # Errors
    /// Those of the driver.
    fn find(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        let largest = self.rules().split.largest(bytes);
        Ok(heap.find(list, bytes, largest).map(|block| (block, Path::Hit)))
    }

    /// Searches for a free block again, after deferred frees were waited for.
    ///
    /// # Errors
    /// Those of the driver.
    fn find_again(&self, heap: &mut Heap, list: FreeList, bytes: u64) -> Result<Found, DriverError> {
        self.find(heap, list, bytes)
    }

    /// Segment size for a rounded size.
    fn segment(&self, bytes: u64) -> u64 {
        self.rules().size.segment(bytes)
    }

    /// Makes a free block when none fits; `None` refuses the request.
    ///
    /// # Errors
    /// Those of the driver.
    fn grow(&self, heap: &mut Heap, miss: &Miss) -> Result<Found, DriverError> {
        let again = |heap: &mut Heap| Ok(self.find_again(heap, miss.list, miss.bytes)?.map(|(block, _)| block));
        self.rules().ladder.climb(heap, miss, again)
    }

    /// Takes `bytes` of a free block, or the whole block. Returns the live block, and whether it was split off.
    fn take(&self, heap: &mut Heap, block: BlockId, list: FreeList, bytes: u64, requested: u64) -> (BlockId, bool) {
        let size = heap.space()[block].bytes;
        let cut = self.rules().split.cuts(list.pool, bytes, size);
        heap.take(block, list, if cut { bytes } else { size }, requested);
        (block, cut)
    }

    /// Serves a valid request of `owner` for `requested` bytes. Returns the live block, and the path.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`], or [`AllocError::Driver`] for any other failing driver call. The heap is consistent
    /// nevertheless.
    fn allocate(&mut self, heap: &mut Heap, owner: Owner, requested: u64) -> Result<(BlockId, Path), AllocError> {
        serve(self, heap, owner, requested)
    }

    /// Frees a block that other streams (`users`) were announced to use. It is live, or pending since a capture.
    ///
    /// # Errors
    /// Those of the driver. The client has freed the block nevertheless.
    fn free(&mut self, heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
        put_back(heap, block, users)
    }

    /// Changes the maximum of reserved bytes, also while it runs; false where that is not supported.
    fn set_memory_limit(&mut self, heap: &mut Heap, bytes: Option<u64>) -> bool {
        heap.set_limit(bytes);
        true
    }

    /// Whether it supports segments of another allocator, and checkpoints of private pools.
    fn restores(&self) -> bool {
        true
    }

    /// Whether it has [private pools](crate::DeviceAllocator#private-pools).
    fn has_private_pools(&self) -> bool {
        true
    }

    /// The setting that reduces fragmentation, for errors: `set max_split_size`. `None` where there is none.
    fn against_fragmentation(&self) -> Option<String> {
        None
    }

    /// Adds its own counters to the statistics.
    fn count(&self, _stats: &mut Stats) {}

    /// Teardown: returns events to the heap.
    fn end(&mut self, _heap: &mut Heap) {}
}

impl Policy for Rules {
    fn rules(&self) -> &Rules {
        self
    }
}

/// A request, step by step. The default of [`Policy::allocate`].
///
/// # Errors
/// Those of [`Policy::allocate`].
pub fn serve<P: Policy + ?Sized>(
    policy: &mut P,
    heap: &mut Heap,
    owner: Owner,
    requested: u64,
) -> Result<(BlockId, Path), AllocError> {
    // Deferred frees whose streams have completed take effect.
    heap.process_events_for(owner.stream)?;
    let bytes = policy.rules().size.round(requested);
    let list = FreeList { owner, pool: policy.rules().size.pool(bytes) };
    policy.prepare(heap, list)?;
    let (block, path) = match policy.find(heap, list, bytes)? {
        Some(found) => found,
        None => {
            // The next request like this finds a new segment.
            let [due, segment] = [bytes, policy.segment(bytes)].map(|bytes| heap.surely_found(bytes));
            let miss = Miss { list, bytes: due, segment };
            let grown = policy.grow(heap, &miss)?;
            grown.ok_or_else(|| heap.out_of_memory(policy.rules().name, &miss, requested))?
        }
    };
    let (held, cut) = policy.take(heap, block, list, bytes, requested);
    Ok((held, if cut && path == Path::Hit { Path::Split } else { path }))
}

/// A free, the default of [`Policy::free`]. The stream's own uses of the block were queued before its later work, so it may reuse
/// the block immediately. Uses of other streams end at an event on each of them.
///
/// # Errors
/// Those of the driver.
pub fn put_back(heap: &mut Heap, block: BlockId, users: &[StreamId]) -> Result<Path, AllocError> {
    if !users.is_empty() {
        heap.put_after(block, users)?;
        return Ok(Path::Deferred);
    }
    let joined = heap.put(block);
    heap.take_event_error()?;
    Ok(if joined { Path::Coalesce } else { Path::Hit })
}
