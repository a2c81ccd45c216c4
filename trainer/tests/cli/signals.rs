//! Signals that end a run.

use super::outside::{Background, LONG, PATIENCE};
use super::*;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

fn recorded(test_dir: &TestDir) -> Background {
    Background::start(test_dir, &[&LONG[..], &["--out", "record", "--json"]].concat())
}

/// Returns true if the parent of these tests ignores SIGHUP, as `nohup` does. Runs inherit that and do not change it.
fn hang_up_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or("0");
    u64::from_str_radix(mask.trim(), 16).unwrap() & 1 == 1
}

#[test]
fn a_signal_ends_a_run_in_order() {
    for (signal, code) in [("-INT", 130), ("-TERM", 143), ("-HUP", 129)] {
        if signal == "-HUP" && hang_up_is_ignored() {
            continue;
        }
        let test_dir = TestDir::new();
        let run = recorded(&test_dir);
        run.wait_for("epoch  1 ");
        // Into the middle of an epoch, which takes some tenths of a second.
        std::thread::sleep(Duration::from_millis(50));
        run.signal(signal);
        let (status, stdout, lines) = run.end();
        assert_eq!(status.code(), Some(code), "{signal}: {lines:?}");
        let errors: Vec<&String> = lines.iter().filter(|line| line.starts_with("error:")).collect();
        assert!(errors.len() == 1 && errors[0].contains("interrupted"), "{lines:?}");
        let json = read_json(&test_dir.at("record/summary.json"));
        assert_eq!(json["status"], "interrupted");
        assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap(), json);
        let epochs = json["epochs"].as_array().unwrap().len();
        let losses = column(&test_dir.at("record/steps.csv"), "loss");
        assert!(epochs >= 1 && (125 * epochs..=125 * (epochs + 1)).contains(&losses.len()), "{}", losses.len());
        assert!(losses.iter().all(|loss| loss.parse::<f32>().unwrap().is_finite()));
    }
}

#[test]
fn an_epoch_that_was_cut_short_is_said_to_be() {
    let test_dir = TestDir::new();
    let run = Background::start(&test_dir, &[&LONG[..], &["--alloc", "naive", "--out", "record"]].concat());
    run.wait_for("epoch  1 ");
    std::thread::sleep(Duration::from_millis(50));
    run.signal("-INT");
    let (status, stdout, lines) = run.end();
    assert_eq!(status.code(), Some(130), "{lines:?}");
    let epochs = read_json(&test_dir.at("record/summary.json"))["epochs"].as_array().unwrap().len();
    let steps = column(&test_dir.at("record/steps.csv"), "loss").len();
    assert!(!stdout.contains(", 0 of them"), "{stdout}");
    // A signal may come exactly between two epochs.
    let cut = format!("the last in epoch {}, which was cut short", epochs + 1);
    assert!(steps == 125 * epochs || stdout.replace('\n', " ").contains(&cut), "{stdout}");
}

#[test]
fn a_second_signal_ends_a_run_that_does_not_end() {
    let test_dir = TestDir::new();
    // One step takes many seconds.
    let arguments = ["--device=sim", "--dataset=digits", "--hidden=3000", "--layers=4", "--batch=8000", "--out=record"];
    let run = Background::start(&test_dir, &arguments);
    run.wait_for("train ");
    run.signal("-INT");
    run.signal("-TERM");
    let (status, _, lines) = run.end();
    assert_eq!(status.code(), Some(143), "{lines:?}");
    assert_eq!(read_json(&test_dir.at("record/summary.json"))["status"], "running");
    // The disk space that the run reserved was freed with it.
    let left = std::fs::read_dir(test_dir.at("record")).unwrap();
    assert!(left.map(|entry| entry.unwrap().file_name()).all(|name| !name.to_string_lossy().ends_with(".part")));
}

#[test]
fn without_a_record_the_first_signal_ends_it() {
    let test_dir = TestDir::new();
    // A mirror that accepts the connection and sends nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mirror = format!("http://{}/", silent.local_addr().unwrap());
    let mut command = test_dir.process(&["--device=sim", "--dataset=mnist", "--out=record"]);
    command.env("MNIST_MIRROR", mirror);
    let run = Background::of(command);
    let _asked = silent.accept().unwrap();
    run.signal("-TERM");
    let (status, stdout, lines) = run.end();
    assert_eq!((status.code(), stdout.as_str()), (Some(143), ""), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("interrupted before the record was opened")), "{lines:?}");
    assert!(!test_dir.at("record").exists());
}

#[test]
fn a_start_file_under_way_goes_with_its_program() {
    let test_dir = TestDir::new();
    // Half a gigabyte, which takes a while.
    let run = Background::start(
        &test_dir,
        &["start", "-o", "start.safetensors", "--dataset", "iris", "--hidden=8000", "--layers=4"],
    );
    let until = std::time::Instant::now() + PATIENCE;
    while !names(&test_dir).iter().any(|name| name.ends_with(".part")) {
        assert!(std::time::Instant::now() < until, "no part was begun");
        std::thread::sleep(Duration::from_millis(2));
    }
    run.signal("-INT");
    let (status, _, lines) = run.end();
    assert_eq!(status.code(), Some(130), "{lines:?}");
    assert_eq!(names(&test_dir), [""; 0]);
}

fn names(test_dir: &TestDir) -> Vec<String> {
    std::fs::read_dir(test_dir.at("."))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name != "cache")
        .collect()
}

/// As under `nohup`.
#[test]
#[cfg(target_os = "linux")]
fn a_hangup_that_is_ignored_stays_so() {
    let test_dir = TestDir::new();
    let mut command = std::process::Command::new("sh");
    let script = "trap '' HUP; exec \"$0\" \"$@\"";
    test_dir.settle(command.args(["-c", script, env!("CARGO_BIN_EXE_trainer")]).args(LONG).args(["--out", "record"]));
    let run = Background::of(command);
    run.wait_for("epoch  1 ");
    run.signal("-HUP");
    run.wait_for("epoch  ");
    run.signal("-TERM");
    let (status, _, lines) = run.end();
    assert_eq!((status.code(), status.signal()), (Some(143), None), "{lines:?}");
}
