//! `experiments results`: unpacks recorded results and lists them in the order that decides which one is the newest.
//! `vramlab_analysis` reads its JSON.

use crate::repository::{self, Record};
use crate::table::table;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use terminal::{Cell, Column, Page};

#[derive(Debug, Args)]
pub(crate) struct ResultsArgs {
    /// A directory of results, whose archives LABEL.tar.xz are unpacked to LABEL next to them, or one such archive
    /// [default: experiments/results]
    path: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A directory of results.
#[derive(Debug, Serialize)]
struct Listing {
    /// The directory, or the one of the archive.
    folder: PathBuf,
    /// Its entries, oldest first, without archives.
    records: Vec<Record>,
}

/// Unpacks what is not yet unpacked, and prints the entries.
pub(crate) fn results(args: &ResultsArgs) -> Result<()> {
    let path = args.path.clone().or_else(|| repository::find("results"));
    let path = path.context("experiments/results was not found; name the directory of the results")?;
    let folder = if path.is_dir() {
        repository::unpack_all(&path)?;
        path
    } else if path.is_file() && repository::is_archive(&path) {
        repository::unpack_beside(&path)?
    } else {
        bail!("{} is neither a directory nor a file *{}", path.display(), repository::ARCHIVE);
    };
    let listing = Listing { records: repository::records(&folder)?, folder };
    if args.json {
        return terminal::print_json(&listing);
    }
    let device = |record: &Record| Cell::or_dash(record.device.clone());
    let mut page = Page::stdout();
    page.table(&table(
        &listing.records,
        &[
            (Column::left("record"), &|record| Cell::from(&record.name)),
            (Column::left("device"), &|record| device(record)),
        ],
    ));
    let count = listing.records.len();
    let noun = if count == 1 { "record" } else { "records" };
    page.title(format!("{count} {noun} in {}.", listing.folder.display()));
    page.print()
}
