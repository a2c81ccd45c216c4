//! What the parts of an allocator work on: its memory, the index of its free blocks, its source, its pending frees.

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

/// The memory of an allocator with what its parts need. A policy searches it, takes blocks and puts them back, and asks for segments when it has to.
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
    /// The first error by which blocks that were put are of no use to other streams for now.
    event_error: Option<DriverError>,
    /// Whether all work on the device is over and no more comes, at the end.
    ended: bool,
}

impl Heap {
    /// An empty heap, of parts that know of no block yet.
    ///
    /// # Panics
    /// When the space holds a segment: it would not be the source's, to which idle segments go back.
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

    /// A heap without pools, whose segments are one call of the driver each. `limit` is the most bytes that are held.
    #[must_use]
    pub fn plain(driver: Arc<dyn Driver>, limit: Option<u64>, fit: Fit) -> Self {
        Self::new(Space::new(Account::new()), fit, Stream::Own, Source::Plain { driver, limit })
    }

    /// Lets streams take the free blocks of others. The heap is still empty.
    #[must_use]
    pub fn with_steals(self) -> Self {
        Self { stream: Stream::Steal(LastFrees::default()), ..self }
    }

    /// Sets the rule for joining free neighbours. The heap is still empty.
    #[must_use]
    pub fn with_join(self, join: Join) -> Self {
        Self { join, ..self }
    }

    /// The memory that is held.
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

    /// Changes the most bytes that may be held from the device. Nothing goes back for it.
    pub fn set_limit(&mut self, bytes: Option<u64>) {
        self.source.set_limit(bytes);
    }

