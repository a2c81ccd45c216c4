//! PyTorch's syntax for its allocator's settings, as in `PYTORCH_CUDA_ALLOC_CONF`.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::str::FromStr;
use vramlab::Selection;
use vramlab::backends::{CachingSettings, TorchAllocator, of_torch};
use vramlab::histories::replay::recorded_settings;
use vramlab::settings::{Settings, list_parts};

/// The variable that advice sets: every release reads it, and CUDA's allocator prefers it to `PYTORCH_ALLOC_CONF`.
pub(super) const VARIABLE: &str = "PYTORCH_CUDA_ALLOC_CONF";

const MIB: u64 = 1 << 20;
/// The smallest value of both settings that are in MiB: a segment of the large pool.
const LEAST_MIB: u64 = 20;
/// Largest value in MiB; PyTorch clamps larger ones.
const MOST_MIB: u64 = 1 << 40;

/// Longest line that fits 80 columns with its indent.
const LINE: usize = 78;

/// Applies a value to a setting, or returns how to write the value.
type Set = fn(&mut Conf, &str) -> Result<(), &'static str>;

/// Settings of the newest PyTorch, each with the first release of PyTorch 2 that has it; 0 stands for 2.0 and earlier. A release
/// does not start with a setting that it lacks.
pub(super) const KEYS: [(&str, u16, Set); 20] = [
    ("backend", 0, |conf, value| {
        conf.malloc_async = match value {
            "native" => false,
            "cudaMallocAsync" | "hipMallocAsync" => true,
            _ => return Err("write native or cudaMallocAsync"),
        };
        Ok(())
    }),
    ("max_split_size_mb", 0, |conf, value| mebibytes(value).map(|bytes| conf.settings.max_split_size = Some(bytes))),
    ("garbage_collection_threshold", 0, |conf, value| {
        let fraction = value.parse::<f64>().ok().filter(|fraction| *fraction > 0.0 && *fraction < 1.0);
        conf.settings.garbage_collection_threshold = fraction.ok_or("write a fraction between 0 and 1")?;
        Ok(())
    }),
    ("roundup_power2_divisions", 0, |conf, value| {
        let divisions = value.parse().ok().filter(|_| value != "off" && value != "0");
        conf.settings.roundup_power2_divisions =
            divisions.ok_or("write a power of two, or a list such as [256:1,512:2,>:4]")?;
        Ok(())
    }),
    ("expandable_segments", 1, |conf, value| switch(value).map(|on| conf.expandable = on)),
    // Settings without effect on device addresses are ignored.
    ("release_lock_on_cudamalloc", 2, |_, value| switch(value).map(drop)),
    ("pinned_use_cuda_host_register", 2, |_, value| switch(value).map(drop)),
    ("pinned_num_register_threads", 2, |_, _| Ok(())),
    ("max_non_split_rounding_mb", 6, |conf, value| {
        mebibytes(value).map(|bytes| conf.settings.max_non_split_rounding = bytes)
    }),
    ("pinned_use_background_threads", 6, |_, value| switch(value).map(drop)),
    ("graph_capture_record_stream_reuse", 9, |_, value| switch(value).map(drop)),
    ("per_process_memory_fraction", 10, |_, value| match value.parse() {
        Ok(1.0) => Ok(()),
        _ => Err("a recording does not contain the device's memory size; remove the setting and pass --limit BYTES"),
    }),
    ("pinned_reserve_segment_size_mb", 10, |_, _| Ok(())),
    ("large_segment_size_mb", 11, |_, value| match integer(value)? {
        LEAST_MIB => Ok(()),
        _ => Err("only 20 can be replayed, PyTorch's default"),
    }),
    ("throw_on_cudamalloc_oom", 12, |_, value| switch(value).map(drop)),
    ("pinned_free_catch_all", 12, |_, _| Ok(())),
    ("pinned_max_round_threshold_mb", 13, |_, _| Ok(())),
    ("pinned_max_cached_size_mb", 13, |_, _| Ok(())),
    ("expandable_segments_reserve", 15, |_, _| Ok(())),
    ("expandable_segments_reserve_by_class", 15, |_, _| Ok(())),
];

fn switch(value: &str) -> Result<bool, &'static str> {
    match value {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err("write True or False"),
    }
}

fn integer(value: &str) -> Result<u64, &'static str> {
    value.parse().map_err(|_| "write a whole number")
}

