//! Reading files.

use super::{MANY, linear};
use crate::formats::{ReadError, ReadOptions, Summary, read_from};
use std::io::Read;

/// Reads `bytes` in about `items` steps.
fn read(name: &str, items: u64, bytes: &[u8]) -> Result<Summary, ReadError> {
    read_source(name, items, bytes)
}

fn read_source(name: &str, items: u64, source: impl Read) -> Result<Summary, ReadError> {
    linear(name, items, || read_from(Box::new(source), &ReadOptions::default(), &mut |_| Ok(())))
}

fn many(what: &[u8]) -> Vec<u8> {
    what.repeat(MANY as usize)
}

/// A pickle of a dictionary whose keys and values these instructions push.
fn pickle(parts: &[&[u8]]) -> Vec<u8> {
    [b"\x80\x04}(", &parts.concat()[..], b"u."].concat()
}

const TRACES: &[u8] = b"\x8c\x0ddevice_traces";
const SEGMENTS: &[u8] = b"\x8c\x08segments";
const SETTINGS: &[u8] = b"\x8c\x12allocator_settings";

#[test]
fn pickle_of_many_keys() {
    // Whether a key is the next of the outermost dictionary depends on all before it.
    let summary = read("keys", MANY, &pickle(&[TRACES, b"]", &many(b"\x8c\x08segments]")])).unwrap();
    assert!(summary.segments.is_empty());
    read("keys without a meaning", MANY, &pickle(&[TRACES, b"]", &many(b"\x8c\x01x]")])).unwrap();
    // A value that is not a key, and then keys again.
    read("a key that is none", MANY, &pickle(&[TRACES, b"]", b"K\x01]", &many(b"\x8c\x08segments]")])).unwrap();
    // Such values behind a million that are keys.
    let behind = [&many(b"\x8c\x01xN")[..], b"K\x01]", &many(b"\x8c\x08segments]")].concat();
    read("a key that is none, behind keys", 2 * MANY, &pickle(&[TRACES, b"]", &behind])).unwrap();
    // Keys that are pushed and dropped.
    let removed = many(b"\x8c\x01x]\x8c\x08segments]");
    read("keys in tuples", MANY, &pickle(&[TRACES, b"]", b"\x8c\x01x(", &removed, b"t"])).unwrap();
    // One instruction each, all for one dictionary.
    let set = [&b"\x80\x04}"[..], TRACES, b"]s", &many(b"\x8c\x08segments]s"), b"."].concat();
    read("keys one by one", MANY, &set).unwrap();
}

#[test]
fn pickle_of_events_and_segments() {
    let event = b"}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x10\x8c\x04sizeK\x20u";
    let summary = read("events", MANY, &pickle(&[TRACES, b"](](", &many(event), b"ee"])).unwrap();
    assert_eq!(summary.events, [MANY]);
    let appended = many(&[&event[..], b"a"].concat());
    let summary = read("events one by one", MANY, &pickle(&[TRACES, b"](]", &appended, b"e"])).unwrap();
    assert_eq!(summary.events, [MANY]);
    // The keys of one event.
    let keys = many(b"\x8c\x04addrK\x10");
    let one = pickle(&[TRACES, b"](](}(\x8c\x06action\x8c\x05alloc\x8c\x04sizeK\x01", &keys, b"uee"]);
    assert_eq!(read("keys of an event", MANY, &one).unwrap().events, [1]);
    let segment = b"}(\x8c\x07addressK\x10\x8c\x0atotal_sizeK\x20\x8c\x06blocks]u";
    let summary = read("segments", MANY, &pickle(&[TRACES, b"]", SEGMENTS, b"](", &many(segment), b"e"])).unwrap();
    assert_eq!(summary.segments.len() as u64, MANY);
    let block = b"}(\x8c\x04sizeK\x10\x8c\x05state\x8c\x08inactiveu";
    let blocks = [&segment[..segment.len() - 1], b"(", &many(block), b"eu"].concat();
    let summary = read("blocks", MANY, &pickle(&[TRACES, b"]", SEGMENTS, b"](", &blocks, b"e"])).unwrap();
    assert_eq!(summary.segments[0].blocks.len() as u64, MANY);
    // Lists of devices that are built before they are known to be such.
    let lists = [&b"\x80\x02(\x8c\x0ddevice_traces("[..], &b"(l".repeat(65_536), b"ld."].concat();
    assert_eq!(read("devices", 65_536, &lists).unwrap().events.len(), 65_536);
}

