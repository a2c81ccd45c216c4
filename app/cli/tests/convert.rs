//! `vramlab convert` as a user meets it.

use crate::common::{Place, Ran};
use crate::mutate;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use vramlab::histories::formats::{Action, Event, ReadOptions, Summary, read};

fn convert(place: &Place, from: &Path, to: &str, out: &str, more: &[&str]) -> Ran {
    let mut command = place.process(&["convert"]);
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

/// A trace of ours that has every action it can have.
fn own_trace() -> String {
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

/// A snapshot with events of GPU 0 and GPU 2.
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
fn a_snapshot_written_as_a_snapshot_says_the_same() {
    let place = Place::new();
    for name in ["small.p2.pickle", "small.p4.pickle", "small.torch.pickle", "small.json"] {
        let (events, summary) = read_all(&fixture(name));
        for (to, out) in [("snapshot", "out.pickle"), ("snapshot-json", "out.json")] {
            let line = convert(&place, &fixture(name), to, out, &["--force"]).line();
            assert!(line.contains(&format!("{} events of 1 GPU; nothing left out", events.len())), "{line}");
            let (again, also) = read_all(&place.at(out));
            assert_eq!(again, events, "{name} to {to}");
            assert_eq!(also.segments, summary.segments);
            assert_eq!(also.events, summary.events, "devices without events should stay");
            assert_eq!(also.allocator_settings, summary.allocator_settings);
        }
    }
    // A pickle made of a pickle that was made of a pickle is the same to the last byte.
    convert(&place, &fixture("small.p4.pickle"), "snapshot", "once.pickle", &[]).line();
    convert(&place, &place.at("once.pickle"), "snapshot", "twice.pickle", &[]).line();
    let bytes = |name| std::fs::read(place.at(name)).unwrap();
    assert_eq!(bytes("once.pickle"), bytes("twice.pickle"));
}

#[test]
fn each_format_holds_what_the_line_says() {
    let place = Place::new();
    let from = fixture("small.p4.pickle");
    let (events, _) = read_all(&from);
    let left = events.len();

    let line = convert(&place, &from, "rmm", "rmm.csv", &[]).line();
    let kept = count(&events, &[Action::Alloc, Action::FreeRequested, Action::Oom]);
    assert!(kept > 0 && kept < left && line.contains(&format!("(rmm): {kept} events of 1 GPU; left out: ")), "{line}");
    let segments = count(&events, &[Action::SegmentAlloc]);
    assert!(line.contains(&format!("{segments} segment_alloc")) && !line.contains("free_requested"), "{line}");
    let rows = std::fs::read_to_string(place.at("rmm.csv")).unwrap().lines().count() - 1;
    assert_eq!(rows, kept);

    let line = convert(&place, &from, "minimalloc", "minimalloc.csv", &[]).line();
    let kept = count(&events, &[Action::Alloc, Action::FreeCompleted]);
    assert!(line.contains(&format!("(minimalloc): {kept} events of 1 GPU; left out: ")), "{line}");
    let text = std::fs::read_to_string(place.at("minimalloc.csv")).unwrap();
    assert_eq!(text.lines().count() - 1, count(&events, &[Action::Alloc]), "one row for each life");

    let line = convert(&place, &from, "perfetto", "perfetto.json", &[]).line();
    assert!(line.contains(&format!("(perfetto): {left} events of 1 GPU")), "{line}");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(place.at("perfetto.json")).unwrap()).unwrap();
    let begun = json["traceEvents"].as_array().unwrap().iter().filter(|event| event["cat"] == "block").count();
    assert_eq!(begun, count(&events, &[Action::Alloc]), "one life for each allocation");
    assert_eq!(place.files(), ["minimalloc.csv", "perfetto.json", "rmm.csv"]);
}

#[test]
fn uses_are_left_out_where_pytorch_has_no_name_for_them() {
    let place = Place::new();
    let from = place.file("trace.jsonl", own_trace());
    let line = convert(&place, &from, "snapshot", "a.pickle", &[]).line();
    assert!(line.contains("(trace) to a.pickle (snapshot): 4 events of 1 GPU; left out: 1 record_use"), "{line}");
    let line = convert(&place, &from, "perfetto", "a.json", &[]).line();
    assert!(line.contains("5 events of 1 GPU; nothing left out"), "{line}");
    assert!(std::fs::read_to_string(place.at("a.json")).unwrap().contains("record_use"));
}

#[test]
fn other_formats_become_snapshots() {
    let place = Place::new();
    let seeds = mutate::seeds("csv");
    for name in ["rmm.csv", "minimalloc.csv", "stalloc.txt"] {
        let (_, bytes) = seeds.iter().find(|(seed, _)| seed == name).unwrap();
        let file = place.file(name, bytes);
        let (events, _) = read_all(&file);
        convert(&place, &file, "snapshot", "out.pickle", &["--force"]).line();
        let (again, _) = read_all(&place.at("out.pickle"));
        let told = |events: &[Event]| -> Vec<(Action, u64, u64)> {
            events.iter().map(|event| (event.action, event.addr, event.bytes)).collect()
        };
        assert!(!events.is_empty());
        assert_eq!(told(&again), told(&events), "{name}");
    }
}

/// PyTorch can leave out one of a free's two events (`skip_actions`).
#[test]
fn one_event_of_a_free_is_enough() {
    let place = Place::new();
    let part = |action: &str, frees: [&str; 2]| {
        let event =
            |action: &str, size: u64| json!({"action": action, "addr": 4096, "size": size, "stream": 0, "time_us": 1});
        let events: Vec<Value> = [512, 1024]
            .into_iter()
            .flat_map(|size| [event("alloc", size), event(frees[0], size), event(frees[1], size)])
            .filter(|event| event["action"] != action)
            .collect();
        place.write("part.json", json!({"segments": [], "device_traces": [events]}).to_string())
    };
    let frees = ["free_requested", "free_completed"];
    let without_requests = PathBuf::from(part(frees[0], frees));
    let ran = convert(&place, &without_requests, "rmm", "rmm.csv", &[]).ok();
    assert!(ran.stdout.contains("4 events of 1 GPU; nothing left out."), "{}", ran.stdout);
    assert_eq!(count(&read_all(&place.at("rmm.csv")).0, &[Action::FreeRequested]), 2);
    let without_completions = PathBuf::from(part(frees[1], frees));
    for (to, said) in [("minimalloc", true), ("perfetto", true), ("rmm", false)] {
        let ran = convert(&place, &without_completions, to, "part.out", &["--force"]).ok();
        let words = ran.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            words.contains("It has no free_completed events: blocks are shown live until"),
            said,
            "{to}: {words}"
        );
    }
}

