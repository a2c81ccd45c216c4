//! `vramlab run` and `vramlab try` around programs: what passes through untouched, and what is left. A stand-in for PyTorch plays
//! its part in Python.

#![cfg(unix)]

use crate::common::{self, LATE, Ran, TestDir, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

mod cuda;
mod endings;
mod records;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// The program.
fn process(test_dir: &TestDir, arguments: &[&str]) -> Command {
    test_dir.process(arguments)
}

/// `vramlab run` with a command of the shell.
fn run(test_dir: &TestDir, script: &str) -> Command {
    process(test_dir, &["run", "--", "sh", "-c", script])
}

/// With the stand-in for PyTorch, and a script of Python as `script.py`.
fn torch(test_dir: &TestDir, mut command: Command, script: &str) -> Command {
    test_dir.write("script.py", script);
    command.env("PYTHONPATH", root().join("python/tests/fake"));
    command.env("FAKE_SNAPSHOT", root().join("../experiments/histories/mlp.pickle.xz"));
    // The recorder needs PyTorch's classes.
    command.env("VRAMLAB_RECORDER", "pytorch");
    for rank in ["RANK", "LOCAL_RANK", "SLURM_PROCID", "VRAMLAB_ALLOC", "VRAMLAB_LIMIT", "PYTORCH_CUDA_ALLOC_CONF"] {
        command.env_remove(rank);
    }
    command
}

/// A program under way. Dropped, it is ended.
struct Live {
    child: Child,
    lines: Receiver<String>,
    said: Receiver<String>,
}

impl Live {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (out, mut err) = (BufReader::new(child.stdout.take().unwrap()), child.stderr.take().unwrap());
        let (line, lines) = channel();
        let (all, said) = channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|text| line.send(text)));
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = err.read_to_string(&mut text);
            let _ = all.send(text);
        });
        Self { child, lines, said }
    }

    /// The next line of its output.
    fn line(&self) -> String {
        self.lines.recv_timeout(LATE).unwrap()
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// How it ended.
    fn status(&mut self) -> ExitStatus {
        let mut status = None;
        wait_for("the end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// How it ended, and what it wrote to standard error.
    fn end(mut self) -> (ExitStatus, String) {
        let status = self.status();
        (status, self.said.recv_timeout(LATE).unwrap())
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program's end, which must come.
fn ended(command: Command) -> (ExitStatus, String) {
    Live::start(command).end()
}

fn record(test_dir: &TestDir, folder: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(test_dir.at(folder).join("program.json")).unwrap()).unwrap()
}

#[test]
fn input_output_and_the_exit_code_pass_through() {
    let test_dir = TestDir::new();
    let mut child = run(&test_dir, "cat; echo stderr >&2; exit 7");
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"\x00\xffa\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(7), &b"\x00\xffa\n"[..]));
    let said = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], "stderr");
    assert!(lines[1].starts_with("vramlab ") && lines[1].contains("exit code 7; nothing recorded: "), "{said}");
    assert_eq!(lines.len(), 2);
    let left = record(&test_dir, "vramlab-run-1");
    assert_eq!((&left["exit_code"], &left["signal"], &left["processes"]), (&json!(7), &Value::Null, &json!([])));
}

#[test]
fn a_program_that_dies_by_a_signal_ends_this_one_so() {
    let test_dir = TestDir::new();
    for signal in ["TERM", "KILL", "SEGV", "INT", "USR1"] {
        let status = run(&test_dir, &format!("kill -{signal} $$")).stderr(Stdio::null()).status().unwrap();
        let mut alone = Command::new("sh");
        alone.args(["-c", &format!("kill -{signal} $$")]);
        let expected = alone.status().unwrap();
        assert_eq!(status.signal(), expected.signal(), "{signal}");
        assert!(status.signal().is_some());
    }
    assert_eq!(record(&test_dir, "vramlab-run-2")["signal"], 9);
}

#[test]
fn signals_go_to_the_program() {
    let test_dir = TestDir::new();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2] {
        let name = signal.as_raw();
        let script = format!("trap 'echo got; exit 5' {name}; echo ready; while :; do sleep 0.02; done");
        let live = Live::start(run(&test_dir, &script));
        assert_eq!(live.line(), "ready");
        live.send(signal);
        assert_eq!(live.line(), "got");
        assert_eq!(live.end().0.code(), Some(5), "{signal:?}");
    }
    // Ignored signals stay ignored, as under nohup.
    let mut nohup = Command::new("sh");
    let script = format!("trap '' HUP; exec {} run -- sh -c 'kill -HUP $$; echo alive'", common::PROGRAM);
    let output = nohup.args(["-c", &script]).current_dir(test_dir.at(".")).output().unwrap();
    assert_eq!(output.stdout, b"alive\n");
}

