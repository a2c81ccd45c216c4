//! Several runners, parallel runs, and their endings.

use crate::common::{HANGS, IDS, Ran, SMALL, TestDir, json_at, names, run, runs};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

#[test]
fn a_killed_runner_goes_on_where_it_was() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL.replace("hidden = [5, 9]", "hidden = [5, 9]\nseed = [1, 2, 3, 4, 5]"));
    let arguments = ["run", "small.toml", "--device", "sim", "-o", "out"];
    let mut child = test_dir.process(&arguments).stdout(std::process::Stdio::null()).spawn().unwrap();
    let folder = test_dir.at("out/small/runs");
    let complete = || {
        let names = if folder.is_dir() { names(&folder) } else { Vec::new() };
        names.into_iter().filter(|name| !name.starts_with('.')).count()
    };
    let begun = Instant::now();
    while complete() < 3 {
        assert!(begun.elapsed() < HANGS, "it should have done three runs");
        assert!(child.try_wait().unwrap().is_none(), "it should be running");
        std::thread::sleep(Duration::from_millis(1));
    }
    // SIGKILL: the runner cannot clean up.
    child.kill().unwrap();
    child.wait().unwrap();
    let before: BTreeMap<String, String> = names(&folder)
        .into_iter()
        .filter(|name| !name.starts_with('.'))
        .map(|name| (name.clone(), std::fs::read_to_string(folder.join(name).join("run.json")).unwrap()))
        .collect();
    assert!((3..40).contains(&before.len()), "{}", before.len());
    test_dir.run(&arguments).ok();
    let after = runs(&test_dir, "out");
    assert_eq!(after.len(), 40, "nothing is lost, nothing half-written is left");
    for (id, text) in before {
        assert_eq!(after[&id], text, "{id} should not be repeated");
    }
}

/// The last line that a killed program printed is not why it ended.
#[cfg(target_os = "linux")]
#[test]
fn a_run_that_a_signal_ended_says_so() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL.replace("epochs = 2", "epochs = 50000").replace("[5, 9]", "[5]"));
    let mut runner = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out", "--shard", "1/4"]);
    let mut runner = runner.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let tasks = std::path::PathBuf::from(format!("/proc/{}/task", runner.id()));
    let child = || {
        names(&tasks).iter().find_map(|task| {
            let children = std::fs::read_to_string(tasks.join(task).join("children")).unwrap_or_default();
            children.split_whitespace().next().map(str::to_owned)
        })
    };
    let part = test_dir.at("out/small/runs/.00-naive-5-r0.part/stderr.txt");
    until("it should train", || std::fs::metadata(&part).is_ok_and(|file| file.len() > 0));
    let child = child().unwrap();
    assert!(std::process::Command::new("kill").args(["-9", &child]).status().unwrap().success());
    assert_eq!(runner.wait().unwrap().code(), Some(1));
    let record = json_at(&test_dir.at("out/small/runs/00-naive-5-r0/run.json"));
    let error = record["error"].as_str().unwrap();
    assert!(error.starts_with("it ended with signal: 9 (SIGKILL); its last line: "), "{error}");
    assert_eq!(record["exit_code"], json!(null));
}

#[test]
fn shards_put_together_are_the_whole() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    for (shard, out) in [("1/2", "a"), ("2/2", "b")] {
        test_dir.run(&["run", "small.toml", "--device", "sim", "--shard", shard, "-o", out]).ok();
    }
    let (first, second) = (runs(&test_dir, "a"), runs(&test_dir, "b"));
    assert_eq!((first.len(), second.len()), (4, 4));
    for id in second.keys() {
        std::fs::rename(test_dir.at("b/small/runs").join(id), test_dir.at("a/small/runs").join(id)).unwrap();
    }
    assert_eq!(runs(&test_dir, "a").keys().collect::<Vec<_>>(), IDS);
    let merged = test_dir.run(&["run", "small.toml", "--device", "sim", "-o", "a", "--json"]).ok();
    let completed: Vec<u64> = merged.rows().iter().map(|cell| cell["done"].as_u64().unwrap()).collect();
    assert_eq!(completed, [2, 2, 2, 2]);
    let mut together = first;
    together.extend(second);
    assert_eq!(runs(&test_dir, "a"), together, "there was nothing left to do");
}

