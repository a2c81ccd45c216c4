//! Allocator settings and snapshot keys of each release of PyTorch 2, and the releases that may have written a snapshot.
//!
//! Taken from the Linux wheels on PyPI, 2.0 to 2.15: settings are strings in `libc10.so` and `libc10_cuda.so`, snapshot keys in
//! `libtorch_python.so`, and the variable in the header `c10/cuda/CUDAAllocatorConfig.h`. Settings of PyTorch 1 are from its
//! documentation.

use super::conf::{CONF_KEYS, Conf, ParseConfError, VARIABLE};
use anyhow::{Result, bail};
use serde_json::{Map, Value};
use std::fmt;
use std::str::FromStr;
use vramlab::backends::HostRelease;
use vramlab::histories::formats::{Cut, Frame, Keys, Origins};

/// Location of a key in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Within {
    Outermost,
    Segment,
    Event,
    Settings,
}

/// A key that snapshots contain from one release on.
#[derive(Debug)]
struct Sign {
    since: u16,
    key: &'static str,
    within: Within,
    /// Whether it is written even if empty: then a snapshot without it is older.
    always: bool,
}

const fn sign(since: u16, within: Within, key: &'static str) -> Sign {
    Sign { since, key, within, always: true }
}

const fn optional(since: u16, within: Within, key: &'static str) -> Sign {
    Sign { since, key, within, always: false }
}

const SIGNS: [Sign; 12] = [
    sign(1, Within::Segment, "is_expandable"),
    sign(2, Within::Event, "time_us"),
    sign(3, Within::Outermost, "allocator_settings"),
    sign(5, Within::Outermost, "external_annotations"),
    sign(8, Within::Event, "compile_context"),
    sign(9, Within::Settings, "graph_capture_record_stream_reuse"),
    sign(10, Within::Event, "user_metadata"),
    optional(11, Within::Event, "forward_frames"),
    sign(12, Within::Event, "pool_id"),
    sign(13, Within::Settings, "max_cached_size"),
    optional(14, Within::Outermost, "host_segments"),
    optional(15, Within::Event, "internal_metadata"),
];

/// Settings that PyTorch 1 had, with the minor version that added each; before 1.10 it had none.
const OF_TORCH_1: [(&str, u16); 3] =
    [("max_split_size_mb", 10), ("garbage_collection_threshold", 12), ("roundup_power2_divisions", 12)];

/// A release of PyTorch by its minor version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Torch {
    One(u16),
    Two(u16),
}

impl Torch {
    /// The rules of its host allocator; `None` before 2.6.
    pub(super) fn host_release(self) -> Option<HostRelease> {
        match self {
            Self::One(_) => None,
            Self::Two(minor) => HostRelease::of_version(&format!("2.{minor}")),
        }
    }
}

impl FromStr for Torch {
    type Err = ParseTorchError;

    /// Parses `torch.__version__`, of which the first two numbers count.
    fn from_str(text: &str) -> Result<Self, ParseTorchError> {
        let mut numbers = text.split(['.', '+']).map(str::parse::<u16>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(1)), Some(Ok(minor))) => Ok(Self::One(minor)),
            (Some(Ok(2)), Some(Ok(minor))) => Ok(Self::Two(minor)),
            _ => Err(ParseTorchError(text.to_owned())),
        }
    }
}

/// The text is not a [`Torch`] version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a version of PyTorch; write one such as 2.9")]
pub(super) struct ParseTorchError(String);

/// A range of releases of PyTorch 2 by their minor versions, 0 for 2.0 and earlier; or one release of PyTorch 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Versions {
    first: u16,
    /// `None`: the newest.
    last: Option<u16>,
    /// The minor version of a release of PyTorch 1, if it is one.
    of_torch_1: Option<u16>,
}

impl Versions {
    /// The range for a recording without snapshot keys.
    const ANY: Self = Self::range(1, None);

    const fn range(first: u16, last: Option<u16>) -> Self {
        Self { first, last, of_torch_1: None }
    }

    pub(super) fn given(torch: Torch) -> Self {
        match torch {
            Torch::One(minor) => Self { of_torch_1: Some(minor), ..Self::range(0, Some(0)) },
            Torch::Two(minor) => Self::range(minor, Some(minor)),
        }
    }

