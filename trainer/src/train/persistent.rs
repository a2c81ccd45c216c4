//! Many steps as one kernel.

use super::stepper::StepOf;
use crate::data::Dataset;
use crate::device::Device;
use crate::error::{Result, TrainError};
use crate::loader::Loader;
use crate::mlp::{LossSlot, Mlp};
use crate::settings::{DeviceChoice, LaunchMode, Settings, SyncMode};
use crate::tensor::Context;
use kernels::{KernelError, PersistentSteps, Precision};
use std::sync::Arc;
use vramlab::backends::Naive;
use vramlab::instruments::NvtxMode;
use vramlab::instruments::nvtx::Ranges;
use vramlab::{DeviceBuffer, DeviceName, Memory};

/// Steps that one kernel does in a row. As with graphs there is one for each number of rows, and the device knows the step.
#[derive(Debug)]
pub(super) struct PersistentStepper {
    /// One u32.
    pub(super) cursor: DeviceBuffer,
    /// Of the longest epoch.
    pub(super) losses: DeviceBuffer,
    precision: Precision,
    /// Steps that a launch does at most.
    pub(super) most: u64,
    recorded: Vec<RecordedSteps>,
}

/// What a launch does, with the memory that it uses.
#[derive(Debug)]
struct RecordedSteps {
    rows: usize,
    launch: PersistentSteps,
    _buffers: Vec<Arc<DeviceBuffer>>,
}

/// Few enough that the run can be interrupted at any time, and that its record has times; enough that a launch costs nothing.
const MOST_STEPS_AT_ONCE: u64 = 100;

impl PersistentStepper {
    pub(super) fn new(settings: &Settings, precision: Precision, cursor: DeviceBuffer, losses: DeviceBuffer) -> Self {
        let most = if settings.sync == SyncMode::Never { MOST_STEPS_AT_ONCE } else { 1 };
        Self { cursor, losses, precision, most, recorded: Vec::new() }
    }

    /// Launches so many steps with so many rows each.
    ///
    /// # Errors
    /// Those of the allocator, of copies and launches; [`TrainError::Input`] for a net that does not fit the kernel.
    pub(super) fn step(
        &mut self,
        context: &Context,
        loader: &mut Loader,
        of: &StepOf<'_>,
        (rows, count): (usize, u64),
    ) -> Result<()> {
        let known = self.recorded.iter().position(|recorded| recorded.rows == rows);
        let place = match known {
            Some(place) => place,
            None => {
                let recorded = self.record(context, loader, of, rows).map_err(explain)?;
                self.recorded.push(recorded);
                self.recorded.len() - 1
            }
        };
        // CAST: at most `MOST_STEPS_AT_ONCE`.
        let launch = self.recorded[place].launch.with_steps(count as u32);
        // SAFETY: the buffers of the recorded operations are kept beside them; weights, data and losses outlive the
        // stepper's launches, as they outlive those of single operations.
        unsafe { context.device.run(&launch) }.map_err(explain)
    }

    /// The step on so many rows, with memory of its own.
    fn record(&self, context: &Context, loader: &mut Loader, of: &StepOf<'_>, rows: usize) -> Result<RecordedSteps> {
        let loss = LossSlot { addr: self.losses.addr().get(), cursor: Some(self.cursor.addr().get()) };
        let mut recorded = context.device.record(&context.memory, || {
            // With a cursor the device knows which rows, and their number alone counts.
            let batch = loader.batch(context, of.split, of.order, 0..rows)?;
            of.model.step(context, batch, loss, of.learning_rate)
        })?;
        // CAST: some kilobytes.
        let memory = context.upload(&[0u8; PersistentSteps::MEMORY_BYTES as usize])?;
        let launch = PersistentSteps::new(self.precision, recorded.operations, 1, memory.addr().get())?;
        recorded.buffers.push(Arc::new(memory));
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

/// Refuses a net and batches that do not fit the kernel, before there is a record: describes the steps on a simulated device,
/// which takes the time of copying the data set once. A GPU without room for the blocks of the kernel shows at the launch.
///
/// # Errors
/// [`TrainError::Input`] for steps that do not fit.
pub(super) fn check_fit(settings: &Settings, dataset: &Dataset) -> Result<()> {
    if settings.launch != LaunchMode::Persistent {
        return Ok(());
    }
    match describe(settings, dataset).map_err(explain) {
        Err(error @ TrainError::Input(_)) => Err(error),
        // What this device runs out of says nothing about the real one.
        _ => Ok(()),
    }
}

fn describe(settings: &Settings, dataset: &Dataset) -> Result<()> {
    let device =
        Device::open(&DeviceChoice::Named(DeviceName::Sim(None)), SyncMode::Never, Ranges::new(NvtxMode::Off), None)?;
    let memory = Memory::new(Arc::new(Naive::new(device.driver())));
    let (context, split) = (Context { memory, device }, &dataset.train);
    let (widths, arithmetic) = (super::network(settings, dataset)?, settings.arithmetic()?);
    let model = Mlp::unset(&context, &widths, arithmetic, &super::batches(settings, dataset))?;
    let mut loader =
        Loader::new(&context, split, dataset.features, settings.batch, settings.loader, model.arithmetic())?;
    // CAST: data sets have fewer than 2^32 rows.
    let order: Vec<u32> = (0..split.rows as u32).collect();
    let (cursor, losses) = (context.allocate::<u32>(1)?, context.allocate::<f32>(order.len())?);
    loader.follow(cursor.addr().get());
    loader.begin_pass(&context, &order)?;
    let steps = PersistentStepper::new(settings, model.arithmetic().precision(), cursor, losses);
    let of = StepOf { model: &model, split, order: &order, learning_rate: settings.learning_rate };
    let batch = settings.batch as usize;
    let last = split.rows % batch;
    // The last, smaller batch of an epoch, if the run gets there.
    let reached = last > 0 && super::steps_in_all(settings, dataset) >= split.rows.div_ceil(batch) as u64;
    for rows in [batch.min(split.rows), if reached { last } else { 0 }].into_iter().filter(|rows| *rows > 0) {
        steps.record(&context, &mut loader, &of, rows)?;
    }
    Ok(())
}
