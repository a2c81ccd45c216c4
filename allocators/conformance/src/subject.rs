//! The allocator that a check works on, with calls that are expected to succeed.

use super::Bench;
use super::demand::{Asked, Outcome as _, demand, demand_eq};
use super::support::{allocate, check_nothing_held, fill, free, free_bytes};
use std::ops::Deref;
use std::sync::Arc;
use vramlab_device::{Bytes, StreamId};
use vramlab_policies::contract::{AllocError, Block, DeviceAllocator, Path};

/// An allocator that a bench has built.
pub(super) struct Subject<'a> {
    pub(super) bench: &'a Bench,
    allocator: Arc<dyn DeviceAllocator>,
    /// Free bytes of the device before it was built.
    pub(super) room: u64,
}

impl Deref for Subject<'_> {
    type Target = dyn DeviceAllocator;

    fn deref(&self) -> &Self::Target {
        self.allocator.as_ref()
    }
}

impl<'a> Subject<'a> {
    pub(super) fn new(bench: &'a Bench) -> Self {
        let room = free_bytes(bench.driver.as_ref());
        Self { bench, allocator: bench.selection.build(&bench.driver).granted(), room }
    }

    pub(super) fn try_take(&self, bytes: u64, stream: StreamId) -> Result<Block, AllocError> {
        allocate(&**self, bytes, stream)
    }

    pub(super) fn take(&self, bytes: u64, stream: StreamId) -> Block {
        self.try_take(bytes, stream).granted()
    }

    pub(super) fn try_give(&self, block: Block, stream: StreamId) -> Result<Path, AllocError> {
        free(&**self, block, stream)
    }

    pub(super) fn give(&self, block: Block, stream: StreamId) -> Path {
        self.try_give(block, stream).granted()
    }

    pub(super) fn give_all(&self, blocks: impl IntoIterator<Item = Block>, stream: StreamId) {
        self.give_each(blocks.into_iter().map(|block| (block, stream)));
    }

    /// Frees blocks, each on the stream in its pair.
    pub(super) fn give_each(&self, blocks: impl IntoIterator<Item = (Block, StreamId)>) {
        for (block, stream) in blocks {
            self.give(block, stream);
        }
    }

    /// Queues work that writes a whole block.
    pub(super) fn use_on(&self, block: &Block, stream: StreamId) {
        fill(self.bench.driver.as_ref(), block.addr(), 7, block.requested(), stream);
    }

    /// Allocates blocks of `part` bytes until one is refused.
    pub(super) fn take_until_full(&self, part: u64, stream: StreamId) -> (Vec<Block>, AllocError) {
        let mut live = Vec::new();
        loop {
            match self.try_take(part, stream) {
                Ok(block) => live.push(block),
                Err(error) => return (live, error),
            }
            demand!(live.len() < 100, "100 blocks of {} fill the device", Bytes(part));
        }
    }

    /// Trims as [`DeviceAllocator::trim`] does.
    pub(super) fn trim(&self, keep: u64) -> Result<u64, AllocError> {
        Asked::Trim { keep }.note();
        self.allocator.trim(keep)
    }

    /// Sets the limit as `DeviceAllocator::set_memory_limit` does.
    pub(super) fn limit_to(&self, bytes: Option<u64>) -> bool {
        Asked::Limit { bytes }.note();
        self.set_memory_limit(bytes)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.current
    }

    /// Fails unless a trim returns everything to the device.
    pub(super) fn check_all_returns(&self) {
        self.trim(0).granted();
        check_nothing_held(&self.stats());
        demand_eq!(self.reserved(), 0, "trim releases all when nothing is held");
        check_room(self.bench, self.room);
    }

    /// Drops the allocator; fails unless the device has its memory back.
    pub(super) fn check_drop_returns_all(self) {
        let Self { bench, allocator, room } = self;
        drop(allocator);
        check_room(bench, room);
    }
}

fn check_room(bench: &Bench, room: u64) {
    let free = free_bytes(bench.driver.as_ref());
    let came = format_args!("{} free of {}", Bytes(free), Bytes(room));
    demand!(free.abs_diff(room) <= bench.slack(), came = came, "the device has its memory back");
}

/// First address and bytes of a block.
pub(super) type Range = (u64, u64);

pub(super) fn range(block: &Block) -> Range {
    (block.addr().get(), block.bytes())
}

pub(super) fn overlap(a: Range, b: Range) -> bool {
    a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}

/// Fails when a block shares a byte with a range.
pub(super) fn assert_apart<'a>(blocks: impl IntoIterator<Item = &'a Block>, ranges: &[Range]) {
    for block in blocks {
        let shared = ranges.iter().find(|other| overlap(range(block), **other));
        demand!(
            shared.is_none(),
            came = format_args!("{block:?} in {shared:#x?}"),
            "memory that is in use, or kept apart, serves no other request"
        );
    }
}