/// Bytes from a text in MiB.
fn mebibytes(value: &str) -> Result<u64, &'static str> {
    match integer(value)?.min(MOST_MIB) {
        ..LEAST_MIB => Err("PyTorch takes 20 or more"),
        mib => Ok(mib * MIB),
    }
}

/// PyTorch's keys for settings of [`CachingSettings`], in the order of the output; bytes are in MiB.
const WRITTEN: [(&str, &str); 4] = [
    ("max_split_size_mb", "max_split_size"),
    ("max_non_split_rounding_mb", "max_non_split_rounding"),
    ("roundup_power2_divisions", "roundup_power2_divisions"),
    ("garbage_collection_threshold", "garbage_collection_threshold"),
];

/// Settings of PyTorch's allocator, with their text.
#[derive(Clone, Debug)]
pub(crate) struct Conf {
    text: String,
    pub(super) malloc_async: bool,
    pub(super) expandable: bool,
    /// Has no memory limit.
    pub(super) settings: CachingSettings,
}

impl Conf {
    /// PyTorch's defaults.
    pub(super) fn torch() -> Self {
        Self { text: String::new(), malloc_async: false, expandable: false, settings: CachingSettings::default() }
    }

    /// Native or expandable segments with these settings.
    pub(super) fn of(expandable: bool, settings: CachingSettings) -> Self {
        let mut out = Self { text: String::new(), malloc_async: false, expandable, settings };
        out.text = out.changed().join(",");
        out
    }

    /// The settings that a snapshot contains.
    ///
    /// # Errors
    /// Those of a snapshot whose settings PyTorch would not accept.
    pub(super) fn recorded(values: &Map<String, Value>) -> anyhow::Result<Self> {
        let mut settings = recorded_settings(values)?;
        let is_on = |key: &str| values.get(key).and_then(Value::as_bool).unwrap_or(false);
        let expandable = is_on("expandable_segments");
        let line = values.get("PYTORCH_CUDA_ALLOC_CONF").and_then(Value::as_str).unwrap_or_default();
        // The program may have changed settings after it read the line, so the line counts only if it agrees with the values.
        if let Ok(parsed) = line.parse::<Self>()
            && (parsed.malloc_async || parsed.expandable == expandable)
            && parsed.settings == (CachingSettings { memory_limit: None, ..settings })
        {
            return Ok(parsed);
        }
        settings.memory_limit = None;
        settings.retry_fit_after_sync = false;
        Ok(Self::of(expandable, settings))
    }

    /// The value of [`VARIABLE`].
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// The text; "PyTorch's defaults" if it is empty.
    pub(super) fn shown(&self) -> &str {
        if self.text.is_empty() { "PyTorch's defaults" } else { &self.text }
    }

    /// Shell line that sets it.
    pub(super) fn export(&self) -> String {
        match self.text.as_str() {
            "" => "unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF".to_owned(),
            text if text.contains(['[', '>', ' ']) => format!("export {VARIABLE}='{text}'"),
            text => format!("export {VARIABLE}={text}"),
        }
    }

    /// The same, broken into lines that fit a screen; the shell joins them.
    pub(super) fn export_lines(&self) -> Vec<String> {
        let line = self.export();
        if line.len() <= LINE {
            return vec![line];
        }
        let plain: String = self.text.chars().filter(|c| *c != ' ').collect();
        // In double quotes a shell removes a backslash before a line break.
        let mut lines = vec![format!("export {VARIABLE}=\"")];
        for part in plain.split_inclusive(',') {
            match lines.last_mut() {
                Some(line) if line.len() + part.len() < LINE => *line += part,
                _ => lines.push(part.to_owned()),
            }
        }
        let last = lines.len() - 1;
        let end = |(at, line): (usize, String)| line + if at == last { "\"" } else { "\\" };
        lines.into_iter().enumerate().map(end).collect()
    }

    /// Whether it has an effect only under a limit (`set_per_process_memory_fraction`).
    pub(super) fn needs_limit(&self) -> bool {
        self.settings.garbage_collection_threshold > 0.0 && !self.expandable && !self.malloc_async
    }

