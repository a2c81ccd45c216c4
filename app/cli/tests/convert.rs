//! `vramlab convert` from the command line.

use crate::common::{Ran, TestDir};
use crate::mutate;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use vramlab::histories::formats::{Action, Event, ReadOptions, Summary, read};

fn convert(dir: &TestDir, from: &Path, to: &str, out: &str, more: &[&str]) -> Ran {
    let mut command = dir.process(&["convert"]);
    command.arg(from).args(["--to", to, "-o", out]).args(more);
    Ran::of(command.output().unwrap())
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../allocators/histories/tests/fixtures").join(name)
}

fn read_all(path: &Path) -> (Vec<Event>, Summary) {
    let mut events = Vec::new();
    let summary = read(path, &ReadOptions::default(), &mut |event| {
        events.push(event);
        Ok(())
    });
    (events, summary.unwrap())
}

fn count(events: &[Event], actions: &[Action]) -> usize {
    events.iter().filter(|event| actions.contains(&event.action)).count()
}

/// A `trace.jsonl` with every action of the format.
fn trace() -> String {
    let mut text = String::new();
    for (at, (action, addr, bytes, stream)) in [
        ("alloc", 4096, 700, 1),
        ("record_use", 4096, 0, 2),
        ("free_requested", 4096, 700, 1),
        ("oom", 0, 1_u64 << 40, 1),
    ]
    .into_iter()
    .enumerate()
    {
        let addr = if action == "oom" { String::new() } else { format!("\"addr\":{addr},") };
        writeln!(
            text,
            "{{\"time_ns\":{},\"action\":\"{action}\",{addr}\"size\":{bytes},\"block\":1024,\"stream\":{stream},\
             \"path\":\"hit\"}}",
            at * 1000
        )
        .unwrap();
    }
    text
}

/// A snapshot with events of GPUs 0 and 2.
fn two_gpus() -> String {
    let event = |addr: u64| format!("{{\"action\":\"alloc\",\"addr\":{addr},\"size\":512,\"stream\":0,\"time_us\":1}}");
    let segment = |device: u16| {
        format!(
            "{{\"device\":{device},\"address\":4096,\"total_size\":2097152,\"stream\":0,\"segment_type\":\"small\",\
             \"is_expandable\":false,\"blocks\":[{{\"address\":4096,\"size\":2097152,\"requested_size\":512,\
             \"state\":\"active_allocated\"}}]}}"
        )
    };
    format!(
        "{{\"segments\":[{},{}],\"device_traces\":[[{}],[],[{},{}]],\"allocator_settings\":{{}}}}",
        segment(0),
        segment(2),
        event(4096),
        event(4096),
        event(8192)
    )
}

#[test]
fn a_snapshot_converted_to_a_snapshot_is_equal() {
    let dir = TestDir::new();
    for name in ["small.p2.pickle", "small.p4.pickle", "small.torch.pickle", "small.json"] {
        let (events, summary) = read_all(&fixture(name));
        for (to, out) in [("snapshot", "out.pickle"), ("snapshot-json", "out.json")] {
            let line = convert(&dir, &fixture(name), to, out, &["--force"]).line();
            assert!(line.contains(&format!("{} events of 1 GPU; nothing omitted", events.len())), "{line}");
            let (again, also) = read_all(&dir.at(out));
            assert_eq!(again, events, "{name} to {to}");
            assert_eq!(also.segments, summary.segments);
            assert_eq!(also.events, summary.events, "devices without events should stay");
            assert_eq!(also.allocator_settings, summary.allocator_settings);
        }
    }
    // A second conversion to a pickle is byte-identical.
    convert(&dir, &fixture("small.p4.pickle"), "snapshot", "once.pickle", &[]).line();
    convert(&dir, &dir.at("once.pickle"), "snapshot", "twice.pickle", &[]).line();
    let bytes = |name| std::fs::read(dir.at(name)).unwrap();
    assert_eq!(bytes("once.pickle"), bytes("twice.pickle"));
}

