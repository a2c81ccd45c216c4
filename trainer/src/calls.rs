//! The driver calls of a run, each with its place in the run.

use serde::{Deserialize, Serialize};
use std::fmt::{self, Write as _};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vramlab::{CallEvent, CallKind};

/// One driver call, as a line of `driver_calls.jsonl`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallLine {
    /// Start on the run's clock.
    pub start_ns: u64,
    /// Host time in the call.
    pub total_ns: u64,
    /// Part of it spent waiting for the device.
    pub blocked_ns: u64,
    /// Kind of call.
    pub call: String,
    /// Kernel that was launched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Size in bytes, for calls that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Address that it received or returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addr: Option<u64>,
    /// Stream on which it queued work, or for which it waited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<u64>,
    /// Position in the run: the names of the enclosing ranges, outermost first, separated by slashes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// True if it succeeded.
    pub ok: bool,
}

/// Buffers the driver calls in memory until they are taken.
#[derive(Debug, Default)]
pub struct CallLog {
    calls: Mutex<Calling>,
}

#[derive(Debug, Default)]
struct Calling {
    lines: Vec<CallLine>,
    /// Kernel of the next launch.
    kernel: Option<&'static str>,
    /// Names of the open ranges, separated by slashes.
    path: String,
    /// Length of the path before each of them.
    outer: Vec<usize>,
}

impl CallLog {
    fn calling(&self) -> MutexGuard<'_, Calling> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names the kernel of the next launch.
    pub fn launching(&self, kernel: &'static str) {
        self.calling().kernel = Some(kernel);
    }

    /// Opens a range inside the one that is open; [`leave`](Self::leave) closes it.
    pub fn enter(&self, name: fmt::Arguments<'_>) {
        let mut calling = self.calling();
        let length = calling.path.len();
        calling.outer.push(length);
        let separator = if length == 0 { "" } else { "/" };
        // Writing to a string does not fail.
        let _ = write!(calling.path, "{separator}{name}");
    }

    /// Closes the innermost range.
    pub fn leave(&self) {
        let mut calling = self.calling();
        let length = calling.outer.pop().unwrap_or(0);
        calling.path.truncate(length);
    }

    /// Records a call.
    pub fn observe(&self, event: &CallEvent) {
        let mut calling = self.calling();
        let kernel = if event.kind == CallKind::KernelLaunch { calling.kernel.take() } else { None };
        let path = calling.path.clone();
        calling.lines.push(CallLine {
            start_ns: event.start_ns,
            total_ns: event.total_ns,
            blocked_ns: event.blocked_ns,
            call: event.kind.name().to_owned(),
            kernel: kernel.map(str::to_owned),
            bytes: (event.bytes > 0).then_some(event.bytes),
            addr: event.addr.map(|addr| addr.get()),
            stream: event.stream.map(|stream| stream.get()),
            path,
            ok: event.ok,
        });
    }

    /// The calls since the last time.
    #[must_use]
    pub fn take(&self) -> Vec<CallLine> {
        std::mem::take(&mut self.calling().lines)
    }
}
