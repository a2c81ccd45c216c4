//! `vramlab replay` and `experiments compare` know the backends, and go on with this program: `cargo test`.

use std::process::Command;

const HISTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../experiments/histories/streams.pickle.xz");

fn vramlab(arguments: &[&str]) -> String {
    program("vramlab", arguments)
}

fn program(word: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bump-allocator"));
    let output = command.arg(word).args(arguments).env_remove("CARGO").output().expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it writes text")
}

#[test]
fn a_history_is_replayed_under_each() {
    let json = vramlab(&["replay", HISTORY, "--alloc", "bump,snug,worst,buddy,caching", "--plan", "off", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&json).expect("it is JSON");
    let rows = rows.as_array().expect("an object for each");
    let names: Vec<&str> = rows.iter().filter_map(|row| row["allocator"].as_str()).collect();
    assert_eq!(names, ["bump", "snug", "worst", "buddy", "caching"]);
    for row in rows {
        assert_eq!((&row["failed_allocations"], &row["allocations"]), (&0.into(), &rows[4]["allocations"]), "{row}");
    }
    // A policy of its own reserves what no other does.
    assert_ne!(rows[2]["peak_reserved_bytes"], rows[4]["peak_reserved_bytes"], "{rows:?}");
}

#[test]
fn the_next_command_is_one_of_this_program() {
    let page = vramlab(&["replay", HISTORY, "--alloc", "bump,worst", "--plan", "off"]);
    let next = page.lines().find_map(|line| line.strip_prefix("Next: ")).expect("it says how to go on");
    let mut words = next.split(' ');
    assert_eq!(words.next(), Some(env!("CARGO_BIN_EXE_bump-allocator")), "{next}");
    assert_eq!(words.next(), Some("vramlab"), "{next}");
    let command: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    vramlab(&[&command[..], &["--json"]].concat());
}

#[test]
fn allocators_are_compared() {
    let run = ["compare", "--alloc", "bump,caching", "--device", "sim", "--dataset", "iris", "--epochs", "1"];
    let json = program("experiments", &[&run[..], &["--json"]].concat());
    let found: serde_json::Value = serde_json::from_str(&json).expect("it is JSON");
    let arms: Vec<&str> =
        found.as_array().expect("an object for each").iter().filter_map(|arm| arm["arm"].as_str()).collect();
    assert_eq!(arms.iter().map(|arm| arm.contains("bump")).collect::<Vec<_>>(), [true, false], "{json}");
    let page = program("experiments", &run);
    let next = page.lines().find_map(|line| line.strip_prefix("Next: ")).expect("it says how to go on");
    assert!(next.starts_with(env!("CARGO_BIN_EXE_bump-allocator")), "{next}");
}
