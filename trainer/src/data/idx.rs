//! The IDX format: a big-endian magic number, the sizes, the bytes.
//!
//! ```text
//! images   0000_0803  count  rows  columns  count * rows * columns bytes
//! labels   0000_0801  count                 count bytes
//! ```
//!
//! The reader trusts nothing: it takes memory as the bytes arrive, never beyond what the header announced, and never
//! reads more than one byte past that. So a compressed file that unpacks without end costs no more than an honest one.

use std::io::{self, Read};

use super::error::DataError;

/// Bytes per read: few enough to stay in the cache for a reader that hashes them.
const STEP: usize = 256 << 10;
/// Limit of immediate allocation in bytes; beyond it, memory is allocated only as bytes arrive.
const TRUSTED: u64 = 64 << 20;

/// Contents of an IDX file. MNIST and its relatives use only these two kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdxKind {
    /// Three dimensions of bytes.
    Images,
    /// One dimension of bytes.
    Labels,
}

impl IdxKind {
    /// The first four bytes of such a file.
    pub fn magic(self) -> u32 {
        match self {
            Self::Images => 2051,
            Self::Labels => 2049,
        }
    }

    fn dimensions(self) -> usize {
        match self {
            Self::Images => 3,
            Self::Labels => 1,
        }
    }
}

/// Limits of [`parse_idx`].
#[derive(Debug, Clone, Copy)]
pub struct IdxLimits {
    /// Required contents of the file.
    pub kind: IdxKind,
    /// The most values that one item may have.
    pub max_features: u64,
    /// The most bytes that the file may have, uncompressed and without its header.
    pub max_bytes: u64,
}

impl IdxLimits {
    /// Limits for `kind`: 4,096 values an item and 1 GiB.
    pub fn new(kind: IdxKind) -> Self {
        Self { kind, max_features: 4096, max_bytes: 1 << 30 }
    }
}

/// A parsed IDX file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idx {
    /// The sizes, items first: three for images, one for labels.
    pub shape: Vec<usize>,
    /// The values, item after item.
    pub data: Vec<u8>,
}

impl Idx {
    /// Number of items.
    pub fn items(&self) -> usize {
        self.shape[0]
    }

    /// Number of values in an item.
    pub fn features(&self) -> usize {
        self.shape[1..].iter().product()
    }
}

/// Reads an IDX file from `bytes` to its end; `name` is what errors call it.
///
/// # Errors
/// [`DataError`] if the file is not what `limits` ask for, is shorter or longer than its header says, or cannot be
/// read. A reader that fails with [`io::ErrorKind::InvalidData`] or [`io::ErrorKind::InvalidInput`] is taken to be a
/// decompressor.
pub fn parse_idx(bytes: impl Read, name: &str, limits: &IdxLimits) -> Result<Idx, DataError> {
    let mut reader = Counted { inner: bytes, count: 0, cut: false, name };
    let dimensions = limits.kind.dimensions();
    let header_len = 4 + 4 * dimensions;
    let mut header = [0; 16];

    if reader.fill(&mut header[..4])? < 4 {
        return Err(reader.truncated(header_len as u64));
    }
    let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let magic = word(0);
    if magic != limits.kind.magic() {
        let (expected, mend) = (limits.kind.magic(), advice(limits.kind, magic));
        let problem = format!("offset 0: the magic number is {magic} where {expected} was expected: {mend}");
        return Err(unusable(name, problem));
    }
    if reader.fill(&mut header[4..header_len])? < header_len - 4 {
        return Err(reader.truncated(header_len as u64));
    }
    let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let shape: Vec<u64> = (0..dimensions).map(|dimension| u64::from(word(4 + 4 * dimension))).collect();

    let bad_shape = |problem: String| Err(shape_error(name, &problem));
    if let Some(zero) = shape.iter().position(|&size| size == 0) {
        return bad_shape(format!("the header announces 0 {}", ["items", "rows", "columns"][zero]));
    }
    // Two 32-bit sizes cannot overflow 64 bits; the third factor is bounded by then.
    let features: u64 = shape[1..].iter().product();
    if features > limits.max_features {
        return bad_shape(format!("an item has {features} values where at most {} are taken", limits.max_features));
    }
    let announced = shape[0] * features;
    if announced > limits.max_bytes {
        return bad_shape(format!(
            "the header announces {announced} bytes where at most {} are taken",
            limits.max_bytes
        ));
    }

    let total = header_len as u64 + announced;
    let data = reader.exactly(announced, total)?;
    if reader.fill(&mut [0])? > 0 {
        let problem = format!(
            "offset {total}: there are more bytes than the {total} (uncompressed) that the header announces: fetch it afresh"
        );
        return Err(unusable(name, problem));
    }
    if reader.cut {
        // All the bytes are there, but not the sum that vouches for them.
        return Err(gzip_error(name, total, "it ends before its checksum"));
    }
    Ok(Idx { shape: shape.into_iter().map(|size| size as usize).collect(), data })
}

