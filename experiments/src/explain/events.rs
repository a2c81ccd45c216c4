//! The events of a history in memory, 32 bytes each.

use std::collections::HashMap;
use vramlab::budget::{Budget, Claim, LongList, OverBudget};
use vramlab::histories::trace::{Action, Origin, StackId, TextId};

/// An event, and where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::explain) struct Recorded {
    pub(in crate::explain) addr: u64,
    pub(in crate::explain) bytes: u64,
    pub(in crate::explain) stream: u64,
    pub(in crate::explain) time_ns: u64,
    pub(in crate::explain) origin: Origin,
    pub(in crate::explain) action: Action,
}

/// All events of a history.
#[derive(Debug)]
pub(in crate::explain) struct Events {
    packed: LongList<Packed>,
    /// What most events have in common with others.
    kinds: Vec<Kind>,
    numbers: HashMap<Kind, u32>,
    /// The last one of each action.
    last: [u32; Action::ALL.len()],
    claim: Claim,
}

/// An event; what few have of their own is a number.
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

/// A kind in the table, which holds both sizes for a moment when it doubles at seven eighths.
const ENTRY: usize = 4 * (size_of::<(Kind, u32)>() + 1);

impl Events {
    pub(in crate::explain) fn new(budget: &Budget) -> Self {
        Self {
            packed: LongList::new(budget),
            kinds: Vec::new(),
            numbers: HashMap::new(),
            last: [0; Action::ALL.len()],
            claim: budget.claim(),
        }
    }

    /// Adds an event.
    ///
    /// # Errors
    /// [`OverBudget`] when there is no room for another.
    pub(in crate::explain) fn push(&mut self, event: Recorded) -> Result<(), OverBudget> {
        let Recorded { addr, bytes, stream, time_ns, origin, action } = event;
        let kind = self.number(Kind { action, stream, category: origin.category, note: origin.note })?;
        self.packed.push(Packed { addr, bytes, time_ns, stack: origin.stack, kind })
    }

    fn number(&mut self, kind: Kind) -> Result<u32, OverBudget> {
        // CAST: the number of the action.
        let last = &mut self.last[kind.action as usize];
        if self.kinds.get(*last as usize) == Some(&kind) {
            return Ok(*last);
        }
        if let Some(&known) = self.numbers.get(&kind) {
            *last = known;
            return Ok(known);
        }
        self.claim.add(ENTRY)?;
        // CAST: each claims memory, of which no machine has enough for four billion.
        let number = self.kinds.len() as u32;
        self.claim.push(&mut self.kinds, kind)?;
        self.numbers.insert(kind, number);
        *last = number;
        Ok(number)
    }

    fn unpacked(&self, packed: Packed) -> Recorded {
        let Packed { addr, bytes, time_ns, stack, kind } = packed;
        let Kind { action, stream, category, note } = self.kinds[kind as usize];
        Recorded { addr, bytes, stream, time_ns, origin: Origin { stack, category, note }, action }
    }

    pub(in crate::explain) fn len(&self) -> usize {
        self.packed.len()
    }

    pub(in crate::explain) fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    pub(in crate::explain) fn get(&self, index: usize) -> Option<Recorded> {
        self.packed.get(index).map(|packed| self.unpacked(packed))
    }

    pub(in crate::explain) fn first(&self) -> Option<Recorded> {
        self.get(0)
    }

    pub(in crate::explain) fn last(&self) -> Option<Recorded> {
        self.get(self.len().checked_sub(1)?)
    }

    pub(in crate::explain) fn iter(&self) -> impl Iterator<Item = Recorded> + '_ {
        self.iter_from(0)
    }

    pub(in crate::explain) fn iter_from(&self, index: usize) -> impl Iterator<Item = Recorded> + '_ {
        self.packed.iter_from(index).map(|packed| self.unpacked(packed))
    }

    /// Index of the first event that is not before a time, in a history in the order of its times.
    pub(in crate::explain) fn at_time(&self, time_ns: u64) -> usize {
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
        let event = |at: u64| Recorded {
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
        // No more than one piece beyond them.
        assert!(budget.peak() < 32 * (200_000 + (1 << 16)) + 100_000, "{}", budget.peak());
    }
}
