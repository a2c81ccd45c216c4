//! Copies of the memory map that the walk over a history leaves behind, so that the few moments that are looked at closely
//! are reached without a second walk from the beginning.

use crate::recording::Recording;
use vramlab::budget::OverBudget;
use vramlab::histories::memory::Memory;

/// Into how many stretches a history is cut.
const STRETCHES: usize = 128;

/// Few copies at a time: the last one, and for each moment that may be looked at the last one before it.
pub(super) struct Checkpoints<'r> {
    recording: &'r Recording,
    kept: Vec<Checkpoint>,
    /// Number of events after which the next copy is made.
    next: usize,
}

struct Checkpoint {
    /// Events that it has seen.
    seen: usize,
    memory: Memory,
}

/// How many events are seen at a moment: those up to this one.
fn seen_at(index: usize) -> usize {
    // START is the last number there is, and nothing is seen there.
    index.wrapping_add(1)
}

impl<'r> Checkpoints<'r> {
    pub(super) fn new(recording: &'r Recording) -> Self {
        Self { recording, kept: Vec::new(), next: 0 }
    }

    /// Whether it is time for a copy when so many events were seen.
    pub(super) fn is_due(&self, seen: usize) -> bool {
        seen >= self.next
    }

    /// Copies the map as it is after so many events. `wanted` are the moments that would be looked at by what is known so
    /// far. Those that take their place lie further on, or are among them.
    pub(super) fn keep(&mut self, seen: usize, memory: &Memory, wanted: &[usize]) {
        let last = |index: usize| self.kept.iter().rposition(|kept| kept.seen <= seen_at(index));
        let needed: Vec<usize> = wanted.iter().filter_map(|index| last(*index)).collect();
        let mut at = 0..;
        self.kept.retain(|_| at.next().is_some_and(|at| needed.contains(&at)));
        // Copies together cost no more than a part of the walk, however many blocks there are.
        self.next = seen + (self.recording.events.len() / STRETCHES).max(4 * memory.blocks().len()).max(1);
        // Without room for a copy the walk begins further back.
        self.kept.extend(memory.copy().ok().map(|memory| Checkpoint { seen, memory }));
    }

    /// The map as it is after an event, or at the beginning.
    ///
    /// # Errors
    /// [`OverBudget`] when it takes more memory than there is.
    pub(super) fn memory_at(&self, index: usize) -> Result<Memory, OverBudget> {
        let seen = seen_at(index);
        let last = self.kept.iter().rfind(|kept| kept.seen <= seen);
        let (from, mut memory) = match last {
            Some(kept) => (kept.seen, kept.memory.copy()?),
            None => (0, self.recording.memory()?),
        };
        for (index, event, at_once) in self.recording.events.walk(from).take(seen - from) {
            // CAST: bounded when the history was read.
            memory.apply(&event, index as u32, at_once)?;
        }
        Ok(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reading::ReadArgs;
    use crate::recording::START;
    use std::path::Path;

    #[test]
    fn the_map_at_a_moment_is_that_of_a_walk_from_the_beginning() {
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../allocators/tests/fixtures/resnet50.limit.pickle.xz");
        let recording = Recording::read(&file, None, None, &ReadArgs::default()).unwrap();
        let count = recording.events.len();
        let points: Vec<usize> = (0..5).map(|at| at * count / 5 + 3).chain([count - 1]).collect();
        let (mut checkpoints, mut memory) = (Checkpoints::new(&recording), recording.memory().unwrap());
        let shown = |memory: &Memory| format!("{:?} {:?}", memory.segments(), memory.blocks());
        let (mut there, mut blocks) = (vec![shown(&memory)], 0);
        for (index, event, at_once) in recording.events.walk(0) {
            if checkpoints.is_due(index) {
                checkpoints.keep(index, &memory, &points);
            }
            assert!(checkpoints.kept.len() <= points.len() + 1);
            memory.apply(&event, index as u32, at_once).unwrap();
            blocks = blocks.max(memory.blocks().len());
            if points.contains(&index) {
                there.push(shown(&memory));
            }
        }
        let without = Checkpoints::new(&recording);
        for (index, there) in [START].iter().chain(&points).zip(there) {
            assert_eq!(shown(&checkpoints.memory_at(*index).unwrap()), there, "{index}");
            assert_eq!(shown(&without.memory_at(*index).unwrap()), there, "{index}");
        }
        // And nearly nothing is walked again.
        for index in points {
            let last = checkpoints.kept.iter().rfind(|kept| kept.seen <= seen_at(index)).unwrap();
            let again = seen_at(index) - last.seen;
            assert!(again <= (count / STRETCHES).max(4 * blocks), "{again} events of {count}");
        }
    }
}
