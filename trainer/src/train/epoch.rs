//! One pass over the training rows, and the validation after it.

use super::Run;
use super::capture::Capture;
use super::stepper::{Part, StepOf, Stepper};
use crate::data::Dataset;
use crate::device::{OwnedEvent, Role};
use crate::error::{Result, TrainError};
use crate::loader::{self, Loader};
use crate::mlp::{Buckets, Mlp};
use crate::observer::Observer;
use crate::record::{EpochRecord, StepRow};
use crate::settings::{Settings, SyncMode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// One epoch: training, then validation.
pub(super) struct Pass<'a> {
    pub(super) epoch: u32,
    pub(super) settings: &'a Settings,
    pub(super) dataset: &'a Dataset,
    pub(super) model: &'a Mlp,
    /// Where there are several ranks.
    pub(super) buckets: Option<&'a Buckets>,
    pub(super) stop: &'a AtomicBool,
    pub(super) observer: &'a Arc<dyn Observer>,
}

impl Pass<'_> {
    /// Runs the epoch; `rows` receives the rows of completed steps, losses included, whatever ends it.
    pub(super) fn run(
        &self,
        run: &mut Run,
        (stepper, loaders): (&mut Stepper, &mut (Loader, Loader)),
        left: &mut u64,
        capture: &mut Capture,
        rows: &mut Vec<StepRow>,
    ) -> Result<EpochRecord> {
        let (settings, split) = (self.settings, &self.dataset.train);
        let steps = run.steps_in_epoch(split.rows).min(*left);
        let device = &run.context.device;
        let mut open = Some(device.range(format_args!("epoch {}", self.epoch)));
        let (clock, driver, stream) = (device.clock(), device.driver(), device.stream());
        let (calls_before, busy_before, start_ns) = (device.calls(), device.busy_ns(), clock.now_ns());
        let event = || OwnedEvent::new(&driver, true);
        let events = [event()?, event()?, event()?, event()?];
        let [first, last, first_step, last_step] = events.each_ref().map(|event| event.id);
        driver.event_record(first, stream)?;

        let mut order = vec![0u32; split.rows];
        loader::shuffled(settings.seed, self.epoch, &mut order);
        loaders.0.begin_pass(&run.context, &order)?;
        // CAST: an epoch's steps are bounded by its rows.
        stepper.begin_epoch(&run.context, steps as usize)?;
        let (model, learning_rate) = (self.model, settings.learning_rate);
        let group = run.group.clone();
        let part = group.as_ref().zip(self.buckets);
        let part = part.map(|(group, buckets)| Part { rank: group.rank(), size: group.size(), buckets });
        let of = StepOf { model, split, order: &order, learning_rate, part };
        let before = u64::from(self.epoch - 1) * run.steps_in_epoch(split.rows);
        let batch = settings.batch as usize;
        let training_before = device.calls();
        let mut allocations = training_before.driver_allocations();
        let mut ended = Ok(());
        let steps_ns = clock.now_ns();
        driver.event_record(first_step, stream)?;
        let mut step = 0;
        while step < steps {
            let from = step as usize * batch;
            let range = from..(from + batch).min(split.rows);
            let count = range.len();
            // Steps with as many rows as this one, up to where a profiler's capture begins or ends.
            let alike = ((split.rows - from) / batch).max(1) as u64;
            let together = stepper.at_once(alike.min(steps - step).min(capture.steps_alike()));
            let stop = self.stop.load(Relaxed);
            let may_begin = match &group {
                Some(group) => group.begin_steps(before + step, together, stop),
                None if stop => Err(TrainError::Interrupted),
                None => Ok(()),
            };
            if let Err(error) = may_begin {
                ended = Err(error);
                break;
            }
            capture.steps_begin(&run.context.device, self.epoch, &mut open)?;
            for number in step..step + together {
                self.observer.step(self.epoch, number + 1);
            }
            if run.summary.first_step_s.is_none() {
                run.summary.first_step_s = Some(run.started.elapsed().as_secs_f64());
            }
            if let Err(error) = self.step(run, stepper, &mut loaders.0, &of, (step, together), range) {
                ended = Err(error);
                break;
            }
            capture.steps_ended(&run.context.device, self.epoch, &mut open, together)?;
            let stats = run.stack.top.stats();
            let host_ns = clock.now_ns();
            for number in step..step + together {
                let so_far = run.context.device.calls().driver_allocations();
                rows.push(StepRow {
                    epoch: self.epoch,
                    step: number + 1,
                    // CAST: a batch's rows are a u32.
                    rows: count as u32,
                    loss: None,
                    host_ns,
                    driver_allocations: so_far - allocations,
                    reserved_bytes: stats.reserved_bytes.all.current,
                    allocated_bytes: stats.allocated_bytes.all.current,
                    active_bytes: stats.active_bytes.all.current,
                    requested_bytes: stats.requested_bytes.all.current,
                });
                allocations = so_far;
            }
            // The cold start: the initial weights, the first batch and the first step.
            if self.epoch == 1 && step == 0 {
                run.close_latency();
            }
            step += together;
        }
        if ended.is_ok() {
            driver.event_record(last_step, stream)?;
        }
        // The losses of an interrupted epoch are read as well; after a failure the device may not answer.
        if !rows.is_empty() && matches!(ended, Ok(()) | Err(TrainError::Interrupted)) {
            let mut values = run.context.read::<f32>(stepper.losses(), rows.len())?;
            if let Some(group) = &group {
                let of_batches: Vec<u32> = rows.iter().map(|row| row.rows).collect();
                values = group.mean_losses(&values, &of_batches)?;
            }
            for (row, value) in rows.iter_mut().zip(values) {
                row.loss = Some(value);
            }
        }
        ended?;
        let train_s = seconds(clock.now_ns() - steps_ns);
        let train_driver_calls = run.context.device.calls().since(&training_before);
        *left -= steps;
        stepper.end_epoch();
        let mut weighted = 0.0;
        for row in rows.iter() {
            let loss = row.loss.unwrap_or(f32::NAN);
            if !loss.is_finite() {
                let (epoch, step) = (self.epoch, row.step);
                return Err(TrainError::Diverged { epoch, step, loss, advice: self.advice() });
            }
            weighted += f64::from(loss) * f64::from(row.rows);
        }
        let trained_rows = rows.iter().map(|row| f64::from(row.rows)).sum::<f64>();
        self.observer.validation(self.epoch);
        let (val_loss, val_accuracy) = self.validate(run, &mut loaders.1)?;
        // The last update of an epoch shows in no training loss of it.
        if !val_loss.is_finite() {
            let (epoch, advice) = (self.epoch, self.advice());
            return Err(TrainError::DivergedInValidation { epoch, loss: val_loss, advice });
        }
        driver.event_record(last, stream)?;
        driver.event_synchronize(last)?;
        let device_ns = driver.event_elapsed_ns(first, last)?;
        let train_ns = driver.event_elapsed_ns(first_step, last_step)?;
        if let Some(buckets) = self.buckets {
            let (sampled, waited_ns) = buckets.take_waits(&run.context)?;
            run.sum_waits = (run.sum_waits.0 + sampled, run.sum_waits.1 + waited_ns);
        }
        let (sampled, waited_ns) = self.model.take_waits(&run.context)?;
        run.offload_waits = (run.offload_waits.0 + sampled, run.offload_waits.1 + waited_ns);
        drop(events);
        let device = &run.context.device;
        let busy = device.busy_ns().zip(busy_before).map(|(now, before)| seconds(now - before));
        Ok(EpochRecord {
            epoch: self.epoch,
            steps,
            train_loss: weighted / trained_rows,
            val_loss,
            val_accuracy,
            wall_s: seconds(clock.now_ns() - start_ns),
            device_s: seconds(device_ns),
            train_s,
            train_device_s: seconds(train_ns),
            device_busy_s: busy,
            driver_calls: device.calls().since(&calls_before),
            train_driver_calls,
        })
    }

    fn step(
        &self,
        run: &Run,
        stepper: &mut Stepper,
        loader: &mut Loader,
        of: &StepOf<'_>,
        (step, count): (u64, u64),
        range: std::ops::Range<usize>,
    ) -> Result<()> {
        let context = &run.context;
        let _range = match count {
            1 => context.device.range(format_args!("step {}", step + 1)),
            _ => context.device.range(format_args!("steps {} to {}", step + 1, step + count)),
        };
        stepper.step(context, loader, of, (step, count), range)?;
        if self.settings.sync == SyncMode::Step {
            context.device.synchronize()?;
        }
        Ok(context.memory.check()?)
    }

    /// The setting to change when the loss becomes NaN or infinite.
    fn advice(&self) -> String {
        self.model.arithmetic().advice(self.settings.learning_rate)
    }

    /// Mean loss and accuracy on the validation rows.
    fn validate(&self, run: &Run, loader: &mut Loader) -> Result<(f64, f64)> {
        let context = &run.context;
        let _range = context.device.range(format_args!("validate"));
        context.device.order(Role::Compute, Role::Evaluate)?;
        let _on = context.device.on(Role::Evaluate);
        let split = &self.dataset.validation;
        let batch = self.settings.batch as usize;
        // CAST: data sets have fewer than 2^32 rows.
        let order: Vec<u32> = (0..split.rows as u32).collect();
        loader.begin_pass(context, &order)?;
        let batches = split.rows.div_ceil(batch);
        let losses = context.allocate::<f32>(batches)?;
        let correct = context.allocate::<u32>(batches)?;
        for number in 0..batches {
            let range = number * batch..((number + 1) * batch).min(split.rows);
            let part = loader.batch(context, split, &order, range)?;
            let at = 4 * number as u64;
            self.model.evaluate(context, part, losses.addr().get() + at, correct.addr().get() + at)?;
            if self.settings.sync == SyncMode::Step {
                context.device.synchronize()?;
            }
        }
        let losses = context.read::<f32>(&losses, batches)?;
        let correct = context.read::<u32>(&correct, batches)?;
        let rows_of = |number: usize| ((number + 1) * batch).min(split.rows) - number * batch;
        let total: f64 =
            losses.iter().enumerate().map(|(number, loss)| f64::from(*loss) * rows_of(number) as f64).sum();
        let hits: f64 = correct.iter().map(|count| f64::from(*count)).sum();
        let rows = split.rows as f64;
        Ok((total / rows, hits / rows))
    }
}

fn seconds(ns: u64) -> f64 {
    // CAST: exact up to 104 days.
    ns as f64 / 1e9
}
