//! The three programs accept the backends: the trainer computes the same losses under each; `vramlab replay` and
//! `experiments compare` compare them and suggest commands of this program.

use std::process::Command;

const HISTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../histories/streams.pickle.xz");

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_bump-allocator"))
}

/// The program's stdout.
fn stdout(arguments: &[&str]) -> String {
    let output = program().args(arguments).env_remove("CARGO").output().expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it writes text")
}

/// The losses of each epoch, sums over its steps, to the last bit.
fn computed(record: &str) -> Vec<String> {
    let record: serde_json::Value = serde_json::from_str(record).expect("a record is JSON");
    let epochs = record["epochs"].as_array().expect("a record has epochs");
    let losses: Vec<String> =
        epochs.iter().map(|epoch| format!("{} {}", epoch["train_loss"], epoch["val_loss"])).collect();
    assert!(!losses.is_empty() && !losses.join(" ").contains("null"), "{losses:?}");
    losses
}

#[test]
fn losses_are_those_of_the_default_allocator() {
    let run = |allocator: &str| {
        stdout(&["--device", "sim", "--dataset", "iris", "--epochs", "2", "--json", "--alloc", allocator])
    };
    let usual = computed(&run("caching"));
    for (allocator, name) in [("bump:segment=4M", "bump"), ("snug", "snug"), ("worst", "worst"), ("buddy", "buddy")] {
        let record = run(allocator);
        let read: serde_json::Value = serde_json::from_str(&record).expect("a record is JSON");
        assert_eq!(read["settings"]["allocator"], name, "the record names the allocator");
        assert_eq!(computed(&record), usual, "{name}");
    }
}

#[test]
fn the_command_line_knows_its_settings() {
    let output = program().args(["--device", "sim", "--alloc", "bump:segmant=4M"]).output().expect("the program runs");
    assert_eq!(output.status.code(), Some(2), "a wrong setting is a mistake of the command line");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("bump") && stderr.contains("did you mean 'segment'"), "{stderr}");
}

#[test]
fn a_history_is_replayed_under_each() {
    let json =
        stdout(&["vramlab", "replay", HISTORY, "--alloc", "bump,snug,worst,buddy,caching", "--plan", "off", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&json).expect("it is JSON");
    let rows = rows.as_array().expect("an object for each");
    let names: Vec<&str> = rows.iter().filter_map(|row| row["allocator"].as_str()).collect();
    assert_eq!(names, ["bump", "snug", "worst", "buddy", "caching"]);
    for row in rows {
        assert_eq!((&row["failed_allocations"], &row["allocations"]), (&0.into(), &rows[4]["allocations"]), "{row}");
    }
    // The policy's peak differs from every other backend's.
    assert_ne!(rows[2]["peak_reserved_bytes"], rows[4]["peak_reserved_bytes"], "{rows:?}");
}

#[test]
fn the_next_command_is_one_of_this_program() {
    let page = stdout(&["vramlab", "replay", HISTORY, "--alloc", "bump,worst", "--plan", "off"]);
    let next = page.lines().find_map(|line| line.strip_prefix("Next: ")).expect("it says how to go on");
    let mut words = next.split(' ');
    assert_eq!(words.next(), Some(env!("CARGO_BIN_EXE_bump-allocator")), "{next}");
    let command: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    assert_eq!(command[0], "vramlab", "{next}");
    stdout(&[&command[..], &["--json"]].concat());
}

#[test]
fn allocators_are_compared() {
    let run =
        ["experiments", "compare", "--alloc", "bump,caching", "--device", "sim", "--dataset", "iris", "--epochs", "1"];
    let json = stdout(&[&run[..], &["--json"]].concat());
    let rows: serde_json::Value = serde_json::from_str(&json).expect("it is JSON");
    let arms: Vec<&str> =
        rows.as_array().expect("an object for each").iter().filter_map(|arm| arm["arm"].as_str()).collect();
    assert_eq!(arms.iter().map(|arm| arm.contains("bump")).collect::<Vec<_>>(), [true, false], "{json}");
    let page = stdout(&run);
    let next = page.lines().find_map(|line| line.strip_prefix("Next: ")).expect("it says how to go on");
    assert!(next.starts_with(env!("CARGO_BIN_EXE_bump-allocator")), "{next}");
}
