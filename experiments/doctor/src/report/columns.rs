//! How numbers get into the page: columns of differences in few bytes, deflated, as base64.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::ZlibEncoder;
use std::io::Write;

/// Columns of whole numbers, which `data.js` reads back in the same order.
///
/// A column is its length and then, for each number, the difference to the one before it: seven bits a byte, lowest first,
/// the sign in the lowest bit.
#[derive(Debug, Default)]
pub(super) struct Columns(Vec<u8>);

impl Columns {
    /// Adds a column. Numbers are below 2^53, as the page's script keeps them exactly.
    pub(super) fn push(&mut self, numbers: impl ExactSizeIterator<Item = u64>) {
        // CAST: a number of rows.
        self.varint(numbers.len() as u64);
        let mut last = 0;
        for number in numbers {
            let number = number.min((1 << 53) - 1).cast_signed();
            let step = number - last;
            self.varint((step << 1 ^ step >> 63).cast_unsigned());
            last = number;
        }
    }

    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            // CAST: the lowest seven bits.
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        // CAST: below 128.
        self.0.push(number as u8);
    }

    /// The columns as text.
    ///
    /// # Errors
    /// Those of compression, which has none into memory.
    pub(super) fn text(&self) -> std::io::Result<String> {
        let mut packed = ZlibEncoder::new(Vec::new(), Compression::new(6));
        packed.write_all(&self.0)?;
        Ok(STANDARD.encode(packed.finish()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_its_length_and_differences() {
        let mut columns = Columns::default();
        columns.push([3, 1, 200].into_iter());
        columns.push(std::iter::empty());
        // 3 numbers: +3, -2, +199 (398 in two groups of seven bits); then none.
        assert_eq!(columns.0, [3, 6, 3, 0x8E, 3, 0]);
        assert!(columns.text().unwrap().len() > 4);
    }
}
