//! Pinned host memory in a process's calls: what it pinned and registered, and a recording of it for `replay --host`.

use super::{Line, Stacks};
use crate::run::folder::{Folder, create_private};
use crate::words::counted;
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use terminal::{command, duration, quoted};
use vramlab::Bytes;
use vramlab::histories::calls::{Call, CallRecord, Calls, Counter, Notes, Served};
use vramlab::output::{Existing, OutputFile};

/// Pinned host memory of a process, as the driver's boundary saw it. Of a PyTorch program these are the segments that its host allocator
/// pinned, after rounding; what it cached is not seen.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PinnedUse {
    /// Successful calls that allocated pinned memory (`cuMemHostAlloc`, `cuMemAllocHost`).
    pub(crate) allocations: u64,
    /// Most bytes of it at once.
    pub(crate) peak_bytes: u64,
    /// Bytes of it that were not freed.
    pub(crate) left_bytes: u64,
    /// Successful calls that registered memory in place (`cuMemHostRegister`).
    pub(crate) registrations: u64,
    /// Most bytes registered at once.
    pub(crate) registered_peak_bytes: u64,
    /// Calls that were refused.
    pub(crate) refused: u64,
    /// Nanoseconds in calls of the driver that pinned memory, registered it and gave it back.
    pub(crate) total_ns: u64,
    /// What the allocator of pinned memory did; `null` where none served.
    pub(crate) allocator: Option<PinnedAllocator>,
    /// Recording of the allocations for `vramlab replay --host`; `null` where there was none.
    pub(crate) history: Option<PathBuf>,
}

/// An allocator of pinned memory between the program and the driver.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PinnedAllocator {
    /// Allocations that it served.
    pub(crate) served: u64,
    /// Most bytes that it had pinned at once.
    pub(crate) reserved_peak_bytes: u64,
    /// Calls of the driver that it made.
    pub(crate) driver_calls: u64,
}

/// Bytes by address, and the most there were.
#[derive(Default)]
struct Level {
    live: BTreeMap<u64, u64>,
    bytes: u64,
    peak: u64,
    count: u64,
}

impl Level {
    fn add(&mut self, addr: u64, bytes: u64) {
        // A child that was forked has the addresses of its parent in a record of its own.
        let before = self.live.insert(addr, bytes).unwrap_or(0);
        self.bytes = self.bytes.saturating_add(bytes).saturating_sub(before);
        self.peak = self.peak.max(self.bytes);
        self.count += 1;
    }

    /// The bytes at an address; `None` for memory that is not known here, such as a parent's.
    fn remove(&mut self, addr: u64) -> Option<u64> {
        let bytes = self.live.remove(&addr)?;
        self.bytes -= bytes;
        Some(bytes)
    }
}

/// Follows pinned memory, and writes the recording.
#[derive(Default)]
pub(super) struct Pinned {
    allocated: Level,
    registered: Level,
    refused: u64,
    served: u64,
    total_ns: u64,
}

impl Pinned {
    /// The pinned memory of a process; `None` if it pinned none.
    ///
    /// # Errors
    /// The recording cannot be written.
    pub(super) fn write(
        calls: &Calls,
        stacks: &Stacks,
        notes: &Notes,
        (folder, name): (&Folder, &str),
    ) -> Result<Option<PinnedUse>> {
        let mut out = Self::default();
        let mut file: Option<(PathBuf, PathBuf, OutputFile)> = None;
        let mut written = std::collections::BTreeSet::new();
        let mut time = 0;
        for record in &calls.records {
            let Some((action, size)) = out.apply(record) else { continue };
            let (path, _, file) = match &mut file {
                Some(file) => file,
                empty => {
                    let name = format!("{name}-host.jsonl");
                    let path = folder.path.join(&name);
                    let made = create_private(&path, Existing::Replace)?;
                    empty.insert((path, folder.shown.join(name), made))
                }
            };
            time = record.start_ns.max(time);
            let line =
                Line::new(record, (action, size), time.wrapping_add(calls.epoch_ns), stacks, notes, &mut |stack| {
                    written.insert(stack)
                });
            serde_json::to_writer(&mut *file, &line).with_context(|| path.display().to_string())?;
            file.write_all(b"\n").with_context(|| path.display().to_string())?;
        }
        let history = match file {
            Some((_, shown, file)) => {
                file.finish()?;
                Some(shown)
            }
            None => None,
        };
        let any = out.allocated.count + out.registered.count + out.refused > 0;
        Ok(any.then_some(PinnedUse {
            allocations: out.allocated.count,
            peak_bytes: out.allocated.peak,
            left_bytes: out.allocated.bytes,
            registrations: out.registered.count,
            registered_peak_bytes: out.registered.peak,
            refused: out.refused,
            total_ns: out.total_ns + calls.counter(Counter::HostDriverNs),
            allocator: (calls.counter(Counter::HostDriverCalls) > 0).then(|| PinnedAllocator {
                served: out.served,
                reserved_peak_bytes: calls.counter(Counter::HostReservedPeak),
                driver_calls: calls.counter(Counter::HostDriverCalls),
            }),
            history,
        }))
    }

