//! Written recordings read back unchanged.

use super::snapshots::recorded;
use super::{fixture, read_all};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use vramlab_histories::formats::{Action, Ending, Event, Export, Format, Summary, WriteProblem};

fn write(export: Export, path: &Path, events: &[Event], summary: &Summary) {
    let mut writer = export.create(path).unwrap();
    for event in events {
        writer.event(event).unwrap();
    }
    assert!(!path.exists(), "a file in the making should not have its name");
    let devices = u16::try_from(summary.events.len()).unwrap();
    let settings = Some(&summary.allocator_settings);
    writer
        .finish(&Ending { segments: &summary.segments, allocator_settings: settings, devices, origins: None })
        .unwrap();
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing else should be left");
}

/// Writes and reads back.
fn through(export: Export, events: &[Event], summary: &Summary) -> (Vec<Event>, Summary) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(export.file_name());
    write(export, &path, events, summary);
    read_all(&path).unwrap()
}

fn snapshots() -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = recorded().into_iter().map(|(path, _)| path).collect();
    out.push(fixture("small.p4.pickle"));
    out
}

#[test]
fn snapshots_round_trip() {
    for path in snapshots() {
        let (events, summary) = read_all(&path).unwrap();
        for (export, format) in
            [(Export::Snapshot, Format::SnapshotPickle), (Export::SnapshotJson, Format::SnapshotJson)]
        {
            let (again, also) = through(export, &events, &summary);
            assert_eq!(again, events, "{}", path.display());
            assert_eq!(also.format, format);
            assert_eq!(also.events, summary.events);
            assert_eq!(also.segments, summary.segments);
            assert_eq!(also.allocator_settings, summary.allocator_settings);
        }
    }
}

#[test]
fn integers_round_trip() {
    let (_, mut summary) = read_all(&fixture("small.p4.pickle")).unwrap();
    summary.segments.clear();
    let mut events = Vec::new();
    for bit in 0..63 {
        for addr in [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1] {
            let stream = if bit % 2 == 0 { addr } else { addr.wrapping_neg() };
            events.push(Event { action: Action::Alloc, device: 0, addr, bytes: addr / 3, stream, time_ns: 1000 * bit });
        }
    }
    for export in [Export::Snapshot, Export::SnapshotJson] {
        assert_eq!(through(export, &events, &summary).0, events, "{}", export.name());
    }
    // Values that PyTorch's readers cannot represent are refused, and no file is left.
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("snapshot.pickle");
    let mut writer = Export::Snapshot.create(&path).unwrap();
    let error = writer.event(&Event { addr: 1 << 63, ..events[0] }).unwrap_err();
    assert!(matches!(error.problem, WriteProblem::Unfit(_)) && error.to_string().contains("2^63"), "{error}");
    drop(writer);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn several_devices_round_trip_in_order() {
    let (events, mut summary) = read_all(&fixture("small.p4.pickle")).unwrap();
    let mut all = Vec::new();
    for device in [0, 2] {
        all.extend(events.iter().map(|event| Event { device, ..*event }));
    }
    summary.segments.iter_mut().for_each(|segment| segment.device = 2);
    let (again, also) = through(Export::Snapshot, &all, &summary);
    assert_eq!(again, all);
    assert_eq!(also.events, [40, 0, 40]);
    assert_eq!(also.segments, summary.segments);
    let folder = TempDir::new().unwrap();
    let mut writer = Export::Snapshot.create(&folder.path().join("x")).unwrap();
    writer.event(&all[40]).unwrap();
    assert!(writer.event(&all[0]).unwrap_err().to_string().contains("by device"));
    for export in [Export::Rmm, Export::Minimalloc] {
        let mut writer = export.create(&folder.path().join("y")).unwrap();
        let alloc = Event { action: Action::Alloc, ..all[0] };
        writer.event(&alloc).unwrap();
        assert!(writer.event(&Event { device: 1, ..alloc }).unwrap_err().to_string().contains("has one"));
    }
}

/// The part of a recording that an RMM log contains.
fn as_rmm(events: &[Event]) -> Vec<Event> {
    const DAY: u64 = 24 * 3600 * 1_000_000_000;
    let start = events[0].time_ns / DAY * DAY;
    let mut out = Vec::new();
    for event in events {
        let event = Event { time_ns: event.time_ns - start, ..*event };
        match event.action {
            Action::Alloc => out.push(event),
            Action::Oom => out.push(Event { addr: 0, ..event }),
            Action::FreeRequested => {
                out.push(event);
                out.push(Event { action: Action::FreeCompleted, ..event });
            }
            _ => {}
        }
    }
    out
}

#[test]
fn rmm_logs_round_trip_and_become_snapshots() {
    for path in snapshots() {
        let (events, summary) = read_all(&path).unwrap();
        let (log, also) = through(Export::Rmm, &events, &summary);
        assert_eq!(log, as_rmm(&events), "{}", path.display());
        let (again, _) = through(Export::Snapshot, &log, &also);
        assert_eq!(again, log);
    }
}

#[test]
fn rmm_log_frees_only_blocks_that_it_allocates() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("rmm.csv");
    let event = |action, addr| Event { action, device: 0, addr, bytes: 512, stream: 0, time_ns: 0 };
    let mut writer = Export::Rmm.create(&path).unwrap();
    for (action, addr) in
        [(Action::FreeRequested, 1 << 20), (Action::Alloc, 4096), (Action::FreeRequested, 4096), (Action::Alloc, 8192)]
    {
        writer.event(&event(action, addr)).unwrap();
    }
    assert_eq!(writer.passed_over(), 1, "the first was live before the history began");
    writer.finish(&Ending::default()).unwrap();
    let freed: Vec<u64> = read_all(&path)
        .unwrap()
        .0
        .iter()
        .filter(|event| event.action == Action::FreeRequested)
        .map(|event| event.addr)
        .collect();
    assert_eq!(freed, [4096]);
}

