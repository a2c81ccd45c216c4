//! Text logs: RMM's, STAlloc's, minimalloc's, our own, and a snapshot as JSON.

use super::{fixture, message, read_all, read_bytes};
use std::io::Write;
use vramlab_device::budget::Budget;
use vramlab_histories::formats::{
    Action, Event, Format, Place, Problem, ReadError, ReadOptions, jsonl_placements, read_from,
};

fn event(action: Action, addr: u64, bytes: u64, stream: u64, time_ns: u64) -> Event {
    Event { action, device: 0, addr, bytes, stream, time_ns }
}

const RMM: &str = "\
Thread,Time,Action,Pointer,Size,Stream
140202,14:41:57.123456,allocate,0x7f7f38000000,1024,0
140202,23:59:59.999999,allocate,0x7f7f38000400,512,0x55d3c0a1b2c0
140202,00:00:00.000001,free,0x7f7f38000000,1024,0
140203,00:00:01.5,allocate failure,(nil),99999999999,0x2
";

#[test]
fn rmm_logs_keep_streams_and_pass_midnight() {
    const SECOND: u64 = 1_000_000_000;
    let (events, summary) = read_bytes(RMM.as_bytes()).unwrap();
    let day = 24 * 3600 * SECOND;
    let first = (14 * 3600 + 41 * 60 + 57) * SECOND + 123_456_000;
    let expected = [
        event(Action::Alloc, 0x7f7f_3800_0000, 1024, 0, first),
        event(Action::Alloc, 0x7f7f_3800_0400, 512, 0x55d3_c0a1_b2c0, day - 1000),
        event(Action::FreeRequested, 0x7f7f_3800_0000, 1024, 0, day + 1000),
        event(Action::FreeCompleted, 0x7f7f_3800_0000, 1024, 0, day + 1000),
        event(Action::Oom, 0, 99_999_999_999, 2, day + SECOND + SECOND / 2),
    ];
    assert_eq!(events, expected);
    assert_eq!((summary.format, summary.events), (Format::RmmCsv, vec![5]));
    // Windows' line ends, a byte order mark, old releases' colon, and no end of the last line.
    let odd = format!("\u{feff}{}", RMM.replace('\n', "\r\n").replace("57.123456", "57:123456"));
    assert_eq!(read_bytes(odd.trim_end().as_bytes()).unwrap().0, expected);
}

#[test]
fn byte_order_mark_is_skipped() {
    let marked = |bytes: &[u8]| [b"\xef\xbb\xbf", bytes].concat();
    let json = std::fs::read(fixture("small.json")).unwrap();
    let buffers = b"id,lower,upper,size,offset\nb,4,9,7,0\n".to_vec();
    let jsonl = b"{\"action\":\"alloc\",\"addr\":4096,\"size\":512,\"stream\":0,\"time_ns\":1}\n".to_vec();
    for plain in [json, RMM.into(), buffers, jsonl] {
        let (expected, summary) = read_bytes(&plain).unwrap();
        let (events, of_marked) = read_bytes(&marked(&plain)).unwrap();
        assert_eq!((events, of_marked.format), (expected, summary.format));
    }
    // A trace is also read for the addresses of its blocks.
    let file = tempfile::NamedTempFile::new().unwrap();
    let line = br#"{"action":"alloc","addr":4096,"size":500,"block":512,"stream":0,"time_ns":1,"path":"split"}"#;
    std::fs::write(file.path(), marked(line)).unwrap();
    assert_eq!(jsonl_placements(file.path()).unwrap()[0].bytes, 512);
    assert_eq!(read_bytes(&marked(b"")).unwrap_err().problem.to_string(), Problem::Empty.to_string());
}

#[test]
fn stalloc_marks_are_skipped() {
    let text = "Iteration Index : 0\n1 140737488355328 2048 0\nmicro-batch:F 0\n1 0x7f0000000800 512 7\nLayer 3 : forward\n\
                0 140737488355328 2048 0\n";
    let (events, summary) = read_bytes(text.as_bytes()).unwrap();
    let expected = [
        event(Action::Alloc, 1 << 47, 2048, 0, 0),
        event(Action::Alloc, 0x7f00_0000_0800, 512, 7, 0),
        event(Action::FreeRequested, 1 << 47, 2048, 0, 0),
        event(Action::FreeCompleted, 1 << 47, 2048, 0, 0),
    ];
    assert_eq!((events.as_slice(), summary.format), (&expected[..], Format::Stalloc));
}

