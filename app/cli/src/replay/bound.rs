//! How little memory a history can do with, beside what the allocators took: its lower bound and its plan.

use crate::history::Compiled;
use clap::ValueEnum;
use serde::Serialize;
use std::fmt;
use vramlab::Bytes;
use vramlab::budget::OverBudget;
use vramlab::histories::plan::{CrossStream, Lifetime, PlanSettings, SearchEnd, lower_bound, plan};

/// Whether something is searched for that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Search {
    On,
    Off,
}

/// The bounds of a history; the keys are described in `analysis/schema.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Bounds {
    /// Most bytes that were in use at once: each block in multiples of 512, from its allocation to the completion of
    /// its free; memory of a private pool of CUDA graphs until the pool is released. No allocator with that rounding
    /// can reserve less.
    pub(crate) lower_bound_bytes: u64,
    /// Bytes that are enough by a plan that knows the whole history and lets streams wait for one another; `null` with
    /// `--plan off`. The search is bounded, so less may be enough, too.
    pub(crate) plan_bytes: Option<u64>,
    /// Why the search for the plan ended: `best` (there is none of fewer bytes, or it is within 0.012 % of the lower bound),
    /// `steps` (they were used up; `vramlab plan` makes more of them) or `memory` (`--read-memory` allows more; `plan_bytes`
    /// is `null` where there was none for a plan at all). `null` with `--plan off`.
    pub(crate) plan_end: Option<SearchEnd>,
    /// The lower bound where streams do not wait: memory that one stream freed goes to another only when the history
    /// shows that the host knew the work to be over.
    pub(crate) ordered_lower_bound_bytes: u64,
    /// Bytes that are enough then.
    pub(crate) ordered_plan_bytes: Option<u64>,
    /// Why the search for that plan ended.
    pub(crate) ordered_plan_end: Option<SearchEnd>,
}

/// A lower bound, the bytes of a plan, and why the search for it ended.
type Found = (u64, Option<u64>, Option<SearchEnd>);

impl Bounds {
    /// Those of a history. `progress` hears what is known so far. All searches together make as many steps as one does by
    /// default: about a second.
    ///
    /// # Errors
    /// The budget has no room for the lifetimes of the blocks.
    pub(crate) fn of(
        Compiled { history, budget, .. }: &Compiled,
        choice: Search,
        mut progress: impl FnMut(&str),
    ) -> Result<Self, OverBudget> {
        let mut claim = budget.claim();
        claim.add(history.bytes_of_lifetimes())?;
        let lifetimes = history.lifetimes();
        // A single stream has no other to wait for.
        let one = |pair: &[Lifetime]| pair[0].stream == pair[1].stream;
        let single = lifetimes.windows(2).all(one);
        let steps = PlanSettings::STEPS / if single { 1 } else { 2 };
        let mut search = |cross_stream| -> Found {
            let settings = PlanSettings { cross_stream, steps, seed: 0 };
            match choice {
                Search::Off => (lower_bound(&lifetimes, cross_stream), None, None),
                Search::On => {
                    let heard = |_, bytes| progress(&format!("{} are enough", Bytes(bytes)));
                    match plan(&lifetimes, &settings, budget, heard) {
                        Ok(plan) => (plan.lower_bound, Some(plan.bytes), Some(plan.end)),
                        Err(_) => (lower_bound(&lifetimes, cross_stream), None, Some(SearchEnd::Memory)),
                    }
                }
            }
        };
        let any = search(CrossStream::AfterWait);
        let ordered = if single { any } else { search(CrossStream::KnownOrder) };
        let (lower_bound_bytes, plan_bytes, plan_end) = any;
        let (ordered_lower_bound_bytes, ordered_plan_bytes, ordered_plan_end) = ordered;
        Ok(Self {
            lower_bound_bytes,
            plan_bytes,
            plan_end,
            ordered_lower_bound_bytes,
            ordered_plan_bytes,
            ordered_plan_end,
        })
    }

    /// Whether so many bytes can have been reserved by an allocator that rounds as PyTorch and does not wait for work.
    ///
    /// # Errors
    /// What contradicts what.
    pub(crate) fn check(&self, who: &str, reserved: u64) -> Result<(), String> {
        if reserved >= self.lower_bound_bytes {
            return Ok(());
        }
        let (reserved, bound) = (Bytes(reserved), Bytes(self.lower_bound_bytes));
        Err(format!("{who} reserves {reserved} at most, less than the {bound} that are in use at once"))
    }

    /// So many bytes over the lower bound.
    pub(crate) fn ratio(&self, bytes: u64) -> Option<String> {
        ratio(bytes, self.lower_bound_bytes).map(|ratio| format!("{ratio:.3}"))
    }
}

fn ratio(bytes: u64, bound: u64) -> Option<f64> {
    // CAST: bytes of a device, below 2^53.
    (bound > 0).then(|| bytes as f64 / bound as f64)
}

/// What a search says of itself that ended before it knew the best plan.
pub(crate) fn said(end: Option<SearchEnd>) -> &'static str {
    match end {
        None | Some(SearchEnd::Best) => "",
        Some(SearchEnd::Steps) => "the search ended at its steps",
        Some(SearchEnd::Memory) => "the search ended at its memory, --read-memory allows more",
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |f: &mut fmt::Formatter<'_>, bound: u64, plan: Option<u64>, end: Option<SearchEnd>| {
            write!(f, "at least {}", Bytes(bound))?;
            let said = said(end);
            match plan.and_then(|plan| ratio(plan, bound).map(|ratio| (Bytes(plan), ratio))) {
                Some((plan, ratio)) if said.is_empty() => write!(f, "; a plan needs {plan} ({ratio:.3} of it)"),
                Some((plan, ratio)) => write!(f, "; a plan needs {plan} ({ratio:.3} of it; {said})"),
                None if said.is_empty() => Ok(()),
                None => write!(f, "; no plan: {said}"),
            }
        };
        write!(f, "bound: ")?;
        part(f, self.lower_bound_bytes, self.plan_bytes, self.plan_end)?;
        if (self.ordered_lower_bound_bytes, self.ordered_plan_bytes) != (self.lower_bound_bytes, self.plan_bytes) {
            write!(f, "; without waits between streams ")?;
            part(f, self.ordered_lower_bound_bytes, self.ordered_plan_bytes, self.ordered_plan_end)?;
        }
        Ok(())
    }
}
