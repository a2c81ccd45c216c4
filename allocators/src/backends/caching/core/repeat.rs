//! The last allocation of a stream, made again and again.
//!
//! A free that directly follows its allocation undoes it: the blocks, the index and the levels are what they were
//! before. So an equal request that comes next gets the same block by the same path, and again, as long as nothing else
//! happens. Such rounds need not be carried out: the cache keeps the block when it comes back, gives it out when the same
//! is asked for, and counts. Whoever looks at the cache, or wants anything else of it, first has the rounds put on the
//! books ([`BlockCache::settle`](super::block_cache::BlockCache::settle)), and finds what it would have found without
//! all this. The first round is carried out at once: one that nobody repeats would only be work put off.

use super::blocks::{BlockIndex, NONE};

/// See the [module](self). Nothing is known of the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Repeat {
    /// Record of the block that was handed out last by way of the index, if nothing happened since.
    served: BlockIndex,
    /// Record of the block of which a whole round was seen, while it is out and nothing else happens.
    known: BlockIndex,
    /// Record of such a block that came back, which is not on the books.
    kept: BlockIndex,
    /// Bytes that were asked for in the block that was handed out last and came back at once; 0 if there is none.
    undone: u64,
    /// Bytes that were asked for in the known or kept block. Rounding has no other input, so equal requests are of equal size.
    requested: u64,
    /// Whether it was cut off a larger one.
    split: bool,
    /// Whether there is anything that is not on the books.
    owes: bool,
    /// Rounds of a free and an allocation that are not on the books.
    rounds: u64,
}

/// What is not on the books.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outstanding {
    /// Record of the block, which the books have as handed out.
    pub(super) index: BlockIndex,
    /// Rounds of a free and an equal allocation.
    pub(super) rounds: u64,
    /// Whether it came back after them.
    pub(super) held: bool,
}

impl Repeat {
    /// Whether there is something to settle.
    #[inline(always)]
    pub(super) fn owes(&self) -> bool {
        self.owes
    }

    /// A block was handed out by way of the index.
    #[inline(always)]
    pub(super) fn served(&mut self, index: BlockIndex, split: bool, requested: u64) {
        (self.served, self.known) = (index, NONE);
        if self.undone == requested {
            (self.known, self.split, self.requested) = (index, split, requested);
        }
        self.undone = 0;
    }

    /// A block went back to the index.
    #[inline(always)]
    pub(super) fn returned(&mut self, index: BlockIndex, requested: u64) {
        self.undone = if self.served == index { requested } else { 0 };
        (self.served, self.known) = (NONE, NONE);
    }

    /// Whether the block is out and a whole round of it was seen, so that it can be [kept](Self::hold).
    #[inline(always)]
    pub(super) fn can_hold(&self, index: BlockIndex) -> bool {
        self.known == index
    }

    /// Keeps the block that comes back; says whether it was cut off a larger one.
    #[inline(always)]
    pub(super) fn hold(&mut self) -> bool {
        (self.served, self.known, self.kept) = (NONE, NONE, self.known);
        self.owes = true;
        self.split
    }

    /// Gives the kept block out, if there is one, for an equal request; the block, and whether it was cut off a larger
    /// one.
    #[inline(always)]
    pub(super) fn give_again(&mut self, requested: u64) -> Option<(BlockIndex, bool)> {
        if self.kept == NONE || self.requested != requested {
            return None;
        }
        (self.known, self.kept) = (self.kept, NONE);
        self.rounds += 1;
        Some((self.known, self.split))
    }

    /// Something else happens.
    #[inline(always)]
    pub(super) fn forget(&mut self) {
        (self.served, self.known, self.undone) = (NONE, NONE, 0);
    }

    /// Forgets everything; what was not on the books, if there was anything.
    pub(super) fn settle(&mut self) -> Option<Outstanding> {
        let Self { known, kept, rounds, owes, .. } = std::mem::take(self);
        owes.then_some(Outstanding { index: known | kept, rounds, held: kept != NONE })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block that can be kept.
    fn known(index: BlockIndex, split: bool, requested: u64) -> Repeat {
        let mut repeat = Repeat::default();
        repeat.served(index, split, requested);
        repeat.returned(index, requested);
        repeat.served(index, split, requested);
        repeat
    }

    #[test]
    fn a_block_is_kept_after_one_whole_round() {
        let mut repeat = Repeat::default();
        for can in [false, true] {
            repeat.served(7, true, 100);
            assert_eq!((repeat.can_hold(7), repeat.can_hold(8), repeat.give_again(100)), (can, false, None));
            if !can {
                repeat.returned(7, 100);
            }
        }
        assert!(!repeat.owes() && repeat.hold() && repeat.owes());
        assert_eq!((repeat.give_again(101), repeat.give_again(100)), (None, Some((7, true))));
        assert!(repeat.owes() && repeat.can_hold(7) && !repeat.can_hold(8) && repeat.hold());
        assert!(!repeat.can_hold(7), "a block that is kept is not out");
        assert_eq!(repeat.settle(), Some(Outstanding { index: 7, rounds: 1, held: true }));
        assert_eq!(repeat, Repeat::default());
    }

    #[test]
    fn what_is_given_again_is_owed() {
        let mut repeat = known(7, false, 100);
        assert_eq!({ repeat }.settle(), None);
        assert!(!repeat.hold());
        assert_eq!({ repeat }.settle(), Some(Outstanding { index: 7, rounds: 0, held: true }));
        repeat.give_again(100).expect("the block is kept");
        assert_eq!(repeat.settle(), Some(Outstanding { index: 7, rounds: 1, held: false }));
    }

    #[test]
    fn whatever_comes_between_ends_it() {
        let other = |between: fn(&mut Repeat)| {
            let mut repeat = Repeat::default();
            repeat.served(7, false, 100);
            between(&mut repeat);
            repeat.returned(7, 100);
            repeat.served(7, false, 100);
            repeat.can_hold(7)
        };
        assert!(other(|_| {}));
        assert!(!other(|repeat| repeat.served(8, false, 100)));
        assert!(!other(|repeat| repeat.returned(8, 100)));
        assert!(!other(|repeat| assert_eq!(repeat.settle(), None)));
        assert!(!other(Repeat::forget));
        let mut repeat = known(7, false, 100);
        repeat.returned(8, 100);
        assert!(!repeat.can_hold(7));
        let mut repeat = known(7, false, 100);
        repeat.served(8, false, 100);
        assert!(!repeat.can_hold(7));
    }

    #[test]
    fn another_request_of_the_same_rounded_size_is_another_request() {
        let mut repeat = Repeat::default();
        repeat.served(7, false, 100);
        repeat.returned(7, 100);
        repeat.served(7, false, 99);
        assert!(!repeat.can_hold(7));
    }
}
