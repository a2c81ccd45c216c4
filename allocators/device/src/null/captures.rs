//! Stream capture and graphs of the null device: which streams capture, and addresses that belong to graphs.

use super::{NullDriver, lock};
use crate::DriverError;
use crate::{CallKind, DeviceAddr, DriverResult, GraphDriver, GraphId, GraphMemory, StreamId};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Stream-ordered allocations of a capture or a graph: size by address.
#[derive(Debug, Default)]
struct Own {
    out: BTreeMap<u64, u64>,
    idle: BTreeMap<u64, u64>,
}

/// Captures by their stream, and graphs.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    captures: HashMap<u64, Own>,
    graphs: HashMap<u64, Own>,
    memory: GraphMemory,
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
        let own = graphs.captures.get_mut(&stream.get())?;
        if let Some(addr) = own.idle.iter().find(|(_, size)| **size == bytes).map(|(addr, _)| *addr) {
            own.idle.remove(&addr);
            own.out.insert(addr, bytes);
            return Some(Ok(DeviceAddr::handed_out(addr)));
        }
        Some(self.take_async(bytes, None).inspect(|addr| {
            own.out.insert(addr.get(), bytes);
            let memory = &mut graphs.memory;
            memory.used += bytes;
            memory.used_high = memory.used_high.max(memory.used);
            // As with its pools: nothing is held beyond what is used.
            (memory.reserved, memory.reserved_high) = (memory.used, memory.used_high);
        }))
    }

    /// A free on a stream that captures; `None` on one that does not.
    pub(super) fn free_captured(&self, addr: DeviceAddr, stream: StreamId) -> Option<DriverResult<()>> {
        let graphs = &mut *lock(&self.graphs);
        let own = graphs.captures.get_mut(&stream.get())?;
        let Some(bytes) = own.out.remove(&addr.get()) else {
            let context = format!("no block of the capture at {:#x}", addr.get());
            return Some(Err(DriverError::invalid_value(CallKind::MemFreeAsync, context)));
        };
        own.idle.insert(addr.get(), bytes);
        Some(Ok(()))
    }

    fn end(&self, graphs: &mut Graphs, call: CallKind, stream: StreamId) -> DriverResult<Own> {
        let own = graphs
            .captures
            .remove(&stream.get())
            .ok_or_else(|| DriverError::illegal_state(call, "the stream does not capture"))?;
        self.capturing.fetch_sub(1, Release);
        Ok(own)
    }

    fn drop_own(&self, graphs: &mut Graphs, call: CallKind, own: &Own) -> DriverResult<()> {
        for addr in own.out.keys().chain(own.idle.keys()).filter_map(|addr| DeviceAddr::new(*addr)) {
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
        graphs.captures.insert(stream.get(), Own::default());
        self.capturing.fetch_add(1, Release);
        Ok(())
    }

    fn capture_end(&self, stream: StreamId) -> DriverResult<GraphId> {
        let graphs = &mut *lock(&self.graphs);
        let own = self.end(graphs, CallKind::CaptureEnd, stream)?;
        let id = self.next_handle.fetch_add(1, Relaxed);
        graphs.graphs.insert(id, own);
        Ok(GraphId::made(id))
    }

    fn capture_abort(&self, stream: StreamId) -> DriverResult<()> {
        let graphs = &mut *lock(&self.graphs);
        let own = self.end(graphs, CallKind::CaptureAbort, stream)?;
        self.drop_own(graphs, CallKind::CaptureAbort, &own)
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
        let own = graphs.graphs.remove(&graph.get());
        let no_graph = || DriverError::no_such(call, "graph", graph.get());
        self.drop_own(graphs, call, &own.ok_or_else(no_graph)?)
    }

    fn graph_memory(&self) -> DriverResult<GraphMemory> {
        Ok(lock(&self.graphs).memory)
    }

    fn graph_trim(&self) -> DriverResult<()> {
        Ok(())
    }
}