/// PyTorch can leave out the requests of frees (`skip_actions`).
#[test]
fn rmm_log_writes_a_lone_completion_as_a_free() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("rmm.csv");
    let mut writer = Export::Rmm.create(&path).unwrap();
    let steps = [
        (Action::Alloc, 4096, 512),
        (Action::FreeCompleted, 4096, 512),
        (Action::Alloc, 4096, 1024),
        (Action::FreeRequested, 4096, 1024),
        // The first belongs to the request before it; the next one to a block from before recording started.
        (Action::FreeCompleted, 4096, 1024),
        (Action::FreeCompleted, 8192, 1024),
    ];
    for (action, addr, bytes) in steps {
        writer.event(&Event { action, device: 0, addr, bytes, stream: 0, time_ns: 0 }).unwrap();
    }
    assert_eq!((writer.stood_in(), writer.passed_over()), (1, 0));
    writer.finish(&Ending::default()).unwrap();
    let read = read_all(&path).unwrap().0;
    let written: Vec<_> = read
        .iter()
        .filter(|event| event.action != Action::FreeCompleted)
        .map(|event| (event.action, event.bytes))
        .collect();
    let free = Action::FreeRequested;
    assert_eq!(written, [(Action::Alloc, 512), (free, 512), (Action::Alloc, 1024), (free, 1024)]);
}

#[test]
fn minimalloc_tables_keep_the_order_of_lifetimes() {
    for path in snapshots() {
        let (events, summary) = read_all(&path).unwrap();
        let (table, _) = through(Export::Minimalloc, &events, &summary);
        // The same sizes in the same order. Blocks that are never freed end with the recording.
        let sizes = |events: &[Event], action| {
            let of = events.iter().filter(|event| event.action == action);
            of.map(|event| event.bytes).collect::<Vec<u64>>()
        };
        assert_eq!(sizes(&table, Action::Alloc), sizes(&events, Action::Alloc), "{}", path.display());
        let frees = sizes(&events, Action::FreeCompleted);
        assert_eq!(sizes(&table, Action::FreeCompleted)[..frees.len()], frees);
        // Peak live bytes, which minimalloc minimises.
        let peak = |events: &[Event]| {
            let (mut live, mut peak) = (0_u64, 0);
            for event in events {
                match event.action {
                    Action::Alloc => live += event.bytes,
                    Action::FreeCompleted => live -= event.bytes,
                    _ => {}
                }
                peak = peak.max(live);
            }
            peak
        };
        assert_eq!(peak(&table), peak(&events));
        let (again, _) = through(Export::Minimalloc, &table, &summary);
        assert_eq!(sizes(&again, Action::Alloc), sizes(&table, Action::Alloc));
    }
}

