//! Logarithms of sizes, by which searches order blocks.

/// One doubling of the size, in a logarithm.
pub(super) const DOUBLING: u64 = 1 << 16;

/// The binary logarithm, with sixteen bits behind the point that are linear between powers of two. Integers only, so that it
/// is the same everywhere.
pub(super) fn log2(bytes: u64) -> u64 {
    let Some(power) = bytes.checked_ilog2() else { return 0 };
    let rest = bytes - (1 << power);
    // CAST: the quotient is below 2^16.
    u64::from(power) * DOUBLING + ((u128::from(rest) * u128::from(DOUBLING)) >> power) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logarithm_rises_with_the_size() {
        assert_eq!([0, 1, 2, 3, 1 << 40].map(log2), [0, 0, DOUBLING, DOUBLING * 3 / 2, 40 * DOUBLING]);
        assert!((1..5000u64).all(|units| log2(512 * units) < log2(512 * units + 512)));
    }
}
