//! `diff` on small recordings with known answers.

use crate::common::TestDir;
use crate::common::story::{MIB, Story, script};
use serde_json::{Value, json};
use std::path::Path;

/// Lines with a constant block, a second block, a freed block and a new block.
fn story(frames: bool) -> Story {
    let frame = |line, name| if frames { json!([script(line, name)]) } else { json!([]) };
    let mut story = Story::default();
    story.segment(0, 60 * MIB, 0);
    story.alloc(0, 2 * MIB, 0, frame(1, "keeps"));
    story.alloc(2 * MIB, 4 * MIB, 0, frame(2, "grows"));
    story.alloc(10 * MIB, 6 * MIB, 0, frame(3, "goes"));
    story.annotate("second", "START", story.events.len());
    story.alloc(20 * MIB, 5 * MIB, 0, frame(2, "grows"));
    story.free(10 * MIB, 6 * MIB, 0);
    story.alloc(30 * MIB, 8 * MIB, 0, frame(4, "comes"));
    story
}

fn diff_json(dir: &TestDir, arguments: &[&str]) -> Value {
    let output = dir.run(&[&["diff", "--json"], arguments].concat()).ok();
    serde_json::from_str(&output.stdout).unwrap()
}

fn lines(diff: &Value) -> Vec<(&str, &str, u64, u64)> {
    let mib = |row: &Value, key: &str| row[key].as_u64().unwrap() / MIB;
    let row = |row: &'_ Value| {
        let text = |key: &str| row[key].as_str().unwrap().to_owned().leak() as &str;
        (text("line"), text("change"), mib(row, "before_bytes"), mib(row, "after_bytes"))
    };
    diff["lines"].as_array().unwrap().iter().map(row).collect()
}

const CHANGED: [(&str, &str, u64, u64); 3] = [
    ("proj/train.py:4 comes", "new", 0, 8),
    ("proj/train.py:3 goes", "gone", 6, 0),
    ("proj/train.py:2 grows", "grew", 4, 9),
];

#[test]
fn two_moments_of_one_snapshot_are_compared() {
    let dir = TestDir::new();
    let file = dir.write("a.json", story(true).text());
    let end = diff_json(&dir, &[&file, "--at", "4", "end"]);
    assert_eq!(lines(&end), CHANGED);
    assert_eq!((&end["before"]["moment"]["event"], &end["after"]["moment"]["event"]), (&json!(4), &json!(8)));
    assert_eq!(end["after"]["moment"]["active_bytes"], json!(19 * MIB));
    // The reverse comparison.
    let back = diff_json(&dir, &[&file, "--at", "end", "4"]);
    assert_eq!(lines(&back)[2], ("proj/train.py:2 grows", "shrank", 9, 4));
    // By name: the annotation starts at the fifth event, and the peak is the last.
    let named = diff_json(&dir, &[&file, "--at", "second", "peak"]);
    assert_eq!((&named["before"]["moment"]["event"], &named["after"]["moment"]["event"]), (&json!(5), &json!(8)));
    assert_eq!(diff_json(&dir, &[&file, "--at", "start", "4"])["before"]["moment"]["active_bytes"], json!(0));
    let screen = dir.run(&["diff", &file, "--at", "4", "end"]).ok().stdout;
    for words in ["active memory +7 MiB: 12 MiB before, 19 MiB after", "gone", "1 -> 2", "proj/train.py:4 comes"] {
        assert!(screen.contains(words), "{words}: {screen}");
    }
}

#[test]
fn two_snapshots_are_compared() {
    let dir = TestDir::new();
    let whole = story(true);
    let mut half = story(true);
    half.events.truncate(4);
    let (before, after) = (dir.write("before.json", half.text()), dir.write("after.json", whole.text()));
    let diff = diff_json(&dir, &[&before, &after]);
    assert_eq!(lines(&diff), CHANGED);
    assert_eq!((&diff["before"]["trace"], &diff["after"]["at"]), (&json!(before), &json!("end")));
    // One moment for both, or one for each.
    assert_eq!(lines(&diff_json(&dir, &[&before, &after, "--at", "4"])), []);
    assert_eq!(lines(&diff_json(&dir, &[&before, &after, "--at", "end", "4"])), []);
    let screen = dir.run(&["diff", &before, &before]).ok().stdout;
    assert!(screen.contains("no difference") && screen.contains("compare the peaks with --at peak"), "{screen}");
}

