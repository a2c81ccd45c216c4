//! The program as a user meets it: what it prints where, its exit codes, what it refuses, and what survives a kill.

mod bad_input;
#[cfg(unix)]
mod files;
#[cfg(target_os = "linux")]
mod host_memory;
#[cfg(unix)]
mod outside;
#[cfg(unix)]
mod ranks;
#[cfg(unix)]
mod signals;

use crate::common::{column, read_json};
use assert_cmd::Command;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use tempfile::TempDir;
use vramlab::Profile;

/// A directory to work in, and the program in it with nothing of this machine's set-up.
struct TestDir(TempDir);

impl TestDir {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        std::fs::create_dir_all(self.at(name).parent().unwrap()).unwrap();
        std::fs::write(self.at(name), contents).unwrap();
        self.at(name).to_str().unwrap().to_owned()
    }

    fn settle(&self, command: &mut std::process::Command) {
        // The message stays on one line, however long.
        command.current_dir(self.0.path()).env("VRAMLAB_CACHE", self.at("cache")).env("COLUMNS", "1000");
        for variable in ["MNIST_DIR", "MNIST_MIRROR", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH"] {
            command.env_remove(variable);
        }
        // The tests may run in a job.
        for variable in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"] {
            command.env_remove(variable);
        }
    }

    fn process(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trainer"));
        self.settle(command.args(arguments));
        command
    }

    fn run(&self, arguments: &[&str]) -> ProgramOutput {
        ProgramOutput::of(Command::from_std(self.process(arguments)))
    }

    /// [`run`](Self::run) on the simulated device with iris and few, small layers.
    fn iris(&self, arguments: &[&str]) -> ProgramOutput {
        let base = ["--device", "sim", "--dataset", "iris", "--hidden", "16", "--epochs", "2"];
        // Options given twice are refused, so the defaults are left out.
        let kept = base.chunks(2).filter(|pair| !arguments.contains(&pair[0])).flatten();
        self.run(&kept.chain(arguments).copied().collect::<Vec<_>>())
    }

    /// [`run`](Self::run) with at most this many KiB of address space.
    #[cfg(target_os = "linux")]
    fn run_within(&self, kib: u64, arguments: &[&str]) -> ProgramOutput {
        let mut command = std::process::Command::new("sh");
        let script = format!("ulimit -v {kib} && exec \"$0\" \"$@\"");
        self.settle(command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_trainer")).args(arguments));
        ProgramOutput::of(Command::from_std(command))
    }
}

/// Output of a run.
#[derive(Debug)]
struct ProgramOutput {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl ProgramOutput {
    fn of(mut command: Command) -> Self {
        Self::of_output(command.timeout(std::time::Duration::from_secs(60)).output().unwrap())
    }

    fn of_output(output: std::process::Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let process_output =
            Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
        for words in ["panicked", "internal fault", "RUST_BACKTRACE", "stack backtrace"] {
            assert!(
                !process_output.stderr.contains(words) && !process_output.stdout.contains(words),
                "{process_output:#?}"
            );
        }
        process_output
    }

    fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        assert!(!self.stderr.contains("error"), "{self:#?}");
        self
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// The error line. It is the last line, and `code` is the exit code.
    fn error(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{self:#?}");
        let errors: Vec<&str> = self.stderr.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!(errors.len(), 1, "{self:#?}");
        assert_eq!(self.stderr.lines().next_back(), Some(errors[0]), "{self:#?}");
        errors[0]
    }

    /// Bad input: refused before anything was printed or recorded, in a line that holds all of `words`.
    fn refused(&self, words: &[&str]) {
        let line = self.error(2);
        for word in words {
            assert!(line.contains(word), "'{word}' is missing: {line}");
        }
        assert_eq!(self.stdout, "", "{self:#?}");
    }

    /// An argument that clap refuses, with its usage.
    fn unparsable(&self, words: &[&str]) {
        assert_eq!(self.code, Some(2), "{self:#?}");
        assert_eq!(self.stdout, "", "{self:#?}");
        assert_eq!(self.stderr.lines().filter(|line| line.starts_with("error:")).count(), 1, "{self:#?}");
        let line = self.stderr.lines().next().unwrap();
        for word in words {
            assert!(line.contains(word), "'{word}' is missing: {line}");
        }
    }
}

/// Keys in alphabetical order.
fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect::<BTreeSet<_>>().into_iter().collect()
}

const FILES: [&str; 4] =
    ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"];

/// Four IDX files with 20 and 10 images of 4×3.
fn mnist(test_dir: &TestDir, directory: &str) {
    for (name, count) in FILES.into_iter().zip([20u32, 20, 10, 10]) {
        let images = name.contains("images");
        let header = if images { vec![2051, count, 4, 3] } else { vec![2049, count] };
        let length = if images { 12 * count } else { count };
        let mut bytes: Vec<u8> = header.into_iter().flat_map(u32::to_be_bytes).collect();
        bytes.extend((0..length).map(|at| (at % 10) as u8));
        test_dir.write(&format!("{directory}/{name}"), bytes);
    }
}

// ---- what works ----------------------------------------------------------------------------------------------------

#[test]
fn a_run_reports_to_people() {
    let test_dir = TestDir::new();
    let process_output =
        test_dir.run(&["--device", "sim", "--dataset", "digits", "--epochs", "1", "--out", "record"]).ok();
    let order =
        ["device   ", "data     digits: 8000 rows", "train    3 layers", "epoch  1 train loss", "record   record"];
    let actual: Vec<usize> =
        order.iter().map(|words| process_output.stderr.find(words).unwrap_or(usize::MAX)).collect();
    assert!(actual.is_sorted() && actual[4] < usize::MAX, "{actual:?} {process_output:#?}");
    for words in ["Training with 'caching'", "Driver calls", "Allocator latency", "Memory", "Reserved memory"] {
        assert!(process_output.stdout.contains(words), "{words}: {process_output:#?}");
    }
    assert!(
        !process_output.stderr.contains('\u{1b}') && !process_output.stdout.contains('\u{1b}'),
        "no escapes away from a terminal"
    );
    for file in ["summary.json", "steps.csv", "latency.hlog"] {
        assert!(test_dir.at("record").join(file).is_file(), "{file}");
    }
    let accuracy = read_json(&test_dir.at("record/summary.json"))["epochs"][0]["val_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.9, "one epoch of the defaults should learn the digits: {accuracy}");
}

#[test]
fn json_is_the_record_and_nothing_else() {
    for arguments in [
        &["--alloc", "naive"][..],
        &["--alloc", "caching"],
        &["--alloc", "caching:max_split_size=20M,garbage_collection_threshold=0.5", "--memory-limit", "64M"],
        &["--alloc", "stream-ordered"],
        &["--alloc", "stream-ordered:release_threshold=0", "--sync", "step"],
    ] {
        let test_dir = TestDir::new();
        let more = ["--json", "--out", "record", "--seed", "7", "--check"];
        let process_output = test_dir.iris(&arguments.iter().chain(&more).copied().collect::<Vec<_>>()).ok();
        let json = process_output.json();
        assert_eq!(json, read_json(&test_dir.at("record/summary.json")));

        assert_eq!(json["schema_version"], 1);
        assert_eq!(json["status"], "finished");
        assert_eq!(json["settings"]["allocator"], arguments[1].split(':').next().unwrap());
        assert_eq!(json["settings"]["alloc"], arguments[1]);
        assert_eq!(json["settings"]["seed"], 7);
        assert_eq!(json["device"]["kind"], "sim");
        assert!(json["device"]["name"].as_str().unwrap().contains("simulated"));
        assert_eq!(json["dataset"]["name"], "iris");
        assert_eq!(json["step_losses"], "steps.csv");
        assert_eq!(json["check"]["violations"], serde_json::json!([]));
        assert_eq!(json["check"]["live"], serde_json::json!([]));

        let epochs = json["epochs"].as_array().unwrap();
        assert_eq!(epochs.len(), 2);
        for (number, epoch) in (1..).zip(epochs) {
            assert_eq!(epoch["epoch"], number);
            for key in ["train_loss", "val_loss", "wall_s", "device_s"] {
                assert!(epoch[key].as_f64().unwrap() > 0.0, "{key}");
            }
            assert!((0.0..=1.0).contains(&epoch["val_accuracy"].as_f64().unwrap()));
            assert_eq!(keys(&epoch["driver_calls"]["mem_alloc"]), ["blocked_ns", "count", "total_ns"]);
        }

        let peak = |name: &str| json["allocator_stats"][format!("{name}.all.peak")].as_u64().unwrap();
        assert!(0 < peak("requested_bytes") && peak("requested_bytes") <= peak("allocated_bytes"));
        assert!(peak("allocated_bytes") <= peak("active_bytes") && peak("active_bytes") <= peak("reserved_bytes"));

        let rows = json["latency"].as_array().unwrap();
        assert!(!rows.is_empty());
        for row in rows {
            assert!(
                ["allocate", "deallocate"].contains(&row["operation"].as_str().unwrap()) && row["path"].is_string()
            );
            assert!(row["count"].as_u64().unwrap() > 0);
            let order = ["min_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"];
            // Times that the simulated device does not model are absent, never 0.
            let order: Vec<u64> = order.iter().filter_map(|key| row.get(*key)).map(|ns| ns.as_u64().unwrap()).collect();
            assert!(order.is_sorted() && !order.contains(&0), "{row}");
            assert_eq!(
                order.is_empty(),
                ["hit", "split", "coalesce"].contains(&row["path"].as_str().unwrap()),
                "{row}"
            );
        }

        let ledger = |key: &str| json["fragmentation"][key].as_u64().unwrap();
        let parts: u64 = ["internal", "soft", "hard", "stream", "pending"].into_iter().map(ledger).sum();
        assert_eq!(parts, ledger("reserved") - ledger("requested"));
        assert_eq!(ledger("reserved"), peak("reserved_bytes"));

        let steps = test_dir.at("record/steps.csv");
        assert_eq!(column(&steps, "epoch"), ["1", "1", "2", "2"]);
        assert_eq!(column(&steps, "rows"), ["64", "56", "64", "56"]);
    }
}

#[test]
fn effective_settings_are_read_back() {
    let test_dir = TestDir::new();
    let threshold = "stream-ordered:release_threshold=1G,reuse_allow_opportunistic=off";
    let json = test_dir.iris(&["--alloc", threshold, "--json"]).ok().json();
    let actual = &json["settings"]["allocator_settings"];
    assert_eq!(actual["release_threshold"], 1u64 << 30);
    assert_eq!(actual["reuse_allow_opportunistic"], false);
    assert_eq!(actual["reuse_follow_event_dependencies"], true);
    let json =
        test_dir.iris(&["--alloc", "caching", "--memory-limit", "1.5G", "--latency", "off", "--json"]).ok().json();
    assert_eq!(json["settings"]["memory_limit"], 3u64 << 29);
    assert_eq!(json["settings"]["allocator_settings"]["memory_limit"], 3u64 << 29);
    let own = test_dir.iris(&["--alloc", "caching:memory_limit=1.5G", "--json"]).ok().json();
    for key in ["memory_limit", "allocator_settings"] {
        assert_eq!(own["settings"][key], json["settings"][key], "{key}");
    }
    assert_eq!(json["settings"]["latency"], false);
    assert_eq!(json["latency"], serde_json::json!([]));
    assert!(json["files"].get("latency").is_none());
}

#[test]
fn memory_limit_of_the_allocator_counts_reserved_bytes() {
    let test_dir = TestDir::new();
    // More than the run's live blocks need, less than a segment of most allocators.
    let limit = 64u64 << 10;
    let mut refused = 0;
    for backend in vramlab::backends::all() {
        let process_output =
            test_dir.iris(&["--alloc", backend.name, "--memory-limit", "64K", "--latency", "off", "--json"]);
        let keeps_reserved = vramlab::Selection::of(backend).set_memory_limit(None);
        if keeps_reserved && process_output.code == Some(1) {
            assert!(process_output.error(1).contains("out of memory"), "{backend}");
            refused += 1;
            continue;
        }
        let json = process_output.ok().json();
        let peak = |bytes: &str| json["allocator_stats"][format!("{bytes}.all.peak")].as_u64().unwrap();
        assert!(peak("allocated_bytes") <= limit, "{backend}");
        assert!(!keeps_reserved || peak("reserved_bytes") <= limit, "{backend}");
        // Its first segment alone is of 256 MiB.
        assert!(backend.name != "rmm-pool" || peak("reserved_bytes") > limit);
    }
    assert!(refused > 0);
}

#[test]
fn arithmetic_in_effect_is_recorded_and_reported() {
    let test_dir = TestDir::new();
    let usual = serde_json::json!(["f32", "master", 1.0, "tiled", "none"]);
    let keys = ["dtype", "weights", "loss_scale", "gemm", "fuse"];
    for (arguments, expected) in [
        ("", usual),
        ("--gemm tiled", serde_json::json!(["f32", "master", 1.0, "tiled", "none"])),
        ("--dtype tf32", serde_json::json!(["tf32", "master", 1.0, "tensor", "none"])),
        ("--dtype bf16 --weights half", serde_json::json!(["bf16", "half", 1.0, "tensor", "none"])),
        ("--dtype f16 --fuse update", serde_json::json!(["f16", "master", 1024.0, "tensor", "update"])),
        (
            "--dtype f16 --loss-scale 8 --gemm tensor --fuse epilogue",
            serde_json::json!(["f16", "master", 8.0, "tensor", "epilogue"]),
        ),
    ] {
        let arguments: Vec<&str> = arguments.split_whitespace().collect();
        let json = test_dir.iris(&[&arguments[..], &["--json"]].concat()).ok().json();
        assert_eq!(serde_json::json!(keys.map(|key| &json["settings"][key])), expected);
        let process_output = test_dir.iris(&arguments).ok();
        let dtype = expected[0].as_str().unwrap();
        assert!(
            process_output.stderr.contains(&format!("batch 64, {dtype}, allocator caching")),
            "{process_output:#?}"
        );
        assert!(
            process_output.stdout.contains(&format!("Training with 'caching' in {dtype} on")),
            "{process_output:#?}"
        );
    }
}

#[test]
fn steps_bound_the_run() {
    let test_dir = TestDir::new();
    let json = test_dir.iris(&["--steps", "3", "--json", "--epochs", "9"]).ok().json();
    let steps: Vec<u64> = json["epochs"].as_array().unwrap().iter().map(|e| e["steps"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 1]);
}

#[test]
fn runs_without_out_never_share_a_directory() {
    let test_dir = TestDir::new();
    for _ in 0..3 {
        test_dir.iris(&[]).ok();
    }
    let actual: Vec<_> = std::fs::read_dir(test_dir.at("runs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(actual.len(), 3, "{actual:?}");
    assert!(actual.iter().all(|path| path.join("summary.json").is_file()));
}

#[test]
fn driver_calls_are_logged_where_they_happen() {
    let test_dir = TestDir::new();
    let log = |arguments: &[&str]| -> Vec<String> {
        let process_output = test_dir.iris(arguments).ok();
        process_output.stderr.lines().filter_map(|line| line.strip_prefix("driver   ")).map(str::to_owned).collect()
    };
    // With wide layers a step needs memory that the set-up has not brought.
    let caching = log(&["--alloc", "caching", "--log-driver-calls", "--hidden", "900", "--layers", "8"]);
    assert!(caching.iter().any(|line| line.starts_with("set-up ") && line.contains("mem_alloc")), "{caching:#?}");
    assert!(caching.iter().any(|line| line.starts_with("epoch 1 step 1 ")), "{caching:#?}");
    assert!(!caching.iter().any(|line| line.starts_with("epoch 2")), "{caching:#?}");
    // The cache goes when all is over, which is in no epoch.
    let frees: Vec<&String> = caching.iter().filter(|line| line.contains("mem_free")).collect();
    assert!(!frees.is_empty() && frees.iter().all(|line| line.starts_with("after epoch 2 ")), "{caching:#?}");

    let naive = log(&["--alloc", "naive", "--log-driver-calls"]);
    // The first step call by call, later ones by their counts.
    let parts = ["set-up ", "epoch 1 step 1 ", "epoch 1 step 2 ", "epoch 1 validation ", "epoch 2 steps 1-2 "];
    for part in parts {
        assert!(naive.iter().any(|line| line.starts_with(part)), "{part}: {naive:#?}");
    }
    let of = |part: &str, kind: &str| -> Vec<&String> {
        naive.iter().filter(|line| line.starts_with(part) && line.contains(kind)).collect()
    };
    let made = of("epoch 1 step 1 ", "mem_alloc ").len();
    let counts = [of("epoch 1 step 2 ", "mem_alloc "), of("epoch 2 steps 1-2 ", "mem_alloc ")].concat();
    assert!(counts.len() == 2, "{naive:#?}");
    let counts: Vec<usize> = counts
        .iter()
        .map(|line| line.split_once(" in ").unwrap().1.split_once(" calls").unwrap().0.parse().unwrap())
        .collect();
    assert!(made > 8 && counts[1] == 2 * counts[0], "{made} calls, then {counts:?}");
    for free in of("", "mem_free ") {
        assert!(free.contains(" B ") || free.contains("iB "), "a free without its size: {free}");
    }
    assert!(naive.iter().any(|line| line.contains("blocked")), "a free of plain memory waits");
    assert!(log(&["--alloc", "naive"]).is_empty());
}

#[test]
fn help_names_every_option_and_the_exit_codes() {
    let test_dir = TestDir::new();
    let help = test_dir.run(&["--help"]).ok().stdout;
    let options = "alloc memory-limit device dataset data-dir offline loader hidden layers batch epochs \
                   steps lr seed init dtype weights loss-scale gemm fuse launch graph-steps streams sync out json nvtx nvtx-memory latency trace check log-driver-calls";
    for option in options.split_whitespace() {
        assert!(help.contains(&format!("--{option}")), "{option}");
    }
    assert!(help.contains("Exit codes") && help.contains("130") && help.contains("doctor"), "{help}");
    assert!(test_dir.run(&["-h"]).ok().stdout.len() < help.len());
    assert!(test_dir.run(&["--version"]).ok().stdout.starts_with("trainer "));
    assert!(test_dir.run(&["doctor", "--help"]).ok().stdout.contains("--data-dir"));
}

#[test]
fn allocators_are_listed_with_their_settings() {
    let test_dir = TestDir::new();
    let (text, help) = (test_dir.run(&["allocators"]).ok().stdout, test_dir.run(&["--help"]).ok().stdout);
    let rows = test_dir.run(&["allocators", "--json"]).ok().json();
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), vramlab::backends::all().len());
    for (row, backend) in rows.iter().zip(vramlab::backends::all()) {
        assert_eq!((&row["name"], &row["summary"]), (&backend.name.into(), &backend.summary.into()));
        assert_eq!(row["capabilities"]["snapshot"], backend.capabilities.snapshot);
        assert!(text.contains(backend.name) && help.contains(backend.name), "{}", backend.name);
        let details = test_dir.run(&["allocators", backend.name]).ok().stdout;
        let settings = row["settings"].as_array().unwrap();
        assert_eq!(settings.len(), backend.settings().len());
        for (setting, message) in backend.settings().iter().zip(settings) {
            assert_eq!((&message["name"], &message["default"]), (&setting.name.into(), &setting.value.as_str().into()));
            assert!(!message["takes"].as_str().unwrap().is_empty() && !message["help"].as_str().unwrap().is_empty());
            assert!(details.contains(setting.name), "{}", setting.name);
        }
    }
    let bare = |arguments: &[&str]| {
        let output = test_dir.process(arguments).env_remove("COLUMNS").output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let short = bare(&["allocators"]);
    assert!(short.lines().count() < 60 && short.lines().all(|line| line.chars().count() <= 120), "{short}");
    let long = bare(&["allocators", "lab", "caching"]);
    assert!(long.lines().all(|line| line.chars().count() <= 120), "{long}");
    for columns in [80, 110] {
        let output = test_dir.process(&["--help"]).env("COLUMNS", columns.to_string()).output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        let widest = help.lines().map(|line| line.chars().count()).max().unwrap();
        assert!((columns - 8..=columns).contains(&widest), "{columns}: {widest}\n{help}");
    }
    let one = test_dir.run(&["allocators", "naive"]).ok().stdout;
    assert!(one.contains("naive") && !one.contains("release_threshold"), "{one}");
    test_dir.run(&["allocators", "naiv"]).refused(&["no allocator is called 'naiv'; did you mean 'naive'?"]);
}

#[test]
fn doctor_says_what_is_there() {
    let test_dir = TestDir::new();
    let text = test_dir.run(&["doctor"]).ok().stdout;
    for what in ["CUDA driver", "simulated GPU", "MNIST", "Nsight Systems", "NVTX tool"] {
        assert!(text.contains(what), "{what}: {text}");
    }
    let json = test_dir.run(&["doctor", "--json"]).ok().json();
    for finding in json["findings"].as_array().unwrap() {
        assert!(["ok", "missing", "broken"].contains(&finding["state"].as_str().unwrap()), "{finding}");
        assert!(!finding["what"].as_str().unwrap().is_empty() && !finding["found"].as_str().unwrap().is_empty());
    }
    assert!(!test_dir.at("runs").exists() && !test_dir.at("cache").exists(), "looking leaves nothing behind");

    // MNIST in the directory that is named, and not in another.
    let state = |dir: &str| {
        let json = test_dir.run(&["doctor", "--json", "--data-dir", dir]).ok().json();
        let findings = json["findings"].as_array().unwrap().clone();
        findings.into_iter().find(|finding| finding["what"] == "MNIST").unwrap()["state"].clone()
    };
    mnist(&test_dir, "data");
    assert_eq!((state("data"), state("elsewhere")), ("ok".into(), "missing".into()));
}

// ---- failures while running ----------------------------------------------------------------------------------------

#[test]
fn a_run_that_fails_gives_its_events_back() {
    // Events that are still held when the record is written: those of the loaders and the streams.
    let held = |arguments: &[&str], code: i32| {
        let test_dir = TestDir::new();
        let process_output = test_dir.iris(&[&["--out", "record", "--alloc", "naive"], arguments].concat());
        assert_eq!(process_output.code, Some(code), "{arguments:?}");
        let calls = &read_json(&test_dir.at("record/summary.json"))["driver_calls"];
        let [made, gone] =
            ["event_create", "event_destroy"].map(|call| calls[call]["count"].as_u64().unwrap_or_default());
        assert!(made > gone, "{arguments:?}: the loaders' events are held");
        made - gone
    };
    let after_success = held(&[], 0);
    // In the first epoch's losses, and in the validation after it.
    for failing in [&["--lr", "1e30"][..], &["--lr", "1e30", "--steps", "1"]] {
        assert_eq!(held(failing, 1), after_success, "{failing:?}");
    }
}

#[test]
fn failures_at_run_time_leave_a_record() {
    for (arguments, words) in [
        (&["--lr", "1e30"][..], "the loss became NaN in epoch 1, step 2: lower --lr"),
        (&["--lr", "1e30", "--steps", "1"], "the validation loss became"),
        (&["--dtype", "f16", "--loss-scale", "1e9"], "lower --loss-scale (now 1000000000) or change --init"),
        (&["--memory-limit", "64K"], "out of memory"),
        (&["--memory-limit", "9K", "--alloc", "naive"], "out of memory"),
        (&["--memory-limit", "9K", "--alloc", "stream-ordered", "--check"], "out of memory"),
    ] {
        let test_dir = TestDir::new();
        let process_output = test_dir.iris(&[&["--out", "record", "--json"], arguments].concat());
        let line = process_output.error(1);
        assert!(line.contains(words), "{line}");
        let json = read_json(&test_dir.at("record/summary.json"));
        assert_eq!(json["status"], "failed");
        assert_eq!(json["error"].as_str(), line.strip_prefix("error: "));
        assert_eq!(process_output.json(), json, "the record is printed all the same");
    }
}
