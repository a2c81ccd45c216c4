//! Recordings in zip archives and in pages of the memory viewer.

use super::read_bytes;
use super::snapshots::{both, pickle};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::io::{Cursor, Write};
use std::path::Path;
use vramlab_device::budget::Budget;
use vramlab_histories::formats::{Action, Event, ReadOptions, read};
use zip::CompressionMethod;
use zip::write::{SimpleFileOptions, ZipWriter};

const SNAPSHOT: &str = r#"{"segments": [], "device_traces": [[
    {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "time_us": 1},
    {"action": "free_requested", "addr": 4096, "size": 512, "stream": 0, "time_us": 2},
    {"action": "free_completed", "addr": 4096, "size": 512, "stream": 0, "time_us": 2}]]}"#;

/// The same as a pickle: a dictionary of two lists.
const PICKLE: &[u8] = b"\x80\x02}q\x00(X\x08\x00\x00\x00segmentsq\x01]q\x02X\x0d\x00\x00\x00device_tracesq\x03]q\x04]q\x05}q\x06(\
    X\x06\x00\x00\x00actionq\x07X\x05\x00\x00\x00allocq\x08X\x04\x00\x00\x00addrq\x09M\x00\x10X\x04\x00\x00\x00sizeq\x0aM\x00\x02\
    X\x06\x00\x00\x00streamq\x0bK\x00ua\x61u.";

fn archive(files: &[(&str, &[u8])], method: CompressionMethod) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in files {
        writer.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

/// The actions in a file, or the error's text.
fn actions(content: &[u8]) -> Result<Vec<Action>, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshot");
    std::fs::write(&path, content).unwrap();
    let mut out = Vec::new();
    let read = read(&path, &ReadOptions::default(), &mut |event: Event| {
        out.push(event.action);
        Ok(())
    });
    read.map(|_| out).map_err(|error| error.to_string())
}

fn all() -> Result<Vec<Action>, String> {
    Ok(vec![Action::Alloc, Action::FreeRequested, Action::FreeCompleted])
}

#[test]
fn recordings_in_zip_archives_are_read() {
    for method in [CompressionMethod::Deflated, CompressionMethod::Stored] {
        let files: [(&str, &[u8]); 4] = [
            ("README.md", b"see below"),
            ("mine/snapshot.json", SNAPSHOT.as_bytes()),
            ("__MACOSX/mine/._snapshot.json", b"\0\x05"),
            ("mine/.DS_Store", b"\0"),
        ];
        assert_eq!(actions(&archive(&files, method)), all(), "{method}");
    }
    // As torch.save writes it.
    let saved: [(&str, &[u8]); 3] = [("t/data.pkl", PICKLE), ("t/byteorder", b"little"), ("t/version", b"3\n")];
    assert_eq!(actions(&archive(&saved, CompressionMethod::Stored)), Ok(vec![Action::Alloc]));
}

#[test]
fn archives_without_one_recording_are_refused_in_one_line() {
    let zeros = vec![0; 300 << 20];
    let snapshot = SNAPSHOT.as_bytes();
    let whole = archive(&[("a.json", snapshot)], CompressionMethod::Deflated);
    let deflated = |files: &[(&str, &[u8])]| archive(files, CompressionMethod::Deflated);
    for (content, words) in [
        (deflated(&[("a.json", snapshot), ("b.json", snapshot)]), "contains 2 files: a.json, b.json; unpack it"),
        (deflated(&[("notes.md", snapshot)]), "contains no recording"),
        (deflated(&[("bomb.pickle", &zeros)]), "no recording does"),
        (whole[..whole.len() - 30].to_vec(), "cut short"),
    ] {
        let error = actions(&content).unwrap_err();
        assert!(error.contains(words) && !error.contains('\n'), "{words}: {error}");
    }
}

fn page(files: &str) -> String {
    format!(
        "\n<!DOCTYPE html>\n<html><body><script type=\"module\">\nconst local_files = {files}\nadd_local_files(local_files)"
    )
}

