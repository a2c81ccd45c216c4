//! Changes of the program that `advise` names, each with a replay.

use crate::common::{
    TestDir,
    story::{BASE, MIB, Story, script},
};
use serde_json::{Value, json};

fn framed(name: &str, file: &str, line: u64) -> Value {
    json!([
        {"name": name, "filename": format!("/venv/lib/python3.12/site-packages/torch/{file}"), "line": 1},
        script(line, "main"),
    ])
}

fn in_step() -> Value {
    framed("_multi_tensor_adamw", "optim/adamw.py", 9)
}

fn cast() -> Value {
    json!([{"name": "at::autocast::cached_cast(c10::ScalarType, at::Tensor const&)", "filename": "??", "line": 0}, script(4, "main")])
}

/// A block in a segment of its own, which stays.
fn block(story: &mut Story, at: u64, mib: u64, frames: Value) {
    story.segment(at << 30, mib * MIB, 0);
    story.alloc(at << 30, mib * MIB, 0, frames);
}

fn ends_with(story: &mut Story, at: u64, mib: u64, live: bool) {
    let (requested, state) = if live { (mib * MIB, "active_allocated") } else { (0, "inactive") };
    story.segments.push(json!({
        "device": 0, "address": BASE + (at << 30), "total_size": mib * MIB, "stream": 0, "segment_type": "large",
        "is_expandable": false, "segment_pool_id": [0, 0],
        "blocks": [{"address": BASE + (at << 30), "size": mib * MIB, "requested_size": requested, "state": state, "frames": []}],
    }));
}

fn change<'a>(advice: &'a Value, cause: &str) -> &'a Value {
    let changes = advice["program_changes"].as_array().unwrap();
    changes.iter().find(|change| change["cause"] == cause).unwrap_or_else(|| panic!("no {cause}: {advice}"))
}

/// 200 MiB of weights, and a step with two temporaries of 100 MiB each and 30 MiB of state. With `fails`, the second temporary does
/// not fit.
fn step(fails: bool) -> Story {
    let mut story = Story::default();
    block(&mut story, 1, 200, json!([script(1, "main")]));
    block(&mut story, 2, 100, in_step());
    ends_with(&mut story, 1, 200, true);
    if fails {
        story.event("oom", 50 * MIB, 100 * MIB, 0, in_step());
        ends_with(&mut story, 2, 100, true);
        return story;
    }
    block(&mut story, 3, 30, framed("_init_group", "optim/adamw.py", 9));
    block(&mut story, 4, 100, in_step());
    story.free(2 << 30, 100 * MIB, 0);
    story.free(4 << 30, 100 * MIB, 0);
    block(&mut story, 5, 20, json!([script(12, "main")]));
    for (at, mib, live) in [(2, 100, false), (3, 30, true), (4, 100, false), (5, 20, true)] {
        ends_with(&mut story, at, mib, live);
    }
    story
}

#[test]
fn temporaries_of_optimizers_are_a_change_of_the_program() {
    let test_dir = TestDir::new();
    let file = test_dir.write("step.json", step(false).text());
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    let found = change(&advice, "optimizer-temporaries");
    assert_eq!((&found["times"], &found["bytes"]), (&json!(2), &json!(200 * MIB)), "{found}");
    // The state stays.
    assert_eq!(found["without"]["peak_reserved_bytes"], 250 * MIB, "{found}");
    assert_eq!(found["lines"], json!([{"line": "proj/train.py:9 main", "times": 2}]));
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    let (change, settings) = (screen.find("Program changes").unwrap(), screen.find("What would help").unwrap());
    assert!(change < settings, "it saves most: {screen}");
    // With foreach=False one of the two tensors of the list is left.
    let lists = self::change(&advice, "optimizer-lists");
    assert_eq!((&lists["times"], &lists["without"]["peak_reserved_bytes"]), (&json!(1), &json!(330 * MIB)), "{lists}");
    let (fused, lists) = (screen.find("With fused=True").unwrap(), screen.find("With foreach=False").unwrap());
    assert!(fused < lists, "it saves more: {screen}");
}

