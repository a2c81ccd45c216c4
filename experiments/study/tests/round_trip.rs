//! What a run exports and what `convert` writes, `replay` reads.
// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use trainer::Settings;
use trainer::data::DatasetName;
use trainer::observer::{Observer, Silent};
use trainer::settings::DeviceChoice;
use vramlab::backends::{self, caching};
use vramlab::histories::formats::{Action, Export};

/// Ways of using each allocator; some run out of memory.
fn arms() -> Vec<(&'static str, Settings)> {
    let base = Settings {
        device: DeviceChoice::Named(vramlab::DeviceName::Sim(None)),
        dataset: DatasetName::Digits,
        offline: true,
        hidden: 40,
        batch: 64,
        steps: Some(6),
        exports: Export::ALL.to_vec(),
        ..Settings::default()
    };
    let with = |text: &str| Settings { allocator: text.parse().unwrap(), ..base.clone() };
    let under =
        "caching:garbage_collection_threshold=0.1,max_split_size=20M,roundup_power2_divisions=4,memory_limit=64M";
    // Room for the weights, but not for the gradients too.
    let mut small = with("caching");
    small.hidden = 1500;
    small.memory_limit = Some(24 << 20);
    vec![
        ("naive", with("naive")),
        ("caching", with("caching")),
        ("caching under settings", with(under)),
        ("caching without memory", small),
        ("stream-ordered", with("stream-ordered")),
        ("stream-ordered that keeps nothing", with("stream-ordered:release_threshold=0")),
    ]
}

#[test]
fn every_export_of_every_allocator_is_replayed() {
    for (name, settings) in arms() {
        let observer: Arc<dyn Observer> = Arc::new(Silent);
        let place = Place::new();
        let record = place.at("record");
        let settings = Settings { out: Some(record.clone()), ..settings };
        let run = trainer::run(&settings, vec!["test".into()], Instant::now(), &AtomicBool::new(false), &observer);
        drop(run.unwrap());
        let summary: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(record.join("summary.json")).unwrap()).unwrap();
        let stats = &summary["allocator_stats"];
        for export in Export::ALL {
            let file = record.join(export.file_name());
            let file = file.to_str().unwrap();
            let ran = place.run(&["vramlab", "replay", file, "--alloc", "all", "--device", "null", "--json"]);
            if export == Export::Perfetto {
                assert_eq!(ran.code, Some(2), "a timeline is no history: {ran:#?}");
                continue;
            }
            let rows = ran.rows();
            assert_eq!(rows.len(), backends::all().len(), "{name} as {}", export.name());
            for row in &rows {
                let tried = stats["allocation.all.allocated"].as_u64().unwrap();
                assert_eq!(row["allocations"].as_u64(), Some(tried), "{name} as {}: {row}", export.name());
                // What fitted into a limit under PyTorch's rules may not fit under others.
                let alike = backends::find(row["allocator"].as_str().unwrap()).unwrap().capabilities.follows_pytorch;
                if alike || stats["num_ooms"] == 0 {
                    assert_eq!(row["failed_allocations"], 0, "{name} as {}: {row}", export.name());
                }
                if export.holds(Action::Oom) {
                    assert_eq!(row["refused_allocations"], stats["num_ooms"], "{name} as {}: {row}", export.name());
                }
            }
            // A snapshot has all that it takes to follow the run address for address.
            if !matches!(export, Export::Snapshot | Export::SnapshotJson)
                || settings.allocator.backend() != &caching::BACKEND
            {
                continue;
            }
            let arguments = ["vramlab", "replay", file, "--alloc", "caching", "--addresses", "recorded", "--json"];
            let row = &place.run(&arguments).rows()[0];
            assert_eq!(
                (&row["address_mismatches"], &row["segment_mismatches"]),
                (&0.into(), &0.into()),
                "{name}: {row}"
            );
            assert_eq!(row["peak_reserved_bytes"], stats["reserved_bytes.all.peak"], "{name}: {row}");
            assert_eq!(row["limit_bytes"], summary["settings"]["memory_limit"], "{name}");
            for (key, value) in summary["settings"]["allocator_settings"].as_object().unwrap() {
                assert_eq!(&row["allocator_settings"][key], value, "{name}: {key}");
            }
        }
    }
}

// What `vramlab` makes of the trainer's own records: plans that a later run follows, and who held memory.

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
