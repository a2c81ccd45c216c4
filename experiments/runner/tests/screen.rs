//! Terminal output: each program's screen at 80 columns, and properties at any width.

#![cfg(unix)]

use crate::common::{TestDir, by_path, end, least};
use crate::pty::{self, acts_on_terminal, check};
use std::path::Path;
use std::process::Command;

const IRIS: [&str; 10] = ["--device", "sim", "--dataset", "iris", "--epochs", "3", "--hidden", "16", "--layers", "2"];

const SPEC: &str = r#"
name = "small"
question = "Does a table of this experiment fit a terminal of eighty columns, with its question above it in words?"
repeats = 2
devices = ["sim"]
keep = ["summary.json"]

[options]
dataset = "iris"
layers = 2
epochs = 2

[matrix]
alloc = ["naive", "caching", "stream-ordered"]
sync = ["never", "step"]
"#;

/// Text that differs between machines and between runs.
const CHANGES: [(&str, &str); 4] = [
    (r"(?m)^host ns/operation.*$", "host ns/operation [host time]"),
    (r"--release -p", "-p"),
    (r"/\S*/(small|history)", "/[folder]/$1"),
    (r"(?m)^wall.*$", "wall [host time]"),
];

/// A bench prints values everywhere, and widths that depend on them.
const FIGURES: [(&str, &str); 7] = [
    (r"(?s)warning: these loops.*?--release\n", ""),
    // On a busy machine the repeats differ by more.
    (r"(?s)warning: the repeats.*?more\s+--repeats\n", ""),
    (r"(?m)^~: the repeats.*\n", ""),
    (r"(?m)^null, .*(\n.*)?largest\)$", "null, [processor] (smallest to largest)"),
    (r"~?[\d.]+ \([\d.]+-[\d.]+\)", "[ns]"),
    (r"(takes) [\d.]+", "$1 [ns]"),
    (r"  +|[─═]+", "  "),
];

/// A directory with a small spec.
fn place() -> TestDir {
    let test_dir = TestDir::new();
    test_dir.write("small.toml", SPEC);
    test_dir
}

fn screen(test_dir: &TestDir, arguments: &[&str]) -> String {
    pty::screen(&mut test_dir.process(arguments))
}

