//! `experiments campaign` on the parts that need no GPU.

use crate::common::{Ran, SMALL, TestDir, json_at, wait_for};
use assert_cmd::Command;
use serde_json::{Value, json};
use std::fs;

fn campaign() -> Command {
    let mut command = Command::cargo_bin("experiments").unwrap();
    command.arg("campaign").env("NO_COLOR", "1");
    command
}

/// The predictions equal the committed table's, and a complete part is not repeated.
#[test]
fn truth_is_made_once_and_compared() {
    let test_dir = tempfile::tempdir().unwrap();
    let made = || {
        let assertion = campaign().args(["truth", "--json", "-o"]).arg(test_dir.path()).assert().success();
        let output = assertion.get_output().clone();
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        (rows, String::from_utf8(output.stderr).unwrap())
    };
    let (rows, stderr) = made();
    assert!(stderr.contains("part     truth"), "{stderr}");
    assert!(rows.len() > 100 && rows.iter().all(|row| row["ratio"] == 1.0), "{rows:?}");
    let (again, stderr) = made();
    assert_eq!(again, rows);
    assert!(!stderr.contains("part     truth"), "{stderr}");
}

/// Every spec of the repository belongs to a part, and each part names its requirements.
#[test]
fn every_spec_is_part_of_the_campaign() {
    let plan = campaign().args(["--plan", "--json"]).assert().success().get_output().stdout.clone();
    let parts: Vec<Value> = serde_json::from_slice(&plan).unwrap();
    let words: Vec<&str> =
        parts.iter().flat_map(|part| part["command"].as_array().unwrap()).filter_map(Value::as_str).collect();
    let specs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../specs");
    for name in crate::common::names(&specs) {
        let name = name.strip_suffix(".toml").unwrap();
        assert!(words.contains(&name), "no part of campaign.toml runs {name}");
    }
    for part in &parts {
        let needs: Vec<&str> = part["needs"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let is_on_gpu = part["command"].as_array().unwrap().iter().any(|word| word == "cuda");
        assert!(!is_on_gpu || needs.iter().any(|need| need.contains("gpu")), "{part}");
    }
}

/// A part whose spec is not here yet is skipped, and the others are made.
#[test]
fn a_part_without_its_spec_is_skipped() {
    let test_dir = TestDir::new();
    std::fs::create_dir_all(test_dir.at("experiments/specs")).unwrap();
    test_dir.write("experiments/specs/small.toml", SMALL);
    let part = |name: &str| {
        format!(
            "[[part]]\nname = '{name}'\ncommand = ['experiments', 'run', '{{specs}}', '--device', 'sim', '-o', '{{out}}']\n\
             documents = []\n[[part.record]]\nspecs = ['{name}']\nmade = '{{spec}}'\nkept = '*-sim/{{spec}}'\nkey = ['arm']\n\
             figures = ['wall_s']\n"
        )
    };
    test_dir.write("parts.toml", part("no-such-spec-here") + &part("small"));
    let output = test_dir.run(&["campaign", "--file", "parts.toml", "-o", "out"]).ok();
    assert!(output.stderr.contains("skipped  no-such-spec-here: there is no spec 'no-such-spec-here'"), "{output:?}");
    assert!(test_dir.at("out/small/experiment.json").is_file());
    let plan = test_dir.run(&["campaign", "--file", "parts.toml", "-o", "out", "--plan"]).ok().stdout;
    assert!(plan.contains("no spec no-such-spec-here") && plan.contains("done"), "{plan}");
}

/// The outcomes of the tests that need a GPU carry the commit of their sources.
#[cfg(unix)]
#[test]
fn tests_that_need_a_gpu_are_listed_with_their_commit() {
    let test_dir = TestDir::new();
    std::fs::create_dir(test_dir.at("built")).unwrap();
    for (name, outcome, code) in [("conformance", "ok", 0), ("soundness", "ok", 0), ("against_cpu", "FAILED", 101)] {
        let text = format!("#!/bin/sh\necho \"test {name}_$1 ... {outcome}\"\necho noise\nexit {code}\n");
        test_dir.program(&format!("built/{name}"), &text);
    }
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpu-tests.sh");
    let mut command = Command::new("bash");
    command.arg(script).arg(test_dir.at("out.txt")).env("TESTS", test_dir.at("built"));
    command.env_remove("BUILD").assert().code(2);
    command.env("BUILD", "abc123").assert().code(1);
    let text = std::fs::read_to_string(test_dir.at("out.txt")).unwrap();
    assert!(text.contains("\ncommit   abc123\n"), "{text}");
    assert!(text.contains("\n== conformance\ntest conformance_cuda ... ok\n"), "{text}");
    assert!(text.ends_with("\n== against_cpu\ntest against_cpu_--format ... FAILED\n"), "{text}");
}

/// A failed command leaves no file that looks complete, and one whose budget ended is not complete.
#[cfg(unix)]
#[test]
fn what_failed_is_not_done() {
    let test_dir = tempfile::tempdir().unwrap();
    let file = test_dir.path().join("parts.toml");
    for (ends, code) in [("exit 1", 1), ("exit 4", 4), ("exit 130", 130), ("kill -9 $$", 1)] {
        let text = format!(
            "[[part]]\nname = 'a'\ncommand = ['sh', '-c', 'echo []; {ends}']\nstdout = 'a.json'\ndocuments = []\n\
             [[part.record]]\nmade = 'a.json'\nkept = 'none.json'\nkey = ['arm']\nfigures = ['ms']\n"
        );
        fs::write(&file, text).unwrap();
        let out = test_dir.path().join("out");
        campaign().arg("--file").arg(&file).arg("-o").arg(&out).assert().code(code);
        assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    }
    // The parts after one that failed are made.
    for (fails, words) in [
        ("'sh', '-c', 'kill -9 $$'", "a (signal: 9 (SIGKILL))"),
        ("'no-such-command'", "a (cannot start no-such-command"),
    ] {
        let part = |name: &str, command: &str| {
            format!(
                "[[part]]\nname = '{name}'\ncommand = [{command}]\nstdout = '{name}.json'\ndocuments = []\n\
                 [[part.record]]\nmade = '{name}.json'\nkept = 'none.json'\nkey = ['arm']\nfigures = ['ms']\n"
            )
        };
        fs::write(&file, part("a", fails) + &part("b", "'echo', '[]'")).unwrap();
        let out = test_dir.path().join("next");
        let assertion = campaign().arg("--file").arg(&file).arg("-o").arg(&out).assert().code(1);
        let stderr = String::from_utf8(assertion.get_output().stderr.clone()).unwrap();
        assert!(stderr.contains(words), "{stderr}");
        assert!(out.join("b.json").is_file() && !out.join("a.json.part").exists());
        fs::remove_dir_all(&out).unwrap();
    }
    campaign().args(["none", "--file"]).arg(&file).assert().code(2);
    campaign().args(["--budget", "0"]).assert().code(2);
}

/// A part may be a command of `vramlab`, because this program is `vramlab` too.
#[test]
fn a_history_is_replayed() {
    let test_dir = tempfile::tempdir().unwrap();
    let file = test_dir.path().join("parts.toml");
    let text = "[[part]]\nname = 'a'\nstdout = 'a.json'\ndocuments = []\n\
                command = ['vramlab', 'replay', '{experiments}/histories/mlp.pickle.xz', '--device', 'null', '--json', '--plan', 'off']\n\
                [[part.record]]\nmade = 'a.json'\nkept = 'none.json'\nkey = ['alloc']\nfigures = ['peak_reserved_bytes']\n";
    fs::write(&file, text).unwrap();
    let out = test_dir.path().join("out");
    campaign().arg("--file").arg(&file).arg("-o").arg(&out).assert().success();
    assert!(json_at(&out.join("a.json"))[0]["peak_reserved_bytes"].as_u64() > Some(0));
}

/// Parts after the one that makes a profile use the new profile.
#[cfg(unix)]
#[test]
fn the_profile_is_the_campaigns_own() {
    let test_dir = tempfile::tempdir().unwrap();
    let record = |made: &str| {
        format!("documents = []\n[[part.record]]\nmade = '{made}'\nkept = 'none'\nkey = []\nfigures = []\n")
    };
    let part = |name: &str, command: &str| {
        let made = format!("{name}.json");
        format!("[[part]]\nname = '{name}'\ncommand = {command}\nstdout = '{made}'\n{}", record(&made))
    };
    let says = r#"['sh', '-c', 'echo "[{\"is\": \"$0\"}]"', '{profile}']"#;
    let parts = [part("before", says), part("profile", "['echo', '{}']"), part("after", says)].concat();
    let (file, out) = (test_dir.path().join("parts.toml"), test_dir.path().join("out"));
    fs::write(&file, parts).unwrap();
    campaign().arg("--file").arg(&file).arg("-o").arg(&out).assert().success();
    let content = |name: &str| json_at(&out.join(name))[0]["is"].as_str().unwrap().to_owned();
    assert_ne!(content("before.json"), content("after.json"));
    assert_eq!(content("after.json"), out.join("profile.json").to_string_lossy());
}

/// An experiment's directory is compared with the newest record of its name in an archive: a repetition shows no
/// differences; changed values are reported, as are cells that only one of the two has.
#[test]
fn folders_of_experiments_are_compared() {
    const PEAK: &str = "reserved_bytes.all.peak";
    let test_dir = TestDir::new();
    let parts = format!(
        "[[part]]\nname = 'small'\ncommand = ['experiments', 'run', 'small.toml', '--device', 'sim', '-o', '{{out}}/sim']\n\
         documents = []\n[[part.record]]\nspecs = ['small']\nmade = 'sim/{{spec}}'\nkept = '*-sim/{{spec}}'\nkey = ['arm', 'options']\n\
         figures = ['summary/allocator_stats/{PEAK}', 'result/none']\n"
    );
    test_dir.write("parts.toml", parts);
    let rows = |out: &str| test_dir.run(&["campaign", "--file", "parts.toml", "--json", "-o", out]).ok().rows();
    test_dir.write("small.toml", SMALL);
    assert!(rows("first").is_empty(), "nothing is kept yet");
    let page = |out: &str| test_dir.run(&["campaign", "--file", "parts.toml", "-o", out]).ok().stdout;
    assert!(page("first").contains("no kept record of sim/small"));
    fs::create_dir_all(test_dir.at("experiments/results")).unwrap();
    for label in ["2026-01-01-sim", "2026-01-02-sim"] {
        let archive = format!("experiments/results/{label}.tar.xz");
        test_dir.run(&["pack", "first/sim", "-o", &archive]).ok();
        test_dir.write("small.toml", SMALL.replace("[5, 9]", "[5, 12]"));
        test_dir.run(&["run", "small.toml", "--device", "sim", "--again", "-o", "first/sim"]).ok();
    }
    // The newest has widths 5 and 12.
    let again = rows("second");
    assert_eq!(again.len(), 4, "a row for each cell, whatever the repeats: {again:?}");
    assert!(again.iter().all(|row| row["ratio"] == 1.0 && row["part"] == "small"), "{again:?}");
    // The new record has twice the value in one cell.
    for run in ["02-naive-12-r0", "03-naive-12-r1"] {
        let path = test_dir.at(&format!("second/sim/small/runs/{run}/summary.json"));
        let mut summary = json_at(&path);
        let peak = &mut summary["allocator_stats"][PEAK];
        *peak = json!(2 * peak.as_u64().unwrap());
        fs::write(&path, summary.to_string()).unwrap();
    }
    let changes = rows("second");
    let ratios: Vec<(bool, Option<f64>)> =
        changes.iter().map(|row| (row["figure"].as_str().unwrap().contains("naive"), row["ratio"].as_f64())).collect();
    assert_eq!(ratios, [(true, Some(2.0)), (false, Some(1.0)), (false, Some(1.0)), (true, Some(1.0))], "{changes:?}");
    let page = page("second");
    assert!(page.contains("small: 3 of 4 figures are as they were") && page.contains("2.000"), "{page}");
    assert!(page.contains("sim/small differs: no recorded cause"), "{page}");
    // A width that only one of the two has.
    test_dir.write("small.toml", SMALL.replace("[5, 9]", "[5, 7]"));
    let alone: Vec<Value> = rows("third").into_iter().filter(|row| row.get("ratio").is_none()).collect();
    assert_eq!(alone.len(), 4, "two cells of width 7 and two of width 12: {alone:?}");
    assert_eq!(alone.iter().filter(|row| row.get("kept").is_some()).count(), 2, "{alone:?}");
    assert!(alone.iter().all(|row| row["because"][0] == "the spec changed"), "{alone:?}");
    let plan = test_dir.run(&["campaign", "--file", "parts.toml", "-o", "third", "--plan", "--json"]).ok().rows();
    let kept = json!([{"path": "2026-01-02-sim/small"}]);
    assert_eq!((&plan[0]["kept"], &plan[0]["not_kept"]), (&kept, &json!([])), "{plan:?}");
}

/// The plan says what a kept record does not say of its making, and which parts have none.
#[test]
fn the_plan_names_what_kept_records_lack() {
    let test_dir = TestDir::new();
    let part = |name: &str| {
        format!(
            "[[part]]\nname = '{name}'\nneeds = ['gpu']\ncommand = ['true', '{{profile}}']\nprofile = '*/old/../profile.json'\n\
             documents = []\n[[part.record]]\nmade = '{name}.json'\nkept = '*/{name}.json'\nkey = ['arm']\nfigures = ['ms']\n"
        )
    };
    test_dir.write("parts.toml", part("kept") + &part("new"));
    fs::create_dir_all(test_dir.at("experiments/results/2026-01-01-h100/old")).unwrap();
    fs::create_dir_all(test_dir.at("experiments/results/2026-01-02-h200")).unwrap();
    test_dir.write("experiments/results/2026-01-01-h100/profile.json", "{}");
    test_dir.write("experiments/results/2026-01-02-h200/profile.json", "{}");
    let rows = json!([{"arm": "a", "ms": 1, "build": "0123abcd", "started_at": "2026-01-02T00:00:00Z"}]);
    test_dir.write("experiments/results/2026-01-02-h200/kept.json", rows.to_string());
    let plan = test_dir.run(&["campaign", "--file", "parts.toml", "--plan", "--json"]).ok().rows();
    let lacks = json!(["command", "clean", "driver", "host"]);
    assert_eq!(plan[0]["kept"], json!([{"path": "2026-01-02-h200/kept.json", "lacks": lacks}]));
    assert_eq!((&plan[1]["kept"], &plan[1]["not_kept"]), (&json!([]), &json!(["new.json"])));
    assert_eq!(plan[0]["command"][1], "experiments/results/2026-01-01-h100/old/../profile.json");
    let page = test_dir.run(&["campaign", "--file", "parts.toml", "--plan"]).ok().stdout;
    assert!(page.contains("no command, clean flag, driver, host: 2026-01-02-h200/kept.json"), "{page}");
    assert!(page.contains("Parts without a kept record\nnew"), "{page}");
}

/// A shell makes a part by the line that the plan prints.
#[cfg(unix)]
#[test]
fn the_plan_prints_commands_to_copy() {
    let test_dir = TestDir::new();
    test_dir.write(
        "parts.toml",
        "[[part]]\nname = 'a'\ncommand = ['printf', '%s', 'two words']\nstdout = 'a file'\ndocuments = []\n\
         [[part.record]]\nmade = 'a file'\nkept = 'none.json'\nkey = ['arm']\nfigures = ['ms']\n",
    );
    let page = test_dir.run(&["campaign", "--file", "parts.toml", "-o", "out", "--plan"]).ok().stdout;
    let line = page.lines().skip_while(|line| *line != "a:").nth(1).unwrap_or_else(|| panic!("{page}"));
    fs::create_dir_all(test_dir.at("out")).unwrap();
    Command::new("sh").args(["-c", line]).current_dir(&test_dir.0).assert().success();
    assert_eq!(fs::read_to_string(test_dir.at("out/a file")).unwrap(), "two words", "{line}");
}

/// A signal ends the command of the part and what it started, whatever group of processes got the signal; meanwhile no other
/// campaign may write to the directory.
#[cfg(unix)]
#[test]
fn a_signal_ends_a_part_and_all_that_it_started() {
    use rustix::process::{Pid, Signal, kill_process};
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let test_dir = TestDir::new();
        let text = "[[part]]\nname = 'a'\ncommand = ['sh', '-c', 'sleep 600 & echo $! > below; echo $$ > leader; wait']\n\
                    stdout = 'a.json'\ndocuments = []\n\
                    [[part.record]]\nmade = 'a.json'\nkept = 'none.json'\nkey = ['arm']\nfigures = ['ms']\n";
        test_dir.write("parts.toml", text);
        let campaign = ["campaign", "--file", "parts.toml", "-o", "out"];
        let child = test_dir.process(&campaign).stderr(std::process::Stdio::piped()).spawn().unwrap();
        let number = |name: &str| fs::read_to_string(test_dir.at(name)).ok()?.trim().parse::<i32>().ok();
        wait_for("the part", || number("leader").is_some());
        test_dir.run(&campaign).refused(2, &["another run is at work in"]);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = Ran::of(child.wait_with_output().unwrap());
        assert_eq!(output.code, Some(code), "{output:#?}");
        assert!(output.stderr.contains("error: interrupted in part a"), "{output:#?}");
        for name in ["leader", "below"] {
            let pid = number(name).unwrap();
            wait_for("its end", || is_over(pid));
        }
        assert_eq!(fs::read_dir(test_dir.at("out")).unwrap().count(), 0, "{signal:?}");
    }
}

/// Whether a process has ended. Its new parent may not have collected it.
#[cfg(unix)]
fn is_over(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}
