//! The fuzz target of IDX files: its seeds and some thousand mutations of them.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

#[path = "../../allocators/tests/common/mutate.rs"]
mod mutate;

use mutate::{mutations, seeds};
use std::path::Path;
use trainer::data::{IdxKind, IdxLimits, parse_idx};

fn parse(bytes: &[u8]) -> bool {
    [IdxKind::Images, IdxKind::Labels].into_iter().fold(false, |sound, kind| {
        let limits = IdxLimits { max_bytes: 1 << 24, ..IdxLimits::new(kind) };
        match parse_idx(bytes, "fuzz", &limits) {
            Ok(idx) => {
                assert_eq!(idx.data.len(), idx.items() * idx.features());
                true
            }
            Err(error) => {
                assert!(!error.to_string().contains('\n'), "an error is one line: {error}");
                sound
            }
        }
    })
}

#[test]
fn idx_files() {
    let seeds = seeds(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../allocators/fuzz/corpus/idx"));
    assert!(seeds.iter().all(|seed| parse(seed)), "a seed should be sound");
    let sound = mutations(&seeds, 5000).filter(|mutation| parse(mutation)).count();
    assert!(sound > 0, "some mutations should still be sound, or they reach nothing but the head");
}
