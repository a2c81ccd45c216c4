//! Files that `experiments` writes: nothing replaced that is no regular file.
#![cfg(unix)]
// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;
use std::path::Path;

#[test]
fn links_stay_whatever_is_written() {
    let place = Place::new();
    let target = place.file("target", "old");
    std::os::unix::fs::symlink("target", place.at("link")).unwrap();
    let said = ["link: is a symbolic link to target; name the file itself"];
    // Before the minutes that measuring takes.
    let calibrate = ["calibrate", "--device", "sim", "--source", "here"];
    place.run(&[&calibrate[..], &["-o", "link"]].concat()).refused(2, &said);
    place.run(&[&calibrate[..], &["-o", "profile.json", "-m", "link"]].concat()).refused(2, &said);
    let timings = place.write("timings", "");
    assert_eq!(place.run(&["fit-kernels", &timings, "-o", "link"]).code, Some(2));
    assert_eq!(std::fs::read_to_string(target).unwrap(), "old");
    assert_eq!(std::fs::read_link(place.at("link")).unwrap(), Path::new("target"));
    assert_eq!(place.files(), ["link", "target", "timings"]);
}

// Files that never end, and small ones that ask for all the memory there is: each is refused in one line.

/// So many times the same, compressed.
fn packed(item: &[u8], times: usize) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    (0..times).for_each(|_| encoder.write_all(item).unwrap());
    encoder.finish().unwrap()
}

#[test]
fn devices_that_never_end() {
    let place = Place::new();
    let longer = "it is longer than 1 MiB";
    place.run(&["fit-kernels", "/dev/null", "--profile", "/dev/zero", "-o", "new.json"]).refused(2, &[longer]);
    place.run(&["run", "/dev/zero", "--dry-run"]).refused(2, &["/dev/zero", longer]);
}

#[test]
fn a_record_that_unpacks_to_more_than_any() {
    let place = Place::new();
    std::fs::create_dir_all(place.at("record/runs/a")).unwrap();
    place.write("record/experiment.json", r#"{"schema_version": 1, "runs": [{"id": "a", "options": {}}]}"#);
    place.write("record/runs/a/run.json", r#"{"schema_version": 1, "status": "done"}"#);
    // 64 MiB in 64 KiB.
    place.write("record/runs/a/summary.json.gz", packed(&vec![b' '; 1 << 20], 64));
    let fidelity = || place.run(&["fidelity", "--measured", "record", "--against", "record"]);
    fidelity().refused(2, &["summary.json.gz", "it is longer than 16 MiB"]);
    place.write("record/runs/a/run.json", vec![b' '; 17 << 20]);
    fidelity().refused(2, &["run.json", "it is longer than 16 MiB"]);
}