#[test]
fn of_runners_that_begin_at_once_one_works() {
    use std::process::Stdio;
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL.replace("epochs = 2", "epochs = 200"));
    let start = || {
        let mut runner = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
        runner.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let runners: Vec<_> = (0..6).map(|_| start()).collect();
    let outputs = runners.into_iter().map(|runner| Ran::of(runner.wait_with_output().unwrap()));
    let (completed, refused): (Vec<Ran>, Vec<Ran>) = outputs.partition(|output| output.code == Some(0));
    // One that starts after the first has ended finds all runs complete.
    assert!(!completed.is_empty());
    refused.iter().for_each(|output| output.refused(2, &["another run is at work in", "out/small", "with -o"]));
    let runs = runs(&test_dir, "out");
    assert_eq!(runs.keys().collect::<Vec<_>>(), IDS);
    for text in runs.values() {
        assert_eq!(serde_json::from_str::<Value>(text).unwrap()["status"], "done");
    }
}

#[test]
fn a_second_runner_leaves_the_first_alone() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL.replace("epochs = 2", "epochs = 50000"));
    let mut first = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
    let mut first = first.stderr(std::process::Stdio::null()).stdout(std::process::Stdio::null()).spawn().unwrap();
    let (folder, begun) = (test_dir.at("out/small/runs"), Instant::now());
    let unfinished = || if folder.is_dir() { names(&folder) } else { Vec::new() };
    while unfinished().is_empty() {
        assert!(begun.elapsed() < HANGS, "it should have begun a run");
        std::thread::sleep(Duration::from_millis(5));
    }
    let before = unfinished();
    for more in [&[][..], &["--again"], &["--shard", "2/2"]] {
        run(&test_dir, more).refused(2, &["another run is at work in", "out/small", "with -o"]);
    }
    assert_eq!(before.len(), 1);
    assert_eq!(unfinished(), before, "nothing of the first is gone");
    assert!(first.try_wait().unwrap().is_none(), "it is still at work");
    // A dry run is allowed, and so is another experiment next to it.
    run(&test_dir, &["--dry-run"]).ok();
    test_dir.write("other.toml", SMALL.replace("\"small\"", "\"other\""));
    test_dir.run(&["run", "other.toml", "--device", "sim", "-o", "out"]).ok();
    // A killed runner leaves its lock file, but no lock.
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(test_dir.at("out/.small.lock").exists());
    test_dir.write("small.toml", SMALL);
    run(&test_dir, &["--again"]).ok();
    assert_eq!(runs(&test_dir, "out").len(), 8);
    assert_eq!(names(&test_dir.at("out")), ["other", "small"]);
}

/// Waits until a condition is true.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < HANGS, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A runner in the background, with captured output.
fn start(test_dir: &TestDir, more: &[&str]) -> std::process::Child {
    let mut command = test_dir.process(&[&["run", "small.toml", "--device", "sim", "-o", "out"], more].concat());
    command.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap()
}

/// Runs that are being written, and complete ones.
fn begun_and_whole(test_dir: &TestDir) -> (Vec<String>, Vec<String>) {
    let folder = test_dir.at("out/small/runs");
    let names = if folder.is_dir() { names(&folder) } else { Vec::new() };
    names.into_iter().partition(|name| name.starts_with('.'))
}

fn status(test_dir: &TestDir) -> Value {
    test_dir.run(&["status", "out", "--json"]).rows().remove(0)
}

/// The last two lines of a program: its result, and the next command without the program's name, which depends on how
/// it is run.
fn closing(text: &str) -> [&str; 2] {
    let lines: Vec<&str> = text.lines().rev().take(2).collect();
    let next = lines[0].strip_prefix("Next: ").unwrap();
    [lines[1], next.rsplit_once("experiments ").map_or(next, |(_, rest)| rest.trim_start_matches("-- "))]
}

