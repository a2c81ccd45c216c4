//! The program's screens in a terminal: their text at 80 columns, and their properties at any width.

#![cfg(unix)]

use crate::pty::{self, acts_on_terminal, check, show};
use serde_json::Value;
use std::process::Command;
use tempfile::TempDir;

const IRIS: [&str; 8] = ["--device", "sim", "--dataset", "iris", "--hidden", "16", "--epochs", "2"];

fn trainer(test_dir: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.args(arguments).current_dir(test_dir.path()).env("VRAMLAB_CACHE", "cache").env("PATH", "/nowhere");
    for name in ["MNIST_DIR", "MNIST_MIRROR", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH"] {
        command.env_remove(name);
    }
    command
}

/// Patterns of text that differs between machines and runs.
const CHANGES: [(&str, &str); 3] = [
    (r"costs -?\d+ ns each time", "costs [host time] each time"),
    (r"--release -p", "-p"),
    (r"runs/\S+", "runs/[time]"),
];

fn of(arguments: &[&str]) -> String {
    let test_dir = TempDir::new().unwrap();
    pty::screen(&mut trainer(&test_dir, &[&IRIS, arguments].concat()))
}

#[test]
fn a_run_at_80_columns() {
    insta::with_settings!({ filters => CHANGES }, {
        insta::assert_snapshot!("caching", of(&["--alloc", "caching"]));
        insta::assert_snapshot!("naive", of(&["--alloc", "naive", "--log-driver-calls"]));
    });
}

#[test]
fn a_run_at_other_widths_and_without_styles() {
    let test_dir = TempDir::new().unwrap();
    check(&|| trainer(&test_dir, &[&IRIS[..], &["--check", "--alloc", "stream-ordered"]].concat()));
}

#[test]
fn doctor_at_80_columns_and_others() {
    let test_dir = TempDir::new().unwrap();
    check(&|| trainer(&test_dir, &["doctor"]));
    let shown = show(&mut trainer(&test_dir, &["doctor"]), 80, &[]);
    // With a driver the screen is the machine's.
    if shown.screen.contains("libcuda was not found") {
        insta::with_settings!({ filters => CHANGES }, {
            insta::assert_snapshot!(shown.screen, @r"
                --  CUDA driver            no NVIDIA driver: libcuda was not found; install one
                                           or use --device sim
                                           -> training uses the simulated GPU; for a real one
                                           install NVIDIA's driver 550 or newer (no CUDA toolkit
                                           is needed)
                ok  simulated GPU          NVIDIA H200 (simulated), built in (--device sim)
                ok    stream-ordered pools supported
                ok    virtual memory       supported
                --  MNIST                  not here: cache/mnist (the cache) has none of its
                                           files; would be downloaded from
                                           https://ossci-datasets.s3.amazonaws.com/mnist/ or
                                           https://storage.googleapis.com/cvdf-datasets/mnist/
                                           -> put the four files into a directory and name it
                                           with --data-dir or MNIST_DIR; without them --dataset
                                           auto tries a download and otherwise generates digits
                --  Nsight Systems         nsys is not on PATH
                                           -> install Nsight Systems to see runs on a timeline;
                                           NVTX ranges are on under it
                --  NVTX tool              none attached; ranges are off and cost one branch

                No GPU can be used; a run uses the simulated one.
                Next: cargo run -p trainer -- --alloc caching
            ");
        });
    }
}

/// The last two lines in a pipe: what was found, and the next command.
fn end(stdout: &str) -> (&str, &str) {
    let mut lines = stdout.trim_end().lines().rev();
    let next = lines.next().and_then(|line| line.strip_prefix("Next: "));
    (lines.next().unwrap_or_default(), next.unwrap_or_else(|| panic!("no next command: {stdout}")))
}