    /// The Python line that it requires, if any; `limit` is the memory limit.
    pub(super) fn python(&self, limit: Option<u64>) -> Option<String> {
        let limit = limit.map_or("LIMIT".to_owned(), |limit| limit.to_string());
        let line = format!("torch.cuda.set_per_process_memory_fraction({limit} / torch.cuda.mem_get_info()[1])");
        self.needs_limit().then_some(line)
    }

    /// The settings in its text.
    pub(super) fn keys(&self) -> impl Iterator<Item = String> + '_ {
        let plain: String = self.text.chars().filter(|c| *c != ' ').collect();
        let parts: Vec<String> = list_parts(&plain).into_iter().map(str::to_owned).collect();
        let key = |part: String| part.split_once(':').map(|(key, _)| key.replace("hip", "cuda"));
        parts.into_iter().filter_map(key)
    }

    /// Settings that differ from PyTorch's defaults, in PyTorch's syntax.
    fn changed(&self) -> Vec<String> {
        let mut out = Vec::new();
        if self.malloc_async {
            out.push("backend:cudaMallocAsync".to_owned());
        }
        if self.expandable {
            out.push("expandable_segments:True".to_owned());
        }
        let torch = CachingSettings::default();
        for (key, name) in WRITTEN {
            let value = self.settings.get(name).filter(|value| torch.get(name).as_ref() != Some(value));
            let mib = self.settings.json()[name].as_u64().map(|bytes| (bytes / MIB).to_string());
            out.extend(value.map(|value| format!("{key}:{}", mib.unwrap_or(value))));
        }
        out
    }

    /// Number of settings that are not PyTorch's defaults.
    pub(super) fn changes(&self) -> usize {
        self.changed().len()
    }

    /// Whether the allocator acts the same under both.
    pub(super) fn acts_as(&self, other: &Self) -> bool {
        let kind = |conf: &Self| (conf.malloc_async, conf.expandable);
        kind(self) == kind(other) && (self.malloc_async || self.settings == other.settings)
    }

    /// The backend that implements it.
    pub(super) fn selection(&self) -> Selection {
        match self {
            // That backend has none of the settings.
            Self { malloc_async: true, .. } => Selection::of(of_torch(TorchAllocator::MallocAsync)),
            Self { expandable: true, .. } => Selection::with(of_torch(TorchAllocator::Expandable), &self.settings),
            _ => Selection::with(of_torch(TorchAllocator::Native), &self.settings),
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), ParseConfError> {
        let Some((_, _, set)) = KEYS.iter().find(|(name, ..)| *name == key.replace("hip", "cuda")) else {
            return Err(ParseConfError::Key(key.to_owned()));
        };
        set(self, value).map_err(|expected| ParseConfError::Value {
            key: key.to_owned(),
            value: value.to_owned(),
            expected,
        })
    }
}

impl Serialize for Conf {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

/// Why a text is not a setting of PyTorch's allocator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ParseConfError {
    #[error("'{0}' is not a setting of PyTorch's allocator; use one of {names}", names = KEYS.map(|(name, ..)| name).join(", "))]
    Key(String),
    #[error("{key}:{value}: {expected}")]
    Value { key: String, value: String, expected: &'static str },
    #[error("'{0}': write key:value,key:value")]
    Form(String),
}

impl FromStr for Conf {
    type Err = ParseConfError;

