//! What a file may hold besides one GPU with events: several GPUs, and snapshots without events.

use crate::common::story::{MIB, Story};
use crate::common::{Place, by_path, end};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use vramlab::histories::formats::{Ending, Export, ReadOptions, read_origins};
use vramlab::output::{Existing, OutputFile};

const BASE: u64 = 1 << 40;

/// The events of one GPU, and what it holds at the end.
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

    /// A segment that is held to the end, with a block of all of it where there is one.
    fn hold(&mut self, at: u64, bytes: u64, state: &str) {
        self.segments.push(json!({
            "device": 0, "address": BASE + at, "total_size": bytes, "stream": 0, "segment_type": "large",
            "is_expandable": false,
            "blocks": [{"address": BASE + at, "size": bytes, "requested_size": bytes, "state": state}],
        }));
    }

    /// So many segments of 30 MiB, one behind the other, each with one block that stays.
    fn filled(segments: u64) -> Self {
        let mut out = Self::default();
        for at in (0..segments).map(|number| number << 30) {
            out.event("segment_alloc", at, 30 * MIB);
            out.event("alloc", at, 30 * MIB);
            out.hold(at, 30 * MIB, "active_allocated");
        }
        out
    }

    /// A segment of 30 MiB that is used and stays, then a request that is refused.
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
fn page(place: &Place, file: &str, more: &[&str]) -> Value {
    let arguments = ["report", file, "--plan", "off", "--advise", "off", "--alloc", "caching", "-o", "page.html"];
    place.run(&[&arguments[..], more].concat()).ok();
    let text = std::fs::read_to_string(place.at("page.html")).unwrap();
    let data = text.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap().to_owned();
    serde_json::from_str(&data).unwrap()
}

#[test]
fn the_gpu_that_ran_out_is_answered_though_others_reserved_more() {
    let place = Place::new();
    let file = place.write("three.json", snapshot(&[Gpu::filled(2), Gpu::refused(), Gpu::filled(3)]));
    for command in ["advise", "explain"] {
        let found = place.run(&[command, &file, "--json"]).ok().json();
        assert_eq!((&found["gpu"], &found["events"]), (&json!(1), &json!(3)), "{command}");
        let others = json!([
            {"gpu": 0, "events": 4, "refused": 0, "peak_reserved_bytes": 60 * MIB, "peak_is_whole": true},
            {"gpu": 2, "events": 6, "refused": 0, "peak_reserved_bytes": 90 * MIB, "peak_is_whole": true},
        ]);
        assert_eq!(found["other_gpus"], others, "{command}");
        let screen = place.run(&[command, &file]).ok().stdout;
        for said in [
            "The file holds 3 GPUs. This is about GPU 1, which ran out of memory.",
            "GPU 0: at most 60 MiB reserved, 4 events (--gpu 0)",
            "GPU 2: at most 90 MiB reserved, 6 events (--gpu 2)",
        ] {
            assert!(words(&screen).contains(said), "{command}, {said}: {screen}");
        }
        assert!(screen.trim_end().ends_with(" --gpu 1"), "{command}: {screen}");
    }
    let notes = page(&place, &file, &[])["histories"][0]["notes"].to_string();
    assert!(notes.contains("GPU 1, which ran out of memory") && notes.contains("GPU 2: at most 90 MiB"), "{notes}");
}

#[test]
fn else_the_one_that_reserved_most_or_the_one_that_is_asked_for() {
    let place = Place::new();
    let file = place.write("two.json", snapshot(&[Gpu::filled(1), Gpu::filled(2)]));
    let gpu = |arguments: &[&str]| {
        let found = place.run(&[arguments, &[&file, "--json"]].concat()).ok().json();
        (found["gpu"].as_u64().unwrap(), found["events"].as_u64().unwrap())
    };
    assert_eq!((gpu(&["explain"]), gpu(&["advise"])), ((1, 4), (1, 4)));
    assert_eq!((gpu(&["explain", "--gpu", "0"]), gpu(&["advise", "--gpu", "0"])), ((0, 2), (0, 2)));
    let screen = words(&place.run(&["explain", &file, "--gpu", "0"]).ok().stdout);
    assert!(screen.contains("This is about GPU 0, which --gpu names. GPU 1: at most 60 MiB reserved"), "{screen}");
    // Of equals the first.
    let file = place.write("equal.json", snapshot(&[Gpu::filled(1), Gpu::filled(1)]));
    assert_eq!(place.run(&["explain", &file, "--json"]).ok().json()["gpu"], 0);
    // One GPU is not spoken of.
    let file = place.write("one.json", snapshot(&[Gpu::filled(1)]));
    for command in ["advise", "explain"] {
        let screen = place.run(&[command, &file]).ok().stdout;
        assert!(!screen.contains("GPU 0") && !screen.contains("--gpu"), "{screen}");
    }
}

