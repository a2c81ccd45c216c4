//! Which blocks get the few tracks that a timeline has.

use super::Life;
use std::collections::BTreeMap;

/// A block as its track sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    device: u16,
    bytes: u64,
    start: u64,
    end: u64,
}

impl Span {
    pub(super) fn of(life: &Life, latest: u64) -> Self {
        let end = life.end.unwrap_or(latest).max(life.start);
        Self { device: life.device, bytes: life.bytes, start: life.start, end }
    }
}

/// The track of each block, from the largest block to the smallest each on the first on which nothing else lies at its time;
/// `None` where there is none. O(n log n) for `most` tracks a device.
pub(super) fn assign(spans: &[Span], most: usize) -> Vec<Option<usize>> {
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|at| (std::cmp::Reverse(spans[*at].bytes), *at));
    // Starts with ends, of each track.
    let mut tracks: BTreeMap<u16, Vec<BTreeMap<u64, u64>>> = BTreeMap::new();
    let mut out = vec![None; spans.len()];
    for at in order {
        let Span { device, start, end, .. } = spans[at];
        let own = tracks.entry(device).or_default();
        let free = |track: &BTreeMap<u64, u64>| {
            // One that takes no time lies there for a moment all the same.
            track.range(..end.max(start + 1)).next_back().is_none_or(|(other, last)| *last <= start && *other < start)
        };
        let track = match own.iter().position(free) {
            Some(track) => track,
            None if own.len() < most => {
                own.push(BTreeMap::new());
                own.len() - 1
            }
            None => continue,
        };
        own[track].insert(start, end);
        out[at] = Some(track);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_blocks_get_tracks_and_none_overlap() {
        let span = |bytes, start, end| Span { device: 0, bytes, start, end };
        let spans = [span(1, 0, 10), span(5, 0, 4), span(3, 4, 8), span(9, 2, 6), span(2, 6, 6), span(2, 6, 7)];
        // The second track has 0..4 and 4..8, the first 2..6 and then one of those that begin at 6.
        assert_eq!(assign(&spans, 2), [None, Some(1), Some(1), Some(0), Some(0), None]);
        assert_eq!(assign(&spans, 0), [None; 6]);
        let other = Span { device: 1, ..spans[3] };
        assert_eq!(assign(&[spans[3], other], 1), [Some(0), Some(0)], "each device has its own");
    }
}
