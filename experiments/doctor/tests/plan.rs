//! `vramlab plan`, and the allocator that follows what it makes.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use serde_json::json;
use std::path::Path;

/// A history of the repository's.
fn trace(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../histories").join(name);
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_history_that_is_replayed_by_its_plan_needs_what_the_plan_says() {
    let place = Place::new();
    let plan = place.at("plan.json");
    let alloc = format!("plan:file={}", plan.to_str().unwrap());
    // With two streams both plans: that with waits between them, and that without.
    for (name, order) in [("mlp", &[][..]), ("streams", &[][..]), ("streams", &["--known-order"][..])] {
        let file = trace(&format!("{name}.pickle.xz"));
        let made = ["plan", &file, "-o", plan.to_str().unwrap(), "--steps", "1000000", "--json"];
        let made: serde_json::Value =
            serde_json::from_str(&place.run(&[&made[..], order].concat()).ok().stdout).unwrap();
        assert_eq!(made["known_order"], !order.is_empty());
        let count = |key: &str| made[key].as_u64().unwrap();
        assert!(0 < count("segment_requests") && count("segment_requests") < count("allocations") / 10, "{made}");
        assert!(count("stitchable_requests") < count("segment_requests"), "{made}");
        for device in ["sim", "null"] {
            let rows =
                place.run(&["replay", &file, "--alloc", &alloc, "--device", device, "--plan", "off", "--json"]).rows();
            let row = &rows[0];
            assert_eq!((&row["peak_reserved_bytes"], &row["unplanned_allocations"]), (&made["plan_bytes"], &json!(0)));
            assert_eq!((&row["planned_allocations"], &row["segment_allocs"]), (&made["allocations"], &json!(1)));
            assert!(row["lower_bound_bytes"].as_u64() <= made["plan_bytes"].as_u64(), "{name}");
        }
    }
    // Another history, by the last plan.
    let file = trace("mlp.pickle.xz");
    let rows = place.run(&["replay", &file, "--alloc", &alloc, "--device", "null", "--plan", "off", "--json"]).rows();
    assert!(rows[0]["unplanned_allocations"].as_u64() > Some(0) && rows[0]["failed_allocations"] == 0, "{}", rows[0]);
    let table = place.run(&["replay", &file, "--alloc", &alloc, "--device", "null", "--plan", "off"]).ok().stdout;
    assert!(table.contains("not as planned"), "{table}");
    let text = place.run(&["plan", &file, "--steps", "1000"]).ok().stdout;
    assert!(text.contains("A plan of") && text.contains("plan.json"), "{text}");
    let bad = place.write("bad.json", "[]");
    place.run(&["replay", &file, "--alloc", &format!("plan:file={bad}")]).refused(2, &["bad.json", "vramlab plan"]);
    place.run(&["plan", "missing.pickle"]).refused(2, &["missing.pickle"]);
}
