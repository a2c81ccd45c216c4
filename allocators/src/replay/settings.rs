//! The settings under which a snapshot was recorded.

use super::ReplayError;
use crate::backend::CachingSettings;
use crate::core::rounding::{DIVISION_INTERVALS, Divisions};
use serde_json::{Map, Value};

/// The settings of `caching` that correspond to a snapshot's `allocator_settings`; defaults where it says nothing. The
/// memory limit is not among them: PyTorch does not write it down.
///
/// # Errors
/// [`ReplayError::History`] for a setting that PyTorch would not accept.
pub fn recorded_settings(settings: &Map<String, Value>) -> Result<CachingSettings, ReplayError> {
    let wrong = |key: &str| {
        let text = format!("the snapshot's allocator_settings have an impossible {key}: {}", settings[key]);
        ReplayError::History(text)
    };
    let mut out = CachingSettings::default();
    if let Some(bound) = settings.get("max_split_size") {
        let bound = bound.as_i64().ok_or_else(|| wrong("max_split_size"))?;
        // -1: no bound.
        out.max_split_size = u64::try_from(bound).ok();
    }
    if let Some(rounding) = settings.get("max_non_split_rounding_size") {
        out.max_non_split_rounding = rounding.as_u64().ok_or_else(|| wrong("max_non_split_rounding_size"))?;
    }
    if let Some(threshold) = settings.get("garbage_collection_threshold") {
        let threshold = threshold.as_f64().filter(|threshold| (0.0..=1.0).contains(threshold));
        out.garbage_collection_threshold = threshold.ok_or_else(|| wrong("garbage_collection_threshold"))?;
    }
    if let Some(divisions) = settings.get("roundup_power2_divisions") {
        out.roundup_power2_divisions = read_divisions(divisions).ok_or_else(|| wrong("roundup_power2_divisions"))?;
    }
    Ok(out)
}

/// From `{"1": n, "2": n, "4": n, ...}`, sizes in MiB.
fn read_divisions(value: &Value) -> Option<Divisions> {
    let mut out = Divisions::default();
    for (size, count) in value.as_object()? {
        let size: u64 = size.parse().ok()?;
        let count = count.as_u64().filter(|count| *count == 0 || count.is_power_of_two() && *count <= 1 << 20)?;
        if !size.is_power_of_two() || size.ilog2() as usize >= DIVISION_INTERVALS {
            return None;
        }
        out.0[size.ilog2() as usize] = count;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        let divisions = settings.roundup_power2_divisions.0;
        assert_eq!((divisions[0], divisions[1], divisions[2], divisions[15]), (4, 8, 0, 16));
    }

    #[test]
    fn refuses_what_pytorch_would() {
        for (key, value) in [
            ("garbage_collection_threshold", json!(2.5)),
            ("garbage_collection_threshold", json!("half")),
            ("max_split_size", json!("big")),
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
