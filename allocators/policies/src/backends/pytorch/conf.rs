//! The text of `PYTORCH_CUDA_ALLOC_CONF`, and the settings of an allocator that follow from it.

use super::settings::PyTorchSettings;
use crate::backends::{SegmentUse, Selection};
use std::str::FromStr;
use vramlab_device::settings::{Settings as _, list_parts};

const MIB: u64 = 1 << 20;

/// The smallest value of settings in MiB: a segment of the large pool. It is also PyTorch's default for `large_segment_size_mb`.
pub const LEAST_MIB: u64 = 20;

/// PyTorch caps settings in MiB here.
const MOST_MIB: u64 = 1 << 40;

/// Sets the value of a key, or returns the form that the value should have.
type Set = fn(&mut TorchConf, &str) -> Result<(), &'static str>;

/// A key that PyTorch's allocator has.
#[derive(Clone, Copy, Debug)]
pub struct ConfKey {
    /// The key.
    pub name: &'static str,
    /// The minor version of PyTorch 2 that introduced it; 0 stands for 2.0 and earlier. An older version does not start with it.
    pub since: u16,
    set: Set,
}

/// The keys of the newest PyTorch, oldest first.
pub static CONF_KEYS: [ConfKey; 20] = [
    key("backend", 0, |conf, value| {
        conf.malloc_async = match value {
            "native" => false,
            "cudaMallocAsync" | "hipMallocAsync" => true,
            _ => return Err("write native or cudaMallocAsync"),
        };
        Ok(())
    }),
    key("max_split_size_mb", 0, |conf, value| mebibytes(value).map(|bytes| conf.settings.max_split_size = Some(bytes))),
    key("garbage_collection_threshold", 0, |conf, value| {
        let fraction = value.parse::<f64>().ok().filter(|fraction| *fraction > 0.0 && *fraction < 1.0);
        conf.settings.garbage_collection_threshold = fraction.ok_or("write a fraction between 0 and 1")?;
        Ok(())
    }),
    key("roundup_power2_divisions", 0, |conf, value| {
        let divisions = value.parse().ok().filter(|_| value != "off" && value != "0");
        conf.settings.roundup_power2_divisions =
            divisions.ok_or("write a power of two, or a list such as [256:1,512:2,>:4]")?;
        Ok(())
    }),
    key("expandable_segments", 1, |conf, value| switch(value).map(|on| conf.expandable = on)),
    // The next three do not change the addresses or sizes of blocks.
    key("release_lock_on_cudamalloc", 2, |_, value| switch(value).map(drop)),
    key("pinned_use_cuda_host_register", 2, |_, value| switch(value).map(drop)),
    key("pinned_num_register_threads", 2, |_, _| Ok(())),
    key("max_non_split_rounding_mb", 6, |conf, value| {
        mebibytes(value).map(|bytes| conf.settings.max_non_split_rounding = bytes)
    }),
    key("pinned_use_background_threads", 6, |_, value| switch(value).map(drop)),
    key("graph_capture_record_stream_reuse", 9, |_, value| switch(value).map(drop)),
    key("per_process_memory_fraction", 10, |conf, value| {
        let fraction = value.parse::<f64>().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
        conf.memory_fraction = fraction.ok_or("write a fraction from 0 to 1")?;
        Ok(())
    }),
    key("pinned_reserve_segment_size_mb", 10, |_, _| Ok(())),
    key("large_segment_size_mb", 11, |conf, value| whole(value).map(|mib| conf.large_segment_mib = mib)),
    key("throw_on_cudamalloc_oom", 12, |_, value| switch(value).map(drop)),
    key("pinned_free_catch_all", 12, |_, _| Ok(())),
    key("pinned_max_round_threshold_mb", 13, |_, _| Ok(())),
    key("pinned_max_cached_size_mb", 13, |_, _| Ok(())),
    key("expandable_segments_reserve", 15, |_, _| Ok(())),
    key("expandable_segments_reserve_by_class", 15, |_, _| Ok(())),
];

const fn key(name: &'static str, since: u16, set: Set) -> ConfKey {
    ConfKey { name, since, set }
}

fn switch(value: &str) -> Result<bool, &'static str> {
    match value {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err("write True or False"),
    }
}

fn whole(value: &str) -> Result<u64, &'static str> {
    value.parse().map_err(|_| "write a whole number")
}

/// A value in MiB, in bytes.
fn mebibytes(value: &str) -> Result<u64, &'static str> {
    match whole(value)?.min(MOST_MIB) {
        ..LEAST_MIB => Err("PyTorch takes 20 or more"),
        mib => Ok(mib * MIB),
    }
}

/// Keys with the settings of [`PyTorchSettings`] that they set.
pub const CONF_SETTINGS: [(&str, &str); 4] = [
    ("max_split_size_mb", "max_split_size"),
    ("max_non_split_rounding_mb", "max_non_split_rounding"),
    ("roundup_power2_divisions", "roundup_power2_divisions"),
    ("garbage_collection_threshold", "garbage_collection_threshold"),
];

