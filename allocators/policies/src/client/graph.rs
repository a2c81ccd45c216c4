//! Graphs with the memory of their kernels: the trainer's side of graph capture.

use crate::client::Memory;
use crate::contract::{AllocError, CaptureId};
use std::sync::Arc;
use vramlab_device::{CallKind, Driver, DriverError, GraphDriver, GraphId, StreamId};

/// An open capture. Work that is queued on the stream, and buffers that are allocated on it, belong to the graph. Dropping it ends
/// the capture without a graph.
///
/// The graph keeps the memory of the capture. Memory from before the capture that captured work uses must live as long as the
/// graph: the code that queues that work promises it (see [`Driver`]).
///
/// A capture can make [several graphs](Self::cut) that use the same memory one after another, as PyTorch's graphs of one pool do:
/// memory freed in one graph serves the next.
///
/// ```
/// # use vramlab_policies::backends::caching;
/// # use vramlab_device::{Driver, Profile, SimDriver, sim::SimMemory};
/// # use vramlab_policies::{Capture, Memory, Selection};
/// # use std::sync::Arc;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver: Arc<dyn Driver> = Arc::new(SimDriver::new(Profile::h200(), SimMemory::Host));
/// let memory = Memory::new(Selection::of(&caching::BACKEND).build(&driver)?);
/// let stream = driver.stream_create()?;
/// let capture = Capture::begin(&memory, &driver, stream)?;
/// let activations = memory.allocate(4096, stream)?;
/// // ... launch kernels on `stream` that use `activations` ...
/// drop(activations);
/// let mut graph = capture.end()?;
/// for _ in 0..1000 {
///     graph.launch(stream)?;
/// }
/// # graph.release()?;
/// # Ok(()) }
/// ```
#[must_use = "a dropped Capture discards the captured work"]
#[derive(Debug)]
pub struct Capture {
    memory: Arc<Memory>,
    driver: Arc<dyn Driver>,
    stream: StreamId,
    id: Option<CaptureId>,
    /// Complete graphs.
    made: Vec<GraphId>,
}

/// A captured graph, ready to be launched, and its pinned memory. When dropped, it waits for its last launch, is destroyed and
/// releases the memory; an error of that is returned by the next fallible call on the [`Memory`].
#[derive(Debug)]
pub struct Graph {
    memory: Arc<Memory>,
    driver: Arc<dyn Driver>,
    /// Until it is released; graphs in the order of their capture.
    held: Option<(Vec<GraphId>, CaptureId)>,
    /// Streams of launches since they were last waited for, that of the last launch at the end.
    launched_on: Vec<StreamId>,
}

/// The driver's graphs. A capture was begun through them, so the driver has them.
fn graphs(driver: &dyn Driver) -> &dyn GraphDriver {
    driver.graphs().expect("a capture should have found graphs when it began")
}

impl Capture {
    /// Begins to capture `stream`: the allocator first, then the driver.
    ///
    /// # Errors
    /// [`AllocError::Unsupported`] on a device without graphs, those of
    /// [`GraphMemory::capture_begin`](crate::contract::GraphMemory::capture_begin), and
    /// [`AllocError::Driver`] when the driver refuses. Nothing is captured then.
    pub fn begin(memory: &Arc<Memory>, driver: &Arc<dyn Driver>, stream: StreamId) -> Result<Self, AllocError> {
        memory.check()?;
        let id = memory.allocator().capture_begin(stream)?;
        let mut capture =
            Self { memory: Arc::clone(memory), driver: Arc::clone(driver), stream, id: Some(id), made: Vec::new() };
        let begun = driver.graphs().map(|graphs| graphs.capture_begin(stream)).transpose();
        match begun {
            Ok(Some(())) => Ok(capture),
            Ok(None) => {
                capture.give_up(id);
                let (allocator, device) = (memory.allocator().name(), driver.describe().name);
                Err(AllocError::Unsupported { allocator, capability: "graph capture", device })
            }
            Err(error) => {
                capture.give_up(id);
                Err(error.into())
            }
        }
    }

    fn over(&self) -> AllocError {
        AllocError::Capture { allocator: self.memory.allocator().name(), reason: "it is over".into() }
    }

    /// Makes a graph of the work captured so far and continues with the next one, which uses the same memory. [`Graph::launch_nth`]
    /// launches them by number. Buffers of the capture must be freed before, as at its end.
    ///
    /// # Errors
    /// [`AllocError::Driver`] when the capture was incomplete, its graph could not be made, or the next one is refused. The capture
    /// has ended then and its memory is released.
    pub fn cut(&mut self) -> Result<(), AllocError> {
        let id = self.id.ok_or_else(|| self.over())?;
        let graphs = graphs(self.driver.as_ref());
        let made = graphs.capture_end(self.stream);
        let next = made.and_then(|graph| {
            self.made.push(graph);
            graphs.capture_begin(self.stream)
        });
        next.map_err(|error| {
            self.abort();
            self.give_up(id);
            error.into()
        })
    }