    /// Parses as PyTorch does: ignores blanks, and of a repeated key uses the last value.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut out = Self { text: text.trim().to_owned(), ..Self::torch() };
        let plain: String = text.chars().filter(|c| *c != ' ').collect();
        let parts = list_parts(&plain);
        let last = parts.len() - 1;
        for (at, part) in parts.into_iter().enumerate() {
            // PyTorch accepts a trailing comma and an empty text.
            if part.is_empty() && at == last {
                continue;
            }
            let (key, value) =
                part.split_once(':').ok_or_else(|| match KEYS.iter().any(|(name, ..)| *name == part) {
                    false if !part.contains(['=', '[', ']']) && !part.is_empty() => {
                        ParseConfError::Key(part.to_owned())
                    }
                    _ => ParseConfError::Form(part.to_owned()),
                })?;
            out.set(key, value)?;
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(text: &str) -> Conf {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn conf_parses_every_syntax_of_pytorch() {
        assert!(read("").acts_as(&Conf::torch()) && read("backend:native,").acts_as(&Conf::torch()));
        let all = read("garbage_collection_threshold:0.8, max_split_size_mb:64,roundup_power2_divisions:4");
        let CachingSettings { max_split_size, garbage_collection_threshold, roundup_power2_divisions, .. } =
            all.settings;
        assert_eq!((max_split_size, garbage_collection_threshold), (Some(64 * MIB), 0.8));
        assert!(roundup_power2_divisions.0.iter().all(|count| *count == 4));
        // The values are those that a snapshot of PyTorch contains.
        let list = read("roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:True");
        assert_eq!(list.settings.roundup_power2_divisions.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]);
        assert!(list.expandable && list.selection().name() == "pytorch-expandable");
        assert_eq!(read("max_non_split_rounding_mb:64").settings.max_non_split_rounding, 64 * MIB);
        assert_eq!(read("backend:cudaMallocAsync").selection().name(), "stream-ordered");
        // Host settings are ignored; of a repeated key the last counts.
        let host = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8,release_lock_on_hipmalloc:False";
        assert!(read(host).acts_as(&Conf::torch()));
        assert!(!read("expandable_segments:True,expandable_segments:False").expandable);
        assert_eq!(read(host).text(), host);
    }

    #[test]
    fn conf_rejects_invalid_and_unsupported_values() {
        for (text, words) in [
            (
                "max_split_mb:64",
                "'max_split_mb' is not a setting of PyTorch's allocator; use one of backend, max_split_",
            ),
            ("max_split_size_mb:19", "PyTorch takes 20 or more"),
            ("max_split_size_mb:-1", "whole number"),
            ("max_split_size_mb", "key:value"),
            ("max_split_size_mb=64", "key:value"),
            ("max_split_size_mb:64,,expandable_segments:True", "key:value"),
            ("expandable_segments:true", "True or False"),
            ("garbage_collection_threshold:1", "between 0 and 1"),
            ("garbage_collection_threshold:nan", "between 0 and 1"),
            ("roundup_power2_divisions:3", "power of two"),
            ("roundup_power2_divisions:[256:1,128:2]", "power of two"),
            ("backend:jemalloc", "native or cudaMallocAsync"),
            ("large_segment_size_mb:40", "only 20"),
            ("per_process_memory_fraction:0.5", "--limit"),
            ("pinned_use_cuda_host_register:yes", "True or False"),
        ] {
            let error = text.parse::<Conf>().unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn conf_text_round_trips() {
        let divisions = "[4:0,>:8]".parse().unwrap();
        let settings = CachingSettings {
            max_split_size: Some(96 * MIB),
            max_non_split_rounding: 64 * MIB,
            garbage_collection_threshold: 0.6,
            roundup_power2_divisions: divisions,
            ..CachingSettings::default()
        };
        for conf in [Conf::of(false, settings), Conf::of(true, settings), Conf::of(false, CachingSettings::default())] {
            assert!(read(conf.text()).acts_as(&conf), "{}", conf.text());
        }
        assert_eq!(
            Conf::of(true, CachingSettings::default()).export(),
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        );
        let lines = Conf::of(false, settings).export_lines();
        assert_eq!(
            lines,
            [
                "export PYTORCH_CUDA_ALLOC_CONF=\"max_split_size_mb:96,\\",
                "max_non_split_rounding_mb:64,roundup_power2_divisions:[4:0,>:8],\\",
                "garbage_collection_threshold:0.6\""
            ]
        );
        assert!(lines.iter().all(|line| line.len() <= LINE));
        assert!(Conf::of(false, settings).export().contains("='"), "brackets and > are the shell's");
    }

    #[test]
    fn recorded_conf_matches_the_snapshot_values() {
        let recorded = |values: Value| Conf::recorded(values.as_object().unwrap()).unwrap();
        let divisions = json!({"1": 4, "2": 8});
        let values = json!({"PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:64,max_split_size_mb:128",
            "max_split_size": 128 << 20, "expandable_segments": false, "garbage_collection_threshold": 0.0});
        assert_eq!(recorded(values).text(), "max_non_split_rounding_mb:64,max_split_size_mb:128");
        // A line that contradicts the values is ignored.
        let values = json!({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "max_split_size": -1,
            "expandable_segments": true, "roundup_power2_divisions": divisions, "memory_limit": 5});
        assert_eq!(recorded(values).text(), "expandable_segments:True,roundup_power2_divisions:[1:4,2:8]");
        assert!(recorded(json!({})).acts_as(&Conf::torch()));
    }
}
