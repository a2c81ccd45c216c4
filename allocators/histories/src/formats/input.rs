//! Bytes of a file, decompressed if necessary, through one buffer.

use super::error::{Place, Problem, ReadError};
use crate::steps;
use flate2::bufread::MultiGzDecoder;
use liblzma::bufread::XzDecoder;
use liblzma::stream::{CONCATENATED, Stream};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use vramlab_device::Bytes;
use vramlab_device::budget::{Budget, Claim};

/// Size of the buffer, the maximum for [`Input::ensure`].
const BUFFER: usize = 1 << 18;

/// Memory limit for xz, unless an eighth of the budget is more: twice the needs of `xz -9`.
const XZ_MEMORY: u64 = 128 << 20;

/// The byte order mark in UTF-8.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// A reader that knows its position.
pub(crate) struct Input<'a> {
    source: Box<dyn Read + 'a>,
    buffer: Vec<u8>,
    /// Next byte in the buffer.
    at: usize,
    /// End of the buffer's content.
    end: usize,
    /// Offset of the buffer's first byte.
    base: u64,
    /// Claim for decompressing xz.
    unpacking: Claim,
    /// The compressed data was truncated, which ends the input.
    broken: Option<std::io::Error>,
}

impl<'a> Input<'a> {
    /// Reads `source`, after a byte order mark if there is one, and decompresses gzip and xz.
    pub(crate) fn new(source: Box<dyn Read + 'a>, budget: &Budget) -> Result<Self, ReadError> {
        let mut unpacking = budget.claim();
        let io = |error| ReadError::at(Place::Whole, Problem::Io(error));
        let mut packed = BufReader::with_capacity(BUFFER, source);
        // The buffer is empty, so one call gets whatever the source returns; a pipe may return less.
        let mut start = packed.fill_buf().map_err(io)?.to_vec();
        if start.len() < 6 {
            packed.consume(start.len());
            (&mut packed).take(6).read_to_end(&mut start).map_err(io)?;
        } else {
            start.clear();
        }
        let magic = if start.is_empty() { packed.buffer() } else { &start[..] };
        let (gzip, xz) = (magic.starts_with(&[0x1f, 0x8b]), magic.starts_with(b"\xfd7zXZ\0"));
        let input = std::io::Cursor::new(start).chain(packed);
        let source: Box<dyn Read + 'a> = if gzip {
            Box::new(MultiGzDecoder::new(input))
        } else if xz {
            let memory = (budget.limit() / 8).max(XZ_MEMORY.min(budget.limit() / 4));
            // CAST: what exceeds the address space exceeds the budget of any machine.
            unpacking
                .add(usize::try_from(memory).unwrap_or(usize::MAX))
                .map_err(|over| ReadError::over(Place::Whole, over))?;
            let stream =
                Stream::new_stream_decoder(memory, CONCATENATED).map_err(|error| io(std::io::Error::other(error)))?;
            Box::new(XzDecoder::new_stream(input, stream))
        } else {
            Box::new(input)
        };
        let mut input = Self { source, buffer: vec![0; BUFFER], at: 0, end: 0, base: 0, unpacking, broken: None };
        // Editors on Windows write a byte order mark before text; no format has one.
        if input.ensure(MARK.len())? && input.buffered().starts_with(MARK) {
            input.advance(MARK.len());
        }
        Ok(input)
    }

    /// Fails if the compressed data was truncated, for formats whose content does not show that.
    pub(crate) fn check_whole(&mut self) -> Result<(), ReadError> {
        self.broken.take().map_or(Ok(()), |error| Err(self.failed(error)))
    }

    /// Offset of the next byte.
    pub(crate) fn offset(&self) -> u64 {
        // CAST: an index into the buffer.
        self.base + self.at as u64
    }

    /// Fills the buffer with `count` bytes, at most [`BUFFER`]; returns false if the source ends before.
    #[inline]
    pub(crate) fn ensure(&mut self, count: usize) -> Result<bool, ReadError> {
        if self.end - self.at >= count { Ok(true) } else { self.fill(count) }
    }

    #[cold]
    fn fill(&mut self, count: usize) -> Result<bool, ReadError> {
        // A source may return one byte at a time, so the content moves only near the buffer's end.
        if self.at == self.end || self.at + count > BUFFER || BUFFER - self.end < BUFFER / 4 {
            steps::count(self.end - self.at);
            self.buffer.copy_within(self.at..self.end, 0);
            // CAST: an index into the buffer.
            self.base += self.at as u64;
            self.end -= self.at;
            self.at = 0;
        }
        while self.end - self.at < count {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Ok(false),
                Ok(read) => self.end += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                    self.broken = Some(error);
                    return Ok(false);
                }
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(true)
    }

    fn failed(&self, error: std::io::Error) -> ReadError {
        // CAST: an index into the buffer.
        let place = Place::Byte(self.base + self.end as u64);
        let lzma = error.get_ref().and_then(|error| error.downcast_ref::<liblzma::stream::Error>());
        if lzma == Some(&liblzma::stream::Error::MemLimit) {
            let memory = Bytes(self.unpacking.bytes());
            return ReadError::content(
                place,
                format!(
                    "unpacking takes more than {memory}; unpack it first with xz -d, or allow more with --read-memory"
                ),
            );
        }
        ReadError::at(place, Problem::Io(error))
    }

    /// Content of the buffer.
    #[inline]
    pub(crate) fn buffered(&self) -> &[u8] {
        &self.buffer[self.at..self.end]
    }

    /// Skips bytes of the buffer.
    #[inline]
    pub(crate) fn advance(&mut self, count: usize) {
        debug_assert!(count <= self.end - self.at);
        self.at += count;
    }

    /// Skips bytes, possibly beyond the buffer; returns false if the source ends before.
    pub(crate) fn skip(&mut self, mut count: u64) -> Result<bool, ReadError> {
        loop {
            // CAST: a length of the buffer.
            let here = (self.end - self.at) as u64;
            if count <= here {
                // CAST: at most `here`.
                self.at += count as usize;
                return Ok(true);
            }
            count -= here;
            self.at = self.end;
            if !self.ensure(1)? {
                return Ok(false);
            }
        }
    }
}

impl Read for Input<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let from = self.fill_buf()?;
        let count = from.len().min(out.len());
        out[..count].copy_from_slice(&from[..count]);
        self.advance(count);
        Ok(count)
    }
}

impl BufRead for Input<'_> {
    fn fill_buf(&mut self) -> std::io::Result<&[u8]> {
        match self.ensure(1) {
            Ok(_) => Ok(self.buffered()),
            Err(ReadError { problem: Problem::Io(error), .. }) => Err(error),
            Err(error) => Err(std::io::Error::other(error)),
        }
    }

    fn consume(&mut self, count: usize) {
        self.advance(count);
    }
}
