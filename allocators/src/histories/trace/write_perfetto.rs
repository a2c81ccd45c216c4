//! Chrome's trace events as JSON, for ui.perfetto.dev: counters, lives of blocks, and what happened when.
//!
//! A device is a process and a stream is a thread of it. Counters: `requested`, bytes in blocks from allocation to the
//! client's free; `active`, the same until the free has completed; `reserved`, bytes in segments, in histories that
//! have segments. A block's life is an async slice on its stream from allocation to completed free. Segments, refused
//! requests and uses on other streams are instants. Times are microseconds with decimals from the first event.
//!
//! Memory is taken for the live blocks and for the streams. Source: the Trace Event Format document of Chromium.

use super::write::{Ending, HistoryFile, TraceWriter, WriteError};
use super::{Action, Event};
use crate::bytes::Bytes;
use crate::output::OutputFile;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;

/// A block whose life is under way.
#[derive(Clone, Copy, Debug)]
struct Life {
    id: u64,
    bytes: u64,
    thread: u64,
    requested: bool,
}

/// Levels of one device.
#[derive(Clone, Copy, Debug, Default)]
struct Levels {
    requested: u64,
    active: u64,
    reserved: Option<u64>,
}

/// Writes a timeline.
#[derive(Debug)]
pub struct PerfettoWriter {
    file: HistoryFile,
    first: bool,
    base_ns: Option<u64>,
    lives: HashMap<(u16, u64), Life>,
    next_life: u64,
    levels: BTreeMap<u16, Levels>,
    /// Thread of each stream.
    threads: HashMap<(u16, u64), u64>,
    /// Thread of each named track, of process 0.
    tracks: BTreeMap<String, u64>,
}

impl PerfettoWriter {
    /// Begins a timeline.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn begin(file: OutputFile) -> Result<Self, WriteError> {
        let mut file = HistoryFile::new(file);
        file.put(|out| out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":["))?;
        Ok(Self {
            file,
            first: true,
            base_ns: None,
            lives: HashMap::new(),
            next_life: 1,
            levels: BTreeMap::new(),
            threads: HashMap::new(),
            tracks: BTreeMap::new(),
        })
    }

    fn put(&mut self, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<(), WriteError> {
        let separator: &[u8] = if std::mem::take(&mut self.first) { b"\n" } else { b",\n" };
        self.file.put(|out| {
            out.write_all(separator)?;
            write(out)
        })
    }

    /// Microseconds since the first event.
    fn micros(&mut self, time_ns: u64) -> Micros {
        let base = *self.base_ns.get_or_insert(time_ns);
        Micros(i128::from(time_ns) - i128::from(base))
    }

    fn name(&mut self, kind: &'static str, pid: u64, tid: u64, name: &str) -> Result<(), WriteError> {
        self.put(|out| {
            write!(out, "{{\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"name\":\"{kind}\",\"args\":{{\"name\":")?;
            serde_json::to_writer(&mut *out, name)?;
            out.write_all(b"}}")
        })
    }

    fn thread(&mut self, device: u16, stream: u64) -> Result<u64, WriteError> {
        if let Some(thread) = self.threads.get(&(device, stream)) {
            return Ok(*thread);
        }
        // CAST: a number of streams.
        let thread = self.threads.len() as u64 + 1;
        self.threads.insert((device, stream), thread);
        self.name("thread_name", process(device), thread, &format!("stream {stream:#x}"))?;
        Ok(thread)
    }

    fn life(&mut self, phase: char, ts: Micros, device: u16, addr: u64, life: Life) -> Result<(), WriteError> {
        let (pid, thread, id, bytes) = (process(device), life.thread, life.id, life.bytes);
        self.put(|out| {
            write!(
                out,
                "{{\"ph\":\"{phase}\",\"cat\":\"block\",\"id\":\"{id}\",\"pid\":{pid},\"tid\":{thread},\"ts\":{ts},\
                 \"name\":\"{}\",\"args\":{{\"addr\":\"{addr:#x}\",\"bytes\":{bytes}}}}}",
                Bytes(bytes)
            )
        })
    }

    fn instant(&mut self, ts: Micros, event: &Event, thread: u64) -> Result<(), WriteError> {
        let (pid, action, addr, bytes) = (process(event.device), event.action, event.addr, event.bytes);
        let key = if action == Action::Oom { "device_free" } else { "addr" };
        self.put(|out| {
            write!(
                out,
                "{{\"ph\":\"i\",\"s\":\"t\",\"cat\":\"allocator\",\"pid\":{pid},\"tid\":{thread},\"ts\":{ts},\
                 \"name\":\"{action}\",\"args\":{{\"{key}\":\"{addr:#x}\",\"bytes\":{bytes}}}}}"
            )
        })
    }

    fn counters(&mut self, ts: Micros, device: u16) -> Result<(), WriteError> {
        let pid = process(device);
        let Levels { requested, active, reserved } = self.levels.get(&device).copied().unwrap_or_default();
        self.put(|out| {
            write!(
                out,
                "{{\"ph\":\"C\",\"pid\":{pid},\"tid\":0,\"ts\":{ts},\"name\":\"memory\",\
                 \"args\":{{\"requested\":{requested},\"active\":{active}"
            )?;
            if let Some(reserved) = reserved {
                write!(out, ",\"reserved\":{reserved}")?;
            }
            out.write_all(b"}}")
        })
    }
}

