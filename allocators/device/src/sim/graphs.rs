//! Stream capture and graphs of the simulated device.
//!
//! A capture records queued work and its costs; a launch costs the host one call and runs the recorded work, one piece after
//! another, with a gap between two instead of the cost of a launch each. Nothing is computed, neither during the capture nor at a
//! launch: the caller that launches the graph computes the kernels with their fills and copies. A launch runs its nodes in the
//! order of the calls, on joined streams too; it is not checked that these are joined to the first one again before the end. The
//! order of the streams is known only during the capture.
//!
//! Stream-ordered allocations of a capture come from a heap of their own that all graphs share. An address belongs to its capture
//! and then its graph until that is destroyed, and so does its host memory. Within a capture a freed block serves the next request
//! that rounds to the same size. (The behaviour of a GPU's driver there is not visible.)

use super::heap::{Heap, Packing};
use super::timeline::{Mark, Order};
use super::{LARGE_BASE, PoolMemory, RANGE, SimDriver, State};
use crate::DriverError;
use crate::graph::CapturedMemory;
use crate::{CallKind, CapturedWork, DeviceAddr, DriverResult, EventId, GraphDriver, GraphId, PoolCounters, StreamId};
use std::collections::{BTreeMap, BTreeSet};

/// Between plain memory and pools.
const GRAPH_BASE: u64 = LARGE_BASE + RANGE;

/// Work that is queued on a stream, or that a launch of a graph runs.
#[derive(Debug)]
pub(super) struct Node {
    work: Work,
    bytes: u64,
    /// Address and bytes of the buffers that it reads and writes.
    buffers: Vec<(u64, u64)>,
}

#[derive(Debug)]
enum Work {
    Kernel {
        name: String,
        geometry: (u64, u64),
    },
    /// A copy to or from the device.
    Copy,
    /// A sum over all ranks.
    AllReduce,
    /// An allocation or a free: no work, but a place in the order.
    Memory,
}

impl Node {
    const MEMORY: Self = Self { work: Work::Memory, bytes: 0, buffers: Vec::new() };

    pub(super) fn kernel(name: &str, geometry: (u64, u64), bytes: u64, buffers: &[(u64, u64)]) -> Self {
        Self { work: Work::Kernel { name: name.to_owned(), geometry }, bytes, buffers: buffers.to_vec() }
    }

    pub(super) fn all_reduce(addr: u64, bytes: u64) -> Self {
        Self { work: Work::AllReduce, bytes, buffers: vec![(addr, bytes)] }
    }

    /// A copy between the host and this address of the device.
    pub(super) fn copy(addr: u64, bytes: u64) -> Self {
        Self { work: Work::Copy, bytes, buffers: vec![(addr, bytes)] }
    }
}

#[derive(Debug)]
struct Capture {
    /// The stream that began it.
    origin: u64,
    nodes: Vec<Node>,
    /// The dependencies of each node.
    after: Vec<BTreeSet<u64>>,
    own: CapturedMemory,
    /// The reason why it cannot become a graph.
    invalid: Option<CallKind>,
}

#[derive(Debug)]
struct Graph {
    nodes: Vec<Node>,
    own: CapturedMemory,
    /// Time at which its last launch completes.
    last: Option<Mark>,
}

/// Captures and graphs.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    /// The capture that a stream is part of, and the dependencies of its next work there.
    capturing: BTreeMap<u64, CapturedWork>,
    captures: BTreeMap<u64, Capture>,
    /// The capture that an event was recorded in, and its nodes there.
    events: BTreeMap<u64, CapturedWork>,
    graphs: BTreeMap<u64, Graph>,
    next: u64,
    heap: Option<Heap>,
    counters: PoolCounters,
}

impl Graphs {
    pub(super) fn held_bytes(&self) -> u64 {
        self.heap.as_ref().map_or(0, Heap::held_bytes)
    }

    pub(super) fn is_capturing(&self, stream: StreamId) -> bool {
        self.capturing.contains_key(&stream.get())
    }

    fn capture(&mut self, stream: StreamId) -> Option<&mut Capture> {
        self.captures.get_mut(&self.capturing.get(&stream.get())?.capture)
    }

    /// Records work of a stream that is captured.
    fn push(&mut self, stream: StreamId, node: Node) {
        let Some(front) = self.capturing.get_mut(&stream.get()) else { return };
        let Some(capture) = self.captures.get_mut(&front.capture) else { return };
        let number = capture.nodes.len() as u64;
        capture.nodes.push(node);
        capture.after.push(std::mem::replace(&mut front.nodes, BTreeSet::from([number])));
    }

    pub(super) fn forget_event(&mut self, event: EventId) {
        self.events.remove(&event.get());
    }