fn counts(of: &Value) -> [u64; 5] {
    ["done", "running", "failed", "skipped", "left"].map(|key| of[key].as_u64().unwrap())
}

#[test]
fn four_shards_in_one_folder_do_the_plan_once() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL.replace("hidden = [5, 9]", "hidden = [5, 9]\nseed = [1, 2, 3, 4, 5]"));
    let shards = ["1/4", "2/4", "3/4", "4/4"];
    let mut at_work: Vec<std::process::Child> =
        shards.iter().map(|shard| start(&test_dir, &["--shard", shard])).collect();
    // The second is killed between its first run and its last.
    let mine = |id: &str, shard: usize| id[..2].parse::<usize>().unwrap() % 4 == shard - 1;
    let of_second = || begun_and_whole(&test_dir).1.into_iter().filter(|id| mine(id, 2)).collect::<Vec<String>>();
    until("the second shard should have done two runs", || of_second().len() >= 2);
    // SIGKILL: the runner cannot clean up.
    at_work[1].kill().unwrap();
    let killed = at_work.remove(1).wait_with_output().unwrap();
    assert_eq!(killed.status.code(), None, "it should have been at work still");
    let before: Vec<(String, String)> = of_second()
        .into_iter()
        .map(|id| {
            (id.clone(), std::fs::read_to_string(test_dir.at("out/small/runs").join(id).join("run.json")).unwrap())
        })
        .collect();
    let report = status(&test_dir);
    let second = report["runners"].as_array().unwrap().iter().find(|part| part["shard"] == "2/4").unwrap();
    assert_eq!((&second["runner"], &second["planned"], &second["running"]), (&json!("stale"), &json!(10), &json!(0)));
    at_work.push(start(&test_dir, &["--shard", "2/4"]));
    for child in at_work {
        Ran::of(child.wait_with_output().unwrap()).ok();
    }
    let records = runs(&test_dir, "out");
    let planned = json_at(&test_dir.at("out/small/experiment.json"));
    let planned: Vec<&str> =
        planned["runs"].as_array().unwrap().iter().map(|run| run["id"].as_str().unwrap()).collect();
    assert_eq!(records.keys().collect::<Vec<_>>(), planned, "none is lost, nothing half-written is left");
    for (index, text) in records.values().enumerate() {
        let record: Value = serde_json::from_str(text).unwrap();
        assert_eq!((&record["status"], &record["jobs"]), (&json!("done"), &json!(1)));
        assert_eq!(record["shard"], format!("{}/4", index % 4 + 1), "each run is its shard's");
    }
    for (id, text) in before {
        assert_eq!(records[&id], text, "{id} should not be repeated");
    }
    assert_eq!(names(&test_dir.at("out")), ["small"], "no lock is left");
    assert_eq!(counts(&status(&test_dir)), [40, 0, 0, 0, 0]);
}

