//! What can be wrong with data.

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
        /// What the system said.
        source: io::Error,
    },
    /// The first four bytes are not those of the file that was expected.
    #[error("{file}: offset 0: the magic number is {found} where {expected} was expected: {mend}")]
    Magic {
        /// The file.
        file: String,
        /// What was there.
        found: u32,
        /// What should have been there.
        expected: u32,
        /// What probably happened.
        mend: &'static str,
    },
    /// The header announces sizes that cannot be used.
    #[error("{file}: offset 4: {problem}: this is no data set that an MLP here can take, fetch the file afresh")]
    Shape {
        /// The file.
        file: String,
        /// What is wrong with the sizes.
        problem: String,
    },
    /// The file ends early.
    #[error("{file}: ends after {found} of {expected} bytes (uncompressed): it was cut short, fetch it afresh")]
    Truncated {
        /// The file.
        file: String,
        /// The bytes that its header announces, header included.
        expected: u64,
        /// The bytes that are there.
        found: u64,
    },
    /// The file goes on after its end.
    #[error(
        "{file}: offset {expected}: there are more bytes than the {expected} (uncompressed) that the header announces: fetch it afresh"
    )]
    Trailing {
        /// The file.
        file: String,
        /// The bytes that its header announces, header included.
        expected: u64,
    },
    /// The gzip stream is broken.
    #[error("{file}: broken gzip data after {found} uncompressed bytes ({problem}): fetch it afresh")]
    Gzip {
        /// The file.
        file: String,
        /// How far it could be read.
        found: u64,
        /// What the decompressor said.
        problem: String,
    },
    /// Images and labels are not equally many.
    #[error("{images} has {image_count} images but {labels} has {label_count} labels: take both from the same set")]
    CountMismatch {
        /// The file with the images.
        images: String,
        /// How many it has.
        image_count: usize,
        /// The file with the labels.
        labels: String,
        /// How many it has.
        label_count: usize,
    },
    /// The images for training and for validation differ in size.
    #[error("{train} has images of {train_shape} but {test} has images of {test_shape}: take both from the same set")]
    ShapeMismatch {
        /// The file with the training images.
        train: String,
        /// Their size, as `28x28`.
        train_shape: String,
        /// The file with the test images.
        test: String,
        /// Their size, as `28x28`.
        test_shape: String,
    },
    /// A label is not a digit.
    #[error(
        "{file}: offset {offset}: the label is {label}, but labels go from 0 to 9: the file is damaged or of another data set"
    )]
    Label {
        /// The file.
        file: String,
        /// Where, in uncompressed bytes from its start.
        offset: usize,
        /// What was there.
        label: u8,
    },
    /// A file that must be the standard one is not.
    #[error("{file}: the SHA-256 is {found} where {expected} was expected: {mend}")]
    Checksum {
        /// The file.
        file: String,
        /// The sum of the standard file.
        expected: String,
        /// The sum of this one.
        found: String,
        /// What to do about it.
        mend: String,
    },
    /// MNIST is not on this machine, and may not be downloaded.
    #[error("MNIST is not on this machine ({searched}) and was not downloaded because {reason}: {mend}")]
    Unavailable {
        /// Where it was looked for.
        searched: String,
        /// Why there was no download.
        reason: &'static str,
        /// What to do about it.
        mend: &'static str,
    },
    /// No mirror gave the file.
    #[error(
        "MNIST is not on this machine and {file} could not be downloaded ({problems}): check the network, or give the files with --data-dir"
    )]
    Download {
        /// The file's standard name.
        file: &'static str,
        /// What each mirror answered.
        problems: String,
        /// What they answered in few words, without their names.
        brief: String,
    },
    /// The cache cannot be written.
    #[error(
        "{path}: cannot write to the cache: {source}: mend that, or set VRAMLAB_CACHE to a directory that can be written"
    )]
    Cache {
        /// What was being written.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// A table is malformed.
    #[error("{file}: line {line}: {problem}: restore the file")]
    Table {
        /// The file.
        file: &'static str,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
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
