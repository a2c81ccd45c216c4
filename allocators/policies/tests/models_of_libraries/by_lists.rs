//! Other policies, on lists of free ranges: those whose streams keep to their own memory, and those whose streams share it.

use super::Model;
use super::device::Device;
use super::lists::{Lists, Range};
use std::cmp::Reverse;

/// The differences between them.
pub(crate) trait Rules {
    const UNIT: u64;

    /// Which of the free ranges of a stream serves.
    fn find(&self, lists: &Lists, stream: usize, bytes: u64) -> Option<Range>;

    /// Sizes of segments that are asked for, one after another.
    fn segments(&self, bytes: u64) -> Vec<u64>;

    /// Takes a part of a free range.
    fn take(&self, lists: &mut Lists, range: Range, bytes: u64) -> u64 {
        lists.take(range, range.list, bytes)
    }

    /// A range became free.
    fn freed(&self, _range: &mut Range, _number: u64) {}
}

/// The memory of an allocator with rules.
pub(crate) struct Own<R> {
    rules: R,
    lists: Lists,
}

impl<R: Rules> Own<R> {
    pub(crate) fn new(rules: R) -> Self {
        Self { rules, lists: Lists::default() }
    }

    fn grow(&mut self, device: &Device, stream: usize, bytes: u64) -> Option<Range> {
        self.rules.segments(bytes).into_iter().find_map(|due| self.lists.grow(device, stream, due))
    }
}

impl<R: Rules> Model for Own<R> {
    fn allocate(&mut self, device: &mut Device, stream: usize, bytes: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(R::UNIT);
        let mut block = self.rules.find(&self.lists, stream, bytes);
        if block.is_none() {
            block = self.grow(device, stream, bytes);
        }
        if block.is_none() {
            device.completed(true).into_iter().for_each(|addr| self.free(addr));
            let mut segments = self.lists.segments.clone();
            segments.sort_unstable_by_key(|segment| (segment.list, segment.bytes, segment.addr));
            self.lists.give_back(device, segments, |_| false);
            block = self.rules.find(&self.lists, stream, bytes).or_else(|| self.grow(device, stream, bytes));
        }
        block.map(|range| self.rules.take(&mut self.lists, range, bytes))
    }

    fn free(&mut self, addr: u64) {
        let number = self.lists.next_number();
        self.rules.freed(self.lists.release(addr), number);
    }

    fn free_ranges(&self) -> Option<Vec<(u64, u64)>> {
        Some(self.lists.free_ranges())
    }
}

/// `SingleDeviceMemoryPool`. Of equal chunks the oldest serves; CuPy leaves that open.
pub(crate) struct CuPy;

impl Rules for CuPy {
    const UNIT: u64 = 512;

    fn find(&self, lists: &Lists, stream: usize, bytes: u64) -> Option<Range> {
        let fits = lists.free.iter().filter(|range| range.list == stream && range.bytes >= bytes);
        fits.min_by_key(|range| (range.bytes, range.number)).copied()
    }

    fn segments(&self, bytes: u64) -> Vec<u64> {
        vec![bytes]
    }
}

/// `AutoGrowthBestFitAllocator`
pub(crate) struct Paddle {
    pub(crate) chunk: u64,
}

impl Rules for Paddle {
    const UNIT: u64 = 256;

    fn find(&self, lists: &Lists, stream: usize, bytes: u64) -> Option<Range> {
        lists.best(stream, bytes)
    }

    fn segments(&self, bytes: u64) -> Vec<u64> {
        vec![bytes.max(self.chunk)]
    }

    /// The end of it.
    fn take(&self, lists: &mut Lists, range: Range, bytes: u64) -> u64 {
        lists.free.retain(|other| other.addr != range.addr);
        let rest = range.bytes - bytes;
        if rest > 0 {
            lists.free.push(Range { bytes: rest, ..range });
        }
        lists.used.insert(range.addr + rest, Range { addr: range.addr + rest, bytes, ..range });
        range.addr + rest
    }
}

/// Two-level segregated fit, which grows by segments here.
pub(crate) struct Tlsf {
    pub(crate) segment: u64,
}

/// A part of the power of two that a size lies in, of which there are 32.
fn part(units: u64) -> u64 {
    ((1 << units.ilog2()) / 32).max(1)
}

impl Rules for Tlsf {
    const UNIT: u64 = 512;

    /// `mapping_search` rounds up, `mapping_insert` rounds down. Of a class the range that became free last serves.
    fn find(&self, lists: &Lists, stream: usize, bytes: u64) -> Option<Range> {
        let units = bytes / Self::UNIT;
        let min_class = units.next_multiple_of(part(units));
        let class = |range: &Range| {
            let units = range.bytes / Self::UNIT;
            units / part(units) * part(units)
        };
        let fits = lists.free.iter().filter(|range| range.list == stream && class(range) >= min_class);
        fits.min_by_key(|range| (class(range), Reverse(range.number))).copied()
    }

    /// The request is for a segment as for a range.
    fn segments(&self, bytes: u64) -> Vec<u64> {
        let units = bytes / Self::UNIT;
        let bytes = units.next_multiple_of(part(units)) * Self::UNIT;
        vec![bytes.max(self.segment), bytes]
    }

    fn freed(&self, range: &mut Range, number: u64) {
        range.number = number;
    }
}

// Policies whose streams take each other's memory: RMM's pool and BFC.

/// RMM's `cuda_stream_legacy`.
const LEGACY: usize = usize::MAX;

/// A range for a request: of the stream's own list, else of the first other one that has any.
fn own_or_other(lists: &Lists, order: &[usize], stream: usize, bytes: u64) -> Option<Range> {
    let others = order.iter().filter(|other| **other != stream);
    std::iter::once(&stream).chain(others).find_map(|list| lists.best(*list, bytes))
}