#[test]
fn the_last_lines_are_what_was_found_and_the_next_command() {
    let test_dir = TempDir::new().unwrap();
    for allocator in ["naive", "caching", "stream-ordered"] {
        let run = |more: &[&str]| {
            let mut command = trainer(&test_dir, &[&IRIS[..], &["--alloc", allocator], more].concat());
            let output = command.env_remove("CARGO").env("COLUMNS", "1000").output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let text = run(&["--out", &format!("{allocator}-text")]);
        let record: Value = serde_json::from_str(&run(&["--json", "--out", allocator])).unwrap();
        let calls = |name: &str| record["driver_calls"][name]["count"].as_u64().unwrap_or(0);
        let count = calls("mem_alloc") + calls("mem_alloc_async");
        let times = if count == 1 { "once".to_owned() } else { format!("{count} times") };
        let (actual, next) = end(&text);
        assert!(actual.starts_with(&format!("{allocator} asked the driver for memory {times}, ")), "{actual}");
        assert!(actual.ends_with('.'), "{actual}");
        assert!(next.contains("experiments") && next.contains(" compare --device sim --dataset iris"), "{next}");
    }
    let output = trainer(&test_dir, &["doctor"]).env_remove("CARGO").env("COLUMNS", "1000").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (actual, next) = end(&text);
    assert!(actual.ends_with('.') && actual.contains("GPU") && next.contains("trainer --alloc caching"), "{text}");
}

#[test]
fn what_comes_from_outside_moves_no_cursor() {
    let test_dir = TempDir::new().unwrap();
    let hostile = "\u{1b}[2J\u{9b}31m\u{202e}\u{7}";
    let profile = test_dir.path().join(format!("{hostile}.json"));
    std::fs::write(&profile, format!("{{\"{}\": 1}}", r"\u001b[2J\u202e")).unwrap();
    let profile = format!("sim:{}", profile.display());
    for arguments in [
        &["--device", &profile][..],
        &["--device", hostile],
        &["--alloc", hostile],
        &["--data-dir", hostile, "--dataset", "mnist", "--offline"],
        &[&IRIS[..], &["--out", hostile]].concat(),
        &[hostile],
        &["doctor", "--data-dir", hostile],
        &["doctor", "--json", "--data-dir", hostile],
        &[&IRIS[..], &["--json", "--save-start", hostile, "--out", "record"]].concat(),
    ] {
        let output = trainer(&test_dir, arguments).output().unwrap();
        for text in [output.stdout, output.stderr] {
            let text = String::from_utf8(text).unwrap();
            assert!(!acts_on_terminal(&text), "{arguments:?}: {text:?}");
        }
    }
}

#[test]
fn kernels_that_the_profile_has_no_cost_of_are_named() {
    let test_dir = TempDir::new().unwrap();
    let names = |device: &str, more: &[&str]| {
        let arguments = ["--device", device, "--dataset", "iris", "--hidden", "16", "--epochs", "1", "--json"];
        let output = trainer(&test_dir, &[&arguments[..], more].concat()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        summary["kernels_without_cost"].clone()
    };
    let launches: [&[&str]; 2] = [&["--dtype", "f16"], &["--dtype", "f16", "--launch", "graph"]];
    for arguments in [&[][..], launches[0], launches[1]] {
        assert_eq!(names("sim", arguments), Value::Null, "{arguments:?}");
    }
    let mut profile = serde_json::to_value(vramlab::Profile::h200()).unwrap();
    profile["kernels"].as_object_mut().unwrap().retain(|name, _| !name.contains("_f16") && name != "advance_cursor");
    std::fs::write(test_dir.path().join("gpu.json"), profile.to_string()).unwrap();
    assert_eq!(names("sim:gpu.json", &[]), Value::Null);
    let of_f16 = names("sim:gpu.json", launches[0]);
    let of_f16: Vec<_> = of_f16.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert!(of_f16.len() > 1 && of_f16.iter().all(|name| name.contains("_f16")), "{of_f16:?}");
    let screen =
        pty::screen(&mut trainer(&test_dir, &[&IRIS[..], &["--device", "sim:gpu.json"], launches[0]].concat()));
    assert!(screen.contains(&format!("the profile has no cost of {} and", of_f16[0])), "{screen}");
    // In a graph as well.
    let of_graph = names("sim:gpu.json", launches[1]);
    assert!(of_graph.as_array().unwrap().iter().any(|name| name == "advance_cursor"), "{of_graph:?}");
}
