//! Files that stand for a recording without being one: compressed in a way that is not read, the pointer of a large file, or a timeline.

use super::error::{Place, Problem, ReadError};

/// A kind of file, its beginning and its remedy.
struct Foreign {
    begins: &'static [u8],
    kind: &'static str,
    fix: &'static str,
}

const fn packed(begins: &'static [u8], kind: &'static str, fix: &'static str) -> Foreign {
    Foreign { begins, kind, fix }
}

/// No beginning is that of a format: pickles of protocols 2 to 5 begin with 0x80, all others with text.
const KINDS: [Foreign; 12] = [
    packed(b"\x28\xb5\x2f\xfd", "is compressed with zstd", "unpack it first: zstd -d FILE"),
    packed(b"BZh", "is compressed with bzip2", "unpack it first: bzip2 -dk FILE"),
    packed(b"\x04\x22\x4d\x18", "is compressed with lz4", "unpack it first: lz4 -d FILE"),
    packed(b"\x02\x21\x4c\x18", "is compressed with lz4", "unpack it first: lz4 -d FILE"),
    packed(b"\x5d\0\0", "is compressed with lzma", "unpack it first: xz -dk --format=lzma FILE"),
    packed(b"\x1f\x9d", "is compressed with compress", "unpack it first: gzip -dk FILE"),
    packed(b"7z\xbc\xaf\x27\x1c", "is a 7-Zip archive", "unpack it and name the recording in it: 7z x FILE"),
    packed(b"Rar!\x1a\x07", "is a RAR archive", "unpack it and name the recording in it: unrar x FILE"),
    // PowerShell writes redirected output so.
    packed(b"\xff\xfe", "is text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    packed(b"PK\x05\x06", "is an empty zip archive", "download or copy it again"),
    packed(
        b"version https://git-lfs.github.com/spec/",
        "is a pointer of Git LFS and not the recording itself",
        "fetch that: git lfs pull",
    ),
    packed(
        b"/annex/objects/",
        "is a pointer of git-annex and not the recording itself",
        "fetch that: git annex get FILE",
    ),
];

/// Where a tar archive has its mark.
const TAR: (usize, &[u8]) = (257, b"ustar");

/// The error of a file with this beginning, if it is such a file.
pub(super) fn foreign(start: &[u8]) -> Option<Problem> {
    let found = KINDS.iter().find(|kind| start.starts_with(kind.begins));
    // Frames that zstd and lz4 skip may precede the others.
    let skipped = start.get(1..4) == Some(b"\x2a\x4d\x18") && start[0] & 0xf0 == 0x50;
    let (kind, fix) = match found {
        Some(Foreign { kind, fix, .. }) => (*kind, *fix),
        None if skipped => ("is compressed with zstd or lz4", "unpack it first: zstd -d FILE, or lz4 -d FILE"),
        None if start.get(TAR.0..TAR.0 + TAR.1.len()) == Some(TAR.1) => {
            ("is a tar archive", "unpack it and name the recording in it: tar -xf FILE")
        }
        None => return None,
    };
    Some(Problem::Foreign { kind, fix })
}

/// The error of a timeline in Chrome's format of traces, which PyTorch's profiler writes, as `convert --to perfetto` does.
pub(super) fn timeline() -> ReadError {
    let kind = "is a timeline for a viewer, such as PyTorch's profiler writes, and has no events of an allocator";
    let fix = "name the recording, or record the program: vramlab run -- COMMAND";
    ReadError::at(Place::Whole, Problem::Foreign { kind, fix })
}
