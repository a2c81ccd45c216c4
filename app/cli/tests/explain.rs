//! `explain` on small histories whose answers are known.

use crate::common::Place;
use crate::common::story::{BASE, MIB, Story, library, script, torch};
use crate::common::story::{agrees, explain, found, part};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// A hole that one block keeps, a stream that is used once, and a request that only that stream could have served.
fn holes() -> Story {
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(
        0,
        2 * MIB,
        0,
        json!([torch("f"), library(7, "embed"), torch("call"), script(10, "load"), script(1, "main")]),
    );
    story.alloc(2 * MIB, 18 * MIB, 0, json!([script(20, "step"), script(1, "main")]));
    story.free(2 * MIB, 18 * MIB, 0);
    story.segment(1 << 30, 30 * MIB, 7);
    story.alloc(1 << 30, 30 * MIB, 7, json!([script(40, "warm_up"), script(1, "main")]));
    story.free(1 << 30, 30 * MIB, 7);
    story.segment(2 << 30, 26 * MIB, 0);
    story.alloc(2 << 30, 25 * MIB, 0, json!([script(30, "grow"), script(1, "main")]));
    // Work goes on.
    for _ in 0..20 {
        story.alloc(2 * MIB, 4 * MIB, 0, json!([]));
        story.free(2 * MIB, 4 * MIB, 0);
    }
    story
}

#[test]
fn who_what_keeps_it_and_what_is_stranded() {
    let place = Place::new();
    let file = place.write("holes.json", holes().text());
    let found = found(&place, &[&file]);
    let peak = &found["peak_reserved"];
    assert_eq!((&peak["reserved_bytes"], &peak["event"]), (&json!(76 * MIB), &json!(11)));
    // 25 MiB leave 1 MiB, which is too little to be split off.
    assert_eq!(peak["active_bytes"], json!(28 * MIB));
    assert_eq!(peak["requested_bytes"], json!(27 * MIB));
    let parts = ["requested", "internal", "soft", "hard", "stream", "pending"].map(|name| part(&found, name) / MIB);
    assert_eq!(parts, [27, 1, 0, 18, 30, 0]);
    // At the peak of use the warm-up's block is there.
    let active = &found["who"][0];
    assert_eq!(active["at"], "peak_active");
    let who = found["who"].as_array().unwrap().iter().find(|who| who["at"] == "peak_reserved").unwrap();
    let lines: Vec<(&str, Option<&str>, u64)> = who["lines"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["line"].as_str().unwrap(), row["inside"].as_str(), row["bytes"].as_u64().unwrap() / MIB))
        .collect();
    assert_eq!(
        lines,
        [("proj/train.py:30 grow", None, 26), ("proj/train.py:10 load", Some("nets/blocks.py:7 embed"), 2)]
    );
    let tree = &who["tree"]["children"][0];
    assert_eq!((&tree["name"], &tree["bytes"]), (&json!("proj/train.py:1 main"), &json!(28 * MIB)));
    assert_eq!(tree["children"][1]["children"][0]["name"], "nets/blocks.py:7 embed");
    let pinned = &found["reserved"]["pinned"];
    assert_eq!(pinned.as_array().unwrap().len(), 1);
    assert_eq!((&pinned[0]["bytes"], &pinned[0]["free_bytes"]), (&json!(20 * MIB), &json!(18 * MIB)));
    let keeper = &pinned[0]["keepers"][0];
    assert_eq!((&keeper["line"], &keeper["bytes"]), (&json!("proj/train.py:10 load"), &json!(2 * MIB)));
    assert_eq!((&keeper["age_events"], &keeper["age_ns"]), (&json!(9), &json!(9000)));
    let stranded = &found["reserved"]["stranded"];
    assert_eq!(
        stranded,
        &json!([{"stream": 7, "free_bytes": 30 * MIB, "returnable_bytes": 30 * MIB, "last_request": 7,
            "requests_since": 21, "line": "proj/train.py:40 warm_up"}])
    );
    // Why the three requests missed.
    let causes: Vec<(u64, &str)> = found["shapes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|shape| (shape["requested_bytes"].as_u64().unwrap() / MIB, shape["cause"].as_str().unwrap()))
        .collect();
    assert_eq!(causes, [(30, "growth"), (25, "stream"), (2, "growth")]);
    // Blocks without frames are told by what ran last.
    let all = explain(&place, &[&file]).ok().stdout;
    assert!(all.contains("stranded: 30 MiB free in stream 0x7") && all.contains("warm_up"), "{all}");
    let useless = "what was free then did not serve what was asked for";
    assert!(all.contains(useless), "{all}");
    // The rest of a first segment is not what failed to serve.
    let mut first = Story::default();
    first.segment(0, 20 * MIB, 0);
    first.alloc(0, 2 * MIB, 0, json!([]));
    first.alloc(2 * MIB, 10 * MIB, 0, json!([]));
    let screen = explain(&place, &[&place.write("first.json", first.text())]).ok().stdout;
    assert!(!screen.contains(useless), "{screen}");
    // Unfolded, the innermost frame is the line.
    let unfolded = self::found(&place, &[&file, "--frames"]);
    let rows = unfolded["who"].as_array().unwrap().iter().find(|who| who["at"] == "peak_reserved").unwrap();
    assert_eq!(rows["lines"][1]["line"], "modules/module.py:1 f");
}

