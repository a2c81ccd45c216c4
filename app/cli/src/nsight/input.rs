//! The capture behind a path: which kind of file it is, and its contents. A report is exported first.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use terminal::{Bar, quoted};
use vramlab_nsight::{Capture, DESCRIPTION};

/// The kinds of files of a capture.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Format {
    /// `nsys export --type sqlite`, or another SQLite database.
    Export,
    /// `.nsys-rep`, or `.qdrep` of older versions.
    Report,
    /// `.qdstrm`: events that were not yet imported into a report.
    Raw,
    /// A directory that `--extract` wrote.
    Extracted,
}

impl Format {
    /// The kind of this file; `None` for a file that is not of a capture.
    pub(crate) fn new(path: &Path) -> Option<Self> {
        let metadata = std::fs::metadata(path).ok()?;
        if metadata.is_dir() {
            return path.join(DESCRIPTION).is_file().then_some(Self::Extracted);
        }
        let mut magic = [0; 16];
        let read = metadata.is_file() && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok();
        if read && &magic == b"SQLite format 3\0" {
            return Some(Self::Export);
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("nsys-rep" | "qdrep") => Some(Self::Report),
            Some("qdstrm") => Some(Self::Raw),
            _ => None,
        }
    }

    /// The kind in words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Export => "an SQLite database, as Nsight Systems exports captures",
            Self::Report => "a capture of Nsight Systems",
            Self::Raw => "a capture of Nsight Systems that was not imported into a report",
            Self::Extracted => "a directory with the tables of a capture of Nsight Systems",
        }
    }
}

/// Reads an export or extracted tables, or exports a report of Nsight Systems to a temporary file and reads that.
pub(crate) fn read(file: &Path) -> Result<Capture> {
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    let format = Format::new(file);
    if format == Some(Format::Raw) {
        let report = file.with_extension("nsys-rep");
        let [raw, report] = [file, &report].map(|path| quoted(&path.display().to_string()));
        bail!(
            "{}: is {}; import it where all of Nsight Systems is installed, in the version that captured: {}",
            file.display(),
            Format::Raw.words(),
            format_args!("QdstrmImporter -i {raw} -o {report}")
        );
    }
    if format != Some(Format::Report) {
        bar.message(format!("reading {}", file.display()));
        let capture = vramlab_nsight::read(file);
        bar.clear();
        return Ok(capture?);
    }
    let directory = tempfile::tempdir().context("cannot create a temporary directory")?;
    let export = directory.path().join("capture.sqlite");
    bar.message(format!("exporting {}", file.display()));
    let mut nsys = Command::new("nsys");
    nsys.args(["export", "--type", "sqlite", "--output"]).arg(&export).arg(file);
    let output = nsys.stdin(Stdio::null()).output();
    bar.clear();
    let by_hand = format!("nsys export --type sqlite {}", quoted(&file.display().to_string()));
    match output {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("{}: `nsys` is not on the PATH; export where it is: {by_hand}", file.display())
        }
        Err(error) => bail!("{}: cannot start `nsys`: {error}", file.display()),
        Ok(output) if !output.status.success() || !export.is_file() => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let line = stderr.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("no message");
            bail!("{}: `nsys export` failed ({line}); export by hand: {by_hand}", file.display())
        }
        Ok(_) => Ok(vramlab_nsight::read(&export)?),
    }
}
