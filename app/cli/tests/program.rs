//! What `advise` says of the program: changes of it, each rule on a recording that shows it and on one that does not, and phases.

use crate::common::Place;
use crate::common::story::{BASE, MIB, Story, script};
use crate::common::story::{explain, found};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

fn advise(place: &Place, story: &Story, more: &[&str]) -> Value {
    let file = place.write("story.json", story.text());
    place.run(&[&["advise", &file, "--json"], more].concat()).ok().json()
}

fn screen(place: &Place) -> String {
    place.run(&["advise", "story.json"]).ok().stdout
}

/// The change of a cause, and what is reserved with and without it, in MiB.
fn change(advice: &Value, cause: &str) -> Option<(Value, [u64; 2])> {
    let found = advice["program_changes"].as_array().unwrap().iter().find(|change| change["cause"] == cause)?.clone();
    let mib = |bytes: &Value| bytes.as_u64().unwrap_or(0) / MIB;
    let peaks = [mib(&found["instead_of_bytes"]), mib(&found["without"]["peak_reserved_bytes"])];
    Some((found, peaks))
}

fn file(name: &str, path: &str) -> Value {
    json!({"name": name, "filename": format!("/venv/lib/python3.12/site-packages/torch/{path}"), "line": 1})
}

/// Steps that take 20 MiB each; the line empties the cache after each.
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
fn a_cache_that_is_emptied_to_be_filled_again_is_named_with_its_line() {
    let place = Place::new();
    let advice = advise(&place, &emptied(5, |_| 20 * MIB), &[]);
    let (found, peaks) = change(&advice, "empty-cache").unwrap();
    assert_eq!((peaks, &found["times"], &found["segments"]), ([20, 20], &json!(5), &json!(5)));
    assert_eq!(found["lines"], json!([{"line": "proj/train.py:9 step", "times": 5}]));
    let calls = |of: &Value| of["driver_calls"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum::<u64>();
    assert!(calls(&found["without"]) < calls(&advice["recorded"]["replayed"]) / 2);
    // Nothing else is to be changed, so it comes first.
    let screen = screen(&place);
    let [change, help] = ["a change of the program", "What would help"].map(|title| screen.find(title).unwrap());
    assert!(change < help && screen.contains("train.py:9 step (5)") && screen.contains("simulated H200"), "{screen}");
    // Sizes that do not come again are not fetched again, and one call is no habit.
    for story in [emptied(5, |step| (20 + 2 * step) * MIB), emptied(1, |_| 20 * MIB)] {
        assert_eq!(change_of(&place, &story, "empty-cache"), None);
    }
}

fn change_of(place: &Place, story: &Story, cause: &str) -> Option<[u64; 2]> {
    change(&advise(place, story, &[]), cause).map(|(_, peaks)| peaks)
}

#[test]
fn memory_that_is_free_on_other_streams_is_named_by_the_line_that_misses() {
    let place = Place::new();
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
    let advice = advise(&place, &on(7), &[]);
    let (found, peaks) = change(&advice, "other-streams").unwrap();
    assert_eq!((peaks, &found["times"], &found["saving_percent"]), ([40, 20], &json!(1), &json!(50.0)));
    assert_eq!(found["lines"][0]["line"], "proj/train.py:4 step");
    assert!(screen(&place).contains("1 of 2 requests that found no free block on their stream"));
    // A free block of the same stream is no matter of streams.
    let mut same = Story::default();
    for at in [0, GIB] {
        same.segment(at, 20 * MIB, 0);
        same.alloc(at, 20 * MIB, 0, json!([script(3, "step")]));
    }
    assert_eq!(change_of(&place, &same, "other-streams"), None);
}

#[test]
fn workspaces_that_are_held_to_the_end_are_named() {
    let place = Place::new();
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
    let (found, peaks) = change(&advise(&place, &with(false, cublas), &[]), "workspaces").unwrap();
    assert_eq!((peaks, &found["bytes"]), ([72, 42], &json!(32 * MIB)));
    assert_eq!(found["lines"][0]["line"], "proj/train.py:5 forward");
    assert!(screen(&place).contains("CUBLAS_WORKSPACE_CONFIG=:16:8"));
    assert_eq!(change_of(&place, &with(true, cublas), "workspaces"), None);
    assert_eq!(change_of(&place, &with(false, "at::native::add()"), "workspaces"), None);
}

#[test]
fn a_cache_from_before_the_recording_is_named_where_nothing_uses_it() {
    let place = Place::new();
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
    let advice = advise(&place, &cached(false), &[]);
    let (found, _) = change(&advice, "leftover-cache").unwrap();
    assert_eq!((&found["bytes"], &found["without"]), (&json!(30 * MIB), &Value::Null));
    let saving = found["saving_percent"].as_f64().unwrap();
    assert!((saving - 300.0 / 7.0).abs() < 0.01, "{saving}");
    // The earlier part needed what it left: no change of the later part is below that.
    let mut more = cached(false);
    more.held(2 * GIB, 30 * MIB, json!([0, 0]));
    let (found, _) = change(&advise(&place, &more, &[]), "leftover-cache").unwrap();
    assert_eq!(found["bytes"], 40 * MIB);
    advise(&place, &cached(false), &[]);
    assert!(screen(&place).contains("30 MiB were cached before the recording began, and unused at the peak"));
    assert_eq!(change_of(&place, &cached(true), "leftover-cache"), None);
}

#[test]
fn a_pool_that_is_alive_and_empty_is_named_unless_graphs_may_need_it() {
    let place = Place::new();
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
    let advice = advise(&place, &pooled(json!([0, 1]), false), &[]);
    let (found, peaks) = change(&advice, "private-pools").unwrap();
    assert_eq!((peaks, &found["bytes"], &found["times"]), ([40, 20], &json!(20 * MIB), &json!(1)));
    assert!(screen(&place).contains("Delete the MemPool"));
    for (pool, graphs) in [(json!([0, 1]), true), (json!([1, 0]), false), (json!([0, 0]), false)] {
        assert_eq!(change_of(&place, &pooled(pool, graphs), "private-pools"), None);
    }
}

/// Recorded by `fixtures/changes.py` on an H200, PyTorch 2.11: what each program reserves at its peak, in MiB, as it is and with
/// the change.
#[test]
fn a_change_gains_what_it_gained_on_a_gpu() {
    let place = Place::new();
    for (name, cause, measured) in [
        ("emptied", "empty-cache", [280, 280]),
        ("streams", "other-streams", [512, 256]),
        ("workspaces", "workspaces", [432, 252]),
        ("mempool", "private-pools", [640, 384]),
    ] {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/{name}.pickle.xz"));
        let advice = place.run(&["advise", file.to_str().unwrap(), "--json"]).ok().json();
        let (found, peaks) = change(&advice, cause).unwrap_or_else(|| panic!("{name}: {}", advice["program_changes"]));
        assert_eq!(peaks, measured, "{name}");
        let line = found["lines"].as_array().unwrap().first().map(|line| line["line"].as_str().unwrap().to_owned());
        assert_eq!(line.is_none(), cause == "private-pools", "{line:?}");
        assert!(line.is_none_or(|line| line.starts_with("device/changes.py:")));
    }
    // Memory that was cached before was needed before: 480 MiB of 880 remain, and 400 were measured without.
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/leftover.pickle.xz");
    let advice = place.run(&["advise", file.to_str().unwrap(), "--json"]).ok().json();
    let (found, _) = change(&advice, "leftover-cache").unwrap();
    assert_eq!((&found["bytes"], &advice["evidence"]["needed_reserved_bytes"]), (&json!(400 * MIB), &json!(400 * MIB)));
}

// The phases of a program, in `explain` and `advise`.

/// Takes so much of a new segment at once, and gives it back over the next events.
fn work(story: &mut Story, at: u64, bytes: u64, line: u64) {
    story.segment(at, bytes, 0);
    for _ in 0..20 {
        story.alloc(at, bytes, 0, json!([script(line, "work")]));
        story.free(at, bytes, 0);
    }
}

/// Names, peaks of what is reserved in MiB, and which decides.
fn rows(found: &Value) -> Vec<(String, u64, bool)> {
    let phases = found["phases"].as_array().unwrap().iter();
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
fn annotations_part_a_program_and_the_phase_that_decides_is_named() {
    let place = Place::new();
    let mut story = Story::default();
    for (at, (name, mib)) in [("load", 20), ("train", 60), ("generate", 1)].into_iter().enumerate() {
        story.annotate(name, "START", story.events.len());
        // What lies inside is no phase.
        story.annotate("step", "START", story.events.len() + 5);
        story.annotate("step", "END", story.events.len() + 9);
        work(&mut story, at as u64 * GIB, mib * MIB, 1);
        story.annotate(name, "END", story.events.len());
    }
    let file = place.write("phases.json", story.text());
    // The last one takes reserved memory by more than half a percent beyond training.
    let expected = [row("load", 20, false), row("train", 80, false), row("generate", 81, true)];
    assert_eq!(rows(&found(&place, &[&file])), expected);
    let screen = explain(&place, &[&file]).ok().stdout;
    assert!(screen.contains("Phases: the peak is reached first in generate"), "{screen}");
    let advice = place.run(&["advise", &file, "--conf", "", "--json"]).ok().json();
    assert_eq!(rows(&advice), expected);
    let screen = place.run(&["advise", &file, "--conf", ""]).ok().stdout;
    assert!(screen.contains("train 60 MiB of 80 MiB") && screen.contains("reached first in generate"), "{screen}");
}

#[test]
fn steps_are_no_phases() {
    let place = Place::new();
    let mut story = Story::default();
    for at in 0..12 {
        for (half, name) in ["forward", "backward"].into_iter().enumerate() {
            story.annotate(name, "START", story.events.len());
            work(&mut story, (2 * at + half as u64) * GIB, 2 * MIB, 1);
            story.annotate(name, "END", story.events.len());
        }
    }
    assert_eq!(rows(&found(&place, &[&place.write("steps.json", story.text())])), []);
    // The same name again and again is one phase.
    let mut story = Story::default();
    for at in 0..12 {
        let name = if at < 4 { "load" } else { "train" };
        story.annotate(name, "START", story.events.len());
        work(&mut story, at * GIB, 2 * MIB, 1);
        story.annotate(name, "END", story.events.len());
    }
    let found = found(&place, &[&place.write("again.json", story.text())]);
    assert_eq!(rows(&found), [row("load", 8, false), row("train", 24, true)]);
}

#[test]
fn a_long_pause_parts_what_has_no_annotations() {
    let place = Place::new();
    let parts = |pause_us: u64| {
        let mut story = Story::default();
        work(&mut story, 0, 20 * MIB, 3);
        let second = story.events.len();
        work(&mut story, GIB, 60 * MIB, 4);
        for event in &mut story.events[second..] {
            event["time_us"] = json!(event["time_us"].as_u64().unwrap() + pause_us);
        }
        found(&place, &[&place.write("pause.json", story.text())])
    };
    let paused = parts(2_000_000);
    assert_eq!(rows(&paused), [row("proj/train.py:3 work", 20, false), row("proj/train.py:4 work", 80, true)]);
    assert_eq!((&paused["phases"][0]["last_event"], &paused["phases"][1]["first_event"]), (&json!(61), &json!(62)));
    assert_eq!(rows(&parts(20_000)), []);
}

/// Recorded by `fixtures/changes.py` on an H200, PyTorch 2.11.
#[test]
fn the_phases_of_a_recorded_program_are_its_annotations() {
    let place = Place::new();
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/phases.pickle.xz");
    let found = found(&place, &[file.to_str().unwrap()]);
    assert_eq!(rows(&found), [row("load", 400, false), row("train", 1000, true), row("generate", 1000, false)]);
}
