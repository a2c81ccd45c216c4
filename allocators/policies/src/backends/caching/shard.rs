//! Shards: each stream has blocks, free lists and counts behind a lock of its own, so threads on streams of their own never wait
//! for each other.
//!
//! *Effect.* None with one thread. Sixteen threads make 187 million allocations and frees a second on streams of their own, and 2.1
//! million where they share one stream and so one lock (`experiments/notes/caching.md`). A stream's shard is found without a lock,
//! in a hash table whose slots are filled once.

use crate::backends::caching::block_cache::BlockCache;
use crate::backends::caching::blocks::BlockIndex;
use crate::backends::caching::totals::{Lease, Sums};
use crate::backends::caching::watched_lock::WatchedLock;
use crate::contract::{CaptureId, PoolKind, Tokens};
use crate::space::{FreeList, Owner};
use crate::sync::{Mutex, SpinGuard, lock};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use vramlab_device::StreamId;

/// The state of one stream. Threads on streams of their own share nothing here.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Shard {
    /// Number in the order of first use, counted from the table's first.
    pub(super) id: u32,
    /// The stream.
    pub(super) stream: StreamId,
    state: WatchedLock<ShardState>,
}

/// The state behind a shard's lock.
#[derive(Debug, Default)]
struct ShardState {
    cache: BlockCache,
    uses: Uses,
    lease: Option<Lease>,
    pinned: bool,
    private: Option<CaptureId>,
}

/// Streams that were announced to use a block (`record_stream`); blocks that have any are flagged as shared.
pub(super) type Uses = BTreeMap<BlockIndex, Vec<StreamId>>;

impl Shard {
    fn new(id: u32, stream: StreamId) -> Self {
        Self { id, stream, state: WatchedLock::new(ShardState::default()) }
    }

    /// The free list of one of its pools.
    pub(super) fn list(&self, pool: PoolKind) -> FreeList {
        FreeList { owner: Owner { stream: self.stream, private: self.lock().private() }, pool: Some(pool) }
    }

    /// Locks the shard for reading. No lock of a shard is held over a call to the device, nor while another shard's is taken but in
    /// [`lock_all`](ShardTable::lock_all).
    #[inline]
    pub(super) fn lock(&self) -> Locked<'_> {
        Locked(self.state.lock())
    }

    /// The shard for changes; `None` while it may not change its levels.
    #[inline(always)]
    pub(super) fn lock_leased(&self) -> Option<Counted<'_>> {
        let state = self.state.lock();
        state.lease.is_some().then_some(Counted(state))
    }

    /// Locks the shard for changes; the caller holds `Sums`, so that no other thread changes any levels meanwhile.
    pub(super) fn lock_with(&self, _sums: &mut Sums) -> Counted<'_> {
        Counted(self.state.lock())
    }
}

/// A locked shard whose blocks can be read, but not changed.
pub(super) struct Locked<'a>(SpinGuard<'a, ShardState>);

impl Locked<'_> {
    /// Its blocks.
    pub(super) fn cache(&self) -> &BlockCache {
        &self.0.cache
    }

    /// Whether a graph may use its segments, so that they stay reserved.
    pub(super) fn is_pinned(&self) -> bool {
        self.0.pinned
    }

    /// Makes it a part of a private pool, which [pins](Self::is_pinned) it.
    pub(super) fn pin(&mut self, private: CaptureId) {
        (self.0.private, self.0.pinned) = (Some(private), true);
    }

    /// Lets its segments be released.
    pub(super) fn unpin(&mut self) {
        self.0.pinned = false;
    }

    /// The private pool that it is a part of.
    pub(super) fn private(&self) -> Option<CaptureId> {
        self.0.private
    }

    /// Announced uses.
    pub(super) fn uses(&mut self) -> &mut Uses {
        &mut self.0.uses
    }

    /// The lease for changes of its levels.
    pub(super) fn lease(&mut self) -> &mut Option<Lease> {
        &mut self.0.lease
    }

    /// Restarts the peaks of its counts.
    pub(super) fn restart_peaks(&mut self) {
        self.0.cache.restart_peaks();
    }
}

