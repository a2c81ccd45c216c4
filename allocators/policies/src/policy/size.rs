//! Part `size`: how a request is rounded, which pool serves it, and the size of its segment.
#![forbid(unsafe_code)]

mod divisions;
pub mod torch;

use crate::contract::PoolKind;
use std::fmt;

/// Policies without segment sizes of their own round them to this: a page of the device.
const PAGE: u64 = 2 << 20;

/// A rule for sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// PyTorch: multiples of 512 bytes, or steps between powers of two; a small and a large pool. See [`torch`].
    Torch(torch::Divisions),
    /// PyTorch's sizes of blocks and of segments, in one pool: small blocks may be between large ones.
    TorchOnePool(torch::Divisions),
    /// Multiples of this number of bytes, which is a multiple of 256; one pool. RMM and TensorFlow's BFC take 256, CuPy 512.
    Multiple(u64),
    /// Powers of two from 512 bytes on, one pool: blocks of one size class are equal, with up to half of each wasted.
    PowerOfTwo,
    /// Another rule, with one pool.
    Custom(&'static dyn SizeRule),
}

/// A rule for sizes of another crate: [`Size::Custom`].
pub trait SizeRule: fmt::Debug + Sync {
    /// Every block size is a multiple of this number of bytes, which is a multiple of 256.
    fn granule(&self) -> u64;

    /// The block size for a request of `bytes`, at most 2^62: not less, and a multiple of the granule.
    fn round(&self, bytes: u64) -> u64;

    /// The segment size for a rounded size: not less.
    fn segment(&self, rounded: u64) -> u64 {
        rounded.next_multiple_of(PAGE)
    }
}

impl PartialEq for dyn SizeRule {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self, other)
    }
}

impl Eq for dyn SizeRule {}

impl Size {
    /// Every block size is a multiple of this number of bytes.
    #[must_use]
    pub fn granule(&self) -> u64 {
        match self {
            Self::Torch(_) | Self::TorchOnePool(_) | Self::PowerOfTwo => torch::MIN_BLOCK,
            Self::Multiple(bytes) => *bytes,
            Self::Custom(rule) => rule.granule(),
        }
    }

    /// The block size for a request of `bytes`, at most 2^62.
    #[must_use]
    pub fn round(&self, bytes: u64) -> u64 {
        match self {
            Self::Torch(divisions) | Self::TorchOnePool(divisions) => torch::round_size(bytes, divisions),
            Self::Multiple(_) => bytes.next_multiple_of(self.granule()),
            Self::PowerOfTwo => bytes.next_power_of_two().max(self.granule()),
            Self::Custom(rule) => rule.round(bytes),
        }
    }

    /// The pool that serves a rounded size; `None` where there is only one pool.
    #[must_use]
    pub fn pool(&self, rounded: u64) -> Option<PoolKind> {
        matches!(self, Self::Torch(_)).then(|| torch::pool_of(rounded))
    }

    /// The pool for a segment that another allocator had in `pool`.
    #[must_use]
    pub(crate) fn pool_of_segment(&self, pool: Option<PoolKind>) -> Option<PoolKind> {
        matches!(self, Self::Torch(_)).then(|| pool.unwrap_or(PoolKind::Large))
    }

    /// The segment size for a rounded size.
    #[must_use]
    pub fn segment(&self, rounded: u64) -> u64 {
        match self {
            Self::Torch(_) | Self::TorchOnePool(_) => torch::segment_size(rounded),
            Self::Custom(rule) => rule.segment(rounded),
            _ => rounded.next_multiple_of(PAGE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Size; 3] = [Size::Torch(torch::Divisions([0; 16])), Size::Multiple(256), Size::PowerOfTwo];

    #[test]
    fn sizes_grow_with_the_request_and_are_whole_granules() {
        for size in ALL {
            let mut last = 0;
            for bytes in (1..70_000).chain([1 << 20, (1 << 20) + 1, 10 << 20, (1 << 40) - 1, 1 << 62]) {
                let rounded = size.round(bytes);
                assert!(rounded >= bytes.max(last) && rounded.is_multiple_of(size.granule()), "{size:?} {bytes}");
                assert_eq!(size.round(rounded), rounded, "{size:?} {bytes}");
                assert!(size.segment(rounded) >= rounded, "{size:?} {bytes}");
                last = rounded;
            }
        }
    }

    #[test]
    fn each_rule_rounds_as_its_original() {
        let round = |bytes| ALL.map(|size| size.round(bytes));
        assert_eq!(round(1), [512, 256, 512]);
        assert_eq!(round(600), [1024, 768, 1024]);
        assert_eq!(round((1 << 20) + 1), [(1 << 20) + 512, (1 << 20) + 256, 2 << 20]);
        assert_eq!(ALL.map(|size| size.pool(512)), [Some(PoolKind::Small), None, None]);
        assert_eq!(ALL.map(|size| size.segment(3 << 20)), [20 << 20, 4 << 20, 4 << 20]);
    }
}
