//! Data sets: MNIST from IDX files, Fisher's iris, and generated digits.
//!
//! [`load`] is the entry point. Whatever it returns says where the data came from and carries SHA-256 sums of it, so
//! that a run record can name exactly what was trained on. Everything that is read is treated as hostile: sizes are
//! bounded before memory is taken, and a bad file is one [`DataError`] with one line of text.
//!
//! Four environment variables are read, all of them by [`Sources::from_environment`] and nowhere else:
//!
//! | variable | meaning |
//! |---|---|
//! | `MNIST_DIR` | a directory with the four MNIST files; when set, the cache and the network are not used |
//! | `MNIST_MIRROR` | base URLs, comma separated, to download from in place of the built-in ones |
//! | `VRAMLAB_CACHE` | the cache directory (MNIST lies in its `mnist` folder) in place of `vramlab` in the user's own |
//! | `XDG_CACHE_HOME` | the user's cache directory, as everywhere |

mod digits;
#[cfg(feature = "download")]
mod download;
mod error;
mod idx;
mod iris;
mod locate;
mod mnist;

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::PathBuf;

use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use flate2::bufread::MultiGzDecoder;
use ring::digest::{Context, SHA256};
use serde::Serialize;

pub use error::DataError;
pub use idx::{Idx, IdxKind, IdxLimits, parse_idx};
pub use locate::{Candidate, Download, MnistLocation, Origin, Sources, StandardFile, locate_mnist, locate_mnist_with};

/// Data set to train on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DatasetName {
    /// MNIST if it can be had, else the generated digits.
    #[default]
    Auto,
    /// Handwritten digits, 28×28, 60,000 + 10,000: from a directory, the cache, or the network.
    Mnist,
    /// Fisher's 150 irises, built in.
    Iris,
    /// Generated digits, 28×28, 8,000 + 2,000: the same for the same seed.
    Digits,
}

impl fmt::Display for DatasetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&terminal::arguments::name(*self))
    }
}

/// Request to [`load`].
#[derive(Debug, Clone, Default)]
pub struct DataRequest {
    /// The data set.
    pub name: DatasetName,
    /// Directory of MNIST; if given, no other directory is searched.
    pub data_dir: Option<PathBuf>,
    /// Decides the generated digits, and how iris is split.
    pub seed: u64,
    /// Never touch the network.
    pub offline: bool,
}

/// A file that was read or written, with the hash of its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileChecksum {
    /// Path of the file, or its name if it is built in.
    pub path: String,
    /// SHA-256 of the uncompressed contents, in lowercase hex.
    pub sha256: String,
}

/// A data set in memory, split for training and validation.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// `mnist`, `iris` or `digits`: never `auto`.
    pub name: DatasetName,
    /// Human-readable source of the data.
    pub source: String,
    /// One sentence that a person must see, such as why `auto` did not take MNIST.
    pub notice: Option<String>,
    /// The files that were read; empty for generated data.
    pub files: Vec<FileChecksum>,
    /// SHA-256, in lowercase hex, of the data in effect. For MNIST it is taken over the four files' own digests (train
    /// images, train labels, test images, test labels), otherwise over features and labels of the two splits.
    pub checksum: String,
    /// Values in a row.
    pub features: usize,
    /// Labels are below this.
    pub classes: usize,
    /// The rows to train on.
    pub train: Split,
    /// The rows to validate on.
    pub validation: Split,
}

/// One part of a data set: row `i` of `features` has the label `labels[i]`.
#[derive(Debug, Clone)]
pub struct Split {
    /// Number of rows.
    pub rows: usize,
    /// The rows' values.
    pub features: Features,
    /// The rows' classes.
    pub labels: Vec<u8>,
}

/// The values of a split, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum Features {
    /// Bytes, as images come; a value is `byte * scale + shift`. A quarter of the memory of `F32`.
    U8 {
        /// Row after row.
        bytes: Vec<u8>,
        /// The factor that a byte is multiplied by.
        scale: f32,
        /// The offset that is added to the scaled byte.
        shift: f32,
    },
    /// The values themselves.
    F32(Vec<f32>),
}

impl Features {
    /// For reading rows.
    pub fn rows(&self) -> Rows<'_> {
        let mut values = [0.0; 256];
        if let Self::U8 { scale, shift, .. } = self {
            for (value, byte) in values.iter_mut().zip(0u8..=255) {
                // Rounded once, as the kernel that gathers rows on the device does: every loader gives the same bits.
                *value = f32::from(byte).mul_add(*scale, *shift);
            }
        }
        Rows { features: self, values }
    }
}

/// Rows of features on the host. What each byte stands for is worked out once: without an instruction for it, which a
/// program for any x86-64 processor may not assume, a multiply and add with one rounding is a call of a function.
#[derive(Debug)]
pub struct Rows<'a> {
    features: &'a Features,
    /// By byte.
    values: [f32; 256],
}

impl Rows<'_> {
    /// Writes row `row` to `out`, whose length is the row's length.
    ///
    /// # Panics
    /// If the row is not there.
    pub fn copy(&self, row: usize, out: &mut [f32]) {
        let range = row * out.len()..(row + 1) * out.len();
        match self.features {
            Features::U8 { bytes, .. } => {
                for (value, &byte) in out.iter_mut().zip(&bytes[range]) {
                    *value = self.values[usize::from(byte)];
                }
            }
            Features::F32(values) => out.copy_from_slice(&values[range]),
        }
    }
}

