//! The captures of an allocator: their streams, and the state of each. Every backend has such a list.

use crate::contract::{AllocError, CaptureId};
use std::collections::BTreeMap;
use vramlab_device::{Driver, StreamId};

/// Captures by number, each with a state `T`.
#[derive(Debug)]
pub(super) struct Captures<T> {
    open: BTreeMap<StreamId, CaptureId>,
    all: BTreeMap<CaptureId, (StreamId, T)>,
}

impl<T> Default for Captures<T> {
    fn default() -> Self {
        Self { open: BTreeMap::new(), all: BTreeMap::new() }
    }
}

/// An error unless the device has graphs.
pub(super) fn need_graphs(allocator: &'static str, driver: &dyn Driver) -> Result<(), AllocError> {
    if driver.graphs().is_some() {
        return Ok(());
    }
    Err(AllocError::Unsupported { allocator, capability: "graph capture", device: driver.describe().name })
}

fn no_capture(allocator: &'static str, capture: CaptureId) -> AllocError {
    AllocError::Capture { allocator, reason: format!("there is no capture {capture}, or it has been released") }
}

impl<T> Captures<T> {
    /// Whether there is no capture, neither open nor ended.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether no capture is open.
    pub(super) fn all_ended(&self) -> bool {
        self.open.is_empty()
    }

    /// An error if the stream is captured.
    pub(super) fn need_none_on(&self, allocator: &'static str, stream: StreamId) -> Result<(), AllocError> {
        let Some(open) = self.open.get(&stream) else { return Ok(()) };
        let reason = format!("stream {} is in capture {open} already; end that one first", stream.get());
        Err(AllocError::Capture { allocator, reason })
    }

    /// Opens a capture on a stream that is not captured. Its state may depend on its number.
    pub(super) fn begin(&mut self, stream: StreamId, keeps: impl FnOnce(CaptureId) -> T) -> CaptureId {
        let id = CaptureId::next();
        self.open.insert(stream, id);
        self.all.insert(id, (stream, keeps(id)));
        id
    }

    /// The state of a stream's open capture.
    pub(super) fn open_on(&mut self, stream: StreamId) -> Option<&mut T> {
        let id = self.open.get(&stream)?;
        self.all.get_mut(id).map(|(_, keeps)| keeps)
    }

    /// Whether the stream's capture is open.
    pub(super) fn is_open_on(&self, stream: StreamId) -> bool {
        self.open.contains_key(&stream)
    }

    /// The state of a stream's open capture, or of some other open one if that stream has none.
    pub(super) fn open_of(&mut self, stream: StreamId) -> Option<&mut T> {
        let id = self.open.get(&stream).or_else(|| self.open.values().next())?;
        self.all.get_mut(id).map(|(_, keeps)| keeps)
    }

    /// The state of each capture, and whether it is open.
    pub(super) fn each(&mut self) -> impl Iterator<Item = (bool, &mut T)> {
        let open = &self.open;
        self.all.iter_mut().map(|(id, (stream, keeps))| (open.get(stream) == Some(id), keeps))
    }

    /// The state of each capture.
    pub(super) fn kept(&self) -> impl Iterator<Item = &T> {
        self.all.values().map(|(_, keeps)| keeps)
    }

    /// The stream of an open capture and its state.
    pub(super) fn find_open(
        &mut self,
        allocator: &'static str,
        capture: CaptureId,
    ) -> Result<(StreamId, &mut T), AllocError> {
        let (stream, keeps) = self.all.get_mut(&capture).ok_or_else(|| no_capture(allocator, capture))?;
        if self.open.get(stream) != Some(&capture) {
            return Err(AllocError::Capture { allocator, reason: format!("capture {capture} has ended before") });
        }
        Ok((*stream, keeps))
    }

    /// Ends the open capture of a stream.
    pub(super) fn end(&mut self, stream: StreamId) {
        self.open.remove(&stream);
    }

    /// Removes an ended capture and returns its state.
    pub(super) fn release(&mut self, allocator: &'static str, capture: CaptureId) -> Result<T, AllocError> {
        let (stream, _) = self.all.get(&capture).ok_or_else(|| no_capture(allocator, capture))?;
        if self.open.get(stream) == Some(&capture) {
            let reason = format!("capture {capture} has not ended");
            return Err(AllocError::Capture { allocator, reason });
        }
        let (_, keeps) = self.all.remove(&capture).ok_or_else(|| no_capture(allocator, capture))?;
        Ok(keeps)
    }
}
