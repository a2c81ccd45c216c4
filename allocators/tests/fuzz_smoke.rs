//! The fuzz targets' seeds and some thousand mutations of them, through the targets' own entry points: no parser
//! panics, and every error is one line. The same seeds, the same mutations, on every run.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "common/mutate.rs"]
mod mutate;

use mutate::{mutations, seeds};
use vramlab::backends::CachingSettings;
use vramlab::budget::Budget;
use vramlab::histories::formats::{Format, ReadError, ReadOptions, read_from};
use vramlab::histories::replay::HistoryBuilder;

/// Mutations of each seed.
const ROUNDS: u64 = 1500;

fn parse(bytes: &[u8], formats: &[Format]) -> u32 {
    let mut sound = 0;
    for format in formats.iter().copied().map(Some).chain([None]) {
        let options = ReadOptions { format, budget: Budget::new(1 << 26) };
        match read_from(Box::new(bytes), &options, &mut |_| Ok(())) {
            Ok(_) => sound += 1,
            Err(error) => assert!(!error.to_string().contains('\n'), "an error is one line: {error}"),
        }
    }
    sound
}

fn smoke(target: &str, formats: &[Format]) {
    let seeds = seeds(target);
    for (_, seed) in &seeds {
        assert!(parse(seed, formats) >= 1, "a seed should be sound");
    }
    let mut sound = 0;
    for mutation in mutations(&seeds, ROUNDS) {
        sound += u32::from(parse(&mutation, formats) > 0);
    }
    assert!(sound > 0, "some mutations should still be sound, or they reach nothing but the head");
}

#[test]
fn pickles() {
    smoke("pickle", &[Format::SnapshotPickle]);
}

#[test]
fn json() {
    smoke("json", &[Format::SnapshotJson, Format::Jsonl]);
}

#[test]
fn csv() {
    smoke("csv", &[Format::RmmCsv, Format::MinimallocCsv, Format::Stalloc]);
}

/// Reads and compiles; the one line of what is wrong.
fn compile(bytes: &[u8]) -> Result<(), String> {
    let options = ReadOptions { format: None, budget: Budget::new(1 << 26) };
    let mut builder = HistoryBuilder::new(None).within(&options.budget);
    read_from(Box::new(bytes), &options, &mut |event| builder.push(&event).map_err(ReadError::stop))
        .map_err(|error| error.to_string())?;
    let settings = CachingSettings { memory_limit: Some(1 << 20), ..CachingSettings::default() };
    builder.finish(&settings).map(drop).map_err(|error| error.to_string())
}

#[test]
fn compilations() {
    let windows = seeds("json").iter().filter(|(_, seed)| compile(seed).is_ok()).count();
    assert!(windows >= 3, "most seeds should compile, not {windows}");
    let seeds: Vec<_> = ["pickle", "json", "csv"].into_iter().flat_map(seeds).collect();
    for mutation in mutations(&seeds, ROUNDS / 3) {
        if let Err(error) = compile(&mutation) {
            assert!(!error.contains('\n'), "an error is one line: {error}");
        }
    }
}
