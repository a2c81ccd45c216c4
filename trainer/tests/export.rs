//! Output of `--export`: the run's own trace, in every format, for every allocator.

use crate::common::{self, FinishedRun, arms, digits, iris, train};
use std::collections::BTreeMap;
use trainer::Settings;
use vramlab::BlockState;
use vramlab::backends::stream_ordered;
use vramlab::histories::formats::{Action, Event, Export, ReadOptions, Summary, read};
use vramlab::histories::replay::snapshot_settings;

fn history(run: &FinishedRun, file: &str) -> (Vec<Event>, Summary) {
    let mut events = Vec::new();
    let summary = read(&run.path().join(file), &ReadOptions::default(), &mut |event| {
        events.push(event);
        Ok(())
    })
    .unwrap();
    (events, summary)
}

fn exporting(settings: &Settings) -> Settings {
    Settings { exports: Export::ALL.to_vec(), ..settings.clone() }
}

fn is_segment(event: &Event) -> bool {
    matches!(event.action, Action::SegmentAlloc | Action::SegmentFree)
}

#[test]
fn exports_hold_the_run_s_own_history() {
    for (name, settings) in arms(&exporting(&iris())) {
        let run = train(&settings).finished();
        let names: Vec<&str> = Export::ALL.iter().map(|export| export.file_name()).collect();
        assert_eq!(run.json()["files"]["exports"], serde_json::json!(names));
        assert_eq!(run.json()["settings"]["trace"], true);
        let (trace, _) = history(&run, "trace.jsonl");
        let (snapshot, summary) = history(&run, "snapshot.pickle");
        // Whole microseconds; otherwise what the trace says, with segments between.
        let micros = |event: &Event| Event { time_ns: event.time_ns / 1000 * 1000, ..*event };
        let kept: Vec<Event> = snapshot.iter().filter(|event| !is_segment(event)).copied().collect();
        assert_eq!(kept, trace.iter().map(micros).collect::<Vec<_>>(), "{name}");
        let (json, also) = history(&run, "snapshot.json");
        assert_eq!((&json, &also.segments), (&snapshot, &summary.segments), "{name}");
        let settings = &run.json()["settings"]["allocator_settings"];
        assert_eq!(also.allocator_settings, snapshot_settings(settings), "{name}");
        assert_eq!(also.allocator_settings, summary.allocator_settings, "{name}");
        let (rmm, _) = history(&run, "rmm.csv");
        assert_eq!(rmm, kept, "{name}");
        let (buffers, _) = history(&run, "minimalloc.csv");
        let sizes = |events: &[Event]| {
            events.iter().filter(|event| event.action == Action::Alloc).map(|event| event.bytes).collect::<Vec<_>>()
        };
        assert_eq!(sizes(&buffers), sizes(&trace), "{name}");
        assert!(run.json()["files"]["driver_calls"] == "driver_calls.jsonl");
    }
}

/// Follows a history: blocks lie in segments, segments go back empty, and what is left is what the snapshot says.
fn follow(name: &str, events: &[Event], summary: &Summary) {
    let (mut segments, mut blocks) = (BTreeMap::new(), BTreeMap::new());
    let mut before = 0;
    for event in events {
        assert!(event.time_ns >= before, "{name}: time goes back at {event:?}");
        before = event.time_ns;
        match event.action {
            Action::SegmentAlloc => assert_eq!(segments.insert(event.addr, event.bytes), None, "{name}"),
            Action::SegmentFree => {
                assert_eq!(segments.remove(&event.addr), Some(event.bytes), "{name}");
                let inside = blocks.range(event.addr..event.addr + event.bytes).next();
                assert_eq!(inside, None, "{name}: a segment goes back with a block in it");
            }
            Action::Alloc => {
                let (addr, bytes) = segments.range(..=event.addr).next_back().expect("a block lies in a segment");
                assert!(event.addr + event.bytes <= addr + bytes, "{name}");
                assert_eq!(blocks.insert(event.addr, event.bytes), None, "{name}");
            }
            Action::FreeRequested => assert_eq!(blocks.remove(&event.addr), Some(event.bytes), "{name}"),
            _ => {}
        }
    }
    let held: BTreeMap<u64, u64> =
        summary.segments.iter().map(|segment| (segment.address, segment.total_size)).collect();
    assert_eq!(segments, held, "{name}");
    let left = summary.segments.iter().flat_map(|segment| &segment.blocks);
    let left: BTreeMap<u64, u64> = left
        .filter(|block| block.state == BlockState::Allocated)
        .map(|block| (block.address, block.requested_size))
        .collect();
    assert_eq!(blocks, left, "{name}");
}

