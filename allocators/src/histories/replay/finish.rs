//! Ends a compilation: what only the whole history tells.

use super::ReplayError;
use super::beginning::Beginning;
use super::builder::{HistoryBuilder, OpenWindow, wrong};
use super::history::History;
use super::memory::When;
use super::op::{BY_DEVICE, Kind, MAX_STREAMS, NEVER, NO_STREAM, Op, Release};
use super::windows::{Cause, End};
use crate::backends::CachingSettings;
use crate::ordered::OrderedSet;
use crate::steps;

impl HistoryBuilder {
    /// Ends the history. `settings` are those under which it was recorded: the limit tells a retry from a call of
    /// `empty_cache`.
    ///
    /// # Errors
    /// [`ReplayError::Event`] for a free of what was never allocated if that was [not
    /// expected](Self::expect_complete), and [`ReplayError::History`] when deferred frees need more than
    /// [`MAX_STREAMS`] further streams. [`ReplayError::TooLarge`] when the [budget](Self::within) is used up.
    pub fn finish(mut self, settings: &CachingSettings) -> Result<History, ReplayError> {
        self.make_room()?;
        if let Some((addr, op)) = self.just_freed.take().filter(|_| !self.breaks_off) {
            self.waiting.insert(addr, op);
            self.most_waiting = self.most_waiting.max(self.waiting.len());
            self.deferred.push(op);
        }
        self.close_window(End::Other);
        self.make_room_to_finish()?;
        if let Some(unknown) = self.unknown.first().filter(|_| self.complete) {
            let what = format!("free of {} bytes at {:#x}, which were never allocated", unknown.bytes, unknown.addr);
            return Err(wrong(unknown.number, what));
        }
        let mut beginning = self.look_back()?;
        self.tell_held_up_sizes(&beginning, settings);
        let retries = self.explain(settings, beginning.reserved());
        let streams = self.sort_streams(&mut beginning);
        // A log in which every free completes at once does not tell when those with announced uses did.
        let tells = self.completes && !self.deferred.is_empty();
        let further_streams = if tells { self.defer(streams.len())? } else { self.leave_to_device() };
        let deferred = self.deferred.iter().filter(|number| tells && !self.is_before(**number)).count() as u64;
        self.complete_beginning(&mut beginning, settings)?;
        let pools = self.tell_pools(&beginning, &streams, settings)?;
        self.empty_before_private_pools(&retries);
        let out_of_memory = self.out_of_memory(&beginning, &streams, settings);
        let not_comparable = self.not_comparable(&beginning);
        // The history holds it.
        self.claim.keep();
        let client = |op: &&Op| !matches!(op.kind(), Kind::Nothing | Kind::Refused);
        let prologue = beginning.blocks.len() as u64;
        Ok(History {
            operations: self.ops.iter().filter(client).count() as u64,
            allocations: self.addresses.len() as u64 + prologue,
            max_live: (self.highest + beginning.requested().cast_signed()).cast_unsigned(),
            beginning,
            ops: self.ops,
            addresses: self.addresses,
            segments: self.segments,
            slots: self.slots,
            streams,
            further_streams,
            events: self.events,
            refused: self.refused,
            out_of_memory,
            deferred,
            pools,
            not_comparable,
        })
    }

    /// Tells how large the blocks were whose frees were held up, where that tells why segments went back.
    fn tell_held_up_sizes(&mut self, beginning: &Beginning, settings: &CachingSettings) {
        fn asking(open: &&mut OpenWindow) -> bool {
            open.window.asks_for_sizes(open.end)
        }
        let mut open = std::mem::take(&mut self.open);
        if let Some(last) = open.iter_mut().rev().find(asking).map(|open| open.placeholder) {
            // Only sizes are asked for.
            let streams = vec![0; self.streams.len()];
            let mut windows = open.iter_mut().filter(asking).peekable();
            self.follow_memory(beginning, &streams, settings, last, |at, when, memory| {
                if when == When::After {
                    return;
                }
                let Some(next) = windows.peek_mut() else { return };
                let arrived = next.placeholder == at;
                // The block that was freed right before is still there when the operation comes that frees it; one from
                // before the first event is pending until its window.
                if let Some(before) = next.window.before.as_mut().filter(|before| before.op == at || arrived) {
                    before.size = before.size.or(memory.size_of(before.addr));
                }
                if arrived {
                    for held_up in &mut next.window.completions {
                        steps::count(1);
                        held_up.size = memory.size_of(held_up.addr);
                    }
                    windows.next();
                }
            });
        }
        self.open = open;
    }