#[test]
fn blocks_without_frames_are_near_the_line_that_ran_last() {
    let place = Place::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, MIB + MIB / 2, 0, json!([script(5, "backward")]));
    story.alloc(2 * MIB, 8 * MIB, 0, json!([]));
    let found = found(&place, &[&place.write("near.json", story.text())]);
    let rows = &found["who"][0]["lines"];
    assert_eq!((&rows[0]["line"], &rows[0]["nearby"]), (&json!("proj/train.py:5 backward"), &json!(true)));
    assert_eq!((&rows[1]["line"], &rows[1]["nearby"]), (&json!("proj/train.py:5 backward"), &json!(false)));
}

#[test]
fn retries_are_told_from_empty_cache_and_have_a_cause() {
    let place = Place::new();
    let mut story = Story::default();
    // 10 MiB and 10 MiB free, 15 MiB wanted.
    for at in [0, 1 << 30] {
        story.segment(at, 10 * MIB, 0);
        story.alloc(at, 10 * MIB, 0, json!([script(1, "a")]));
    }
    story.free(0, 10 * MIB, 0);
    story.free(1 << 30, 10 * MIB, 0);
    story.event("segment_free", BASE, 10 * MIB, 0, json!([]));
    story.event("segment_free", BASE + (1 << 30), 10 * MIB, 0, json!([]));
    story.segment(2 << 30, 15 * MIB, 0);
    story.alloc(2 << 30, 15 * MIB, 0, json!([script(2, "b")]));
    story.event("oom", 3 * MIB, 12 * MIB, 0, json!([script(3, "c")]));
    let file = place.write("retry.json", story.text());
    for (limit, kind) in [(None, Some("retry_or_empty_cache")), (Some("30MiB"), Some("retry")), (Some("1GiB"), None)] {
        let limit = limit.map(|limit| vec!["--limit", limit]).unwrap_or_default();
        let found = found(&place, &[&[file.as_str()], &limit[..]].concat());
        let retries = found["retries"].as_array().unwrap();
        assert_eq!(retries.first().map(|retry| retry["kind"].as_str().unwrap()), kind);
        assert_eq!(found["num_retries"], json!(retries.len()));
        assert_eq!(found["num_releases"], json!(usize::from(kind.is_none())));
        if let [retry] = &retries[..] {
            assert_eq!((&retry["cause"], &retry["released_bytes"]), (&json!("pieces"), &json!(20 * MIB)));
            assert_eq!((&retry["succeeded"], &retry["line"]), (&json!(true), &json!("proj/train.py:2 b")));
        }
        let refused = &found["out_of_memory"][0];
        assert_eq!((&refused["asked_bytes"], &refused["cause"]), (&json!(12 * MIB), &json!("growth")));
        assert_eq!((&refused["device_free_bytes"], &refused["event"]), (&json!(3 * MIB), &json!(13)));
        assert_eq!(found["who"][1]["at"], "out_of_memory");
    }
    // The frames of the segments' frees tell it for certain.
    for event in &mut story.events {
        if event["action"] == "segment_free" {
            event["frames"] = json!([torch("empty_cache"), script(9, "tidy")]);
        }
    }
    let file = place.write("tidy.json", story.text());
    assert_eq!(found(&place, &[&file])["retries"], json!([]));
}

