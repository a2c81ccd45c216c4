//! The memory budget for reading a file.
//!
//! A file contains the sizes of its parts, which may be wrong: a few kilobytes can claim gigabytes, and a stream may never end.
//! Memory that a reader keeps and that exceeds a few hundred kilobytes is therefore claimed from a [`Budget`] *before* it is
//! allocated, and a claim that exceeds the budget ends the reading with one line.

mod long_list;

pub use long_list::LongList;

use crate::bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Maximum bytes of a reading. Clones share them: all parts of a reading use one budget.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limit: u64,
    held: AtomicU64,
    peak: AtomicU64,
}

/// A reading needs more memory than its [`Budget`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it takes at least {} of memory to read, and the limit is {}; if the file is sound, allow more with --read-memory",
    Bytes(*needed), Bytes(*limit)
)]
pub struct OverBudget {
    /// Claimed bytes, and the additional bytes that were needed.
    pub needed: u64,
    /// Bytes of the budget.
    pub limit: u64,
}

impl Budget {
    /// Bytes of [`Budget::default`]: 1 GiB.
    pub const DEFAULT: u64 = 1 << 30;

    /// A budget of `limit` bytes.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Shared { limit, held: AtomicU64::new(0), peak: AtomicU64::new(0) }))
    }

    /// Maximum of claimed bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Claimed bytes.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.0.held.load(Relaxed)
    }

    /// Peak of claimed bytes.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.0.peak.load(Relaxed)
    }

    /// An empty claim, which can grow.
    #[must_use]
    pub fn claim(&self) -> Claim {
        Claim { budget: self.clone(), bytes: 0 }
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(Self::DEFAULT)
    }
}

/// Claimed bytes. They return to the budget when the claim is dropped.
#[derive(Debug)]
pub struct Claim {
    budget: Budget,
    bytes: u64,
}

impl Claim {
    /// Bytes of this claim.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Claims further bytes; to be called before they are allocated.
    ///
    /// # Errors
    /// [`OverBudget`] when the budget has fewer left; the claim does not change then.
    pub fn add(&mut self, bytes: usize) -> Result<(), OverBudget> {
        // CAST: a size in memory.
        let bytes = bytes as u64;
        let shared = &*self.budget.0;
        // No other memory is published by this sum, so its order does not matter.
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= shared.limit);
        match shared.held.fetch_update(Relaxed, Relaxed, fits) {
            Ok(before) => {
                if before + bytes > shared.peak.load(Relaxed) {
                    shared.peak.fetch_max(before + bytes, Relaxed);
                }
                self.bytes += bytes;
                Ok(())
            }
            Err(held) => Err(OverBudget { needed: held.saturating_add(bytes), limit: shared.limit }),
        }
    }

    /// The error for more bytes than any budget has.
    pub fn refuse(&self) -> OverBudget {
        OverBudget { needed: u64::MAX, limit: self.budget.limit() }
    }

    /// Returns bytes to the budget, at most the claimed ones; to be called after the memory was freed.
    pub fn sub(&mut self, bytes: usize) {
        // CAST: a size in memory.
        let bytes = (bytes as u64).min(self.bytes);
        self.bytes -= bytes;
        self.budget.0.held.fetch_sub(bytes, Relaxed);
    }

    /// Changes the claim to `bytes` bytes.
    ///
    /// # Errors
    /// Those of [`add`](Self::add).
    #[inline]
    pub fn set(&mut self, bytes: usize) -> Result<(), OverBudget> {
        // CAST: sizes in memory.
        match (bytes as u64).checked_sub(self.bytes) {
            Some(0) => Ok(()),
            Some(more) => self.add(more as usize),
            None => {
                self.sub(self.bytes as usize - bytes);
                Ok(())
            }
        }
    }

    /// Makes room for `more` items. Growing doubles a vector, where the budget allows it, and claims both sizes temporarily.
    ///
    /// # Errors
    /// [`OverBudget`]; the vector does not change then.
    #[inline]
    pub fn reserve<T>(&mut self, items: &mut Vec<T>, more: usize) -> Result<(), OverBudget> {
        if items.capacity() - items.len() >= more { Ok(()) } else { self.grow(items, more) }
    }

    #[cold]
    fn grow<T>(&mut self, items: &mut Vec<T>, more: usize) -> Result<(), OverBudget> {
        let (before, needed) = (items.capacity(), items.len().saturating_add(more));
        let bytes = |count: usize| count.saturating_mul(size_of::<T>());
        let mut count = needed.max(before.saturating_mul(2)).max(4);
        if self.add(bytes(count)).is_err() {
            // Near the limit by less, which is still a fraction of the current size, so that copies stay few.
            count = needed.max(before.saturating_add(before / 8));
            self.add(bytes(count))?;
        }
        items.reserve_exact(count - items.len());
        self.sub(bytes(before));
        Ok(())
    }

    /// Adds an item.
    ///
    /// # Errors
    /// Those of [`reserve`](Self::reserve).
    #[inline]
    pub fn push<T>(&mut self, items: &mut Vec<T>, item: T) -> Result<(), OverBudget> {
        self.reserve(items, 1)?;
        items.push(item);
        Ok(())
    }

    /// Frees a vector that was grown with this claim.
    pub fn free<T>(&mut self, items: Vec<T>) {
        let bytes = items.capacity() * size_of::<T>();
        drop(items);
        self.sub(bytes);
    }

    /// Ends the claim without returning its bytes: they belong to the result of the reading.
    pub fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.budget.0.held.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_claimed_goes_back() {
        let budget = Budget::new(100);
        let (mut one, mut other) = (budget.claim(), budget.clone().claim());
        one.add(60).unwrap();
        other.add(40).unwrap();
        assert_eq!(one.add(1), Err(OverBudget { needed: 101, limit: 100 }));
        assert_eq!(one.add(usize::MAX), Err(OverBudget { needed: u64::MAX, limit: 100 }));
        one.sub(10);
        one.add(5).unwrap();
        assert_eq!((budget.held(), budget.peak(), one.bytes()), (95, 100, 55));
        drop(one);
        other.keep();
        assert_eq!((budget.held(), budget.peak()), (40, 100));
    }

    #[test]
    fn a_vector_is_claimed_before_it_grows() {
        let budget = Budget::new(8 * (1024 + 2048));
        let mut claim = budget.claim();
        let mut items: Vec<u64> = Vec::new();
        let over = loop {
            if let Err(over) = claim.push(&mut items, 7) {
                break over;
            }
            assert_eq!(budget.held(), 8 * items.capacity() as u64);
        };
        // 2,048 and twice that are too many, and so are 2,048 and an eighth more.
        assert_eq!((items.len(), over.needed), (2048, 8 * (2048 + 2304)));
        assert_eq!(budget.peak(), 8 * (1024 + 2048));
        claim.free(items);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_refusal_says_what_was_needed_and_what_to_do() {
        let over = OverBudget { needed: 3 << 30, limit: 1 << 30 };
        assert_eq!(
            over.to_string(),
            "it takes at least 3 GiB of memory to read, and the limit is 1 GiB; if the file is sound, allow more with \
             --read-memory"
        );
    }
}
