//! Histories: read in every format by name and in the one that the content shows, and compiled for a replay.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vramlab::backends::CachingSettings;
use vramlab::budget::Budget;
use vramlab::histories::formats::{Format, ReadError, ReadOptions, read_from};
use vramlab::histories::replay::HistoryBuilder;

fuzz_target!(|bytes: &[u8]| {
    for format in Format::ALL.into_iter().map(Some).chain([None]) {
        let options = ReadOptions { format, budget: Budget::new(1 << 26) };
        let mut builder = HistoryBuilder::new(None).within(&options.budget);
        let read = read_from(Box::new(bytes), &options, &mut |event| builder.push(&event).map_err(ReadError::stop));
        let compiled = read.map(|_| {
            let settings = CachingSettings { memory_limit: Some(1 << 20), ..CachingSettings::default() };
            builder.finish(&settings).map_err(|error| error.to_string())
        });
        if let Err(error) = compiled.map_err(|error| error.to_string()).and_then(|finished| finished) {
            assert!(!error.contains('\n'), "an error is one line");
        }
    }
});