#[test]
fn every_cause_of_a_miss() {
    let place = Place::new();
    // What is free beside a request of so many bytes on stream 0, under which settings, and why it missed.
    let cases = [
        ("class", json!({}), 900 << 10, 20 * MIB, 0, "class"),
        ("rounding", json!({"roundup_power2_divisions": {"8": 2}}), 9 * MIB, 20 * MIB, 0, "rounding"),
        ("split", json!({"max_split_size": 20 * MIB}), 3 * MIB, 64 * MIB, 0, "split_limit"),
        ("stream", json!({}), 3 * MIB, 20 * MIB, 5, "stream"),
        ("growth", json!({}), 30 * MIB, 20 * MIB, 0, "growth"),
        ("private", json!({}), 3 * MIB, 20 * MIB, 0, "elsewhere"),
        ("no pool", json!({}), 3 * MIB, 20 * MIB, 0, "untold"),
    ];
    for (name, settings, asked, segment, stream, cause) in cases {
        let mut story = Story { settings, ..Story::default() };
        story.segment(0, segment, stream);
        if name == "rounding" {
            // 10 MiB are free in the end, and 9 MiB are rounded to 12.
            for (at, bytes) in [(0, 5), (5, 5), (10, 4), (14, 6)] {
                story.alloc(at * MIB, bytes * MIB, stream, json!([]));
            }
            story.free(0, 5 * MIB, stream);
            story.free(5 * MIB, 5 * MIB, stream);
        } else {
            story.alloc(0, segment, stream, json!([]));
            story.free(0, segment, stream);
        }
        if name == "private" {
            story.held(2 << 30, 2 * MIB, json!([1, 0]));
        }
        story.segment(1 << 30, 2 * asked.max(MIB), 0);
        story.alloc(1 << 30, asked, 0, json!([]));
        let found = found(&place, &[&place.write(&format!("{name}.json"), story.text())]);
        let shapes = found["shapes"].as_array().unwrap();
        let shape = shapes.iter().find(|shape| shape["requested_bytes"] == json!(asked)).unwrap();
        let causes: Vec<&str> = shape["causes"].as_array().unwrap().iter().map(|of| of[0].as_str().unwrap()).collect();
        assert!(causes.contains(&cause), "{name}: {shape}");
    }
}

#[test]
fn frees_that_wait_are_counted_by_stream() {
    let place = Place::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, 8 * MIB, 0, json!([script(3, "prefetch")]));
    story.event("free_requested", BASE, 8 * MIB, 0, json!([]));
    story.alloc(8 * MIB, 8 * MIB, 0, json!([script(4, "next")]));
    // While the first waits, a third finds no room.
    story.segment(1 << 30, 20 * MIB, 0);
    story.alloc(1 << 30, 8 * MIB, 0, json!([script(4, "next")]));
    story.event("free_completed", BASE, 8 * MIB, 0, json!([]));
    story.alloc(0, 4 * MIB, 0, json!([]));
    let found = found(&place, &[&place.write("waits.json", story.text())]);
    let pending = &found["reserved"]["pending"];
    assert_eq!(
        (&pending["deferred_frees"], &pending["peak_bytes"], &pending["peak_event"]),
        (&json!(1), &json!(8 * MIB), &json!(3))
    );
    assert_eq!(found["peak_active"]["active_bytes"], json!(24 * MIB));
    assert_eq!(pending["peak_active_instant_bytes"], json!(20 * MIB));
    let row = &pending["streams"][0];
    assert_eq!(
        (&row["deferred_frees"], &row["longest_events"], &row["line"]),
        (&json!(1), &json!(4), &json!("proj/train.py:3 prefetch"))
    );
    let shape = found["shapes"].as_array().unwrap().iter().find(|shape| shape["misses"] == 2).unwrap();
    assert!(shape["causes"].as_array().unwrap().contains(&json!(["pending", 1])), "{shape}");
    // At the peak of reserved it is a part of its own.
    assert_eq!(part(&found, "pending"), 8 * MIB);
    assert_eq!(pending["replayed_reserved_bytes"], json!(40 * MIB));
    assert_eq!(pending["replayed_instant_reserved_bytes"], json!(20 * MIB));
}

