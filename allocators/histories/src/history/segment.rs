//! A segment that came from the device or went back.

use vramlab_policies::contract::PoolKind;
use vramlab_policies::policy::size::torch::SMALL_SEGMENT;

/// A segment, or a part of an expandable one, that came from the device or went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentEvent {
    /// First address.
    pub(crate) addr: u64,
    /// Bytes.
    pub(crate) bytes: u64,
    /// Handle of its stream.
    pub(crate) stream: u64,
    /// The pool of a part of an expandable segment; `None` for whole segments.
    pub(crate) part: Option<PoolKind>,
    /// The operation inside which it happened.
    pub(crate) op: u32,
    /// Whether it went back.
    pub(crate) released: bool,
    /// Whether a device that refused is the only explanation, so that a replay has to refuse as well.
    pub(crate) refused: bool,
}

impl SegmentEvent {
    /// A whole segment that came before the first operation.
    pub(crate) fn made(addr: u64, bytes: u64, stream: u64) -> Self {
        Self { addr, bytes, stream, part: None, op: 0, released: false, refused: false }
    }

    /// This memory on its way back to the device.
    pub(crate) fn released(self) -> Self {
        Self { released: true, ..self }
    }

    /// This memory as a part of an expandable segment.
    pub(crate) fn part_of(self, pool: PoolKind) -> Self {
        Self { part: Some(pool), ..self }
    }

    /// The pool that it serves: that of a whole segment follows from its size.
    pub(crate) fn pool(&self) -> PoolKind {
        self.part.unwrap_or(if self.bytes == SMALL_SEGMENT { PoolKind::Small } else { PoolKind::Large })
    }

    /// The first address behind it.
    pub(crate) fn end(&self) -> u64 {
        self.addr + self.bytes
    }

    /// Whether an address lies in it.
    pub(crate) fn contains(&self, addr: u64) -> bool {
        addr >= self.addr && addr - self.addr < self.bytes
    }
}
