//! Runs that are forked from a process with the imports, and runs that take turns, over a substitute for PyTorch.

use crate::common::{Ran, TestDir, json_at, names};
use serde_json::Value;
use std::process::Command;

/// The server of the repository.
const SERVER: &str = include_str!("../../pytorch/programs/fork_server.py");

/// A substitute for PyTorch: each import leaves a line in a file.
const TORCH: &str = r#"
import os
with open(os.environ["IMPORTS"], "a") as file:
    file.write(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + "\n")
cuda = type("cuda", (), {"is_available": staticmethod(lambda: False)})
"#;

/// A program whose result is its environment. What it does follows from its first word; `dies` kills the process that it was
/// forked from, once.
const PROGRAM: &str = r#"
import json, os, signal, subprocess, sys, time
import torch
name, output = sys.argv[1], next(word for word in sys.argv if word.startswith("--output="))
with open(os.environ["STARTS"], "a") as file:
    file.write(name + "\n")
if name == "fails":
    sys.exit("error: it has no luck")
if name in ("hangs", "waits"):
    processes = [os.getpid()] + [subprocess.Popen(["sleep", "600"]).pid] * (name == "hangs")
    with open(os.environ["STARTS"] + ".hangs", "a") as file:
        file.write(" ".join(map(str, processes)) + "\n")
    time.sleep(600)
if name == "dies" and not os.path.exists(os.environ["STARTS"] + ".died"):
    open(os.environ["STARTS"] + ".died", "w").close()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
turns = []
if name == "turns":
    print("ready", flush=True)
    for line in sys.stdin:
        turns.append(int(line))
        with open(os.environ["STARTS"] + ".turns", "a") as file:
            file.write(f"{os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')} {line}")
        if len(turns) == 2 and os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == "leaves":
            sys.exit("error: it had enough")
        print("done", flush=True)
