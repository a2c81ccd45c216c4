//! Joins the logs of several threads into one order.

use super::log::{Chunk, Record};
use super::trace::Traced;
use crate::contract::Action;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use vramlab_device::StreamId;
use vramlab_device::clock::Scale;

/// How far stamps of different threads may be the wrong way round: a stamp is read while earlier instructions are in
/// flight, which takes a fraction of a microsecond at the very most.
const SKEW_NS: u64 = 10_000;

/// One thread's records that are not joined yet.
#[derive(Debug)]
struct Rest {
    chunks: std::vec::IntoIter<Chunk>,
    chunk: Chunk,
    at: usize,
    /// Stream of the next record.
    stream: StreamId,
}

impl Rest {
    /// The next record, where [`key`](Self::key) has found one.
    fn head(&self) -> &Record {
        &self.chunk.records()[self.at]
    }

    /// The key of the next record; goes on to the next chunk where one has ended, and keeps ended ones.
    fn key(&mut self, ended: &mut impl FnMut(Chunk)) -> Option<(u64, u64)> {
        loop {
            match self.chunk.records().get(self.at).map(Record::stream) {
                Some(None) => return self.chunk.key(self.at),
                Some(Some(stream)) => {
                    self.stream = stream;
                    self.at += 1;
                }
                None => {
                    let next = self.chunks.next()?;
                    (self.at, self.stream) = (0, next.stream);
                    ended(std::mem::replace(&mut self.chunk, next));
                }
            }
        }
    }
}

/// The next records of the logs, by key and then log.
type Heads = BinaryHeap<Reverse<((u64, u64), usize)>>;

/// The state of the order between one call and the next.
#[derive(Debug)]
pub(super) struct Merge {
    /// Whether stamps may be the wrong way round by [`SKEW_NS`] and the blocks decide.
    by_blocks: bool,
    /// What stamps are in.
    scale: Scale,
    /// [`SKEW_NS`] in ticks.
    skew: u64,
    /// Address and bytes of live blocks.
    live: BTreeMap<u64, u64>,
    /// Latest stamp.
    last: u64,
}

impl Merge {
    /// An order by stamps, in which blocks decide between close ones if `by_blocks`.
    pub(super) fn new(by_blocks: bool, scale: Scale) -> Self {
        Self { by_blocks, scale, skew: scale.ticks(SKEW_NS), live: BTreeMap::new(), last: 0 }
    }

    /// Whether a record can come next: nothing is handed out that is held, nothing is freed that is not.
    fn fits(&self, record: &Record) -> bool {
        match record.action() {
            Action::Alloc => {
                let below = self.live.range(..record.addr.saturating_add(record.block)).next_back();
                below.is_none_or(|(addr, bytes)| addr.saturating_add(*bytes) <= record.addr)
            }
            Action::FreeRequested | Action::RecordUse => self.live.contains_key(&record.addr),
            _ => true,
        }
    }

    /// The event of a record that comes next. Times do not go back.
    fn pass(&mut self, record: &Record, stream: StreamId) -> Traced {
        if self.by_blocks {
            match record.action() {
                Action::Alloc => self.live.insert(record.addr, record.block),
                Action::FreeRequested => self.live.remove(&record.addr),
                _ => None,
            };
        }
        self.last = self.last.max(record.time());
        record.event(self.scale.nanoseconds(self.last), stream)
    }

    /// Joins logs, each of which is in its thread's order; gives back up to `keep` emptied chunks for each.
    ///
    /// A record that does not fit waits for those of other threads that are close behind it. One always fits if the
    /// logs tell of things that happened: the first to have happened. Should none fit, as when a block is freed that
    /// never was here, the stamps decide.
    pub(super) fn join(&mut self, logs: Vec<Vec<Chunk>>, keep: usize) -> (Vec<Traced>, Vec<Chunk>) {
        let mut out = Vec::with_capacity(logs.iter().flatten().map(|chunk| chunk.records().len()).sum());
        let (mut spare, most) = (Vec::new(), keep * logs.len());
        let mut ended = |mut chunk: Chunk| {
            if chunk.has_room() && spare.len() < most {
                chunk.clear();
                spare.push(chunk);
            }
        };
        let rest = |chunks: Vec<Chunk>| Rest {
            chunks: chunks.into_iter(),
            chunk: Chunk::none(),
            at: 0,
            stream: StreamId::NONE,
        };
        let mut logs: Vec<Rest> = logs.into_iter().map(rest).collect();
        let mut heads = Heads::new();
        for (log, rest) in logs.iter_mut().enumerate() {
            heads.extend(rest.key(&mut ended).map(|key| Reverse((key, log))));
        }
        while let Some(log) = self.choose(&mut heads, &logs) {
            let rest = &mut logs[log];
            out.push(self.pass(rest.head(), rest.stream));
            rest.at += 1;
            heads.extend(rest.key(&mut ended).map(|key| Reverse((key, log))));
        }
        logs.into_iter().for_each(|rest| ended(rest.chunk));
        (out, spare)
    }

