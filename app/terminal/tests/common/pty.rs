//! A terminal to run a program in, and what a person sees in it when the program has ended.

use nix::pty::{Winsize, openpty};
use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};

/// More lines than any program here prints.
const ROWS: u16 = 500;

/// What is on the screen.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) code: Option<i32>,
    /// All bytes that came.
    pub(crate) raw: String,
    /// The screen's lines, without empty ones at the end.
    pub(crate) screen: String,
    /// Lines that the terminal had to break.
    pub(crate) broken: Vec<String>,
}

/// Runs a program in a terminal of so many columns, with all three streams.
pub(crate) fn show(command: &mut Command, columns: u16, environment: &[(&str, &str)]) -> Shown {
    let size = Winsize { ws_row: ROWS, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let ends = openpty(&size, None).unwrap();
    let theirs = File::from(ends.slave);
    for name in ["COLUMNS", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "CI"] {
        command.env_remove(name);
    }
    // The commands that are suggested are those of a checkout, wherever it lies.
    command.env("TERM", "xterm-256color").env("CARGO", "cargo").envs(environment.iter().copied());
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs);
    let mut child = command.spawn().unwrap();
    // The command holds their end until it is given others, and then the reading would never end.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (mut ours, mut bytes, mut part) = (File::from(ends.master), Vec::new(), [0; 4096]);
    // The end of the other side is an error on Linux.
    while let Ok(count @ 1..) = ours.read(&mut part) {
        bytes.extend_from_slice(&part[..count]);
    }
    let code = child.wait().unwrap().code();
    let mut parser = vt100::Parser::new(ROWS.try_into().unwrap(), columns.try_into().unwrap(), 0);
    parser.process(&bytes);
    let screen = parser.screen();
    let rows: Vec<String> = screen.rows(0, columns).map(|row| row.trim_end().to_owned()).collect();
    let broken = (0..ROWS).filter(|row| screen.row_wrapped(*row)).map(|row| rows[usize::from(row)].clone());
    Shown {
        code,
        broken: broken.collect(),
        screen: rows.join("\n").trim_end().to_owned(),
        raw: String::from_utf8_lossy(&bytes).into_owned(),
    }
}

/// The screen of 80 columns that a program leaves when it ends well.
pub(crate) fn screen(command: &mut Command) -> String {
    let shown = show(command, 80, &[]);
    assert_eq!(shown.code, Some(0), "{}", shown.screen);
    shown.screen
}

/// Whether a text could move the cursor or turn the reading direction.
pub(crate) fn acts_on_terminal(text: &str) -> bool {
    text.contains(|character: char| (character.is_control() && character != '\n') || character == '\u{202e}')
}

/// What every program keeps to in every terminal: no line is broken by it, and where styles are not wanted there are none.
pub(crate) fn check(make: &dyn Fn() -> Command) {
    for columns in [60, 80, 100] {
        let shown = show(&mut make(), columns, &[]);
        assert_eq!((shown.code, shown.broken.as_slice()), (Some(0), &[][..]), "{columns} columns:\n{}", shown.screen);
    }
    let dumb = show(&mut make(), 80, &[("TERM", "dumb")]);
    assert!(!dumb.raw.contains('\u{1b}'), "TERM=dumb: {:?}", dumb.raw);
    // Moving the cursor is no colour.
    let plain = show(&mut make(), 80, &[("NO_COLOR", "1")]);
    let styles = plain.raw.split("\u{1b}[").skip(1).filter(|rest| {
        rest.trim_start_matches(|character: char| character.is_ascii_digit() || character == ';').starts_with('m')
    });
    assert_eq!(styles.count(), 0, "NO_COLOR: {:?}", plain.raw);
    for (name, styled) in [("CLICOLOR", false), ("CLICOLOR_FORCE", true)] {
        let mut command = make();
        command.env_remove("NO_COLOR").env_remove("COLUMNS").env(name, "1");
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(styled || !text.contains('\u{1b}'), "a pipe with {name}: {text:?}");
        assert!(!String::from_utf8(output.stderr).unwrap().contains('\u{1b}'));
    }
}
