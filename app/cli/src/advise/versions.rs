//! What each release of PyTorch 2 reads of its allocator's settings, and which of them wrote a snapshot.
//!
//! Taken from the wheels for Linux on PyPI, 2.0 to 2.15: the names stand in `libc10.so` and `libc10_cuda.so`, a snapshot's keys
//! in `libtorch_python.so`, and which variable is read in the header `c10/cuda/CUDAAllocatorConfig.h`.

use super::conf::{Conf, KEYS, ParseConfError, VARIABLE};
use anyhow::{Result, bail};
use serde_json::{Map, Value};
use std::fmt;
use std::str::FromStr;
use vramlab::histories::formats::{Cut, Frame, Keys, Origins};

/// Where a snapshot has a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Within {
    Outermost,
    Segment,
    Event,
    Settings,
}

/// A key that snapshots have from one release on.
#[derive(Debug)]
struct Sign {
    since: u16,
    key: &'static str,
    within: Within,
    /// Whether it stands there even if it says nothing: then a snapshot without it is older.
    always: bool,
}

const fn sign(since: u16, within: Within, key: &'static str) -> Sign {
    Sign { since, key, within, always: true }
}

const fn at_times(since: u16, within: Within, key: &'static str) -> Sign {
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
    at_times(11, Within::Event, "forward_frames"),
    sign(12, Within::Event, "pool_id"),
    sign(13, Within::Settings, "max_cached_size"),
    at_times(14, Within::Outermost, "host_segments"),
    at_times(15, Within::Event, "internal_metadata"),
];

/// A release of PyTorch 2 by its second number; 0 stands for 2.0 and what came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Torch(u16);

impl FromStr for Torch {
    type Err = NoVersion;

    /// As `torch.__version__` says it; the first two numbers count.
    fn from_str(text: &str) -> Result<Self, NoVersion> {
        let mut numbers = text.split(['.', '+']).map(str::parse::<u16>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(1)), Some(Ok(_))) => Ok(Self(0)),
            (Some(Ok(2)), Some(Ok(minor))) => Ok(Self(minor)),
            _ => Err(NoVersion(text.to_owned())),
        }
    }
}

/// Why a text is no [`Torch`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no version of PyTorch; write one such as 2.9")]
pub(super) struct NoVersion(String);

/// The releases that may be meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Versions {
    first: u16,
    /// `None`: the newest.
    last: Option<u16>,
}

impl Versions {
    /// Those from which nothing is known of the program.
    const ANY: Self = Self { first: 1, last: None };

    pub(super) fn given(torch: Torch) -> Self {
        Self { first: torch.0, last: Some(torch.0) }
    }

    /// Those that write what a snapshot has, know the settings that it ran under, and write nothing that it lacks.
    pub(super) fn told(keys: Keys, settings: &Map<String, Value>, cut: Option<Cut>) -> Self {
        let has = |sign: &Sign| match sign.within {
            Within::Settings => settings.contains_key(sign.key),
            _ => keys.has(sign.key),
        };
        // What is not there says something only where it would stand.
        let would_stand = |sign: &Sign| match sign.within {
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
        let lacking = SIGNS.iter().filter(|sign| sign.since > first && sign.always && !has(sign) && would_stand(sign));
        Self { first, last: lacking.map(|sign| sign.since - 1).min() }
    }

    /// Whether all of them know a setting.
    fn know(self, setting: &str) -> bool {
        since(setting).is_some_and(|since| since <= self.first)
    }

    /// Whether none of them knows a setting.
    fn lack(self, setting: &str) -> bool {
        self.last.is_some_and(|last| since(setting).is_none_or(|since| since > last))
    }

    /// Whether anything is known of them.
    pub(super) fn are_told(self) -> bool {
        self != Self::ANY
    }

    /// Refuses what none of them knows.
    ///
    /// # Errors
    /// One line that names the first such setting.
    pub(super) fn check(self, conf: &Conf) -> Result<()> {
        let Some(key) = conf.keys().find(|key| self.lack(key)) else { return Ok(()) };
        let first = since(&key).map_or(String::new(), |since| format!(" came with 2.{since} and"));
        let text = conf.text();
        bail!("--conf {text:?}: {key}{first} is not known to PyTorch {self}; --torch names another version")
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
    KEYS.iter().find(|(name, ..)| *name == setting).map(|(_, since, _)| *since)
}

/// What may be advised.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed<'a> {
    pub(super) versions: Versions,
    /// Settings that are to be left out.
    pub(super) without: &'a [String],
}

impl Allowed<'_> {
    pub(super) fn permits(self, conf: &Conf) -> bool {
        conf.keys().all(|key| self.versions.know(&key) && !self.without.contains(&key))
    }
}

