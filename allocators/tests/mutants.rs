//! The list of mutants that `mutants/run.py` applies fits the sources.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use serde_json::Value;
use std::path::Path;

#[test]
fn every_mutant_changes_one_place_that_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let list = std::fs::read_to_string(root.join("mutants/mutants.json")).unwrap();
    let list: Vec<Value> = serde_json::from_str(&list).unwrap();
    assert!(!list.is_empty());
    for mutant in &list {
        let text = |key: &str| mutant[key].as_str().unwrap_or_else(|| panic!("no {key} in {mutant}"));
        let source = std::fs::read_to_string(root.join(text("file"))).unwrap();
        assert_eq!(source.matches(text("find")).count(), 1, "{}: {}", text("file"), text("name"));
        assert_ne!(text("find"), text("replace"));
        let tests = mutant["tests"].as_array().unwrap();
        assert!(!tests.is_empty(), "{}", text("name"));
        for test in tests.iter().filter_map(Value::as_str).flat_map(|words| words.split("--test ").skip(1)) {
            let name = test.split_whitespace().next().unwrap();
            assert!(root.join(format!("tests/{name}.rs")).exists(), "no tests/{name}.rs");
        }
    }
}
