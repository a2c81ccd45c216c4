//! The program as a user meets it: what it prints where, its exit codes, what it refuses, and what survives a kill.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use allocators::{CudaDriver, Profile};
use assert_cmd::Command;
use common::{column, read_json};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use tempfile::TempDir;

/// A directory to work in, and the program in it with nothing of this machine's set-up.
struct Place(TempDir);

impl Place {
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
        command.current_dir(self.0.path()).env("GPU_ALLOCATORS_CACHE", self.at("cache"));
        for variable in ["MNIST_DIR", "MNIST_MIRROR", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH"] {
            command.env_remove(variable);
        }
    }

    fn process(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trainer"));
        self.settle(command.args(arguments));
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(Command::from_std(self.process(arguments)))
    }

    /// [`run`](Self::run) on the simulated device with iris and few, small layers.
    fn iris(&self, arguments: &[&str]) -> Ran {
        let base = ["--device", "sim", "--dataset", "iris", "--hidden", "16", "--epochs", "2"];
        // What is given twice is refused, so the defaults make way.
        let kept = base.chunks(2).filter(|pair| !arguments.contains(&pair[0])).flatten();
        self.run(&kept.chain(arguments).copied().collect::<Vec<_>>())
    }

    /// [`run`](Self::run) with at most this many KiB of address space.
    #[cfg(target_os = "linux")]
    fn run_within(&self, kib: u64, arguments: &[&str]) -> Ran {
        let mut command = std::process::Command::new("sh");
        let script = format!("ulimit -v {kib} && exec \"$0\" \"$@\"");
        self.settle(command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_trainer")).args(arguments));
        Ran::of(Command::from_std(command))
    }
}

/// What a run left.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn of(mut command: Command) -> Self {
        let output = command.timeout(std::time::Duration::from_secs(60)).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let ran = Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
        for words in ["panicked", "internal fault", "RUST_BACKTRACE", "stack backtrace"] {
            assert!(!ran.stderr.contains(words) && !ran.stdout.contains(words), "{ran:#?}");
        }
        ran
    }

    fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        assert!(!self.stderr.contains("error"), "{self:#?}");
        self
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// The one line that says what went wrong. It comes last and `code` is the exit code.
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

// ---- what works ----------------------------------------------------------------------------------------------------

#[test]
fn a_run_reports_to_people() {
    let place = Place::new();
    let ran = place.run(&["--device", "sim", "--dataset", "digits", "--epochs", "1", "--out", "record"]).ok();
    let order =
        ["device   ", "data     digits: 8000 rows", "train    3 layers", "epoch  1 train loss", "record   record"];
    let found: Vec<usize> = order.iter().map(|words| ran.stderr.find(words).unwrap_or(usize::MAX)).collect();
    assert!(found.is_sorted() && found[4] < usize::MAX, "{found:?} {ran:#?}");
    for words in
        ["Training with 'caching'", "Driver calls", "Allocator latency", "Memory", "Where reserved memory went"]
    {
        assert!(ran.stdout.contains(words), "{words}: {ran:#?}");
    }
    assert!(!ran.stderr.contains('\u{1b}') && !ran.stdout.contains('\u{1b}'), "no escapes away from a terminal");
    for file in ["summary.json", "steps.csv", "latency.hlog"] {
        assert!(place.at("record").join(file).is_file(), "{file}");
    }
    let accuracy = read_json(&place.at("record/summary.json"))["epochs"][0]["val_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.9, "one epoch of the defaults should learn the digits: {accuracy}");
}

#[test]
fn json_is_the_record_and_nothing_else() {
    for arguments in [
        &["--alloc", "naive"][..],
        &["--alloc", "caching"],
        &["--alloc", "caching", "--memory-limit", "64M", "--gc-threshold", "0.5", "--max-split-size", "20M"],
        &["--alloc", "stream-ordered"],
        &["--alloc", "stream-ordered", "--release-threshold", "0", "--sync", "step"],
    ] {
        let place = Place::new();
        let more = ["--json", "--out", "record", "--seed", "7", "--check"];
        let ran = place.iris(&arguments.iter().chain(&more).copied().collect::<Vec<_>>()).ok();
        let json = ran.json();
        assert_eq!(json, read_json(&place.at("record/summary.json")));

        assert_eq!(json["schema_version"], 1);
        assert_eq!(json["status"], "finished");
        assert_eq!(json["settings"]["allocator"], arguments[1]);
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
            let order =
                ["min_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"].map(|key| row[key].as_u64().unwrap());
            assert!(order.is_sorted(), "{row}");
        }

        let ledger = |key: &str| json["fragmentation"][key].as_u64().unwrap();
        let parts: u64 = ["internal", "soft", "hard", "stream", "pending"].into_iter().map(ledger).sum();
        assert_eq!(parts, ledger("reserved") - ledger("requested"));
        assert_eq!(ledger("reserved"), peak("reserved_bytes"));

        let steps = place.at("record/steps.csv");
        assert_eq!(column(&steps, "epoch"), ["1", "1", "2", "2"]);
        assert_eq!(column(&steps, "rows"), ["64", "56", "64", "56"]);
    }
}