#[test]
fn each_format_contains_the_reported_events() {
    let dir = TestDir::new();
    let from = fixture("small.p4.pickle");
    let (events, _) = read_all(&from);
    let all = events.len();

    let line = convert(&dir, &from, "rmm", "rmm.csv", &[]).line();
    let written = count(&events, &[Action::Alloc, Action::FreeRequested, Action::Oom]);
    assert!(written > 0 && written < all, "{line}");
    assert!(line.contains(&format!("(rmm): {written} events of 1 GPU; omitted: ")), "{line}");
    let segments = count(&events, &[Action::SegmentAlloc]);
    assert!(line.contains(&format!("{segments} segment_alloc")) && !line.contains("free_requested"), "{line}");
    let rows = std::fs::read_to_string(dir.at("rmm.csv")).unwrap().lines().count() - 1;
    assert_eq!(rows, written);

    let line = convert(&dir, &from, "minimalloc", "minimalloc.csv", &[]).line();
    let written = count(&events, &[Action::Alloc, Action::FreeCompleted]);
    assert!(line.contains(&format!("(minimalloc): {written} events of 1 GPU; omitted: ")), "{line}");
    let text = std::fs::read_to_string(dir.at("minimalloc.csv")).unwrap();
    assert_eq!(text.lines().count() - 1, count(&events, &[Action::Alloc]), "one row for each block");

    let line = convert(&dir, &from, "perfetto", "perfetto.json", &[]).line();
    assert!(line.contains(&format!("(perfetto): {all} events of 1 GPU")), "{line}");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(dir.at("perfetto.json")).unwrap()).unwrap();
    let begun = json["traceEvents"].as_array().unwrap().iter().filter(|event| event["cat"] == "block").count();
    assert_eq!(begun, count(&events, &[Action::Alloc]), "one lifetime for each allocation");
    assert_eq!(dir.files(), ["minimalloc.csv", "perfetto.json", "rmm.csv"]);
}

#[test]
fn uses_are_omitted_from_formats_without_them() {
    let dir = TestDir::new();
    let from = dir.file("trace.jsonl", trace());
    let line = convert(&dir, &from, "snapshot", "a.pickle", &[]).line();
    assert!(line.contains("(trace) to a.pickle (snapshot): 4 events of 1 GPU; omitted: 1 record_use"), "{line}");
    let line = convert(&dir, &from, "perfetto", "a.json", &[]).line();
    assert!(line.contains("5 events of 1 GPU; nothing omitted"), "{line}");
    assert!(std::fs::read_to_string(dir.at("a.json")).unwrap().contains("record_use"));
}

#[test]
fn other_formats_are_converted_to_snapshots() {
    let dir = TestDir::new();
    let seeds = mutate::seeds("csv");
    for name in ["rmm.csv", "minimalloc.csv", "stalloc.txt"] {
        let (_, bytes) = seeds.iter().find(|(seed, _)| seed == name).unwrap();
        let file = dir.file(name, bytes);
        let (events, _) = read_all(&file);
        convert(&dir, &file, "snapshot", "out.pickle", &["--force"]).line();
        let (again, _) = read_all(&dir.at("out.pickle"));
        let fields = |events: &[Event]| -> Vec<(Action, u64, u64)> {
            events.iter().map(|event| (event.action, event.addr, event.bytes)).collect()
        };
        assert!(!events.is_empty());
        assert_eq!(fields(&again), fields(&events), "{name}");
    }
}

/// PyTorch can omit one of a free's two events (`skip_actions`).
#[test]
fn one_event_of_each_free_is_enough() {
    let dir = TestDir::new();
    let part = |action: &str, frees: [&str; 2]| {
        let event =
            |action: &str, size: u64| json!({"action": action, "addr": 4096, "size": size, "stream": 0, "time_us": 1});
        let events: Vec<Value> = [512, 1024]
            .into_iter()
            .flat_map(|size| [event("alloc", size), event(frees[0], size), event(frees[1], size)])
            .filter(|event| event["action"] != action)
            .collect();
        dir.write("part.json", json!({"segments": [], "device_traces": [events]}).to_string())
    };
    let frees = ["free_requested", "free_completed"];
    let without_requests = PathBuf::from(part(frees[0], frees));
    let output = convert(&dir, &without_requests, "rmm", "rmm.csv", &[]).ok();
    assert!(output.stdout.contains("4 events of 1 GPU; nothing omitted."), "{}", output.stdout);
    assert_eq!(count(&read_all(&dir.at("rmm.csv")).0, &[Action::FreeRequested]), 2);
    let without_completions = PathBuf::from(part(frees[1], frees));
    for (to, noted) in [("minimalloc", true), ("perfetto", true), ("rmm", false)] {
        let output = convert(&dir, &without_completions, to, "part.out", &["--force"]).ok();
        let words = output.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            words.contains("The recording has no free_completed events: blocks are shown as live until"),
            noted,
            "{to}: {words}"
        );
    }
}

