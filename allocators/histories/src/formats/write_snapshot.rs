//! PyTorch's memory snapshot, as a pickle and as JSON, with exactly PyTorch's keys.
//!
//! Read by pytorch.org/memory_viz (the pickle), `torch/cuda/_memory_viz.py` (the pickle), mosaic (either) and
//! [`read`](super::read()). `record_use` events are left out, because PyTorch has no name for them. Recurring stack frames are
//! shared. Times are whole microseconds. Integers are signed 64-bit; larger values are errors.
//!
//! Source: `torch/csrc/cuda/Module.cpp`, `torch/utils/viz/MemoryViz.js`.

use super::list::Writer;
use super::segment::{pool_name, state_name};
use super::write::{Ending, HistoryFile, TraceWriter, WriteError};
use super::write_plain::{Plain, Recurring};
use super::{Action, Event, Origin, Origins, Segment, StackId, TextId};
use vramlab_device::output::OutputFile;
use vramlab_policies::contract::BlockState;

/// The entry in the [list](super::list).
pub(super) const PICKLE: Writer = Writer {
    name: "snapshot",
    file_name: "snapshot.pickle",
    summary: "pickle for pytorch.org/memory_viz",
    holds: SnapshotWriter::holds,
    begin: |file| Ok(Box::new(SnapshotWriter::pickle(file)?)),
};

/// The entry in the [list](super::list).
pub(super) const JSON: Writer = Writer {
    name: "snapshot-json",
    file_name: "snapshot.json",
    summary: "the same as JSON, which repeats the stack of each event",
    holds: SnapshotWriter::holds,
    begin: |file| Ok(Box::new(SnapshotWriter::json(file)?)),
};

/// Writes a snapshot. Events must be ordered by device: all of device 0, then all of device 1.
#[derive(Debug)]
pub struct SnapshotWriter {
    out: Plain,
    /// Device whose list is open.
    device: u16,
}

