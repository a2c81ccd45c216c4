//! What a person sees in a terminal: screens at 80 columns, and what holds at any width.

#![cfg(unix)]
// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../../../trainer/tests/common/pty.rs"]
mod pty;

use common::{Place, by_path, end, least};
use pty::{acts_on_terminal, check};
use std::path::Path;

/// What differs from machine to machine and from run to run.
const CHANGES: [(&str, &str); 3] = [
    (r"(?m)^host ns/operation.*$", "host ns/operation [host time]"),
    (r"--release -p", "-p"),
    (r"(?m)^wall.*$", "wall [host time]"),
];

const HISTORY: &str = "mlp.pickle.xz";

/// A folder with a small history.
fn place() -> Place {
    let place = Place::new();
    let history = Path::new(env!("CARGO_MANIFEST_DIR")).join("../histories").join(HISTORY);
    place.file(HISTORY, std::fs::read(history).unwrap());
    place
}

fn screen(place: &Place, arguments: &[&str]) -> String {
    pty::screen(&mut place.process(arguments))
}

#[test]
fn screens_at_80_columns() {
    let place = place();
    insta::with_settings!({ filters => CHANGES }, {
        insta::assert_snapshot!("replay", screen(&place, &["replay", HISTORY]));
        insta::assert_snapshot!("capacity", screen(&place, &["capacity", HISTORY]));
    });
}

#[test]
fn screens_at_other_widths_and_without_styles() {
    let place = place();
    for arguments in [
        &["replay", HISTORY, HISTORY][..],
        &["replay", HISTORY, "--addresses", "recorded"],
        &["capacity", HISTORY],
        &["convert", HISTORY, "--to", "perfetto", "-o", "history.json", "--force"],
    ] {
        check(&|| place.process(arguments));
    }
}

#[test]
fn what_comes_from_outside_moves_no_cursor() {
    let place = place();
    let hostile = "\u{1b}[2J\u{9b}31m\u{202e}\u{7}";
    let written = r"\u001b[2J\u202e";
    let named = |name: &str, text: &str| place.write(&format!("{hostile}{name}"), text);
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
        let output = place.process(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(!acts_on_terminal(&text), "{arguments:?}: {text:?}");
        // As the printer, JSON, or Rust's own quoting write them.
        assert!([r"\x", r"\u"].iter().any(|sign| text.contains(sign)), "{arguments:?}: {text:?}");
    }
}

#[test]
fn the_last_lines_are_what_was_found_and_the_next_command() {
    let place = place();
    let rows = |command: &str| place.run(&[command, HISTORY, "--json"]).rows();
    let (replayed, fitted) = (rows("replay"), rows("capacity"));
    let convert = ["convert", HISTORY, "--to", "rmm", "-o", "history.csv"];
    for (arguments, words, next_words) in [
        (
            &["replay", HISTORY][..],
            vec![format!("{} reserves", least(&replayed, "peak_reserved_bytes", "allocator"))],
            "vramlab capacity mlp.pickle.xz",
        ),
        (
            &["capacity", HISTORY],
            vec![least(&fitted, "capacity_bytes", "allocator").to_owned(), " the history in ".to_owned()],
            "vramlab replay mlp.pickle.xz --alloc caching --limit ",
        ),
        (&convert, vec!["to history.csv (rmm): ".to_owned()], "vramlab replay history.csv"),
    ] {
        let text = by_path(&place, arguments);
        let (found, next) = end(&text);
        assert!(found.ends_with('.') && found.split(' ').count() > 4, "{arguments:?}: {found}");
        assert!(words.iter().all(|words| found.contains(words)), "{arguments:?}: {words:?} should be in: {found}");
        assert!(next.contains(next_words), "{arguments:?}: {next}");
    }
}

#[test]
fn the_next_command_can_be_pasted() {
    let place = place();
    place.file("a history.pickle.xz", std::fs::read(place.at(HISTORY)).unwrap());
    place.pasted(by_path(&place, &["replay", "a history.pickle.xz"]), 3);
}
