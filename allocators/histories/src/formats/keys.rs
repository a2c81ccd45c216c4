//! Which keys the dictionaries of a snapshot have. Each release of PyTorch writes a few more, so they tell which wrote it.

use super::words::Word;

/// The keys of a snapshot that have a meaning here, wherever they stand in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keys(u64);

// A bit for each word.
const _: () = assert!(Word::ALL.len() <= u64::BITS as usize);

impl Keys {
    pub(super) fn add(&mut self, key: Word) {
        self.0 |= Self::bit(key);
    }

    /// Whether any key was found: other formats have none.
    #[must_use]
    pub fn any(self) -> bool {
        self.0 != 0
    }

    /// Whether the snapshot has this key.
    #[must_use]
    pub fn has(self, key: &str) -> bool {
        Word::of(key).is_some_and(|word| self.0 & Self::bit(word) != 0)
    }

    fn bit(key: Word) -> u64 {
        1 << (key as u8)
    }
}