#[test]
fn timeline_counters_match_the_recording() {
    for path in snapshots() {
        let (events, summary) = read_all(&path).unwrap();
        let folder = TempDir::new().unwrap();
        let out = folder.path().join("perfetto.json");
        write(Export::Perfetto, &out, &events, &summary);
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
        let trace = trace["traceEvents"].as_array().unwrap();
        let phase = |name: &str| trace.iter().filter(|event| event["ph"] == name).collect::<Vec<_>>();
        let count = |action| events.iter().filter(|event| event.action == action).count();
        let (blocks, others): (Vec<_>, Vec<_>) = trace.iter().partition(|event| event["cat"] == "block");
        assert_eq!(blocks.len(), count(Action::Alloc), "each block once");
        let written = blocks.iter().filter(|block| block["args"]["freed"] == "never").count();
        let begun = blocks.iter().map(|block| block["args"]["addr"].as_str().unwrap()).collect::<BTreeSet<_>>();
        assert!(written <= begun.len() && written + count(Action::FreeCompleted) >= blocks.len());
        let instants = others.iter().filter(|event| event["ph"] == "i").count();
        assert_eq!(instants, count(Action::SegmentAlloc) + count(Action::SegmentFree) + count(Action::Oom));
        // The last counters match the segments.
        let last = &phase("C").last().copied().unwrap()["args"];
        let sum = |state: &dyn Fn(&vramlab_histories::formats::Segment) -> u64| {
            summary.segments.iter().map(state).sum::<u64>()
        };
        assert_eq!(last["reserved"], sum(&|segment| segment.total_size));
        assert_eq!(last["requested"], sum(&|segment| segment.requested_size()));
        // Times start at 0 and increase, and every slice is on a named stream.
        let mut before = 0.0;
        let mut named = BTreeSet::new();
        for event in &others {
            if event["ph"] == "M" {
                named.insert((event["pid"].as_u64(), event["tid"].as_u64()));
                continue;
            }
            let now = event["ts"].as_f64().unwrap();
            assert!(now >= before);
            before = now;
            assert!(named.contains(&(event["pid"].as_u64(), event["tid"].as_u64())), "{event}");
        }
        let counters: BTreeSet<(u64, &str)> = phase("C")
            .iter()
            .flat_map(|counter| {
                let keys = counter["args"].as_object().unwrap().keys();
                keys.map(|key| (counter["pid"].as_u64().unwrap(), key.as_str()))
            })
            .collect();
        let tracks = named.iter().filter(|(_, thread)| *thread != Some(0)).count();
        assert!(tracks + counters.len() <= 50, "{tracks} threads and {counters:?}");
        // Slices of one track do not overlap.
        let mut ends: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
        for block in blocks.iter().filter(|block| block["ph"] == "X") {
            let number = |key: &str| block[key].as_f64().unwrap();
            let track = (block["pid"].as_u64().unwrap(), block["tid"].as_u64().unwrap());
            assert!(named.contains(&(Some(track.0), Some(track.1))));
            ends.entry(track).or_default().push((number("ts"), number("ts") + number("dur")));
        }
        for spans in ends.values_mut() {
            spans.sort_by(|a, b| a.partial_cmp(b).unwrap());
            assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0 + 1e-6));
        }
    }
}

#[test]
fn dropped_writer_leaves_no_file() {
    let (events, _) = read_all(&fixture("small.p4.pickle")).unwrap();
    let folder = TempDir::new().unwrap();
    for export in Export::ALL {
        let path = folder.path().join(export.file_name());
        let mut writer = export.create(&path).unwrap();
        events.iter().for_each(|event| writer.event(event).unwrap());
        drop(writer);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{}", export.name());
        let nowhere = folder.path().join("absent").join("file");
        let error = export.create(&nowhere).err().unwrap().to_string();
        assert!(error.contains("there is no folder"), "{error}");
    }
}

#[test]
fn formats_contain_their_declared_actions() {
    let folder = TempDir::new().unwrap();
    let file = |export: Export, actions: &[Action]| {
        let path = folder.path().join("out");
        let mut writer = export.create(&path).unwrap();
        for &action in actions {
            let event = Event { action, device: 0, addr: 4096, bytes: 512, stream: 1, time_ns: 1000 };
            writer.event(&event).unwrap();
        }
        writer.finish(&Ending::default()).unwrap();
        std::fs::read(path).unwrap()
    };
    for export in Export::ALL {
        for action in Action::ALL {
            // Freed blocks were allocated.
            let before: &[Action] = if action == Action::FreeRequested { &[Action::Alloc] } else { &[] };
            let changed = file(export, &[before, &[action]].concat()) != file(export, before);
            assert_eq!(changed, export.holds(action), "{action} in {}", export.name());
        }
    }
}