fn unusable(file: &str, problem: String) -> DataError {
    DataError::Unusable { file: file.to_owned(), problem }
}

/// For sizes in a header that cannot be used.
fn shape_error(file: &str, problem: &str) -> DataError {
    let mend = "this is no data set that an MLP here can take, fetch the file afresh";
    unusable(file, format!("offset 4: {problem}: {mend}"))
}

/// For a broken stream, of which `found` bytes could be read.
fn gzip_error(file: &str, actual: u64, problem: &str) -> DataError {
    unusable(file, format!("broken gzip data after {actual} uncompressed bytes ({problem}): fetch it afresh"))
}

/// The likely cause of a wrong magic number.
fn advice(kind: IdxKind, actual: u32) -> &'static str {
    match (kind, actual) {
        (IdxKind::Images, 2049) => "is this the labels file? the names may be swapped",
        (IdxKind::Labels, 2051) => "is this the images file? the names may be swapped",
        (_, 0x0108_0000 | 0x0308_0000) => "its bytes are swapped, the numbers must be big-endian",
        (_, actual) if actual >> 16 == 0x1f8b => "it was compressed twice, unpack it once",
        (_, actual) if actual >> 24 == u32::from(b'<') => "it looks like a web page, fetch the file afresh",
        (_, actual) if actual >> 16 == 0x504b => "it is a zip archive, unpack it",
        _ => "it is no IDX file of bytes, fetch it afresh",
    }
}

/// A reader that knows how far it is, and turns failures into our errors.
struct Counted<'a, R> {
    inner: R,
    count: u64,
    /// True if the input of a decompressor was truncated.
    cut: bool,
    name: &'a str,
}

