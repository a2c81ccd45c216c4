//! The state of [`gmlake`](super): both pools, and blocks that wait for other streams.

use super::BACKEND;
use super::lake::{Found, Lake, Want};
use crate::backends::pooled::put_back;
use crate::contract::{AllocError, OomReport, Path};
use crate::policy::Heap;
use crate::policy::grow::{Segments as _, release_cached};
use crate::policy::pending::{Freed, Pending};
use crate::policy::size::torch::SMALL_SEGMENT;
use crate::space::{BlockId, FreeList};
use vramlab_device::{DeviceAddr, DriverError, StreamId};

/// A block that the client freed and that other streams use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Held {
    Small(BlockId),
    /// By its address.
    Large(u64),
}

/// Both pools under one lock.
#[derive(Debug)]
pub(super) struct State {
    /// The small pool, with the account of both.
    pub(super) heap: Heap,
    pub(super) lake: Lake,
    pub(super) pending: Pending<Held>,
}

impl State {
    fn capturing(&self) -> bool {
        self.heap.is_capturing()
    }

    pub(super) fn stream_of(&self, held: Held) -> StreamId {
        match held {
            Held::Small(block) => self.heap.space()[block].list.owner.stream,
            Held::Large(addr) => self.lake.stream_of(addr),
        }
    }

    /// Makes blocks reusable whose last use has completed, and remembers their addresses if requested.
    pub(super) fn put_completed(&mut self, done: Vec<Held>) {
        for held in done {
            let addr = match held {
                Held::Small(block) => self.heap.space()[block].addr,
                Held::Large(addr) => addr,
            };
            self.pending.completed.iter_mut().for_each(|completed| completed.push(DeviceAddr::handed_out(addr)));
            match held {
                Held::Small(block) => {
                    self.heap.put(block);
                }
                Held::Large(addr) => self.lake.put(self.heap.space_mut().account_mut(), addr),
            }
        }
    }

    pub(super) fn process_events(&mut self) -> Result<(), DriverError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let (driver, capturing, mut done) = (self.heap.driver(), self.capturing(), Vec::new());
        let outcome = self.pending.process(driver.as_ref(), capturing, None, &mut done);
        self.put_completed(done);
        outcome
    }

    /// Waits for every deferred free.
    pub(super) fn synchronize(&mut self) -> Result<(), DriverError> {
        self.heap.space_mut().account_mut().count_wait();
        let (driver, capturing, mut done) = (self.heap.driver(), self.capturing(), Vec::new());
        let outcome = self.pending.synchronize(driver.as_ref(), capturing, &mut done);
        self.put_completed(done);
        outcome
    }

    /// Releases idle segments while more than `keep` bytes are reserved; returns the released bytes.
    pub(super) fn release(&mut self, keep: u64) -> Result<u64, DriverError> {
        let large = self.lake.release(self.heap.space_mut().account_mut(), keep)?;
        Ok(large + release_cached(&mut self.heap, keep)?)
    }

    pub(super) fn small(
        &mut self,
        list: FreeList,
        bytes: u64,
        requested: u64,
    ) -> Result<Option<(BlockId, Path)>, DriverError> {
        let (block, path) = match self.heap.find(list, bytes, u64::MAX) {
            Some(block) if self.heap.space()[block].bytes > bytes => (block, Path::Split),
            Some(block) => (block, Path::Hit),
            None => match self.grow_small(list, bytes)? {
                Some(found) => found,
                None => return Ok(None),
            },
        };
        self.heap.take(block, list, bytes, requested);
        Ok(Some((block, path)))
    }

    fn grow_small(&mut self, list: FreeList, bytes: u64) -> Result<Option<(BlockId, Path)>, DriverError> {
        if let Some(block) = self.heap.new_segment(list, SMALL_SEGMENT)? {
            return Ok(Some((block, Path::DriverAlloc)));
        }
        if self.capturing() {
            return Ok(None);
        }
        self.synchronize()?;
        if let Some(block) = self.heap.find(list, bytes, u64::MAX) {
            return Ok(Some((block, Path::Retry)));
        }
        self.heap.space_mut().account_mut().count_retry();
        self.release(0)?;
        Ok(self.heap.new_segment(list, SMALL_SEGMENT)?.map(|block| (block, Path::Retry)))
    }

    /// The address of a large block, and the path by which it was found. `level` is the setting.
    pub(super) fn large(&mut self, level: u64, want: Want) -> Result<Found, DriverError> {
        let limit = self.heap.limit();
        let account = self.heap.space_mut().account_mut();
        let reused = self.lake.reuse(account, want);
        if reused.is_some() {
            return Ok(reused);
        }
        let stitched = if level == 0 { self.lake.stitch(account, want)? } else { None };
        if stitched.is_some() {
            return Ok(stitched);
        }
        if let Some(addr) = self.lake.grow(account, limit, want)? {
            return Ok(Some((addr, Path::DriverAlloc)));
        }
        let stitched = if level == 1 { self.lake.stitch(account, want)? } else { None };
        if stitched.is_some() || self.capturing() {
            return Ok(stitched);
        }
        self.synchronize()?;
        self.heap.space_mut().account_mut().count_retry();
        self.release(0)?;
        let account = self.heap.space_mut().account_mut();
        if let Some(addr) = self.lake.grow(account, limit, want)? {
            return Ok(Some((addr, Path::Retry)));
        }
        Ok(self.lake.stitch(account, want)?.map(|(addr, _)| (addr, Path::Retry)))
    }

    pub(super) fn refusal(&mut self, list: FreeList, requested: u64, bytes: u64) -> AllocError {
        self.heap.space_mut().account_mut().count_refusal();
        let (mut largest, mut others) = (0, 0);
        let small = self.heap.space().free_blocks().map(|block| (block.list, block.bytes));
        for (of, bytes) in small.chain(self.lake.free_blocks()) {
            if of == list {
                largest = bytes.max(largest);
            } else if of.owner != list.owner {
                others += bytes;
            }
        }
        let active = self.heap.space().account().stats().active_bytes.all.current;
        let report = OomReport::new(BACKEND.name, requested).needing(bytes).with_memory(self.heap.reserved(), active);
        let report = report.with_free(largest, others).with_limit(self.heap.limit());
        report.with_device(self.heap.driver().as_ref()).into()
    }

    pub(super) fn free(&mut self, held: Held) -> Result<Path, AllocError> {
        let users = self.pending.take_uses(held);
        if users.is_empty() {
            return match held {
                Held::Small(block) => put_back(&mut self.heap, block, &[]),
                Held::Large(addr) => {
                    let account = self.heap.space_mut().account_mut();
                    self.lake.defer(account, addr);
                    self.lake.put(account, addr);
                    Ok(Path::Hit)
                }
            };
        }
        let stream = self.stream_of(held);
        let bytes = match held {
            Held::Small(block) => {
                self.heap.space_mut().defer(block);
                self.heap.space()[block].bytes
            }
            Held::Large(addr) => self.lake.defer(self.heap.space_mut().account_mut(), addr),
        };
        let freed = Freed { block: held, bytes, stream, users, private: false };
        let (driver, capturing) = (self.heap.driver(), self.capturing());
        self.pending.wait_for(driver.as_ref(), freed, capturing)?;
        Ok(Path::Deferred)
    }
}
