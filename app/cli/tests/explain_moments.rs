//! Moments that `explain` compares, parts of the breakdown at them, and sentences about refused requests.

use crate::common::TestDir;
use crate::common::story::{BASE, MIB, Story, explain, explain_json, part, script};
use serde_json::{Value, json};

fn explained(story: &Story) -> Value {
    let dir = TestDir::new();
    explain_json(&dir, &[&dir.write("story.json", story.text())])
}

fn screen(story: &Story) -> String {
    let dir = TestDir::new();
    explain(&dir, &[&dir.write("story.json", story.text())]).ok().stdout
}

/// Parts of the breakdown in MiB: requested, free, partly used.
fn parts(explanation: &Value) -> [u64; 3] {
    ["requested", "soft", "hard"].map(|name| part(explanation, name) / MIB)
}

#[test]
fn whole_free_pages_of_expandable_segments_are_releasable() {
    let mut story = Story::default();
    story.event("segment_map", BASE, 620 * MIB, 0, json!([]));
    story.alloc(0, 100 * MIB, 0, json!([script(1, "main")]));
    story.alloc(100 * MIB, 410 * MIB, 0, json!([script(2, "main")]));
    story.alloc(510 * MIB, 110 * MIB, 0, json!([script(3, "main")]));
    story.free(100 * MIB, 410 * MIB, 0);
    story.event("segment_map", BASE + 620 * MIB, 20 * MIB, 0, json!([]));
    story.event("oom", 0, 500 * MIB, 0, json!([script(4, "main")]));
    let explanation = explained(&story);
    // The free block starts at a page of 20 MiB and ends in the middle of one; the new page is free, too.
    assert_eq!(parts(&explanation), [210, 420, 10]);
    let streams = &explanation["reserved"]["streams"][0];
    assert_eq!((&streams["soft_bytes"], &streams["hard_bytes"]), (&json!(420 * MIB), &json!(10 * MIB)));
    // No block keeps a whole page reserved.
    assert_eq!(explanation["reserved"]["pinned"], json!([]));
    // A segment of cudaMalloc is released only if it has no block.
    for event in &mut story.events {
        if event["action"] == "segment_map" {
            event["action"] = json!("segment_alloc");
        }
    }
    let explanation = explained(&story);
    assert_eq!(parts(&explanation), [210, 20, 410]);
    assert_eq!(explanation["reserved"]["pinned_free_bytes"], json!(410 * MIB));
}

#[test]
fn of_a_constant_reserved_peak_the_busiest_moment_is_explained() {
    let mut story = Story::default();
    story.segment(0, 100 * MIB, 0);
    story.alloc(0, 10 * MIB, 0, json!([script(1, "load")]));
    for _ in 0..3 {
        story.alloc(10 * MIB, 80 * MIB, 0, json!([script(2, "forward")]));
        story.free(10 * MIB, 80 * MIB, 0);
    }
    let explanation = explained(&story);
    assert_eq!(explanation["peak_reserved"]["event"], 3);
    assert_eq!((&explanation["reserved"]["at"], parts(&explanation)), (&json!("peak_reserved"), [90, 0, 10]));
}

/// Steps that hold `kept` more MiB each, between peaks of 100 MiB.
fn steps(count: u64, kept: u64) -> Story {
    let mut story = Story::default();
    story.segment(0, 400 * MIB, 0);
    for step in 0..count {
        story.alloc(300 * MIB, 100 * MIB, 0, json!([script(1, "forward")]));
        if kept > 0 {
            story.alloc(step * kept * MIB, kept * MIB, 0, json!([script(2, "log")]));
        }
        story.free(300 * MIB, 100 * MIB, 0);
    }
    story
}

