//! Memory of graphs: each capture has a private pool, which serves no other request.

use super::{Policy, State};
use crate::backends::captures::need_graphs;
use crate::contract::{AllocError, CaptureId};
use crate::policy::grow::release_private;
use crate::space::BlockId;
use vramlab_device::StreamId;

/// The state of a capture.
#[derive(Debug)]
pub(super) struct Kept {
    /// Its private pool.
    pub(super) private: Option<CaptureId>,
    /// Blocks whose free is deferred to the end.
    waiting: Vec<BlockId>,
}

impl<P: Policy> State<P> {
    pub(super) fn begin_capture(&mut self, name: &'static str, stream: StreamId) -> Result<CaptureId, AllocError> {
        need_graphs(name, self.heap.source().driver().as_ref())?;
        self.captures.need_none_on(name, stream)?;
        let capture = self.captures.begin(stream, |id| Kept { private: Some(id), waiting: Vec::new() });
        self.heap.begin_capture(capture);
        Ok(capture)
    }

    /// Defers the free of a block to the end of its stream's capture; false when there is no such capture.
    ///
    /// A block from before the capture is freed at the end. A block of the capture is reusable immediately, unless another stream
    /// uses it in the graph.
    pub(super) fn defer_to_capture(&mut self, block: BlockId) -> bool {
        let owner = self.heap.space()[block].list.owner;
        let Some(kept) = self.captures.open_on(owner.stream) else { return false };
        if owner.private == kept.private {
            if self.heap.reuses_in_captures() {
                return false;
            }
            // The other streams' work is a part of the graph, and completes with it.
            if self.heap.take_uses(block).is_empty() {
                return false;
            }
        } else if owner.private.is_some() {
            // Of an earlier capture of the stream.
            return false;
        }
        self.heap.space_mut().defer(block);
        kept.waiting.push(block);
        true
    }

    /// Frees a block whose free was deferred to the end of a capture; uses on other streams are waited for now.
    fn free_after_capture(&mut self, block: BlockId) -> Result<(), AllocError> {
        let users = self.heap.take_uses(block);
        self.policy.free(&mut self.heap, block, &users).map(|_| ())
    }

    pub(super) fn end_capture(&mut self, name: &'static str, capture: CaptureId) -> Result<(), AllocError> {
        let (stream, kept) = self.captures.find_open(name, capture)?;
        let waiting = std::mem::take(&mut kept.waiting);
        self.captures.end(stream);
        self.heap.end_capture();
        let (blocks, bytes) = self.heap.space().held_where(|list| list.owner.private == Some(capture));
        let mut freed = Ok(());
        for block in waiting {
            freed = freed.and(self.free_after_capture(block));
        }
        if blocks > 0 {
            return Err(AllocError::CaptureLive { allocator: name, blocks, bytes });
        }
        freed
    }

    pub(super) fn release_capture(&mut self, name: &'static str, capture: CaptureId) -> Result<(), AllocError> {
        self.captures.release(name, capture)?;
        self.heap.unpin(capture);
        release_private(&mut self.heap, capture)?;
        Ok(())
    }

    /// Lets every segment be released, whatever captures there were; frees deferred to the end of a capture take effect.
    pub(super) fn end_all_captures(&mut self) {
        self.heap.unpin_all();
        let mut captures = std::mem::take(&mut self.captures);
        for block in captures.each().flat_map(|(_, kept)| std::mem::take(&mut kept.waiting)) {
            // An error cannot be returned here; the block then waits like any other.
            let _ = self.free_after_capture(block);
        }
    }
}
