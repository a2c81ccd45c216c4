//! Origins of events, in every form of a snapshot.

use super::fixture;
use serde_json::Value;
use std::path::Path;
use vramlab_device::budget::Budget;
use vramlab_histories::formats::{
    Action, Ending, Event, Export, Origin, Origins, ReadOptions, StackId, read_origins, read_origins_from,
};

/// A frame: function, file, line.
type Spelt = (String, String, u32);

fn spelt(origins: &Origins, stack: StackId) -> Vec<Spelt> {
    let text = |text| origins.spelt(text).to_owned();
    origins.frames(stack).map(|frame| (text(frame.name), text(frame.filename), frame.line)).collect()
}

fn read(path: &Path) -> (Vec<(Event, Origin)>, Origins) {
    let mut events = Vec::new();
    let (_, origins) = read_origins(path, &ReadOptions::default(), &mut |event, origin, _| {
        events.push((event, origin));
        Ok(())
    })
    .unwrap();
    (events, origins)
}

fn expected(frames: &Value) -> Vec<Spelt> {
    let text = |frame: &Value, key: &str| frame[key].as_str().unwrap().to_owned();
    let spelt = |frame: &Value| (text(frame, "name"), text(frame, "filename"), frame["line"].as_u64().unwrap() as u32);
    frames.as_array().unwrap().iter().map(spelt).collect()
}

#[test]
fn every_form_has_the_same_frames_and_annotations() {
    let document: Value = serde_json::from_slice(&std::fs::read(fixture("small.json")).unwrap()).unwrap();
    let expected: Vec<Vec<Spelt>> =
        document["device_traces"][0].as_array().unwrap().iter().map(|event| expected(&event["frames"])).collect();
    assert!(expected.iter().any(|frames| frames.len() > 1));
    for name in ["small.p2.pickle", "small.p4.pickle", "small.torch.pickle", "small.json"] {
        let (events, origins) = read(&fixture(name));
        let frames: Vec<Vec<Spelt>> = events.iter().map(|(_, origin)| spelt(&origins, origin.stack)).collect();
        assert_eq!(frames, expected, "{name}");
        let annotations: Vec<_> = origins
            .annotations()
            .iter()
            .map(|annotation| (origins.spelt(annotation.name), annotation.start, annotation.device, annotation.time_ns))
            .collect();
        assert_eq!(
            annotations,
            [
                ("Optimizer.step#SGD.step", true, Some(0), 1_795_247_137_685_945_000),
                ("Optimizer.step#SGD.step", false, Some(0), 1_795_247_137_685_999_000)
            ],
            "{name}"
        );
        assert!(origins.stacks() <= expected.len() + 1, "{name}: equal stacks are one");
    }
}

const SNAPSHOT: &str = r#"{
    "segments": [{"device": 0, "address": 4096, "total_size": 2097152, "stream": 0, "segment_type": "small",
        "frames": [{"name": "made", "filename": "made.py", "line": 1}], "later": {"a": [1]},
        "blocks": [
            {"address": 4096, "size": 512, "requested_size": 100, "state": "active_allocated",
             "frames": [{"name": "f", "filename": "a.py", "line": 7, "fx_node_op": "call", "more": {"x": []}}]},
            {"address": 4608, "size": 2096640, "requested_size": 0, "state": "inactive", "frames": []}]}],
    "device_traces": [[
        {"action": "alloc", "addr": 4096, "size": 100, "stream": 0, "time_us": 1, "category": "parameter",
         "user_metadata": "step 3", "forward_frames": ["x"], "pool_id": [0, 1],
         "frames": [{"name": "f", "filename": "a.py", "line": 7}, {"name": "g", "filename": "a.py", "line": null}]},
        {"action": "alloc", "addr": 4608, "size": 100, "stream": 0, "time_us": 2, "frames": [], "category": "unknown"}]],
    "external_annotations": [{"name": "fwd", "stage": "START", "device": 0, "time_us": 1, "other": {"deep": [[]]}}],
    "a later key": {"frames": [1]}}"#;