#[test]
fn minimalloc_buffers_end_before_the_next_begins() {
    let (events, summary) = read_bytes(b"id,lower,upper,size,offset\nb,4,9,7,0\na,-3,4,5,0\n").unwrap();
    let expected = [
        event(Action::Alloc, 0, 5, 0, 0),
        // Ends when the other begins, and so before it: both may be at offset 0.
        event(Action::FreeRequested, 0, 5, 0, 7),
        event(Action::FreeCompleted, 0, 5, 0, 7),
        event(Action::Alloc, 0, 7, 0, 7),
        event(Action::FreeRequested, 0, 7, 0, 12),
        event(Action::FreeCompleted, 0, 7, 0, 12),
    ];
    assert_eq!((events.as_slice(), summary.format), (&expected[..], Format::MinimallocCsv));
    // Without offsets each buffer has a separate address; columns are found by name.
    let (events, _) = read_bytes(b"size,id,upper,lower\n5,a,4,0\n7,b,9,2\n").unwrap();
    let allocs: Vec<_> = events.iter().filter(|event| event.action == Action::Alloc).collect();
    assert_eq!((allocs[0].addr, allocs[0].bytes, allocs[0].time_ns), (0, 5, 0));
    assert_eq!((allocs[1].addr, allocs[1].bytes, allocs[1].time_ns), (5, 7, 2));
}

#[test]
fn jsonl_trace_is_read() {
    let text = r#"{"time_ns":5,"action":"alloc","addr":512,"size":100,"block":512,"stream":1,"path":"split"}
{"time_ns":6,"action":"record_use","addr":512,"size":100,"block":512,"stream":2,"path":"deferred"}
{"time_ns":9,"action":"free_requested","addr":512,"size":100,"block":512,"stream":1,"path":"coalesce"}
{"time_ns":9,"action":"oom","size":7,"block":0,"stream":1,"path":"failed"}
"#;
    let (events, summary) = read_bytes(text.as_bytes()).unwrap();
    let expected = [
        event(Action::Alloc, 512, 100, 1, 5),
        event(Action::RecordUse, 512, 0, 2, 6),
        event(Action::FreeRequested, 512, 100, 1, 9),
        event(Action::FreeCompleted, 512, 100, 1, 9),
        event(Action::Oom, 0, 7, 1, 9),
    ];
    assert_eq!((events.as_slice(), summary.format), (&expected[..], Format::Jsonl));
    let cut = message(&text.as_bytes()[..text.len() - 30]);
    assert!(cut.contains(":4: ") && cut.contains("truncated"), "{cut}");
}

#[test]
fn json_snapshot_reads_like_its_pickle() {
    let (events, summary) = read_all(&fixture("small.json")).unwrap();
    let (pickled, also) = read_all(&fixture("small.p4.pickle")).unwrap();
    assert_eq!(events, pickled);
    assert_eq!(summary.format, Format::SnapshotJson);
    assert_eq!((summary.segments, summary.events), (also.segments, also.events));
    assert_eq!(summary.allocator_settings, also.allocator_settings);
    assert_eq!(summary.external_annotations, 2);
}

#[test]
fn truncated_json_is_read_as_far_as_possible() {
    let bytes = std::fs::read(fixture("small.json")).unwrap();
    let (all, summary) = read_bytes(&bytes).unwrap();
    let end = bytes.trim_ascii_end().len();
    let mut most = 0;
    for length in (1..end).step_by(7).chain(end - 20..end) {
        match read_bytes(&bytes[..length]) {
            Ok((events, part)) => {
                let cut = part.cut.unwrap();
                assert!(all.starts_with(&events), "{length}");
                assert_eq!(cut.events, events.len() as u64);
                assert_eq!(part.segments.is_empty(), !cut.ends_known, "{length}");
                assert!(!cut.ends_known || part.segments == summary.segments, "{length}");
                most = events.len();
            }
            Err(error) => {
                assert!(matches!(error.problem, Problem::Truncated(_)), "{length}: {error}");
                assert_eq!(most, 0, "{length}");
            }
        }
    }
    assert_eq!(most, all.len());
}

