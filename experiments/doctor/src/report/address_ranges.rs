//! Addresses without the gaps between segments: where a block is drawn.

/// Blocks that lie closer than this are drawn in one lane, with the gap between them.
const NEAR: u64 = 2 << 20;

/// A range of addresses in which something was held at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddressRange {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    /// Where it begins when the lanes lie one behind the other.
    place: u64,
}

/// All lanes of a map in address order.
#[derive(Debug, Default)]
pub(super) struct AddressRanges(Vec<AddressRange>);

impl AddressRanges {
    /// The lanes that hold these ranges of addresses and bytes. Ranges of `segments` that touch are one lane; so are `blocks`
    /// outside of them that lie close to each other.
    pub(super) fn of(segments: impl Iterator<Item = (u64, u64)>, blocks: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut lanes = merged(segments.collect(), 0);
        let inside = |lanes: &[(u64, u64)], addr: u64| {
            let after = lanes.partition_point(|(start, _)| *start <= addr);
            after > 0 && lanes[after - 1].1 > addr
        };
        let outside: Vec<(u64, u64)> = blocks.filter(|(addr, _)| !inside(&lanes, *addr)).collect();
        if !outside.is_empty() {
            let ranges = lanes.iter().map(|(start, end)| (*start, end - start));
            let outside = merged(outside, NEAR).into_iter().map(|(start, end)| (start, end - start));
            lanes = merged(ranges.chain(outside).collect(), 0);
        }
        let mut place = 0;
        let lane = |(addr, end): (u64, u64)| {
            let lane = AddressRange { addr, bytes: end - addr, place };
            place += lane.bytes;
            lane
        };
        Self(lanes.into_iter().map(lane).collect())
    }

    /// Where an address is drawn; `None` if no lane holds it.
    pub(super) fn place(&self, addr: u64) -> Option<u64> {
        let after = self.0.partition_point(|lane| lane.addr <= addr);
        let lane = self.0.get(after.checked_sub(1)?)?;
        (addr < lane.addr + lane.bytes).then(|| lane.place + (addr - lane.addr))
    }

    pub(super) fn list(&self) -> &[AddressRange] {
        &self.0
    }
}

/// Start and end of the ranges that these make together; gaps of less than `near` are closed.
fn merged(mut ranges: Vec<(u64, u64)>, near: u64) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (addr, bytes) in ranges.into_iter().filter(|(_, bytes)| *bytes > 0) {
        let end = addr.saturating_add(bytes);
        match out.last_mut() {
            Some(last) if addr <= last.1.saturating_add(near) => last.1 = last.1.max(end),
            _ => out.push((addr, end)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_lie_one_behind_the_other() {
        let segments = [(1000, 500), (1500, 500), (9000, 1000)];
        let lanes = AddressRanges::of(segments.into_iter(), [(9100, 5)].into_iter());
        assert_eq!(lanes.list().len(), 2, "what touches is one lane");
        assert_eq!(lanes.place(1999), Some(999));
        assert_eq!(lanes.place(9000), Some(1000));
        assert_eq!((lanes.place(2000), lanes.place(999), lanes.place(10_000)), (None, None, None));
    }

    #[test]
    fn blocks_without_segments_have_lanes_of_their_own() {
        let lanes = AddressRanges::of(std::iter::empty(), [(4096, 512), (8192, 512), (1 << 40, 512)].into_iter());
        assert_eq!(lanes.list().iter().map(|lane| lane.bytes).collect::<Vec<_>>(), [4608, 512]);
        assert_eq!(lanes.place(1 << 40), Some(4608));
    }
}