#[test]
fn one_of_several_gpus_is_converted() {
    let dir = TestDir::new();
    let from = dir.file("two.json", two_gpus());
    for to in ["rmm", "minimalloc"] {
        let output = convert(&dir, &from, to, "out", &["--force"]);
        let both = ["GPU 0 (peak reserved 2 MiB, 1 event)", "GPU 2 (peak reserved at least 2 MiB, 2 events)"];
        output.refused(
            2,
            &["two.json: it contains several GPUs", &format!("{to} can hold one"), both[0], both[1], "--gpu"],
        );
        let line = convert(&dir, &from, to, "out", &["--gpu", "2", "--force"]).line();
        assert!(line.contains("2 events of 1 GPU; omitted: 1 of other GPUs"), "{line}");
    }
    convert(&dir, &from, "snapshot", "none", &["--gpu", "1"])
        .refused(2, &["no event of GPU 1; the file has events of 0, 2"]);
    let line = convert(&dir, &from, "snapshot", "all.pickle", &[]).line();
    assert!(line.contains("3 events of 2 GPUs; nothing omitted"), "{line}");
    convert(&dir, &from, "snapshot", "one.pickle", &["--gpu", "2"]).line();
    let (events, summary) = read_all(&dir.at("one.pickle"));
    assert_eq!((events.len(), summary.events), (2, vec![0, 0, 2]), "a GPU keeps its number");
    assert_eq!(summary.segments.iter().map(|segment| segment.device).collect::<Vec<_>>(), [2]);
    assert_eq!(dir.files(), ["all.pickle", "one.pickle", "out", "two.json"]);
}

#[test]
fn an_existing_file_is_replaced_only_with_force() {
    let dir = TestDir::new();
    let from = fixture("small.p4.pickle");
    let out = dir.file("out.csv", "precious");
    convert(&dir, &from, "rmm", "out.csv", &[]).refused(2, &["out.csv: already exists", "--force"]);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious");
    // With --force it stays if the conversion fails.
    let hostile = dir.file("cut.pickle", &std::fs::read(&from).unwrap()[..500]);
    convert(&dir, &hostile, "rmm", "out.csv", &["--force"]).refused(2, &["cut.pickle", "truncated"]);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious");
    convert(&dir, &from, "rmm", "out.csv", &["--force"]).line();
    assert!(std::fs::read_to_string(&out).unwrap().starts_with("Thread,Time,Action"));
    // A recording can replace itself.
    let (events, _) = read_all(&from);
    let own = dir.file("own.pickle", std::fs::read(&from).unwrap());
    convert(&dir, &own, "snapshot", "own.pickle", &["--force"]).line();
    assert_eq!(read_all(&own).0, events);
    // Other kinds of files are never replaced.
    std::fs::create_dir(dir.at("folder")).unwrap();
    convert(&dir, &from, "rmm", "folder", &["--force"]).refused(2, &["folder: is a directory"]);
    #[cfg(unix)]
    {
        let _socket = std::os::unix::net::UnixListener::bind(dir.at("socket")).unwrap();
        convert(&dir, &from, "rmm", "socket", &["--force"]).refused(2, &["socket: is a socket"]);
    }
    convert(&dir, &from, "rmm", "missing/out.csv", &[]).refused(2, &["missing/out.csv: there is no folder missing"]);
    assert!(dir.files().iter().all(|name| !name.ends_with(".part")), "{:?}", dir.files());
}