#[test]
fn growth_needs_four_repetitions_that_grow() {
    for (count, kept) in [(1, 4), (3, 4), (12, 0)] {
        assert_eq!(explained(&steps(count, kept))["grew"], Value::Null, "{count} steps that keep {kept} MiB");
    }
    let grew = explained(&steps(12, 4))["grew"].clone();
    let lines: Vec<&str> =
        grew["lines"].as_array().unwrap().iter().map(|line| line["line"].as_str().unwrap()).collect();
    assert_eq!(lines, ["proj/train.py:2 log"], "{grew}");
    // One step that frees gradients of an earlier one and makes others grows by nothing.
    let mut story = Story::default();
    story.segment(0, 400 * MIB, 0);
    for at in 0..10 {
        story.alloc(at * 8 * MIB, 8 * MIB, 0, json!([script(3, "backward")]));
    }
    for at in 0..10 {
        story.free(at * 8 * MIB, 8 * MIB, 0);
    }
    for at in 0..20 {
        story.alloc(at * 4 * MIB, 4 * MIB, 0, json!([script(1, "forward")]));
    }
    for at in 0..10 {
        story.free(at * 4 * MIB, 4 * MIB, 0);
        story.alloc(200 * MIB + at * 8 * MIB, 8 * MIB, 0, json!([script(3, "backward")]));
    }
    assert_eq!(explained(&story)["grew"], Value::Null);
}

#[test]
fn growth_compares_starts_of_a_repeated_annotation() {
    // The lows between peaks differ by what the annotation contains: they do not decide.
    let mut story = Story::default();
    story.segment(0, 400 * MIB, 0);
    for step in 0..8 {
        story.annotate(&format!("step {step}"), "START", story.events.len());
        story.alloc(0, 100 * MIB, 0, json!([script(1, "forward")]));
        story.free(0, 100 * MIB, 0);
        story.annotate(&format!("step {step}"), "END", story.events.len());
        story.alloc(200 * MIB + step * MIB, MIB, 0, json!([script(2, "log")]));
    }
    let grew = explained(&story)["grew"].clone();
    assert_eq!((&grew["from"]["annotation"], &grew["to"]["annotation"]), (&json!("step 2"), &json!("step 7")));
    assert_eq!(grew["lines"][0]["line"], "proj/train.py:2 log");
}

/// Names and peaks of active memory in MiB of the phases, and the phase that determines the peak.
fn phases(explanation: &Value) -> (Vec<(&str, u64)>, Vec<&str>) {
    let phases = explanation["phases"].as_array().unwrap();
    let name = |phase: &'_ Value| phase["name"].as_str().unwrap_or("-").to_owned().leak() as &str;
    let rows = phases.iter().map(|phase| (name(phase), phase["peak_active_bytes"].as_u64().unwrap() / MIB));
    (rows.collect(), phases.iter().filter(|phase| phase["decides"] == true).map(name).collect())
}

/// Allocates and frees memory in phases of these names, MiB and repetitions.
fn program(parts: &[(&str, u64, u64)], annotated: bool, pause_us: u64) -> Story {
    let mut story = Story::default();
    for (number, (name, mib, times)) in parts.iter().enumerate() {
        let first = story.events.len();
        let at = (number as u64) << 40;
        if annotated {
            story.annotate(name, "START", first);
        }
        story.segment(at, mib * MIB, 0);
        for _ in 0..*times {
            story.alloc(at, mib * MIB, 0, json!([script(number as u64 + 1, name)]));
            story.free(at, mib * MIB, 0);
        }
        for event in &mut story.events[first..] {
            event["time_us"] = json!(event["time_us"].as_u64().unwrap() + number as u64 * pause_us);
        }
        if annotated {
            story.annotate(name, "END", story.events.len() - 1);
        }
    }
    story
}

#[test]
fn a_short_annotated_phase_is_kept() {
    let parts = [("offload", 40, 30), ("generate", 4000, 1), ("load", 10, 30)];
    let explanation = explained(&program(&parts, true, 0));
    let expected = vec![("offload", 40), ("generate", 4000), ("load", 10)];
    assert_eq!(phases(&explanation), (expected, vec!["generate"]));
}

#[test]
fn a_short_part_between_pauses_is_kept_if_it_has_the_peak() {
    let named = |parts: &[(&str, u64, u64)]| {
        let story = program(parts, false, 2_000_000);
        (phases(&explained(&story)).0.iter().map(|(_, mib)| *mib).collect::<Vec<u64>>(), screen(&story))
    };
    let (peaks, text) = named(&[("a", 40, 30), ("b", 4000, 1), ("c", 10, 30)]);
    assert_eq!(peaks, [40, 4000, 10]);
    assert!(text.contains("Phases; the peak is in: events 92 to 95"), "{text}");
    assert!(!text.contains("Phases; the peak is in: proj"), "{text}");
    // A short part without the peak belongs to the one before it.
    let (peaks, _) = named(&[("a", 40, 30), ("b", 45, 1), ("c", 4000, 30)]);
    assert_eq!(peaks, [45, 4000]);
}

