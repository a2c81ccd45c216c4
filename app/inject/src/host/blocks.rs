//! Blocks of pinned memory that the program holds, by address, and the segments that they lie in.

use super::HostServed;
use crate::serve::{Range, lock, next_buffer_id};
use std::collections::BTreeMap;
use std::sync::Mutex;
use vramlab_policies::Block;

/// A block that the program holds.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) block: Block,
    pub(super) served: &'static HostServed,
    /// Bytes that were requested.
    pub(super) bytes: u64,
    buffer_id: u64,
}

impl Held {
    pub(super) fn new(block: Block, served: &'static HostServed, bytes: u64) -> Self {
        Self { block, served, bytes, buffer_id: next_buffer_id() }
    }
}

/// A segment of an allocator.
#[derive(Clone, Copy, Debug)]
struct Segment {
    bytes: u64,
    context: u64,
}

static HELD: Mutex<BTreeMap<u64, Held>> = Mutex::new(BTreeMap::new());
/// By first address.
static SEGMENTS: Mutex<BTreeMap<u64, Segment>> = Mutex::new(BTreeMap::new());

pub(super) fn insert(addr: u64, held: Held) {
    lock(&HELD).insert(addr, held);
}

/// Takes a block that begins at an address.
pub(super) fn take(addr: u64) -> Option<Held> {
    lock(&HELD).remove(&addr)
}

/// The block that an address lies in, as queries of the program see it.
pub(crate) fn range_of(addr: u64) -> Option<Range> {
    let held = lock(&HELD);
    let (base, found) = held.range(..=addr).next_back()?;
    let inside = addr - base < found.bytes;
    inside.then_some(Range { base: *base, bytes: found.bytes, buffer_id: found.buffer_id })
}

/// Whether an address lies in a segment.
pub(super) fn owns(addr: u64) -> bool {
    let segments = lock(&SEGMENTS);
    segments.range(..=addr).next_back().is_some_and(|(base, segment)| addr - base < segment.bytes)
}

pub(super) fn segment_made(addr: u64, bytes: u64, context: u64) {
    lock(&SEGMENTS).insert(addr, Segment { bytes, context });
}

/// Forgets a segment that is about to go back to the driver; its bytes.
pub(super) fn segment_gone(addr: u64) -> Option<u64> {
    lock(&SEGMENTS).remove(&addr).map(|segment| segment.bytes)
}

/// Forgets the blocks and segments of a context; the bytes of the segments.
pub(super) fn context_gone(context: u64) -> u64 {
    lock(&HELD).retain(|_, held| held.served.context != context);
    let mut bytes = 0;
    lock(&SEGMENTS).retain(|_, segment| {
        let gone = segment.context == context;
        bytes += if gone { segment.bytes } else { 0 };
        !gone
    });
    bytes
}