#[test]
fn a_gpu_without_events_is_not_dropped() {
    let place = Place::new();
    let mut silent = Gpu::filled(3);
    silent.events.clear();
    // It holds more than the other ever did.
    let file = place.write("half.json", snapshot(&[Gpu::filled(2), silent]));
    let screen = words(&place.run(&["explain", &file, "--gpu", "0"]).ok().stdout);
    assert!(screen.contains("GPU 1: 90 MiB reserved at the end, no events (--gpu 1)"), "{screen}");
    let screen = words(&place.run(&["explain", &file]).ok().stdout);
    assert!(screen.contains("half.json, GPU 1: 90 MiB reserved in 3 segments"), "{screen}");
    place
        .run(&["replay", &file])
        .refused(2, &["it holds several GPUs", "GPU 1 (90 MiB reserved at the end, no events)"]);
    // Neither has events.
    let two = [14 * MIB, 40 * MIB].map(|bytes| {
        let mut gpu = Gpu::default();
        gpu.hold(0, bytes, "active_allocated");
        gpu
    });
    let file = place.write("none.json", snapshot(&two));
    for command in ["advise", "explain"] {
        let screen = words(&place.run(&[command, &file]).ok().stdout);
        assert!(screen.contains("none.json, GPU 1: 40 MiB reserved in 1 segment"), "{screen}");
        assert!(screen.contains("GPU 0: 14 MiB reserved at the end, no events (--gpu 0)"), "{screen}");
    }
}

#[test]
fn tables_of_several_files_name_the_gpu() {
    let place = Place::new();
    let two = place.write("two.json", snapshot(&[Gpu::filled(1), Gpu::filled(2)]));
    let one = place.write("one.json", snapshot(&[Gpu::filled(1)]));
    for command in ["advise", "explain"] {
        let screen = place.run(&[command, &two, &one]).ok().stdout;
        assert!(screen.contains("two.json, GPU 1") && !screen.contains("one.json, GPU"), "{command}: {screen}");
        let ranks = place.run(&[command, &two, &one, "--json"]).ok().json();
        let ranks = ranks["ranks"].as_array().unwrap();
        let others = |rank: &Value| rank["other_gpus"].as_array().unwrap().len();
        let mut found: Vec<usize> = ranks.iter().map(others).collect();
        found.sort_unstable();
        assert_eq!(found, [0, 1], "{command}");
    }
}

#[test]
fn events_are_counted_as_each_gpu_s_own_list_counts_them() {
    let place = Place::new();
    let file = place.write("three.json", snapshot(&[Gpu::filled(5), Gpu::refused()]));
    let explained = place.run(&["explain", &file, "--json"]).ok().json();
    assert_eq!(explained["out_of_memory"][0]["event"], 3);
    let advice = place.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!(advice["recorded"]["out_of_memory"]["event"], 3);
    let screen = place.run(&["advise", &file]).ok().stdout;
    assert!(screen.contains("Out of memory at event 3 of 3"), "{screen}");
    let rows = place.run(&["replay", &file, "--gpu", "1", "--alloc", "caching", "--json"]).rows();
    assert_eq!(rows[0]["out_of_memory"][0]["event"], 3);
    let mark = &page(&place, &file, &[])["histories"][0]["marks"][0];
    assert_eq!((&mark["kind"], &mark["start"]), (&json!("oom"), &json!(2)), "the page counts from 0");
    place.run(&["explain", &file, "--between", "1", "9"]).refused(2, &["the events have the numbers 1 to 3"]);
    // So is what contradicts the events before it.
    let mut wrong = Gpu::filled(1);
    wrong.event("alloc", MIB, MIB);
    let file = place.write("wrong.json", snapshot(&[Gpu::filled(5), wrong]));
    place.run(&["advise", &file, "--gpu", "1"]).refused(2, &["event 3:", "overlaps"]);
    place.run(&["convert", &file, "--to", "snapshot", "-o", "out.pickle"]).refused(2, &["event 3 of GPU 1:"]);
    // It is another GPU's and does not matter.
    assert_eq!(place.run(&["advise", &file, "--json"]).ok().json()["gpu"], 0);
}

#[test]
fn commands_that_choose_no_gpu_name_them_with_their_peaks() {
    let place = Place::new();
    let file = place.write("three.json", snapshot(&[Gpu::filled(1), Gpu::refused()]));
    for command in ["replay", "capacity", "plan"] {
        place.run(&[command, &file]).refused(
            2,
            &[
                "three.json: it holds several GPUs:",
                "GPU 0 (at most 30 MiB reserved, 2 events)",
                "GPU 1 (at most 30 MiB reserved, out of memory (1 refused request), 3 events)",
                "choose one with --gpu",
            ],
        );
    }
    for arguments in [&["replay", &file, "--alloc", "caching"][..], &["capacity", &file], &["plan", &file]] {
        let screen = place.run(&[arguments, &["--gpu", "1"]].concat()).ok().stdout;
        assert!(end(&screen).1.contains(" --gpu 1"), "{screen}");
    }
    // What is written holds both.
    let screen = by_path(&place, &["convert", &file, "--to", "snapshot", "-o", "out.pickle"]);
    assert!(screen.contains("5 events of 2 GPUs; nothing left out"), "{screen}");
    assert!(screen.ends_with("out.pickle --gpu 1\n"), "{screen}");
    place.pasted(screen, 2);
}

