//! `experiments bench` as a user meets it.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

use assert_cmd::Command;
use serde_json::Value;
use std::path::Path;
use std::process::Output;

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_experiments"));
    command
        .arg("bench")
        .args(arguments)
        .env("COLUMNS", "1000")
        .timeout(std::time::Duration::from_secs(120))
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn the_json_names_what_was_measured_and_where() {
    let cases = "history/mlp,alternate/4096,pair/512,mixed/64,threads/2,shared,instrument/latency/1";
    let arguments = ["--json", "--case", cases, "--threads", "2", "--alloc", "caching,naive", "--repeats", "2"];
    let output = bench(&arguments);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in
        ["schema_version", "code_version", "provenance", "date", "device", "cores", "repeats", "included", "rows"]
    {
        assert!(!report[key].is_null(), "{key} is missing");
    }
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<String> = rows
        .iter()
        .map(|row| format!("{} {}", row["case"].as_str().unwrap(), row["allocator"].as_str().unwrap()))
        .collect();
    let expected = [
        "history/mlp naive",
        "history/mlp caching",
        "alternate/4096/65536 naive",
        "alternate/4096/65536 caching",
        "shared/2 naive",
        "shared/2 caching",
        "pair/512 naive",
        "pair/512 caching",
        "mixed/64 naive",
        "mixed/64 caching",
        "threads/2 naive",
        "threads/2 caching",
        "instrument/bare/1 caching",
        "instrument/latency/1 caching",
    ];
    let sorted = |names: &[String]| {
        let mut names = names.to_vec();
        names.sort();
        names
    };
    assert_eq!(sorted(&names), sorted(&expected.map(str::to_owned)));
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(0.0 < number("min") && number("min") <= number("median") && number("median") <= number("max"), "{row}");
        assert_eq!(row["samples"].as_array().unwrap().len(), 2, "{row}");
        assert!(number("operations") > 0.0 && row["device"] == "null" && row["program"] == "experiments", "{row}");
    }
}

#[test]
fn the_table_has_a_line_for_each_case() {
    let output = bench(&["--case", "pair/512,pair/65536,instrument/trace/1", "--repeats", "1"]);
    assert!(output.status.success(), "{output:?}");
    let table = text(&output.stdout);
    for word in ["pair/512", "pair/65536", "instrument/trace/1", "stream-ordered", "added ns per call", "1 runs"] {
        assert!(table.contains(word), "'{word}' is missing:\n{table}");
    }
}

#[test]
fn in_a_pipe_each_finished_case_is_a_line() {
    let output = bench(&["--case", "pair/512,pair/65536", "--repeats", "2", "--alloc", "naive,caching"]);
    assert!(output.status.success(), "{output:?}");
    let stderr = text(&output.stderr);
    let mut lines: Vec<&str> = stderr.lines().filter(|line| !line.starts_with("warning")).collect();
    assert_eq!(lines.remove(0), "repeat   1 of 2 done");
    lines.sort_unstable();
    let cases = ["pair/512 caching", "pair/512 naive", "pair/65536 caching", "pair/65536 naive"];
    assert_eq!(lines, cases.map(|case| format!("done     {case}")));
}

#[test]
fn bad_input_is_one_line() {
    for (arguments, word) in [
        (&["--case", "pear"][..], "no case begins with 'pear'; there are history/"),
        (&["--history", "/nowhere.pickle"], "/nowhere.pickle"),
        (&["--baselines"], "add --device cuda"),
        (&["--baselines", "--device", "cuda", "--baselines-dir", "/nowhere"], "/nowhere holds no run.py"),
    ] {
        let output = bench(arguments);
        let stderr = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{stderr}");
        assert!(stderr.lines().count() == 1 && stderr.starts_with("error: ") && stderr.contains(word), "{stderr}");
    }
    for arguments in [&["--alloc", "cashing"][..], &["--repeats", "0"], &["--threads", "0"], &["--device", "tpu"]] {
        let output = bench(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(arguments[0]), "{arguments:?}");
    }
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn baselines_that_are_missing_are_named_with_a_remedy() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../baselines/run.py");
    let mut python = std::process::Command::new("python3");
    // Where everything is installed they run.
    let python = python.arg(program).args(["--cases", "pair/512", "--repeats", "1"]);
    let output = python.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let (rows, missing) = (found["rows"].as_array().unwrap(), found["missing"].as_array().unwrap());
    assert!(rows.len() + missing.len() >= 3, "{found}");
    for baseline in missing {
        assert!(["allocator", "reason", "remedy"].iter().all(|key| !baseline[*key].as_str().unwrap().is_empty()));
    }
}