#[test]
#[cfg(target_os = "linux")]
fn the_program_ends_with_a_run_that_is_killed() {
    let test_dir = TestDir::new();
    let live = Live::start(run(&test_dir, "echo $$; exec sleep 600"));
    let pid = live.line();
    assert!(runs(&pid));
    live.send(Signal::KILL);
    live.end();
    wait_for("the end of the program", || !runs(&pid));
}

/// Whether there is such a process that has not ended.
#[cfg(target_os = "linux")]
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // One that is not collected yet has ended, too.
    !stat.is_empty() && !stat.contains(") Z ")
}

#[test]
fn what_cannot_be_run_is_said_before_anything_is() {
    let test_dir = TestDir::new();
    let refused = |arguments: &[&str], code: i32, words: &[&str]| {
        let ran = test_dir.run(arguments);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(code), ""), "{ran:#?}");
        for word in words {
            assert!(ran.stderr.contains(word), "{word}: {}", ran.stderr);
        }
        ran
    };
    refused(&["run", "--", "no-such-program"], 127, &["error: no-such-program: command not found"]);
    test_dir.write("text", "#!/bin/sh\n");
    refused(&["run", "--", "./text"], 126, &["error: ./text: Permission denied"]);
    refused(&["run"], 2, &["<COMMAND>"]);
    refused(&["run", "--"], 2, &["<COMMAND>"]);
    refused(&["run", "--alloc", "remep", "--", "true"], 2, &["no allocator is called 'remep'", "'remap'"]);
    refused(&["run", "--alloc", "remap:stael=always", "--", "true"], 2, &["stael", "steal"]);
    refused(&["run", "--limit", "lots", "--", "true"], 2, &["'lots' is not a size"]);
    refused(&["run", "--limit", "24", "--", "true"], 2, &["24 B", "24GiB"]);
    refused(&["run", "--every", "0", "--", "true"], 2, &["write seconds"]);
    refused(&["run", "--events", "0", "--", "true"], 2, &["--events"]);
    refused(&["run", "--output", "text", "--", "true"], 2, &["error: --output text: File exists"]);
    refused(&["run", "--output", "text/in", "--", "true"], 2, &["error: --output text/in: Not a directory"]);
    assert_eq!(test_dir.files(), ["text"], "nothing is left of what did not run");
}

