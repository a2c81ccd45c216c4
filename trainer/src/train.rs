//! One run from settings to record.

use crate::data::{self, DataRequest, Dataset, Progress, Split};
use crate::device::Device;
use crate::error::{Result, TrainError};
use crate::loader::Loader;
use crate::mlp::{self, Mlp};
use crate::observer::{Observer, driver_call_log};
use crate::record::{
    DatasetRecord, EffectiveSettings, EpochRecord, Files, LATENCY, RecordWriter, SCHEMA_VERSION, STEPS, Status,
    StepRow, Summary, TRACE,
};
use crate::settings::{DeviceChoice, Settings, SyncMode};
use crate::stack::Stack;
use crate::tensor::Context;
use allocators::instrument::nvtx::Ranges;
use allocators::{AllocatorSettings, BackendKind, Bytes, CallCounts, DeviceKind, Memory};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// What a finished or ended run leaves.
#[derive(Debug)]
pub struct Outcome {
    /// The record, as written.
    pub summary: Summary,
    /// Where it was written.
    pub directory: std::path::PathBuf,
    /// Why the run ended early, if it did.
    pub error: Option<TrainError>,
}

/// Trains as the settings say.
///
/// `started` is when the process started; `stop` is looked at between steps; `observer` hears of progress.
///
/// # Errors
/// What goes wrong before there is a record. Later errors are in the [`Outcome`], beside the record of what was
/// done.
pub fn run(
    settings: &Settings,
    command: Vec<String>,
    started: Instant,
    stop: &AtomicBool,
    observer: &Arc<dyn Observer>,
) -> Result<Outcome> {
    check(settings)?;
    let ranges = Ranges::new(settings.nvtx);
    ranges.name_thread("trainer");
    let log = settings.log_driver_calls.then(|| driver_call_log(Arc::clone(observer)));
    let device = Device::open(&settings.device, settings.sync, ranges, log)?;
    observer.device(&device);
    let dataset = load(settings, observer)?;
    observer.dataset(&dataset);
    let mut run = Run::new(settings, command, started, device, &dataset)?;
    run.record.write_summary(&run.summary)?;
    observer.begin(settings, &run.summary, run.steps_in_all(&dataset));
    let ended = run.train(settings, &dataset, stop, observer);
    run.finish(ended)
}

/// More layers than any network has, and few enough that their widths can be listed.
const MOST_LAYERS: u32 = 1 << 16;

/// What can be told from the settings alone.
fn check(settings: &Settings) -> Result<()> {
    let positive = [
        ("--hidden", settings.hidden),
        ("--layers", settings.layers),
        ("--batch", settings.batch),
        ("--epochs", settings.epochs),
    ];
    for (option, value) in positive {
        if value == 0 {
            return Err(TrainError::Input(format!("{option} must be at least 1")));
        }
    }
    if settings.layers > MOST_LAYERS {
        return Err(TrainError::Input(format!("--layers must be at most {MOST_LAYERS}, found {}", settings.layers)));
    }
    if settings.steps == Some(0) {
        return Err(TrainError::Input("--steps must be at least 1".into()));
    }
    if !settings.learning_rate.is_finite() || settings.learning_rate <= 0.0 {
        return Err(TrainError::Input(format!("--lr must be a positive number, found {}", settings.learning_rate)));
    }
    Ok(())
}

fn load(settings: &Settings, observer: &Arc<dyn Observer>) -> Result<Dataset> {
    struct Reported<'a>(&'a Arc<dyn Observer>);
    impl Progress for Reported<'_> {
        fn begin(&mut self, what: &str, total_bytes: Option<u64>) {
            self.0.download_begin(what, total_bytes);
        }

        fn advance(&mut self, bytes: u64) {
            self.0.download_advance(bytes);
        }

        fn finish(&mut self) {
            self.0.download_finish();
        }
    }
    let request = DataRequest {
        name: settings.dataset,
        data_dir: settings.data_dir.clone(),
        seed: settings.seed,
        offline: settings.offline,
    };
    Ok(data::load(&request, &mut Reported(observer))?)
}

