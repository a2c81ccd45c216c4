//! `experiments bench` from a user's view, and `experiments fidelity`: the error of a simulated run compared with a
//! GPU.

use crate::common::{Ran, TestDir};
use assert_cmd::Command;
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use vramlab::Profile;

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
    for key in [
        "schema_version",
        "code_version",
        "provenance",
        "command",
        "date",
        "device",
        "cores",
        "repeats",
        "included",
        "rows",
    ] {
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
        (&["--case", "mixed/64,pear"], "no case begins with 'pear'; there are history/"),
        (&["--history", "/nowhere.pickle"], "/nowhere.pickle"),
        (&["--baselines"], "add --device cuda"),
        (&["--baselines", "--device", "cuda", "--baselines-dir", "/nowhere"], "/nowhere has no run.py"),
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
fn without_a_gpu_the_advice_is_a_device_that_bench_takes() {
    let test_dir = TestDir::new();
    for more in [&[][..], &["--baselines"]] {
        let mut command = test_dir.process(&[&["bench", "--device", "cuda", "--case", "pair/512"], more].concat());
        let output = Ran::of(command.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap());
        output.refused(2, &["cannot measure on a GPU: ", "--device null"]);
        assert!(!output.stderr.contains("--device sim"), "{output:#?}");
    }
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn baselines_that_are_missing_are_named_with_a_remedy() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pytorch/baselines/run.py");
    let mut python = std::process::Command::new("python3");
    // The program runs the baselines that are installed.
    let python = python.arg(program).args(["--cases", "pair/512", "--repeats", "1"]);
    let output = python.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let (rows, missing) = (document["rows"].as_array().unwrap(), document["missing"].as_array().unwrap());
    assert!(rows.len() + missing.len() >= 3, "{document}");
    for baseline in missing {
        assert!(["allocator", "reason", "remedy"].iter().all(|key| !baseline[*key].as_str().unwrap().is_empty()));
    }
}

// `experiments fidelity` from a user's view, on recorded runs.

const SPEC: &str = r#"
name = "small"
question = "Is it the same?"
repeats = 1
devices = ["sim"]
keep = ["summary.json", "steps.csv"]

[options]
dataset = "iris"
layers = 2
epochs = 2

[matrix]
alloc = ["naive", "caching"]
sync = ["never", "step"]
"#;

/// Runs the spec into `out` on a device.
fn record(test_dir: &TestDir, out: &str, device: &str) {
    test_dir.write("small.toml", SPEC);
    test_dir.run(&["run", "small.toml", "--device", device, "-o", out]).ok();
}

fn fidelity(test_dir: &TestDir, more: &[&str]) -> Ran {
    test_dir.run(&[&["fidelity", "--measured", "a/small", "--against", "b/small"], more].concat())
}

#[test]
fn a_simulation_is_like_itself() {
    let test_dir = TestDir::new();
    record(&test_dir, "a", "sim");
    record(&test_dir, "b", "sim");
    let report = fidelity(&test_dir, &["--json", "--tolerance", "0%"]).ok().json();
    assert_eq!((&report["worst"], &report["within"]), (&0.0.into(), &true.into()));
    assert_eq!(report["axes"], serde_json::json!(["alloc", "sync"]));
    let cells = report["cells"].as_array().unwrap();
    let names: Vec<&str> = cells.iter().map(|cell| cell["cell"].as_str().unwrap()).collect();
    assert_eq!(names, ["caching never", "caching step", "naive never", "naive step"]);
    for cell in cells {
        assert_eq!(cell["steps_with_other_allocations"], 0, "{cell}");
        assert!(cell["steps"].as_u64().unwrap() > 2 && cell["measured_step_s"].as_f64().unwrap() > 0.0);
        for call in cell["calls"].as_array().unwrap() {
            assert_eq!(call["measured"], call["simulated"]);
        }
    }
    let naive = cells.iter().find(|cell| cell["cell"] == "naive never").unwrap();
    assert!((naive["same_calls"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{naive}");
    let text = fidelity(&test_dir, &[]).ok().stdout;
    assert!(text.contains("caching step") && text.contains("+0.0 %") && text.contains("mem_free"), "{text}");
}

#[test]
fn a_simulation_that_is_off_fails_and_says_by_how_much() {
    let test_dir = TestDir::new();
    record(&test_dir, "a", "sim");
    // Launches that take twice as long, and frees that do not wait.
    let mut profile = Profile::h200();
    profile.queues.launch_ns *= 2;
    test_dir.write("slow.json", serde_json::to_string(&profile).unwrap());
    record(&test_dir, "b", "sim:slow.json");
    let output = fidelity(&test_dir, &["--json"]);
    assert_eq!(output.code, Some(1), "{output:#?}");
    let report = output.json();
    assert!(report["worst"].as_f64().unwrap() > 0.15 && report["within"] == false, "{report}");
    let error = output.stderr.lines().last().unwrap();
    assert!(error.starts_with("error: ") && error.contains("cells are not as measured: the step time of '"), "{error}");
    // A wider tolerance accepts it.
    fidelity(&test_dir, &["--tolerance", "1000%"]).ok();

    let mut profile = Profile::h200();
    profile.plain.free_drains_device = false;
    test_dir.write("lax.json", serde_json::to_string(&profile).unwrap());
    let out = ["run", "small.toml", "--device", "sim:lax.json", "-o", "c"];
    test_dir.run(&out).ok();
    let arguments = ["fidelity", "--measured", "a/small", "--against", "c/small", "--tolerance", "1000%", "--json"];
    let output = test_dir.run(&arguments);
    assert_eq!(output.code, Some(1), "it waits elsewhere: {output:#?}");
    // Only the failed criterion is named.
    let error = output.stderr.lines().last().unwrap();
    assert!(error.contains("2 of 4 cells are not as measured: ") && error.ends_with("less than 50 %"), "{error}");
    assert!(!error.contains("step time"), "{error}");
    let cells = output.json()["cells"].as_array().unwrap().clone();
    let elsewhere: Vec<&str> =
        cells.iter().filter(|cell| cell["within"] == false).map(|cell| cell["cell"].as_str().unwrap()).collect();
    assert_eq!(elsewhere, ["naive never", "naive step"]);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let test_dir = TestDir::new();
    record(&test_dir, "a", "sim");
    fidelity(&test_dir, &[]).refused(2, &["b/small has no experiment.json"]);
    std::fs::create_dir_all(test_dir.at("b/small")).unwrap();
    fidelity(&test_dir, &[]).refused(2, &["b/small has no experiment.json"]);
    record(&test_dir, "b", "sim");
    std::fs::remove_dir_all(test_dir.at("b/small/runs/02-caching-never-r0")).unwrap();
    fidelity(&test_dir, &[]).refused(2, &["b/small has no finished run of 'caching never'"]);
    std::fs::remove_dir_all(test_dir.at("b/small/runs")).unwrap();
    fidelity(&test_dir, &[]).refused(2, &["b/small has no finished run"]);
    let path = test_dir.at("b/small/experiment.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"schema_version\": 1", "\"schema_version\": 2")).unwrap();
    fidelity(&test_dir, &[]).refused(2, &["schema version 2"]);
    let output = fidelity(&test_dir, &["--tolerance", "lots"]);
    assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{output:#?}");
    fidelity(&test_dir, &["--profile", "slow.json"]).refused(2, &["--profile is for new runs"]);
    // A record that is missing is missed before the other one is made.
    let spec = ["--spec", "small.toml", "--out", "new"];
    test_dir
        .run(&[&["fidelity", "--measured", "none"], &spec[..]].concat())
        .refused(2, &["none has no experiment.json"]);
    test_dir
        .run(&[&["fidelity", "--against", "none"], &spec[..]].concat())
        .refused(2, &["none has no experiment.json"]);
    // So is one of another spec.
    record(&test_dir, "c", "sim");
    for recorded in ["--measured", "--against"] {
        test_dir
            .run(&["fidelity", recorded, "c/small", "--out", "new"])
            .refused(2, &["c/small is of the spec 'small', and the new runs are of 'fidelity'; set --spec"]);
    }
    assert!(!test_dir.at("new").exists());
}

#[test]
fn without_a_gpu_the_recorded_runs_are_compared() {
    let test_dir = TestDir::new();
    let mut command = test_dir.process(&["fidelity", "--json"]);
    let output = Ran::of(command.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap());
    let report = output.json();
    // It fails because of the simulation's error, not because something is missing here.
    assert_eq!(output.code, Some(if report["within"] == true { 0 } else { 1 }), "{output:#?}");
    assert!(report["cells"].as_array().unwrap().len() > 1, "{report}");
    let has_note = |words: &str| output.stderr.lines().any(|line| line.contains(words));
    assert!(
        has_note("no GPU here: the measured runs are those of ") && has_note("the simulated runs are those of "),
        "{output:#?}"
    );
    // Nothing was run for it.
    assert_eq!(test_dir.files(), [""; 0]);

    // The text report: one sentence and the next command.
    let mut command = test_dir.process(&["fidelity"]);
    let text = Ran::of(command.env("CUDA_VISIBLE_DEVICES", "-1").output().unwrap()).stdout;
    let mut lines = text.lines().rev();
    let (next, conclusion) = (lines.next().unwrap(), lines.next().unwrap());
    assert!(next.starts_with("Next: ") && next.contains("experiments"), "{text}");
    let count = report["cells"].as_array().unwrap().iter().filter(|cell| cell["within"] == true).count();
    assert!(conclusion.starts_with(&format!("{count} of ")) && conclusion.ends_with('.'), "{conclusion}");
}
