//! `vramlab replay` and `vramlab capacity` end to end.

use crate::common::TestDir;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use vramlab::histories::formats::{Ending, Export, ReadOptions, read};

const MIB: u64 = 1 << 20;

/// A line of a trace.jsonl.
fn line(action: &str, addr: u64, bytes: u64, stream: u64) -> String {
    json!({"time_ns": 0, "action": action, "addr": addr, "size": bytes, "block": bytes, "stream": stream, "path": "hit"})
        .to_string()
        + "\n"
}

/// Ten steps of three tensors, two of them live simultaneously.
fn steps() -> String {
    let mut text = String::new();
    for _ in 0..10 {
        for (at, bytes) in [(1, 3 * MIB), (2, 5 * MIB), (3, 700)] {
            write!(text, "{}", line("alloc", at << 30, bytes, 1)).unwrap();
            if at == 2 {
                write!(text, "{}", line("record_use", 1 << 30, 0, 2)).unwrap();
                write!(text, "{}", line("free_requested", 1 << 30, 3 * MIB, 1)).unwrap();
            }
        }
        write!(text, "{}", line("free_requested", 2 << 30, 5 * MIB, 1)).unwrap();
        write!(text, "{}", line("free_requested", 3 << 30, 700, 1)).unwrap();
    }
    text
}

/// A recording of the repository.
fn trace(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories").join(name);
    path.to_str().unwrap().to_owned()
}

#[test]
fn json_has_an_object_for_each_file_and_allocator() {
    let test_dir = TestDir::new();
    let (first, second) = (test_dir.write("a.jsonl", steps()), test_dir.write("b.jsonl", line("alloc", 4096, 1000, 1)));
    for device in ["sim", "null"] {
        let arguments = ["replay", &first, &second, "--alloc", "naive,caching,stream-ordered", "--device", device];
        let rows = test_dir.run(&[&arguments[..], &["--json"]].concat()).rows();
        let pairs: Vec<(&str, &str)> =
            rows.iter().map(|row| (row["trace"].as_str().unwrap(), row["allocator"].as_str().unwrap())).collect();
        let names = ["naive", "caching", "stream-ordered"];
        let expected: Vec<(&str, &str)> =
            [&first, &second].iter().flat_map(|file| names.map(|name| (file.as_str(), name))).collect();
        assert_eq!(pairs, expected);
        for row in &rows {
            let number = |key: &str| row[key].as_u64().unwrap_or_else(|| panic!("{key}: {row}"));
            let (reserved, live) = (number("peak_reserved_bytes"), number("max_live_bytes"));
            assert_eq!(row["device"], device);
            assert!(live <= number("peak_requested_bytes") && number("peak_requested_bytes") <= reserved, "{row}");
            assert!(number("peak_allocated_bytes") <= number("peak_active_bytes"), "{row}");
            let utilisation = row["utilisation"].as_f64().unwrap();
            // JSON may change the last digit of a fraction.
            assert!((utilisation - number("peak_active_bytes") as f64 / reserved as f64).abs() < 1e-12, "{row}");
            let ledger = |key: &str| row["ledger"][key].as_u64().unwrap();
            let parts: u64 = ["internal", "soft", "hard", "stream", "pending"].map(ledger).iter().sum();
            assert_eq!(parts, ledger("reserved") - ledger("requested"), "{row}");
            assert_eq!(row["simulated_s"].is_f64(), device == "sim", "{row}");
            assert!(row["address_mismatches"].is_null() && row["segment_mismatches"].is_null());
            assert_eq!(row["segment_allocs"].is_null(), row["allocator"] == "stream-ordered");
            assert_eq!((number("failed_allocations"), number("num_alloc_retries")), (0, 0));
            assert!(row["host_ns_per_op"].as_f64().unwrap() > 0.0 && row["driver_calls"].is_object());
        }
        let of = |row: usize, key: &str| rows[row][key].as_u64().unwrap();
        assert_eq!((of(0, "events"), of(0, "allocations"), of(0, "max_live_bytes")), (100, 30, 8 * MIB));
        assert_eq!((of(0, "segment_allocs"), of(1, "segment_allocs")), (30, 2));
        assert_eq!(rows[0]["driver_calls"]["mem_alloc"], 30);
    }
}

