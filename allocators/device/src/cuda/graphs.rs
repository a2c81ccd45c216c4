//! Stream capture and graphs on CUDA.
//!
//! A [`GraphId`] identifies an instance (`CUgraphExec`) and is never reused, so that a launch of a destroyed graph is an error. The
//! captured graph is destroyed as soon as its instance is made, as in NVIDIA's sample `graphMemoryNodes`.

use super::{CudaDriver, check, refusal};
use crate::{CallKind, CapturedWork, DriverResult, GraphDriver, GraphId, PoolCounters, StreamId};
use cudarc::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUgraph, CUgraphEdgeData, CUgraphExec, CUgraphInstantiate_flags,
    CUgraphMem_attribute, CUgraphNode, CUgraphNodeType, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};
use std::mem::MaybeUninit;
use std::sync::{MutexGuard, PoisonError};
use std::{ptr, slice};

impl CudaDriver {
    fn graph_attribute(&self, attribute: CUgraphMem_attribute) -> DriverResult<u64> {
        let mut value = 0u64;
        // SAFETY: the device is live, and the pointer is to a live u64, the type that the driver's reference gives for
        // each of these attributes.
        self.call(CallKind::GraphMemory, || unsafe {
            sys::cuDeviceGetGraphMemAttribute(self.device, attribute, (&raw mut value).cast())
        })?;
        Ok(value)
    }

    /// An instance of a captured graph, uploaded on `stream`.
    fn instantiate(&self, graph: CUgraph, stream: CUstream) -> DriverResult<CUgraphExec> {
        let mut instance: CUgraphExec = ptr::null_mut();
        let flags = u64::from(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH.0);
        // SAFETY: `graph` is live (the caller made it) and the pointer is to a live handle of the type that the call
        // writes.
        self.call(CallKind::CaptureEnd, || unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut instance, graph, flags)
        })?;
        // SAFETY: the instance was made above, and the stream is live (the caller looked it up).
        let uploaded = self.call(CallKind::CaptureEnd, || unsafe { sys::cuGraphUpload(instance, stream) });
        uploaded.map(|()| instance).inspect_err(|_| {
            // Its result is ignored: the returned error is that of the first failure.
            // SAFETY: the instance was made above, was never launched, and no other code has its handle.
            unsafe { sys::cuGraphExecDestroy(instance) };
        })
    }
}

/// The dependencies of a node.
///
/// # Safety
/// The node is of a graph that is not destroyed meanwhile, and a context is current.
unsafe fn dependencies(node: u64) -> DriverResult<Vec<u64>> {
    let call = CallKind::StreamIsCapturing;
    // CAST: a handle is stored as its value.
    let node = node as CUgraphNode;
    let mut count = 0usize;
    // SAFETY: the node is live (the caller's promise); without places for nodes and edges their number is written.
    let counted = unsafe { sys::cuGraphNodeGetDependencies_v2(node, ptr::null_mut(), ptr::null_mut(), &raw mut count) };
    check(call, counted)?;
    let mut nodes: Vec<CUgraphNode> = vec![ptr::null_mut(); count];
    if count > 0 {
        let edge = CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
        let mut edges = vec![edge; count];
        // SAFETY: as above, with a place for each node and each edge.
        let read =
            unsafe { sys::cuGraphNodeGetDependencies_v2(node, nodes.as_mut_ptr(), edges.as_mut_ptr(), &raw mut count) };
        check(call, read)?;
    }
    // CAST: a handle is stored as its value.
    Ok(nodes.into_iter().take(count).map(|node| node as u64).collect())
}

