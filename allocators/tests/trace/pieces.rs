//! Pickles that come byte by byte. Shortcuts of the reader take what lies in its buffer, so here each instruction is run
//! alone; files that come at once must say the same.

use crate::common::fixture;
use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use vramlab::histories::formats::{Event, Format, Frame, Origin, ReadOptions, StackId, TextId, read_origins_from};

/// Gives one byte at a time.
struct Bytewise<'a>(&'a [u8]);

impl Read for Bytewise<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let count = out.len().min(1);
        self.0.read(&mut out[..count])
    }
}

/// Everything that reading gives: events, what their stacks and texts are, and the rest or the error in words.
#[derive(PartialEq)]
struct Told {
    events: Vec<(Event, Origin)>,
    stacks: BTreeMap<StackId, Vec<Frame>>,
    texts: BTreeMap<TextId, String>,
    rest: String,
}

fn told(source: impl Read) -> Told {
    // Telling the format by the content would fill the buffer.
    let options = ReadOptions { format: Some(Format::SnapshotPickle), ..ReadOptions::default() };
    let mut events = Vec::new();
    let read = read_origins_from(Box::new(source), &options, &mut |event, origin, _| {
        events.push((event, origin));
        Ok(())
    });
    let (mut stacks, mut texts) = (BTreeMap::new(), BTreeMap::new());
    let rest = read.map(|(summary, origins)| {
        for (_, Origin { stack, category, note }) in &events {
            stacks.entry(*stack).or_insert_with(|| origins.frames(*stack).collect::<Vec<Frame>>());
            let frames = stacks[stack].iter().flat_map(|frame| [frame.name, frame.filename]);
            for text in frames.chain([*category, *note]) {
                texts.entry(text).or_insert_with(|| origins.spelt(text).to_owned());
            }
        }
        format!("{summary:?} {:?} {}", origins.annotations(), origins.stacks())
    });
    Told { events, stacks, texts, rest: rest.unwrap_or_else(|error| error.to_string()) }
}

fn assert_same(what: &str, bytes: &[u8]) {
    let (at_once, bytewise) = (told(Cursor::new(bytes)), told(Bytewise(bytes)));
    assert_eq!(at_once.rest, bytewise.rest, "{what}");
    assert_eq!(at_once.events, bytewise.events, "{what}");
    assert!(at_once == bytewise, "{what}: stacks or texts differ");
}

#[test]
fn whole_files_say_the_same() {
    let mut found = 0;
    for entry in std::fs::read_dir(fixture("")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let mut unpacked = Vec::new();
        if name.ends_with(".pickle.xz") {
            let packed = std::fs::File::open(&path).unwrap();
            liblzma::read::XzDecoder::new(packed).read_to_end(&mut unpacked).unwrap();
        } else if name.ends_with(".pickle") {
            unpacked = std::fs::read(&path).unwrap();
        } else {
            continue;
        }
        assert_same(&name, &unpacked);
        found += 1;
    }
    assert!(found > 10, "{found} files");
}

#[test]
fn damaged_files_say_the_same() {
    // The instructions of a snapshot, and some that none has.
    const INSTRUCTIONS: &[u8] = b"hjKMJ\x8a\x94()}]uea\x8cXqr\x88N.st\x95\x850";
    let mut state = 1_u64;
    let mut below = |bound: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // CAST: below `bound`.
        ((state >> 33) % bound as u64) as usize
    };
    for name in ["small.p2.pickle", "small.p4.pickle", "small.torch.pickle"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        for number in 0..200 {
            let mut bytes = whole.clone();
            let at = below(bytes.len());
            match number % 5 {
                0 => bytes.truncate(at),
                1 => bytes[at] = below(256) as u8,
                2 => bytes[at] = INSTRUCTIONS[below(INSTRUCTIONS.len())],
                3 => bytes.insert(at, INSTRUCTIONS[below(INSTRUCTIONS.len())]),
                _ => drop(bytes.remove(at)),
            }
            assert_same(&format!("{name}, damage {number} at {at}"), &bytes);
        }
    }
}

#[test]
fn numbers_of_every_length_say_the_same() {
    // An event whose size is written as LONG1 of each length, with each sign, in front of what could be taken for its rest.
    for length in 0..=9_u8 {
        for top in [0x00, 0x01, 0x7f, 0x80, 0xff] {
            let mut bytes =
                b"\x80\x04}(\x8c\x0ddevice_traces]](}(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x10\x8c\x06stream"
                    .to_vec();
            bytes.extend([0x8a, length]);
            bytes.extend((0..length).map(|at| if at + 1 == length { top } else { 0xa5 }));
            bytes.extend(b"\x8c\x04sizeK\x20ueau.");
            assert_same(&format!("{length} bytes, the last {top:#x}"), &bytes);
        }
    }
}