/// The order of the training rows in one epoch.
fn shuffled(seed: u64, epoch: u32, order: &mut [u32]) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Weights take the low streams; each epoch has one of its own.
    rng.set_stream((1 << 32) + u64::from(epoch));
    for (row, slot) in (0..).zip(order.iter_mut()) {
        *slot = row;
    }
    order.shuffle(&mut rng);
}

struct Run {
    summary: Summary,
    record: RecordWriter,
    started: Instant,
    /// Declared before `context`: the allocator goes before the device that it allocates from.
    stack: Stack,
    context: Context,
}

impl Run {
    fn new(
        settings: &Settings,
        command: Vec<String>,
        started: Instant,
        device: Device,
        dataset: &Dataset,
    ) -> Result<Self> {
        let widths = network(settings, dataset)?;
        let parameter_bytes = mlp::parameter_bytes(&widths);
        if let Some(limit) = settings.memory_limit.filter(|limit| *limit < parameter_bytes) {
            return Err(TrainError::Input(format!(
                "--memory-limit {} is less than the model's weights, {}: raise it, or lower --hidden or --layers",
                Bytes(limit),
                Bytes(parameter_bytes)
            )));
        }
        let description = device.describe();
        if parameter_bytes > description.total_bytes {
            return Err(TrainError::Input(format!(
                "the model's weights, {}, are more than the memory of {}, {}: lower --hidden or --layers",
                Bytes(parameter_bytes),
                description.name,
                Bytes(description.total_bytes)
            )));
        }
        let stack = Stack::build(&allocator_settings(settings), settings, &device)?;
        let label =
            format!("{}-{}", stack.top.name(), if description.kind == DeviceKind::Cuda { "cuda" } else { "sim" });
        let now = jiff::Timestamp::now();
        let stamp = now.strftime("%Y%m%dT%H%M%SZ").to_string();
        let record = RecordWriter::create(settings.out.as_deref(), &stamp, &label)?;
        let summary = Summary {
            schema_version: SCHEMA_VERSION,
            status: Status::Running,
            error: None,
            code_version: env!("CARGO_PKG_VERSION").into(),
            started_at: now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
            command,
            settings: effective(settings, &stack, &device, dataset),
            clock: if description.virtual_time { "virtual" } else { "monotonic" },
            device: description,
            process_s: started.elapsed().as_secs_f64(),
            first_step_s: None,
            dataset: DatasetRecord {
                name: dataset.name.into(),
                source: dataset.source.clone(),
                checksum: dataset.checksum.clone(),
                files: dataset.files.iter().cloned().map(Into::into).collect(),
                features: dataset.features,
                classes: dataset.classes,
                train_rows: dataset.train.rows,
                validation_rows: dataset.validation.rows,
            },
            parameter_bytes,
            epochs: Vec::new(),
            step_losses: STEPS,
            driver_calls: CallCounts::default(),
            blocked_method: device.blocked_method(),
            idle_costs: device.idle_costs().cloned(),
            allocator_stats: stack.top.stats(),
            latency: Vec::new(),
            fragmentation: stack.top.ledger_at_peak(),
            instruments: stack.costs.clone(),
            check: None,
            files: Files {
                steps: STEPS,
                latency: stack.timed.is_some().then_some(LATENCY),
                trace: stack.trace.is_some().then_some(TRACE),
            },
        };
        let memory = Memory::new(Arc::clone(&stack.top));
        Ok(Self { summary, record, started, stack, context: Context { memory, device } })
    }

    fn steps_in_epoch(&self, rows: usize) -> u64 {
        rows.div_ceil(self.summary.settings.batch as usize) as u64
    }

