//! The program's live blocks, by address: C identifies a block by its first address.
//!
//! *Cost.* One look-up in one of 64 tables, each behind a lock of its own.

use rustc_hash::FxHashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab_device::StreamId;
use vramlab_policies::Block;

const TABLES: usize = 64;

/// A block of the program.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) block: Block,
    /// The stream that it was allocated on.
    pub(crate) stream: StreamId,
    /// The private pool that it belongs to; 0 for none.
    pub(crate) pool: u64,
    /// Whether another stream's use was announced.
    pub(crate) shared: bool,
}

#[derive(Debug)]
pub(crate) struct HeldBlocks([Table; TABLES]);

/// On a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Table(Mutex<Blocks>);

type Blocks = FxHashMap<u64, Held>;

impl HeldBlocks {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| Table::default()))
    }

    fn table(&self, addr: u64) -> MutexGuard<'_, Blocks> {
        self.0[number(addr)].0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn insert(&self, held: Held) {
        let addr = held.block.addr().get();
        self.table(addr).insert(addr, held);
    }

    pub(crate) fn take(&self, addr: u64) -> Option<Held> {
        self.table(addr).remove(&addr)
    }

    /// Reads a block, which stays live meanwhile.
    pub(crate) fn with<R>(&self, addr: u64, look: impl FnOnce(&mut Held) -> R) -> Option<R> {
        self.table(addr).get_mut(&addr).map(look)
    }

    /// Keeps other threads from every block, until the result is dropped.
    pub(crate) fn lock_all(&self) -> AllBlocks<'_> {
        AllBlocks(self.0.each_ref().map(|table| table.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// The number of the table for an address.
fn number(addr: u64) -> usize {
    // Blocks begin at multiples of 256, and those of a thread are often adjacent.
    let at = (addr >> 8).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - TABLES.ilog2());
    // CAST: the shift leaves as many bits as there are tables.
    at as usize
}

/// All tables, locked in their order.
pub(crate) struct AllBlocks<'a>([MutexGuard<'a, Blocks>; TABLES]);

impl AllBlocks<'_> {
    pub(crate) fn insert(&mut self, held: Held) {
        let addr = held.block.addr().get();
        self.0[number(addr)].insert(addr, held);
    }

    /// Removes the selected blocks, in address order.
    pub(crate) fn take_where(&mut self, filter: impl Fn(&Held) -> bool) -> Vec<Held> {
        let mut taken = Vec::new();
        for table in &mut self.0 {
            taken.extend(table.extract_if(|_, held| filter(held)).map(|(_, held)| held));
        }
        taken.sort_unstable_by_key(|held| held.block.addr());
        taken
    }
}