#[test]
fn table_has_a_column_for_each_allocator() {
    let test_dir = TestDir::new();
    let file = test_dir.write("a.jsonl", steps());
    let table = test_dir.run(&["replay", &file, "--touch"]).ok().stdout;
    for words in ["100 events, 30 allocations, peak live 8 MiB", "naive", "caching", "stream-ordered"] {
        assert!(table.contains(words), "{words} is missing: {table}");
    }
    assert!(!table.contains('\u{1b}'), "no escapes without a terminal: {table}");
}

#[cfg(target_os = "linux")]
#[test]
fn replay_ends_with_the_exit_codes_of_its_help() {
    let test_dir = TestDir::new();
    let help = test_dir.run(&["replay", "--help"]).ok().stdout;
    assert!(
        help.contains("Exit codes: 0 all replays are made, even if an allocator ran out of memory; 1 the "),
        "{help}"
    );
    let file = test_dir.write("a.jsonl", steps());
    assert_eq!(test_dir.run(&["replay", &file, "--limit", "4MiB", "--plan", "off"]).code, Some(0));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    assert_eq!(test_dir.process(&["replay", &file]).stdout(full).status().unwrap().code(), Some(1));
    let twice = test_dir.write("b.jsonl", line("alloc", 4096, 1000, 1).repeat(2));
    for file in [twice.as_str(), "missing.jsonl"] {
        assert_eq!(test_dir.run(&["replay", file]).code, Some(2), "{file}");
    }
}

#[test]
fn replay_keeps_to_the_limit_and_reports_failures() {
    let test_dir = TestDir::new();
    let file = test_dir.write("a.jsonl", steps());
    let rows = test_dir.run(&["replay", &file, "--limit", "6MiB", "--json"]).rows();
    for row in &rows {
        assert!(row["failed_allocations"].as_u64().unwrap() > 0, "{row}");
        assert!(row["peak_reserved_bytes"].as_u64().unwrap() <= 6 * MIB, "{row}");
        let failure = &row["first_failure"];
        assert!(failure["error"].as_str().unwrap().contains("out of memory"), "{row}");
    }
    let table = test_dir.run(&["replay", &file, "--limit", "6MiB", "--alloc", "naive"]).ok().stdout;
    assert!(table.contains("naive: allocation 2 failed first: out of memory"), "{table}");
}

#[test]
fn replay_reports_a_recorded_out_of_memory_first() {
    let test_dir = TestDir::new();
    let event = |action: &str, addr: u64, size: u64, stream: u64| {
        let addr_key = if action == "oom" { "device_free" } else { "addr" };
        json!({"action": action, addr_key: addr, "size": size, "stream": stream, "time_us": 1})
    };
    // Of 20 MiB the first 7 and 4 in the middle are freed; another stream keeps 9 of 20.
    let events = [
        event("segment_alloc", 1 << 30, 20 * MIB, 0),
        event("alloc", 1 << 30, 7 * MIB, 0),
        event("alloc", (1 << 30) + 7 * MIB, 3 * MIB, 0),
        event("alloc", (1 << 30) + 10 * MIB, 4 * MIB, 0),
        event("alloc", (1 << 30) + 14 * MIB, 6 * MIB, 0),
        event("segment_alloc", 2 << 30, 20 * MIB, 5),
        event("alloc", 2 << 30, 9 * MIB, 5),
        event("free_requested", 1 << 30, 7 * MIB, 0),
        event("free_completed", 1 << 30, 7 * MIB, 0),
        event("free_requested", (1 << 30) + 10 * MIB, 4 * MIB, 0),
        event("oom", 3 << 30, 8 * MIB, 0),
        event("free_completed", (1 << 30) + 10 * MIB, 4 * MIB, 0),
        event("oom", 3 << 30, 8 * MIB, 0),
    ];
    let snapshot = json!({"segments": [], "device_traces": [events], "allocator_settings": {}});
    let file = "oom.json";
    test_dir.write(file, snapshot.to_string());
    let text = test_dir.run(&["replay", file, "--alloc", "naive,caching"]).ok().stdout;
    let expected = [
        "oom.json: out of memory at event 13: 8 MiB requested on stream 0x0",
        "  3 GiB free on the device",
        "  40 MiB reserved, 18 MiB allocated",
        "  22 MiB free in 3 blocks, largest 11 MiB",
        "  stream 0x0: 20 MiB reserved, 11 MiB free in 2 blocks, largest 7 MiB",
        "  stream 0x5: 20 MiB reserved, 11 MiB free in one block",
        "  the free bytes would have sufficed but no single block does (fragmentation): allocate large tensors first, or set \
         max_split_size, or use expandable segments (expandable_segments)",
        "  earlier refused requests: 1",
    ];
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].ends_with(expected[0]), "{text}");
    assert_eq!(lines[1..expected.len()], expected[1..], "{text}");
    assert_eq!(lines.iter().filter(|line| line.contains("out of memory")).count(), 1, "{text}");
    let rows = test_dir.run(&["replay", file, "--alloc", "caching", "--limit", "1GiB", "--json"]).rows();
    let reports = rows[0]["out_of_memory"].as_array().unwrap();
    assert_eq!((reports.len(), &reports[0]["event"], &reports[0]["limit_bytes"]), (2, &json!(11), &json!(1u64 << 30)));
    assert_eq!(reports[0]["held"]["pending_bytes"], 4 * MIB);
    assert_eq!(
        reports[0]["streams"][1],
        json!({
            "stream": 5, "reserved_bytes": 20 * MIB, "allocated_bytes": 9 * MIB, "pending_bytes": 0,
            "free_bytes": 11 * MIB, "free_blocks": 1, "largest_free_bytes": 11 * MIB,
        })
    );
    // Without segments only live bytes are known.
    let lines = [line("alloc", 4096, 1000, 1), line("oom", 0, MIB, 1)].concat();
    let text = test_dir.run(&["replay", &test_dir.write("own.jsonl", lines), "--alloc", "naive"]).ok().stdout;
    assert!(text.contains("1000 B live; the recording does not show reserved memory"), "{text}");
}

