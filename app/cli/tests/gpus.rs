//! Files with several GPUs, and snapshots without events.

use crate::common::story::{MIB, Story};
use crate::common::{TestDir, by_path, end};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use vramlab::histories::formats::{Ending, Export, ReadOptions, read_origins};
use vramlab::output::{Existing, OutputFile};

const BASE: u64 = 1 << 40;

/// The events and final segments of one GPU.
#[derive(Default)]
struct Gpu {
    events: Vec<Value>,
    segments: Vec<Value>,
}

impl Gpu {
    fn event(&mut self, action: &str, at: u64, bytes: u64) {
        let (key, value) = if action == "oom" { ("device_free", 0) } else { ("addr", BASE + at) };
        let time = 1000 + self.events.len();
        self.events.push(json!({"action": action, key: value, "size": bytes, "stream": 0, "time_us": time}));
    }

    /// Adds a segment with one block of its size to the final snapshot.
    fn hold(&mut self, at: u64, bytes: u64, state: &str) {
        self.segments.push(json!({
            "device": 0, "address": BASE + at, "total_size": bytes, "stream": 0, "segment_type": "large",
            "is_expandable": false,
            "blocks": [{"address": BASE + at, "size": bytes, "requested_size": bytes, "state": state}],
        }));
    }

    /// This number of 30 MiB segments, each with one live block.
    fn filled(segments: u64) -> Self {
        let mut out = Self::default();
        for at in (0..segments).map(|number| number << 30) {
            out.event("segment_alloc", at, 30 * MIB);
            out.event("alloc", at, 30 * MIB);
            out.hold(at, 30 * MIB, "active_allocated");
        }
        out
    }

    /// A used 30 MiB segment, then a refused request.
    fn refused() -> Self {
        let mut out = Self::filled(1);
        out.event("oom", 0, 64 * MIB);
        out
    }
}

