//! How training steps are queued: operation by operation, or as a graph.

use crate::data::Split;
use crate::device::StepGraph;
use crate::error::Result;
use crate::loader::Loader;
use crate::mlp::{LossSlot, Mlp};
use crate::settings::{LaunchMode, Settings};
use crate::tensor::Context;
use allocators::DeviceBuffer;
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

impl Stepper {
    /// For epochs of at most so many steps; `loader` is told to follow the device.
    ///
    /// # Errors
    /// Those of the allocator.
    pub(super) fn new(context: &Context, settings: &Settings, loader: &mut Loader, most: usize) -> Result<Self> {
        if settings.launch == LaunchMode::Eager {
            return Ok(Self::Eager { losses: None });
        }
        let cursor = context.allocate::<u32>(1)?;
        loader.follow(cursor.addr().get());
        let losses = context.allocate::<f32>(most)?;
        Ok(Self::Graph(Box::new(GraphStepper { cursor, losses, graphs: Vec::new() })))
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
        }
    }

    /// Queues step `step` (from 0 on) of the epoch, on the rows `order[range]`.
    ///
    /// # Errors
    /// Those of the allocator, of copies, captures and launches.
    pub(super) fn step(
        &mut self,
        context: &Context,
        loader: &mut Loader,
        of: &StepOf<'_>,
        step: u64,
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
        }
    }
}