    /// Takes the log whose record comes next off the heads.
    fn choose(&self, heads: &mut Heads, logs: &[Rest]) -> Option<usize> {
        let first = heads.pop()?;
        let Reverse(((earliest, _), log)) = first;
        if !self.by_blocks || self.fits(logs[log].head()) {
            return Some(log);
        }
        let mut waiting = vec![first];
        let chosen = loop {
            match heads.pop() {
                Some(Reverse((key, log))) if key.0 <= earliest.saturating_add(self.skew) => {
                    if self.fits(logs[log].head()) {
                        break log;
                    }
                    waiting.push(Reverse((key, log)));
                }
                later => {
                    heads.extend(later);
                    waiting.swap_remove(0);
                    break log;
                }
            }
        };
        heads.extend(waiting);
        Some(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Path;
    use crate::instruments::log::Log;

    /// Time, action, address, bytes.
    fn record((time, action, addr, block): (u64, Action, u64, u64)) -> Record {
        Record { stamp: Record::stamp(time, action, Path::Hit), addr, size: block, block }
    }

    fn chunk(records: &[(u64, Action, u64, u64)]) -> Vec<Chunk> {
        let mut log = Log::default();
        records.iter().for_each(|one| log.push(record(*one), crate::stream(1), None));
        log.take()
    }

    fn join(merge: &mut Merge, logs: &[&[(u64, Action, u64, u64)]]) -> Vec<(u64, Action, u64)> {
        let (events, _) = merge.join(logs.iter().map(|log| chunk(log)).collect(), 1);
        events.iter().map(|Traced { event, .. }| (event.time_ns, event.action, event.addr)).collect()
    }

    use Action::{Alloc, FreeRequested as Free, RecordUse};

    #[test]
    fn stamps_that_are_the_wrong_way_round_are_put_right() {
        let mut merge = Merge::new(true, Scale::NANOSECONDS);
        // The second thread is handed a part of what the first freed, and the third the rest; the third's stamp is the
        // earliest.
        let first = [(10, Alloc, 4096, 1024), (105, Free, 4096, 1024)];
        let second = [(100, Alloc, 4608, 512), (300, Free, 4608, 512)];
        let third = [(95, Alloc, 4096, 512)];
        let expected =
            [(10, Alloc, 4096), (105, Free, 4096), (105, Alloc, 4096), (105, Alloc, 4608), (300, Free, 4608)];
        assert_eq!(join(&mut merge, &[&first, &second, &third]), expected);
        // What is live is known from one call to the next; a block may be freed by another thread.
        let expected = [(400, RecordUse, 4096), (401, Free, 4096), (401, Alloc, 4096)];
        let (first, second) = ([(400, RecordUse, 4096, 512), (401, Free, 4096, 512)], [(399, Alloc, 4096, 512)]);
        assert_eq!(join(&mut merge, &[&first, &second]), expected);
        assert_eq!(merge.live.len(), 1);
    }

    #[test]
    fn what_fits_nowhere_goes_by_its_stamp() {
        let mut merge = Merge::new(true, Scale::NANOSECONDS);
        let stranger = [(50, Free, 512, 512), (60, Alloc, 1024, 512)];
        let other = [(55, Alloc, 4096, 512), (20_000, Free, 4096, 512)];
        // The free waits for what is close behind it, and then goes.
        let expected = [(55, Alloc, 4096), (55, Free, 512), (60, Alloc, 1024), (20_000, Free, 4096)];
        assert_eq!(join(&mut merge, &[&stranger, &other]), expected);
    }

    #[test]
    fn a_counter_decides_alone_where_there_is_one() {
        let mut merge = Merge::new(false, Scale::NANOSECONDS);
        let one = |sequence: u64, action| {
            let mut log = Log::default();
            log.push(record((7, action, 512, 512)), crate::stream(1), Some(sequence));
            log.take()
        };
        let (events, _) = merge.join(vec![one(2, Alloc), one(1, Free), one(0, Alloc)], 1);
        assert_eq!(events.iter().map(|line| line.event.action).collect::<Vec<_>>(), [Alloc, Free, Alloc]);
    }

    #[test]
    fn each_record_is_on_its_stream() {
        let (mut merge, mut log) = (Merge::new(true, Scale::NANOSECONDS), Log::default());
        // Streams that change at every step, seldom and never, over the ends of chunks and of what is taken.
        let stream = |at: u64| crate::stream(if at < 100_000 { at % 2 * 7 } else { at / 70_000 });
        for (start, end) in [(0, 150_000), (150_000, 150_010), (150_010, 400_000)] {
            for at in start..end {
                log.push(record((at, Action::Oom, 0, 0)), stream(at), None);
            }
            let (events, mut spare) = merge.join(vec![log.take()], 2);
            assert!(spare.len() <= 2);
            log.keep(&mut spare);
            let expected = (start..end).map(|at| (at, stream(at).get()));
            assert!(events.iter().map(|Traced { event, .. }| (event.time_ns, event.stream)).eq(expected));
        }
    }
}