impl CudaDriver {
    fn captured(&self) -> MutexGuard<'_, ()> {
        self.captured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies `of` to the capture that a stream is a part of, and the nodes that its next work depends on. Their graph is live
    /// while `of` runs, with a context current: the lock excludes the ends of captures here, and the owner of an adopted stream
    /// promised it for the others.
    fn of_capture<T>(
        &self,
        stream: StreamId,
        of: impl FnOnce(u64, &[CUgraphNode]) -> DriverResult<T>,
    ) -> DriverResult<Option<T>> {
        let call = CallKind::StreamIsCapturing;
        let stream = self.stream(call, stream)?;
        let _no_end = self.captured();
        let _entered = self.enter(call)?;
        // Room for the status as a number, so that a value that cudarc's enum does not know does no harm.
        let (mut status, mut id, mut count) = (0u32, 0u64, 0usize);
        let mut nodes: *const CUgraphNode = ptr::null();
        let mut edges = ptr::null();
        // SAFETY: the stream is live (looked up above), and each pointer is to a live value of the type that the call writes
        // or null where it may be.
        let asked = unsafe {
            sys::cuStreamGetCaptureInfo_v3(
                stream,
                (&raw mut status).cast(),
                &raw mut id,
                ptr::null_mut(),
                &raw mut nodes,
                &raw mut edges,
                &raw mut count,
            )
        };
        if asked == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            // The legacy default stream, while a stream that it would wait for is captured.
            return Ok(None);
        }
        check(call, asked)?;
        // CAST: the enum's value. Of a broken capture nothing else was written.
        if status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32 {
            return Ok(None);
        }
        // SAFETY: the call wrote where `count` nodes lie, which stay there until the stream is called again.
        let nodes = if count == 0 { &[] } else { unsafe { slice::from_raw_parts(nodes, count) } };
        of(id, nodes).map(Some)
    }
}

/// The number of blocks that a node launches; `None` if it is not a kernel.
///
/// # Safety
/// As for [`dependencies`].
unsafe fn blocks(node: u64) -> DriverResult<Option<u64>> {
    let call = CallKind::StreamIsCapturing;
    // CAST: a handle is stored as its value.
    let node = node as CUgraphNode;
    // Room for the type as a number, so that a value that cudarc's enum does not know does no harm.
    let mut kind = 0u32;
    // SAFETY: the node is live (the caller's promise), and the pointer is to a live value of the enum's size.
    check(call, unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()) })?;
    // CAST: the enum's value.
    if kind != CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32 {
        return Ok(None);
    }
    let mut parameters = MaybeUninit::<CUDA_KERNEL_NODE_PARAMS>::zeroed();
    // SAFETY: the node is a live kernel, and the pointer is to room for its parameters, which the call writes.
    check(call, unsafe { sys::cuGraphKernelNodeGetParams_v2(node, parameters.as_mut_ptr()) })?;
    // SAFETY: written by the call; all its fields are numbers and pointers, for which zeros are valid, too.
    let parameters = unsafe { parameters.assume_init() };
    Ok(Some([parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ].into_iter().map(u64::from).product()))
}

impl CudaDriver {
    /// Number of blocks of each kernel that the next work of a stream follows in the stream's capture, in no particular order;
    /// empty where the stream is not in a capture. O(nodes).
    ///
    /// # Errors
    /// When the driver refuses a query.
    pub fn captured_blocks(&self, stream: StreamId) -> DriverResult<Vec<u64>> {
        let found = self.of_capture(stream, |capture, front| {
            let mut past = CapturedWork { capture, ..CapturedWork::default() };
            // CAST: handles are kept as their values.
            // SAFETY: nodes of the graph of an open capture, and a context is current, see `of_capture`.
            past.add_past(front.iter().map(|node| *node as u64), |node| unsafe { dependencies(node) })?;
            // SAFETY: as above.
            past.nodes
                .iter()
                .filter_map(|node| unsafe { blocks(*node) }.transpose())
                .collect::<DriverResult<Vec<u64>>>()
        });
        Ok(found?.unwrap_or_default())
    }
}