/// Refuses what is no setting.
///
/// # Errors
/// A name that no release knows.
pub(super) fn check_name(setting: &str) -> Result<(), ParseConfError> {
    since(setting).map(drop).ok_or_else(|| ParseConfError::Key(setting.to_owned()))
}

// Whether stack frames show that the program cannot have expandable segments: it ran on Windows, or shares memory between
// processes by CUDA IPC.

/// Parts of the names of functions that share memory or open what is shared: of PyTorch in Python and in C++, of the CUDA
/// runtime, and of kernels that reduce in each other's memory.
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

/// Files that do so, with the function where not all of the file does.
const FILES: [(&str, &str); 2] = [("multiprocessing/reductions.py", "reduce_tensor"), ("custom_all_reduce.", "")];

/// What stands against expandable segments, with the frame (`file:line function`) that shows it.
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

/// What frames show: the first of them that shows anything.
pub(super) fn shown(origins: &Origins) -> Option<Obstacle> {
    origins.all_frames().find_map(|Frame { name, filename, line }| {
        let (name, path) = (origins.spelt(name), origins.spelt(filename));
        let file = path.replace('\\', "/");
        let parts: Vec<&str> = file.rsplitn(3, '/').take(2).collect();
        let frame = || format!("{}:{line} {name}", parts.iter().rev().copied().collect::<Vec<_>>().join("/"));
        if is_of_windows(path) {
            return Some(Obstacle::Windows(frame()));
        }
        let shares = FUNCTIONS.iter().any(|part| name.contains(part))
            || FILES.iter().any(|(end, function)| file.contains(end) && name.contains(function));
        shares.then(|| Obstacle::Ipc(frame()))
    })
}

