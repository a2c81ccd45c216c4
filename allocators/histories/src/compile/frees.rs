//! First stage: which frees did not complete at once.

use crate::formats::{Action, Event};
use std::collections::HashMap;

/// Frees, from their request to their completion.
#[derive(Debug, Default)]
pub(super) struct Frees {
    /// Address and operation of the free that the last event requested.
    requested: Option<(u64, u32)>,
    /// Frees that have not completed, by address.
    waiting: HashMap<u64, u32>,
    /// Operations of all frees that did not complete at once, in order. Those that were held up in a retry come later.
    pub(super) deferred: Vec<u32>,
    /// Operations of frees that did not complete at once, in order.
    pub(super) held_up: Vec<u32>,
    /// Operation before which the free of the block at an address completed, in order.
    pub(super) completed: Vec<(u32, u64)>,
    /// Whether the history has completions.
    pub(super) completes: bool,
}

impl Frees {
    /// Operation `op` requests the free of the block at an address.
    pub(super) fn request(&mut self, addr: u64, op: u32) {
        self.requested = Some((addr, op));
    }

    /// The operation of the free that the last event requested, if this event completes it. If not, other streams held it up.
    pub(super) fn completes_last(&mut self, event: &Event) -> Option<u32> {
        let (addr, op) = self.requested.take()?;
        if event.action == Action::FreeCompleted && event.addr == addr {
            return Some(op);
        }
        self.wait(addr, op);
        self.held_up.push(op);
        None
    }

    /// The operation of the free that was requested right now, which completes with it.
    pub(super) fn complete_requested(&mut self) -> Option<u32> {
        self.requested.take().map(|(_, op)| op)
    }

    /// Ends the history: a free that the last event requested has not completed.
    pub(super) fn end(&mut self) {
        if let Some((addr, op)) = self.requested.take() {
            self.wait(addr, op);
        }
    }

    fn wait(&mut self, addr: u64, op: u32) {
        self.waiting.insert(addr, op);
        self.deferred.push(op);
    }

    /// The free of the block at an address is over, if it waits.
    pub(super) fn stop_waiting(&mut self, addr: u64) -> Option<u32> {
        self.waiting.remove(&addr)
    }

    /// The operation that requested the free of the block at an address, if that waits.
    pub(super) fn waiting_at(&self, addr: u64) -> Option<u32> {
        self.waiting.get(&addr).copied()
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}