/// A locked shard that may change its levels, with the knowledge of [`Totals`](super::totals::Totals). Leads to its blocks.
pub(super) struct Counted<'a>(SpinGuard<'a, ShardState>);

impl Counted<'_> {
    /// The blocks and the announced uses.
    pub(super) fn parts(&mut self) -> (&mut BlockCache, &mut Uses) {
        let state = &mut *self.0;
        (&mut state.cache, &mut state.uses)
    }
}

impl Deref for Counted<'_> {
    type Target = BlockCache;

    #[inline(always)]
    fn deref(&self) -> &BlockCache {
        &self.0.cache
    }
}

impl DerefMut for Counted<'_> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut BlockCache {
        &mut self.0.cache
    }
}

/// Slots that are searched without a lock; a power of two.
const SLOTS: usize = 512;
/// Streams that get a slot. Further streams are found under a lock, so that probing stays short.
const SLOTTED: usize = SLOTS / 2;

/// Tokens' owners that a table takes at a time, one for each shard: nearly every program needs only the first ones for its streams
/// and private pools.
const OWNERS: u32 = 1 << 12;

/// Finds a stream's shard. Shards are made at a stream's first use and live as long as the allocator.
#[derive(Debug)]
pub(super) struct ShardTable {
    /// Open addressing by a multiplicative mix of the stream's handle; null, or a shard of `rows`. Filled and never emptied.
    slots: Box<[AtomicPtr<Shard>; SLOTS]>,
    /// By number: row `r` holds 2^r shards, so that a shard never moves.
    rows: [OnceLock<Row>; u32::BITS as usize],
    /// Number of the first shard. [`OWNERS`] are consecutive and may wrap around.
    first: u32,
    /// The first numbers of further shards, [`OWNERS`] each.
    further: Mutex<Vec<u32>>,
    numbers: Mutex<Numbers>,
}

#[derive(Debug, Default)]
struct Numbers {
    by_stream: BTreeMap<StreamId, u32>,
    /// Shards that are not in the streams' table, oldest first: those of captures and private pools.
    private: Vec<u32>,
}

impl Numbers {
    /// Number of shards.
    fn count(&self) -> u32 {
        u32::try_from(self.by_stream.len() + self.private.len()).expect("there should be fewer than 2^32 shards")
    }
}

type Row = Box<[OnceLock<Box<Shard>>]>;

fn first_slot(stream: StreamId) -> usize {
    // CAST: the shift leaves as many bits as there are slots.
    (stream.get().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - SLOTS.ilog2())) as usize
}

/// Row and column of shard number `before`.
fn place(before: u32) -> (usize, usize) {
    let position = u64::from(before) + 1;
    // CAST: at most 32, and below 2^32.
    (position.ilog2() as usize, (position - (1 << position.ilog2())) as usize)
}

impl ShardTable {
    /// A table whose shards have numbers that no other allocator has.
    pub(super) fn new() -> Self {
        Self::numbered(Tokens::owners(OWNERS))
    }

    /// A table whose shards are numbered from `first` on.
    fn numbered(first: u32) -> Self {
        Self {
            first,
            further: Mutex::new(Vec::new()),
            slots: Box::new([const { AtomicPtr::new(ptr::null_mut()) }; SLOTS]),
            rows: [const { OnceLock::new() }; u32::BITS as usize],
            numbers: Mutex::new(Numbers::default()),
        }
    }

    /// The stream's shard; made when this is its first use.
    #[inline(always)]
    pub(super) fn of_stream(&self, stream: StreamId) -> &Shard {
        // A slot orders making a shard before finding it, which loom cannot see.
        #[cfg(loom)]
        drop(lock(&self.numbers));
        let first = first_slot(stream);
        match self.in_slot(first) {
            Some(shard) if shard.stream == stream => shard,
            _ => self.probe(stream, first),
        }
    }

