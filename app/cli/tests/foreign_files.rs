//! Recordings of other versions of PyTorch and of programs that failed in unusual ways: what they lack is not made up.

use crate::common::TestDir;
use crate::common::story::{self, MIB, Story, explain, explain_json};
use serde_json::{Value, json};

/// The words of a screen, whatever its width.
fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn screen(dir: &TestDir, arguments: &[&str]) -> String {
    flat(&dir.run(arguments).ok().stdout)
}

/// Two segments, one of them with a free block of 40 MiB at the end.
fn two_segments() -> Story {
    let mut story = Story::default();
    for (at, bytes) in [(0, 100 * MIB), (200 * MIB, 40 * MIB)] {
        story.segment(at, bytes, 0);
        story.alloc(at, bytes, 0, json!([]));
    }
    story.free(200 * MIB, 40 * MIB, 0);
    story
}

/// The story with a failed request of any size.
fn failed(size: Value) -> Story {
    let mut story = two_segments();
    story.event("oom", 5 << 30, 0, 0, json!([]));
    story.events.last_mut().unwrap()["size"] = size;
    story
}

#[test]
fn failed_request_of_an_impossible_size_is_named_and_left_out() {
    let dir = TestDir::new();
    for (size, bytes, words) in [
        (json!(-1), u64::MAX, "-1 as a signed number"),
        (json!(u64::MAX - 1023), u64::MAX - 1023, "-1024 as a signed number"),
        (json!(1_u64 << 51), 1 << 51, "a negative or overflowed number in the program"),
    ] {
        let file = dir.write("snapshot.json", failed(size).text());
        let text = flat(&explain(&dir, &[&file]).ok().stdout);
        assert!(
            text.contains("no GPU has as much memory: the requested size is wrong") && text.contains(words),
            "{text}"
        );
        assert!(!text.contains("the GPU had") && !text.contains("process limit"), "{text}");
        let last = &explain_json(&dir, &[&file])["out_of_memory"][0];
        assert_eq!((&last["asked_bytes"], &last["cause"]), (&json!(bytes), &json!("impossible")));
        let advice = screen(&dir, &["advise", &file]);
        assert!(advice.contains("The request of event 7 failed because no GPU has"), "{advice}");
        assert!(!advice.contains("Out of memory at") && !advice.contains("avoids"), "{advice}");
        assert!(dir.run(&["advise", &file, "--json"]).ok().json()["lower_bound_bytes"].as_u64().unwrap() <= 140 * MIB);
        let replay = screen(&dir, &["replay", &file, "--alloc", "caching", "--device", "null"]);
        assert!(replay.contains("event 7 failed because no GPU has"), "{replay}");
        for format in ["snapshot", "snapshot-json", "perfetto", "rmm"] {
            dir.run(&["convert", &file, "--to", format, "--out", "converted", "--force"]).ok();
        }
    }
    // Others count as before.
    let mut story = failed(json!(60 * MIB));
    story.event("oom", 5 << 30, u64::MAX, 0, json!([]));
    let file = dir.write("snapshot.json", story.text());
    let advice = screen(&dir, &["advise", &file]);
    assert!(advice.contains("Out of memory at event 7 of 8: 60 MiB requested"), "{advice}");
    // A block of such a size contradicts the device.
    let mut story = two_segments();
    story.alloc(0, 1 << 51, 0, json!([]));
    let file = dir.write("snapshot.json", story.text());
    assert!(explain(&dir, &[&file]).stderr.contains("no device has more than 256 TiB"));
}