impl GraphDriver for CudaDriver {
    fn capture_begin(&self, stream: StreamId) -> DriverResult<()> {
        let stream = self.stream(CallKind::CaptureBegin, stream)?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live (looked up above).
        self.call(CallKind::CaptureBegin, || unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })
    }

    fn capture_end(&self, stream: StreamId) -> DriverResult<GraphId> {
        let call = CallKind::CaptureEnd;
        let stream = self.stream(call, stream)?;
        let mut graph: CUgraph = ptr::null_mut();
        let _not_looked_at = self.captured();
        // SAFETY: the stream is live (looked up above), and the pointer is to a live handle of the type that
        // the call writes.
        self.call(call, || unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) })?;
        if graph.is_null() {
            let context = "the capture ended without a graph".into();
            return Err(refusal(call, CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, context));
        }
        // CAST: a handle is kept as its value.
        let made = self.instantiate(graph, stream).map(|made| GraphId::made(self.live.graphs.insert_once(made as u64)));
        // A failure would leak the host's memory of the graph; the instance does not need it.
        // SAFETY: the graph was captured above, no other code has its handle, and its instance has a copy of its own.
        unsafe { sys::cuGraphDestroy(graph) };
        made
    }

    fn capture_abort(&self, stream: StreamId) -> DriverResult<()> {
        let call = CallKind::CaptureAbort;
        let stream = self.stream(call, stream)?;
        let mut graph: CUgraph = ptr::null_mut();
        let _not_looked_at = self.captured();
        let _entered = self.enter(call)?;
        // SAFETY: as in `capture_end`; the context is current.
        let result = unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) };
        if !graph.is_null() {
            // SAFETY: the graph was captured above and no other code has its handle.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        match result {
            // The capture was invalid, and has ended nevertheless.
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED => Ok(()),
            result => check(call, result),
        }
    }

    fn capture_front(&self, stream: StreamId) -> DriverResult<Option<CapturedWork>> {
        // CAST: handles are kept as their values.
        self.of_capture(stream, |capture, front| {
            Ok(CapturedWork { capture, nodes: front.iter().map(|node| *node as u64).collect() })
        })
    }

    fn capture_past(&self, stream: StreamId, past: &mut CapturedWork) -> DriverResult<()> {
        let extended = self.of_capture(stream, |capture, front| {
            past.keep_of(capture);
            // CAST: handles are kept as their values.
            // SAFETY: nodes of the graph of an open capture, and a context is current, see `of_capture`.
            past.add_past(front.iter().map(|node| *node as u64), |node| unsafe { dependencies(node) })
        });
        extended.map(|_| ())
    }

    unsafe fn graph_launch(&self, graph: GraphId, stream: StreamId) -> DriverResult<()> {
        let stream = self.stream(CallKind::GraphLaunch, stream)?;
        // CAST: a handle is kept as its value.
        let graph = self.live.graphs.get(CallKind::GraphLaunch, graph.get())? as CUgraphExec;
        // SAFETY: graph and stream are live (looked up above), and so is its memory (the caller's promise).
        self.call(CallKind::GraphLaunch, || unsafe { sys::cuGraphLaunch(graph, stream) })
    }

    unsafe fn graph_destroy(&self, graph: GraphId) -> DriverResult<()> {
        self.live.graphs.remove(CallKind::GraphDestroy, graph.get(), |raw| {
            // SAFETY: a live graph of this driver, which no other call can look up any more; the caller promises that its last
            // launch has finished.
            self.call(CallKind::GraphDestroy, || unsafe { sys::cuGraphExecDestroy(raw as CUgraphExec) })
        })
    }

    fn graph_memory(&self) -> DriverResult<PoolCounters> {
        let read = |which| self.graph_attribute(which);
        Ok(PoolCounters {
            used: read(CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT)?,
            used_high: read(CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)?,
            reserved: read(CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT)?,
            reserved_high: read(CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)?,
        })
    }

    fn graph_trim(&self) -> DriverResult<()> {
        // SAFETY: the device is live; only memory that no graph uses is touched.
        self.call(CallKind::GraphTrim, || unsafe { sys::cuDeviceGraphMemTrim(self.device) })
    }
}
