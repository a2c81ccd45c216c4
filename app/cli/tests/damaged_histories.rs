//! Damaged recordings: contradictory events, which every command refuses with the same line or all answer, and recordings whose
//! beginning or end is missing.

use crate::common::TestDir;
use crate::common::story::{self, Story};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Edits of each recording.
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

/// A recording of the repository as a snapshot in JSON.
fn snapshot(test_dir: &TestDir, name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    test_dir.run(&["convert", path.to_str().unwrap(), "--to", "snapshot-json", "--out", "seed.json", "--force"]).ok();
    serde_json::from_slice(&std::fs::read(test_dir.at("seed.json")).unwrap()).unwrap()
}

/// Checks that no object has more active than reserved bytes. Points of the timeline are left out: an edit may move a segment's
/// event behind its block's.
fn check_levels(value: &Value, edit: &str) {
    if let (Some(active), Some(reserved)) = (value["active_bytes"].as_u64(), value["reserved_bytes"].as_u64()) {
        assert!(active <= reserved, "{edit}: {value}");
    }
    match value {
        Value::Object(map) => {
            map.iter().filter(|(key, _)| *key != "timeline").for_each(|(_, value)| check_levels(value, edit))
        }
        Value::Array(list) => list.iter().for_each(|value| check_levels(value, edit)),
        _ => {}
    }
}

/// Whether every command answers; otherwise all refuse with the same line.
fn answered(test_dir: &TestDir, file: &str, edit: &str) -> bool {
    let commands: [&[&str]; 5] = [
        &["replay", file, "--alloc", "caching", "--device", "null", "--plan", "off"],
        &["explain", file, "--json"],
        &["advise", file, "--conf", "", "--json"],
        &["diff", file, file],
        &["report", file, "-o", "page.html", "--plan", "off"],
    ];
    let outputs = commands.map(|command| (command, test_dir.run(command)));
    let (_, first) = &outputs[0];
    for (command, other) in &outputs {
        assert_eq!((other.code, error(&other.stderr)), (first.code, error(&first.stderr)), "{edit}: {command:?}");
    }
    match first.code {
        Some(0) => check_levels(&outputs[1].1.json(), edit),
        _ => first.refused(2, &[": event "]),
    }
    first.code == Some(0)
}

fn error(stderr: &str) -> Option<&str> {
    stderr.lines().find(|line| line.starts_with("error: "))
}

#[test]
fn all_commands_refuse_the_same_edited_snapshots() {
    let (test_dir, mut random) = (TestDir::new(), Random(0x9e37_79b9_7f4a_7c15));
    let (mut accepted, mut refused) = (0, 0);
    let fixtures = ["resnet50.gcsplit", "graph_step.expandable", "streams.expandable"];
    for name in fixtures.map(|name| format!("allocators/histories/tests/fixtures/{name}.pickle.xz")) {
        let mut snapshot = snapshot(&test_dir, &name);
        let events = snapshot["device_traces"][0].as_array().unwrap().clone();
        for number in 0..EDITS {
            let mut edited = events.clone();
            edit(&mut edited, &mut random);
            snapshot["device_traces"][0] = json!(edited);
            let file = test_dir.write("edited.json", snapshot.to_string());
            *if answered(&test_dir, &file, &format!("{name} {number}")) { &mut accepted } else { &mut refused } += 1;
        }
    }
    assert!(refused > EDITS && accepted > EDITS / 2, "{refused} refused and {accepted} answered");
}

