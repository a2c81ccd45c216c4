//! Settings in the syntax of a snapshot, from and to those of [`Caching`](vramlab_policies::backends::Caching).

use crate::history::ReplayError;
use serde_json::{Map, Value, json};
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::backends::pytorch::conf::TorchConf;
use vramlab_policies::policy::size::torch::{DIVISION_INTERVALS, Divisions};

/// The settings of `caching` for a snapshot's `allocator_settings`, with defaults for missing ones.
///
/// PyTorch does not record its memory limit; [`snapshot_settings`] does, as `memory_limit`. Names and values in which our
/// allocator reports its settings are accepted too.
///
/// # Errors
/// [`ReplayError::History`] for a setting that PyTorch would not accept.
pub fn recorded_settings(settings: &Map<String, Value>) -> Result<CachingSettings, ReplayError> {
    let wrong = |key: &str| {
        let text = format!("the snapshot's allocator_settings have an invalid {key}: {}", settings[key]);
        ReplayError::History(text)
    };
    // Our allocator reports absent settings as null.
    let set = |key: &str| settings.get(key).filter(|value| !value.is_null());
    let mut out = CachingSettings::default();
    if let Some(bound) = set("max_split_size") {
        let bound = bound.as_i64().ok_or_else(|| wrong("max_split_size"))?;
        // -1: unlimited.
        out.max_split_size = u64::try_from(bound).ok();
    }
    // PyTorch records this value only in the line that it parsed.
    for key in ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"] {
        if let Some(rounding) = settings.get(key).and_then(Value::as_str).and_then(non_split_rounding) {
            out.max_non_split_rounding = rounding;
        }
    }
    for key in ["max_non_split_rounding_size", "max_non_split_rounding"] {
        if let Some(rounding) = settings.get(key) {
            out.max_non_split_rounding = rounding.as_u64().ok_or_else(|| wrong(key))?;
        }
    }
    if let Some(threshold) = settings.get("garbage_collection_threshold") {
        let threshold = threshold.as_f64().filter(|threshold| (0.0..=1.0).contains(threshold));
        out.garbage_collection_threshold = threshold.ok_or_else(|| wrong("garbage_collection_threshold"))?;
    }
    if let Some(divisions) = settings.get("roundup_power2_divisions") {
        out.roundup_power2_divisions = read_divisions(divisions).ok_or_else(|| wrong("roundup_power2_divisions"))?;
    }
    if let Some(limit) = set("memory_limit") {
        out.memory_limit = Some(limit.as_u64().ok_or_else(|| wrong("memory_limit"))?);
    }
    Ok(out)
}

/// The value of `max_non_split_rounding_mb` in a line such as `max_split_size_mb:64,max_non_split_rounding_mb:40`, in bytes.
fn non_split_rounding(line: &str) -> Option<u64> {
    let conf: TorchConf = line.parse().ok()?;
    let is_set = conf.entries.iter().any(|(key, _)| key == "max_non_split_rounding_mb");
    is_set.then_some(conf.settings.max_non_split_rounding)
}

/// A snapshot's `allocator_settings` for an allocator that reports `settings`
/// ([`DeviceAllocator::settings`](vramlab_policies::DeviceAllocator::settings)).
///
/// Those of `caching` get PyTorch's names and values: -1 for unlimited, divisions as a dictionary by size in MiB. Settings that
/// PyTorch does not have are copied, unless they are unset. [`u64::MAX`] also means unlimited, and PyTorch's tools read no number
/// above [`i64::MAX`].
#[must_use]
pub fn snapshot_settings(settings: &Value) -> Map<String, Value> {
    let mut out = Map::new();
    for (key, value) in settings.as_object().into_iter().flatten() {
        let (key, value) = match (key.as_str(), value) {
            ("max_split_size", Value::Null) => ("max_split_size", json!(-1)),
            ("max_non_split_rounding", value) => ("max_non_split_rounding_size", value.clone()),
            ("roundup_power2_divisions", Value::Array(counts)) => {
                let by_size = counts.iter().enumerate().map(|(at, count)| ((1_u64 << at).to_string(), count.clone()));
                ("roundup_power2_divisions", Value::Object(by_size.collect()))
            }
            (_, Value::Null) => continue,
            (key, value) if value.as_u64() == Some(u64::MAX) => (key, json!(-1)),
            (key, value) => (key, value.clone()),
        };
        out.insert(key.to_owned(), value);
    }
    out
}

