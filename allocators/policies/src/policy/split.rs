//! Part `split`: whether a free block may serve a request, and whether what is left of it is cut off.
#![forbid(unsafe_code)]

use super::size::torch::{MIN_BLOCK, SMALL_MAX, pool_of};
use crate::contract::PoolKind;
use std::fmt;

/// A rule for splitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// PyTorch: a rest is kept from 512 bytes on in the small pool, above 1 MiB in the large one.
    Torch {
        /// Blocks of at least this many bytes are never split and serve only requests that are as large;
        /// `u64::MAX` for no bound.
        max_split: u64,
        /// How much larger than the request such a block may be.
        max_non_split_rounding: u64,
    },
    /// PyTorch with expandable segments: a rest is kept from 512 bytes on in both pools. The bounds are those of
    /// [`Torch`](Self::Torch), but a block that is too large is cut all the same when it serves because memory was asked for.
    TorchExpandable {
        /// Blocks of at least this many bytes serve only requests that are as large; `u64::MAX` for no bound.
        max_split: u64,
        /// How much larger than the request such a block may be.
        max_non_split_rounding: u64,
    },
    /// Every rest is kept (RMM's pool).
    Always,
    /// A rest is kept when it is as large as the request, or as a bound (BFC).
    Bfc {
        /// The bound.
        largest_rest: u64,
    },
    /// None is: a block serves as a whole, however large it is.
    Never,
    /// Another rule.
    Custom(&'static dyn SplitRule),
}

/// A rule for splitting of another crate: [`Split::Custom`].
pub trait SplitRule: fmt::Debug + Sync {
    /// The largest block that may serve a request of this rounded size.
    fn largest(&self, _bytes: u64) -> u64 {
        u64::MAX
    }

    /// Whether a request of `bytes` that is served by a block of `size`, which is no less, leaves a rest of its own. Not where nothing
    /// would be left.
    fn cuts(&self, bytes: u64, size: u64) -> bool;
}

impl PartialEq for dyn SplitRule {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self, other)
    }
}

impl Eq for dyn SplitRule {}

/// The bound that TensorFlow and XLA have by default, and ONNX Runtime as `max_dead_bytes_per_chunk`.
pub const BFC_LARGEST_REST: u64 = 128 << 20;

impl Split {
    /// The largest block that may serve a request of this rounded size.
    #[must_use]
    pub fn largest(&self, bytes: u64) -> u64 {
        match *self {
            // PyTorch's `get_free_block`.
            Self::Torch { max_split: u64::MAX, .. } | Self::TorchExpandable { max_split: u64::MAX, .. } => u64::MAX,
            Self::Torch { max_split, .. } | Self::TorchExpandable { max_split, .. } if bytes < max_split => {
                max_split - 1
            }
            Self::Torch { max_non_split_rounding, .. } | Self::TorchExpandable { max_non_split_rounding, .. } => {
                bytes.saturating_add(max_non_split_rounding) - 1
            }
            Self::Always | Self::Bfc { .. } | Self::Never => u64::MAX,
            Self::Custom(rule) => rule.largest(bytes),
        }
    }

    /// Whether a request of `bytes` that is served by a block of `size` leaves a rest of its own.
    #[must_use]
    pub fn cuts(&self, pool: Option<PoolKind>, bytes: u64, size: u64) -> bool {
        let rest = size - bytes;
        match *self {
            // PyTorch's `should_split`.
            Self::Torch { max_split, .. } => match pool.unwrap_or_else(|| pool_of(bytes)) {
                PoolKind::Small => rest >= MIN_BLOCK,
                PoolKind::Large => bytes < max_split && rest > SMALL_MAX,
            },
            Self::TorchExpandable { .. } => rest >= MIN_BLOCK,
            Self::Always => rest > 0,
            Self::Bfc { largest_rest } => rest > 0 && (rest >= bytes || rest >= largest_rest),
            Self::Never => false,
            Self::Custom(rule) => rest > 0 && rule.cuts(bytes, size),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn torch_keeps_small_rests_in_the_small_pool_only() {
        let split = Split::Torch { max_split: u64::MAX, max_non_split_rounding: 20 * MIB };
        assert!(split.cuts(Some(PoolKind::Small), 512, 1024) && !split.cuts(Some(PoolKind::Small), 512, 512));
        assert!(split.cuts(Some(PoolKind::Large), 2 * MIB, 3 * MIB + 512));
        assert!(!split.cuts(Some(PoolKind::Large), 2 * MIB, 3 * MIB));
        assert_eq!(split.largest(512), u64::MAX);
    }

    #[test]
    fn torch_leaves_oversize_blocks_to_oversize_requests() {
        let split = Split::Torch { max_split: 30 * MIB, max_non_split_rounding: 20 * MIB };
        assert_eq!(split.largest(2 * MIB), 30 * MIB - 1);
        assert_eq!(split.largest(30 * MIB), 50 * MIB - 1);
        assert!(!split.cuts(Some(PoolKind::Large), 30 * MIB, 49 * MIB));
    }

    #[test]
    fn torch_cuts_expandable_blocks_of_any_size() {
        let split = Split::TorchExpandable { max_split: 30 * MIB, max_non_split_rounding: 20 * MIB };
        for pool in [PoolKind::Small, PoolKind::Large] {
            assert!(split.cuts(Some(pool), 40 * MIB, 40 * MIB + 512) && !split.cuts(Some(pool), MIB, MIB));
        }
        assert_eq!((split.largest(2 * MIB), split.largest(30 * MIB)), (30 * MIB - 1, 50 * MIB - 1));
    }

    #[test]
    fn the_others_keep_every_rest_large_ones_or_none() {
        for (bytes, size, always, bfc) in [
            (512, 512, false, false),
            (512, 768, true, false),
            (512, 1024, true, true),
            (200 * MIB, 327 * MIB, true, false),
            (200 * MIB, 328 * MIB, true, true),
        ] {
            assert_eq!(Split::Always.cuts(None, bytes, size), always, "{bytes} of {size}");
            assert_eq!(Split::Bfc { largest_rest: BFC_LARGEST_REST }.cuts(None, bytes, size), bfc, "{bytes} of {size}");
            assert!(!Split::Never.cuts(None, bytes, size));
        }
    }
}