#[test]
fn effective_settings_are_read_back() {
    let place = Place::new();
    let threshold = ["--alloc", "stream-ordered", "--release-threshold", "1G", "--reuse-allow-opportunistic", "off"];
    let json = place.iris(&[&threshold[..], &["--json"]].concat()).ok().json();
    let found = &json["settings"]["allocator_settings"];
    assert_eq!(found["release_threshold"], 1u64 << 30);
    assert_eq!(found["reuse_allow_opportunistic"], false);
    assert_eq!(found["reuse_follow_event_dependencies"], true);
    let json = place.iris(&["--alloc", "caching", "--memory-limit", "1.5G", "--latency", "off", "--json"]).ok().json();
    assert_eq!(json["settings"]["memory_limit"], 3u64 << 29);
    assert_eq!(json["settings"]["allocator_settings"]["memory_limit"], 3u64 << 29);
    assert_eq!(json["settings"]["latency"], false);
    assert_eq!(json["latency"], serde_json::json!([]));
    assert!(json["files"].get("latency").is_none());
}

#[test]
fn steps_bound_the_run() {
    let place = Place::new();
    let json = place.iris(&["--steps", "3", "--json", "--epochs", "9"]).ok().json();
    let steps: Vec<u64> = json["epochs"].as_array().unwrap().iter().map(|e| e["steps"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2, 1]);
}