#[test]
fn what_grew_and_between_which_points() {
    let place = Place::new();
    let mut story = Story::default();
    story.segment(0, 200 * MIB, 0);
    for step in 0..20 {
        story.annotate(&format!("step {step}"), "START", story.events.len());
        story.alloc(100 * MIB, 40 * MIB, 0, json!([script(8, "forward")]));
        story.alloc(step * 2 * MIB, 2 * MIB, 0, json!([script(9, "log_loss")]));
        story.free(100 * MIB, 40 * MIB, 0);
        story.annotate(&format!("step {step}"), "END", story.events.len() - 1);
    }
    let file = place.write("leak.json", story.text());
    let grew = found(&place, &[&file])["grew"].clone();
    let rows = grew["lines"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "what comes and goes has not grown: {rows:?}");
    assert_eq!(rows[0]["line"], "proj/train.py:9 log_loss");
    assert!(rows[0]["after_bytes"].as_u64() >= rows[0]["before_bytes"].as_u64().map(|bytes| bytes + 18 * MIB));
    let between = |a: &str, b: &str| found(&place, &[&file, "--between", a, b])["grew"].clone();
    let named = between("step 1", "step 4");
    assert_eq!((&named["from"]["event"], &named["to"]["event"]), (&json!(6), &json!(18)));
    assert_eq!(named["from"]["annotation"], "step 1");
    assert_eq!(
        named["lines"][0]["after_bytes"].as_u64().unwrap() - named["lines"][0]["before_bytes"].as_u64().unwrap(),
        6 * MIB
    );
    assert_eq!(between("6", "18")["lines"], named["lines"]);
    for (a, b, words) in [
        ("9", "9", "is not before"),
        ("0", "9", "the numbers 1 to 81"),
        ("5", "82", "the numbers 1 to 81"),
        ("step 1", "step 99", "no annotation of the history is named 'step 99'"),
    ] {
        explain(&place, &[&file, "--between", a, b]).refused(2, &[words]);
    }
    // Nothing grows, so nothing is said.
    let steady = place.write("steady.json", holes().text());
    assert_eq!(found(&place, &[&steady])["grew"], Value::Null);
}

#[test]
fn a_late_recording_and_one_without_events() {
    let place = Place::new();
    let mut story = Story::default();
    let block = |at: u64, bytes: u64, state: &str, frames: Value| json!({"address": BASE + at, "size": bytes, "requested_size": bytes, "state": state, "frames": frames});
    story.segments.push(json!({
        "device": 0, "address": BASE, "total_size": 20 * MIB, "stream": 0, "segment_type": "large", "is_expandable": false,
        "blocks": [
            block(0, 4 * MIB, "active_allocated", json!([script(2, "weights")])),
            block(4 * MIB, 16 * MIB, "inactive", json!([])),
        ],
    }));
    // Without events it is what was held.
    let found = self::found(&place, &[&place.write("none.json", story.text())]);
    assert_eq!((&found["events"], &found["end"]["reserved_bytes"]), (&json!(0), &json!(20 * MIB)));
    assert_eq!(found["who"][0]["lines"][0]["line"], "proj/train.py:2 weights");
    assert_eq!(found["reserved"]["pinned"][0]["free_bytes"], json!(16 * MIB));
    // Which streams are still used and which settings would help is not told.
    assert_eq!(found["reserved"]["stranded"], json!([]));
    let screen = explain(&place, &[&place.write("none.json", story.text())]).ok().stdout;
    assert!(
        screen.contains("Next: call torch.cuda.memory._record_memory_history") && !screen.contains("advise"),
        "{screen}"
    );
    // A block of before goes, another stays.
    story.free(4 * MIB, 10 * MIB, 0);
    let found = self::found(&place, &[&place.write("late.json", story.text())]);
    assert_eq!((&found["blocks_before"], &found["segments_before"]), (&json!(2), &json!(1)));
    assert_eq!(found["end"]["active_bytes"], json!(4 * MIB));
    assert_eq!(found["peak_active"]["active_bytes"], json!(14 * MIB));
}