/// Whether a path begins with a drive, as `C:\\`.
fn is_of_windows(path: &str) -> bool {
    matches!(path.as_bytes(), [drive, b':', b'\\' | b'/', ..] if drive.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use vramlab::budget::Budget;
    use vramlab::histories::formats::{ReadOptions, read_from};

    const NEWEST: u16 = 15;

    /// The versions of a snapshot with keys of each kind.
    fn told(outermost: &[&str], segment: &[&str], event: &[&str], settings: &[&str]) -> String {
        let with = |mut base: Value, keys: &[&str], value: Value| {
            keys.iter().for_each(|key| base[*key] = value.clone());
            base
        };
        let event = with(json!({"action": "alloc", "addr": 1, "size": 1, "stream": 0}), event, json!(0));
        let mut segment_keys = json!({"address": 1, "total_size": 1, "blocks": []});
        segment.iter().for_each(|key| segment_keys[*key] = json!(false));
        let mut whole = json!({"segments": [segment_keys], "device_traces": [[event]]});
        if !settings.is_empty() {
            whole["allocator_settings"] = with(json!({}), settings, json!(0));
        }
        let whole = with(whole, outermost, json!([])).to_string();
        let summary = read_from(Box::new(whole.as_bytes()), &ReadOptions::default(), &mut |_| Ok(())).unwrap();
        Versions::told(summary.keys, &summary.allocator_settings, summary.cut).to_string()
    }

    #[test]
    fn a_snapshot_tells_the_versions_that_write_such() {
        assert_eq!(told(&[], &[], &[], &[]), "before 2.1");
        let expandable = ["is_expandable"];
        assert_eq!(told(&[], &expandable, &[], &[]), "2.1");
        assert_eq!(told(&[], &expandable, &["time_us"], &[]), "2.2");
        let settings = ["expandable_segments"];
        assert_eq!(told(&[], &expandable, &["time_us"], &settings), "2.3 or 2.4");
        let outermost = ["external_annotations"];
        assert_eq!(told(&outermost, &expandable, &["time_us"], &settings), "2.5 to 2.7");
        let mut event = vec!["time_us", "compile_context"];
        assert_eq!(told(&outermost, &expandable, &event, &settings), "2.8");
        let mut settings = vec!["expandable_segments", "graph_capture_record_stream_reuse"];
        assert_eq!(told(&outermost, &expandable, &event, &settings), "2.9");
        event.push("user_metadata");
        assert_eq!(told(&outermost, &expandable, &event, &settings), "2.10 or 2.11");
        event.push("forward_frames");
        assert_eq!(told(&outermost, &expandable, &event, &settings), "2.11");
        event.push("pool_id");
        assert_eq!(told(&outermost, &expandable, &event, &settings), "2.12");
        settings.push("max_cached_size");
        assert_eq!(told(&outermost, &expandable, &event, &settings), "2.13 or newer");
        assert_eq!(told(&["external_annotations", "host_segments"], &expandable, &event, &settings), "2.14 or newer");
    }

    #[test]
    fn what_would_not_stand_there_says_nothing() {
        // An older key that another program left out does not contradict a newer one.
        let settings = ["graph_capture_record_stream_reuse"];
        assert_eq!(told(&[], &[], &["time_us", "user_metadata"], &settings), "2.10 or 2.11");
        // It knew what it ran under.
        let line = json!({VARIABLE: "max_non_split_rounding_mb:64", "max_split_size": -1});
        let whole =
            json!({"segments": [], "device_traces": [], "external_annotations": [], "allocator_settings": line});
        let summary = read_from(Box::new(whole.to_string().as_bytes()), &ReadOptions::default(), &mut |_| Ok(()));
        let summary = summary.unwrap();
        let told = Versions::told(summary.keys, &summary.allocator_settings, None);
        assert_eq!(told.to_string(), "2.6 to 2.8");
        let none = Versions::told(Keys::default(), &Map::new(), None);
        assert_eq!((none.to_string(), none.are_told()), ("2.1 or newer".to_owned(), false));
    }

    #[test]
    fn a_version_is_read_as_torch_says_it() {
        for (text, minor) in [("2.9", 9), ("2.9.1", 9), ("2.11.0+cu130", 11), ("2.16.0a0+git12ab", 16), ("1.13.1", 0)] {
            assert_eq!(text.parse(), Ok(Torch(minor)), "{text}");
        }
        for text in ["", "2", "nine", "3.1", "2.x", "-2.9"] {
            assert!(text.parse::<Torch>().unwrap_err().to_string().contains("such as 2.9"), "{text}");
        }
    }

    #[test]
    fn what_a_version_does_not_know_is_not_permitted() {
        let rounding: Conf = "max_non_split_rounding_mb:64,max_split_size_mb:64".parse().unwrap();
        let expandable: Conf = "expandable_segments:True".parse().unwrap();
        let permits =
            |first, last, conf: &Conf| Allowed { versions: Versions { first, last }, without: &[] }.permits(conf);
        assert!(permits(6, Some(6), &rounding) && permits(6, None, &rounding));
        // Not all of these know it.
        assert!(!permits(5, Some(7), &rounding) && !permits(1, None, &rounding));
        assert!(permits(1, Some(1), &expandable) && !permits(0, Some(0), &expandable));
        assert!(permits(0, Some(0), &Conf::torch()));
        let without = ["expandable_segments".to_owned()];
        assert!(!Allowed { versions: Versions::ANY, without: &without }.permits(&expandable));
        // To compare under it is refused only where none can.
        let five = Versions { first: 5, last: Some(5) };
        let error = five.check(&rounding).unwrap_err().to_string();
        assert!(error.contains("max_non_split_rounding_mb came with 2.6 and is not known to PyTorch 2.5"), "{error}");
        assert!(
            Versions { first: 5, last: Some(7) }.check(&rounding).is_ok() && Versions::ANY.check(&rounding).is_ok()
        );
    }

    #[test]
    fn names_are_those_that_are_read() {
        assert!(KEYS.iter().all(|(name, ..)| check_name(name).is_ok()) && check_name("expandable").is_err());
        assert!(KEYS.is_sorted_by_key(|(_, since, _)| *since), "in the order in which they came");
    }

    /// Which variables a release takes CUDA's settings from, the one first that it prefers.
    fn variables(minor: u16) -> String {
        match minor {
            9 => format!("`{VARIABLE}`; `PYTORCH_ALLOC_CONF` is known and does nothing for CUDA"),
            10.. => format!("`{VARIABLE}`, else `PYTORCH_ALLOC_CONF`"),
            _ => format!("`{VARIABLE}`"),
        }
    }

    #[test]
    fn the_readme_has_the_table() {
        let named = |names: Vec<&str>| {
            let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
            if names.is_empty() { "–".to_owned() } else { names.join(", ") }
        };
        let mut rows = String::from("| PyTorch | reads | new settings | new in its snapshots |\n|---|---|---|---|\n");
        for minor in 0..=NEWEST {
            let settings = KEYS.iter().filter(|(_, since, _)| *since == minor).map(|(name, ..)| *name).collect();
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
        shown(&origins)
    }

    #[test]
    fn frames_that_stand_against_expandable_segments_are_found() {
        let step = ("step", "/home/me/train.py");
        assert_eq!(of(&[step, ("at::empty", "??"), ("call", "<string>")]), None);
        // A function of this name is in many training scripts, where it sums over ranks.
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
