//! Graphs: the work of a stream captured once and launched many times.

use super::{CallKind, DeviceAddr, DriverError, DriverResult, GraphId, PoolCounters, StreamId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// How many captures a program has open that the driver did not begin, see [`Driver::note_capture`](super::Driver::note_capture).
#[derive(Debug, Default)]
pub(crate) struct NotedCaptures(AtomicUsize);

impl NotedCaptures {
    /// One more, or one less; an end without a beginning changes nothing.
    pub(crate) fn note(&self, open: bool) {
        if open {
            self.0.fetch_add(1, Release);
        } else {
            let _ = self.0.fetch_update(Release, Acquire, |open| open.checked_sub(1));
        }
    }

    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.0.load(Acquire) != 0
    }
}

/// Memory of a capture or a graph: size by address, of blocks that are out and of those that were freed.
#[derive(Debug, Default)]
pub(crate) struct CapturedMemory {
    out: BTreeMap<u64, u64>,
    idle: BTreeMap<u64, u64>,
}

impl CapturedMemory {
    /// Hands a freed block of this size out again: the lowest.
    pub(crate) fn reuse(&mut self, bytes: u64) -> Option<u64> {
        let addr = *self.idle.iter().find(|(_, size)| **size == bytes)?.0;
        self.idle.remove(&addr);
        self.out.insert(addr, bytes);
        Some(addr)
    }

    /// Takes in a new block, which is out.
    pub(crate) fn add(&mut self, addr: u64, bytes: u64) {
        self.out.insert(addr, bytes);
    }

    /// Takes a block back, if it is out.
    pub(crate) fn free(&mut self, call: CallKind, addr: DeviceAddr) -> DriverResult<()> {
        let none = || DriverError::invalid_value(call, format!("no block of the capture at {:#x}", addr.get()));
        let bytes = self.out.remove(&addr.get()).ok_or_else(none)?;
        self.idle.insert(addr.get(), bytes);
        Ok(())
    }

    /// The addresses of all blocks.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> {
        self.out.keys().chain(self.idle.keys()).copied()
    }
}

/// Work of one capture, as nodes of its graph. Their numbers are the driver's and mean something as long as the capture is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapturedWork {
    /// Which capture of the process it is; no two have the same number. 0 is none.
    pub capture: u64,
    /// The nodes.
    pub nodes: BTreeSet<u64>,
}

impl CapturedWork {
    /// Forgets what is of another capture.
    pub(crate) fn keep_of(&mut self, capture: u64) {
        if self.capture != capture {
            *self = Self { capture, nodes: BTreeSet::new() };
        }
    }

    /// Adds nodes and what they depend on, as `before` says. Where a node is known, so is all that it depends on.
    pub(crate) fn add_past<E>(
        &mut self,
        nodes: impl IntoIterator<Item = u64>,
        mut before: impl FnMut(u64) -> Result<Vec<u64>, E>,
    ) -> Result<(), E> {
        let mut left: Vec<u64> = nodes.into_iter().collect();
        while let Some(node) = left.pop() {
            if !self.nodes.contains(&node) {
                left.extend(before(node)?);
                self.nodes.insert(node);
            }
        }
        Ok(())
    }
}

/// Stream capture and graphs (`cuStreamBeginCapture`, `cuGraphLaunch`, ...).
///
/// # What a capture takes
/// Between [`capture_begin`](Self::capture_begin) and [`capture_end`](Self::capture_end) work that is queued on the
/// stream is noted and not run: kernels, fills, copies from page-locked memory, stream-ordered allocations and frees. A
/// stream that waits for an event recorded in the capture joins it; the first stream has to wait for the work of the
/// joined ones before the end. Plain memory is allocated and freed at once, as outside of a capture (CUDA's relaxed mode).
///
/// Waiting for a capturing stream, for the device or for a captured event, and asking after them, fails with
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` or `CUDA_ERROR_CAPTURED_EVENT`; so does what waits by itself, such as a copy to
/// the host. The capture is then invalid: its end is an error. A copy from pageable memory must not be captured, because
/// a launch would read the source again.
/// <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html>
pub trait GraphDriver {
    /// Starts to capture what is queued on `stream`.
    fn capture_begin(&self, stream: StreamId) -> DriverResult<()>;

    /// Ends the capture and makes its graph ready for its first launch. What a launch allocates and does not free is freed
    /// by the next launch. After an error there is no graph, and the stream no longer captures unless it never did.
    fn capture_end(&self, stream: StreamId) -> DriverResult<GraphId>;

    /// Ends the capture, also one that has become invalid, and throws away what was captured.
    fn capture_abort(&self, stream: StreamId) -> DriverResult<()>;

    /// The nodes that the next work of `stream` will depend on directly, in the capture that the stream is a part of; `None`
    /// where it is a part of none, or of one that is broken. Does not disturb the capture.
    fn capture_front(&self, stream: StreamId) -> DriverResult<Option<CapturedWork>>;

    /// Makes `past` all nodes of its capture that the next work of `stream` will come behind. `past` is what an earlier call for the
    /// same stream made of it, or empty. Nothing changes where the stream is in no capture. O(new nodes).
    fn capture_past(&self, stream: StreamId, past: &mut CapturedWork) -> DriverResult<()>;

    /// Queues everything that was captured: one call for any number of kernels. Launches of one graph run one after
    /// another, also on different streams.
    ///
    /// A graph that was destroyed, or that another driver made, is `CUDA_ERROR_INVALID_HANDLE`.
    ///
    /// # Safety
    /// The memory that captured work uses has not been given back: blocks of the capture belong to the graph until
    /// `GraphMemory::capture_release`.
    unsafe fn graph_launch(&self, graph: GraphId, stream: StreamId) -> DriverResult<()>;

    /// Destroys a graph; the addresses of its stream-ordered allocations are free for other graphs.
    ///
    /// # Safety
    /// The graph came from [`capture_end`](Self::capture_end), is destroyed once and not used afterwards, and its last
    /// launch has finished.
    unsafe fn graph_destroy(&self, graph: GraphId) -> DriverResult<()>;

    /// The device's account of memory that graphs allocate for themselves. It covers the graphs of all programs on the device.
    /// Plain memory that captured kernels use is not in it.
    fn graph_memory(&self) -> DriverResult<PoolCounters>;

    /// Gives back what is reserved for graphs and used by none.
    fn graph_trim(&self) -> DriverResult<()>;
}
