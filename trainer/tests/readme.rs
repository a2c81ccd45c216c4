//! The README shows what its first command prints.

use assert_cmd::Command;
use std::path::Path;

#[test]
fn the_readme_shows_what_the_program_prints() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    let shown = readme.split("```text\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let output = Command::cargo_bin("trainer")
        .unwrap()
        .args(["--alloc", "caching", "--device", "sim", "--dataset", "digits", "--out"])
        .arg(directory.path().join("run"))
        .env("NO_COLOR", "1")
        .output()
        .unwrap();
    assert!(output.status.success());
    let printed = [output.stderr, output.stdout].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    let mut left = printed.as_str();
    for line in shown.lines().filter(|line| *line != "...") {
        let at = left
            .find(line)
            .unwrap_or_else(|| panic!("README.md shows '{line}', which the program does not print there"));
        left = &left[at + line.len()..];
    }
}
