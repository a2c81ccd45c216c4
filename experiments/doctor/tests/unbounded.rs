//! Files that never end, and small ones that ask for all the memory there is: each is refused in one line.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

mod common;

use common::Place;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;

/// So many times the same, compressed.
fn packed(item: &[u8], times: usize) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    (0..times).for_each(|_| encoder.write_all(item).unwrap());
    encoder.finish().unwrap()
}

#[test]
fn devices_that_never_end() {
    let place = Place::new();
    let trace = place.write("trace.txt", "1 4096 512 0\n0 4096 512 0\n");
    let longer = "it is longer than 1 MiB";
    place.run(&["replay", &trace, "--device", "sim:/dev/zero"]).refused(2, &["/dev/zero", longer]);
    place.run(&["capacity", &trace, "--device", "sim:/dev/zero"]).refused(2, &["/dev/zero", longer]);
    place.run(&["replay", "/dev/zero"]).refused(2, &["/dev/zero", "no known format"]);
}

#[test]
fn a_history_takes_no_more_memory_than_it_may() {
    let place = Place::new();
    // 16 million events in some 300 KB.
    let trace = place.write("trace.txt.gz", packed(&b"1 4096 512 0\n0 4096 512 0\n".repeat(1 << 10), 1 << 13));
    assert!(std::fs::metadata(&trace).unwrap().len() < 1 << 20);
    for command in ["replay", "capacity"] {
        let words = ["at least", "the limit is 16 MiB", "allow more with --read-memory"];
        place.run(&[command, &trace, "--read-memory", "16M"]).refused(2, &words);
    }
    let words = ["at least", "the limit is 16 MiB", "allow more with --read-memory"];
    place.run(&["convert", &trace, "--to", "rmm", "-o", "out.csv", "--read-memory", "16M"]).refused(2, &words);
    assert!(!place.at("out.csv").exists());
    let table = place.write("table.csv", "id,lower,upper,size\na,0,1,1\n");
    let refused = place.run(&["convert", &table, "--to", "rmm", "-o", "new.csv", "--read-memory", "0"]);
    refused.refused(2, &["table.csv:2: it takes at least", "the limit is 0 B"]);
}