#[cfg(unix)]
#[test]
fn the_jobs_of_an_array_share_a_folder() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../slurm.sbatch");
    let job = |variables: &[(&str, String)]| {
        let runner = test_dir.process(&[]);
        let mut shell = std::process::Command::new("bash");
        shell.arg(&script).args(["small.toml", "out", "--json"]).current_dir(test_dir.at("."));
        shell.env("EXPERIMENTS", runner.get_program()).env("DEVICE", "sim").env_remove("SHARDS");
        // As Slurm sets them; without the variables of a job that the tests themselves may run under.
        for name in ["JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "ARRAY_TASK_COUNT", "ARRAY_TASK_MIN", "ARRAY_TASK_STEP"]
        {
            shell.env_remove(format!("SLURM_{name}"));
        }
        shell.envs(variables.iter().map(|(name, value)| (*name, value.as_str())));
        shell.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let finish = |child: std::process::Child| Ran::of(child.wait_with_output().unwrap()).ok();
    // `--array=10-14:2`: three jobs.
    let of_array = |task: u32| {
        let number = |text: &str| text.to_owned();
        [
            ("SLURM_JOB_ID", (100 + task).to_string()),
            ("SLURM_ARRAY_JOB_ID", number("100")),
            ("SLURM_ARRAY_TASK_ID", task.to_string()),
            ("SLURM_ARRAY_TASK_COUNT", number("3")),
            ("SLURM_ARRAY_TASK_MIN", number("10")),
            ("SLURM_ARRAY_TASK_STEP", number("2")),
        ]
    };
    let jobs = [10, 12, 14].map(|task| job(&of_array(task)));
    jobs.into_iter().for_each(|child| drop(finish(child)));
    let records = runs(&test_dir, "out");
    assert_eq!(records.keys().collect::<Vec<_>>(), IDS);
    for (index, text) in records.values().enumerate() {
        let record: Value = serde_json::from_str(text).unwrap();
        let task = 10 + 2 * (index % 3);
        let expected = json!({"id": (100 + task).to_string(), "array_id": "100", "array_task": task.to_string()});
        assert_eq!(
            (&record["shard"], &record["provenance"]["job"]),
            (&json!(format!("{}/3", index % 3 + 1)), &expected)
        );
    }
    // One of four by itself, and a job outside an array.
    std::fs::remove_dir_all(test_dir.at("out")).unwrap();
    finish(job(&[("SLURM_ARRAY_TASK_ID", "2".into()), ("SLURM_ARRAY_TASK_MIN", "2".into()), ("SHARDS", "4".into())]));
    assert_eq!(runs(&test_dir, "out").into_keys().collect::<Vec<_>>(), [IDS[2], IDS[6]]);
    finish(job(&[]));
    assert_eq!(runs(&test_dir, "out").into_keys().collect::<Vec<_>>(), IDS);
}

#[test]
fn shards_share_a_folder_only_with_shards_of_their_number() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL.replace("epochs = 2", "epochs = 50000"));
    let mut first = start(&test_dir, &["--shard", "2/8"]);
    until("it should have begun a run", || !begun_and_whole(&test_dir).0.is_empty());
    for (more, words) in [
        (&["--shard", "2/8"][..], "on the same shard 2/8;"),
        (&["--shard", "2/4"], "not by 4;"),
        (&[], "on shard 2/8;"),
        (&["--again"], "on shard 2/8;"),
    ] {
        run(&test_dir, more).refused(2, &["another run is at work in", "out/small", words]);
    }
    // Its run is in progress, its lock names the runner, and the others have no runner.
    let report = status(&test_dir);
    assert_eq!(counts(&report), [0, 1, 0, 0, 7]);
    assert_eq!(
        (&report["experiment"], &report["device"], &report["locks"]),
        (&json!("small"), &json!("sim"), &json!(true))
    );
    let runners = report["runners"].as_array().unwrap();
    assert_eq!((runners.len(), &runners[1]["runner"], &runners[0]["runner"]), (8, &json!("running"), &json!("none")));
    assert_eq!(runners[1]["holder"]["process"], first.id());
    assert_eq!((&report["runs"][1]["state"], &report["runs"][0]["state"]), (&json!("running"), &json!("left")));
    let text = test_dir.run(&["status", "out/small"]).ok().stdout;
    assert_eq!(
        closing(&text),
        ["0 of 8 runs are done, 1 running, 7 left.", "run path/to/small.toml --device sim -o out --shard 1/8"]
    );
    first.kill().unwrap();
    first.wait().unwrap();
    // Its current run is stale, and its other runs remain.
    let report = status(&test_dir);
    assert_eq!(counts(&report), [0, 0, 0, 0, 8]);
    assert_eq!((&report["runners"][1]["runner"], &report["runs"][1]["stale"]), (&json!("stale"), &json!(true)));
    let text = test_dir.run(&["status", "out/small"]).ok().stdout;
    assert!(text.contains("stale: small/01-naive-5-r1 was begun by a runner that is gone"), "{text}");
    assert!(text.contains("stale: it was killed"), "{text}");
}

