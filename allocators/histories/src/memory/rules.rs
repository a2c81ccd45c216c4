//! How the recorded allocator splits memory into segments and blocks.

use crate::formats::{Segment, Summary};
use crate::history::MAX_BYTES;
use std::sync::Arc;
use vramlab_policies::backends::CachingSettings;
use vramlab_policies::contract::PoolKind;
use vramlab_policies::policy::size::Size;
use vramlab_policies::policy::size::torch::{LARGE_SEGMENT, SMALL_SEGMENT, pool_of};
use vramlab_policies::policy::split::Split;

/// How the recorded allocator splits memory into segments and blocks, as far as the recording shows it.
#[derive(Clone, Debug)]
pub struct Rules {
    /// How PyTorch rounds a request; `None` for recordings of other allocators, whose blocks have the requested size.
    size: Option<Size>,
    split: Split,
    /// Segments at the end: start, end, whether they serve small requests, and whether they are expandable.
    at_end: Arc<[(u64, u64, bool, bool)]>,
}

impl Rules {
    /// PyTorch's rules under these settings.
    #[must_use]
    pub fn pytorch(settings: &CachingSettings) -> Self {
        let split = Split::Torch {
            max_split: settings.max_split_size.unwrap_or(u64::MAX),
            max_non_split_rounding: settings.max_non_split_rounding,
        };
        Self { size: Some(Size::Torch(settings.roundup_power2_divisions)), split, at_end: Arc::default() }
    }

    /// The rules for a GPU's recording.
    #[must_use]
    pub fn new(summary: &Summary, device: u16, settings: &CachingSettings) -> Self {
        let ending = summary.ending().unwrap_or_default().iter();
        let mut at_end: Vec<(u64, u64, bool, bool)> = ending
            .filter(|segment| segment.device == device)
            .map(|segment| {
                let small = segment.segment_type == PoolKind::Small;
                (segment.address, segment.end(), small, segment.is_expandable)
            })
            .collect();
        at_end.sort_unstable();
        let rules = if summary.format.is_snapshot() {
            Self::pytorch(settings)
        } else {
            Self { size: None, split: Split::Always, at_end: Arc::default() }
        };
        Self { at_end: at_end.into(), ..rules }
    }

    /// The size of the block for a request. No block has more than [`MAX_BYTES`]; such a request is not rounded.
    #[must_use]
    pub fn rounded(&self, bytes: u64) -> u64 {
        self.size.filter(|_| bytes <= MAX_BYTES).map_or(bytes, |size| size.round(bytes))
    }

    /// Whether a rounded size belongs to the pool for small requests.
    #[must_use]
    pub fn is_small(&self, rounded: u64) -> bool {
        pool_of(rounded) == PoolKind::Small
    }

    /// Whether a free block of `size` may serve a request of this rounded size.
    #[must_use]
    pub fn serves(&self, size: u64, rounded: u64) -> bool {
        (rounded..=self.split.largest(rounded)).contains(&size)
    }

    /// Whether a request of this rounded size splits a free block of `size`. Segments for small requests and expandable ones keep
    /// `small` remainders.
    #[must_use]
    pub fn cuts(&self, small: bool, rounded: u64, size: u64) -> bool {
        self.split.cuts(Some(if small { PoolKind::Small } else { PoolKind::Large }), rounded, size)
    }

    /// Whether a new segment serves small requests, and whether it is expandable. Of mapped memory the end shows both, if it still
    /// exists: allocators that stitch memory map segments that are not expandable. O(log n) in the segments at the end.
    pub(super) fn kind(&self, addr: u64, bytes: u64, mapped: bool) -> (bool, bool) {
        if !mapped {
            return (bytes == SMALL_SEGMENT, false);
        }
        let before = self.at_end.partition_point(|(start, ..)| *start <= addr);
        let known = before.checked_sub(1).map(|at| self.at_end[at]).filter(|(_, end, ..)| addr < *end);
        // Ranges for small requests have 2 MiB, others multiples of 20 MiB.
        known.map_or((!bytes.is_multiple_of(LARGE_SEGMENT), true), |(_, _, small, expandable)| (small, expandable))
    }
}

impl Segment {
    /// The first address behind it.
    pub(super) fn end(&self) -> u64 {
        self.address.saturating_add(self.total_size)
    }
}