// Snapshots without events, as PyTorch writes them where no history was recorded: what `advise` and `report` say of them.

/// A history of the repository.
fn history(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../experiments/histories/{name}.pickle.xz"))
}

/// What that history's snapshot is where its events were not recorded.
fn without_events(place: &Place, name: &str) -> String {
    let (summary, origins) = read_origins(&history(name), &ReadOptions::default(), &mut |_, _, _| Ok(())).unwrap();
    let out = OutputFile::create(&place.at("held.pickle"), Existing::Refuse).unwrap();
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
fn advise_shows_what_is_held_and_how_to_record() {
    let place = Place::new();
    let file = without_events(&place, "streams");
    let explained = place.run(&["explain", &file]).ok().stdout;
    let advised = place.run(&["advise", &file]).ok().stdout;
    // All that `explain` says but its last line.
    let (same, _) = explained.split_once("\nNext: ").unwrap();
    assert!(advised.starts_with(same.trim_end()), "{advised}");
    let ledger = "Where 1.56 GiB reserved went when the snapshot was taken";
    for said in [ledger, "Which blocks pin the holes", "1.56 GiB reserved in 60 segments", "none were recorded"] {
        assert!(advised.contains(said), "{said}: {advised}");
    }
    for line in [
        "\n  torch.cuda.memory._record_memory_history(context=\"alloc\", max_entries=1000000, stacks=\"python\")\n",
        "\n  torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")\n",
    ] {
        assert!(advised.contains(line), "{line}: {advised}");
    }
    for text in [&explained, &advised] {
        // Words of a recording.
        for never in ["peak", "first event", "had they completed", "age: since"] {
            assert!(!text.contains(never), "{never}: {text}");
        }
    }
}

#[test]
fn the_object_has_the_keys_of_any_advice() {
    let place = Place::new();
    let file = without_events(&place, "mlp");
    let held = place.run(&["advise", &file, "--json"]).ok().json();
    let whole = place.run(&["advise", history("mlp").to_str().unwrap(), "--conf", "", "--json"]).ok().json();
    for part in ["", "/recorded", "/unknown"] {
        assert_eq!(keys(held.pointer(part).unwrap()), keys(whole.pointer(part).unwrap()), "{part}");
    }
    assert_eq!(
        (&held["verdict"], &held["events"], &held["settings"]),
        (&json!("not-recorded"), &json!(0), &Value::Null)
    );
    assert_eq!(held["recorded"]["peak_reserved_bytes"], Value::Null);
    assert_eq!(held["unknown"]["prologue_reserved_bytes"], json!(90 << 20));
    let limited = place.run(&["advise", &file, "--json", "--limit", "1GiB"]).ok().json();
    assert_eq!((&limited["limit_bytes"], &limited["limit_source"]), (&json!(1 << 30), &json!("given")));
}

#[test]
fn the_page_draws_the_segments() {
    let place = Place::new();
    let file = without_events(&place, "streams");
    let ran = place.run(&["report", &file, "-o", "page.html"]).ok();
    assert!(ran.stdout.contains("what was held in one snapshot without events"), "{}", ran.stdout);
    assert!(ran.stdout.contains("_record_memory_history(context=\"alloc\", max_entries="), "{}", ran.stdout);
    let text = std::fs::read_to_string(place.at("page.html")).unwrap();
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
    let place = Place::new();
    let file = place.write("empty.json", json!({"segments": [], "device_traces": [[]]}).to_string());
    for command in ["advise", "explain", "report", "replay"] {
        place.run(&[command, &file]).refused(2, &["there are no events"]);
    }
}

#[test]
fn nothing_is_shared_out_where_some_segments_are_missing() {
    let place = Place::new();
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
    let file = place.write("some.json", story.text());
    let advice = place.run(&["advise", &file, "--json"]).ok().json();
    assert_eq!((&advice["saving_percent"], &advice["recorded"]["peak_reserved_bytes"]), (&Value::Null, &Value::Null));
    for command in ["advise", "explain"] {
        let screen = place.run(&[command, &file]).ok().stdout;
        assert!(!screen.contains("more than the") && !screen.contains("(-"), "{screen}");
        let shares = screen.split(" %").filter_map(|before| before.rsplit(['(', ' ']).next()?.parse::<f64>().ok());
        assert!(shares.into_iter().all(|share| share <= 100.0), "{screen}");
    }
}