#[test]
fn one_gpu_of_several() {
    let place = Place::new();
    let from = place.file("two.json", two_gpus());
    for to in ["rmm", "minimalloc"] {
        let ran = convert(&place, &from, to, "out", &["--force"]);
        let both = ["GPU 0 (at most 2 MiB reserved, 1 event)", "GPU 2 (at least 2 MiB reserved at the peak, 2 events)"];
        ran.refused(
            2,
            &["two.json: it holds several GPUs", &format!("{to} has place for one"), both[0], both[1], "--gpu"],
        );
        let line = convert(&place, &from, to, "out", &["--gpu", "2", "--force"]).line();
        assert!(line.contains("2 events of 1 GPU; left out: 1 of other GPUs"), "{line}");
    }
    convert(&place, &from, "snapshot", "none", &["--gpu", "1"])
        .refused(2, &["no event of GPU 1; there are those of 0, 2"]);
    let line = convert(&place, &from, "snapshot", "all.pickle", &[]).line();
    assert!(line.contains("3 events of 2 GPUs; nothing left out"), "{line}");
    convert(&place, &from, "snapshot", "one.pickle", &["--gpu", "2"]).line();
    let (events, summary) = read_all(&place.at("one.pickle"));
    assert_eq!((events.len(), summary.events), (2, vec![0, 0, 2]), "a GPU keeps its number");
    assert_eq!(summary.segments.iter().map(|segment| segment.device).collect::<Vec<_>>(), [2]);
    assert_eq!(place.files(), ["all.pickle", "one.pickle", "out", "two.json"]);
}

#[test]
fn what_is_there_stays_without_leave() {
    let place = Place::new();
    let from = fixture("small.p4.pickle");
    let out = place.file("out.csv", "precious");
    convert(&place, &from, "rmm", "out.csv", &[]).refused(2, &["out.csv: is there already", "--force"]);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious");
    // With leave it still stays when the conversion fails.
    let hostile = place.file("cut.pickle", &std::fs::read(&from).unwrap()[..500]);
    convert(&place, &hostile, "rmm", "out.csv", &["--force"]).refused(2, &["cut.pickle", "cut short"]);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious");
    convert(&place, &from, "rmm", "out.csv", &["--force"]).line();
    assert!(std::fs::read_to_string(&out).unwrap().starts_with("Thread,Time,Action"));
    // A history may take its own place.
    let (events, _) = read_all(&from);
    let own = place.file("own.pickle", std::fs::read(&from).unwrap());
    convert(&place, &own, "snapshot", "own.pickle", &["--force"]).line();
    assert_eq!(read_all(&own).0, events);
    // No file at all: never.
    std::fs::create_dir(place.at("folder")).unwrap();
    convert(&place, &from, "rmm", "folder", &["--force"]).refused(2, &["folder: is a directory"]);
    #[cfg(unix)]
    {
        let _socket = std::os::unix::net::UnixListener::bind(place.at("socket")).unwrap();
        convert(&place, &from, "rmm", "socket", &["--force"]).refused(2, &["socket: is a socket"]);
    }
    convert(&place, &from, "rmm", "missing/out.csv", &[]).refused(2, &["missing/out.csv: there is no folder missing"]);
    assert!(place.files().iter().all(|name| !name.ends_with(".part")), "{:?}", place.files());
}

