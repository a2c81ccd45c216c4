//! Pickles that are truncated, damaged or malicious.

use super::{fixture, message, read_bytes};
use vramlab_device::budget::Budget;
use vramlab_histories::formats::{Problem, ReadOptions, read_from};

#[test]
fn truncated_pickle_is_read_as_far_as_possible() {
    for name in ["small.p2.pickle", "small.p4.pickle", "small.torch.pickle"] {
        let bytes = std::fs::read(fixture(name)).unwrap();
        let (all, summary) = read_bytes(&bytes).unwrap();
        assert_eq!(summary.cut, None);
        let (mut most, mut complete) = (0, 0);
        for length in 1..bytes.len() {
            let (events, part) = match read_bytes(&bytes[..length]) {
                Ok(read) => read,
                Err(error) => {
                    assert!(matches!(error.problem, Problem::Truncated(_)), "{length}: {error}");
                    assert_eq!(most, 0, "{name}: {length} bytes should hold what fewer did");
                    continue;
                }
            };
            let cut = part.cut.unwrap();
            assert_eq!((cut.at, cut.events), (length as u64, events.len() as u64), "{name}");
            assert!(all.starts_with(&events) && events.len() >= most, "{name}: {length}");
            most = events.len();
            if cut.ends_known {
                assert_eq!((events.len(), &part.segments), (all.len(), &summary.segments), "{name}: {length}");
                complete += 1;
            } else {
                assert!(part.segments.is_empty() && part.ending().is_none(), "{name}: {length}");
            }
            if cut.settings_known {
                assert_eq!(part.allocator_settings, summary.allocator_settings, "{name}: {length}");
            }
        }
        assert_eq!(most, all.len(), "{name}");
        assert!(complete > 0, "{name}: events and final segments precede the last byte");
    }
    assert!(message(b"").contains("empty"));
}

