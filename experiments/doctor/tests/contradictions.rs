//! Histories whose events contradict each other: a recorded one with a single event doubled, dropped, exchanged or bent. Every
//! command refuses them in the same line, or all of them answer.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use common::story::{self, MIB, Story};
use serde_json::{Value, json};
use std::path::Path;

/// Edits of each history.
const EDITS: usize = 16;

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap()
    }
}

/// Changes one event.
fn edit(events: &mut Vec<Value>, random: &mut Random) {
    let (at, other) = (random.below(events.len()), random.below(events.len()));
    match random.below(7) {
        0 => events.insert(at, events[at].clone()),
        1 => drop(events.remove(at)),
        2 => {
            let allocs: Vec<usize> = (0..events.len()).filter(|at| events[*at]["action"] == "alloc").collect();
            events.remove(allocs[at % allocs.len()]);
        }
        3 => events.swap(at, other),
        4 => events[at]["addr"] = events[other]["addr"].clone(),
        5 => events[at]["addr"] = json!(events[at]["addr"].as_u64().unwrap_or(0) ^ 512 << random.below(14)),
        _ => events[at]["size"] = json!(events[at]["size"].as_u64().unwrap() << 1 << random.below(5)),
    }
}

/// A history of the repository as a snapshot in JSON.
fn snapshot(place: &Place, name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    place.run(&["convert", path.to_str().unwrap(), "--to", "snapshot-json", "--out", "seed.json", "--force"]).ok();
    serde_json::from_slice(&std::fs::read(place.at("seed.json")).unwrap()).unwrap()
}

/// Every object that tells both figures has no more in use than reserved. A point of the curve may lie before the segment of a block
/// came, where that event was moved.
fn check_levels(value: &Value, what: &str) {
    if let (Some(active), Some(reserved)) = (value["active_bytes"].as_u64(), value["reserved_bytes"].as_u64()) {
        assert!(active <= reserved, "{what}: {value}");
    }
    match value {
        Value::Object(map) => {
            map.iter().filter(|(key, _)| *key != "timeline").for_each(|(_, value)| check_levels(value, what))
        }
        Value::Array(list) => list.iter().for_each(|value| check_levels(value, what)),
        _ => {}
    }
}

/// Whether every command answers; otherwise all refuse in the same words.
fn answered(place: &Place, file: &str, what: &str) -> bool {
    let commands: [&[&str]; 5] = [
        &["replay", file, "--alloc", "caching", "--device", "null", "--plan", "off"],
        &["explain", file, "--json"],
        &["advise", file, "--conf", "", "--json"],
        &["diff", file, file],
        &["report", file, "-o", "page.html"],
    ];
    let ran = commands.map(|command| (command, place.run(command)));
    let (_, first) = &ran[0];
    for (command, other) in &ran {
        assert_eq!((other.code, error(&other.stderr)), (first.code, error(&first.stderr)), "{what}: {command:?}");
    }
    match first.code {
        Some(0) => check_levels(&ran[1].1.json(), what),
        _ => first.refused(2, &[": event "]),
    }
    first.code == Some(0)
}

fn error(stderr: &str) -> Option<&str> {
    stderr.lines().find(|line| line.starts_with("error: "))
}

#[test]
fn every_command_refuses_the_same_edits() {
    let (place, mut random) = (Place::new(), Random(0x9e37_79b9_7f4a_7c15));
    let (mut told, mut refused) = (0, 0);
    let fixtures = ["resnet50.gcsplit", "graph_step.expandable", "streams.expandable"];
    for name in fixtures.map(|name| format!("allocators/tests/fixtures/{name}.pickle.xz")) {
        let mut snapshot = snapshot(&place, &name);
        let events = snapshot["device_traces"][0].as_array().unwrap().clone();
        for number in 0..EDITS {
            let mut edited = events.clone();
            edit(&mut edited, &mut random);
            snapshot["device_traces"][0] = json!(edited);
            let file = place.write("edited.json", snapshot.to_string());
            *if answered(&place, &file, &format!("{name} {number}")) { &mut told } else { &mut refused } += 1;
        }
    }
    assert!(refused > EDITS && told > EDITS / 2, "{refused} refused and {told} answered");
}

#[test]
fn every_command_refuses_the_same_edits_of_a_log() {
    let (place, mut random) = (Place::new(), Random(0x2545_f491_4f6c_dd1d));
    let mut events = snapshot(&place, "experiments/histories/mlp.pickle.xz")["device_traces"][0].take();
    let events = events.as_array_mut().unwrap();
    events.retain(|event| event["action"] != "free_completed");
    events.truncate(1200);
    let (mut told, mut refused) = (0, 0);
    // Few of them can be answered.
    for number in 0..4 * EDITS {
        let mut edited = events.clone();
        edit(&mut edited, &mut random);
        let line = |event: &Value| {
            let [action, addr, size, stream] = ["action", "addr", "size", "stream"].map(|key| event[key].clone());
            json!({"time_ns": 1, "action": action, "addr": addr, "size": size, "stream": stream}).to_string() + "\n"
        };
        let file = place.write("edited.jsonl", edited.iter().map(line).collect::<String>());
        *if answered(&place, &file, &format!("log {number}")) { &mut told } else { &mut refused } += 1;
    }
    assert!(refused > EDITS && told > 0, "{refused} refused and {told} answered");
}

/// Two frees wait. One completes before a block is freed, the other after 18 MiB were asked for; `idle` goes back between.
fn two_frees_that_wait(idle: bool) -> Story {
    let mut story = Story::default();
    if idle {
        story.segment(200 * MIB, 2 * MIB, 0);
    }
    story.segment(0, 20 * MIB, 0);
    for at in [0, 8, 16] {
        story.alloc(at * MIB, if at < 16 { 8 * MIB } else { 2 * MIB }, 0, json!([]));
    }
    story.event("free_requested", story::BASE, 8 * MIB, 0, json!([]));
    story.event("free_requested", story::BASE + 8 * MIB, 8 * MIB, 0, json!([]));
    story.event("free_completed", story::BASE, 8 * MIB, 0, json!([]));
    if idle {
        story.event("segment_free", story::BASE + 200 * MIB, 2 * MIB, 0, json!([]));
    }
    story.free(16 * MIB, 2 * MIB, 0);
    story.segment(100 * MIB, 18 * MIB, 0);
    story.alloc(100 * MIB, 18 * MIB, 0, json!([]));
    story.event("free_completed", story::BASE + 8 * MIB, 8 * MIB, 0, json!([]));
    story
}

#[test]
fn what_waits_on_shows_that_the_cache_was_not_emptied() {
    let place = Place::new();
    let replay = |story: &Story| {
        let file = place.write("waits.json", story.text());
        place.run(&["replay", &file, "--alloc", "caching", "--device", "null", "--json"])
    };
    let rows = replay(&two_frees_that_wait(false)).rows();
    let figure = |name: &str| rows[0][name].as_u64().unwrap() / MIB;
    assert_eq!(
        (figure("peak_reserved_bytes"), figure("lower_bound_bytes")),
        (38, 26),
        "20 and 18 of which 8 and 18 are used"
    );
    // `empty_cache` waits for every free, and one of them went on waiting.
    let why = "caching reserves 20 MiB at most, less than the 26 MiB that are in use at once";
    replay(&two_frees_that_wait(true)).refused(2, &["waits.json", "the events contradict each other", why]);
}
