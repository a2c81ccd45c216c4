//! Random numbers for searches and synthetic workloads.

/// SplitMix64 (Steele, Lea, Flood 2014): small, and the same in every language.
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `bound`, by multiplication instead of division.
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        // CAST: the upper half of the product is below `bound`.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u32
    }

    /// 512 · 2^k bytes with k uniform in 0..13, plus a uniform remainder below that.
    pub(super) fn size(&mut self) -> u32 {
        let size = 512 << self.below(13);
        size + self.below(size)
    }
}
