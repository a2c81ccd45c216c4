//! Latency histograms by part of the run: together they are the run's, and the first holds the cold start.

use crate::common::{FinishedRun, digits, train};
use base64::Engine;
use hdrhistogram::Histogram;
use hdrhistogram::serialization::Deserializer;
use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};
use std::collections::BTreeMap;
use std::time::Duration;
use trainer::Settings;
use vramlab::backends::{self, caching};

/// Start, length, tag and histogram of each line of the log.
fn log(run: &FinishedRun) -> Vec<(Duration, Duration, String, Histogram<u64>)> {
    let bytes = std::fs::read(run.path().join("latency.hlog")).unwrap();
    let mut out = Vec::new();
    for entry in IntervalLogIterator::new(&bytes) {
        let LogEntry::Interval(interval) = entry.unwrap() else { continue };
        let raw = base64::engine::general_purpose::STANDARD.decode(interval.encoded_histogram()).unwrap();
        let histogram = Deserializer::new().deserialize(&mut raw.as_slice()).unwrap();
        let tag = interval.tag().unwrap().as_str().to_owned();
        out.push((interval.start_timestamp(), interval.duration(), tag, histogram));
    }
    out
}

#[test]
fn intervals_together_are_the_whole_run() {
    for allocator in backends::all() {
        let settings = Settings { allocator: allocator.into(), epochs: 2, steps: Some(130), ..digits() };
        let run = train(&settings).finished();
        let mut together = BTreeMap::new();
        for (_, _, tag, histogram) in log(&run) {
            *together.entry(tag).or_insert(0) += histogram.len();
        }
        let message = run.json()["latency"].as_array().unwrap().clone();
        let message = message.iter().map(|row| {
            let word = |key: &str| row[key].as_str().unwrap().to_owned();
            (format!("{}.{}", word("operation"), word("path")), row["count"].as_u64().unwrap())
        });
        assert_eq!(together, message.collect(), "{}", allocator);
    }
}

#[test]
fn the_first_interval_is_the_cold_start() {
    let settings = Settings { allocator: (&caching::BACKEND).into(), epochs: 2, steps: Some(130), ..digits() };
    let run = train(&settings).finished();
    let log = log(&run);
    let mut starts: Vec<Duration> = log.iter().map(|line| line.0).collect();
    starts.dedup();
    assert_eq!(starts[0], Duration::ZERO);
    assert_eq!(starts.len(), 4, "to the first step, two epochs, what is freed at the end: {starts:?}");
    assert!(starts.is_sorted());
    let asked = |from: usize| -> u64 {
        let of = log.iter().filter(|line| starts[from..].contains(&line.0) && line.2 == "allocate.driver_alloc");
        of.map(|line| line.3.len()).sum()
    };
    assert!(asked(0) > 0, "a cold start asks the driver");
    assert_eq!(asked(2), 0, "after the first epoch the cache has it all");
    // Lines of one interval say the same of it, to the log's milliseconds.
    for pair in log.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        assert_eq!(pair[0].1, pair[1].1);
    }
}