#[test]
fn segments_come_before_their_blocks_and_go_after_them() {
    for (name, settings) in arms(&exporting(&digits())) {
        let run = train(&settings).finished();
        let (events, summary) = history(&run, "snapshot.pickle");
        let segments = events.iter().filter(|event| is_segment(event)).count();
        if settings.allocator.backend() == &stream_ordered::BACKEND {
            assert_eq!(segments, 0, "{name}: a pool shows no segments");
            continue;
        }
        let stats = &run.outcome.summary.allocator_stats;
        let allocated = events.iter().filter(|event| event.action == Action::SegmentAlloc).count();
        assert_eq!(allocated as u64, stats.num_device_alloc, "{name}");
        assert_eq!((segments - allocated) as u64, stats.num_device_free, "{name}");
        follow(name, &events, &summary);
    }
}

#[test]
fn a_run_that_runs_out_of_memory_exports_what_led_there() {
    let run = train(&exporting(&Settings { memory_limit: Some(8 << 10), ..iris() }));
    assert!(run.outcome.error.is_some());
    let (events, _) = history(&run, "snapshot.pickle");
    let last = events.iter().rfind(|event| !matches!(event.action, Action::FreeRequested | Action::FreeCompleted));
    assert_eq!(last.unwrap().action, Action::Oom);
    assert!(std::fs::read_to_string(run.path().join("rmm.csv")).unwrap().contains("allocate failure,(nil),"));
}

#[test]
fn the_timeline_names_kernels_and_adds_up() {
    let run = train(&exporting(&digits())).finished();
    let timeline = common::read_json(&run.path().join("perfetto.json"));
    let events = timeline["traceEvents"].as_array().unwrap();
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X" && event["cat"] == "host").collect();
    let track = |name: &str| {
        let named = events.iter().find(|event| event["name"] == "thread_name" && event["args"]["name"] == name);
        named.unwrap_or_else(|| panic!("no track {name}"))["tid"].clone()
    };
    let (slices, ranges): (Vec<_>, Vec<_>) =
        slices.into_iter().partition(|slice| slice["tid"] == track("driver calls"));
    assert!(ranges.iter().all(|range| range["tid"] == track("steps and layers")));
    assert!(
        ranges.iter().any(|range| range["name"] == "step 1") && ranges.iter().any(|range| range["name"] == "layer 2")
    );
    let calls: u64 =
        run.json()["driver_calls"].as_object().unwrap().values().map(|kind| kind["count"].as_u64().unwrap()).sum();
    assert_eq!(slices.len() as u64, calls, "every call is a slice");
    assert!(slices.iter().all(|slice| slice["name"] != "kernel_launch"), "launches go by their kernels' names");
    // Slices of the one track do not overlap.
    let mut end = 0.0;
    for slice in &slices {
        let (start, length) = (slice["ts"].as_f64().unwrap(), slice["dur"].as_f64().unwrap());
        assert!(start >= end - 1e-6, "{slice}");
        end = start + length;
    }
    let peak = |name: &str| {
        let counters = events.iter().filter(|event| event["ph"] == "C");
        counters.filter_map(|event| event["args"][name].as_u64()).max().unwrap()
    };
    let stats = &run.outcome.summary.allocator_stats;
    assert_eq!(peak("reserved"), stats.reserved_bytes.all.peak);
    assert_eq!(peak("requested"), stats.requested_bytes.all.peak);
    let blocks: Vec<_> = events.iter().filter(|event| event["cat"] == "block").collect();
    assert_eq!(blocks.len() as u64, stats.allocation.all.allocated, "each block once");
    assert!(blocks.iter().all(|block| block["args"]["freed"] != "never"), "every block was freed");
    assert!(blocks.iter().all(|block| block["args"]["path"].is_string() && block["args"]["block"].is_u64()));
    let layers = blocks.iter().filter(|block| block["args"]["layer"] == "layer 2" && block["args"]["step"].is_string());
    assert!(layers.count() > 0, "blocks say their step and layer");
}

#[test]
fn exports_leave_simulated_measurements_unchanged() {
    let plain = train(&iris()).finished();
    let exported = train(&exporting(&iris())).finished();
    assert_eq!(plain.column("loss"), exported.column("loss"));
    assert_eq!(plain.column("host_ns"), exported.column("host_ns"));
    assert_eq!(plain.json()["driver_calls"], exported.json()["driver_calls"]);
    assert!(plain.json()["files"].get("exports").is_none());
    assert!(!plain.path().join("driver_calls.jsonl").exists());
}
