//! Files that a user names, and disks that are full.

use super::*;
use std::os::unix::fs::symlink;

/// Sorted names in a directory.
fn names(directory: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_start_file_replaces_regular_files_alone() {
    let test_dir = TestDir::new();
    test_dir.write("target", "old");
    test_dir.write("out/start.part", "mine");
    test_dir.write("out/.start.part", "mine too");
    symlink("../target", test_dir.at("out/link")).unwrap();
    symlink("nowhere", test_dir.at("out/dangling")).unwrap();
    std::fs::create_dir(test_dir.at("out/folder")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(test_dir.at("out/pipe")).status().unwrap().success());
    let mut cases = vec![
        ("link", "is a symbolic link to ../target"),
        ("dangling", "is a symbolic link to nowhere"),
        ("folder", "is a directory"),
        ("pipe", "is a pipe"),
    ];
    // A null device of our own, where the user may make one.
    let mut mknod = std::process::Command::new("mknod");
    if mknod.arg(test_dir.at("out/null")).args(["c", "1", "3"]).output().unwrap().status.success() {
        cases.push(("null", "is a device"));
    }
    let before = names(&test_dir.at("out"));
    for (name, said) in cases {
        let path = format!("out/{name}");
        test_dir.run(&["start", "-o", &path, "--dataset", "iris"]).refused(&[&path, said]);
        test_dir.iris(&["--save-start", &path, "--out", "record"]).refused(&[&path, said]);
        assert!(!test_dir.at("record").exists(), "{name}: refused before there is a record");
    }
    for stream in ["-", "/dev/stdout"] {
        test_dir.run(&["start", "-o", stream, "--dataset", "iris"]).refused(&[stream, "is a stream"]);
    }
    test_dir
        .run(&["start", "-o", "out/nowhere/start", "--dataset", "iris"])
        .refused(&["there is no folder out/nowhere"]);
    assert_eq!(names(&test_dir.at("out")), before);
    assert_eq!(std::fs::read(test_dir.at("target")).unwrap(), b"old");
    assert!(!std::fs::symlink_metadata(test_dir.at("out/pipe")).unwrap().file_type().is_file());

    test_dir.run(&["start", "-o", "out/start", "--dataset", "iris"]).ok();
    test_dir.iris(&["--save-start", "out/start"]).ok();
    assert_eq!(std::fs::read(test_dir.at("out/start.part")).unwrap(), b"mine");
    assert_eq!(std::fs::read(test_dir.at("out/.start.part")).unwrap(), b"mine too");
    assert_eq!(names(&test_dir.at("out")).len(), before.len() + 1);
}

#[test]
fn of_runs_that_name_one_folder_at_once_one_gets_it() {
    for round in 0..10 {
        let test_dir = TestDir::new();
        if round % 2 == 0 {
            std::fs::create_dir(test_dir.at("record")).unwrap();
        }
        let arguments = ["--device", "sim", "--dataset", "iris", "--hidden", "16", "--epochs", "2", "--out", "record"];
        let start = || {
            let mut run = test_dir.process(&arguments);
            run.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
        };
        let runs: Vec<_> = (0..6).map(|_| start()).collect();
        let runs = runs.into_iter().map(|run| ProgramOutput::of_output(run.wait_with_output().unwrap()));
        let (won, lost): (Vec<ProgramOutput>, Vec<ProgramOutput>) = runs.partition(|run| run.code == Some(0));
        assert_eq!(won.len(), 1, "{lost:#?}");
        lost.iter().for_each(|lost| lost.refused(&["record exists already", "choose another directory with --out"]));
        assert_eq!(read_json(&test_dir.at("record/summary.json"))["status"], "finished");
        assert_eq!(column(&test_dir.at("record/steps.csv"), "step").len(), 4);
    }
}

#[test]
fn a_run_that_is_refused_leaves_the_start_file_that_was_there() {
    let test_dir = TestDir::new();
    test_dir.write("start", "old");
    test_dir.write("record/summary.json", "{}");
    test_dir.iris(&["--save-start", "start", "--out", "record"]).refused(&["record exists already"]);
    test_dir.iris(&["--save-start", "start", "--memory-limit", "1K"]).refused(&["--memory-limit"]);
    assert_eq!(std::fs::read(test_dir.at("start")).unwrap(), b"old");
}

#[test]
fn a_record_goes_into_an_empty_directory() {
    let test_dir = TestDir::new();
    std::fs::create_dir(test_dir.at("record")).unwrap();
    test_dir.iris(&["--out", "record"]).ok();
    assert_eq!(read_json(&test_dir.at("record/summary.json"))["status"], "finished");
    test_dir.iris(&["--out", "record"]).refused(&["record exists already and holds a run that finished"]);
}

/// Runs in the directory `disk` of a place, a file system of this size, whose files are copied to `left` afterwards.
fn on_a_disk(size: &str, runs: &[&[&str]]) -> (TestDir, Vec<ProgramOutput>) {
    let test_dir = TestDir::new();
    std::fs::create_dir(test_dir.at("disk")).unwrap();
    let begin = format!("mount -t tmpfs -o size={size} tmpfs disk || exit 77; cd disk");
    let mut script = vec![begin];
    for (number, run) in runs.iter().enumerate() {
        let words: Vec<String> = run.iter().map(|word| format!("'{word}'")).collect();
        let run = format!("\"$0\" {} >../out{number} 2>../err{number}; echo $? >../code{number}", words.join(" "));
        script.push(run);
    }
    script.push("cp -a . ../left".to_owned());
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "--map-root-user", "sh", "-c", &script.join("\n"), env!("CARGO_BIN_EXE_trainer")]);
    test_dir.settle(&mut command);
    let output = command.output().unwrap();
    assert!(test_dir.at("left").exists(), "no disk of one's own: {}", String::from_utf8_lossy(&output.stderr));
    let read = |name: String| std::fs::read_to_string(test_dir.at(&name)).unwrap();
    let process_output = (0..runs.len()).map(|number| ProgramOutput {
        code: read(format!("code{number}")).trim().parse().ok(),
        stdout: read(format!("out{number}")),
        stderr: read(format!("err{number}")),
    });
    let process_output = process_output.collect();
    (test_dir, process_output)
}