#[test]
fn events_of_later_versions_are_counted_and_named_once() {
    let dir = TestDir::new();
    let mut story = two_segments();
    let known = dir.write("known.json", story.text());
    // Only that version knows what their fields mean.
    for (action, size) in
        [("annotate_memory", json!(5)), ("annotate_memory", json!(-5)), ("capture_begin", Value::Null)]
    {
        story.event(action, story::BASE, 0, 0, json!([]));
        story.events.last_mut().unwrap()["size"] = size;
    }
    let file = dir.write("snapshot.json", story.text());
    let words = "3 events of actions that this version does not know (annotate_memory, capture_begin)";
    for command in ["explain", "advise"] {
        let ran = dir.run(&[command, &file]).ok();
        assert_eq!(flat(&ran.stderr).matches(words).count(), 1, "{}", ran.stderr);
    }
    let converted = screen(&dir, &["convert", &file, "--to", "rmm", "--out", "rmm.csv"]);
    assert!(converted.contains("3 of unknown actions (annotate_memory, capture_begin)"), "{converted}");
    for command in ["explain", "advise"] {
        assert!(screen(&dir, &[command, &file]).contains(words));
        assert!(!screen(&dir, &[command, &known]).contains("does not know"));
    }
    let [with, without] = [&file, &known].map(|file| explain_json(&dir, &[file]));
    assert_eq!((&with["peak_reserved"], &with["end"]), (&without["peak_reserved"], &without["end"]));
    assert_eq!(with["events"], 6);
}

#[test]
fn free_memory_of_the_device_is_not_supposed_where_it_is_not_recorded() {
    let dir = TestDir::new();
    for free in [None, Some(Value::Null), Some(json!(0))] {
        let mut story = failed(json!(60 * MIB));
        let event = story.events.last_mut().unwrap().as_object_mut().unwrap();
        event.remove("device_free");
        event.extend(free.map(|free| ("device_free".to_owned(), free)));
        let file = dir.write("snapshot.json", story.text());
        let text = screen(&dir, &["explain", &file]);
        assert!(text.contains("60 MiB requested") && !text.contains("the GPU had"), "{text}");
        assert!(!text.contains("limit") && !text.contains("on the GPU"), "{text}");
        assert_eq!(explain_json(&dir, &[&file])["out_of_memory"][0]["device_free_bytes"], Value::Null);
        let advice = screen(&dir, &["advise", &file]);
        assert!(!advice.contains("were free on the device"), "{advice}");
    }
}

#[test]
fn durations_are_unknown_where_times_are_missing_or_go_backwards() {
    let dir = TestDir::new();
    let mut story = two_segments();
    story.annotate("forward", "START", 1);
    story.annotate("forward", "END", 4);
    let recorded = explain_json(&dir, &[&dir.write("snapshot.json", story.text())]);
    assert_eq!(
        (&recorded["peak_active"]["time_ns"], &recorded["timeline"][1]["time_ns"]),
        (&json!(3000), &json!(1000))
    );
    let kept = |at: usize| json!(1000 + at);
    let missing: [(&str, &dyn Fn(usize) -> Value); 5] = [
        ("absent", &|_| json!("absent")),
        ("none", &|_| Value::Null),
        ("zero", &|_| json!(0)),
        ("one missing", &|at| if at == 3 { json!(0) } else { kept(at) }),
        ("backwards", &|at| json!(1_000_000 - 10_000 * at)),
    ];
    for (name, time) in missing {
        let mut story =
            Story { events: story.events.clone(), annotations: story.annotations.clone(), ..Story::default() };
        for (at, event) in story.events.iter_mut().enumerate() {
            event["time_us"] = time(at);
            if event["time_us"] == "absent" {
                event.as_object_mut().unwrap().remove("time_us");
            }
        }
        let file = dir.write("snapshot.json", story.text());
        let explanation = explain_json(&dir, &[&file]);
        for moment in ["peak_active", "peak_reserved", "end"] {
            assert_eq!(
                (&explanation[moment]["time_ns"], &explanation[moment]["annotation"]),
                (&Value::Null, &Value::Null)
            );
        }
        let points = explanation["timeline"].as_array().unwrap();
        assert!(points.iter().all(|point| point["time_ns"].is_null()), "{name}: {points:?}");
        assert!(explanation["phases"].as_array().unwrap().iter().all(|phase| phase["time_ns"].is_null()), "{name}");
        let text = screen(&dir, &["explain", &file]);
        assert!(!text.contains(", after "), "{name}: {text}");
        dir.run(&["report", &file, "-o", &format!("{name}.html")]).ok();
    }
}

