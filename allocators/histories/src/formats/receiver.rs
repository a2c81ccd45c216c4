//! What takes the events of a file as they are read.

use super::{Action, Event, Origin, Origins, ReadError, Summary};

/// Takes events as they are read; its error ends the reading ([`ReadError::stop`]).
pub type Sink<'a> = dyn FnMut(Event) -> Result<(), ReadError> + 'a;

/// As [`Sink`], with where each event came from.
pub type OriginSink<'a> = dyn FnMut(Event, Origin, &Origins) -> Result<(), ReadError> + 'a;

/// The sink of a reading, and what is kept of where events came from.
pub(super) struct Receiver<'s> {
    pub(super) sink: &'s mut OriginSink<'s>,
    pub(super) origins: Origins,
    /// Whether the caller asks where they came from.
    pub(super) wants_origins: bool,
}

impl Receiver<'_> {
    pub(super) fn take(&mut self, event: Event, origin: Origin) -> Result<(), ReadError> {
        (self.sink)(event, origin, &self.origins)
    }
}

/// Hands on an event of a format that does not say when a free completed: it completes at once.
pub(super) fn emit(event: Event, summary: &mut Summary, receiver: &mut Receiver<'_>) -> Result<(), ReadError> {
    summary.count(event.device);
    receiver.take(event, Origin::default())?;
    if event.action == Action::FreeRequested {
        summary.count(event.device);
        receiver.take(Event { action: Action::FreeCompleted, ..event }, Origin::default())?;
    }
    Ok(())
}
