//! Third stage: how large the blocks were whose frees were held up, where that says why segments went back.

use super::memory::{self, When};
use super::transcript::Transcript;
use super::windows::ClosedWindow;
use crate::history::Beginning;
use crate::steps;
use vramlab_device::budget::OverBudget;
use vramlab_policies::backends::CachingSettings;

/// Fills in the sizes in the closed windows that ask for them.
///
/// # Errors
/// [`OverBudget`] when following the memory takes more than there is.
pub(super) fn find_sizes(
    transcript: &mut Transcript,
    beginning: &Beginning,
    settings: &CachingSettings,
) -> Result<(), OverBudget> {
    fn asking(closed: &&mut ClosedWindow) -> bool {
        closed.window.asks_for_sizes(closed.end)
    }
    let mut closed = std::mem::take(&mut transcript.windows.closed);
    if let Some(last) = closed.iter_mut().rev().find(asking).map(|closed| closed.placeholder) {
        // Only sizes are asked for, so any stream will do.
        let streams = vec![0; transcript.slots.stream_count()];
        let mut windows = closed.iter_mut().filter(asking).peekable();
        let Transcript { timeline, frees, budget, .. } = &*transcript;
        memory::follow((timeline, frees), (beginning, &streams), (settings, budget), last, |at, when, memory| {
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
        })?;
    }
    transcript.windows.closed = closed;
    Ok(())
}
