//! Stream capture and graphs of the null device: capturing streams, and addresses that belong to graphs.

use super::{NullDriver, lock};
use crate::DriverError;
use crate::graph::CapturedMemory;
use crate::{CallKind, CapturedWork, DeviceAddr, DriverResult, GraphDriver, GraphId, PoolCounters, StreamId};
use std::collections::HashMap;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Captures by their stream, and graphs.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    captures: HashMap<u64, CapturedMemory>,
    graphs: HashMap<u64, CapturedMemory>,
    memory: PoolCounters,
}

impl Graphs {
    pub(super) fn is_capturing(&self, stream: StreamId) -> bool {
        self.captures.contains_key(&stream.get())
    }
}

impl NullDriver {
    /// An allocation on a stream that captures; `None` on one that does not.
    pub(super) fn alloc_captured(&self, bytes: u64, stream: StreamId) -> Option<DriverResult<DeviceAddr>> {
        let graphs = &mut *lock(&self.graphs);
        let blocks = graphs.captures.get_mut(&stream.get())?;
        if let Some(addr) = blocks.reuse(bytes) {
            return Some(Ok(DeviceAddr::handed_out(addr)));
        }
        Some(self.take_async(bytes, None).inspect(|addr| {
            blocks.add(addr.get(), bytes);
            // As with its pools, reserved and used memory are equal.
            graphs.memory.take(bytes, graphs.memory.used + bytes);
        }))
    }

    /// A free on a stream that captures; `None` on one that does not.
    pub(super) fn free_captured(&self, addr: DeviceAddr, stream: StreamId) -> Option<DriverResult<()>> {
        let graphs = &mut *lock(&self.graphs);
        Some(graphs.captures.get_mut(&stream.get())?.free(CallKind::MemFreeAsync, addr))
    }

    fn end(&self, graphs: &mut Graphs, call: CallKind, stream: StreamId) -> DriverResult<CapturedMemory> {
        let blocks = graphs
            .captures
            .remove(&stream.get())
            .ok_or_else(|| DriverError::illegal_state(call, "the stream does not capture"))?;
        self.capturing.fetch_sub(1, Release);
        Ok(blocks)
    }

    fn drop_own(&self, graphs: &mut Graphs, call: CallKind, own: &CapturedMemory) -> DriverResult<()> {
        for addr in own.addresses().filter_map(DeviceAddr::new) {
            graphs.memory.used -= self.give(call, addr)?.0;
            graphs.memory.reserved = graphs.memory.used;
        }
        Ok(())
    }
}

impl GraphDriver for NullDriver {
    fn capture_begin(&self, stream: StreamId) -> DriverResult<()> {
        let graphs = &mut *lock(&self.graphs);
        if graphs.is_capturing(stream) {
            return Err(DriverError::illegal_state(CallKind::CaptureBegin, "the stream captures already"));
        }
        graphs.captures.insert(stream.get(), CapturedMemory::default());
        self.capturing.fetch_add(1, Release);
        Ok(())
    }

    fn capture_end(&self, stream: StreamId) -> DriverResult<GraphId> {
        let graphs = &mut *lock(&self.graphs);
        let blocks = self.end(graphs, CallKind::CaptureEnd, stream)?;
        let id = self.next_handle.fetch_add(1, Relaxed);
        graphs.graphs.insert(id, blocks);
        Ok(GraphId::made(id))
    }

    fn capture_abort(&self, stream: StreamId) -> DriverResult<()> {
        let graphs = &mut *lock(&self.graphs);
        let blocks = self.end(graphs, CallKind::CaptureAbort, stream)?;
        self.drop_own(graphs, CallKind::CaptureAbort, &blocks)
    }

    /// Work has no order here: no work is known to follow other work.
    fn capture_front(&self, _stream: StreamId) -> DriverResult<Option<CapturedWork>> {
        Ok(None)
    }

    fn capture_past(&self, _stream: StreamId, _past: &mut CapturedWork) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn graph_launch(&self, graph: GraphId, _stream: StreamId) -> DriverResult<()> {
        if lock(&self.graphs).graphs.contains_key(&graph.get()) {
            return Ok(());
        }
        Err(DriverError::no_such(CallKind::GraphLaunch, "graph", graph.get()))
    }

    unsafe fn graph_destroy(&self, graph: GraphId) -> DriverResult<()> {
        let call = CallKind::GraphDestroy;
        let graphs = &mut *lock(&self.graphs);
        let blocks = graphs.graphs.remove(&graph.get());
        let no_graph = || DriverError::no_such(call, "graph", graph.get());
        self.drop_own(graphs, call, &blocks.ok_or_else(no_graph)?)
    }

    fn graph_memory(&self) -> DriverResult<PoolCounters> {
        Ok(lock(&self.graphs).memory)
    }

    fn graph_trim(&self) -> DriverResult<()> {
        Ok(())
    }
}
