//! Causes that `explain` names only where the history can show them.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use common::explained::{explain, found, part};
use common::story::{BASE, MIB, Story, script};
use serde_json::json;

#[test]
fn frees_that_complete_while_memory_is_taken_are_no_private_pool() {
    let place = Place::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, 20 * MIB, 0, json!([]));
    story.event("free_requested", BASE, 20 * MIB, 0, json!([]));
    story.segment(1 << 30, 12 * MIB, 3);
    story.alloc(1 << 30, 12 * MIB, 3, json!([]));
    // No block fits and the device is full, so the allocator waits for the frees, gives segments back and asks again.
    story.event("free_completed", BASE, 20 * MIB, 0, json!([]));
    story.segment(2 << 30, 20 * MIB, 0);
    story.alloc(2 << 30, 16 * MIB, 0, json!([script(3, "step")]));
    let found = found(&place, &[&place.write("waited.json", story.text())]);
    let shape = &found["shapes"].as_array().unwrap().iter().find(|shape| shape["requested_bytes"] == 16 * MIB).unwrap();
    assert_eq!(shape["cause"], "pending");
    // So does a request that was refused.
    let last = story.events.len() - 2;
    story.events.truncate(last);
    story.event("oom", 0, 16 * MIB, 0, json!([script(3, "step")]));
    let found = self::found(&place, &[&place.write("refused.json", story.text())]);
    assert_eq!(found["out_of_memory"][0]["cause"], "pending");
    let screen = explain(&place, &["refused.json"]).ok().stdout;
    assert!(!screen.contains("private pool"), "{screen}");
}

#[test]
fn a_private_pool_is_named_where_there_is_one() {
    let place = Place::new();
    for (pool, cause) in [(None, "untold"), (Some(json!([0, 0])), "untold"), (Some(json!([0, 1])), "elsewhere")] {
        let mut story = Story::default();
        story.segment(0, 20 * MIB, 0);
        story.alloc(0, 20 * MIB, 0, json!([]));
        story.free(0, 20 * MIB, 0);
        story.segment(1 << 30, 20 * MIB, 0);
        story.alloc(1 << 30, 16 * MIB, 0, json!([]));
        if let Some(pool) = pool {
            story.held(2 << 30, 2 * MIB, pool);
        }
        let file = place.write("pools.json", story.text());
        let shapes = found(&place, &[&file])["shapes"].clone();
        assert_eq!(
            shapes.as_array().unwrap().iter().find(|shape| shape["requested_bytes"] == 16 * MIB).unwrap()["cause"],
            cause
        );
        let screen = explain(&place, &[&file]).ok().stdout;
        assert_eq!(screen.contains("private pool"), cause == "elsewhere", "{screen}");
    }
}

#[test]
fn nothing_is_stranded_in_a_recording_that_ends_soon() {
    let place = Place::new();
    let stranded = |requests: u64| {
        let mut story = Story::default();
        story.held(1 << 30, 20 * MIB, json!([0, 0]));
        story.segments[0]["stream"] = json!(7);
        story.segment(0, 20 * MIB, 0);
        for _ in 0..requests {
            story.alloc(0, 4 * MIB, 0, json!([]));
            story.free(0, 4 * MIB, 0);
        }
        // At the last event is the peak.
        story.segment(2 << 30, 40 * MIB, 0);
        story.alloc(2 << 30, 40 * MIB, 0, json!([]));
        found(&place, &[&place.write("stranded.json", story.text())])["reserved"]["stranded"].clone()
    };
    assert_eq!(stranded(0), json!([]));
    assert_eq!(stranded(8), json!([]));
    assert_eq!(stranded(9)[0]["requests_since"], 10);
    // One event.
    let mut story = Story::default();
    story.held(1 << 30, 20 * MIB, json!([0, 0]));
    story.segments[0]["stream"] = json!(7);
    story.alloc(0, 4 * MIB, 0, json!([]));
    let file = place.write("one.json", story.text());
    assert_eq!(found(&place, &[&file])["reserved"]["stranded"], json!([]));
    let screen = explain(&place, &[&file]).ok().stdout;
    for never in ["used no more", "did not serve", "Who held memory at the peak of reserved"] {
        assert!(!screen.contains(never), "{never}: {screen}");
    }
}

#[test]
fn other_streams_are_named_where_there_are_some() {
    let place = Place::new();
    for stream in [0, 5] {
        let mut story = Story::default();
        story.segment(0, 20 * MIB, 0);
        story.alloc(0, 8 * MIB, 0, json!([]));
        story.event("free_requested", BASE, 8 * MIB, 0, json!([]));
        story.alloc(8 * MIB, 4 * MIB, 0, json!([]));
        story.segment(1 << 30, 20 * MIB, stream);
        story.alloc(1 << 30, 8 * MIB, stream, json!([]));
        story.event("free_completed", BASE, 8 * MIB, 0, json!([]));
        let file = place.write("streams.json", story.text());
        assert_eq!(found(&place, &[&file])["streams"], if stream == 0 { 1 } else { 2 });
        let screen = explain(&place, &[&file]).ok().stdout;
        assert_eq!(screen.contains("record_stream"), stream == 5, "{screen}");
        assert!(screen.contains("1 free"), "{screen}");
    }
}

#[test]
fn the_ledger_is_of_the_first_moment_near_the_peak() {
    let place = Place::new();
    let mut story = Story::default();
    story.segment(0, 1000 * MIB, 0);
    story.alloc(0, 1000 * MIB, 0, json!([script(4, "forward")]));
    story.free(0, 1000 * MIB, 0);
    // Little is in use when the last 2 MiB are taken.
    story.segment(1 << 40, 2 * MIB, 0);
    story.alloc(1 << 40, 512, 0, json!([script(9, "log")]));
    let near = found(&place, &[&place.write("near.json", story.text())]);
    assert_eq!(near["peak_reserved"]["event"], 6);
    assert_eq!(
        (&near["reserved"]["at"], &near["reserved"]["moment"]["event"]),
        (&json!("near_peak_reserved"), &json!(2))
    );
    assert_eq!(part(&near, "requested"), 1000 * MIB);
    assert!(!explain(&place, &["near.json"]).ok().stdout.contains("did not serve"));
    // More than half a percent is another moment.
    story.segment(2 << 40, 20 * MIB, 0);
    story.alloc(2 << 40, 20 * MIB, 0, json!([]));
    let peak = found(&place, &[&place.write("peak.json", story.text())]);
    assert_eq!((&peak["reserved"]["at"], &peak["reserved"]["moment"]["event"]), (&json!("peak_reserved"), &json!(8)));
}
