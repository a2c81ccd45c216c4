//! The main values of a run, read from its files. All runners and comparisons take them from here, so that one name
//! has one meaning.

use anyhow::{Context, Result};
use serde_json::Value;
use std::path::Path;
use vramlab::input::{DOCUMENT, read_unpacked};

/// A run's main value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Measure {
    /// Seconds per training step.
    StepTime,
    /// Seconds of simulated time for a complete recording.
    SimulatedTime,
    /// Seconds of host time per operation of a recording or a benchmark.
    OperationTime,
    /// Memory size of the smallest device, in bytes.
    Capacity,
}

impl Measure {
    /// Title of its column.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::StepTime => "step",
            Self::SimulatedTime => "simulated",
            Self::OperationTime => "operation",
            Self::Capacity => "capacity",
        }
    }
}

/// Main values of a run; those that its program does not record are absent.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct Figures {
    pub(crate) measure: Measure,
    pub(crate) value: f64,
    /// Share of an epoch, validation included, during which the host was blocked.
    pub(crate) blocked_share: Option<f64>,
    /// Driver calls per batch, validation included; for a recording: the total.
    pub(crate) driver_calls: Option<f64>,
    pub(crate) peak_reserved_bytes: Option<f64>,
    /// Peak of active over peak of reserved.
    pub(crate) utilisation: Option<f64>,
    pub(crate) train_loss: Option<f64>,
}

impl Figures {
    /// A main value without others.
    fn of(measure: Measure, value: f64) -> Self {
        let absent = None;
        Self {
            measure,
            value,
            blocked_share: absent,
            driver_calls: absent,
            peak_reserved_bytes: absent,
            utilisation: absent,
            train_loss: absent,
        }
    }
}

/// Reads a file of a record, compressed or not, of at most `limit` bytes.
pub(crate) fn read_text(folder: &Path, name: &str, limit: u64) -> Result<String> {
    let (plain, packed) = (folder.join(name), folder.join(format!("{name}.gz")));
    let path = if packed.is_file() { &packed } else { &plain };
    read_unpacked(path, limit).with_context(|| format!("cannot read {}", path.display()))
}

pub(crate) fn read_document(folder: &Path, name: &str) -> Result<Value> {
    let text = read_text(folder, name, DOCUMENT)?;
    serde_json::from_str(&text).with_context(|| format!("{} is not JSON", folder.join(name).display()))
}

/// The summary of a trainer's run.
pub(crate) fn read_summary(folder: &Path) -> Result<Value> {
    let summary = read_document(folder, "summary.json")?;
    let version = &summary["schema_version"];
    if version.as_u64() != Some(u64::from(trainer::record::SCHEMA_VERSION)) {
        anyhow::bail!(
            "{} has schema version {version}, this program reads {}",
            folder.join("summary.json").display(),
            trainer::record::SCHEMA_VERSION
        );
    }
    Ok(summary)
}

/// The steady epochs: all but the first, which contains the warm-up, unless there is no other.
pub(crate) fn steady_epochs(summary: &Value) -> &[Value] {
    let epochs = summary["epochs"].as_array().map(Vec::as_slice).unwrap_or_default();
    if epochs.len() > 1 { &epochs[1..] } else { epochs }
}

/// Seconds per step in one epoch: of its training only, by the device's events on a GPU, because the other work in
/// host time differs between programs; with its validation where a record does not separate them.
fn step_s(epoch: &Value, on_gpu: bool) -> Option<f64> {
    let by_device = epoch["train_device_s"].as_f64().filter(|_| on_gpu);
    let time = by_device.or_else(|| epoch["train_s"].as_f64()).or_else(|| epoch["wall_s"].as_f64())?;
    let steps = epoch["steps"].as_f64().filter(|steps| *steps > 0.0)?;
    Some(time / steps)
}

/// Seconds per training step: the median over the steady epochs.
pub(crate) fn step_time(summary: &Value) -> Option<f64> {
    let on_gpu = summary["device"]["kind"] == "cuda";
    let times: Vec<f64> = steady_epochs(summary).iter().filter_map(|epoch| step_s(epoch, on_gpu)).collect();
    (!times.is_empty()).then(|| median(&times))
}

/// Batches of an epoch: its training steps and those of the validation after it. An epoch's driver calls include both.
pub(crate) fn batches(summary: &Value, epoch: &Value) -> f64 {
    let steps = epoch["steps"].as_f64().unwrap_or(f64::NAN);
    let rows = summary["dataset"]["validation_rows"].as_f64().unwrap_or(0.0);
    let batch = summary["settings"]["batch"].as_f64().unwrap_or(f64::NAN);
    steps + (rows / batch).ceil()
}

/// Share of an epoch during which the host was blocked in driver calls.
pub(crate) fn blocked_share(epoch: &Value) -> Option<f64> {
    let calls = epoch["driver_calls"].as_object()?;
    let blocked: f64 = calls.values().filter_map(|totals| totals["blocked_ns"].as_f64()).sum();
    epoch["wall_s"].as_f64().filter(|wall| *wall > 0.0).map(|wall| blocked / 1e9 / wall)
}

