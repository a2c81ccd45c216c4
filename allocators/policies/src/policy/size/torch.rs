//! PyTorch's rounding rules (`CUDACachingAllocator`: `round_size`, `get_allocation_size`).

use crate::contract::PoolKind;
use serde::Serialize;

/// Every block size is a multiple of this.
pub const MIN_BLOCK: u64 = 512;
/// Requests of at most this size (after rounding) use the small pool.
pub const SMALL_MAX: u64 = 1 << 20;
/// Size of segments of the small pool.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// Large requests below this share segments of `LARGE_SEGMENT`.
pub const LARGE_MIN: u64 = 10 << 20;
/// Size of segments for large requests below `LARGE_MIN`.
pub const LARGE_SEGMENT: u64 = 20 << 20;
/// Segments for larger requests are rounded up to this.
pub const LARGE_ROUND: u64 = 2 << 20;

/// Number of size intervals of `roundup_power2_divisions`: up to 2 MiB, 4 MiB, ... 64 GiB and above.
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

/// The block size for a request.
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

/// The segment size for a rounded size.
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
        // The documentation's example: 1200 with 4 divisions is between 1024 and 2048, in steps of 256.
        let four = Divisions::uniform(4);
        assert_eq!(round_to_division(1200, 4), 1280);
        // Not above 512 x 4, so the plain rule applies.
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
}