/// Keys that PyTorch itself follows above any allocator, also while the program runs, by the beginnings of their names.
const PYTORCHS_OWN: [&str; 3] = ["pinned_", "per_process_memory_fraction", "graph_capture_record_stream_reuse"];

/// The settings that a text of `PYTORCH_CUDA_ALLOC_CONF` contains.
#[derive(Clone, Debug, PartialEq)]
pub struct TorchConf {
    /// `backend:cudaMallocAsync`.
    pub malloc_async: bool,
    /// `expandable_segments:True`.
    pub expandable: bool,
    /// Settings of the native allocator. The text has no memory limit.
    pub settings: PyTorchSettings,
    /// `per_process_memory_fraction`.
    pub memory_fraction: f64,
    /// `large_segment_size_mb`.
    pub large_segment_mib: u64,
    /// Keys and values in order, with `cuda` in the place of `hip`. Keys of [`unknown`](Self::unknown) are included.
    pub entries: Vec<(String, String)>,
    /// Keys that are not in [`CONF_KEYS`]: misspelled, or of a newer PyTorch.
    pub unknown: Vec<String>,
}

impl Default for TorchConf {
    /// PyTorch's defaults.
    fn default() -> Self {
        Self {
            malloc_async: false,
            expandable: false,
            settings: PyTorchSettings::default(),
            memory_fraction: 1.0,
            large_segment_mib: LEAST_MIB,
            entries: Vec::new(),
            unknown: Vec::new(),
        }
    }
}

/// A text that is not a list of settings of PyTorch's allocator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseConfError {
    /// There is no such key.
    #[error("'{0}' is not a setting of PyTorch's allocator; use one of {names}", names = CONF_KEYS.map(|key| key.name).join(", "))]
    Key(String),
    /// The key takes other values.
    #[error("{key}:{value}: {expected}")]
    Value {
        /// The key.
        key: String,
        /// The value in the text.
        value: String,
        /// The form of the key's values.
        expected: &'static str,
    },
    /// An entry is not a key with a value.
    #[error("'{0}': write key:value,key:value")]
    Form(String),
}

impl FromStr for TorchConf {
    type Err = ParseConfError;

    /// Reads the text as PyTorch does: blanks are ignored, and the last value of a key counts. Unknown keys are not errors.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut out = Self::default();
        let compact: String = text.chars().filter(|c| *c != ' ').collect();
        let parts = list_parts(&compact);
        let last = parts.len() - 1;
        for (at, part) in parts.into_iter().enumerate() {
            // PyTorch accepts a comma at the end, and an empty text.
            if part.is_empty() && at == last {
                continue;
            }
            let Some((key, value)) = part.split_once(':') else {
                let is_word = !part.is_empty() && !part.contains(['=', '[', ']']);
                let part = part.to_owned();
                return Err(match CONF_KEYS.iter().any(|key| key.name == part) {
                    false if is_word => ParseConfError::Key(part),
                    _ => ParseConfError::Form(part),
                });
            };
            let name = key.replace("hip", "cuda");
            match CONF_KEYS.iter().find(|known| known.name == name) {
                None => out.unknown.push(key.to_owned()),
                Some(known) => (known.set)(&mut out, value).map_err(|expected| ParseConfError::Value {
                    key: key.to_owned(),
                    value: value.to_owned(),
                    expected,
                })?,
            }
            out.entries.push((name, value.to_owned()));
        }
        Ok(out)
    }
}

/// The part of a [`TorchConf`] that an allocator follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppliedConf {
    /// Settings of the allocator, by name.
    pub settings: Vec<(&'static str, String)>,
    /// Keys that have no effect, each with a hint in brackets where there is one.
    pub ignored: Vec<String>,
}

impl TorchConf {
    /// The settings of another allocator than PyTorch's that follow from this text, and the keys that it ignores. A setting that was
    /// given to the allocator by name stays. `limit` is its memory limit, of which PyTorch's threshold is a fraction.
    #[must_use]
    pub fn applied_to(&self, allocator: &Selection, limit: Option<u64>) -> AppliedConf {
        let has = |name: &str| allocator.settings().get(name).is_some();
        let mut out = AppliedConf::default();
        for (key, value) in &self.entries {
            let name = CONF_SETTINGS.iter().find(|(conf, _)| conf == key).map(|(_, name)| *name);
            let is_default =
                matches!((key.as_str(), value.as_str()), ("backend", "native") | ("expandable_segments", "False"));
            let is_given = name.is_some_and(|name| allocator.is_given(name));
            if is_default || is_given || PYTORCHS_OWN.iter().any(|own| key.starts_with(own)) {
                continue;
            }
            match name.filter(|name| has(name)) {
                Some(name) => {
                    out.settings.retain(|(other, _)| *other != name);
                    out.settings.extend(self.settings.get(name).map(|value| (name, value)));
                }
                None if key != "expandable_segments" => out.ignored.push(key.clone()),
                None if allocator.capabilities().segments == SegmentUse::Expandable => {}
                None => out.ignored.push(format!("{key} (use pytorch-expandable)")),
            }
        }
        let threshold = "garbage_collection_threshold";
        if out.settings.iter().any(|(name, _)| *name == threshold) && !allocator.is_given("memory_limit") {
            match limit.filter(|_| has("memory_limit")) {
                Some(limit) => out.settings.push(("memory_limit", limit.to_string())),
                None => {
                    out.settings.retain(|(name, _)| *name != threshold);
                    out.ignored.push(format!("{threshold} (needs a limit)"));
                }
            }
        }
        out
    }