    fn steps_in_all(&self, dataset: &Dataset) -> u64 {
        let all = self.steps_in_epoch(dataset.train.rows) * u64::from(self.summary.settings.epochs);
        self.summary.settings.steps.map_or(all, |bound| bound.min(all))
    }

    fn train(
        &mut self,
        settings: &Settings,
        dataset: &Dataset,
        stop: &AtomicBool,
        observer: &Arc<dyn Observer>,
    ) -> Result<()> {
        let widths = network(settings, dataset)?;
        let context = &self.context;
        let model = Mlp::new(context, &widths, settings.init, settings.seed, settings.gemm)?;
        let new_loader = |split: &Split| Loader::new(context, split, dataset.features, settings.batch, settings.loader);
        let mut loaders = (new_loader(&dataset.train)?, new_loader(&dataset.validation)?);
        context.device.synchronize()?;
        context.device.profile(true);
        let mut left = self.steps_in_all(dataset);
        for epoch in 1..=settings.epochs {
            let rows =
                Pass { epoch, settings, dataset, model: &model, stop, observer }.run(self, &mut loaders, &mut left);
            let (rows, ended) = rows;
            self.record.append_steps(&rows)?;
            if let Some(trace) = &self.stack.trace {
                self.record.append_trace(&trace.take())?;
            }
            self.update_summary();
            let stop_here = ended.is_err() || left == 0;
            match ended {
                Ok(epoch) => self.summary.epochs.push(epoch),
                Err(error) => {
                    self.record.write_summary(&self.summary)?;
                    return Err(error);
                }
            }
            self.record.write_summary(&self.summary)?;
            // What is announced is in the record already, whatever happens next.
            if let Some(epoch) = self.summary.epochs.last() {
                observer.epoch(epoch);
            }
            if stop_here {
                break;
            }
        }
        self.context.device.profile(false);
        drop((loaders, model));
        self.context.device.synchronize()?;
        Ok(self.context.memory.check()?)
    }

    fn update_summary(&mut self) {
        let summary = &mut self.summary;
        summary.process_s = self.started.elapsed().as_secs_f64();
        summary.driver_calls = self.context.device.calls();
        summary.allocator_stats = self.stack.top.stats();
        summary.fragmentation = self.stack.top.ledger_at_peak();
        summary.latency = self.stack.timed.as_ref().map(|timed| timed.rows()).unwrap_or_default();
        summary.check = self.stack.checker.as_ref().map(|checker| checker.report());
    }

    fn finish(mut self, ended: Result<()>) -> Result<Outcome> {
        self.update_summary();
        let mut error = ended.err();
        if let Some(report) = self.summary.check.as_ref().filter(|report| error.is_none() && !report.is_clean()) {
            let first = report.violations.first().cloned();
            let text = first.unwrap_or_else(|| format!("{} blocks were never freed", report.live.len()));
            error = Some(allocators::AllocError::Violation(text).into());
        }
        self.summary.status = match &error {
            None => Status::Finished,
            Some(TrainError::Interrupted) => Status::Interrupted,
            Some(_) => Status::Failed,
        };
        self.summary.error = error.as_ref().map(ToString::to_string);
        if let Some(trace) = &self.stack.trace {
            self.record.append_trace(&trace.take())?;
        }
        if let Some(timed) = &self.stack.timed {
            self.record.write_latency(timed, self.started.elapsed())?;
        }
        self.record.write_summary(&self.summary)?;
        Ok(Outcome { directory: self.record.directory().to_owned(), summary: self.summary, error })
    }
}

/// One epoch: training, then validation.
struct Pass<'a> {
    epoch: u32,
    settings: &'a Settings,
    dataset: &'a Dataset,
    model: &'a Mlp,
    stop: &'a AtomicBool,
    observer: &'a Arc<dyn Observer>,
}