/// A request of 200 MiB that is refused with 160 MiB free in a segment, and these bytes free on the GPU.
fn refused(device_free: u64) -> Story {
    refused_request(200 * MIB, device_free)
}

fn refused_request(asked: u64, device_free: u64) -> Story {
    let mut story = Story::default();
    story.segment(0, 220 * MIB, 0);
    story.alloc(0, 220 * MIB, 0, json!([script(1, "main")]));
    story.free(0, 220 * MIB, 0);
    story.alloc(0, 60 * MIB, 0, json!([script(2, "main")]));
    story.event("oom", device_free, asked, 0, json!([script(3, "main")]));
    story
}

#[test]
fn memory_free_in_two_places_is_reported_with_a_setting() {
    let text = screen(&refused(160 * MIB));
    assert!(text.contains("320 MiB were free, in two places: 160 MiB in segments, 160 MiB on the GPU"), "{text}");
    assert!(text.contains("neither place alone") && text.contains("expandable_segments:True"), "{text}");
    let mut expandable = refused(160 * MIB);
    expandable.events[0]["action"] = json!("segment_map");
    let text = screen(&expandable);
    assert!(text.contains("in two places") && !text.contains("expandable_segments:True"), "{text}");
    // 30 MiB are missing in segments, and expandable segments grow by 20 MiB.
    for (free, combines) in [(39 * MIB, false), (40 * MIB, true)] {
        let text = screen(&refused_request(190 * MIB, free));
        assert!(text.contains("in two places"), "{text}");
        assert_eq!(text.contains("expandable_segments:True"), combines, "{text}");
    }
    for free in [20 * MIB, 240 * MIB] {
        let text = screen(&refused(free));
        assert!(!text.contains("two places"), "{text}");
    }
}

#[test]
fn a_process_limit_is_named_only_if_the_segment_had_fit() {
    // Requested KiB, KiB free on the GPU, action of the segment event, and the segment's MiB.
    let cases = [
        (5 << 10, 15 << 10, "segment_alloc", 20),
        (600, 1536, "segment_alloc", 2),
        (30 << 10, 35 << 10, "segment_map", 40),
    ];
    for (asked, free, action, segment) in cases {
        let refused = |free: u64| {
            let mut story = Story::default();
            story.event(action, BASE, 100 * MIB, 0, json!([]));
            story.alloc(0, 100 * MIB, 0, json!([script(1, "main")]));
            story.event("oom", free << 10, asked << 10, 0, json!([script(2, "main")]));
            story
        };
        let story = refused(free);
        assert_eq!(explained(&story)["out_of_memory"][0]["segment_bytes"], json!(segment * MIB));
        let text = screen(&story).replace("\n  ", " ");
        assert!(text.contains(&format!("less than the {segment} MiB segment")), "{text}");
        assert!(!text.contains("process limit"), "{text}");
        let text = screen(&refused((segment + 1) << 10)).replace("\n  ", " ");
        assert!(text.contains("a process limit refused it") && !text.contains("less than"), "{text}");
    }
}

#[test]
fn segments_left_by_a_failed_release_belong_to_private_pools() {
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, 11 * MIB, 0, json!([script(1, "main")]));
    story.free(0, 11 * MIB, 0);
    story.event("oom", MIB, 30 * MIB, 0, json!([script(3, "main")]));
    let text = screen(&story);
    assert!(text.contains("that the failed request did not release") && !text.contains("empty_cache"), "{text}");
    assert!(!text.contains("private pool"), "{text}");
    story.held(0, 20 * MIB, json!([0, 1]));
    story.segments[0]["segment_type"] = json!("large");
    let text = screen(&story);
    assert!(text.contains("live private pools") && !text.contains("empty_cache"), "{text}");
}

