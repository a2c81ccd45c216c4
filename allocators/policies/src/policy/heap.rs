//! The memory of an allocator, on which its parts work: blocks, the index of free ones, the source, deferred frees.

mod checkpoint;
mod extend;
mod segments;
pub(super) mod shared;
mod take_pages;

use super::fit::Fit;
use super::grow::Segments as _;
use super::join::Join;
use super::pending::{Freed, Pending};
use super::source::Source;
use super::stream::{LastFrees, Stream};
use crate::contract::CaptureId;
use crate::space::{Account, BlockId, FreeList, Joined, Owner, Space, State};
use std::collections::BTreeSet;
use std::sync::Arc;
use vramlab_device::{DeviceAddr, Driver, DriverError, EventId, StreamId};

/// The memory of an allocator with the state that its parts need. A policy searches it, takes and frees blocks, and allocates
/// segments.
#[derive(Debug)]
pub struct Heap {
    space: Space,
    fit: Fit,
    join: Join,
    stream: Stream,
    source: Source,
    pending: Pending,
    /// Private pools whose segments stay reserved: their graph may be launched, or the pool may serve another request.
    pinned: BTreeSet<CaptureId>,
    /// Number of open captures.
    captures: usize,
    /// The first error by which other streams cannot take freed blocks for now.
    event_error: Option<DriverError>,
    /// Whether all work on the device has completed and no more follows, at the end.
    ended: bool,
}

impl Heap {
    /// An empty heap, of parts without blocks.
    ///
    /// # Panics
    /// When the space has a segment: it would not come from the source, to which segments are released.
    #[must_use]
    pub fn new(space: Space, fit: Fit, stream: Stream, source: Source) -> Self {
        assert!(space.segments().next().is_none(), "a heap begins empty");
        Self {
            space,
            fit,
            join: Join::default(),
            stream,
            source,
            pending: Pending::default(),
            pinned: BTreeSet::new(),
            captures: 0,
            event_error: None,
            ended: false,
        }
    }

    /// A heap without pools, whose segments are one driver allocation each. `limit` is the maximum of reserved bytes.
    #[must_use]
    pub fn plain(driver: Arc<dyn Driver>, limit: Option<u64>, fit: Fit) -> Self {
        Self::new(Space::new(Account::new()), fit, Stream::Own, Source::Plain { driver, limit })
    }

    /// Lets streams take the free blocks of other streams. The heap is still empty.
    #[must_use]
    pub fn with_steals(self) -> Self {
        Self { stream: Stream::Steal(LastFrees::default()), ..self }
    }

    /// Sets the rule for coalescing. The heap is still empty.
    #[must_use]
    pub fn with_join(self, join: Join) -> Self {
        Self { join, ..self }
    }

    /// The segments and blocks.
    #[must_use]
    pub fn space(&self) -> &Space {
        &self.space
    }

    pub(crate) fn space_mut(&mut self) -> &mut Space {
        &mut self.space
    }

    pub(crate) fn pending(&self) -> &Pending {
        &self.pending
    }

    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// Changes the maximum of reserved bytes. Nothing is released.
    pub fn set_limit(&mut self, bytes: Option<u64>) {
        self.source.set_limit(bytes);
    }

