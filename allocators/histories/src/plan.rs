//! How little memory a history can do with: a lower bound, and a plan that shows what can be had.
//!
//! An allocator decides without knowing what comes next. Afterwards everything is known: how large each block was, and from
//! when until when it was in use. Then placing the blocks is a packing problem (dynamic storage allocation): each block is a
//! rectangle that is as wide as its lifetime and as high as its size, and may be moved up and down only. [`plan`] solves it
//! well, though not always best; [`lower_bound`] says how well.
//!
//! - **Bound.** Most bytes in use at once. A block counts from its allocation to the completion of its free, rounded up to
//!   [512 bytes](UNIT) as PyTorch does it. No allocator with that rounding can reserve less, unless its frees wait for the
//!   work that still ran then (`cuMemFree` does).
//! - **Plan.** An offset for each block of the history, so that no two blocks that conflict overlap.
//! - **Gap.** The plan's bytes over the bound, less one.
//!
//! # Streams
//! When is memory free that a block of stream `a` had? For a later block of the same stream from the free on: work is
//! done in the order of the stream. If other streams used the block, from the completion of that free on, by which the host
//! knows that they are done. For a block of another stream the host's order says nothing: work of `a` that was queued before
//! the free may still be running. There are two answers ([`CrossStream`]):
//!
//! - [`AfterWait`](CrossStream::AfterWait): the new owner's stream is made to wait for an event behind the free. Every
//!   allocator could do that, so this is the plan that policies are compared with.
//! - [`KnownOrder`](CrossStream::KnownOrder): memory changes streams or pools only where the host has seen that the work is over.
//!   Each stream has a clock that says up to which free its work is known to be done. Logs do not name the waits between
//!   streams, so the host's observations (frees that complete late) are all that moves these clocks. It is the plan of a
//!   policy that never waits, as PyTorch's.
//!
//! With one stream the two are the same.
//!
//! # Private pools
//! A captured CUDA graph writes to the memory of its pool at each launch, whether a block there was freed or not. So memory
//! of a private pool serves its other blocks only, until the program has released the pool.
//!
//! # The search
//! 1. An online best fit gives the first plan, in O(n log n). It is what is left where the rest would take too long.
//! 2. Blocks are placed from the largest to the smallest (of equal ones the longest-lived first), each at the lowest offset
//!    at which no block that conflicts with it lies. Order decides: by size this is within a few percent of the bound.
//! 3. As long as a block's top lies above the bound, blocks that do move forward in the order, and all are placed
//!    again: "squeaky wheel" optimisation (Joslin and Clements 1999). The best plan is kept.
//!
//! 4. An eighth of the steps is spent on orders. If that is not enough, up to 32,768 blocks of one group are searched exactly
//!    for plans of fewer and fewer bytes (`plan/skyline.rs`). That takes a plan close to the bound, and can prove that
//!    there is none: [`Plan::least`].
//!
//! The search ends at the bound, where orders come within 0.012 % of it, or when it has made [`PlanSettings::steps`] steps, or where
//! its budget of memory is used up. A step
//! is a block that is looked at or sorted, or two lists of byte ranges, or sixteen of the numbers that the exact search
//! looks at. Nothing reads a clock, so the same history gives the same plan everywhere.
//!
//! # What a history does not tell
//! - Blocks from before the first event are in use from the beginning, in address order, and blocks that are never freed are
//!   in use to the end.
//! - Requests that the recorded allocator refused never lived, and are left out.
//! - In a log that does not say when frees complete, they complete at once.
//!
//! *Source.* The heuristic is that of TensorFlow Lite's and TVM's memory planners (greedy by size) with the search added.
//! The exact search has ideas of MiniMalloc (ASPLOS 2023), <https://github.com/google/minimalloc>.

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

/// Bytes of an allocation in the plan that is made in the order of the history: its offset, and a count of ends.
const FIRST: usize = size_of::<u64>() + size_of::<u32>();
/// Bytes of a block that is in use: its end, and the free ranges beside it, in trees.
const IN_USE: usize = 160;

/// Places the blocks of a history. `progress` hears after each attempt how many steps were made and how many bytes the best
/// plan so far needs.
///
/// O(n log n) and at most [`PlanSettings::steps`] steps more. The search claims its memory from the budget: some 200 bytes for
/// each block, and in an exact search up to 256 MiB for the way back. Where the budget is used up it ends with the best plan
/// so far ([`Plan::end`]).
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
