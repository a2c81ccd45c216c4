//! `vramlab nsight` on exports made by hand.

use crate::nsight_export::{Version, training};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn nsight(file: &Path, arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_vramlab");
    Command::new(program).arg("nsight").arg(file).args(arguments).env("NO_COLOR", "1").output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_first_line_names_the_call_that_waited() {
    let export = training(Version::New, 25);
    let text = stdout(&nsight(&export.path, &[]));
    let words: Vec<&str> = text.split_whitespace().collect();
    let text = words.join(" ");
    assert!(text.starts_with("cuMemFree waited 3.90 us in 25 of 50 calls, behind relu. "), "{text}");
    assert!(text.contains("75 memory calls take 4.35 us of 25.0 us: 3.90 us waiting for the device"), "{text}");
    assert!(text.contains(" --tables"), "{text}");
    for line in stdout(&nsight(&export.path, &["--tables", "--top", "3"])).lines() {
        assert!(line.chars().count() <= 120, "{line}");
    }
}

#[test]
fn json_has_every_wait() {
    let export = training(Version::Old, 25);
    let document: Value = serde_json::from_str(&stdout(&nsight(&export.path, &["--json"]))).unwrap();
    assert_eq!(document["steps"], 25);
    assert_eq!(document["memory"]["blocked_ns"], 25 * 156);
    let waits = document["tables"]["blocked_calls"].as_array().unwrap();
    assert_eq!(waits.len(), 25);
    assert_eq!(waits[3]["path"], "epoch 1/step 4/forward/free 4 KiB");
    let behind = &document["tables"]["waited_for"];
    assert_eq!(behind.as_array().unwrap().len(), 1);
    assert_eq!((&behind[0]["call"], &behind[0]["waited_for"]), (&Value::from("cuMemFree"), &Value::from("relu")));
}

#[test]
fn the_page_has_one_picture_and_no_script() {
    let mut export = training(Version::New, 25);
    export.kernel("<b>&\"'", (30_000, 30_010), (30_020, 30_100));
    export.call("cudaFree_v3020", 30_030, 30_110);
    let page = export.path.with_extension("html");
    let read = || {
        stdout(&nsight(&export.path, &["-o", page.to_str().unwrap()]));
        std::fs::read_to_string(&page).unwrap()
    };
    let html = read();
    assert_eq!(html.matches("<svg").count(), 1);
    assert!(html.contains("cuMemFree waited 3.90 us in 25 of 50 calls, behind relu"));
    assert!(html.contains(">step "), "a step is drawn");
    assert!(html.contains("url(#wait)"));
    assert!(!html.contains("<b>") && !html.contains("<script"));
    assert_eq!(html, read(), "the same capture gives the same page");
}

#[test]
fn other_files_are_refused_in_one_line() {
    let directory = tempfile::tempdir().unwrap();
    let text = directory.path().join("x.sqlite");
    std::fs::write(&text, "not a database ".repeat(300)).unwrap();
    let report = directory.path().join("x.nsys-rep");
    std::fs::write(&report, "a report").unwrap();
    for (file, part) in [
        (text.as_path(), "nsys export --type sqlite"),
        (report.as_path(), "`nsys` is not on the PATH"),
        (&directory.path().join("missing.nsys-rep"), "No such file"),
        (directory.path(), "not a regular file"),
    ] {
        let program = env!("CARGO_BIN_EXE_vramlab");
        let output = Command::new(program).arg("nsight").arg(file).env("PATH", "").output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let stderr = String::from_utf8(output.stderr).unwrap();
        let error = stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(error.contains(part), "{error}");
        assert!(output.stdout.is_empty());
    }
}
