//! The events of a recording in memory, 32 bytes each.

use crate::formats::{Action, Origin, StackId, TextId};
use indexmap::IndexSet;
use vramlab_device::budget::{Budget, Claim, LongList, OverBudget};

/// An event with its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedEvent {
    /// Address, or the device's free bytes for a failed request.
    pub addr: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Stream handle.
    pub stream: u64,
    /// Time in nanoseconds.
    pub time_ns: u64,
    /// Stack, category and note.
    pub origin: Origin,
    /// Kind of event.
    pub action: Action,
}

/// All events of one GPU. Memory is claimed from the reader's budget.
#[derive(Debug)]
pub struct Events {
    packed: LongList<Packed>,
    /// Values that many events share.
    kinds: IndexSet<Kind>,
    /// The last kind of each action.
    last: [u32; Action::ALL.len()],
    /// Number of events of each action.
    counts: [usize; Action::ALL.len()],
    /// Whether frees were pending at the end.
    waits_at_end: bool,
    /// Whether events are missing after the last.
    breaks_off: bool,
    claim: Claim,
}

/// An event; shared values are an index.
#[derive(Clone, Copy, Debug)]
struct Packed {
    addr: u64,
    bytes: u64,
    time_ns: u64,
    stack: StackId,
    kind: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kind {
    action: Action,
    stream: u64,
    category: TextId,
    note: TextId,
}

/// A kind in its table, with hash and position. While the table doubles, both sizes are allocated.
const ENTRY: usize = 4 * size_of::<(Kind, u64, usize)>();

impl Events {
    /// Without events.
    #[must_use]
    pub fn new(budget: &Budget) -> Self {
        Self {
            packed: LongList::new(budget),
            kinds: IndexSet::new(),
            last: [0; Action::ALL.len()],
            counts: [0; Action::ALL.len()],
            waits_at_end: false,
            breaks_off: false,
            claim: budget.claim(),
        }
    }

    /// Adds an event.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget is used up.
    pub fn push(&mut self, event: RecordedEvent) -> Result<(), OverBudget> {
        let RecordedEvent { addr, bytes, stream, time_ns, origin, action } = event;
        let kind = self.number(Kind { action, stream, category: origin.category, note: origin.note })?;
        self.packed.push(Packed { addr, bytes, time_ns, stack: origin.stack, kind })?;
        // CAST: the number of the action.
        self.counts[action as usize] += 1;
        Ok(())
    }

    /// Number of events of an action.
    #[must_use]
    pub fn count(&self, action: Action) -> usize {
        // CAST: the number of the action.
        self.counts[action as usize]
    }

    /// Declares that frees were pending at the end: a recording without completions then has none because none happened, not
    /// because they were not recorded.
    pub fn waits_at_end(&mut self) {
        self.waits_at_end = true;
    }

    /// Declares that events are missing after the last one. If that requests a free, its completion is among them.
    pub fn breaks_off(&mut self) {
        self.breaks_off = true;
    }

    fn number(&mut self, kind: Kind) -> Result<u32, OverBudget> {
        // CAST: the number of the action.
        let last = &mut self.last[kind.action as usize];
        if self.kinds.get_index(*last as usize) == Some(&kind) {
            return Ok(*last);
        }
        if !self.kinds.contains(&kind) {
            self.claim.add(ENTRY)?;
        }
        // CAST: each claims memory, and no machine has enough for four billion.
        *last = self.kinds.insert_full(kind).0 as u32;
        Ok(*last)
    }

    fn unpacked(&self, packed: Packed) -> RecordedEvent {
        let Packed { addr, bytes, time_ns, stack, kind } = packed;
        let Kind { action, stream, category, note } = self.kinds[kind as usize];
        RecordedEvent { addr, bytes, stream, time_ns, origin: Origin { stack, category, note }, action }
    }

    /// Number of events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packed.len()
    }