/// A snapshot of these GPUs.
fn snapshot(gpus: &[Gpu]) -> String {
    let segments = gpus.iter().enumerate().flat_map(|(number, gpu)| {
        gpu.segments.iter().map(move |segment| {
            let mut segment = segment.clone();
            segment["device"] = json!(number);
            segment
        })
    });
    let traces: Vec<&Vec<Value>> = gpus.iter().map(|gpu| &gpu.events).collect();
    json!({
        "segments": segments.collect::<Vec<Value>>(), "device_traces": traces, "allocator_settings": {},
    })
    .to_string()
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The data of a page of `report`.
fn page(dir: &TestDir, file: &str, more: &[&str]) -> Value {
    let arguments = ["report", file, "--plan", "off", "--advise", "off", "--alloc", "caching", "-o", "page.html"];
    dir.run(&[&arguments[..], more].concat()).ok();
    let text = std::fs::read_to_string(dir.at("page.html")).unwrap();
    let data = text.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap().to_owned();
    serde_json::from_str(&data).unwrap()
}

#[test]
fn the_gpu_that_ran_out_of_memory_is_analyzed_first() {
    let dir = TestDir::new();
    let file = dir.write("three.json", snapshot(&[Gpu::filled(2), Gpu::refused(), Gpu::filled(3)]));
    for command in ["advise", "explain"] {
        let answer = dir.run(&[command, &file, "--json"]).ok().json();
        assert_eq!((&answer["gpu"], &answer["events"]), (&json!(1), &json!(3)), "{command}");
        let others = json!([
            {"gpu": 0, "events": 4, "refused": 0, "peak_reserved_bytes": 60 * MIB, "peak_is_whole": true},
            {"gpu": 2, "events": 6, "refused": 0, "peak_reserved_bytes": 90 * MIB, "peak_is_whole": true},
        ]);
        assert_eq!(answer["other_gpus"], others, "{command}");
        let screen = dir.run(&[command, &file]).ok().stdout;
        for said in [
            "The file contains 3 GPUs. This analysis is for GPU 1, which ran out of memory.",
            "GPU 0: peak reserved 60 MiB, 4 events (--gpu 0)",
            "GPU 2: peak reserved 90 MiB, 6 events (--gpu 2)",
        ] {
            assert!(words(&screen).contains(said), "{command}, {said}: {screen}");
        }
        assert!(screen.trim_end().ends_with(" --gpu 1"), "{command}: {screen}");
    }
    let notes = page(&dir, &file, &[])["histories"][0]["notes"].to_string();
    assert!(
        notes.contains("GPU 1, which ran out of memory") && notes.contains("GPU 2: peak reserved 90 MiB"),
        "{notes}"
    );
}

#[test]
fn the_highest_peak_or_the_requested_gpu_is_analyzed_otherwise() {
    let dir = TestDir::new();
    let file = dir.write("two.json", snapshot(&[Gpu::filled(1), Gpu::filled(2)]));
    let gpu = |arguments: &[&str]| {
        let answer = dir.run(&[arguments, &[&file, "--json"]].concat()).ok().json();
        (answer["gpu"].as_u64().unwrap(), answer["events"].as_u64().unwrap())
    };
    assert_eq!((gpu(&["explain"]), gpu(&["advise"])), ((1, 4), (1, 4)));
    assert_eq!((gpu(&["explain", "--gpu", "0"]), gpu(&["advise", "--gpu", "0"])), ((0, 2), (0, 2)));
    let screen = words(&dir.run(&["explain", &file, "--gpu", "0"]).ok().stdout);
    assert!(screen.contains("This analysis is for GPU 0, chosen with --gpu. GPU 1: peak reserved 60 MiB"), "{screen}");
    // Of equal GPUs the first.
    let file = dir.write("equal.json", snapshot(&[Gpu::filled(1), Gpu::filled(1)]));
    assert_eq!(dir.run(&["explain", &file, "--json"]).ok().json()["gpu"], 0);
    // A file with one GPU does not mention GPUs.
    let file = dir.write("one.json", snapshot(&[Gpu::filled(1)]));
    for command in ["advise", "explain"] {
        let screen = dir.run(&[command, &file]).ok().stdout;
        assert!(!screen.contains("GPU 0") && !screen.contains("--gpu"), "{screen}");
    }
}

#[test]
fn a_gpu_without_events_is_listed() {
    let dir = TestDir::new();
    let mut silent = Gpu::filled(3);
    silent.events.clear();
    // It has more reserved memory than the other's peak.
    let file = dir.write("half.json", snapshot(&[Gpu::filled(2), silent]));
    let screen = words(&dir.run(&["explain", &file, "--gpu", "0"]).ok().stdout);
    assert!(screen.contains("GPU 1: 90 MiB reserved at the end, no events (--gpu 1)"), "{screen}");
    let screen = words(&dir.run(&["explain", &file]).ok().stdout);
    assert!(screen.contains("half.json, GPU 1: 90 MiB reserved in 3 segments"), "{screen}");
    dir.run(&["replay", &file]).refused(2, &["several GPUs", "GPU 1 (90 MiB reserved at the end, no events)"]);
    // Neither has events.
    let two = [14 * MIB, 40 * MIB].map(|bytes| {
        let mut gpu = Gpu::default();
        gpu.hold(0, bytes, "active_allocated");
        gpu
    });
    let file = dir.write("none.json", snapshot(&two));
    for command in ["advise", "explain"] {
        let screen = words(&dir.run(&[command, &file]).ok().stdout);
        assert!(screen.contains("none.json, GPU 1: 40 MiB reserved in 1 segment"), "{screen}");
        assert!(screen.contains("GPU 0: 14 MiB reserved at the end, no events (--gpu 0)"), "{screen}");
    }
}

#[test]
fn tables_of_several_files_name_the_gpu() {
    let dir = TestDir::new();
    let two = dir.write("two.json", snapshot(&[Gpu::filled(1), Gpu::filled(2)]));
    let one = dir.write("one.json", snapshot(&[Gpu::filled(1)]));
    for command in ["advise", "explain"] {
        let screen = dir.run(&[command, &two, &one]).ok().stdout;
        assert!(screen.contains("two.json, GPU 1") && !screen.contains("one.json, GPU"), "{command}: {screen}");
        let ranks = dir.run(&[command, &two, &one, "--json"]).ok().json();
        let ranks = ranks["ranks"].as_array().unwrap();
        let others = |rank: &Value| rank["other_gpus"].as_array().unwrap().len();
        let mut answer: Vec<usize> = ranks.iter().map(others).collect();
        answer.sort_unstable();
        assert_eq!(answer, [0, 1], "{command}");
    }
}

#[test]
fn events_are_numbered_per_gpu() {
    let dir = TestDir::new();
    let file = dir.write("three.json", snapshot(&[Gpu::filled(5), Gpu::refused()]));
    let explained = dir.run(&["explain", &file, "--json"]).ok().json();
    assert_eq!(explained["out_of_memory"][0]["event"], 3);
    let advice = dir.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!(advice["recorded"]["out_of_memory"]["event"], 3);
    let screen = dir.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains("Out of memory at event 3 of 3"), "{screen}");
    let rows = dir.run(&["replay", &file, "--gpu", "1", "--alloc", "caching", "--json"]).rows();
    assert_eq!(rows[0]["out_of_memory"][0]["event"], 3);
    let mark = &page(&dir, &file, &[])["histories"][0]["marks"][0];
    assert_eq!((&mark["kind"], &mark["start"]), (&json!("oom"), &json!(2)), "the page counts from 0");
    dir.run(&["explain", &file, "--between", "1", "9"]).refused(2, &["events are numbered 1 to 3"]);
    // Errors about contradictory events use the same numbers.
    let mut wrong = Gpu::filled(1);
    wrong.event("alloc", MIB, MIB);
    let file = dir.write("wrong.json", snapshot(&[Gpu::filled(5), wrong]));
    dir.run(&["advise", &file, "--gpu", "1"]).refused(2, &["event 3:", "overlaps"]);
    dir.run(&["convert", &file, "--to", "snapshot", "-o", "out.pickle"]).refused(2, &["event 3 of GPU 1:"]);
    // A contradiction on another GPU is ignored.
    assert_eq!(dir.run(&["advise", &file, "--json"]).ok().json()["gpu"], 0);
}

