//! Bounds on the memory that a recording needs: a lower bound, and an offline placement as an upper bound.

use crate::history::Trace;
use clap::ValueEnum;
use serde::Serialize;
use std::fmt;
use vramlab::Bytes;
use vramlab::budget::OverBudget;
use vramlab::histories::plan::{CrossStream, Lifetime, PlanSettings, SearchEnd, lower_bound, plan};
use vramlab::histories::replay::History;

/// Whether to run a search that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Search {
    On,
    Off,
}

/// The bounds of a recording; the keys are described in `schema.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Bounds {
    /// Peak active bytes: each block in multiples of 512, from its allocation to the completion of its free; memory of a private
    /// pool of CUDA graphs until the pool is released. No allocator with that rounding reserves less. `advise` counts requests that
    /// failed in the recording as served.
    pub(crate) lower_bound_bytes: u64,
    /// Size of an offline placement, which knows all events and lets streams wait for one another; `null` with `--plan off`. The
    /// search is bounded, so a smaller placement may exist.
    pub(crate) plan_bytes: Option<u64>,
    /// Why the search stopped: `best` (no smaller placement exists, or it is within 0.012 % of the lower bound), `steps` (used up;
    /// `vramlab plan` makes more) or `memory` (raise `--read-memory`; `plan_bytes` is `null` if it allowed no placement at all).
    /// `null` with `--plan off`.
    pub(crate) plan_end: Option<SearchEnd>,
    /// The lower bound if streams do not wait: memory freed on one stream serves another only once the recording shows that the
    /// host knew the work to be complete.
    pub(crate) ordered_lower_bound_bytes: u64,
    /// Size of an offline placement under that rule.
    pub(crate) ordered_plan_bytes: Option<u64>,
    /// Why the search for that placement stopped.
    pub(crate) ordered_plan_end: Option<SearchEnd>,
}

/// A lower bound, the size of a placement, and why its search stopped.
type Bound = (u64, Option<u64>, Option<SearchEnd>);

impl Bounds {
    /// Computes the bounds. `progress` receives the best placement so far. All searches together make the default number of
    /// steps, which takes about a second.
    ///
    /// # Errors
    /// The budget has no room for the lifetimes of the blocks.
    pub(crate) fn of(trace: &Trace, choice: Search, progress: impl FnMut(&str)) -> Result<Self, OverBudget> {
        Self::over(trace, History::lifetimes, choice, progress)
    }

    /// As [`of`](Self::of), for a program whose failed requests succeed.
    ///
    /// # Errors
    /// Those of [`of`](Self::of).
    pub(crate) fn with_refused(trace: &Trace, choice: Search) -> Result<Self, OverBudget> {
        Self::over(trace, History::lifetimes_with_refused, choice, |_| {})
    }

    fn over(
        Trace { history, budget, .. }: &Trace,
        blocks: impl Fn(&History) -> Vec<Lifetime>,
        choice: Search,
        mut progress: impl FnMut(&str),
    ) -> Result<Self, OverBudget> {
        let mut claim = budget.claim();
        claim.add(history.bytes_of_lifetimes())?;
        let lifetimes = blocks(history);
        // A single stream has no other to wait for.
        let same_stream = |pair: &[Lifetime]| pair[0].stream == pair[1].stream;
        let single = lifetimes.windows(2).all(same_stream);
        let steps = PlanSettings::STEPS / if single { 1 } else { 2 };
        let mut search = |cross_stream| -> Bound {
            let settings = PlanSettings { cross_stream, steps, seed: 0 };
            match choice {
                Search::Off => (lower_bound(&lifetimes, cross_stream), None, None),
                Search::On => {
                    let report = |_, bytes| progress(&format!("placement in {}", Bytes(bytes)));
                    match plan(&lifetimes, &settings, budget, report) {
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

    /// Checks a reserved peak of an allocator that rounds as PyTorch and does not wait for work.
    ///
    /// # Errors
    /// It is below the lower bound.
    pub(crate) fn check(&self, who: &str, reserved: u64) -> Result<(), String> {
        if reserved >= self.lower_bound_bytes {
            return Ok(());
        }
        let (reserved, bound) = (Bytes(reserved), Bytes(self.lower_bound_bytes));
        Err(format!("{who} has peak reserved {reserved}, below the {bound} that are active"))
    }

    /// Bytes relative to the lower bound.
    pub(crate) fn ratio(&self, bytes: u64) -> Option<String> {
        ratio(bytes, self.lower_bound_bytes).map(|ratio| format!("{ratio:.3}"))
    }
}

fn ratio(bytes: u64, bound: u64) -> Option<f64> {
    // CAST: bytes of a device, below 2^53.
    (bound > 0).then(|| bytes as f64 / bound as f64)
}

/// Note on a search that stopped before it found the best placement.
pub(crate) fn search_note(end: Option<SearchEnd>) -> &'static str {
    match end {
        None | Some(SearchEnd::Best) => "",
        Some(SearchEnd::Steps) => "search stopped: out of steps",
        Some(SearchEnd::Memory) => "search stopped: out of memory, raise --read-memory",
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |f: &mut fmt::Formatter<'_>, bound: u64, plan: Option<u64>, end: Option<SearchEnd>| {
            write!(f, "lower bound {}", Bytes(bound))?;
            let note = search_note(end);
            match plan.and_then(|plan| ratio(plan, bound).map(|ratio| (Bytes(plan), ratio))) {
                Some((plan, ratio)) if note.is_empty() => write!(f, "; offline placement {plan} ({ratio:.3} of it)"),
                Some((plan, ratio)) => write!(f, "; offline placement {plan} ({ratio:.3} of it; {note})"),
                None if note.is_empty() => Ok(()),
                None => write!(f, "; no offline placement: {note}"),
            }
        };
        part(f, self.lower_bound_bytes, self.plan_bytes, self.plan_end)?;
        if (self.ordered_lower_bound_bytes, self.ordered_plan_bytes) != (self.lower_bound_bytes, self.plan_bytes) {
            write!(f, "; without waits between streams: ")?;
            part(f, self.ordered_lower_bound_bytes, self.ordered_plan_bytes, self.ordered_plan_end)?;
        }
        Ok(())
    }
}