#[test]
fn screens_at_80_columns() {
    let test_dir = place();
    let specs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../specs");
    let specs = specs.to_str().unwrap();
    insta::with_settings!({ filters => CHANGES }, {
        insta::assert_snapshot!(screen(&test_dir, &[&["compare"], &IRIS[..]].concat()), @r"
            NVIDIA H200 (simulated), data set iris, 2 steps an epoch
            ────────────────────────────────────────────────────────────────────────────────
                              naive             caching  stream-ordered      stream-ordered:
                                                                         release_threshold=0
                                                                                 --sync step
            ════════════════════════════════════════════════════════════════════════════════
            training step    160 us             75.5 us         99.2 us               108 us
            to the best      2.12 x              1.00 x          1.31 x               1.43 x
            host blocked       23 %                 5 %             3 %                  4 %
            most of it in  mem free  stream synchronize          stream   stream synchronize
                                                            synchronize
            driver calls       52.3                23.7            53.0                 68.3
            allocate p50    1.55 us                   -          734 ns              1.12 us
            allocate p99    1.55 us                   -         1.23 us              1.12 us
            free p50        1.53 us                   -          806 ns               806 ns
            free p99        7.45 us                   -          806 ns               806 ns
            peak reserved  17.5 KiB               2 MiB          32 MiB               32 MiB
            utilisation     100.0 %               1.1 %           0.1 %                0.1 %
            training loss  0.746985            0.746985        0.746985             0.746985
            ────────────────────────────────────────────────────────────────────────────────
            training step: median over the epochs without the first
            host blocked: of the last epoch's time; driver calls: a batch of it; both with
              the validation
            allocate, free: on the most frequent path
            -: not available; the simulator times only an allocator's driver calls
            utilisation: peak active of peak reserved

            'caching' is the fastest; 'naive' takes 2.12 times its step: its host waits for
            23 % of an epoch, most in mem_free.
            Next: cargo run -p trainer -- --device=sim --dataset=iris --hidden=16 \
                  --layers=2 --epochs=3 --alloc naive --log-driver-calls
        ");
        insta::assert_snapshot!(screen(&test_dir, &["list", "--specs", "."]), @r"
            ────────────────────────────────────────────────────────────────────────────────
            spec   cuda runs  sim runs  question
            ════════════════════════════════════════════════════════════════════════════════
            small          -        12  Does a table of this experiment fit a terminal of
                                        eighty columns, with its question above it in words?
            ────────────────────────────────────────────────────────────────────────────────

            1 question, 1 of which the simulated GPU answers.
            Next: cargo run -p experiments -- run small --specs . --device sim
        ");
        insta::assert_snapshot!(screen(&test_dir, &["run", "small.toml", "--device", "sim", "-o", "out"]), @r"
            small: Does a table of this experiment fit a terminal of eighty columns, with
            its question above it in words?
            ────────────────────────────────────────────────────────────────────────────────
            alloc sync               step  spread  host blocked  driver  peak reserved  runs
                                                                  calls
            ════════════════════════════════════════════════════════════════════════════════
            naive never            160 us   0.0 %          23 %    52.3      207.9 KiB   2/2
            naive step             161 us   0.0 %          23 %    53.3      207.9 KiB   2/2
            caching never         75.5 us   0.0 %           5 %    23.7          2 MiB   2/2
            caching step          79.0 us   0.0 %           7 %    24.7          2 MiB   2/2
            stream-ordered never  99.2 us   0.0 %           3 %    53.7         32 MiB   2/2
            stream-ordered step    103 us   0.0 %           5 %    54.7         32 MiB   2/2
            ────────────────────────────────────────────────────────────────────────────────
            columns omitted: utilisation; --json has all
            host blocked: of the last epoch; driver calls: a batch of it; both with the
              validation

            12 of 12 runs of small are done; the records are in out/small.
            Next: vramlab report out/small
        ");
    });
    insta::with_settings!({ filters => FIGURES }, {
        let bench = ["bench", "--case", "pair/512", "--repeats", "2"];
        insta::assert_snapshot!(screen(&test_dir, &[&bench[..], &["--alloc", "caching"]].concat()), @r"
            null, [processor] (smallest to largest)

            time, ns for one allocation and its free; less is better (`pair` gives out the
            same block again each time)
              
            case  caching
              
            pair/512  [ns]
              

            an operation is one allocation and one free, a call is one of the two; timed is
              the loop around the calls with one look at the clock on either side; sizes and
              slots are drawn beforehand, a read of 8 bytes and a slot of the live blocks
              for each operation are in it; no kernel runs

            caching takes [ns] ns/operation in 'pair/512'.
            Next: cargo run -p experiments -- compare
        ");
    });
    // The project's own questions change, so only their fit is tested.
    check(&|| test_dir.process(&["list", "--specs", specs]));
}

#[test]
fn screens_at_other_widths_and_without_styles() {
    let test_dir = place();
    for arguments in [
        &[&["compare"], &IRIS[..]].concat()[..],
        &["run", "small.toml", "--device", "sim", "-o", "out"],
        &["run", "small.toml", "--device", "sim", "-o", "out", "--dry-run"],
        &["fidelity", "--measured", "out/small", "--against", "out/small"],
        &["bench", "--case", "pair/512,instrument", "--threads", "1", "--repeats", "1"],
    ] {
        check(&|| test_dir.process(arguments));
    }
}

#[test]
fn what_comes_from_outside_moves_no_cursor() {
    let test_dir = place();
    let hostile = "\u{1b}[2J\u{9b}31m\u{202e}\u{7}";
    let written = r"\u001b[2J\u202e";
    let named = |name: &str, text: &str| test_dir.write(&format!("{hostile}{name}"), text);
    let history =
        named("history.json", &format!(r#"{{"segments": [{{"{written}": 1}}], "device_traces": "{written}"}}"#));
    let profile = named("profile.json", &format!(r#"{{"{written}": 1}}"#));
    let spec = named("spec.toml", &format!("name = \"{written}\"\n\"{written}\" = 1\n"));
    std::fs::create_dir(test_dir.at("questions")).unwrap();
    let asked = SPEC.replace("Does a table", written);
    test_dir.write("questions/small.toml", &asked);
    // A recorded run without a known state.
    test_dir.run(&["run", "small.toml", "--device", "sim", "-o", "out"]).ok();
    let run = test_dir.at("out/small/runs").read_dir().unwrap().next().unwrap().unwrap().path().join("run.json");
    let text = std::fs::read_to_string(&run).unwrap().replace("\"done\"", &format!("\"{written}\""));
    std::fs::write(&run, text).unwrap();
    // Not all messages name their input.
    let mut count = 0;
    for arguments in [
        &["compare", "--arm", hostile][..],
        &["compare", "--device", hostile],
        &["calibrate", "--device", "cuda", "--profile", &profile, "--source", "here", "--out", "x"],
        &["run", &spec],
        &["run", hostile],
        &["run", "small.toml", "--device", "sim", "-o", "out"],
        &["list", "--specs", "questions"],
        &["list", "--specs", "questions", "--json"],
        &["list", "--specs", hostile],
        &["fidelity", "--measured", hostile, "--against", hostile],
        &["bench", "--case", hostile],
        &["calibrate", "--device", hostile, "--source", hostile, "--out", hostile],
        &["fit-kernels", &history, "--out", "x"],
    ] {
        let output = test_dir.process(arguments).output().unwrap();
        let listed = arguments[0] == "list" && arguments[2] == "questions";
        assert_eq!(output.status.success(), listed, "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        let mut escaped = false;
        for text in [output.stdout, output.stderr] {
            let text = String::from_utf8(text).unwrap();
            assert!(!acts_on_terminal(&text), "{arguments:?}: {text:?}");
            // As the printer, JSON, or Rust's own quoting write them.
            escaped |= [r"\x", r"\u"].iter().any(|sign| text.contains(sign));
        }
        count += usize::from(escaped);
    }
    assert!(count > 7, "{count} outputs show something of it");
}

#[test]
fn the_last_lines_are_what_was_found_and_the_next_command() {
    let test_dir = place();
    let specs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../specs");
    let specs = specs.to_str().unwrap();
    let rows = |arguments: &[&str]| test_dir.run(&[arguments, &["--json"]].concat()).rows();
    let compare = [&["compare"], &IRIS[..]].concat();
    let compared = rows(&compare);
    let questions = rows(&["list", "--specs", specs]);
    let run = ["run", "small.toml", "--device", "sim", "-o", "out"];
    let bench = ["bench", "--case", "pair/512", "--repeats", "1", "--alloc", "caching"];
    let fidelity = ["fidelity", "--measured", "out/small", "--against", "out/small"];
    for (arguments, words, next_words) in [
        (
            &compare[..],
            vec![format!("'{}' is the fastest", least(&compared, "step_s", "arm"))],
            "--dataset=iris --hidden=16 --layers=2 --epochs=3 --alloc ",
        ),
        (&["list", "--specs", specs], vec![format!("{} questions", questions.len())], "--device sim"),
        (&run, vec!["runs of small are done".to_owned(), "out/small".to_owned()], "vramlab report out/small"),
        (&["status", "out/small"], vec!["runs are done".to_owned()], "vramlab report out/small"),
        (&fidelity, vec!["cells are as measured".to_owned()], "experiments compare"),
        (&bench, vec!["caching takes".to_owned()], "experiments compare"),
    ] {
        let text = by_path(&test_dir, arguments);
        let (summary, next) = end(&text);
        assert!(summary.ends_with('.') && summary.split(' ').count() > 4, "{arguments:?}: {summary}");
        assert!(words.iter().all(|words| summary.contains(words)), "{arguments:?}: {words:?} should be in: {summary}");
        assert!(next.contains(next_words), "{arguments:?}: {next}");
    }
    let count = std::fs::read_dir(test_dir.at("out/small/runs")).unwrap().count();
    let text = by_path(&test_dir, &["status", "out/small"]);
    assert!(end(&text).0.contains(&format!("{count} of {count} runs")), "{text}");
}

#[test]
fn the_next_command_can_be_pasted() {
    let test_dir = place();
    std::fs::create_dir(test_dir.at("my specs")).unwrap();
    std::fs::rename(test_dir.at("small.toml"), test_dir.at("my specs/small.toml")).unwrap();
    test_dir.pasted(by_path(&test_dir, &["list", "--specs", "my specs"]), 1);
}

#[test]
fn a_pipe_gets_lines_of_120_columns_and_whole_tables() {
    let test_dir = place();
    let output = |command: &mut Command| String::from_utf8(command.output().unwrap().stdout).unwrap();
    let table = output(test_dir.process(&["list", "--specs", "."]).env_remove("COLUMNS"));
    assert!(table.contains("Does a table of this experiment fit a terminal of eighty columns"), "{table}");
    assert!(table.lines().all(|line| line.starts_with("Next: ") || line.chars().count() <= 120), "{table}");
    assert!(!table.contains("no room for"), "{table}");
    let narrow = output(test_dir.process(&["list", "--specs", "."]).env("COLUMNS", "60"));
    assert!(narrow.lines().all(|line| line.chars().count() <= 60), "{narrow}");
}

/// The programs' page names every command of this program, and no other as its own.
#[test]
fn the_page_names_the_commands_that_there_are() {
    let page = include_str!("../../README.md");
    let (_, table) = page.split_once("### Other commands").unwrap();
    let rows = table.lines().skip_while(|line| !line.starts_with('|')).skip(2).take_while(|line| line.starts_with('|'));
    // Names are in the first cell, in backticks.
    let named = rows.flat_map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2));
    // These have their own sections.
    let mut named: Vec<&str> = named.chain(["run", "status", "list", "pack"]).collect();
    let help = Command::new(env!("CARGO_BIN_EXE_experiments")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let mut there: Vec<&str> =
        commands.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect();
    named.sort_unstable();
    there.sort_unstable();
    assert_eq!(named, there);
}
