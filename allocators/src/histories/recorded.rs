//! What the allocator did from which a history was recorded: the events of one GPU in memory, what was there before the first
//! of them, and the memory, followed event by event.
//!
//! Unlike a [replay](super::replay) this asks no allocator anything. Blocks lie where the history says.

mod before;
mod events;
mod memory;

pub use before::{Before, BlockBefore, SegmentBefore};
pub use events::{Events, Iter, Recorded, Walk};
pub use memory::{BEFORE, Block, Memory, Pool, Segment, Totals};

use super::trace::{Format, SegmentType, Summary};
use crate::backends::CachingSettings;

/// How the recorded allocator cut its memory into segments and blocks, as far as the history tells it.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whether they were PyTorch's.
    pytorch: bool,
    settings: CachingSettings,
    /// Segments that were held at the end: where each begins and ends, and whether it is for small requests.
    ending: Vec<(u64, u64, bool)>,
}

impl Rules {
    /// Those of a GPU's history.
    #[must_use]
    pub fn new(summary: &Summary, device: u16, settings: &CachingSettings) -> Self {
        let ending = summary.ending().unwrap_or_default().iter().filter(|segment| segment.device == device);
        let range = |segment: &super::trace::Segment| {
            let end = segment.address.saturating_add(segment.total_size);
            (segment.address, end, segment.segment_type == SegmentType::Small)
        };
        Self {
            pytorch: matches!(summary.format, Format::SnapshotPickle | Format::SnapshotJson),
            settings: *settings,
            ending: ending.map(range).collect(),
        }
    }

    /// Whether a segment is for small requests. Of parts that are mapped into an expandable segment the end tells it, where
    /// they are still there. O(segments at the end) for those.
    fn is_small(&self, addr: u64, bytes: u64, mapped: bool) -> bool {
        // Parts for small requests are of 2 MiB, for others of multiples of 20 MiB.
        const SMALL: u64 = 2 << 20;
        const LARGE: u64 = 20 << 20;
        if !mapped {
            return bytes == SMALL;
        }
        let known = self.ending.iter().find(|(start, end, _)| (*start..*end).contains(&addr));
        known.map_or(!bytes.is_multiple_of(LARGE), |(_, _, small)| *small)
    }
}
