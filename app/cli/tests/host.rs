//! Pinned host memory: `replay --host`, and what `explain` and `advise` say of a snapshot that has it.

use crate::common::TestDir;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// An event of pinned memory in a snapshot.
fn event(action: &str, addr: u64, size: u64, line: u64) -> Value {
    let frame = json!({"name": "load", "filename": "loader.py", "line": line});
    json!({"action": action, "addr": addr, "size": size, "stream": 0, "device": -1, "time_us": 5, "frames": [frame]})
}

/// A snapshot with these events of pinned memory, and one event of a GPU.
fn snapshot(host: &[Value], segments: &[Value], settings: Value) -> String {
    let frames = json!([{"name": "step", "filename": "train.py", "line": 7}]);
    let of_gpu = |action: &str, size: u64| json!({"action": action, "addr": 1 << 30, "size": size, "stream": 0, "time_us": 1, "frames": frames});
    let block =
        json!({"address": 1 << 30, "size": 2 * MIB, "requested_size": MIB, "state": "active_allocated", "frames": []});
    json!({
        "segments": [{
            "device": 0, "address": 1 << 30, "total_size": 2 * MIB, "allocated_size": 2 * MIB, "active_size": 2 * MIB,
            "requested_size": MIB, "stream": 0, "segment_type": "large", "segment_pool_id": [0, 0], "is_expandable": false,
            "frames": [], "blocks": [block]
        }],
        "device_traces": [[of_gpu("segment_alloc", 2 * MIB), of_gpu("alloc", 2 * MIB)]],
        "host_segments": segments,
        "host_traces": host,
        "allocator_settings": settings,
        "external_annotations": [],
    })
    .to_string()
}

/// Two buffers of 8 GiB blocks, of which one waits for its copy when the other is freed.
pub(crate) fn offload() -> String {
    let events = [
        event("segment_alloc", 1 << 36, 8 * GIB, 10),
        event("alloc", 1 << 36, 8 * GIB, 10),
        event("segment_alloc", 1 << 37, 8 * GIB, 20),
        event("alloc", 1 << 37, 8 * GIB, 20),
        event("free_requested", 1 << 36, 8 * GIB, 10),
        event("free_requested", 1 << 37, 8 * GIB, 20),
        event("segment_alloc", 1 << 38, 8 * GIB, 30),
        event("alloc", 1 << 38, 8 * GIB, 30),
        event("free_completed", 1 << 36, 8 * GIB, 10),
        event("alloc", 1 << 36, 8 * GIB, 40),
    ];
    snapshot(&events, &[], json!({}))
}

fn rows(test_dir: &TestDir, words: &[&str]) -> Vec<Value> {
    let words: Vec<&str> = ["replay", "--host", "--json"].iter().chain(words).copied().collect();
    serde_json::from_str(&test_dir.run(&words).ok().stdout).unwrap()
}

#[test]
fn a_snapshot_is_replayed_block_by_block_and_its_requests_are_bounded() {
    let test_dir = TestDir::new();
    test_dir.file("snapshot.json", offload());
    let rows = rows(&test_dir, &["snapshot.json", "--alloc", "host-pytorch,host-exact"]);
    let [pytorch, exact] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!(pytorch["sizes"], "blocks");
    assert_eq!((&pytorch["differences"], &pytorch["contradictions"]), (&0.into(), &0.into()));
    assert_eq!(pytorch["peak_reserved_bytes"], 24 * GIB);
    assert_eq!(pytorch["peak_reserved_least_bytes"], 24 * GIB);
    assert_eq!(pytorch["recorded_peak_reserved_bytes"], 24 * GIB);
    assert_eq!((&pytorch["pin_calls"], &pytorch["deferred_frees"]), (&3.into(), &2.into()));
    assert_eq!(pytorch["rounding_bytes"], Value::Null, "requests are not recorded");
    let least = exact["peak_reserved_least_bytes"].as_u64().unwrap();
    assert!((12 * GIB..12 * GIB + MIB).contains(&least), "{least}");
    let screen = test_dir.run(&["replay", "--host", "snapshot.json"]).ok().stdout;
    for part in ["peak pinned", "host-rmm-pool", "recorded: 24 GiB", "not as recorded", "more than half of its block"] {
        assert!(screen.contains(part), "{part}: {screen}");
    }
}

