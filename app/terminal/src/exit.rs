//! Exit codes, and the error line at the end of a program.

use crate::fail;
use std::fmt::Display;
use vramlab::output::OutputError;

/// Success.
pub const OK: u8 = 0;
/// Failure at run time: out of memory, a driver error, a file that could not be written.
pub const FAILED: u8 = 1;
/// Bad input: arguments, data files, a profile, a missing device or library.
pub const BAD_INPUT: u8 = 2;
/// No setting reduces the program's memory, if the command line requests this code.
pub const NO_SETTING_HELPS: u8 = 3;
/// Interrupted from the keyboard (128 + SIGINT). After another signal the code is 128 plus that signal's number: 143 for SIGTERM, 129
/// for SIGHUP.
pub const INTERRUPTED: u8 = 130;

/// An error that is not a fault of the input, with its exit code.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct RuntimeFailure {
    code: u8,
    text: String,
}

impl RuntimeFailure {
    /// An error at run time, with the exit code [`FAILED`].
    #[must_use]
    pub fn new(text: impl Display) -> Self {
        Self::with_code(FAILED, text)
    }

    /// An error whose exit code is determined by another process or a signal.
    #[must_use]
    pub fn with_code(code: u8, text: impl Display) -> Self {
        Self { code, text: text.to_string() }
    }
}

/// Prints an error on standard error, and returns the exit code: [`BAD_INPUT`], unless the error is a [`RuntimeFailure`] or an output
/// file that the system failed to write.
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
