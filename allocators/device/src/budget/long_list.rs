//! A list that grows in pieces: nothing is copied, and at most one piece is claimed in advance.

use super::{Budget, Claim, OverBudget};

/// Items of a piece.
const PIECE: usize = 1 << 16;

/// A list of small items within a [`Budget`], for files of any length: a doubling vector needs both sizes temporarily.
#[derive(Debug)]
pub struct LongList<T> {
    /// All but the last have [`PIECE`] items.
    pieces: Vec<Vec<T>>,
    len: usize,
    claim: Claim,
}

impl<T: Copy> LongList<T> {
    /// An empty list.
    #[must_use]
    pub fn new(budget: &Budget) -> Self {
        Self { pieces: Vec::new(), len: 0, claim: budget.claim() }
    }

    /// Number of items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an item.
    ///
    /// # Errors
    /// [`OverBudget`]; the list does not change then.
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), OverBudget> {
        match self.pieces.last_mut() {
            Some(last) if last.len() < PIECE && last.len() < last.capacity() => last.push(item),
            _ => self.push_where_full(item)?,
        }
        self.len += 1;
        Ok(())
    }

    #[cold]
    fn push_where_full(&mut self, item: T) -> Result<(), OverBudget> {
        match &mut self.pieces[..] {
            // A short list needs little memory.
            [first] if first.len() < PIECE => return self.claim.push(first, item),
            [] => self.claim.push(&mut self.pieces, Vec::new())?,
            _ => {
                self.claim.reserve(&mut self.pieces, 1)?;
                self.claim.add(PIECE * size_of::<T>())?;
                self.pieces.push(Vec::with_capacity(PIECE));
            }
        }
        match self.pieces.last_mut() {
            Some(last) => self.claim.push(last, item),
            None => Ok(()),
        }
    }

    /// The item at an index.
    #[must_use]
    #[inline]
    pub fn get(&self, at: usize) -> Option<T> {
        self.pieces.get(at / PIECE)?.get(at % PIECE).copied()
    }

    /// Replaces the item at an index; false if there is none.
    pub fn set(&mut self, at: usize, item: T) -> bool {
        let slot = self.pieces.get_mut(at / PIECE).and_then(|piece| piece.get_mut(at % PIECE));
        slot.map(|slot| *slot = item).is_some()
    }

    /// The items from an index on.
    pub fn iter_from(&self, at: usize) -> impl Iterator<Item = T> + '_ {
        let pieces = self.pieces.get(at / PIECE..).unwrap_or_default();
        let (first, rest) = pieces.split_first().map_or((&[][..], pieces), |(first, rest)| (&first[..], rest));
        let first = first.get(at % PIECE..).unwrap_or_default();
        first.iter().chain(rest.iter().flatten()).copied()
    }

    /// Index of the first item for which `is_before` is false, in a list that is ordered by it.
    #[must_use]
    pub fn partition_point(&self, mut is_before: impl FnMut(&T) -> bool) -> usize {
        let full = self.pieces.partition_point(|piece| piece.last().is_some_and(&mut is_before));
        let rest = self.pieces.get(full).map(|piece| full * PIECE + piece.partition_point(is_before));
        rest.unwrap_or(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: u64 = 2 * PIECE as u64 + 5;

    fn numbers(budget: &Budget) -> LongList<u64> {
        let mut list = LongList::new(budget);
        (0..MANY).for_each(|number| list.push(number).unwrap());
        list
    }

    #[test]
    fn items_are_where_they_were_put() {
        let mut list = numbers(&Budget::default());
        assert_eq!(list.len() as u64, MANY);
        for at in [0, 4, PIECE - 1, PIECE, 2 * PIECE, list.len()] {
            assert_eq!(list.get(at), (at < list.len()).then_some(at as u64));
            assert_eq!(list.partition_point(|number| *number < at as u64), at);
            assert!(list.iter_from(at).eq(at as u64..MANY), "{at}");
        }
        assert_eq!(list.iter_from(list.len() + PIECE).count(), 0);
        assert!(list.set(PIECE, 7) && !list.set(list.len(), 7));
        assert_eq!(list.get(PIECE), Some(7));
        assert!(LongList::<u8>::new(&Budget::default()).is_empty());
    }

    #[test]
    fn what_is_claimed_is_what_is_there_and_at_most_a_piece_more() {
        let budget = Budget::default();
        let list = numbers(&budget);
        let there = 8 * MANY;
        assert!((there..=there + 8 * PIECE as u64 + 1024).contains(&budget.peak()), "{}", budget.peak());
        drop(list);
        assert_eq!(budget.held(), 0);
        // A short list needs little memory.
        let mut short = LongList::new(&budget);
        (0..10_u64).for_each(|number| short.push(number).unwrap());
        assert!(budget.held() < 512, "{}", budget.held());
        // All of a budget can be used.
        let budget = Budget::new(there + 1024);
        let mut list = LongList::new(&budget);
        let over = (0..MANY).find_map(|number| list.push(number).err()).unwrap();
        assert_eq!((over.limit, list.len()), (there + 1024, 2 * PIECE));
    }
}