/// 60 MiB requested after 20 MiB in a private pool of 40 MiB; the default pool has a free block of 100 MiB on the other or the same stream.
fn failed_in_private_pool(stream: u64) -> Story {
    let mut story = Story::default();
    story.segment(0, 100 * MIB, 0);
    story.alloc(0, 100 * MIB, 0, json!([]));
    story.free(0, 100 * MIB, 0);
    story.segment(200 * MIB, 40 * MIB, stream);
    story.alloc(200 * MIB, 20 * MIB, stream, json!([]));
    story.event("oom", 10 * MIB, 60 * MIB, stream, json!([]));
    story.held(0, 100 * MIB, json!([0, 0]));
    story.held(200 * MIB, 40 * MIB, json!([0, 1]));
    story.segments[1]["stream"] = json!(stream);
    let [used, free] = [(0, "active_allocated"), (20 * MIB, "inactive")].map(|(at, state)| {
        let address = story::BASE + 200 * MIB + at;
        json!({"address": address, "size": 20 * MIB, "requested_size": 20 * MIB, "state": state, "frames": []})
    });
    story.segments[1]["blocks"] = json!([used, free]);
    story
}

#[test]
fn failed_request_of_a_private_pool_is_explained_by_that_pool() {
    let dir = TestDir::new();
    for stream in [0, 7] {
        let file = dir.write("snapshot.json", failed_in_private_pool(stream).text());
        let last = &explain_json(&dir, &[&file])["out_of_memory"][0];
        assert_eq!((&last["private_pool"], &last["cause"]), (&json!("0.1"), &json!("private_pool")), "{last}");
        assert_eq!((&last["free_bytes"], &last["largest_free_bytes"]), (&json!(20 * MIB), &json!(20 * MIB)));
        let text = screen(&dir, &["explain", &file]);
        let words = "20 MiB free in its private pool 0.1 (CUDA graph or MemPool, that of the last allocation on its stream), largest \
                     free block 20 MiB: too little free in its private pool";
        assert!(text.contains(words), "{text}");
    }
    // A request that the pool would have served was to the default one.
    let mut story = failed_in_private_pool(0);
    story.events[6]["size"] = json!(15 * MIB);
    let file = dir.write("snapshot.json", story.text());
    let last = &explain_json(&dir, &[&file])["out_of_memory"][0];
    assert_eq!((&last["private_pool"], &last["private_free_bytes"]), (&Value::Null, &json!(20 * MIB)), "{last}");
}

#[test]
fn largest_free_block_of_a_small_request_is_that_of_the_small_pool() {
    let dir = TestDir::new();
    let mut story = two_segments();
    story.event("oom", 1024, MIB / 2, 0, json!([]));
    let file = dir.write("snapshot.json", story.text());
    assert_eq!(explain_json(&dir, &[&file])["out_of_memory"][0]["largest_free_bytes"], 0);
    assert!(screen(&dir, &["explain", &file]).contains("0 B free in its stream and pool, largest free block 0 B"));
}

/// Four segments of which half is free, and a failed request of these bytes.
fn fragmented(bytes: u64) -> Story {
    let mut story = Story::default();
    let half = |at: u64, state: &str| json!({"address": at, "size": 20 * MIB, "requested_size": 20 * MIB, "state": state, "frames": []});
    for at in (0..400 * MIB).step_by(100 << 20) {
        story.segment(at, 40 * MIB, 0);
        story.alloc(at, 20 * MIB, 0, json!([]));
        story.alloc(at + 20 * MIB, 20 * MIB, 0, json!([]));
        story.held(at, 40 * MIB, json!([0, 0]));
        let (first, second) = (story::BASE + at, story::BASE + at + 20 * MIB);
        story.segments.last_mut().unwrap()["blocks"] =
            json!([half(first, "inactive"), half(second, "active_allocated")]);
        story.segments.last_mut().unwrap()["segment_type"] = json!("large");
    }
    (0..400 * MIB).step_by(100 << 20).for_each(|at| story.free(at, 20 * MIB, 0));
    story.event("oom", 3 * MIB, bytes, 0, json!([]));
    story
}

