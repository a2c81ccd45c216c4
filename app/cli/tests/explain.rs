//! `explain` on small recordings with known answers.

use crate::common::TestDir;
use crate::common::story::{BASE, MIB, Story, library, script, torch};
use crate::common::story::{agrees, explain, explain_json, part};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// A free block kept reserved by another block, a stream used once, and a request that only that stream could have served.
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
    // Later work on stream 0, with less active memory.
    story.free(2 << 30, 25 * MIB, 0);
    for _ in 0..20 {
        story.alloc(2 * MIB, 4 * MIB, 0, json!([]));
        story.free(2 * MIB, 4 * MIB, 0);
    }
    story
}

#[test]
fn holders_keeping_blocks_and_stranded_memory_are_found() {
    let dir = TestDir::new();
    let file = dir.write("holes.json", holes().text());
    let explanation = explain_json(&dir, &[&file]);
    let peak = &explanation["peak_reserved"];
    assert_eq!((&peak["reserved_bytes"], &peak["event"]), (&json!(76 * MIB), &json!(11)));
    // 25 MiB leave 1 MiB, which is too small to be split off.
    assert_eq!(peak["active_bytes"], json!(28 * MIB));
    assert_eq!(peak["requested_bytes"], json!(27 * MIB));
    let parts =
        ["requested", "internal", "soft", "hard", "stream", "pending"].map(|name| part(&explanation, name) / MIB);
    assert_eq!(parts, [27, 1, 0, 18, 30, 0]);
    // At the active peak the warm-up's block is live.
    let active = &explanation["who"][0];
    assert_eq!(active["at"], "peak_active");
    let who = explanation["who"].as_array().unwrap().iter().find(|who| who["at"] == "peak_reserved").unwrap();
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
    let pinned = &explanation["reserved"]["pinned"];
    assert_eq!(pinned.as_array().unwrap().len(), 1);
    assert_eq!((&pinned[0]["bytes"], &pinned[0]["free_bytes"]), (&json!(20 * MIB), &json!(18 * MIB)));
    let keeper = &pinned[0]["keepers"][0];
    assert_eq!((&keeper["line"], &keeper["bytes"]), (&json!("proj/train.py:10 load"), &json!(2 * MIB)));
    assert_eq!((&keeper["age_events"], &keeper["age_ns"]), (&json!(9), &json!(9000)));
    let stranded = &explanation["reserved"]["stranded"];
    assert_eq!(
        stranded,
        &json!([{"stream": 7, "free_bytes": 30 * MIB, "returnable_bytes": 30 * MIB, "last_request": 7,
            "requests_since": 21, "line": "proj/train.py:40 warm_up"}])
    );
    // The causes of the three misses.
    let causes: Vec<(u64, &str)> = explanation["shapes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|shape| (shape["requested_bytes"].as_u64().unwrap() / MIB, shape["cause"].as_str().unwrap()))
        .collect();
    assert_eq!(causes, [(30, "growth"), (25, "stream"), (2, "growth")]);
    // Stranded memory is named with its line.
    let all = explain(&dir, &[&file]).ok().stdout;
    assert!(all.contains("stranded: 30 MiB free on stream 0x7") && all.contains("warm_up"), "{all}");
    let useless = "the free blocks could not serve the request";
    assert!(all.contains(useless), "{all}");
    // The remainder of a first segment did not fail to serve a request.
    let mut first = Story::default();
    first.segment(0, 20 * MIB, 0);
    first.alloc(0, 2 * MIB, 0, json!([]));
    first.alloc(2 * MIB, 10 * MIB, 0, json!([]));
    let screen = explain(&dir, &[&dir.write("first.json", first.text())]).ok().stdout;
    assert!(!screen.contains(useless), "{screen}");
    // Unfolded, the innermost frame is the line.
    let unfolded = explain_json(&dir, &[&file, "--frames"]);
    let rows = unfolded["who"].as_array().unwrap().iter().find(|who| who["at"] == "peak_reserved").unwrap();
    assert_eq!(rows["lines"][1]["line"], "modules/module.py:1 f");
}

#[test]
fn blocks_without_frames_get_the_last_line_before_them() {
    let dir = TestDir::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, MIB + MIB / 2, 0, json!([script(5, "backward")]));
    story.alloc(2 * MIB, 8 * MIB, 0, json!([]));
    let explanation = explain_json(&dir, &[&dir.write("near.json", story.text())]);
    let rows = &explanation["who"][0]["lines"];
    assert_eq!((&rows[0]["line"], &rows[0]["nearby"]), (&json!("proj/train.py:5 backward"), &json!(true)));
    assert_eq!((&rows[1]["line"], &rows[1]["nearby"]), (&json!("proj/train.py:5 backward"), &json!(false)));
}

