//! Logs that are text.
#![no_main]

use vramlab::budget::Budget;
use vramlab::histories::formats::{Format, ReadOptions, read_from};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // In each format by name, and in the one that the content shows.
    let formats: &[Format] = &[Format::RmmCsv, Format::MinimallocCsv, Format::Stalloc];
    for format in formats.iter().copied().map(Some).chain([None]) {
        let options = ReadOptions { format, budget: Budget::new(1 << 26) };
        if let Err(error) = read_from(Box::new(bytes), &options, &mut |_| Ok(())) {
            assert!(!error.to_string().contains('\n'), "an error is one line");
        }
    }
});
