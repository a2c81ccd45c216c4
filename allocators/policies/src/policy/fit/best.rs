//! Free blocks in the order of best fit: the smallest that fits first, of equal blocks the one with the lowest address.
//!
//! The blocks of a list are in sorted pieces of at most [`MOST`], contiguous in memory. A search bisects the pieces and then the
//! piece, and an insertion moves half a piece. An ordered set of the standard library compares whole keys node by node instead:
//! with it the index alone takes more than half of the instructions of `pytorch` and `pytorch-expandable` (callgrind, PyTorch's
//! GPT-2 under expandable segments).

use super::FreeBlocks;
use crate::space::{BlockId, FreeBlock, FreeList};
use std::cell::Cell;

/// Blocks of a piece; a full one is split into halves.
const MOST: usize = 64;

/// Size and address.
type Key = (u64, u64);

/// A key as one number, because a comparison of pairs branches where the sizes are equal, which is frequent.
fn order((bytes, addr): Key) -> u128 {
    u128::from(bytes) << 64 | u128::from(addr)
}

/// The free blocks of every list.
#[derive(Clone, Debug, Default)]
pub(super) struct Best {
    /// In the order of lists.
    lists: Vec<(FreeList, Sorted)>,
    /// Position of the list of the last search: the next search often uses the same list.
    last: Cell<usize>,
}

/// The free blocks of a list.
#[derive(Clone, Debug, Default)]
struct Sorted {
    /// The first key of each piece.
    firsts: Vec<Key>,
    /// Ascending. Only a single piece may be empty.
    pieces: Vec<Vec<(Key, BlockId)>>,
    /// Piece and position of the last search: the block is removed next, and one of its size is often inserted.
    last: Cell<(usize, usize)>,
}

impl Sorted {
    /// The piece with the first block from a key on, and the position in it: behind the last where the next piece begins with that
    /// block.
    fn seek(&self, key: Key) -> (usize, usize) {
        if self.is_sought(key, self.last.get()) {
            return self.last.get();
        }
        let piece = self.firsts.partition_point(|first| order(*first) <= order(key)).saturating_sub(1);
        let position =
            self.pieces.get(piece).map_or(0, |piece| piece.partition_point(|(other, _)| order(*other) < order(key)));
        self.last.set((piece, position));
        (piece, position)
    }

    /// Whether a search for a key ends at this position.
    fn is_sought(&self, key: Key, (at, place): (usize, usize)) -> bool {
        let Some(piece) = self.pieces.get(at).filter(|piece| place <= piece.len()) else { return false };
        let key = order(key);
        piece.get(place).is_none_or(|(here, _)| order(*here) >= key)
            && place
                .checked_sub(1)
                .map_or(at == 0 || order(self.firsts[at]) == key, |before| order(piece[before].0) < key)
            && self.firsts.get(at + 1).is_none_or(|next| order(*next) > key)
    }

    fn at(&self, (piece, place): (usize, usize)) -> Option<(Key, BlockId)> {
        let key = self.pieces.get(piece)?.get(place);
        key.or_else(|| self.pieces.get(piece + 1)?.first()).copied()
    }

    fn insert(&mut self, key: Key, id: BlockId) {
        let (at, place) = self.seek(key);
        if self.pieces.is_empty() {
            self.pieces.push(Vec::with_capacity(MOST));
            self.firsts.push(key);
        }
        let piece = &mut self.pieces[at];
        piece.insert(place, (key, id));
        self.firsts[at] = piece[0].0;
        if piece.len() == MOST {
            let mut upper = Vec::with_capacity(MOST);
            upper.extend(piece.drain(MOST / 2..));
            self.firsts.insert(at + 1, upper[0].0);
            self.pieces.insert(at + 1, upper);
        }
    }

    /// False when it is not in the list.
    fn remove(&mut self, key: Key, id: BlockId) -> bool {
        let (at, place) = self.seek(key);
        let is_only = self.pieces.len() == 1;
        let Some(piece) = self.pieces.get_mut(at).filter(|piece| piece.get(place) == Some(&(key, id))) else {
            return false;
        };
        piece.remove(place);
        match piece.first() {
            Some((first, _)) => self.firsts[at] = *first,
            // A single piece stays, so that a list of one block does not allocate host memory repeatedly.
            None if !is_only => {
                self.pieces.remove(at);
                self.firsts.remove(at);
            }
            None => {}
        }
        true
    }

    /// Inserts a block into the piece of the block that is removed. False, without effect, where it belongs into another piece, or
    /// the removed block is not in the index.
    fn replace(&mut self, (removed, id): (Key, BlockId), key: Key, by: BlockId) -> bool {
        let (at, place) = self.seek(removed);
        let is_last = at + 1 >= self.pieces.len();
        let Some(piece) = self.pieces.get_mut(at).filter(|piece| piece.get(place) == Some(&(removed, id))) else {
            return false;
        };
        let target = piece.partition_point(|(other, _)| order(*other) < order(key));
        if (target == 0 && at > 0) || (target == piece.len() && !is_last) {
            return false;
        }
        if target > place {
            piece.copy_within(place + 1..target, place);
            piece[target - 1] = (key, by);
        } else {
            piece.copy_within(target..place, target + 1);
            piece[target] = (key, by);
        }
        self.firsts[at] = piece[0].0;
        true
    }

    fn is_empty(&self) -> bool {
        self.pieces.iter().all(Vec::is_empty)
    }
}