    /// The keys that an allocator takes when it is built and that PyTorch does not follow itself: a later change has no effect.
    pub fn fixed_keys(&self) -> impl Iterator<Item = &str> {
        let keys = self.entries.iter().map(|(key, _)| key.as_str());
        keys.filter(|key| !PYTORCHS_OWN.iter().any(|own| key.starts_with(own)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> TorchConf {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn applied(text: &str, allocator: &str, limit: Option<u64>) -> (Vec<(&'static str, String)>, Vec<String>) {
        let AppliedConf { settings, ignored } = read(text).applied_to(&allocator.parse().unwrap(), limit);
        (settings, ignored)
    }

    #[test]
    fn text_of_pytorch_is_read() {
        assert_eq!(read(""), TorchConf::default());
        let conf = read("max_split_size_mb:64, roundup_power2_divisions:[256:1,>:8],max_split_size_mb:128,");
        assert_eq!(conf.settings.max_split_size, Some(128 * MIB), "the last value counts");
        assert_eq!(conf.settings.roundup_power2_divisions, "[256:1,>:8]".parse().unwrap());
        let conf = read("expandable_segments:True,release_lock_on_hipmalloc:False,of_a_newer_release:7");
        assert!(conf.expandable && conf.unknown == ["of_a_newer_release"]);
        assert_eq!(conf.entries[1].0, "release_lock_on_cudamalloc");
    }

    #[test]
    fn values_that_pytorch_refuses_are_errors() {
        for (text, words) in [
            ("max_split_size_mb:19", "max_split_size_mb:19: PyTorch takes 20 or more"),
            ("max_split_size_mb", "'max_split_size_mb': write key:value"),
            ("max_split", "'max_split' is not a setting of PyTorch's allocator; use one of backend"),
            ("expandable_segments:true", "write True or False"),
            ("per_process_memory_fraction:2", "write a fraction from 0 to 1"),
            ("large_segment_size_mb:x", "write a whole number"),
        ] {
            let error = text.parse::<TorchConf>().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn allocator_follows_the_settings_that_it_has() {
        let split = ("max_split_size", "64M".to_owned());
        assert_eq!(applied("max_split_size_mb:64", "caching", None), (vec![split.clone()], vec![]));
        assert_eq!(applied("max_split_size_mb:64", "caching:max_split_size=32M", None), (vec![], vec![]));
        let other_settings =
            "per_process_memory_fraction:0.5,pinned_num_register_threads:2,backend:native,expandable_segments:False";
        assert_eq!(applied(other_settings, "naive", None), (vec![], vec![]));
        let ignored = vec!["max_split_size_mb".to_owned(), "of_a_newer_release".to_owned()];
        assert_eq!(applied("max_split_size_mb:64,of_a_newer_release:1", "naive", None), (vec![], ignored));
        for (allocator, ignored) in
            [("pytorch-expandable", 0), ("remap", 0), ("lab:source=expandable", 0), ("caching", 1)]
        {
            assert_eq!(applied("expandable_segments:True", allocator, None).1.len(), ignored, "{allocator}");
        }
    }

    #[test]
    fn threshold_needs_a_limit() {
        let text = "garbage_collection_threshold:0.8";
        let ignored = vec!["garbage_collection_threshold (needs a limit)".to_owned()];
        assert_eq!(applied(text, "caching", None), (vec![], ignored));
        let threshold = ("garbage_collection_threshold", "0.8".to_owned());
        let limit = ("memory_limit", "1000".to_owned());
        assert_eq!(applied(text, "caching", Some(1000)), (vec![threshold.clone(), limit], vec![]));
        assert_eq!(applied(text, "caching:memory_limit=1G", Some(1000)), (vec![threshold], vec![]));
    }

    #[test]
    fn fixed_keys_are_those_that_pytorch_does_not_follow_itself() {
        let conf = read("max_split_size_mb:64,graph_capture_record_stream_reuse:True,pinned_free_catch_all:1");
        assert_eq!(conf.fixed_keys().collect::<Vec<_>>(), ["max_split_size_mb"]);
    }
}