#[test]
fn commands_that_need_a_gpu_list_all_with_their_peaks() {
    let dir = TestDir::new();
    let file = dir.write("three.json", snapshot(&[Gpu::filled(1), Gpu::refused()]));
    for command in ["replay", "capacity", "plan"] {
        dir.run(&[command, &file]).refused(
            2,
            &[
                "several GPUs:",
                "GPU 0 (peak reserved 30 MiB, 2 events)",
                "GPU 1 (peak reserved 30 MiB, out of memory (1 refused request), 3 events)",
                "choose one with --gpu",
            ],
        );
    }
    for arguments in [&["replay", &file, "--alloc", "caching"][..], &["capacity", &file], &["plan", &file]] {
        let screen = dir.run(&[arguments, &["--gpu", "1"]].concat()).ok().stdout;
        assert!(end(&screen).1.contains(" --gpu 1"), "{screen}");
    }
    // The converted snapshot contains both GPUs.
    let screen = by_path(&dir, &["convert", &file, "--to", "snapshot", "-o", "out.pickle"]);
    assert!(screen.contains("5 events of 2 GPUs; nothing omitted"), "{screen}");
    assert!(screen.ends_with("out.pickle --gpu 1\n"), "{screen}");
    dir.pasted(screen, 2);
}

// `advise` and `report` on snapshots without events, as PyTorch writes them without recording.

/// A recording of the repository.
fn history(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../experiments/histories/{name}.pickle.xz"))
}

/// That recording's snapshot without its events.
fn without_events(dir: &TestDir, name: &str) -> String {
    let (summary, origins) = read_origins(&history(name), &ReadOptions::default(), &mut |_, _, _| Ok(())).unwrap();
    let out = OutputFile::create(&dir.at("held.pickle"), Existing::Refuse).unwrap();
    let ending = Ending {
        segments: &summary.segments,
        allocator_settings: Some(&summary.allocator_settings),
        devices: 1,
        origins: Some(&origins),
    };
    Export::Snapshot.begin(out).unwrap().finish(&ending).unwrap();
    "held.pickle".to_owned()
}

fn keys(value: &Value) -> BTreeSet<&String> {
    value.as_object().unwrap().keys().collect()
}

#[test]
fn advise_shows_held_memory_and_how_to_record() {
    let dir = TestDir::new();
    let file = without_events(&dir, "streams");
    let explained = dir.run(&["explain", &file]).ok().stdout;
    let advised = dir.run(&["advise", &file]).ok().stdout;
    // The screen of `explain` without its last line.
    let (same, _) = explained.split_once("\nNext: ").unwrap();
    assert!(advised.starts_with(same.trim_end()), "{advised}");
    let breakdown = "Reserved memory when the snapshot was taken: 1.56 GiB";
    for said in
        [breakdown, "Blocks that keep mostly free", "1.56 GiB reserved in 60 segments", "the snapshot has no events"]
    {
        assert!(advised.contains(said), "{said}: {advised}");
    }
    for line in [
        "\n  torch.cuda.memory._record_memory_history(context=\"alloc\", max_entries=1000000, stacks=\"python\")\n",
        "\n  torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")\n",
    ] {
        assert!(advised.contains(line), "{line}: {advised}");
    }
    for text in [&explained, &advised] {
        // Words that apply only to recordings with events.
        for never in ["peak", "first event", "deferred frees", "age: that"] {
            assert!(!text.contains(never), "{never}: {text}");
        }
    }
}

