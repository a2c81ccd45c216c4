//! The table of a run's steps: times, losses and memory.

use super::{Record, plain_or_packed, quantile};
use anyhow::{Context, Result, anyhow};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hdrhistogram::Histogram;
use hdrhistogram::serialization::Deserializer;
use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use vramlab::input;

/// Points of a curve; about the columns of a screen.
const POINTS: usize = 600;
/// Minimum number of steps averaged in a point of the losses.
const STEPS_PER_POINT: usize = 10;

#[derive(Debug, Deserialize)]
struct Row {
    epoch: u64,
    step: u64,
    loss: Option<f64>,
    host_ns: Option<u64>,
    reserved_bytes: Option<u64>,
    allocated_bytes: Option<u64>,
    active_bytes: Option<u64>,
    requested_bytes: Option<u64>,
}

/// The steps of a run, in order.
#[derive(Debug)]
pub(in crate::report) struct Steps(Vec<Row>);

/// Curves over the steps. A curve is a list of points: step, from 1, and value.
#[derive(Debug, Serialize)]
pub(super) struct Curves {
    steps: usize,
    loss: Vec<(usize, f64)>,
    reserved: Vec<(usize, f64)>,
    active: Vec<(usize, f64)>,
    requested: Vec<(usize, f64)>,
}

impl Steps {
    /// Reads the table of a run; `None` if it does not exist.
    ///
    /// # Errors
    /// One line with the file and the row.
    pub(in crate::report) fn read(directory: &Path, record: &Record) -> Result<Option<Self>> {
        let path = plain_or_packed(&directory.join(&record.step_losses));
        if !path.is_file() {
            return Ok(None);
        }
        let text = input::read_unpacked(&path, input::TABLE).with_context(|| path.display().to_string())?;
        let rows = csv::Reader::from_reader(text.as_bytes()).into_deserialize().collect::<Result<Vec<Row>, _>>();
        Ok(Some(Self(rows.with_context(|| path.display().to_string())?)))
    }

    /// The end of each step on the run's clock, with its label.
    pub(in crate::report) fn ends(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let end = |row: &Row| Some((format!("end of step {} of epoch {}", row.step, row.epoch), row.host_ns?));
        self.0.iter().filter_map(end)
    }

    /// Host time of each step in ns, except the first step of each epoch and the first quarter of the run, at most 100 steps.
    pub(super) fn times(&self) -> Vec<f64> {
        let skip = (self.0.len() / 4).clamp(1, 100);
        let time = |at: usize| {
            let (before, row) = (&self.0[at - 1], &self.0[at]);
            let (from, to) = before.host_ns.zip(row.host_ns)?;
            (before.epoch == row.epoch).then(|| to.saturating_sub(from) as f64)
        };
        (skip..self.0.len()).filter_map(time).collect()
    }

    /// Time of a step. If the host never waits for the device, the time of a single step is that of queueing its work, and only the
    /// mean is the time of a step.
    pub(super) fn pace(&self, never_waits: bool) -> Option<f64> {
        let times = self.times();
        match never_waits {
            true => (!times.is_empty()).then(|| times.iter().sum::<f64>() / times.len() as f64),
            false => quantile(&times, 0.5),
        }
    }

    pub(super) fn curves(&self) -> Curves {
        let level = |of: fn(&Row) -> Option<u64>| {
            let values: Option<Vec<f64>> = self.0.iter().map(|row| of(row).map(|bytes| bytes as f64)).collect();
            values.map_or_else(Vec::new, |values| thin(&values, 1, |part| part.iter().copied().fold(0.0, f64::max)))
        };
        let losses: Option<Vec<f64>> = self.0.iter().map(|row| row.loss.filter(|loss| loss.is_finite())).collect();
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        Curves {
            steps: self.0.len(),
            loss: losses.map_or_else(Vec::new, |losses| thin(&losses, STEPS_PER_POINT, mean)),
            reserved: level(|row| row.reserved_bytes),
            active: level(|row| row.active_bytes.or(row.allocated_bytes)),
            requested: level(|row| row.requested_bytes),
        }
    }

