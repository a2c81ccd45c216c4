//! The benchmark's cases by name.

use crate::repository;
use crate::study::record::cores;
use anyhow::{Context, Result, bail};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::slice;
use vramlab::Selection;
use vramlab::histories::workload::RecordedCalls;

/// Sizes of the cases `alternate`, in bytes: both of the small pool, one of each, both of the large pool.
const ALTERNATE_BYTES: [[u64; 2]; 3] = [[4 << 10, 64 << 10], [64 << 10, 4 << 20], [4 << 20, 32 << 20]];
/// Sizes of the cases `pair`, in bytes.
const PAIR_BYTES: [u64; 4] = [512, 64 << 10, 1 << 20, 32 << 20];
/// Live blocks of the cases `mixed`.
const MIXED_LIVE: [u32; 3] = [64, 1_024, 16_384];
/// Live blocks of each thread in the cases `threads`.
pub(crate) const THREAD_LIVE: u32 = 64;

vramlab::device::named! {
    /// An instrument whose cost is measured.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Instrument {
        /// No instrument, the reference.
        Bare "bare",
        /// Latency histograms.
        Latency "latency",
        /// The event trace.
        Trace "trace",
    }
}

/// A benchmark case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    /// Replays the allocations and frees of the recording with this number.
    History { number: usize },
    /// Frees a random one of `live` blocks and allocates another.
    Mixed { live: u32 },
    /// Allocates and frees a block of one size, then one of the other.
    Alternate { bytes: [u64; 2] },
    /// Allocates and frees one size in turn, so the same block is reused.
    Pair { bytes: u64 },
    /// Mixed sizes by threads, each on its own stream.
    Threads { threads: u32 },
    /// Mixed sizes by threads that share one stream.
    Shared { threads: u32 },
    /// Pairs of 4 KiB under an instrument.
    Instrument { instrument: Instrument, threads: u32 },
    /// Ten million events at full speed; the trace must contain every one.
    Events { threads: u32 },
}

impl Case {
    /// Name, as `--case` takes it; `histories` are the recordings that `History` numbers.
    pub(crate) fn name(self, histories: &[Named]) -> String {
        match self {
            Self::History { number } => format!("history/{}", histories[number].name),
            Self::Mixed { live } => format!("mixed/{live}"),
            Self::Alternate { bytes: [one, other] } => format!("alternate/{one}/{other}"),
            Self::Pair { bytes } => format!("pair/{bytes}"),
            Self::Threads { threads } => format!("threads/{threads}"),
            Self::Shared { threads } => format!("shared/{threads}"),
            Self::Instrument { instrument, threads } => format!("instrument/{instrument}/{threads}"),
            Self::Events { threads } => format!("trace/events/{threads}"),
        }
    }

    /// Number of threads.
    pub(crate) fn threads(self) -> u32 {
        match self {
            Self::History { .. } | Self::Mixed { .. } | Self::Alternate { .. } | Self::Pair { .. } => 1,
            Self::Threads { threads }
            | Self::Shared { threads }
            | Self::Instrument { threads, .. }
            | Self::Events { threads } => threads,
        }
    }

    /// Whether other projects' allocators are measured with it too.
    pub(crate) fn is_for_all(self) -> bool {
        !matches!(self, Self::Instrument { .. } | Self::Events { .. })
    }

    /// Unit of its values.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::History { .. } | Self::Mixed { .. } | Self::Alternate { .. } | Self::Pair { .. } => "ns/operation",
            Self::Threads { .. } | Self::Shared { .. } => "million operations/s",
            Self::Instrument { .. } => "ns/call",
            Self::Events { .. } => "million events/s",
        }
    }

    fn matches(self, histories: &[Named], patterns: &[String]) -> bool {
        let name = self.name(histories);
        let fits = |pattern: &String| {
            let pattern = pattern.trim_end_matches('*').trim_end_matches('/');
            name.strip_prefix(pattern)
                .is_some_and(|rest| pattern.is_empty() || rest.is_empty() || rest.starts_with('/'))
        };
        patterns.is_empty() || patterns.iter().any(fits)
    }
}

/// A case under an allocator.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// The case.
    pub(crate) case: Case,
    /// The allocator.
    pub(crate) alloc: Selection,
}

/// The selected cases, in groups; members of a group are compared and so run in turn.
pub(crate) fn groups(
    chosen: &[Selection],
    threads: &[u32],
    histories: &[Named],
    patterns: &[String],
) -> Result<Vec<Vec<Job>>> {
    let mut cases: Vec<Case> = (0..histories.len()).map(|number| Case::History { number }).collect();
    cases.extend(MIXED_LIVE.map(|live| Case::Mixed { live }));
    cases.extend(ALTERNATE_BYTES.map(|bytes| Case::Alternate { bytes }));
    cases.extend(PAIR_BYTES.map(|bytes| Case::Pair { bytes }));
    cases.extend(threads.iter().map(|threads| Case::Threads { threads: *threads }));
    cases.extend(threads.iter().filter(|threads| **threads > 1).map(|threads| Case::Shared { threads: *threads }));
    let mut groups: Vec<Vec<Job>> =
        cases.into_iter().map(|case| chosen.iter().map(|alloc| Job { case, alloc: alloc.clone() }).collect()).collect();
    // Instruments wrap every allocator alike; their cost is measured on one whose cache hits are cheap.
    let cheap = |alloc: &&Selection| alloc.capabilities().caches;
    if let Some(alloc) = chosen.iter().find(cheap).or(chosen.first()) {
        for threads in [1, cores().min(16)].into_iter().take(if cores() > 1 { 2 } else { 1 }) {
            let of = |instrument| Job { case: Case::Instrument { instrument, threads }, alloc: alloc.clone() };
            groups.push(Instrument::ALL.map(of).to_vec());
            groups.push(vec![Job { case: Case::Events { threads }, alloc: alloc.clone() }]);
        }
    }
    // A misspelt case would otherwise be missing from the rows without a word.
    let all: Vec<Case> = groups.iter().flatten().map(|job| job.case).collect();
    let lacks = |pattern: &&String| !all.iter().any(|case| case.matches(histories, slice::from_ref(*pattern)));
    if let Some(pattern) = patterns.iter().find(lacks) {
        let mut names: Vec<String> = all.iter().map(|case| case.name(histories)).collect();
        names.dedup();
        let hint = if histories.is_empty() { "; name recordings with --history" } else { "" };
        bail!("no case begins with '{pattern}'; there are {}{hint}", names.join(", "));
    }
    for group in &mut groups {
        group.retain(|job| job.case.matches(histories, patterns));
        // An instrument's cost is a difference, so the bare run is included.
        if let Some(Job { case: Case::Instrument { threads, .. }, alloc }) = group.first().cloned() {
            let bare = Case::Instrument { instrument: Instrument::Bare, threads };
            if group.iter().all(|job| job.case != bare) {
                group.insert(0, Job { case: bare, alloc });
            }
        }
    }
    groups.retain(|group| !group.is_empty());
    Ok(groups)
}