impl Pass<'_> {
    /// The rows of the steps that were done, losses included, and how the epoch went.
    fn run(
        &self,
        run: &mut Run,
        loaders: &mut (Loader, Loader),
        left: &mut u64,
    ) -> (Vec<StepRow>, Result<EpochRecord>) {
        let mut rows = Vec::new();
        let ended = self.train(run, loaders, left, &mut rows);
        (rows, ended)
    }

    fn train(
        &self,
        run: &mut Run,
        loaders: &mut (Loader, Loader),
        left: &mut u64,
        rows: &mut Vec<StepRow>,
    ) -> Result<EpochRecord> {
        let (settings, split) = (self.settings, &self.dataset.train);
        let steps = run.steps_in_epoch(split.rows).min(*left);
        let device = &run.context.device;
        let _range = device.ranges().range(format_args!("epoch {}", self.epoch));
        let (clock, driver, stream) = (device.clock(), device.driver(), device.stream());
        let (calls_before, busy_before, start_ns) = (device.calls(), device.busy_ns(), clock.now_ns());
        let (first, last) = (driver.event_create(true)?, driver.event_create(true)?);
        driver.event_record(first, stream)?;

        let mut order = vec![0u32; split.rows];
        shuffled(settings.seed, self.epoch, &mut order);
        loaders.0.begin_pass(&run.context, &order)?;
        // CAST: an epoch's steps are bounded by its rows.
        let losses = run.context.allocate::<f32>(steps as usize)?;
        let batch = settings.batch as usize;
        let mut allocations = device.calls().driver_allocations();
        let mut ended = Ok(());
        for step in 0..steps {
            if self.stop.load(Relaxed) {
                ended = Err(TrainError::Interrupted);
                break;
            }
            self.observer.step(self.epoch, step + 1);
            if run.summary.first_step_s.is_none() {
                run.summary.first_step_s = Some(run.started.elapsed().as_secs_f64());
            }
            let from = step as usize * batch;
            let range = from..(from + batch).min(split.rows);
            let count = range.len();
            if let Err(error) = self.step(run, &mut loaders.0, &order, range, step, losses.addr().get() + 4 * step) {
                ended = Err(error);
                break;
            }
            let (allocated, reserved) = run.stack.levels();
            let so_far = run.context.device.calls().driver_allocations();
            rows.push(StepRow {
                epoch: self.epoch,
                step: step + 1,
                // CAST: a batch's rows are a u32.
                rows: count as u32,
                loss: None,
                host_ns: clock.now_ns(),
                driver_allocations: so_far - allocations,
                reserved_bytes: reserved,
                allocated_bytes: allocated,
            });
            allocations = so_far;
        }
        // The losses of an interrupted epoch are read as well; after a failure the device may not answer.
        if !rows.is_empty() && matches!(ended, Ok(()) | Err(TrainError::Interrupted)) {
            let values = run.context.read::<f32>(&losses, rows.len())?;
            for (row, value) in rows.iter_mut().zip(values) {
                row.loss = Some(value);
            }
        }
        ended?;
        *left -= steps;
        drop(losses);
        let mut weighted = 0.0;
        for row in rows.iter() {
            let loss = row.loss.unwrap_or(f32::NAN);
            if !loss.is_finite() {
                let (epoch, step) = (self.epoch, row.step);
                return Err(TrainError::Diverged { epoch, step, loss, learning_rate: settings.learning_rate });
            }
            weighted += f64::from(loss) * f64::from(row.rows);
        }
        let seen = rows.iter().map(|row| f64::from(row.rows)).sum::<f64>();
        self.observer.validation(self.epoch);
        let (val_loss, val_accuracy) = self.validate(run, &mut loaders.1)?;
        // The last update of an epoch shows in no training loss of it.
        if !val_loss.is_finite() {
            let (epoch, learning_rate) = (self.epoch, settings.learning_rate);
            return Err(TrainError::DivergedInValidation { epoch, loss: val_loss, learning_rate });
        }
        driver.event_record(last, stream)?;
        driver.event_synchronize(last)?;
        let device_ns = driver.event_elapsed_ns(first, last)?;
        for event in [first, last] {
            // SAFETY: both have completed and are used nowhere else.
            unsafe { driver.event_destroy(event)? };
        }
        let device = &run.context.device;
        let busy = device.busy_ns().zip(busy_before).map(|(now, before)| seconds(now - before));
        Ok(EpochRecord {
            epoch: self.epoch,
            steps,
            train_loss: weighted / seen,
            val_loss,
            val_accuracy,
            wall_s: seconds(clock.now_ns() - start_ns),
            device_s: seconds(device_ns),
            device_busy_s: busy,
            driver_calls: device.calls().since(&calls_before),
        })
    }

    fn step(
        &self,
        run: &Run,
        loader: &mut Loader,
        order: &[u32],
        range: std::ops::Range<usize>,
        step: u64,
        loss_slot: u64,
    ) -> Result<()> {
        let context = &run.context;
        let _range = context.device.ranges().range(format_args!("step {}", step + 1));
        let batch = loader.batch(context, &self.dataset.train, order, range)?;
        let gradients = self.model.gradients(context, batch, loss_slot)?;
        self.model.update(context, gradients, self.settings.learning_rate)?;
        if self.settings.sync == SyncMode::Step {
            context.device.synchronize()?;
        }
        Ok(context.memory.check()?)
    }

    /// Mean loss and accuracy on the validation rows.
    fn validate(&self, run: &Run, loader: &mut Loader) -> Result<(f64, f64)> {
        let context = &run.context;
        let _range = context.device.ranges().range(format_args!("validate"));
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

fn network(settings: &Settings, dataset: &Dataset) -> Result<Vec<u32>> {
    let size =
        |value: usize| u32::try_from(value).map_err(|_| TrainError::Input(format!("{value} is too wide a layer")));
    let widths = mlp::widths(size(dataset.features)?, settings.hidden, settings.layers, size(dataset.classes)?);
    const MOST: u64 = 1 << 31;
    let largest = widths.windows(2).map(|pair| u64::from(pair[0]) * u64::from(pair[1])).max().unwrap_or(0);
    let rows = u64::from(settings.batch) * u64::from(widths.iter().copied().max().unwrap_or(0));
    if largest >= MOST || rows >= MOST {
        return Err(TrainError::Input(
            "a tensor would have more than 2^31 values: lower --hidden or --batch".to_owned(),
        ));
    }
    Ok(widths)
}

fn allocator_settings(settings: &Settings) -> AllocatorSettings {
    let mut out = AllocatorSettings::new(settings.allocator);
    out.pool = settings.pool;
    out.caching = settings.caching;
    if settings.allocator == BackendKind::Caching {
        out.caching.memory_limit = settings.memory_limit;
    }
    out
}

fn effective(settings: &Settings, stack: &Stack, device: &Device, dataset: &Dataset) -> EffectiveSettings {
    let name = match (&settings.device, device.describe().kind) {
        (DeviceChoice::Cuda(number), _) => format!("cuda:{number}"),
        (DeviceChoice::SimProfile(path), _) => format!("sim:{}", path.display()),
        (_, DeviceKind::Cuda) => "cuda:0".into(),
        _ => "sim".into(),
    };
    EffectiveSettings {
        allocator: stack.top.name().into(),
        allocator_settings: stack.top.settings(),
        memory_limit: settings.memory_limit,
        device: name,
        dataset: dataset.name.into(),
        hidden: settings.hidden,
        layers: settings.layers,
        batch: settings.batch,
        epochs: settings.epochs,
        steps: settings.steps,
        lr: settings.learning_rate,
        seed: settings.seed,
        sync: settings.sync,
        loader: settings.loader,
        init: settings.init,
        gemm: settings.gemm,
        dtype: "f32",
        nvtx: device.ranges().is_on(),
        latency: stack.timed.is_some(),
        trace: stack.trace.is_some(),
        check: stack.checker.is_some(),
    }
}
