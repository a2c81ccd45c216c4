//! The sentences, the rows and the bounds of `advise` agree with each other and with the recording.

use crate::common::{
    TestDir,
    story::{BASE, MIB, Story, script},
};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

/// A block of a segment at the end of a recording: bytes, requested bytes and state.
type End = (u64, u64, &'static str);

/// Adds a segment with these blocks to the final snapshot.
fn ends_with(story: &mut Story, at: u64, stream: u64, blocks: &[End]) {
    let mut address = BASE + at;
    let mut list = Vec::new();
    for (size, requested, state) in blocks {
        list.push(json!({"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}));
        address += size;
    }
    let total: u64 = blocks.iter().map(|(size, ..)| size).sum();
    story.segments.push(json!({
        "device": 0, "address": BASE + at, "total_size": total, "stream": stream, "segment_type": "large",
        "is_expandable": false, "segment_pool_id": [0, 0], "blocks": list,
    }));
}

const LIVE: &str = "active_allocated";

/// A block of 3 GiB whose free never completes, and another one. With `streams`, two of them allocate.
fn pending_at_end(streams: bool) -> Story {
    let mut story = Story::default();
    if streams {
        story.segment(0, 20 * MIB, 7);
        story.alloc(0, 20 * MIB, 7, json!([]));
        ends_with(&mut story, 0, 7, &[(20 * MIB, 20 * MIB, LIVE)]);
    }
    story.segment(GIB, 3 * GIB, 0);
    story.alloc(GIB, 3 * GIB, 0, json!([script(1, "a")]));
    story.event("free_requested", BASE + GIB, 3 * GIB, 0, json!([script(2, "a")]));
    story.segment(8 * GIB, 3 * GIB, 0);
    story.alloc(8 * GIB, 3 * GIB, 0, json!([script(3, "b")]));
    ends_with(&mut story, GIB, 0, &[(3 * GIB, 3 * GIB, "active_pending_free")]);
    ends_with(&mut story, 8 * GIB, 0, &[(3 * GIB, 3 * GIB, LIVE)]);
    story
}

#[test]
fn frees_that_never_complete_stay_pending_in_replays() {
    let test_dir = TestDir::new();
    for streams in [false, true] {
        let file = test_dir.write("pending.json", pending_at_end(streams).text());
        let peak = 6 * GIB + if streams { 20 * MIB } else { 0 };
        let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
        assert_eq!(advice["recorded"]["peak_reserved_bytes"], peak);
        assert_eq!(advice["recorded"]["replayed"]["peak_reserved_bytes"], peak, "{advice}");
        assert_eq!(advice["unknown"]["deferred_frees"], 1);
        let rows = test_dir.run(&["replay", &file, "--alloc", "caching,pytorch", "--json"]).rows();
        assert!(rows.len() == 2 && rows.iter().all(|row| row["peak_reserved_bytes"] == peak), "{rows:?}");
    }
}

/// 11 GiB are freed, smaller blocks take part of them, and 11 GiB are requested again right after a free of 20 MiB: 1 GiB is free
/// on the device. With `streams`, another stream allocates, too.
fn out_of_memory_after_free(streams: bool) -> Story {
    let mut story = Story::default();
    if streams {
        story.segment(0, 20 * MIB, 7);
        story.alloc(0, 20 * MIB, 7, json!([]));
        ends_with(&mut story, 0, 7, &[(20 * MIB, 20 * MIB, LIVE)]);
    }
    story.segment(GIB, 11 * GIB, 0);
    story.alloc(GIB, 11 * GIB, 0, json!([]));
    story.free(GIB, 11 * GIB, 0);
    story.alloc(GIB, 400 * MIB, 0, json!([]));
    story.alloc(GIB + 400 * MIB, 20 * MIB, 0, json!([]));
    story.free(GIB + 400 * MIB, 20 * MIB, 0);
    story.events.push(json!({"action": "oom", "device_free": GIB, "size": 11 * GIB, "stream": 0, "time_us": 9000}));
    ends_with(&mut story, GIB, 0, &[(400 * MIB, 400 * MIB, LIVE), (11 * GIB - 400 * MIB, 0, "inactive")]);
    story
}

#[test]
fn failed_requests_are_in_bounds_and_plain_frees_do_not_wait() {
    let test_dir = TestDir::new();
    for streams in [false, true] {
        let file = test_dir.write("oom.json", out_of_memory_after_free(streams).text());
        for limit in [&[][..], &["--limit", "12GiB"]] {
            let advice = test_dir.run(&[&["advise", &file, "--json"], limit].concat()).ok().json();
            assert_eq!(advice["unknown"]["deferred_frees"], 0, "{advice}");
            let needed = 11 * GIB + 400 * MIB + if streams { 20 * MIB } else { 0 };
            for bound in ["live_bytes", "lower_bound_bytes", "plan_bytes"] {
                assert_eq!(advice[bound], needed, "{bound}: {advice}");
            }
            assert_eq!(advice["recorded"]["peak_reserved_bytes"], 11 * GIB + if streams { 20 * MIB } else { 0 });
        }
    }
}

/// The lines below a title.
fn section<'a>(screen: &'a str, title: &str) -> Vec<&'a str> {
    let lines = screen.lines().skip_while(|line| *line != title).skip(1);
    lines.take_while(|line| line.starts_with(' ')).collect()
}

#[test]
fn next_best_lists_only_better_than_the_current_settings() {
    let test_dir = TestDir::new();
    let file = test_dir.write("pending.json", pending_at_end(false).text());
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains(" tested is better by half a percent:") && !screen.contains("Next best"), "{screen}");
    // Settings of the command line are shown as they are.
    let arguments = ["advise", &file, "--conf", "", "--conf", "max_split_size_mb:64"];
    let screen = test_dir.run(&arguments).ok().stdout;
    assert!(section(&screen, "Other tested settings").contains(&"  max_split_size_mb:64"), "{screen}");
    // Where memory runs out, every setting under which it does not is better.
    let file = test_dir.write("oom.json", out_of_memory_after_free(false).text());
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    let settings = advice["settings"].as_array().unwrap();
    let runs = |text: &str| settings.iter().any(|setting| setting["conf"] == text && setting["out_of_memory"] == false);
    let next: Vec<&str> = section(&screen, "Next best").into_iter().filter(|line| !line.starts_with("    ")).collect();
    assert!(!next.is_empty() && next.iter().all(|line| runs(line.trim())), "{screen}");
}

#[test]
fn row_of_the_current_settings_has_the_others_figures() {
    let test_dir = TestDir::new();
    let file = test_dir.write("oom.json", out_of_memory_after_free(false).text());
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    let least = advice["recorded"]["smallest_memory_bytes"].as_u64().unwrap();
    assert!(least > 12 * GIB, "it ran out of memory in 12 GiB: {advice}");
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    let row = screen.split("  current settings: ").nth(1).unwrap().split("\n\n").next().unwrap();
    for figure in ["peak reserved", "minimum memory", "driver call"] {
        assert!(row.contains(figure), "{figure}: {screen}");
    }
    // As the same setting tested by itself.
    let tested = test_dir.run(&["advise", &file, "--conf", "", "--json"]).ok().json();
    assert_eq!(tested["settings"][0]["smallest_memory_bytes"], json!(least));
    assert_ne!(advice["settings"][0]["conf"], Value::from(""));
}

#[test]
fn limit_is_echoed_as_typed_and_the_export_stays_on_one_line() {
    let test_dir = TestDir::new();
    let file = test_dir.write("oom.json", out_of_memory_after_free(false).text());
    let screen = test_dir.run(&["advise", &file, "--limit", "11.75GiB"]).ok().stdout;
    assert!(screen.contains("Memory limit: --limit 11.75GiB."), "{screen}");
    assert!(screen.lines().last().unwrap().contains("--limit 11.75GiB"), "{screen}");
    let conf = "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_non_split_rounding_mb:128";
    let mut process = std::process::Command::new(crate::common::PROGRAM);
    process.args(["advise", &file, "--conf", conf, "--limit", "12GiB"]).env("COLUMNS", "80");
    let screen = crate::common::Ran::of(process.output().unwrap()).ok().stdout;
    assert!(screen.contains(&format!("  export PYTORCH_CUDA_ALLOC_CONF='{conf}'\n")), "{screen}");
}

/// Recording begins with 1000 MiB in use and a free segment of 100 MiB, of which 49 MiB are used; 60 MiB take a segment of their own.
fn late() -> Story {
    let mut story = Story::default();
    let small = |story: &mut Story, at: u64, mib: u64| story.alloc(at, mib * MIB, 0, json!([]));
    small(&mut story, 4 * GIB, 49);
    story.segment(8 * GIB, 60 * MIB, 0);
    small(&mut story, 8 * GIB, 60);
    ends_with(&mut story, GIB, 0, &[(1000 * MIB, 1000 * MIB, LIVE)]);
    ends_with(&mut story, 4 * GIB, 0, &[(49 * MIB, 49 * MIB, LIVE), (51 * MIB, 0, "inactive")]);
    ends_with(&mut story, 8 * GIB, 0, &[(60 * MIB, 60 * MIB, LIVE)]);
    story
}

#[test]
fn late_recording_says_what_is_compared() {
    let test_dir = TestDir::new();
    let file = test_dir.write("late.json", late().text());
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    let (first, now) = (&advice["settings"][0], &advice["recorded"]["replayed"]);
    assert_eq!((&advice["verdict"], &advice["saving_percent"]), (&json!("keep"), &json!(0.0)), "{advice}");
    // The first setting reserves less than the replay, and not less than the current settings without the cache.
    let [peak, replayed, same_start] = [
        &first["peak_reserved_bytes"],
        &now["peak_reserved_bytes"],
        &advice["evidence"]["same_start_peak_reserved_bytes"],
    ]
    .map(|bytes| bytes.as_u64().unwrap());
    assert!(same_start <= peak && peak < replayed, "{advice}");
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    let words = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    let less = 100.0 * (1.0 - peak as f64 / replayed as f64);
    let conf = first["conf"].as_str().unwrap();
    assert!(words.contains(&format!("{less:.1} % less than their replay")), "{screen}");
    assert!(words.contains("but not less than the ") && words.contains("without the prior cache"), "{screen}");
    assert!(section(&screen, "Next best").contains(&format!("  {conf}").as_str()), "{screen}");
}

#[test]
fn releases_right_before_a_request_are_named_by_explain_and_advise() {
    let mut story = Story::default();
    for at in [0, GIB] {
        story.segment(at, 10 * MIB, 0);
        story.alloc(at, 10 * MIB, 0, json!([script(1, "a")]));
    }
    story.free(0, 10 * MIB, 0);
    story.free(GIB, 10 * MIB, 0);
    for at in [0, GIB] {
        story.event("segment_free", BASE + at, 10 * MIB, 0, json!([]));
    }
    story.segment(2 * GIB, 15 * MIB, 0);
    story.alloc(2 * GIB, 15 * MIB, 0, json!([script(2, "b")]));
    let test_dir = TestDir::new();
    let run = |story: &Story| {
        let file = test_dir.write("story.json", story.text());
        let json = |command: &str| test_dir.run(&[command, &file, "--json"]).ok().json();
        let screens = ["explain", "advise"].map(|command| {
            let screen = test_dir.run(&[command, &file]).ok().stdout;
            screen.split_whitespace().collect::<Vec<_>>().join(" ")
        });
        (json("explain"), json("advise"), screens)
    };
    // Nothing shows who released the segments.
    let (explanation, advice, [explained, advised]) = run(&story);
    assert_eq!((&explanation["num_retries"], &explanation["num_unclear_retries"]), (&json!(1), &json!(1)));
    assert_eq!(advice["unclear_releases"], 1);
    assert!(
        explained.contains("right before a request once: memory was full, or the program called empty_cache"),
        "{explained}"
    );
    assert!(advised.contains("released cached memory right before 1 request: memory was full, or"), "{advised}");
    // The request's frames show that it did.
    for event in &mut story.events {
        if event["action"] == "segment_free" {
            event["frames"] = json!([script(2, "b")]);
        }
    }
    let (explanation, advice, [explained, advised]) = run(&story);
    assert_eq!((&explanation["num_retries"], &explanation["num_unclear_retries"]), (&json!(1), &json!(0)));
    assert_eq!((&advice["unclear_releases"], &advice["released"]["times"]), (&Value::Null, &json!(1)));
    assert!(
        explained.contains("memory was full: PyTorch released cached memory to serve a request once"),
        "{explained}"
    );
    assert!(advised.contains("PyTorch emptied its cache once to serve a request"), "{advised}");
}

#[test]
fn large_shares_are_said_as_multiples() {
    let mut story = Story::default();
    story.segment(0, 2 * MIB, 0);
    story.alloc(0, 100, 0, json!([script(1, "main")]));
    ends_with(&mut story, 0, 0, &[(512, 100, LIVE), (2 * MIB - 512, 0, "inactive")]);
    story.segments[0]["segment_type"] = json!("small");
    let test_dir = TestDir::new();
    let screen = test_dir.run(&["advise", &test_dir.write("tiny.json", story.text())]).ok().stdout;
    assert!(screen.contains("Peak reserved: 2 MiB, 20,972 times peak requested (100 B)"), "{screen}");
}

#[test]
fn more_memory_serves_the_refused_request_without_a_caution() {
    let test_dir = TestDir::new();
    let file = test_dir.write("oom.json", out_of_memory_after_free(false).text());
    let arguments = ["advise", &file, "--limit", "40GiB"];
    let advice = test_dir.run(&[&arguments[..], &["--json"]].concat()).ok().json();
    assert_eq!(advice["recorded"]["replayed_off_percent"], Value::Null, "{advice}");
    let [peak, replayed] =
        [&advice["recorded"]["peak_reserved_bytes"], &advice["recorded"]["replayed"]["peak_reserved_bytes"]]
            .map(|bytes| bytes.as_u64().unwrap());
    assert!(replayed > peak, "{advice}");
    let screen = test_dir.run(&arguments).ok().stdout;
    assert!(!screen.contains("Caution"), "{screen}");
}

#[test]
fn the_second_answer_says_that_it_needs_more_memory_too() {
    let mut story = Story::default();
    story.segment(0, 1100 * MIB, 0);
    story.alloc(0, 1100 * MIB, 0, json!([script(1, "main")]));
    ends_with(&mut story, 0, 0, &[(1100 * MIB, 1100 * MIB, LIVE)]);
    let test_dir = TestDir::new();
    let file = test_dir.write("story.json", story.text());
    let arguments = ["advise", &file, "--conf", "expandable_segments:True", "--conf", "roundup_power2_divisions:2"];
    let screen = test_dir.run(&arguments).ok().stdout;
    let lines = section(&screen, "Without expandable segments").join(" ");
    assert!(lines.contains("It needs more memory than the current settings: minimum memory 1.50 GiB"), "{screen}");
}
