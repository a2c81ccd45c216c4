//! How training steps are queued: operation by operation, as a graph, or many as one kernel.

use crate::data::Split;
use crate::device::StepGraph;
use crate::error::{Result, TrainError};
use crate::loader::Loader;
use crate::mlp::{LossSlot, Mlp};
use crate::settings::{LaunchMode, Settings, SyncMode};
use crate::tensor::Context;
use allocators::DeviceBuffer;
use kernels::{KernelError, PersistentSteps, Precision};
use std::ops::Range;

/// What a step works on, besides its batch.
pub(super) struct StepOf<'a> {
    pub(super) model: &'a Mlp,
    pub(super) split: &'a Split,
    /// Order of the rows in this epoch.
    pub(super) order: &'a [u32],
    pub(super) learning_rate: f32,
}

/// Queues steps.
pub(super) enum Stepper {
    Eager { losses: Option<DeviceBuffer> },
    Graph(Box<GraphStepper>),
    Persistent(Box<PersistentStepper>),
}

/// Steps as graphs: one for each number of rows, so that a last, smaller batch has its own. Their arguments never change, so
/// a step's number lies on the device, from where it picks the batch and the slot of the loss.
pub(super) struct GraphStepper {
    /// One u32.
    cursor: DeviceBuffer,
    /// Of the longest epoch.
    losses: DeviceBuffer,
    graphs: Vec<(usize, StepGraph)>,
}

/// Steps that one kernel does in a row. As with graphs there is one for each number of rows, and the device knows the step.
pub(super) struct PersistentStepper {
    /// One u32.
    cursor: DeviceBuffer,
    /// Of the longest epoch.
    losses: DeviceBuffer,
    precision: Precision,
    /// Steps that a launch does at most.
    most: u64,
    recorded: Vec<RecordedSteps>,
}

/// What a launch does, with the memory that it uses.
struct RecordedSteps {
    rows: usize,
    launch: PersistentSteps,
    _buffers: Vec<DeviceBuffer>,
}

/// Few enough that the run can be interrupted at any time, and that its record has times; enough that a launch costs nothing.
const MOST_STEPS_AT_ONCE: u64 = 100;

impl Stepper {
    /// For epochs of at most so many steps; `loader` is told to follow the device.
    ///
    /// # Errors
    /// Those of the allocator, and of loading kernels.
    pub(super) fn new(
        context: &Context,
        settings: &Settings,
        model: &Mlp,
        loader: &mut Loader,
        most: usize,
    ) -> Result<Self> {
        if settings.launch == LaunchMode::Eager {
            return Ok(Self::Eager { losses: None });
        }
        let cursor = context.allocate::<u32>(1)?;
        loader.follow(cursor.addr().get());
        let losses = context.allocate::<f32>(most)?;
        if settings.launch == LaunchMode::Graph {
            return Ok(Self::Graph(Box::new(GraphStepper { cursor, losses, graphs: Vec::new() })));
        }
        let precision = model.arithmetic().precision();
        context.device.prepare_persistent(precision)?;
        let most = if settings.sync == SyncMode::Never { MOST_STEPS_AT_ONCE } else { 1 };
        let recorded = Vec::new();
        Ok(Self::Persistent(Box::new(PersistentStepper { cursor, losses, precision, most, recorded })))
    }

    /// Before the first step of an epoch of so many.
    ///
    /// # Errors
    /// Those of the allocator and of the copy.
    pub(super) fn begin_epoch(&mut self, context: &Context, steps: usize) -> Result<()> {
        match self {
            Self::Eager { losses } => {
                *losses = Some(context.allocate::<f32>(steps)?);
                Ok(())
            }
            Self::Graph(graph) => context.write(&graph.cursor, &[0u32]),
            Self::Persistent(steps) => context.write(&steps.cursor, &[0u32]),
        }
    }

    /// After the last step of an epoch, whose losses were read.
    pub(super) fn end_epoch(&mut self) {
        if let Self::Eager { losses } = self {
            *losses = None;
        }
    }

    /// Where the losses of the epoch's steps lie.
    pub(super) fn losses(&self) -> &DeviceBuffer {
        match self {
            Self::Eager { losses } => losses.as_ref().expect("an epoch should have begun"),
            Self::Graph(graph) => &graph.losses,
            Self::Persistent(steps) => &steps.losses,
        }
    }