    /// Ends the capture and makes the graph.
    ///
    /// # Errors
    /// [`AllocError::Driver`] when the capture was incomplete or its graph could not be made, [`AllocError::CaptureLive`] when
    /// buffers of the capture are still live. There is no graph then, and its memory is released.
    pub fn end(mut self) -> Result<Graph, AllocError> {
        let id = self.id.take().ok_or_else(|| self.over())?;
        let made = graphs(self.driver.as_ref()).capture_end(self.stream);
        if made.is_err() {
            self.abort();
        }
        let ended = self.memory.allocator().capture_end(id);
        let complete = match (made, ended) {
            (Ok(graph), ended) => {
                self.made.push(graph);
                ended
            }
            (Err(error), ended) => {
                self.note(ended);
                Err(error.into())
            }
        };
        if let Err(error) = complete {
            self.destroy();
            self.note(self.memory.allocator().capture_release(id));
            return Err(error);
        }
        let (memory, driver) = (Arc::clone(&self.memory), Arc::clone(&self.driver));
        Ok(Graph { memory, driver, held: Some((std::mem::take(&mut self.made), id)), launched_on: Vec::new() })
    }

    /// Destroys the graphs.
    fn destroy(&mut self) {
        for graph in std::mem::take(&mut self.made) {
            // SAFETY: made by this capture, never launched, and no other code has its id.
            let destroyed = unsafe { graphs(self.driver.as_ref()).graph_destroy(graph) };
            self.note(destroyed.map_err(AllocError::from));
        }
    }

    /// Ends the driver's capture, if it is still open.
    fn abort(&self) {
        // A driver that cannot report its state is asked to end it; the result of that counts.
        if self.driver.stream_is_capturing(self.stream).unwrap_or(true) {
            let aborted = graphs(self.driver.as_ref()).capture_abort(self.stream);
            self.note(aborted.map_err(AllocError::from));
        }
    }

    /// Releases the allocator's side of a failed capture.
    fn give_up(&mut self, id: CaptureId) {
        self.id = None;
        self.note(self.memory.allocator().capture_end(id));
        self.destroy();
        self.note(self.memory.allocator().capture_release(id));
    }

    /// Keeps an error for the next fallible call. Live buffers of a failed capture are not an error: the program is about to drop
    /// them.
    fn note(&self, outcome: Result<(), AllocError>) {
        if let Err(error) = outcome
            && !matches!(error, AllocError::CaptureLive { .. })
        {
            self.memory.defer(error);
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.abort();
            self.give_up(id);
        }
    }
}

impl Graph {
    /// Launches the captured work on `stream`, which must outlive the graph; of [several](Capture::cut) graphs the first.
    ///
    /// # Errors
    /// Those of [`launch_nth`](Self::launch_nth).
    pub fn launch(&mut self, stream: StreamId) -> Result<(), DriverError> {
        self.launch_nth(0, stream)
    }

    /// Launches one of several graphs, numbered from 0 on in the order of their capture. They share their memory, so a launch on
    /// another stream than the last one first waits for the last stream on the host.
    ///
    /// # Errors
    /// Those of [`GraphDriver::graph_launch`] and of waiting; `CUDA_ERROR_INVALID_HANDLE` when there is no graph with this number.
    pub fn launch_nth(&mut self, number: usize, stream: StreamId) -> Result<(), DriverError> {
        let captured = self.held.as_ref().map_or(&[][..], |(held, _)| held);
        let Some(graph) = captured.get(number).copied() else {
            let context = format!("no graph {number} of {}", captured.len());
            return Err(DriverError::new(CallKind::GraphLaunch, DriverError::INVALID_HANDLE, context));
        };
        if self.launched_on.last() != Some(&stream) {
            if let Some(before) = self.launched_on.last().filter(|_| captured.len() > 1) {
                self.driver.stream_synchronize(*before)?;
            }
            self.launched_on.retain(|other| *other != stream);
            self.launched_on.push(stream);
        }
        // SAFETY: the capture's memory is pinned: only this graph has its id, so it is not released before this graph is destroyed.
        // The code that queued captured work keeps everything else that it uses until then (`Driver`, "Captures").
        unsafe { graphs(self.driver.as_ref()).graph_launch(graph, stream) }
    }

    /// Waits for the last launch, destroys the graph and releases its memory.
    ///
    /// # Errors
    /// [`AllocError::Driver`] when one of these is refused. Waiting and destroying are then tried once more; if that fails as well,
    /// the memory stays pinned until the allocator is dropped, because the device may still use it.
    pub fn release(mut self) -> Result<(), AllocError> {
        self.give_up()
    }

    fn give_up(&mut self) -> Result<(), AllocError> {
        let Some((held, capture)) = &mut self.held else { return Ok(()) };
        for stream in &self.launched_on {
            self.driver.stream_synchronize(*stream)?;
        }
        while let Some(graph) = held.last().copied() {
            // SAFETY: the graph is ours, `held` forgets it as soon as it is destroyed, and its launches have finished.
            unsafe { graphs(self.driver.as_ref()).graph_destroy(graph) }?;
            held.pop();
        }
        let capture = *capture;
        self.held = None;
        self.memory.allocator().capture_release(capture)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Err(error) = self.give_up() {
            self.memory.defer(error);
        }
    }
}
