//! Blocks that the program holds, by address, and the segments that they lie in.

use super::{Served, lock, next_buffer_id};
use std::collections::BTreeMap;
use std::sync::Mutex;
use vramlab_device::StreamId;
use vramlab_policies::Block;

/// A block that the program holds.
#[derive(Debug)]
pub(crate) struct Held {
    pub(super) block: Block,
    pub(crate) served: &'static Served,
    /// The stream that it was allocated on.
    pub(super) stream: StreamId,
    /// The same as the program named it.
    pub(crate) handle: u64,
    /// Bytes that were requested.
    pub(crate) bytes: u64,
    buffer_id: u64,
}

impl Held {
    pub(super) fn new(block: Block, served: &'static Served, stream: StreamId, handle: u64, bytes: u64) -> Self {
        Self { block, served, stream, handle, bytes, buffer_id: next_buffer_id() }
    }
}

/// An allocation as queries of the program see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    pub(crate) buffer_id: u64,
}

static HELD: Mutex<BTreeMap<u64, Held>> = Mutex::new(BTreeMap::new());
/// Segments of allocators: bytes by first address.
static SEGMENTS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

pub(super) fn insert(addr: u64, held: Held) {
    lock(&HELD).insert(addr, held);
}

/// Takes a block that begins at an address.
pub(crate) fn take(addr: u64) -> Option<Held> {
    lock(&HELD).remove(&addr)
}

/// The device and size of a block that begins at an address.
pub(crate) fn holder(addr: u64) -> Option<(&'static Served, u64, u64)> {
    lock(&HELD).get(&addr).map(|held| (held.served, held.handle, held.bytes))
}

/// The allocation that an address lies in.
pub(crate) fn range_of(addr: u64) -> Option<Range> {
    let held = lock(&HELD);
    let (base, found) = held.range(..=addr).next_back()?;
    let inside = addr - base < found.bytes;
    inside.then_some(Range { base: *base, bytes: found.bytes, buffer_id: found.buffer_id })
}

/// Whether an address lies in memory of an allocator.
pub(crate) fn owns(addr: u64) -> bool {
    let segments = lock(&SEGMENTS);
    segments.range(..=addr).next_back().is_some_and(|(base, bytes)| addr - base < *bytes)
}

/// Notes a segment that an allocator took.
pub(crate) fn segment_made(addr: u64, bytes: u64) {
    lock(&SEGMENTS).insert(addr, bytes);
}

/// Forgets a segment that an allocator is about to give back; its bytes.
pub(crate) fn segment_gone(addr: u64) -> Option<u64> {
    lock(&SEGMENTS).remove(&addr)
}

/// Forgets all memory of a context.
pub(super) fn context_gone(context: u64) {
    let mut all = lock(&HELD);
    let of_context = |(addr, held): (&u64, &Held)| (held.served.context == context).then_some(*addr);
    let addresses: Vec<u64> = all.iter().filter_map(of_context).collect();
    let gone: Vec<Held> = addresses.iter().filter_map(|addr| all.remove(addr)).collect();
    drop(all);
    let mut segments = lock(&SEGMENTS);
    for held in gone {
        let addr = held.block.addr().get();
        let segment = segments.range(..=addr).next_back().map(|(base, bytes)| (*base, *bytes));
        if let Some((base, bytes)) = segment
            && addr - base < bytes
        {
            segments.remove(&base);
        }
    }
}
