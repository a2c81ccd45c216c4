//! The streams of a run, and the order between them.

use super::Device;
use crate::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use vramlab::{Driver, EventId, StreamId};

vramlab::device::named! {
    /// Work that can have a stream of its own, in the order in which `--streams` gives them one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Role {
        /// Forward and backward pass.
        Compute "compute",
        /// Updates of the weights, beside the rest of the backward pass.
        Update "update",
        /// Batches on their way to the device.
        Load "load",
        /// Validation.
        Evaluate "evaluate",
    }
}

#[derive(Debug)]
pub(super) struct Streams {
    /// By role; roles beyond the number of streams share the first.
    of: [StreamId; Role::ALL.len()],
    count: usize,
    /// Id of the current stream.
    current: AtomicU64,
    /// Recorded where one stream has to wait for another; by the stream that is waited for.
    events: Vec<OwnedEvent>,
    /// The streams of sums over several GPUs.
    communication: Vec<StreamId>,
    /// The stream of copies of what is kept on the host.
    offload: Option<StreamId>,
}

impl Streams {
    /// One stream for everything.
    pub(super) fn alone(stream: StreamId) -> Self {
        let of = [stream; Role::ALL.len()];
        Self {
            of,
            count: 1,
            current: AtomicU64::new(stream.get()),
            events: Vec::new(),
            communication: Vec::new(),
            offload: None,
        }
    }

    pub(super) fn current(&self) -> StreamId {
        // SAFETY: one of the streams above, which this device made.
        unsafe { StreamId::from_raw(self.current.load(Relaxed)) }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = (StreamId, &'static str)> {
        let of_roles = self.of.into_iter().zip(Role::ALL).take(self.count).map(|(stream, role)| (stream, role.name()));
        let communication = self.communication.iter().map(|stream| (*stream, "communication"));
        of_roles.chain(communication).chain(self.offload.map(|stream| (stream, "offload")))
    }

    /// Errors are of no use; what is left then goes with the context.
    pub(super) fn destroy(&mut self, driver: &dyn Driver) {
        self.events.clear();
        for stream in self.of.into_iter().take(self.count).chain(self.communication.drain(..)).chain(self.offload) {
            // SAFETY: the stream belongs to the device, whose users are gone.
            let _ = unsafe { driver.stream_destroy(stream) };
        }
    }
}

/// An event that goes back to its driver when dropped. An error of that is of no use: what remains goes with the context.
#[derive(Debug)]
pub(crate) struct OwnedEvent {
    driver: Arc<dyn Driver>,
    /// The event, for calls of the driver.
    pub(crate) id: EventId,
}

impl OwnedEvent {
    /// A new one; `timed` if it notes the time.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn new(driver: &Arc<dyn Driver>, timed: bool) -> Result<Self> {
        Ok(Self { id: driver.event_create(timed)?, driver: Arc::clone(driver) })
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        // SAFETY: made by `new` and used nowhere after this; the driver keeps what work waits for.
        let _ = unsafe { self.driver.event_destroy(self.id) };
    }
}

/// Ends the work that has a stream of its own when dropped.
#[must_use = "the work ends when this is dropped"]
#[derive(Debug)]
pub(crate) struct OnStream<'a> {
    device: &'a Device,
    before: StreamId,
}

impl Drop for OnStream<'_> {
    fn drop(&mut self) {
        self.device.streams.current.store(self.before.get(), Relaxed);
    }
}

impl Device {
    /// Gives the first roles a stream each, `count` in all; the others share the first.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn open_streams(&mut self, count: u32) -> Result<()> {
        // CAST: the command line allows four.
        for place in 1..(count as usize).min(Role::ALL.len()) {
            self.streams.of[place] = self.driver.stream_create()?;
            self.streams.count = place + 1;
        }
        for _ in 0..self.streams.count {
            self.streams.events.push(OwnedEvent::new(&self.driver, false)?);
        }
        self.name_in_profiler();
        Ok(())
    }

    /// Gives sums over several GPUs this many streams.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn open_communication(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            self.streams.communication.push(self.driver.stream_create()?);
        }
        self.name_in_profiler();
        Ok(())
    }

    /// The stream of this number for sums over several GPUs; the current one where there is none.
    pub(crate) fn communication(&self, number: usize) -> StreamId {
        self.streams.communication.get(number).copied().unwrap_or_else(|| self.stream())
    }

    /// The streams of sums over several GPUs.
    pub(crate) fn communication_streams(&self) -> &[StreamId] {
        &self.streams.communication
    }

    /// Gives copies of what is kept on the host a stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn open_offload(&mut self) -> Result<()> {
        self.streams.offload = Some(self.driver.stream_create()?);
        self.name_in_profiler();
        Ok(())
    }

    /// The stream of copies of what is kept on the host; the current one where there is none.
    pub(crate) fn offload(&self) -> StreamId {
        self.streams.offload.unwrap_or_else(|| self.stream())
    }

    /// The stream of a role.
    #[must_use]
    pub fn stream_of(&self, role: Role) -> StreamId {
        self.streams.of[role as usize]
    }

    /// Lets what is queued and allocated from now on be on the stream of a role, up to the end of the guard.
    pub(crate) fn on(&self, role: Role) -> OnStream<'_> {
        let before = self.stream();
        self.streams.current.store(self.stream_of(role).get(), Relaxed);
        OnStream { device: self, before }
    }

    /// Lets later work of one role wait for what another has queued so far; nothing where they share a stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn order(&self, first: Role, then: Role) -> Result<()> {
        self.order_streams(self.stream_of(first), self.stream_of(then))
    }

    /// Lets later work of one of the device's streams wait for what another has queued so far; nothing if they are one.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn order_streams(&self, first: StreamId, then: StreamId) -> Result<()> {
        if first == then {
            return Ok(());
        }
        let place = self.streams.of.iter().position(|stream| *stream == first).unwrap_or(0);
        let event = self.streams.events[place].id;
        self.driver.event_record(event, first)?;
        Ok(self.driver.stream_wait_event(then, event)?)
    }
}