#[test]
fn private_pools_are_rows_of_the_table() {
    let mut story = Story::default();
    for at in [0, 1] {
        story.segment(at << 40, 20 * MIB, 0);
        story.alloc(at << 40, 12 * MIB, 0, json!([script(1, "main")]));
        story.held(at << 40, 20 * MIB, json!([0, at]));
        let segment = story.segments.last_mut().unwrap();
        segment["segment_type"] = json!("large");
        segment["blocks"][0]["state"] = json!("active_allocated");
        segment["blocks"][0]["requested_size"] = json!(12 * MIB);
    }
    let explanation = explained(&story);
    let rows = explanation["reserved"]["streams"].as_array().unwrap();
    let pools: Vec<(&Value, &Value)> = rows.iter().map(|row| (&row["private_pool"], &row["reserved_bytes"])).collect();
    assert_eq!(pools.len(), 2);
    for pool in [(&Value::Null, &json!(20 * MIB)), (&json!("0.1"), &json!(20 * MIB))] {
        assert!(pools.contains(&pool), "{pools:?}");
    }
    assert!(screen(&story).contains("large, private 0.1"), "{}", screen(&story));
    // A free segment of such a pool is not simply releasable.
    story.segment(2 << 40, 20 * MIB, 0);
    story.alloc(2 << 40, 20 * MIB, 0, json!([script(2, "main")]));
    story.free(2 << 40, 20 * MIB, 0);
    story.segment(3 << 40, 90 * MIB, 0);
    story.alloc(3 << 40, 90 * MIB, 0, json!([script(3, "main")]));
    story.held(2 << 40, 20 * MIB, json!([0, 1]));
    story.held(3 << 40, 90 * MIB, json!([0, 0]));
    for segment in &mut story.segments[2..] {
        segment["segment_type"] = json!("large");
    }
    let block = &mut story.segments[3]["blocks"][0];
    (block["state"], block["requested_size"]) = (json!("active_allocated"), json!(90 * MIB));
    let text = screen(&story);
    assert!(text.contains("except 20 MiB in private pools"), "{text}");
}

#[test]
fn a_replay_below_the_recorded_peak_is_not_quoted() {
    let mut story = Story::default();
    story.segment(1 << 40, 2 * MIB, 7);
    story.alloc(1 << 40, MIB, 7, json!([]));
    story.segment(0, 300 * MIB, 0);
    story.alloc(0, 300 * MIB, 0, json!([script(1, "a")]));
    story.event("free_requested", BASE, 300 * MIB, 0, json!([]));
    story.segment(1 << 41, 300 * MIB, 0);
    story.alloc(1 << 41, 300 * MIB, 0, json!([script(2, "b")]));
    let mut block = |at: u64, state: &str| {
        story.segments.push(json!({
            "device": 0, "address": BASE + at, "total_size": 300 * MIB, "stream": 0, "segment_type": "large",
            "is_expandable": false, "blocks": [{"address": BASE + at, "size": 300 * MIB,
            "requested_size": 300 * MIB, "state": state, "frames": []}],
        }));
    };
    block(0, "active_pending_free");
    block(1 << 41, "active_allocated");
    let explanation = explained(&story);
    let recorded = explanation["peak_reserved"]["reserved_bytes"].as_u64().unwrap();
    assert_eq!((recorded, part(&explanation, "pending")), (602 * MIB, 300 * MIB));
    let replayed = explanation["reserved"]["pending"]["replayed_reserved_bytes"].as_u64().unwrap();
    let text = screen(&story);
    assert!(text.contains("peak active 601 MiB (301 MiB without deferred frees)"), "{text}");
    assert_eq!(text.contains("peak reserved in replay"), replayed >= recorded, "{text}");
}

