//! Where in the program blocks come from: stacks of frames, each kept once.

use super::columns::Columns;

/// Stacks by number, from 1; 0 is that nothing is known.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// Lines of the user's code in words.
    pub(super) lines: Vec<String>,
    /// Frames in words.
    pub(super) frames: Vec<String>,
    /// The line that a stack is known by, from 1 (0: none), and its frames, the innermost first.
    pub(super) stacks: Vec<(u32, Vec<u32>)>,
}

impl Places {
    /// The columns that `data.js` reads, where there are stacks.
    pub(super) fn columns(&self) -> Option<Columns> {
        if self.stacks.is_empty() {
            return None;
        }
        let mut columns = Columns::default();
        columns.push(self.stacks.iter().map(|(line, _)| u64::from(*line)));
        columns.push(self.stacks.iter().map(|(_, frames)| frames.len() as u64));
        let frames: Vec<u32> = self.stacks.iter().flat_map(|(_, frames)| frames.iter().copied()).collect();
        columns.push(frames.into_iter().map(u64::from));
        Some(columns)
    }
}
