//! Graphs: the work of a stream captured once and launched many times.

use super::{CallKind, DeviceAddr, DriverError, DriverResult, GraphId, PoolCounters, StreamId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// Number of open captures that the driver did not begin, see [`Driver::note_capture`](super::Driver::note_capture).
#[derive(Debug, Default)]
pub(crate) struct NotedCaptures(AtomicUsize);

impl NotedCaptures {
    /// Counts a begin or an end; an end without a begin has no effect.
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

/// Memory of a capture or a graph: size by address, of allocated and of freed blocks.
#[derive(Debug, Default)]
pub(crate) struct CapturedMemory {
    out: BTreeMap<u64, u64>,
    idle: BTreeMap<u64, u64>,
}

impl CapturedMemory {
    /// Allocates a freed block of this size again: the lowest.
    pub(crate) fn reuse(&mut self, bytes: u64) -> Option<u64> {
        let addr = *self.idle.iter().find(|(_, size)| **size == bytes)?.0;
        self.idle.remove(&addr);
        self.out.insert(addr, bytes);
        Some(addr)
    }

    /// Adds a new block, which is allocated.
    pub(crate) fn add(&mut self, addr: u64, bytes: u64) {
        self.out.insert(addr, bytes);
    }

    /// Frees a block, if it is allocated.
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

/// Work of one capture, as nodes of its graph. The driver's numbers are valid while the capture is open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapturedWork {
    /// Number of the capture, unique in the process. 0 is none.
    pub capture: u64,
    /// The nodes.
    pub nodes: BTreeSet<u64>,
}

impl CapturedWork {
    /// Removes nodes of another capture.
    pub(crate) fn keep_of(&mut self, capture: u64) {
        if self.capture != capture {
            *self = Self { capture, nodes: BTreeSet::new() };
        }
    }

    /// Adds nodes and their dependencies, as `before` returns them. Where a node is known, so are all its dependencies.
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
/// # The effects of a capture
/// Between [`capture_begin`](Self::capture_begin) and [`capture_end`](Self::capture_end) work that is queued on the stream is
/// recorded and not run: kernels, fills, copies from page-locked memory, stream-ordered allocations and frees. A stream that waits
/// for an event recorded in the capture joins it; the first stream must wait for the work of the joined ones before the end. Plain
/// memory is allocated and freed immediately, as outside of a capture (CUDA's relaxed mode).
///
/// Waiting for a capturing stream, for the device or for a captured event, and querying them, fails with
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` or `CUDA_ERROR_CAPTURED_EVENT`; so do calls that wait by themselves, such as a copy to
/// the host. The capture is then invalid: its end is an error. A copy from pageable memory must not be captured, because a launch
/// would read the source again.
/// <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html>
pub trait GraphDriver {
    /// Starts to capture the work queued on `stream`.
    fn capture_begin(&self, stream: StreamId) -> DriverResult<()>;

    /// Ends the capture and makes its graph ready for its first launch. Memory that a launch allocates and does not free is freed
    /// by the next launch. After an error there is no graph, and the stream does not capture any more unless it never did.
    fn capture_end(&self, stream: StreamId) -> DriverResult<GraphId>;

    /// Ends the capture, also one that has become invalid, and discards the captured work.
    fn capture_abort(&self, stream: StreamId) -> DriverResult<()>;

    /// The nodes that the next work of `stream` will depend on directly, in the stream's capture; `None` where it has none, or an
    /// invalid one. Does not disturb the capture.
    fn capture_front(&self, stream: StreamId) -> DriverResult<Option<CapturedWork>>;

    /// Adds all nodes of its capture that the next work of `stream` follows to `past`, which is the result of an earlier call for
    /// the same stream, or empty. No effect where the stream is not in a capture. O(new nodes).
    fn capture_past(&self, stream: StreamId, past: &mut CapturedWork) -> DriverResult<()>;

    /// Launches the captured work: one call for any number of kernels. Launches of one graph run one after another, also on
    /// different streams.
    ///
    /// A graph that was destroyed, or that another driver made, is `CUDA_ERROR_INVALID_HANDLE`.
    ///
    /// # Safety
    /// The memory that captured work uses is still reserved: blocks of the capture belong to the graph until
    /// `GraphMemory::capture_release`.
    unsafe fn graph_launch(&self, graph: GraphId, stream: StreamId) -> DriverResult<()>;

    /// Destroys a graph; the addresses of its stream-ordered allocations are free for other graphs.
    ///
    /// # Safety
    /// The graph came from [`capture_end`](Self::capture_end), is destroyed once and not used afterwards, and its last
    /// launch has finished.
    unsafe fn graph_destroy(&self, graph: GraphId) -> DriverResult<()>;

    /// The device's counters of memory that graphs allocate for themselves. They cover the graphs of all programs on the device.
    /// Plain memory that captured kernels use is not included.
    fn graph_memory(&self) -> DriverResult<PoolCounters>;

    /// Releases memory that is reserved for graphs and unused.
    fn graph_trim(&self) -> DriverResult<()>;
}
