//! Why a request was not served from what was free.

use super::explanation::Cause;
use vramlab::histories::memory::{Memory, Pool};
use vramlab::policy::size::torch::MIN_BLOCK;

/// Why a request of so many bytes on a stream finds nothing in this memory. O(pools + pending blocks).
pub(super) fn cause(memory: &Memory, bytes: u64, stream: u64) -> Cause {
    let rounded = memory.rules().rounded(bytes);
    let own = memory.pool_of(stream, bytes);
    if let Some(found) = memory.smallest_hole_from(own, rounded) {
        return if memory.rules().serves(found, rounded) { Cause::Elsewhere } else { Cause::SplitLimit };
    }
    if memory.largest_hole(own) >= bytes.next_multiple_of(MIN_BLOCK) {
        return Cause::Rounding;
    }
    if memory.largest_with_pending(own) >= rounded {
        return Cause::Pending;
    }
    let other = Pool { small: !own.small, ..own };
    if memory.free_bytes(own) >= rounded {
        return Cause::Pieces;
    }
    if memory.largest_hole(other) >= rounded {
        return Cause::Class;
    }
    let elsewhere = memory.pools().filter(|pool| pool.stream != stream).map(|pool| memory.largest_hole(pool)).max();
    if elsewhere.is_some_and(|largest| largest >= rounded) { Cause::Stream } else { Cause::Growth }
}
