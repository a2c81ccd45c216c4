//! Frees inside a capture of blocks that other streams use there (PyTorch's `graph_capture_record_stream_reuse`).
//!
//! Inside a capture no event reports that a use has completed, so by default such a block becomes reusable at the end. With this
//! part the order of the graph's nodes decides: a freed block remembers the last nodes of its own stream and of the streams that
//! use it. It is reusable for a request of its stream when that stream's next work follows all of these nodes, because streams
//! joined.
//!
//! *Cost.* Each node of a graph is visited once for each stream, in a request that could use such a block.
//!
//! *Source.* PyTorch 2.9 and later, `record_free_markers` and `free_safe_blocks_in_capture` of `c10/cuda/CUDACachingAllocator.cpp`.

use super::pending::Freed;
use std::collections::BTreeMap;
use vramlab_device::{CapturedWork, Driver, DriverError, StreamId};

/// A block that was freed in a capture.
#[derive(Clone, Debug)]
struct Waiting<B> {
    freed: Freed<B>,
    /// The last nodes of the streams.
    behind: CapturedWork,
}

/// The blocks that were freed in captures which are open, or were open at the last request.
#[derive(Debug)]
pub(super) struct Captured<B> {
    waiting: Vec<Waiting<B>>,
    /// Nodes that the next work of a stream follows, as far as known.
    past: BTreeMap<StreamId, CapturedWork>,
}

impl<B> Default for Captured<B> {
    fn default() -> Self {
        Self { waiting: Vec::new(), past: BTreeMap::new() }
    }
}

/// The last nodes of these streams in the capture that they share; `None` if there is no such capture or it is empty.
fn front(driver: &dyn Driver, streams: impl Iterator<Item = StreamId>) -> Result<Option<CapturedWork>, DriverError> {
    let Some(graphs) = driver.graphs() else { return Ok(None) };
    let mut all = CapturedWork::default();
    for stream in streams {
        let Some(mut front) = graphs.capture_front(stream)? else { return Ok(None) };
        if all.capture != 0 && all.capture != front.capture {
            return Ok(None);
        }
        all.capture = front.capture;
        all.nodes.append(&mut front.nodes);
    }
    Ok(Some(all).filter(|all| !all.nodes.is_empty()))
}

impl<B: Copy> Captured<B> {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a freed block; false if one of its streams is not in a capture.
    ///
    /// # Errors
    /// Those of the driver; the block was not added then.
    pub(super) fn add(&mut self, driver: &dyn Driver, freed: &Freed<B>) -> Result<bool, DriverError> {
        let streams = std::iter::once(freed.stream).chain(freed.users.iter().copied());
        let Some(behind) = front(driver, streams)? else { return Ok(false) };
        if self.waiting.is_empty() {
            // State of ended captures is obsolete.
            self.past.retain(|_, past| past.capture == behind.capture);
        }
        self.waiting.push(Waiting { freed: freed.clone(), behind });
        Ok(true)
    }

    /// Removes a stream whose work has completed, once the captures have ended.
    pub(super) fn forget_stream(&mut self, stream: StreamId) {
        self.waiting.iter_mut().for_each(|waiting| waiting.freed.users.retain(|user| *user != stream));
    }

    /// Moves the blocks of a stream that its next work follows to `done`.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn find_reusable(
        &mut self,
        driver: &dyn Driver,
        stream: StreamId,
        done: &mut Vec<B>,
    ) -> Result<(), DriverError> {
        let Some(graphs) = driver.graphs() else { return Ok(()) };
        if self.waiting.iter().all(|waiting| waiting.freed.stream != stream) {
            return Ok(());
        }
        let past = self.past.entry(stream).or_default();
        graphs.capture_past(stream, past)?;
        self.waiting.retain(|Waiting { freed, behind }| {
            let over = freed.stream == stream && behind.capture == past.capture && behind.nodes.is_subset(&past.nodes);
            done.extend(over.then_some(freed.block));
            !over
        });
        Ok(())
    }

    /// Every block: no capture is open any more.
    pub(super) fn take(&mut self) -> Vec<Freed<B>> {
        self.past.clear();
        std::mem::take(&mut self.waiting).into_iter().map(|waiting| waiting.freed).collect()
    }
}
