//! What `advise` infers of a GPU, or a limit, that was full although no request was refused.

use crate::common::Place;
use serde_json::{Value, json};
use std::path::Path;

const MIB: u64 = 1 << 20;

/// Recorded by `fixtures/full.py` on an H200 under a limit of 900 MiB, at which PyTorch released its cache twice, in the backward
/// pass: only stacks with C++ show that.
#[test]
fn a_full_gpu_is_told_from_the_stacks_of_what_went_back() {
    let place = Place::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/full.pickle.xz");
    let file = file.to_str().unwrap();
    let advice = place.run(&["advise", file, "--json"]).ok().json();
    assert_eq!(advice["limit_source"], "retries", "{advice}");
    let (least, most) = (&advice["limit_bytes"], &advice["released"]["limit_most_bytes"]);
    assert!(least.as_u64() <= Some(900 * MIB) && most.as_u64() >= Some(900 * MIB), "{least} to {most}");
    // Replayed under that, what ran releases its cache as it did.
    let replayed = &advice["recorded"]["replayed"];
    assert_eq!((&replayed["num_alloc_retries"], &replayed["out_of_memory"]), (&json!(2), &json!(false)), "{replayed}");
    assert_eq!(advice["evidence"]["compared"]["same"], true, "{advice}");
    let screen = place.run(&["advise", file]).ok().stdout;
    assert!(screen.contains("Memory was full") && screen.contains("there was room for 874 MiB to "), "{screen}");
    // A limit that is given says what there is.
    let given = place.run(&["advise", file, "--limit", "2GiB", "--json"]).ok().json();
    assert_eq!((&given["limit_source"], &given["released"]), (&json!("given"), &Value::Null));
}

/// The same recording as others would have written it, with frames of Python only: nothing in the backward pass has any. This project's
/// recorder has those of `empty_cache`. Under PyTorch's `context="alloc"` what `empty_cache` releases has those of its birth.
#[test]
fn a_full_gpu_is_told_without_frames_of_frees() {
    let place = Place::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/full.pickle.xz");
    let json = place.at("full.json").to_str().unwrap().to_owned();
    place.run(&["convert", file.to_str().unwrap(), "--to", "snapshot-json", "-o", &json]).ok();
    let whole: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let recorded = |own: bool| {
        let mut snapshot = whole.clone();
        if own {
            snapshot["recorder"] = json!("vramlab");
        }
        let mut births = std::collections::HashMap::new();
        for event in snapshot["device_traces"][0].as_array_mut().unwrap() {
            let (action, addr) = (event["action"].as_str().unwrap().to_owned(), event["addr"].as_u64());
            let frames = event["frames"].as_array_mut().unwrap();
            frames.retain(|frame| !action.starts_with("free") && frame["filename"].as_str().unwrap().ends_with(".py"));
            match action.as_str() {
                "segment_alloc" => _ = births.insert(addr, frames.clone()),
                "segment_free" if !own && frames.iter().any(|frame| frame["name"] == "empty_cache") => {
                    frames.clone_from(&births[&addr]);
                }
                _ => {}
            }
        }
        place.write("recorded.json", snapshot.to_string())
    };
    let own = place.run(&["advise", &recorded(true), "--json"]).ok().json();
    assert_eq!((&own["limit_source"], &own["released"]["times"]), (&json!("retries"), &json!(2)), "{own}");
    let theirs = place.run(&["advise", &recorded(false), "--json"]).ok().json();
    assert_eq!(theirs["limit_source"], own["limit_source"], "{theirs}");
    let explained = place.run(&["explain", &recorded(false), "--json"]).ok().json();
    assert!(explained["num_releases"].as_u64() >= Some(1), "{}", explained["num_releases"]);
}