#[test]
fn a_file_that_was_cut_short_is_explained_as_far_as_it_goes() {
    let place = Place::new();
    let file = place.write("whole.json", holes().text());
    for form in ["snapshot", "snapshot-json"] {
        let to = place.at("whole.out");
        place.run(&["convert", &file, "--to", form, "-o", to.to_str().unwrap(), "--force"]).ok();
        let bytes = std::fs::read(&to).unwrap();
        let mut explained = 0;
        for part in 1..20 {
            let cut = place.write("cut.out", &bytes[..bytes.len() * part / 20]);
            let ran = explain(&place, &[&cut, "--json"]);
            assert!(!ran.stderr.contains("internal fault"), "{}", ran.stderr);
            match ran.code {
                Some(0) => {
                    assert!(ran.stderr.contains("was cut short at byte"), "{}", ran.stderr);
                    let found: Value = serde_json::from_str(&ran.stdout).unwrap();
                    assert!(found["cut"].is_string());
                    explained += 1;
                    // The others read it too.
                    if part == 12 {
                        let replayed = place.run(&["replay", &cut, "--alloc", "caching", "--plan", "off"]).ok();
                        assert!(replayed.stderr.contains("was cut short at byte"), "{}", replayed.stderr);
                    }
                }
                code => assert_eq!(code, Some(2), "{}", ran.stderr),
            }
        }
        assert!(explained >= 10, "{form}: {explained}");
    }
}

#[test]
fn ranks_stand_in_one_table_with_what_stands_out_first() {
    let place = Place::new();
    let rank = |extra: u64| {
        let mut story = holes();
        if extra > 0 {
            story.segment(3 << 30, extra * MIB, 0);
            story.alloc(3 << 30, extra * MIB, 0, json!([script(50, "extra")]));
        }
        story.text()
    };
    for (number, extra) in [0, 0, 200, 0].into_iter().enumerate() {
        place.file(&format!("rank{number}.json"), rank(extra));
    }
    place.file("rank4.json", "{\"device_traces\": 1}");
    let files = ["rank0.json", "rank1.json", "rank2.json", "rank3.json", "rank4.json"];
    let ran = explain(&place, &[&files[..], &["--json"]].concat()).ok();
    assert!(ran.stderr.contains("rank4.json") && ran.stderr.contains("go on without it"), "{}", ran.stderr);
    let found: Value = serde_json::from_str(&ran.stdout).unwrap();
    let order: Vec<&str> =
        found["ranks"].as_array().unwrap().iter().map(|rank| rank["trace"].as_str().unwrap()).collect();
    assert_eq!(order, ["rank2.json", "rank0.json", "rank1.json", "rank3.json"]);
    assert_eq!(found["worst"]["trace"], "rank2.json");
    assert_eq!(found["unread"][0]["trace"], "rank4.json");
    let screen = explain(&place, &files).ok().stdout;
    assert!(screen.starts_with("4 histories") && screen.contains("In full: rank2.json"), "{screen}");
    // Each shard has its own.
    let shard = |of: &str| {
        let ran = explain(&place, &[&files[..4], &["--shard", of, "--json"]].concat()).ok();
        let found: Value = serde_json::from_str(&ran.stdout).unwrap();
        found["ranks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|rank| rank["trace"].as_str().unwrap().to_owned())
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(shard("1/2"), BTreeSet::from(["rank0.json".to_owned(), "rank2.json".to_owned()]));
    assert_eq!(shard("2/2"), BTreeSet::from(["rank1.json".to_owned(), "rank3.json".to_owned()]));
    explain(&place, &["rank4.json", "rank4.json"]).refused(2, &["none of the 2 histories"]);
}

#[test]
fn the_ledger_is_that_of_the_replay() {
    let place = Place::new();
    agrees(&place, &place.write("holes.json", holes().text()));
}

/// The keys of an object, of what is in it too, as paths.
fn keys(value: &Value, before: &str, out: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if before.is_empty() { key.clone() } else { format!("{before}.{key}") };
                keys(value, &path, out);
                out.insert(path);
            }
        }
        Value::Array(list) => list.iter().for_each(|item| keys(item, &format!("{before}[]"), out)),
        _ => {}
    }
}

