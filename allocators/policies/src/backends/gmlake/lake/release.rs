//! Release of memory and addresses, and reports, of the large pool of [`gmlake`](super::super).

use super::{Lake, Live, Segment, Stitched};
use crate::contract::{BlockInfo, BlockState, PoolKind, SegmentInfo};
use crate::space::{Account, FreeList};
use std::collections::BTreeSet;
use vramlab_device::{DeviceAddr, DriverError};

impl Lake {
    /// Unmaps every stitched block that is not live, after a wait for the device; returns their number.
    ///
    /// # Errors
    /// Those of the driver.
    pub(in super::super) fn unmap_idle(&mut self) -> Result<usize, DriverError> {
        let idle = self.stitched.iter().filter(|(_, stitched)| stitched.live == 0);
        let idle: Vec<usize> = idle.map(|(id, _)| id).collect();
        if idle.is_empty() || self.memory.is_capturing() {
            return Ok(0);
        }
        self.memory.synchronize()?;
        for id in &idle {
            // SAFETY: all work on the device has completed, and no client holds the block.
            unsafe { self.unmap_behind(*id, 0) }?;
        }
        Ok(idle.len())
    }

    /// Unmaps a stitched block behind its first `keep` bytes; without any, the block is removed.
    ///
    /// # Safety
    /// No client holds an address behind them, and no queued work uses one.
    unsafe fn unmap_behind(&mut self, id: usize, keep: u64) -> Result<(), DriverError> {
        let Stitched { addr, bytes, reserved, list, .. } = self.stitched[id];
        // SAFETY: `stitch` mapped exactly these pages; the caller promises that they are unused.
        unsafe { self.memory.unmap(addr + keep, bytes - keep) }?;
        self.free_stitched.remove(&(list, bytes, addr));
        // CAST: a number of pages.
        for page in self.stitched[id].pages.split_off((keep / self.memory.page) as usize) {
            self.page(page).over.remove(&id);
        }
        if keep > 0 {
            let stitched = &mut self.stitched[id];
            // The remainder is live.
            (stitched.bytes, stitched.busy) = (keep, keep / self.memory.page);
            return Ok(());
        }
        self.stitched.remove(id);
        self.stitched_bytes -= reserved;
        self.memory.address_free(addr, reserved)
    }

    /// Releases idle segments while more than `keep` bytes are reserved, the largest first, after a wait for the device. Stitched
    /// blocks over them are unmapped. Returns the released bytes.
    ///
    /// # Errors
    /// Those of the driver. Memory released before that is accounted for.
    pub(in super::super) fn release(&mut self, account: &mut Account, keep: u64) -> Result<u64, DriverError> {
        self.memory.release_refused()?;
        let idle = self.segments.iter().filter(|(_, segment)| segment.is_idle());
        let mut idle: Vec<(u64, u64)> = idle.map(|(addr, segment)| (segment.bytes, *addr)).collect();
        idle.sort_unstable();
        if idle.is_empty() || account.reserved() <= keep {
            return Ok(0);
        }
        self.memory.synchronize()?;
        let mut released = 0;
        for (bytes, addr) in idle.into_iter().rev() {
            if account.reserved() <= keep {
                break;
            }
            // SAFETY: no block of it is live or pending, and all work on the device has completed.
            unsafe { self.release_segment(account, addr) }?;
            released += bytes;
        }
        Ok(released)
    }

    /// Releases an idle segment.
    ///
    /// # Safety
    /// No queued work uses its memory.
    unsafe fn release_segment(&mut self, account: &mut Account, addr: u64) -> Result<(), DriverError> {
        let over: BTreeSet<usize> =
            self.segments[&addr].pages.iter().flat_map(|page| page.over.iter().copied()).collect();
        for id in over {
            // SAFETY: the pages of a live block are in use, and none of this segment is. So they are behind the live one.
            unsafe { self.unmap_behind(id, self.stitched[id].live) }?;
        }
        let Segment { bytes, list, .. } = self.segments[&addr];
        // SAFETY: `create` mapped exactly this range; the caller promises that no work uses it.
        unsafe { self.memory.unmap(addr, bytes) }?;
        // An idle segment is one free block.
        self.blocks.remove(&addr);
        self.free.remove(&(list, bytes, addr));
        account.segment_removed(list, bytes);
        let pages = self.segments.remove(&addr).map_or_else(Vec::new, |segment| segment.pages);
        let released = self.memory.release(pages.into_iter().map(|page| page.handle).collect());
        released.and(self.memory.address_free(addr, bytes))
    }

    // Reports.

    /// A live or pending stitched block is a segment by itself. Of each segment, the runs of other blocks are shown.
    pub(in super::super) fn segments(&self) -> Vec<SegmentInfo> {
        let info = |addr: u64, list: FreeList| SegmentInfo {
            addr: DeviceAddr::handed_out(addr),
            bytes: 0,
            stream: list.owner.stream,
            pool: Some(PoolKind::Large),
            private: None,
            expandable: false,
            page: 0,
            blocks: Vec::new(),
        };
        let add = |segment: &mut SegmentInfo, addr: u64, bytes: u64, live: Option<&Live>| {
            let state = match live {
                None => BlockState::Free,
                Some(Live { pending: true, .. }) => BlockState::PendingFree,
                Some(_) => BlockState::Allocated,
            };
            let requested = live.map_or(0, |live| live.want.requested);
            segment.bytes += bytes;
            segment.page = segment.bytes;
            segment.blocks.push(BlockInfo { addr: DeviceAddr::handed_out(addr), bytes, requested, state });
        };
        let mut segments = Vec::new();
        for (addr, live) in self.live.iter().filter(|(_, live)| live.stitched.is_some()) {
            let mut segment = info(*addr, live.want.list);
            add(&mut segment, *addr, live.want.bytes, Some(live));
            segments.push(segment);
        }
        for (start, owner) in &self.segments {
            let mut open: Option<SegmentInfo> = None;
            for (addr, block) in self.blocks.range(*start..start + owner.bytes) {
                let live = self.live.get(addr);
                if block.busy && live.is_none() {
                    segments.extend(open.take());
                    continue;
                }
                add(open.get_or_insert_with(|| info(*addr, owner.list)), *addr, block.bytes, live);
            }
            segments.extend(open);
        }
        segments
    }
}
