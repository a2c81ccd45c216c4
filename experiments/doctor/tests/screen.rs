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
        insta::assert_snapshot!(screen(&place, &["replay", HISTORY]), @r"
            mlp.pickle.xz on NVIDIA H200 (simulated): 26911 events, 8981 allocations, never
            more than 81.6 MiB live
            bound: at least 81.6 MiB; a plan needs 81.6 MiB (1.000 of it)
            ─────────────────────────────────────────────────────────────────────────
                                        recorded      naive   caching  stream-ordered
            ═════════════════════════════════════════════════════════════════════════
            failed allocations                 -          0         0               0
            peak reserved                 90 MiB   81.6 MiB    90 MiB          96 MiB
            reserved / bound               1.102      1.000     1.102           1.176
            peak active                        -   81.6 MiB  81.6 MiB        81.6 MiB
            peak requested              81.6 MiB   81.6 MiB  81.6 MiB        81.6 MiB
            utilisation                        -    100.0 %    90.7 %          85.0 %
            requested at peak reserved         -   81.6 MiB  81.6 MiB        73.0 MiB
            internal at peak reserved          -        0 B  4.30 KiB        3.14 KiB
            soft at peak reserved              -        0 B       0 B        23.0 MiB
            hard at peak reserved              -        0 B  8.36 MiB             0 B
            stream at peak reserved            -        0 B       0 B             0 B
            pending at peak reserved           -        0 B       0 B             0 B
            segments +/-                     6/0  8981/8962       6/0               -
            retries                            -          0         0               0
            driver calls                       -      17943         6           17967
            simulated time                     -     115 ms    209 us         7.57 ms
            host ns/operation [host time]
            ─────────────────────────────────────────────────────────────────────────
            utilisation: peak active of peak reserved
            recorded: what the program did, as far as its history tells; peak requested:
              bytes asked for in active blocks

            naive reserves 81.6 MiB at its peak, the least; 90 MiB were reserved when it was
            recorded, and so they are by caching here; caching makes 6 driver calls,
            stream-ordered 17967.
            Next: cargo run -p doctor -- capacity mlp.pickle.xz
        ");
        insta::assert_snapshot!(screen(&place, &["capacity", HISTORY]), @r"
            mlp.pickle.xz on sim, in steps of 2 MiB
            ─────────────────────────────────────────────────────
                                  naive   caching  stream-ordered
            ═════════════════════════════════════════════════════
            smallest memory      94 MiB    90 MiB          96 MiB
            most live at once  81.6 MiB  81.6 MiB        81.6 MiB
            ratio of the two      1.151     1.102           1.176
            retries in it             0         0               0
            sizes tried               5         5               7
            ─────────────────────────────────────────────────────
            nothing runs in less than is live at once

            caching runs the history in 90 MiB, stream-ordered needs 96 MiB; 81.6 MiB are
            live at once.
            Next: cargo run -p doctor -- replay mlp.pickle.xz --alloc caching --limit \
                  94371840B --device sim
        ");
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
