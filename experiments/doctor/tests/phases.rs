//! The phases of a program, in `explain` and `advise`.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use common::explained::{explain, found};
use common::story::{MIB, Story, script};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

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
