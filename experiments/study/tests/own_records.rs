//! What `vramlab` makes of the trainer's own records: plans that a later run follows, and who held memory.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use serde_json::json;

#[test]
fn a_training_run_follows_the_plan_of_an_earlier_one() {
    let place = Place::new();
    let train = |alloc: &str, out: &str| {
        let arguments =
            ["trainer", "--alloc", alloc, "--device", "sim", "--dataset", "iris", "--epochs", "2", "--out", out];
        place.run(&[&arguments[..], &["--export", "snapshot-json"]].concat()).ok();
        let path = place.at(out).join("summary.json");
        let summary: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        summary["allocator_stats"].clone()
    };
    train("caching", "first");
    let made = place.run(&["vramlab", "plan", "first/snapshot.json", "-o", "plan.json", "--json"]).ok().stdout;
    let made: serde_json::Value = serde_json::from_str(&made).unwrap();
    let stats = train("plan:file=plan.json", "second");
    assert_eq!((&stats["num_planned"], &stats["num_unplanned"]), (&made["allocations"], &json!(0)));
    assert_eq!(stats["reserved_bytes.all.peak"], made["plan_bytes"]);
}

#[test]
fn a_run_of_ours_names_layers_and_roles() {
    let place = Place::new();
    let run = ["trainer", "--device", "sim", "--dataset", "iris", "--epochs", "2", "--hidden", "256", "--layers", "3"];
    place.run(&[&run[..], &["--alloc", "caching", "--export", "snapshot,snapshot-json", "--out", "run"]].concat()).ok();
    for file in ["run/snapshot.pickle", "run/snapshot.json"] {
        let found = place
            .run(&["vramlab", "explain", "--json", file, "--between", "epoch 1 step 2", "epoch 2 step 1"])
            .ok()
            .json();
        let lines: Vec<&str> =
            found["who"][0]["lines"].as_array().unwrap().iter().map(|row| row["line"].as_str().unwrap()).collect();
        for wanted in ["layer 3 weights gradient", "layer 2 weights gradient", "set-up parameters or data"] {
            assert!(lines.contains(&wanted), "{wanted}: {lines:?}");
        }
        let children = found["who"][0]["tree"]["children"].as_array().unwrap();
        assert!(children.iter().any(|child| child["name"] == "training backward"), "{children:?}");
        assert_eq!(found["peak_active"]["annotation"].as_str().map(|name| name.starts_with("epoch ")), Some(true));
    }
}
