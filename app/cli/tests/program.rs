//! Program changes in `advise`, each rule on a recording that triggers it and on one that does not, and phases.

use crate::common::TestDir;
use crate::common::story::{BASE, MIB, Story, script};
use crate::common::story::{explain, explain_json};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

fn advise(dir: &TestDir, story: &Story, more: &[&str]) -> Value {
    let file = dir.write("story.json", story.text());
    dir.run(&[&["advise", &file, "--json"], more].concat()).ok().json()
}

fn screen(dir: &TestDir) -> String {
    dir.run(&["advise", "story.json"]).ok().stdout
}

/// The change for a cause, and peak reserved with and without it, in MiB.
fn change(advice: &Value, cause: &str) -> Option<(Value, [u64; 2])> {
    let finding = advice["program_changes"].as_array().unwrap().iter().find(|change| change["cause"] == cause)?.clone();
    let mib = |bytes: &Value| bytes.as_u64().unwrap_or(0) / MIB;
    let peaks = [mib(&finding["instead_of_bytes"]), mib(&finding["without"]["peak_reserved_bytes"])];
    Some((finding, peaks))
}

fn file(name: &str, path: &str) -> Value {
    json!({"name": name, "filename": format!("/venv/lib/python3.12/site-packages/torch/{path}"), "line": 1})
}

/// Steps that allocate memory and empty the cache.
fn emptied(steps: u64, bytes: impl Fn(u64) -> u64) -> Story {
    let mut story = Story::default();
    for step in 0..steps {
        let bytes = bytes(step);
        story.segment(0, bytes, 0);
        story.alloc(0, bytes, 0, json!([script(3, "step")]));
        story.free(0, bytes, 0);
        story.event("segment_free", BASE, bytes, 0, json!([file("empty_cache", "cuda/memory.py"), script(9, "step")]));
    }
    story
}

