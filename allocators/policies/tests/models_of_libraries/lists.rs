//! Free ranges list by list in one vector, and the device's blocks that they lie in.

use super::device::Device;
use std::collections::HashMap;

/// Memory of a list, free or in use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) list: usize,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    /// Counts what comes into being or, where a model says so, becomes free.
    pub(crate) number: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Lists {
    pub(crate) free: Vec<Range>,
    pub(crate) used: HashMap<u64, Range>,
    /// The segments of the device, and the list of each.
    pub(crate) segments: Vec<Range>,
    count: u64,
}

impl Lists {
    pub(crate) fn next_number(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// Memory from the device, as one free range.
    pub(crate) fn grow(&mut self, device: &Device, list: usize, bytes: u64) -> Option<Range> {
        let range = Range { list, addr: device.take(bytes)?, bytes, number: self.next_number() };
        self.segments.push(range);
        self.free.push(range);
        Some(range)
    }

    /// The smallest free range of a list that fits; of equal ones that with the lowest address.
    pub(crate) fn best(&self, list: usize, bytes: u64) -> Option<Range> {
        let fits = self.free.iter().filter(|range| range.list == list && range.bytes >= bytes);
        fits.min_by_key(|range| (range.bytes, range.addr)).copied()
    }

    /// Cuts `bytes` off the front of a free range, for a request of `list`. The rest is a new range, and stays where it was.
    pub(crate) fn take(&mut self, from: Range, list: usize, bytes: u64) -> u64 {
        self.free.retain(|range| range.addr != from.addr);
        if from.bytes > bytes {
            let number = self.next_number();
            self.free.push(Range { addr: from.addr + bytes, bytes: from.bytes - bytes, number, ..from });
        }
        self.used.insert(from.addr, Range { list, bytes, ..from });
        from.addr
    }

    /// Puts a range into its list, joined with those beside it that are from the same call of the device. It is known by the number
    /// of its front.
    pub(crate) fn put(&mut self, mut range: Range) -> &mut Range {
        let starts = |addr: u64| self.segments.iter().any(|segment| segment.addr == addr);
        let (end, list) = (range.addr + range.bytes, range.list);
        if let Some(at) = self.free.iter().position(|next| next.list == list && next.addr == end && !starts(end)) {
            range.bytes += self.free.remove(at).bytes;
        }
        let before = |front: &Range| front.list == list && front.addr + front.bytes == range.addr;
        if let Some(at) = self.free.iter().position(before).filter(|_| !starts(range.addr)) {
            let front = self.free.remove(at);
            range = Range { bytes: front.bytes + range.bytes, ..front };
        }
        self.free.push(range);
        self.free.last_mut().unwrap()
    }

    /// A block becomes reusable for the list that it was taken for.
    pub(crate) fn release(&mut self, addr: u64) -> &mut Range {
        let range = self.used.remove(&addr).unwrap();
        self.put(range)
    }

    /// Gives whole free blocks of the device back.
    pub(crate) fn give_back(&mut self, device: &Device, mut segments: Vec<Range>, stop: impl Fn(&Self) -> bool) {
        segments.retain(|segment| self.is_whole(segment));
        for segment in segments {
            if stop(self) {
                break;
            }
            device.give_back(segment.addr);
            self.free.retain(|range| range.addr != segment.addr);
            self.segments.retain(|other| other.addr != segment.addr);
        }
    }

    fn is_whole(&self, segment: &Range) -> bool {
        self.free.iter().any(|range| range.addr == segment.addr && range.bytes == segment.bytes)
    }

    pub(crate) fn free_ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<_> = self.free.iter().map(|range| (range.addr, range.bytes)).collect();
        ranges.sort_unstable();
        ranges
    }
}
