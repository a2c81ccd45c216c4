//! Loops for benchmarks: calls of recorded programs, and synthetic ones.
//!
//! | workload | one operation |
//! |---|---|
//! | [`RecordedCalls::run`] | one allocation of a recording, and its free |
//! | [`Slots::run`] | a random one of N live blocks is freed and replaced by one of another size |
//! | [`alternate`] | a block of one size is allocated and freed, then one of another size |
//! | [`pair`] | one block of a fixed size is allocated and freed, so the same block is reused each time |
//!
//! Only the first is what a program does; each of the others shows one effect. Sizes and slots are drawn beforehand
//! ([`Sequence`]), so that a timed loop contains the calls through the trait object, a sequential read of 8 bytes and a slot of
//! the live blocks. Each loop is compiled once and not inlined: inlined copies of a block may be read in other pieces than it was
//! written in, which can double the time of a call. `experiments/pytorch/baselines/workload.hpp` draws the same numbers for allocators of
//! other projects.

use super::random::Random;
use crate::history::{Call, History};
use vramlab_device::StreamId;
use vramlab_policies::contract::AllocError;
use vramlab_policies::contract::{Block, DeviceAllocator, Request};

/// Frees the block in `slot` and allocates another in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Slot of the live blocks.
    pub slot: u32,
    /// Bytes of the new block.
    pub bytes: u32,
}

/// Mixed sizes for a number of live blocks: 512 · 2^k bytes with k uniform in 0..13, plus a uniform remainder below that
/// (512 bytes to 4 MiB, 472 KiB on average).
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Sizes of the initial blocks, one for each slot.
    pub fill: Vec<u32>,
    /// The steps.
    pub steps: Vec<Step>,
}

impl Sequence {
    /// Draws a sequence; equal arguments give equal sequences.
    #[must_use]
    pub fn new(seed: u64, slots: u32, steps: usize) -> Self {
        let mut random = Random(seed);
        let fill = (0..slots).map(|_| random.size()).collect();
        let steps = (0..steps).map(|_| Step { slot: random.below(slots), bytes: random.size() }).collect();
        Self { fill, steps }
    }
}

/// Allocates and frees `bytes` over and over.
///
/// # Errors
/// The first operation that fails.
#[inline(never)]
pub fn pair(allocator: &dyn DeviceAllocator, stream: StreamId, bytes: u64, pairs: u64) -> Result<(), AllocError> {
    for _ in 0..pairs {
        // Not by `?`, which copies the block once more on its way.
        match allocator.allocate(Request::new(bytes), stream) {
            // SAFETY: nothing uses the block.
            Ok(block) => unsafe { allocator.deallocate(block, stream)? },
            Err(error) => return Err(error),
        };
    }
    Ok(())
}

/// Allocates and frees a block of one size, then one of the other, over and over: `pairs` of them in all, an even number.
///
/// # Errors
/// The first operation that fails.
#[inline(never)]
pub fn alternate(
    allocator: &dyn DeviceAllocator,
    stream: StreamId,
    bytes: [u64; 2],
    pairs: u64,
) -> Result<(), AllocError> {
    for _ in 0..pairs / 2 {
        for bytes in bytes {
            // Not by `?`, as above.
            match allocator.allocate(Request::new(bytes), stream) {
                // SAFETY: nothing uses the block.
                Ok(block) => unsafe { allocator.deallocate(block, stream)? },
                Err(error) => return Err(error),
            };
        }
    }
    Ok(())
}

/// The allocations and frees of a recording as a loop, without uses on other streams and `empty_cache`, which not every allocator
/// has.
#[derive(Clone, Debug)]
pub struct RecordedCalls {
    calls: Vec<Call>,
    slots: u32,
    streams: u32,
    allocations: u64,
}

impl RecordedCalls {
    /// The calls of a recording in order. Blocks that stay live are freed at the end, so passes can be repeated.
    #[must_use]
    pub fn new(history: &History) -> Self {
        let mut calls = Vec::new();
        let mut live = Vec::new();
        for call in history.calls() {
            // CAST: widening.
            let slot = call.slot as usize;
            if live.len() <= slot {
                live.resize(slot + 1, None);
            }
            live[slot] = (call.bytes > 0).then_some(call.stream);
            calls.push(call);
        }
        let slots = u32::try_from(live.len()).unwrap_or(u32::MAX);
        let left = live.iter().zip(0..).filter_map(|(stream, slot)| Some(Call { bytes: 0, slot, stream: (*stream)? }));
        calls.extend(left);
        let streams = calls.iter().map(|call| call.stream + 1).max().unwrap_or(0);
        let allocations = calls.iter().filter(|call| call.bytes > 0).count() as u64;
        Self { calls, slots, streams, allocations }
    }

