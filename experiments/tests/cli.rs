//! The program as a user meets it: comparisons, fits, and what it refuses.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

use allocators::Profile;
use assert_cmd::Command;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Stdio;
use tempfile::TempDir;

/// A directory to work in.
struct Place(TempDir);

/// What a run left.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Place {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        std::fs::write(self.at(name), contents).unwrap();
        self.at(name).to_str().unwrap().to_owned()
    }

    fn process(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_experiments"));
        command.args(arguments).current_dir(self.0.path()).env("GPU_ALLOCATORS_CACHE", self.at("cache"));
        for variable in ["MNIST_DIR", "MNIST_MIRROR", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH"] {
            command.env_remove(variable);
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = Command::from_std(self.process(arguments));
        let output = command.timeout(std::time::Duration::from_secs(60)).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let ran = Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
        assert!(!ran.stderr.contains("panicked") && !ran.stderr.contains("internal fault"), "{ran:#?}");
        ran
    }

    /// `compare` with small networks on iris, for as many epochs as it takes to have a steady one.
    fn compare(&self, before: &[&str], after: &[&str]) -> Ran {
        let common = ["--", "--device", "sim", "--dataset", "iris", "--hidden", "16"];
        self.run(&[&["compare"], before, &common, after].concat())
    }
}

impl Ran {
    fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// One line on stderr that holds all of `words`, nothing on stdout.
    fn refused(&self, code: i32, words: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (Some(code), ""), "{self:#?}");
        let lines: Vec<&str> = self.stderr.lines().collect();
        assert!(lines.len() == 1 && lines[0].starts_with("error: "), "{self:#?}");
        for word in words {
            assert!(lines[0].contains(word), "'{word}' is missing: {}", lines[0]);
        }
        assert_eq!(lines[0].matches("error:").count(), 1, "{}", lines[0]);
    }
}

#[test]
fn compare_has_a_row_for_each_arm() {
    let place = Place::new();
    let rows = place.compare(&["--json"], &["--epochs", "3"]).ok().json();
    let rows = rows.as_array().unwrap();
    let arms: Vec<&str> = rows.iter().map(|row| row["arm"].as_str().unwrap()).collect();
    let trimmed = "stream-ordered --release-threshold 0 --sync step";
    assert_eq!(arms, ["naive", "caching", "stream-ordered", trimmed]);
    for row in rows {
        assert_eq!((&row["dataset"], &row["steps"]), (&"iris".into(), &2.into()));
        assert!(row["device"].as_str().unwrap().contains("simulated"));
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("epoch_s") > 0.0 && number("final_train_loss") > 0.0);
        assert!((0.0..=1.0).contains(&number("val_accuracy")));
        assert!(0.0 < number("peak_requested_bytes"));
        assert!(number("peak_requested_bytes") <= number("peak_reserved_bytes"), "{row}");
        assert!(number("allocate_p50_ns") <= number("allocate_p99_ns"));
        // What was computed does not depend on the allocator.
        assert_eq!(row["final_train_loss"], rows[0]["final_train_loss"]);
        assert_eq!(row["val_accuracy"], rows[0]["val_accuracy"]);
    }
    let [naive, caching, pool, _] = [0, 1, 2, 3].map(|at| &rows[at]);
    assert_eq!((&caching["driver_allocations"], &caching["driver_frees"]), (&0.into(), &0.into()));
    assert!(naive["driver_allocations"].as_u64().unwrap() > 10);
    assert_eq!(naive["driver_allocations"], naive["driver_frees"], "a steady epoch frees what it takes");
    assert_eq!(naive["driver_allocations"], pool["driver_allocations"]);
    assert_eq!(naive["blocked_in"], "mem_free");
    assert!(naive["epoch_s"].as_f64() > caching["epoch_s"].as_f64());
    assert!(naive["blocked_ns"].as_u64() > caching["blocked_ns"].as_u64());
}

