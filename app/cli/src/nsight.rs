//! `vramlab nsight`: which CUDA calls waited for the device, and behind which work, from a capture of Nsight Systems.

mod input;
mod page;
mod picture;
mod rows;
mod screen;
mod sites;
mod summary;

pub(crate) use input::Format;

use crate::output;
use anyhow::{Context, Result};
use clap::Args;
use std::path::{Path, PathBuf};
use terminal::RuntimeFailure;
use vramlab::output::{OutputFile, OutputFolder};

#[derive(Debug, Args)]
pub(crate) struct NsightArgs {
    /// Capture: an SQLite export (`nsys export --type sqlite`), a .nsys-rep where `nsys` is on the PATH, or a directory that
    /// --extract wrote
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print all tables: longest waits, places in the run, idle GPU, kernels
    #[arg(long, conflicts_with = "json")]
    tables: bool,
    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = 12, conflicts_with = "json")]
    top: usize,
    /// Page to write: one picture of a step, or of the busiest second, and the table of calls
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object with all rows of all tables
    #[arg(long)]
    json: bool,
    /// With --json: print every call, piece of work and range too
    #[arg(long, requires = "json")]
    rows: bool,
    /// Directory to write: small tables for publication, without ids, environment or name of the machine
    #[arg(long, value_name = "DIR")]
    extract: Option<PathBuf>,
}

/// Writes the page of a capture, for `vramlab report`.
pub(crate) fn report(file: &Path, out: OutputFile) -> Result<()> {
    let capture = input::read(file)?;
    let attribution = vramlab_nsight::attribute(&capture);
    let summary = summary::Summary::new(&capture, &attribution);
    page::write(file, out, &capture, &attribution, &summary)?;
    let mut page = terminal::Page::stdout();
    page.line(screen::sentence(&summary));
    page.print()
}

/// Reads the capture and prints the waits in it.
pub(crate) fn nsight(args: &NsightArgs) -> Result<()> {
    let capture = input::read(&args.file)?;
    let attribution = vramlab_nsight::attribute(&capture);
    let mut summary = summary::Summary::new(&capture, &attribution);
    if let Some(out) = &args.out {
        let out = output::replacing(out, [&args.file])?;
        page::write(&args.file, out, &capture, &attribution, &summary)?;
    }
    if let Some(directory) = &args.extract {
        let directory = OutputFolder::create(directory)?;
        vramlab_nsight::extract(&capture, directory.part())
            .with_context(|| format!("{}: cannot be written", directory.path().display()))
            .map_err(|error| RuntimeFailure::new(format!("{error:#}")))?;
        directory.finish()?;
    }
    summary.rows = args.rows.then(|| rows::CaptureRows::new(&capture, &attribution));
    if args.json {
        return terminal::print_json(&summary);
    }
    screen::report(&summary, args).print()
}