#[test]
fn retries_are_distinguished_from_empty_cache_and_have_a_cause() {
    let dir = TestDir::new();
    let mut story = Story::default();
    // 10 MiB and 10 MiB free, 15 MiB requested.
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
    let file = dir.write("retry.json", story.text());
    for (limit, kind) in [(None, Some("retry_or_empty_cache")), (Some("30MiB"), Some("retry")), (Some("1GiB"), None)] {
        let limit = limit.map(|limit| vec!["--limit", limit]).unwrap_or_default();
        let explanation = explain_json(&dir, &[&[file.as_str()], &limit[..]].concat());
        let retries = explanation["retries"].as_array().unwrap();
        assert_eq!(retries.first().map(|retry| retry["kind"].as_str().unwrap()), kind);
        assert_eq!(explanation["num_retries"], json!(retries.len()));
        assert_eq!(explanation["num_releases"], json!(usize::from(kind.is_none())));
        if let [retry] = &retries[..] {
            assert_eq!((&retry["cause"], &retry["released_bytes"]), (&json!("pieces"), &json!(20 * MIB)));
            assert_eq!((&retry["succeeded"], &retry["line"]), (&json!(true), &json!("proj/train.py:2 b")));
        }
        let refused = &explanation["out_of_memory"][0];
        assert_eq!((&refused["asked_bytes"], &refused["cause"]), (&json!(12 * MIB), &json!("growth")));
        assert_eq!((&refused["device_free_bytes"], &refused["event"]), (&json!(3 * MIB), &json!(13)));
        assert_eq!(explanation["who"][1]["at"], "out_of_memory");
    }
    // The frames of the segment releases prove it.
    for event in &mut story.events {
        if event["action"] == "segment_free" {
            event["frames"] = json!([torch("empty_cache"), script(9, "tidy")]);
        }
    }
    let file = dir.write("tidy.json", story.text());
    assert_eq!(explain_json(&dir, &[&file])["retries"], json!([]));
}

#[test]
fn the_cause_of_a_miss_after_empty_cache_is_that_of_the_emptied_memory() {
    let dir = TestDir::new();
    let call = json!([torch("empty_cache"), script(9, "tidy")]);
    // Frames name the call; without them the next request shows it, as a request with a fitting free block releases nothing.
    for frames in [call, json!([])] {
        let mut story = Story::default();
        for step in 0..3 {
            let at = step << 30;
            story.segment(at, 20 * MIB, 0);
            story.alloc(at, 16 * MIB, 0, json!([script(2, "step")]));
            story.free(at, 16 * MIB, 0);
            story.event("segment_free", BASE + at, 20 * MIB, 0, frames.clone());
        }
        let explanation = explain_json(&dir, &[&dir.write("emptied.json", story.text())]);
        assert_eq!(explanation["shapes"][0]["causes"], json!([["growth", 3]]), "{frames}");
        assert_eq!((&explanation["num_retries"], &explanation["num_releases"]), (&json!(0), &json!(3)), "{frames}");
        // A limit does not turn them into retries.
        let limited = explain_json(&dir, &["emptied.json", "--limit", "30MiB"]);
        assert_eq!((&limited["num_retries"], &limited["num_releases"]), (&json!(0), &json!(3)), "{frames}");
    }
    // A call whose next request is served from the cache.
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.segment(1 << 30, 20 * MIB, 0);
    story.alloc(0, 4 * MIB, 0, json!([]));
    story.event("segment_free", BASE + (1 << 30), 20 * MIB, 0, json!([torch("empty_cache")]));
    story.alloc(4 * MIB, 4 * MIB, 0, json!([]));
    assert_eq!(explain_json(&dir, &[&dir.write("served.json", story.text())])["num_releases"], 1);
}

#[test]
fn every_cause_of_a_miss_is_inferred() {
    let dir = TestDir::new();
    // Name, settings, requested bytes on stream 0, a free block's bytes and stream, and the expected cause.
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
        let explanation = explain_json(&dir, &[&dir.write(&format!("{name}.json"), story.text())]);
        let shapes = explanation["shapes"].as_array().unwrap();
        let shape = shapes.iter().find(|shape| shape["requested_bytes"] == json!(asked)).unwrap();
        let causes: Vec<&str> = shape["causes"].as_array().unwrap().iter().map(|of| of[0].as_str().unwrap()).collect();
        assert!(causes.contains(&cause), "{name}: {shape}");
    }
}