    /// The releases that write the snapshot's keys, have its settings, and write no key that it lacks.
    pub(super) fn inferred(keys: Keys, settings: &Map<String, Value>, cut: Option<Cut>) -> Self {
        let has = |sign: &Sign| match sign.within {
            Within::Settings => settings.contains_key(sign.key),
            _ => keys.has(sign.key),
        };
        // An absent key indicates an older release only if the snapshot has the object that would contain it.
        let has_parent = |sign: &Sign| match sign.within {
            Within::Outermost => cut.is_none(),
            Within::Segment => keys.has("blocks"),
            Within::Event => keys.has("action"),
            Within::Settings => !settings.is_empty(),
        };
        if !keys.any() {
            return Self::ANY;
        }
        let line = settings.get(VARIABLE).and_then(Value::as_str).and_then(|line| line.parse::<Conf>().ok());
        let known = line.iter().flat_map(Conf::keys).filter_map(|key| since(&key));
        let written = SIGNS.iter().filter(|sign| has(sign)).map(|sign| sign.since);
        let first = written.chain(known).max().unwrap_or(0);
        let lacking = SIGNS.iter().filter(|sign| sign.since > first && sign.always && !has(sign) && has_parent(sign));
        Self::range(first, lacking.map(|sign| sign.since - 1).min())
    }

    /// Whether all releases have a setting.
    fn have(self, setting: &str) -> bool {
        match self.of_torch_1 {
            Some(minor) => OF_TORCH_1.iter().any(|(name, since)| *name == setting && *since <= minor),
            None => since(setting).is_some_and(|since| since <= self.first),
        }
    }

    /// Whether all releases accept a text of settings that they have: lists by size are of PyTorch 2.
    fn accept(self, conf: &Conf) -> bool {
        self.of_torch_1.is_none() || !conf.text().contains('[')
    }

    /// Whether every release lacks a setting.
    fn lack(self, setting: &str) -> bool {
        self.of_torch_1.is_some() && !self.have(setting)
            || self.last.is_some_and(|last| since(setting).is_none_or(|since| since > last))
    }

    /// Whether the range is known.
    pub(super) fn are_known(self) -> bool {
        self != Self::ANY
    }

    /// Refuses settings that every release lacks.
    ///
    /// # Errors
    /// One line that names the first such setting.
    pub(super) fn check(self, conf: &Conf) -> Result<()> {
        let Some(key) = conf.keys().find(|key| self.lack(key)) else { return Ok(()) };
        let of_torch_1 = OF_TORCH_1.iter().find(|(name, _)| *name == key).map(|(_, since)| format!("1.{since}"));
        let first = of_torch_1.or_else(|| since(&key).map(|since| format!("2.{since}")));
        let first = first.map_or(String::new(), |first| format!(" requires PyTorch {first} and"));
        let text = conf.text();
        bail!("--conf {text:?}: {key}{first} is not available in PyTorch {self}; use --torch for another version")
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(minor) = self.of_torch_1 {
            return write!(f, "1.{minor}");
        }
        match (self.first, self.last) {
            (_, Some(0)) => f.write_str("before 2.1"),
            (0, Some(last)) => write!(f, "2.{last} or older"),
            (first, None) => write!(f, "2.{first} or newer"),
            (first, Some(last)) if first == last => write!(f, "2.{first}"),
            (first, Some(last)) if first + 1 == last => write!(f, "2.{first} or 2.{last}"),
            (first, Some(last)) => write!(f, "2.{first} to 2.{last}"),
        }
    }
}

fn since(setting: &str) -> Option<u16> {
    CONF_KEYS.iter().find(|key| key.name == setting).map(|key| key.since)
}

/// Settings that may be advised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed<'a> {
    pub(super) versions: Versions,
    /// Excluded settings.
    pub(super) without: &'a [String],
}

impl Allowed<'_> {
    pub(super) fn permits(self, conf: &Conf) -> bool {
        let allows = |key: String| self.versions.have(&key) && !self.without.contains(&key);
        self.versions.accept(conf) && conf.keys().all(allows)
    }
}

/// Refuses an unknown setting.
///
/// # Errors
/// No release has a setting of this name.
pub(super) fn check_name(setting: &str) -> Result<(), ParseConfError> {
    since(setting).map(drop).ok_or_else(|| ParseConfError::Key(setting.to_owned()))
}

