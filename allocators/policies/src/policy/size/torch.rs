//! PyTorch's rounding rules (`CUDACachingAllocator`: `round_size`, `get_allocation_size`).

use crate::contract::PoolKind;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// Every block is a multiple of this.
pub const MIN_BLOCK: u64 = 512;
/// Requests of at most this much (after rounding) come from the small pool.
pub const SMALL_MAX: u64 = 1 << 20;
/// Segments of the small pool.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// Large requests below this share segments of `LARGE_SEGMENT`.
pub const LARGE_MIN: u64 = 10 << 20;
/// Segments for large requests below `LARGE_MIN`.
pub const LARGE_SEGMENT: u64 = 20 << 20;
/// Larger requests get segments rounded up to this.
pub const LARGE_ROUND: u64 = 2 << 20;

/// Number of size intervals that `roundup_power2_divisions` tells apart: up to 2 MiB, 4 MiB, ... 64 GiB and above.
pub const DIVISION_INTERVALS: usize = 16;
const FIRST_INTERVAL_LOG2: u32 = 20;

/// Power-of-two divisions by size interval; 0 or 1 means plain rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Divisions(pub [u64; DIVISION_INTERVALS]);

impl Divisions {
    /// One number of divisions for every size.
    #[must_use]
    pub fn uniform(divisions: u64) -> Self {
        Self([divisions; DIVISION_INTERVALS])
    }

    fn at(&self, bytes: u64) -> u64 {
        let interval = bytes.ilog2().saturating_sub(FIRST_INTERVAL_LOG2) as usize;
        self.0[interval.min(DIVISION_INTERVALS - 1)]
    }
}

/// The size of the block for a request.
#[must_use]
pub fn round_size(bytes: u64, divisions: &Divisions) -> u64 {
    if bytes < MIN_BLOCK {
        return MIN_BLOCK;
    }
    let parts = divisions.at(bytes);
    if parts > 1 && bytes > MIN_BLOCK * parts {
        round_to_division(bytes, parts)
    } else {
        bytes.next_multiple_of(MIN_BLOCK)
    }
}

/// Rounds up to one of `parts` (a power of two) equal steps between powers of two.
fn round_to_division(bytes: u64, parts: u64) -> u64 {
    let floor = 1 << bytes.ilog2();
    let step: u64 = floor >> parts.ilog2();
    if step == 0 { if bytes == floor { bytes } else { floor << 1 } } else { bytes.next_multiple_of(step) }
}

/// The pool of a rounded size.
#[must_use]
pub fn pool_of(rounded: u64) -> PoolKind {
    if rounded <= SMALL_MAX { PoolKind::Small } else { PoolKind::Large }
}

/// The size of the segment that is taken from the device for a rounded size.
#[must_use]
pub fn segment_size(rounded: u64) -> u64 {
    if rounded <= SMALL_MAX {
        SMALL_SEGMENT
    } else if rounded < LARGE_MIN {
        LARGE_SEGMENT
    } else {
        rounded.next_multiple_of(LARGE_ROUND)
    }
}

// How `roundup_power2_divisions` is written: one number for every size, or a list by size in MiB as PyTorch's.

/// Most divisions between two powers of two.
const MOST: u64 = 1 << 20;

impl Divisions {
    /// What the text looks like.
    pub(crate) const FORM: &'static str =
        "off, a power of two, or powers of two by size in MiB, such as [1:4,64:8,>:16]";
}

/// The text is none of the forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write {}", Divisions::FORM)]
pub struct ParseDivisionsError;

fn power(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|number: &u64| number.is_power_of_two())
}

fn divisions(text: &str) -> Option<u64> {
    if text.trim() == "0" { Some(0) } else { power(text).filter(|number| *number <= MOST) }
}

/// As PyTorch reads it: the first size stands for all smaller ones too, `>` for all larger than the last, and what is left
/// out between has plain rounding.
fn by_size(list: &str) -> Option<Divisions> {
    let (mut out, mut last) = (Divisions::default(), None);
    for part in list.split(',') {
        let (size, number) = part.split_once(':')?;
        let number = divisions(number)?;
        if size.trim() == ">" {
            out.0[last? + 1..].fill(number);
            last = Some(DIVISION_INTERVALS - 1);
            continue;
        }
        let at = (power(size)?.ilog2() as usize).min(DIVISION_INTERVALS - 1);
        match last {
            None => out.0[..=at].fill(number),
            Some(last) if last < at => out.0[at] = number,
            Some(_) => return None,
        }
        last = Some(at);
    }
    Some(out)
}