    /// The difference between the losses of two runs in the steps that both have, as text.
    pub(super) fn compare_losses(&self, other: &Self) -> Option<String> {
        let baseline: BTreeMap<(u64, u64), f64> =
            other.0.iter().filter_map(|row| Some(((row.epoch, row.step), row.loss?))).collect();
        let both = |row: &Row| Some((row.loss?, *baseline.get(&(row.epoch, row.step))?));
        let relative = |(actual, expected): (f64, f64)| {
            if actual == expected { 0.0 } else { ((actual - expected) / expected).abs() }
        };
        let differences: Vec<f64> = self.0.iter().filter_map(both).map(relative).collect();
        let max = differences.iter().copied().max_by(f64::total_cmp)?;
        let text =
            if max == 0.0 { "are bit-identical".to_owned() } else { format!("differ by at most {max:.1e} (relative)") };
        Some(format!("losses of {} steps {text}.", differences.len()))
    }
}

/// Reduces values to at most `POINTS` points, each made of at least `least` neighbouring values and placed at the last of them.
fn thin(values: &[f64], least: usize, of: impl Fn(&[f64]) -> f64) -> Vec<(usize, f64)> {
    let width = values.len().div_ceil(POINTS).max(if values.len() >= 2 * least { least } else { 1 });
    let ends = (1..=values.len().div_ceil(width)).map(|part| (part * width).min(values.len()));
    ends.scan(0, |from, end| {
        let point = (end, of(&values[*from..end]));
        *from = end;
        Some(point)
    })
    .collect()
}

// The latency histograms of a run (`latency.hlog`, the interval log of HdrHistogram) as percentile spectra.

/// Time of one operation on one path, by the share of operations that were at least as fast.
#[derive(Debug, Serialize)]
pub(super) struct Spectrum {
    operation: String,
    path: String,
    count: u64,
    /// Share from 0 to 1, and ns.
    points: Vec<(f64, u64)>,
}

/// Reads the log; empty if it does not exist. On a simulated device only driver calls take time, so operations without time were
/// not measured and are omitted.
///
/// # Errors
/// One line about the fault in the file.
pub(super) fn read(path: &Path, simulated: bool) -> Result<Vec<Spectrum>> {
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let bytes = input::read_bytes(path, input::DOCUMENT).with_context(|| path.display().to_string())?;
    let merged = merged(&bytes).with_context(|| format!("{}: not a log of histograms", path.display()))?;
    Ok(merged.into_iter().filter_map(|(tag, histogram)| spectrum(&tag, &histogram, simulated)).collect())
}

/// The merged intervals of each tag.
fn merged(bytes: &[u8]) -> Result<BTreeMap<String, Histogram<u64>>> {
    let mut out: BTreeMap<String, Histogram<u64>> = BTreeMap::new();
    for entry in IntervalLogIterator::new(bytes) {
        let LogEntry::Interval(interval) = entry.map_err(|error| anyhow!("{error:?}"))? else { continue };
        let raw = STANDARD.decode(interval.encoded_histogram())?;
        let histogram = Deserializer::new().deserialize(&mut raw.as_slice()).map_err(|error| anyhow!("{error:?}"))?;
        let tag = interval.tag().map_or("all.all", |tag| tag.as_str()).to_owned();
        match out.entry(tag) {
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(histogram);
            }
            std::collections::btree_map::Entry::Occupied(mut entry) => {
                entry.get_mut().add(&histogram).map_err(|error| anyhow!("{error:?}"))?;
            }
        }
    }
    Ok(out)
}

fn spectrum(tag: &str, histogram: &Histogram<u64>, simulated: bool) -> Option<Spectrum> {
    let (operation, path) = tag.split_once('.').unwrap_or((tag, "all"));
    let count = histogram.len();
    let (mut below, mut points) = (0, Vec::new());
    for bucket in histogram.iter_recorded() {
        let from = below;
        below += bucket.count_since_last_iteration();
        // A histogram's minimum value is 1.
        if simulated && bucket.value_iterated_to() <= 1 {
            continue;
        }
        let share = |operations: u64| operations as f64 / count as f64;
        points.push((share(from), bucket.value_iterated_to()));
        // The largest value is drawn at the highest share that this number of operations can resolve.
        points.push((share(below).min(1.0 - 0.5 / count as f64), bucket.value_iterated_to()));
    }
    (!points.is_empty()).then(|| Spectrum { operation: operation.to_owned(), path: path.to_owned(), count, points })
}
