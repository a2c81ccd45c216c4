//! Tests that need what a machine may lack: a GPU, a library, data. Where it is missing they are counted as ignored, and the
//! reason stands beside their names. `--include-ignored` runs them all the same, and then they fail.

use libtest_mimic::{Arguments, Trial};
use std::process::ExitCode;

/// A test; with `missing`, why it cannot run here.
pub(crate) fn trial(name: impl Into<String>, missing: Option<&str>, body: impl FnOnce() + Send + 'static) -> Trial {
    let trial = Trial::test(name, move || {
        body();
        Ok(())
    });
    match missing {
        Some(why) => trial.with_kind(why).with_ignored_flag(true),
        None => trial,
    }
}

/// Runs them as `cargo test` does.
pub(crate) fn run(trials: Vec<Trial>) -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Functions without arguments as tests: `trials!(missing => one two; None => three)`.
#[allow(unused_macros, reason = "not for tests whose names are made")]
macro_rules! trials {
    ($($missing:expr => $($name:ident)+);+ $(;)?) => {
        vec![$($(trials::trial(stringify!($name), $missing, $name)),+),+]
    };
}
#[allow(unused_imports, reason = "as above")]
pub(crate) use trials;
