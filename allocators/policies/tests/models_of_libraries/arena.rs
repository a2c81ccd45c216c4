//! RMM's arenas: `arena_memory_resource`, `global_arena`, `superblock`, without size classes.

use super::Model;
use super::device::Device;
use std::collections::HashMap;

const SUPERBLOCK: u64 = 1 << 20;

/// A part of the arena with its free ranges, both as (first address, bytes).
struct Superblock {
    addr: u64,
    bytes: u64,
    /// The stream whose arena has it, or none for the global arena.
    holder: Option<usize>,
    free: Vec<(u64, u64)>,
}

impl Superblock {
    fn empty(addr: u64, bytes: u64) -> Self {
        Self { addr, bytes, holder: None, free: vec![(addr, bytes)] }
    }

    fn is_empty(&self) -> bool {
        self.free == [(self.addr, self.bytes)]
    }

    fn first_fit(&self, bytes: u64) -> Option<usize> {
        self.free.iter().position(|(_, free)| *free >= bytes)
    }
}

pub(crate) struct RmmArena {
    bytes: u64,
    /// In the order of addresses.
    superblocks: Vec<Superblock>,
    used: HashMap<u64, u64>,
}

impl RmmArena {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, superblocks: Vec::new(), used: HashMap::new() }
    }

    fn find(&mut self, holder: Option<usize>, bytes: u64) -> Option<u64> {
        let of = |holder| {
            let fits = move |part: &Superblock| part.holder == holder && part.first_fit(bytes).is_some();
            self.superblocks.iter().position(fits)
        };
        let local = holder.and_then(|_| of(holder));
        let at = match local {
            Some(at) => at,
            None => {
                let at = of(None)?;
                let (part, due) = (&self.superblocks[at], bytes.max(SUPERBLOCK));
                if part.is_empty() && part.bytes >= due + SUPERBLOCK {
                    let (addr, whole) = (part.addr, part.bytes);
                    self.superblocks[at] = Superblock::empty(addr, due);
                    self.superblocks.insert(at + 1, Superblock::empty(addr + due, whole - due));
                }
                at
            }
        };
        let part = &mut self.superblocks[at];
        part.holder = holder;
        let range = part.first_fit(bytes).unwrap();
        let (addr, free) = part.free.remove(range);
        if free > bytes {
            part.free.insert(range, (addr + bytes, free - bytes));
        }
        self.used.insert(addr, bytes);
        Some(addr)
    }

    /// Empty superblocks of the global arena that lie side by side become one.
    fn coalesce(&mut self) {
        let mut joined: Vec<Superblock> = Vec::new();
        for part in self.superblocks.drain(..) {
            let alike = |part: &Superblock| part.holder.is_none() && part.is_empty();
            match joined.last_mut() {
                Some(before) if alike(before) && alike(&part) => {
                    *before = Superblock::empty(before.addr, before.bytes + part.bytes);
                }
                _ => joined.push(part),
            }
        }
        self.superblocks = joined;
    }
}

impl Model for RmmArena {
    fn allocate(&mut self, device: &mut Device, stream: usize, bytes: u64) -> Option<u64> {
        if self.superblocks.is_empty() {
            self.superblocks.push(Superblock::empty(device.take(self.bytes).unwrap(), self.bytes));
        }
        let bytes = bytes.next_multiple_of(256);
        let holder = (bytes <= SUPERBLOCK).then_some(stream);
        self.find(holder, bytes).or_else(|| {
            device.completed(true).into_iter().for_each(|addr| self.free(addr));
            self.superblocks.iter_mut().for_each(|part| part.holder = None);
            self.coalesce();
            self.find(holder, bytes)
        })
    }

    fn free(&mut self, addr: u64) {
        let bytes = self.used.remove(&addr).unwrap();
        let part =
            self.superblocks.iter_mut().find(|part| (part.addr..part.addr + part.bytes).contains(&addr)).unwrap();
        part.free.push((addr, bytes));
        part.free.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (addr, bytes) in part.free.drain(..) {
            match joined.last_mut() {
                Some(before) if before.0 + before.1 == addr => before.1 += bytes,
                _ => joined.push((addr, bytes)),
            }
        }
        part.free = joined;
        self.coalesce();
    }

    /// A snapshot does not show where superblocks end.
    fn free_ranges(&self) -> Option<Vec<(u64, u64)>> {
        None
    }
}
