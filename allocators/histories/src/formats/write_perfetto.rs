//! Chrome's trace events as JSON, for ui.perfetto.dev: counters, lifetimes of blocks, and events.
//!
//! A device is a process. Counters: `requested`, requested bytes of active blocks; `pending`, the part of it whose free was
//! requested and has not completed; `reserved`, bytes in segments, if the recording has segments. The bytes of the blocks
//! themselves are known only after the last event, if at all. Segments, failed requests and uses on other streams are instants on
//! the thread of their stream.
//!
//! A block's lifetime is a slice from its allocation to the completed free. Slices of one track must not overlap, and thousands
//! of blocks are live simultaneously, so the largest blocks get tracks; the others are instants on the thread of their stream.
//! Both have the same arguments: address, bytes, stream, how the request was served, and its origin, as far as known. A file has
//! at most 50 tracks, which a person can still examine; more than eight devices have some more.
//!
//! Each call stack is written once, as an instant `stack N: line` on the host's track `stacks`, at the first block that it
//! allocated; blocks refer to it by its number. The dictionary `stackFrames` of the format is ignored by ui.perfetto.dev.
//!
//! Times are microseconds with decimals from the first event. Memory is some 50 bytes for each block of the recording.
//! Source: the Trace Event Format document of Chromium.

use super::list::Writer;
use super::write::{Ending, HistoryFile, TraceWriter, WriteError};
use super::{Action, BlockPlace, Event};
use indexmap::IndexSet;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use vramlab_device::Bytes;
use vramlab_device::output::OutputFile;

/// Maximum number of tracks of a timeline.
const MOST_TRACKS: usize = 50;
/// Maximum number of streams with a thread of their own; later streams of a device share one.
const MOST_STREAMS: usize = 16;
/// Maximum number of tracks for blocks of a device.
const MOST_BLOCK_TRACKS: usize = 24;
/// Counters of a device.
const COUNTERS: usize = 3;

/// Lifetime of a block.
#[derive(Clone, Copy, Debug)]
struct Life {
    start: u64,
    /// `None` for a block that was never freed.
    end: Option<u64>,
    addr: u64,
    bytes: u64,
    stream: u64,
    thread: u32,
    device: u16,
    /// Whether its free was requested.
    pending: bool,
    /// Number of its label, from 1; 0 for none.
    label: u32,
}

