//! Stream capture and graphs on CUDA.
//!
//! A [`GraphId`] stands for an instance (`CUgraphExec`) and is never used again, so that a launch of a graph that is gone is an
//! error. The captured graph is destroyed as soon as its instance is made, as NVIDIA's sample `graphMemoryNodes` does.

use super::{CudaDriver, check, refusal};
use crate::{CallKind, DriverResult, GraphDriver, GraphId, PoolCounters, StreamId};
use cudarc::driver::sys::{
    self, CUgraph, CUgraphExec, CUgraphInstantiate_flags, CUgraphMem_attribute, CUresult, CUstream, CUstreamCaptureMode,
};
use std::ptr;

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
            // Its result does not matter: the error that is returned says what went wrong first.
            // SAFETY: the instance was made above, was never launched, and no other code has its handle.
            unsafe { sys::cuGraphExecDestroy(instance) };
        })
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
        let _entered = self.enter(call)?;
        // SAFETY: as in `capture_end`; the context is current.
        let result = unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) };
        if !graph.is_null() {
            // SAFETY: the graph was captured above and no other code has its handle.
            unsafe { sys::cuGraphDestroy(graph) };
        }
        match result {
            // The capture was no longer whole, and has ended all the same.
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED => Ok(()),
            result => check(call, result),
        }
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
            // SAFETY: a live graph of this driver, which no other call finds any more; the caller promises that its last
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
