//! The table of a run's steps: their times, losses and levels of memory.

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

/// Points of a curve; a screen has about as many columns.
const POINTS: usize = 600;
/// Steps that a point of the losses is the mean of, at least.
const OVER: usize = 10;

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

/// What is drawn over the steps. A curve is its points: step, from 1, and value.
#[derive(Debug, Serialize)]
pub(super) struct Curves {
    steps: usize,
    loss: Vec<(usize, f64)>,
    reserved: Vec<(usize, f64)>,
    active: Vec<(usize, f64)>,
    requested: Vec<(usize, f64)>,
}

impl Steps {
    /// Reads the table of a run; `None` where it was not kept.
    ///
    /// # Errors
    /// One line that names the file and the row.
    pub(in crate::report) fn read(folder: &Path, record: &Record) -> Result<Option<Self>> {
        let path = plain_or_packed(&folder.join(&record.step_losses));
        if !path.is_file() {
            return Ok(None);
        }
        let text = input::read_unpacked(&path, input::TABLE).with_context(|| path.display().to_string())?;
        let rows = csv::Reader::from_reader(text.as_bytes()).into_deserialize().collect::<Result<Vec<Row>, _>>();
        Ok(Some(Self(rows.with_context(|| path.display().to_string())?)))
    }

    /// When each step ended by the run's clock, with words for it.
    pub(in crate::report) fn ends(&self) -> impl Iterator<Item = (String, u64)> + '_ {
        let end = |row: &Row| Some((format!("end of step {} of epoch {}", row.step, row.epoch), row.host_ns?));
        self.0.iter().filter_map(end)
    }

    /// Host time of each step in ns, without the first of each epoch and the first of the run: a quarter of them, at most 100.
    pub(super) fn times(&self) -> Vec<f64> {
        let skip = (self.0.len() / 4).clamp(1, 100);
        let time = |at: usize| {
            let (before, row) = (&self.0[at - 1], &self.0[at]);
            let (from, to) = before.host_ns.zip(row.host_ns)?;
            (before.epoch == row.epoch).then(|| to.saturating_sub(from) as f64)
        };
        (skip..self.0.len()).filter_map(time).collect()
    }

    /// Time of a step. Where the host never waits for the device, single steps say when work was queued and only their mean is
    /// the pace.
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
            values.map_or_else(Vec::new, |values| thinned(&values, 1, |part| part.iter().copied().fold(0.0, f64::max)))
        };
        let losses: Option<Vec<f64>> = self.0.iter().map(|row| row.loss.filter(|loss| loss.is_finite())).collect();
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        Curves {
            steps: self.0.len(),
            loss: losses.map_or_else(Vec::new, |losses| thinned(&losses, OVER, mean)),
            reserved: level(|row| row.reserved_bytes),
            active: level(|row| row.active_bytes.or(row.allocated_bytes)),
            requested: level(|row| row.requested_bytes),
        }
    }

    /// How far the losses of the steps that two runs share are apart, in words.
    pub(super) fn apart(&self, other: &Self) -> Option<String> {
        let theirs: BTreeMap<(u64, u64), f64> =
            other.0.iter().filter_map(|row| Some(((row.epoch, row.step), row.loss?))).collect();
        let both = |row: &Row| Some((row.loss?, *theirs.get(&(row.epoch, row.step))?));
        let relative = |(ours, theirs): (f64, f64)| if ours == theirs { 0.0 } else { ((ours - theirs) / theirs).abs() };
        let apart: Vec<f64> = self.0.iter().filter_map(both).map(relative).collect();
        let most = apart.iter().copied().max_by(f64::total_cmp)?;
        let said = if most == 0.0 {
            "equal to the last bit".to_owned()
        } else {
            format!("at most {most:.1e} apart (relative)")
        };
        Some(format!("losses of {} steps are {said}.", apart.len()))
    }
}

/// At most `POINTS` points, each of `least` neighbouring values or more, at the last of them.
fn thinned(values: &[f64], least: usize, of: impl Fn(&[f64]) -> f64) -> Vec<(usize, f64)> {
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

/// Time of one operation on one path against the share of operations that took no longer.
#[derive(Debug, Serialize)]
pub(super) struct Spectrum {
    operation: String,
    path: String,
    count: u64,
    /// Share from 0 to 1, and ns.
    points: Vec<(f64, u64)>,
}

/// Reads the log; nothing where it was not kept. On a simulated device only driver calls take time, so what took none was not
/// measured and is left out.
///
/// # Errors
/// One line: what is wrong with the file.
pub(super) fn read(path: &Path, simulated: bool) -> Result<Vec<Spectrum>> {
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let bytes = input::read_bytes(path, input::DOCUMENT).with_context(|| path.display().to_string())?;
    let merged = merged(&bytes).with_context(|| format!("{}: not a log of histograms", path.display()))?;
    Ok(merged.into_iter().filter_map(|(tag, histogram)| spectrum(&tag, &histogram, simulated)).collect())
}

/// The intervals of each tag together.
fn merged(bytes: &[u8]) -> Result<BTreeMap<String, Histogram<u64>>> {
    let mut out: BTreeMap<String, Histogram<u64>> = BTreeMap::new();
    for entry in IntervalLogIterator::new(bytes) {
        let LogEntry::Interval(interval) = entry.map_err(|error| anyhow!("{error:?}"))? else { continue };
        let raw = STANDARD.decode(interval.encoded_histogram())?;
        let histogram = Deserializer::new().deserialize(&mut raw.as_slice()).map_err(|error| anyhow!("{error:?}"))?;
        let tag = interval.tag().map_or("all.all", |tag| tag.as_str()).to_owned();
        match out.entry(tag) {
            std::collections::btree_map::Entry::Vacant(place) => {
                place.insert(histogram);
            }
            std::collections::btree_map::Entry::Occupied(mut place) => {
                place.get_mut().add(&histogram).map_err(|error| anyhow!("{error:?}"))?;
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
        // A histogram's least value is 1.
        if simulated && bucket.value_iterated_to() <= 1 {
            continue;
        }
        let share = |operations: u64| operations as f64 / count as f64;
        points.push((share(from), bucket.value_iterated_to()));
        // The largest is drawn at the last share that so many operations can tell.
        points.push((share(below).min(1.0 - 0.5 / count as f64), bucket.value_iterated_to()));
    }
    (!points.is_empty()).then(|| Spectrum { operation: operation.to_owned(), path: path.to_owned(), count, points })
}