#[test]
fn requests_of_any_trace_are_replayed_as_host_memory() {
    let test_dir = TestDir::new();
    let sizes = [4.5, 6.0, 10.0, 12.0, 20.4, 2.25].map(|gib| (gib * GIB as f64) as u64);
    let line = |(at, size): (usize, &u64)| {
        let event = json!({"time_ns": at, "action": "alloc", "addr": (at as u64 + 1) << 40, "size": size, "stream": 0});
        event.to_string() + "\n"
    };
    test_dir.file("requests.jsonl", sizes.iter().enumerate().map(line).collect::<String>());
    let rows = rows(&test_dir, &["requests.jsonl", "--alloc", "host-pytorch,host-exact"]);
    let asked: u64 = sizes.iter().sum();
    let (pytorch, exact) = (&rows[0], &rows[1]);
    assert_eq!(pytorch["peak_reserved_bytes"], 84 * GIB, "55.2 GiB asked, 84 taken");
    assert_eq!((&pytorch["peak_live_bytes"], &pytorch["rounding_bytes"]), (&asked.into(), &(84 * GIB - asked).into()));
    assert_eq!(pytorch["differences"], Value::Null);
    assert!(exact["peak_reserved_bytes"].as_u64().unwrap() < asked + MIB, "{exact}");
    // The published time of cudaHostAlloc: 8 GiB in 2.79 s.
    let seconds = pytorch["pin_s"].as_f64().unwrap();
    assert!((seconds - 84.0 / 8.0 * 2.79).abs() < 1e-6, "{seconds}");
    let other = self::rows(&test_dir, &["requests.jsonl", "--alloc", "host-pytorch", "--pin-costs", "g6.4xlarge"]);
    assert!(other[0]["pin_s"].as_f64().unwrap() > seconds && other[0]["costs"] == "g6.4xlarge");
    let limited = self::rows(&test_dir, &["requests.jsonl", "--alloc", "host-pytorch,host-exact", "--limit", "60GiB"]);
    assert!(limited[0]["failed_allocations"] != 0 && limited[1]["failed_allocations"] == 0, "{limited:?}");
}

/// Requests as the recorder in PyTorch writes them, under a thresholded release: 100 MiB are exact, 3 MiB are rounded.
fn recorded_requests(settings: &Value) -> String {
    let line = |at: u64, action: &str, addr: u64, size: u64, more: Value| {
        let mut line = json!({"time_ns": at, "action": action, "addr": addr << 30, "size": size, "stream": 0});
        line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        line.to_string() + "\n"
    };
    let frames = json!({"stack": 3, "frames": [{"name": "load", "filename": "loader.py", "line": 7}]});
    [
        line(1, "segment_alloc", 1, 4 * MIB, json!({"allocator_settings": settings})),
        line(2, "alloc", 1, 3 * MIB, frames),
        line(3, "record_use", 1, 3 * MIB, json!({})),
        line(4, "free_requested", 1, 3 * MIB, json!({"deferred": true})),
        line(5, "segment_alloc", 2, 4 * MIB, json!({})),
        line(6, "alloc", 2, 3 * MIB, json!({"stack": 3})),
        line(7, "free_completed", 1, 3 * MIB, json!({})),
        line(8, "alloc", 1, 3 * MIB, json!({})),
        line(9, "segment_alloc", 3, 100 * MIB, json!({})),
        line(10, "alloc", 3, 100 * MIB, json!({})),
    ]
    .concat()
}

