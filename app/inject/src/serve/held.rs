//! Blocks that the program holds, by address, and the segments that they lie in.

use super::{Served, lock, next_buffer_id};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
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

/// A hash of an address. Allocators choose the addresses, so no input can make them collide.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0.rotate_left(8) ^ u64::from(*byte)));
    }

    fn write_u64(&mut self, addr: u64) {
        // 2^64 divided by the golden ratio. The halves are folded, since a table uses low bits and addresses have none.
        let product = u128::from(addr) * 0x9e37_79b9_7f4a_7c15;
        // CAST: both halves.
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type ByAddress = HashMap<u64, Held, BuildHasherDefault<AddressHasher>>;

/// Each call takes from it or puts into it, and few queries name an address inside of a block: so it has no order.
static HELD: Mutex<ByAddress> = Mutex::new(HashMap::with_hasher(BuildHasherDefault::new()));
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

/// The allocation that an address lies in. O(1) for its first address, else O(blocks).
pub(crate) fn range_of(addr: u64) -> Option<Range> {
    let held = lock(&HELD);
    let inside = |(base, held): &(&u64, &Held)| addr.checked_sub(**base).is_some_and(|offset| offset < held.bytes);
    let (base, found) = held.get_key_value(&addr).filter(inside).or_else(|| {
        // An address of the driver's memory needs no search.
        owns(addr).then(|| held.iter().find(inside)).flatten()
    })?;
    Some(Range { base: *base, bytes: found.bytes, buffer_id: found.buffer_id })
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
