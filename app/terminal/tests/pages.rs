//! Output: tables that fit their screen, and no control characters.

// The lint exempts only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use terminal::around::{Around, Exit, Signalled, end_alike};
use terminal::{Cell, Column, Comparison, Page, Screen, Table};
use unicode_width::UnicodeWidthStr;
use vramlab::output::{Existing, OutputFile};

#[cfg(unix)]
#[path = "common/signals.rs"]
mod signals;

fn screen(width: usize) -> Screen {
    Screen { width: Some(width), styled: false }
}

const UNBOUNDED: Screen = Screen { width: None, styled: false };

fn table() -> Table {
    let mut table = Table::new([
        Column::left("path"),
        Column::right("driver allocations").priority(1),
        Column::right("p50"),
        Column::right("p99").priority(3),
        Column::right("longest of all").priority(2),
    ]);
    table.row(["split", "12345", "1.50 us", "25.4 us", "2.24 ms"]);
    table.row([
        Cell::from("driver_alloc"),
        Cell::from("3"),
        Cell::bold_if(true, "33.0 us"),
        Cell::or_dash(None::<&str>),
    ]);
    table
}

#[test]
fn columns_that_do_not_fit_are_omitted_by_priority_and_named() {
    let shown = |width: usize| {
        let (text, omitted) = table().show(screen(width));
        assert!(text.lines().all(|line| line.width() <= width), "{width}:\n{text}");
        (text, omitted)
    };
    assert_eq!(table().show(UNBOUNDED), shown(70), "a table that fits is unchanged");
    assert!(shown(70).0.contains("driver allocations"), "a title that fits is not wrapped");
    let (text, _) = shown(60);
    assert!(text.contains("driver allocations") && !text.contains("longest of all"), "{text}");
    let (text, omitted) = shown(53);
    assert!(omitted.is_empty() && text.contains("allocations") && !text.contains("driver allocations"), "{text}");
    assert_eq!(shown(52).1, [""; 0]);
    assert_eq!(shown(51).1, ["p99"]);
    assert_eq!(shown(42).1, ["p99", "longest of all"]);
    assert_eq!(shown(33).1, ["driver allocations", "p99", "longest of all"]);
    for width in 24..80 {
        let (text, _) = shown(width);
        for word in ["split", "driver_alloc", "33.0 us", "1.50 us"] {
            assert!(text.contains(word), "{word} is broken at {width}:\n{text}");
        }
    }
    let mut page = Page::new(screen(42));
    page.table(&table());
    let end = "columns omitted: p99, longest of all;\n  --json has all\n";
    assert!(page.text().ends_with(end), "{}", page.text());
}

#[test]
fn subjects_are_shown_in_columns_and_the_best_is_bold() {
    let names = ["naive", "caching", "stream-ordered", "stream-ordered: release_threshold=0 --sync step", "another"];
    let mut comparison = Comparison::new("metric", names);
    comparison
        .ranked("step", [("25 us", Some(25.0)), ("9 us", Some(9.0)), ("9 us", Some(9.0)), ("-", None), ("8 us", None)]);
    comparison.ranked("loss", [("1", Some(1.0)); 5]);
    comparison.metric("driver calls a batch", ["1", "2", "3", "4", "5"]);
    for width in [40, 60, 80, 100, 200] {
        let text = comparison.show(screen(width));
        assert!(text.lines().all(|line| line.width() <= width), "{width}:\n{text}");
        for name in names {
            let words = || name.split(' ').all(|word| text.contains(word));
            assert!(words(), "{name} is missing or broken at {width}:\n{text}");
        }
        let tables = text.matches("loss").count();
        assert_eq!(tables, if width >= 80 { 2 } else { tables.max(2) }, "{width}:\n{text}");
    }
    let styled = comparison.show(Screen { width: Some(100), styled: true });
    let line = styled.lines().find(|line| line.starts_with("step")).unwrap();
    let bold: Vec<&str> =
        line.split("\u{1b}[1m").skip(1).map(|part| part.split('\u{1b}').next().unwrap().trim()).collect();
    assert_eq!(bold, ["9 us", "9 us"], "{styled}");
    let loss = styled.lines().find(|line| line.starts_with("loss")).unwrap();
    assert!(!loss.contains('\u{1b}'), "of equal values none is bold: {loss:?}");
    assert!(!comparison.show(screen(100)).contains('\u{1b}'));
}

