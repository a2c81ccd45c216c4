//! Queues training steps, operation by operation or as a graph.

use crate::data::Split;
use crate::device::StepGraphs;
use crate::error::Result;
use crate::loader::Loader;
use crate::mlp::{Buckets, LossSlot, Mlp};
use crate::ranks::share;
use crate::settings::{LaunchMode, Settings};
use crate::tensor::Context;
use std::ops::Range;
use vramlab::DeviceBuffer;

/// Inputs of a step other than its batch.
pub(super) struct StepOf<'a> {
    pub(super) model: &'a Mlp,
    pub(super) split: &'a Split,
    /// Order of the rows in this epoch.
    pub(super) order: &'a [u32],
    pub(super) learning_rate: f32,
    /// The part of each batch that this rank has, where there are several.
    pub(super) part: Option<Part<'a>>,
}

/// Every which step of an eager run times the waits for sums and for state on the host: rarely enough to cost nothing that shows.
const SAMPLED_EVERY: u64 = 8;

/// One rank's part of the steps.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) buckets: &'a Buckets,
}

impl StepOf<'_> {
    /// Queues one step on the rows `order[range]`, or on this rank's part of them.
    fn queue(&self, context: &Context, loader: &mut Loader, loss: LossSlot, range: Range<usize>) -> Result<()> {
        let Some(Part { rank, size, buckets }) = self.part else {
            let batch = loader.batch(context, self.split, self.order, range)?;
            return self.model.step(context, batch, loss, self.learning_rate);
        };
        // CAST: a batch's rows are a u32.
        let whole_rows = range.len() as u32;
        let batch = loader.batch(context, self.split, self.order, share(range, rank, size))?;
        self.model.step_of_part(context, batch, loss, self.learning_rate, (buckets, whole_rows))
    }
}

/// Queues steps.
pub(super) struct Stepper {
    /// As graphs, if they are launched so.
    graphs: Option<GraphStepper>,
    /// Losses of an epoch's steps: sized for the longest epoch for graphs, else for the current epoch.
    losses: Option<DeviceBuffer>,
}

impl Stepper {
    /// A stepper for a run with this many steps in total, on this many rows; sets `loader` to follow the device.
    ///
    /// # Errors
    /// Errors of the allocator.
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

    /// Begins an epoch of this many steps.
    ///
    /// # Errors
    /// Errors of the allocator and of the copy.
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

    /// Losses of the epoch's steps.
    pub(super) fn losses(&self) -> &DeviceBuffer {
        self.losses.as_ref().expect("an epoch should have begun")
    }

    /// Number of steps to queue together, if the next `alike` steps have the same number of rows.
    pub(super) fn at_once(&self, alike: u64) -> u64 {
        self.graphs.as_ref().map_or(1, |graphs| graphs.at_once(alike))
    }

    /// Queues `count` steps of the epoch, the first of which is `step` (from 0 on), on the rows `order[range]`; no more than
    /// [`at_once`](Self::at_once) says.
    ///
    /// # Errors
    /// Errors of the allocator, of copies, captures and launches.
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
        let sampled = step % SAMPLED_EVERY == SAMPLED_EVERY - 1;
        if let Some(part) = &of.part {
            part.buckets.sample(sampled);
        }
        of.model.sample_waits(sampled);
        let slot = self.losses().addr().get();
        of.queue(context, loader, LossSlot::at(slot + 4 * step), range)
    }

    /// Gives up the graphs and their memory.
    ///
    /// # Errors
    /// Errors of the driver and of the allocator.
    pub(super) fn release(self) -> Result<()> {
        self.graphs.map_or(Ok(()), GraphStepper::release)
    }
}

// Steps as CUDA graphs: one graph for several steps, one for a single step, one for an epoch's last, smaller batch.

/// Key of a graph: rows in each batch, and number of consecutive steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    rows: usize,
    steps: u64,
}

/// Graphs by kind. Their arguments never change, so a step's number lies on the device, from where it picks the batch and
/// the slot of the loss.
#[derive(Debug)]
pub(super) struct GraphStepper {
    /// One u32.
    pub(super) cursor: DeviceBuffer,
    /// Address of the losses of an epoch's steps.
    losses: u64,
    /// Steps of a full graph.
    full: u64,
    /// Kinds that the run will need and that are not captured yet.
    planned: Vec<Kind>,
    /// Each set of graphs shares its memory, as they run one after another.
    captured: Vec<(Vec<Kind>, StepGraphs)>,
}

impl GraphStepper {
    /// A stepper for a run with this many steps in total, on this many rows.
    pub(super) fn new(settings: &Settings, (rows, steps): (usize, u64), cursor: DeviceBuffer, losses: u64) -> Self {
        let full = settings.steps_in_graph().unwrap_or(1).into();
        let planned = kinds(rows, settings.batch as usize, steps, full, settings.profile_steps.is_some());
        Self { cursor, losses, full, planned, captured: Vec::new() }
    }

    /// Number of steps of the next graph, if the next `alike` steps have the same number of rows.
    pub(super) fn at_once(&self, alike: u64) -> u64 {
        if alike >= self.full { self.full } else { 1 }
    }