    /// The effect of a call: the action in the recording and its bytes.
    fn apply(&mut self, record: &CallRecord) -> Option<(&'static str, u64)> {
        let pins = matches!(record.call, Call::HostAlloc | Call::HostRegister);
        let of_host = pins || matches!(record.call, Call::HostFree | Call::HostUnregister);
        if !of_host {
            return None;
        }
        if record.served == Served::Driver {
            self.total_ns += record.total_ns;
        }
        if record.code != 0 {
            self.refused += u64::from(pins);
            return (record.call == Call::HostAlloc).then_some(("oom", record.bytes));
        }
        match record.call {
            Call::HostAlloc => {
                self.allocated.add(record.addr, record.bytes);
                self.served += u64::from(record.served == Served::Allocator);
                Some(("alloc", record.bytes))
            }
            Call::HostFree => Some(("free_requested", self.allocated.remove(record.addr)?)),
            Call::HostRegister => {
                self.registered.add(record.addr, record.bytes);
                None
            }
            _ => {
                self.registered.remove(record.addr);
                None
            }
        }
    }
}

impl PinnedUse {
    /// The line of the screen.
    pub(in crate::run) fn line(&self) -> String {
        let mut parts = Vec::new();
        if let Some(PinnedAllocator { served, reserved_peak_bytes, driver_calls }) = self.allocator {
            parts.push(format!(
                "{} requested at most in {} cudaMallocHost, {served} served from {} reserved at most in {}",
                Bytes(self.peak_bytes),
                self.allocations,
                Bytes(reserved_peak_bytes),
                counted(driver_calls, "driver call"),
            ));
        } else if self.allocations > 0 {
            parts.push(format!("{} pinned at most in {} cudaMallocHost", Bytes(self.peak_bytes), self.allocations));
        }
        if self.registrations > 0 {
            let bytes = Bytes(self.registered_peak_bytes);
            parts.push(format!("{bytes} registered at most in {} cudaHostRegister", self.registrations));
        }
        if self.refused > 0 {
            parts.push(format!("{} refused", self.refused));
        }
        let mut out = format!("host memory: {}; {} in these calls", parts.join(", "), duration(self.total_ns));
        if let Some(history) = &self.history {
            let arguments = format!("replay --host {}", quoted(&history.display().to_string()));
            out += &format!("; {}", command("vramlab", &arguments));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(call: Call, addr: u64, bytes: u64, code: u16) -> CallRecord {
        CallRecord {
            call,
            served: Served::Driver,
            device: 0,
            thread: 1,
            addr,
            bytes,
            stream: 0,
            start_ns: 0,
            total_ns: 10,
            blocked_ns: 0,
            code,
            behind: 0,
            stack: 0,
        }
    }

    #[test]
    fn pinned_and_registered_memory_is_followed() {
        let mut pinned = Pinned::default();
        let mut apply = |call, addr, bytes, code| pinned.apply(&record(call, addr, bytes, code));
        assert_eq!(apply(Call::HostAlloc, 4096, 100, 0), Some(("alloc", 100)));
        assert_eq!(apply(Call::HostRegister, 1 << 20, 50, 0), None);
        assert_eq!(apply(Call::HostAlloc, 0, 1 << 40, 2), Some(("oom", 1 << 40)));
        assert_eq!(apply(Call::HostFree, 8192, 0, 0), None, "a free of memory that is not known");
        assert_eq!(apply(Call::HostFree, 4096, 0, 0), Some(("free_requested", 100)));
        assert_eq!(apply(Call::HostUnregister, 1 << 20, 0, 713), None, "what is not registered is refused");
        assert_eq!(apply(Call::Alloc, 4096, 100, 0), None);
        assert_eq!((pinned.allocated.peak, pinned.allocated.bytes, pinned.registered.bytes), (100, 0, 50));
        assert_eq!((pinned.refused, pinned.total_ns), (1, 60));
    }
}
