//! Why a request was not served from what was free.

use super::explanation::Cause;
use vramlab::backends::CachingSettings;
use vramlab::histories::recorded::{Memory, Pool};
use vramlab::policy::size::torch::MIN_BLOCK;

/// Why a request of so many bytes on a stream finds nothing in this memory. O(pools + pending blocks).
pub(super) fn cause(memory: &Memory, settings: &CachingSettings, bytes: u64, stream: u64) -> Cause {
    let rounded = memory.rounded(bytes);
    let own = memory.pool_of(stream, bytes);
    if let Some(found) = memory.smallest_from(own, rounded) {
        let bound = settings.max_split_size.unwrap_or(u64::MAX);
        let kept = rounded < bound && found >= bound
            || rounded >= bound && found >= rounded.saturating_add(settings.max_non_split_rounding);
        return if kept { Cause::SplitLimit } else { Cause::Elsewhere };
    }
    if memory.largest(own) >= bytes.next_multiple_of(MIN_BLOCK) {
        return Cause::Rounding;
    }
    if memory.largest_with_pending(own) >= rounded {
        return Cause::Pending;
    }
    let other = Pool { small: !own.small, ..own };
    if memory.free_in(own) >= rounded {
        return Cause::Pieces;
    }
    if memory.largest(other) >= rounded {
        return Cause::Class;
    }
    let elsewhere = memory.pools().filter(|pool| pool.stream != stream).map(|pool| memory.largest(pool)).max();
    if elsewhere.is_some_and(|largest| largest >= rounded) { Cause::Stream } else { Cause::Growth }
}
