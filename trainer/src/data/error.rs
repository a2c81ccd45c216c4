//! Errors of data sets.

use std::io;
use std::path::Path;

use terminal::visible;

/// Why a data set could not be had. Each message is one line: what is wrong, where, and how to mend it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A directory that the user named lacks one of the four files.
    #[error(
        "{directory} ({origin}) has no {file}, plain or .gz: put it there, or point {origin} at the directory that holds the four MNIST files"
    )]
    Missing {
        /// The file's standard name.
        file: &'static str,
        /// The directory.
        directory: String,
        /// Who named it: `--data-dir` or `MNIST_DIR`.
        origin: &'static str,
    },
    /// A directory that the user named is not there.
    #[error("{directory} ({origin}) is not a directory: give the one that holds the four MNIST files")]
    NoDirectory {
        /// The directory.
        directory: String,
        /// Who named it: `--data-dir` or `MNIST_DIR`.
        origin: &'static str,
    },
    /// The system refused to read a file.
    #[error("{file}: cannot read it: {source}")]
    Read {
        /// The file.
        file: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A file that is damaged, or not the one that is needed.
    #[error("{file}: {problem}")]
    Unusable {
        /// The file.
        file: String,
        /// Position in the file, fault and fix.
        problem: String,
    },
    /// Files that do not belong together.
    #[error("{0}: take both from the same set")]
    Mismatch(String),
    /// MNIST is not on this machine, and may not be downloaded.
    #[error("MNIST is not on this machine ({searched}) and was not downloaded because {reason}: {mend}")]
    Unavailable {
        /// Searched locations.
        searched: String,
        /// Why there was no download.
        reason: &'static str,
        /// The fix.
        mend: &'static str,
    },
    /// No mirror gave the file.
    #[error(
        "MNIST is not on this machine and {file} could not be downloaded ({problems}): check the network, or give the files with --data-dir"
    )]
    Download {
        /// The file's standard name.
        file: &'static str,
        /// Each mirror's answer.
        problems: String,
        /// Summary of their answers, without their names.
        brief: String,
    },
    /// The cache cannot be written.
    #[error(
        "{path}: cannot write to the cache: {source}: mend that, or set VRAMLAB_CACHE to a directory that can be written"
    )]
    Cache {
        /// The path that was being written.
        path: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A table is malformed.
    #[error("{file}: line {line}: {problem}: restore the file")]
    Table {
        /// The file.
        file: &'static str,
        /// The line, from 1.
        line: usize,
        /// The fault.
        problem: &'static str,
    },
}

/// `path` for a message: a control character in a file name must not break the line.
pub(super) fn shown(path: &Path) -> String {
    visible(&path.display().to_string()).into_owned()
}

/// A URL without the name and password that it may hold (`user:password@`).
pub(super) fn url_without_password(url: &str) -> String {
    let (scheme, rest) = url.split_at(url.find("://").map_or(0, |at| at + 3));
    // The last one: a password that was written down raw may hold others.
    format!("{scheme}{}", rest.rsplit_once('@').map_or(rest, |(_, host)| host))
}

/// A text without the names and passwords of the URLs in it.
#[cfg(any(feature = "download", test))]
pub(super) fn without_passwords(text: &str) -> String {
    let ends = |character: char| character.is_whitespace() || "\"'<>(),;".contains(character);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("://").map(|at| at + 3) {
        out += &rest[..start];
        rest = &rest[start..];
        let url = &rest[..rest.find(ends).unwrap_or(rest.len())];
        rest = &rest[url.rfind('@').map_or(0, |at| at + 1)..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_taken_out() {
        for (text, shown) in [
            ("https://host/a", "https://host/a"),
            ("https://me:secret@host:80/a", "https://host:80/a"),
            ("https://me@host", "https://host"),
            ("http://me:se/cr@et@host/a", "http://host/a"),
            (
                "no proxy http://me:secret@p: refused; \"https://me:secret@q/\"",
                "no proxy http://p: refused; \"https://q/\"",
            ),
            ("write to me@host", "write to me@host"),
        ] {
            assert_eq!(without_passwords(text), shown);
        }
        for url in ["https://me:secret@host/a", "https://me:s, (e);c@r e/t@host/a"] {
            assert_eq!(url_without_password(url), "https://host/a");
        }
        assert_eq!(url_without_password("me:secret@host"), "host");
    }

    #[test]
    fn a_hostile_file_name_stays_on_one_line() {
        assert_eq!(shown(Path::new("a\nb\u{1b}[31m")), "a\\nb\\x1b[31m");
    }
}