#[test]
fn compare_prints_a_table_and_repeats() {
    let place = Place::new();
    let arms = ["--arm", "--alloc naive", "--arm", "--alloc caching --latency off", "--repeats", "2"];
    let text = place.compare(&arms, &["--epochs", "2"]).ok().stdout;
    for words in
        ["NVIDIA H200 (simulated), data set iris", "naive", "caching --latency off", "driver allocs", "mem_free"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(std::fs::read_dir(place.at("runs")).unwrap().count(), 4, "each run leaves its record");
}

#[test]
fn a_failing_arm_is_one_line_and_its_exit_code() {
    let place = Place::new();
    // Bad input: an option, a value, a file.
    place.compare(&["--arm", "--alloc nonsense"], &[]).refused(2, &["'--alloc nonsense'", "invalid value"]);
    place.compare(&[], &["--hidden=0"]).refused(2, &["'--alloc naive'"]);
    place.compare(&[], &["--lr", "0"]).refused(2, &["'--alloc naive'", "--lr must be a positive number"]);
    place.compare(&[], &["--out", "one"]).refused(2, &["'--alloc caching'", "exists already"]);
    // A failure while running.
    place.compare(&["--json"], &["--lr", "1e30"]).refused(1, &["'--alloc naive'", "the loss became NaN"]);
    let arms = ["--arm", "--alloc naive", "--arm", "--alloc caching --memory-limit 64K"];
    place.compare(&arms, &["--epochs", "1"]).refused(1, &["'--alloc caching --memory-limit 64K'", "out of memory"]);
}

#[test]
fn arguments_that_mean_nothing_are_refused() {
    let place = Place::new();
    for arguments in
        [&["nonsense"][..], &["compare", "--repeats", "0"], &["compare", "--nonsense"], &["fit-kernels"], &[]]
    {
        let ran = place.run(arguments);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:#?}");
    }
    let help = place.run(&["--help"]).ok().stdout;
    assert!(help.contains("compare") && help.contains("fit-kernels"), "{help}");
}

/// Timings that a kernel of this cost would have given.
fn timings(kernel: &str, fixed: f64, iteration: f64, bandwidth: f64) -> String {
    let shapes =
        [(10u64, 7u64, 100_000u64), (132, 49, 500_000), (133, 49, 600_000), (900, 3, 9_000_000), (4, 1, 80_000_000)];
    let line = |(blocks, iterations, bytes): (u64, u64, u64)| {
        let compute = blocks.div_ceil(132) as f64 * iterations as f64 * iteration;
        let median = fixed + compute.max(bytes as f64 / bandwidth);
        let (m, n) = (64, 10);
        json!({"kernel": kernel, "blocks": blocks, "iterations": iterations, "bytes": bytes, "median_ns": median, "m": m, "n": n})
            .to_string()
    };
    shapes.map(line).join("\n")
}

#[test]
fn a_fit_gives_a_profile_that_runs() {
    let place = Place::new();
    let text = format!("{}\n\n{}\n", timings("sgd", 1500.0, 800.0, 3000.0), timings("made_up", 900.0, 20.0, 2000.0));
    let file = place.write("timings.jsonl", text);
    let ran = place.run(&["fit-kernels", &file, "--out", "profile.json"]).ok();
    assert!(
        ran.stdout.contains("sgd") && ran.stdout.contains("made_up") && ran.stdout.contains("worst miss"),
        "{ran:#?}"
    );
    let text = std::fs::read_to_string(place.at("profile.json")).unwrap();
    let (found, old) = (Profile::from_json(&text).unwrap(), Profile::h200());
    assert!((found.kernels["sgd"].fixed_ns / 1500.0 - 1.0).abs() < 0.1, "{:?}", found.kernels["sgd"]);
    assert_eq!(found.kernels.len(), old.kernels.len() + usize::from(!old.kernels.contains_key("made_up")));
    assert_eq!((&found.plain, &found.pool, &found.queues), (&old.plain, &old.pool, &old.queues), "the rest is kept");
    place.compare(&["--arm", "--alloc caching"], &["--epochs", "1"]).ok();
    let ran = place.run(&["compare", "--", "--device", "sim:profile.json", "--dataset", "iris", "--epochs", "1"]).ok();
    assert!(ran.stdout.contains("stream-ordered"));
    // A profile of one's own is the base as well.
    place.run(&["fit-kernels", &file, "--profile", "profile.json", "--out", "again.json"]).ok();
    assert_eq!(std::fs::read_to_string(place.at("again.json")).unwrap(), text);
}

#[test]
fn the_shortest_timings_give_a_profile_that_can_be_read() {
    let place = Place::new();
    let line =
        |blocks: u64, ns: f64| json!({"kernel": "k", "blocks": blocks, "iterations": 1, "bytes": 1, "median_ns": ns});
    for (name, ns) in [("tiny", 1e-3), ("huge", 1e11)] {
        let file = place.write(name, format!("{}\n{}", line(1, ns), line(5000, ns)));
        let out = place.at(&format!("{name}.json"));
        place.run(&["fit-kernels", &file, "--out", out.to_str().unwrap()]).ok();
        Profile::from_json(&std::fs::read_to_string(out).unwrap()).unwrap();
    }
}

#[test]
fn bad_timings_are_refused() {
    let place = Place::new();
    let fit = |file: &str| place.run(&["fit-kernels", file, "--out", "profile.json"]);
    fit("missing.jsonl").refused(2, &["cannot read missing.jsonl"]);
    fit(".").refused(2, &["cannot read ."]);
    let good = timings("sgd", 1500.0, 800.0, 3000.0);
    for (contents, words) in [
        (String::new(), "holds no timings"),
        ("\n  \n".to_owned(), "holds no timings"),
        (format!("{good}\nnot json"), "line 6: not a line of time_kernels"),
        (format!("{good}\n{{\"kernel\": \"sgd\"}}"), "line 6: not a line of time_kernels"),
        (good.replacen("\"blocks\":10", "\"blocks\":-1", 1), "line 1: not a line of time_kernels"),
        (format!("\n{}", good.replacen("\"blocks\":10", "\"blocks\":1e99", 1)), "line 2: not a line of time_kernels"),
        (json!({"kernel": "k", "blocks": 1, "iterations": 1, "bytes": 1, "median_ns": 0}).to_string(), "median_ns"),
        (json!({"kernel": "k", "blocks": 1, "iterations": 1, "bytes": 1, "median_ns": -5}).to_string(), "median_ns"),
        ("{\"kernel\":\"k\",\"blocks\":1,\"iterations\":1,\"bytes\":1,\"median_ns\":1e999}".to_owned(), "line 1"),
        (json!({"kernel": "k", "blocks": 1, "iterations": 1, "bytes": 1, "median_ns": 1e300}).to_string(), "median_ns"),
    ] {
        let file = place.write("bad.jsonl", contents);
        fit(&file).refused(2, &["bad.jsonl", words]);
        assert!(!place.at("profile.json").exists(), "nothing is written for '{words}'");
    }
    let file = place.write("bytes.jsonl", [0xff, 0xfe, 0x00]);
    fit(&file).refused(2, &["cannot read", "bytes.jsonl"]);

    let file = place.write("good.jsonl", good);
    let with = |profile: &str| place.run(&["fit-kernels", &file, "--profile", profile, "--out", "profile.json"]);
    with("missing.json").refused(2, &["cannot read missing.json"]);
    with(&place.write("broken.json", "{")).refused(2, &["broken.json", "not a device profile"]);
    let blocked = format!("{file}/profile.json");
    place.run(&["fit-kernels", &file, "--out", &blocked]).refused(2, &["cannot write", "profile.json"]);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = Place::new();
    let file = place.write("timings.jsonl", timings("sgd", 1500.0, 800.0, 3000.0));
    let compare =
        ["compare", "--arm", "--alloc caching", "--", "--device", "sim", "--dataset", "iris", "--epochs", "1"];
    for arguments in [&compare[..], &["fit-kernels", &file, "--out", "profile.json"]] {
        let mut child = place.process(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}
