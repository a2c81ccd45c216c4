//! Files that `experiments` writes: nothing replaced that is no regular file.

#![cfg(unix)]
// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::Place;
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