#[test]
fn requests_that_pytorch_recorded_are_replayed_as_it_served_them() {
    let test_dir = TestDir::new();
    let settings = json!({"release": "2.14", "pinned_max_round_threshold_mb": "64"});
    test_dir.file("pid1-host.jsonl", recorded_requests(&settings));
    let rows = rows(&test_dir, &["pid1-host.jsonl", "--alloc", "host-pytorch,host-exact"]);
    let (pytorch, exact) = (&rows[0], &rows[1]);
    assert_eq!(pytorch["sizes"], "requested");
    assert_eq!((&pytorch["differences"], &pytorch["contradictions"]), (&0.into(), &0.into()));
    assert_eq!(pytorch["peak_reserved_bytes"], 108 * MIB);
    assert_eq!(pytorch["recorded_peak_reserved_bytes"], 108 * MIB);
    assert_eq!((&pytorch["peak_live_bytes"], &pytorch["deferred_frees"]), (&(106 * MIB).into(), &1.into()));
    assert_eq!(pytorch["allocator_settings"]["release"], "R2_14");
    assert!(exact["peak_reserved_bytes"].as_u64().unwrap() <= 108 * MIB, "{exact}");
    let screen = test_dir.run(&["replay", "pid1-host.jsonl", "--host", "--alloc", "host-pytorch"]).ok().stdout;
    for part in ["recorded: 108 MiB", "loader.py:7", "rounding at peak"] {
        assert!(screen.contains(part), "{part}: {screen}");
    }
    // Without the settings all is rounded, which is not what was recorded.
    test_dir.file("other.jsonl", recorded_requests(&json!({"release": "2.11"})));
    let other = &self::rows(&test_dir, &["other.jsonl", "--alloc", "host-pytorch"])[0];
    assert_eq!((&other["peak_reserved_bytes"], &other["differences"]), (&(136 * MIB).into(), &0.into()));
}

#[test]
fn requests_beside_a_recording_are_advised_on_and_explained() {
    let test_dir = TestDir::new();
    // Without pinned memory of its own, as before PyTorch 2.14.
    test_dir.file("pid1.pickle", snapshot(&[], &[], json!({})));
    let advice = |words: &[&str]| -> Value {
        serde_json::from_str(&test_dir.run(&[&["advise", "--json", "pid1.pickle"], words].concat()).ok().stdout)
            .unwrap()
    };
    assert_eq!(advice(&[])["host"], Value::Null);
    test_dir.file("pid1-host.jsonl", recorded_requests(&json!({"release": "2.11"})));
    let host = &advice(&[])["host"];
    assert_eq!((&host["sizes"], &host["release"]), (&"requested".into(), &"2.11".into()));
    assert_eq!(
        (&host["peak_requested_bytes"], &host["peak_requested_least_bytes"]),
        (&(106 * MIB).into(), &(106 * MIB).into())
    );
    assert_eq!(host["settings"][0]["peak_reserved_bytes"], 136 * MIB);
    let other = &advice(&["--torch", "2.14"])["host"];
    assert_eq!(other["release"], "2.14");
    assert!(other["settings"].as_array().unwrap().len() > 1, "thresholds are of 2.13 and newer: {other}");
    let screen = test_dir.run(&["advise", "pid1.pickle"]).ok().stdout;
    assert!(screen.contains("108 MiB of host memory pinned for 106 MiB requested"), "{screen}");
    let screen = test_dir.run(&["explain", "pid1.pickle"]).ok().stdout;
    assert!(screen.contains("106 MiB in pinned blocks at the peak, 108 MiB pinned in all"), "{screen}");
    assert!(screen.contains("loader.py:7"), "{screen}");
    // What a killed process left, a link, and other recordings.
    test_dir.file("pid1-host.jsonl", "{\"time_ns\": 1, \"act");
    assert_eq!(advice(&[])["host"], Value::Null);
    for command in ["advise", "explain"] {
        test_dir.file("pid2-host.jsonl", recorded_requests(&json!({"release": "2.11"})));
        let words = ["requests of pinned host memory, not of a GPU's", "--host"];
        test_dir.run(&[command, "pid2-host.jsonl"]).refused(2, &words);
        // Of a CUDA program's calls.
        let call =
            json!({"time_ns": 1, "action": "alloc", "addr": 4096, "size": MIB, "stream": 0, "call": "cuMemHostAlloc"});
        test_dir.file("calls-3-host.jsonl", format!("{call}\n"));
        test_dir.run(&[command, "calls-3-host.jsonl"]).refused(2, &words);
    }
}

#[test]
fn settings_of_recorded_requests_may_be_anything() {
    let test_dir = TestDir::new();
    for settings in [json!({"release": 7}), json!({"release": "1.2", "pinned_reserve_segment_size_mb": "x"}), json!({})]
    {
        test_dir.file("pid1-host.jsonl", recorded_requests(&settings));
        let rows = rows(&test_dir, &["pid1-host.jsonl", "--alloc", "host-pytorch"]);
        assert_eq!(rows[0]["peak_reserved_bytes"], 136 * MIB, "{settings}");
    }
    // A threshold that the release does not have.
    let settings = json!({"release": "2.11", "pinned_max_round_threshold_mb": "64"});
    test_dir.file("pid1-host.jsonl", recorded_requests(&settings));
    let replay = ["replay", "--host", "pid1-host.jsonl", "--alloc", "host-pytorch"];
    test_dir.run(&replay).refused(2, &["pinned_max_round_threshold_mb is of PyTorch 2.13 and newer; this is 2.11"]);
    test_dir.file("list.jsonl", recorded_requests(&json!([1])));
    test_dir.run(&["replay", "--host", "list.jsonl"]).refused(2, &["list.jsonl", "line 1"]);
}