    /// The shard in a slot; `slot` may exceed the number of slots.
    #[inline(always)]
    fn in_slot(&self, slot: usize) -> Option<&Shard> {
        // SAFETY: `register` stores only references to shards in `rows`, which are neither moved nor dropped before the table is,
        // and with `Release`, so the shard is seen complete.
        unsafe { self.slots[slot % SLOTS].load(Acquire).as_ref() }
    }

    fn probe(&self, stream: StreamId, first: usize) -> &Shard {
        for step in 1..SLOTS {
            match self.in_slot(first + step) {
                Some(shard) if shard.stream == stream => return shard,
                Some(_) => {}
                None => break,
            }
        }
        self.register(stream, first)
    }

    #[cold]
    fn register(&self, stream: StreamId, first: usize) -> &Shard {
        let numbers = &mut *lock(&self.numbers);
        if let Some(shard) = numbers.by_stream.get(&stream).and_then(|id| self.by_id(*id)) {
            return shard;
        }
        // By number before by stream: the owner of a block or of the lease is found by number without the lock.
        let made = self.put(numbers.count(), stream);
        numbers.by_stream.insert(stream, made.id);
        if numbers.by_stream.len() <= SLOTTED {
            let mut slots = (0..SLOTS).map(|step| &self.slots[(first + step) % SLOTS]);
            // Only the holder of the numbers fills slots, and at least half of them are vacant.
            let vacant = slots.find(|slot| slot.load(Relaxed).is_null()).expect("there should be a vacant slot");
            vacant.store(ptr::from_ref(made).cast_mut(), Release);
        }
        made
    }

    /// Makes a shard for a stream's part of a private pool, which is not in the streams' table.
    pub(super) fn make_private(&self, stream: StreamId) -> &Shard {
        let numbers = &mut *lock(&self.numbers);
        let made = self.put(numbers.count(), stream);
        numbers.private.push(made.id);
        made
    }

    /// Every shard of private pools, oldest first.
    pub(super) fn private(&self) -> Vec<&Shard> {
        lock(&self.numbers).private.iter().filter_map(|id| self.by_id(*id)).collect()
    }

    /// Whether a shard is a private pool's.
    pub(super) fn is_private(&self, shard: &Shard) -> bool {
        lock(&self.numbers).private.contains(&shard.id)
    }

    /// Makes shard number `before`, and files it under its number. The caller holds the numbers.
    fn put(&self, before: u32, stream: StreamId) -> &Shard {
        let (owners, at) = ((before / OWNERS) as usize, before % OWNERS);
        let first = match owners {
            0 => self.first,
            _ => {
                let further = &mut *lock(&self.further);
                if further.len() < owners {
                    further.push(Tokens::owners(OWNERS));
                }
                further[owners - 1]
            }
        };
        let (row, column) = place(before);
        let row = self.rows[row].get_or_init(|| (0..1usize << row).map(|_| OnceLock::new()).collect());
        row[column].get_or_init(|| Box::new(Shard::new(first.wrapping_add(at), stream)))
    }

    /// The shard with a number; `None` for an unused number.
    #[inline]
    pub(super) fn by_id(&self, id: u32) -> Option<&Shard> {
        let at = id.wrapping_sub(self.first);
        let before = if at < OWNERS { at } else { self.before(id)? };
        let (row, column) = place(before);
        self.rows.get(row)?.get()?.get(column)?.get().map(|shard| &**shard)
    }

    /// Position of a shard that has none of the first numbers; `None` for another allocator's.
    #[cold]
    fn before(&self, id: u32) -> Option<u32> {
        let further = lock(&self.further);
        let mut firsts = (1..).zip(further.iter());
        firsts.find_map(|(owners, first)| {
            Some(id.wrapping_sub(*first)).filter(|at| *at < OWNERS).map(|at| owners * OWNERS + at)
        })
    }

