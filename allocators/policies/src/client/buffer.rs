//! Owners of memory: what the trainer sees.

use crate::contract::{AllocError, Block, DeviceAllocator, Path, Request};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vramlab_device::{DeviceAddr, Driver, DriverError, StreamId};

/// An allocator, and the place where errors from dropped buffers wait for the next fallible call.
#[derive(Debug)]
pub struct Memory {
    allocator: Arc<dyn DeviceAllocator>,
    deferred: Mutex<Vec<AllocError>>,
    /// Number of `holds`, so that a drop sees without a lock that there are none.
    holding: AtomicUsize,
    holds: Mutex<Holds>,
}

/// The calls of [`Memory::hold`] that are under way, and the buffers that were dropped since each began.
#[derive(Debug, Default)]
struct Holds {
    next: u64,
    /// By number. A buffer that is dropped during several belongs to all of them.
    open: BTreeMap<u64, Vec<Arc<DeviceBuffer>>>,
}

/// One call of [`Memory::hold`]. Where its work panics, its buffers are freed.
struct Hold<'a> {
    memory: &'a Memory,
    number: u64,
}

impl<'a> Hold<'a> {
    fn begin(memory: &'a Memory) -> Self {
        let holds = &mut *memory.holds();
        let number = holds.next;
        holds.next += 1;
        holds.open.insert(number, Vec::new());
        memory.holding.fetch_add(1, Relaxed);
        Self { memory, number }
    }

    /// Its buffers; dropped buffers do not come here any more.
    fn end(&mut self) -> Vec<Arc<DeviceBuffer>> {
        let ended = self.memory.holds().open.remove(&self.number);
        self.memory.holding.fetch_sub(usize::from(ended.is_some()), Relaxed);
        ended.unwrap_or_default()
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        // Not while the list is locked: a buffer's drop looks at it.
        drop(self.end());
    }
}

impl Memory {
    /// Wraps an allocator.
    #[must_use]
    pub fn new(allocator: Arc<dyn DeviceAllocator>) -> Arc<Self> {
        Arc::new(Self { allocator, deferred: Mutex::default(), holding: AtomicUsize::new(0), holds: Mutex::default() })
    }

    /// The allocator.
    #[must_use]
    pub fn allocator(&self) -> &Arc<dyn DeviceAllocator> {
        &self.allocator
    }

    /// A buffer of `bytes` for work on `stream`, freed when it is dropped.
    ///
    /// # Errors
    /// Those of [`DeviceAllocator::allocate`], and the first error that an earlier drop left behind.
    pub fn allocate(self: &Arc<Self>, bytes: u64, stream: StreamId) -> Result<DeviceBuffer, AllocError> {
        self.check()?;
        let block = self.allocator.allocate(Request::new(bytes), stream)?;
        Ok(DeviceBuffer { block: Some(block), stream, memory: Arc::clone(self) })
    }

    /// Does `work`, and hands over the buffers that were dropped meanwhile on this thread or others: they are not freed
    /// before these owners are dropped. For launches that are described now and made later.
    ///
    /// Calls may be nested and made from several threads. A buffer that is dropped during several of them is handed to
    /// each, and freed with the last of its owners. If `work` panics, its buffers are freed.
    pub fn hold<T>(&self, work: impl FnOnce() -> T) -> (T, Vec<Arc<DeviceBuffer>>) {
        let mut hold = Hold::begin(self);
        let outcome = work();
        (outcome, hold.end())
    }

    /// Hands a dropped block to every hold that is under way; gives it back if there is none.
    fn keep(self: &Arc<Self>, block: Block, stream: StreamId) -> Option<Block> {
        if self.holding.load(Relaxed) == 0 {
            return Some(block);
        }
        let open = &mut self.holds().open;
        if open.is_empty() {
            return Some(block);
        }
        let kept = Arc::new(DeviceBuffer { block: Some(block), stream, memory: Arc::clone(self) });
        open.values_mut().for_each(|buffers| buffers.push(Arc::clone(&kept)));
        None
    }

    fn holds(&self) -> MutexGuard<'_, Holds> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an error for the next fallible call.
    pub(crate) fn defer(&self, error: AllocError) {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push(error);
    }

