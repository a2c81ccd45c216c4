//! Files that `vramlab run` writes: they contain no secrets and only true figures, and other users cannot read them.

use super::*;
use std::os::unix::fs::PermissionsExt;

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

#[test]
fn secrets_of_the_command_line_are_not_kept() {
    let test_dir = TestDir::new();
    let words =
        ["--api-key", "a1-x", "--token=b2-x", "HF_TOKEN=c3-x", "https://me:d4-x@host/", "PASSWORD=e5-x run", "plain"];
    let arguments = [&["run", "--output", "out", "--", "sh", "-c", "exit 7", "sh"][..], &words].concat();
    let (status, said) = ended(process(&test_dir, &arguments));
    assert_eq!(status.code(), Some(7), "{said}");
    let text = std::fs::read_to_string(test_dir.at("out/program.json")).unwrap();
    for secret in ["a1-x", "b2-x", "c3-x", "d4-x", "e5-x"] {
        assert!(!text.contains(secret) && !said.contains(secret), "{text}");
    }
    assert!(text.contains("plain") && text.contains("--api-key '***'"), "{text}");
}

#[test]
#[ignore = "needs Python 3"]
fn secrets_are_not_in_what_processes_write() {
    let test_dir = TestDir::new();
    let arguments = ["run", "--output", "out", "--", "python3", "script.py", "--api-key", "a1-x", "TOKEN=b2-x"];
    let (status, said) = ended(torch(&test_dir, process(&test_dir, &arguments), "import torch\ntorch.cuda.init()\n"));
    assert_eq!(status.code(), Some(0), "{said}");
    for name in common::names(&test_dir.at("out")).iter().filter(|name| name.ends_with(".json")) {
        let text = std::fs::read_to_string(test_dir.at("out").join(name)).unwrap();
        assert!(!text.contains("a1-x") && !text.contains("b2-x"), "{name}: {text}");
    }
}

#[test]
fn others_cannot_read_a_folder_that_is_made_nor_its_record() {
    let test_dir = TestDir::new();
    let open = |arguments: &[&str]| {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", "umask 0; exec \"$0\" \"$@\"", common::PROGRAM])
            .args(arguments)
            .current_dir(test_dir.at("."));
        let (status, said) = ended(shell);
        assert_eq!(status.code(), Some(0), "{said}");
    };
    open(&["run", "-q", "--", "true"]);
    open(&["run", "-q", "--output", "out", "--", "true"]);
    for folder in ["vramlab-run-1", "out"] {
        let folder = test_dir.at(folder);
        assert_eq!((mode(&folder), mode(&folder.join("program.json"))), (0o700, 0o600));
    }
    // One of an earlier version, in a folder that the user has made.
    std::fs::set_permissions(test_dir.at("out"), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(test_dir.at("out/program.json"), PermissionsExt::from_mode(0o644)).unwrap();
    open(&["run", "-q", "--output", "out", "--", "true"]);
    assert_eq!((mode(&test_dir.at("out")), mode(&test_dir.at("out/program.json"))), (0o755, 0o600));
}

#[test]
#[ignore = "needs Python 3"]
fn others_cannot_read_snapshots() {
    let test_dir = TestDir::new();
    let command = process(&test_dir, &["run", "--output", "out", "--", "sh", "-c", "umask 0; python3 script.py"]);
    let (status, said) = ended(torch(&test_dir, command, "import torch\ntorch.cuda.init()\n"));
    assert_eq!(status.code(), Some(0), "{said}");
    let names = common::names(&test_dir.at("out"));
    assert_eq!(names.len(), 3, "{names:?}");
    names.iter().for_each(|name| assert_eq!(mode(&test_dir.at("out").join(name)), 0o600, "{name}"));
}

#[test]
fn an_allocator_that_was_not_put_in_is_said_first() {
    let test_dir = TestDir::new();
    let command = process(&test_dir, &["run", "--output", "out", "--alloc", "remap", "--", "sh", "-c", "exit 7"]);
    let (status, said) = ended(command);
    assert_eq!(status.code(), Some(7));
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("remap was NOT put under PyTorch: ") && lines[0].contains("-I, -E and -S"), "{said}");
    assert!(lines[1].contains("exit code 7") && lines[1].contains("nothing recorded: "), "{said}");
    let left = record(&test_dir, "out");
    assert_eq!((&left["allocator"], &left["allocator_installed"]), (&json!("remap"), &json!(false)));
}

#[test]
#[ignore = "needs Python 3"]
fn python_without_the_start_hook_is_named() {
    for option in ["-I", "-E", "-S"] {
        let test_dir = TestDir::new();
        // Isolated, it does not find the stand-in by itself.
        let script =
            "import os, sys\nsys.path.insert(0, os.environ['FAKE'])\nimport torch\ntorch.cuda.init()\nprint('ran')\n";
        let arguments = ["run", "--output", "out", "--alloc", "remap", "--", "python3", option, "script.py"];
        let mut command = torch(&test_dir, process(&test_dir, &arguments), script);
        command.env("FAKE", root().join("python/tests/fake"));
        let live = Live::start(command);
        assert_eq!(live.line(), "ran", "{option}");
        let (status, said) = live.end();
        assert_eq!(status.code(), Some(0), "{option}: {said}");
        let first = said.lines().next().unwrap();
        assert!(first.contains("remap was NOT put under PyTorch") && first.contains("-I, -E and -S"), "{said}");
    }
}

/// Small blocks are the reason for the option, so no size is too small for it; only a limit has a smallest value.
#[test]
fn stacks_can_begin_at_any_size() {
    for (size, bytes) in [("64KiB", "65536"), ("1", "1")] {
        let test_dir = TestDir::new();
        let options = ["run", "--frames-from", size, "--", "sh", "-c", "echo $VRAMLAB_FRAMES_FROM"];
        let output = process(&test_dir, &options).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{bytes}\n"), "{size}");
    }
    for (option, value, fault) in
        [("--limit", "64KiB", "64 KiB is less than one segment"), ("--frames-from", "small", "'small' is not a size")]
    {
        let refused = TestDir::new().run(&["run", option, value, "--", "true"]);
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains(fault), "{refused:?}");
    }
}

#[test]
#[ignore = "needs Python 3"]
fn a_rank_that_is_none_leaves_the_record() {
    for (variable, rank) in [
        ("RANK", "99999999999"),
        ("RANK", "-1"),
        ("RANK", ""),
        ("SLURM_PROCID", "²"),
        ("SLURM_PROCID", "٣"),
        ("RANK", &"9".repeat(5000)),
    ] {
        let test_dir = TestDir::new();
        let command = process(&test_dir, &["run", "--output", "out", "--", "python3", "script.py"]);
        let mut command = torch(&test_dir, command, "import sys, torch\ntorch.cuda.init()\nsys.exit(7)\n");
        command.env(variable, rank);
        let (status, said) = ended(command);
        assert_eq!(status.code(), Some(7), "{said}");
        let left = record(&test_dir, "out");
        assert_eq!(left["processes"].as_array().map(Vec::len), Some(1), "{variable}={rank}: {said}");
        assert_eq!(left["processes"][0]["rank"], Value::Null);
        assert!(said.contains("1 snapshot in out"), "{said}");
    }
}
