//! Snapshots without events, as PyTorch writes them where no history was recorded: what `advise` and `report` say of them.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use common::story::{MIB, Story};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use vramlab::histories::formats::{Ending, Export, ReadOptions, read_origins};
use vramlab::output::{Existing, OutputFile};

/// A history of the repository.
fn history(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../histories/{name}.pickle.xz"))
}

/// What that history's snapshot is where its events were not recorded.
fn without_events(place: &Place, name: &str) -> String {
    let (summary, origins) = read_origins(&history(name), &ReadOptions::default(), &mut |_, _, _| Ok(())).unwrap();
    let out = OutputFile::create(&place.at("held.pickle"), Existing::Refuse).unwrap();
    let ending = Ending {
        segments: &summary.segments,
        allocator_settings: Some(&summary.allocator_settings),
        devices: 1,
        origins: Some(&origins),
    };
    Export::Snapshot.begin(out).unwrap().finish(&ending).unwrap();
    "held.pickle".to_owned()
}

fn keys(value: &Value) -> BTreeSet<&String> {
    value.as_object().unwrap().keys().collect()
}

#[test]
fn advise_shows_what_is_held_and_how_to_record() {
    let place = Place::new();
    let file = without_events(&place, "streams");
    let explained = place.run(&["explain", &file]).ok().stdout;
    let advised = place.run(&["advise", &file]).ok().stdout;
    // All that `explain` says but its last line.
    let (same, _) = explained.split_once("\nNext: ").unwrap();
    assert!(advised.starts_with(same.trim_end()), "{advised}");
    let ledger = "Where 1.56 GiB reserved went when the snapshot was taken";
    for said in [ledger, "Which blocks pin the holes", "1.56 GiB reserved in 60 segments", "none were recorded"] {
        assert!(advised.contains(said), "{said}: {advised}");
    }
    for line in [
        "\n  torch.cuda.memory._record_memory_history(max_entries=1000000, stacks=\"python\")\n",
        "\n  torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")\n",
    ] {
        assert!(advised.contains(line), "{line}: {advised}");
    }
    for text in [&explained, &advised] {
        // Words of a recording.
        for never in ["peak", "first event", "had they completed", "age: since"] {
            assert!(!text.contains(never), "{never}: {text}");
        }
    }
}

#[test]
fn the_object_has_the_keys_of_any_advice() {
    let place = Place::new();
    let file = without_events(&place, "mlp");
    let held = place.run(&["advise", &file, "--json"]).ok().json();
    let whole = place.run(&["advise", history("mlp").to_str().unwrap(), "--conf", "", "--json"]).ok().json();
    for part in ["", "/recorded", "/unknown"] {
        assert_eq!(keys(held.pointer(part).unwrap()), keys(whole.pointer(part).unwrap()), "{part}");
    }
    assert_eq!(
        (&held["verdict"], &held["events"], &held["settings"]),
        (&json!("not-recorded"), &json!(0), &Value::Null)
    );
    assert_eq!(held["recorded"]["peak_reserved_bytes"], Value::Null);
    assert_eq!(held["unknown"]["prologue_reserved_bytes"], json!(90 << 20));
    let limited = place.run(&["advise", &file, "--json", "--limit", "1GiB"]).ok().json();
    assert_eq!((&limited["limit_bytes"], &limited["limit_source"]), (&json!(1 << 30), &json!("given")));
}

#[test]
fn the_page_draws_the_segments() {
    let place = Place::new();
    let file = without_events(&place, "streams");
    let ran = place.run(&["report", &file, "-o", "page.html"]).ok();
    assert!(ran.stdout.contains("what was held in one snapshot without events"), "{}", ran.stdout);
    assert!(ran.stdout.contains("_record_memory_history(max_entries="), "{}", ran.stdout);
    let text = std::fs::read_to_string(place.at("page.html")).unwrap();
    let data = text.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let shown = &data["histories"][0];
    assert_eq!((&shown["recorded"], &shown["events"]), (&json!(false), &json!(1)));
    let maps: Vec<(&Value, &Value)> =
        shown["maps"].as_array().unwrap().iter().map(|map| (&map["name"], &map["segments"])).collect();
    assert_eq!(maps, [(&json!("as recorded"), &json!(true))]);
    assert!(shown["figures"].as_array().unwrap().contains(&json!(["segments", "60"])), "{}", shown["figures"]);
    assert_eq!((&shown["settings"], &shown["lower_bound_bytes"]), (&json!([]), &Value::Null));
    // A ledger that adds up, and what pins.
    let went = &shown["answers"]["explain"]["said"]["reserved"];
    let parts: u64 = went["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(json!(parts), went["moment"]["reserved_bytes"]);
    assert_eq!(went["pinned_segments"], 4);
    assert_eq!(shown["answers"]["advise"], Value::Null);
}

#[test]
fn what_holds_nothing_either_is_refused() {
    let place = Place::new();
    let file = place.write("empty.json", json!({"segments": [], "device_traces": [[]]}).to_string());
    for command in ["advise", "explain", "report", "replay"] {
        place.run(&[command, &file]).refused(2, &["there are no events"]);
    }
}

#[test]
fn nothing_is_shared_out_where_some_segments_are_missing() {
    let place = Place::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, 20 * MIB, 0, json!([]));
    // Its segment came in an event that was left out, and went before the end.
    story.alloc(1 << 30, 40 * MIB, 0, json!([]));
    story.free(1 << 30, 40 * MIB, 0);
    story.held(0, 20 * MIB, json!([0, 0]));
    let block = &mut story.segments[0]["blocks"][0];
    (block["state"], block["requested_size"]) = (json!("active_allocated"), json!(20 * MIB));
    story.segments[0]["segment_type"] = json!("large");
    let file = place.write("some.json", story.text());
    let advice = place.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!((&advice["saving_percent"], &advice["recorded"]["peak_reserved_bytes"]), (&Value::Null, &Value::Null));
    for command in ["advise", "explain"] {
        let screen = place.run(&[command, &file]).ok().stdout;
        assert!(!screen.contains("more than the") && !screen.contains("(-"), "{screen}");
        let shares = screen.split(" %").filter_map(|before| before.rsplit(['(', ' ']).next()?.parse::<f64>().ok());
        assert!(shares.into_iter().all(|share| share <= 100.0), "{screen}");
    }
}