/// Is notified of a download's progress; every method is optional. The command line shows a bar.
pub trait Progress {
    /// The download of `what` begins; its size, if it is known.
    fn download_begin(&self, _what: &str, _total_bytes: Option<u64>) {}
    /// This many more bytes have arrived.
    fn download_advance(&self, _bytes: u64) {}
    /// The download that [`download_begin`](Self::download_begin) announced has ended, well or badly.
    fn download_finish(&self) {}
}

/// Loads the data set that `request` asks for, downloading MNIST if that is wanted, allowed and needed.
///
/// # Errors
/// [`DataError`] if the data is missing or broken. Under [`DatasetName::Auto`] only what the user pointed at
/// (`--data-dir`, `MNIST_DIR`) can fail; anything else falls back to the generated digits, and [`Dataset::notice`]
/// says why.
pub fn load(request: &DataRequest, progress: &dyn Progress) -> Result<Dataset, DataError> {
    load_with(request, &Sources::from_environment(), progress)
}

/// [`load`] with the places to look in given, not taken from the environment.
///
/// # Errors
/// As [`load`].
pub fn load_with(request: &DataRequest, sources: &Sources, progress: &dyn Progress) -> Result<Dataset, DataError> {
    let unused_dir = |mut dataset: Dataset| {
        if request.data_dir.is_some() {
            dataset.notice = Some(format!("--data-dir is for MNIST and was not used: {} needs no files", dataset.name));
        }
        dataset
    };
    match request.name {
        DatasetName::Iris => iris::load(request.seed).map(unused_dir),
        DatasetName::Digits => Ok(unused_dir(digits::generate(request.seed))),
        DatasetName::Mnist => mnist::load(request, sources, progress),
        DatasetName::Auto => match mnist::load(request, sources, progress) {
            // Data that the user named is used or refused, never replaced.
            Err(error) if !sources.user_points_at_mnist(request) => {
                let mut digits = digits::generate(request.seed);
                digits.notice = Some(match error {
                    DataError::Download { brief, .. } => format!(
                        "generated digits stand in for MNIST, which could not be downloaded ({brief}); --data-dir takes \
                         its files"
                    ),
                    error => format!("generated digits stand in for MNIST, so accuracies are not MNIST's: {error}"),
                });
                Ok(digits)
            }
            outcome => outcome,
        },
    }
}

/// A generator for `seed` and one `purpose`. The key is laid out here, not left to a library's seeding, because the
/// data must stay the same from one library version to the next.
fn seeded(seed: u64, purpose: &[u8; 8]) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(purpose);
    ChaCha8Rng::from_seed(key)
}

/// Puts `items` in a random order (Fisher and Yates). Its own for the reason that [`seeded`] is.
fn shuffle<T>(items: &mut [T], rng: &mut ChaCha8Rng) {
    for last in (1..items.len()).rev() {
        let pick = (u128::from(rng.next_u64()) * (last as u128 + 1)) >> 64;
        items.swap(last, pick as usize);
    }
}

/// SHA-256 over two splits, in the form that [`Dataset::checksum`] describes.
fn checksum_of(splits: [&Split; 2]) -> String {
    let mut hash = Context::new(&SHA256);
    for split in splits {
        match &split.features {
            Features::U8 { bytes, .. } => hash.update(bytes),
            Features::F32(values) => values.iter().for_each(|value| hash.update(&value.to_le_bytes())),
        }
        hash.update(&split.labels);
    }
    hex(hash.finish().as_ref())
}

/// Hashes what is read or written through it, while that is still in the processor's cache.
pub(crate) struct Hashed<T> {
    pub(crate) inner: T,
    pub(crate) hash: Context,
}

impl<T> Hashed<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self { inner, hash: Context::new(&SHA256) }
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(&buffer[..read]);
        Ok(read)
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Lowercase hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The contents of `file`, decompressed if they are compressed. What it is called does not matter: browsers unpack
/// files and keep the `.gz`.
fn unpacked(file: File) -> io::Result<Box<dyn Read + Send>> {
    let mut file = BufReader::with_capacity(256 << 10, file);
    let start = io::BufRead::fill_buf(&mut file)?;
    Ok(if start.starts_with(&[0x1f, 0x8b]) { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_scaled() {
        let features = Features::U8 { bytes: vec![0, 255, 51, 102], scale: 1.0 / 255.0, shift: -1.0 };
        let mut row = [0.0; 2];
        features.rows().copy(1, &mut row);
        assert!((row[0] + 0.8).abs() < 1e-6 && (row[1] + 0.6).abs() < 1e-6);
    }

    #[test]
    fn shuffling_keeps_every_item() {
        let mut items: Vec<u32> = (0..100).collect();
        shuffle(&mut items, &mut seeded(1, b"test    "));
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn names_are_the_same_everywhere() {
        use clap::ValueEnum;
        for name in DatasetName::value_variants() {
            let shown = name.to_string();
            assert_eq!(name.to_possible_value().map(|value| value.get_name().to_owned()), Some(shown.clone()));
            assert_eq!(serde_json::to_string(name).unwrap(), format!("\"{shown}\""));
        }
    }

    #[test]
    fn hex_is_lowercase() {
        assert_eq!(hex(&[0x00, 0xaf, 0x19]), "00af19");
    }
}
