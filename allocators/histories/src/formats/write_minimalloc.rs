//! minimalloc's table of buffers, `id,lower,upper,size`, in the order in which their lives end.
//!
//! A life is counted in allocations and completed frees: each is one step of time. So the table orders lives as the
//! history does, whatever the clock's resolution. A free of what was allocated before the history began is a life from
//! 0; what is never freed lives to the end. Memory is taken for the live buffers only.

use super::list::Writer;
use super::write::{Ending, HistoryFile, TraceWriter, WriteError};
use super::{Action, Event};
use std::collections::BTreeMap;
use std::io::Write;
use vramlab_device::output::OutputFile;

/// The entry in the [list](super::list).
pub(super) const WRITER: Writer = Writer {
    name: "minimalloc",
    file_name: "minimalloc.csv",
    summary: "buffers and their lives for minimalloc",
    holds: MinimallocWriter::holds,
    begin: |file| Ok(Box::new(MinimallocWriter::begin(file)?)),
};

/// Writes a table.
#[derive(Debug)]
pub struct MinimallocWriter {
    file: HistoryFile,
    /// Beginning and size of the live buffers, by device and address.
    live: BTreeMap<(u16, u64), (u64, u64)>,
    /// Allocations and frees so far.
    now: u64,
    written: u64,
    device: Option<u16>,
}

impl MinimallocWriter {
    /// Begins a table.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn begin(file: OutputFile) -> Result<Self, WriteError> {
        let mut file = HistoryFile::new(file);
        file.put(|out| out.write_all(b"id,lower,upper,size\n"))?;
        Ok(Self { file, live: BTreeMap::new(), now: 0, written: 0, device: None })
    }

    /// Whether a table has a place for such events.
    fn holds(action: Action) -> bool {
        matches!(action, Action::Alloc | Action::FreeCompleted)
    }

    fn row(&mut self, lower: u64, upper: u64, size: u64) -> Result<(), WriteError> {
        let id = self.written;
        self.written += 1;
        self.file.put(|out| writeln!(out, "b{id},{lower},{upper},{size}"))
    }
}

impl TraceWriter for MinimallocWriter {
    fn event(&mut self, event: &Event) -> Result<(), WriteError> {
        if !Self::holds(event.action) {
            return Ok(());
        }
        if *self.device.get_or_insert(event.device) != event.device {
            return Err(self.file.unfit("the history is of several devices, but a minimalloc table is of one"));
        }
        self.now += 1;
        let key = (event.device, event.addr);
        let ended = if event.action == Action::Alloc {
            // If the address is taken, the free of its last owner was lost.
            self.live.insert(key, (self.now, event.bytes))
        } else {
            Some(self.live.remove(&key).unwrap_or((0, event.bytes)))
        };
        match ended {
            Some((lower, size)) => self.row(lower, self.now, size),
            None => Ok(()),
        }
    }

    fn finish(mut self: Box<Self>, _ending: &Ending<'_>) -> Result<(), WriteError> {
        let end = self.now + 1;
        for (lower, size) in std::mem::take(&mut self.live).into_values() {
            self.row(lower, end, size)?;
        }
        self.file.finish()
    }
}