#[test]
fn all_commands_refuse_the_same_edited_logs() {
    let (test_dir, mut random) = (TestDir::new(), Random(0x2545_f491_4f6c_dd1d));
    let mut events = snapshot(&test_dir, "experiments/histories/mlp.pickle.xz")["device_traces"][0].take();
    let events = events.as_array_mut().unwrap();
    events.retain(|event| event["action"] != "free_completed");
    events.truncate(1200);
    let (mut accepted, mut refused) = (0, 0);
    // Few edits of a log are valid.
    for number in 0..4 * EDITS {
        let mut edited = events.clone();
        edit(&mut edited, &mut random);
        let line = |event: &Value| {
            let [action, addr, size, stream] = ["action", "addr", "size", "stream"].map(|key| event[key].clone());
            json!({"time_ns": 1, "action": action, "addr": addr, "size": size, "stream": stream}).to_string() + "\n"
        };
        let file = test_dir.write("edited.jsonl", edited.iter().map(line).collect::<String>());
        *if answered(&test_dir, &file, &format!("log {number}")) { &mut accepted } else { &mut refused } += 1;
    }
    assert!(refused > EDITS && accepted > 0, "{refused} refused and {accepted} answered");
}

/// Two deferred frees. One completes before a block is freed, the other after a request of 18 MiB; with `idle` a segment is released
/// in between.
/// A flush of the cache shows a limit only where the recording has all segments.
#[test]
fn blocks_without_segments_show_no_limit() {
    const MIB: u64 = 1 << 20;
    let mut events = Vec::new();
    let mut event = |action: &str, at: u64, mib: u64, line: u64| {
        let frames = json!([{"name": "main", "filename": "t.py", "line": line}]);
        let (address, time) = (0x7f00_0000_0000 + at * MIB, 1000 + events.len());
        events.push(json!({"action": action, "addr": address, "size": mib * MIB, "stream": 0, "time_us": time, "frames": frames}));
    };
    event("free_requested", 0, 100, 1);
    event("free_completed", 0, 100, 1);
    event("segment_free", 0, 100, 7);
    event("segment_alloc", 1000, 200, 7);
    event("alloc", 1000, 200, 7);
    (0..5).for_each(|number| event("alloc", 3000 + 300 * number, 250, 8));
    let test_dir = TestDir::new();
    test_dir.write("late.json", json!({"segments": [], "device_traces": [events]}).to_string());
    let advice = test_dir.run(&["advise", "late.json", "--exit-code"]).ok();
    assert!(!advice.stdout.contains("memory limit"), "1.42 GiB were live: {advice:?}");
}

