//! What is printed: tables that fit their screen, nothing that a terminal would act on.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use terminal::around::{Around, Exit, Signalled, end_alike};
use terminal::{Cell, Column, Comparison, Page, Screen, Table};
use unicode_width::UnicodeWidthStr;
use vramlab::output::{Existing, OutputFile};

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
fn columns_that_have_no_room_go_by_priority_and_are_named() {
    let shown = |width: usize| {
        let (text, gone) = table().show(screen(width));
        assert!(text.lines().all(|line| line.width() <= width), "{width}:\n{text}");
        (text, gone)
    };
    assert_eq!(table().show(UNBOUNDED), shown(70), "what fits stays as it is");
    assert!(shown(70).0.contains("driver allocations"), "a title stays on its line where there is room");
    let (text, _) = shown(60);
    assert!(text.contains("driver allocations") && !text.contains("longest of all"), "{text}");
    let (text, gone) = shown(53);
    assert!(gone.is_empty() && text.contains("allocations") && !text.contains("driver allocations"), "{text}");
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
    let end = "no room for: p99, longest of all; --json\n  has everything\n";
    assert!(page.text().ends_with(end), "{}", page.text());
}

#[test]
fn subjects_stand_side_by_side_and_the_best_is_bold() {
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
    assert!(!loss.contains('\u{1b}'), "where all are equal none is the best: {loss:?}");
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
    // What no screen cuts stays on its line.
    let mut page = Page::new(UNBOUNDED);
    page.note(text);
    assert_eq!(page.text(), format!("{text}\n"));
    // A word that is longer than the screen is wide is all that is ever broken.
    let mut page = Page::new(screen(20));
    page.line(format!("see {}", "x".repeat(45)));
    assert!(page.text().lines().all(|line| line.width() <= 20), "{}", page.text());
}

#[test]
fn what_comes_from_outside_is_made_visible_in_every_part_of_a_page() {
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

/// The test beside it runs this in a process of its own.
#[test]
#[ignore = "ends its process"]
fn panics_in_a_thread() {
    terminal::report_panics();
    let folder = std::env::var_os("PANICS_IN").unwrap();
    let mut file = OutputFile::create(&Path::new(&folder).join("half"), Existing::Refuse).unwrap();
    file.write_all(b"half").unwrap();
    std::thread::spawn(|| panic!("meant")).join().unwrap();
}

#[test]
fn a_panic_is_one_line_and_leaves_nothing_half_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "panics_in_a_thread", "--nocapture"]).env("PANICS_IN", folder.path());
    let ran = command.output().unwrap();
    let stderr = String::from_utf8(ran.stderr).unwrap();
    assert!(stderr.starts_with("error: internal fault, please report it: "), "{stderr}");
    assert!(stderr.contains("meant") && !stderr.contains("backtrace"), "{stderr}");
    assert_eq!(ran.status.code(), Some(101));
    // The process ended there: the harness did not come to count.
    assert!(!String::from_utf8_lossy(&ran.stdout).contains("test result"));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

/// Runs a command in its place, and has a thread of its own fail while that runs, or afterwards. The test beside it runs this in
/// a process of its own.
#[cfg(unix)]
#[test]
#[ignore = "ends its process"]
fn panics_beside_a_command() {
    terminal::report_panics();
    let folder = std::path::PathBuf::from(std::env::var_os("PANICS_IN").unwrap());
    let around = Around::listen(Exit::OfCommand, Duration::from_secs(60), |_| Signalled::PassOn).unwrap();
    let mut command = Command::new("sh");
    command.current_dir(&folder);
    let fails = || panic!("meant");
    let ended = if folder.join("while").exists() {
        let begun = folder.join("begun");
        std::thread::spawn(move || {
            (0..6000).take_while(|_| !begun.exists()).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
            fails()
        });
        // It goes on when the test has read of the panic.
        let wait = "touch begun; n=0; while [ ! -e go ] && [ $n -lt 3000 ]; do sleep 0.02; n=$((n+1)); done; exit 7";
        around.run(command.args(["-c", wait])).unwrap()
    } else {
        let ended = around.run(command.args(["-c", "exit 7"])).unwrap();
        let _ = std::thread::spawn(fails).join();
        ended
    };
    end_alike(ended.status)
}

#[cfg(unix)]
#[test]
fn a_panic_leaves_the_command_and_its_exit_code_alone() {
    for while_it_runs in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        if while_it_runs {
            std::fs::write(folder.path().join("while"), "").unwrap();
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "panics_beside_a_command", "--nocapture"])
            .env("PANICS_IN", folder.path());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // Its end closes the pipe, also where it ended too early.
        let line = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok).next();
        std::fs::write(folder.path().join("go"), "").unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(7), "{line:?}");
        assert!(line.is_some_and(|line| line.starts_with("error: internal fault") && line.contains("meant")));
    }
}
