//! Policies whose streams keep to their own memory: CuPy's pool, PaddlePaddle's growing best fit, two-level segregated fit.

use crate::Model;
use crate::device::Device;
use crate::lists::{Lists, Range};
use std::cmp::Reverse;

/// What differs between them.
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
        let mut found = self.rules.find(&self.lists, stream, bytes);
        if found.is_none() {
            found = self.grow(device, stream, bytes);
        }
        if found.is_none() {
            device.completed(true).into_iter().for_each(|addr| self.free(addr));
            let mut segments = self.lists.segments.clone();
            segments.sort_unstable_by_key(|segment| (segment.list, segment.bytes, segment.addr));
            self.lists.give_back(device, segments, |_| false);
            found = self.rules.find(&self.lists, stream, bytes).or_else(|| self.grow(device, stream, bytes));
        }
        found.map(|range| self.rules.take(&mut self.lists, range, bytes))
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
        let wanted = units.next_multiple_of(part(units));
        let class = |range: &Range| {
            let units = range.bytes / Self::UNIT;
            units / part(units) * part(units)
        };
        let fits = lists.free.iter().filter(|range| range.list == stream && class(range) >= wanted);
        fits.min_by_key(|range| (class(range), Reverse(range.number))).copied()
    }

    fn segments(&self, bytes: u64) -> Vec<u64> {
        vec![bytes.max(self.segment), bytes]
    }

    fn freed(&self, range: &mut Range, number: u64) {
        range.number = number;
    }
}
