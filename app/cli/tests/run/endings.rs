//! How `vramlab run` ends: as the program, whatever becomes of it and of the folder, and never not at all.

use super::*;
use crate::signals;
use std::os::unix::fs::symlink;

/// `vramlab run` into the folder `out`.
fn into_out(test_dir: &TestDir, more: &[&str], script: &str) -> Command {
    process(test_dir, &[&["run", "--output", "out"], more, &["--", "sh", "-c", script]].concat())
}

#[test]
fn files_in_the_folder_that_are_no_records_cost_nothing() {
    let test_dir = TestDir::new();
    let script = r#"cd "$VRAMLAB_OUTPUT" || exit 1
        echo '{"run":' > cut.process.json; echo '[1]' > list.process.json; echo '{"a": 1}' > other.process.json
        mkfifo pipe.process.json; mkdir folder.process.json; : > empty.process.json; truncate -s 1G long.process.json
        ln -s /dev/zero link.process.json; printf '\377' > bytes.process.json
        echo '{"run": "an earlier one", "version": 99}' > earlier.process.json; exit 7"#;
    let (status, said) = ended(into_out(&test_dir, &[], script));
    assert_eq!(status.code(), Some(7), "{said}");
    let lines: Vec<&str> = said.lines().filter(|line| line.contains(".process.json")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(lines[0].contains("no record of this run in out") && lines[0].contains("and 8 more"), "{said}");
    assert!(!said.contains("earlier"), "{said}");
    assert_eq!(record(&test_dir, "out")["exit_code"], 7);
    // Nothing of it was taken away.
    assert_eq!(common::names(&test_dir.at("out")).len(), 11);
}

/// A record of this run, by a program that knows its word.
fn hostile_record(rank: &str, more: &str) -> String {
    format!(
        r#"printf '{{"run": "%s", "state": "ended", "pid": 4294967295, "rank": {rank}, "command": ["p", "--token", "x1"],
        "torch": "2", "allocator": null, "takes_signal": true, "began_ns": 1, "until_ns": 2, "snapshots": [{more}],
        "devices": [{{"index": 0, "uuid": null, "stats": {{"num_ooms": 18446744073709551615}}}},
        {{"index": 1, "uuid": null, "stats": {{"num_ooms": 7}}}}], "pinned_bytes": null, "step_ns": [],
        "allocator_stats": {{"0": {{"calls": {{"a": {{"count": 18446744073709551615, "total_ns": 9}}, "b": {{"count": 2}}}}}}}}}}' \
        "$VRAMLAB_RUN" > "$VRAMLAB_OUTPUT/p.process.json"; exit 7"#
    )
}