#[test]
fn deferred_frees_are_counted_by_stream() {
    let dir = TestDir::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, 8 * MIB, 0, json!([script(3, "prefetch")]));
    story.event("free_requested", BASE, 8 * MIB, 0, json!([]));
    story.alloc(8 * MIB, 8 * MIB, 0, json!([script(4, "next")]));
    // While the first free is pending, a third request misses.
    story.segment(1 << 30, 20 * MIB, 0);
    story.alloc(1 << 30, 8 * MIB, 0, json!([script(4, "next")]));
    story.event("free_completed", BASE, 8 * MIB, 0, json!([]));
    story.alloc(0, 4 * MIB, 0, json!([]));
    let explanation = explain_json(&dir, &[&dir.write("waits.json", story.text())]);
    let pending = &explanation["reserved"]["pending"];
    assert_eq!(
        (&pending["deferred_frees"], &pending["peak_bytes"], &pending["peak_event"]),
        (&json!(1), &json!(8 * MIB), &json!(3))
    );
    assert_eq!(explanation["peak_active"]["active_bytes"], json!(24 * MIB));
    assert_eq!(pending["peak_active_instant_bytes"], json!(20 * MIB));
    let row = &pending["streams"][0];
    assert_eq!(
        (&row["deferred_frees"], &row["longest_events"], &row["line"]),
        (&json!(1), &json!(4), &json!("proj/train.py:3 prefetch"))
    );
    let shape = explanation["shapes"].as_array().unwrap().iter().find(|shape| shape["misses"] == 2).unwrap();
    assert!(shape["causes"].as_array().unwrap().contains(&json!(["pending", 1])), "{shape}");
    // At peak reserved the pending bytes are a separate part.
    assert_eq!(part(&explanation, "pending"), 8 * MIB);
    assert_eq!(pending["replayed_reserved_bytes"], json!(40 * MIB));
    assert_eq!(pending["replayed_instant_reserved_bytes"], json!(20 * MIB));
}

#[test]
fn growth_is_reported_between_repetitions_and_given_moments() {
    let dir = TestDir::new();
    let mut story = Story::default();
    story.segment(0, 200 * MIB, 0);
    for step in 0..20 {
        story.annotate(&format!("step {step}"), "START", story.events.len());
        story.alloc(100 * MIB, 40 * MIB, 0, json!([script(8, "forward")]));
        story.alloc(step * 2 * MIB, 2 * MIB, 0, json!([script(9, "log_loss")]));
        story.free(100 * MIB, 40 * MIB, 0);
        story.annotate(&format!("step {step}"), "END", story.events.len() - 1);
    }
    let file = dir.write("leak.json", story.text());
    let grew = explain_json(&dir, &[&file])["grew"].clone();
    let rows = grew["lines"].as_array().unwrap();
    assert_eq!(rows.len(), 1, "activations do not grow: {rows:?}");
    assert_eq!(rows[0]["line"], "proj/train.py:9 log_loss");
    assert!(rows[0]["after_bytes"].as_u64() >= rows[0]["before_bytes"].as_u64().map(|bytes| bytes + 18 * MIB));
    let between = |a: &str, b: &str| explain_json(&dir, &[&file, "--between", a, b])["grew"].clone();
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
        ("0", "9", "numbered 1 to 81"),
        ("5", "82", "numbered 1 to 81"),
        ("step 1", "step 99", "no annotation 'step 99'"),
    ] {
        explain(&dir, &[&file, "--between", a, b]).refused(2, &[words]);
    }
    // Without growth there is no section.
    let steady = dir.write("steady.json", holes().text());
    assert_eq!(explain_json(&dir, &[&steady])["grew"], Value::Null);
}

