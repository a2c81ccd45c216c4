//! `diff` on small histories whose answers are known.

use crate::common::Place;
use crate::common::story::{MIB, Story, script};
use serde_json::{Value, json};
use std::path::Path;

/// Four blocks: of `keeps` one, of `grows` one and then two, of `goes` one that goes.
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

fn found(place: &Place, arguments: &[&str]) -> Value {
    let ran = place.run(&[&["diff", "--json"], arguments].concat()).ok();
    serde_json::from_str(&ran.stdout).unwrap()
}

fn lines(found: &Value) -> Vec<(&str, &str, u64, u64)> {
    let mib = |row: &Value, key: &str| row[key].as_u64().unwrap() / MIB;
    let row = |row: &'_ Value| {
        let text = |key: &str| row[key].as_str().unwrap().to_owned().leak() as &str;
        (text("line"), text("change"), mib(row, "before_bytes"), mib(row, "after_bytes"))
    };
    found["lines"].as_array().unwrap().iter().map(row).collect()
}

const CHANGED: [(&str, &str, u64, u64); 3] = [
    ("proj/train.py:4 comes", "new", 0, 8),
    ("proj/train.py:3 goes", "gone", 6, 0),
    ("proj/train.py:2 grows", "grew", 4, 9),
];

#[test]
fn two_moments_of_one_snapshot() {
    let place = Place::new();
    let file = place.write("a.json", story(true).text());
    let end = found(&place, &[&file, "--at", "4", "end"]);
    assert_eq!(lines(&end), CHANGED);
    assert_eq!((&end["before"]["moment"]["event"], &end["after"]["moment"]["event"]), (&json!(4), &json!(8)));
    assert_eq!(end["after"]["moment"]["active_bytes"], json!(19 * MIB));
    // The other way round what came goes.
    let back = found(&place, &[&file, "--at", "end", "4"]);
    assert_eq!(lines(&back)[2], ("proj/train.py:2 grows", "shrank", 9, 4));
    // By names: the annotation begins at the fifth event, and the peak is the last.
    let named = found(&place, &[&file, "--at", "second", "peak"]);
    assert_eq!((&named["before"]["moment"]["event"], &named["after"]["moment"]["event"]), (&json!(5), &json!(8)));
    assert_eq!(found(&place, &[&file, "--at", "start", "4"])["before"]["moment"]["active_bytes"], json!(0));
    let screen = place.run(&["diff", &file, "--at", "4", "end"]).ok().stdout;
    for words in ["+7 MiB in use: 12 MiB before, 19 MiB after", "gone", "1 -> 2", "proj/train.py:4 comes"] {
        assert!(screen.contains(words), "{words}: {screen}");
    }
}

#[test]
fn two_snapshots() {
    let place = Place::new();
    let whole = story(true);
    let mut half = story(true);
    half.events.truncate(4);
    let (before, after) = (place.write("before.json", half.text()), place.write("after.json", whole.text()));
    let found = found(&place, &[&before, &after]);
    assert_eq!(lines(&found), CHANGED);
    assert_eq!((&found["before"]["trace"], &found["after"]["at"]), (&json!(before), &json!("end")));
    // One moment for both, or one for each.
    assert_eq!(lines(&self::found(&place, &[&before, &after, "--at", "4"])), []);
    assert_eq!(lines(&self::found(&place, &[&before, &after, "--at", "end", "4"])), []);
    let screen = place.run(&["diff", &before, &before]).ok().stdout;
    assert!(screen.contains("what is held is the same; --at peak"), "{screen}");
}

#[test]
fn without_frames_by_size() {
    let place = Place::new();
    let file = place.write("sizes.json", story(false).text());
    let found = found(&place, &[&file, "--at", "4", "end"]);
    let sizes: Vec<(u64, &str)> = found["sizes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["requested_bytes"].as_u64().unwrap() / MIB, row["change"].as_str().unwrap()))
        .collect();
    assert_eq!(sizes, [(8, "new"), (6, "gone"), (5, "new")]);
    let screen = place.run(&["diff", &file, "--at", "4", "end"]).ok().stdout;
    assert!(screen.contains("by size") && screen.contains("no stack frames were recorded"), "{screen}");
}

#[test]
fn what_cannot_be_compared_is_said_in_a_line() {
    let place = Place::new();
    let file = place.write("a.json", story(true).text());
    for (arguments, words) in [
        (&[file.as_str()][..], "name a second snapshot, or two moments of this one"),
        (&[&file, "--at", "4"], "name a second snapshot, or two moments of this one"),
        (&[&file, "--at", "4", "9"], "--at 9: the events have the numbers 1 to 8"),
        (&[&file, "--at", "4", "third"], "no annotation of the history is named 'third'"),
        (&[&file, "missing.json"], "missing.json"),
    ] {
        place.run(&[&["diff"], arguments].concat()).refused(2, &[words]);
    }
}

// `vramlab plan`, and the allocator that follows what it makes.

/// A history of the repository's.
fn trace(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories").join(name);
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_history_that_is_replayed_by_its_plan_needs_what_the_plan_says() {
    let place = Place::new();
    let plan = place.at("plan.json");
    let alloc = format!("plan:file={}", plan.to_str().unwrap());
    // With two streams both plans: that with waits between them, and that without.
    for (name, order) in [("mlp", &[][..]), ("streams", &[][..]), ("streams", &["--known-order"][..])] {
        let file = trace(&format!("{name}.pickle.xz"));
        let made = ["plan", &file, "-o", plan.to_str().unwrap(), "--steps", "1000000", "--json"];
        let made: serde_json::Value =
            serde_json::from_str(&place.run(&[&made[..], order].concat()).ok().stdout).unwrap();
        assert_eq!(made["known_order"], !order.is_empty());
        let count = |key: &str| made[key].as_u64().unwrap();
        assert!(0 < count("segment_requests") && count("segment_requests") < count("allocations") / 10, "{made}");
        assert!(count("stitchable_requests") < count("segment_requests"), "{made}");
        for device in ["sim", "null"] {
            let rows =
                place.run(&["replay", &file, "--alloc", &alloc, "--device", device, "--plan", "off", "--json"]).rows();
            let row = &rows[0];
            assert_eq!((&row["peak_reserved_bytes"], &row["unplanned_allocations"]), (&made["plan_bytes"], &json!(0)));
            assert_eq!((&row["planned_allocations"], &row["segment_allocs"]), (&made["allocations"], &json!(1)));
            assert!(row["lower_bound_bytes"].as_u64() <= made["plan_bytes"].as_u64(), "{name}");
        }
    }
    // Another history, by the last plan.
    let file = trace("mlp.pickle.xz");
    let rows = place.run(&["replay", &file, "--alloc", &alloc, "--device", "null", "--plan", "off", "--json"]).rows();
    assert!(rows[0]["unplanned_allocations"].as_u64() > Some(0) && rows[0]["failed_allocations"] == 0, "{}", rows[0]);
    let table = place.run(&["replay", &file, "--alloc", &alloc, "--device", "null", "--plan", "off"]).ok().stdout;
    assert!(table.contains("not as planned"), "{table}");
    let text = place.run(&["plan", &file, "--steps", "1000"]).ok().stdout;
    assert!(text.contains("A plan of") && text.contains("plan.json"), "{text}");
    let bad = place.write("bad.json", "[]");
    place.run(&["replay", &file, "--alloc", &format!("plan:file={bad}")]).refused(2, &["bad.json", "vramlab plan"]);
    place.run(&["plan", "missing.pickle"]).refused(2, &["missing.pickle"]);
}
