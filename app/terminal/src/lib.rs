//! Terminal code of the programs: arguments, output, signals and errors.
//!
//! All output goes through this crate: results to standard output, everything else to standard error. Control characters in text from
//! files, names and errors are made [visible] first.

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

/// Width of the label at the start of a line on standard error.
const LABEL: usize = 9;
/// The exit code after a panic, the same as Rust's.
const FAULT: i32 = 101;

/// Writes visible text to standard output.
fn write_out(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    written(writeln!(out, "{}", text.trim_end()))
}

/// The result of a write to standard output. A full disk is a failure at run time, not bad input.
fn written(outcome: std::io::Result<()>) -> Result<()> {
    match outcome.and_then(|()| std::io::stdout().flush()) {
        // A reader that closed the pipe (`| head`) has read enough.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(RuntimeFailure::new(format_args!("cannot write to stdout: {error}")).into())
        }
        _ => Ok(()),
    }
}

/// Prints a value as one indented JSON document on standard output.
///
/// # Errors
/// A [`RuntimeFailure`] if it cannot be written; a closed pipe is not an error.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    print_json_text(&serde_json::to_string_pretty(value)?)
}

/// Prints a JSON text, as [`print_json`] does.
///
/// # Errors
/// As [`print_json`].
pub fn print_json_text(text: &str) -> Result<()> {
    write_out(&escape::visible_json(text))
}

/// Writes a line to standard error. On a terminal it wraps at words; text after a label of nine columns is indented to that column.
pub fn say(text: &str) {
    let text = escape::glued(text);
    let labelled = text.get(..LABEL).is_some_and(|label| label.ends_with(' ') && !label.trim().contains(' '));
    let indent = if labelled { LABEL } else { 0 };
    write_err(&escape::unglued(&screen::wrapped(&text, Screen::stderr().width, indent)));
}

/// Writes lines to standard error. A closed pipe (`2>&1 | head`) is not an error; `eprintln!` would panic.
fn write_err(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{}", text.trim_end());
}

/// Writes an error to standard error, on one line: `error: …`.
pub fn fail(error: impl std::fmt::Display) {
    say(&format!("error: {error}"));
}

/// Makes a panic in any thread end the process with one line instead of a backtrace. Release builds do not unwind, so unfinished files
/// are removed here. A command that runs [in place](around::Exit::OfCommand) of this program continues, and its exit code is kept.
pub fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        fail(format_args!("internal fault, please report it: {panic}"));
        around::contain_fault();
        vramlab::output::discard_unfinished();
        std::process::exit(FAULT)
    }));
}

/// Initialises a program: a panic prints one line, exceeding the file size limit is an error, child processes can be waited for, and
/// signals arrive, whatever the parent process ignores or blocks.
pub fn begin() {
    report_panics();
    // If the system refuses, the signals stay blocked, as the parent process requested.
    #[cfg(unix)]
    let _ = signals::unblock();
    // If the system refuses a handler, exceeding the limit ends the process, which is the default.
    let _ = signals::outlive_file_limits();
    let _ = signals::collect_children();
}

/// Parses a command line. `--help`, `--version` and parse errors exit the process.
#[must_use]
pub fn parse<C: Parser>(arguments: Vec<OsString>) -> C {
    let width = Screen::stdout().width.unwrap_or(screen::PIPED).min(screen::PIPED);
    let mut command = C::command().term_width(width);
    let parsed = command
        .try_get_matches_from_mut(arguments)
        .and_then(|mut matches| C::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command)));
    parsed.unwrap_or_else(|error| {
        if error.use_stderr() {
            // The error quotes arguments.
            write_err(&escape::visible_lines(&error.to_string()));
        } else {
            // Help is styled; it contains no text from outside.
            std::process::exit(exit::end(written(error.print())).into());
        }
        std::process::exit(error.exit_code())
    })
}

/// A word of a command line, quoted for a shell.
#[must_use]
pub fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_alphanumeric() || "-_./:=,+%@".contains(character);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Programs that this one contains, each with the word that starts it.
static PARTS: OnceLock<&'static [(&'static str, &'static str)]> = OnceLock::new();

/// Registers, for [`command`], the programs that the current one contains, and the word that starts each:
/// `[("trainer", ""), ("vramlab", "vramlab")]`. Only the first call has an effect.
pub fn contains(parts: &'static [(&'static str, &'static str)]) {
    let _ = PARTS.set(parts);
}

/// A command line of one of the programs, in the form in which this program was started: with `cargo run`, by path, or by name.
#[must_use]
pub fn command(program: &str, arguments: &str) -> String {
    let exe = std::env::current_exe().unwrap_or_default();
    let release = exe.parent().is_some_and(|directory| directory.ends_with("release"));
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
    let directory = called.parent().filter(|directory| !directory.as_os_str().is_empty());
    let path =
        directory.map_or_else(|| program.to_owned(), |directory| quoted(&directory.join(program).to_string_lossy()));
    format!("{path} {arguments}")
}
