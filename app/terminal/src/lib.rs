//! What the programs share at the terminal: their arguments, what they print, how signals and errors end them.
//!
//! Everything that they print goes through here: results to standard output, all else to standard error. Text of files, names
//! and errors is made [visible] first.

pub mod arguments;
pub mod around;
mod bar;
mod escape;
pub mod exit;
mod page;
pub mod provenance;
mod screen;
pub mod signals;
mod table;

use anyhow::Result;
use clap::Parser;
use serde::Serialize;
use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;

pub use arguments::{Completions, Shard, completions};
pub use bar::Bar;
pub use escape::visible;
pub use exit::RuntimeFailure;
pub use page::{Page, digits, duration, seconds};
pub use screen::Screen;
pub use table::{Cell, Column, Comparison, SIDE_BY_SIDE, Table};

/// Lines on standard error begin with a word of this width.
const LABEL: usize = 9;
/// The exit code after a fault of the program, as Rust's own.
const FAULT: i32 = 101;

/// Writes to standard output what has been made visible.
fn write_out(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    written(writeln!(out, "{}", text.trim_end()))
}

/// How standard output took what was written to it. A full disk behind it is no fault of the input.
fn written(outcome: std::io::Result<()>) -> Result<()> {
    match outcome.and_then(|()| std::io::stdout().flush()) {
        // A reader that went away (`| head`) has what it wanted.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(RuntimeFailure::new(format_args!("cannot write to stdout: {error}")).into())
        }
        _ => Ok(()),
    }
}

/// Prints a value as one JSON document, laid out for people, and nothing else, on standard output.
///
/// # Errors
/// A [`RuntimeFailure`] when it cannot be written; a reader that went away is no error.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    print_json_text(&serde_json::to_string_pretty(value)?)
}

/// Prints a JSON document that is text already, as [`print_json`] does.
///
/// # Errors
/// As [`print_json`].
pub fn print_json_text(text: &str) -> Result<()> {
    write_out(&escape::visible_json(text))
}

/// Writes a line to standard error. It wraps at words where that is a terminal; what follows a label of nine columns
/// stays beside it.
pub fn say(text: &str) {
    let text = escape::glued(text);
    let labelled = text.get(..LABEL).is_some_and(|label| label.ends_with(' ') && !label.trim().contains(' '));
    let indent = if labelled { LABEL } else { 0 };
    write_err(&escape::unglued(&screen::wrapped(&text, Screen::stderr().width, indent)));
}

/// Writes lines to standard error. A reader that went away (`2>&1 | head`) is no error, and `eprintln!` would panic.
fn write_err(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", text.trim_end());
}

/// Writes what went wrong to standard error, on one line: `error: …`.
pub fn fail(error: impl std::fmt::Display) {
    say(&format!("error: {error}"));
}

/// Has a panic in any thread end the process with one line that says so instead of a backtrace: it is a fault of this
/// program. Nothing unwinds (release builds have no code for it), so files under way are removed here. A command that runs
/// [in the place](around::Exit::OfCommand) of this program goes on, and its exit code is kept.
pub fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        fail(format_args!("internal fault, please report it: {panic}"));
        around::contain_fault();
        vramlab::output::discard_unfinished();
        std::process::exit(FAULT)
    }));
}

/// What every program does first: a panic becomes one line, a file that reaches the limit on its size an error, and children can
/// be waited for.
pub fn begin() {
    report_panics();
    // Where the system refuses a handler, such a limit ends the process, as it would anyway.
    let _ = signals::outlive_file_limits();
    let _ = signals::collect_children();
}

/// Parses a command line. `--help`, `--version` and arguments that cannot be parsed end the process.
#[must_use]
pub fn parse<C: Parser>(arguments: Vec<OsString>) -> C {
    let width = Screen::stdout().width.unwrap_or(screen::PIPED).min(screen::PIPED);
    let mut command = C::command().term_width(width);
    let parsed = command
        .try_get_matches_from_mut(arguments)
        .and_then(|mut matches| C::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command)));
    parsed.unwrap_or_else(|error| {
        if error.use_stderr() {
            // Arguments are quoted in it.
            write_err(&escape::visible_lines(&error.to_string()));
        } else {
            // Help in the style of the terminal; nothing of it comes from outside.
            std::process::exit(exit::end(written(error.print())).into());
        }
        std::process::exit(error.exit_code())
    })
}

/// A word of a command line as a shell takes it.
#[must_use]
pub fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_alphanumeric() || "-_./:=,+%@".contains(character);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Programs that are a part of this one, each with the words that lead to it.
static PARTS: OnceLock<&'static [(&'static str, &'static str)]> = OnceLock::new();

/// Says which of the programs a program of another crate contains, and behind which word each is reached, for [`command`]:
/// `[("trainer", ""), ("vramlab", "vramlab")]`. The first call counts.
pub fn contains(parts: &'static [(&'static str, &'static str)]) {
    let _ = PARTS.set(parts);
}

/// A command line of one of the programs, as the user would type it where this program was started: under `cargo run`,
/// by its path, or by its name.
#[must_use]
pub fn command(program: &str, arguments: &str) -> String {
    let exe = std::env::current_exe().unwrap_or_default();
    let release = exe.parent().is_some_and(|folder| folder.ends_with("release"));
    let part = PARTS.get().and_then(|parts| parts.iter().find(|(name, _)| *name == program));
    if let Some((_, word)) = part {
        let called = match std::env::var_os("CARGO") {
            Some(_) => format!("cargo run {}--", if release { "--release " } else { "" }),
            None => quoted(&std::env::args_os().next().unwrap_or_default().to_string_lossy()),
        };
        return [&called, *word, arguments]
            .iter()
            .filter(|word| !word.is_empty())
            .copied()
            .collect::<Vec<_>>()
            .join(" ");
    }
    if std::env::var_os("CARGO").is_some() {
        // The package `vramlab` is the library.
        let package = if program == "vramlab" { "vramlab-cli" } else { program };
        return format!("cargo run {}-p {package} -- {arguments}", if release { "--release " } else { "" });
    }
    let called = std::env::args_os().next().map(std::path::PathBuf::from).unwrap_or_default();
    let folder = called.parent().filter(|folder| !folder.as_os_str().is_empty());
    let path = folder.map_or_else(|| program.to_owned(), |folder| quoted(&folder.join(program).to_string_lossy()));
    format!("{path} {arguments}")
}
