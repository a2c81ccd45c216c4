//! The latency histograms of a run (`latency.hlog`, the interval log of HdrHistogram) as percentile spectra.

use anyhow::{Context, Result, anyhow};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hdrhistogram::Histogram;
use hdrhistogram::serialization::Deserializer;
use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use vramlab::input;

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