    /// Returns the first error that a dropped buffer left behind, if any, and forgets it.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), AllocError> {
        let mut deferred = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        if deferred.is_empty() { Ok(()) } else { Err(deferred.remove(0)) }
    }
}

/// Device memory that is freed when dropped.
///
/// The free takes effect on the stream that the buffer was allocated on, after everything queued on it so far;
/// work on other streams is announced with [`record_use`](Self::record_use). An error of that free is kept and
/// comes back from the next fallible call on the [`Memory`].
#[derive(Debug)]
pub struct DeviceBuffer {
    block: Option<Block>,
    stream: StreamId,
    memory: Arc<Memory>,
}

impl DeviceBuffer {
    fn block(&self) -> &Block {
        self.block.as_ref().expect("a buffer holds its block until it is dropped")
    }

    /// First address.
    #[must_use]
    pub fn addr(&self) -> DeviceAddr {
        self.block().addr()
    }

    /// Size that was asked for, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block().requested()
    }

    /// Stream that the buffer belongs to.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// How the allocation was served.
    #[must_use]
    pub fn path(&self) -> Path {
        self.block().path()
    }

    /// Announces that work queued so far on another stream uses the buffer.
    ///
    /// # Errors
    /// Those of [`DeviceAllocator::record_use`].
    pub fn record_use(&self, stream: StreamId) -> Result<(), AllocError> {
        self.memory.allocator.record_use(self.block(), stream)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let Some(block) = self.memory.keep(block, self.stream) else { return };
        // SAFETY: who queued work on this memory, by an unsafe call, promised that it stays valid until then. On the buffer's own
        // stream the free comes later by itself; work on others was announced with `record_use` or has been waited for.
        let freed = unsafe { self.memory.allocator.deallocate(block, self.stream) };
        if let Err(error) = freed {
            self.memory.defer(error);
        }
    }
}