#[test]
fn a_simulated_host_has_no_device_of_its_own() {
    let test_dir = TestDir::new();
    let event = json!({"time_ns": 1, "action": "alloc", "addr": 64, "size": MIB, "stream": 0}).to_string() + "\n";
    test_dir.file("requests.jsonl", &event);
    let replay = ["replay", "--host", "requests.jsonl", "--device"];
    for (device, words) in [(&["null"][..], "write sim"), (&["sim:none.json"], "write sim")] {
        test_dir.run(&[&replay[..], device].concat()).refused(2, &[words]);
    }
    for option in [&["--limit", "1GiB"][..], &["--pin-costs", "h100x8"]] {
        test_dir.run(&[&replay[..], &["cuda"], option].concat()).refused(2, &[option[0], "simulated host"]);
    }
    assert_eq!(rows(&test_dir, &["requests.jsonl", "--device", "sim"])[0]["device"], "sim");
}

#[test]
fn overruns_before_the_scan_are_counted() {
    let test_dir = TestDir::new();
    let event = |action: &str, addr: u64, size: u64| {
        json!({"time_ns": 1, "action": action, "addr": addr, "size": size, "stream": 0}).to_string() + "\n"
    };
    let text =
        event("alloc", 64, 150 * MIB) + &event("free_requested", 64, 150 * MIB) + &event("alloc", 128, 200 * MIB);
    test_dir.file("requests.jsonl", &text);
    let conf = "pinned_max_round_threshold_mb=128,pinned_max_cached_size_mb=1024";
    let alloc = format!("host-pytorch:release=2.13,{conf},host-pytorch:release=2.15,{conf}");
    let rows = rows(&test_dir, &["requests.jsonl", "--alloc", &alloc]);
    assert_eq!(rows[0]["overruns"], json!({"count": 1, "bytes": 50 * MIB}));
    assert_eq!(rows[1]["overruns"], json!({"count": 0, "bytes": 0}));
}

#[test]
fn explain_names_who_pins_and_what_waits() {
    let test_dir = TestDir::new();
    test_dir.file("snapshot.json", offload());
    let explanation: Value =
        serde_json::from_str(&test_dir.run(&["explain", "--json", "snapshot.json"]).ok().stdout).unwrap();
    let host = &explanation["host"];
    assert_eq!(host["peak_active_bytes"], 24 * GIB);
    assert_eq!(host["lines"][0]["bytes"], 8 * GIB);
    assert!(host["lines"][0]["line"].as_str().unwrap().contains("loader.py:"), "{host}");
    assert_eq!((&host["deferred_frees"], &host["peak_waiting_bytes"]), (&2.into(), &(16 * GIB).into()));
    assert_eq!((&host["front"]["behind"], &host["front"]["behind_bytes"]), (&1.into(), &(8 * GIB).into()));
    assert!(host["front"]["line"].as_str().unwrap().contains("loader.py:10"), "{host}");
    assert!(host["stuck"]["line"].as_str().unwrap().contains("loader.py:20"), "{host}");
    let rounding = host["rounding_most_bytes"].as_u64().unwrap();
    assert_eq!(rounding, 3 * (4 * GIB - 1));
    let screen = test_dir.run(&["explain", "snapshot.json"]).ok().stdout;
    for part in ["24 GiB in pinned blocks at the peak", "loader.py:10", "not completed at the end"] {
        assert!(screen.contains(part), "{part}: {screen}");
    }
}