/// From `{"1": n, "2": n, "4": n, ...}`, sizes in MiB, or from the list of counts.
fn read_divisions(value: &Value) -> Option<Divisions> {
    let mut out = Divisions::default();
    let count =
        |count: &Value| count.as_u64().filter(|count| *count == 0 || count.is_power_of_two() && *count <= 1 << 20);
    if let Some(counts) = value.as_array() {
        for (slot, value) in out.0.iter_mut().zip(counts) {
            *slot = count(value)?;
        }
        return (counts.len() == DIVISION_INTERVALS).then_some(out);
    }
    for (size, value) in value.as_object()? {
        let size: u64 = size.parse().ok()?;
        if !size.is_power_of_two() || size.ilog2() as usize >= DIVISION_INTERVALS {
            return None;
        }
        out.0[size.ilog2() as usize] = count(value)?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use vramlab_device::NullDriver;
    use vramlab_policies::DeviceAllocator;
    use vramlab_policies::backends::Caching;

    fn read(value: &Value) -> Result<CachingSettings, ReplayError> {
        recorded_settings(value.as_object().unwrap())
    }

    #[test]
    fn reads_what_pytorch_writes() {
        assert_eq!(read(&json!({})), Ok(CachingSettings::default()));
        let settings = json!({
            "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
            "expandable_segments": false, "roundup_power2_divisions": {"1": 0, "2": 0, "32768": 0},
        });
        assert_eq!(read(&settings), Ok(CachingSettings::default()));
        let settings = json!({
            "max_split_size": 128 << 20, "garbage_collection_threshold": 0.8,
            "roundup_power2_divisions": {"1": 4, "2": 8, "32768": 16},
        });
        let settings = read(&settings).unwrap();
        assert_eq!((settings.max_split_size, settings.garbage_collection_threshold), (Some(128 << 20), 0.8));
        assert_eq!(settings.max_non_split_rounding, CachingSettings::default().max_non_split_rounding);
        let divisions = settings.roundup_power2_divisions.0;
        assert_eq!((divisions[0], divisions[1], divisions[2], divisions[15]), (4, 8, 0, 16));
    }

    #[test]
    fn what_only_the_line_of_settings_says_is_read_there() {
        let rounding = |line: &str| {
            let settings = json!({ "PYTORCH_CUDA_ALLOC_CONF": line, "max_split_size": 64 << 20 });
            read(&settings).unwrap().max_non_split_rounding >> 20
        };
        assert_eq!(rounding("max_split_size_mb:64, max_non_split_rounding_mb : 40"), 40);
        assert_eq!(rounding("max_non_split_rounding_mb:30,roundup_power2_divisions:[256:1,>:2]"), 30);
        assert_eq!(rounding("max_non_split_rounding_mb:30,max_non_split_rounding_mb:50"), 50);
        for nothing in ["", "max_split_size_mb:64", "max_non_split_rounding_mb:much", "max_non_split_rounding_mb:1"] {
            assert_eq!(rounding(nothing), 20, "{nothing}");
        }
    }

    #[test]
    fn what_is_written_reads_as_what_it_was() {
        let limited = CachingSettings {
            max_split_size: Some(64 << 20),
            max_non_split_rounding: 30 << 20,
            garbage_collection_threshold: 0.8,
            roundup_power2_divisions: Divisions::uniform(4),
            memory_limit: Some(6 << 30),
            retry_fit_after_sync: false,
        };
        for settings in [CachingSettings::default(), limited] {
            let driver = Arc::new(NullDriver::new(1 << 30));
            let reported = Caching::new(driver, settings).settings();
            // In our syntax, and in PyTorch's.
            assert_eq!(read(&reported), Ok(settings));
            let written = snapshot_settings(&reported);
            assert_eq!(recorded_settings(&written), Ok(settings), "{written:?}");
            assert!(written["max_split_size"].is_i64() && written["roundup_power2_divisions"].is_object());
            assert!(written.values().all(|value| !value.is_null()), "{written:?}");
        }
        assert!(snapshot_settings(&json!({})).is_empty());
        // PyTorch's viewer fails on numbers that need unsigned 64 bits.
        let pool = json!(vramlab_device::PoolSettings::default());
        assert_eq!(pool["release_threshold"], json!(u64::MAX));
        assert_eq!(snapshot_settings(&pool)["release_threshold"], json!(-1));
    }

    #[test]
    fn refuses_what_pytorch_would() {
        for (key, value) in [
            ("garbage_collection_threshold", json!(2.5)),
            ("garbage_collection_threshold", json!("half")),
            ("garbage_collection_threshold", json!(null)),
            ("max_split_size", json!("big")),
            ("max_non_split_rounding_size", json!(-1)),
            ("memory_limit", json!("half")),
            ("roundup_power2_divisions", json!([1, 2])),
            ("roundup_power2_divisions", json!({"3": 4})),
            ("roundup_power2_divisions", json!({"1": 3})),
            ("roundup_power2_divisions", json!({"65536": 1})),
            ("roundup_power2_divisions", json!({"1": u64::MAX})),
        ] {
            let error = read(&json!({ key: value })).unwrap_err();
            assert!(error.is_bad_input() && error.to_string().contains(key), "{error}");
        }
    }
}