/// Moves list after list into the stream's own, until a range fits.
fn merged(lists: &mut Lists, order: &[usize], stream: usize, bytes: u64) -> Option<Range> {
    for other in order.iter().filter(|other| **other != stream) {
        let (moved, kept) = lists.free.iter().partition(|range| range.list == *other);
        lists.free = kept;
        let moved: Vec<Range> = moved;
        for range in moved {
            lists.put(Range { list: stream, ..range });
        }
        if let Some(range) = lists.best(stream, bytes) {
            return Some(range);
        }
    }
    None
}

/// `stream_ordered_memory_resource` with `pool_memory_resource` and `coalescing_free_list`.
pub(crate) struct RmmPool {
    lists: Lists,
    /// Streams in the order of their events.
    order: Vec<usize>,
    initial: u64,
    maximum: Option<u64>,
}

impl RmmPool {
    pub(crate) fn new(initial: u64, maximum: Option<u64>) -> Self {
        Self { lists: Lists::default(), order: vec![LEGACY], initial, maximum }
    }

    fn find(&mut self, stream: usize, bytes: u64) -> Option<Range> {
        own_or_other(&self.lists, &self.order, stream, bytes)
            .or_else(|| merged(&mut self.lists, &self.order, stream, bytes))
    }

    /// `expand_pool`, with `reclaim_free_blocks`, `size_to_grow` and `try_to_expand`.
    fn expand(&mut self, device: &Device, stream: usize, bytes: u64) -> Option<Range> {
        let mut due = self.lists.reserved().max(bytes);
        if let Some(maximum) = self.maximum {
            let left = |lists: &Lists| maximum - lists.reserved();
            if bytes > left(&self.lists).next_multiple_of(256) && bytes <= maximum {
                let mut segments = self.lists.segments.clone();
                segments.sort_unstable_by_key(|segment| segment.addr);
                self.lists.give_back(device, segments, |lists| bytes <= left(lists));
            }
            let left = left(&self.lists).next_multiple_of(256);
            if bytes > left {
                return None;
            }
            due = (left / 2).max(bytes);
        }
        loop {
            let grown = self.lists.grow(device, stream, due);
            if grown.is_some() || due == bytes {
                return grown;
            }
            due = (due / 2).max(bytes);
        }
    }
}

impl Model for RmmPool {
    fn allocate(&mut self, device: &mut Device, stream: usize, bytes: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(256);
        if self.lists.segments.is_empty() && self.order == [LEGACY] {
            let initial = self.initial.min(device.free_bytes() / 2);
            self.lists.grow(device, LEGACY, initial).unwrap();
        }
        if !self.order.contains(&stream) {
            self.order.push(stream);
        }
        let mut block = self.find(stream, bytes).or_else(|| self.expand(device, stream, bytes));
        // Ours: before a request is refused, uses on other streams are waited for.
        if block.is_none() {
            device.completed(true).into_iter().for_each(|addr| self.free(addr));
            block = self.find(stream, bytes);
        }
        block.map(|range| self.lists.take(range, stream, bytes))
    }

    fn free(&mut self, addr: u64) {
        self.lists.release(addr);
    }

    fn free_ranges(&self) -> Option<Vec<(u64, u64)>> {
        Some(self.lists.free_ranges())
    }
}

/// XLA's `BFCAllocator`, with a list for each stream as ONNX Runtime has it.
pub(crate) struct Bfc {
    lists: Lists,
    order: Vec<usize>,
    region: u64,
    limit: Option<u64>,
}

impl Bfc {
    pub(crate) fn new(region: u64, limit: Option<u64>) -> Self {
        Self { lists: Lists::default(), order: Vec::new(), region, limit }
    }

    /// `Extend`
    fn extend(&mut self, device: &Device, stream: usize, bytes: u64) -> Option<Range> {
        let available = self.limit.map_or(u64::MAX, |limit| limit - self.lists.reserved()) / 256 * 256;
        if bytes > available {
            return None;
        }
        let increased = self.region < bytes;
        let mut next = self.region;
        while next < bytes {
            next *= 2;
        }
        let mut due = next.min(available);
        while due >= bytes {
            if let Some(range) = self.lists.grow(device, stream, due) {
                self.region = if increased { next } else { next * 2 };
                return Some(range);
            }
            due = ((due as f32 * 0.9) as u64).next_multiple_of(256).min(due - 256);
        }
        None
    }
}

impl Model for Bfc {
    fn allocate(&mut self, device: &mut Device, stream: usize, bytes: u64) -> Option<u64> {
        let bytes = bytes.next_multiple_of(256);
        if !self.order.contains(&stream) {
            self.order.push(stream);
        }
        let mut block = own_or_other(&self.lists, &self.order, stream, bytes);
        if block.is_none() {
            block = self.extend(device, stream, bytes);
        }
        if block.is_none() {
            device.completed(true).into_iter().for_each(|addr| self.free(addr));
            block = own_or_other(&self.lists, &self.order, stream, bytes)
                .or_else(|| merged(&mut self.lists, &self.order, stream, bytes));
        }
        let range = block?;
        // `MaybeSplitChunk`
        let rest = range.bytes - bytes;
        let is_whole = rest < bytes && rest < 128 << 20;
        Some(self.lists.take(range, stream, if is_whole { range.bytes } else { bytes }))
    }

    fn free(&mut self, addr: u64) {
        self.lists.release(addr);
    }

    fn free_ranges(&self) -> Option<Vec<(u64, u64)>> {
        Some(self.lists.free_ranges())
    }
}