#[test]
fn pickle_that_refers_to_itself() {
    let traces = [TRACES, b"]"].concat();
    // References to one list.
    let references = [b"}\x8c\x01x]\x94(", &many(b"h\0")[..], b"es"].concat();
    read("references", MANY, &pickle(&[&traces, SETTINGS, &references])).unwrap();
    // Settings that are set again and again: each time to the same large dictionary.
    let large = [&b"}\x94("[..], &b"\x8c\x01xK\x01".repeat(1 << 13), b"u"].concat();
    let again = many(&[SETTINGS, b"h\0"].concat());
    read("the same settings", MANY, &pickle(&[&traces, SETTINGS, &large, &again])).unwrap();
    // A dictionary whose keys are not texts, in a list a million times.
    let numbers = [&b"}\x94("[..], &many(b"K\x01K\x02"), b"u"].concat();
    let listed = [&b"]("[..], &numbers, &many(b"h\0"), b"e"].concat();
    let settings = [&b"}\x8c\x01x"[..], &listed, b"s"].concat();
    read("keys that are not texts", MANY, &pickle(&[&traces, SETTINGS, &settings])).unwrap();
    // A list of two of a list of two of ...
    let mut shared = b"}(\x8c\x01x(]\x94".to_vec();
    for level in 1..200_u8 {
        shared.extend([b']', 0x94, b'(', b'h', level - 1, b'h', level - 1, b'e']);
    }
    shared.extend(b"lu");
    // Kept settings are limited, so the steps follow that limit and not the file.
    read("shared lists", 1 << 14, &pickle(&[&traces, SETTINGS, &shared])).unwrap();
}

#[test]
fn pickle_that_is_deep() {
    let deep = [&b"}\x8c\x01x"[..], &many(b"]"), &b"a".repeat(MANY as usize - 1), b"s"].concat();
    read("lists in lists", MANY, &pickle(&[TRACES, b"]", SETTINGS, &deep])).unwrap();
    let marks = [&b"}\x8c\x01x"[..], &many(b"("), &many(b"t"), b"s"].concat();
    read("tuples in tuples", MANY, &pickle(&[TRACES, b"]", SETTINGS, &marks])).unwrap();
    let dicts = [&b"}\x8c\x01x"[..], &many(b"(\x8c\x01x"), b"]", &many(b"d"), b"s"].concat();
    read("dictionaries in dictionaries", MANY, &pickle(&[TRACES, b"]", SETTINGS, &dicts])).unwrap();
    // Memo entries whose numbers leave gaps.
    let sparse: Vec<u8> = (1..=MANY as u32).flat_map(|at| [&b"r"[..], &(2 * at).to_le_bytes()].concat()).collect();
    read("memo entries", MANY, &pickle(&[TRACES, b"]", &sparse])).unwrap();
}

#[test]
fn json() {
    let events = |event: &str| format!("{{\"device_traces\":[[{}{event}]]}}", format!("{event},").repeat(1 << 17));
    let event = "{\"action\":\"alloc\",\"addr\":1,\"size\":2}";
    let text = events(event);
    assert_eq!(read("JSON events", text.len() as u64, text.as_bytes()).unwrap().events, [(1 << 17) + 1]);
    let list = |name: &str, before: &str, item: &str, after: &str| {
        let text = format!("{before}{}{item}{after}", format!("{item},").repeat(1 << 17));
        read(name, text.len() as u64, text.as_bytes())
    };
    let segment = "{\"address\":1,\"total_size\":2,\"blocks\":[]}";
    list("JSON segments", "{\"device_traces\":[],\"segments\":[", segment, "]}").unwrap();
    let block = "{\"size\":1,\"state\":\"inactive\"}";
    let before = "{\"device_traces\":[],\"segments\":[{\"address\":1,\"total_size\":2,\"blocks\":[";
    list("JSON blocks", before, block, "]}]}").unwrap();
    list("JSON keys", "{\"device_traces\":[],", "\"segments\":[]", "}").unwrap();
    list("JSON settings", "{\"device_traces\":[],", "\"allocator_settings\":{\"a\":[[],{}]}", "}").unwrap();
    list("JSON unknown", "{\"device_traces\":[],\"x\":[", "[[[[[[[[{\"a\":1}]]]]]]]]", "]}").unwrap();
}

/// A source that returns one byte at a time.
struct Slow<'b>(&'b [u8]);

impl Read for Slow<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = out.len().min(1);
        self.0.read(&mut out[..count])
    }
}

#[test]
fn text() {
    let rows = |header: &str, row: &str| [header.as_bytes(), &many(row.as_bytes())].concat();
    let trace = "{\"time_ns\":1,\"action\":\"alloc\",\"addr\":1,\"size\":1,\"stream\":0}\n";
    for (what, bytes) in [
        ("rmm", rows("Thread,Time,Action,Pointer,Size,Stream\n", "1,00:00:00.0,allocate,0x1,1,0\n")),
        ("stalloc", rows("", "1 1 1 1\n")),
        ("marks", rows("1 1 1 1\n", "x\n")),
        ("blank lines", rows("1 1 1 1\n", "\n")),
        ("minimalloc", rows("id,lower,upper,size\n", "a,0,1,1\n")),
        ("trace", rows("", trace)),
    ] {
        read(what, MANY, &bytes).unwrap();
    }
    // Lines as long as they may be, from a source that gives a byte at a time.
    let line = format!("x{}\n", " ".repeat(60_000));
    let text = format!("1 1 1 1\n{}", line.repeat(16));
    // Format detection reads some of it without counting.
    read_source("a byte at a time", text.len() as u64 * 9 / 10, Slow(text.as_bytes())).unwrap();
}