#[test]
fn optimizers_without_a_fused_step_get_foreach_alone() {
    let mut story = step(false);
    for event in &mut story.events {
        let frames = event["frames"].as_array_mut().unwrap();
        for frame in frames.iter_mut().filter(|frame| frame["filename"].as_str().unwrap().ends_with("adamw.py")) {
            frame["filename"] = json!("/venv/lib/python3.12/site-packages/torch/optim/rmsprop.py");
        }
    }
    let test_dir = TestDir::new();
    let file = test_dir.write("step.json", story.text());
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains("With foreach=False") && !screen.contains("fused=True"), "{screen}");
}

#[test]
fn failed_step_succeeds_without_its_temporaries() {
    let test_dir = TestDir::new();
    let file = test_dir.write("oom.json", step(true).text());
    let arguments = ["advise", &file, "--limit", "350MiB"];
    let advice = test_dir.run(&[&arguments[..], &["--json"]].concat()).ok().json();
    assert_eq!(advice["verdict"], "out-of-memory", "{advice}");
    let found = change(&advice, "optimizer-temporaries");
    assert_eq!(
        (&found["without"]["out_of_memory"], &found["without"]["peak_reserved_bytes"]),
        (&json!(false), &json!(200 * MIB))
    );
    let screen = test_dir.run(&arguments).ok().stdout;
    assert!(screen.contains("With fused=True: no out-of-memory, peak reserved 200 MiB"), "{screen}");
}

#[test]
fn copies_that_autocast_caches_are_a_change_of_the_program() {
    let mut story = Story::default();
    block(&mut story, 1, 200, json!([script(1, "main")]));
    block(&mut story, 2, 100, cast());
    // Results of two operators show that the copy is cached.
    block(&mut story, 3, 20, json!([script(5, "main")]));
    block(&mut story, 4, 20, json!([script(6, "main")]));
    story.free(2 << 30, 100 * MIB, 0);
    for (at, mib, live) in [(1, 200, true), (2, 100, false), (3, 20, true), (4, 20, true)] {
        ends_with(&mut story, at, mib, live);
    }
    let test_dir = TestDir::new();
    let file = test_dir.write("cast.json", story.text());
    let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
    let found = change(&advice, "autocast-copies");
    assert_eq!((&found["times"], &found["without"]["peak_reserved_bytes"]), (&json!(1), &json!(240 * MIB)), "{found}");
    let screen = test_dir.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains("model.to(torch.bfloat16)"), "{screen}");
}

#[test]
fn advice_for_a_mempool_with_live_blocks_can_be_followed() {
    let test_dir = TestDir::new();
    for (live, cause, words) in
        [(false, "private-pools", "Delete the MemPool"), (true, "live-private-pools", "outside of the MemPool")]
    {
        let mut story = Story::default();
        block(&mut story, 1, 100, json!([script(1, "load")]));
        block(&mut story, 2, 60, json!([script(2, "load")]));
        story.free(1 << 30, 100 * MIB, 0);
        block(&mut story, 3, 40, json!([script(3, "load")]));
        for (at, mib, is_live, pool) in [(1, 100, false, 1), (2, 60, true, u64::from(live)), (3, 40, true, 0)] {
            ends_with(&mut story, at, mib, is_live);
            story.segments.last_mut().unwrap()["segment_pool_id"] = json!([0, pool]);
        }
        let file = test_dir.write("pool.json", story.text());
        let advice = test_dir.run(&["advise", &file, "--json"]).ok().json();
        assert_eq!(change(&advice, cause)["bytes"], 100 * MIB, "{advice}");
        let screen = test_dir.run(&["advise", &file]).ok().stdout;
        assert!(screen.contains(words), "{words}: {screen}");
    }
}

#[test]
fn the_page_names_the_changes() {
    let test_dir = TestDir::new();
    let file = test_dir.write("step.json", step(false).text());
    test_dir.run(&["report", &file, "-o", "page.html"]).ok();
    let page = std::fs::read_to_string(test_dir.at("page.html")).unwrap();
    assert!(
        page.contains("With fused=True: peak reserved 250 MiB") && page.contains("Program changes"),
        "{}",
        page.len()
    );
}
