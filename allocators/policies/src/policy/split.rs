//! Part `split`: whether a free block may serve a request, and whether it is split.
#![forbid(unsafe_code)]

use super::size::torch::{MIN_BLOCK, SMALL_MAX, pool_of};
use crate::contract::PoolKind;
use std::fmt;

/// A rule for splitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// PyTorch: a remainder is split off from 512 bytes on in the small pool, above 1 MiB in the large one.
    Torch {
        /// Blocks of at least this size are never split and serve only requests of at least this size; `u64::MAX` for no bound.
        max_split: u64,
        /// How much larger than the request such a block may be.
        max_non_split_rounding: u64,
    },
    /// PyTorch with expandable segments: a remainder is split off from 512 bytes on in both pools. The bounds are those of
    /// [`Torch`](Self::Torch), but a block above them is split nevertheless when memory was mapped for the request.
    TorchExpandable {
        /// Blocks of at least this size serve only requests of at least this size; `u64::MAX` for no bound.
        max_split: u64,
        /// How much larger than the request such a block may be.
        max_non_split_rounding: u64,
    },
    /// Every remainder is split off (RMM's pool).
    Always,
    /// A remainder is split off when it is as large as the request, or as a bound (BFC).
    Bfc {
        /// The bound.
        largest_rest: u64,
    },
    /// Never: a block serves a request as a whole, however large it is.
    Never,
    /// Another rule.
    Custom(&'static dyn SplitRule),
}

/// A rule of another crate: [`Split::Custom`].
pub trait SplitRule: fmt::Debug + Sync {
    /// The largest block that may serve a request of this rounded size.
    fn largest(&self, _bytes: u64) -> u64 {
        u64::MAX
    }

    /// Whether a request of `bytes` splits the block of `size` that serves it. `size` is at least `bytes`; equal sizes leave no
    /// remainder.
    fn cuts(&self, bytes: u64, size: u64) -> bool;
}

impl PartialEq for dyn SplitRule {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(self, other)
    }
}

impl Eq for dyn SplitRule {}

/// The default bound of TensorFlow and XLA, and of ONNX Runtime as `max_dead_bytes_per_chunk`.
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

    /// Whether a request of `bytes` splits the block of `size` that serves it.
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
