//! NCCL's own device memory in a process's calls: allocations that NCCL made, known by their call stacks.
//!
//! NCCL maps its buffers (`cuMemCreate`, then `cuMemMap` in the same thread), or calls `cuMemAlloc`. A mapping counts until it is
//! unmapped: handles that NCCL retains and releases for exports change nothing. Memory of `ncclMemAlloc` is the program's. Code and
//! local memory of NCCL's kernels belong to the context, as the driver allocates them without a call.

use super::Stacks;
use crate::words::counted;
use serde::Serialize;
use std::collections::BTreeMap;
use vramlab::Bytes;
use vramlab::histories::calls::{Call, CallRecord, Calls, MEMORY_OF_GPU};

/// Device memory that NCCL allocated in a process, as the driver's boundary saw it.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct NcclUse {
    /// Most bytes at once, over all GPUs.
    pub(crate) peak_bytes: u64,
    /// Bytes that were not freed.
    pub(crate) left_bytes: u64,
    /// Successful allocations.
    pub(crate) allocations: u64,
    /// Bytes on a GPU since a time (nanoseconds since 1970), in the order of time.
    #[serde(skip)]
    levels: Vec<Level>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Level {
    time_ns: u64,
    device: u8,
    bytes: u64,
}

/// Follows NCCL's memory over the calls.
#[derive(Default)]
struct Nccl {
    /// Bytes and GPU by address.
    live: BTreeMap<u64, (u64, u8)>,
    /// The same for memory that is created and not yet mapped, by thread.
    created: BTreeMap<u32, (u64, u8)>,
    on_device: BTreeMap<u8, u64>,
    out: NcclUse,
}

impl NcclUse {
    /// NCCL's memory in these calls; `None` without any, or without call stacks.
    pub(super) fn new(calls: &Calls, stacks: &Stacks) -> Option<Self> {
        let mut nccl = Nccl::default();
        for record in calls.records.iter().filter(|record| record.code == 0) {
            let is_nccl = || stacks.0.get(&record.stack).is_some_and(|stack| super::symbols::is_of_nccl(stack));
            nccl.apply(record, is_nccl, record.start_ns.wrapping_add(calls.epoch_ns));
        }
        let left_bytes = nccl.on_device.values().sum();
        (nccl.out.allocations > 0).then_some(Self { left_bytes, ..nccl.out })
    }

    /// Bytes on a GPU at a time.
    pub(in crate::run) fn at(&self, device: u32, time_ns: u64) -> u64 {
        let of_device = self.levels.iter().rev().filter(|level| u32::from(level.device) == device);
        of_device.skip_while(|level| level.time_ns > time_ns).map(|level| level.bytes).next().unwrap_or(0)
    }

    /// The line of the screen.
    pub(in crate::run) fn line(&self) -> String {
        let count = counted(self.allocations, "allocation");
        format!("NCCL: {} of device memory at most, in {count}", Bytes(self.peak_bytes))
    }
}

impl Nccl {
    /// The effect of a successful call.
    fn apply(&mut self, record: &CallRecord, is_nccl: impl Fn() -> bool, time_ns: u64) {
        match record.call {
            Call::Alloc | Call::Pitch | Call::AllocAsync | Call::FromPool if is_nccl() => {
                self.add(record.addr, (record.bytes, record.device), time_ns);
            }
            Call::Create if record.stream == MEMORY_OF_GPU && is_nccl() => {
                self.created.insert(record.thread, (record.bytes, record.device));
            }
            Call::Map => {
                // A mapping of other bytes is of imported memory, which is a peer's.
                if let Some(created) = self.created.remove(&record.thread).filter(|(bytes, _)| *bytes == record.bytes) {
                    self.add(record.addr, created, time_ns);
                }
            }
            Call::Free | Call::FreeAsync | Call::Unmap => {
                if let Some((bytes, device)) = self.live.remove(&record.addr) {
                    self.set(device, self.level(device).saturating_sub(bytes), time_ns);
                }
            }
            _ => {}
        }
    }

    fn level(&self, device: u8) -> u64 {
        self.on_device.get(&device).copied().unwrap_or(0)
    }

    fn add(&mut self, addr: u64, memory: (u64, u8), time_ns: u64) {
        // A child that was forked has the addresses of its parent in a record of its own.
        self.live.insert(addr, memory);
        self.out.allocations += 1;
        self.set(memory.1, self.level(memory.1).saturating_add(memory.0), time_ns);
        let all = self.on_device.values().sum();
        self.out.peak_bytes = self.out.peak_bytes.max(all);
    }

    fn set(&mut self, device: u8, bytes: u64, time_ns: u64) {
        self.on_device.insert(device, bytes);
        // Threads take their places in the record in another order than their calls began.
        let time_ns = self.out.levels.last().map_or(time_ns, |last| last.time_ns.max(time_ns));
        self.out.levels.push(Level { time_ns, device, bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::histories::calls::Served;

    fn record(call: Call, addr: u64, bytes: u64) -> CallRecord {
        CallRecord {
            call,
            served: Served::Driver,
            device: 1,
            thread: 7,
            addr,
            bytes,
            stream: if call == Call::Create { MEMORY_OF_GPU } else { 0 },
            start_ns: 0,
            total_ns: 10,
            blocked_ns: 0,
            code: 0,
            behind: 0,
            stack: 1,
        }
    }

    /// The use after these calls, which are NCCL's or not, one each nanosecond.
    fn after(calls: &[(CallRecord, bool)]) -> NcclUse {
        let mut nccl = Nccl::default();
        for (time, (record, is_nccl)) in (1..).zip(calls) {
            nccl.apply(record, || *is_nccl, time);
        }
        NcclUse { left_bytes: nccl.on_device.values().sum(), ..nccl.out }
    }

    #[test]
    fn mapped_memory_counts_from_its_mapping_to_its_unmapping() {
        let found = after(&[
            (record(Call::Alloc, 1, 100), true),
            (record(Call::Alloc, 2, 1000), false),
            (record(Call::Create, 90, 64), true),
            (record(Call::Map, 3, 64), true),
            // For an export: retained, and released.
            (record(Call::Release, 90, 0), true),
            // Imported memory.
            (record(Call::Map, 4, 64), true),
            (record(Call::Unmap, 3, 64), true),
            (record(Call::Unmap, 4, 64), true),
            (record(Call::Free, 2, 1000), false),
        ]);
        assert_eq!((found.allocations, found.peak_bytes, found.left_bytes), (2, 164, 100));
        assert_eq!([0, 1, 3, 4, 6, 7].map(|time| found.at(1, time)), [0, 100, 100, 164, 164, 100]);
        assert_eq!(found.at(0, 9), 0, "another GPU");
    }

    #[test]
    fn memory_of_the_host_is_not_the_gpus() {
        let host = CallRecord { stream: 3, ..record(Call::Create, 90, 64) };
        let found = after(&[(host, true), (record(Call::Map, 3, 64), true)]);
        assert_eq!((found.allocations, found.peak_bytes), (0, 0));
    }
}
