//! How a program ends: with which code, and with which line.

use crate::fail;
use std::fmt::Display;
use vramlab::output::OutputError;

/// It did what it was asked.
pub const OK: u8 = 0;
/// It failed while running: out of memory, a driver error, a file that could not be written.
pub const FAILED: u8 = 1;
/// The input was bad: arguments, data files, a profile, a device or a library that is not there.
pub const BAD_INPUT: u8 = 2;
/// There is no answer that mends it, where the command line asks for a code that says so.
pub const UNMENDED: u8 = 3;
/// It was interrupted from the keyboard (128 + SIGINT). By another signal the code is 128 and that signal's number: 143 for
/// SIGTERM, 129 for SIGHUP.
pub const INTERRUPTED: u8 = 130;

/// An error that is no fault of the input, with the exit code that it ends the program with.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct RuntimeFailure {
    code: u8,
    text: String,
}

impl RuntimeFailure {
    /// Something failed while the program ran: [`FAILED`].
    #[must_use]
    pub fn new(text: impl Display) -> Self {
        Self::with_code(FAILED, text)
    }

    /// Another process, or a signal, decided the code.
    #[must_use]
    pub fn with_code(code: u8, text: impl Display) -> Self {
        Self { code, text: text.to_string() }
    }
}

/// Says on standard error what went wrong, if something did, and gives the exit code. Errors are of the input ([`BAD_INPUT`]) unless they are a
/// [`RuntimeFailure`] or an output file that the system failed to write.
#[must_use]
pub fn end(result: anyhow::Result<()>) -> u8 {
    let Err(error) = result else { return OK };
    fail(format_args!("{error:#}"));
    match (error.downcast_ref::<OutputError>(), error.downcast_ref::<RuntimeFailure>()) {
        (Some(output), _) if !output.problem.is_refusal() => FAILED,
        (_, Some(failure)) => failure.code,
        _ => BAD_INPUT,
    }
}