found = {"words": sys.argv[1:], "alloc": os.environ.get("VRAMLAB_ALLOC"), "parent": os.getppid(), "turns": turns,
         "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), "ms": 2.0, "oom": None}
with open(output.partition("=")[2], "w") as file:
    json.dump(found, file)
"#;

/// A directory with the programs, and a spec with these lines.
fn test_dir(spec: &str) -> TestDir {
    let test_dir = TestDir::new();
    let programs = "experiments/pytorch/programs";
    for folder in [programs, "torch", "vramlab"] {
        std::fs::create_dir_all(test_dir.at(folder)).unwrap();
    }
    test_dir.write(&format!("{programs}/fork_server.py"), SERVER);
    test_dir.write(&format!("{programs}/programs.py"), PROGRAM);
    test_dir.write("torch/__init__.py", TORCH);
    test_dir.write("torch/_dynamo.py", "");
    test_dir.write("vramlab/__init__.py", "");
    test_dir.write("vramlab/_start.py", "import sys\nassert 'torch' in sys.modules\n");
    let text = format!("name = \"small\"\nquestion = \"?\"\nrepeats = 1\ndevices = [\"sim\"]\nkeep = []\n{spec}");
    test_dir.write("small.toml", text);
    test_dir
}

fn arm(name: &str, options: &str, matrix: &str) -> String {
    format!(
        "[[arms]]\nname = \"{name}\"\nprogram = \"inside\"\ndevices = [\"sim\"]\noptions = {{ {options} }}\nmatrix = {{ {matrix} }}\n"
    )
}

fn command(test_dir: &TestDir, more: &[&str]) -> Command {
    let mut command = test_dir.process(&[&["run", "small.toml", "--device", "sim", "-o", "out"], more].concat());
    command.env("PYTHONPATH", test_dir.at(".")).env("PYTHON", "python3").env_remove("VRAMLAB_ALLOC");
    command.env("IMPORTS", test_dir.at("imports")).env("STARTS", test_dir.at("starts"));
    command
}

fn run(test_dir: &TestDir, more: &[&str]) -> Ran {
    Ran::of(command(test_dir, more).output().unwrap())
}

/// The lines of a file, none if it is missing.
fn lines(test_dir: &TestDir, name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(test_dir.at(name)).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn file(test_dir: &TestDir, run: &str, name: &str) -> Value {
    json_at(&test_dir.at("out/small/runs").join(run).join(name))
}

/// Whether a process has ended.
fn is_over(process: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_none_or(|state| state.is_empty() || state.starts_with('Z'))
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn forked_runs_share_the_imports_of_their_environment() {
    let arms = [arm("all", "steps = 3", "program = [\"a\", \"b\"], alloc = [\"native\", \"caching\", \"expandable\"]")];
    let test_dir = test_dir(&format!("fork = true\n{}", arms.concat()));
    run(&test_dir, &[]).ok();
    let mut imports = lines(&test_dir, "imports");
    imports.sort();
    // The first is the runner's, which asks for PyTorch once.
    assert_eq!(imports, ["", "", "expandable_segments:True"]);
    let results = names(&test_dir.at("out/small/runs")).into_iter().map(|id| file(&test_dir, &id, "result.json"));
    let results: Vec<Value> = results.collect();
    assert_eq!(results[0]["words"], serde_json::json!(["a", "--steps=3", "--device=cpu", "--output=result.json"]));
    let of = |key: &str| results[..3].iter().map(|result| result[key].as_str()).collect::<Vec<_>>();
    assert_eq!(
        (of("alloc"), of("conf")),
        (vec![None, Some("caching"), None], vec![None, None, Some("expandable_segments:True")])
    );
    assert_eq!((&results[0]["parent"], &results[0]["parent"]), (&results[1]["parent"], &results[3]["parent"]));
    assert_ne!(results[0]["parent"], results[2]["parent"]);
    let record = file(&test_dir, "01-all-a-caching-r0", "run.json");
    assert_eq!((&record["exit_code"], &record["command"][0]), (&0.into(), &"VRAMLAB_ALLOC=caching".into()));
    // Nothing is left to do, and nothing is imported again.
    run(&test_dir, &[]).ok();
    assert_eq!(lines(&test_dir, "starts").len(), 6);
    assert_eq!(lines(&test_dir, "imports").len(), 3);
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn pytorch_is_looked_for_once_for_all_specs() {
    let test_dir = test_dir(&format!("fork = true\n{}", arm("all", "", "program = [\"a\"]")));
    let text = std::fs::read_to_string(test_dir.at("small.toml")).unwrap();
    test_dir.write("other.toml", text.replace("name = \"small\"", "name = \"other\""));
    run(&test_dir, &["other.toml"]).ok();
    assert_eq!(lines(&test_dir, "imports").len(), 3, "one by the runner, and one by the server of each spec");
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn a_forked_run_that_fails_or_hangs_costs_no_other() {
    let test_dir = test_dir(&format!(
        "fork = true\ntimeout_s = 10\n{}",
        arm("all", "", "program = [\"fails\", \"hangs\", \"a\"]")
    ));
    let outcome = run(&test_dir, &["--jobs", "3"]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    let error = |id: &str| file(&test_dir, id, "run.json")["error"].to_string();
    assert_eq!(error("00-all-fails-r0"), "\"it has no luck\"");
    assert_eq!(error("01-all-hangs-r0"), "\"it was ended after 10 s, its timeout_s\"");
    assert_eq!(file(&test_dir, "00-all-fails-r0", "run.json")["exit_code"], 1);
    assert_eq!(file(&test_dir, "02-all-a-r0", "run.json")["status"], "done");
    let processes = lines(&test_dir, "starts.hangs").join(" ");
    assert_eq!(processes.split(' ').count(), 2);
    crate::common::wait_for("its processes to end", || processes.split(' ').all(is_over));
    // The next call makes only what failed.
    run(&test_dir, &[]);
    assert_eq!(lines(&test_dir, "starts").iter().filter(|name| *name == "a").count(), 1);
}

const COMMANDS: &str = r#"
[told]
command = ["{python}", "{experiments}/told.py", "{host-alloc}", "{repeat}"]
json = "told"
results = ["loss"]
[shell]
command = ["sh", "-c", "true"]
"#;

/// Prints its words between other lines, and its loss.
const TOLD: &str = r#"
import json, os, sys
print("a line")
print("a note", file=sys.stderr)
print(json.dumps({"told": sys.argv[1:], "parent": os.getppid(), "loss": "2" if sys.argv[1] == "host-cupy" else "1"}))
"#;

fn commands(options: &str, matrix: &str) -> TestDir {
    let arm = arm("all", options, matrix).replace("\"inside\"", "\"command\"");
    let test_dir = test_dir(&format!("fork = true\n{arm}"));
    test_dir.write("experiments/commands.toml", COMMANDS);
    test_dir.write("experiments/told.py", TOLD);
    test_dir
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn a_forked_command_has_its_repeat_and_is_compared_with_pytorchs_own_allocator() {
    let hosts = "host-alloc = [\"pytorch\", \"host-exact\", \"host-cupy\"]";
    let test_dir = commands("program = \"told\"", hosts);
    let text = std::fs::read_to_string(test_dir.at("small.toml")).unwrap();
    test_dir.write("small.toml", text.replace("repeats = 1", "repeats = 2"));
    let output = run(&test_dir, &[]).ok();
    let ids = names(&test_dir.at("out/small/runs"));
    let told: Vec<Value> = ids.iter().map(|id| file(&test_dir, id, "result.json")["lines"][0].clone()).collect();
    let words = |at: usize| told[at]["told"].clone();
    assert_eq!(words(0), serde_json::json!(["pytorch", "0"]));
    assert_eq!(words(3), serde_json::json!(["host-exact", "1"]));
    assert!(told.iter().all(|line| line["parent"] == told[0]["parent"]), "one process has the imports: {told:?}");
    let differing = "note: results of told differ from its unchanged runs': all host-cupy r0 by inf, all host-cupy r1";
    assert!(output.stderr.contains(differing), "{output:?}");
    assert_eq!(
        file(&test_dir, &ids[0], "run.json")["command"],
        serde_json::json!(["python3", "experiments/told.py", "pytorch", "0"])
    );
}

#[test]
fn a_command_that_cannot_be_forked_or_has_no_such_allocator_is_refused() {
    for (options, words) in [
        ("program = \"shell\"", "shell does not begin with {python}, so it cannot be forked"),
        ("program = \"told\"", "told needs the option 'host-alloc'"),
        ("program = \"shell\", host-alloc = \"host-exact\"", "shell has not the option 'host-alloc'"),
        ("program = \"told\", host-alloc = \"host-exac\"", "did you mean 'host-exact'?"),
        ("program = \"told\", host-alloc = \"caching\"", "caching"),
        ("program = \"told\", host-alloc = \"host-exact,host-cupy\"", "host-alloc must be one allocator"),
        ("program = \"told\", host-alloc = \"pytorch\", way = \"record\"", "a forked command runs as it is"),
    ] {
        let output = run(&commands(options, ""), &["--dry-run"]);
        assert_eq!(output.code, Some(2), "{options}: {output:?}");
        assert!(output.stderr.contains("small.toml:") && output.stderr.contains(words), "{options}: {output:?}");
    }
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn a_server_that_dies_costs_its_run_and_is_started_again() {
    let test_dir = test_dir(&format!("fork = true\n{}", arm("all", "", "program = [\"dies\", \"a\", \"b\"]")));
    let outcome = run(&test_dir, &[]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    let message = "small/00-all-dies-r0: the process that it was forked from has ended, and with it this run";
    assert!(outcome.stderr.contains(message), "{outcome:?}");
    assert_eq!(outcome.stderr.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{outcome:?}");
    for id in ["01-all-a-r0", "02-all-b-r0"] {
        assert_eq!(file(&test_dir, id, "run.json")["status"], "done");
    }
    run(&test_dir, &[]).ok();
    assert_eq!(lines(&test_dir, "starts").len(), 4);
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn a_server_that_does_not_start_is_one_line() {
    let test_dir = test_dir(&format!("fork = true\n{}", arm("all", "", "program = [\"a\"]")));
    test_dir.write("torch/_dynamo.py", "raise ImportError('no libcuda')\n");
    let outcome = run(&test_dir, &[]);
    outcome.refused(1, &["the process from which runs are forked ended with exit status: 1: ImportError: no libcuda"]);
    assert!(!test_dir.at("out/small/runs/00-all-a-r0").exists());
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "needs python3; run with --ignored"]
fn a_killed_runner_takes_its_forked_runs_along() {
    let test_dir = test_dir(&format!("fork = true\n{}", arm("all", "", "program = [\"waits\"]")));
    let mut runner = command(&test_dir, &[]).stderr(std::process::Stdio::null()).spawn().unwrap();
    crate::common::wait_for("the run to start", || lines(&test_dir, "starts.hangs").len() == 1);
    let processes = lines(&test_dir, "starts.hangs").join(" ");
    runner.kill().unwrap();
    runner.wait().unwrap();
    crate::common::wait_for("its run to end", || is_over(&processes));
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn the_runs_of_a_repeat_take_turns() {
    let turns = "turns = { rounds = 3, requests = [10, 20] }\n";
    let arms = arm("all", "", "program = [\"turns\"], conf = [\"one\", \"two\", \"three\"]");
    let test_dir = test_dir(&format!("{turns}{arms}"));
    run(&test_dir, &[]).ok();
    let ids = names(&test_dir.at("out/small/runs"));
    assert_eq!(ids.len(), 3);
    for id in &ids {
        assert_eq!(file(&test_dir, id, "result.json")["turns"], serde_json::json!([10, 20, 10, 20, 10, 20]));
    }
    // Each process has one turn for each request.
    let taken = lines(&test_dir, "starts.turns");
    assert_eq!(taken.len(), 18);
    for turn in taken.chunks(3) {
        let mut confs: Vec<&str> = turn.iter().map(|line| line.split(' ').next().unwrap()).collect();
        confs.sort_unstable();
        assert_eq!(confs, ["one", "three", "two"]);
    }
    // A repeat that lacks a run is made anew, as its runs are compared with each other.
    std::fs::remove_dir_all(test_dir.at("out/small/runs").join(&ids[0])).unwrap();
    run(&test_dir, &[]).ok();
    assert_eq!(lines(&test_dir, "starts").len(), 6);
    run(&test_dir, &[]).ok();
    assert_eq!(lines(&test_dir, "starts").len(), 6);
}

#[test]
#[ignore = "needs python3; run with --ignored"]
fn a_process_that_ends_loses_only_its_own_turns() {
    let turns = "turns = { rounds = 2, requests = [1, 2] }\n";
    let matrix = "program = [\"turns\"], conf = [\"stays\", \"leaves\"]";
    let test_dir = test_dir(&format!("{turns}{}", arm("all", "", matrix)));
    let outcome = run(&test_dir, &[]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert_eq!(file(&test_dir, "00-all-turns-stays-r0", "result.json")["turns"], serde_json::json!([1, 2, 1, 2]));
    assert_eq!(file(&test_dir, "01-all-turns-leaves-r0", "run.json")["error"], "it had enough");
}

#[test]
fn forks_and_turns_are_refused_where_they_do_nothing() {
    for (spec, words) in [
        ("fork = true\n", "'fork' is for specs whose arms all run 'inside' or 'command'"),
        ("turns = { rounds = 1, requests = [1] }\n", "'turns' is for specs whose arms all run 'inside'"),
        ("timeout_s = 0\n", "timeout_s is at least 1"),
    ] {
        let test_dir = test_dir(&format!("{spec}[[arms]]\nname = \"a\"\n"));
        run(&test_dir, &[]).refused(2, &["small.toml:6", words]);
    }
    let inside = arm("all", "", "program = [\"a\"]");
    for (spec, words) in [
        ("fork = true\nturns = { rounds = 1, requests = [1] }\n", "keep one of 'fork' and 'turns'"),
        ("turns = { rounds = 0, requests = [1] }\n", "at least one round and one request"),
        ("turns = { rounds = 1, requests = [] }\n", "at least one round and one request"),
    ] {
        run(&test_dir(&format!("{spec}{inside}")), &[]).refused(2, &["small.toml:6", words]);
    }
    let table = format!("\n[turns]\nrounds = 0\nrequests = [1]\n{inside}");
    run(&test_dir(&table), &[]).refused(2, &["small.toml:7", "at least one round"]);
    let sharded = test_dir(&format!("turns = {{ rounds = 1, requests = [1] }}\n{inside}"));
    run(&sharded, &["--shard", "1/2"]).refused(2, &["--shard: the runs of small take turns"]);
    let twice = test_dir(&arm("all", "alloc = \"expandable\", conf = \"x:1\"", "program = [\"a\"]"));
    run(&twice, &[]).refused(2, &["alloc = \"expandable\" sets conf; leave conf out"]);
}
