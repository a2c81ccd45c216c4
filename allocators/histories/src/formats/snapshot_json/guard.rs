//! Bounds on what the parser of JSON can be made to keep or to wait for.

use crate::formats::input::Input;
use crate::steps;
use std::io::{Error, Read, Result};

/// Longest text in bytes; the parser keeps the one that it reads.
const LONGEST_TEXT: u32 = 1 << 18;
/// Longest stretch between two texts.
const LONGEST_STRETCH: u32 = 1 << 24;
/// Deepest nesting; the parser keeps a byte for each level that it passes over.
const DEEPEST: u32 = 128;

/// The bytes of an input, up to what no snapshot holds.
pub(super) struct Guarded<'r, 'i> {
    pub(super) input: &'r mut Input<'i>,
    /// Bytes since a text began or ended.
    run: u32,
    in_text: bool,
    escaped: bool,
    depth: u32,
    /// What ended the reading.
    pub(super) fault: Option<&'static str>,
}

impl<'r, 'i> Guarded<'r, 'i> {
    pub(super) fn new(input: &'r mut Input<'i>) -> Self {
        Self { input, run: 0, in_text: false, escaped: false, depth: 0, fault: None }
    }

    #[inline]
    fn look(&mut self, byte: u8) {
        self.run += 1;
        if self.in_text {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => (self.in_text, self.run) = (false, 0),
                _ => {}
            }
        } else {
            match byte {
                b'"' => (self.in_text, self.run) = (true, 0),
                b'[' | b'{' => self.depth += 1,
                b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        if self.run > if self.in_text { LONGEST_TEXT } else { LONGEST_STRETCH } {
            self.fault = Some("a text, or a stretch between two texts, is longer than any snapshot's");
        } else if self.depth > DEEPEST {
            self.fault = Some("its lists and dictionaries are nested deeper than any snapshot's");
        }
    }
}

impl Read for Guarded<'_, '_> {
    #[inline]
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        // The parser asks for one byte at a time.
        let count = match (&mut *out, self.input.buffered().first()) {
            ([slot], Some(byte)) => {
                *slot = *byte;
                self.input.advance(1);
                1
            }
            _ => self.input.read(out)?,
        };
        steps::count(count);
        out[..count].iter().for_each(|byte| self.look(*byte));
        match self.fault {
            Some(fault) => Err(Error::other(fault)),
            None => Ok(count),
        }
    }
}
