//! Instructions that only push a value or enter one in the memo: most of a snapshot, run without a step of the machine for
//! each.

use super::machine::Machine;
use super::store::Value;
use crate::formats::{Place, ReadError};
use crate::steps;

/// The longest of these instructions: LONG1 with eight bytes.
const LONGEST: usize = 10;

impl Machine<'_, '_, '_> {
    /// Runs what comes next as long as it is such an instruction and lies in the buffer. Whatever is not as it should be is
    /// left to the machine, which says what is wrong, so both together do what the machine does alone.
    pub(super) fn run_ahead(&mut self) -> Result<(), ReadError> {
        let buffer = self.input.buffered();
        let floor = self.marks.last().copied().unwrap_or(0);
        let mut at = 0;
        while let Some(next) = buffer[at..].first_chunk::<LONGEST>() {
            let (value, length) = match *next {
                [b'h', index, ..] => (self.memo.get(u32::from(index)), 2),
                [b'j', a, b, c, d, ..] => (self.memo.get(u32::from_le_bytes([a, b, c, d])), 5),
                [b'K', value, ..] => (Some(Value::Int(i64::from(value))), 2),
                [b'M', a, b, ..] => (Some(Value::Int(i64::from(u16::from_le_bytes([a, b])))), 3),
                [b'J', a, b, c, d, ..] => (Some(Value::Int(i64::from(i32::from_le_bytes([a, b, c, d])))), 5),
                [0x8a, length @ 1..=8, a, b, c, d, e, f, g, h] => {
                    // What lies behind the number is shifted out, and its sign comes in.
                    let rest = 64 - 8 * u32::from(length);
                    let value = i64::from_le_bytes([a, b, c, d, e, f, g, h]) << rest >> rest;
                    (Some(Value::Int(value)), 2 + usize::from(length))
                }
                [0x94, ..] if self.stack.len() > floor => {
                    let grown = self.memo.add(self.stack[self.stack.len() - 1]);
                    // CAST: a place in the buffer.
                    let place = Place::Byte(self.input.offset() + at as u64);
                    grown.map_err(|over| ReadError::over(place, over))?;
                    at += 1;
                    steps::count(1);
                    continue;
                }
                _ => break,
            };
            let Some(value) = value.filter(|_| self.stack.len() < self.stack.capacity()) else { break };
            self.stack.push(value);
            at += length;
            steps::count(1);
        }
        self.input.advance(at);
        Ok(())
    }
}
