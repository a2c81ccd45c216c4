//! Output files of commands that read recordings.

use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use vramlab::output::{Existing, OutputFile};

/// Begins an output that replaces an existing file, but none of the inputs: a recording cannot be made again.
pub(crate) fn replacing<'a>(out: &Path, inputs: impl IntoIterator<Item = &'a PathBuf>) -> Result<OutputFile> {
    // Another hard link of an input may be replaced: the input keeps its contents.
    if let Ok(existing) = out.canonicalize()
        && inputs.into_iter().any(|input| input.canonicalize().is_ok_and(|input| input == existing && input.is_file()))
    {
        bail!("{}: is an input too; name another file for the output", out.display());
    }
    Ok(OutputFile::create(out, Existing::Replace)?)
}