#[test]
fn advice_after_an_out_of_memory_says_whether_a_setting_is_shown_to_avoid_it() {
    let dir = TestDir::new();
    let none = dir.write("none.json", fragmented(90 * MIB).text());
    let ran = dir.run(&["advise", &none]);
    let text = flat(&ran.stdout);
    assert!(text.contains("No setting avoids the out-of-memory"), "{text}");
    assert!(!text.contains("export ") && !text.contains("unset "), "{text}");
    // A free block would have served the request, and the recording does not show why it did not.
    let mut story = two_segments();
    story.event("oom", 5 * MIB, 30 * MIB, 0, json!([]));
    story.held(200 * MIB, 40 * MIB, json!([0, 0]));
    story.held(0, 100 * MIB, json!([0, 0]));
    story.segments[1]["blocks"][0]["state"] = json!("active_allocated");
    let file = dir.write("snapshot.json", story.text());
    let text = screen(&dir, &["advise", &file]);
    assert!(
        text.contains(
            "Inconclusive: memory ran out in the recording, but the replay of the current settings within 145 MiB"
        ),
        "{text}"
    );
    assert!(!text.contains("Keep the current settings"), "{text}");
    let advice = dir.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!(advice["verdict"], "not-said");
    assert!(advice["not_reproduced"].as_str().unwrap().contains("does not run out"), "{advice}");
    // More memory than the program had was asked for.
    let text = screen(&dir, &["advise", &file, "--limit", "10GiB"]);
    assert!(text.contains("In this memory the replay of the current settings does not run out"), "{text}");
}

#[test]
fn line_of_an_earlier_event_is_named_as_such() {
    let dir = TestDir::new();
    let mut story = Story::default();
    story.segment(0, 100 * MIB, 0);
    story.alloc(0, 100 * MIB, 0, json!([story::script(3, "load")]));
    story.event("oom", 5 * MIB, 60 * MIB, 0, json!([]));
    story.alloc(100 * MIB, 1024, 0, json!([story::script(9, "recover")]));
    let file = dir.write("snapshot.json", story.text());
    let text = screen(&dir, &["explain", &file]);
    assert!(
        text.contains("out of memory at event 3, after 2.00 us, last recorded line proj/train.py:3 load"),
        "{text}"
    );
    assert!(text.contains("the recording continues for 1 event"), "{text}");
    let explanation = explain_json(&dir, &[&file]);
    assert_eq!(
        (&explanation["out_of_memory"][0]["nearby"], &explanation["end"]["nearby"]),
        (&json!(true), &json!(false))
    );
    story.events[2]["frames"] = json!([story::script(4, "step")]);
    let text = screen(&dir, &["explain", &dir.write("snapshot.json", story.text())]);
    assert!(text.contains("at proj/train.py:4 step: 60 MiB requested"), "{text}");
}

#[test]
fn segments_without_requests_are_reserved_memory() {
    let dir = TestDir::new();
    let mut story = Story::default();
    story.segment(0, 100 * MIB, 0);
    story.segment(200 * MIB, 20 * MIB, 0);
    let file = dir.write("snapshot.json", story.text());
    assert_eq!(explain_json(&dir, &[&file])["peak_reserved"]["reserved_bytes"], 120 * MIB);
    assert!(screen(&dir, &["explain", &file]).contains("peak reserved 120 MiB, peak active 0 B"));
}

#[test]
fn frees_without_their_completion_are_counted_apart() {
    let dir = TestDir::new();
    let mut story = Story::default();
    // The ring buffer lost the request of the first free.
    story.event("free_completed", story::BASE + 60 * MIB, 8 * MIB, 0, json!([]));
    story.segment(0, 40 * MIB, 0);
    story.alloc(0, 20 * MIB, 0, json!([]));
    story.alloc(20 * MIB, 20 * MIB, 0, json!([]));
    story.event("free_requested", story::BASE, 20 * MIB, 0, json!([]));
    story.event("free_requested", story::BASE + 20 * MIB, 20 * MIB, 0, json!([]));
    let whole = story.text();
    let file = dir.write("snapshot.json", &whole);
    let pending = &explain_json(&dir, &[&file])["reserved"]["pending"];
    assert_eq!((&pending["deferred_frees"], &pending["unfinished_frees"]), (&json!(2), &json!(2)), "{pending}");
    assert_eq!(pending["streams"][0]["longest_events"], 1);
    let text = screen(&dir, &["explain", &file]);
    assert!(
        text.contains("2 frees did not complete when requested") && text.contains("none of them completed"),
        "{text}"
    );
    assert!(screen(&dir, &["advise", &file]).contains("2 frees did not complete when requested"));
    // Cut after the last event, whose completion is missing.
    let at = whole.rfind("}],").or_else(|| whole.rfind("}]]")).unwrap();
    let file = dir.write("cut.json", &whole[..=at]);
    let pending = &explain_json(&dir, &[&file])["reserved"]["pending"];
    assert_eq!(pending["deferred_frees"], 1, "{pending}");
}

