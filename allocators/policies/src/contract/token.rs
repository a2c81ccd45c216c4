//! Tokens: the part of a block that identifies its allocator.
//!
//! Devices return the same addresses, so an address does not identify the allocator. No two allocators of a process share a token,
//! whatever their kind and wherever they are written.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The part of a [`Block`](super::Block) that identifies its allocator. Made by the allocator's [`Tokens`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Token(u64);

impl Token {
    /// The token of record `record` of the allocator, or part of one, with number `owner`.
    #[inline(always)]
    pub(crate) fn new(owner: u32, record: u32) -> Self {
        Self(u64::from(owner) << 32 | u64::from(record))
    }

    /// The numbers that it was made from, see [`new`](Self::new).
    #[inline(always)]
    pub(crate) fn parts(self) -> (u32, u32) {
        // CAST: the upper and the lower half.
        ((self.0 >> 32) as u32, self.0 as u32)
    }

    /// As stored in a block.
    #[inline(always)]
    #[cfg(target_arch = "x86_64")]
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
    /// Tokens for a new allocator. The numbers repeat after 2^32 allocators.
    #[must_use]
    pub fn next() -> Self {
        Self { owner: Self::owners(1) }
    }

    /// Tokens for an allocator whose parts have tokens of their own: the first of `parts` consecutive numbers.
    pub(crate) fn owners(parts: u32) -> u32 {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        // Relaxed: only uniqueness matters. It wraps around.
        NEXT.fetch_add(parts, Relaxed)
    }

    /// The token of an allocator that identifies its blocks by their addresses.
    #[must_use]
    pub fn token(&self) -> Token {
        self.of_record(0)
    }

    /// The token of the block with this number.
    #[must_use]
    #[inline(always)]
    pub fn of_record(&self, record: u32) -> Token {
        Token::new(self.owner, record)
    }

    /// The block's number in a token; `None` for a token of another allocator.
    #[must_use]
    #[inline(always)]
    pub fn record(&self, token: Token) -> Option<u32> {
        let (owner, record) = token.parts();
        (owner == self.owner).then_some(record)
    }
}
