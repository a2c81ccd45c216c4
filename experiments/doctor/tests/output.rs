//! Files that `vramlab` writes: whole or not at all, and nothing replaced that is no regular file.
#![cfg(unix)]
// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Place, Ran};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;
use std::path::Path;

fn history() -> String {
    format!("{}/../../allocators/tests/fixtures/small.p4.pickle", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn links_stay_whatever_is_written() {
    let place = Place::new();
    let target = place.file("target", "old");
    std::os::unix::fs::symlink("target", place.at("link")).unwrap();
    let said = ["link: is a symbolic link to target; name the file itself"];
    place.run(&["convert", &history(), "--to", "rmm", "-o", "link", "--force"]).refused(2, &said);
    assert_eq!(std::fs::read_to_string(target).unwrap(), "old");
    assert_eq!(std::fs::read_link(place.at("link")).unwrap(), Path::new("target"));
    assert_eq!(place.files(), ["link", "target"]);
}

#[test]
fn what_does_not_fit_is_a_failure_and_leaves_nothing() {
    for format in ["snapshot", "snapshot-json", "perfetto", "rmm", "minimalloc"] {
        let place = Place::new();
        let history = history();
        let convert = ["convert", &history, "--to", format, "-o", "out"];
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "ulimit -f 0; exec \"$0\" \"$@\"", common::PROGRAM]);
        let ran = Ran::of(shell.args(convert).current_dir(place.at(".")).output().unwrap());
        ran.refused(1, &["out: cannot be written: File too large", "it needs at least ", "raise the limit"]);
        assert_eq!(place.files(), [""; 0], "{format}");
        // With room it goes.
        place.run(&convert).ok();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_stdout_is_a_failure_at_run_time() {
    let place = Place::new();
    let history = history();
    for arguments in [&["explain", &history][..], &["explain", &history, "--json"], &["--help"], &["advise", "-h"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut program = std::process::Command::new(common::PROGRAM);
        program.args(arguments).current_dir(place.at(".")).stdout(full);
        Ran::of(program.output().unwrap()).refused(1, &["cannot write to stdout: No space left on device"]);
    }
}

/// Programs that write one file at the same time: each waits for its history, which comes through a pipe.
#[test]
fn of_programs_that_write_one_file_one_has_it() {
    use std::process::{Command, Stdio};
    let plan = |place: &Place, pipe: &str| {
        assert!(Command::new("mkfifo").arg(place.at(pipe)).status().unwrap().success());
        let mut program = place.process(&["plan", pipe, "-o", "out"]);
        program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let feed = |place: &Place, pipe: &str| std::fs::write(place.at(pipe), std::fs::read(history()).unwrap()).unwrap();
    let parts = |place: &Place| place.files().iter().filter(|name| name.ends_with(".part")).count();
    for there in [false, true] {
        let place = Place::new();
        if there {
            place.file("out", "old");
        }
        let first = plan(&place, "one");
        while parts(&place) < 1 {
            std::thread::yield_now();
        }
        let second = plan(&place, "two");
        if !there {
            while parts(&place) < 2 {
                std::thread::yield_now();
            }
        }
        let said = ["out: another program writes it at the same time"];
        let mut second = Some(second);
        if there {
            // It is told before it reads.
            Ran::of(second.take().unwrap().wait_with_output().unwrap()).refused(2, &said);
        }
        feed(&place, "one");
        Ran::of(first.wait_with_output().unwrap()).ok();
        let whole = std::fs::read_to_string(place.at("out")).unwrap();
        serde_json::from_str::<serde_json::Value>(&whole).unwrap();
        if let Some(second) = second {
            feed(&place, "two");
            Ran::of(second.wait_with_output().unwrap()).refused(2, &said);
        }
        assert_eq!(std::fs::read_to_string(place.at("out")).unwrap(), whole);
        assert_eq!(place.files(), ["one", "out", "two"]);
    }
}

#[test]
fn of_programs_that_make_one_file_one_has_it() {
    use std::process::Stdio;
    let (place, history) = (Place::new(), history());
    let convert = || {
        let mut program = place.process(&["convert", &history, "--to", "rmm", "-o", "out.csv"]);
        program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let programs: Vec<_> = (0..6).map(|_| convert()).collect();
    let ran = programs.into_iter().map(|program| Ran::of(program.wait_with_output().unwrap()));
    let (won, lost): (Vec<Ran>, Vec<Ran>) = ran.partition(|ran| ran.code == Some(0));
    assert_eq!(won.len(), 1);
    lost.iter().for_each(|lost| lost.refused(2, &["out.csv: is there already"]));
    assert_eq!(place.files(), ["out.csv"]);
}

#[cfg(unix)]
#[test]
fn signals_leave_no_unfinished_file() {
    use std::process::{Command, Stdio};
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let place = Place::new();
        assert!(Command::new("mkfifo").arg(place.at("in")).status().unwrap().success());
        let mut program = Command::new(common::PROGRAM);
        program.args(["convert", "in", "--to", "rmm", "-o", "out"]).current_dir(place.at("."));
        let mut program = program.stderr(Stdio::null()).spawn().unwrap();
        // It goes on when the program reads, which then waits for more.
        let pipe = std::fs::File::options().write(true).open(place.at("in")).unwrap();
        while place.files().len() < 2 && program.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        assert!(Command::new("kill").args([signal, &program.id().to_string()]).status().unwrap().success());
        assert_eq!(program.wait().unwrap().code(), Some(code), "{signal}");
        drop(pipe);
        assert_eq!(place.files(), ["in"], "{signal}");
    }
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