    /// Requests of a private pool never release what is cached: what looked like it was a call of `empty_cache` right before,
    /// with which `torch.cuda.graph` begins. `retries` are operations, in order.
    fn empty_before_private_pools(&mut self, retries: &[u32]) {
        let of_private = |op: &&u32| {
            let op = self.ops[**op as usize];
            op.kind() == Kind::Alloc && op.pool() > 0
        };
        let requests: OrderedSet<u32> = retries.iter().filter(of_private).copied().collect();
        if requests.is_empty() {
            return;
        }
        for request in &requests {
            self.ops[*request as usize - 1].set_kind(Kind::Trim);
        }
        for op in self.ops.iter_mut().filter(|op| op.kind() == Kind::Release) {
            let release = Release::unpack(op.value);
            if requests.contains(&release.ready) {
                op.value = Release { ready: release.ready - 1, ..release }.pack();
            }
        }
        for segment in self.segments.iter_mut().filter(|segment| segment.released && requests.contains(&segment.op)) {
            segment.op -= 1;
        }
    }

    /// Decides in each window why segments went back; `reserved` bytes were held before the first event. Returns the requests
    /// that were tried again.
    fn explain(&mut self, settings: &CachingSettings, reserved: u64) -> Vec<u32> {
        let mut retries = Vec::new();
        let refused_from = self.refused_from(settings, reserved).filter(|_| settings.memory_limit.is_none());
        for open in std::mem::take(&mut self.open) {
            let OpenWindow { mut window, placeholder, first, end } = open;
            window.reserved = window.reserved.wrapping_add(reserved);
            window.refused_from = refused_from;
            if settings.garbage_collection_threshold > 0.0 || settings.max_split_size.is_some() {
                // What goes then depends on what is free, so a free that seems to have completed at once is taken for
                // one that did.
                window.before = None;
            }
            let cause = window.cause(settings, end);
            let trims = cause == Cause::Trim;
            if trims {
                self.ops[placeholder as usize].set_kind(Kind::Trim);
            }
            if cause == Cause::Retry && window.released {
                retries.push(placeholder + 1);
            }
            self.complete(&window, cause, if trims { placeholder } else { placeholder + 1 });
            let count = window.segments.len();
            for segment in self.segments[first..first + count].iter_mut().filter(|segment| segment.released) {
                segment.refused = matches!(cause, Cause::Full | Cause::Device);
                if trims {
                    segment.op = placeholder;
                }
            }
        }
        retries
    }

    fn not_comparable(&self, beginning: &Beginning) -> Option<String> {
        if let Some(unseen) = &self.unseen {
            return Some(unseen.clone());
        }
        let why = beginning.unknown.as_ref().map_or(String::new(), |why| format!(", and {why}"));
        if why.is_empty() && self.segments.is_empty() && beginning.segments.is_empty() {
            return Some("the history has no segments whose addresses could be used".into());
        }
        // What lies outside of the segments that the history makes lies in those from before.
        if why.is_empty() && !beginning.segments.is_empty() {
            return None;
        }
        if let Some(unknown) = self.unknown.first() {
            let number = unknown.number;
            return Some(format!(
                "the history is incomplete: event {number} frees a block from before its first event{why}"
            ));
        }
        self.outside.map(|number| {
            format!("the history is incomplete: event {number} lies in no segment whose allocation it shows{why}")
        })
    }

