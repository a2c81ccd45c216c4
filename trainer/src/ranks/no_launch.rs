//! Ranks are started on Unix alone.

use crate::error::{Result, TrainError};
use crate::settings::Settings;
use std::ffi::OsString;
use terminal::signals::Signals;

/// Refuses.
///
/// # Errors
/// Always.
pub(crate) fn launch(_: u32, _: &Settings, _: &[OsString], _: &Signals) -> Result<u8> {
    Err(TrainError::Input("--gpus starts several processes, which works on Linux and other Unix systems alone".into()))
}