/// Label of a block: a name, and arguments.
type Label = (String, Vec<(&'static str, String)>);

/// Levels of one device.
#[derive(Clone, Copy, Debug, Default)]
struct Levels {
    requested: u64,
    pending: u64,
    reserved: Option<u64>,
}

impl Levels {
    /// Subtracts a block that is no longer active.
    fn remove(&mut self, life: &Life) {
        self.requested = self.requested.saturating_sub(life.bytes);
        self.pending = self.pending.saturating_sub(if life.pending { life.bytes } else { 0 });
    }
}

/// The entry in the [list](super::list).
pub(super) const WRITER: Writer = Writer {
    name: "perfetto",
    file_name: "perfetto.json",
    summary: "timeline for ui.perfetto.dev",
    holds: |_| true,
    begin: |file| Ok(Box::new(PerfettoWriter::begin(file)?)),
};

/// Writes a timeline.
#[derive(Debug)]
pub struct PerfettoWriter {
    file: HistoryFile,
    first: bool,
    base_ns: Option<u64>,
    latest_ns: u64,
    /// All blocks, in the order of their allocation.
    lives: Vec<Life>,
    /// Live blocks.
    live: HashMap<(u16, u64), usize>,
    levels: BTreeMap<u16, Levels>,
    /// Thread of each stream.
    threads: HashMap<(u16, u64), u32>,
    /// The thread that streams of a device share, and the number of threads.
    shared: BTreeMap<u16, u32>,
    thread_count: u32,
    /// Thread of each named track, of process 0.
    tracks: BTreeMap<String, u64>,
    /// Label of the next block, and all labels.
    next_label: u32,
    labels: IndexSet<Label>,
    /// Name and frames of a stack that the next event is the first to have.
    next_stack: Option<(String, String)>,
    /// How each allocation of a device was served.
    served: BTreeMap<u16, Vec<BlockPlace>>,
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
            latest_ns: 0,
            lives: Vec::new(),
            live: HashMap::new(),
            levels: BTreeMap::new(),
            threads: HashMap::new(),
            shared: BTreeMap::new(),
            thread_count: 0,
            tracks: BTreeMap::new(),
            next_label: 0,
            labels: IndexSet::new(),
            next_stack: None,
            served: BTreeMap::new(),
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

    fn thread(&mut self, device: u16, stream: u64) -> Result<u32, WriteError> {
        if let Some(thread) = self.threads.get(&(device, stream)) {
            return Ok(*thread);
        }
        let separate = self.threads.len() < MOST_STREAMS;
        let thread = match self.shared.get(&device) {
            Some(shared) if !separate => *shared,
            _ => {
                self.thread_count += 1;
                let name = if separate { format!("stream {stream:#x}") } else { "other streams".to_owned() };
                self.name("thread_name", process(device), self.thread_count.into(), &name)?;
                if !separate {
                    self.shared.insert(device, self.thread_count);
                }
                self.thread_count
            }
        };
        self.threads.insert((device, stream), thread);
        Ok(thread)
    }

    /// Writes a block as a slice of a track, or as an instant if it has none.
    fn life(&mut self, life: &Life, track: Option<u64>, place: Option<BlockPlace>) -> Result<(), WriteError> {
        let base = self.base_ns.unwrap_or(0);
        let end = life.end.unwrap_or(self.latest_ns).max(life.start);
        let micros = |time: u64| Micros(i128::from(time) - i128::from(base));
        let nothing = (String::new(), Vec::new());
        let labels = std::mem::take(&mut self.labels);
        let (name, arguments) =
            (life.label as usize).checked_sub(1).and_then(|at| labels.get_index(at)).unwrap_or(&nothing);
        let size = Bytes(life.bytes).to_string();
        let name = if name.is_empty() { size } else { format!("{name} ({size})") };
        let put = self.put(|out| {
            write!(out, "{{\"cat\":\"block\",\"pid\":{},\"ts\":{}", process(life.device), micros(life.start))?;
            match track {
                Some(track) => {
                    write!(out, ",\"ph\":\"X\",\"tid\":{track},\"dur\":{}", Micros((end - life.start).into()))?
                }
                None => write!(out, ",\"ph\":\"i\",\"s\":\"t\",\"tid\":{}", life.thread)?,
            }
            out.write_all(b",\"name\":")?;
            serde_json::to_writer(&mut *out, &name)?;
            let (addr, bytes, stream) = (life.addr, life.bytes, life.stream);
            write!(out, ",\"args\":{{\"addr\":\"{addr:#x}\",\"bytes\":{bytes},\"stream\":\"{stream:#x}\"")?;
            if let Some(BlockPlace { bytes, path: Some(path), .. }) = place {
                write!(out, ",\"block\":{bytes},\"path\":\"{path}\"")?;
            }
            if life.end.is_none() {
                out.write_all(b",\"freed\":\"never\"")?;
            } else if track.is_none() {
                write!(out, ",\"freed\":{}", micros(end))?;
            }
            for (key, value) in arguments {
                write!(out, ",\"{key}\":")?;
                serde_json::to_writer(&mut *out, value)?;
            }
            out.write_all(b"}}")
        });
        self.labels = labels;
        put
    }

    /// Number of tracks for blocks that each device can have.
    fn block_tracks(&self) -> usize {
        // CAST: a number of threads.
        let used = self.tracks.len() + self.thread_count as usize + COUNTERS * self.levels.len();
        let left = MOST_TRACKS.saturating_sub(used) / self.levels.len().max(1);
        left.min(MOST_BLOCK_TRACKS)
    }

    /// Writes the blocks, the largest on separate tracks.
    fn blocks(&mut self) -> Result<(), WriteError> {
        let most = self.block_tracks();
        let lives = std::mem::take(&mut self.lives);
        let spans: Vec<Span> = lives.iter().map(|life| Span::of(life, self.latest_ns)).collect();
        let assigned = assign(&spans, most);
        let mut named: BTreeMap<(u16, usize), u64> = BTreeMap::new();
        let mut numbers: BTreeMap<u16, usize> = BTreeMap::new();
        for (life, track) in lives.iter().zip(assigned) {
            let number = numbers.entry(life.device).or_default();
            let place = self.served.get(&life.device).and_then(|places| places.get(*number)).copied();
            *number += 1;
            let track = match track.map(|track| (life.device, track)) {
                None => None,
                Some(key) => Some(match named.get(&key) {
                    Some(thread) => *thread,
                    None => {
                        self.thread_count += 1;
                        let thread = u64::from(self.thread_count);
                        self.name("thread_name", process(life.device), thread, &format!("blocks {}", key.1 + 1))?;
                        named.insert(key, thread);
                        thread
                    }
                }),
            };
            self.life(life, track, place)?;
        }
        Ok(())
    }

    /// The thread of a track of the host.
    fn track(&mut self, track: &str) -> Result<u64, WriteError> {
        if let Some(thread) = self.tracks.get(track) {
            return Ok(*thread);
        }
        let thread = self.tracks.len() as u64 + 1;
        if self.tracks.is_empty() {
            self.name("process_name", 0, 0, "host")?;
        }
        self.name("thread_name", 0, thread, track)?;
        self.tracks.insert(track.to_owned(), thread);
        Ok(thread)
    }

    /// Writes a stack.
    fn stack(&mut self, ts: Micros, name: &str, frames: &str) -> Result<(), WriteError> {
        let thread = self.track("stacks")?;
        self.put(|out| {
            write!(
                out,
                "{{\"ph\":\"i\",\"s\":\"t\",\"cat\":\"stack\",\"pid\":0,\"tid\":{thread},\"ts\":{ts},\"name\":"
            )?;
            serde_json::to_writer(&mut *out, name)?;
            out.write_all(b",\"args\":{\"frames\":")?;
            serde_json::to_writer(&mut *out, frames)?;
            out.write_all(b"}}")
        })
    }

    fn instant(&mut self, ts: Micros, event: &Event, thread: u32) -> Result<(), WriteError> {
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
        let Levels { requested, pending, reserved } = self.levels.get(&device).copied().unwrap_or_default();
        self.put(|out| {
            write!(
                out,
                "{{\"ph\":\"C\",\"pid\":{pid},\"tid\":0,\"ts\":{ts},\"name\":\"memory\",\
                 \"args\":{{\"requested\":{requested},\"pending\":{pending}"
            )?;
            if let Some(reserved) = reserved {
                write!(out, ",\"reserved\":{reserved}")?;
            }
            out.write_all(b"}}")
        })
    }
}

/// Devices are processes from 1; 0 is the host.
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
        self.latest_ns = self.latest_ns.max(event.time_ns);
        let thread = self.thread(device, event.stream)?;
        let mut levels = self.levels.get(&device).copied().unwrap_or_default();
        let label = std::mem::take(&mut self.next_label);
        if let Some((name, frames)) = self.next_stack.take() {
            self.stack(ts, &name, &frames)?;
        }
        match event.action {
            Action::Alloc => {
                if let Some(lost) = self.live.insert(key, self.lives.len()) {
                    let lost = &mut self.lives[lost];
                    levels.remove(lost);
                    lost.end = Some(event.time_ns);
                }
                levels.requested = levels.requested.saturating_add(event.bytes);
                let Event { addr, bytes, stream, time_ns: start, .. } = *event;
                let life = Life { start, end: None, addr, bytes, stream, thread, device, pending: false, label };
                self.lives.push(life);
            }
            Action::FreeRequested => match self.live.get(&key).map(|at| &mut self.lives[*at]) {
                Some(life) if !life.pending => {
                    life.pending = true;
                    levels.pending = levels.pending.saturating_add(life.bytes);
                }
                _ => {}
            },
            Action::FreeCompleted => {
                if let Some(at) = self.live.remove(&key) {
                    let life = &mut self.lives[at];
                    life.end = Some(event.time_ns);
                    levels.remove(life);
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
        let thread = self.track(track)?;
        let (ts, dur) = (self.micros(start_ns), Micros(total_ns.into()));
        self.put(|out| {
            write!(
                out,
                "{{\"ph\":\"X\",\"cat\":\"host\",\"pid\":0,\"tid\":{thread},\"ts\":{ts},\"dur\":{dur},\"name\":"
            )?;
            serde_json::to_writer(&mut *out, name)?;
            out.write_all(b"}")
        })
    }

    fn say(&mut self, name: &str, arguments: &[(&'static str, &str)]) {
        let label: Label =
            (name.to_owned(), arguments.iter().map(|(key, value)| (*key, (*value).to_owned())).collect());
        // CAST: there are at most as many labels as blocks, fewer than 2^32.
        self.next_label = self.labels.insert_full(label).0 as u32 + 1;
    }

    fn describe_stack(&mut self, number: usize, line: &str, frames: &str) {
        let line = if line.is_empty() { String::new() } else { format!(": {line}") };
        self.next_stack = Some((format!("stack {number}{line}"), frames.to_owned()));
    }

    fn served(&mut self, device: u16, places: Vec<BlockPlace>) {
        self.served.insert(device, places);
    }

    fn finish(mut self: Box<Self>, _ending: &Ending<'_>) -> Result<(), WriteError> {
        self.blocks()?;
        self.file.put(|out| out.write_all(b"\n]}\n"))?;
        self.file.finish()
    }
}

// Assignment of blocks to the tracks of a timeline.

/// A block for the assignment to tracks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    device: u16,
    bytes: u64,
    start: u64,
    end: u64,
}

impl Span {
    fn of(life: &Life, latest: u64) -> Self {
        let end = life.end.unwrap_or(latest).max(life.start);
        Self { device: life.device, bytes: life.bytes, start: life.start, end }
    }
}

/// The track of each block: from the largest block to the smallest, each on the first track that is free during its lifetime;
/// `None` if there is none. O(n log n) for `most` tracks for each device.
fn assign(spans: &[Span], most: usize) -> Vec<Option<usize>> {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|at| (std::cmp::Reverse(spans[*at].bytes), *at));
    // Starts and ends on each track.
    let mut tracks: BTreeMap<u16, Vec<BTreeMap<u64, u64>>> = BTreeMap::new();
    let mut out = vec![None; spans.len()];
    for at in order {
        let Span { device, start, end, .. } = spans[at];
        let device_tracks = tracks.entry(device).or_default();
        let free = |track: &BTreeMap<u64, u64>| {
            // A block without duration still occupies its track for a moment.
            track.range(..end.max(start + 1)).next_back().is_none_or(|(other, last)| *last <= start && *other < start)
        };
        let track = match device_tracks.iter().position(free) {
            Some(track) => track,
            None if device_tracks.len() < most => {
                device_tracks.push(BTreeMap::new());
                device_tracks.len() - 1
            }
            None => continue,
        };
        device_tracks[track].insert(start, end);
        out[at] = Some(track);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_blocks_get_tracks_and_none_overlap() {
        let span = |bytes, start, end| Span { device: 0, bytes, start, end };
        let spans = [span(1, 0, 10), span(5, 0, 4), span(3, 4, 8), span(9, 2, 6), span(2, 6, 6), span(2, 6, 7)];
        // The second track has 0..4 and 4..8, the first 2..6 and then one that starts at 6.
        assert_eq!(assign(&spans, 2), [None, Some(1), Some(1), Some(0), Some(0), None]);
        assert_eq!(assign(&spans, 0), [None; 6]);
        let other = Span { device: 1, ..spans[3] };
        assert_eq!(assign(&[spans[3], other], 1), [Some(0), Some(0)], "each device has separate tracks");
    }
}