    /// Numbers streams by their handles, as allocators order them; the handles.
    fn sort_streams(&mut self, beginning: &mut Beginning) -> Vec<u64> {
        let mut handles: Vec<(u64, u32)> = self.streams.drain().collect();
        handles.sort_unstable();
        let mut rank = vec![0; handles.len()];
        for (at, (_, number)) in handles.iter().enumerate() {
            // CAST: at most `MAX_STREAMS`.
            rank[*number as usize] = at as u32;
        }
        let frees = self.pending.iter_mut().map(|pending| &mut pending.op);
        let ops = self.ops.iter_mut().filter(|op| !matches!(op.kind(), Kind::Trim | Kind::Nothing));
        for op in ops.chain(frees) {
            op.set_stream(rank[op.stream() as usize]);
            if op.kind() == Kind::Release {
                let release = Release::unpack(op.value);
                op.value = Release { user: rank[release.user as usize], ..release }.pack();
            }
        }
        beginning.renumber(&rank);
        handles.into_iter().map(|(handle, _)| handle).collect()
    }

    /// Frees complete when the announced uses are done; the history does not say more.
    fn leave_to_device(&mut self) -> u32 {
        for op in self.ops.iter_mut().filter(|op| op.kind() == Kind::Release) {
            op.value = Release { ready: BY_DEVICE, user: NO_STREAM }.pack();
        }
        0
    }

    /// Gives each deferred free the stream that held it up; how many streams that takes beside the recorded ones.
    ///
    /// Allocators look at a stream's pending frees in order and stop at the first whose event is not ready, so a
    /// stream fits when the free before on it completes no later. The stream whose use was announced last is taken if
    /// it fits, otherwise the one whose last completion is latest, which needs the fewest streams. Other announced uses
    /// are left out: which of them held the block up is not known, and the wrong one would hold up others.
    fn defer(&mut self, recorded: usize) -> Result<u32, ReplayError> {
        let mut deferred = std::mem::take(&mut self.deferred);
        // Frees from before the first event come first, in the order in which they complete.
        deferred.sort_unstable_by_key(|&number| match self.is_before(number) {
            true => (0, Release::unpack(self.op_mut(number).value).ready),
            false => (1, number),
        });
        let mut announced = Vec::with_capacity(deferred.len());
        for &number in &deferred {
            let op = self.op_mut(number);
            announced.push(op.kind() == Kind::Release);
            op.set_kind(Kind::Free);
        }
        // What completed at once had no use that was still running.
        for op in &mut self.ops {
            match op.kind() {
                Kind::Release => op.set_kind(Kind::Free),
                Kind::Use => op.set_kind(Kind::Nothing),
                _ => {}
            }
        }
        let mut last = vec![0; recorded];
        // CAST: at most `MAX_STREAMS`.
        let mut ends: OrderedSet<(u32, u32)> = (0..recorded as u32).map(|stream| (0, stream)).collect();
        for (&number, announced) in deferred.iter().zip(announced) {
            let op = self.op_mut(number);
            let release = Release::unpack(op.value);
            let ready = if release.ready == BY_DEVICE { NEVER } else { release.ready };
            let own = op.stream();
            let other = |stream: &&(u32, u32)| {
                steps::count(1);
                stream.1 != own
            };
            let fit = || ends.range(..=(ready, u32::MAX)).rev().find(other);
            let user = if announced && last[release.user as usize] <= ready {
                release.user
            } else if let Some((_, stream)) = fit() {
                *stream
            } else if last.len() - recorded >= MAX_STREAMS {
                let text = format!("its deferred frees complete in an order that needs {MAX_STREAMS} more streams");
                return Err(ReplayError::History(text));
            } else {
                last.push(0);
                last.len() as u32 - 1
            };
            ends.remove(&(last[user as usize], user));
            ends.insert((ready, user));
            last[user as usize] = ready;
            op.set_kind(Kind::Release);
            op.value = Release { ready, user }.pack();
        }
        self.deferred = deferred;
        // CAST: as above.
        Ok((last.len() - recorded) as u32)
    }
}
