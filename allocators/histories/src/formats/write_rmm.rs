//! RMM's log, for its replay benchmark and whatever reads such logs.
//!
//! Allocations, the client's frees and refused requests; the rest has no place in it. Where only the completion of a free
//! was recorded, it is written as the free. Times are of the day, in UTC if the history's times count from 1970. The thread
//! is not known and written as 0. A log is of one device, and it begins with its program: frees of what it does not
//! allocate are left out. Memory is taken for the live blocks.

use super::list::Writer;
use super::write::{Ending, HistoryFile, TraceWriter, WriteError};
use super::{Action, Event};
use std::collections::HashMap;
use std::io::Write;
use vramlab_device::output::OutputFile;

/// The entry in the [list](super::list).
pub(super) const WRITER: Writer = Writer {
    name: "rmm",
    file_name: "rmm.csv",
    summary: "log for RMM's replay",
    holds: |action| matches!(action, Action::Alloc | Action::FreeRequested | Action::Oom),
    begin: |file| Ok(Box::new(RmmWriter::begin(file)?)),
};

/// Writes a log.
#[derive(Debug)]
pub struct RmmWriter {
    file: HistoryFile,
    device: Option<u16>,
    /// Sizes of the live blocks by address.
    live: HashMap<u64, u64>,
    passed_over: u64,
    stood_in: u64,
}

impl RmmWriter {
    /// Begins a log.
    ///
    /// # Errors
    /// [`WriteError`] when its first bytes cannot be written.
    pub fn begin(file: OutputFile) -> Result<Self, WriteError> {
        let mut file = HistoryFile::new(file);
        file.put(|out| out.write_all(b"Thread,Time,Action,Pointer,Size,Stream\n"))?;
        Ok(Self { file, device: None, live: HashMap::new(), passed_over: 0, stood_in: 0 })
    }
}

impl TraceWriter for RmmWriter {
    fn event(&mut self, event: &Event) -> Result<(), WriteError> {
        let action = match event.action {
            Action::Alloc => "allocate",
            Action::FreeRequested => "free",
            // The history has no request for this free.
            Action::FreeCompleted if event.bytes > 0 && self.live.get(&event.addr) == Some(&event.bytes) => "free",
            Action::Oom => "allocate failure",
            _ => return Ok(()),
        };
        if *self.device.get_or_insert(event.device) != event.device {
            return Err(self.file.unfit("the history is of several devices, but an RMM log is of one"));
        }
        match event.action {
            // Empty tensors have no block.
            Action::Alloc if event.bytes > 0 => {
                self.live.insert(event.addr, event.bytes);
            }
            Action::FreeRequested if self.live.remove(&event.addr).is_none() && event.bytes > 0 => {
                self.passed_over += 1;
                return Ok(());
            }
            Action::FreeCompleted => {
                self.live.remove(&event.addr);
                self.stood_in += 1;
            }
            _ => {}
        }
        let micros = event.time_ns / 1000;
        let (seconds, micros) = (micros / 1_000_000, micros % 1_000_000);
        let (hours, minutes, seconds) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        let (addr, bytes, stream) = (event.addr, event.bytes, event.stream);
        self.file.put(|out| {
            write!(out, "0,{hours:02}:{minutes:02}:{seconds:02}.{micros:06},{action},")?;
            // As printf's %p and C++'s streams print pointers.
            if addr == 0 || event.action == Action::Oom {
                write!(out, "(nil)")?;
            } else {
                write!(out, "{addr:#x}")?;
            }
            write!(out, ",{bytes},")?;
            if stream == 0 { writeln!(out, "0") } else { writeln!(out, "{stream:#x}") }
        })
    }

    fn passed_over(&self) -> u64 {
        self.passed_over
    }

    fn stood_in(&self) -> u64 {
        self.stood_in
    }

    fn finish(self: Box<Self>, _ending: &Ending<'_>) -> Result<(), WriteError> {
        self.file.finish()
    }
}