#[test]
fn caching_reproduces_recorded_addresses() {
    let test_dir = TestDir::new();
    for (name, limit) in [
        ("mlp", None),
        ("streams", None),
        ("gpt2", None),
        ("resnet50", None),
        ("../../allocators/histories/tests/fixtures/resnet50.limit", Some("6000MiB")),
    ] {
        let file = trace(&format!("{name}.pickle.xz"));
        for device in ["sim", "null"] {
            let mut arguments =
                vec!["replay", &file, "--alloc", "caching", "--addresses", "recorded", "--device", device, "--json"];
            arguments.extend(["--plan", "off"]);
            arguments.extend(limit.iter().flat_map(|limit| ["--limit", limit]));
            let rows = test_dir.run(&arguments).rows();
            assert_eq!(
                (&rows[0]["address_mismatches"], &rows[0]["segment_mismatches"]),
                (&json!(0), &json!(0)),
                "{name}"
            );
            assert_eq!(rows[0]["num_alloc_retries"].as_u64() > Some(0), limit.is_some(), "{name}");
        }
    }
}

#[test]
fn bounds_hold_for_every_recording() {
    let test_dir = TestDir::new();
    // Largest ratio of the placement to the bound. A recording of two streams has a second placement without waits, and half the
    // steps for each.
    for (name, most) in [("mlp", 1.01), ("gpt2", 1.01), ("resnet50", 1.01), ("streams", 1.07)] {
        let file = trace(&format!("{name}.pickle.xz"));
        let rows = test_dir.run(&["replay", &file, "--alloc", "caching", "--device", "null", "--json"]).rows();
        let number = |key: &str| rows[0][key].as_u64().unwrap_or_else(|| panic!("{key}: {}", rows[0]));
        let (bound, plan) = (number("lower_bound_bytes"), number("plan_bytes"));
        let ordered = (number("ordered_lower_bound_bytes"), number("ordered_plan_bytes"));
        // Requests are rounded up, and blocks stay active until their free completes.
        assert!(number("max_live_bytes") <= bound && bound <= number("peak_active_bytes"), "{name}: {}", rows[0]);
        assert!(bound <= plan && plan <= number("peak_reserved_bytes"), "{name}: {}", rows[0]);
        assert!(ordered.0 <= ordered.1 && bound <= ordered.0, "{name}: {}", rows[0]);
        for (bound, plan) in [(bound, plan), ordered] {
            assert!(plan as f64 / bound as f64 <= most, "{name}: {plan} for {bound}");
        }
        assert_eq!((bound, plan) == ordered, name != "streams", "{name}");
    }
    let file = trace("streams.pickle.xz");
    let text = test_dir.run(&["replay", &file, "--alloc", "naive", "--plan", "off", "--device", "null"]).ok().stdout;
    assert!(text.contains("lower bound 765.0 MiB; without waits between streams: lower bound"), "{text}");
    assert!(!text.contains("offline placement"), "{text}");
    let rows =
        test_dir.run(&["replay", &file, "--alloc", "naive", "--plan", "off", "--device", "null", "--json"]).rows();
    assert!(rows[0]["lower_bound_bytes"].is_u64() && rows[0]["plan_bytes"].is_null(), "{}", rows[0]);
}