impl Best {
    fn place_of(&self, list: FreeList) -> Option<usize> {
        if self.lists.get(self.last.get()).is_some_and(|(last, _)| *last == list) {
            return Some(self.last.get());
        }
        let at = self.lists.binary_search_by_key(&list, |(list, _)| *list).ok()?;
        self.last.set(at);
        Some(at)
    }

    fn of_list(&self, list: FreeList) -> Option<&Sorted> {
        Some(&self.lists[self.place_of(list)?].1)
    }
}

impl FreeBlocks for Best {
    fn insert(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) {
        let at = self.place_of(list).unwrap_or_else(|| {
            let at = self.lists.partition_point(|(other, _)| *other < list);
            self.lists.insert(at, (list, Sorted::default()));
            at
        });
        self.lists[at].1.insert((bytes, addr), id);
    }

    fn remove(&mut self, FreeBlock { list, addr, bytes, id }: FreeBlock) -> bool {
        let Some(at) = self.place_of(list) else { return false };
        let blocks = &mut self.lists[at].1;
        let known = blocks.remove((bytes, addr), id);
        // The list of a graph is not used again after its memory was released.
        if list.owner.private.is_some() && blocks.is_empty() {
            self.lists.remove(at);
        }
        known
    }

    fn replace(&mut self, removed: FreeBlock, block: FreeBlock) -> bool {
        if removed.list == block.list
            && let Some(at) = self.place_of(removed.list)
            && self.lists[at].1.replace(
                ((removed.bytes, removed.addr), removed.id),
                (block.bytes, block.addr),
                block.id,
            )
        {
            return true;
        }
        let known = self.remove(removed);
        self.insert(block);
        known
    }

    fn find(&mut self, list: FreeList, bytes: u64, largest: u64) -> Option<BlockId> {
        let blocks = self.of_list(list)?;
        let ((size, _), id) = blocks.at(blocks.seek((bytes, 0)))?;
        (size <= largest).then_some(id)
    }

    fn next_larger(&self, block: FreeBlock) -> Option<BlockId> {
        let blocks = self.of_list(block.list)?;
        blocks.at(blocks.seek((block.bytes, block.addr + 1))).map(|(_, id)| id)
    }

    fn of(&self, list: FreeList) -> Vec<FreeBlock> {
        let blocks = self.of_list(list).into_iter().flat_map(|blocks| blocks.pieces.iter().flatten());
        blocks.map(|&((bytes, addr), id)| FreeBlock { list, addr, bytes, id }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Owner;
    use std::collections::BTreeSet;

    #[test]
    fn it_is_an_ordered_set() {
        let mut state = 3_u64;
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        let list = |stream| FreeList { owner: Owner::of(crate::stream(stream)), pool: None };
        let (mut index, mut model) = (Best::default(), BTreeSet::new());
        // Miri is slow.
        let steps: u64 = if cfg!(miri) { 600 } else { 60_000 };
        for step in 0..steps {
            // It grows to some thousands, shrinks to nothing, and grows again; sizes are often equal.
            let grows = (step * 6 / steps).is_multiple_of(2);
            let (list, bytes, addr) = (list(1 + below(12)), 1 + below(40), below(4_000));
            // CAST: small numbers.
            let block = FreeBlock { list, addr, bytes, id: BlockId::numbered(addr as u32) };
            let key = (list, bytes, addr);
            match (below(10) < if grows { 9 } else { 1 }, model.contains(&key)) {
                (true, false) => {
                    model.insert(key);
                    index.insert(block);
                }
                (false, _) | (true, true) => {
                    let known = model.range((list, bytes, addr)..).next().copied().filter(|(of, ..)| *of == list);
                    assert_eq!(index.remove(block), model.remove(&key));
                    if let Some((_, bytes, addr)) = known.filter(|known| *known != key) {
                        let other = FreeBlock { list, addr, bytes, id: BlockId::numbered(addr as u32) };
                        assert_eq!((index.remove(other), model.remove(&(list, bytes, addr))), (true, true));
                    }
                }
            }
            // A block that is split, or coalesced with another.
            let (from, to) = ((list, 1 + below(40), below(4_000)), (1 + below(40), below(4_000)));
            if let Some(removed) = model.range(from..).next().copied() {
                let (to, numbered) = ((removed.0, to.0, to.1), |(list, bytes, addr)| {
                    // CAST: small numbers.
                    FreeBlock { list, addr, bytes, id: BlockId::numbered(addr as u32) }
                });
                if model.insert(to) {
                    model.remove(&removed);
                    assert!(index.replace(numbered(removed), numbered(to)));
                }
            }
            let first = |from: (FreeList, u64, u64)| model.range(from..).next().filter(|(of, ..)| *of == list);
            let best = first((list, bytes, 0)).map(|(_, _, addr)| BlockId::numbered(*addr as u32));
            assert_eq!(index.find(list, bytes, u64::MAX), best, "step {step}");
            let after = first((list, bytes, addr + 1)).map(|(_, _, addr)| BlockId::numbered(*addr as u32));
            assert_eq!(index.next_larger(block), after, "step {step}");
        }
        for stream in 1..=12 {
            let all: Vec<(u64, u64)> = index.of(list(stream)).iter().map(|block| (block.bytes, block.addr)).collect();
            let expected: Vec<(u64, u64)> =
                model.iter().filter(|(of, ..)| *of == list(stream)).map(|(_, bytes, addr)| (*bytes, *addr)).collect();
            assert_eq!(all, expected);
        }
    }
}
