//! Tokens: what a block carries to say which allocator it is from.
//!
//! Devices hand out the same addresses, so an address does not tell. No two allocators of a process have a token in common,
//! whatever their kind and wherever they are written.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// What a [`Block`](super::Block) carries to say which allocator it is from. Comes from the allocator's [`Tokens`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Token(u64);

impl Token {
    /// Of the allocator, or part of one, that has this number, for the record that has that.
    #[inline(always)]
    pub(crate) fn of(owner: u32, record: u32) -> Self {
        Self(u64::from(owner) << 32 | u64::from(record))
    }

    /// What it was made [of](Self::of).
    #[inline(always)]
    pub(crate) fn parts(self) -> (u32, u32) {
        // CAST: the upper and the lower half.
        ((self.0 >> 32) as u32, self.0 as u32)
    }

    /// As it lies in a block.
    #[inline(always)]
    pub(super) fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (owner, record) = self.parts();
        write!(f, "{owner}:{record}")
    }
}

/// The tokens of one allocator, which takes them when it is made and keeps them for its blocks.
///
/// ```
/// use vramlab_policies::Tokens;
///
/// let (mine, theirs) = (Tokens::next(), Tokens::next());
/// // An allocator that finds its blocks by address needs one token.
/// assert_ne!(mine.token(), theirs.token());
/// // One that numbers its records finds them again.
/// assert_eq!(mine.record(mine.of_record(7)), Some(7));
/// assert_eq!(theirs.record(mine.of_record(7)), None);
/// ```
// Not `Clone`: the tokens of two allocators are never the same.
#[derive(Debug, PartialEq, Eq)]
pub struct Tokens {
    owner: u32,
}

impl Tokens {
    /// Those of an allocator that is being made. They begin anew after 2^32 allocators.
    #[must_use]
    pub fn next() -> Self {
        Self { owner: Self::owners(1) }
    }

    /// Numbers for an allocator whose parts have tokens of their own: the first of `parts` that follow each other.
    pub(crate) fn owners(parts: u32) -> u32 {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // Relaxed: only uniqueness matters. It wraps around.
        NEXT.fetch_add(parts, Relaxed)
    }

    /// The token of an allocator that tells its blocks apart by their addresses.
    #[must_use]
    pub fn token(&self) -> Token {
        self.of_record(0)
    }

    /// The token of the block that an allocator has under this number.
    #[must_use]
    #[inline(always)]
    pub fn of_record(&self, record: u32) -> Token {
        Token::of(self.owner, record)
    }

    /// The number that a token was made of; `None` for a token of another allocator.
    #[must_use]
    #[inline(always)]
    pub fn record(&self, token: Token) -> Option<u32> {
        let (owner, record) = token.parts();
        (owner == self.owner).then_some(record)
    }
}
