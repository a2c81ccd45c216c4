//! How little memory a recording needs: a lower bound, and an offline placement as an upper bound.
//!
//! An allocator decides without knowing later requests. Afterwards everything is known: the size of each block, and its lifetime.
//! Then placing the blocks is a packing problem (dynamic storage allocation): each block is a rectangle as wide as its lifetime
//! and as high as its size, and may only move up and down. [`plan`] solves it well, though not always optimally; [`lower_bound`]
//! shows how well.
//!
//! - **Bound.** Peak active bytes. A block counts from its allocation to the completion of its free, rounded up to [512
//!   bytes](UNIT) as in PyTorch. No allocator with that rounding reserves less, unless its frees wait for work that is still
//!   running (`cuMemFree` does).
//! - **Plan.** An offset for each block, so that no two conflicting blocks overlap.
//! - **Gap.** The plan's size over the bound, minus one.
//!
//! # Streams
//! When is the memory of a block of stream `a` free? For a later block of the same stream, from the free on: work is done in
//! stream order. If other streams used the block, from the completion of that free on, by which the host knows that their work is
//! done. For a block of another stream the host's order proves nothing: work of `a` that was queued before the free may still be
//! running. There are two models ([`CrossStream`]):
//!
//! - [`AfterWait`](CrossStream::AfterWait): the new owner's stream waits for an event behind the free. Every allocator could do
//!   that, so policies are compared with this plan.
//! - [`KnownOrder`](CrossStream::KnownOrder): memory changes streams or pools only where the host has observed that the work is
//!   complete. Each stream has a clock: the latest free up to which its work is known to be done. Logs do not contain waits
//!   between streams, so only the host's observations (deferred completions of frees) advance these clocks. It is the plan of a
//!   policy that never waits, such as PyTorch's.
//!
//! With one stream the two are the same.
//!
//! # Private pools
//! A captured CUDA graph writes to its pool's memory at each launch, whether a block there was freed or not. So memory of a
//! private pool only serves that pool, until the program has released it.
//!
//! # The search
//! 1. An online best fit gives the first plan, in O(n log n). It is the result if the rest would take too long.
//! 2. Blocks are placed from the largest to the smallest (of equal ones the longest-lived first), each at the lowest offset
//!    without a conflicting block. The order decides: by size the result is within a few percent of the bound.
//! 3. As long as a block's top is above the bound, such blocks move forward in the order, and all are placed again: "squeaky
//!    wheel" optimisation (Joslin and Clements 1999). The best plan is kept.
//! 4. An eighth of the steps is spent on orders. If that is not enough, up to 32,768 blocks of one group are searched exactly for
//!    smaller and smaller plans (`plan/skyline.rs`). That brings a plan close to the bound, and can prove that none is smaller:
//!    [`Plan::least`].
//!
//! The search stops at the bound, within 0.012 % of it for orders, after [`PlanSettings::steps`] steps, or when its memory budget
//! is used up. A step examines or sorts one block, or two lists of byte ranges, or sixteen numbers of the exact search. Nothing
//! reads a clock, so the same recording gives the same plan everywhere.
//!
//! # Missing information
//! - Blocks from before recording started are active from the beginning, in address order, and blocks that are never freed are
//!   active to the end.
//! - Failed requests never allocated a block, and are left out.
//! - In a log without completions of frees, frees complete immediately.
//!
//! *Source.* The heuristic is that of TensorFlow Lite's and TVM's memory planners (greedy by size), with the search added. The
//! exact search uses ideas of MiniMalloc (ASPLOS 2023), <https://github.com/google/minimalloc>.

mod bound;
mod conflicts;
mod exact;
mod lifetime;
mod lifetimes;
mod occupied;
mod online;
mod parts;
mod placed;
mod search;
mod skyline;
mod stitched;

pub use bound::lower_bound;
pub use lifetime::{CrossStream, Lifetime, NEVER, PlanSettings};
pub use placed::{Overlap, Plan, SearchEnd};
pub use stitched::{MOST_LOOKED, Misses, misses, stitched};

use search::Search;
use vramlab_device::budget::{Budget, OverBudget};

pub use vramlab_policies::backends::plan::UNIT;

/// Bytes for each allocation in the online plan: its offset, and a count of ends.
const FIRST: usize = size_of::<u64>() + size_of::<u32>();
/// Bytes for each active block: its end, and the adjacent free ranges, in trees.
const IN_USE: usize = 160;

/// Places the blocks of a recording. After each attempt `progress` receives the number of steps and the size of the best plan so
/// far.
///
/// O(n log n) and at most [`PlanSettings::steps`] additional steps. The search claims its memory from the budget: some 200 bytes
/// for each block, and in an exact search up to 256 MiB for backtracking. If the budget is used up it stops with the best plan so
/// far ([`Plan::end`]).
///
/// # Errors
/// The budget has no room for any plan.
pub fn plan(
    lifetimes: &[Lifetime],
    settings: &PlanSettings,
    budget: &Budget,
    mut progress: impl FnMut(u64, u64),
) -> Result<Plan, OverBudget> {
    let mut claim = budget.claim();
    claim.add(FIRST * lifetimes.len())?;
    claim.add(IN_USE * lifetime::most_in_use(lifetimes))?;
    let lower_bound = lower_bound(lifetimes, settings.cross_stream);
    let (offsets, bytes) = online::best_fit(lifetimes, settings.cross_stream);
    let first = Plan { offsets, bytes, lower_bound, least: lower_bound, steps: 0, end: SearchEnd::Memory };
    match Search::new(lifetimes, settings, lower_bound, budget) {
        Ok(search) => Ok(search.run(first, &mut progress)),
        Err(_) if bytes == lower_bound => Ok(Plan { end: SearchEnd::Best, ..first }),
        Err(_) => Ok(first),
    }
}
