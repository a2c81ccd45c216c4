//! Provenance of a record: code, host, driver and job.
//!
//! Unknown values are absent: a build outside a checkout has no commit, a host without NVIDIA's driver no driver release.

use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Build information of a program, from its build script. [`built!`](crate::built) creates it.
#[derive(Clone, Copy, Debug)]
pub struct Built {
    /// Commit, in hexadecimal; empty if unknown.
    pub commit: &'static str,
    /// `true` or `false`; empty if unknown.
    pub dirty: &'static str,
    /// Name of Cargo's profile.
    pub profile: &'static str,
}

/// Build information of the calling crate, whose build script must set these variables.
#[macro_export]
macro_rules! built {
    () => {
        $crate::provenance::Built {
            commit: env!("BUILT_FROM_COMMIT"),
            dirty: env!("BUILT_FROM_DIRTY"),
            profile: env!("BUILT_WITH_PROFILE"),
        }
    };
}

/// Provenance of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Provenance {
    /// Commit of the sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub git_commit: Option<String>,
    /// Whether the sources differed from that commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub git_dirty: Option<bool>,
    /// Cargo's profile: `dev`, `release` or a custom one.
    pub build_profile: String,
    /// Identifies the host without naming it: 16 hexadecimal digits of a SHA-256.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_hash: Option<String>,
    /// Release of NVIDIA's driver, as `580.159.03`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_release: Option<String>,
    /// The scheduler's job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
}

/// A Slurm job.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Job {
    /// `SLURM_JOB_ID`.
    pub id: String,
    /// `SLURM_ARRAY_JOB_ID`, shared by all jobs of an array.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array_id: Option<String>,
    /// `SLURM_ARRAY_TASK_ID`, the job's number in the array.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array_task: Option<String>,
}

impl Provenance {
    /// Provenance of this process. Reads a few small system files.
    #[must_use]
    pub fn of(built: Built) -> Self {
        let root = Path::new("/");
        Self {
            git_commit: (!built.commit.is_empty()).then(|| built.commit.to_owned()),
            git_dirty: built.dirty.parse().ok(),
            build_profile: built.profile.to_owned(),
            host_hash: host_hash(root, &|name| std::env::var(name).ok()),
            driver_release: driver_release(root),
            job: job(&|name| std::env::var(name).ok()),
        }
    }
}

/// The command line of this process, without directories of this machine.
#[must_use]
pub fn command_line() -> Vec<String> {
    std::env::args_os().map(|word| without_directories(&word.to_string_lossy())).collect()
}

/// A word with its absolute path cut to the last name: `/a/b`, `-o/a/b`, `--out=/a/b`, `sim:/a/b`, and not `https://a/b`.
fn without_directories(word: &str) -> String {
    let begins = |before: &str| {
        before.is_empty() || before.ends_with(['=', ':']) || before.len() == 2 && before.starts_with('-')
    };
    let is_root = |at: usize| begins(&word[..at]) && !word[at..].starts_with("//");
    match word.match_indices('/').map(|(at, _)| at).find(|at| is_root(*at)) {
        Some(at) => word[..at].to_owned() + word[at..].trim_end_matches('/').rsplit('/').next().unwrap_or_default(),
        None => word.to_owned(),
    }
}