/// Blocks of random sizes and lifetimes in an RMM log: no placement reaches the bound, and an exact search goes deep.
fn crowded(blocks: u64) -> String {
    let mut state = 7_u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut text, mut live) = ("Thread,Time,Action,Pointer,Size,Stream\n".to_owned(), Vec::new());
    for block in 0..blocks {
        let (pointer, size) = (0x1_0000_0000_0000 + (block << 28), 512 * (1 + random(40_000)));
        text += &format!("1,00:00:00:000001,allocate,0x{pointer:x},{size},0x0\n");
        live.push((pointer, size));
        if live.len() > 200 {
            let (pointer, size) = live.swap_remove(random(200) as usize);
            text += &format!("1,00:00:00:000001,free,0x{pointer:x},{size},0x0\n");
        }
    }
    text
}

#[test]
fn plan_search_keeps_to_the_memory_budget_and_reports_it() {
    let test_dir = TestDir::new();
    let file = test_dir.write("crowded.csv", crowded(6000));
    let with = |memory: &str| {
        test_dir.run(&["replay", &file, "--alloc", "caching", "--device", "null", "--json", "--read-memory", memory])
    };
    let plenty = with("1GiB").rows();
    assert_eq!(plenty[0]["plan_end"], "steps", "{}", plenty[0]);
    let mut ends = Vec::new();
    for kib in [4096, 2048, 1536, 1280, 1024, 896, 768, 640, 512, 384, 256] {
        let output = with(&format!("{kib}KiB"));
        if output.code != Some(0) {
            output.refused(2, &["crowded.csv", "--read-memory"]);
            continue;
        }
        let rows = output.rows();
        assert_eq!(rows[0]["lower_bound_bytes"], plenty[0]["lower_bound_bytes"]);
        assert!(
            rows[0]["plan_bytes"].as_u64() >= plenty[0]["lower_bound_bytes"].as_u64()
                || rows[0]["plan_bytes"].is_null()
        );
        ends.push((kib, rows[0]["plan_end"].as_str().unwrap().to_owned()));
    }
    let (kib, _) = ends.iter().find(|(_, end)| end == "memory").unwrap_or_else(|| panic!("{ends:?}"));
    let memory = format!("{kib}KiB");
    let arguments = ["replay", &file, "--alloc", "caching", "--device", "null", "--read-memory", &memory];
    let text = test_dir.run(&arguments).ok().stdout;
    assert!(text.contains("search stopped: out of memory, raise --read-memory"), "{text}");
    let text = test_dir.run(&["plan", &file, "--read-memory", &memory]).ok().stdout;
    assert!(text.contains("search stopped: out of memory, raise --read-memory"), "{text}");
    let text = test_dir.run(&["plan", &file, "--steps", "100000"]).ok().stdout;
    assert!(text.contains("search stopped: out of steps, raise --steps"), "{text}");
}

/// Only an allocator that implements the recorded policy is compared with the recorded peak.
#[test]
fn recorded_peak_is_compared_with_the_recorded_policy() {
    let test_dir = TestDir::new();
    let comparison = |file: &str, alloc: &str| {
        let text = test_dir.run(&["replay", file, "--alloc", alloc, "--plan", "off", "--device", "null"]).ok().stdout;
        text.contains("\nRecorded: ").then_some(text.clone()).or_else(|| text.contains(" Recorded: ").then_some(text))
    };
    let native = trace("streams.pickle.xz");
    let expandable = trace("../../allocators/histories/tests/fixtures/streams.expandable.pickle.xz");
    for (file, alloc) in [
        (&native, "pytorch-expandable"),
        (&native, "caching:retry_fit_after_sync=on"),
        (&native, "lab:fit=first"),
        (&expandable, "caching"),
        (&expandable, "lab"),
    ] {
        assert_eq!(comparison(file, alloc), None, "{file} under {alloc}");
    }
    for (file, alloc) in [(&native, "caching"), (&native, "lab"), (&expandable, "pytorch-expandable")] {
        let text = comparison(file, alloc).unwrap_or_else(|| panic!("{file} under {alloc}"));
        assert!(text.contains(&format!("reproduced by {alloc}.")), "{text}");
    }
    let text = comparison(&native, "pytorch-expandable,lab").unwrap();
    assert!(text.contains("reproduced by lab."), "{text}");
}