#[test]
fn recordings_without_frames_are_compared_by_size() {
    let dir = TestDir::new();
    let file = dir.write("sizes.json", story(false).text());
    let diff = diff_json(&dir, &[&file, "--at", "4", "end"]);
    let sizes: Vec<(u64, &str)> = diff["sizes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["requested_bytes"].as_u64().unwrap() / MIB, row["change"].as_str().unwrap()))
        .collect();
    assert_eq!(sizes, [(8, "new"), (6, "gone"), (5, "new")]);
    let screen = dir.run(&["diff", &file, "--at", "4", "end"]).ok().stdout;
    assert!(screen.contains("by requested size") && screen.contains("has no stack frames"), "{screen}");
}

#[test]
fn invalid_comparisons_are_refused_in_one_line() {
    let dir = TestDir::new();
    let file = dir.write("a.json", story(true).text());
    for (arguments, words) in [
        (&[file.as_str()][..], "name a second snapshot, or two moments"),
        (&[&file, "--at", "4"], "name a second snapshot, or two moments"),
        (&[&file, "--at", "4", "9"], "--at 9: events are numbered 1 to 8"),
        (&[&file, "--at", "4", "third"], "no annotation 'third'"),
        (&[&file, "missing.json"], "missing.json"),
        (&["-", "-"], "both recordings are the standard input"),
    ] {
        dir.run(&[&["diff"], arguments].concat()).refused(2, &[words]);
    }
}

// `vramlab plan`, and the allocator that follows its placement.

/// A recording of the repository.
fn trace(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories").join(name);
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_replay_by_its_offline_placement_needs_the_planned_memory() {
    let dir = TestDir::new();
    let plan = dir.at("plan.json");
    let alloc = format!("plan:file={}", plan.to_str().unwrap());
    // With two streams both plans: that with waits between them, and that without.
    for (name, order) in [("mlp", &[][..]), ("streams", &[][..]), ("streams", &["--known-order"][..])] {
        let file = trace(&format!("{name}.pickle.xz"));
        let made = ["plan", &file, "-o", plan.to_str().unwrap(), "--steps", "1000000", "--json"];
        let made: serde_json::Value = serde_json::from_str(&dir.run(&[&made[..], order].concat()).ok().stdout).unwrap();
        assert_eq!(made["known_order"], !order.is_empty());
        let count = |key: &str| made[key].as_u64().unwrap();
        assert!(0 < count("segment_requests") && count("segment_requests") < count("allocations") / 10, "{made}");
        assert!(count("stitchable_requests") < count("segment_requests"), "{made}");
        for device in ["sim", "null"] {
            let rows =
                dir.run(&["replay", &file, "--alloc", &alloc, "--device", device, "--plan", "off", "--json"]).rows();
            let row = &rows[0];
            assert_eq!((&row["peak_reserved_bytes"], &row["unplanned_allocations"]), (&made["plan_bytes"], &json!(0)));
            assert_eq!((&row["planned_allocations"], &row["segment_allocs"]), (&made["allocations"], &json!(1)));
            assert!(row["lower_bound_bytes"].as_u64() <= made["plan_bytes"].as_u64(), "{name}");
        }
    }
    // Another history, by the last plan.
    let file = trace("mlp.pickle.xz");
    let rows = dir.run(&["replay", &file, "--alloc", &alloc, "--device", "null", "--plan", "off", "--json"]).rows();
    assert!(rows[0]["unplanned_allocations"].as_u64() > Some(0) && rows[0]["failed_allocations"] == 0, "{}", rows[0]);
    let table = dir.run(&["replay", &file, "--alloc", &alloc, "--device", "null", "--plan", "off"]).ok().stdout;
    assert!(table.contains("not as planned"), "{table}");
    let text = dir.run(&["plan", &file, "--steps", "1000"]).ok().stdout;
    assert!(text.contains("Offline placement:") && text.contains("plan.json"), "{text}");
    let bad = dir.write("bad.json", "[]");
    dir.run(&["replay", &file, "--alloc", &format!("plan:file={bad}")]).refused(2, &["bad.json", "vramlab plan"]);
    dir.run(&["plan", "missing.pickle"]).refused(2, &["missing.pickle"]);
}