#[test]
fn runs_without_out_never_share_a_directory() {
    let place = Place::new();
    for _ in 0..3 {
        place.iris(&[]).ok();
    }
    let found: Vec<_> = std::fs::read_dir(place.at("runs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found.iter().all(|path| path.join("summary.json").is_file()));
}

#[test]
fn driver_calls_are_logged_where_they_happen() {
    let place = Place::new();
    let log = |arguments: &[&str]| -> Vec<String> {
        let ran = place.iris(arguments).ok();
        ran.stderr.lines().filter_map(|line| line.strip_prefix("driver   ")).map(str::to_owned).collect()
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
    for place in ["set-up ", "epoch 1 step 1 ", "epoch 1 validation ", "epoch 2 step 2 ", "epoch 2 validation "] {
        assert!(naive.iter().any(|line| line.starts_with(place)), "{place}: {naive:#?}");
    }
    let in_step =
        |step: &str| naive.iter().filter(|line| line.starts_with(step) && line.contains("mem_alloc ")).count();
    assert_eq!(in_step("epoch 2 step 1 "), in_step("epoch 2 step 2 "));
    assert!(naive.iter().any(|line| line.contains("blocked")), "a free of plain memory waits");
    assert!(log(&["--alloc", "naive"]).is_empty());
}

#[test]
fn help_names_every_option_and_the_exit_codes() {
    let place = Place::new();
    let help = place.run(&["--help"]).ok().stdout;
    let options = "alloc memory-limit release-threshold device dataset data-dir offline loader hidden layers batch epochs \
                   steps lr seed init gemm sync out json nvtx latency trace check log-driver-calls";
    for option in options.split_whitespace() {
        assert!(help.contains(&format!("--{option}")), "{option}");
    }
    assert!(help.contains("Exit codes") && help.contains("130") && help.contains("doctor"), "{help}");
    assert!(place.run(&["-h"]).ok().stdout.len() < help.len());
    assert!(place.run(&["--version"]).ok().stdout.starts_with("trainer "));
    assert!(place.run(&["doctor", "--help"]).ok().stdout.contains("--data-dir"));
}

#[test]
fn doctor_says_what_is_there() {
    let place = Place::new();
    let text = place.run(&["doctor"]).ok().stdout;
    for what in ["CUDA driver", "simulated GPU", "MNIST", "Nsight Systems", "NVTX tool"] {
        assert!(text.contains(what), "{what}: {text}");
    }
    let json = place.run(&["doctor", "--json"]).ok().json();
    for finding in json["findings"].as_array().unwrap() {
        assert!(["ok", "missing", "broken"].contains(&finding["state"].as_str().unwrap()), "{finding}");
        assert!(!finding["what"].as_str().unwrap().is_empty() && !finding["found"].as_str().unwrap().is_empty());
    }
    assert!(!place.at("runs").exists() && !place.at("cache").exists(), "looking leaves nothing behind");

    // MNIST in the directory that is named, and not in another.
    let state = |dir: &str| {
        let json = place.run(&["doctor", "--json", "--data-dir", dir]).ok().json();
        let findings = json["findings"].as_array().unwrap().clone();
        findings.into_iter().find(|finding| finding["what"] == "MNIST").unwrap()["state"].clone()
    };
    mnist(&place, "data");
    assert_eq!((state("data"), state("elsewhere")), ("ok".into(), "missing".into()));
}

// ---- bad input -----------------------------------------------------------------------------------------------------

#[test]
fn numbers_that_cannot_work_are_refused() {
    let place = Place::new();
    for (arguments, words) in [
        (["--hidden", "0"], "--hidden must be at least 1"),
        (["--layers", "0"], "--layers must be at least 1"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--lr", "nan"], "--lr must be a positive number"),
        (["--lr", "inf"], "--lr must be a positive number"),
        (["--lr", "0"], "--lr must be a positive number"),
        (["--lr", "-1"], "--lr must be a positive number, found -1"),
        (["--memory-limit", "1K"], "--memory-limit 1 KiB is less than the model's weights"),
        (["--memory-limit", "0"], "--memory-limit 0 B is less than the model's weights"),
        (["--gc-threshold", "0.5"], "--gc-threshold is a fraction of --memory-limit"),
        (["--gc-threshold", "-0.5"], "--gc-threshold must lie between 0 and 1"),
        (["--gc-threshold", "nan"], "--gc-threshold must lie between 0 and 1"),
        (["--gc-threshold", "1.5"], "--gc-threshold must lie between 0 and 1"),
        (["--max-split-size", "1M"], "--max-split-size must be at least 20M"),
    ] {
        place.iris(&arguments).refused(&[words]);
    }
    assert!(!place.at("runs").exists(), "nothing ran, so there is nothing to record");
}

#[test]
fn words_that_mean_nothing_are_refused() {
    let place = Place::new();
    for arguments in [
        ["--device", "nonsense"],
        ["--device", "cuda:x"],
        ["--device", "sim:"],
        ["--alloc", "nonsense"],
        ["--dataset", "nonsense"],
        ["--release-threshold", "nonsense"],
        ["--release-threshold", "99999999999T"],
        ["--memory-limit", "1e400"],
        ["--memory-limit", "lots"],
        ["--reuse-allow-opportunistic", "maybe"],
        ["--sync", "nonsense"],
        ["--loader", "nonsense"],
        ["--init", "nonsense"],
        ["--gemm", "nonsense"],
        ["--nvtx", "nonsense"],
        ["--latency", "nonsense"],
        ["--hidden", "4294967296"],
        ["--seed", "1.5"],
        ["--lr", "fast"],
        ["--nonsense", "1"],
    ] {
        place.iris(&arguments).unparsable(&[arguments[0]]);
    }
    place.run(&["nonsense"]).unparsable(&["nonsense"]);
}

#[test]
#[cfg(target_os = "linux")]
fn sizes_beyond_reason_take_no_memory() {
    let place = Place::new();
    let base = ["--device", "sim", "--dataset", "iris"];
    for (arguments, words) in [
        (&["--hidden", "4000000000"][..], "lower --hidden or --batch"),
        (&["--hidden", "4294967295", "--layers", "2"], "lower --hidden or --batch"),
        (&["--batch", "4000000000"], "lower --hidden or --batch"),
        (&["--layers", "4000000000"], "--layers must be at most"),
        (&["--hidden", "46000", "--layers", "65536"], "more than the memory of"),
    ] {
        place.run_within(2 << 20, &[&base[..], arguments].concat()).refused(&[words]);
    }
    // A batch of more rows than there are is the whole set.
    let json = place.run(&[&base[..], &["--batch", "8000000", "--hidden", "16", "--epochs", "1", "--json"]].concat());
    assert_eq!(json.ok().json()["epochs"][0]["steps"], 1);
}

#[test]
fn places_that_cannot_be_written_are_refused() {
    let place = Place::new();
    let file = place.write("file", "");
    place.iris(&["--out", &format!("{file}/record")]).refused(&["cannot write a run record", "--out"]);
    place.iris(&["--out", &file]).refused(&["exists already", "--out"]);
    std::fs::create_dir(place.at("record")).unwrap();
    place.iris(&["--out", "record"]).refused(&["record exists already", "--out"]);
    assert_eq!(std::fs::read_dir(place.at("record")).unwrap().count(), 0, "what was there stays as it was");
    // The default place.
    place.write("runs", "");
    place.iris(&[]).refused(&["cannot write a run record to runs"]);
}

#[test]
fn profiles_that_cannot_work_are_refused() {
    let place = Place::new();
    let good = serde_json::to_value(Profile::h200()).unwrap();
    let with = |pointer: &str, key: &str, value: Value| {
        let mut changed = good.clone();
        changed.pointer_mut(pointer).unwrap()[key] = value;
        changed.to_string()
    };
    let refused = |name: &str, text: &str, words: &[&str]| {
        let path = place.write(name, text);
        place.iris(&["--device", &format!("sim:{path}")]).refused(&[&[name], words].concat());
    };
    refused("broken.json", "{ \"name\": ", &["not a device profile", "line 1"]);
    refused("empty.json", "", &["not a device profile"]);
    refused("unknown.json", &with("", "colour", "green".into()), &["unknown field", "colour"]);
    refused("nested.json", &with("/queues", "colour", "green".into()), &["unknown field", "colour"]);
    refused("depth.json", &with("/queues", "depth", 0.into()), &["queues.depth"]);
    refused("type.json", &with("/queues", "depth", "deep".into()), &["not a device profile"]);
    refused("wave.json", &with("/default_kernel", "blocks_per_wave", 0.into()), &["default_kernel"]);
    place.iris(&["--device", "sim:missing.json"]).refused(&["missing.json", "cannot read"]);
    place.iris(&["--device", "sim:."]).refused(&["cannot read"]);
    std::fs::write(place.at("bytes.json"), [0xff, 0xfe, 0]).unwrap();
    place.iris(&["--device", "sim:bytes.json"]).refused(&["bytes.json", "cannot read"]);

    let whole = place.write("whole.json", good.to_string());
    let json = place.iris(&["--device", &format!("sim:{whole}"), "--json"]).ok().json();
    assert_eq!(json["settings"]["device"], format!("sim:{whole}"));

    // A device without pools cannot run the allocator that needs them; the others can.
    let mut without = good.clone();
    without.as_object_mut().unwrap().remove("pool");
    let without = format!("sim:{}", place.write("without.json", without.to_string()));
    place.iris(&["--device", &without, "--alloc", "stream-ordered"]).refused(&["stream-ordered", "does not have"]);
    place.iris(&["--device", &without, "--alloc", "naive"]).ok();
}

#[test]
fn a_gpu_that_is_not_there_is_bad_input() {
    if CudaDriver::probe().is_ok() {
        eprintln!("skipped: this machine has a CUDA device");
        return;
    }
    let place = Place::new();
    place.run(&["--device", "cuda", "--dataset", "iris"]).refused(&[]);
    place.run(&["--device", "cuda:99", "--dataset", "iris"]).refused(&[]);
    // `auto` says why it takes the simulated one.
    let ran = place.run(&["--dataset", "iris", "--epochs", "1"]).ok();
    let device = ran.stderr.lines().next().unwrap();
    assert!(device.contains("(simulated)") && device.ends_with(')') && device.matches('(').count() > 1, "{device}");
}

const FILES: [&str; 4] =
    ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"];

/// Four IDX files with 20 and 10 images of 4×3.
fn mnist(place: &Place, directory: &str) {
    for (name, count) in FILES.into_iter().zip([20u32, 20, 10, 10]) {
        let images = name.contains("images");
        let header = if images { vec![2051, count, 4, 3] } else { vec![2049, count] };
        let length = if images { 12 * count } else { count };
        let mut bytes: Vec<u8> = header.into_iter().flat_map(u32::to_be_bytes).collect();
        bytes.extend((0..length).map(|at| (at % 10) as u8));
        place.write(&format!("{directory}/{name}"), bytes);
    }
}

#[test]
fn small_idx_files_are_trained_on() {
    let place = Place::new();
    mnist(&place, "data");
    let arguments = ["--device", "sim", "--dataset", "mnist", "--data-dir", "data", "--epochs", "1", "--json"];
    let ran = place.run(&arguments).ok();
    assert!(ran.stderr.contains("note     data does not hold the standard MNIST"), "{ran:#?}");
    let json = ran.json();
    assert_eq!((&json["dataset"]["train_rows"], &json["dataset"]["features"]), (&20.into(), &12.into()));
    assert_eq!(json["dataset"]["files"].as_array().unwrap().len(), 4);
    // The variable names the same place.
    let mut command = place.process(&arguments[..4]);
    let ran = Ran::of(Command::from_std({
        command.env("MNIST_DIR", place.at("data")).args(["--epochs", "1"]);
        command
    }));
    assert!(ran.ok().stderr.contains("(MNIST_DIR)"));
}

#[test]
fn broken_data_is_refused() {
    let place = Place::new();
    let refused = |directory: &str, words: &[&str]| {
        for dataset in ["mnist", "auto"] {
            let arguments = ["--device", "sim", "--dataset", dataset, "--data-dir", directory];
            place.run(&arguments).refused(&[&[directory], words].concat());
        }
    };
    refused("nowhere", &["--data-dir", "not a directory"]);
    std::fs::create_dir(place.at("empty")).unwrap();
    refused("empty", &["has no train-images-idx3-ubyte"]);

    let damaged = |directory: &str, file: usize, change: &dyn Fn(&mut Vec<u8>)| {
        mnist(&place, directory);
        let path = place.at(directory).join(FILES[file]);
        let mut bytes = std::fs::read(&path).unwrap();
        change(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
    };
    damaged("cut", 0, &|bytes| bytes.truncate(100));
    refused("cut", &[FILES[0], "ends after 100 of 256 bytes"]);
    damaged("none", 3, &|bytes| bytes.clear());
    refused("none", &[FILES[3], "ends after 0"]);
    damaged("magic", 2, &|bytes| bytes[3] = 7);
    refused("magic", &[FILES[2], "magic number"]);
    damaged("swapped", 0, &|bytes| bytes[3] = 1);
    refused("swapped", &[FILES[0], "labels file"]);
    damaged("long", 1, &|bytes| bytes.push(0));
    refused("long", &[FILES[1], "more bytes"]);
    damaged("fewer", 1, &|bytes| {
        bytes[7] = 19;
        bytes.pop();
    });
    refused("fewer", &["20 images", "19 labels"]);
    damaged("label", 1, &|bytes| bytes[8] = 10);
    refused("label", &[FILES[1], "label is 10"]);
    damaged("vast", 0, &|bytes| bytes[4..16].fill(0xff));
    refused("vast", &[FILES[0], "an item has"]);
    damaged("many", 0, &|bytes| bytes[4..8].fill(0xff));
    refused("many", &[FILES[0], "header announces"]);

    // 64 MiB of zeros behind an honest header, in a few dozen KiB.
    damaged("bomb", 0, &|bytes| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(bytes).unwrap();
        for _ in 0..64 {
            encoder.write_all(&vec![0; 1 << 20]).unwrap();
        }
        *bytes = encoder.finish().unwrap();
        assert!(bytes.len() < 100_000);
    });
    refused("bomb", &[FILES[0], "more bytes than the 256"]);
    damaged("torn", 0, &|bytes| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        *bytes = encoder.finish().unwrap();
        bytes.truncate(bytes.len() - 20);
    });
    refused("torn", &[FILES[0]]);
    assert!(!place.at("runs").exists());
}

#[test]
fn offline_never_waits_for_a_network() {
    let place = Place::new();
    place.run(&["--device", "sim", "--dataset", "mnist", "--offline"]).refused(&["offline", "--data-dir"]);
    let ran = place.run(&["--device", "sim", "--offline", "--steps", "1"]).ok();
    assert!(ran.stderr.contains("note     generated digits stand in for MNIST"), "{ran:#?}");
}

// ---- failures while running ----------------------------------------------------------------------------------------

#[test]
fn failures_at_run_time_leave_a_record() {
    for (arguments, words) in [
        (&["--lr", "1e30"][..], "the loss became NaN in epoch 1, step 2: lower --lr"),
        (&["--lr", "1e30", "--steps", "1"], "the validation loss became"),
        (&["--memory-limit", "64K"], "out of memory"),
        (&["--memory-limit", "9K", "--alloc", "naive"], "out of memory"),
        (&["--memory-limit", "9K", "--alloc", "stream-ordered", "--check"], "out of memory"),
    ] {
        let place = Place::new();
        let ran = place.iris(&[&["--out", "record", "--json"], arguments].concat());
        let line = ran.error(1);
        assert!(line.contains(words), "{line}");
        let json = read_json(&place.at("record/summary.json"));
        assert_eq!(json["status"], "failed");
        assert_eq!(json["error"].as_str(), line.strip_prefix("error: "));
        assert_eq!(ran.json(), json, "the record is printed all the same");
    }
}

// ---- what ends a run from outside ----------------------------------------------------------------------------------

#[cfg(unix)]
mod outside {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, ExitStatus, Stdio};
    use std::sync::mpsc::{Receiver, channel};
    use std::time::{Duration, Instant};

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A run in the background whose stderr is read as it comes.
    struct Background {
        child: Child,
        lines: Receiver<String>,
    }

    impl Background {
        fn start(place: &Place, arguments: &[&str]) -> Self {
            let mut command = place.process(arguments);
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let (sender, lines) = channel();
            let stderr = BufReader::new(child.stderr.take().unwrap());
            std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
            Self { child, lines }
        }

        fn wait_for(&self, start: &str) {
            let until = Instant::now() + PATIENCE;
            loop {
                let left = until.saturating_duration_since(Instant::now());
                let line = self.lines.recv_timeout(left).unwrap_or_else(|error| panic!("no line '{start}': {error}"));
                if line.starts_with(start) {
                    return;
                }
            }
        }

        fn signal(&self, name: &str) {
            let sent = std::process::Command::new("kill").args([name, &self.child.id().to_string()]).status();
            assert!(sent.unwrap().success());
        }

        /// Exit status, stdout, and the rest of stderr.
        fn end(mut self) -> (ExitStatus, String, Vec<String>) {
            let mut stdout = self.child.stdout.take().unwrap();
            let reader = std::thread::spawn(move || {
                let mut text = String::new();
                std::io::Read::read_to_string(&mut stdout, &mut text).map(|_| text)
            });
            let until = Instant::now() + PATIENCE;
            let status = loop {
                if let Some(status) = self.child.try_wait().unwrap() {
                    break status;
                }
                if Instant::now() > until {
                    let _ = self.child.kill();
                    panic!("the run should have ended");
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            (status, reader.join().unwrap().unwrap(), self.lines.iter().collect())
        }
    }

    const LONG: [&str; 8] = ["--device", "sim", "--dataset", "digits", "--hidden", "64", "--epochs", "100000"];

    #[test]
    fn an_interrupt_ends_a_run_in_order() {
        let place = Place::new();
        let run = Background::start(&place, &[&LONG[..], &["--out", "record", "--json"]].concat());
        run.wait_for("epoch  1 ");
        // Into the middle of an epoch, which takes some tenths of a second.
        std::thread::sleep(Duration::from_millis(50));
        run.signal("-INT");
        let (status, stdout, lines) = run.end();
        assert_eq!(status.code(), Some(130), "{lines:?}");
        let errors: Vec<&String> = lines.iter().filter(|line| line.starts_with("error:")).collect();
        assert!(errors.len() == 1 && errors[0].contains("interrupted"), "{lines:?}");
        let json = read_json(&place.at("record/summary.json"));
        assert_eq!(json["status"], "interrupted");
        assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap(), json);
        let epochs = json["epochs"].as_array().unwrap().len();
        let losses = column(&place.at("record/steps.csv"), "loss");
        assert!(epochs >= 1 && (125 * epochs..=125 * (epochs + 1)).contains(&losses.len()), "{}", losses.len());
        assert!(losses.iter().all(|loss| loss.parse::<f32>().unwrap().is_finite()));
    }

    #[test]
    fn a_kill_leaves_what_was_done() {
        let place = Place::new();
        let run = Background::start(&place, &[&LONG[..], &["--out", "record", "--trace"]].concat());
        // A line that was printed is in the record already.
        run.wait_for("epoch  1 ");
        run.signal("-KILL");
        let (status, stdout, _) = run.end();
        assert_eq!((status.code(), stdout.as_str()), (None, ""));
        let json = read_json(&place.at("record/summary.json"));
        assert_eq!(json["status"], "running");
        let epochs = json["epochs"].as_array().unwrap().len();
        assert!(epochs >= 1);
        let losses = column(&place.at("record/steps.csv"), "loss");
        assert!(losses.len() >= 125 * epochs, "{}", losses.len());
        let trace = std::fs::read_to_string(place.at("record/trace.jsonl")).unwrap();
        let whole = trace.rsplit_once('\n').unwrap().0;
        assert!(whole.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
    }

    #[test]
    fn a_kill_before_the_first_epoch_leaves_a_readable_record() {
        let place = Place::new();
        let run = Background::start(&place, &[&LONG[..], &["--hidden=700", "--out", "record"]].concat()[2..]);
        drop(run.lines.recv_timeout(PATIENCE));
        run.signal("-KILL");
        run.end();
        // Either nothing was begun, or what there is can be read.
        if place.at("record/summary.json").exists() {
            assert_eq!(read_json(&place.at("record/summary.json"))["epochs"], serde_json::json!([]));
        }
    }

    /// Runs with one of its outputs closed at the other end from the start.
    fn with_closed(arguments: &[&str], stdout: bool) -> (Option<i32>, String) {
        let place = Place::new();
        let mut command = place.process(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        if stdout {
            drop(child.stdout.take())
        } else {
            drop(child.stderr.take())
        };
        let output = child.wait_with_output().unwrap();
        let text = if stdout { output.stderr } else { output.stdout };
        (output.status.code(), String::from_utf8(text).unwrap())
    }

    #[test]
    fn a_reader_that_goes_away_is_no_error() {
        let base = ["--device", "sim", "--dataset", "iris", "--epochs", "1", "--hidden", "16"];
        let json = [&base[..], &["--json"]].concat();
        for arguments in [&base[..], &json, &["doctor"], &["--help"]] {
            let (code, stderr) = with_closed(arguments, true);
            assert_eq!(code, Some(0), "{arguments:?}: {stderr}");
            assert!(!stderr.contains("error") && !stderr.contains("panicked"), "{arguments:?}: {stderr}");
        }
        // `2>&1 | head` closes both; a closed stderr alone is the harder half.
        let log = [&base[..], &["--json", "--log-driver-calls", "--alloc", "naive"]].concat();
        let (code, stdout) = with_closed(&log, false);
        assert_eq!(code, Some(0), "{stdout}");
        assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap()["status"], "finished");
        let (code, _) = with_closed(&[&base[..], &["--lr=-1"]].concat(), false);
        assert_eq!(code, Some(2), "an error is an error though nobody hears of it");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_behind_stdout_is_an_error() {
        let place = Place::new();
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let arguments = ["--device", "sim", "--dataset", "iris", "--epochs", "1", "--out", "record"];
        let output = place.process(&arguments).stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("error: cannot write to stdout"), "{stderr}");
        assert_eq!(read_json(&place.at("record/summary.json"))["status"], "finished");
    }
}