#[test]
fn origins_are_read_and_unknown_keys_ignored() {
    let mut events = Vec::new();
    let (summary, origins) =
        read_origins_from(Box::new(SNAPSHOT.as_bytes()), &ReadOptions::default(), &mut |_, origin, origins| {
            let text = |text| origins.spelt(text).to_owned();
            events.push((text(origin.category), text(origin.note), spelt(origins, origin.stack)));
            Ok(())
        })
        .unwrap();
    let frame = |name: &str, file: &str, line| (name.to_owned(), file.to_owned(), line);
    let expected = |category: &str, note: &str, frames| (category.to_owned(), note.to_owned(), frames);
    assert_eq!(
        events,
        [
            expected("parameter", "step 3", vec![frame("f", "a.py", 7), frame("g", "a.py", 0)]),
            expected("unknown", "", Vec::new())
        ]
    );
    assert_eq!(spelt(&origins, origins.block(0, 4096).stack), [frame("f", "a.py", 7)]);
    assert_eq!(origins.block(0, 4608), Origin::default());
    assert_eq!(spelt(&origins, origins.segment(0, 4096).stack), [frame("made", "made.py", 1)]);
    assert_eq!(summary.external_annotations, 1);
}

/// A pickle with one list of frames that two events share, and one of `count` frames.
fn shared(count: u16) -> Vec<u8> {
    let frame = |line: u16| {
        [&b"}(\x8c\x04name\x8c\x01f\x8c\x08filename\x8c\x04a.py\x8c\x04lineM"[..], &line.to_le_bytes(), b"u"].concat()
    };
    let event = |frames: &[u8]| {
        [&b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrM\0\x10\x8c\x04sizeK\x10\x8c\x06frames"[..], frames, b"u"].concat()
    };
    // Memo 0 and 1 are frames, 2 is the list; then several batches, each of references and new frames.
    let first = event(&[&b"]\x94("[..], &frame(1), b"\x94", &frame(2), b"\x94e"].concat());
    let again = event(b"h\0");
    let mut long = b"]".to_vec();
    for batch in 0..count {
        long.extend_from_slice(b"(h\x01h\x02");
        long.extend(frame(100 + batch));
        long.extend_from_slice(b"h\x01e");
    }
    let long = event(&long);
    [&b"\x80\x04}(\x8c\x0ddevice_traces]]("[..], &first, &again, &long, b"eau."].concat()
}

#[test]
fn shared_and_batched_lists_of_frames_are_read() {
    let bytes = shared(3);
    let mut lines: Vec<Vec<u32>> = Vec::new();
    read_origins_from(Box::new(&bytes[..]), &ReadOptions::default(), &mut |_, origin, origins| {
        lines.push(origins.frames(origin.stack).map(|frame| frame.line).collect());
        Ok(())
    })
    .unwrap();
    let long = (0..3).flat_map(|batch| [1, 2, 100 + batch, 1]).collect();
    assert_eq!(lines, [vec![1, 2], vec![1, 2], long]);
    // Truncated or damaged anywhere: an error or a part, never a panic.
    for length in 0..bytes.len() {
        let _ = read_origins_from(Box::new(&bytes[..length]), &ReadOptions::default(), &mut |_, _, _| Ok(()));
    }
    let mut damaged = bytes.clone();
    for at in 0..bytes.len() {
        for value in (0..=255).step_by(13) {
            damaged[at] = value;
            let _ = read_origins_from(Box::new(&damaged[..]), &ReadOptions::default(), &mut |_, _, _| Ok(()));
        }
        damaged[at] = bytes[at];
    }
}

#[test]
fn memory_of_origins_is_bounded() {
    // Each event has a separate stack.
    let start = b"\x80\x04}(\x8c\x0ddevice_traces]](".to_vec();
    let event = |line: u32| {
        let frame = [&b"}(\x8c\x04lineJ"[..], &line.to_le_bytes(), b"u"].concat();
        let head = &b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrM\0\x10\x8c\x04sizeK\x10\x8c\x06frames]("[..];
        [head, &frame, b"eu"].concat()
    };
    let mut bytes = start;
    for line in 0..100_000 {
        // One batch for each event, so that no event waits.
        bytes.extend(event(line));
        bytes.extend_from_slice(b"e(");
    }
    let budget = Budget::new(1 << 20);
    let options = ReadOptions { budget: budget.clone(), ..ReadOptions::default() };
    let error = read_origins_from(Box::new(&bytes[..]), &options, &mut |_, _, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("--read-memory"), "{error}");
    assert_eq!(budget.held(), 0);
}

#[test]
fn written_origins_read_back_unchanged() {
    let spelling = |origins: &Origins, origin: Origin| {
        let text = |text| origins.spelt(text).to_owned();
        (spelt(origins, origin.stack), text(origin.category), text(origin.note))
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("told.json");
    std::fs::write(&path, SNAPSHOT).unwrap();
    for path in [fixture("small.p4.pickle"), path] {
        let (events, origins) = read(&path);
        let summary = vramlab_histories::formats::read(&path, &ReadOptions::default(), &mut |_| Ok(())).unwrap();
        for export in [Export::Snapshot, Export::SnapshotJson] {
            let out = folder.path().join(export.file_name());
            let mut writer = export.create(&out).unwrap();
            for (event, origin) in &events {
                writer.event_from(event, *origin, &origins).unwrap();
            }
            let origins_at_end = Some(&origins);
            writer
                .finish(&Ending { segments: &summary.segments, origins: origins_at_end, ..Ending::default() })
                .unwrap();
            let (again, also) = read(&out);
            let all = |events: &[(Event, Origin)], origins: &Origins| {
                events.iter().map(|(event, origin)| (*event, spelling(origins, *origin))).collect::<Vec<_>>()
            };
            assert_eq!(all(&again, &also), all(&events, &origins));
            let named = |origins: &Origins| {
                let all = origins.annotations().iter();
                all.map(|of| (origins.spelt(of.name).to_owned(), of.start, of.device, of.time_ns)).collect::<Vec<_>>()
            };
            assert_eq!(named(&also), named(&origins));
            for segment in &summary.segments {
                let (device, at) = (segment.device, segment.address);
                assert_eq!(spelling(&also, also.segment(device, at)), spelling(&origins, origins.segment(device, at)));
                for block in &segment.blocks {
                    let at = block.address;
                    assert_eq!(spelling(&also, also.block(device, at)), spelling(&origins, origins.block(device, at)));
                }
            }
        }
    }
    // Recurring stacks are written once: the pickle of a hundred events with one stack is not a hundred stacks long.
    let (events, origins) = read(&folder.path().join("told.json"));
    let size = |count: usize| {
        let out = folder.path().join("many.pickle");
        let mut writer = Export::Snapshot.create(&out).unwrap();
        for _ in 0..count {
            writer.event_from(&events[0].0, events[0].1, &origins).unwrap();
        }
        writer.finish(&Ending::default()).unwrap();
        std::fs::metadata(&out).unwrap().len()
    };
    assert!(size(100) - size(99) < 64, "{} bytes an event", size(100) - size(99));
}

#[test]
fn lines_of_a_trace_have_call_stacks() {
    let line = |time: u64, action: &str, more: &str| {
        format!("{{\"time_ns\":{time},\"action\":\"{action}\",\"addr\":512,\"size\":64,\"stream\":0{more}}}\n")
    };
    let frames = r#","stack":7,"frames":[{"name":"step","filename":"matrix.cu","line":57},{"name":"main","filename":"a\tb","line":0}]"#;
    let text = [
        line(1, "alloc", frames),
        line(2, "free_requested", ""),
        line(3, "alloc", ",\"stack\":7"),
        // A number that no line before has explained.
        line(4, "free_requested", ",\"stack\":8"),
    ];
    let text = text.concat();
    let mut stacks = Vec::new();
    let mut take = |event: Event, origin: Origin, origins: &Origins| {
        if event.action != Action::FreeCompleted {
            stacks.push(spelt(origins, origin.stack));
        }
        Ok(())
    };
    let source = Box::new(std::io::Cursor::new(text.into_bytes()));
    read_origins_from(source, &ReadOptions::default(), &mut take).unwrap();
    let known = vec![("step".into(), "matrix.cu".into(), 57), ("main".into(), "a\tb".into(), 0)];
    assert_eq!(stacks, [known.clone(), vec![], known, vec![]]);
}