    /// Steps that are queued together, when so many with the same number of rows come next.
    pub(super) fn at_once(&self, alike: u64) -> u64 {
        match self {
            Self::Eager { .. } | Self::Graph(_) => 1,
            Self::Persistent(steps) => alike.min(steps.most),
        }
    }

    /// Queues `count` steps of the epoch, the first of which is `step` (from 0 on), on the rows `order[range]`; no more than
    /// [`at_once`](Self::at_once) says.
    ///
    /// # Errors
    /// Those of the allocator, of copies, captures and launches.
    pub(super) fn step(
        &mut self,
        context: &Context,
        loader: &mut Loader,
        of: &StepOf<'_>,
        (step, count): (u64, u64),
        range: Range<usize>,
    ) -> Result<()> {
        let slot = self.losses().addr().get();
        match self {
            Self::Eager { .. } => {
                let batch = loader.batch(context, of.split, of.order, range)?;
                of.model.step(context, batch, LossSlot::at(slot + 4 * step), of.learning_rate)
            }
            Self::Graph(graphs) => {
                let rows = range.len();
                let known = graphs.graphs.iter().position(|(of_rows, _)| *of_rows == rows);
                let place = match known {
                    Some(place) => place,
                    None => {
                        let loss = LossSlot { addr: slot, cursor: Some(graphs.cursor.addr().get()) };
                        let graph = context.device.capture(&context.memory, || {
                            let batch = loader.batch(context, of.split, of.order, range)?;
                            of.model.step(context, batch, loss, of.learning_rate)
                        })?;
                        graphs.graphs.push((rows, graph));
                        graphs.graphs.len() - 1
                    }
                };
                context.device.launch(&mut graphs.graphs[place].1)
            }
            Self::Persistent(steps) => {
                let known = steps.recorded.iter().position(|recorded| recorded.rows == range.len());
                let place = match known {
                    Some(place) => place,
                    None => {
                        let recorded = steps.record(context, loader, of, range).map_err(explain)?;
                        steps.recorded.push(recorded);
                        steps.recorded.len() - 1
                    }
                };
                // CAST: at most `MOST_STEPS_AT_ONCE`.
                let launch = steps.recorded[place].launch.with_steps(count as u32);
                // SAFETY: the buffers of the recorded operations are kept beside them; weights, data and losses outlive the
                // stepper's launches, as they outlive those of single operations.
                unsafe { context.device.run(&launch) }.map_err(explain)
            }
        }
    }

    /// Gives up the graphs and their memory.
    ///
    /// # Errors
    /// Those of the driver and of the allocator.
    pub(super) fn release(self) -> Result<()> {
        match self {
            Self::Eager { .. } => Ok(()),
            Self::Graph(graphs) => graphs.graphs.into_iter().try_for_each(|(_, graph)| graph.release()),
            // Freed on the stream, behind the last launch.
            Self::Persistent(_) => Ok(()),
        }
    }
}

impl PersistentStepper {
    /// The step on the rows `order[range]`, with memory of its own.
    fn record(
        &self,
        context: &Context,
        loader: &mut Loader,
        of: &StepOf<'_>,
        range: Range<usize>,
    ) -> Result<RecordedSteps> {
        let rows = range.len();
        let loss = LossSlot { addr: self.losses.addr().get(), cursor: Some(self.cursor.addr().get()) };
        let mut recorded = context.device.record(&context.memory, || {
            let batch = loader.batch(context, of.split, of.order, range)?;
            of.model.step(context, batch, loss, of.learning_rate)
        })?;
        // CAST: some kilobytes.
        let memory = context.upload(&[0u8; PersistentSteps::MEMORY_BYTES as usize])?;
        let launch = PersistentSteps::new(self.precision, recorded.operations, 1, memory.addr().get())?;
        recorded.buffers.push(memory);
        Ok(RecordedSteps { rows, launch, _buffers: recorded.buffers })
    }
}

/// What to do if a net does not fit the kernel.
fn explain(error: TrainError) -> TrainError {
    match error {
        TrainError::Kernel(error @ KernelError::NotPersistent { .. }) => {
            TrainError::Input(format!("--launch persistent is for small nets and batches: {error}; use --launch graph"))
        }
        error => error,
    }
}