impl FromStr for Divisions {
    type Err = ParseDivisionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let list = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let read = match list {
            Some(list) => by_size(list),
            None if text == "off" => Some(Self::default()),
            None => divisions(text).map(Self::uniform),
        };
        read.ok_or(ParseDivisionsError)
    }
}

impl fmt::Display for Divisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = &self.0;
        let (first, last) = (counts[0], counts[DIVISION_INTERVALS - 1]);
        if counts.iter().all(|count| *count == first) {
            return if first == 0 { f.write_str("off") } else { write!(f, "{first}") };
        }
        // One entry for the equal ones at the start, one for those at the end, one for each between that is not plain.
        let head = counts.iter().take_while(|count| **count == first).count();
        let tail = DIVISION_INTERVALS - counts.iter().rev().take_while(|count| **count == last).count();
        write!(f, "[{}:{first}", 1_u64 << (head - 1))?;
        let mut named = head - 1;
        for (at, count) in counts.iter().enumerate().take(tail).skip(head).filter(|(_, count)| **count != 0) {
            write!(f, ",{}:{count}", 1_u64 << at)?;
            named = at;
        }
        if last != 0 {
            // `>` begins behind the last size that is named.
            if named + 1 < tail {
                write!(f, ",{}:{}", 1_u64 << (tail - 1), counts[tail - 1])?;
            }
            write!(f, ",>:{last}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn rounds_up_to_512() {
        for (bytes, rounded) in [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)] {
            assert_eq!(round_size(bytes, &Divisions::default()), rounded);
        }
    }

    #[test]
    fn divisions_follow_pytorchs_example() {
        // The documentation's example: 1200 with 4 divisions lies between 1024 and 2048, steps of 256.
        let four = Divisions::uniform(4);
        assert_eq!(round_to_division(1200, 4), 1280);
        // Not above 512 x 4, so the plain rule holds.
        assert_eq!(round_size(1200, &four), 1536);
        for (bytes, rounded) in [(2049, 2560), (2560, 2560), (5 * MIB + 1, 6 * MIB), (8 * MIB, 8 * MIB)] {
            assert_eq!(round_size(bytes, &four), rounded);
        }
    }

    #[test]
    fn divisions_may_differ_by_size() {
        let mut divisions = Divisions::default();
        divisions.0[1] = 2; // 2 MiB up to 4 MiB
        assert_eq!(round_size(2 * MIB + 1, &divisions), 3 * MIB);
        assert_eq!(round_size(4 * MIB + 1, &divisions), 4 * MIB + 512);
        assert_eq!(round_size(1 << 40, &Divisions::uniform(2)), 1 << 40);
    }

    #[test]
    fn segments_by_size() {
        let cases = [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (21 * MIB + 512, 22 * MIB),
        ];
        for (rounded, segment) in cases {
            assert_eq!(segment_size(rounded), segment);
        }
    }

    #[test]
    fn reads_what_pytorch_reads() {
        let list: Divisions = "[2:4,8:8,>:16]".parse().unwrap_or_default();
        assert_eq!(list.0[..6], [4, 4, 0, 8, 16, 16]);
        assert_eq!(list.0[15], 16);
        assert_eq!("4".parse(), Ok(Divisions::uniform(4)));
        assert_eq!("off".parse(), Ok(Divisions::default()));
        // Larger than the last interval: the last.
        assert_eq!("[1048576:2]".parse(), Ok(Divisions::uniform(2)));
        for text in ["", "3", "[", "[]", "[1:3]", "[3:4]", "[>:4]", "[4:2,2:2]", "[1:2,>:4,8:4]", "-1", "[1]"] {
            assert_eq!(text.parse::<Divisions>(), Err(ParseDivisionsError), "{text}");
        }
    }

    #[test]
    fn every_pattern_reads_back() {
        // Three values for the intervals: all patterns of the first eight, the rest as the last of them.
        for pattern in (0..3_u32.pow(8)).step_by(if cfg!(miri) { 97 } else { 1 }) {
            let mut out = Divisions::default();
            let mut rest = pattern;
            for at in 0..DIVISION_INTERVALS {
                if at < 8 {
                    out.0[at] = [0, 1, 8][(rest % 3) as usize];
                    rest /= 3;
                } else {
                    out.0[at] = out.0[7];
                }
            }
            assert_eq!(out.to_string().parse(), Ok(out), "{out}");
        }
    }
}