#[test]
fn a_late_recording_and_one_without_events_are_explained() {
    let dir = TestDir::new();
    let mut story = Story::default();
    let block = |at: u64, bytes: u64, state: &str, frames: Value| json!({"address": BASE + at, "size": bytes, "requested_size": bytes, "state": state, "frames": frames});
    story.segments.push(json!({
        "device": 0, "address": BASE, "total_size": 20 * MIB, "stream": 0, "segment_type": "large", "is_expandable": false,
        "blocks": [
            block(0, 4 * MIB, "active_allocated", json!([script(2, "weights")])),
            block(4 * MIB, 16 * MIB, "inactive", json!([])),
        ],
    }));
    // Without events the snapshot's segments are explained.
    let explanation = explain_json(&dir, &[&dir.write("none.json", story.text())]);
    assert_eq!((&explanation["events"], &explanation["end"]["reserved_bytes"]), (&json!(0), &json!(20 * MIB)));
    assert_eq!(explanation["who"][0]["lines"][0]["line"], "proj/train.py:2 weights");
    assert_eq!(explanation["reserved"]["pinned"][0]["free_bytes"], json!(16 * MIB));
    // Without events stranded streams and settings are unknown.
    assert_eq!(explanation["reserved"]["stranded"], json!([]));
    let screen = explain(&dir, &[&dir.write("none.json", story.text())]).ok().stdout;
    assert!(
        screen.contains("Next: call torch.cuda.memory._record_memory_history") && !screen.contains("advise"),
        "{screen}"
    );
    // One earlier block is freed, another stays live.
    story.free(4 * MIB, 10 * MIB, 0);
    let explanation = explain_json(&dir, &[&dir.write("late.json", story.text())]);
    assert_eq!((&explanation["blocks_before"], &explanation["segments_before"]), (&json!(2), &json!(1)));
    assert_eq!(explanation["end"]["active_bytes"], json!(4 * MIB));
    assert_eq!(explanation["peak_active"]["active_bytes"], json!(14 * MIB));
}

#[test]
fn a_truncated_file_is_explained_up_to_the_cut() {
    let dir = TestDir::new();
    let file = dir.write("whole.json", holes().text());
    for form in ["snapshot", "snapshot-json"] {
        let to = dir.at("whole.out");
        dir.run(&["convert", &file, "--to", form, "-o", to.to_str().unwrap(), "--force"]).ok();
        let bytes = std::fs::read(&to).unwrap();
        let mut explained = 0;
        for part in 1..20 {
            let cut = dir.write("cut.out", &bytes[..bytes.len() * part / 20]);
            let output = explain(&dir, &[&cut, "--json"]);
            assert!(!output.stderr.contains("internal fault"), "{}", output.stderr);
            match output.code {
                Some(0) => {
                    assert!(output.stderr.contains("was cut short at byte"), "{}", output.stderr);
                    let explanation: Value = serde_json::from_str(&output.stdout).unwrap();
                    assert!(explanation["cut"].is_string());
                    explained += 1;
                    // Other commands read it, too.
                    if part == 12 {
                        let replayed = dir.run(&["replay", &cut, "--alloc", "caching", "--plan", "off"]).ok();
                        assert!(replayed.stderr.contains("was cut short at byte"), "{}", replayed.stderr);
                    }
                }
                code => assert_eq!(code, Some(2), "{}", output.stderr),
            }
        }
        assert!(explained >= 10, "{form}: {explained}");
    }
}

