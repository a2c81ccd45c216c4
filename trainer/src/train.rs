//! One run from settings to record.

mod capture;
mod epoch;
mod of_ranks;
mod stepper;

use crate::arithmetic::Arithmetic;
use crate::calls::CallLog;
use crate::check;
use crate::data::{self, Dataset, Split};
use crate::device::{Backend, Device};
use crate::error::{Result, TrainError};
use crate::export;
use crate::latency::{Intervals, LatencyRecord};
use crate::loader::Loader;
use crate::mlp::{self, Buckets, Mlp};
use crate::observer::{Observer, driver_call_log};
use crate::provenance::{self, Provenance};
use crate::ranks::{self, Group};
use crate::record::{
    DRIVER_CALLS, DatasetRecord, EffectiveSettings, Files, LATENCY, RecordWriter, SCHEMA_VERSION, STEPS, Status,
    Summary, TRACE,
};
use crate::settings::{DeviceChoice, Settings};
use crate::stack::Stack;
use crate::start;
use crate::tensor::Context;
use capture::Capture;
use of_ranks::{cause, communication, part, record_of_rank};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use stepper::Stepper;
use vramlab::device::CallObserver;
use vramlab::instruments::NvtxMode;
use vramlab::instruments::nvtx::Ranges;
use vramlab::{Bytes, CallCounts, CallEvent, DeviceKind, HostRoom, Memory};

pub use crate::record::LastAllocation;

/// The result of a run that has completed or was ended early.
#[derive(Debug)]
pub struct Outcome {
    /// The record, as written.
    pub summary: Summary,
    /// Directory of the record.
    pub directory: std::path::PathBuf,
    /// Why the run ended early, if it did.
    pub error: Option<TrainError>,
    /// Position of the allocator's last request to the driver; `None` if it was before the first step.
    pub last_allocation: Option<LastAllocation>,
}

/// Trains as the settings say.
///
/// `started` is the start of the process; `stop` is checked between steps; `observer` is notified of progress.
///
/// # Errors
/// Errors before the record exists. Later errors are in the [`Outcome`], together with the record of the completed
/// work.
pub fn run(
    settings: &Settings,
    command: Vec<String>,
    started: Instant,
    stop: &AtomicBool,
    observer: &Arc<dyn Observer>,
) -> Result<Outcome> {
    run_part(settings, command, started, stop, observer, None)
}

/// Trains as one rank of a group. A failure of any rank ends all; the error is that of the rank which failed.
///
/// # Errors
/// As for [`run`].
pub(crate) fn run_rank(
    settings: &Settings,
    command: Vec<String>,
    started: Instant,
    stop: &AtomicBool,
    observer: &Arc<dyn Observer>,
    group: &Arc<Group>,
) -> Result<Outcome> {
    let outcome = run_part(settings, command, started, stop, observer, Some(Arc::clone(group)));
    outcome.map_err(|error| cause(group, error))
}

fn run_part(
    settings: &Settings,
    command: Vec<String>,
    started: Instant,
    stop: &AtomicBool,
    observer: &Arc<dyn Observer>,
    group: Option<Arc<Group>>,
) -> Result<Outcome> {
    check::settings(settings)?;
    if let Some(group) = &group {
        check::ranks(settings, group.size())?;
    }
    let ranges = Ranges::new(settings.nvtx);
    ranges.name_thread("trainer");
    let calls = (!settings.exports.is_empty()).then(|| Arc::new(CallLog::default()));
    let mut device =
        Device::open(&settings.device, settings.sync, ranges, listeners(settings, observer, calls.as_ref()))?;
    if let Some(calls) = &calls {
        device.name_launches(Arc::clone(calls));
    }
    device.open_streams(settings.streams)?;
    if let Some(mode) = settings.pin_mode() {
        device.pin(mode)?;
    }
    if settings.offload.is_some() {
        device.open_offload()?;
    }
    device.prepare(&settings.arithmetic()?)?;
    observer.device(&device);
    let backend = group.as_ref().map(|group| device.join(group, settings)).transpose()?;
    let start = settings.save_start.as_deref().map(start::begin).transpose()?;
    let dataset = load(settings, observer, group.as_deref())?;
    observer.dataset(&dataset);
    if let Some(group) = &group {
        ranks::check_batches(settings, group.size(), Some(dataset.train.rows))?;
        ranks::check_alike(group, device.describe().kind, &dataset)?;
    }
    let steps = steps_in_all(settings, &dataset);
    // Before the record exists, because both depend only on the command line.
    let capture = Capture::new(settings.profile_steps, steps)?;
    let mut run = Run::new(settings, command, started, device, &dataset, calls, group)?;
    run.record.write_summary(&run.summary)?;
    if let Err(error) = run.announce_record() {
        return run.finish(Err(error));
    }
    // After all that can be refused: a refused run keeps the start file that was there.
    if let Some(file) = start {
        match start::write(file, settings, &dataset) {
            Ok(start) => run.summary.start = Some(start),
            Err(error) => return run.finish(Err(error)),
        }
        run.record.write_summary(&run.summary)?;
    }
    observer.begin(settings, &run.summary, steps);
    let ended = run.train(settings, &dataset, capture, stop, observer, backend);
    // Before the device is closed, which would wait for the others.
    let ended = match (ended, &run.group) {
        (Err(error), Some(group)) => Err(cause(group, error)),
        (ended, _) => ended,
    };
    run.finish(ended)
}