#[test]
#[ignore = "needs Python 3"]
fn a_run_is_recorded_and_ten_lines_say_what_it_took() {
    let test_dir = TestDir::new();
    let command =
        process(&test_dir, &["run", "--output", "out", "--limit", "20GiB", "--", "python3", "script.py", "x y"]);
    let script = "import sys, torch\ntorch.cuda.init()\nprint(sys.argv[1:])\nsys.exit(3)\n";
    let ran = Ran::of(torch(&test_dir, command, script).output().unwrap());
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), "['x y']\n"), "{ran:#?}");
    // A run of more than half a second has a sample of the host's memory.
    let lines: Vec<&str> = ran.stderr.lines().filter(|line| !line.starts_with("host ")).collect();
    assert!(
        lines[0].contains("exit code 3; 1 process used PyTorch 2.11.0+fake under PyTorch's own allocator"),
        "{ran:#?}"
    );
    assert!(
        lines[1]
            .contains("reserved 300 MiB, active 200 MiB, requested 190 MiB at most; 14 driver calls, 64 MiB pinned"),
        "{ran:#?}"
    );
    assert!(lines[2].starts_with("device "), "{ran:#?}");
    assert_eq!(lines[3], "files    1 snapshot in out");
    assert!(
        lines[4].starts_with("advise   export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reserves "),
        "{ran:#?}"
    );
    assert!(lines[5].starts_with("Next: ") && lines.len() == 6, "{ran:#?}");
    let left = record(&test_dir, "out");
    assert_eq!((&left["exit_code"], &left["limit_bytes"]), (&json!(3), &json!(20_u64 << 30)));
    assert_eq!(left["advice"]["conf"], "expandable_segments:True");
    let snapshot = test_dir.at("out").join(left["processes"][0]["snapshots"][0]["file"].as_str().unwrap());
    // The snapshot is PyTorch's, so that the next command works.
    let next = test_dir.run(&["explain", snapshot.to_str().unwrap()]).ok();
    assert!(next.stdout.contains("Active memory at its peak"), "{next:#?}");
    // Without a driver that is said; with one the run has no such GPU.
    let why = left["device_missing"].as_str();
    assert!(why.is_none_or(|why| why.contains("no NVIDIA driver")), "{left}");
}

#[test]
#[ignore = "needs Python 3"]
fn quiet_says_nothing_and_skips_files_of_an_earlier_run() {
    let test_dir = TestDir::new();
    for _ in 0..2 {
        let command =
            process(&test_dir, &["run", "-q", "--no-advise", "--output", "out", "--", "python3", "script.py"]);
        let ran = Ran::of(torch(&test_dir, command, "import torch\ntorch.cuda.init()\n").output().unwrap());
        assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(0), "", ""));
        assert_eq!(record(&test_dir, "out")["processes"].as_array().unwrap().len(), 1);
    }
    let pickles = common::names(&test_dir.at("out")).into_iter().filter(|name| name.ends_with(".pickle"));
    assert_eq!(pickles.count(), 2);
}