#[test]
fn sentences_wrap_at_words_and_commands_can_be_pasted() {
    let text = "caching asked the driver 3 times, never after step 1; naive 24,866 times";
    let mut page = Page::new(screen(30));
    page.note(text);
    page.end("Done.", "experiments compare --device sim --dataset iris --epochs 2");
    let (note, end) = page.text().split_once("\n\n").unwrap();
    assert!(page.text().lines().all(|line| line.width() <= 30), "{}", page.text());
    assert_eq!(note.split_whitespace().collect::<Vec<_>>().join(" "), text);
    let command = end.strip_prefix("Done.\nNext: ").unwrap().replace("\\\n", "");
    let words: Vec<&str> = command.split_whitespace().collect();
    assert_eq!(words.join(" "), "experiments compare --device sim --dataset iris --epochs 2");
    // Without a screen width text is not wrapped.
    let mut page = Page::new(UNBOUNDED);
    page.note(text);
    assert_eq!(page.text(), format!("{text}\n"));
    // Only words longer than a line are broken.
    let mut page = Page::new(screen(20));
    page.line(format!("see {}", "x".repeat(45)));
    assert!(page.text().lines().all(|line| line.width() <= 20), "{}", page.text());
}

#[test]
fn text_from_outside_is_made_visible_everywhere_on_a_page() {
    let hostile = "a\u{1b}]0;title\u{7}\u{9b}2J\u{202e}b\nc";
    let mut table = Table::new([Column::text(hostile), Column::right(hostile)]);
    table.row([hostile, hostile]);
    let mut comparison = Comparison::new(hostile, [hostile]);
    comparison.metric(hostile, [hostile]);
    for width in [Some(40), Some(200), None] {
        let mut page = Page::new(Screen { width, styled: false });
        page.title(hostile);
        page.note(hostile);
        page.labelled(hostile, 9, hostile);
        page.table(&table);
        page.comparison(&comparison);
        page.end(hostile, hostile);
        let bad = |character: char| character.is_control() && character != '\n' || character == '\u{202e}';
        assert!(!page.text().contains(bad), "{:?}", page.text());
        assert!(page.text().contains("\\x1b]0;title\\x07\\x9b2J"), "{}", page.text());
    }
}

/// The next test runs this in a separate process.
#[test]
#[ignore = "ends its process"]
fn panics_in_a_thread() {
    terminal::report_panics();
    let directory = std::env::var_os("PANICS_IN").unwrap();
    let mut file = OutputFile::create(&Path::new(&directory).join("half"), Existing::Refuse).unwrap();
    file.write_all(b"half").unwrap();
    std::thread::spawn(|| panic!("meant")).join().unwrap();
}

#[test]
fn a_panic_prints_one_line_and_removes_unfinished_files() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "panics_in_a_thread", "--nocapture"]).env("PANICS_IN", directory.path());
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.starts_with("error: internal fault, please report it: "), "{stderr}");
    assert!(stderr.contains("meant") && !stderr.contains("backtrace"), "{stderr}");
    assert_eq!(output.status.code(), Some(101));
    // The process ended before the test harness printed its summary.
    assert!(!String::from_utf8_lossy(&output.stdout).contains("test result"));
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
}

/// Runs a command in place of this process, and panics in a thread during the command or after it. The next test runs this in a
/// separate process.
#[cfg(unix)]
#[test]
#[ignore = "ends its process"]
fn panics_around_a_command() {
    terminal::report_panics();
    let directory = std::path::PathBuf::from(std::env::var_os("PANICS_IN").unwrap());
    let around = Around::listen(Exit::OfCommand, Duration::from_secs(60), |_| Signalled::PassOn).unwrap();
    let mut command = Command::new("sh");
    command.current_dir(&directory);
    let fails = || panic!("meant");
    let outcome = if directory.join("while").exists() {
        let begun = directory.join("begun");
        std::thread::spawn(move || {
            (0..6000).take_while(|_| !begun.exists()).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
            fails()
        });
        // The command continues when the test has read the panic's line.
        let wait = "touch begun; n=0; while [ ! -e go ] && [ $n -lt 3000 ]; do sleep 0.02; n=$((n+1)); done; exit 7";
        around.run(command.args(["-c", wait])).unwrap()
    } else {
        let outcome = around.run(command.args(["-c", "exit 7"])).unwrap();
        let _ = std::thread::spawn(fails).join();
        outcome
    };
    end_alike(outcome.status)
}

#[cfg(unix)]
#[test]
fn a_panic_does_not_affect_the_command_or_its_exit_code() {
    for while_it_runs in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        if while_it_runs {
            std::fs::write(directory.path().join("while"), "").unwrap();
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "panics_around_a_command", "--nocapture"])
            .env("PANICS_IN", directory.path());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // The end of the process closes the pipe, even if it ended too early.
        let line = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok).next();
        std::fs::write(directory.path().join("go"), "").unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(7), "{line:?}");
        assert!(line.is_some_and(|line| line.starts_with("error: internal fault") && line.contains("meant")));
    }
}