    /// Ends the capture of the stream that began it.
    fn end(&mut self, call: CallKind, stream: StreamId) -> DriverResult<Capture> {
        let illegal = || DriverError::illegal_state(call, "the stream does not capture");
        let id = self.capturing.get(&stream.get()).ok_or_else(illegal)?.capture;
        if self.captures.get(&id).is_some_and(|capture| capture.origin != stream.get()) {
            let context = "another stream began the capture";
            return Err(DriverError::new(call, DriverError::STREAM_CAPTURE_UNMATCHED, context));
        }
        self.capturing.retain(|_, front| front.capture != id);
        self.events.retain(|_, front| front.capture != id);
        self.captures.remove(&id).ok_or_else(illegal)
    }
}

impl State {
    /// Returns the blocks of a capture or a graph to the heap.
    fn free_own(&mut self, own: &CapturedMemory) {
        for addr in own.addresses() {
            self.host.unback(addr);
            let len = self.graphs.heap.as_mut().and_then(|heap| heap.free(addr, None));
            self.graphs.counters.used -= len.unwrap_or(0);
        }
    }

    /// Refuses a wait for a stream that is captured, or a query of it, and invalidates the capture.
    pub(super) fn refuse_capturing(&mut self, call: CallKind, stream: StreamId) -> DriverResult<()> {
        self.need_stream(call, stream)?;
        let Some(capture) = self.graphs.capture(stream) else { return Ok(()) };
        capture.invalid.get_or_insert(call);
        Err(DriverError::new(call, DriverError::STREAM_CAPTURE_UNSUPPORTED, "the stream is being captured"))
    }

    /// Refuses a wait for the device while anything is captured.
    pub(super) fn refuse_any_capture(&mut self, call: CallKind) -> DriverResult<()> {
        if self.graphs.captures.is_empty() {
            return Ok(());
        }
        for capture in self.graphs.captures.values_mut() {
            capture.invalid.get_or_insert(call);
        }
        Err(DriverError::new(call, DriverError::STREAM_CAPTURE_UNSUPPORTED, "a stream is being captured"))
    }

    /// Refuses a wait for an event that was recorded in a capture, or a query of it.
    pub(super) fn refuse_captured_event(&mut self, call: CallKind, event: EventId) -> DriverResult<()> {
        let Some(front) = self.graphs.events.get(&event.get()) else { return Ok(()) };
        if let Some(capture) = self.graphs.captures.get_mut(&front.capture) {
            capture.invalid.get_or_insert(call);
        }
        Err(DriverError::new(call, DriverError::CAPTURED_EVENT, "the event was recorded in a capture"))
    }

    /// Records an event on a stream that is captured; false when it is not.
    pub(super) fn record_captured(&mut self, event: EventId, stream: StreamId) -> bool {
        match self.graphs.capturing.get(&stream.get()).cloned() {
            Some(front) => {
                self.graphs.events.insert(event.get(), front);
                true
            }
            None => {
                self.graphs.events.remove(&event.get());
                false
            }
        }
    }

    /// Makes a stream wait where that is part of a capture, and join it; false where it is not.
    pub(super) fn wait_captured(&mut self, stream: StreamId, event: EventId, recorded: bool) -> DriverResult<bool> {
        let (own, of_event) = (self.graphs.capturing.get_mut(&stream.get()), self.graphs.events.get(&event.get()));
        match (own, of_event) {
            (None, None) => Ok(false),
            // A capture cannot wait for work outside of it; an event that was never recorded has none.
            (Some(_), None) if !recorded => Ok(true),
            (None, Some(front)) => {
                self.graphs.capturing.insert(stream.get(), front.clone());
                Ok(true)
            }
            (Some(own), Some(other)) if own.capture == other.capture => {
                own.nodes.extend(&other.nodes);
                Ok(true)
            }
            (Some(own), _) => {
                let call = CallKind::StreamWaitEvent;
                if let Some(capture) = self.graphs.captures.get_mut(&own.capture) {
                    capture.invalid.get_or_insert(call);
                }
                let context = "a capture cannot wait for work outside of it";
                Err(DriverError::new(call, DriverError::STREAM_CAPTURE_ISOLATION, context))
            }
        }
    }
}