#[test]
fn emptying_a_cache_that_is_refilled_is_reported_with_its_line() {
    let dir = TestDir::new();
    let advice = advise(&dir, &emptied(5, |_| 20 * MIB), &[]);
    let (finding, peaks) = change(&advice, "empty-cache").unwrap();
    assert_eq!((peaks, &finding["times"], &finding["segments"]), ([20, 20], &json!(5), &json!(5)));
    assert_eq!(finding["lines"], json!([{"line": "proj/train.py:9 step", "times": 5}]));
    let calls = |of: &Value| of["driver_calls"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum::<u64>();
    assert!(calls(&finding["without"]) < calls(&advice["recorded"]["replayed"]) / 2);
    // Nothing else is to be changed, so it comes first.
    let screen = screen(&dir);
    let [change, help] = ["Program changes", "What would help"].map(|title| screen.find(title).unwrap());
    assert!(change < help && screen.contains("train.py:9 step (5)") && screen.contains("simulated H200"), "{screen}");
    // Sizes that do not recur are not refilled, and one call is not a pattern.
    for story in [emptied(5, |step| (20 + 2 * step) * MIB), emptied(1, |_| 20 * MIB)] {
        assert_eq!(change_of(&dir, &story, "empty-cache"), None);
    }
}

fn change_of(dir: &TestDir, story: &Story, cause: &str) -> Option<[u64; 2]> {
    change(&advise(dir, story, &[]), cause).map(|(_, peaks)| peaks)
}

#[test]
fn free_memory_on_other_streams_is_reported_with_its_line() {
    let dir = TestDir::new();
    let on = |second: u64| {
        let mut story = Story::default();
        for (at, stream, line) in [(0, 0, 3), (GIB, second, 4)] {
            story.segment(at, 20 * MIB, stream);
            story.alloc(at, 20 * MIB, stream, json!([script(line, "step")]));
            story.free(at, 20 * MIB, stream);
        }
        for (at, stream) in [(0, 0), (GIB, second)] {
            story.held(at, 20 * MIB, json!([0, 0]));
            let segment = story.segments.last_mut().unwrap();
            (segment["segment_type"], segment["stream"]) = (json!("large"), json!(stream));
        }
        story
    };
    let advice = advise(&dir, &on(7), &[]);
    let (finding, peaks) = change(&advice, "other-streams").unwrap();
    assert_eq!((peaks, &finding["times"], &finding["saving_percent"]), ([40, 20], &json!(1), &json!(50.0)));
    assert_eq!(finding["lines"][0]["line"], "proj/train.py:4 step");
    assert!(screen(&dir).contains("1 of 2 cache misses (20 MiB) had a fitting free block on another stream"));
    // A free block of the same stream is no matter of streams.
    let mut same = Story::default();
    for at in [0, GIB] {
        same.segment(at, 20 * MIB, 0);
        same.alloc(at, 20 * MIB, 0, json!([script(3, "step")]));
    }
    assert_eq!(change_of(&dir, &same, "other-streams"), None);
}

#[test]
fn workspaces_live_at_the_end_are_reported() {
    let dir = TestDir::new();
    let with = |freed: bool, name: &str| {
        let mut story = Story::default();
        story.segment(0, 32 * MIB, 0);
        story.alloc(0, 32 * MIB, 0, json!([{"name": name, "filename": "??", "line": 0}, script(5, "forward")]));
        if freed {
            story.free(0, 32 * MIB, 0);
        }
        story.segment(GIB, 40 * MIB, 0);
        story.alloc(GIB, 40 * MIB, 0, json!([script(6, "forward")]));
        story
    };
    let cublas = "at::cuda::setWorkspaceForHandle(cublasContext*, c10::cuda::CUDAStream)";
    let (finding, peaks) = change(&advise(&dir, &with(false, cublas), &[]), "workspaces").unwrap();
    assert_eq!((peaks, &finding["bytes"]), ([72, 42], &json!(32 * MIB)));
    assert_eq!(finding["lines"][0]["line"], "proj/train.py:5 forward");
    assert!(screen(&dir).contains("CUBLAS_WORKSPACE_CONFIG=:16:8"));
    assert_eq!(change_of(&dir, &with(true, cublas), "workspaces"), None);
    assert_eq!(change_of(&dir, &with(false, "at::native::add()"), "workspaces"), None);
}

#[test]
fn an_unused_cache_from_before_the_recording_is_reported() {
    let dir = TestDir::new();
    let cached = |used: bool| {
        let mut story = Story::default();
        story.held(GIB, 30 * MIB, json!([0, 0]));
        story.segments[0]["segment_type"] = json!("large");
        story.segment(0, 40 * MIB, 0);
        story.alloc(0, 40 * MIB, 0, json!([]));
        if used {
            story.alloc(GIB, 30 * MIB, 0, json!([]));
            story.free(GIB, 30 * MIB, 0);
        }
        story.segments.push(json!({
            "device": 0, "address": BASE, "total_size": 40 * MIB, "stream": 0, "segment_type": "large",
            "is_expandable": false, "segment_pool_id": [0, 0],
            "blocks": [{"address": BASE, "size": 40 * MIB, "requested_size": 40 * MIB, "state": "active_allocated"}],
        }));
        story
    };
    let advice = advise(&dir, &cached(false), &[]);
    let (finding, _) = change(&advice, "leftover-cache").unwrap();
    assert_eq!((&finding["bytes"], &finding["without"]), (&json!(30 * MIB), &Value::Null));
    let saving = finding["saving_percent"].as_f64().unwrap();
    assert!((saving - 300.0 / 7.0).abs() < 0.01, "{saving}");
    // The earlier part needed its cache: no change of the later part reduces memory below it.
    let mut more = cached(false);
    more.held(2 * GIB, 30 * MIB, json!([0, 0]));
    let (finding, _) = change(&advise(&dir, &more, &[]), "leftover-cache").unwrap();
    assert_eq!(finding["bytes"], 40 * MIB);
    advise(&dir, &cached(false), &[]);
    assert!(screen(&dir).contains("30 MiB were cached before recording started and unused at the peak"));
    assert_eq!(change_of(&dir, &cached(true), "leftover-cache"), None);
}

#[test]
fn a_live_empty_pool_is_reported_unless_graphs_may_need_it() {
    let dir = TestDir::new();
    let pooled = |pool: Value, graphs: bool| {
        let frames = match graphs {
            true => json!([file("__enter__", "cuda/graphs.py"), script(3, "step")]),
            false => json!([script(3, "step")]),
        };
        let mut story = Story::default();
        for (at, last) in [(0, false), (GIB, true)] {
            story.segment(at, 20 * MIB, 0);
            story.alloc(at, 20 * MIB, 0, frames.clone());
            if !last {
                story.free(at, 20 * MIB, 0);
            }
        }
        story.held(0, 20 * MIB, pool.clone());
        story.held(GIB, 20 * MIB, json!([0, 0]));
        story.segments.iter_mut().for_each(|segment| segment["segment_type"] = json!("large"));
        let block = &mut story.segments[1]["blocks"][0];
        (block["state"], block["requested_size"]) = (json!("active_allocated"), json!(20 * MIB));
        story
    };
    let advice = advise(&dir, &pooled(json!([0, 1]), false), &[]);
    let (finding, peaks) = change(&advice, "private-pools").unwrap();
    assert_eq!((peaks, &finding["bytes"], &finding["times"]), ([40, 20], &json!(20 * MIB), &json!(1)));
    assert!(screen(&dir).contains("Delete the MemPool"));
    for (pool, graphs) in [(json!([0, 1]), true), (json!([1, 0]), false), (json!([0, 0]), false)] {
        assert_eq!(change_of(&dir, &pooled(pool, graphs), "private-pools"), None);
    }
}

/// Recorded by `fixtures/changes.py` on an H200, PyTorch 2.11: peak reserved of each program in MiB, without and with the change.
#[test]
fn a_change_saves_as_much_as_measured_on_a_gpu() {
    let dir = TestDir::new();
    for (name, cause, measured) in [
        ("emptied", "empty-cache", [280, 280]),
        ("streams", "other-streams", [512, 256]),
        ("workspaces", "workspaces", [432, 252]),
        ("mempool", "private-pools", [640, 384]),
    ] {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/{name}.pickle.xz"));
        let advice = dir.run(&["advise", file.to_str().unwrap(), "--json"]).ok().json();
        let (finding, peaks) =
            change(&advice, cause).unwrap_or_else(|| panic!("{name}: {}", advice["program_changes"]));
        assert_eq!(peaks, measured, "{name}");
        let line = finding["lines"].as_array().unwrap().first().map(|line| line["line"].as_str().unwrap().to_owned());
        assert_eq!(line.is_none(), cause == "private-pools", "{line:?}");
        assert!(line.is_none_or(|line| line.starts_with("device/changes.py:")));
    }
    // The earlier part needed its cached memory: 480 of 880 MiB remain; 400 MiB were measured without it.
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/leftover.pickle.xz");
    let advice = dir.run(&["advise", file.to_str().unwrap(), "--json"]).ok().json();
    let (finding, _) = change(&advice, "leftover-cache").unwrap();
    assert_eq!(
        (&finding["bytes"], &advice["evidence"]["needed_reserved_bytes"]),
        (&json!(400 * MIB), &json!(400 * MIB))
    );
}

// Phases in `explain` and `advise`.

/// Repeatedly allocates and frees all of a new segment.
fn work(story: &mut Story, at: u64, bytes: u64, line: u64) {
    story.segment(at, bytes, 0);
    for _ in 0..20 {
        story.alloc(at, bytes, 0, json!([script(line, "work")]));
        story.free(at, bytes, 0);
    }
}

/// Name, peak reserved in MiB, and whether it determines the peak, for each phase.
fn rows(finding: &Value) -> Vec<(String, u64, bool)> {
    let phases = finding["phases"].as_array().unwrap().iter();
    phases
        .map(|phase| {
            let reserved = phase["peak_reserved_bytes"].as_u64().unwrap() / MIB;
            let name = phase["name"].as_str().unwrap_or("-").to_owned();
            (name, reserved, phase["decides"].as_bool().unwrap())
        })
        .collect()
}

fn row(name: &str, mib: u64, decides: bool) -> (String, u64, bool) {
    (name.to_owned(), mib, decides)
}

#[test]
fn annotations_separate_phases_and_the_peak_phase_is_named() {
    let dir = TestDir::new();
    let mut story = Story::default();
    for (at, (name, mib)) in [("load", 20), ("train", 60), ("generate", 1)].into_iter().enumerate() {
        story.annotate(name, "START", story.events.len());
        // A nested annotation is not a phase.
        story.annotate("step", "START", story.events.len() + 5);
        story.annotate("step", "END", story.events.len() + 9);
        work(&mut story, at as u64 * GIB, mib * MIB, 1);
        story.annotate(name, "END", story.events.len());
    }
    let file = dir.write("phases.json", story.text());
    // The last phase exceeds the reserved peak of training by more than half a percent.
    let expected = [row("load", 20, false), row("train", 80, false), row("generate", 81, true)];
    assert_eq!(rows(&explain_json(&dir, &[&file])), expected);
    let screen = explain(&dir, &[&file]).ok().stdout;
    assert!(screen.contains("Phases; the peak is in: generate"), "{screen}");
    let advice = dir.run(&["advise", &file, "--conf", "", "--json"]).ok().json();
    assert_eq!(rows(&advice), expected);
    let screen = dir.run(&["advise", &file, "--conf", ""]).ok().stdout;
    assert!(screen.contains("train 60 MiB of 80 MiB") && screen.contains("determines the peak: generate"), "{screen}");
}

#[test]
fn steps_are_not_phases() {
    let dir = TestDir::new();
    let mut story = Story::default();
    for at in 0..12 {
        for (half, name) in ["forward", "backward"].into_iter().enumerate() {
            story.annotate(name, "START", story.events.len());
            work(&mut story, (2 * at + half as u64) * GIB, 2 * MIB, 1);
            story.annotate(name, "END", story.events.len());
        }
    }
    assert_eq!(rows(&explain_json(&dir, &[&dir.write("steps.json", story.text())])), []);
    // Consecutive annotations of the same name are one phase.
    let mut story = Story::default();
    for at in 0..12 {
        let name = if at < 4 { "load" } else { "train" };
        story.annotate(name, "START", story.events.len());
        work(&mut story, at * GIB, 2 * MIB, 1);
        story.annotate(name, "END", story.events.len());
    }
    let finding = explain_json(&dir, &[&dir.write("again.json", story.text())]);
    assert_eq!(rows(&finding), [row("load", 8, false), row("train", 24, true)]);
}

#[test]
fn a_long_pause_separates_phases_without_annotations() {
    let dir = TestDir::new();
    let parts = |pause_us: u64| {
        let mut story = Story::default();
        work(&mut story, 0, 20 * MIB, 3);
        let second = story.events.len();
        work(&mut story, GIB, 60 * MIB, 4);
        for event in &mut story.events[second..] {
            event["time_us"] = json!(event["time_us"].as_u64().unwrap() + pause_us);
        }
        explain_json(&dir, &[&dir.write("pause.json", story.text())])
    };
    let paused = parts(2_000_000);
    assert_eq!(rows(&paused), [row("-", 20, false), row("-", 80, true)]);
    assert_eq!((&paused["phases"][0]["last_event"], &paused["phases"][1]["first_event"]), (&json!(61), &json!(62)));
    assert_eq!(rows(&parts(20_000)), []);
}

/// Recorded by `fixtures/changes.py` on an H200, PyTorch 2.11.
#[test]
fn phases_of_a_recorded_program_are_its_annotations() {
    let dir = TestDir::new();
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/phases.pickle.xz");
    let finding = explain_json(&dir, &[file.to_str().unwrap()]);
    assert_eq!(rows(&finding), [row("load", 400, false), row("train", 1000, true), row("generate", 1000, false)]);
}
