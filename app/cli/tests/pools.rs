//! Private pools (CUDA graphs, MemPools) in `explain` and `advise`, which agree on what releases their memory.

use crate::common::TestDir;
use crate::common::story::{BASE, MIB, Story, explain, explain_json, part, script};
use serde_json::{Value, json};

/// Adds a block in a segment of its own.
fn block(story: &mut Story, at: u64, mib: u64, line: u64) {
    story.segment(at << 30, mib * MIB, 0);
    story.alloc(at << 30, mib * MIB, 0, json!([script(line, "main")]));
}

/// Adds a segment to the final snapshot.
fn ends_with(story: &mut Story, at: u64, mib: u64, live: bool, pool: [u64; 2]) {
    let (requested, state) = if live { (mib * MIB, "active_allocated") } else { (0, "inactive") };
    let address = BASE + (at << 30);
    story.segments.push(json!({
        "device": 0, "address": address, "total_size": mib * MIB, "stream": 0, "segment_type": "large",
        "is_expandable": false, "segment_pool_id": pool,
        "blocks": [{"address": address, "size": mib * MIB, "requested_size": requested, "state": state, "frames": []}],
    }));
}

/// A MemPool holds 100 MiB of weights and 300 MiB that loading them left free; then 400 MiB are requested outside of it.
fn weights_in_a_pool() -> Story {
    let mut story = Story::default();
    block(&mut story, 1, 300, 1);
    block(&mut story, 2, 100, 2);
    story.free(1 << 30, 300 * MIB, 0);
    block(&mut story, 3, 200, 3);
    story.event("oom", 150 * MIB, 250 * MIB, 0, json!([script(4, "generate")]));
    ends_with(&mut story, 1, 300, false, [0, 1]);
    ends_with(&mut story, 2, 100, true, [0, 1]);
    ends_with(&mut story, 3, 200, true, [0, 0]);
    story
}

#[test]
fn free_memory_of_a_live_pool_is_not_releasable_when_memory_ran_out() {
    let dir = TestDir::new();
    let file = dir.write("pool.json", weights_in_a_pool().text());
    let explanation = explain_json(&dir, &[&file]);
    assert_eq!(["soft", "kept", "hard"].map(|name| part(&explanation, name)), [0, 300 * MIB, 0]);
    assert_eq!(explanation["out_of_memory"][0]["private_free_bytes"], 300 * MIB);
    let text = explain(&dir, &[&file]).ok().stdout;
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "live private pools (CUDA graphs, MemPools) keep such segments: 300 MiB in 0.1",
        "large, private 0.1",
        "300 MiB of it in private pools",
    ] {
        assert!(flat.contains(words), "{words}: {text}");
    }
    // The pool's memory does not count as free for this request.
    assert!(!flat.contains("in two places"), "{text}");
    let advice = dir.run(&["advise", &file, "--json"]).ok().json();
    let pools = &advice["pools"];
    assert_eq!((&pools["at"], &pools["pools"][0]["pool"]), (&json!("out_of_memory"), &Value::Null), "{pools}");
    let pool = &pools["pools"][1];
    assert_eq!(
        (&pool["pool"], &pool["free_bytes"], &pool["active_bytes"]),
        (&json!("0.1"), &json!(300 * MIB), &json!(100 * MIB))
    );
    let screen = dir.run(&["advise", &file]).ok().stdout;
    let flat = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in
        ["Pools when memory ran out", "private 0.1", "pool 0.1 (300 MiB)", "outside of the MemPool", "no out-of-memory"]
    {
        assert!(flat.contains(words), "{words}: {screen}");
    }
    // Free memory of the pool is no fragmentation.
    let replayed = dir.run(&["replay", &file, "--alloc", "caching", "--device", "null", "--plan", "off"]).ok().stdout;
    assert!(replayed.contains("300 MiB of it in private pools") && !replayed.contains("fragmentation"), "{replayed}");
    for words in ["Delete the MemPool", "Call torch.cuda.empty_cache()"] {
        assert!(!flat.contains(words), "{words}: {screen}");
    }
}

#[test]
fn events_name_pools_whose_segments_are_gone() {
    let mut story = Story::default();
    block(&mut story, 1, 300, 1);
    story.free(1 << 30, 300 * MIB, 0);
    block(&mut story, 2, 200, 2);
    story.event("segment_free", BASE + (1 << 30), 300 * MIB, 0, json!([]));
    for (event, pool) in [(0, [0, 5]), (4, [0, 0]), (6, [0, 5])] {
        story.events[event]["pool_id"] = json!(pool);
    }
    ends_with(&mut story, 2, 200, true, [0, 0]);
    let dir = TestDir::new();
    let explanation = explain_json(&dir, &[&dir.write("pool.json", story.text())]);
    assert_eq!(["soft", "kept"].map(|name| part(&explanation, name)), [0, 300 * MIB]);
    let row = &explanation["reserved"]["streams"][0];
    assert_eq!((&row["private_pool"], &row["kept_bytes"]), (&json!("0.5"), &json!(300 * MIB)));
}

#[test]
fn a_recording_without_private_pools_has_no_table_of_pools() {
    let mut story = Story::default();
    block(&mut story, 1, 300, 1);
    ends_with(&mut story, 1, 300, true, [0, 0]);
    let dir = TestDir::new();
    let file = dir.write("story.json", story.text());
    assert_eq!(dir.run(&["advise", &file, "--json"]).ok().json()["pools"], Value::Null);
    assert_eq!(part(&explain_json(&dir, &[&file]), "kept"), 0);
}

#[test]
fn deleting_a_pool_without_live_blocks_releases_its_segments() {
    let mut story = Story::default();
    block(&mut story, 1, 300, 1);
    story.free(1 << 30, 300 * MIB, 0);
    // No segment of the pool is large enough for it.
    block(&mut story, 2, 400, 2);
    ends_with(&mut story, 1, 300, false, [0, 4]);
    ends_with(&mut story, 2, 400, true, [0, 0]);
    let dir = TestDir::new();
    let file = dir.write("pool.json", story.text());
    let advice = dir.run(&["advise", &file, "--json"]).ok().json();
    let change = &advice["program_changes"][0];
    assert_eq!(
        (&change["cause"], &change["without"]["peak_reserved_bytes"]),
        (&json!("private-pools"), &json!(400 * MIB))
    );
    let screen = dir.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains("With the MemPool deleted: peak reserved 400 MiB instead of 700 MiB"), "{screen}");
}