impl SimDriver {
    /// A stream-ordered allocation on a stream that is captured.
    pub(super) fn alloc_captured(
        &self,
        state: &mut State,
        costs: &PoolMemory,
        bytes: u64,
        stream: StreamId,
    ) -> DriverResult<DeviceAddr> {
        let call = CallKind::MemAllocAsync;
        let budget = self.free_bytes(state);
        state.time.spend(costs.alloc_ns);
        let Some(len) = bytes.checked_next_multiple_of(costs.align_bytes) else {
            return Err(DriverError::out_of_memory(call));
        };
        let graphs = &mut state.graphs;
        let of_stream = graphs.capturing.get(&stream.get());
        let Some(capture) = of_stream.and_then(|front| graphs.captures.get_mut(&front.capture)) else {
            return Err(DriverError::illegal_state(call, "the stream does not capture"));
        };
        let addr = match capture.own.reuse(len) {
            Some(addr) => addr,
            None => {
                let new = || Heap::new(GRAPH_BASE, RANGE, costs.granule_bytes, costs.align_bytes, Packing::Across);
                let heap = graphs.heap.get_or_insert_with(new);
                let placed =
                    heap.place(len, budget, |_| Order::Usable).ok_or_else(|| DriverError::out_of_memory(call))?;
                self.back(call, &mut state.host, placed.addr, len).inspect_err(|_| _ = heap.free(placed.addr, None))?;
                graphs.counters.take(len, heap.held_bytes());
                capture.own.add(placed.addr, len);
                placed.addr
            }
        };
        graphs.push(stream, Node::MEMORY);
        Ok(DeviceAddr::handed_out(addr))
    }

    /// A stream-ordered free on a stream that is captured: of a block of that capture.
    pub(super) fn free_captured(
        &self,
        state: &mut State,
        costs: &PoolMemory,
        addr: DeviceAddr,
        stream: StreamId,
    ) -> DriverResult<()> {
        state.time.spend(costs.free_ns);
        let call = CallKind::MemFreeAsync;
        let no_capture = || DriverError::illegal_state(call, "the stream does not capture");
        let capture = state.graphs.capture(stream).ok_or_else(no_capture)?;
        capture.own.free(call, addr)?;
        state.graphs.push(stream, Node::MEMORY);
        Ok(())
    }

    /// Queues work on a stream, or records it where the stream is captured.
    pub(super) fn queue(&self, state: &mut State, stream: StreamId, node: Node) {
        if state.graphs.is_capturing(stream) {
            state.graphs.push(stream, node);
            return;
        }
        self.start(state, stream, &node);
    }

    /// Queues work that all ranks do together, or records it where the stream is captured.
    pub(super) fn queue_collective(&self, state: &mut State, stream: StreamId, node: Node) -> DriverResult<()> {
        if state.graphs.is_capturing(stream) {
            state.graphs.push(stream, node);
            return Ok(());
        }
        self.meet(state, stream, node.bytes)?;
        self.start(state, stream, &node);
        Ok(())
    }

    /// Work on a stream that is not captured.
    fn start(&self, state: &mut State, stream: StreamId, node: &Node) {
        let duration = self.node_ns(state, node);
        state.time.enqueue(stream.get(), self.profile.queues.start_latency_ns, duration, 0);
        state.note_use(stream, &node.buffers);
    }

    /// Queues the nodes of a graph: what lies between two collectives is one piece of work, and each collective starts with the last
    /// rank.
    fn run_nodes(&self, state: &mut State, stream: StreamId, nodes: &[Node]) -> DriverResult<()> {
        let is_collective = |node: &Node| matches!(node.work, Work::AllReduce);
        for piece in nodes.chunk_by(|_, next| !is_collective(next)) {
            if let Some(collective) = piece.first().filter(|node| is_collective(node)) {
                self.meet(state, stream, collective.bytes)?;
            }
            let work_ns = piece.iter().map(|node| self.node_ns(state, node)).sum();
            let gaps_ns = piece.len() as u64 * self.profile.graphs.node_gap_ns;
            state.time.enqueue(stream.get(), self.profile.queues.start_latency_ns, work_ns, gaps_ns);
        }
        Ok(())
    }

    /// Device time of a node that runs now.
    fn node_ns(&self, state: &mut State, node: &Node) -> u64 {
        // Data that are copied to the device pass through its cache and stay there.
        let missed = state.access(&node.buffers);
        match &node.work {
            Work::Kernel { name, geometry: (blocks, iterations) } => {
                self.profile.kernel_ns(name, *blocks, *iterations, node.bytes, missed)
            }
            Work::Copy => self.profile.copies.to_device_ns.at(node.bytes),
            Work::AllReduce => self.profile.links.all_reduce_ns(self.ranks(), node.bytes),
            Work::Memory => 0,
        }
    }
}

