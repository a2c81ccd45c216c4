//! The driver's functions that are written here, each under its name and type in `cuda.h`. Handles and enums cross as integers.
//!
//! Each passes a call that was made in here to the driver, and so does each when its arguments are ones that the driver refuses: then
//! the code is the driver's.

mod host;
mod memory;
mod other;
mod queries;
mod state;

pub(crate) use host::*;
pub(crate) use memory::*;
pub(crate) use other::*;
pub(crate) use queries::*;
pub(crate) use state::*;

use crate::serve::SUCCESS;
use crate::{record, serve};
use vramlab_histories::calls::{Call, CallRecord, Served};

/// The subject of a call.
#[derive(Clone, Copy)]
struct About {
    call: Call,
    bytes: u64,
    stream: u64,
}

impl About {
    fn new(call: Call, bytes: u64) -> Self {
        Self { call, bytes, stream: 0 }
    }
}

/// How long a call waited for the device.
#[derive(Clone, Copy, Default)]
pub(crate) struct Blocked {
    pub(crate) ns: u64,
    /// Number of what was queued last, in the notes.
    pub(crate) behind: u16,
}

/// The record of a call that began at `start_ns`, on the current device.
fn recorded(about: About, served: Served, addr: u64, start_ns: u64, blocked: Blocked, code: i32) -> CallRecord {
    recorded_on(serve::device(), about, served, addr, start_ns, blocked, code)
}

/// The same on a device that is known.
fn recorded_on(
    device: i32,
    about: About,
    served: Served,
    addr: u64,
    start_ns: u64,
    blocked: Blocked,
    code: i32,
) -> CallRecord {
    // CAST: devices are few, and codes are not negative.
    let device = device as u8;
    let About { call, bytes, stream } = about;
    let total_ns = record::now().saturating_sub(start_ns);
    let code = u16::try_from(code).unwrap_or(u16::MAX);
    let Blocked { ns: blocked_ns, behind } = blocked;
    // After the time was taken.
    let stack = crate::stacks::current();
    CallRecord {
        call,
        served,
        device,
        thread: 0,
        addr,
        bytes,
        stream,
        start_ns,
        total_ns,
        blocked_ns,
        code,
        behind,
        stack,
    }
}

/// Makes a call that the driver serves, again after the allocators gave memory back where it was refused for want of memory. `addr`
/// reads the address that it wrote.
fn pass_timed(about: About, mut pass: impl FnMut() -> i32, addr: impl FnOnce() -> u64) -> i32 {
    let start = record::start();
    let mut code = pass();
    let trim =
        if matches!(about.call, Call::HostAlloc | Call::HostRegister) { crate::host::trim } else { serve::trim_all };
    if code == serve::OUT_OF_MEMORY && trim() {
        code = pass();
    }
    if record::is_on() {
        let addr = if code == SUCCESS { addr() } else { 0 };
        let done = recorded(about, Served::Driver, addr, start, Blocked::default(), code);
        record::place().fill(done);
    }
    code
}