impl SnapshotWriter {
    /// A pickle of protocol 4.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn pickle(file: OutputFile) -> Result<Self, WriteError> {
        Self::begin(Plain::pickle(HistoryFile::new(file))?)
    }

    /// JSON; pairs are lists.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn json(file: OutputFile) -> Result<Self, WriteError> {
        Self::begin(Plain::json(HistoryFile::new(file)))
    }

    /// Whether a snapshot has events of an action.
    fn holds(action: Action) -> bool {
        action != Action::RecordUse
    }

    fn begin(mut out: Plain) -> Result<Self, WriteError> {
        // The segments are known last, so the events are written first; the order of keys does not matter.
        out.begin_dict()?;
        out.key("device_traces")?.begin_list()?;
        out.item()?.begin_list()?;
        Ok(Self { out, device: 0 })
    }

    /// Ends the lists of the devices before this one.
    fn open_device(&mut self, device: u16) -> Result<(), WriteError> {
        while self.device < device {
            self.device += 1;
            self.out.end_list()?;
            self.out.item()?.begin_list()?;
        }
        Ok(())
    }

    /// The value of the key `frames`.
    fn frames(&mut self, stack: StackId, origins: Option<&Origins>) -> Result<(), WriteError> {
        let Some(origins) = origins.filter(|_| !stack.is_empty()) else {
            self.out.begin_list()?;
            return self.out.end_list();
        };
        if self.out.again(Recurring::Stack(stack))? {
            return Ok(());
        }
        self.out.begin_list()?;
        for frame in origins.frames(stack) {
            self.out.item()?;
            if self.out.again(Recurring::Frame(frame))? {
                continue;
            }
            self.out.begin_dict()?;
            for (key, text) in [("name", frame.name), ("filename", frame.filename)] {
                self.out.key(key)?;
                self.text(text, origins)?;
            }
            self.out.key("line")?.int(i64::from(frame.line))?;
            self.out.end_dict()?;
            self.out.keep(Recurring::Frame(frame))?;
        }
        self.out.end_list()?;
        self.out.keep(Recurring::Stack(stack))
    }

    fn text(&mut self, text: TextId, origins: &Origins) -> Result<(), WriteError> {
        if self.out.again(Recurring::Text(text))? {
            return Ok(());
        }
        self.out.text(origins.spelt(text))?;
        self.out.keep(Recurring::Text(text))
    }

    fn segment(&mut self, segment: &Segment, origins: Option<&Origins>) -> Result<(), WriteError> {
        let origin = origins.map(|origins| origins.segment(segment.device, segment.address)).unwrap_or_default();
        let out = &mut self.out;
        out.begin_dict()?;
        out.key("device")?.int(i64::from(segment.device))?;
        for (key, value) in [
            ("address", segment.address),
            ("total_size", segment.total_size),
            ("allocated_size", segment.allocated_size()),
            ("active_size", segment.active_size()),
            ("requested_size", segment.requested_size()),
        ] {
            out.key(key)?.size(key, value)?;
        }
        // CAST: a handle's 64 bits; PyTorch writes them as signed.
        out.key("stream")?.int(segment.stream as i64)?;
        out.key("segment_type")?.word(pool_name(segment.segment_type))?;
        let (first, second) = segment.pool_id.unwrap_or_default();
        // CAST: the original 64 bits.
        out.key("segment_pool_id")?.pair(first as i64, second as i64)?;
        out.key("is_expandable")?.bool(segment.is_expandable)?;
        out.key("frames")?;
        self.frames(origin.stack, origins)?;
        self.out.key("blocks")?.begin_list()?;
        for block in &segment.blocks {
            let out = &mut self.out;
            out.item()?.begin_dict()?;
            for (key, value) in
                [("address", block.address), ("size", block.size), ("requested_size", block.requested_size)]
            {
                out.key(key)?.size(key, value)?;
            }
            out.key("state")?.word(state_name(block.state))?;
            out.key("frames")?;
            let active = block.state != BlockState::Free;
            let origin = origins.filter(|_| active).map(|origins| origins.block(segment.device, block.address));
            self.frames(origin.unwrap_or_default().stack, origins)?;
            self.out.end_dict()?;
        }
        self.out.end_list()?;
        self.out.end_dict()
    }

    fn put(&mut self, event: &Event, origin: Origin, origins: Option<&Origins>) -> Result<(), WriteError> {
        if !Self::holds(event.action) {
            return Ok(());
        }
        if event.device < self.device {
            return Err(self.out.file.unfit(format!(
                "an event of device {} comes after one of device {}, but a snapshot orders them by device",
                event.device, self.device
            )));
        }
        self.open_device(event.device)?;
        let out = &mut self.out;
        out.item()?.begin_dict()?;
        out.key("action")?.word(event.action.name())?;
        let addr = if event.action == Action::Oom { "device_free" } else { "addr" };
        out.key(addr)?.size(addr, event.addr)?;
        match event.action {
            // CAST: the same 64 bits; a program may request a negative number.
            Action::Oom => out.key("size")?.int(event.bytes as i64)?,
            _ => out.key("size")?.size("size", event.bytes)?,
        }
        // CAST: a handle's 64 bits; PyTorch writes them as signed.
        out.key("stream")?.int(event.stream as i64)?;
        out.key("time_us")?.size("time", event.time_ns / 1000)?;
        out.key("compile_context")?.word("N/A")?;
        out.key("user_metadata")?;
        match origins.filter(|_| !origin.note.is_empty()) {
            Some(origins) => self.text(origin.note, origins)?,
            None => self.out.word("")?,
        }
        if let Some(origins) = origins {
            if !origin.category.is_empty() {
                self.out.key("category")?;
                self.text(origin.category, origins)?;
            }
            if !origin.stack.is_empty() {
                self.out.key("frames")?;
                self.frames(origin.stack, Some(origins))?;
            }
        }
        self.out.end_dict()
    }
}

impl TraceWriter for SnapshotWriter {
    fn event(&mut self, event: &Event) -> Result<(), WriteError> {
        self.put(event, Origin::default(), None)
    }

    fn event_from(&mut self, event: &Event, origin: Origin, origins: &Origins) -> Result<(), WriteError> {
        self.put(event, origin, Some(origins))
    }

    fn finish(mut self: Box<Self>, ending: &Ending<'_>) -> Result<(), WriteError> {
        let last = ending.segments.iter().map(|segment| segment.device).max().unwrap_or(0);
        self.open_device(last.max(ending.devices.saturating_sub(1)))?;
        self.out.end_list()?;
        self.out.end_list()?;
        self.out.key("segments")?.begin_list()?;
        for segment in ending.segments {
            self.out.item()?;
            self.segment(segment, ending.origins)?;
        }
        self.out.end_list()?;
        let settings = ending.allocator_settings.cloned().unwrap_or_default();
        self.out.key("allocator_settings")?.value(&serde_json::Value::Object(settings))?;
        self.out.key("external_annotations")?.begin_list()?;
        if let Some(origins) = ending.origins {
            for annotation in origins.annotations() {
                self.out.item()?.begin_dict()?;
                self.out.key("stage")?.word(if annotation.start { "START" } else { "END" })?;
                self.out.key("name")?;
                self.text(annotation.name, origins)?;
                if let Some(device) = annotation.device {
                    self.out.key("device")?.int(i64::from(device))?;
                }
                self.out.key("time_us")?.size("time", annotation.time_ns / 1000)?;
                self.out.end_dict()?;
            }
        }
        self.out.end_list()?;
        self.out.end_dict()?;
        self.out.finish()
    }
}