#[test]
fn advice_without_events_has_the_keys_of_any_advice() {
    let dir = TestDir::new();
    let file = without_events(&dir, "mlp");
    let held = dir.run(&["advise", &file, "--json"]).ok().json();
    let whole = dir.run(&["advise", history("mlp").to_str().unwrap(), "--conf", "", "--json"]).ok().json();
    for part in ["", "/recorded", "/unknown"] {
        assert_eq!(keys(held.pointer(part).unwrap()), keys(whole.pointer(part).unwrap()), "{part}");
    }
    assert_eq!(
        (&held["verdict"], &held["events"], &held["settings"]),
        (&json!("not-recorded"), &json!(0), &Value::Null)
    );
    assert_eq!(held["recorded"]["peak_reserved_bytes"], Value::Null);
    assert_eq!(held["unknown"]["prologue_reserved_bytes"], json!(90 << 20));
    let limited = dir.run(&["advise", &file, "--json", "--limit", "1GiB"]).ok().json();
    assert_eq!((&limited["limit_bytes"], &limited["limit_source"]), (&json!(1 << 30), &json!("given")));
}

#[test]
fn the_page_shows_segments_without_events() {
    let dir = TestDir::new();
    let file = without_events(&dir, "streams");
    let output = dir.run(&["report", &file, "-o", "page.html"]).ok();
    assert!(output.stdout.contains("1 snapshot without events"), "{}", output.stdout);
    assert!(output.stdout.contains("_record_memory_history(context=\"alloc\", max_entries="), "{}", output.stdout);
    let text = std::fs::read_to_string(dir.at("page.html")).unwrap();
    let data = text.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let shown = &data["histories"][0];
    assert_eq!((&shown["recorded"], &shown["events"]), (&json!(false), &json!(1)));
    let maps: Vec<(&Value, &Value)> =
        shown["maps"].as_array().unwrap().iter().map(|map| (&map["name"], &map["segments"])).collect();
    assert_eq!(maps, [(&json!("as recorded"), &json!(true))]);
    assert!(shown["figures"].as_array().unwrap().contains(&json!(["segments", "60"])), "{}", shown["figures"]);
    assert_eq!((&shown["settings"], &shown["lower_bound_bytes"]), (&json!([]), &Value::Null));
    // A ledger that adds up, and what pins.
    let went = &shown["answers"]["explain"]["said"]["reserved"];
    let parts: u64 = went["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(json!(parts), went["moment"]["reserved_bytes"]);
    assert_eq!(went["pinned_segments"], 4);
    assert_eq!(shown["answers"]["advise"], Value::Null);
}

#[test]
fn what_holds_nothing_either_is_refused() {
    let dir = TestDir::new();
    let file = dir.write("empty.json", json!({"segments": [], "device_traces": [[]]}).to_string());
    for command in ["advise", "explain", "report", "replay"] {
        dir.run(&[command, &file]).refused(2, &["the file has no events"]);
    }
}

#[test]
fn nothing_is_shared_out_where_some_segments_are_missing() {
    let dir = TestDir::new();
    let mut story = Story::default();
    story.segment(0, 20 * MIB, 0);
    story.alloc(0, 20 * MIB, 0, json!([]));
    // Its segment came in an event that was left out, and went before the end.
    story.alloc(1 << 30, 40 * MIB, 0, json!([]));
    story.free(1 << 30, 40 * MIB, 0);
    story.held(0, 20 * MIB, json!([0, 0]));
    let block = &mut story.segments[0]["blocks"][0];
    (block["state"], block["requested_size"]) = (json!("active_allocated"), json!(20 * MIB));
    story.segments[0]["segment_type"] = json!("large");
    let file = dir.write("some.json", story.text());
    let advice = dir.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!((&advice["saving_percent"], &advice["recorded"]["peak_reserved_bytes"]), (&Value::Null, &Value::Null));
    for command in ["advise", "explain"] {
        let screen = dir.run(&[command, &file]).ok().stdout;
        assert!(!screen.contains("more than the") && !screen.contains("(-"), "{screen}");
        let shares = screen.split(" %").filter_map(|before| before.rsplit(['(', ' ']).next()?.parse::<f64>().ok());
        assert!(shares.into_iter().all(|share| share <= 100.0), "{screen}");
    }
}