    /// Launches the graph of this many steps with this many rows each; captures it if it is the first.
    ///
    /// # Errors
    /// Errors of the allocator, of captures and launches.
    pub(super) fn step(
        &mut self,
        context: &Context,
        loader: &mut Loader,
        of: &StepOf<'_>,
        (rows, steps): (usize, u64),
    ) -> Result<()> {
        let kind = Kind { rows, steps };
        let place = |kinds: &[Kind]| kinds.iter().position(|known| *known == kind);
        let position = self.captured.iter().enumerate().find_map(|(set, (kinds, _))| Some((set, place(kinds)?)));
        let (set, number) = match position {
            Some(position) => position,
            None => {
                let mut kinds = std::mem::take(&mut self.planned);
                let number = place(&kinds).unwrap_or_else(|| {
                    kinds.push(kind);
                    kinds.len() - 1
                });
                let graphs = self.capture(context, loader, of, &kinds)?;
                self.captured.push((kinds, graphs));
                (self.captured.len() - 1, number)
            }
        };
        let plural = if steps == 1 { "" } else { "s" };
        let _range = context.device.range(format_args!("graph of {steps} step{plural}"));
        context.device.launch(&mut self.captured[set].1, number)
    }

    /// Each step allocates and frees as it does by itself, so the next one is served from what it has freed.
    fn capture(&self, context: &Context, loader: &mut Loader, of: &StepOf<'_>, kinds: &[Kind]) -> Result<StepGraphs> {
        let loss = LossSlot { addr: self.losses, cursor: Some(self.cursor.addr().get()) };
        context.device.capture(&context.memory, kinds.len(), |number| {
            let Kind { rows, steps } = kinds[number];
            // With a cursor the device knows which batch; the range is that of the first.
            (0..steps).try_for_each(|_| of.queue(context, loader, loss, 0..rows))
        })
    }

    /// Gives up the graphs and their memory.
    ///
    /// # Errors
    /// Errors of the driver and of the allocator.
    pub(super) fn release(self) -> Result<()> {
        self.captured.into_iter().try_for_each(|(_, graphs)| graphs.release())
    }
}

/// The kinds of graphs that a run of this many steps needs, the largest first, so that the others can reuse its memory.
/// With a profiled range of steps, which graphs must not cross, single steps are always included.
fn kinds(rows: usize, batch: usize, steps: u64, full: u64, profiled: bool) -> Vec<Kind> {
    // CAST: rows are those of a data set in memory.
    let (whole, left) = ((rows / batch) as u64, rows % batch);
    let in_epoch = whole + u64::from(left > 0);
    // Steps with a whole batch each that follow one another: in a whole epoch, and in one that `--steps` cuts short.
    let of_epoch = if steps >= in_epoch { whole } else { 0 };
    let spans = [of_epoch, (steps % in_epoch.max(1)).min(whole)];
    let several = full > 1 && spans.iter().any(|span| *span >= full);
    let single = spans.iter().any(|span| span % full > 0) || full == 1 || profiled;
    let last = left > 0 && steps >= in_epoch;
    let all = [
        (several, Kind { rows: batch, steps: full }),
        (single && spans.iter().any(|span| *span > 0), Kind { rows: batch, steps: 1 }),
        (last, Kind { rows: left, steps: 1 }),
    ];
    all.into_iter().filter_map(|(needed, kind)| needed.then_some(kind)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kinds that the loop over an epoch's steps requests, step by step.
    fn walked(rows: usize, batch: usize, steps: u64, full: u64) -> Vec<Kind> {
        let (mut out, mut left) = (Vec::new(), steps);
        while left > 0 {
            let mut from = 0;
            while from < rows && left > 0 {
                let alike = (((rows - from) / batch).max(1) as u64).min(left);
                let steps = if alike >= full { full } else { 1 };
                let kind = Kind { rows: batch.min(rows - from), steps };
                if !out.contains(&kind) {
                    out.push(kind);
                }
                from += batch * steps as usize;
                left -= steps;
            }
        }
        out.sort_by_key(|kind| std::cmp::Reverse(kind.rows as u64 * kind.steps));
        out
    }

    #[test]
    fn exactly_the_graphs_that_a_run_needs_are_planned() {
        for (rows, batch) in [(120, 25), (120, 30), (120, 1), (7, 10), (10, 10), (17, 16)] {
            for full in [1, 2, 3, 4, 8, 64] {
                for steps in 1..300 {
                    let graphs = kinds(rows, batch, steps, full, false);
                    assert_eq!(graphs, walked(rows, batch, steps, full), "{rows} {batch} {steps} {full}");
                }
            }
        }
    }

    #[test]
    fn a_profiled_range_may_need_single_steps_anywhere() {
        let planned = |profiled| kinds(60_000, 32, 1872, 8, profiled);
        assert_eq!(planned(false), [Kind { rows: 32, steps: 8 }]);
        assert_eq!(planned(true), [Kind { rows: 32, steps: 8 }, Kind { rows: 32, steps: 1 }]);
    }
}