/// The story as PyTorch 2.0 wrote it: without times, settings and requested sizes.
fn of_an_early_version(mut story: Story) -> Value {
    for event in &mut story.events {
        event.as_object_mut().unwrap().remove("time_us");
    }
    let block = |size: u64, state: &str| json!({"size": size, "state": state, "history": []});
    let segment = |at: u64, size: u64, state: &str| {
        json!({"device": 0, "address": story::BASE + at, "total_size": size, "allocated_size": 0, "active_size": 0, "stream": 0,
               "segment_type": "large", "blocks": [block(size, state)]})
    };
    let segments = [segment(0, 100 * MIB, "active_allocated"), segment(200 * MIB, 40 * MIB, "inactive")];
    json!({"segments": segments, "device_traces": [story.events]})
}

#[test]
fn snapshots_of_early_versions_show_their_peak() {
    let dir = TestDir::new();
    let mut snapshot = of_an_early_version(two_segments());
    let file = dir.write("snapshot.json", snapshot.to_string());
    let advice = dir.run(&["advise", &file, "--json"]).ok().json();
    let recorded = &advice["recorded"];
    assert_eq!(
        (&recorded["peak_reserved_bytes"], &recorded["peak_requested_bytes"]),
        (&json!(140 * MIB), &json!(140 * MIB))
    );
    assert!(screen(&dir, &["advise", &file]).contains("Peak reserved: 140 MiB, 0.0 % above peak requested"));
    // Without the key of the events there are none.
    snapshot.as_object_mut().unwrap().remove("device_traces");
    let file = dir.write("held.json", snapshot.to_string());
    assert!(
        screen(&dir, &["explain", &file]).contains("100 MiB (71.4 %) active in 1 block when the snapshot was taken")
    );
    // Edited files have times as floats.
    let mut story = two_segments();
    story.events.iter_mut().for_each(|event| event["time_us"] = json!(event["time_us"].as_f64().unwrap()));
    let explanation = explain_json(&dir, &[&dir.write("floats.json", story.text())]);
    assert_eq!(explanation["peak_active"]["time_ns"], 3000);
}

#[test]
fn a_timeline_of_a_profiler_is_named_before_it_is_read() {
    let dir = TestDir::new();
    let snapshot = dir.write("snapshot.json", two_segments().text());
    dir.run(&["convert", &snapshot, "--to", "perfetto", "--out", "timeline.json"]).ok();
    let profiler =
        json!({"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": [{"ph": "X"}]}).to_string();
    dir.write("profiler.json", &profiler);
    // The rest is not read.
    dir.write("cut.json", &profiler[..profiler.len() - 9]);
    dir.write("memory.json", "[[12, 15, 19], [[0, 0], [512, 0], [512, 1024]]]");
    dir.write("raw.json", "[[12, 1, 512, 3], [15, 2, 512, 3]]");
    for file in ["timeline.json", "profiler.json", "cut.json", "memory.json", "raw.json"] {
        dir.run(&["explain", file]).refused(2, &[file, "is a timeline for a viewer", "vramlab run -- COMMAND"]);
    }
    // A snapshot may have keys of its own.
    let mut whole: Value = serde_json::from_str(&two_segments().text()).unwrap();
    whole["zzz"] = json!({"traceEvents": []});
    dir.write("snapshot.json", whole.to_string());
    explain(&dir, &[&snapshot]).ok();
}