    /// The calls, the frees at the end included.
    #[must_use]
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// Maximum number of live blocks; slots are below it.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Number of streams.
    #[must_use]
    pub fn streams(&self) -> u32 {
        self.streams
    }

    /// Number of allocations in one pass; there are as many frees.
    #[must_use]
    pub fn allocations(&self) -> u64 {
        self.allocations
    }

    /// Makes the calls `passes` times.
    ///
    /// # Errors
    /// The first operation that fails; live blocks are freed first.
    ///
    /// # Panics
    /// When there are fewer streams than the calls use.
    pub fn run(&self, allocator: &dyn DeviceAllocator, streams: &[StreamId], passes: u64) -> Result<(), AllocError> {
        // CAST: widening.
        let mut live: Vec<Option<Block>> = (0..self.slots as usize).map(|_| None).collect();
        for _ in 0..passes {
            if let Err((count, error)) = self.pass(allocator, streams, &mut live) {
                self.give_back(allocator, streams, &mut live, count);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Makes the calls once. An error comes with the number of calls before it.
    #[inline(never)]
    fn pass(
        &self,
        allocator: &dyn DeviceAllocator,
        streams: &[StreamId],
        live: &mut [Option<Block>],
    ) -> Result<(), (usize, AllocError)> {
        for (at, call) in self.calls.iter().enumerate() {
            // CAST: widening, both.
            let (slot, stream) = (&mut live[call.slot as usize], streams[call.stream as usize]);
            if call.bytes == 0 {
                if let Some(block) = slot.take() {
                    // SAFETY: nothing uses the block.
                    unsafe { allocator.deallocate(block, stream) }.map_err(|error| (at, error))?;
                }
                continue;
            }
            // Not by `?`, as above.
            match allocator.allocate(Request::new(call.bytes), stream) {
                Ok(block) => *slot = Some(block),
                Err(error) => return Err((at, error)),
            }
        }
        Ok(())
    }

    /// Frees the blocks that are live after the first `count` calls.
    fn give_back(
        &self,
        allocator: &dyn DeviceAllocator,
        streams: &[StreamId],
        live: &mut [Option<Block>],
        count: usize,
    ) {
        for call in self.calls[..count].iter().rev().filter(|call| call.bytes > 0) {
            // CAST: widening, both.
            if let Some(block) = live[call.slot as usize].take() {
                // Only the earlier error matters.
                // SAFETY: nothing uses the block.
                let _ = unsafe { allocator.deallocate(block, streams[call.stream as usize]) };
            }
        }
    }
}

/// The live blocks of one thread on one stream.
#[derive(Debug)]
pub struct Slots<'a> {
    allocator: &'a dyn DeviceAllocator,
    stream: StreamId,
    live: Vec<Option<Block>>,
}

impl<'a> Slots<'a> {
    /// Allocates one block for each size.
    ///
    /// # Errors
    /// The first allocation that fails.
    pub fn fill(allocator: &'a dyn DeviceAllocator, stream: StreamId, sizes: &[u32]) -> Result<Self, AllocError> {
        let mut slots = Self { allocator, stream, live: Vec::with_capacity(sizes.len()) };
        for bytes in sizes {
            let block = allocator.allocate(Request::new(u64::from(*bytes)), stream)?;
            slots.live.push(Some(block));
        }
        Ok(slots)
    }

    /// Takes steps in order: each frees a block and allocates another in its place.
    ///
    /// # Errors
    /// The first operation that fails; the slot of a failing allocation stays empty.
    ///
    /// # Panics
    /// When a step's slot does not exist.
    #[inline(never)]
    pub fn run(&mut self, steps: &[Step]) -> Result<(), AllocError> {
        for step in steps {
            // CAST: widening.
            let slot = &mut self.live[step.slot as usize];
            if let Some(block) = slot.take() {
                // SAFETY: nothing uses the block.
                unsafe { self.allocator.deallocate(block, self.stream)? };
            }
            // Not by `?`, as above.
            match self.allocator.allocate(Request::new(u64::from(step.bytes)), self.stream) {
                Ok(block) => *slot = Some(block),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Frees what is live.
    ///
    /// # Errors
    /// The first free that fails; later blocks are freed all the same.
    pub fn empty(&mut self) -> Result<(), AllocError> {
        let mut result = Ok(());
        for block in self.live.drain(..).flatten() {
            // SAFETY: nothing uses the block.
            let freed = unsafe { self.allocator.deallocate(block, self.stream) };
            result = result.and(freed.map(|_| ()));
        }
        result
    }
}

impl Drop for Slots<'_> {
    /// Frees the blocks that an error left behind.
    fn drop(&mut self) {
        // Only the returned error matters.
        let _ = self.empty();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{Action, Event};
    use crate::replay::HistoryBuilder;
    use std::sync::Arc;
    use vramlab_device::{Driver, NullDriver};
    use vramlab_policies::Selection;
    use vramlab_policies::backends::{self, CachingSettings};

    fn stream(number: u64) -> StreamId {
        // SAFETY: the device is the null one, which looks at no stream.
        unsafe { StreamId::from_raw(number) }
    }

    #[test]
    fn numbers_are_those_of_the_other_languages() {
        // The published first outputs of SplitMix64 for the seed 1234567.
        let mut random = Random(1_234_567);
        assert_eq!([random.next(), random.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
        let sequence = Sequence::new(1, 64, 10_000);
        assert!(sequence.steps.iter().all(|step| step.slot < 64 && (512..4 << 20).contains(&step.bytes)));
        for k in 0..13 {
            let share = sequence.steps.iter().filter(|step| (step.bytes / 512) >> k == 1).count();
            assert!((600..950).contains(&share), "of 10,000 sizes {share} are of 2^{k}");
        }
    }

    #[test]
    fn nothing_stays_behind() {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 40));
        for kind in backends::all() {
            let allocator = Selection::of(kind).build(&driver).unwrap();
            let sequence = Sequence::new(1, 100, 1_000);
            let mut slots = Slots::fill(allocator.as_ref(), stream(1), &sequence.fill).unwrap();
            assert_eq!(allocator.stats().allocation.all.current, 100);
            slots.run(&sequence.steps).unwrap();
            assert_eq!(allocator.stats().allocation.all.current, 100);
            slots.empty().unwrap();
            pair(allocator.as_ref(), stream(1), 512, 10).unwrap();
            alternate(allocator.as_ref(), stream(1), [512, 4 << 20], 10).unwrap();
            let stats = allocator.stats().allocation.all;
            assert_eq!((stats.current, stats.allocated), (0, 1_120));
        }
    }

    fn history(events: &[(Action, u64, u64, u64)]) -> History {
        let mut builder = HistoryBuilder::new(None);
        for &(action, addr, bytes, stream) in events {
            builder.push(&Event { action, addr, bytes, stream, device: 0, time_ns: 0 }).unwrap();
        }
        builder.finish(&CachingSettings::default()).unwrap()
    }

    #[test]
    fn a_recorded_pass_frees_what_the_history_leaves() {
        let (first, second) = (0x1000, 0x10_0000);
        let events = [
            (Action::Alloc, first, 512, 7),
            (Action::Alloc, second, 4 << 20, 9),
            (Action::FreeRequested, first, 512, 7),
            (Action::FreeCompleted, first, 512, 7),
            (Action::Alloc, first, 1024, 7),
        ];
        let recorded = RecordedCalls::new(&history(&events));
        assert_eq!((recorded.allocations(), recorded.slots(), recorded.streams()), (3, 2, 2));
        assert_eq!(recorded.calls().iter().filter(|call| call.bytes == 0).count(), 3);
        let streams = [stream(1), stream(2)];
        for kind in backends::all() {
            // The second device has no room for the larger block: the live blocks are freed.
            for (bytes, allocated) in [(1 << 40, 6..=6), (2 << 20, 0..=1)] {
                let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(bytes));
                let allocator = Selection::of(kind).build(&driver).unwrap();
                let result = recorded.run(allocator.as_ref(), &streams, 2);
                assert_eq!(result.is_ok(), bytes > 2 << 20, "{kind}: {result:?}");
                let stats = allocator.stats().allocation.all;
                assert_eq!(stats.current, 0, "{kind} on {bytes} bytes");
                assert!(allocated.contains(&stats.allocated), "{kind} on {bytes} bytes: {}", stats.allocated);
            }
        }
    }
}