impl GraphDriver for SimDriver {
    fn capture_begin(&self, stream: StreamId) -> DriverResult<()> {
        let state = &mut *self.lock();
        state.need_stream(CallKind::CaptureBegin, stream)?;
        if state.graphs.is_capturing(stream) {
            let context = "the stream captures already";
            return Err(DriverError::illegal_state(CallKind::CaptureBegin, context));
        }
        let graphs = &mut state.graphs;
        graphs.next += 1;
        let (nodes, after, own) = (Vec::new(), Vec::new(), CapturedMemory::default());
        let capture = Capture { origin: stream.get(), nodes, after, own, invalid: None };
        graphs.captures.insert(graphs.next, capture);
        let front = CapturedWork { capture: graphs.next, nodes: BTreeSet::new() };
        graphs.capturing.insert(stream.get(), front);
        Ok(())
    }

    fn capture_end(&self, stream: StreamId) -> DriverResult<GraphId> {
        let call = CallKind::CaptureEnd;
        let state = &mut *self.lock();
        state.need_stream(call, stream)?;
        let capture = state.graphs.end(call, stream)?;
        if let Some(broken_by) = capture.invalid {
            state.free_own(&capture.own);
            let context = format!("{broken_by} is not allowed in a capture");
            return Err(DriverError::new(call, DriverError::STREAM_CAPTURE_INVALIDATED, context));
        }
        state.graphs.next += 1;
        let id = state.graphs.next;
        state.graphs.graphs.insert(id, Graph { nodes: capture.nodes, own: capture.own, last: None });
        Ok(GraphId::made(id))
    }

    fn capture_abort(&self, stream: StreamId) -> DriverResult<()> {
        let state = &mut *self.lock();
        state.need_stream(CallKind::CaptureAbort, stream)?;
        let capture = state.graphs.end(CallKind::CaptureAbort, stream)?;
        state.free_own(&capture.own);
        Ok(())
    }

    fn capture_front(&self, stream: StreamId) -> DriverResult<Option<CapturedWork>> {
        let state = &mut *self.lock();
        state.need_stream(CallKind::StreamIsCapturing, stream)?;
        let broken = state.graphs.capture(stream).is_none_or(|capture| capture.invalid.is_some());
        Ok(state.graphs.capturing.get(&stream.get()).filter(|_| !broken).cloned())
    }

    fn capture_past(&self, stream: StreamId, past: &mut CapturedWork) -> DriverResult<()> {
        let Some(front) = self.capture_front(stream)? else { return Ok(()) };
        past.keep_of(front.capture);
        let state = self.lock();
        let Some(capture) = state.graphs.captures.get(&front.capture) else { return Ok(()) };
        // CAST: an index of the list.
        let before = |node: u64| Ok(capture.after[node as usize].iter().copied().collect());
        past.add_past(front.nodes, before)
    }

    unsafe fn graph_launch(&self, graph: GraphId, stream: StreamId) -> DriverResult<()> {
        let call = CallKind::GraphLaunch;
        let state = &mut *self.lock();
        state.need_stream(call, stream)?;
        if state.graphs.is_capturing(stream) {
            let context = "a graph inside another one is not simulated";
            return Err(DriverError::new(call, DriverError::NOT_SUPPORTED, context));
        }
        // Removed while it runs through the device's clocks.
        let mut launched =
            state.graphs.graphs.remove(&graph.get()).ok_or_else(|| DriverError::no_such(call, "graph", graph.get()))?;
        state.time.spend(self.profile.graphs.launch_ns);
        if let Some(last) = launched.last {
            state.time.wait_for_mark(stream.get(), last);
        }
        let met = self.run_nodes(state, stream, &launched.nodes);
        launched.last = Some(state.time.mark(stream.get()));
        for node in &launched.nodes {
            state.note_use(stream, &node.buffers);
        }
        state.graphs.graphs.insert(graph.get(), launched);
        met
    }

    unsafe fn graph_destroy(&self, graph: GraphId) -> DriverResult<()> {
        let state = &mut *self.lock();
        let graph_state = state.graphs.graphs.remove(&graph.get());
        let graph_state =
            graph_state.ok_or_else(|| DriverError::no_such(CallKind::GraphDestroy, "graph", graph.get()))?;
        state.free_own(&graph_state.own);
        Ok(())
    }

    fn graph_memory(&self) -> DriverResult<PoolCounters> {
        let mut state = self.lock();
        // Four attributes, as with a pool.
        state.time.spend(4 * self.profile.pool.as_ref().map_or(0, |costs| costs.attribute_ns));
        Ok(PoolCounters { reserved: state.graphs.held_bytes(), ..state.graphs.counters })
    }

    fn graph_trim(&self) -> DriverResult<()> {
        let state = &mut *self.lock();
        let Some(costs) = &self.profile.pool else { return Ok(()) };
        let released = state.graphs.heap.as_mut().map_or(0, |heap| heap.release(0));
        state.time.spend(costs.attribute_ns + released * costs.release_ns_per_granule);
        Ok(())
    }
}
