//! PyTorch's snapshots: those recorded on a GPU, and small ones of the same form.

use crate::common::{fixture, read_all, read_bytes};
use crate::facts::facts;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use vramlab::BlockState;
use vramlab::PoolKind;
use vramlab::histories::formats::{Action, Event, Format};

/// Snapshots recorded on an H200, with their numbers of events: the repository's, and those that may lie beside the checkout.
pub(crate) fn recorded() -> Vec<(PathBuf, u64)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut out = Vec::new();
    for entry in ["experiments/histories", "../shared/traces"]
        .into_iter()
        .flat_map(|at| std::fs::read_dir(root.join(at)).into_iter().flatten())
    {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.ends_with(".pickle.xz") {
            let events = facts(&path).unwrap()["events"].as_u64().unwrap();
            out.push((path, events));
        }
    }
    assert!(out.len() >= 4, "the repository has four recordings");
    out.sort();
    out
}

#[test]
fn the_small_snapshot_says_what_was_written() {
    let (events, summary) = read_all(&fixture("small.p4.pickle")).unwrap();
    assert_eq!(summary.format, Format::SnapshotPickle);
    assert_eq!(summary.events, [40, 0]);
    assert_eq!(events.len(), 40);
    let first = Event {
        action: Action::SegmentAlloc,
        device: 0,
        addr: 0x7f20_0000_0000,
        bytes: 2 << 20,
        stream: 0x55d3_c0a1_b2c0,
        time_ns: 1_795_247_137_240_886_000,
    };
    assert_eq!(events[0], Event { stream: events[0].stream, time_ns: events[0].time_ns, ..first });
    assert!(events.windows(2).all(|pair| pair[0].time_ns < pair[1].time_ns));
    assert_eq!(events.iter().map(|event| event.stream).collect::<std::collections::BTreeSet<_>>().len(), 2);
    assert_eq!(summary.external_annotations, 2);
    assert_eq!(summary.unknown_actions, 0);
    let settings = serde_json::json!({
        "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
        "expandable_segments": false, "roundup_power2_divisions": {"1": 0, "2": 0, "4": 0},
    });
    assert_eq!(serde_json::Value::Object(summary.allocator_settings), settings);
    let made = events.iter().filter(|event| event.action == Action::SegmentAlloc).count();
    assert_eq!(summary.segments.len(), made);
    for segment in &summary.segments {
        assert_eq!((segment.total_size, segment.segment_type), (2 << 20, PoolKind::Small));
        assert_eq!(segment.blocks.len(), 1);
        assert_eq!(segment.blocks[0].address, segment.address);
    }
    assert!(summary.segments.iter().any(|segment| segment.blocks[0].state == BlockState::Allocated));
}

#[test]
fn every_protocol_and_both_picklers_say_the_same() {
    let (events, summary) = read_all(&fixture("small.p4.pickle")).unwrap();
    for name in ["small.p2.pickle", "small.torch.pickle"] {
        let (other, also) = read_all(&fixture(name)).unwrap();
        assert_eq!(other, events, "{name}");
        assert_eq!(also.segments, summary.segments, "{name}");
        assert_eq!(also.allocator_settings, summary.allocator_settings, "{name}");
        assert_eq!(also.events, summary.events, "{name}");
    }
    // Protocols 3 and 5 differ from 2 and 4 in instructions that a snapshot does not use.
    for (name, protocol) in [("small.p2.pickle", 3), ("small.p4.pickle", 5)] {
        let mut bytes = std::fs::read(fixture(name)).unwrap();
        bytes[1] = protocol;
        assert_eq!(read_bytes(&bytes).unwrap().0, events);
    }
}

#[test]
fn compressed_files_are_unpacked_whatever_their_name() {
    use std::io::Write;
    let plain = std::fs::read(fixture("small.p4.pickle")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(&plain).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 6);
    xz.write_all(&plain).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.bin");
    let expected = read_bytes(&plain).unwrap();
    for packed in [gzip.finish().unwrap(), xz.finish().unwrap()] {
        assert!(packed.len() < plain.len() / 2);
        std::fs::write(&path, packed).unwrap();
        assert_eq!(read_all(&path).unwrap(), expected);
    }
}

#[test]
fn recorded_snapshots_have_the_events_that_pytorch_counted() {
    for (path, count) in recorded() {
        let (events, summary) = read_all(&path).unwrap();
        assert_eq!(events.len() as u64, count, "{}", path.display());
        assert_eq!(summary.all_events(), count);
        assert_eq!(summary.allocator_settings["max_split_size"], -1);
        // The blocks of a segment lie one behind the other and fill it.
        for segment in &summary.segments {
            let mut at = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, at);
                at += block.size;
            }
            assert_eq!(at, segment.address + segment.total_size);
        }
        // Live at the end by the events and by the segments.
        let mut live = BTreeMap::new();
        for event in &events {
            match event.action {
                Action::Alloc => assert_eq!(live.insert(event.addr, event.bytes), None),
                Action::FreeRequested => assert_eq!(live.remove(&event.addr), Some(event.bytes)),
                _ => {}
            }
        }
        let blocks = summary.segments.iter().flat_map(|segment| &segment.blocks);
        let held: BTreeMap<u64, u64> = blocks
            .filter(|block| block.state == BlockState::Allocated)
            .map(|block| (block.address, block.requested_size))
            .collect();
        assert_eq!(live, held, "{}", path.display());
    }
}