/// The values in the record of a training run.
pub(crate) fn of_summary(summary: &Value) -> Option<Figures> {
    let last = steady_epochs(summary).last()?;
    let count = |calls: &serde_json::Map<String, Value>| {
        calls.values().filter_map(|totals| totals["count"].as_f64()).sum::<f64>() / batches(summary, last)
    };
    let stat = |name: &str| summary["allocator_stats"][format!("{name}.all.peak")].as_f64();
    let (active, reserved) = (stat("active_bytes"), stat("reserved_bytes"));
    Some(Figures {
        measure: Measure::StepTime,
        value: step_time(summary)?,
        blocked_share: blocked_share(last),
        driver_calls: last["driver_calls"].as_object().map(count),
        peak_reserved_bytes: reserved,
        utilisation: active.zip(reserved).filter(|(_, reserved)| *reserved > 0.0).map(|(a, r)| a / r),
        train_loss: last["train_loss"].as_f64(),
    })
}

/// The values in the output of `inside` and `command`; without a step time for a run that ran out of memory, or a
/// command that prints none.
fn of_inside(result: &Value) -> Option<Figures> {
    if let Some(us) = result["us"].as_f64() {
        let peak_reserved_bytes = result["peak_reserved_bytes"].as_f64();
        return Some(Figures { peak_reserved_bytes, ..Figures::of(Measure::StepTime, us / 1e6) });
    }
    let stat = |name: &str| result["stats"][format!("{name}_bytes.all.peak")].as_f64();
    let (active, reserved) = (stat("active"), stat("reserved"));
    Some(Figures {
        peak_reserved_bytes: reserved,
        utilisation: active.zip(reserved).filter(|(_, reserved)| *reserved > 0.0).map(|(a, r)| a / r),
        ..Figures::of(Measure::StepTime, result["ms"].as_f64()? / 1e3)
    })
}

/// The values in the output of `replay`, `capacity` and `bench`: their first row.
fn of_result(result: &Value) -> Option<Figures> {
    if result.is_object() && result.get("rows").is_none() {
        return of_inside(result);
    }
    let row = result.get(0).or_else(|| result["rows"].get(0))?;
    let (measure, value) = if let Some(bytes) = row["capacity_bytes"].as_f64() {
        (Measure::Capacity, bytes)
    } else if let Some(seconds) = row["simulated_s"].as_f64() {
        (Measure::SimulatedTime, seconds)
    } else {
        let ns = row["host_ns_per_op"].as_f64().or_else(|| row["median"].as_f64())?;
        (Measure::OperationTime, ns / 1e9)
    };
    let calls = row["driver_calls"].as_object();
    Some(Figures {
        driver_calls: calls.map(|calls| calls.values().filter_map(Value::as_f64).sum()),
        peak_reserved_bytes: row["peak_reserved_bytes"].as_f64(),
        utilisation: row["utilisation"].as_f64(),
        ..Figures::of(measure, value)
    })
}

/// The values of a run's directory; `None` where it has none, as for a run that ended before its first epoch.
pub(crate) fn of_folder(folder: &Path) -> Result<Option<Figures>> {
    if folder.join("summary.json").is_file() {
        return Ok(of_summary(&read_summary(folder)?));
    }
    if !folder.join("result.json").is_file() && !folder.join("result.json.gz").is_file() {
        return Ok(None);
    }
    Ok(of_result(&read_document(folder, "result.json")?))
}

/// The middle value, of two the upper; NaN for no values.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

// Spread of the repeats, and outliers.

/// Above this spread the repeats of a cell are called noisy.
pub(crate) const NOISY: f64 = 0.05;
/// An outlier is this many times the spread away, and at least this share of the median.
const OUTLIER_SPREADS: f64 = 5.0;
const OUTLIER_SHARE: f64 = 0.1;

/// Standard deviation over the median, estimated from the median distance to the median, which a single outlier does
/// not change. `None` for fewer than two values.
pub(crate) fn spread(values: &[f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let middle = median(values);
    let distances: Vec<f64> = values.iter().map(|value| (value - middle).abs()).collect();
    // For two or three values the median distance is unreliable; use half of the range.
    let deviation = if values.len() < 4 {
        let range = values.iter().copied().fold(f64::MIN, f64::max) - values.iter().copied().fold(f64::MAX, f64::min);
        range / 2.0
    } else {
        // The factor for the standard deviation of a normal distribution.
        1.4826 * median(&distances)
    };
    (middle != 0.0).then(|| deviation / middle.abs())
}

/// Indices of the outliers. Fewer than four values have none.
pub(crate) fn outliers(values: &[f64]) -> Vec<usize> {
    if values.len() < 4 {
        return Vec::new();
    }
    let (middle, spread) = (median(values), spread(values).unwrap_or(0.0));
    let far = |value: f64| {
        let distance = ((value - middle) / middle).abs();
        distance > OUTLIER_SPREADS * spread && distance > OUTLIER_SHARE
    };
    (0..values.len()).filter(|at| far(values[*at])).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    #[test]
    fn one_value_out_of_line_is_found_and_does_not_widen_the_spread() {
        let values = [1.0, 1.01, 0.99, 1.02, 0.98, 3.0];
        assert!(spread(&values).unwrap() < 0.05, "{:?}", spread(&values));
        assert_eq!(outliers(&values), [5]);
        assert_eq!(outliers(&[1.0, 1.01, 0.99, 1.02, 0.98, 1.05]), [0; 0]);
    }

    #[test]
    fn few_values() {
        assert_eq!(spread(&[1.0]), None);
        assert_eq!(outliers(&[1.0, 9.0, 1.0]), [0; 0]);
        assert!((spread(&[1.0, 1.2]).unwrap() - 0.1 / 1.2).abs() < 1e-12);
        assert_eq!(spread(&[2.0, 2.0, 2.0]), Some(0.0));
        assert_eq!(outliers(&[2.0; 9]), [0; 0]);
    }
}