#[test]
fn ranks_are_listed_in_one_table_with_outliers_first() {
    let dir = TestDir::new();
    let rank = |extra: u64| {
        let mut story = holes();
        if extra > 0 {
            story.segment(3 << 30, extra * MIB, 0);
            story.alloc(3 << 30, extra * MIB, 0, json!([script(50, "extra")]));
        }
        story.text()
    };
    for (number, extra) in [0, 0, 200, 0].into_iter().enumerate() {
        dir.file(&format!("rank{number}.json"), rank(extra));
    }
    dir.file("rank4.json", "{\"device_traces\": 1}");
    let files = ["rank0.json", "rank1.json", "rank2.json", "rank3.json", "rank4.json"];
    let output = explain(&dir, &[&files[..], &["--json"]].concat()).ok();
    assert!(
        output.stderr.contains("rank4.json") && output.stderr.contains("continuing without it"),
        "{}",
        output.stderr
    );
    let explanation: Value = serde_json::from_str(&output.stdout).unwrap();
    let order: Vec<&str> =
        explanation["ranks"].as_array().unwrap().iter().map(|rank| rank["trace"].as_str().unwrap()).collect();
    assert_eq!(order, ["rank2.json", "rank0.json", "rank1.json", "rank3.json"]);
    assert_eq!(explanation["worst"]["trace"], "rank2.json");
    assert_eq!(explanation["unread"][0]["trace"], "rank4.json");
    let screen = explain(&dir, &files).ok().stdout;
    assert!(screen.starts_with("4 recordings") && screen.contains("In full: rank2.json"), "{screen}");
    // Each shard reads its own files.
    let shard = |of: &str| {
        let output = explain(&dir, &[&files[..4], &["--shard", of, "--json"]].concat()).ok();
        let explanation: Value = serde_json::from_str(&output.stdout).unwrap();
        explanation["ranks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|rank| rank["trace"].as_str().unwrap().to_owned())
            .collect::<BTreeSet<_>>()
    };
    assert_eq!(shard("1/2"), BTreeSet::from(["rank0.json".to_owned(), "rank2.json".to_owned()]));
    assert_eq!(shard("2/2"), BTreeSet::from(["rank1.json".to_owned(), "rank3.json".to_owned()]));
    explain(&dir, &["rank0.json", "--shard", "2/2"])
        .refused(2, &["--shard 2/2: there is 1 recording; none is left for this share"]);
    explain(&dir, &["rank4.json", "rank4.json"]).refused(2, &["none of the 2 recordings"]);
}

#[test]
fn the_breakdown_equals_that_of_the_replay() {
    let dir = TestDir::new();
    agrees(&dir, &dir.write("holes.json", holes().text()));
}

/// The keys of an object and of nested objects, as paths.
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
    let dir = TestDir::new();
    let mut story = holes();
    story.event("free_requested", BASE, 2 * MIB, 0, json!([]));
    story.event("oom", 3, 1 << 40, 0, json!([script(3, "c")]));
    story.events[1]["category"] = json!("parameter");
    story.events[1]["user_metadata"] = json!("a note");
    story.annotate("fwd", "START", 1);
    let file = dir.write("a.json", story.text());
    let mut explanation = BTreeSet::new();
    keys(&explain_json(&dir, &[&file]), "", &mut explanation);
    keys(&explain_json(&dir, &[&file, "--between", "2", "9"])["grew"], "grew", &mut explanation);
    let document = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("schema.md")).unwrap();
    let section = document.split("\n## ").find(|section| section.starts_with("explain\n")).unwrap();
    // The section contains the last part of each path in backticks.
    let described: BTreeSet<&str> =
        section.split('`').skip(1).step_by(2).flat_map(|code| code.split(['.', '[', ']'])).collect();
    let missing: Vec<&String> = explanation
        .iter()
        .filter(|path| !described.contains(path.rsplit('.').next().unwrap().trim_end_matches("[]")))
        .collect();
    assert!(missing.is_empty(), "not described: {missing:?}");
}

/// The same work without events of some actions, as with `skip_actions`.
fn without(story: &Story, actions: &[&str]) -> Story {
    let kept = |event: &&Value| !actions.contains(&event["action"].as_str().unwrap());
    Story { events: story.events.iter().filter(kept).cloned().collect(), ..Story::default() }
}

#[test]
fn one_event_of_each_free_is_enough() {
    let dir = TestDir::new();
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
    let whole = explain_json(&dir, &[&dir.write("whole.json", story.text())]);
    let replayed = |file: &str| {
        let arguments = ["replay", file, "--alloc", "caching", "--device", "null", "--plan", "off", "--json"];
        let rows = dir.run(&arguments).rows();
        ["peak_reserved_bytes", "peak_active_bytes"].map(|figure| rows[0][figure].clone())
    };
    let expected = replayed(&dir.at("whole.json").display().to_string());
    for action in ["free_requested", "free_completed"] {
        let file = dir.write("part.json", without(&story, &[action]).text());
        let explanation = explain_json(&dir, &[&file]);
        for (at, figure) in
            [("peak_active", "active_bytes"), ("peak_active", "requested_bytes"), ("end", "active_bytes")]
        {
            assert_eq!(explanation[at][figure], whole[at][figure], "{action}: {at}");
        }
        assert_eq!(explanation["reserved"]["pending"]["deferred_frees"], json!(0), "{action}");
        assert_eq!(replayed(&file), expected, "{action}");
    }
    let file = dir.write("none.json", without(&story, &["alloc"]).text());
    for command in ["explain", "advise"] {
        dir.run(&[command, &file]).refused(2, &["no alloc event precedes it", "skip_actions"]);
    }
    // The recording starts between the two events of a free that did not wait.
    let at = story.events.iter().position(|event| event["action"] == "free_completed").unwrap();
    let cut = Story { events: story.events.split_off(at), ..Story::default() };
    let explanation = explain_json(&dir, &[&dir.write("cut.json", cut.text())]);
    assert_eq!(explanation["reserved"]["pending"]["peak_bytes"], json!(0));
}