/// Devices are processes from 1 on; 0 is the host.
fn process(device: u16) -> u64 {
    u64::from(device) + 1
}

/// Nanoseconds, written as microseconds.
#[derive(Clone, Copy)]
struct Micros(i128);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (sign, ns) = (if self.0 < 0 { "-" } else { "" }, self.0.unsigned_abs());
        write!(f, "{sign}{}.{:03}", ns / 1000, ns % 1000)
    }
}

impl TraceWriter for PerfettoWriter {
    fn event(&mut self, event: &Event) -> Result<(), WriteError> {
        let (device, key) = (event.device, (event.device, event.addr));
        if let std::collections::btree_map::Entry::Vacant(entry) = self.levels.entry(device) {
            entry.insert(Levels::default());
            self.name("process_name", process(device), 0, &format!("device {device}"))?;
        }
        let ts = self.micros(event.time_ns);
        let thread = self.thread(device, event.stream)?;
        let mut levels = self.levels.get(&device).copied().unwrap_or_default();
        match event.action {
            Action::Alloc => {
                let life = Life { id: self.next_life, bytes: event.bytes, thread, requested: true };
                self.next_life += 1;
                if let Some(lost) = self.lives.insert(key, life) {
                    levels.active = levels.active.saturating_sub(lost.bytes);
                    levels.requested = levels.requested.saturating_sub(if lost.requested { lost.bytes } else { 0 });
                    self.life('e', ts, device, event.addr, lost)?;
                }
                levels.active = levels.active.saturating_add(event.bytes);
                levels.requested = levels.requested.saturating_add(event.bytes);
                self.life('b', ts, device, event.addr, life)?;
            }
            Action::FreeRequested => match self.lives.get_mut(&key) {
                Some(life) if life.requested => {
                    life.requested = false;
                    levels.requested = levels.requested.saturating_sub(life.bytes);
                }
                _ => {}
            },
            Action::FreeCompleted => {
                if let Some(life) = self.lives.remove(&key) {
                    levels.active = levels.active.saturating_sub(life.bytes);
                    levels.requested = levels.requested.saturating_sub(if life.requested { life.bytes } else { 0 });
                    self.life('e', ts, device, event.addr, life)?;
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                levels.reserved = Some(levels.reserved.unwrap_or(0).saturating_add(event.bytes));
                self.instant(ts, event, thread)?;
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                levels.reserved = Some(levels.reserved.unwrap_or(0).saturating_sub(event.bytes));
                self.instant(ts, event, thread)?;
            }
            Action::RecordUse | Action::Snapshot | Action::Oom => self.instant(ts, event, thread)?,
        }
        self.levels.insert(device, levels);
        if matches!(event.action, Action::RecordUse | Action::Snapshot | Action::Oom) {
            return Ok(());
        }
        self.counters(ts, device)
    }

    fn slice(&mut self, track: &str, name: &str, start_ns: u64, total_ns: u64) -> Result<(), WriteError> {
        let thread = match self.tracks.get(track) {
            Some(thread) => *thread,
            None => {
                // CAST: a number of tracks.
                let thread = self.tracks.len() as u64 + 1;
                if self.tracks.is_empty() {
                    self.name("process_name", 0, 0, "host")?;
                }
                self.name("thread_name", 0, thread, track)?;
                self.tracks.insert(track.to_owned(), thread);
                thread
            }
        };
        let (ts, dur) = (self.micros(start_ns), Micros(total_ns.into()));
        self.put(|out| {
            write!(out, "{{\"ph\":\"X\",\"pid\":0,\"tid\":{thread},\"ts\":{ts},\"dur\":{dur},\"name\":")?;
            serde_json::to_writer(&mut *out, name)?;
            out.write_all(b"}")
        })
    }

    fn finish(mut self: Box<Self>, _ending: &Ending<'_>) -> Result<(), WriteError> {
        self.file.put(|out| out.write_all(b"\n]}\n"))?;
        self.file.finish()
    }
}