/// Asserts that a record reports a full disk and has only complete lines and no `.part` files.
fn assert_closed(record: &std::path::Path, process_output: &ProgramOutput, file: &str, said: &str) {
    let line = process_output.error(1);
    for words in [file, said, "it needs at least ", "the run record is incomplete"] {
        assert!(line.contains(words), "'{words}' is missing: {line}");
    }
    let json = read_json(&record.join("summary.json"));
    assert_eq!(json["status"], "failed");
    assert_eq!(Some(json["error"].as_str().unwrap()), line.strip_prefix("error: "));
    let left = names(record);
    assert!(left.iter().all(|name| !name.ends_with(".part")), "{left:?}");
    let trace = std::fs::read_to_string(record.join("trace.jsonl")).unwrap();
    assert!(trace.is_empty() || trace.ends_with('\n'));
    assert!(trace.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
}

const TRACED: [&str; 13] = [
    "--device",
    "sim",
    "--dataset",
    "digits",
    "--hidden",
    "16",
    "--epochs",
    "3",
    "--trace",
    "--latency",
    "off",
    "--out",
    "record",
];

#[test]
#[ignore = "needs the right to mount a file system; run with --ignored"]
fn a_disk_that_fills_up_is_told_and_the_record_closed() {
    let again = [&TRACED[..], &["--seed", "1"]].concat();
    let elsewhere = ["--device", "sim", "--dataset", "iris", "--hidden", "16", "--epochs", "1", "--out", "small"];
    let (test_dir, process_output) = on_a_disk("1m", &[&TRACED, &again, &elsewhere]);
    assert_closed(&test_dir.at("left/record"), &process_output[0], "record/trace.jsonl", "No space left on device");
    assert!(process_output[0].stderr.contains("make room there, or name another place"), "{:?}", process_output[0]);
    process_output[1].error(2);
    assert!(
        process_output[1].stderr.contains("holds a run that failed; choose another directory"),
        "{:?}",
        process_output[1]
    );
    // The room that was kept for the summary is there again.
    assert_eq!(process_output[2].code, Some(0), "{:?}", process_output[2]);
}

#[test]
#[ignore = "needs the right to mount a file system; run with --ignored"]
fn on_a_full_disk_nothing_is_begun() {
    let small: &[&str] = &["--device", "sim", "--dataset", "iris", "--epochs", "1", "--out", "a/record"];
    let start: &[&str] = &["start", "-o", "start", "--dataset", "iris"];
    let (test_dir, process_output) = on_a_disk("32k", &[small, small, start, &small[..6]]);
    for process_output in &process_output {
        let line = process_output.error(1);
        assert!(line.contains("No space left on device") && line.contains("make room there"), "{line}");
    }
    assert!(
        process_output[2].stderr.contains("start: cannot be written") && process_output[2].stderr.contains("it needs "),
        "{:?}",
        process_output[2]
    );
    assert_eq!(names(&test_dir.at("left")), ["a", "runs"]);
    assert_eq!((names(&test_dir.at("left/a")).len(), names(&test_dir.at("left/runs")).len()), (0, 0));
}

#[test]
#[ignore = "needs the right to mount a file system; run with --ignored"]
fn a_start_file_without_room_fails_the_run_before_training() {
    let run = ["--device", "sim", "--dataset", "iris", "--hidden", "1000", "--out", "record", "--save-start", "start"];
    let (test_dir, process_output) = on_a_disk("1m", &[&run]);
    let line = process_output[0].error(1);
    for words in ["start: cannot be written: No space left", "it needs ", "room for ", "no start file was written"] {
        assert!(line.contains(words), "{line}");
    }
    let json = read_json(&test_dir.at("left/record/summary.json"));
    assert_eq!((&json["status"], &json["start"]), (&"failed".into(), &Value::Null));
    assert_eq!(names(&test_dir.at("left")), ["record"]);
}

#[test]
#[ignore = "needs the right to mount a file system; run with --ignored"]
fn exports_without_room_are_not_left_half_written() {
    let run = [
        "--device",
        "sim",
        "--dataset",
        "iris",
        "--hidden",
        "16",
        "--epochs",
        "20",
        "--latency",
        "off",
        "--out",
        "record",
        "--export",
        "perfetto,snapshot-json",
    ];
    // Room for all but half of the exports, and in blocks of at most 4 KiB.
    let whole = TestDir::new();
    whole.run(&run).ok();
    let length = |name: &str| std::fs::metadata(whole.at("record").join(name)).unwrap().len();
    let [exports, others]: [u64; 2] = [
        ["perfetto.json", "snapshot.json"].map(length).iter().sum(),
        ["driver_calls.jsonl", "steps.csv", "summary.json", "trace.jsonl"].map(|name| length(name) + 4096).iter().sum(),
    ];
    let (test_dir, process_output) = on_a_disk(&(others + exports / 2).to_string(), &[&run]);
    let line = process_output[0].error(1);
    assert!(line.contains("No space left on device") && line.contains("it needs at least "), "{line}");
    assert!(line.contains("perfetto.json") || line.contains("snapshot.json"), "{line}");
    let json = read_json(&test_dir.at("left/record/summary.json"));
    assert_eq!((&json["status"], &json["files"]["exports"]), (&"failed".into(), &Value::Null));
    assert_eq!(json["epochs"].as_array().unwrap().len(), 20, "what was done before is whole");
    assert_eq!(names(&test_dir.at("left/record")), ["driver_calls.jsonl", "steps.csv", "summary.json", "trace.jsonl"]);
}

#[test]
fn a_limit_on_the_length_of_files_is_told_and_the_record_closed() {
    let test_dir = TestDir::new();
    let mut command = std::process::Command::new("sh");
    test_dir
        .settle(command.args(["-c", "ulimit -f 256; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_trainer")]).args(TRACED));
    let process_output = ProgramOutput::of(Command::from_std(command));
    assert_closed(&test_dir.at("record"), &process_output, "record/trace.jsonl", "File too large");
    assert!(process_output.stderr.contains("raise the limit"), "{process_output:?}");
}

