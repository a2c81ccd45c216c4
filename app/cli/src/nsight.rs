//! `vramlab nsight`: which CUDA calls waited for the device, and behind which work, from a capture of Nsight Systems.

mod input;
mod page;
mod picture;
mod screen;
mod summary;

use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct NsightArgs {
    /// Capture: an SQLite export (`nsys export --type sqlite`), or a .nsys-rep where `nsys` is on the PATH
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
    /// Print one JSON object with all tables and all rows
    #[arg(long)]
    json: bool,
}

/// Reads the capture and prints the waits in it.
pub(crate) fn nsight(args: &NsightArgs) -> Result<()> {
    let capture = input::read(&args.file)?;
    let attribution = vramlab_nsight::attribute(&capture);
    let summary = summary::Summary::new(&capture, &attribution);
    if let Some(out) = &args.out {
        page::write(args, out, &capture, &attribution, &summary)?;
    }
    if args.json {
        return terminal::print_json(&summary);
    }
    screen::report(&summary, args).print()
}
