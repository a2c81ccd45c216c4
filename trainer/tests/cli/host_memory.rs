//! A simulated GPU larger than the machine: runs that do not fit are refused, or end as other failures do.

use super::TestDir;
use crate::common::read_json;
use std::process::{Command, Output};

/// Runs the program with an address space of `kib`.
fn within(test_dir: &TestDir, kib: u64, arguments: &[&str]) -> Output {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit -v {kib} && exec \"$@\""), "sh", env!("CARGO_BIN_EXE_trainer")]);
    test_dir
        .settle(shell.args(["--device", "sim", "--dataset", "digits", "--steps", "1", "--out", "run"]).args(arguments));
    // An arena for each thread would take address space or not, as there is some.
    shell.env("MALLOC_ARENA_MAX", "1").output().unwrap()
}

/// The last line on stderr: the reason that the run ended.
fn reason(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned()
}

/// MiB of a size as people read it.
fn mib(words: &str) -> f64 {
    let (number, unit) = words.split_once(' ').unwrap();
    let scale = match unit.get(..3) {
        Some("GiB") => 1024.0,
        Some("MiB") => 1.0,
        Some("KiB") => 1.0 / 1024.0,
        _ => panic!("no size: {words}"),
    };
    number.parse::<f64>().unwrap() * scale
}

#[test]
fn network_too_large_for_the_host_is_refused_before_allocation() {
    let test_dir = TestDir::new();
    let output = within(&test_dir, 1_500_000, &["--hidden", "30000", "--layers", "4"]);
    let reason = reason(&output);
    assert_eq!(output.status.code(), Some(2), "{reason}");
    for words in ["needs at least 10.", "ulimit -v", "--hidden"] {
        assert!(reason.contains(words), "{reason}");
    }
    assert!(!test_dir.at("run").exists(), "there is nothing to record");
}

#[test]
fn a_run_for_which_memory_runs_out_closes_its_record() {
    let test_dir = TestDir::new();
    let asked = |output: &Output| {
        let words = reason(output);
        assert_eq!(output.status.code(), Some(2), "{words}");
        let sizes = words.split_once("needs at least ").and_then(|(_, rest)| rest.split_once("there are "));
        sizes.map(|(needed, room)| (mib(needed), mib(room))).unwrap()
    };
    // The process's own memory is missing from the available memory that a refused run reports.
    let (_, room) = asked(&within(&test_dir, 1024 * 1024, &["--hidden", "30000", "--layers", "4"]));
    let base = 1024.0 - room;
    // Five matrices of 16 MiB, and without fusion a gradient as large as each.
    let network = ["--hidden", "2048", "--layers", "7", "--fuse", "none"];
    let with_mib = |mib: f64| within(&test_dir, (mib * 1024.0) as u64, &network);
    let (needed, _) = asked(&with_mib(base + 32.0));
    // A little more than what is asked for before.
    let output = with_mib(base + needed + 16.0);
    let reason = reason(&output);
    assert_eq!(output.status.code(), Some(1), "{reason}");
    assert!(reason.contains("of this machine's memory") && reason.contains("ulimit -v"), "{reason}");
    let summary = read_json(&test_dir.at("run/summary.json"));
    assert_eq!(summary["status"], "failed");
    assert!(summary["error"].as_str().unwrap().contains("of this machine's memory"), "{}", summary["error"]);
}
