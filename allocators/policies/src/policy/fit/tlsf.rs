//! Two-level segregated fit: lists of free blocks by size class. The original finds the first class that has a block in bitmaps;
//! here an ordered map finds it.
//!
//! A class is a power of two, divided into 32 equal parts. A search rounds the size up to the next part, so that any block of the
//! class fits, and takes the block that became free last. It may miss a block of exactly the requested size.
//!
//! Sizes are in units, and the lists are separate from the memory: a device's memory contains no headers.
//! Source: M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", 2004;
//! <https://github.com/mattconte/tlsf> `mapping_insert`, `mapping_search`, `search_suitable_block`.

use super::FreeBlocks;
use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::BTreeMap;

/// Bytes of a unit. Block sizes are multiples of it, and the smallest block is one unit.
pub const UNIT: u64 = 512;

/// Parts of a power of two.
const PARTS: u32 = 32;

/// The class of a size in units: the power of two and its part. Below 32 units each size is a part of the first.
fn class(units: u64) -> (u32, u32) {
    if units < u64::from(PARTS) {
        // CAST: below 32.
        return (0, units as u32);
    }
    let log2 = units.ilog2();
    let shift = log2 - PARTS.ilog2();
    // CAST: below 32, because the highest bit is cleared.
    (shift + 1, (units >> shift) as u32 ^ PARTS)
}

/// The first class from which on every block has at least this number of units.
fn class_above(units: u64) -> (u32, u32) {
    if units < u64::from(PARTS) {
        return class(units);
    }
    class(units.saturating_add((1 << (units.ilog2() - PARTS.ilog2())) - 1))
}

/// Units of the smallest block of a class.
fn smallest((power, part): (u32, u32)) -> u64 {
    match power {
        0 => u64::from(part),
        _ => u64::from(PARTS + part) << (power - 1),
    }
}

/// The free blocks.
#[derive(Debug, Default)]
pub(super) struct Tlsf {
    /// By list and class, then by number.
    classes: BTreeMap<(FreeList, (u32, u32)), BTreeMap<u64, FreeBlock>>,
    /// Number of insertions: the block with the highest number of a class became free last.
    inserted: u64,
    /// The number of each block.
    numbers: BTreeMap<BlockId, u64>,
}

/// Above every class.
const ABOVE: (u32, u32) = (u32::MAX, 0);

impl FreeBlocks for Tlsf {
    fn insert(&mut self, block: FreeBlock) {
        self.inserted += 1;
        self.numbers.insert(block.id, self.inserted);
        let class = (block.list, class(block.bytes / UNIT));
        self.classes.entry(class).or_default().insert(self.inserted, block);
    }

    fn remove(&mut self, block: FreeBlock) -> bool {
        let class = (block.list, class(block.bytes / UNIT));
        let (Some(number), Some(blocks)) = (self.numbers.remove(&block.id), self.classes.get_mut(&class)) else {
            return false;
        };
        let known = blocks.remove(&number) == Some(block);
        if blocks.is_empty() {
            self.classes.remove(&class);
        }
        known
    }

    /// The block that became free last, in the lowest class in which all are large enough. Where one may be larger than `largest`,
    /// the next.
    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let from = class_above(bytes.div_ceil(UNIT));
        let mut last_first =
            self.classes.range((list, from)..(list, ABOVE)).flat_map(|(_, blocks)| blocks.values().rev());
        last_first.find(|block| block.bytes <= largest).map(|block| block.id)
    }

    /// The smallest block of the class where the search begins.
    fn surely_found(&self, bytes: u64) -> u64 {
        smallest(class_above(bytes.div_ceil(UNIT))).saturating_mul(UNIT)
    }

    fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        self.classes.range((list, (0, 0))..(list, ABOVE)).flat_map(|(_, blocks)| blocks.values()).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_parts_of_powers_of_two() {
        assert_eq!([0, 1, 31, 32, 33, 63].map(class), [(0, 0), (0, 1), (0, 31), (1, 0), (1, 1), (1, 31)]);
        assert_eq!([64, 65, 66, 127, 128].map(class), [(2, 0), (2, 0), (2, 1), (2, 31), (3, 0)]);
        // 2^40 bytes and more, which 32 bits of units do not hold.
        assert_eq!([1 << 31, (1 << 31) + (1 << 26), u64::MAX].map(class), [(27, 0), (27, 1), (59, 31)]);
    }

    #[test]
    fn a_search_begins_where_every_block_fits() {
        assert_eq!(
            [31, 32, 63, 64, 65, 66, 67].map(class_above),
            [(0, 31), (1, 0), (1, 31), (2, 0), (2, 1), (2, 1), (2, 2)]
        );
        for units in (1..5000).chain([(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 40]) {
            let (own, from) = (class(units), class_above(units));
            assert!(from >= own, "{units}");
            // The smallest block of the class fits, and the largest one of the class before may not.
            assert!(smallest(from) >= units && class(smallest(from)) == from, "{units}");
        }
    }
}