/// The trimmed text of a system file; `None` if it is missing or empty.
fn text(root: &Path, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(root.join(name)).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Hash of the values that differ between hosts: machine ID, host name, processor, the kernel module's driver, and the UUIDs
/// of the GPUs. Virtual machines that start from one image share the first two.
fn host_hash(root: &Path, variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let machine = text(root, "etc/machine-id").or_else(|| text(root, "var/lib/dbus/machine-id"));
    let name =
        text(root, "proc/sys/kernel/hostname").or_else(|| variable("HOSTNAME")).or_else(|| variable("COMPUTERNAME"));
    if machine.is_none() && name.is_none() {
        return None;
    }
    let processor = text(root, "proc/cpuinfo").and_then(|text| field(&text, "model name"));
    // The release of a loaded library is left out: it differs between processes.
    let mut facts = [machine, name, processor, module_release(root)].map(Option::unwrap_or_default).to_vec();
    facts.extend(gpus(root));
    let facts = facts.join("\n");
    Some(digest(&SHA256, facts.as_bytes()).as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The value of the first line `NAME : VALUE`.
fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

/// The UUIDs of NVIDIA's GPUs, sorted.
fn gpus(root: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(root.join("proc/driver/nvidia/gpus")).into_iter().flatten().flatten();
    let information = entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("information")).ok());
    let mut uuids: Vec<String> = information.filter_map(|text| field(&text, "GPU UUID")).collect();
    uuids.sort_unstable();
    uuids
}

/// Whether a word is a driver's release.
fn is_release(word: &str) -> bool {
    let parts: Vec<&str> = word.split('.').collect();
    let digits = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    (2..=3).contains(&parts.len()) && parts.iter().all(digits)
}

/// The kernel module's release.
fn module_release(root: &Path) -> Option<String> {
    let module = text(root, "proc/driver/nvidia/version").and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("NVRM version:"))?.to_owned();
        line.split_whitespace().find(|word| is_release(word)).map(str::to_owned)
    });
    module.or_else(|| text(root, "sys/module/nvidia/version").filter(|text| is_release(text)))
}

/// The kernel module's release, else the release of the loaded library.
fn driver_release(root: &Path) -> Option<String> {
    let loaded = || {
        let maps = text(root, "proc/self/maps")?;
        let mut releases = maps.lines().filter_map(|line| line.rsplit_once("/libcuda.so.").map(|(_, end)| end));
        releases.find(|end| is_release(end)).map(str::to_owned)
    };
    module_release(root).or_else(loaded)
}

fn job(variable: &dyn Fn(&str) -> Option<String>) -> Option<Job> {
    /// Maximum length of a job ID.
    const LONGEST: usize = 64;
    let plain = |text: &String| {
        (1..=LONGEST).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.+-".contains(&byte))
    };
    let of = |name: &str| variable(name).filter(plain);
    Some(Job { id: of("SLURM_JOB_ID")?, array_id: of("SLURM_ARRAY_JOB_ID"), array_task: of("SLURM_ARRAY_TASK_ID") })
}

/// The current time in UTC, in the format of records: `2026-11-22T19:37:32Z`.
#[must_use]
pub fn now() -> String {
    utc(SystemTime::now())
}