fn two_deferred_frees(idle: bool) -> Story {
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
fn pending_free_shows_that_the_cache_was_not_emptied() {
    let test_dir = TestDir::new();
    let replay = |story: &Story| {
        let file = test_dir.write("waits.json", story.text());
        test_dir.run(&["replay", &file, "--alloc", "caching", "--device", "null", "--json"])
    };
    let rows = replay(&two_deferred_frees(false)).rows();
    let mib = |name: &str| rows[0][name].as_u64().unwrap() / MIB;
    assert_eq!(
        (mib("peak_reserved_bytes"), mib("lower_bound_bytes")),
        (38, 26),
        "20 and 18 of which 8 and 18 are used"
    );
    // `empty_cache` waits for every free, but one of them stayed pending.
    let why = "caching has peak reserved 20 MiB, below the 26 MiB that are active";
    replay(&two_deferred_frees(true)).refused(2, &["waits.json", "the events contradict each other", why]);
}

// `advise` on recordings without their beginning or without segment events. Each recording is truncated as by PyTorch's ring buffer:
// the oldest events are lost, the end of the snapshot stays.

const MIB: u64 = 1 << 20;

/// Shares of lost events, in percent. Every second recording next to the checkout loses one of them in turn: these are programs of the
/// repository under other settings.
const LOST: [usize; 6] = [10, 25, 50, 75, 90, 97];
/// Percentage points by which the saving of a truncated recording may exceed that of the complete one.
const POINTS: f64 = 2.0;

/// A recording, and the shares of its events to lose.
type Cuts = (PathBuf, &'static [usize]);

/// The recordings in `directories` of the repository, by name.
fn recordings(directories: [&str; 2]) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let entries = directories.iter().filter_map(|directory| std::fs::read_dir(root.join(directory)).ok()).flatten();
    let mut out: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    out.retain(|path| path.to_string_lossy().ends_with(".pickle.xz"));
    out.sort();
    out
}

/// The repository's recordings, and others next to the checkout.
fn cuts() -> Vec<Cuts> {
    let kept = recordings(["experiments/histories", "experiments/histories/ranks"]);
    let mut others = recordings(["../shared/traces", "../shared/traces/configs"]);
    others.retain(|path| kept.iter().all(|kept| kept.file_name() != path.file_name()));
    let in_turn = others.into_iter().step_by(2).enumerate().map(|(at, path)| (path, &LOST[at % LOST.len()..][..1]));
    kept.into_iter().map(|path| (path, &LOST[..])).chain(in_turn).collect()
}

/// Answers for a complete recording and for its truncated copies.
struct Answers {
    name: String,
    complete: Value,
    /// Lost share, and answer.
    truncated: Vec<(usize, Value)>,
}

impl Answers {
    fn of(test_dir: &TestDir, number: usize, (path, shares): &Cuts) -> Self {
        let json = format!("{number}.json");
        test_dir.run(&["convert", path.to_str().unwrap(), "--to", "snapshot-json", "--out", &json]).ok();
        let mut snapshot: Value = serde_json::from_slice(&std::fs::read(test_dir.at(&json)).unwrap()).unwrap();
        let advise = |file: &str| test_dir.run(&["advise", file, "--json"]).ok().json();
        let complete = advise(&json);
        let traces = snapshot["device_traces"].take();
        let truncated = shares.iter().map(|&lost| {
            let keep = |events: &Value| {
                let events = events.as_array().unwrap();
                Value::from(&events[events.len() * lost / 100..])
            };
            snapshot["device_traces"] = traces.as_array().unwrap().iter().map(keep).collect();
            (lost, advise(&test_dir.write(&format!("{number}.{lost}.json"), snapshot.to_string())))
        });
        let truncated = truncated.collect();
        Self { name: path.file_name().unwrap().to_string_lossy().into_owned(), complete, truncated }
    }
}

#[test]
fn truncated_recording_promises_no_more_than_the_complete() {
    let (test_dir, recordings) = (TestDir::new(), cuts());
    let (next, answers) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((number, cuts)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, recordings.get(at)?)))
                {
                    let answer = Answers::of(&test_dir, number, cuts);
                    answers.lock().unwrap().push(answer);
                }
            });
        }
    });
    let answers = answers.into_inner().unwrap();
    assert!(answers.len() >= 4, "the repository has recordings");
    let (mut stated, mut half, mut same) = (0, 0, 0);
    for Answers { name, complete, truncated } in &answers {
        let saved = complete["saving_percent"].as_f64().unwrap_or(0.0);
        assert_eq!(complete["evidence"]["before"]["reserved_bytes"], 0, "{name}: recorded from the first CUDA call");
        for (lost, answer) in truncated {
            let verdict = answer["verdict"].as_str().unwrap();
            match answer["saving_percent"].as_f64() {
                Some(saving) => {
                    stated += 1;
                    assert!(saving <= saved + POINTS, "{name} without {lost} %: -{saving:.1} % for -{saved:.1} %");
                }
                // Out of memory there is no saving.
                None => assert!(
                    verdict != "change" || complete["saving_percent"].is_null(),
                    "{name} without {lost} %: {answer}"
                ),
            }
            if *lost <= 50 {
                half += 1;
                same += u32::from(answer["settings"][0]["conf"] == complete["settings"][0]["conf"]);
            }
        }
    }
    println!(
        "{} recordings; a saving is stated for {stated} of {} truncated ones; the same first choice {same} of {half} times",
        answers.len(),
        answers.iter().map(|answer| answer.truncated.len()).sum::<usize>()
    );
    assert!(same * 2 >= half, "the complete recording's first choice: {same} of {half} times");
}

