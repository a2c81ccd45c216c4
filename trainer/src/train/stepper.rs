//! How training steps are queued: operation by operation, or as a graph.

use super::graphs::GraphStepper;
use crate::data::Split;
use crate::error::Result;
use crate::loader::Loader;
use crate::mlp::{LossSlot, Mlp};
use crate::settings::{LaunchMode, Settings};
use crate::tensor::Context;
use std::ops::Range;
use vramlab::DeviceBuffer;

/// What a step works on, besides its batch.
pub(super) struct StepOf<'a> {
    pub(super) model: &'a Mlp,
    pub(super) split: &'a Split,
    /// Order of the rows in this epoch.
    pub(super) order: &'a [u32],
    pub(super) learning_rate: f32,
}

/// Queues steps.
pub(super) struct Stepper {
    /// As graphs, if they are launched so.
    graphs: Option<GraphStepper>,
    /// Where the losses of an epoch's steps lie: of the longest epoch for graphs, else of the one under way.
    losses: Option<DeviceBuffer>,
}

impl Stepper {
    /// For a run with so many steps in all, on so many rows; `loader` is told to follow the device.
    ///
    /// # Errors
    /// Those of the allocator.
    pub(super) fn new(
        context: &Context,
        settings: &Settings,
        loader: &mut Loader,
        (rows, steps): (usize, u64),
    ) -> Result<Self> {
        if settings.launch == LaunchMode::Eager {
            return Ok(Self { graphs: None, losses: None });
        }
        let cursor = context.allocate::<u32>(1)?;
        loader.follow(cursor.addr().get());
        // CAST: the steps of an epoch are bounded by the rows of the data set.
        let in_epoch = rows.div_ceil(settings.batch as usize).min(steps as usize);
        let losses = context.allocate::<f32>(in_epoch)?;
        let graphs = GraphStepper::new(settings, (rows, steps), cursor, losses.addr().get());
        Ok(Self { graphs: Some(graphs), losses: Some(losses) })
    }

    /// Before the first step of an epoch of so many.
    ///
    /// # Errors
    /// Those of the allocator and of the copy.
    pub(super) fn begin_epoch(&mut self, context: &Context, steps: usize) -> Result<()> {
        match &self.graphs {
            None => self.losses = Some(context.allocate::<f32>(steps)?),
            Some(graphs) => context.write(&graphs.cursor, &[0u32])?,
        }
        Ok(())
    }

    /// After the last step of an epoch, whose losses were read.
    pub(super) fn end_epoch(&mut self) {
        if self.graphs.is_none() {
            self.losses = None;
        }
    }

    /// Where the losses of the epoch's steps lie.
    pub(super) fn losses(&self) -> &DeviceBuffer {
        self.losses.as_ref().expect("an epoch should have begun")
    }

    /// Steps that are queued together, when so many with the same number of rows come next.
    pub(super) fn at_once(&self, alike: u64) -> u64 {
        self.graphs.as_ref().map_or(1, |graphs| graphs.at_once(alike))
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
        if let Some(graphs) = &mut self.graphs {
            return graphs.step(context, loader, of, (range.len(), count));
        }
        let batch = loader.batch(context, of.split, of.order, range)?;
        let slot = self.losses().addr().get();
        of.model.step(context, batch, LossSlot::at(slot + 4 * step), of.learning_rate)
    }

    /// Gives up the graphs and their memory.
    ///
    /// # Errors
    /// Those of the driver and of the allocator.
    pub(super) fn release(self) -> Result<()> {
        self.graphs.map_or(Ok(()), GraphStepper::release)
    }
}