#[test]
#[ignore = "needs Python 3"]
fn a_signal_asks_each_rank_of_a_script_for_a_snapshot() {
    let test_dir = TestDir::new();
    let launcher = "for rank in 0 1; do RANK=$rank python3 script.py & done; wait; echo over; exit 4";
    let command = process(&test_dir, &["run", "--output", "out", "--no-frames", "--", "sh", "-c", launcher]);
    // Each rank's line by one write, so that the other's does not come between.
    let script = "import os, time, torch\ntorch.cuda.init()\nos.write(1, b'ready\\n')\n\
        while not [f for f in os.listdir(os.environ['VRAMLAB_OUTPUT']) if 'rank' + os.environ['RANK'] in f and 'signal' in f]:\n    \
        time.sleep(0.01)\n";
    let live = Live::start(torch(&test_dir, command, script));
    assert_eq!((live.line(), live.line()), ("ready".to_owned(), "ready".to_owned()));
    // The launcher would die of it.
    live.send(Signal::USR1);
    assert_eq!(live.line(), "over");
    let (status, said) = live.end();
    assert_eq!(status.code(), Some(4), "{said}");
    let left = record(&test_dir, "out");
    let of = |at: usize, key: &str| left["processes"][at][key].clone();
    assert_eq!((of(0, "rank"), of(1, "rank")), (json!(0), json!(1)));
    let why = |at: usize| -> Vec<String> {
        let all = of(at, "snapshots");
        all.as_array().unwrap().iter().map(|one| one["why"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        (why(0), why(1)),
        (vec!["signal".to_owned(), "exit".to_owned()], vec!["signal".to_owned(), "exit".to_owned()])
    );
    assert!(said.contains("rank 0 ") && said.contains("rank 1 ") && said.contains("4 snapshots in out"), "{said}");
}

#[test]
#[ignore = "needs Python 3"]
fn a_process_that_is_killed_leaves_no_half_snapshot() {
    let test_dir = TestDir::new();
    let command = process(&test_dir, &["run", "--output", "out", "--", "python3", "script.py"]);
    let script = "import os, pathlib, torch\nfrom vramlab import _record\ntorch.cuda.init()\n\
        def half(file):\n    file.write(b'half')\n    file.flush()\n    os.kill(os.getpid(), 9)\n\
        _record.write_whole(pathlib.Path(os.environ['VRAMLAB_OUTPUT']) / 'x.pickle', half)\n";
    let output = torch(&test_dir, command, script).output().unwrap();
    assert_eq!(output.status.signal(), Some(9));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("ended by signal 9") && said.contains("its newest snapshot: none"), "{said}");
    let names = common::names(&test_dir.at("out"));
    assert!(names.len() == 2 && names[0].ends_with(".process.json") && names[1] == "program.json", "{names:?}");
}

#[test]
#[ignore = "needs Python 3"]
fn what_was_predicted_stands_beside_what_was_measured() {
    let test_dir = TestDir::new();
    let script = "import os, torch\ntorch.cuda.init()\noptimizer = torch.optim.Optimizer()\n\
        for _ in range(5):\n    optimizer.step()\nprint('conf', os.environ.get('PYTORCH_CUDA_ALLOC_CONF'))\n";
    let command = process(&test_dir, &["try", "--json", "--output", "out", "--", "python3", "script.py"]);
    let ran = Ran::of(torch(&test_dir, command, script).output().unwrap()).ok();
    let tried = ran.json();
    let runs = tried["runs"].as_array().unwrap();
    assert_eq!((&runs[0]["name"], &runs[1]["conf"]), (&json!("as it is"), &json!("expandable_segments:True")));
    // The program's output is not lost.
    assert!(ran.stderr.contains("conf None\n") && ran.stderr.contains("conf expandable_segments:True\n"), "{ran:#?}");
    assert_eq!(runs[1]["predicted_reserved_bytes"], tried["advice"]["predicted_reserved_bytes"]);
    assert_eq!((&runs[1]["reserved_bytes"], &runs[1]["steps"]), (&json!(300_u64 << 20), &json!(4)));
    assert!(runs[0]["step_ns"].as_u64() >= Some(1_000_000));
    assert!(
        runs[0]["driver_calls"].as_u64() > Some(0) && runs[1]["predicted_driver_calls"].as_u64() > Some(0),
        "{tried}"
    );
    // The stand-in takes no other allocator, which is said and shown.
    assert_eq!((&runs[2]["allocator"], &runs[2]["exit_code"]), (&json!("remap"), &json!(2)));
    assert!(
        runs[2]["predicted_reserved_bytes"].as_u64() > Some(0) && runs[2]["predicted_driver_calls"].as_u64() > Some(0)
    );
    assert!(ran.stderr.contains("vramlab: remap cannot be put under PyTorch"), "{ran:#?}");
    let command = process(&test_dir, &["try", "--output", "again", "--", "python3", "script.py"]);
    let ran = Ran::of(torch(&test_dir, command, script).output().unwrap()).ok();
    for words in ["predicted and measured", "as it is", "expandable_segments", "300 MiB", "remap", "step: median time"]
    {
        assert!(ran.stdout.contains(words), "{words}: {ran:#?}");
    }
    let command = process(&test_dir, &["try", "--", "true"]);
    let ran = Ran::of(torch(&test_dir, command, "").output().unwrap());
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("error: no PyTorch process loaded the recorder"), "{ran:#?}");
}

const MIB: u64 = 1 << 20;