/// Page-locked host memory, freed when dropped.
#[derive(Debug)]
pub struct PinnedBuffer {
    driver: Arc<dyn Driver>,
    ptr: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the buffer owns its memory, and a driver may be called from any thread.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` of zeroed page-locked memory.
    ///
    /// # Errors
    /// Those of [`Driver::host_alloc`].
    pub fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, DriverError> {
        let ptr = driver.host_alloc(bytes)?;
        Ok(Self { driver: Arc::clone(driver), ptr, bytes })
    }

    /// The memory to fill. The caller waits first for copies that still read it.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `ptr` is valid and initialised for `bytes` (host_alloc zeroes it) and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.bytes) }
    }

    /// Queues a copy of `bytes` bytes from `offset` on to `dst`.
    ///
    /// # Errors
    /// Those of [`Driver::copy_to_device_async`].
    ///
    /// # Safety
    /// `dst` is valid for `bytes`, and neither this buffer changes nor does it or `dst` go away until the stream
    /// has passed the copy.
    ///
    /// # Panics
    /// When the range lies outside of the buffer.
    pub unsafe fn copy_to(
        &self,
        offset: usize,
        dst: DeviceAddr,
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), DriverError> {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "a copy should stay inside its buffer");
        // SAFETY: the offset was just checked.
        let src = unsafe { self.ptr.add(offset) };
        // SAFETY: the caller keeps both sides valid; the source lies in memory from `host_alloc`.
        unsafe { self.driver.copy_to_device_async(dst, src, bytes, stream) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this size in `new`, freed here only; users of `copy_to` promised to wait. A failing
        // free leaves the memory to the end of the process, which is all that could be done about it.
        let _ = unsafe { self.driver.host_free(self.ptr, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Selection;
    use crate::backends::{self, caching};
    use vramlab_device::sim::SimMemory;
    use vramlab_device::{Profile, SimDriver};

    #[test]
    fn buffers_that_are_held_are_freed_by_who_got_them() {
        for kind in backends::all() {
            let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::Host));
            let memory = Memory::new(Selection::of(kind).build(&driver).unwrap());
            let stream = driver.stream_create().unwrap();
            let allocated = || memory.allocator().stats().allocated_bytes.all.current;
            let ((first, second), held) = memory.hold(|| {
                let addr = || memory.allocate(1 << 20, stream).unwrap().addr();
                (addr(), addr())
            });
            assert_ne!(first, second, "{kind}: the memory of the first was not free for the second");
            assert_eq!(held.iter().map(|buffer| buffer.addr()).collect::<Vec<_>>(), [first, second], "{kind}");
            let third = memory.allocate(1 << 20, stream).unwrap();
            assert!(third.addr() != first && third.addr() != second, "{kind}");
            assert!(allocated() >= 3 << 20, "{kind}");
            drop(held);
            drop(third);
            assert_eq!(allocated(), 0, "{kind}: what is dropped later is freed at once");
        }
    }

    struct Bench {
        memory: Arc<Memory>,
        stream: StreamId,
    }

    impl Bench {
        fn new() -> Self {
            let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::None));
            let memory = Memory::new(Selection::of(&caching::BACKEND).build(&driver).unwrap());
            Self { memory, stream: driver.stream_create().unwrap() }
        }

        /// The address of a buffer that is dropped at once.
        fn pass(&self) -> DeviceAddr {
            self.memory.allocate(1 << 20, self.stream).unwrap().addr()
        }

        fn blocks(&self) -> u64 {
            self.memory.allocator().stats().allocation.all.current
        }
    }

    #[test]
    fn what_is_dropped_in_a_hold_inside_of_another_belongs_to_both() {
        let bench = Bench::new();
        let ((before, inside, inner, after), outer) = bench.memory.hold(|| {
            let before = bench.pass();
            let (inside, inner) = bench.memory.hold(|| bench.pass());
            (before, inside, inner, bench.pass())
        });
        let addrs = |held: &[Arc<DeviceBuffer>]| held.iter().map(|buffer| buffer.addr()).collect::<Vec<_>>();
        assert_eq!(addrs(&outer), [before, inside, after], "the outer one goes on after the inner one has ended");
        assert_eq!(addrs(&inner), [inside]);
        drop(outer);
        assert_eq!(bench.blocks(), 1, "the inner one still has its buffer");
        drop(inner);
        assert_eq!(bench.blocks(), 0);

        // The other way round: what the inner one gives up within the outer one is not handed out again there.
        let ((inside, again), outer) = bench.memory.hold(|| {
            let (inside, inner) = bench.memory.hold(|| bench.pass());
            drop(inner);
            (inside, bench.pass())
        });
        assert_ne!(inside, again);
        assert_eq!(addrs(&outer), [inside, again]);
        drop(outer);
        assert_eq!(bench.blocks(), 0);
    }

    #[test]
    fn holds_of_two_threads_end_on_their_own() {
        let bench = Bench::new();
        let (turn, other_turn) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let shorter = scope.spawn(|| {
                let (addr, held) = bench.memory.hold(|| {
                    turn.wait();
                    bench.pass()
                });
                other_turn.wait();
                (addr, held)
            });
            let ((first, second), longer) = bench.memory.hold(|| {
                turn.wait();
                let first = bench.pass();
                // The other hold ends.
                other_turn.wait();
                (first, bench.pass())
            });
            let (addr, shorter) = shorter.join().unwrap();
            let longer_has = |addr| longer.iter().any(|buffer| buffer.addr() == addr);
            assert!([first, addr, second].into_iter().all(longer_has), "{longer:?}");
            assert!(shorter.iter().any(|buffer| buffer.addr() == addr), "{shorter:?}");
            assert!(first != second && addr != first && addr != second, "held memory was handed out again");
            drop(shorter);
            assert_eq!(bench.blocks(), 3, "the longer hold was under way for all three");
            drop(longer);
            assert_eq!(bench.blocks(), 0);
        });
    }

    #[test]
    fn a_panic_in_a_hold_frees_its_buffers() {
        let bench = Bench::new();
        let work = std::panic::AssertUnwindSafe(|| {
            bench.memory.hold(|| {
                bench.pass();
                // No message: the panic is meant.
                std::panic::resume_unwind(Box::new("meant"));
            })
        });
        assert!(std::panic::catch_unwind(work).is_err());
        assert_eq!(bench.blocks(), 0, "nothing will be launched that could use it");
        let (_, held) = bench.memory.hold(|| ());
        assert!(held.is_empty(), "a later hold gets nothing of it");
        bench.pass();
        assert_eq!(bench.blocks(), 0, "what is dropped later is freed at once");
    }
}