#[test]
fn snapshot_in_a_page_of_the_memory_viewer_is_read() {
    let files = format!(r#"[{{"name": "snapshot.pickle", "base64": "{}"}}]"#, STANDARD.encode(SNAPSHOT));
    assert_eq!(actions(page(&files).as_bytes()), all());
    let error = actions(page("[]").as_bytes()).unwrap_err();
    assert!(error.contains("the page contains no snapshot") && !error.contains('\n'), "{error}");
    // A page that was cut short is a snapshot that was cut short.
    let text = page(&files);
    let cut = text.find("base64").unwrap() + 300;
    assert!(actions(&text.as_bytes()[..cut]).is_ok_and(|actions| actions.len() < 3), "{cut}");
}

#[test]
fn snapshot_in_a_dictionary_is_read() {
    let snapshot: Value = serde_json::from_str(SNAPSHOT).unwrap();
    for whole in [
        json!({"snapshot": snapshot}),
        json!({"rank": 3, "snapshot": snapshot}),
        json!({"snapshot": snapshot, "step": 7, "zebra": {"a": [1, 2, 3], "b": {}}}),
    ] {
        for file in both(&whole) {
            assert_eq!(actions(&file), all(), "{whole}");
        }
    }
    // Python's pickler sets the only pair of a dictionary without a mark.
    let inner = pickle(&snapshot);
    let single = [&b"\x80\x02}X\x08\0\0\0snapshot"[..], &inner[2..inner.len() - 1], b"s."].concat();
    assert_eq!(actions(&single), all());
    // One that was cut short is read as far as possible.
    let cut = single.len() - 100;
    assert!(actions(&single[..cut]).is_ok_and(|actions| (1..3).contains(&actions.len())), "{cut}");
    let error = actions(&pickle(&json!({"snapshot": 3}))).unwrap_err();
    assert!(error.contains("no 'device_traces'"), "{error}");
}

#[test]
fn list_of_segments_is_a_snapshot_without_events() {
    let block = |size: u64, state: &str| json!({"size": size, "requested_size": size, "state": state, "frames": []});
    let segment = |device: u64, address: u64| {
        json!({"device": device, "address": address, "total_size": 2 << 20, "stream": 0, "segment_type": "small",
            "segment_pool_id": [0, 1],
            "blocks": [block(1 << 20, "active_allocated"), block(1 << 20, "inactive")]})
    };
    let list = json!([segment(0, 1 << 32), segment(2, 1 << 33), segment(0, 1 << 34)]);
    for file in both(&list).into_iter().chain(both(&json!({"snapshot": list}))) {
        let (events, summary) = read_bytes(&file).unwrap();
        assert_eq!((events.len(), &summary.events[..]), (0, &[0, 0, 0][..]));
        let addresses: Vec<u64> = summary.segments.iter().map(|segment| segment.address).collect();
        assert_eq!(addresses, [1 << 32, 1 << 33, 1 << 34]);
        assert!(summary.segments.iter().all(|segment| segment.blocks.len() == 2 && segment.pool_id == Some((0, 1))));
    }
    for other in [json!([1, 2, 3]), json!([{"ph": "X", "name": "kernel"}])] {
        for file in both(&other) {
            let error = actions(&file).unwrap_err();
            assert!(error.contains("segment") && !error.contains('\n'), "{other}: {error}");
        }
    }
}

/// The directory of an archive is at its end, so one from a pipe is kept in memory.
#[cfg(target_os = "linux")]
#[test]
fn archive_from_a_pipe_is_read_within_the_budget() {
    let noise: String =
        (0..1 << 18).map(|at: u32| char::from(b' ' + (at.wrapping_mul(2_654_435_761) >> 26) as u8)).collect();
    let files: [(&str, &[u8]); 2] = [("snapshot.json", SNAPSHOT.as_bytes()), ("notes.md", noise.as_bytes())];
    let content = archive(&files, CompressionMethod::Stored);
    for (limit, fits) in [(64 << 20, true), (1 << 15, false)] {
        let (pipe, mut end) = std::io::pipe().unwrap();
        let written = content.clone();
        // A reader that stops early closes the pipe.
        let writer = std::thread::spawn(move || end.write_all(&written));
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&pipe));
        let options = ReadOptions { budget: Budget::new(limit), ..ReadOptions::default() };
        let mut count = 0;
        let read = read(Path::new(&path), &options, &mut |_| {
            count += 1;
            Ok(())
        });
        drop(pipe);
        assert_eq!((read.is_ok(), count), (fits, if fits { 3 } else { 0 }), "{limit}");
        assert_eq!(writer.join().unwrap().is_ok(), fits);
    }
}
