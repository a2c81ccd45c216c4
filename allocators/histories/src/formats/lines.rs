//! Lines of a text, with limited length.

use super::error::{Place, ReadError};
use super::input::Input;
use crate::steps;

/// Longest accepted line, in bytes; lines of these formats are a thousand times shorter.
pub(super) const LONGEST_LINE: usize = 1 << 16;

/// Lines of an input, without line ends.
pub(super) struct Lines<'r, 'i> {
    input: &'r mut Input<'i>,
    /// Length of the last returned line.
    given: usize,
    number: u64,
    /// Bytes of blank lines since the last other line.
    blank: u64,
}

/// Maximum bytes of consecutive blank lines; more are taken for an endless input.
const MOST_BLANK: u64 = 1 << 24;

impl<'r, 'i> Lines<'r, 'i> {
    pub(super) fn new(input: &'r mut Input<'i>) -> Self {
        Self { input, given: 0, number: 0, blank: 0 }
    }

    /// The next line that is not blank; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<&str>, ReadError> {
        loop {
            self.input.advance(self.given);
            self.given = 0;
            self.number += 1;
            let Some((length, given)) = self.find()? else { return Ok(None) };
            self.given = given;
            if self.input.buffered()[..length].iter().all(u8::is_ascii_whitespace) {
                // CAST: a length in the buffer.
                self.blank += given as u64;
                if self.blank > MOST_BLANK {
                    return Err(self.content("there are 16 MiB of blank lines; the file is damaged"));
                }
            } else {
                self.blank = 0;
                let place = self.place();
                let bytes = &self.input.buffered()[..length];
                let text = std::str::from_utf8(bytes)
                    .map_err(|_| ReadError::content(place, "the line is not UTF-8; save the file as plain text"))?;
                return Ok(Some(text.trim_end_matches('\r')));
            }
        }
    }

    /// Passes the event of each line to `take`; a line may have none.
    pub(super) fn each<T>(
        mut self,
        parse: impl Fn(&str) -> Result<Option<T>, String>,
        mut take: impl FnMut(T) -> Result<(), ReadError>,
    ) -> Result<(), ReadError> {
        while let Some(line) = self.next()? {
            let parsed = parse(line);
            if let Some(event) = parsed.map_err(|text| self.content(text))? {
                take(event)?;
            }
        }
        Ok(())
    }

    /// Length of the next line without and with its end.
    fn find(&mut self) -> Result<Option<(usize, usize)>, ReadError> {
        let mut searched = 0;
        loop {
            let bytes = self.input.buffered();
            steps::count(1);
            if let Some(length) = bytes[searched..].iter().position(|byte| *byte == b'\n') {
                let length = searched + length;
                if length <= LONGEST_LINE {
                    return Ok(Some((length, length + 1)));
                }
            }
            searched = bytes.len();
            if searched > LONGEST_LINE {
                return Err(ReadError::content(
                    self.place(),
                    format!("the line is longer than {LONGEST_LINE} bytes; the file is damaged"),
                ));
            }
            if !self.input.ensure(searched + 1)? {
                return Ok((searched > 0).then_some((searched, searched)));
            }
        }
    }

    /// Location of the last line.
    pub(super) fn place(&self) -> Place {
        Place::Line(self.number)
    }

    /// An error of the last line.
    pub(super) fn content(&self, text: impl Into<String>) -> ReadError {
        ReadError::content(self.place(), text)
    }
}

/// Positions of columns in a table with a header.
pub(super) fn columns<const N: usize>(header: &str, names: [&str; N]) -> Result<[usize; N], String> {
    let mut out = [0; N];
    for (slot, name) in out.iter_mut().zip(names) {
        let position = header.split(',').position(|column| column.trim() == name);
        *slot = position.ok_or_else(|| format!("the header has no column '{name}': found '{}'", clip(header)))?;
    }
    Ok(out)
}

/// The fields in these columns.
pub(super) fn fields<const N: usize>(line: &str, columns: [usize; N]) -> Option<[&str; N]> {
    let mut out = [None; N];
    for (at, field) in line.split(',').enumerate() {
        for (slot, column) in out.iter_mut().zip(columns) {
            if column == at {
                *slot = Some(field.trim());
            }
        }
    }
    out.iter().all(Option::is_some).then(|| out.map(Option::unwrap_or_default))
}

/// A text shortened for an error message.
pub(super) fn clip(text: &str) -> String {
    vramlab_device::input::excerpt(text, 60)
}
