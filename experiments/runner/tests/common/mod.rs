//! Shared code of the program's tests: a small spec, and the output of its runs.

#[allow(dead_code, reason = "the tests of `vramlab` use all of it")]
#[path = "../../../../app/cli/tests/common/test_dir.rs"]
mod test_dir;

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
pub(crate) use test_dir::*;

/// A small spec on iris: two allocators, two widths.
pub(crate) const SMALL: &str = r#"
name = "small"
question = "Is it there?"
repeats = 2
devices = ["cuda", "sim"]
keep = ["summary.json", "steps.csv"]

[options]
dataset = "iris"
layers = 2
epochs = 2

[matrix]
alloc = ["naive", "caching"]
hidden = [5, 9]
"#;

pub(crate) fn run(test_dir: &TestDir, more: &[&str]) -> Ran {
    test_dir.run(&[&["run", "small.toml", "--device", "sim", "-o", "out"], more].concat())
}

pub(crate) fn json_at(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// Each run's directory with the text of its `run.json`.
pub(crate) fn runs(test_dir: &TestDir, out: &str) -> BTreeMap<String, String> {
    let folder = test_dir.at(out).join("small/runs");
    let read = |name: String| (name.clone(), std::fs::read_to_string(folder.join(name).join("run.json")).unwrap());
    names(&folder).into_iter().map(read).collect()
}

/// The ids of a spec with eight runs.
pub(crate) const IDS: [&str; 8] = [
    "00-naive-5-r0",
    "01-naive-5-r1",
    "02-naive-9-r0",
    "03-naive-9-r1",
    "04-caching-5-r0",
    "05-caching-5-r1",
    "06-caching-9-r0",
    "07-caching-9-r1",
];
