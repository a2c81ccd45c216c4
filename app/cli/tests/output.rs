//! Files and screens of `vramlab`: files are written atomically and replace only regular files; pages fit the terminal.
#![cfg(unix)]

use crate::common::{self, Ran, TestDir, by_path, end, least, wait_for};
use crate::pty::{self, acts_on_terminal, check};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::Write;
use std::path::Path;

fn history() -> String {
    format!("{}/../../allocators/histories/tests/fixtures/small.p4.pickle", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn symbolic_links_are_not_replaced() {
    let dir = TestDir::new();
    let target = dir.file("target", "old");
    std::os::unix::fs::symlink("target", dir.at("link")).unwrap();
    let said = ["link: is a symbolic link to target; name the file itself"];
    dir.run(&["convert", &history(), "--to", "rmm", "-o", "link", "--force"]).refused(2, &said);
    assert_eq!(std::fs::read_to_string(target).unwrap(), "old");
    assert_eq!(std::fs::read_link(dir.at("link")).unwrap(), Path::new("target"));
    assert_eq!(dir.files(), ["link", "target"]);
}

/// A recording cannot be made again, so no command takes it for its output, whatever path leads to it.
#[test]
fn a_recording_is_not_replaced_by_what_is_read_from_it() {
    let dir = TestDir::new();
    let recording = std::fs::read(history()).unwrap();
    dir.file("s.pickle", &recording);
    std::os::unix::fs::symlink("s.pickle", dir.at("link")).unwrap();
    for [command, input, out] in [
        ["plan", "s.pickle", "s.pickle"],
        ["plan", "link", "./s.pickle"],
        ["report", "s.pickle", "s.pickle"],
        ["report", "link", "./s.pickle"],
    ] {
        let refusal = format!("{out}: is an input too; name another file for the output");
        dir.run(&[command, input, "-o", out]).refused(2, &[&refusal]);
        assert_eq!(std::fs::read(dir.at("s.pickle")).unwrap(), recording, "{command} {input}");
    }
    // Any other file is replaced, also another name of the same contents.
    std::fs::hard_link(dir.at("s.pickle"), dir.at("page")).unwrap();
    dir.run(&["plan", "s.pickle", "-o", "page"]).ok();
    assert_eq!(std::fs::read(dir.at("s.pickle")).unwrap(), recording);
    assert_ne!(std::fs::read(dir.at("page")).unwrap(), recording);
    assert_eq!(dir.files(), ["link", "page", "s.pickle"]);
}

#[test]
fn a_file_that_does_not_fit_is_a_failure_and_leaves_nothing() {
    for format in ["snapshot", "snapshot-json", "perfetto", "rmm", "minimalloc"] {
        let dir = TestDir::new();
        let history = history();
        let convert = ["convert", &history, "--to", format, "-o", "out"];
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "ulimit -f 0; exec \"$0\" \"$@\"", common::PROGRAM]);
        let output = Ran::of(shell.args(convert).current_dir(dir.at(".")).output().unwrap());
        output.refused(1, &["out: cannot be written: File too large", "it needs at least ", "raise the limit"]);
        assert_eq!(dir.files(), [""; 0], "{format}");
        // Without the limit it succeeds.
        dir.run(&convert).ok();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_stdout_is_a_failure_at_run_time() {
    let dir = TestDir::new();
    let history = history();
    for arguments in [&["explain", &history][..], &["explain", &history, "--json"], &["--help"], &["advise", "-h"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut program = std::process::Command::new(common::PROGRAM);
        program.args(arguments).current_dir(dir.at(".")).stdout(full);
        Ran::of(program.output().unwrap()).refused(1, &["cannot write to stdout: No space left on device"]);
    }
}

/// Two programs write one file at the same time; each waits for its recording from a pipe.
#[test]
fn only_one_of_two_concurrent_programs_writes_a_file() {
    use std::process::{Command, Stdio};
    let plan = |dir: &TestDir, pipe: &str| {
        assert!(Command::new("mkfifo").arg(dir.at(pipe)).status().unwrap().success());
        let mut program = dir.process(&["plan", pipe, "-o", "out"]);
        program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let feed = |dir: &TestDir, pipe: &str| std::fs::write(dir.at(pipe), std::fs::read(history()).unwrap()).unwrap();
    let parts = |dir: &TestDir| dir.files().iter().filter(|name| name.ends_with(".part")).count();
    for exists in [false, true] {
        let dir = TestDir::new();
        if exists {
            dir.file("out", "old");
        }
        let first = plan(&dir, "one");
        wait_for("the first one's part", || parts(&dir) >= 1);
        let second = plan(&dir, "two");
        if !exists {
            wait_for("the second one's part", || parts(&dir) >= 2);
        }
        let said = ["out: another program writes it at the same time"];
        let mut second = Some(second);
        if exists {
            // It is refused before it reads.
            Ran::of(second.take().unwrap().wait_with_output().unwrap()).refused(2, &said);
        }
        feed(&dir, "one");
        Ran::of(first.wait_with_output().unwrap()).ok();
        let whole = std::fs::read_to_string(dir.at("out")).unwrap();
        serde_json::from_str::<serde_json::Value>(&whole).unwrap();
        if let Some(second) = second {
            feed(&dir, "two");
            Ran::of(second.wait_with_output().unwrap()).refused(2, &said);
        }
        assert_eq!(std::fs::read_to_string(dir.at("out")).unwrap(), whole);
        assert_eq!(dir.files(), ["one", "out", "two"]);
    }
}

#[test]
fn only_one_of_several_programs_creates_a_file() {
    use std::process::Stdio;
    let (dir, history) = (TestDir::new(), history());
    let convert = || {
        let mut program = dir.process(&["convert", &history, "--to", "rmm", "-o", "out.csv"]);
        program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let programs: Vec<_> = (0..6).map(|_| convert()).collect();
    let output = programs.into_iter().map(|program| Ran::of(program.wait_with_output().unwrap()));
    let (won, lost): (Vec<Ran>, Vec<Ran>) = output.partition(|output| output.code == Some(0));
    assert_eq!(won.len(), 1);
    lost.iter().for_each(|lost| lost.refused(2, &["out.csv: "]));
    assert_eq!(dir.files(), ["out.csv"]);
}

#[cfg(unix)]
#[test]
fn signals_remove_unfinished_files() {
    use std::process::{Command, Stdio};
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let dir = TestDir::new();
        assert!(Command::new("mkfifo").arg(dir.at("in")).status().unwrap().success());
        let mut program = Command::new(common::PROGRAM);
        program.args(["convert", "in", "--to", "rmm", "-o", "out"]).current_dir(dir.at("."));
        let mut program = program.stderr(Stdio::null()).spawn().unwrap();
        // Opening blocks until the program reads; it then waits for data.
        let pipe = std::fs::File::options().write(true).open(dir.at("in")).unwrap();
        wait_for("the part", || dir.files().len() >= 2 || program.try_wait().unwrap().is_some());
        assert!(Command::new("kill").args([signal, &program.id().to_string()]).status().unwrap().success());
        assert_eq!(program.wait().unwrap().code(), Some(code), "{signal}");
        drop(pipe);
        assert_eq!(dir.files(), ["in"], "{signal}");
    }
}

// Endless files, and small files that need all memory: each is refused in one line.

/// An item, repeated and compressed.
fn packed(item: &[u8], times: usize) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    (0..times).for_each(|_| encoder.write_all(item).unwrap());
    encoder.finish().unwrap()
}

#[test]
fn endless_devices_are_refused() {
    let dir = TestDir::new();
    let trace = dir.write("trace.txt", "1 4096 512 0\n0 4096 512 0\n");
    let device = "it is a device; name a regular file";
    dir.run(&["replay", &trace, "--device", "sim:/dev/zero"]).refused(2, &["/dev/zero", device]);
    dir.run(&["capacity", &trace, "--device", "sim:/dev/zero"]).refused(2, &["/dev/zero", device]);
    dir.run(&["replay", &trace, "--alloc", "plan:file=/dev/zero"]).refused(2, &["/dev/zero", device]);
    for command in ["replay", "explain", "advise", "plan", "capacity"] {
        dir.run(&[command, "/dev/zero"]).refused(2, &["/dev/zero", device]);
    }
    dir.run(&["convert", "/dev/zero", "--to", "rmm", "-o", "out"]).refused(2, &["/dev/zero", device]);
}

#[test]
fn a_recording_is_limited_to_the_given_memory() {
    let dir = TestDir::new();
    // 16 million events in some 300 KB.
    let trace = dir.write("trace.txt.gz", packed(&b"1 4096 512 0\n0 4096 512 0\n".repeat(1 << 10), 1 << 13));
    assert!(std::fs::metadata(&trace).unwrap().len() < 1 << 20);
    for command in ["replay", "capacity"] {
        let words = ["at least", "the limit is 16 MiB", "allow more with --read-memory"];
        dir.run(&[command, &trace, "--read-memory", "16M"]).refused(2, &words);
    }
    let words = ["at least", "the limit is 16 MiB", "allow more with --read-memory"];
    dir.run(&["convert", &trace, "--to", "rmm", "-o", "out.csv", "--read-memory", "16M"]).refused(2, &words);
    assert!(!dir.at("out.csv").exists());
    let table = dir.write("table.csv", "id,lower,upper,size\na,0,1,1\n");
    let refused = dir.run(&["convert", &table, "--to", "rmm", "-o", "new.csv", "--read-memory", "0"]);
    refused.refused(2, &["table.csv:2: it takes at least", "the limit is 0 B"]);
}

// Screens at 80 columns, and properties of screens at any width.

/// Lines that differ between machines and runs.
const CHANGES: [(&str, &str); 3] = [
    (r"(?m)^host ns/operation.*$", "host ns/operation [host time]"),
    (r"--release -p", "-p"),
    (r"(?m)^wall.*$", "wall [host time]"),
];

const HISTORY: &str = "mlp.pickle.xz";

/// A directory with a small recording.
fn recording_dir() -> TestDir {
    let dir = TestDir::new();
    let history = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments/histories").join(HISTORY);
    dir.file(HISTORY, std::fs::read(history).unwrap());
    dir
}

fn screen(dir: &TestDir, arguments: &[&str]) -> String {
    pty::screen(&mut dir.process(arguments))
}

#[test]
fn screens_at_80_columns() {
    let dir = recording_dir();
    insta::with_settings!({ filters => CHANGES }, {
        insta::assert_snapshot!(screen(&dir, &["replay", HISTORY]), @r"
            mlp.pickle.xz on NVIDIA H200 (simulated): 26911 events, 8981 allocations, peak
            live 81.6 MiB
            lower bound 81.6 MiB; offline placement 81.6 MiB (1.000 of it)
            ────────────────────────────────────────────────────────────────────
                                   recorded      naive   caching  stream-ordered
            ════════════════════════════════════════════════════════════════════
            failed allocations            -          0         0               0
            peak reserved            90 MiB   81.6 MiB    90 MiB          96 MiB
            reserved / bound          1.102      1.000     1.102           1.176
            peak active                   -   81.6 MiB  81.6 MiB        81.6 MiB
            peak requested         81.6 MiB   81.6 MiB  81.6 MiB        81.6 MiB
            utilisation                   -    100.0 %    90.7 %          85.0 %
            requested at peak             -   81.6 MiB  81.6 MiB        73.0 MiB
            rounding at peak              -        0 B  4.30 KiB        3.14 KiB
            free segments at peak         -        0 B       0 B        23.0 MiB
            partly used at peak           -        0 B  8.36 MiB             0 B
            other streams at peak         -        0 B       0 B             0 B
            pending at peak               -        0 B       0 B             0 B
            segments +/-                6/0  8981/8962       6/0               -
            retries                       -          0         0               0
            driver calls                  -      17943         6           17967
            simulated time                -     126 ms    258 us         7.57 ms
            host ns/operation [host time]
            ────────────────────────────────────────────────────────────────────
            utilisation: peak active of peak reserved; at peak: breakdown of peak reserved
            recorded: values from the recording; peak requested: bytes requested in active
              blocks

            Lowest peak reserved: naive, 81.6 MiB. Recorded: 90 MiB, reproduced by caching.
            Driver calls: caching 6, stream-ordered 17967.
            Next: cargo run -p vramlab-cli -- capacity mlp.pickle.xz
        ");
        insta::assert_snapshot!(screen(&dir, &["capacity", HISTORY]), @r"
            mlp.pickle.xz on sim, in steps of 2 MiB
            ──────────────────────────────────────────────────
                               naive   caching  stream-ordered
            ══════════════════════════════════════════════════
            minimum memory    94 MiB    90 MiB          96 MiB
            peak live       81.6 MiB  81.6 MiB        81.6 MiB
            ratio              1.151     1.102           1.176
            retries                0         0               0
            sizes tested           5         5               7
            ──────────────────────────────────────────────────
            ratio: minimum memory over peak live; retries: at that size

            Minimum memory: 90 MiB for caching, 96 MiB for stream-ordered; peak live
            81.6 MiB.
            Next: cargo run -p vramlab-cli -- replay mlp.pickle.xz --alloc caching --limit \
                  94371840B --device sim
        ");
    });
}

#[test]
fn a_progress_bar_has_steps() {
    let dir = recording_dir();
    let shown = pty::show(&mut dir.process(&["advise", HISTORY]), 120, &[]);
    // Around the best setting of this recording there is none that acts differently.
    assert!(shown.raw.contains("settings") && !shown.raw.contains(" 0/0 "), "{}", shown.raw);
}

#[test]
fn screens_at_other_widths_and_without_styles() {
    let dir = recording_dir();
    for arguments in [
        &["replay", HISTORY, HISTORY][..],
        &["replay", HISTORY, "--addresses", "recorded"],
        &["capacity", HISTORY],
        &["convert", HISTORY, "--to", "perfetto", "-o", "history.json", "--force"],
    ] {
        check(&|| dir.process(arguments));
    }
}

#[test]
fn text_from_outside_moves_no_cursor() {
    let dir = recording_dir();
    let hostile = "\u{1b}[2J\u{9b}31m\u{202e}\u{7}";
    let written = r"\u001b[2J\u202e";
    let named = |name: &str, text: &str| dir.write(&format!("{hostile}{name}"), text);
    let history =
        named("history.json", &format!(r#"{{"segments": [{{"{written}": 1}}], "device_traces": "{written}"}}"#));
    let event = named("trace.jsonl", &format!(r#"{{"operation": "{written}", "path": "{written}"}}"#));
    let profile = named("profile.json", &format!(r#"{{"{written}": 1}}"#));
    let device = format!("sim:{profile}");
    for arguments in [
        &["replay", &history][..],
        &["replay", &event],
        &["replay", hostile],
        &["replay", HISTORY, "--device", &device],
        &["capacity", &history],
        &["convert", &history, "--to", "rmm", "-o", hostile],
        &["explain", &history],
        &["advise", &history],
    ] {
        let output = dir.process(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(!acts_on_terminal(&text), "{arguments:?}: {text:?}");
        // As escaped by the printer, JSON or Rust's quoting.
        assert!([r"\x", r"\u"].iter().any(|sign| text.contains(sign)), "{arguments:?}: {text:?}");
    }
}

#[test]
fn the_last_lines_are_the_result_and_the_next_command() {
    let dir = recording_dir();
    let rows = |command: &str| dir.run(&[command, HISTORY, "--json"]).rows();
    let (replayed, fitted) = (rows("replay"), rows("capacity"));
    let convert = ["convert", HISTORY, "--to", "rmm", "-o", "history.csv"];
    for (arguments, words, next_words) in [
        (
            &["replay", HISTORY][..],
            vec![format!("Lowest peak reserved: {}", least(&replayed, "peak_reserved_bytes", "allocator"))],
            "vramlab capacity mlp.pickle.xz",
        ),
        (
            &["capacity", HISTORY],
            vec![least(&fitted, "capacity_bytes", "allocator").to_owned(), "Minimum memory: ".to_owned()],
            "vramlab replay mlp.pickle.xz --alloc caching --limit ",
        ),
        (&convert, vec!["to history.csv (rmm): ".to_owned()], "vramlab replay history.csv"),
    ] {
        let text = by_path(&dir, arguments);
        let (result, next) = end(&text);
        assert!(result.ends_with('.') && result.split(' ').count() > 4, "{arguments:?}: {result}");
        assert!(words.iter().all(|words| result.contains(words)), "{arguments:?}: {words:?} should be in: {result}");
        assert!(next.contains(next_words), "{arguments:?}: {next}");
    }
}

#[test]
fn the_next_command_can_be_pasted() {
    let dir = recording_dir();
    dir.file("a history.pickle.xz", std::fs::read(dir.at(HISTORY)).unwrap());
    dir.pasted(by_path(&dir, &["replay", "a history.pickle.xz"]), 3);
}
