//! Part `join`: when free neighbours coalesce.
#![forbid(unsafe_code)]

use serde::Serialize;

vramlab_device::named! {
    /// When free neighbours coalesce.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum Join {
        /// When one of them becomes free (PyTorch, RMM's pool, BFC): a free costs more, and a search finds the largest possible
        /// blocks.
        #[default]
        AtFree "at-free",
        /// When no free block fits a request ("deferred coalescing", Knuth's and Lea's): a freed block serves the next request of
        /// its size unchanged. The miss coalesces all free blocks of the list, O(n log n).
        OnMiss "on-miss",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Heap;
    use crate::policy::fit::Fit;
    use crate::policy::grow::Segments as _;
    use crate::policy::source::Source;
    use crate::policy::stream::Stream;
    use crate::space::{Account, BlockId, FreeList, Owner, Space};
    use std::sync::Arc;
    use vramlab_device::NullDriver;

    const KIB: u64 = 1024;

    fn list() -> FreeList {
        FreeList { owner: Owner::of(crate::stream(1)), pool: None }
    }

    /// A heap with one segment of 8 KiB that is split into live blocks of 1 KiB.
    fn eight(join: Join) -> (Heap, Vec<BlockId>) {
        let source = Source::Plain { driver: Arc::new(NullDriver::new(1 << 20)), limit: None };
        let mut heap = Heap::new(Space::new(Account::new()), Fit::best(), Stream::Own, source).with_join(join);
        let mut blocks = Vec::new();
        let mut rest = heap.new_segment(list(), 8 * KIB).unwrap();
        while let Some(block) = rest {
            heap.take(block, list(), KIB, KIB);
            blocks.push(block);
            rest = heap.find(list(), KIB, u64::MAX);
        }
        assert_eq!(blocks.len(), 8);
        (heap, blocks)
    }

    fn sizes(heap: &Heap) -> Vec<u64> {
        let (id, _) = heap.space().segments().next().unwrap();
        let mut next = Some(heap.space()[id].first);
        std::iter::from_fn(|| {
            let block = next?;
            next = heap.space()[block].next;
            Some(heap.space()[block].bytes / KIB)
        })
        .collect()
    }

    #[test]
    fn blocks_stay_apart_until_none_fits() {
        let (mut heap, blocks) = eight(Join::OnMiss);
        for at in [1, 0, 2, 5, 6] {
            assert!(!heap.put(blocks[at]), "a free does not coalesce");
        }
        assert_eq!(sizes(&heap), [1; 8]);
        let split = heap.space().account().stats().inactive_split_bytes;
        assert_eq!((heap.find(list(), 3 * KIB, u64::MAX), split.unwrap().all.current), (None, 5 * KIB));
        assert!(heap.join(list()));
        assert_eq!(sizes(&heap), [3, 1, 1, 2, 1]);
        let stats = heap.space().account().stats();
        assert_eq!(
            (stats.inactive_split.unwrap().all.current, stats.inactive_split_bytes.unwrap().all.current),
            (2, 5 * KIB)
        );
        let block = heap.find(list(), 3 * KIB, u64::MAX).unwrap();
        assert_eq!(heap.space()[block].bytes, 3 * KIB);
        // A segment whose blocks are all free can be released, coalesced or not.
        for at in [3, 4, 7] {
            heap.put(blocks[at]);
        }
        let idle = heap.idle_segments();
        assert_eq!(heap.release(idle[0].segment).unwrap(), 8 * KIB);
        assert_eq!(heap.find(list(), 1, u64::MAX), None);
    }

    #[test]
    fn joined_at_the_free_there_is_nothing_to_do_on_a_miss() {
        let (mut heap, blocks) = eight(Join::AtFree);
        heap.put(blocks[1]);
        assert!(heap.put(blocks[0]));
        assert_eq!(sizes(&heap), [2, 1, 1, 1, 1, 1, 1]);
        assert!(!heap.join(list()));
        assert_eq!(sizes(&heap), [2, 1, 1, 1, 1, 1, 1]);
    }
}
