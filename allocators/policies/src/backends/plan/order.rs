//! The stream that last used each byte of the arena, so that a stream gets another's memory only behind its work.

use crate::policy::Heap;
use crate::policy::grow::Segments as _;
use slab::Slab;
use std::collections::BTreeMap;
use std::ops::Range;
use vramlab_device::{DriverError, EventId, StreamId};

/// The last use of a block's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastUse {
    /// The block is live, or was freed and no event shows when its work completes.
    Unknown,
    /// It completes with this event.
    Before(EventId),
    /// It has completed.
    Over,
}

/// The last block at some addresses.
#[derive(Clone, Copy, Debug)]
struct Owner {
    stream: StreamId,
    last_use: LastUse,
    /// Number of ranges of its memory that no later block has had.
    ranges: u32,
}

/// The range at an offset: its end, and its block.
#[derive(Clone, Copy, Debug)]
struct Piece {
    end: u64,
    owner: usize,
}

/// The condition for a stream to use some memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// None.
    Known,
    /// Its later work waits for these events.
    Waits(Vec<EventId>),
    /// It cannot use it.
    Unknown,
}

/// The last block of each byte of the arena. O(log n) per operation, and an event for each free.
#[derive(Debug, Default)]
pub(super) struct LastOwners {
    /// By offset.
    pieces: BTreeMap<u64, Piece>,
    owners: Slab<Owner>,
}

impl LastOwners {
    fn overlapping(&self, range: &Range<u64>) -> Vec<(u64, Piece)> {
        let first = self.pieces.range(..range.start).next_back().filter(|(_, piece)| piece.end > range.start);
        let rest = self.pieces.range(range.clone());
        first.into_iter().chain(rest).map(|(start, piece)| (*start, *piece)).collect()
    }

    /// Whether a stream can use a free range. While a graph is captured no event is queried.
    ///
    /// # Errors
    /// Those of the driver.
    pub(super) fn before(
        &mut self,
        heap: &mut Heap,
        range: &Range<u64>,
        stream: StreamId,
    ) -> Result<Order, DriverError> {
        let mut waits = Vec::new();
        for (_, piece) in self.overlapping(range) {
            let owner = &mut self.owners[piece.owner];
            match owner.last_use {
                _ if owner.stream == stream => {}
                LastUse::Over => {}
                LastUse::Unknown => return Ok(Order::Unknown),
                LastUse::Before(_) if heap.is_capturing() => return Ok(Order::Unknown),
                LastUse::Before(event) => {
                    if heap.source().driver().event_query(event)? {
                        owner.last_use = LastUse::Over;
                        heap.reuse(event);
                    } else if !waits.contains(&event) {
                        waits.push(event);
                    }
                }
            }
        }
        Ok(if waits.is_empty() { Order::Known } else { Order::Waits(waits) })
    }

    /// Gives a range to a stream.
    pub(super) fn take(&mut self, heap: &mut Heap, range: Range<u64>, stream: StreamId) {
        for (start, piece) in self.overlapping(&range) {
            self.pieces.remove(&start);
            let mut left = 0;
            for (start, end) in [(start, range.start.min(piece.end)), (range.end.max(start), piece.end)] {
                if start < end {
                    self.pieces.insert(start, Piece { end, owner: piece.owner });
                    left += 1;
                }
            }
            let owner = &mut self.owners[piece.owner];
            owner.ranges = owner.ranges - 1 + left;
            if owner.ranges == 0 {
                if let LastUse::Before(event) = owner.last_use {
                    heap.reuse(event);
                }
                self.owners.remove(piece.owner);
            }
        }
        let owner = self.owners.insert(Owner { stream, last_use: LastUse::Unknown, ranges: 1 });
        self.pieces.insert(range.start, Piece { end: range.end, owner });
    }

    /// Frees the block at an offset: its uses complete with all work queued on its stream until now.
    ///
    /// # Errors
    /// Those of the driver: then only its own stream can use the memory.
    pub(super) fn free(&mut self, heap: &mut Heap, offset: u64) -> Result<(), DriverError> {
        let Some(piece) = self.pieces.get(&offset).copied() else { return Ok(()) };
        let owner = &mut self.owners[piece.owner];
        if let Some(event) = heap.record_event(owner.stream)? {
            owner.last_use = LastUse::Before(event);
        }
        Ok(())
    }

    /// Forgets everything: the memory was released, or the allocator ends.
    pub(super) fn clear(&mut self, heap: &mut Heap) {
        self.pieces.clear();
        for (_, owner) in std::mem::take(&mut self.owners).iter() {
            if let LastUse::Before(event) = owner.last_use {
                heap.reuse(event);
            }
        }
    }
}