    pub(crate) fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(self.source.driver())
    }

    // Search, take, free.

    /// The size from which on part `fit` [always finds](crate::policy::fit::FreeBlocks::surely_found) a free block for `bytes`.
    #[must_use]
    pub fn surely_found(&self, bytes: u64) -> u64 {
        self.fit.surely_found(bytes)
    }

    /// A free block of `list` that has at least `bytes` and at most `largest`, by part `fit`.
    pub fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let block = self.fit.find(list, bytes, largest);
        debug_assert!(
            block.map(|block| &self.space[block]).is_none_or(|block| {
                (block.state, block.list) == (State::Free, list) && (bytes..=largest).contains(&block.bytes)
            }),
            "part `fit` should return a free block of the requested list and size"
        );
        block
    }

    /// A free block that fits, of another stream whose blocks may be taken, by part `stream`. Later work of the list's stream waits
    /// on the device until that block's last use has completed.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn steal(&mut self, list: FreeList, bytes: u64, largest: u64) -> Result<Option<BlockId>, DriverError> {
        for other in self.others(list) {
            if let Some(block) = self.fit.find(other, bytes, largest) {
                self.stream.order(self.source.driver().as_ref(), other.owner.stream, list.owner.stream)?;
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// Takes over all free blocks of other streams, one stream after another, until a fitting block exists. Later work of the
    /// list's stream waits on the device until the last uses of the taken blocks have completed. With `record` its own event is
    /// recorded again behind these waits, for streams that take from it before its next free.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn take_over(
        &mut self,
        list: FreeList,
        bytes: u64,
        largest: u64,
        record: bool,
    ) -> Result<Option<BlockId>, DriverError> {
        for other in self.others(list) {
            // Wait for an event only where the list has a block.
            if self.fit.find(other, 0, u64::MAX).is_none() {
                continue;
            }
            let driver = self.driver();
            self.stream.order(driver.as_ref(), other.owner.stream, list.owner.stream)?;
            for block in self.fit.drain(other) {
                self.give(block.id, list);
            }
            if record {
                let capturing = self.is_capturing();
                self.stream.freed(driver.as_ref(), list.owner.stream, capturing)?;
            }
            if let Some(block) = self.fit.find(list, bytes, largest) {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// The lists of other streams that may serve a request of this list.
    fn others(&mut self, list: FreeList) -> Vec<FreeList> {
        if !matches!(self.stream, Stream::Steal(_)) || list.owner.private.is_some() {
            return Vec::new();
        }
        self.stream.came(list.owner.stream);
        let others = self.stream.others(list.owner.stream).into_iter();
        others.map(|stream| FreeList { owner: Owner::of(stream), pool: list.pool }).collect()
    }

    /// Allocates the front `bytes` of a free block to the client of `list`, who requested `requested` bytes; the remainder stays
    /// free.
    pub fn take(&mut self, block: BlockId, list: FreeList, bytes: u64, requested: u64) {
        let free = self.space.as_free(block);
        match self.space.take(block, bytes, requested) {
            Some(rest) => self.fit.replace_by_new(free, self.space.as_free(rest)),
            None => self.fit.remove(free),
        }
        if self.space[block].list.owner != list.owner {
            self.space.hand_over(block, list.owner);
        }
    }

    /// The free block with all of `bytes` from `addr` on. O(log n); the first call indexes every free block by its address.
    pub(crate) fn free_around(&mut self, addr: u64, bytes: u64) -> Option<BlockId> {
        self.fit.list_addresses(self.space.free_blocks());
        self.fit.at(addr).filter(|block| block.addr + block.bytes >= addr + bytes).map(|block| block.id)
    }

    /// As [`take`](Self::take), from `addr` on, an address in the free block: its front and its remainder stay free.
    pub(crate) fn take_at(&mut self, block: BlockId, addr: u64, list: FreeList, bytes: u64, requested: u64) -> BlockId {
        let block = self.begin_free(block, addr);
        self.take(block, list, bytes, requested);
        block
    }

    /// Allocates the last `bytes` of a free block; its front stays free. Returns the live block.
    pub fn take_end(&mut self, block: BlockId, list: FreeList, bytes: u64, requested: u64) -> BlockId {
        self.fit.remove(self.space.as_free(block));
        let end = self.space.take_end(block, bytes, requested);
        if end != block {
            self.fit.insert(self.space.as_free(block));
        }
        if self.space[end].list.owner != list.owner {
            self.space.hand_over(end, list.owner);
        }
        end
    }

    /// Puts a block that is not in the index on a list, coalesced with free neighbours of that list.
    fn give(&mut self, block: BlockId, list: FreeList) {
        let joined = self.space.give(block, list.owner);
        self.index_joined(&joined);
    }

    /// Inserts a freed block into the index, in the place of the neighbours that it was coalesced with.
    fn index_joined(&mut self, joined: &Joined) {
        match joined.absorbed {
            [Some(front), behind] => {
                behind.into_iter().for_each(|behind| self.fit.remove(behind));
                self.fit.replace(front, joined.block);
            }
            [None, Some(behind)] => self.fit.replace(behind, joined.block),
            [None, None] => self.fit.insert(joined.block),
        }
    }

    /// Makes a live or pending block reusable, coalesced with its free neighbours; true when there were any.
    pub fn put(&mut self, block: BlockId) -> bool {
        self.end_export(block);
        if matches!(self.stream, Stream::Arena) {
            self.space.hand_back(block);
        }
        let freed = self.space[block].addr..self.space[block].addr + self.space[block].bytes;
        let joined = match self.join {
            Join::AtFree => self.space.free(block),
            Join::OnMiss => Joined { absorbed: [None, None], block: self.space.free_apart(block) },
        };
        self.index_joined(&joined);
        self.note_pages(freed, joined.block);
        let owner = joined.block.list.owner;
        if owner.private.is_none() && matches!(self.stream, Stream::Steal(_)) {
            let capturing = self.is_capturing();
            let freed = self.stream.freed(self.source.driver().as_ref(), owner.stream, capturing);
            self.event_error = self.event_error.take().or(freed.err());
        }
        joined.any()
    }

    /// Coalesces the free blocks of a list, where [`Join::OnMiss`] did not do so earlier; true when there were any free neighbours.
    /// O(n log n) in the blocks.
    pub fn join(&mut self, list: FreeList) -> bool {
        if self.join == Join::AtFree {
            return false;
        }
        let mut blocks = self.fit.drain(list);
        blocks.sort_unstable_by_key(|block| block.addr);
        let (mut absorbed, mut any) = (BTreeSet::new(), false);
        for block in blocks {
            if absorbed.contains(&block.id) {
                continue;
            }
            let joined = self.space.give(block.id, list.owner);
            // The block in front was inserted into the index before; the block behind was not.
            let [front, behind] = joined.absorbed;
            front.into_iter().for_each(|front| self.fit.remove(front));
            absorbed.extend(behind.map(|behind| behind.id));
            any |= joined.any();
            self.fit.insert(joined.block);
        }
        any
    }

    /// Splits a free block into two free ones: its front of `bytes`, and the remainder, which is returned.
    ///
    /// # Panics
    /// When the block is not free, or one of the two would be empty.
    pub fn cut(&mut self, block: BlockId, bytes: u64) -> BlockId {
        self.fit.remove(self.space.as_free(block));
        let rest = self.space.cut_apart(block, bytes);
        self.fit.insert(self.space.as_free(block));
        self.fit.insert_new(self.space.as_free(rest));
        rest
    }

    /// Coalesces a free block with the free one behind it in its list, where [`Join::OnMiss`] did not do so earlier.
    ///
    /// # Panics
    /// When one of them is not free, or they are of different lists.
    pub fn join_behind(&mut self, block: BlockId) {
        self.fit.remove(self.space.as_free(block));
        let behind = self.space.join_behind(block);
        self.fit.remove(behind);
        self.fit.insert(self.space.as_free(block));
    }

    // Segments.

    /// Splits a new segment into known blocks, see [`Space::carve`].
    pub(crate) fn carve(&mut self, whole: BlockId, parts: &[(u64, Option<u64>)]) -> Vec<BlockId> {
        self.fit.remove(self.space.as_free(whole));
        let blocks = self.space.carve(whole, parts);
        for (block, _) in blocks.iter().zip(parts).filter(|(_, (_, requested))| requested.is_none()) {
            self.fit.insert(self.space.as_free(*block));
        }
        blocks
    }

    // Deferred frees.

    /// Announces that work on `user` uses a live block.
    pub(crate) fn announce(&mut self, block: BlockId, user: StreamId) {
        if user != self.space[block].list.owner.stream {
            self.pending.announce(block, user);
        }
    }

    /// Removes a stream whose work has completed from all blocks that wait for it.
    pub(crate) fn forget_stream(&mut self, stream: StreamId) {
        let mut completed = Vec::new();
        self.pending.forget_stream(stream, &mut completed);
        self.put_completed(completed);
    }

    /// Whether another stream was announced to use a live block.
    pub(crate) fn is_used_elsewhere(&self, block: BlockId) -> bool {
        self.pending.is_used_elsewhere(block)
    }

    /// Keeps an error of a deferred free for [`take_pending_error`](Self::take_pending_error).
    pub(crate) fn note_pending_error(&mut self, error: DriverError) {
        self.pending.note_error(error);
    }

    /// Removes and returns the streams that were announced to use a block.
    pub(crate) fn take_uses(&mut self, block: BlockId) -> Vec<StreamId> {
        self.pending.take_uses(block)
    }

    /// Defers the free of a live or pending block; it is reusable when the queued work of `users` has completed.
    ///
    /// # Errors
    /// Those of the driver; the block waits nevertheless.
    pub fn put_after(&mut self, block: BlockId, users: &[StreamId]) -> Result<(), DriverError> {
        if self.space[block].state == State::Held {
            self.space.defer(block);
        }
        let (bytes, Owner { stream, private }) = (self.space[block].bytes, self.space[block].list.owner);
        let freed = Freed { block, bytes, stream, users: users.to_vec(), private: private.is_some() };
        let capturing = self.is_capturing();
        self.pending.wait_for(self.source.driver().as_ref(), freed, capturing)
    }

    /// Records an event on a stream; `None` while the stream is captured. Return it by [`reuse`](Self::reuse).
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn record_event(&mut self, stream: StreamId) -> Result<Option<EventId>, DriverError> {
        let capturing = self.is_capturing();
        self.pending.events().record(self.source.driver().as_ref(), stream, capturing)
    }

    /// Takes back an event that nothing waits for.
    pub(crate) fn reuse(&mut self, event: EventId) {
        self.pending.events().reuse(event);
    }

    /// Sets whether blocks that other streams use in a capture may be reused within it.
    pub(crate) fn reuse_in_captures(&mut self, on: bool) {
        self.pending.reuse_in_captures(on);
    }

    pub(crate) fn reuses_in_captures(&self) -> bool {
        self.pending.reuses_in_captures()
    }

    /// Makes blocks reusable whose last use by another stream has completed. Does not wait.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn process_events(&mut self) -> Result<(), DriverError> {
        self.process(None)
    }

    /// As [`process_events`](Self::process_events), for a request of a stream. In a capture the stream decides which blocks it may
    /// have.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn process_events_for(&mut self, stream: StreamId) -> Result<(), DriverError> {
        self.process(Some(stream))
    }

    fn process(&mut self, asking: Option<StreamId>) -> Result<(), DriverError> {
        if self.pending.is_empty() {
            return self.take_event_error();
        }
        let (capturing, mut done) = (self.is_capturing(), Vec::new());
        let outcome = self.pending.process(self.source.driver().as_ref(), capturing, asking, &mut done);
        self.put_completed(done);
        self.take_event_error().and(outcome)
    }

    /// Makes pending blocks reusable, and remembers their addresses if requested.
    fn put_completed(&mut self, done: Vec<BlockId>) {
        for block in done {
            let addr = DeviceAddr::handed_out(self.space[block].addr);
            self.pending.completed.iter_mut().for_each(|completed| completed.push(addr));
            self.put(block);
        }
    }

    /// See [`Completions::tell_completed`](crate::contract::Completions::tell_completed).
    pub(crate) fn completed(&mut self) -> &mut Option<Vec<DeviceAddr>> {
        &mut self.pending.completed
    }

    /// The error, if there was one, by which other streams cannot take a block that was just [put](Self::put).
    ///
    /// # Errors
    /// That error.
    pub(crate) fn take_event_error(&mut self) -> Result<(), DriverError> {
        self.event_error.take().map_or(Ok(()), Err)
    }

    /// The error of a deferred free that no free call returned. It is returned once.
    ///
    /// # Errors
    /// That error.
    pub(crate) fn take_pending_error(&mut self) -> Result<(), DriverError> {
        self.pending.take_error().map_or(Ok(()), Err)
    }

    // Graphs.

    /// Notes the begin of a capture, whose memory is the private pool `private`.
    pub(crate) fn begin_capture(&mut self, private: CaptureId) {
        self.pin(private);
        self.captures += 1;
    }

    /// Keeps the segments of a private pool reserved until [`unpin`](Self::unpin).
    pub(crate) fn pin(&mut self, private: CaptureId) {
        self.pinned.insert(private);
    }

    pub(crate) fn end_capture(&mut self) {
        self.captures -= 1;
    }

    /// The graph of a private pool was destroyed, or the pool was released.
    pub(crate) fn unpin(&mut self, private: CaptureId) {
        self.pinned.remove(&private);
    }

    /// Whether a graph may use the segments of a list, so that they stay reserved.
    fn is_pinned(&self, list: FreeList) -> bool {
        list.owner.private.is_some_and(|private| self.pinned.contains(&private))
    }

    pub(crate) fn unpin_all(&mut self) {
        self.pinned.clear();
        self.captures = 0;
    }

    // Reports.

    pub(crate) fn reset_peaks(&mut self) {
        self.space.account_mut().reset_peaks();
        self.pending.reset_peaks();
    }

    /// Waits for the device at the end, so that no stream is waited for from now on: a program may have destroyed its streams
    /// before its allocator, and a driver that gets the handle of such a stream may crash.
    pub(crate) fn end(&mut self) {
        self.source.end_exports();
        self.ended = !self.is_capturing() && self.source.driver().device_synchronize().is_ok();
    }

    /// Destroys every event, at the end.
    pub(crate) fn destroy_events(&mut self) {
        let events = [self.pending.events().take(), self.stream.take_events(), self.source.take_events()].concat();
        for event in events {
            // SAFETY: the event is in no queue any more and belongs to this heap only. An error cannot be returned here.
            let _ = unsafe { self.source.driver().event_destroy(event) };
        }
    }
}

#[cfg(test)]
mod tests;