// Stack frames may show that the program cannot use expandable segments: it ran on Windows, or shares memory through CUDA IPC.

/// Substrings of function names that export or import shared memory: PyTorch in Python and C++, the CUDA runtime, and custom
/// all-reduce kernels.
const FUNCTIONS: [&str; 9] = [
    "_share_cuda_",
    "rebuild_cuda_tensor",
    "_new_shared_cuda",
    "THPStorage_shareCuda",
    "CudaIPC",
    "IpcMemHandle",
    "shareIpcHandle",
    "getIpcDevPtr",
    "graph_buffer_ipc_meta",
];

/// Files that share memory, with the function if only one of the file does.
const FILES: [(&str, &str); 2] = [("multiprocessing/reductions.py", "reduce_tensor"), ("custom_all_reduce.", "")];

/// Why expandable segments are unavailable, with the frame (`file:line function`) that shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    Windows(String),
    Ipc(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Windows(frame) => write!(f, "The program ran on Windows ({frame})"),
            Self::Ipc(frame) => write!(f, "The program shares GPU memory by CUDA IPC ({frame})"),
        }
    }
}

/// The first obstacle that stack frames show.
pub(super) fn obstacle(origins: &Origins) -> Option<Obstacle> {
    origins.all_frames().find_map(|Frame { name, filename, line }| {
        let (name, path) = (origins.spelt(name), origins.spelt(filename));
        let file = path.replace('\\', "/");
        let parts: Vec<&str> = file.rsplitn(3, '/').take(2).collect();
        let frame = || format!("{}:{line} {name}", parts.iter().rev().copied().collect::<Vec<_>>().join("/"));
        if is_windows_path(path) {
            return Some(Obstacle::Windows(frame()));
        }
        let shares = FUNCTIONS.iter().any(|part| name.contains(part))
            || FILES.iter().any(|(end, function)| file.contains(end) && name.contains(function));
        shares.then(|| Obstacle::Ipc(frame()))
    })
}