impl<R: Read> Counted<'_, R> {
    /// Reads until `buffer` is full or the end is reached, and returns the number of bytes read.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, DataError> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.inner.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(read) => {
                    filled += read;
                    self.count += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    self.cut = true;
                    break;
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput) => {
                    return Err(gzip_error(self.name, self.count, &terminal::visible(&error.to_string())));
                }
                Err(source) => {
                    return Err(DataError::Read { file: self.name.to_owned(), source });
                }
            }
        }
        Ok(filled)
    }

    /// Reads `announced` bytes; with the header that makes `total`.
    fn exactly(&mut self, announced: u64, total: u64) -> Result<Vec<u8>, DataError> {
        let no_memory = |name: &str| shape_error(name, &format!("there is no memory for {announced} bytes"));
        let mut data = Vec::new();
        data.try_reserve_exact(announced.min(TRUSTED) as usize).map_err(|_| no_memory(self.name))?;
        while (data.len() as u64) < announced {
            let start = data.len();
            let step = (announced - start as u64).min(STEP as u64) as usize;
            data.try_reserve(step).map_err(|_| no_memory(self.name))?;
            data.resize(start + step, 0);
            if self.fill(&mut data[start..])? < step {
                return Err(self.truncated(total));
            }
        }
        Ok(data)
    }

    fn truncated(&self, expected: u64) -> DataError {
        let actual = self.count;
        let problem =
            format!("ends after {actual} of {expected} bytes (uncompressed): it was cut short, fetch it afresh");
        unusable(self.name, problem)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labels(count: u32, data: &[u8]) -> Vec<u8> {
        [&2049u32.to_be_bytes()[..], &count.to_be_bytes(), data].concat()
    }

    fn images(shape: [u32; 3], data: &[u8]) -> Vec<u8> {
        let header = [2051, shape[0], shape[1], shape[2]].map(u32::to_be_bytes).concat();
        [&header[..], data].concat()
    }

    fn fault(bytes: &[u8], kind: IdxKind) -> String {
        parse_idx(bytes, "f", &IdxLimits::new(kind)).unwrap_err().to_string()
    }

    #[test]
    fn well_formed_files_are_read() {
        let idx =
            parse_idx(&images([2, 1, 3], &[1, 2, 3, 4, 5, 6])[..], "f", &IdxLimits::new(IdxKind::Images)).unwrap();
        assert_eq!((idx.items(), idx.features(), &idx.data[..]), (2, 3, &[1, 2, 3, 4, 5, 6][..]));
        let idx = parse_idx(&labels(2, &[7, 8])[..], "f", &IdxLimits::new(IdxKind::Labels)).unwrap();
        assert_eq!((idx.items(), idx.features(), &idx.data[..]), (2, 1, &[7, 8][..]));
    }

    #[test]
    fn each_fault_has_its_sentence() {
        let cases = [
            (fault(&[], IdxKind::Labels), "f: ends after 0 of 8 bytes"),
            (fault(&labels(3, &[1, 2]), IdxKind::Labels), "f: ends after 10 of 11 bytes"),
            (fault(&labels(1, &[1, 2]), IdxKind::Labels), "f: offset 9: there are more bytes than the 9"),
            (
                fault(&labels(1, &[1]), IdxKind::Images),
                "f: offset 0: the magic number is 2049 where 2051 was expected: is this the labels file?",
            ),
            (
                fault(&images([1, 1, 1], &[1]), IdxKind::Labels),
                "f: offset 0: the magic number is 2051 where 2049 was expected: is this the images file?",
            ),
            (fault(b"<html>", IdxKind::Images), "it looks like a web page"),
            (fault(b"PK\x03\x04", IdxKind::Images), "it is a zip archive"),
            (fault(&labels(0, &[]), IdxKind::Labels), "announces 0 items"),
            (fault(&images([1, 0, 1], &[]), IdxKind::Images), "announces 0 rows"),
            (fault(&images([1, 65, 64], &[]), IdxKind::Images), "an item has 4160 values where at most 4096 are taken"),
            (fault(&images([u32::MAX; 3], &[]), IdxKind::Images), "values where at most 4096 are taken"),
            (fault(&images([u32::MAX, 64, 64], &[]), IdxKind::Images), "bytes where at most 1073741824 are taken"),
        ];
        for (message, expected) in cases {
            assert!(message.contains(expected), "{message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn a_large_claim_takes_no_memory() {
        let huge = images([1 << 18, 64, 64], &[0; 100]);
        let idx = parse_idx(&huge[..], "f", &IdxLimits::new(IdxKind::Images));
        assert!(idx.unwrap_err().to_string().contains("ends after 116 of 1073741840 bytes"));
    }

    #[test]
    fn no_more_than_one_byte_is_read_beyond_the_end() {
        struct Endless(u64);
        impl Read for Endless {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                buffer.fill(0);
                self.0 += buffer.len() as u64;
                Ok(buffer.len())
            }
        }
        let mut endless = Endless(0);
        let header = labels(1000, &[]);
        let outcome = parse_idx(header.chain(&mut endless), "f", &IdxLimits::new(IdxKind::Labels));
        assert!(outcome.unwrap_err().to_string().contains("more bytes than the 1008"));
        assert_eq!(endless.0, 1001);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(magic in prop_oneof![Just(2049u32), Just(2051), any::<u32>()], rest in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = [&magic.to_be_bytes()[..], &rest].concat();
            for kind in [IdxKind::Images, IdxKind::Labels] {
                for cut in [bytes.len(), bytes.len() / 2] {
                    if let Ok(idx) = parse_idx(&bytes[..cut], "f", &IdxLimits::new(kind)) {
                        prop_assert_eq!(idx.items() * idx.features(), idx.data.len());
                    }
                }
            }
        }
    }
}