#[test]
fn late_recording_is_replayed_from_its_inferred_start() {
    let complete = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories/gpt2.pickle.xz");
    let mut events = Vec::new();
    let mut keep = |event| {
        events.push(event);
        Ok(())
    };
    let summary = read(&complete, &ReadOptions::default(), &mut keep).unwrap();
    let test_dir = TestDir::new();
    let file = test_dir.at("late.json");
    let mut writer = Export::SnapshotJson.create(&file).unwrap();
    events[events.len() * 2 / 5..].iter().for_each(|event| writer.event(event).unwrap());
    let settings = Some(&summary.allocator_settings);
    writer
        .finish(&Ending { segments: &summary.segments, allocator_settings: settings, devices: 1, origins: None })
        .unwrap();
    let file = file.to_str().unwrap();

    let arguments = ["replay", file, "--alloc", "caching", "--device", "null"];
    let rows = test_dir.run(&[&arguments[..], &["--addresses", "recorded", "--json"]].concat()).rows();
    assert_eq!((&rows[0]["address_mismatches"], &rows[0]["segment_mismatches"]), (&json!(0), &json!(0)), "{}", rows[0]);
    let number = |key: &str| rows[0][key].as_u64().unwrap();
    assert!(number("prologue_segments") > 10 && number("prologue_allocations") > 100, "{}", rows[0]);
    assert!(number("prologue_reserved_bytes") <= number("peak_reserved_bytes"), "{}", rows[0]);
    let table = test_dir.run(&arguments).ok().stdout;
    assert!(table.contains("existed before recording started, inferred from its end"), "{table}");

    // Without the segments at the end only blocks that are freed later are known.
    let mut document: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    document["segments"] = json!([]);
    let cut = test_dir.write("cut.json", document.to_string());
    let table = test_dir.run(&["replay", &cut, "--alloc", "naive", "--device", "null"]).ok().stdout;
    assert!(table.contains("they are allocated first: the segments at its end contradict"), "{table}");
    let refused = ["replay", &cut, "--alloc", "caching", "--addresses", "recorded"];
    test_dir.run(&refused).refused(2, &["frees a block from before recording started"]);
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let test_dir = TestDir::new();
    let write = |name: &str, lines: &[String]| test_dir.write(name, lines.concat());
    let alloc = |addr, bytes| line("alloc", addr, bytes, 1);
    let free = |addr, bytes| line("free_requested", addr, bytes, 1);
    let streams: Vec<String> = (1..=100_000).map(|at| line("alloc", at << 20, 512, at)).collect();
    for (lines, words) in [
        (vec![free(4096, 512)], "never allocated"),
        (vec![alloc(4096, 1024), alloc(4608, 1024)], "overlaps"),
        (vec![alloc(4096, 1024), free(4096, 1024), free(4096, 1024)], "no block is live"),
        (vec![alloc(4096, 1 << 62)], "no device has more than 256 TiB"),
        (streams, "more than 4096 streams"),
    ] {
        let file = write("bad.jsonl", &lines);
        for command in ["replay", "capacity"] {
            test_dir.run(&[command, &file]).refused(2, &["bad.jsonl", "event ", words]);
        }
    }
    let file = write("good.jsonl", &[alloc(4096, 512)]);
    test_dir
        .run(&["replay", &file, "--addresses", "recorded"])
        .refused(2, &["good.jsonl", "no segments", "--addresses own"]);
    test_dir.run(&["replay", "missing.pickle"]).refused(2, &["missing.pickle"]);
    test_dir.run(&["replay", &write("empty.jsonl", &[])]).refused(2, &["empty.jsonl"]);
    test_dir.run(&["replay", &file, "--gpu", "3"]).refused(2, &["good.jsonl", "no event of GPU 3", "events of 0"]);
    test_dir.run(&["replay", &file, "--device", "sim:missing.json"]).refused(2, &["missing.json"]);
    // The allocator is at fault, not the recording.
    for command in ["replay", "capacity"] {
        let output = test_dir.run(&[command, &file, "--alloc", "plan:file=nope"]);
        output.refused(2, &["error: plan: cannot use nope: ", "; `vramlab plan HISTORY --out FILE` writes plans"]);
        assert!(!output.stderr.contains("good.jsonl"), "{output:?}");
    }
    test_dir.run(&["capacity", &file, "--device", "cuda"]).refused(2, &["--device cuda"]);
    test_dir.run(&["capacity", &file, "--granularity", "0"]).refused(2, &["--granularity"]);
    for arguments in [&["replay", &file, "--alloc", "best"][..], &["replay"], &["replay", &file, "--device", "gpu"]] {
        assert_eq!(test_dir.run(arguments).code, Some(2), "{arguments:?}");
    }
}

