//! Histories of any format, compiled for a replay.
#![no_main]

use vramlab::backends::CachingSettings;
use vramlab::budget::Budget;
use vramlab::histories::replay::HistoryBuilder;
use vramlab::histories::formats::{ReadError, ReadOptions, read_from};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let options = ReadOptions { format: None, budget: Budget::new(1 << 26) };
    let mut builder = HistoryBuilder::new(None).within(&options.budget);
    let read = read_from(Box::new(bytes), &options, &mut |event| builder.push(&event).map_err(ReadError::stop));
    let compiled = read.map(|_| {
        let settings = CachingSettings { memory_limit: Some(1 << 20), ..CachingSettings::default() };
        builder.finish(&settings).map_err(|error| error.to_string())
    });
    if let Err(error) = compiled.map_err(|error| error.to_string()).and_then(|finished| finished) {
        assert!(!error.contains('\n'), "an error is one line");
    }
});
