//! Runs that are ended from outside: by a kill, or by a reader that closes its end.

use super::*;
use std::io::{BufRead, BufReader};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// A run in the background whose stderr is read as it comes.
pub(super) struct Background {
    pub(super) child: Child,
    pub(super) lines: Receiver<String>,
}

impl Background {
    pub(super) fn start(test_dir: &TestDir, arguments: &[&str]) -> Self {
        Self::of(test_dir.process(arguments))
    }

    pub(super) fn of(mut command: std::process::Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, lines }
    }

    pub(super) fn wait_for(&self, start: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|error| panic!("no line '{start}': {error}"));
            if line.starts_with(start) {
                return;
            }
        }
    }

    pub(super) fn signal(&self, name: &str) {
        let sent = std::process::Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    /// Exit status, stdout, and the rest of stderr.
    pub(super) fn end(mut self) -> (ExitStatus, String, Vec<String>) {
        let mut stdout = self.child.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            std::io::Read::read_to_string(&mut stdout, &mut text).map(|_| text)
        });
        let until = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > until {
                let _ = self.child.kill();
                panic!("the run should have ended");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        (status, reader.join().unwrap().unwrap(), self.lines.iter().collect())
    }
}

pub(super) const LONG: [&str; 8] = ["--device", "sim", "--dataset", "digits", "--hidden", "64", "--epochs", "100000"];

#[test]
fn a_kill_leaves_what_was_done() {
    let test_dir = TestDir::new();
    let run = Background::start(&test_dir, &[&LONG[..], &["--out", "record", "--trace"]].concat());
    // A line that was printed is in the record already.
    run.wait_for("epoch  1 ");
    run.signal("-KILL");
    let (status, stdout, _) = run.end();
    assert_eq!((status.code(), stdout.as_str()), (None, ""));
    let json = read_json(&test_dir.at("record/summary.json"));
    assert_eq!(json["status"], "running");
    let epochs = json["epochs"].as_array().unwrap().len();
    assert!(epochs >= 1);
    let losses = column(&test_dir.at("record/steps.csv"), "loss");
    assert!(losses.len() >= 125 * epochs, "{}", losses.len());
    let trace = std::fs::read_to_string(test_dir.at("record/trace.jsonl")).unwrap();
    let whole = trace.rsplit_once('\n').unwrap().0;
    assert!(whole.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
}

#[test]
fn a_kill_before_the_first_epoch_leaves_a_readable_record() {
    let test_dir = TestDir::new();
    let run = Background::start(&test_dir, &[&LONG[..], &["--hidden=700", "--out", "record"]].concat()[2..]);
    drop(run.lines.recv_timeout(PATIENCE));
    run.signal("-KILL");
    run.end();
    // Either nothing was begun, or what there is can be read.
    if test_dir.at("record/summary.json").exists() {
        assert_eq!(read_json(&test_dir.at("record/summary.json"))["epochs"], serde_json::json!([]));
    }
}

/// Runs with one of its outputs closed at the other end from the start.
fn with_closed(arguments: &[&str], stdout: bool) -> (Option<i32>, String) {
    let test_dir = TestDir::new();
    let mut command = test_dir.process(arguments);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    if stdout {
        drop(child.stdout.take())
    } else {
        drop(child.stderr.take())
    };
    let output = child.wait_with_output().unwrap();
    let text = if stdout { output.stderr } else { output.stdout };
    (output.status.code(), String::from_utf8(text).unwrap())
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let base = ["--device", "sim", "--dataset", "iris", "--epochs", "1", "--hidden", "16"];
    let json = [&base[..], &["--json"]].concat();
    for arguments in [&base[..], &json, &["doctor"], &["--help"]] {
        let (code, stderr) = with_closed(arguments, true);
        assert_eq!(code, Some(0), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("error") && !stderr.contains("panicked"), "{arguments:?}: {stderr}");
    }
    // `2>&1 | head` closes both; a closed stderr alone is the harder half.
    let log = [&base[..], &["--json", "--log-driver-calls", "--alloc", "naive"]].concat();
    let (code, stdout) = with_closed(&log, false);
    assert_eq!(code, Some(0), "{stdout}");
    assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap()["status"], "finished");
    let (code, _) = with_closed(&[&base[..], &["--lr=-1"]].concat(), false);
    assert_eq!(code, Some(2), "an error is an error though its message has no reader");
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_behind_stdout_is_an_error() {
    let test_dir = TestDir::new();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let arguments = ["--device", "sim", "--dataset", "iris", "--epochs", "1", "--out", "record"];
    let output = test_dir.process(&arguments).stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("error: cannot write to stdout"), "{stderr}");
    assert_eq!(read_json(&test_dir.at("record/summary.json"))["status"], "finished");
    for arguments in [&["--help"][..], &["--version"], &["start", "-h"], &["completions", "bash"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = test_dir.process(arguments).stdout(full).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {stderr}");
        assert!(
            stderr.lines().count() == 1 && stderr.starts_with("error: cannot write to stdout: No space"),
            "{stderr}"
        );
    }
}