#[test]
fn capacity_finds_the_minimum_memory() {
    let test_dir = TestDir::new();
    let file = test_dir.write("a.jsonl", steps());
    let rows = test_dir.run(&["capacity", &file, "--device", "null", "--granularity", "1MiB", "--json"]).rows();
    let capacities: Vec<(&str, u64)> =
        rows.iter().map(|row| (row["allocator"].as_str().unwrap(), row["capacity_bytes"].as_u64().unwrap())).collect();
    // naive and the CUDA memory pool need the live bytes; caching needs a segment of 20 MiB and one of 2 MiB.
    assert_eq!(capacities, [("naive", 8 * MIB), ("caching", 22 * MIB), ("stream-ordered", 8 * MIB)]);
    for row in &rows {
        assert_eq!(row["max_live_bytes"], 8 * MIB);
        let capacity = row["capacity_bytes"].as_u64().unwrap();
        assert!((row["ratio"].as_f64().unwrap() - capacity as f64 / (8 * MIB) as f64).abs() < 1e-12, "{row}");
        let probes: Vec<(u64, bool)> = row["probes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|probe| (probe["bytes"].as_u64().unwrap(), probe["runs"].as_bool().unwrap()))
            .collect();
        assert!(probes.contains(&(capacity, true)), "{row}");
        assert!(capacity == 8 * MIB || probes.contains(&(capacity - MIB, false)), "{row}");
    }
    let table = test_dir.run(&["capacity", &file, "--alloc", "caching,naive"]).ok().stdout;
    assert!(table.contains("minimum memory") && table.contains("in steps of 2 MiB"), "{table}");
}

#[test]
fn capacity_suggests_a_replay_of_the_best_allocators() {
    let test_dir = TestDir::new();
    let file = test_dir.write("a.jsonl", steps());
    for (given, best) in [
        // The one of two that needs less, with its settings.
        ("caching:max_split_size=20M,remap", &["remap"][..]),
        ("pytorch:max_split_size=20M", &["pytorch:max_split_size=20M"]),
        (
            "pytorch,caching:roundup_power2_divisions=[1:4,>:8]",
            &["pytorch", "caching:roundup_power2_divisions=[1:4,>:8]"],
        ),
    ] {
        let arguments = ["capacity", &file, "--alloc", given, "--gpu", "0"];
        let size = test_dir.run(&[&arguments[..], &["--json"]].concat()).rows().iter().map(capacity_of).min().unwrap();
        let page = test_dir.run(&arguments).ok().stdout;
        let next = page.lines().last().unwrap();
        let (_, arguments) = next
            .split_once(if next.contains("-p vramlab-cli") { "vramlab-cli " } else { "vramlab " })
            .unwrap_or_else(|| panic!("{next}"));
        let arguments: Vec<&str> =
            arguments.trim_start_matches("-- ").split(' ').map(|word| word.trim_matches('\'')).collect();
        assert!(arguments.contains(&format!("{size}B").as_str()), "{next}");
        let rows = test_dir.run(&[&arguments[..], &["--json"]].concat()).rows();
        let replayed: Vec<&str> = rows.iter().map(|row| row["alloc"].as_str().unwrap()).collect();
        assert_eq!(replayed, best, "{next}");
        assert!(rows.iter().all(|row| row["failed_allocations"] == 0), "{rows:?}");
    }
}

fn capacity_of(row: &serde_json::Value) -> u64 {
    row["capacity_bytes"].as_u64().unwrap()
}

#[test]
fn capacity_is_at_least_the_peak_live_bytes() {
    let file = trace("streams.pickle.xz");
    let rows = TestDir::new().run(&["capacity", &file, "--json"]).rows();
    assert_eq!(rows.len(), 3);
    for row in &rows {
        assert!(
            row["ratio"].as_f64().unwrap() >= 1.0 && row["capacity_bytes"].as_u64() >= row["max_live_bytes"].as_u64()
        );
        assert!(Path::new(row["trace"].as_str().unwrap()).ends_with("streams.pickle.xz"));
    }
}

/// A snapshot with these events.
fn snapshot(events: &[serde_json::Value]) -> String {
    json!({"segments": [], "device_traces": [events], "allocator_settings": {}}).to_string()
}

#[test]
fn replay_compares_blocks_with_placements_of_rmm() {
    let test_dir = TestDir::new();
    let event = |action: &str, addr: u64, size: u64| json!({"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1});
    let [first, second, third] = [1 << 30, (1 << 30) + MIB, (1 << 30) + 4 * MIB];
    let history = test_dir.write(
        "history.json",
        snapshot(&[
            event("segment_alloc", first, 20 * MIB),
            event("alloc", first, 1000),
            event("alloc", second, 2 * MIB),
            event("free_requested", first, 1000),
            event("free_completed", first, 1000),
            event("alloc", third, 300),
        ]),
    );
    let header = "# RMM 26.10 pool, a GPU; upstream blocks, bytes@address: 1048576@2097152 2097152@0\n# a SLOT ...\n";
    let right = "a 0 1000 0 0 0\na 1 2097152 0 1 0\nf 0\na 2 300 0 0 0\n";
    let run = |file: &str, further: &[&str]| {
        test_dir.run(&[&["replay", &history, "--device", "null", "--against", file], further].concat())
    };
    let file = test_dir.write("right.txt", format!("{header}{right}"));
    for further in [&["--json"][..], &["--json", "--alloc", "rmm-pool"]] {
        let rows = run(&file, further).rows();
        let row = &rows[0];
        assert_eq!((rows.len(), &row["alloc"]), (1, &json!("rmm-pool:initial_pool_size=1M")));
        assert_eq!((&row["addresses"], &row["against"]), (&json!("against"), &json!(file)));
        assert_eq!((&row["address_mismatches"], &row["segment_mismatches"]), (&json!(0), &json!(0)), "{row}");
    }
    let text = run(&file, &[]).ok().stdout;
    assert!(text.contains("blocks elsewhere") && text.contains("other segments"), "{text}");
    // One block at another offset, and a device block that only RMM allocated.
    let other = right.replace("a 2 300 0 0 0", "a 2 300 0 0 512");
    let header_of_three = header.replace("2097152@0", "2097152@0 256@8388608");
    let rows = run(&test_dir.write("other.txt", format!("{header_of_three}{other}")), &["--json"]).rows();
    assert_eq!((&rows[0]["address_mismatches"], &rows[0]["segment_mismatches"]), (&json!(1), &json!(1)));

    run(&file, &["--alloc", "caching"]).refused(2, &["right.txt", "RMM's pool", "write --alloc rmm-pool"]);
    run(&file, &["--alloc", "rmm-pool:initial_pool_size=2M"]).refused(2, &["right.txt", "leave initial_pool_size out"]);
    run(&history, &[]).refused(2, &["history.json:1", "does not begin a file of placements"]);
    run("absent.txt", &[]).refused(2, &["absent.txt"]);
    let refused = |name: &str, text: String, words: &[&str]| run(&test_dir.write(name, text), &[]).refused(2, words);
    refused("none.txt", header.to_owned(), &["none.txt", "there is no allocation in it"]);
    refused("short.txt", format!("{header}a 0 1000 0 0 0\n"), &["history.json", "belong to another recording"]);
    refused("size.txt", format!("{header}a 0 1001 0 0 0\n"), &["allocation 1 is of 1000 bytes in the recording"]);
    refused("late.txt", header.to_owned() + &right.replace("f 0\n", "") + "f 0\n", &["after allocation 2"]);
    refused("room.txt", format!("{header}a 0 1000 0 0 1048000\n"), &["room.txt:3", "by the header"]);
    let overlaps = header.replace("2097152@0", "2097152@1048576");
    refused("wrong.txt", format!("{overlaps}{right}"), &["wrong.txt:1", "overlap"]);
    let both = test_dir.run(&["replay", &history, &history, "--against", &file]);
    both.refused(2, &["--against compares one recording"]);
}