/// Whether a path begins with a drive, such as `C:\\`.
fn is_windows_path(path: &str) -> bool {
    matches!(path.as_bytes(), [drive, b':', b'\\' | b'/', ..] if drive.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use vramlab::budget::Budget;
    use vramlab::histories::formats::{ReadOptions, read_from};

    const NEWEST: u16 = 15;

    /// Versions inferred from a snapshot with keys of each kind.
    fn inferred(outermost: &[&str], segment: &[&str], event: &[&str], settings: &[&str]) -> String {
        let with = |mut base: Value, keys: &[&str], value: Value| {
            keys.iter().for_each(|key| base[*key] = value.clone());
            base
        };
        let event = with(json!({"action": "alloc", "addr": 1, "size": 1, "stream": 0}), event, json!(0));
        let mut segment_keys = json!({"address": 1, "total_size": 1, "blocks": []});
        segment.iter().for_each(|key| segment_keys[*key] = json!(false));
        let mut snapshot = json!({"segments": [segment_keys], "device_traces": [[event]]});
        if !settings.is_empty() {
            snapshot["allocator_settings"] = with(json!({}), settings, json!(0));
        }
        let snapshot = with(snapshot, outermost, json!([])).to_string();
        let summary = read_from(Box::new(snapshot.as_bytes()), &ReadOptions::default(), &mut |_| Ok(())).unwrap();
        Versions::inferred(summary.keys, &summary.allocator_settings, summary.cut).to_string()
    }

    #[test]
    fn versions_follow_from_the_keys_of_a_snapshot() {
        assert_eq!(inferred(&[], &[], &[], &[]), "before 2.1");
        let expandable = ["is_expandable"];
        assert_eq!(inferred(&[], &expandable, &[], &[]), "2.1");
        assert_eq!(inferred(&[], &expandable, &["time_us"], &[]), "2.2");
        let settings = ["expandable_segments"];
        assert_eq!(inferred(&[], &expandable, &["time_us"], &settings), "2.3 or 2.4");
        let outermost = ["external_annotations"];
        assert_eq!(inferred(&outermost, &expandable, &["time_us"], &settings), "2.5 to 2.7");
        let mut event = vec!["time_us", "compile_context"];
        assert_eq!(inferred(&outermost, &expandable, &event, &settings), "2.8");
        let mut settings = vec!["expandable_segments", "graph_capture_record_stream_reuse"];
        assert_eq!(inferred(&outermost, &expandable, &event, &settings), "2.9");
        event.push("user_metadata");
        assert_eq!(inferred(&outermost, &expandable, &event, &settings), "2.10 or 2.11");
        event.push("forward_frames");
        assert_eq!(inferred(&outermost, &expandable, &event, &settings), "2.11");
        event.push("pool_id");
        assert_eq!(inferred(&outermost, &expandable, &event, &settings), "2.12");
        settings.push("max_cached_size");
        assert_eq!(inferred(&outermost, &expandable, &event, &settings), "2.13 or newer");
        assert_eq!(
            inferred(&["external_annotations", "host_segments"], &expandable, &event, &settings),
            "2.14 or newer"
        );
    }

    #[test]
    fn versions_ignore_keys_whose_parent_is_absent() {
        // The newest key decides, even if another program left an older one out.
        let settings = ["graph_capture_record_stream_reuse"];
        assert_eq!(inferred(&[], &[], &["time_us", "user_metadata"], &settings), "2.10 or 2.11");
        // The version has the settings that the program ran under.
        let line = json!({VARIABLE: "max_non_split_rounding_mb:64", "max_split_size": -1});
        let snapshot =
            json!({"segments": [], "device_traces": [], "external_annotations": [], "allocator_settings": line});
        let summary = read_from(Box::new(snapshot.to_string().as_bytes()), &ReadOptions::default(), &mut |_| Ok(()));
        let summary = summary.unwrap();
        let versions = Versions::inferred(summary.keys, &summary.allocator_settings, None);
        assert_eq!(versions.to_string(), "2.6 to 2.8");
        let none = Versions::inferred(Keys::default(), &Map::new(), None);
        assert_eq!((none.to_string(), none.are_known()), ("2.1 or newer".to_owned(), false));
    }

    #[test]
    fn torch_version_parses_as_in_torch() {
        for (text, minor) in [("2.9", 9), ("2.9.1", 9), ("2.11.0+cu130", 11), ("2.16.0a0+git12ab", 16)] {
            assert_eq!(text.parse(), Ok(Torch::Two(minor)), "{text}");
        }
        assert_eq!("1.13.1".parse(), Ok(Torch::One(13)));
        for text in ["", "2", "nine", "3.1", "2.x", "-2.9"] {
            assert!(text.parse::<Torch>().unwrap_err().to_string().contains("such as 2.9"), "{text}");
        }
    }

    #[test]
    fn settings_that_a_version_lacks_are_not_permitted() {
        let rounding: Conf = "max_non_split_rounding_mb:64,max_split_size_mb:64".parse().unwrap();
        let expandable: Conf = "expandable_segments:True".parse().unwrap();
        let permits =
            |first, last, conf: &Conf| Allowed { versions: Versions::range(first, last), without: &[] }.permits(conf);
        assert!(permits(6, Some(6), &rounding) && permits(6, None, &rounding));
        // Not all of these have it.
        assert!(!permits(5, Some(7), &rounding) && !permits(1, None, &rounding));
        assert!(permits(1, Some(1), &expandable) && !permits(0, Some(0), &expandable));
        assert!(permits(0, Some(0), &Conf::torch()));
        let without = ["expandable_segments".to_owned()];
        assert!(!Allowed { versions: Versions::ANY, without: &without }.permits(&expandable));
        // `--conf` is refused only if no version has the setting.
        let five = Versions::range(5, Some(5));
        let error = five.check(&rounding).unwrap_err().to_string();
        assert!(
            error.contains("max_non_split_rounding_mb requires PyTorch 2.6 and is not available in PyTorch 2.5"),
            "{error}"
        );
        assert!(Versions::range(5, Some(7)).check(&rounding).is_ok() && Versions::ANY.check(&rounding).is_ok());
    }

    #[test]
    fn releases_of_pytorch_1_have_few_settings() {
        let permits = |torch: &str, conf: &str| {
            let versions = Versions::given(torch.parse().unwrap());
            Allowed { versions, without: &[] }.permits(&conf.parse().unwrap())
        };
        for conf in ["max_split_size_mb:64", "garbage_collection_threshold:0.8", "roundup_power2_divisions:4"] {
            assert!(!permits("1.9", conf) && permits("1.13", conf), "{conf}");
        }
        assert!(permits("1.9", "") && permits("1.10", "max_split_size_mb:64"));
        assert!(!permits("1.11", "roundup_power2_divisions:4"));
        for conf in ["roundup_power2_divisions:[256:1,>:4]", "expandable_segments:True", "backend:cudaMallocAsync"] {
            assert!(!permits("1.13", conf), "{conf}");
        }
        let old = Versions::given(Torch::One(9));
        let error = old.check(&"max_split_size_mb:64".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("requires PyTorch 1.10 and is not available in PyTorch 1.9"), "{error}");
        assert_eq!((old.to_string(), old.are_known()), ("1.9".to_owned(), true));
    }

    #[test]
    fn check_name_accepts_every_setting() {
        assert!(CONF_KEYS.iter().all(|key| check_name(key.name).is_ok()) && check_name("expandable").is_err());
        assert!(CONF_KEYS.is_sorted_by_key(|key| key.since), "in release order");
    }

    /// Variables from which a release reads CUDA's settings, the preferred one first.
    fn variables(minor: u16) -> String {
        match minor {
            9 => format!("`{VARIABLE}`; `PYTORCH_ALLOC_CONF` is known and does nothing for CUDA"),
            10.. => format!("`{VARIABLE}`, else `PYTORCH_ALLOC_CONF`"),
            _ => format!("`{VARIABLE}`"),
        }
    }

    #[test]
    fn readme_contains_the_table_of_versions() {
        let named = |names: Vec<&str>| {
            let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
            if names.is_empty() { "–".to_owned() } else { names.join(", ") }
        };
        let mut rows = String::from("| PyTorch | reads | new settings | new in its snapshots |\n|---|---|---|---|\n");
        for minor in 0..=NEWEST {
            let settings = CONF_KEYS.iter().filter(|key| key.since == minor).map(|key| key.name).collect();
            let keys = SIGNS.iter().filter(|sign| sign.since == minor).map(|sign| sign.key).collect();
            let version = if minor == 0 { "2.0 and before".to_owned() } else { format!("2.{minor}") };
            rows += &format!("| {version} | {} | {} | {} |\n", variables(minor), named(settings), named(keys));
        }
        let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
        let readme = std::fs::read_to_string(readme).unwrap();
        assert!(readme.contains(&rows), "app/README.md should have\n{rows}");
    }

    fn of(frames: &[(&str, &str)]) -> Option<Obstacle> {
        let mut origins = Origins::new(&Budget::default());
        for (name, file) in frames {
            let frame = Frame { name: origins.text(name).unwrap(), filename: origins.text(file).unwrap(), line: 7 };
            origins.frame(frame).unwrap();
        }
        obstacle(&origins)
    }

    #[test]
    fn obstacle_names_the_frame_that_rules_out_expandable() {
        let step = ("step", "/home/me/train.py");
        assert_eq!(of(&[step, ("at::empty", "??"), ("call", "<string>")]), None);
        // Many training scripts have a function of this name that sums over ranks.
        assert_eq!(of(&[("reduce_tensor", "/home/me/train.py")]), None);
        let torch = ("reduce_tensor", "/env/torch/multiprocessing/reductions.py");
        let frame = "multiprocessing/reductions.py:7 reduce_tensor".to_owned();
        assert_eq!(of(&[step, torch]), Some(Obstacle::Ipc(frame)));
        for name in [
            "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::shareIpcHandle(void*)",
            "torch::CudaIPCSentDataDelete(void*)",
        ] {
            assert!(of(&[step, (name, "??")]).unwrap().to_string().contains(name), "{name}");
        }
        let reduces = ("__init__", "vllm/distributed/device_communicators/custom_all_reduce.py");
        assert!(matches!(of(&[reduces]), Some(Obstacle::Ipc(_))));
        let windows = of(&[("forward", "C:\\Users\\me\\net.py")]);
        assert_eq!(windows, Some(Obstacle::Windows("me/net.py:7 forward".to_owned())));
    }
}