fn event(action: &str, addr: u64, size: u64) -> Value {
    json!({"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1})
}

/// A screen without its line breaks.
fn words(screen: &str) -> String {
    screen.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A snapshot whose recording begins with the `empty_cache` of an earlier run and continues with three requests.
fn after_an_earlier_run(test_dir: &TestDir) -> String {
    let mut events = vec![event("segment_free", 1 << 40, 512 * MIB), event("segment_free", 1 << 41, 512 * MIB)];
    let mut segments = Vec::new();
    for at in 1..=3 {
        let addr = at << 30;
        events.push(event("segment_alloc", addr, 32 * MIB));
        events.push(event("alloc", addr, 32 * MIB));
        let block = json!({"address": addr, "size": 32 * MIB, "requested_size": 32 * MIB, "state": "active_allocated"});
        segments
            .push(json!({"device": 0, "address": addr, "total_size": 32 * MIB, "stream": 0, "segment_type": "large",
            "segment_pool_id": [0, 0], "is_expandable": false, "blocks": [block]}));
    }
    let snapshot = json!({"segments": segments, "device_traces": [events], "allocator_settings": {}});
    test_dir.write("later.json", snapshot.to_string())
}

#[test]
fn prior_cache_is_reported_and_saves_nothing() {
    let test_dir = TestDir::new();
    let file = after_an_earlier_run(&test_dir);
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    let evidence = &advice["evidence"];
    assert_eq!(evidence["before"]["returned_at_once_bytes"], 1024 * MIB, "{evidence}");
    assert_eq!(
        (&evidence["needed_reserved_bytes"], &evidence["compared"]["segments_taken"]),
        (&json!(96 * MIB), &json!(3))
    );
    assert_eq!((&advice["verdict"], &advice["saving_percent"]), (&json!("keep"), &json!(0.0)), "{advice}");
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains("1 GiB were cached and released before the first allocation"), "{screen}");
    assert!(screen.contains("Peak reserved without that cache: 96 MiB, 0.0 % above"), "{screen}");
    // The page says the same as the screen.
    test_dir.run(&["report", &file, "-o", "page.html"]).ok();
    let page = std::fs::read_to_string(test_dir.at("page.html")).unwrap();
    let kept = page.split("\"kept\":\"").nth(1).and_then(|text| text.split('"').next()).unwrap();
    assert!(kept.contains("90.2 % less than their replay (1 GiB), but not less than the 96 MiB"), "{kept}");
    assert!(words(&screen).contains(kept), "{screen}");
}

#[test]
fn advice_is_inconclusive_if_the_prior_cache_exceeds_the_peak() {
    let test_dir = TestDir::new();
    let mut snapshot: Value =
        serde_json::from_str(&std::fs::read_to_string(after_an_earlier_run(&test_dir)).unwrap()).unwrap();
    // The same GiB, which stays cached.
    let events = snapshot["device_traces"][0].as_array_mut().unwrap();
    events.drain(..2);
    for at in [40, 41] {
        let cached = json!({"address": 1_u64 << at, "size": 512 * MIB, "requested_size": 0, "state": "inactive"});
        snapshot["segments"].as_array_mut().unwrap().push(json!({"device": 0, "address": 1_u64 << at,
            "total_size": 512 * MIB, "stream": 0, "segment_type": "large", "segment_pool_id": [0, 0],
            "is_expandable": false, "blocks": [cached]}));
    }
    let file = test_dir.write("cached.json", snapshot.to_string());
    let advice = test_dir.run(&["advise", &file, "--conf", "expandable_segments:True", "--json"]).ok().json();
    assert_eq!(advice["evidence"]["before"]["kept_unused_bytes"], 1024 * MIB, "{advice}");
    assert_eq!((&advice["verdict"], &advice["saving_percent"]), (&json!("not-said"), &Value::Null), "{advice}");
    let screen = test_dir.run(&["advise", &file, "--conf", "expandable_segments:True"]).ok().stdout;
    assert!(screen.contains("Inconclusive: ") && screen.contains("_record_memory_history"), "{screen}");
    assert!(!screen.contains("Within the recording"), "{screen}");
}

#[test]
fn inconclusive_advice_says_if_little_is_to_be_gained() {
    let test_dir = TestDir::new();
    let block = |address: u64, size: u64, live: bool| {
        let state = if live { "active_allocated" } else { "inactive" };
        json!({"address": address, "size": size, "requested_size": if live { size } else { 0 }, "state": state})
    };
    let segment = |address: u64, size: u64, kind: &str, blocks: Vec<Value>| {
        json!({"device": 0, "address": address, "total_size": size, "stream": 0, "segment_type": kind,
            "segment_pool_id": [0, 0], "is_expandable": false, "blocks": blocks})
    };
    // A GiB in use and 20 MiB of cache from before; three requests are served from that cache, one from a new segment.
    let (cache, new) = (1 << 42, 1 << 30);
    let mut segments: Vec<Value> = [1 << 40, 1 << 41]
        .map(|address| segment(address, 512 * MIB, "large", vec![block(address, 512 * MIB, true)]))
        .into();
    let mut blocks: Vec<Value> = (0..3).map(|at| block(cache + 2 * MIB * at, 2 * MIB, true)).collect();
    blocks.push(block(cache + 6 * MIB, 14 * MIB, false));
    segments.push(segment(cache, 20 * MIB, "large", blocks));
    segments.push(segment(new, 2 * MIB, "small", vec![block(new, MIB, true), block(new + MIB, MIB, false)]));
    let mut events: Vec<Value> = (0..3).map(|at| event("alloc", cache + 2 * MIB * at, 2 * MIB)).collect();
    events.extend([event("segment_alloc", new, 2 * MIB), event("alloc", new, MIB)]);
    let snapshot = json!({"segments": segments, "device_traces": [events], "allocator_settings": {}});
    let file = test_dir.write("full.json", snapshot.to_string());
    let arguments = ["advise", &file, "--conf", "expandable_segments:True"];
    let advice = test_dir.run(&[&arguments[..], &["--json"]].concat()).ok().json();
    assert_eq!(advice["verdict"], "not-said", "{advice}");
    let [bound, peak] =
        [&advice["lower_bound_bytes"], &advice["recorded"]["peak_reserved_bytes"]].map(|bytes| bytes.as_f64().unwrap());
    let gain = 100.0 * (1.0 - bound / peak);
    let screen = words(&test_dir.run(&arguments).ok().stdout);
    let (_, after) = screen.split_once("Within the recording no setting saves more than ").expect(&screen);
    let (said, after) = after.split_once(" %: keep the current settings.").expect(&screen);
    let said: f64 = said.parse().unwrap();
    assert!(gain <= said && said < gain + 0.11 && gain > 0.0 && after.contains("Lowest peak"), "{gain}: {screen}");
}

#[test]
fn without_segment_events_reserved_memory_is_unknown() {
    let test_dir = TestDir::new();
    let mut snapshot: Value =
        serde_json::from_str(&std::fs::read_to_string(after_an_earlier_run(&test_dir)).unwrap()).unwrap();
    // Three blocks were allocated, and the segment of one is still reserved.
    let events = snapshot["device_traces"][0].as_array_mut().unwrap();
    events.retain(|event| event["action"] == "alloc");
    let freed: Vec<Value> = events[1..]
        .iter()
        .flat_map(|event| {
            ["free_requested", "free_completed"].map(|action| {
                let mut freed = event.clone();
                freed["action"] = action.into();
                freed
            })
        })
        .collect();
    events.extend(freed);
    snapshot["segments"].as_array_mut().unwrap().truncate(1);
    let file = test_dir.write("few.json", snapshot.to_string());
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!(advice["recorded"]["peak_reserved_bytes"], Value::Null, "{advice}");
    assert_eq!(advice["saving_percent"], Value::Null, "{advice}");
    for command in ["advise", "explain"] {
        let screen = test_dir.run(&[command, &file]).ok().stdout;
        assert!(!screen.contains("% above") && !screen.contains("(300"), "{screen}");
        let words = if command == "advise" { "Peak reserved: at least 96 MiB" } else { "reserved memory is unknown" };
        assert!(screen.contains(words), "{screen}");
    }
}