#[test]
fn every_key_is_described() {
    let place = Place::new();
    let mut story = holes();
    story.event("free_requested", BASE, 2 * MIB, 0, json!([]));
    story.event("oom", 3, 1 << 40, 0, json!([script(3, "c")]));
    story.events[1]["category"] = json!("parameter");
    story.events[1]["user_metadata"] = json!("a note");
    story.annotate("fwd", "START", 1);
    let file = place.write("a.json", story.text());
    let mut found = BTreeSet::new();
    keys(&self::found(&place, &[&file]), "", &mut found);
    keys(&self::found(&place, &[&file, "--between", "2", "9"])["grew"], "grew", &mut found);
    let document =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../analysis/schema.md")).unwrap();
    let section = document.split("\n## ").find(|section| section.starts_with("explain\n")).unwrap();
    // The last part of each path stands in the section, between backticks.
    let described: BTreeSet<&str> =
        section.split('`').skip(1).step_by(2).flat_map(|code| code.split(['.', '[', ']'])).collect();
    let missing: Vec<&String> = found
        .iter()
        .filter(|path| !described.contains(path.rsplit('.').next().unwrap().trim_end_matches("[]")))
        .collect();
    assert!(missing.is_empty(), "not described: {missing:?}");
}

/// The same work with events of some actions left out, as `skip_actions` does.
fn without(story: &Story, actions: &[&str]) -> Story {
    let kept = |event: &&Value| !actions.contains(&event["action"].as_str().unwrap());
    Story { events: story.events.iter().filter(kept).cloned().collect(), ..Story::default() }
}

#[test]
fn one_event_of_a_free_is_enough() {
    let place = Place::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    for _ in 0..3 {
        story.alloc(0, 12 * MIB, 0, json!([]));
        story.alloc(12 * MIB, 8 * MIB, 0, json!([]));
        story.free(0, 12 * MIB, 0);
        story.alloc(0, 3 * MIB, 0, json!([]));
        story.free(12 * MIB, 8 * MIB, 0);
        story.free(0, 3 * MIB, 0);
    }
    let whole = self::found(&place, &[&place.write("whole.json", story.text())]);
    let replayed = |file: &str| {
        let arguments = ["replay", file, "--alloc", "caching", "--device", "null", "--plan", "off", "--json"];
        let rows = place.run(&arguments).rows();
        ["peak_reserved_bytes", "peak_active_bytes"].map(|figure| rows[0][figure].clone())
    };
    let expected = replayed(&place.at("whole.json").display().to_string());
    for action in ["free_requested", "free_completed"] {
        let file = place.write("part.json", without(&story, &[action]).text());
        let found = self::found(&place, &[&file]);
        for (at, figure) in
            [("peak_active", "active_bytes"), ("peak_active", "requested_bytes"), ("end", "active_bytes")]
        {
            assert_eq!(found[at][figure], whole[at][figure], "{action}: {at}");
        }
        assert_eq!(found["reserved"]["pending"]["deferred_frees"], json!(0), "{action}");
        assert_eq!(replayed(&file), expected, "{action}");
    }
    let file = place.write("none.json", without(&story, &["alloc"]).text());
    for command in ["explain", "advise"] {
        place.run(&[command, &file]).refused(2, &["no alloc event comes before it", "skip_actions"]);
    }
    // The recording begins between the two events of a free, for which nothing waited.
    let at = story.events.iter().position(|event| event["action"] == "free_completed").unwrap();
    let cut = Story { events: story.events.split_off(at), ..Story::default() };
    let found = self::found(&place, &[&place.write("cut.json", cut.text())]);
    assert_eq!(found["reserved"]["pending"]["peak_bytes"], json!(0));
}
