//! Sets of addresses, such as the addresses of all former blocks.

use std::collections::BTreeMap;

/// A set of addresses, stored as ranges that are not adjacent.
#[derive(Clone, Debug, Default)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Whether any address of `start..end` is in the set. O(log n).
    pub fn overlaps(&self, start: u64, end: u64) -> bool {
        self.0.range(..end).next_back().is_some_and(|(_, &last)| last > start)
    }

    /// Whether all addresses of `start..end` are in the set. O(log n).
    pub fn contains(&self, start: u64, end: u64) -> bool {
        self.0.range(..=start).next_back().is_some_and(|(_, &last)| last >= end)
    }

    /// Number of ranges.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no address is in the set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds `start..end`. O(log n) for each range that it joins.
    pub fn insert(&mut self, mut start: u64, mut end: u64) {
        if let Some((&before, &last)) = self.0.range(..=start).next_back()
            && last >= start
        {
            if last >= end {
                return;
            }
            start = before;
        }
        while let Some((&next, &last)) = self.0.range(start..=end).next() {
            self.0.remove(&next);
            end = end.max(last);
        }
        self.0.insert(start, end);
    }

    /// Removes `start..end`, which is not empty; returns the parts that were in the set, the last first. O(log n) for each range
    /// that it splits.
    pub fn remove(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        while let Some((&from, &to)) = self.0.range(..end).next_back().filter(|(_, to)| **to > start) {
            self.0.remove(&from);
            if end < to {
                self.0.insert(end, to);
            }
            if from < start {
                self.0.insert(from, start);
            }
            out.push((from.max(start), to.min(end)));
        }
        out
    }

    /// The parts of `start..end` that are not in the set, in order. O(log n) for each.
    pub fn missing(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let (mut out, mut at) = (Vec::new(), start);
        let first = self.0.range(..=start).next_back().map_or(start, |(from, _)| *from);
        for (&from, &to) in self.0.range(first..end.max(first)) {
            if from > at {
                out.push((at, from));
            }
            at = at.max(to);
        }
        if at < end {
            out.push((at, end));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_when_they_touch() {
        let mut set = Ranges::default();
        for (start, end) in [(10, 20), (30, 40), (20, 25), (24, 30), (50, 60), (5, 70), (6, 8)] {
            set.insert(start, end);
        }
        assert_eq!(set.0.into_iter().collect::<Vec<_>>(), [(5, 70)]);
    }

    #[test]
    fn a_range_is_contained_only_if_all_of_it_is() {
        let mut set = Ranges::default();
        for (start, end) in [(10, 20), (20, 30), (40, 50)] {
            set.insert(start, end);
        }
        for (start, end) in [(10, 30), (15, 25), (40, 50), (29, 30)] {
            assert!(set.contains(start, end), "{start}..{end}");
        }
        for (start, end) in [(9, 11), (29, 31), (25, 45), (30, 40), (0, 5), (60, 61)] {
            assert!(!set.contains(start, end), "{start}..{end}");
        }
        assert_eq!(set.len(), 2);
    }

    #[test]
    fn what_is_not_in_the_set_is_missing() {
        let mut set = Ranges::default();
        set.insert(10, 20);
        set.insert(30, 40);
        assert_eq!(set.missing(0, 50), [(0, 10), (20, 30), (40, 50)]);
        assert_eq!(set.missing(12, 18), []);
        set.remove(15, 35);
        assert_eq!(set.missing(10, 40), [(15, 35)]);
        assert_eq!(set.missing(40, 40), []);
        set.insert(0, 100);
        set.remove(40, 60);
        assert_eq!(set.missing(0, 100), [(40, 60)]);
    }

    #[test]
    fn neighbours_do_not_overlap() {
        let mut set = Ranges::default();
        set.insert(10, 20);
        assert!(!set.overlaps(0, 10) && !set.overlaps(20, 30));
        assert!(set.overlaps(0, 11) && set.overlaps(19, 30) && set.overlaps(12, 13) && set.overlaps(0, 100));
    }
}
