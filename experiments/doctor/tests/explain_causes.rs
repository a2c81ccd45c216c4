//! Causes that `explain` names only where the history can show them.
// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use common::explained::{agrees, explain, found, part};
use common::story::{BASE, MIB, Story, script};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

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

// `explain` on recorded histories, on a run of the trainer, and on a large file.
/// A snapshot as Python's pickler writes it (protocol 4): strings and containers are entered in the memo, and frames are
/// shared; each event has a list of frames of its own.
fn pickled(events: u32) -> Vec<u8> {
    let mut out = b"\x80\x04\x95\0\0\0\0\0\0\0\0}\x94(".to_vec();
    let mut entered = 1_u32;
    let mut texts: Vec<(&str, u32)> = Vec::new();
    let mut text =
        |out: &mut Vec<u8>, entered: &mut u32, text: &'static str| match texts.iter().find(|(known, _)| *known == text)
        {
            Some((_, number)) => out.extend([&b"j"[..], &number.to_le_bytes()].concat()),
            None => {
                out.extend([&[0x8c, text.len() as u8][..], text.as_bytes(), &[0x94]].concat());
                texts.push((text, *entered));
                *entered += 1;
            }
        };
    let open = |out: &mut Vec<u8>, entered: &mut u32, what: u8| {
        out.extend([what, 0x94, b'(']);
        *entered += 1;
    };
    text(&mut out, &mut entered, "segments");
    out.extend(b"]\x94");
    entered += 1;
    text(&mut out, &mut entered, "device_traces");
    open(&mut out, &mut entered, b']');
    open(&mut out, &mut entered, b']');
    let mut frame = None;
    for number in 0..events {
        let action =
            if number % 3 == 0 { "alloc" } else { ["free_requested", "free_completed"][number as usize % 3 - 1] };
        open(&mut out, &mut entered, b'}');
        text(&mut out, &mut entered, "action");
        text(&mut out, &mut entered, action);
        let long = |value: u64| [&[0x8a, 8][..], &value.to_le_bytes()].concat();
        let values = [
            ("addr", long(BASE)),
            ("size", b"J\0\0\x20\0".to_vec()),
            ("stream", b"K\0".to_vec()),
            ("time_us", long(number.into())),
        ];
        for (key, value) in values {
            text(&mut out, &mut entered, key);
            out.extend(value);
        }
        text(&mut out, &mut entered, "frames");
        open(&mut out, &mut entered, b']');
        if let Some(frame) = frame {
            out.extend([&b"j"[..], &u32::to_le_bytes(frame)].concat());
        } else {
            frame = Some(entered);
            open(&mut out, &mut entered, b'}');
            for (key, value) in [("name", "step"), ("filename", "/home/me/train.py")] {
                text(&mut out, &mut entered, key);
                text(&mut out, &mut entered, value);
            }
            text(&mut out, &mut entered, "line");
            out.extend(b"K\x07u");
        }
        out.extend(b"eu");
        // Lists come in batches.
        if number % 1000 == 999 {
            out.extend(b"e(");
        }
    }
    out.extend(b"eeu.");
    out
}

#[test]
fn reading_takes_less_memory_than_the_file_has_bytes() {
    let place = Place::new();
    let snapshot = pickled(300_000);
    let file = place.at("large.pickle");
    std::fs::write(&file, &snapshot).unwrap();
    let file = file.to_str().unwrap();
    let within = |bytes: usize| explain(&place, &[file, "--json", "--read-memory", &format!("{bytes}B")]);
    let found: Value = serde_json::from_str(&within(snapshot.len()).ok().stdout).unwrap();
    assert_eq!(
        (&found["events"], &found["who"][0]["lines"][0]["line"]),
        (&json!(300_000), &json!("me/train.py:7 step"))
    );
    within(snapshot.len() / 4).refused(2, &["large.pickle", "of memory to read, and the limit is", "--read-memory"]);
}

#[test]
fn the_ledger_of_recorded_programs_is_that_of_the_replay() {
    let place = Place::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../allocators/tests/fixtures");
    for name in ["resnet50.roundup8", "resnet50.split32"] {
        agrees(&place, fixtures.join(format!("{name}.pickle.xz")).to_str().unwrap());
    }
}

/// A recorded history that is not in the repository.
fn recorded(name: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/traces/configs");
    let path = folder.join(format!("{name}.pickle.xz"));
    if !path.exists() {
        println!("skipped: {} is not here", path.display());
    }
    path.exists().then_some(path)
}

#[test]
fn recorded_programs_are_explained() {
    let place = Place::new();
    if let Some(path) = recorded("gpt2.frames") {
        let path = path.to_str().unwrap();
        agrees(&place, path);
        let found = found(&place, &[path]);
        let lines = found["who"][0]["lines"].as_array().unwrap();
        assert!(lines.iter().take(5).all(|row| row["line"].as_str().unwrap().starts_with("train.py:")), "{lines:?}");
        assert!(found["annotations"].as_u64() > Some(0));
        let screen = explain(&place, &[path]).ok().stdout;
        assert!(screen.contains("eager_attention_forward"), "{screen}");
    }
    for name in ["gpt2_fsdp1.rank0", "gpt2_ddp.rank0", "streams.split32"] {
        if let Some(path) = recorded(name) {
            agrees(&place, path.to_str().unwrap());
        }
    }
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../allocators/tests/fixtures");
    let found = found(&place, &[fixtures.join("resnet50.gcsplit.pickle.xz").to_str().unwrap()]);
    let last = found["out_of_memory"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["asked_bytes"], &last["reserved_bytes"]), (&json!(28 * MIB), &json!(6_283_067_392_u64)));
    assert_eq!(last["cause"], "pieces");
    // PyTorch counted five segments that went back.
    let kinds: Vec<&Value> = found["retries"].as_array().unwrap().iter().map(|retry| &retry["kind"]).collect();
    assert_eq!(kinds, ["garbage_collection"; 5]);
}
