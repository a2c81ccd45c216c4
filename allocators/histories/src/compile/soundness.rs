//! The first stage by itself, for what looks at a history and does not replay it.

use super::transcript::Transcript;
use super::windows::Windows;
use crate::formats::{Event, Summary};
use crate::history::ReplayError;
use vramlab_device::budget::Budget;

/// Holds each event of one device to those before it, and refuses in the same words what a
/// [compilation](super::HistoryBuilder) refuses. Memory is what the history makes live at once.
#[derive(Debug)]
pub struct Soundness(Transcript);

impl Soundness {
    /// Before the first event. What it keeps is claimed from the budget.
    #[must_use]
    pub fn new(device: u16, budget: &Budget) -> Self {
        Self(Transcript::new(Some(device), budget))
    }

    /// Takes the next event. O(log n) in the blocks that are live.
    ///
    /// # Errors
    /// Those of [`HistoryBuilder::push`](super::HistoryBuilder::push).
    pub fn push(&mut self, event: &Event) -> Result<(), ReplayError> {
        self.0.push(event)?;
        // What only the later stages read goes at once. Nothing asks for the numbers of operations that are gone: completions of
        // frees go with their windows.
        let Transcript { timeline, frees, segments, windows, unknown, .. } = &mut self.0;
        timeline.ops.clear();
        timeline.addresses.clear();
        timeline.segments.clear();
        timeline.pending.clear();
        frees.deferred.clear();
        frees.held_up.clear();
        frees.completed.clear();
        segments.departed.clear();
        unknown.truncate(1);
        *windows = Windows::default();
        Ok(self.0.give_room_back()?)
    }

    /// Ends the history with what its file says besides events.
    ///
    /// # Errors
    /// [`ReplayError::Event`] where a log that begins with its program names what was never there.
    pub fn finish(&self, summary: &Summary) -> Result<(), ReplayError> {
        if summary.begins_with_program() { self.0.check_complete() } else { Ok(()) }
    }
}