fn utc(time: SystemTime) -> String {
    // The clock of a machine may never have been set.
    humantime::format_rfc3339_seconds(time.max(UNIX_EPOCH)).to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    use std::time::Duration;

    #[test]
    fn command_lines_have_no_directories() {
        for (word, kept) in [
            ("/a/b/trainer", "trainer"),
            ("/a/b/", "b"),
            ("-o/a/b", "-ob"),
            ("--out=/a/b c", "--out=b c"),
            ("sim:/a/b.json", "sim:b.json"),
            ("runs/a", "runs/a"),
            ("--url=https://a/b", "--url=https://a/b"),
            ("", ""),
        ] {
            assert_eq!(without_directories(word), kept, "{word}");
        }
    }

    /// A root directory with these files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn times_are_whole_seconds_of_utc() {
        let after = |ms| UNIX_EPOCH + Duration::from_millis(ms);
        assert_eq!(utc(after(1_700_000_000_999)), "2023-11-14T22:13:20Z");
        assert_eq!(utc(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn the_driver_release_is_read_from_system_files() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n\
                      GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (x)\n";
        let map = "7f00-7f01 r-xp 00000000 08:01 42   /usr/lib/x86_64-linux-gnu/libcuda.so.570.86\n";
        for (files, expected) in [
            (&[("proc/driver/nvidia/version", closed)][..], Some("550.54.15")),
            (&[("proc/driver/nvidia/version", open), ("proc/self/maps", map)], Some("580.159.03")),
            (&[("sys/module/nvidia/version", "535.183.01\n")], Some("535.183.01")),
            (&[("proc/self/maps", map)], Some("570.86")),
            (&[("proc/self/maps", "7f00-7f01 r-xp 0 08:01 4 /usr/lib/libcuda.so.1\n")], None),
            (&[("proc/driver/nvidia/version", "garbage")], None),
            (&[], None),
        ] {
            assert_eq!(driver_release(system(files).path()).as_deref(), expected, "{files:?}");
        }
    }

    #[test]
    fn a_host_is_identified_but_not_named() {
        let none = |_: &str| None;
        let of = |id: &str, name: &str| {
            host_hash(system(&[("etc/machine-id", id), ("proc/sys/kernel/hostname", name)]).path(), &none)
        };
        let first = of("aa\n", "gpu-node-7\n").unwrap();
        assert!(first.len() == 16 && first.bytes().all(|byte| byte.is_ascii_hexdigit()), "{first}");
        assert_eq!(of("aa", "gpu-node-7").as_ref(), Some(&first));
        assert!(of("ab", "gpu-node-7").unwrap() != first && of("aa", "gpu-node-8").unwrap() != first);
        assert_eq!(host_hash(system(&[]).path(), &none), None);
        // Machines that start from one image differ in their GPU, processor or driver.
        let image = [("etc/machine-id", "aa"), ("proc/sys/kernel/hostname", "gpu-node-7")];
        let with = |uuid: &str, cpu: &str, driver: &str| {
            let gpu = format!("Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\n");
            let (cpu, driver) = (format!("processor\t: 0\nmodel name\t: {cpu}\n"), format!("{driver}\n"));
            let files = [
                ("proc/driver/nvidia/gpus/0000:01:00.0/information", gpu.as_str()),
                ("proc/cpuinfo", &cpu),
                ("sys/module/nvidia/version", &driver),
            ];
            host_hash(system(&[&image[..], &files].concat()).path(), &none).unwrap()
        };
        let host = with("GPU-1", "Xeon", "580.1");
        assert_eq!(host, with("GPU-1", "Xeon", "580.1"));
        let others = [with("GPU-2", "Xeon", "580.1"), with("GPU-1", "EPYC", "580.1"), with("GPU-1", "Xeon", "580.2")];
        assert!(others.iter().all(|other| *other != host && *other != first), "{others:?}");
        let named = |name: &str| (name == "HOSTNAME").then(|| "here".to_owned());
        assert!(host_hash(system(&[]).path(), &named).is_some());
    }

    #[test]
    fn a_job_is_present_only_under_slurm() {
        let with = |pairs: &'static [(&str, &str)]| {
            job(&|name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[("SLURM_ARRAY_TASK_ID", "3")]), None);
        assert_eq!(with(&[("SLURM_JOB_ID", "a\u{1b}[2J")]), None);
        let alone = with(&[("SLURM_JOB_ID", "55")]).unwrap();
        assert_eq!(serde_json::to_value(alone).unwrap(), serde_json::json!({"id": "55"}));
        let array = with(&[("SLURM_JOB_ID", "57"), ("SLURM_ARRAY_JOB_ID", "55"), ("SLURM_ARRAY_TASK_ID", "2")]);
        let expected = serde_json::json!({"id": "57", "array_id": "55", "array_task": "2"});
        assert_eq!(serde_json::to_value(array).unwrap(), expected);
    }

    #[test]
    fn unknown_values_are_absent() {
        let built = Built { commit: "", dirty: "", profile: "dev" };
        let value = serde_json::to_value(Provenance::of(built)).unwrap();
        assert!(value.get("git_commit").is_none() && value.get("git_dirty").is_none(), "{value}");
        assert_eq!(value["build_profile"], "dev");
    }
}
