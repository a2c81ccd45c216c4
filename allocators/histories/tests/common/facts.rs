//! PyTorch's statistics of a program when its recording was taken.

use serde_json::Value;
use std::path::Path;

/// The statistics of a recording: in a file of its name next to it, or under its name in `recorded.json`.
pub(crate) fn facts(history: &Path) -> Option<Value> {
    let stem = history.file_name()?.to_str()?.strip_suffix(".pickle.xz")?;
    let read = |name: &str| -> Option<Value> {
        let text = std::fs::read_to_string(history.with_file_name(name)).ok()?;
        Some(serde_json::from_str(&text).unwrap())
    };
    let names = [stem.to_owned(), format!("{stem}.default")];
    names.iter().find_map(|name| read(&format!("{name}.json"))).or_else(|| {
        let all = read("recorded.json")?;
        names.iter().find_map(|name| all.get(name).cloned())
    })
}

/// The memory limit in bytes. PyTorch gets it as a share of the memory and truncates the result to bytes.
#[allow(dead_code, reason = "not every test needs it")]
pub(crate) fn limit(facts: &Value) -> Option<u64> {
    let mib = facts["limit_mib"].as_f64().filter(|mib| *mib > 0.0)?;
    let total = facts["total_memory"].as_f64().unwrap();
    Some((mib * f64::from(1 << 20) / total * total) as u64)
}
