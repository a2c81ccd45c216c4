//! An event as a snapshot has it, in either form.

use super::{Action, Event};

/// The fields of an event as a snapshot has them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawEvent {
    /// Its action; `None` for one that has no counterpart.
    pub(super) action: Option<Option<Action>>,
    pub(super) addr: Option<u64>,
    pub(super) device_free: Option<u64>,
    pub(super) size: Option<u64>,
    pub(super) stream: u64,
    pub(super) time_us: u64,
}

impl RawEvent {
    /// The event; `None` for an action that has no counterpart.
    ///
    /// # Errors
    /// The name of a field that is missing or too large.
    pub(super) fn event(&self, device: u16) -> Result<Option<Event>, &'static str> {
        let Some(action) = self.action.ok_or("action")? else { return Ok(None) };
        let addr = match action {
            Action::Oom => self.device_free.or(self.addr).ok_or("device_free")?,
            _ => self.addr.ok_or("addr")?,
        };
        Ok(Some(Event {
            action,
            device,
            addr,
            bytes: self.size.ok_or("size")?,
            stream: self.stream,
            time_ns: self.time_us.checked_mul(1000).ok_or("time_us below 2^64 ns")?,
        }))
    }
}