#[test]
fn retries_are_in_the_headline_and_on_the_page() {
    let mut story = Story::default();
    for number in 0..2 {
        let at = number << 40;
        story.segment(at, 30 * MIB, 0);
        story.alloc(at, 30 * MIB, 0, json!([script(1, "main")]));
        story.free(at, 30 * MIB, 0);
        story.event("segment_free", BASE + at, 30 * MIB, 0, json!([]));
    }
    story.segment(5 << 40, 50 * MIB, 0);
    story.alloc(5 << 40, 50 * MIB, 0, json!([script(2, "main")]));
    let dir = TestDir::new();
    let file = dir.write("story.json", story.text());
    let retries = explain_json(&dir, &[&file, "--limit", "60MiB"])["num_retries"].clone();
    let text = explain(&dir, &[&file, "--limit", "60MiB"]).ok().stdout;
    assert_eq!(retries, 1, "{text}");
    assert!(text.contains("memory was full: PyTorch released cached memory to serve a request once"), "{text}");
    dir.run(&["report", &file, "--plan", "off", "--advise", "off", "--alloc", "caching", "-o", "page.html"]).ok();
    let page = std::fs::read_to_string(dir.at("page.html")).unwrap();
    assert!(page.contains(r#"["retries","1"]"#) || page.contains(r#"["retries","2"]"#), "{page:.2000}");
}

#[test]
fn logs_of_other_programs_are_explained_without_pytorch() {
    let dir = TestDir::new();
    let log = "Thread,Time,Action,Pointer,Size,Stream\n\
               1,12:00:00:000001,allocate,0x100000,4096,0x0\n\
               1,12:00:00:000002,free,0x100000,4096,0x0\n";
    let screen = explain(&dir, &[&dir.write("rmm.csv", log)]).ok().stdout;
    assert!(screen.contains("so lines are unknown") && !screen.contains("torch"), "{screen}");
}

/// A log without segments: two phases of 30 requests each, between which it pauses, and a refused request.
fn log_with_failure() -> String {
    let mut log = "Thread,Time,Action,Pointer,Size,Stream\n".to_owned();
    for (minute, mib) in [(0, 64), (5, 32)] {
        for second in 0..30 {
            log += &format!(
                "1,12:{minute:02}:{second:02}.000000,allocate,0x{:x}00000,{},0x0\n",
                mib * second + 1,
                mib << 20
            );
        }
        for second in 0..29 {
            log += &format!(
                "1,12:{minute:02}:{:02}.000000,free,0x{:x}00000,{},0x0\n",
                second + 30,
                mib * second + 1,
                mib << 20
            );
        }
    }
    log + "1,12:06:00.000000,allocate failure,0x0,1099511627776,0x0\n"
}

#[test]
fn reserved_memory_that_is_not_recorded_is_absent() {
    let dir = TestDir::new();
    let file = dir.write("rmm.csv", log_with_failure());
    let explanation = explain_json(&dir, &[&file, "--limit", "4GiB"]);
    let refused = &explanation["out_of_memory"][0];
    for key in ["reserved_bytes", "largest_hole_bytes", "cause", "free_bytes"] {
        assert_eq!(refused[key], Value::Null, "{key}");
    }
    for moment in ["peak_active", "peak_reserved", "end"] {
        assert_eq!(explanation[moment]["reserved_bytes"], Value::Null, "{moment}");
    }
    assert_eq!((&explanation["largest_hole"], &explanation["reserved"]["parts"]), (&Value::Null, &json!([])));
    assert_eq!(explanation["timeline"][0]["reserved_bytes"], Value::Null);
    let phases = explanation["phases"].as_array().unwrap();
    let peaks: Vec<(&Value, &Value)> =
        phases.iter().map(|phase| (&phase["peak_active_bytes"], &phase["peak_reserved_bytes"])).collect();
    assert_eq!(peaks, [(&json!(30 * 64 * MIB), &Value::Null), (&json!((64 + 30 * 32) * MIB), &Value::Null)]);
    let text = explain(&dir, &[&file, "--limit", "4GiB"]).ok().stdout;
    assert!(text.contains("active; reserved memory is unknown"), "{text}");
    for made_up in ["0 B", "too little memory", "unreserved", "Largest free block"] {
        assert!(!text.contains(made_up), "{made_up}: {text}");
    }
    let advice = dir.run(&["advise", &file]).ok().stdout;
    assert!(advice.contains("Phases (peak active): ") && !advice.contains("of 0 B"), "{advice}");
    // In the table of several recordings.
    let files = [file.as_str(), &dir.write("steps.json", steps(4, 4).text())];
    let ranks = explain_json(&dir, &files);
    assert_eq!((&ranks["ranks"][0]["peak_reserved_bytes"], &ranks["ranks"][0]["off"]), (&Value::Null, &Value::Null));
    assert_eq!(
        (&ranks["ranks"][1]["peak_reserved_bytes"], &ranks["ranks"][1]["off"]),
        (&json!(400 * MIB), &json!(0.0))
    );
}

#[test]
fn call_sites_of_a_cuda_program_are_its_lines() {
    let dir = TestDir::new();
    let trace = concat!(
        r#"{"time_ns":1,"action":"alloc","addr":4096,"size":1048576,"block":1048576,"stream":0,"stack":1,"frames":["#,
        r#"{"name":"allocate","filename":"/home/me/matrix.cu","line":57},{"name":"main","filename":"/home/me/matrix.cu","line":90},"#,
        r#"{"name":"__libc_start_main","filename":"../sysdeps/nptl/libc_start_call_main.h","line":58},"#,
        r#"{"name":"_start","filename":"??","line":0}]}"#,
        "\n",
        r#"{"time_ns":2,"action":"alloc","addr":8392704,"size":2097152,"block":2097152,"stream":0,"stack":1}"#,
        "\n",
    );
    let screen = explain(&dir, &[&dir.write("trace.jsonl", trace)]).ok().stdout;
    assert!(screen.contains("matrix.cu:57 allocate") && !screen.contains("libc_start"), "{screen}");
}

/// The line about the largest free block, without line breaks.
fn largest_free_block(story: &Story) -> String {
    let text = screen(story);
    let line = text.split("\n\n").find(|part| part.starts_with("Largest free block")).unwrap();
    line.lines().map(str::trim).collect::<Vec<&str>>().join(" ")
}

#[test]
fn the_largest_free_block_has_an_exact_range() {
    // 2000 events, so that a point of the curves stands for several. A new segment is not free before its request is served.
    let mut story = Story::default();
    story.segment(0, 200 * MIB, 0);
    story.alloc(0, 190 * MIB, 0, json!([]));
    for _ in 0..666 {
        story.alloc(190 * MIB, 4 * MIB, 0, json!([]));
        story.free(190 * MIB, 4 * MIB, 0);
    }
    let line = largest_free_block(&story);
    assert_eq!(
        line,
        "Largest free block: 6 MiB at the peak, 10 MiB at the end; maximum 10 MiB (event 2), minimum 6 MiB (event 3)"
    );
    // The start counts if memory was reserved then.
    let mut story = Story::default();
    for at in [0, 1 << 30] {
        story.free(at, 300 * MIB, 0);
    }
    for at in [0, 1 << 30] {
        story.held(at, 300 * MIB, json!([0, 0]));
        story.segments.last_mut().unwrap()["segment_type"] = json!("large");
    }
    let line = largest_free_block(&story);
    assert!(line.contains("0 B at the peak, 300 MiB at the end"), "{line}");
    assert!(line.ends_with("maximum 300 MiB (event 1), minimum 0 B (before recording started)"), "{line}");
    // The breakdown is of a moment near the peak.
    let mut story = Story::default();
    story.segment(0, 1000 * MIB, 0);
    story.alloc(0, 1000 * MIB, 0, json!([]));
    story.free(0, 1000 * MIB, 0);
    story.segment(1 << 40, 2 * MIB, 0);
    story.alloc(1 << 40, 512, 0, json!([]));
    let line = largest_free_block(&story);
    assert!(line.contains("0 B near the peak, 1000 MiB at the end"), "{line}");
    story.event("oom", 0, 1100 * MIB, 0, json!([]));
    let line = largest_free_block(&story);
    assert!(line.contains("1000 MiB when memory ran out"), "{line}");
}

#[test]
fn headline_and_breakdown_agree_where_segments_are_missing() {
    let dir = TestDir::new();
    let base = 1_u64 << 40;
    let event = |action: &str, addr: u64, bytes: u64, time_us: u64| json!({"action": action, "addr": addr, "size": bytes, "stream": 0, "time_us": time_us});
    let events = [
        // In a segment from before recording started, of which the snapshot has nothing.
        event("alloc", base, 64 * MIB, 1),
        event("segment_alloc", base + (1 << 30), 20 * MIB, 2),
        event("alloc", base + (1 << 30), 5 * MIB, 3),
    ];
    let snapshot = json!({
        "segments": [], "device_traces": [events], "allocator_settings": {}, "external_annotations": [],
    });
    dir.file("late.json", snapshot.to_string());
    let screen = dir.run(&["explain", "late.json"]).ok().stdout;
    for line in [
        "late.json: peak active 69 MiB; total reserved memory is unknown: the recording shows a part of it, at most 20 MiB",
        "Part of reserved memory that the recording shows at the peak: 20 MiB (event 3",
    ] {
        assert!(screen.contains(line), "{line}\n{screen}");
    }
    assert!(!screen.contains("\nReserved memory"), "{screen}");
}