#[test]
fn bad_input_gets_one_line_and_leaves_no_file() {
    let dir = TestDir::new();
    let evil = b"\x80\x04cos\nsystem\n(S'true'\ntR.";
    let cases: [(&str, &[u8], &[&str]); 5] = [
        ("evil.pickle", evil, &["evil.pickle", "refused"]),
        ("empty", b"", &["empty: is empty"]),
        ("words.txt", b"no history\n", &["words.txt", "no known format"]),
        ("line.csv", b"Thread,Time,Action,Pointer,Size,Stream\n1,x,allocate,0x10,many,0\n", &["line.csv:2"]),
        (
            "idle.json",
            b"{\"segments\":[],\"device_traces\":[[]],\"allocator_settings\":{}}",
            &["idle.json: the file has no events"],
        ),
    ];
    for (name, bytes, words) in cases {
        let from = dir.file(name, bytes);
        for to in ["snapshot", "snapshot-json", "perfetto", "rmm", "minimalloc"] {
            convert(&dir, &from, to, "out", &[]).refused(2, words);
        }
        std::fs::remove_file(from).unwrap();
        assert!(dir.files().is_empty(), "{:?}", dir.files());
    }
    convert(&dir, Path::new("nowhere.pickle"), "rmm", "out", &[]).refused(2, &["nowhere.pickle: cannot be read"]);
    convert(&dir, dir.0.path(), "rmm", "out", &[]).refused(2, &["is a directory"]);
    let output = convert(&dir, &fixture("small.json"), "svg", "out", &[]);
    assert!(output.code == Some(2) && output.stderr.contains("minimalloc"), "{output:#?}");
    assert!(dir.files().is_empty());
}

#[test]
fn a_snapshot_without_events_keeps_its_segments() {
    let dir = TestDir::new();
    let text = two_gpus().replace("\"action\":\"alloc\"", "\"action\":\"unheard_of\"");
    let from = dir.file("held.json", text);
    let line = convert(&dir, &from, "snapshot", "held.pickle", &[]).line();
    assert!(line.contains("0 events of 0 GPUs; omitted: 3 of unknown actions (unheard_of)"), "{line}");
    assert_eq!(read_all(&dir.at("held.pickle")).1.segments.len(), 2);
    convert(&dir, &from, "perfetto", "held.perfetto", &[]).refused(2, &["the file has no events"]);
}

#[test]
fn a_timeline_shows_lines_and_annotations_on_few_tracks() {
    let dir = TestDir::new();
    // Sixty live blocks, more than tracks; annotations may contain any text.
    let hostile = "a\"</script>\\ \u{1}";
    let frames = serde_json::json!([
        {"name": "empty", "filename": "/x/site-packages/torch/_ops.py", "line": 5},
        {"name": hostile, "filename": "train.py", "line": 7},
    ]);
    let event = |action: &str, addr: u64, bytes: u64, time_us: u64| serde_json::json!({"action": action, "addr": addr, "size": bytes, "stream": 0, "time_us": time_us, "frames": frames});
    let mut events = vec![event("segment_alloc", 1 << 30, 2 << 20, 1)];
    events.extend((0..60).map(|at| event("alloc", (1 << 30) + at * 1024, 1000 - at, 10 + at)));
    let range = |stage: &str, time_us: u64| serde_json::json!({"stage": stage, "name": hostile, "device": 0, "time_us": time_us});
    let snapshot = serde_json::json!({
        "segments": [], "device_traces": [events], "allocator_settings": {},
        "external_annotations": [range("START", 20), range("END", 30), range("START", 40)],
    });
    let from = dir.file("a.json", snapshot.to_string());
    let line = convert(&dir, &from, "perfetto", "p.json", &[]).line();
    assert!(line.contains("61 events of 1 GPU; omitted: 1 annotations"), "{line}");
    let read: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(dir.at("p.json")).unwrap()).unwrap();
    let events = read["traceEvents"].as_array().unwrap();
    let blocks: Vec<_> = events.iter().filter(|event| event["cat"] == "block").collect();
    assert_eq!(blocks.len(), 60);
    let slices = blocks.iter().filter(|block| block["ph"] == "X");
    let used: std::collections::BTreeSet<u64> = slices.map(|block| block["tid"].as_u64().unwrap()).collect();
    assert_eq!(used.len(), 24, "the largest blocks have tracks");
    assert!(blocks.iter().any(|block| block["ph"] == "i"), "the others are instants");
    for block in &blocks {
        assert_eq!(block["args"]["line"], format!("train.py:7 {hostile}"));
        assert!(block["name"].as_str().unwrap().starts_with("train.py:7"), "{block}");
        assert_eq!(block["args"]["stack"], "1");
    }
    let stacks: Vec<_> = events.iter().filter(|event| event["cat"] == "stack").collect();
    assert_eq!(stacks.len(), 1, "each stack is written once");
    assert_eq!(stacks[0]["name"], format!("stack 1: train.py:7 {hostile}"));
    let frames = stacks[0]["args"]["frames"].as_str().unwrap();
    assert_eq!(frames, format!("/x/site-packages/torch/_ops.py:5 empty\ntrain.py:7 {hostile}"));
    let tracks = events.iter().filter(|event| event["name"] == "thread_name").count();
    assert_eq!(tracks, 24 + 3, "blocks, one stream, stacks, annotations");
    let host: Vec<_> = events.iter().filter(|event| event["cat"] == "host").collect();
    assert_eq!(host.len(), 1);
    assert_eq!((&host[0]["name"], host[0]["dur"].as_f64()), (&serde_json::json!(hostile), Some(10.0)));
}