#[test]
fn status_tells_what_failed_and_refuses_what_is_no_experiment() {
    let test_dir = TestDir::new();
    let spec = SMALL.replace("hidden = [5, 9]", "hidden = [5, 900]\nmemory-limit = [\"40K\"]");
    test_dir.write("small.toml", spec.replace(", \"caching\"", ""));
    assert_eq!(run(&test_dir, &[]).code, Some(1));
    let report = status(&test_dir);
    assert_eq!(counts(&report), [2, 0, 2, 0, 0]);
    assert!(report["runs"][2]["error"].as_str().unwrap().contains("out of memory"), "{report}");
    let text = test_dir.run(&["status", "out"]).ok().stdout;
    assert!(text.contains("failed: small/02-naive-900-40k-r0: "), "{text}");
    assert_eq!(closing(&text), ["2 of 4 runs are done, 2 failed.", "run path/to/small.toml --device sim -o out"]);
    test_dir.run(&["status", "nowhere"]).refused(2, &["cannot read nowhere"]);
    test_dir.run(&["status", "."]).refused(2, &[". has no experiment.json", "--out"]);
    // Ids that lead to other directories are refused.
    let path = test_dir.at("out/small/experiment.json");
    let text = std::fs::read_to_string(&path).unwrap();
    for id in ["../../secret", "", ".hidden", "a/b"] {
        std::fs::write(&path, text.replace("00-naive-5-40k-r0", id)).unwrap();
        test_dir.run(&["status", "out"]).refused(2, &["experiment.json: the run 0 has no id"]);
    }
}

#[test]
fn parallel_simulated_runs_equal_sequential_ones() {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SMALL);
    let alone = test_dir.run(&["run", "small.toml", "--device", "sim", "-o", "alone", "--json"]).ok();
    let together = test_dir.run(&["run", "small.toml", "--device", "sim", "-o", "out", "--jobs", "3", "--json"]).ok();
    assert_eq!(together.stdout, alone.stdout);
    for (id, text) in runs(&test_dir, "out") {
        let (folder, other) = (test_dir.at("out/small/runs").join(&id), test_dir.at("alone/small/runs").join(&id));
        assert_eq!(std::fs::read(folder.join("steps.csv")).unwrap(), std::fs::read(other.join("steps.csv")).unwrap());
        let (one, other) = (json_at(&folder.join("summary.json")), json_at(&other.join("summary.json")));
        assert_eq!((&one["epochs"], &one["allocator_stats"]), (&other["epochs"], &other["allocator_stats"]));
        let record: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&record["jobs"], record["shard"].is_null()), (&json!(3), true));
    }
    let output = run(&test_dir, &["--jobs", "2"]).ok();
    let expected = ["8 of 8 runs of small are done; the records are in out/small.", "vramlab report out/small"];
    assert_eq!(closing(&output.stdout), expected, "{output:#?}");
    // A GPU runs one process at a time.
    let cuda = ["run", "small.toml", "--device", "cuda", "-o", "cuda", "--jobs", "2"];
    test_dir.run(&cuda).refused(2, &["--jobs on a GPU is for specs with concurrent = true"]);
    assert!(!test_dir.at("cuda").exists());
    // Failures are reported in the order of the plan, however many runs are parallel.
    let spec = SMALL.replace("hidden = [5, 9]", "hidden = [5, 900]\nmemory-limit = [\"40K\"]");
    test_dir.write("small.toml", spec);
    let errors = ["1", "4"].map(|jobs| run(&test_dir, &["--again", "--jobs", jobs]).stderr);
    assert!(errors[0].contains("6 runs failed; small/0"), "{}", errors[0]);
    assert_eq!(errors[0], errors[1]);
}

#[cfg(target_os = "linux")]
mod ends {
    use super::*;
    use rustix::process::{Pid, Signal, kill_process};
    use std::process::{Child, Command, Stdio};

    fn send(signal: Signal, to: u32) {
        kill_process(Pid::from_raw(to.try_into().unwrap()).unwrap(), signal).unwrap();
    }

    /// State and parent of a process; `None` if it does not exist.
    fn look(process: u32) -> Option<(char, u32)> {
        let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The process name, in brackets, may contain anything.
        let mut fields = text.rsplit_once(") ")?.1.split(' ');
        Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
    }