    /// Whether there are no events.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// The event at an index.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<RecordedEvent> {
        self.packed.get(index).map(|packed| self.unpacked(packed))
    }

    /// The first event.
    #[must_use]
    pub fn first(&self) -> Option<RecordedEvent> {
        self.get(0)
    }

    /// The last event.
    #[must_use]
    pub fn last(&self) -> Option<RecordedEvent> {
        self.get(self.len().checked_sub(1)?)
    }

    /// All events.
    pub fn iter(&self) -> impl Iterator<Item = RecordedEvent> + Clone + '_ {
        self.iter_from(0)
    }

    /// The events from an index on.
    pub fn iter_from(&self, index: usize) -> impl Iterator<Item = RecordedEvent> + Clone + '_ {
        (index..).map_while(|index| self.get(index))
    }

    /// The events from an index on, each with its index and whether it belongs to a free that completes immediately.
    ///
    /// PyTorch can record only one of a free's two events (`skip_actions`). That one then is the complete free, and is returned
    /// as a [`Action::FreeRequested`] that completes immediately. So is a completion that is the very first event: the recording
    /// began, or lost its beginning, between the two events of a free.
    pub fn walk(&self, index: usize) -> impl Iterator<Item = (usize, RecordedEvent, bool)> + Clone + '_ {
        let requests = self.count(Action::FreeRequested) > 0;
        let completions = self.count(Action::FreeCompleted) > 0 || self.waits_at_end;
        // Whether the event completes the free that the previous one requested.
        let mut completes = false;
        let mut next = self.get(index);
        (index..).map_while(move |index| {
            let (event, completed) = (next.take()?, completes);
            next = self.get(index + 1);
            completes = event.action == Action::FreeRequested
                && next.is_some_and(|next| next.action == Action::FreeCompleted && next.addr == event.addr);
            let first = index == 0 && event.action == Action::FreeCompleted;
            let complete = match event.action {
                Action::FreeRequested => !completions || self.breaks_off && next.is_none(),
                Action::FreeCompleted => first || !requests,
                _ => false,
            };
            let action = if complete { Action::FreeRequested } else { event.action };
            Some((index, RecordedEvent { action, ..event }, completes || completed || complete))
        })
    }

    /// Index of the first event not before a time, if events are ordered by time.
    #[must_use]
    pub fn at_time(&self, time_ns: u64) -> usize {
        self.packed.partition_point(|event| event.time_ns < time_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_back_as_they_were_in_32_bytes_each() {
        let budget = Budget::default();
        let mut events = Events::new(&budget);
        let event = |at: u64| RecordedEvent {
            addr: at << 20,
            bytes: u64::MAX - at,
            stream: if at.is_multiple_of(7) { u64::MAX } else { at % 3 },
            time_ns: at / 4,
            origin: Origin::default(),
            action: Action::ALL[at as usize % Action::ALL.len()],
        };
        (0..200_000).for_each(|at| events.push(event(at)).unwrap());
        assert!(events.iter().eq((0..200_000).map(event)));
        assert_eq!((events.get(77_777), events.get(200_000)), (Some(event(77_777)), None));
        assert_eq!((events.first(), events.last()), (Some(event(0)), Some(event(199_999))));
        assert_eq!((events.at_time(5000), events.at_time(u64::MAX), events.len()), (20_000, 200_000, 200_000));
        // At most one chunk more.
        assert!(budget.peak() < 32 * (200_000 + (1 << 16)) + 100_000, "{}", budget.peak());
    }

    #[test]
    fn a_free_that_completes_at_once_is_a_pair() {
        let mut events = Events::new(&Budget::default());
        let (free, completion) = (Action::FreeRequested, Action::FreeCompleted);
        let history = [
            (free, 1),
            (completion, 1),
            (free, 2),
            (free, 3),
            (completion, 3),
            (completion, 2),
            (completion, 2),
            (free, 2),
        ];
        for (action, addr) in history {
            let rest = (8, 0, 0, Origin::default());
            let (bytes, stream, time_ns, origin) = rest;
            events.push(RecordedEvent { addr, bytes, stream, time_ns, origin, action }).unwrap();
        }
        let walked: Vec<(usize, bool)> = events.walk(1).map(|(index, _, at_once)| (index, at_once)).collect();
        assert_eq!(walked, [(1, false), (2, false), (3, true), (4, true), (5, false), (6, false), (7, false)]);
        let first = events.walk(0).next().map(|(index, event, at_once)| (index, event.addr, at_once));
        assert_eq!(first, Some((0, 1, true)));
    }

    #[test]
    fn the_only_event_of_a_free_is_all_of_it() {
        let (alloc, free, completion) = (Action::Alloc, Action::FreeRequested, Action::FreeCompleted);
        let walked = |history: &[Action], waits: bool| {
            let mut events = Events::new(&Budget::default());
            for &action in history {
                let (addr, bytes, stream, time_ns, origin) = (1, 8, 0, 0, Origin::default());
                events.push(RecordedEvent { addr, bytes, stream, time_ns, origin, action }).unwrap();
            }
            if waits {
                events.waits_at_end();
            }
            events.walk(0).map(|(_, event, at_once)| (event.action, at_once)).collect::<Vec<_>>()
        };
        assert_eq!(walked(&[alloc, free], false), [(alloc, false), (free, true)]);
        assert_eq!(walked(&[alloc, free], true), [(alloc, false), (free, false)]);
        assert_eq!(walked(&[alloc, completion], false), [(alloc, false), (free, true)]);
        // The first event is the second of a free; a later one ends a free that was pending from the start.
        let cut = [(free, true), (alloc, false), (completion, false), (free, true), (completion, true)];
        assert_eq!(walked(&[completion, alloc, completion, free, completion], false), cut);
    }
}