#[test]
fn a_timeline_numbers_the_stacks_of_the_chosen_gpu() {
    let dir = TestDir::new();
    let event = |addr: u64, line: u64, time_us: u64| serde_json::json!({"action": "alloc", "addr": addr, "size": 512, "stream": 0, "time_us": time_us, "frames": [{"name": "f", "filename": "a.py", "line": line}]});
    let snapshot = serde_json::json!({
        "segments": [], "allocator_settings": {}, "external_annotations": [],
        "device_traces": [[event(4096, 1, 1), event(8192, 2, 2)], [event(4096, 3, 1), event(8192, 2, 2), event(16384, 3, 3)]],
    });
    let from = dir.file("a.json", snapshot.to_string());
    convert(&dir, &from, "perfetto", "p.json", &["--gpu", "1"]).ok();
    let read: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(dir.at("p.json")).unwrap()).unwrap();
    let events = read["traceEvents"].as_array().unwrap();
    let of = |cat: &'static str| events.iter().filter(move |event| event["cat"] == cat);
    let stacks: Vec<_> = of("stack").map(|stack| stack["name"].as_str().unwrap()).collect();
    assert_eq!(stacks, ["stack 1: a.py:3 f", "stack 2: a.py:2 f"]);
    let numbers: Vec<_> = of("block").map(|block| block["args"]["stack"].as_str().unwrap()).collect();
    assert_eq!(numbers, ["1", "2", "1"]);
}

#[test]
fn a_timeline_counts_requested_bytes_of_active_blocks() {
    let dir = TestDir::new();
    let event = |action: &str, addr: u64, bytes: u64, time_us: u64| serde_json::json!({"action": action, "addr": addr, "size": bytes, "stream": 0, "time_us": time_us});
    let events = [
        event("alloc", 4096, 100, 1),
        event("alloc", 8192, 7, 2),
        event("free_requested", 4096, 100, 3),
        event("free_completed", 4096, 100, 4),
    ];
    let snapshot = serde_json::json!({
        "segments": [], "device_traces": [events], "allocator_settings": {}, "external_annotations": [],
    });
    let from = dir.file("a.json", snapshot.to_string());
    convert(&dir, &from, "perfetto", "p.json", &[]).ok();
    let read: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(dir.at("p.json")).unwrap()).unwrap();
    let counters = read["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "C");
    let levels: Vec<_> = counters.map(|counter| counter["args"].clone()).collect();
    let level = |requested: u64, pending: u64| serde_json::json!({"requested": requested, "pending": pending});
    assert_eq!(levels, [level(100, 0), level(107, 0), level(107, 100), level(7, 0)]);
}