/// A recording and its name.
#[derive(Debug)]
pub(crate) struct Named {
    /// The file's name up to its first dot.
    pub(crate) name: String,
    /// The recorded calls.
    pub(crate) calls: RecordedCalls,
}

/// Reads the given recordings, or those of the sources: all in `experiments/histories`.
///
/// Without a list and without the directory the result is empty.
pub(crate) fn read_histories(named: &[PathBuf]) -> Result<Vec<Named>> {
    let files = if named.is_empty() { beside_the_sources() } else { named.to_vec() };
    let mut recordings: Vec<Named> = Vec::new();
    for file in &files {
        let name = name_of(file);
        if name.is_empty() {
            bail!("{}: has no name that a case could have", file.display());
        }
        if recordings.iter().any(|other| other.name == name) {
            bail!("{}: another history is called {name} too; rename one", file.display());
        }
        let calls = RecordedCalls::new(&vramlab_cli::read_history(file)?);
        if calls.allocations() == 0 {
            bail!("{}: there is no allocation in it", file.display());
        }
        recordings.push(Named { name, calls });
    }
    Ok(recordings)
}

/// A case's name for a recording: letters, digits, `-` and `_` of the file's name up to its first dot.
fn name_of(file: &Path) -> String {
    let name = file.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let stem = name.split('.').next().unwrap_or_default();
    stem.chars()
        .map(|letter| if letter.is_ascii_alphanumeric() || "-_".contains(letter) { letter } else { '_' })
        .collect()
}

fn beside_the_sources() -> Vec<PathBuf> {
    let entries = repository::find("histories").and_then(|folder| repository::entries(&folder).ok());
    let mut files = entries.unwrap_or_default();
    files.retain(|file| file.to_string_lossy().ends_with(".pickle.xz"));
    files
}

/// Writes a recording for the baseline programs: slots and streams, then a line per call (slot, stream, bytes; 0
/// bytes: free).
pub(crate) fn write_history(history: &Named, folder: &Path) -> Result<PathBuf> {
    let calls = &history.calls;
    let mut text = format!("{} {}\n", calls.slots(), calls.streams());
    for call in calls.calls() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{} {} {}", call.slot, call.stream, call.bytes);
    }
    let path = folder.join(format!("{}.calls", history.name));
    std::fs::write(&path, text).with_context(|| format!("{}: cannot write it", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(patterns: &[&str]) -> Vec<String> {
        let patterns: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
        let groups = groups(&terminal::arguments::chosen(&[]), &[1, 4], &[], &patterns).unwrap();
        let mut names: Vec<String> = groups.iter().flatten().map(|job| job.case.name(&[])).collect();
        names.dedup();
        names
    }

    #[test]
    fn patterns_choose_cases() {
        assert_eq!(names(&["mixed"]), ["mixed/64", "mixed/1024", "mixed/16384"]);
        assert_eq!(names(&["threads/*"]), ["threads/1", "threads/4"]);
        assert_eq!(names(&["pair/512", "mixed/64"]), ["mixed/64", "pair/512"]);
        assert_eq!(names(&["shared", "alternate/65536"]), ["alternate/65536/4194304", "shared/4"]);
        assert_eq!(names(&["instrument/trace/1"]), ["instrument/bare/1", "instrument/trace/1"]);
        assert!(names(&[]).len() >= 13);
        let error = groups(&terminal::arguments::chosen(&[]), &[1], &[], &["pear".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("'pear'") && error.contains("pair/512") && error.contains("trace/events/1"), "{error}");
    }

    #[test]
    fn names_are_those_of_files() {
        assert_eq!(name_of(Path::new("/a/gpt2.pickle.xz")), "gpt2");
        assert_eq!(name_of(Path::new("my run,1.pickle")), "my_run_1");
    }

    #[test]
    fn the_histories_of_the_sources_are_read_and_written() {
        let histories = read_histories(&[]).unwrap();
        let names: Vec<&str> = histories.iter().map(|history| history.name.as_str()).collect();
        assert_eq!(names, ["gpt2", "mlp", "resnet50", "streams"]);
        let folder = tempfile::tempdir().unwrap();
        for history in &histories {
            let text = std::fs::read_to_string(write_history(history, folder.path()).unwrap()).unwrap();
            assert_eq!(text.lines().count(), 1 + history.calls.calls().len());
            assert_eq!(history.calls.calls().len() as u64, 2 * history.calls.allocations());
        }
    }
}