/// A snapshot of one block of 33 MiB in a segment of 34, and pinned memory of the host as PyTorch 2.14 has it.
fn with_host_memory() -> Value {
    let event = |action: &str, size: u64, time: u64| json!({"action": action, "addr": 1 << 30, "size": size, "stream": 0, "time_us": time, "frames": []});
    let block = json!({"address": 1 << 30, "size": 33 * MIB, "requested_size": 33 * MIB, "state": "active_allocated", "frames": []});
    let rest = json!({"address": (1_u64 << 30) + 33 * MIB, "size": MIB, "requested_size": 0, "state": "inactive", "frames": []});
    let segment = json!({"device": 0, "address": 1 << 30, "total_size": 34 * MIB, "stream": 0, "segment_type": "large",
        "segment_pool_id": [0, 0], "is_expandable": false, "frames": [], "blocks": [block, rest]});
    let host = |size: u64, used: u64| {
        json!({"address": 1_u64 << 40, "total_size": size, "allocated_size": used, "active_size": used,
            "segment_pool_id": [0, 0], "frames": [{"filename": "load.py", "line": 3, "name": "pin"}]})
    };
    json!({
        "segments": [segment],
        "device_traces": [[event("segment_alloc", 34 * MIB, 1_000_000), event("alloc", 33 * MIB, 2_000_000)]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": [],
        "host_segments": [host(64 * MIB, 64 * MIB), host(16 * MIB, 0), host(3 * MIB, 3 * MIB)],
        "host_traces": [event("segment_alloc", 128 * MIB, 1), event("alloc", 128 * MIB, 1), event("segment_free", 128 * MIB, 2),
            event("segment_alloc", 64 * MIB, 3)],
    })
}

#[test]
fn pinned_memory_of_the_host_is_explained() {
    let test_dir = TestDir::new();
    let file = test_dir.write("host.json", with_host_memory().to_string());
    let explanation = test_dir.run(&["explain", &file, "--json"]).ok().json();
    // 16 and 3 MiB are from before the trace; 3 MiB are not rounded.
    assert_eq!(
        explanation["pinning"],
        json!({"segments": 3, "bytes": 83 * MIB, "active_bytes": 67 * MIB, "peak_bytes": 147 * MIB,
            "rounding_most_bytes": 40 * MIB})
    );
    let said = test_dir.run(&["explain", &file]).ok().stdout;
    let words = "83 MiB of host memory pinned in 3 segments, 67 MiB active; peak 147 MiB; up to 40 MiB due to rounding";
    assert!(said.contains(words), "{said}");
    // Without any, nothing is said.
    let mut without = with_host_memory();
    without.as_object_mut().unwrap().retain(|key, _| !key.starts_with("host"));
    let file = test_dir.write("without.json", without.to_string());
    assert_eq!(test_dir.run(&["explain", &file, "--json"]).ok().json()["pinning"], Value::Null);
}

#[test]
#[ignore = "needs Python 3"]
fn pinned_memory_is_read_from_pickles_too() {
    let test_dir = TestDir::new();
    let file = test_dir.write("host.json", with_host_memory().to_string());
    let expected = test_dir.run(&["explain", &file, "--json"]).ok().json()["pinning"].clone();
    let script = "import json, pickle\nsnapshot = json.load(open('host.json'))\nfor protocol in range(6):\n    \
        pickle.dump(snapshot, open(f'{protocol}.pickle', 'wb'), protocol=protocol)\n\
        many = [dict(one, address=at) for at, one in enumerate(snapshot['host_segments'] * 700)]\n\
        order = ['host_traces', 'host_segments', 'segments', 'device_traces', 'allocator_settings']\n\
        again = {key: snapshot[key] for key in order} | {'host_segments': many}\n\
        pickle.dump(again, open('many.pickle', 'wb'))\n";
    test_dir.write("write.py", script);
    let wrote = Command::new("python3").arg("write.py").current_dir(test_dir.at(".")).status().unwrap();
    assert!(wrote.success());
    // The printed command converts those of protocols 0 and 1.
    for protocol in 0..=1 {
        let name = format!("{protocol}.pickle");
        let refused = test_dir.run(&["explain", &name]);
        refused.refused(2, &[&name, "a pickle of protocol 0 or 1"]);
        let (_, command) = refused.stderr.trim_end().split_once("convert it: ").unwrap();
        let command = command.replace("OLD NEW", &format!("{name} new.pickle && mv new.pickle {name}"));
        assert!(Command::new("sh").args(["-c", &command]).current_dir(test_dir.at(".")).status().unwrap().success());
    }
    for protocol in 0..=5 {
        let explanation = test_dir.run(&["explain", &format!("{protocol}.pickle"), "--json"]).ok().json();
        assert_eq!(explanation["pinning"], expected, "protocol {protocol}");
    }
    // In another order, and in batches.
    let explanation = test_dir.run(&["explain", "many.pickle", "--json"]).ok().json();
    assert_eq!(
        (&explanation["pinning"]["segments"], &explanation["pinning"]["bytes"]),
        (&json!(2100), &json!(700 * 83 * MIB))
    );
    assert_eq!(explanation["peak_reserved"]["reserved_bytes"], 34 * MIB);
}

#[test]
fn samples_of_the_gpu_are_a_line_of_the_ledger_and_a_curve() {
    let test_dir = TestDir::new();
    let file = test_dir.write("pid7.json", with_host_memory().to_string());
    assert_eq!(test_dir.run(&["explain", &file, "--json"]).ok().json()["beside"], Value::Null);
    let curve = |process: Value| {
        json!({"pid": 7, "gpus": [{"index": 0, "uuid": "GPU-1", "name": "a GPU", "total_bytes": 1024 * MIB,
            "time_ns": [0, 1_900_000_000, 4_000_000_000_u64], "used_bytes": [50 * MIB, 600 * MIB, 70 * MIB],
            "process_bytes": process}]})
    };
    let processes = json!([0, 500 * MIB, 20 * MIB]);
    test_dir.write("pid7.device.json", curve(processes).to_string());
    let explanation = test_dir.run(&["explain", &file, "--json"]).ok().json();
    assert_eq!(
        explanation["beside"],
        json!({"total_bytes": 1024 * MIB, "peak_used_bytes": 600 * MIB, "used_bytes": 600 * MIB,
            "not_pytorch_bytes": 566 * MIB, "own_bytes": 466 * MIB, "nccl_bytes": null, "others_bytes": 100 * MIB})
    );
    let said = test_dir.run(&["explain", &file]).ok().stdout;
    let words = "566 MiB used on the GPU outside PyTorch's allocator: 466 MiB by this process (CUDA context, libraries such as \
        cuBLAS and NCCL), 100 MiB by other processes; 424 MiB of 1 GiB free";
    assert!(said.contains(words), "{said}");
    let points = explanation["timeline"].as_array().unwrap();
    assert!(points.iter().all(|point| point["device_used_bytes"] == 600 * MIB), "{explanation}");
    test_dir.run(&["report", &file, "--out", "page.html"]).ok();
    assert!(std::fs::read_to_string(test_dir.at("page.html")).unwrap().contains("device_used_bytes"));
    // With what NCCL allocated, also where the driver does not tell processes apart.
    for (process, words) in [
        (
            json!([0, 500 * MIB, 20 * MIB]),
            "430 MiB by NCCL, 36 MiB by this process's CUDA context and other libraries, 100 MiB by",
        ),
        (
            Value::Null,
            "430 MiB by this process's NCCL, 136 MiB by CUDA contexts, other libraries and other processes; 424 MiB of",
        ),
    ] {
        let mut curves = curve(process);
        curves["gpus"][0]["nccl_bytes"] = json!([0, 430 * MIB, 0]);
        test_dir.write("pid7.device.json", curves.to_string());
        let said = test_dir.run(&["explain", &file]).ok().stdout;
        assert!(said.contains(words), "{said}");
        assert_eq!(test_dir.run(&["explain", &file, "--json"]).ok().json()["beside"]["nccl_bytes"], 430 * MIB);
    }
    // A driver that does not tell processes apart; a file that was cut short says nothing.
    test_dir.write("pid7.device.json", curve(Value::Null).to_string());
    let explanation = test_dir.run(&["explain", &file, "--json"]).ok().json();
    assert_eq!(
        (&explanation["beside"]["not_pytorch_bytes"], &explanation["beside"]["own_bytes"]),
        (&json!(566 * MIB), &Value::Null)
    );
    test_dir.write("pid7.device.json", &curve(Value::Null).to_string()[..40]);
    assert_eq!(test_dir.run(&["explain", &file, "--json"]).ok().json()["beside"], Value::Null);
}
