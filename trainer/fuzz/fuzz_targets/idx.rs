//! MNIST's files.
#![no_main]

use libfuzzer_sys::fuzz_target;
use trainer::data::{IdxKind, IdxLimits, parse_idx};

fuzz_target!(|bytes: &[u8]| {
    for kind in [IdxKind::Images, IdxKind::Labels] {
        let limits = IdxLimits { max_bytes: 1 << 24, ..IdxLimits::new(kind) };
        match parse_idx(bytes, "fuzz", &limits) {
            Ok(idx) => assert_eq!(idx.data.len(), idx.items() * idx.features()),
            Err(error) => assert!(!error.to_string().contains('\n'), "an error is one line"),
        }
    }
});
