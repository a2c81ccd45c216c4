//! `experiments campaign` on the parts that need no GPU.
// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

use assert_cmd::Command;
use serde_json::Value;
use std::fs;

fn campaign() -> Command {
    let mut command = Command::cargo_bin("experiments").unwrap();
    command.arg("campaign").env("NO_COLOR", "1");
    command
}

/// The predictions are those of the table that is kept, and a part that is done is not done again.
#[test]
fn truth_is_made_once_and_compared() {
    let place = tempfile::tempdir().unwrap();
    let made = || {
        let found = campaign().args(["truth", "--json", "-o"]).arg(place.path()).assert().success();
        let output = found.get_output().clone();
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        (rows, String::from_utf8(output.stderr).unwrap())
    };
    let (rows, told) = made();
    assert!(told.contains("part     truth"), "{told}");
    assert!(rows.len() > 100 && rows.iter().all(|row| row["ratio"] == 1.0), "{rows:?}");
    let (again, told) = made();
    assert_eq!(again, rows);
    assert!(!told.contains("part     truth"), "{told}");
}

/// A command that ends badly leaves nothing that looks whole, and one whose budget ended is not done.
#[cfg(unix)]
#[test]
fn what_failed_is_not_done() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("parts.toml");
    for (ends, code) in [(1, 1), (4, 4), (130, 130)] {
        let text = format!(
            "[[part]]\nname = 'a'\ncommand = ['sh', '-c', 'echo []; exit {ends}']\nstdout = 'a.json'\ndocuments = []\n\
             [[part.record]]\nmade = 'a.json'\nkept = 'none.json'\nkey = ['arm']\nfigures = ['ms']\n"
        );
        fs::write(&file, text).unwrap();
        let out = place.path().join("out");
        campaign().arg("--file").arg(&file).arg("-o").arg(&out).assert().code(code);
        assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    }
    campaign().args(["none", "--file"]).arg(&file).assert().code(2);
    campaign().args(["--budget", "0"]).assert().code(2);
}