#[test]
fn advise_answers_for_the_host_by_release() {
    let test_dir = TestDir::new();
    test_dir.file("snapshot.json", offload());
    let advice = |words: &[&str]| -> Value {
        let words: Vec<&str> = ["advise", "--json", "snapshot.json"].iter().chain(words).copied().collect();
        serde_json::from_str(&test_dir.run(&words).ok().stdout).unwrap()
    };
    let host = &advice(&[])["host"];
    assert_eq!((&host["release"], &host["peak_reserved_bytes"]), (&"2.14".into(), &(24 * GIB).into()));
    assert_eq!(host["settings"][0]["conf"], "");
    let confs: Vec<&str> =
        host["settings"].as_array().unwrap().iter().map(|setting| setting["conf"].as_str().unwrap()).collect();
    assert!(confs.iter().any(|conf| conf.contains("pinned_max_round_threshold_mb")), "{confs:?}");
    // Before 2.15 a pair that caches exact sizes can overrun.
    for conf in confs.iter().filter(|conf| conf.contains("round_threshold")) {
        assert!(conf.contains("pinned_max_cached_size_mb"), "{conf}");
    }
    let old = &advice(&["--torch", "2.11"])["host"];
    assert_eq!(old["release"], "2.11");
    let text = old["settings"].to_string();
    assert!(!text.contains("threshold"), "2.11 has no thresholds: {text}");
    assert!(text.contains("pinned_use_cuda_host_register:True"), "{text}");
    let kinds: Vec<&str> =
        old["changes"].as_array().unwrap().iter().map(|change| change["kind"].as_str().unwrap()).collect();
    assert!(kinds.iter().all(|kind| ["register-in-place", "flat-buffer"].contains(kind)), "{kinds:?}");
    let screen = test_dir.run(&["advise", "snapshot.json"]).ok().stdout;
    assert!(screen.contains("Pinned host memory") && screen.contains("24 GiB of host memory pinned"), "{screen}");
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let test_dir = TestDir::new();
    test_dir.file("none.json", snapshot(&[], &[], json!({})));
    test_dir.file("some.json", offload());
    test_dir.file("costs.json", "{\"name\": 3}");
    test_dir.file("empty.jsonl", "");
    let huge = json!({"time_ns": 1, "action": "alloc", "addr": 64, "size": u64::MAX, "stream": 0});
    test_dir.file("huge.jsonl", huge.to_string());
    test_dir.file("nonsense.jsonl", "{\"time_ns\": 1, \"action\": \"alloc\", \"addr\": 1}\n");
    let damaged = snapshot(&[json!({"action": "alloc", "addr": 5, "size": "x"})], &[], json!({}));
    test_dir.file("damaged.json", &damaged);
    for (words, part) in [
        (&["none.json"][..], "has no pinned host memory; PyTorch 2.14 and newer record it"),
        (&["missing.json"], "missing.json"),
        (&["empty.jsonl"], "empty"),
        (&["damaged.json"], "size"),
        (&["huge.jsonl"], "event 1: 18446744073709551615 bytes of host memory are more than any machine has"),
        (&["nonsense.jsonl"], "line 1"),
        (
            &["some.json", "--alloc", "caching"],
            "caching allocates a GPU's memory; with --host choose among host-pytorch",
        ),
        (&["some.json", "--alloc", "host-pytorch:release=2.5"], "'release' takes 2.6"),
        (
            &["some.json", "--alloc", "host-pytorch:release=2.11,pinned_max_cached_size_mb=4"],
            "of PyTorch 2.13 and newer",
        ),
        (&["some.json", "--pin-costs", "nothing"], "neither a machine (h100x8, g6.4xlarge) nor a file"),
        (&["some.json", "--pin-costs", "costs.json"], "costs of pinned memory"),
    ] {
        let words: Vec<&str> = ["replay", "--host"].iter().chain(words).copied().collect();
        let ran = test_dir.run(&words);
        assert_eq!(ran.code, Some(2), "{words:?}: {ran:?}");
        assert!(ran.stderr.contains(part), "{words:?}: {}", ran.stderr);
        let errors = ran.stderr.lines().filter(|line| line.starts_with("error: "));
        assert_eq!(errors.count(), 1, "{}", ran.stderr);
    }
    let ran = test_dir.run(&["replay", "some.json", "--alloc", "host-exact"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("host-exact allocates pinned host memory; write --host"), "{ran:?}");
    let ran = test_dir.run(&["capacity", "some.json", "--alloc", "host-exact"]);
    assert!(ran.code == Some(2) && ran.stderr.contains("replay FILE --host"), "{ran:?}");
}