#[test]
fn truncated_xz_snapshot_is_read_as_far_as_possible() {
    let bytes = std::fs::read(fixture("small.p4.pickle")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    std::io::Write::write_all(&mut gzip, &bytes).unwrap();
    let packed = gzip.finish().unwrap();
    let (events, summary) = read_bytes(&packed[..packed.len() - 100]).unwrap();
    assert!(summary.cut.is_some() && !events.is_empty());
    let message_text = summary.cut.unwrap().to_string();
    assert!(message_text.contains("was cut short at byte") && !message_text.contains('\n'), "{message_text}");
}

#[test]
fn opcodes_that_run_code_are_refused_by_name() {
    // os.system("true"), as protocols 2 and 4 call it.
    let cases: [(&[u8], &str); 4] = [
        (b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.", "byte 2: the pickle opcode GLOBAL"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "byte 14: the pickle opcode STACK_GLOBAL"),
        (b"\x80\x04}R.", "byte 3: the pickle opcode REDUCE"),
        (b"\x80\x04}}b.", "byte 4: the pickle opcode BUILD"),
    ];
    for (bytes, expected) in cases {
        let text = message(bytes);
        assert!(text.contains(expected) && text.contains("run code"), "{text}");
    }
    assert!(message(b"\x80\x05\x96\0\0\0\0\0\0\0\0.").contains("BYTEARRAY8"));
    assert!(message(b"\x80\x04\xfe.").contains("0xfe is not a pickle opcode"));
    assert!(message(b"\x80\x09}.").contains("protocol 9"));
}

#[test]
fn old_pickles_are_refused_with_a_conversion() {
    // As Python's pickler and `torch.save` of PyTorch 2.11 write them.
    let cases: [(&[u8], &str); 7] = [
        (b"(dp0\nVsegments\np1\n(lp2\nsVdevice_traces\np3\n(lp4\ns.", "a pickle of protocol 0 or 1"),
        (b"(lp0\n(dp1\nVaddress\np2\nI0\nsa.", "a pickle of protocol 0 or 1"),
        (b"}q\0(X\x08\0\0\0segmentsq\x01]q\x02u.", "a pickle of protocol 0 or 1"),
        (b"]q\0}q\x01X\x07\0\0\0addressq\x02K\0sa.", "a pickle of protocol 0 or 1"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\0.", "torch.save before PyTorch 1.6"),
        (b"\x80\x04\x95\x0d\0\0\0\0\0\0\0\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x04", "torch.save before PyTorch 1.6"),
        (b"L119547037146038801333356L\n.I1001\n.(dp0\n.", "torch.save before PyTorch 1.6"),
    ];
    for (bytes, expected) in cases {
        let text = message(bytes);
        assert!(text.contains(expected) && text.contains("convert it: python3 -c 'import"), "{text}");
    }
}

#[test]
fn every_opcode_at_every_position_causes_no_panic() {
    let bytes = std::fs::read(fixture("small.p4.pickle")).unwrap();
    let mut damaged = bytes.clone();
    // The head, the first events and the end contain every kind of position.
    let places = (0..300).chain(bytes.len() - 60..bytes.len());
    for at in places {
        for value in (0..=255).step_by(if at < 100 { 1 } else { 11 }) {
            damaged[at] = value;
            if let Err(error) = read_bytes(&damaged) {
                assert!(!error.to_string().contains('\n'));
            }
        }
        damaged[at] = bytes[at];
    }
}

#[test]
fn huge_lengths_allocate_nothing() {
    for (start, length) in [
        (&b"\x80\x04\x8d"[..], (1_u64 << 63).to_le_bytes().to_vec()),
        (b"\x80\x04\x8d", u64::MAX.to_le_bytes().to_vec()),
        (b"\x80\x04X", u32::MAX.to_le_bytes().to_vec()),
        (b"\x80\x04\x8b", i32::MAX.to_le_bytes().to_vec()),
    ] {
        let bytes = [start, &length, b"abc"].concat();
        let error = read_bytes(&bytes).unwrap_err();
        assert!(matches!(error.problem, Problem::Truncated(_)), "{error}");
    }
    assert!(message(b"\x80\x04\x8b\xff\xff\xff\xff.").contains("negative"));
    // A frame that claims everything changes nothing.
    assert!(message(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff}.").contains("device_traces"));
}

#[test]
fn memo_memory_is_proportional_to_its_entries() {
    let mut bytes = b"\x80\x04}".to_vec();
    for index in [u32::MAX, 1 << 31, 1 << 20, 0] {
        bytes.push(b'r');
        bytes.extend(index.to_le_bytes());
    }
    bytes.extend(b"j\xff\xff\xff\xff");
    bytes.push(b'.');
    assert!(message(&bytes).contains("device_traces"));
    assert!(message(b"\x80\x04h\x07.").contains("memo entry 7"));
    let text = message(b"\x80\x04j\xff\xff\xff\xff.");
    assert!(text.contains("memo entry 4294967295"), "{text}");
}

/// A snapshot with these instructions as the value of `allocator_settings`.
fn with_settings(value: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x80\x04}(\x8c\x0ddevice_traces]\x8c\x12allocator_settings".to_vec();
    bytes.extend(value);
    bytes.extend(b"u.");
    bytes
}

#[test]
fn sharing_does_not_grow_and_depth_does_not_recurse() {
    // A list of two of a list of two of ..., 2^59 leaves in all.
    let mut value = b"}(\x8c\x01x(]\x94".to_vec();
    for level in 1..60_u8 {
        value.extend([b']', 0x94, b'(', b'h', level - 1, b'h', level - 1, b'e']);
    }
    value.extend(b"lu");
    let (_, summary) = read_bytes(&with_settings(&value)).unwrap();
    assert!(summary.allocator_settings["x"].as_array().is_some_and(|list| list.len() == 60));
    // A million lists, each in the one before it.
    let mut deep = vec![b']'; 1_000_000];
    deep.extend(vec![b'a'; 999_999]);
    let mut settings = b"}\x8c\x01x".to_vec();
    settings.extend(deep);
    settings.push(b's');
    let (_, summary) = read_bytes(&with_settings(&settings)).unwrap();
    assert!(summary.allocator_settings.contains_key("x"));
    // A list that contains itself.
    let (_, summary) = read_bytes(&with_settings(b"}\x8c\x01x]\x94h\0as")).unwrap();
    assert!(summary.allocator_settings.contains_key("x"));
}

#[test]
fn memory_is_bounded() {
    // Four bytes of memo for each byte of the file, endlessly.
    let source = std::io::Read::chain(&b"\x80\x04}"[..], std::io::repeat(0x94));
    let options = ReadOptions { budget: Budget::new(1 << 20), ..ReadOptions::default() };
    let error = read_from(Box::new(source), &options, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(error.problem, Problem::TooLarge(over) if over.limit == 1 << 20), "{error}");
    for opcode in [b'(', b'}', b']', b'N'] {
        let source = std::io::Read::chain(&b"\x80\x04"[..], std::io::repeat(opcode));
        let error = read_from(Box::new(source), &options, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error.problem, Problem::TooLarge(_)), "{error}");
    }
}

/// A snapshot of one event with these fields.
fn one_event(fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = b"\x80\x04}(\x8c\x0ddevice_traces](](}(".to_vec();
    for (key, value) in fields {
        bytes.extend([0x8c, u8::try_from(key.len()).unwrap()]);
        bytes.extend(key.as_bytes());
        bytes.extend(*value);
    }
    bytes.extend(b"ueeu.");
    bytes
}

#[test]
fn large_numbers_are_read_and_invalid_ones_refused() {
    let alloc: &[u8] = b"\x8c\x05alloc";
    let (addr, size) = ((1_u64 << 63) + 512, (1_u64 << 62) + 1);
    let wide = |value: u64| [&b"\x8a\x09"[..], &value.to_le_bytes(), &[0]].concat();
    let (events, _) =
        read_bytes(&one_event(&[("action", alloc), ("addr", &wide(addr)), ("size", &wide(size))])).unwrap();
    assert_eq!((events[0].addr, events[0].bytes), (addr, size));
    let minus: &[u8] = b"J\xff\xff\xff\xff";
    let ten: &[u8] = b"\x8a\x0a0123456789";
    for (fields, expected) in [
        (vec![("action", alloc), ("addr", minus), ("size", b"K\x01")], "'addr'"),
        (vec![("action", alloc), ("addr", b"K\x01"), ("size", ten)], "'size'"),
        (vec![("action", alloc), ("addr", b"K\x01")], "has no 'size'"),
        (vec![("addr", b"K\x01"), ("size", b"K\x01")], "has no 'action'"),
        (vec![("action", alloc), ("size", b"K\x01")], "has no 'addr'"),
        (vec![("action", b"N"), ("addr", b"K\x01"), ("size", b"K\x01")], "'action'"),
        (
            vec![("action", alloc), ("addr", b"K\x01"), ("size", b"K\x01"), ("time_us", &wide(u64::MAX))],
            "has no 'time_us",
        ),
    ] {
        let text = message(&one_event(&fields));
        assert!(text.contains(expected) && text.contains("event 0 of device 0"), "{text}");
    }
    // A stream is a pointer; an unknown action is skipped and counted.
    let (events, summary) =
        read_bytes(&one_event(&[("action", alloc), ("addr", b"K\x01"), ("size", b"K\x01"), ("stream", minus)]))
            .unwrap();
    assert_eq!((events[0].stream, summary.unknown_actions), (u64::MAX, 0));
    let (events, summary) = read_bytes(&one_event(&[("action", b"\x8c\x03new")])).unwrap();
    assert_eq!((events.len(), summary.unknown_actions), (0, 1));
}

#[test]
fn pickle_without_a_snapshot_is_refused() {
    assert!(message(b"\x80\x04].").contains("memory_snapshot()"));
    assert!(message(b"\x80\x04N.").contains("None"));
    assert!(message(b"\x80\x04}.").contains("device_traces"));
    assert!(message(b"\x80\x04}\x8c\x0ddevice_tracesNs.").contains("should be a list"));
    assert!(message(b"\x80\x04}\x8c\x0ddevice_traces]K\x01as.").contains("should be a list"));
    assert!(message(b"\x80\x04}(\x8c\x0ddevice_traces]\x8c\x08segments]K\x01au.").contains("a segment should be"));
    for bytes in [&b"\x80\x04u."[..], b"\x80\x04e.", b"\x80\x04(u.", b"\x80\x04}(Nu.", b"\x80\x04NNs.", b"\x80\x04."] {
        let text = message(bytes);
        assert!(text.contains("damaged") || text.contains("no "), "{text}");
    }
}

#[test]
fn containers_built_from_the_inside_are_read() {
    // As MARK ... LIST and MARK ... DICT, which no current pickler writes.
    let mut bytes = b"\x80\x02(\x8c\x0ddevice_traces((".to_vec();
    bytes.extend(b"(\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x10\x8c\x04sizeK\x20d");
    bytes.extend(b"ll\x8c\x08segments(ld.");
    let (events, summary) = read_bytes(&bytes).unwrap();
    assert_eq!((events[0].addr, events[0].bytes), (16, 32));
    assert_eq!((summary.events, summary.segments.len()), (vec![1], 0));
}