    /// Whether a process does not exist, or has ended and was not collected yet.
    fn is_over(process: u32) -> bool {
        look(process).is_none_or(|(state, _)| state == 'Z')
    }

    /// The children of a process.
    fn children(process: u32) -> Vec<u32> {
        let all = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
        let numbers = all.filter_map(|name| name.to_str()?.parse::<u32>().ok());
        numbers.filter(|number| look(*number).is_some_and(|(_, parent)| parent == process)).collect()
    }

    /// A runner with some runs of a long experiment in progress, and the processes of these.
    fn long(test_dir: &TestDir, more: &[&str], runs: usize) -> (Child, Vec<u32>) {
        test_dir.write("small.toml", SMALL.replace("epochs = 2", "epochs = 50000"));
        let child = start(test_dir, more);
        until("it should have begun its runs", || {
            begun_and_whole(test_dir).0.len() == runs && children(child.id()).len() == runs
        });
        let trainers = children(child.id());
        (child, trainers)
    }

    #[test]
    fn signals_end_the_runner_and_its_trainers_cleanly() {
        let signals = [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)];
        for (signal, code) in signals {
            for jobs in [1, 3] {
                let test_dir = TestDir::new();
                let (child, trainers) = long(&test_dir, &["--jobs", &jobs.to_string()], jobs);
                send(signal, child.id());
                let output = Ran::of(child.wait_with_output().unwrap());
                assert_eq!((output.code, output.stdout.as_str()), (Some(code), ""), "{signal:?} {output:#?}");
                let message = "error: interrupted in small; what was done is kept, the same command goes on";
                assert_eq!(output.stderr.lines().last(), Some(message), "{output:#?}");
                assert_eq!(begun_and_whole(&test_dir), (Vec::new(), Vec::new()), "{signal:?}");
                assert!(trainers.iter().all(|trainer| is_over(*trainer)), "{signal:?}");
                assert_eq!(names(&test_dir.at("out")), ["small"], "no lock is left");
            }
        }
    }

    /// Commands that wait for a process end it, and what it started, in any group of processes.
    #[test]
    fn signals_end_commands_that_wait_for_a_process() {
        let test_dir = TestDir::new();
        test_dir.write("small.toml", SMALL);
        test_dir.run(&["run", "small.toml", "--device", "sim", "-o", "known"]).ok();
        test_dir.write("small.toml", SMALL.replace("epochs = 2", "epochs = 50000"));
        let compare = ["compare", "--device", "sim", "--dataset", "iris", "--epochs", "50000", "--alloc", "naive"];
        let fidelity = ["fidelity", "--spec", "small.toml", "--measured", "known/small", "--out", "new"];
        for (arguments, depth, signal, code, words) in [
            (&compare[..], 1, Signal::TERM, 143, "interrupted in a run under '--alloc naive'"),
            (&compare[..], 1, Signal::INT, 130, "interrupted in a run under '--alloc naive'"),
            (&fidelity[..], 2, Signal::TERM, 143, "interrupted in the runs on sim; the same command goes on"),
        ] {
            let mut command = test_dir.process(arguments);
            let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let mut processes = Vec::new();
            until("it should wait for a process", || {
                let below = |of: &[u32]| of.iter().flat_map(|one| children(*one)).collect::<Vec<u32>>();
                let first = children(child.id());
                processes = first.clone();
                processes.extend(below(&first));
                processes.len() >= depth
            });
            send(signal, child.id());
            let output = Ran::of(child.wait_with_output().unwrap());
            assert_eq!((output.code, output.stdout.as_str()), (Some(code), ""), "{output:#?}");
            assert!(output.stderr.lines().last().is_some_and(|line| line.contains(words)), "{output:#?}");
            assert!(processes.iter().all(|process| is_over(*process)), "{arguments:?}");
        }
    }

    #[test]
    fn a_hangup_that_is_ignored_stays_ignored() {
        let test_dir = TestDir::new();
        test_dir.write("small.toml", SMALL.replace("epochs = 2", "epochs = 50000"));
        let runner = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out"]);
        // As `nohup` starts it.
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(runner.get_program()).args(runner.get_args());
        shell.current_dir(test_dir.at(".")).stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
        let child = shell.spawn().unwrap();
        until("it should have begun a run", || {
            !begun_and_whole(&test_dir).0.is_empty() && !children(child.id()).is_empty()
        });
        let trainers = children(child.id());
        send(Signal::HUP, child.id());
        send(Signal::TERM, child.id());
        // Both signals have arrived when it ends; if the first had counted, the exit code would be different.
        assert_eq!(Ran::of(child.wait_with_output().unwrap()).code, Some(143));
        assert!(trainers.iter().all(|trainer| is_over(*trainer)));
    }

    /// A supervisor may start it with signals blocked and ignored: runs end, and a signal ends them.
    #[test]
    fn a_runner_works_whatever_signals_it_finds() {
        for ignored in [false, true] {
            let test_dir = TestDir::new();
            test_dir.write("small.toml", SMALL);
            let withheld = |spec: &str| {
                test_dir.write("small.toml", spec);
                let mut command = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out", "--again"]);
                command.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
                crate::signals::withhold(&mut command, 1..32, if ignored { 1..32 } else { 0..0 });
                command.spawn().unwrap()
            };
            Ran::of(withheld(SMALL).wait_with_output().unwrap()).ok();
            let child = withheld(&SMALL.replace("epochs = 2", "epochs = 50000"));
            until("it should have begun a run", || {
                !begun_and_whole(&test_dir).0.is_empty() && !children(child.id()).is_empty()
            });
            let trainers = children(child.id());
            send(Signal::TERM, child.id());
            assert_eq!(Ran::of(child.wait_with_output().unwrap()).code, Some(143), "ignored: {ignored}");
            assert!(trainers.iter().all(|trainer| is_over(*trainer)));
        }
    }

    #[test]
    fn a_killed_runner_takes_its_trainers_along() {
        let test_dir = TestDir::new();
        let (mut child, trainers) = long(&test_dir, &["--jobs", "2"], 2);
        assert!(!trainers.iter().any(|trainer| is_over(*trainer)));
        send(Signal::KILL, child.id());
        child.wait().unwrap();
        until("the trainers should have ended", || trainers.iter().all(|trainer| is_over(*trainer)));
    }

    /// A stand-in for Python that leaves a process running when it ends, or waits for it if requested.
    const LEAVES: &str = r#"#!/bin/sh
