//! PyTorch's syntax for its allocator's settings, as in `PYTORCH_CUDA_ALLOC_CONF`.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use std::str::FromStr;
use vramlab::Selection;
pub(super) use vramlab::backends::pytorch::conf::{CONF_KEYS, ParseConfError};
use vramlab::backends::pytorch::conf::{CONF_SETTINGS, LEAST_MIB, TorchConf};
use vramlab::backends::{CachingSettings, TorchAllocator, of_torch};
use vramlab::histories::replay::recorded_settings;
use vramlab::settings::{Settings, list_parts};

/// The variable that advice sets: every release reads it, and CUDA's allocator prefers it to `PYTORCH_ALLOC_CONF`.
pub(super) const VARIABLE: &str = "PYTORCH_CUDA_ALLOC_CONF";

const MIB: u64 = 1 << 20;

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

    /// The settings that a snapshot contains. Truncated files and those of old versions have none; `expandable` says whether the
    /// recording has expandable segments.
    ///
    /// # Errors
    /// Those of a snapshot whose settings PyTorch would not accept.
    pub(super) fn recorded(values: &Map<String, Value>, expandable: bool) -> anyhow::Result<Self> {
        let mut settings = recorded_settings(values)?;
        let expandable = values.get("expandable_segments").and_then(Value::as_bool).unwrap_or(expandable);
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

    /// The meaning of its sizes in a few words; `None` where the names say it.
    pub(super) fn meaning(&self) -> Option<String> {
        let counts = &self.settings.roundup_power2_divisions.0;
        let count = *counts.iter().find(|count| **count > 1)?;
        let first = counts.iter().position(|other| *other == count)?;
        let behind = counts.iter().rposition(|other| *other == count)? + 1;
        if counts[first..behind].iter().any(|other| *other != count) || counts[behind..].iter().any(|other| *other > 1)
        {
            return None;
        }
        let sizes = match (first, behind < counts.len()) {
            (0, false) => "every size".to_owned(),
            (0, true) => format!("sizes below {} MiB", 1_u64 << behind),
            (first, false) => format!("sizes from {} MiB on", 1_u64 << first),
            (first, true) => format!("sizes from {} to {} MiB", 1_u64 << first, 1_u64 << behind),
        };
        Some(format!("rounds {sizes} up to one of {count} steps between powers of two"))
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
        for (key, name) in CONF_SETTINGS {
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
}

impl Serialize for Conf {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl FromStr for Conf {
    type Err = ParseConfError;

    /// Reads the text as PyTorch does, and refuses settings that a replay cannot follow.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let conf: TorchConf = text.parse()?;
        if let Some(key) = conf.unknown.first() {
            return Err(ParseConfError::Key(key.clone()));
        }
        let refused = |key: &str, expected: &'static str| {
            let value = conf.entries.iter().rfind(|(name, _)| name == key).map(|(_, value)| value.clone());
            Err(ParseConfError::Value { key: key.to_owned(), value: value.unwrap_or_default(), expected })
        };
        if conf.memory_fraction < 1.0 {
            let expected = "a recording does not contain the device's memory size; leave it out and use --limit BYTES";
            return refused("per_process_memory_fraction", expected);
        }
        if conf.large_segment_mib != LEAST_MIB {
            return refused("large_segment_size_mb", "only 20 can be replayed, PyTorch's default");
        }
        let TorchConf { malloc_async, expandable, settings, .. } = conf;
        Ok(Self { text: text.trim().to_owned(), malloc_async, expandable, settings })
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
            ("roundup_power2_divisions:[256:1,100:2]", "power of two"),
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
        assert!(Conf::of(false, settings).export().contains("='"), "brackets and > are the shell's");
    }

    #[test]
    fn meaning_names_the_sizes_that_are_rounded() {
        for (text, sizes) in [
            ("roundup_power2_divisions:4", "every size"),
            ("roundup_power2_divisions:[8:0,>:4]", "sizes from 16 MiB on"),
            ("roundup_power2_divisions:[8:4]", "sizes below 16 MiB"),
            ("roundup_power2_divisions:[2:0,4:4,8:4]", "sizes from 4 to 16 MiB"),
        ] {
            let expected = format!("rounds {sizes} up to one of 4 steps between powers of two");
            assert_eq!(read(text).meaning(), Some(expected), "{text}");
        }
        assert!(
            ["", "max_split_size_mb:64", "roundup_power2_divisions:[1:2,2:4]"]
                .iter()
                .all(|text| read(text).meaning().is_none())
        );
    }

    #[test]
    fn recorded_conf_matches_the_snapshot_values() {
        let recorded = |values: Value| Conf::recorded(values.as_object().unwrap(), false).unwrap();
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