#[test]
fn damaged_text_error_names_its_line() {
    let rmm = |row: &str| format!("Thread,Time,Action,Pointer,Size,Stream\n{row}\n");
    for (text, expected) in [
        (rmm("1,14:41:57.1,allocate,0x10,1024"), ":2: the line has too few columns"),
        (rmm("1,14:41:57.1,allot,0x10,1024,0"), "'allot' is not an action"),
        (rmm("1,14:41:57.1,allocate,0xyz,1024,0"), "Pointer '0xyz'"),
        (rmm("1,14:41:57.1,allocate,0x10,1e9,0"), "Size '1e9'"),
        (rmm("1,24:41:57.1,allocate,0x10,1,0"), "Time '24:41:57.1'"),
        (rmm("1,14:41:+7.1,allocate,0x10,1,0"), "Time"),
        (rmm("1,14:41:57.1,allocate,0x10,18446744073709551616,0"), "Size"),
        (rmm("1,14:41:57.1,allocate,0x10000000000000000,1,0"), "Pointer"),
        ("id,lower,upper,size\na,4,4,1\n".into(), "[4, 4) is empty"),
        ("id,lower,upper,size\na,x,4,1\n".into(), "lower 'x'"),
        ("id,lower,upper,size\na,0,4,-1\n".into(), "size '-1'"),
        ("id,lower,upper,size\na,0,1,18446744073709551615\nb,0,1,9\n".into(), ":3: the sizes add up"),
        ("id,lower,upper,size\n".into(), "no rows"),
        ("1 4096 512 0\n1 4096 512\n".into(), ":2: '1 4096 512' should be"),
        ("1 4096 512 0\n0 4096 512 0 3\n".into(), "more than four"),
        (r#"{"time_ns":1,"action":"alloc","size":1,"stream":0}"#.into(), "no 'addr'"),
        (r#"{"time_ns":1,"action":"alot","size":1,"stream":0}"#.into(), "'alot' is not an action"),
        ("[]".into(), "memory_snapshot()"),
        ("{}".into(), "no 'device_traces'"),
        (r#"{"device_traces":[[{"action":"alloc","addr":1}]]}"#.into(), "has no 'size'"),
        (r#"{"device_traces":[[{"action":"alloc","addr":-1,"size":1}]]}"#.into(), "invalid value"),
        (r#"{"device_traces":{}}"#.into(), "one list of events for each device"),
        ("hello\n".into(), "is in no known format"),
        ("\n\n".into(), "is in no known format"),
    ] {
        let error = message(text.as_bytes());
        assert!(error.contains(expected), "{text}: {error}");
    }
    let mut bytes = rmm("1,14:41:57.1,allocate,0x10,1,0").into_bytes();
    bytes.extend(b"\xff\xff\n");
    assert!(message(&bytes).contains(":3: the line is not UTF-8"));
}

#[test]
fn file_that_has_to_be_unpacked_or_fetched_is_named_with_its_command() {
    let mut tar = vec![b'a'; 512];
    tar[257..262].copy_from_slice(b"ustar");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    for (bytes, kind, command) in [
        (&b"\x28\xb5\x2f\xfd\x24\x00"[..], "compressed with zstd", "zstd -d FILE"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0", "zstd or lz4", "zstd -d FILE"),
        (b"BZh91AY&SY", "compressed with bzip2", "bzip2 -dk FILE"),
        (b"\x04\x22\x4d\x18\x64\x40", "compressed with lz4", "lz4 -d FILE"),
        (b"\x5d\0\0\x80\0\xff", "compressed with lzma", "xz -dk --format=lzma FILE"),
        (b"7z\xbc\xaf\x27\x1c\0\x04", "7-Zip", "7z x FILE"),
        (&tar, "tar archive", "tar -xf FILE"),
        (&[0xff, 0xfe, 0x41, 0x00], "UTF-16", "iconv"),
        (pointer.as_bytes(), "pointer of Git LFS", "git lfs pull"),
        (b"/annex/objects/SHA256E-s1--4d7a.pickle\n", "git-annex", "git annex get FILE"),
    ] {
        let error = message(bytes);
        assert!(error.contains(kind) && error.contains(command), "{error}");
        // Also inside of what is unpacked.
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(bytes).unwrap();
        assert_eq!(message(&packed.finish().unwrap()), error);
    }
}

#[test]
fn numbers_of_any_size_cause_no_panic() {
    let (events, _) = read_bytes(
        b"Thread,Time,Action,Pointer,Size,Stream\n1000000000,14:41:57.1,allocate,1000000000,1000000000,1000000000\n",
    )
    .unwrap();
    assert_eq!((events[0].addr, events[0].bytes), (0x10_0000_0000, 1_000_000_000));
    let (events, _) = read_bytes(
        b"id,lower,upper,size,offset\n1000000000,999999999,1000000000,1000000000,1000000000\n\
          x,-9223372036854775808,9223372036854775807,18446744073709551615,18446744073709551615\n",
    )
    .unwrap();
    assert_eq!(events.last().unwrap().time_ns, u64::MAX);
    // A reader passes on frees of unknown blocks. A replay decides about them.
    let (events, _) = read_bytes(b"0 1 2 3\n").unwrap();
    assert_eq!(events[0], event(Action::FreeRequested, 1, 2, 3, 0));
}

#[test]
fn a_million_streams_are_read() {
    let mut text = String::from("Thread,Time,Action,Pointer,Size,Stream\n");
    for stream in 0..1_000_000 {
        text.push_str(&format!("1,00:00:00.0,allocate,{stream:#x},1,{stream:#x}\n"));
    }
    let mut streams = std::collections::HashSet::new();
    let summary = read_from(Box::new(text.as_bytes()), &ReadOptions::default(), &mut |event| {
        streams.insert(event.stream);
        Ok(())
    })
    .unwrap();
    assert_eq!((streams.len(), summary.all_events()), (1_000_000, 1_000_000));
}

#[test]
fn endless_lines_and_strings_are_refused() {
    use std::io::Read;
    for start in ["Thread,Time,Action,Pointer,Size,Stream\n", "id,lower,upper,size\n", "1 1 1 1\n", "{\"time_ns\":"] {
        let source = start.as_bytes().chain(std::io::repeat(b'7').take(100 << 20));
        let error = read_from(Box::new(source), &ReadOptions::default(), &mut |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
    }
    for start in ["{\"a", "{\"a\":\"", "{\"device_traces\":[],\"allocator_settings\":{\"a\":[0", "{\"segments\": ["] {
        let source = start.as_bytes().chain(std::io::repeat(b' ').take(64 << 20));
        let error = read_from(Box::new(source), &ReadOptions::default(), &mut |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("longer than any snapshot's"), "{start}: {error}");
    }
    let rows = std::iter::repeat_n("a,0,1,1\n", 1 << 20).collect::<String>();
    let text = format!("id,lower,upper,size\n{rows}");
    let options = ReadOptions { budget: Budget::new(1 << 20), ..ReadOptions::default() };
    let error = read_from(Box::new(text.as_bytes()), &options, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(error.problem, Problem::TooLarge(_)), "{error}");
    let deep = format!("{{\"allocator_settings\":{{\"a\":{}", "[".repeat(1 << 20));
    assert!(message(deep.as_bytes()).contains("nested deeper"));
}

#[test]
fn decompression_bombs_take_bounded_memory() {
    // 16 MiB of one letter, in a few KiB.
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 6);
    for _ in 0..16 {
        gzip.write_all(&vec![b'a'; 1 << 20]).unwrap();
        xz.write_all(&vec![b'a'; 1 << 20]).unwrap();
    }
    let (gzip, xz) = (gzip.finish().unwrap(), xz.finish().unwrap());
    assert!(message(&gzip).contains("no known format"));
    assert!(message(&xz).contains("no known format"));
    // Truncated and damaged compression.
    let plain = std::fs::read(fixture("small.p4.pickle")).unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(&plain).unwrap();
    let mut packed = packed.finish().unwrap();
    // A truncated snapshot is read as far as possible, other formats are not.
    let (_, summary) = read_bytes(&packed[..packed.len() / 2]).unwrap();
    assert!(summary.cut.is_some());
    let mut log = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    log.write_all("1 4096 512 0\n".repeat(100).as_bytes()).unwrap();
    let log = log.finish().unwrap();
    let error = read_bytes(&log[..log.len() - 50]).unwrap_err();
    assert!(matches!(error.problem, Problem::Io(_)), "{error}");
    let middle = packed.len() / 2;
    packed[middle] ^= 0xff;
    assert!(!message(&packed).is_empty());
}

#[test]
fn errors_of_files_and_sinks_are_returned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absent");
    let text = read_all(&path).unwrap_err().to_string();
    assert!(text.starts_with(path.to_str().unwrap()) && text.contains("cannot be read"), "{text}");
    assert!(read_all(folder.path()).unwrap_err().to_string().contains("is a directory"));
    std::fs::write(&path, "").unwrap();
    assert!(read_all(&path).unwrap_err().to_string().ends_with("is empty; record again"));
    for name in ["small.p4.pickle", "small.json"] {
        let mut left = 3;
        let error = vramlab_histories::formats::read(&fixture(name), &ReadOptions::default(), &mut |_| {
            left -= 1;
            if left == 0 { Err(ReadError::stop("enough")) } else { Ok(()) }
        })
        .unwrap_err();
        assert_eq!(error.place, Place::Whole, "{name}");
        assert!(error.to_string().ends_with(": enough"), "{error}");
        assert_eq!(left, 0);
    }
}

#[test]
fn table_with_other_columns_names_the_expected_ones() {
    let text = message(b"timestamp,op,address,nbytes\n1,alloc,4096,512\n");
    for words in ["the columns timestamp,op,address,nbytes;", "Time,Action,Pointer,Size,Stream", "lower,upper,size"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!message(b"alpha beta\n").contains("columns") && !message(b"1,2,3\n").contains("columns"));
}
