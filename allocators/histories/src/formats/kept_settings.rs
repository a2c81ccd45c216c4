//! What is kept of the allocator's settings in a snapshot. A training run has some twenty of them.

use serde_json::Value;
use vramlab_device::budget::{Claim, OverBudget};

/// Deepest nesting that is kept.
pub(super) const DEEPEST: usize = 16;

/// What the settings may still take. Sharing could make few bytes into many, and a file may hold settings more than
/// once, so it is counted over the whole file.
#[derive(Debug)]
pub(super) struct Room {
    /// Values, those in lists and dictionaries included.
    nodes: usize,
    /// Bytes of texts.
    text: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self { nodes: 1 << 14, text: 1 << 18 }
    }
}

impl Room {
    /// Takes room for a value; false when there is none.
    pub(super) fn take_node(&mut self) -> bool {
        self.nodes = self.nodes.saturating_sub(1);
        self.nodes > 0
    }

    /// Whether a list of `count` values may have room; they take it one by one.
    pub(super) fn fits(&self, count: usize) -> bool {
        count <= self.nodes
    }

    /// Takes room for a text.
    ///
    /// # Errors
    /// [`OverBudget`] where the settings would have room and the reading has none.
    pub(super) fn take_text(&mut self, text: &str, claim: &mut Claim) -> Result<Option<String>, OverBudget> {
        let Some(left) = self.text.checked_sub(text.len() + 1) else { return Ok(None) };
        claim.add(text.len())?;
        self.text = left;
        Ok(Some(text.to_owned()))
    }
}

/// Memory of the next entry of a dictionary that has `entries`: key, value, hash and place in the table, while all of
/// these double.
pub(super) fn entry_cost(entries: usize) -> usize {
    let entry = size_of::<Value>() + size_of::<String>() + 2 * size_of::<usize>();
    // Room for the first entries is made at once.
    if entries == 0 { 8 * entry } else { 4 * entry }
}