/// Loads the data. Rank 0 does so first, so that one rank downloads what all read.
fn load(settings: &Settings, observer: &Arc<dyn Observer>, group: Option<&Group>) -> Result<Dataset> {
    let load = || data::load(&settings.data(), observer.as_ref());
    match group {
        None => Ok(load()?),
        Some(group) if group.rank() == 0 => {
            let dataset = load()?;
            group.broadcast(Vec::new())?;
            Ok(dataset)
        }
        Some(group) => {
            group.broadcast(Vec::new())?;
            Ok(load()?)
        }
    }
}

/// Listeners for driver calls.
fn listeners(settings: &Settings, observer: &Arc<dyn Observer>, calls: Option<&Arc<CallLog>>) -> Option<CallObserver> {
    let printed = settings.log_driver_calls.then(|| driver_call_log(Arc::clone(observer)));
    let Some(calls) = calls.cloned() else { return printed };
    Some(Box::new(move |event: &CallEvent| {
        calls.observe(event);
        if let Some(printed) = &printed {
            printed(event);
        }
    }))
}

struct Run {
    summary: Summary,
    record: RecordWriter,
    started: Instant,
    /// Latency histograms by part of the run.
    latency: Intervals,
    /// Driver calls for the exports.
    calls: Option<Arc<CallLog>>,
    last_allocation: Option<LastAllocation>,
    /// The other ranks, where there are several.
    group: Option<Arc<Group>>,
    /// Most bytes that were freed and not reusable yet, after a step.
    peak_pending_bytes: u64,
    /// Number of steps whose waits for sums were timed, and the total of these waits in ns.
    sum_waits: (u64, u64),
    /// Number of steps whose waits for the optimizer's state were timed, and the total of these waits in ns.
    offload_waits: (u64, u64),
    /// Declared before `context`: the allocator is dropped before the device that it allocates from.
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
        calls: Option<Arc<CallLog>>,
        group: Option<Arc<Group>>,
    ) -> Result<Self> {
        let widths = check::network(settings, dataset)?;
        let arithmetic = settings.arithmetic()?;
        let parameter_bytes = mlp::parameter_bytes(&widths, &arithmetic);
        let on_host = if settings.offload.is_some() { mlp::state_bytes(&widths, &arithmetic) } else { 0 };
        let on_device = parameter_bytes - on_host;
        check::pinned_memory(on_host, HostRoom::now())?;
        let limit = settings.memory_limit.or(settings.allocator.memory_limit());
        if let Some(limit) = limit.filter(|limit| *limit < on_device) {
            return Err(TrainError::Input(format!(
                "--memory-limit {} is less than the model's weights, {}: raise it, or lower --hidden or --layers",
                Bytes(limit),
                Bytes(on_device)
            )));
        }
        let description = device.describe();
        if on_device > description.total_bytes {
            return Err(TrainError::Input(format!(
                "the model's weights, {}, are more than the memory of {}, {}: lower --hidden or --layers",
                Bytes(on_device),
                description.name,
                Bytes(description.total_bytes)
            )));
        }
        if description.kind == DeviceKind::Sim {
            let ranks = group.as_ref().map_or(1, |group| u64::from(group.size()));
            let least = mlp::least_host_bytes(&widths, &arithmetic, settings.batch).saturating_mul(ranks);
            check::host_memory(least, HostRoom::now())?;
        }
        let stack = Stack::build(settings, &device)?;
        let label = format!("{}-{}", stack.top.name(), description.kind);
        let started_at = provenance::now();
        let stamp = started_at.replace(['-', ':'], "");
        terminal::signals::record_begins();
        let out = match &group {
            None => settings.out.clone(),
            // No rank begins a record before all can, and the others' are in that of rank 0.
            Some(group) => {
                group.broadcast(Vec::new())?;
                if group.rank() == 0 { settings.out.clone() } else { Some(record_of_rank(group)?) }
            }
        };
        // Last, so that nothing after it fails without a summary.
        let record = RecordWriter::create(out.as_deref(), &stamp, &label)?;
        let summary = Summary {
            schema_version: SCHEMA_VERSION,
            program: "trainer",
            status: Status::Running,
            error: None,
            code_version: env!("CARGO_PKG_VERSION").into(),
            provenance: Provenance::of(terminal::built!()),
            started_at,
            command,
            settings: effective(settings, &arithmetic, &stack, &device, dataset, group.is_some()),
            rank: group.as_ref().map(|group| group.rank()),
            clock: if description.virtual_time { "virtual" } else { "monotonic" },
            device: description,
            process_s: started.elapsed().as_secs_f64(),
            first_step_s: None,
            dataset: DatasetRecord {
                name: dataset.name,
                source: dataset.source.clone(),
                checksum: dataset.checksum.clone(),
                files: dataset.files.clone(),
                features: dataset.features,
                classes: dataset.classes,
                train_rows: dataset.train.rows,
                validation_rows: dataset.validation.rows,
            },
            start: None,
            parameter_bytes,
            host_memory: None,
            epochs: Vec::new(),
            communication: None,
            ranks: Vec::new(),
            rank_spread: None,
            step_losses: STEPS,
            driver_calls: CallCounts::default(),
            blocked_method: device.blocked_method(),
            products: None,
            idle_costs: device.idle_costs().cloned(),
            kernels_without_cost: Vec::new(),
            allocator_stats: stack.top.stats(),
            upper_bounds: Vec::new(),
            latency: Vec::new(),
            fragmentation: stack.top.ledger_at_peak(),
            instruments: stack.costs.clone(),
            check: None,
            files: Files {
                steps: STEPS,
                latency: stack.timed.is_some().then_some(LATENCY),
                trace: stack.trace.is_some().then_some(TRACE),
                driver_calls: calls.is_some().then_some(DRIVER_CALLS),
                exports: Vec::new(),
            },
        };
        let memory = Memory::new(Arc::clone(&stack.top));
        let latency = Intervals::new(started);
        Ok(Self {
            summary,
            record,
            started,
            latency,
            calls,
            last_allocation: None,
            group,
            peak_pending_bytes: 0,
            sum_waits: (0, 0),
            offload_waits: (0, 0),
            stack,
            context: Context { memory, device },
        })
    }

    fn steps_in_epoch(&self, rows: usize) -> u64 {
        rows.div_ceil(self.summary.settings.chosen.batch as usize) as u64
    }

    fn train(
        &mut self,
        settings: &Settings,
        dataset: &Dataset,
        mut capture: Capture,
        stop: &AtomicBool,
        observer: &Arc<dyn Observer>,
        backend: Option<Backend>,
    ) -> Result<()> {
        let widths = check::network(settings, dataset)?;
        let context = &self.context;
        let arithmetic = settings.arithmetic()?;
        let batches = batches(settings, dataset, self.group.as_deref());
        let start = (settings.init, settings.seed);
        let model = Mlp::with_state(context, &widths, start, arithmetic, &batches, settings.offload)?;
        let new_loader =
            |split: &Split| Loader::new(context, split, dataset.features, settings.batch, settings.loader, &arithmetic);
        let mut loaders = (new_loader(&dataset.train)?, new_loader(&dataset.validation)?);
        let mut left = steps_in_all(settings, dataset);
        let mut stepper = Stepper::new(context, settings, &mut loaders.0, (dataset.train.rows, left))?;
        let buckets = backend.as_ref().map(|_| Buckets::new(context, &model, settings)).transpose()?;
        if let Some((backend, buckets)) = backend.zip(buckets.as_ref()) {
            let costs = buckets.warm_up(context)?;
            self.summary.communication = Some(communication(settings, backend, buckets, costs));
        }
        // CAST: at most the batch, which is a u32.
        let rows = part(dataset.train.rows.min(settings.batch as usize), self.group.as_deref()) as u32;
        self.summary.products = Some(mlp::products(&widths, &arithmetic, rows, context.device.kernels())?);
        capture.training_begins(&context.device)?;
        for epoch in 1..=settings.epochs {
            let pass =
                epoch::Pass { epoch, settings, dataset, model: &model, buckets: buckets.as_ref(), stop, observer };
            let mut rows = Vec::new();
            let ended = pass.run(self, (&mut stepper, &mut loaders), &mut left, &mut capture, &mut rows);
            self.last_allocation = LastAllocation::of_epoch(epoch, &rows, ended.as_ref().ok()).or(self.last_allocation);
            self.record.append_steps(&rows)?;
            self.append_history()?;
            self.append_latency()?;
            self.update_summary();
            let offload = model.offload_record(self.offload_waits);
            self.summary.host_memory = self.context.device.host_memory().record(offload);
            let pending = rows.iter().map(|row| row.active_bytes.saturating_sub(row.allocated_bytes)).max();
            self.peak_pending_bytes = self.peak_pending_bytes.max(pending.unwrap_or_default());
            let stop_here = ended.is_err() || left == 0;
            match ended {
                Ok(epoch) => self.summary.epochs.push(epoch),
                Err(error) => {
                    self.record.write_summary(&self.summary)?;
                    return Err(error);
                }
            }
            self.gather_ranks()?;
            self.record.write_summary(&self.summary)?;
            // The epoch is in the record before the observer is notified, whatever happens next.
            if let Some(epoch) = self.summary.epochs.last() {
                observer.epoch(epoch);
            }
            if stop_here {
                break;
            }
        }
        capture.training_ends(&self.context.device)?;
        stepper.release()?;
        drop((loaders, model, buckets));
        self.context.device.synchronize()?;
        if let Some(group) = &self.group {
            // No rank closes its device while another may still use its memory.
            group.broadcast(Vec::new())?;
        }
        Ok(self.context.memory.check()?)
    }

    /// Tells the other ranks where the record of rank 0 is.
    fn announce_record(&self) -> Result<()> {
        let Some(group) = self.group.as_ref().filter(|group| group.rank() == 0) else { return Ok(()) };
        let directory = std::path::absolute(self.record.directory()).unwrap_or_else(|_| self.record.directory().into());
        group.broadcast(serde_json::to_vec(&directory).unwrap_or_default()).map(drop)
    }

    /// Moves the contents of the trace and the call log from memory to the record.
    fn append_history(&self) -> Result<()> {
        if let Some(trace) = &self.stack.trace {
            self.record.append_trace(&trace.take())?;
        }
        if let Some(calls) = &self.calls {
            self.record.append_driver_calls(&calls.take())?;
        }
        Ok(())
    }

    /// Ends an interval of the latency histograms, without a file.
    fn close_latency(&mut self) {
        if let Some(timed) = &self.stack.timed {
            self.latency.close(timed);
        }
    }

    /// Ends an interval of the latency histograms and moves all that have ended to the record.
    fn append_latency(&mut self) -> Result<()> {
        self.close_latency();
        if self.stack.timed.is_none() {
            return Ok(());
        }
        let (began, intervals) = self.latency.take();
        self.record.append_latency(began, &intervals)
    }

    /// Writes the exports, of which the summary then tells.
    fn export(&mut self) -> Result<()> {
        let snapshot = self.stack.top.snapshot();
        let end_ns = self.context.device.clock().now_ns();
        let EffectiveSettings { allocator_settings, chosen, .. } = &self.summary.settings;
        export::write(self.record.directory(), &chosen.exports, end_ns, snapshot.as_ref(), allocator_settings)?;
        self.summary.files.exports = chosen.exports.iter().map(|export| export.file_name()).collect();
        Ok(())
    }

    fn update_summary(&mut self) {
        let summary = &mut self.summary;
        summary.process_s = self.started.elapsed().as_secs_f64();
        summary.driver_calls = self.context.device.calls();
        summary.kernels_without_cost = self.context.device.kernels_without_cost();
        summary.allocator_stats = self.stack.top.stats();
        summary.upper_bounds = summary.allocator_stats.upper_bounds();
        summary.fragmentation = self.stack.top.ledger_at_peak();
        let rows = self.stack.timed.as_ref().map(|timed| timed.rows()).unwrap_or_default();
        summary.latency = rows.into_iter().map(|row| LatencyRecord::new(row, summary.clock)).collect();
        summary.check = self.stack.checker.as_ref().map(|checker| checker.report());
    }

    fn finish(mut self, ended: Result<()>) -> Result<Outcome> {
        let rest = self.append_history().and_then(|()| self.append_latency());
        self.update_summary();
        // Whatever ends a run, its record says how; what could not be recorded comes before having been interrupted.
        let mut error = match (ended, rest) {
            (Ok(()) | Err(TrainError::Interrupted), Err(unrecorded)) => Some(unrecorded),
            (ended, _) => ended.err(),
        };
        if let Some(report) = self.summary.check.as_ref().filter(|report| error.is_none() && !report.is_clean()) {
            let first = report.violations.first().cloned();
            let text = first.unwrap_or_else(|| format!("{} blocks were never freed", report.live.len()));
            error = Some(vramlab::AllocError::Violation(text).into());
        }
        self.summary.status = match &error {
            None => Status::Finished,
            Some(TrainError::Interrupted) => Status::Interrupted,
            Some(_) => Status::Failed,
        };
        self.summary.error = error.as_ref().map(ToString::to_string);
        // The record is whole before the exports, which are made from it.
        self.record.write_summary(&self.summary)?;
        if self.calls.is_some() && !self.record.is_incomplete() {
            if let Err(failed) = self.export() {
                self.summary.status = Status::Failed;
                self.summary.error = Some(failed.to_string());
                error = Some(failed);
            }
            self.record.write_summary(&self.summary)?;
        }
        Ok(Outcome {
            directory: self.record.directory().to_owned(),
            summary: self.summary,
            error,
            last_allocation: self.last_allocation,
        })
    }
}