if [ "$1" = -c ]; then exit 0; fi
sleep 3600 &
echo $! > "$STARTED.new" && mv "$STARTED.new" "$STARTED"
if [ -n "$WAITS" ]; then wait; fi
mkdir record && echo '{"schema_version": 1, "epochs": []}' > record/summary.json
"#;

    #[test]
    fn a_run_ends_with_all_that_it_started() {
        let test_dir = TestDir::new();
        test_dir.program("python", LEAVES);
        let spec = "name = \"small\"\nquestion = \"?\"\nrepeats = 1\ndevices = [\"sim\"]\n\
                    [[arms]]\nname = \"theirs\"\nprogram = \"pytorch\"\ndevices = [\"sim\"]\n";
        test_dir.write("small.toml", spec);
        let begin = |waits: &str| {
            let mut command = test_dir.process(&["run", "small.toml", "--device", "sim", "-o", "out", "--again"]);
            command.env("PYTHON", test_dir.at("python")).env("STARTED", test_dir.at("started")).env("WAITS", waits);
            command.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap()
        };
        let left = || {
            let started = test_dir.at("started");
            until("the program should have started a process", || started.is_file());
            let process: u32 = std::fs::read_to_string(&started).unwrap().trim().parse().unwrap();
            std::fs::remove_file(started).unwrap();
            process
        };
        // The process ends by itself.
        Ran::of(begin("").wait_with_output().unwrap()).ok();
        let process = left();
        until("what it left should be ended", || is_over(process));
        // A signal to the runner ends it.
        let child = begin("yes");
        let process = left();
        send(Signal::TERM, child.id());
        assert_eq!(Ran::of(child.wait_with_output().unwrap()).code, Some(143));
        until("what it left should be ended", || is_over(process));
    }
}
