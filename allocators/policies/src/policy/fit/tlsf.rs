//! Two-level segregated fit: lists of free blocks by size class, of which the first that has a block is found in bitmaps.
//!
//! A class is a power of two, cut into 32 equal parts. A search rounds the size up to the next part, so that any block of a
//! class that it looks at fits, and takes the one that became free last. A block of exactly the wanted size may so be missed.
//!
//! Sizes are in units, and the lists are kept apart from the memory that they are of: a device's memory holds no headers.
//! Source: M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", 2004;
//! <https://github.com/mattconte/tlsf> `mapping_insert`, `mapping_search`, `search_suitable_block`.

use crate::space::{BlockId, FreeBlock, FreeList};
use std::collections::BTreeMap;

/// Bytes of a unit. Blocks are multiples of it, and the smallest is one.
pub const UNIT: u64 = 512;

/// Parts of a power of two.
const PARTS: u32 = 32;

/// The class of a size in units: the power of two and the part of it. Below 32 units each size is a part of the first.
pub fn class(units: u64) -> (u32, u32) {
    if units < u64::from(PARTS) {
        // CAST: below 32.
        return (0, units as u32);
    }
    let log2 = units.ilog2();
    let shift = log2 - PARTS.ilog2();
    // CAST: below 32, because the highest bit is taken off.
    (shift + 1, (units >> shift) as u32 ^ PARTS)
}

/// The class from which on every block has at least so many units.
pub fn class_above(units: u64) -> (u32, u32) {
    if units < u64::from(PARTS) {
        return class(units);
    }
    class(units.saturating_add((1 << (units.ilog2() - PARTS.ilog2())) - 1))
}

/// The free blocks of each list.
#[derive(Clone, Debug, Default)]
pub struct Tlsf {
    tables: BTreeMap<FreeList, Table>,
    /// Counts insertions: the block with the highest number of a class became free last.
    inserted: u64,
    /// The number of each block.
    numbers: BTreeMap<BlockId, u64>,
}

/// Classes of one list.
#[derive(Clone, Debug, Default)]
struct Table {
    /// Powers of two that have a block: 64 bits are enough for every size.
    powers: u64,
    /// By power of two, the parts that have one.
    parts: Vec<u32>,
    /// By class, the blocks by number: address and bytes.
    blocks: BTreeMap<(u32, u32), BTreeMap<u64, FreeBlock>>,
}

impl Table {
    fn mark(&mut self, (power, part): (u32, u32), filled: bool) {
        let at = power as usize;
        if self.parts.len() <= at {
            self.parts.resize(at + 1, 0);
        }
        let bit = 1 << part;
        self.parts[at] = if filled { self.parts[at] | bit } else { self.parts[at] & !bit };
        let bit = 1 << power;
        self.powers = if self.parts[at] != 0 { self.powers | bit } else { self.powers & !bit };
    }

    /// The first class from this one on that has a block.
    fn first(&self, (power, part): (u32, u32)) -> Option<(u32, u32)> {
        let here = self.parts.get(power as usize).map_or(0, |parts| parts & (u32::MAX << part));
        if here != 0 {
            return Some((power, here.trailing_zeros()));
        }
        let above = self.powers & u64::MAX.checked_shl(power + 1).unwrap_or(0);
        let power = (above != 0).then(|| above.trailing_zeros())?;
        Some((power, self.parts[power as usize].trailing_zeros()))
    }
}

impl Tlsf {
    pub(super) fn insert(&mut self, block: FreeBlock) {
        self.inserted += 1;
        self.numbers.insert(block.id, self.inserted);
        let (class, table) = (class(block.bytes / UNIT), self.tables.entry(block.list).or_default());
        table.blocks.entry(class).or_default().insert(self.inserted, block);
        table.mark(class, true);
    }

    /// False when it is not there.
    pub(super) fn remove(&mut self, block: FreeBlock) -> bool {
        let class = class(block.bytes / UNIT);
        let (Some(number), Some(table)) = (self.numbers.remove(&block.id), self.tables.get_mut(&block.list)) else {
            return false;
        };
        let Some(blocks) = table.blocks.get_mut(&class) else { return false };
        let known = blocks.remove(&number) == Some(block);
        if blocks.is_empty() {
            table.blocks.remove(&class);
            table.mark(class, false);
        }
        known
    }

    /// The block that became free last, in the lowest class in which all are large enough. Where one may be too large, the next.
    pub(super) fn find(&self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let table = self.tables.get(&list)?;
        let mut from = class_above(bytes.div_ceil(UNIT));
        loop {
            let class = table.first(from)?;
            let mut last_first = table.blocks.get(&class)?.values().rev();
            if let Some(block) = last_first.find(|block| block.bytes <= largest) {
                return Some(block.id);
            }
            from = if class.1 + 1 < PARTS { (class.0, class.1 + 1) } else { (class.0 + 1, 0) };
        }
    }

    /// The blocks of a list.
    pub(super) fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        self.tables
            .get(&list)
            .into_iter()
            .flat_map(|table| table.blocks.values().flat_map(BTreeMap::values))
            .copied()
            .collect()
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
            // The smallest of the class fits, and the largest of the one before may not.
            let smallest = |(power, part): (u32, u32)| match power {
                0 => u64::from(part),
                _ => u64::from(PARTS + part) << (power - 1),
            };
            assert!(smallest(from) >= units && class(smallest(from)) == from, "{units}");
        }
    }
}