#[test]
fn bad_input_gets_one_line_and_leaves_nothing() {
    let place = Place::new();
    let evil = b"\x80\x04cos\nsystem\n(S'true'\ntR.";
    let cases: [(&str, &[u8], &[&str]); 5] = [
        ("evil.pickle", evil, &["evil.pickle", "refused"]),
        ("empty", b"", &["empty: is empty"]),
        ("words.txt", b"no history\n", &["words.txt", "no known format"]),
        ("line.csv", b"Thread,Time,Action,Pointer,Size,Stream\n1,x,allocate,0x10,many,0\n", &["line.csv:2"]),
        (
            "idle.json",
            b"{\"segments\":[],\"device_traces\":[[]],\"allocator_settings\":{}}",
            &["idle.json: there are no events"],
        ),
    ];
    for (name, bytes, words) in cases {
        let from = place.file(name, bytes);
        for to in ["snapshot", "snapshot-json", "perfetto", "rmm", "minimalloc"] {
            convert(&place, &from, to, "out", &[]).refused(2, words);
        }
        std::fs::remove_file(from).unwrap();
        assert!(place.files().is_empty(), "{:?}", place.files());
    }
    convert(&place, Path::new("nowhere.pickle"), "rmm", "out", &[]).refused(2, &["nowhere.pickle: cannot be read"]);
    convert(&place, place.0.path(), "rmm", "out", &[]).refused(2, &["is a directory"]);
    let ran = convert(&place, &fixture("small.json"), "svg", "out", &[]);
    assert!(ran.code == Some(2) && ran.stderr.contains("minimalloc"), "{ran:#?}");
    assert!(place.files().is_empty());
}

#[test]
fn a_snapshot_without_a_history_keeps_its_segments() {
    let place = Place::new();
    let text = two_gpus().replace("\"action\":\"alloc\"", "\"action\":\"unheard_of\"");
    let from = place.file("held.json", text);
    let line = convert(&place, &from, "snapshot", "held.pickle", &[]).line();
    assert!(line.contains("0 events of 0 GPUs; left out: 3 of unknown actions"), "{line}");
    assert_eq!(read_all(&place.at("held.pickle")).1.segments.len(), 2);
    convert(&place, &from, "perfetto", "held.perfetto", &[]).refused(2, &["there are no events"]);
}

#[test]
fn a_timeline_names_lines_and_ranges_on_few_tracks() {
    let place = Place::new();
    // Sixty blocks at once, more than there are tracks; what the program says may hold anything.
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
    let from = place.file("a.json", snapshot.to_string());
    let line = convert(&place, &from, "perfetto", "p.json", &[]).line();
    assert!(line.contains("61 events of 1 GPU; left out: 1 annotations"), "{line}");
    let read: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(place.at("p.json")).unwrap()).unwrap();
    let events = read["traceEvents"].as_array().unwrap();
    let blocks: Vec<_> = events.iter().filter(|event| event["cat"] == "block").collect();
    assert_eq!(blocks.len(), 60);
    let slices = blocks.iter().filter(|block| block["ph"] == "X");
    let used: std::collections::BTreeSet<u64> = slices.map(|block| block["tid"].as_u64().unwrap()).collect();
    assert_eq!(used.len(), 24, "the largest have tracks");
    assert!(blocks.iter().any(|block| block["ph"] == "i"), "the others have not");
    for block in &blocks {
        assert_eq!(block["args"]["line"], format!("train.py:7 {hostile}"));
        assert!(block["name"].as_str().unwrap().starts_with("train.py:7"), "{block}");
        assert!(block["args"]["stack"].as_str().unwrap().starts_with("/x/site-packages/torch/_ops.py:5 empty\n"));
    }
    let tracks = events.iter().filter(|event| event["name"] == "thread_name").count();
    assert_eq!(tracks, 24 + 2, "blocks, one stream, annotations");
    let host: Vec<_> = events.iter().filter(|event| event["cat"] == "host").collect();
    assert_eq!(host.len(), 1);
    assert_eq!((&host[0]["name"], host[0]["dur"].as_f64()), (&serde_json::json!(hostile), Some(10.0)));
}
