//! The smallest inputs of defects that strangers' recordings showed, made by a model of PyTorch's allocator outside of the
//! repository. Ignored, because they need it and Python.

use crate::common::TestDir;
use crate::common::story::{MIB, explain, explain_json, part};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const GIB: u64 = 1024 * MIB;

/// Runs a script of the model with arguments.
fn make(script: &str, arguments: &[&str]) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/tools/strangers");
    let made = Command::new("python3").arg("-B").arg(directory.join(script)).args(arguments).output();
    let made = made.expect("python3 should run");
    assert!(made.status.success(), "{script}: {}", String::from_utf8_lossy(&made.stderr));
}

/// The inputs of `checks.py`.
fn checks() -> TestDir {
    let dir = TestDir::new();
    make("checks.py", &[dir.at(".").to_str().unwrap()]);
    dir
}

fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn screen(dir: &TestDir, command: &str, file: &str) -> String {
    flat(&dir.run(&[command, file]).ok().stdout)
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn every_input_is_answered_by_every_command() {
    let dir = checks();
    let mut files: Vec<_> = std::fs::read_dir(dir.at(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert!(files.len() > 9, "{files:?}");
    for file in &files {
        let file = file.to_str().unwrap();
        let explanation = explain_json(&dir, &[file]);
        let reserved = explanation["reserved"]["moment"]["reserved_bytes"].as_u64().unwrap();
        let parts = explanation["reserved"]["parts"].as_array().unwrap();
        assert_eq!(parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum::<u64>(), reserved, "{file}");
        explain(&dir, &[file]).ok();
        let advice = dir.run(&["advise", file, "--json"]).ok().json();
        assert_eq!(advice["recorded"]["peak_reserved_bytes"], explanation["peak_reserved"]["reserved_bytes"], "{file}");
        dir.run(&["advise", file, "--limit", "200GiB"]).ok();
        dir.run(&["replay", file, "--alloc", "caching,pytorch-expandable", "--device", "null"]).ok();
        dir.run(&["report", file, "-o", &format!("{file}.html")]).ok();
    }
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn whole_pages_of_expandable_segments_are_releasable() {
    let dir = checks();
    let explanation = explain_json(&dir, &["expandable.json"]);
    let streams = &explanation["reserved"]["streams"][0];
    // At the peak the 9 GiB are active; there is one pool.
    assert_eq!((&streams["hard_bytes"], &explanation["reserved"]["pinned_free_bytes"]), (&json!(0), &json!(0)));
    assert!(!screen(&dir, "explain", "expandable.json").contains("Blocks that keep"));
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn a_flat_peak_is_explained_where_it_is_used_most() {
    let dir = checks();
    let explanation = explain_json(&dir, &["flat.json"]);
    assert_eq!(["requested", "soft", "hard"].map(|name| part(&explanation, name)), [18 * GIB, 0, 0]);
    assert_eq!(explanation["reserved"]["moment"]["event"], 8);
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn pools_that_events_name_are_not_inferred() {
    let dir = checks();
    let advice = dir.run(&["advise", "named_pools.json", "--json"]).ok().json();
    assert_eq!((&advice["pools"], &advice["program_changes"]), (&Value::Null, &json!([])));
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn a_refused_request_is_in_bound_and_plan() {
    let dir = checks();
    let advice = dir.run(&["advise", "oom_after_free.json", "--json"]).ok().json();
    let asked = 11 * GIB + 400 * MIB;
    assert!(advice["lower_bound_bytes"].as_u64().unwrap() >= asked, "{advice}");
    assert_eq!((&advice["unknown"]["deferred_frees"], &advice["live_bytes"]), (&json!(0), &json!(asked)));
    assert!(!screen(&dir, "advise", "oom_after_free.json").contains("waited for other streams"));
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn a_short_phase_holds_its_own_peak() {
    let dir = checks();
    let explanation = explain_json(&dir, &["short_phase.json"]);
    let decides = explanation["phases"].as_array().unwrap().iter().find(|phase| phase["decides"] == true).unwrap();
    assert_eq!((&decides["name"], &decides["peak_active_bytes"]), (&json!("generate"), &json!(100 * GIB)));
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn recordings_that_end_as_they_began_did_not_grow() {
    let dir = checks();
    for file in ["no_growth-1.json", "no_growth-3.json", "no_growth-8.json", "one_step.json"] {
        assert_eq!(explain_json(&dir, &[file])["grew"], Value::Null, "{file}");
    }
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn memory_in_two_places_is_named_with_its_cure() {
    let dir = checks();
    let text = screen(&dir, "explain", "two_places.json");
    for words in ["16 GiB were free, in two places: 8 GiB in segments, 8 GiB on the GPU", "expandable_segments:True"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(screen(&dir, "advise", "two_places.json").contains("expandable_segments:True"));
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn frees_that_never_complete_stay_pending() {
    let dir = TestDir::new();
    make("pending_end.py", &[dir.at(".").to_str().unwrap()]);
    for (file, reserved) in [("pending-one.json", 6 * GIB), ("pending-two.json", 6 * GIB + 2 * MIB)] {
        let advice = dir.run(&["advise", file, "--json"]).ok().json();
        assert_eq!(advice["recorded"]["replayed"]["peak_reserved_bytes"], reserved, "{file}");
        assert_eq!(explain_json(&dir, &[file])["peak_reserved"]["reserved_bytes"], reserved, "{file}");
    }
}

#[test]
#[ignore = "needs the model next to the checkout, in ../shared, and Python"]
fn a_plan_of_made_training_steps_is_bounded() {
    let dir = TestDir::new();
    make("planner.py", &["4", "1", dir.at("steps.json").to_str().unwrap()]);
    let advice = dir.run(&["advise", "steps.json", "--json"]).ok().json();
    let [bound, plan, peak] =
        [&advice["lower_bound_bytes"], &advice["plan_bytes"], &advice["recorded"]["peak_reserved_bytes"]]
            .map(|value| value.as_u64().unwrap());
    assert!(bound <= plan && plan <= peak, "{bound} {plan} {peak}");
}