    pub(crate) fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(self.source.driver())
    }

    // Searching, taking, putting back.

    /// Bytes from which on part `fit` [surely finds](crate::policy::fit::FreeBlocks::surely_found) a free block for `bytes`.
    #[must_use]
    pub fn surely_found(&self, bytes: u64) -> u64 {
        self.fit.surely_found(bytes)
    }

    /// A free block of `list` that has at least `bytes` and at most `largest`, by part `fit`.
    pub fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let found = self.fit.find(list, bytes, largest);
        debug_assert!(
            found.map(|block| &self.space[block]).is_none_or(|found| {
                (found.state, found.list) == (State::Free, list) && (bytes..=largest).contains(&found.bytes)
            }),
            "part `fit` should find what was asked for"
        );
        found
    }

    /// A free block that fits, of another stream whose blocks may be taken, by part `stream`. Later work of the list's stream waits on the
    /// device until that block's last use is over.
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

    /// Takes over all free blocks of other streams, one stream after another, until one that fits has come together. Later
    /// work of the list's stream waits on the device until the last uses of what it took are over. With `record` its own
    /// event is recorded again behind these waits, for those who take from it before its next free.
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
            // An event is waited for only where there is something to wait for.
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

    /// The lists of other streams that may serve a request of this one.
    fn others(&mut self, list: FreeList) -> Vec<FreeList> {
        if !matches!(self.stream, Stream::Steal(_)) || list.owner.private.is_some() {
            return Vec::new();
        }
        self.stream.came(list.owner.stream);
        let others = self.stream.others(list.owner.stream).into_iter();
        others.map(|stream| FreeList { owner: Owner::of(stream), pool: list.pool }).collect()
    }

    /// Hands a free block to the client of `list`, who asked for `requested` bytes: its front `bytes`; the rest stays free.
    pub fn take(&mut self, block: BlockId, list: FreeList, bytes: u64, requested: u64) {
        let whole = self.space.as_free(block);
        match self.space.take(block, bytes, requested) {
            Some(rest) => self.fit.replace_by_new(whole, self.space.as_free(rest)),
            None => self.fit.remove(whole),
        }
        if self.space[block].list.owner != list.owner {
            self.space.hand_over(block, list.owner);
        }
    }

    /// The free block that has all of `bytes` from `addr` on. O(log n); the first call lists every free block by its address.
    pub(crate) fn free_around(&mut self, addr: u64, bytes: u64) -> Option<BlockId> {
        self.fit.list_addresses(self.space.free_blocks());
        self.fit.at(addr).filter(|block| block.addr + block.bytes >= addr + bytes).map(|block| block.id)
    }

    /// As [`take`](Self::take), from `addr` on, which is in the free block: the front and the rest stay free.
    pub(crate) fn take_at(&mut self, block: BlockId, addr: u64, list: FreeList, bytes: u64, requested: u64) -> BlockId {
        let block = self.begin_free(block, addr);
        self.take(block, list, bytes, requested);
        block
    }

    /// Hands out the last `bytes` of a free block; what lies in front of them stays free. Returns the block that is held.
    pub fn take_end(&mut self, block: BlockId, list: FreeList, bytes: u64, requested: u64) -> BlockId {
        self.fit.remove(self.space.as_free(block));
        let held = self.space.take_end(block, bytes, requested);
        if held != block {
            self.fit.insert(self.space.as_free(block));
        }
        if self.space[held].list.owner != list.owner {
            self.space.hand_over(held, list.owner);
        }
        held
    }

    /// Puts a block that the index does not have now on a list, joined with free neighbours of that.
    fn give(&mut self, block: BlockId, list: FreeList) {
        let joined = self.space.give(block, list.owner);
        self.index_joined(&joined);
    }

    /// Puts what became of a block into the index, in the place of its neighbours that are a part of it now.
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

    /// Makes a held or pending block reusable, joined with its free neighbours; true when there were any.
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

    /// Joins the free blocks of a list with their neighbours, where [`Join::OnMiss`] left them apart; true when there were
    /// any to join. O(n log n) in the blocks.
    pub fn join(&mut self, list: FreeList) -> bool {
        if self.join == Join::AtFree {
            return false;
        }
        let mut blocks = self.fit.drain(list);
        blocks.sort_unstable_by_key(|block| block.addr);
        let (mut gone, mut any) = (BTreeSet::new(), false);
        for block in blocks {
            if gone.contains(&block.id) {
                continue;
            }
            let joined = self.space.give(block.id, list.owner);
            // What lies in front has been back in the index for a while; what lies behind is not there yet.
            let [front, behind] = joined.absorbed;
            front.into_iter().for_each(|front| self.fit.remove(front));
            gone.extend(behind.map(|behind| behind.id));
            any |= joined.any();
            self.fit.insert(joined.block);
        }
        any
    }

    /// Cuts a free block in two that stay free: its front of `bytes`, and the rest, which is returned.
    ///
    /// # Panics
    /// When the block is not free, or nothing would be left on a side.
    pub fn cut(&mut self, block: BlockId, bytes: u64) -> BlockId {
        self.fit.remove(self.space.as_free(block));
        let rest = self.space.cut_apart(block, bytes);
        self.fit.insert(self.space.as_free(block));
        self.fit.insert_new(self.space.as_free(rest));
        rest
    }

    /// Joins a free block with the free one behind it in its list, where [`Join::OnMiss`] left them apart.
    ///
    /// # Panics
    /// When one of them is not free, or they are of different lists.
    pub fn join_behind(&mut self, block: BlockId) {
        self.fit.remove(self.space.as_free(block));
        let gone = self.space.join_behind(block);
        self.fit.remove(gone);
        self.fit.insert(self.space.as_free(block));
    }

    // Segments.

    /// Cuts a new segment into blocks that are known, see [`Space::carve`].
    pub(crate) fn carve(&mut self, whole: BlockId, parts: &[(u64, Option<u64>)]) -> Vec<BlockId> {
        self.fit.remove(self.space.as_free(whole));
        let blocks = self.space.carve(whole, parts);
        for (block, _) in blocks.iter().zip(parts).filter(|(_, (_, requested))| requested.is_none()) {
            self.fit.insert(self.space.as_free(*block));
        }
        blocks
    }

    // Frees that wait.

    /// Announces that work on `user` uses a held block.
    pub(crate) fn announce(&mut self, block: BlockId, user: StreamId) {
        if user != self.space[block].list.owner.stream {
            self.pending.announce(block, user);
        }
    }

    /// Lets no block wait for a stream whose work is done.
    pub(crate) fn forget_stream(&mut self, stream: StreamId) {
        let mut done = Vec::new();
        self.pending.forget_stream(stream, &mut done);
        self.put_completed(done);
    }

    /// Whether another stream was announced to use a held block.
    pub(crate) fn is_used_elsewhere(&self, block: BlockId) -> bool {
        self.pending.is_used_elsewhere(block)
    }

    /// Keeps an error of a pending free for [`take_pending_error`](Self::take_pending_error).
    pub(crate) fn note_pending_error(&mut self, error: DriverError) {
        self.pending.note_error(error);
    }

    /// The streams that a block was announced to, which are forgotten here.
    pub(crate) fn take_uses(&mut self, block: BlockId) -> Vec<StreamId> {
        self.pending.take_uses(block)
    }

    /// Takes a held or pending block back that waits for what is queued on some streams; it is reusable when that is done.
    ///
    /// # Errors
    /// Those of the driver; the block waits all the same.
    pub fn put_after(&mut self, block: BlockId, users: &[StreamId]) -> Result<(), DriverError> {
        if self.space[block].state == State::Held {
            self.space.defer(block);
        }
        let (bytes, Owner { stream, private }) = (self.space[block].bytes, self.space[block].list.owner);
        let freed = Freed { block, bytes, stream, users: users.to_vec(), private: private.is_some() };
        let capturing = self.is_capturing();
        self.pending.wait_for(self.source.driver().as_ref(), freed, capturing)
    }

    /// Queues an event on a stream; `None` while the stream is captured. It goes back by [`reuse`](Self::reuse).
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn record_event(&mut self, stream: StreamId) -> Result<Option<EventId>, DriverError> {
        let capturing = self.is_capturing();
        self.pending.events().record(self.source.driver().as_ref(), stream, capturing)
    }

    /// Takes back an event that is no longer waited for.
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

    /// Makes blocks reusable whose last use by another stream is over. Does not wait.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn process_events(&mut self) -> Result<(), DriverError> {
        self.process(None)
    }

    /// As [`process_events`](Self::process_events), for a request of a stream. In a capture that is what tells which blocks it may have.
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

    /// Makes pending blocks reusable, and remembers where they lay if that is asked for.
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

    /// The error, if there was one, by which a block that was just [put](Self::put) is of no use to other streams for now.
    ///
    /// # Errors
    /// That one.
    pub(crate) fn take_event_error(&mut self) -> Result<(), DriverError> {
        self.event_error.take().map_or(Ok(()), Err)
    }

    /// An error by which a pending free was set aside outside of a free. It is given once.
    ///
    /// # Errors
    /// That one.
    pub(crate) fn take_pending_error(&mut self) -> Result<(), DriverError> {
        self.pending.take_error().map_or(Ok(()), Err)
    }

    // Graphs.

    /// A graph is being captured, whose memory is the private pool `private`.
    pub(crate) fn begin_capture(&mut self, private: CaptureId) {
        self.pin(private);
        self.captures += 1;
    }

    /// Lets the segments of a private pool stay until [`unpin`](Self::unpin).
    pub(crate) fn pin(&mut self, private: CaptureId) {
        self.pinned.insert(private);
    }

    pub(crate) fn end_capture(&mut self) {
        self.captures -= 1;
    }

    /// The graph of a private pool is gone, or the pool was released.
    pub(crate) fn unpin(&mut self, private: CaptureId) {
        self.pinned.remove(&private);
    }

    /// Whether a graph may use the segments of a list, so that they stay.
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
            // SAFETY: the event is in no queue any more and belongs to this heap alone. An error cannot be returned here.
            let _ = unsafe { self.source.driver().event_destroy(event) };
        }
    }
}

#[cfg(test)]
mod tests;
