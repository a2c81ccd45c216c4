//! Stacks that are deeper, and names that are longer, than those of real programs.

use crate::common::TestDir;
use serde_json::{Value, json};

/// A snapshot of allocations that are never freed, each with its stack.
fn snapshot(stacks: &[Vec<Value>]) -> String {
    let event = |(at, frames): (u64, &Vec<Value>)| {
        let (addr, size) = (0x7f00_0000_0000_u64 + (at << 22), 2 << 20);
        let event = |action: &str| json!({"action": action, "addr": addr, "size": size, "stream": 0, "time_us": at, "frames": frames});
        [event("segment_alloc"), event("alloc")]
    };
    let events: Vec<Value> = (0..).zip(stacks).flat_map(event).collect();
    json!({"segments": [], "device_traces": [events]}).to_string()
}

fn frame(name: String, line: usize) -> Value {
    json!({"filename": "/home/me/train.py", "name": name, "line": line})
}

/// Depth of a tree, and number of its nodes.
fn depth_and_count(node: &Value) -> (usize, usize) {
    let below = node["children"].as_array().unwrap().iter().map(depth_and_count);
    below.fold((1, 1), |(depth, count), (deeper, more)| (depth.max(deeper + 1), count + more))
}

fn sum(nodes: &Value, key: &str) -> u64 {
    nodes.as_array().unwrap().iter().map(|node| node[key].as_u64().unwrap()).sum()
}

#[test]
fn stack_of_12000_frames_is_shown_without_its_middle() {
    let test_dir = TestDir::new();
    let deep: Vec<Value> = (0..12_000).map(|line| frame(format!("f{line}"), line)).collect();
    let text = snapshot(&[deep]);
    let file = test_dir.write("deep.json", &text);
    let output = test_dir.run(&["explain", &file, "--json"]).ok().stdout;
    assert!(output.len() < text.len(), "{} bytes of {}", output.len(), text.len());
    let explained: Value = serde_json::from_str(&output).unwrap();
    let tree = &explained["who"][0]["tree"];
    let (depth, _) = depth_and_count(tree);
    assert!((50..64).contains(&depth), "{depth}");
    // The outermost and innermost frames are shown, and those in between are counted.
    let shown = tree.to_string();
    assert!(shown.contains("train.py:11999 f11999") && shown.contains("train.py:1 f1"), "{shown}");
    assert!(shown.contains("11945 calls in between"), "{shown}");
    test_dir.run(&["explain", &file]).ok();
    test_dir.run(&["advise", &file]).ok();
    test_dir.run(&["report", &file, "-o", "report.html"]).ok();
    assert!(std::fs::metadata(test_dir.at("report.html")).unwrap().len() < 16 << 20);
}

#[test]
fn many_calls_are_shown_as_the_largest_and_a_sum() {
    let test_dir = TestDir::new();
    let stack = |number: usize| (1..51).map(|line| frame(format!("f{number}_{line}"), line)).rev().collect();
    let stacks: Vec<Vec<Value>> = (0..200).map(stack).collect();
    let file = test_dir.write("many.json", snapshot(&stacks));
    let explained: Value = serde_json::from_str(&test_dir.run(&["explain", &file, "--json"]).ok().stdout).unwrap();
    let tree = &explained["who"][0]["tree"];
    let (_, count) = depth_and_count(tree);
    assert!((4000..8200).contains(&count), "{count} of 10,000");
    assert_eq!((sum(&tree["children"], "bytes"), sum(&tree["children"], "blocks")), (200 * (2 << 20), 200));
    assert!(tree.to_string().contains("smaller …"), "{tree}");
}

#[test]
fn name_of_200_kib_is_truncated() {
    let test_dir = TestDir::new();
    let long = |letter: &str| format!("{}\u{1b}[31m", letter.repeat(200 << 10));
    let stack = vec![json!({"filename": format!("/{}.py", long("p")), "name": long("n"), "line": 7})];
    let mut text: Value = serde_json::from_str(&snapshot(&[stack])).unwrap();
    text["external_annotations"] = json!([{"name": long("a"), "device": 0, "stage": "START", "time_us": 0}]);
    let file = test_dir.write("long.json", text.to_string());
    for arguments in [&["explain", &file][..], &["explain", &file, "--json"], &["advise", &file]] {
        let output = test_dir.run(arguments).ok();
        assert!(output.stdout.len() < 100 << 10, "{arguments:?}: {} bytes", output.stdout.len());
        assert!(!output.stdout.contains('\u{1b}'), "{arguments:?}");
    }
    test_dir.run(&["report", &file, "-o", "report.html"]).ok();
    assert!(std::fs::metadata(test_dir.at("report.html")).unwrap().len() < 1 << 20);
}