// `trainer start` and `--save-start`.

#[test]
fn a_start_is_written_without_training() {
    let test_dir = TestDir::new();
    let process_output = test_dir.run(&["start", "-o", "start.safetensors", "--dataset", "iris", "--hidden", "5"]).ok();
    assert!(process_output.stderr.contains("start    start.safetensors (SHA-256 "), "{process_output:#?}");
    assert_eq!(process_output.stdout, "");
    assert!(test_dir.at("start.safetensors").is_file());
    assert!(!test_dir.at("runs").exists(), "nothing was trained");

    let json = test_dir.run(&["start", "-o", "other", "--dataset", "iris", "--hidden", "5", "--json"]).ok().json();
    assert_eq!(keys(&json), ["path", "sha256"]);
    assert!(process_output.stderr.contains(json["sha256"].as_str().unwrap()), "the same options give the same file");
}

#[test]
fn a_run_writes_its_start_and_goes_on() {
    let test_dir = TestDir::new();
    let json = test_dir.iris(&["--save-start", "start.safetensors", "--out", "record", "--json"]).ok().json();
    assert_eq!(json["status"], "finished");
    assert_eq!(json["start"]["path"], "start.safetensors");
    test_dir.run(&["start", "-o", "again", "--dataset", "iris", "--hidden", "16", "--epochs", "2"]).ok();
    let read = |name: &str| std::fs::read(test_dir.at(name)).unwrap();
    assert_eq!(read("start.safetensors"), read("again"));
}

#[test]
fn a_start_that_cannot_be_written_is_refused() {
    let test_dir = TestDir::new();
    let cases = [
        ("nowhere/start.safetensors", "there is no folder nowhere; make it first"),
        (".", "is a directory; name a file"),
    ];
    for (bad, said) in cases {
        let words = ["no start file can be written", bad, said];
        test_dir.run(&["start", "-o", bad, "--dataset", "iris"]).refused(&words);
        test_dir.iris(&["--save-start", bad, "--out", "record"]).refused(&words);
    }
    assert!(!test_dir.at("record").exists(), "nothing ran, so there is nothing to record");
    test_dir
        .run(&["start", "-o", "start", "--dataset", "iris", "--hidden", "0"])
        .refused(&["--hidden must be at least 1"]);
    test_dir.run(&["start", "--dataset", "iris"]).unparsable(&["required"]);
    test_dir.run(&["start", "-o", "start", "--alloc", "naive"]).unparsable(&["--alloc"]);
    assert!(!test_dir.at("start").exists());
}