    /// Locks shards for reading at one moment. No thread that holds one waits for another lock that is held here, so one that holds
    /// several waits for none.
    pub(super) fn lock_all<'a>(shards: &[&'a Shard]) -> Vec<Locked<'a>> {
        shards.iter().map(|shard| shard.lock()).collect()
    }

    /// Every shard: those of streams in the order of the streams' handles, then those of private pools.
    pub(super) fn by_stream(&self) -> Vec<&Shard> {
        let numbers = lock(&self.numbers);
        numbers.by_stream.values().chain(&numbers.private).filter_map(|id| self.by_id(*id)).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::thread;

    #[test]
    fn shard_found_by_stream_is_found_by_number() {
        // Miri runs a thread at a time, slowly, and switches threads anywhere.
        for round in 0..if cfg!(miri) { 2 } else { 200u64 } {
            let table = ShardTable::numbered(7);
            let streams: Vec<StreamId> =
                (0..SLOTTED as u64).map(|number| crate::stream(round << 16 | number)).collect();
            thread::scope(|scope| {
                scope.spawn(|| streams.iter().for_each(|stream| assert_eq!(table.of_stream(*stream).stream, *stream)));
                // Searches as `of_stream` does, but makes none.
                for stream in &streams {
                    let probe = || (0..SLOTS).map(|step| table.in_slot(first_slot(*stream) + step));
                    let shard_of = || probe().map_while(|slot| slot).find(|shard| shard.stream == *stream);
                    let shard = std::iter::repeat_with(shard_of).flatten().next().expect("the stream gets a shard");
                    let numbered = table.by_id(shard.id).map(|shard| shard.stream);
                    assert_eq!(numbered, Some(*stream), "round {round}, shard {}", shard.id);
                }
            });
        }
    }

    #[test]
    fn each_stream_has_one_shard_however_many_there_are() {
        // Numbers wrap around.
        let table = ShardTable::numbered(u32::MAX - 700);
        // Clustered handles, as those of a driver, and more streams than slots.
        let streams: Vec<StreamId> =
            (0..2_000u64).map(|number| crate::stream(0x7f00_0000_0000 + number * 16)).collect();
        for (number, stream) in streams.iter().enumerate().rev() {
            let shard = table.of_stream(*stream);
            let at = shard.id.wrapping_sub(table.first) as usize;
            assert_eq!((shard.stream, at), (*stream, streams.len() - 1 - number));
        }
        for stream in &streams {
            let shard = table.of_stream(*stream);
            assert!(std::ptr::eq(shard, table.of_stream(*stream)));
            assert!(std::ptr::eq(shard, table.by_id(shard.id).expect("the number was given")));
        }
        assert!([2_000, u32::MAX].iter().all(|after| table.by_id(table.first.wrapping_add(*after)).is_none()));
        let order: Vec<StreamId> = table.by_stream().iter().map(|shard| shard.stream).collect();
        assert_eq!(order, streams);
    }

    #[test]
    #[cfg_attr(miri, ignore = "16,000 shards; the others do the same with fewer")]
    fn no_two_tables_share_a_number_however_many_streams_there_are() {
        let tables = [(); 2].map(|()| ShardTable::new());
        let streams = || (1..2 * u64::from(OWNERS) + 10).map(crate::stream);
        for stream in streams() {
            tables.iter().for_each(|table| assert_eq!(table.of_stream(stream).stream, stream));
        }
        let numbers: BTreeSet<u32> =
            tables.iter().flat_map(|table| table.by_stream().into_iter().map(|shard| shard.id)).collect();
        assert_eq!(numbers.len(), 2 * streams().count());
        for stream in streams() {
            let [mine, other] = tables.each_ref().map(|table| table.of_stream(stream));
            assert!(tables[0].by_id(mine.id).is_some_and(|found| std::ptr::eq(found, mine)));
            assert!(tables[0].by_id(other.id).is_none());
        }
    }
}