/// Training steps of a run.
fn steps_in_all(settings: &Settings, dataset: &Dataset) -> u64 {
    let all = dataset.train.rows.div_ceil(settings.batch as usize) as u64 * u64::from(settings.epochs);
    settings.steps.map_or(all, |bound| bound.min(all))
}

/// Numbers of rows that batches have: whole ones and the last of a pass, in training (of a rank its part) and in validation.
fn batches(settings: &Settings, dataset: &Dataset, group: Option<&Group>) -> Vec<u32> {
    let mut out = Vec::new();
    for (rows, group) in [(dataset.train.rows, group), (dataset.validation.rows, None)] {
        let batch = settings.batch as usize;
        let rows = [rows.min(batch), rows % batch].map(|rows| part(rows, group));
        // CAST: data sets have fewer than 2^32 rows.
        out.extend(rows.into_iter().filter(|rows| *rows > 0).map(|rows| rows as u32));
    }
    out.sort_unstable();
    out.dedup();
    out
}

fn effective(
    settings: &Settings,
    arithmetic: &Arithmetic,
    stack: &Stack,
    device: &Device,
    dataset: &Dataset,
    of_rank: bool,
) -> EffectiveSettings {
    let &Arithmetic { gemm, loss_scale, .. } = arithmetic;
    let mut exports = settings.exports.clone();
    exports.sort_unstable();
    exports.dedup();
    EffectiveSettings {
        allocator: stack.top.name().into(),
        allocator_settings: stack.top.settings(),
        precision: arithmetic.precision().name(),
        chosen: Settings {
            memory_limit: settings.memory_limit.or(settings.allocator.memory_limit()),
            device: DeviceChoice::Named(device.name().clone()),
            dataset: dataset.name,
            gemm: Some(gemm),
            loss_scale: Some(loss_scale),
            graph_steps: settings.steps_in_graph(),
            pin: settings.pin_mode(),
            bucket: of_rank.then(|| settings.bucket.unwrap_or(mlp::USUAL_BUCKET)),
            overlap: of_rank.then(|| settings.overlap.unwrap_or(true)),
            buffers: of_rank.then(|| settings.buffers.unwrap_or_default()),
            comm_streams: of_rank.then(|| settings.comm_streams.unwrap_or(1)),
            bucket_source: of_rank.then(|| settings.bucket_source.unwrap_or_default()),
            register: of_rank.then(|| settings.register.unwrap_or(false)),
            peer_access: of_rank.then(|| settings.peer_access.unwrap_or(false)),
            nvtx: if device.ranges().is_on() { NvtxMode::On } else { NvtxMode::Off },
            nvtx_memory: if stack.nvtx_heaps { NvtxMode::On } else { NvtxMode::Off },
            latency: stack.timed.is_some(),
            trace: stack.trace.is_some(),
            exports,
            check: stack.checker.is_some(),
            ..settings.clone()
        },
    }
}
