//! Runs a program in a pseudo-terminal and returns its final screen.

use nix::pty::{Winsize, openpty};
use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};

/// More lines than any program prints here.
const ROWS: u16 = 500;

/// The final screen.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) code: Option<i32>,
    /// All received bytes.
    pub(crate) raw: String,
    /// The screen's lines, without trailing empty lines.
    pub(crate) screen: String,
    /// Lines broken by the terminal.
    pub(crate) broken: Vec<String>,
}

/// Runs a program in a terminal of this many columns, with all three streams.
pub(crate) fn show(command: &mut Command, columns: u16, environment: &[(&str, &str)]) -> Shown {
    let size = Winsize { ws_row: ROWS, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let ends = openpty(&size, None).unwrap();
    let slave = File::from(ends.slave);
    for name in ["COLUMNS", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "CI"] {
        command.env_remove(name);
    }
    // Makes the program suggest the commands of a checkout.
    command.env("TERM", "xterm-256color").env("CARGO", "cargo").envs(environment.iter().copied());
    command.stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap()).stderr(slave);
    let mut child = command.spawn().unwrap();
    // The command keeps the slave end open until it gets other streams; otherwise reading would never end.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (mut master, mut bytes, mut part) = (File::from(ends.master), Vec::new(), [0; 4096]);
    // On Linux the end of the other side is an error.
    while let Ok(count @ 1..) = master.read(&mut part) {
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

/// The 80-column screen of a successful program.
pub(crate) fn screen(command: &mut Command) -> String {
    let shown = show(command, 80, &[]);
    assert_eq!(shown.code, Some(0), "{}", shown.screen);
    shown.screen
}

/// Whether a text could move the cursor or change the reading direction.
pub(crate) fn acts_on_terminal(text: &str) -> bool {
    text.contains(|character: char| (character.is_control() && character != '\n') || character == '\u{202e}')
}

/// Asserts that a program breaks no lines in any terminal, and uses no styles if they are disabled.
pub(crate) fn check(make: &dyn Fn() -> Command) {
    for columns in [60, 80, 100] {
        let shown = show(&mut make(), columns, &[]);
        assert_eq!((shown.code, shown.broken.as_slice()), (Some(0), &[][..]), "{columns} columns:\n{}", shown.screen);
    }
    let dumb = show(&mut make(), 80, &[("TERM", "dumb")]);
    assert!(!dumb.raw.contains('\u{1b}'), "TERM=dumb: {:?}", dumb.raw);
    // Moving the cursor is not a style.
    let plain = show(&mut make(), 80, &[("NO_COLOR", "1")]);
    let styles = plain.raw.split("\u{1b}[").skip(1).filter(|sequence| {
        sequence.trim_start_matches(|character: char| character.is_ascii_digit() || character == ';').starts_with('m')
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
