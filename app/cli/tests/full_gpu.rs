//! `advise` infers that a GPU or a limit was full although no request was refused.

use crate::common::TestDir;
use serde_json::{Value, json};
use std::path::Path;

const MIB: u64 = 1 << 20;

/// Recorded by `fixtures/full.py` on an H200 under a limit of 900 MiB. PyTorch released its cache twice in the backward pass; only C++
/// stacks show that.
#[test]
fn a_full_gpu_is_inferred_from_the_stacks_of_releases() {
    let dir = TestDir::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/full.pickle.xz");
    let file = file.to_str().unwrap();
    let advice = dir.run(&["advise", file, "--json"]).ok().json();
    assert_eq!(advice["limit_source"], "retries", "{advice}");
    let (least, most) = (&advice["limit_bytes"], &advice["released"]["limit_most_bytes"]);
    assert!(least.as_u64() <= Some(900 * MIB) && most.as_u64() >= Some(900 * MIB), "{least} to {most}");
    // A replay under that limit releases its cache as often as recorded.
    let replayed = &advice["recorded"]["replayed"];
    assert_eq!((&replayed["num_alloc_retries"], &replayed["out_of_memory"]), (&json!(2), &json!(false)), "{replayed}");
    assert_eq!(advice["evidence"]["compared"]["same"], true, "{advice}");
    let screen = dir.run(&["advise", file]).ok().stdout;
    assert!(
        screen.contains("PyTorch emptied its cache") && screen.contains("Inferred memory limit: 874 MiB"),
        "{screen}"
    );
    // A limit that is given says what there is.
    let given = dir.run(&["advise", file, "--limit", "2GiB", "--json"]).ok().json();
    assert_eq!((&given["limit_source"], &given["released"]), (&json!("given"), &Value::Null));
}

/// The same recording with only Python frames, which the backward pass lacks. This project's recorder stores the frames of
/// `empty_cache`; PyTorch with `context="alloc"` stores those of the segment's allocation.
#[test]
fn a_full_gpu_is_inferred_without_frames_of_frees() {
    let dir = TestDir::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/full.pickle.xz");
    let json = dir.at("full.json").to_str().unwrap().to_owned();
    dir.run(&["convert", file.to_str().unwrap(), "--to", "snapshot-json", "-o", &json]).ok();
    let whole: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let recorded = |exact: bool| {
        let mut snapshot = whole.clone();
        if exact {
            snapshot["recorder"] = json!("vramlab");
        }
        let mut allocations = std::collections::HashMap::new();
        for event in snapshot["device_traces"][0].as_array_mut().unwrap() {
            let (action, addr) = (event["action"].as_str().unwrap().to_owned(), event["addr"].as_u64());
            let frames = event["frames"].as_array_mut().unwrap();
            frames.retain(|frame| !action.starts_with("free") && frame["filename"].as_str().unwrap().ends_with(".py"));
            match action.as_str() {
                "segment_alloc" => _ = allocations.insert(addr, frames.clone()),
                "segment_free" if !exact && frames.iter().any(|frame| frame["name"] == "empty_cache") => {
                    frames.clone_from(&allocations[&addr]);
                }
                _ => {}
            }
        }
        dir.write("recorded.json", snapshot.to_string())
    };
    let recorder = dir.run(&["advise", &recorded(true), "--json"]).ok().json();
    assert_eq!(
        (&recorder["limit_source"], &recorder["released"]["times"]),
        (&json!("retries"), &json!(2)),
        "{recorder}"
    );
    let pytorch = dir.run(&["advise", &recorded(false), "--json"]).ok().json();
    assert_eq!(pytorch["limit_source"], recorder["limit_source"], "{pytorch}");
    let explained = dir.run(&["explain", &recorded(false), "--json"]).ok().json();
    assert!(explained["num_releases"].as_u64() >= Some(1), "{}", explained["num_releases"]);
}