#[test]
fn a_record_may_say_anything() {
    for rank in ["4294967296", "1e300", "-1", "null", "\"x\""] {
        let test_dir = TestDir::new();
        let (status, said) = ended(into_out(&test_dir, &[], &hostile_record(rank, "")));
        assert_eq!(status.code(), Some(7), "{rank}: {said}");
        let left = record(&test_dir, "out");
        let process = &left["processes"][0];
        assert_eq!((&process["rank"], &process["command"]), (&Value::Null, &json!(["p", "--token", "***"])), "{left}");
    }
    // Snapshots that lie elsewhere, are none, or would be waited for.
    for (file, at) in [("../secret", None), ("/etc/passwd", None), ("pipe", Some("pipe")), ("missing", Some("missing"))]
    {
        let test_dir = TestDir::new();
        let snapshot = format!(r#"{{"file": "{file}", "why": "exit", "time_ns": 1, "took_s": 0.1}}"#);
        let script = format!("mkfifo \"$VRAMLAB_OUTPUT/pipe\"; {}", hostile_record("0", &snapshot));
        let (status, said) = ended(into_out(&test_dir, &[], &script));
        assert_eq!(status.code(), Some(7), "{said}");
        let named = &record(&test_dir, "out")["processes"][0]["snapshots"][0]["file"];
        assert_eq!(named.as_str(), at, "{said}");
    }
    // This would have grown if the process had requested memory.
    for there in [&["p.pickle"][..], &["p.gpu3.pickle", "p.pickle"], &[]] {
        let test_dir = TestDir::new();
        let snapshot = r#"{"file": "p.pickle", "why": "running", "time_ns": 1, "took_s": 0.0}"#;
        let made: String = there.iter().map(|name| format!("echo > \"$VRAMLAB_OUTPUT/{name}\"; ")).collect();
        let (status, said) = ended(into_out(&test_dir, &[], &format!("{made}{}", hostile_record("0", snapshot))));
        assert_eq!(status.code(), Some(7), "{said}");
        let left = record(&test_dir, "out");
        let named: Vec<&str> = left["processes"][0]["snapshots"]
            .as_array()
            .unwrap()
            .iter()
            .map(|snapshot| snapshot["file"].as_str().unwrap())
            .collect();
        assert_eq!(named, there);
    }
}

#[test]
fn pinned_memory_that_was_requested_has_a_line_with_its_replay() {
    let requests = r#"{"time_ns": 1, "action": "alloc", "addr": 64, "size": 3145728, "stream": 0}"#;
    for (name, bytes, expected) in [
        ("p-host.jsonl", "4194304", Some("4 MiB pinned for 3 MiB requested; ")),
        ("p-host.jsonl", "null", Some("requests of pinned memory until it was ended; ")),
        ("missing-host.jsonl", "4194304", None),
        ("../p-host.jsonl", "4194304", None),
    ] {
        let test_dir = TestDir::new();
        let pinned =
            format!(r#""pinned_bytes": {bytes}, "pinned_requested_bytes": 3145728, "pinned_history": "{name}""#);
        let write_record =
            hostile_record("0", "").replace(r#""pinned_bytes": null"#, &pinned).replace("18446744073709551615", "1");
        let script = format!("echo '{requests}' > \"$VRAMLAB_OUTPUT/p-host.jsonl\"; {write_record}");
        let (status, said) = ended(into_out(&test_dir, &[], &script));
        assert_eq!(status.code(), Some(7), "{said}");
        let line = said.lines().find(|line| line.starts_with("pinned   rank 0: "));
        let Some(expected) = expected else {
            assert_eq!(line, None, "{said}");
            assert!(record(&test_dir, "out")["processes"][0]["pinned_history"].is_null());
            continue;
        };
        let line = line.unwrap_or_else(|| panic!("{said}"));
        assert!(line.contains(expected), "{line}");
        let words: Vec<&str> = line.split(' ').skip_while(|word| *word != "replay").collect();
        assert_eq!(words[1], "out/p-host.jsonl", "{line}");
        let screen = test_dir.run(&words).ok().stdout;
        assert!(screen.contains("host-exact") && screen.contains("peak pinned"), "{screen}");
    }
}

#[test]
fn a_pipe_that_is_called_like_a_record_keeps_no_signal() {
    let test_dir = TestDir::new();
    let script = r#"mkfifo "$VRAMLAB_OUTPUT/p.process.json"; trap 'echo usr' USR1; trap 'echo term; exit 5' TERM; echo ready
        while :; do sleep 0.02; done"#;
    let live = Live::start(into_out(&test_dir, &[], script));
    assert_eq!(live.line(), "ready");
    for (signal, heard) in [(Signal::USR1, "usr"), (Signal::TERM, "term")] {
        live.send(signal);
        assert_eq!(live.line(), heard);
    }
    let (status, said) = live.end();
    assert_eq!(status.code(), Some(5), "{said}");
}

#[test]
fn an_error_is_no_longer_than_a_line() {
    let test_dir = TestDir::new();
    let script = r#"{ printf '{"run": 1, "state": "'; head -c 100000 /dev/zero | tr '\0' x; echo '"}'
        } > "$VRAMLAB_OUTPUT/a.process.json"
        { printf '"'; head -c 100000 /dev/zero | tr '\0' x; printf '"'; } > "$VRAMLAB_OUTPUT/b.process.json"; exit 7"#;
    let (status, said) = ended(into_out(&test_dir, &[], script));
    assert_eq!(status.code(), Some(7));
    assert!(said.len() < 2000 && said.contains("and 1 more"), "{}", said.len());
    assert!(said.contains("a.process.json") || said.contains("b.process.json"));
}

#[test]
fn a_folder_that_is_gone_or_another_one_costs_nothing() {
    for (then, left) in
        [(":", None), ("mkdir \"$VRAMLAB_OUTPUT\"", Some("out")), ("ln -s else \"$VRAMLAB_OUTPUT\"", Some("else"))]
    {
        let test_dir = TestDir::new();
        std::fs::create_dir(test_dir.at("else")).unwrap();
        let script = format!("rm -r \"$VRAMLAB_OUTPUT\"; {then}; exit 7");
        let (status, said) = ended(into_out(&test_dir, &[], &script));
        assert_eq!(status.code(), Some(7), "{said}");
        assert!(said.contains("exit code 7; out is gone, and what was recorded with it"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        // The file that took its name is unchanged, and nothing is written through a link.
        assert_eq!(left.map(|name| common::names(&test_dir.at(name))), left.map(|_| Vec::new()), "{then}");
    }
}

#[test]
fn a_full_disk_costs_nothing() {
    let test_dir = TestDir::new();
    for (end, code, signal) in [("exit 7", Some(7), None), ("kill -9 $$", None, Some(9))] {
        let mut limited = Command::new("sh");
        let script = format!("ulimit -f 0; exec {} run --output out -- sh -c '{end}'", common::PROGRAM);
        limited.args(["-c", &script]).current_dir(test_dir.at(".")).env("COLUMNS", "1000");
        let (status, said) = ended(limited);
        assert_eq!((status.code(), status.signal()), (code, signal), "{said}");
        let line = said.lines().find(|line| line.contains("no record is left of this run"));
        assert!(line.is_some_and(|line| line.contains("program.json: cannot be written: File too large")), "{said}");
        assert_eq!(common::names(&test_dir.at("out")), [""; 0]);
    }
}

#[test]
fn a_file_that_is_called_like_a_part_stays() {
    let test_dir = TestDir::new();
    std::fs::create_dir(test_dir.at("out")).unwrap();
    for name in [".thesis.4000000.partial", ".thesis.partial", ".a.4000000.0123456789abcdef.partial"] {
        test_dir.write(&format!("out/{name}"), "mine");
    }
    let (status, said) =
        ended(into_out(&test_dir, &[], ": > \"$VRAMLAB_OUTPUT/.x.4000000.$VRAMLAB_RUN.partial\"; exit 7"));
    assert_eq!(status.code(), Some(7), "{said}");
    let mut names = common::names(&test_dir.at("out"));
    names.retain(|name| name != "program.json");
    assert_eq!(names, [".a.4000000.0123456789abcdef.partial", ".thesis.4000000.partial", ".thesis.partial"]);
}

#[test]
fn two_runs_share_a_folder() {
    for earlier in [false, true] {
        let test_dir = TestDir::new();
        if earlier {
            assert_eq!(ended(into_out(&test_dir, &["-q"], "exit 1")).0.code(), Some(1));
        }
        let mut first = into_out(&test_dir, &[], "echo ready; read line; exit 3");
        let mut first = Live::start({
            first.stdin(Stdio::piped());
            first
        });
        assert_eq!(first.line(), "ready");
        let (status, said) = ended(into_out(&test_dir, &[], "exit 4"));
        assert_eq!(status.code(), Some(4), "{said}");
        drop(first.child.stdin.take());
        let (status, said) = first.end();
        assert_eq!(status.code(), Some(3), "{said}");
        let left = common::names(&test_dir.at("out"));
        assert_eq!(left, ["program-2.json", "program.json"], "{said}");
        let codes = left.iter().map(|name| {
            let text = std::fs::read_to_string(test_dir.at("out").join(name)).unwrap();
            serde_json::from_str::<Value>(&text).unwrap()["exit_code"].as_u64().unwrap()
        });
        let mut codes: Vec<u64> = codes.collect();
        codes.sort_unstable();
        assert_eq!(codes, [3, 4]);
    }
}

#[test]
fn children_that_are_ignored_can_be_waited_for() {
    let test_dir = TestDir::new();
    let ignored = |mut command: Command| {
        let ignore = || {
            // SAFETY: `signal` sets a disposition, which no pointer is needed for.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
            Ok(())
        };
        // SAFETY: between fork and exec only what is safe in a signal's handler may be done, as `signal` is.
        unsafe { command.pre_exec(ignore) };
        command
    };
    let (status, said) = ended(ignored(run(&test_dir, "exit 7")));
    assert_eq!(status.code(), Some(7), "{said}");
    assert!(said.contains("exit code 7"), "{said}");
    let (status, _) = ended(ignored(run(&test_dir, "kill -9 $$")));
    assert_eq!(status.signal(), Some(9));
    // The program is started as it would have been.
    #[cfg(target_os = "linux")]
    {
        let masks = |command: Command| {
            let live = Live::start(ignored(command));
            let mask = live.line();
            live.end();
            mask
        };
        let show = "grep SigIgn /proc/$$/status";
        let mut alone = Command::new("sh");
        alone.args(["-c", show]);
        assert_eq!(masks(run(&test_dir, show)), masks(alone));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn signals_that_are_ignored_or_blocked_on_start_are_so_for_the_program() {
    for (blocked, ignored) in [(0..0, 0..0), (libc::SIGALRM..libc::SIGTERM, 0..0), (1..32, 0..0), (1..32, 1..32)] {
        let masks = |mut command: Command| {
            signals::withhold(&mut command, blocked.clone(), ignored.clone());
            let live = Live::start(command);
            let mask = |line: String| u64::from_str_radix(line.rsplit('\t').next().unwrap(), 16).unwrap();
            let masks = [live.line(), live.line()].map(mask);
            assert_eq!(live.end().0.code(), Some(0));
            assert_eq!(masks[0] == 0, blocked.is_empty());
            masks
        };
        let test_dir = TestDir::new();
        // No shell, which may clear its mask.
        let show = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"];
        let mut alone = Command::new(show[0]);
        alone.args(&show[1..]);
        let run = process(&test_dir, &[&["run", "--"], show.as_slice()].concat());
        assert_eq!(masks(run), masks(alone), "{blocked:?}, {ignored:?}");
    }
}

/// The program has the signal blocked, so the second one kills it.
#[test]
#[cfg(target_os = "linux")]
fn a_signal_that_is_blocked_on_start_ends_the_run() {
    let test_dir = TestDir::new();
    let mut command = process(&test_dir, &["run", "--", "cat"]);
    signals::withhold(command.stdin(Stdio::piped()), 1..32, 0..0);
    let mut live = Live::start(command);
    // Open until the end, for which `cat` would not wait.
    let mut input = live.child.stdin.take().unwrap();
    input.write_all(b"ready\n").unwrap();
    assert_eq!(live.line(), "ready");
    live.send(Signal::TERM);
    std::thread::sleep(Duration::from_millis(200));
    live.send(Signal::TERM);
    assert_eq!(live.end().0.signal(), Some(Signal::TERM.as_raw()));
}

#[test]
#[cfg(target_os = "linux")]
fn a_second_signal_ends_what_does_not_end() {
    for (first, second) in [(Signal::TERM, Signal::TERM), (Signal::TERM, Signal::INT), (Signal::INT, Signal::INT)] {
        let test_dir = TestDir::new();
        // A child that has a child in a session of its own, as launchers start ranks; none of them ends by itself.
        let inner = "trap \"\" TERM INT; echo $$; while :; do sleep 600; done";
        let script = format!("trap 'echo got' TERM INT; setsid sh -c '{inner}' & echo $$; while :; do wait; done");
        let live = Live::start(into_out(&test_dir, &[], &script));
        let pids = [live.line(), live.line()];
        live.send(first);
        assert_eq!(live.line(), "got");
        // Of two that come as one, one is meant.
        std::thread::sleep(Duration::from_millis(200));
        live.send(second);
        let (status, said) = live.end();
        assert_eq!(status.signal(), Some(second.as_raw()), "{said}");
        let line = said.lines().find(|line| line.contains("the program was killed after signal")).unwrap();
        for pid in &pids {
            assert!(line.contains(&format!("{pid} (sh)")), "{pid}: {said}");
            wait_for("its end", || !runs(pid));
        }
        assert!(line.contains("(sleep)"), "{said}");
        assert_eq!(record(&test_dir, "out")["signal"], second.as_raw());
    }
}

#[test]
#[cfg(target_os = "linux")]
fn what_a_program_leaves_in_the_background_is_not_waited_for() {
    let test_dir = TestDir::new();
    let mut live = Live::start(run(&test_dir, "(trap '' TERM; exec sleep 600) & echo $!; exit 3"));
    let pid = live.line();
    // It has the pipes of the program open.
    assert_eq!(live.status().code(), Some(3));
    assert!(runs(&pid));
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}

#[test]
fn a_record_behind_a_link_is_refused_before_anything_runs() {
    let test_dir = TestDir::new();
    std::fs::create_dir(test_dir.at("out")).unwrap();
    test_dir.write("mine", "mine");
    symlink(test_dir.at("mine"), test_dir.at("out/program.json")).unwrap();
    let ran = Ran::of(into_out(&test_dir, &[], "echo ran").output().unwrap());
    ran.refused(2, &["out/program.json: is a symbolic link to", "name the file itself"]);
    assert_eq!(std::fs::read_to_string(test_dir.at("mine")).unwrap(), "mine");
}

/// The stack of the process that answers is too small for any build of it. The run's own does not grow any more by then.
#[test]
#[ignore = "needs Python 3"]
#[cfg(target_os = "linux")]
fn advice_that_dies_costs_nothing() {
    let test_dir = TestDir::new();
    let script = "import os, resource, sys, torch\ntorch.cuda.init()\n\
        resource.prlimit(os.getppid(), resource.RLIMIT_STACK, (1 << 14, 1 << 14))\nsys.exit(7)\n";
    let command = process(&test_dir, &["run", "--output", "out", "--", "python3", "script.py"]);
    let (status, said) = ended(torch(&test_dir, command, script));
    assert_eq!(status.code(), Some(7), "{said}");
    assert!(said.contains("advise   looking at the snapshot failed (signal:"), "{said}");
    assert!(said.contains("reserved 300 MiB"), "{said}");
    let left = record(&test_dir, "out");
    assert!(left["no_advice"].as_str().is_some_and(|why| why.contains("failed")), "{left}");
}

/// Each of the runs leaves what is no record, and the second takes its folder away.
#[test]
#[ignore = "needs Python 3"]
fn comparing_goes_on_whatever_a_program_does_to_its_folder() {
    let test_dir = TestDir::new();
    let script = "import atexit, os, shutil\nout = os.environ['VRAMLAB_OUTPUT']\nos.mkfifo(out + '/pipe.process.json')\n\
        if 'PYTORCH_CUDA_ALLOC_CONF' in os.environ:\n    atexit.register(shutil.rmtree, out)\n\
        import torch\ntorch.cuda.init()\n";
    let command =
        process(&test_dir, &["try", "--json", "--output", "out", "--", "python3", "script.py", "--token", "a1-x"]);
    let live = Live::start(torch(&test_dir, command, script));
    let mut text = String::new();
    while let Ok(line) = live.lines.recv_timeout(LATE) {
        text += &line;
    }
    let (status, said) = live.end();
    assert_eq!(status.code(), Some(0), "{said}");
    let tried: Value = serde_json::from_str(&text).unwrap();
    let runs = tried["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 3, "{tried}");
    assert_eq!((&runs[0]["reserved_bytes"], &runs[1]["reserved_bytes"]), (&json!(300 << 20), &Value::Null));
    assert!(runs[1]["predicted_reserved_bytes"].as_u64() > Some(0));
    assert!(said.contains("out/advised was removed meanwhile") && said.contains("pipe.process.json (no regular file)"));
    assert!(said.contains("remap was NOT put under PyTorch") && !text.contains("a1-x"), "{said}");
}
