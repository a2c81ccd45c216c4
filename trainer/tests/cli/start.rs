//! `trainer start` and `--save-start`.

use super::*;

#[test]
fn a_start_is_written_without_training() {
    let place = Place::new();
    let ran = place.run(&["start", "-o", "start.safetensors", "--dataset", "iris", "--hidden", "5"]).ok();
    assert!(ran.stderr.contains("start    start.safetensors (SHA-256 "), "{ran:#?}");
    assert_eq!(ran.stdout, "");
    assert!(place.at("start.safetensors").is_file());
    assert!(!place.at("runs").exists(), "nothing was trained");

    let json = place.run(&["start", "-o", "other", "--dataset", "iris", "--hidden", "5", "--json"]).ok().json();
    assert_eq!(keys(&json), ["path", "sha256"]);
    assert!(ran.stderr.contains(json["sha256"].as_str().unwrap()), "the same options give the same file");
}

#[test]
fn a_run_writes_its_start_and_goes_on() {
    let place = Place::new();
    let json = place.iris(&["--save-start", "start.safetensors", "--out", "record", "--json"]).ok().json();
    assert_eq!(json["status"], "finished");
    assert_eq!(json["start"]["path"], "start.safetensors");
    place.run(&["start", "-o", "again", "--dataset", "iris", "--hidden", "16", "--epochs", "2"]).ok();
    let read = |name: &str| std::fs::read(place.at(name)).unwrap();
    assert_eq!(read("start.safetensors"), read("again"));
}

#[test]
fn a_start_that_cannot_be_written_is_refused() {
    let place = Place::new();
    let cases = [
        ("nowhere/start.safetensors", "there is no folder nowhere; make it first"),
        (".", "is a directory; name a file"),
    ];
    for (bad, said) in cases {
        let words = ["no start file can be written", bad, said];
        place.run(&["start", "-o", bad, "--dataset", "iris"]).refused(&words);
        place.iris(&["--save-start", bad, "--out", "record"]).refused(&words);
    }
    assert!(!place.at("record").exists(), "nothing ran, so there is nothing to record");
    place
        .run(&["start", "-o", "start", "--dataset", "iris", "--hidden", "0"])
        .refused(&["--hidden must be at least 1"]);
    place.run(&["start", "--dataset", "iris"]).unparsable(&["required"]);
    place.run(&["start", "-o", "start", "--alloc", "naive"]).unparsable(&["--alloc"]);
    assert!(!place.at("start").exists());
}
