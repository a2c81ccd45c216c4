//! How little memory a history can do with, beside what the allocators took: its lower bound and its plan.

use clap::ValueEnum;
use serde::Serialize;
use std::fmt;
use vramlab::Bytes;
use vramlab::histories::plan::{CrossStream, Lifetime, Plan, PlanSettings, lower_bound, plan};
use vramlab::histories::replay::History;

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
    /// The lower bound where streams do not wait: memory that one stream freed goes to another only when the history
    /// shows that the host knew the work to be over.
    pub(crate) ordered_lower_bound_bytes: u64,
    /// Bytes that are enough then.
    pub(crate) ordered_plan_bytes: Option<u64>,
}

impl Bounds {
    /// Those of a history. `progress` hears what is known so far.
    pub(crate) fn of(history: &History, choice: Search, mut progress: impl FnMut(&str)) -> Self {
        let lifetimes = history.lifetimes();
        let mut search = |cross_stream| {
            let settings = PlanSettings { cross_stream, ..PlanSettings::for_blocks(lifetimes.len()) };
            match choice {
                Search::Off => (lower_bound(&lifetimes, cross_stream), None),
                Search::On => {
                    let heard = |_, bytes| progress(&format!("{} are enough", Bytes(bytes)));
                    let Plan { lower_bound, bytes, .. } = plan(&lifetimes, &settings, heard);
                    (lower_bound, Some(bytes))
                }
            }
        };
        let (lower_bound_bytes, plan_bytes) = search(CrossStream::AfterWait);
        // A single stream has no other to wait for.
        let one = |pair: &[Lifetime]| pair[0].stream == pair[1].stream;
        let (ordered_lower_bound_bytes, ordered_plan_bytes) = match lifetimes.windows(2).all(one) {
            true => (lower_bound_bytes, plan_bytes),
            false => search(CrossStream::KnownOrder),
        };
        Self { lower_bound_bytes, plan_bytes, ordered_lower_bound_bytes, ordered_plan_bytes }
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

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |f: &mut fmt::Formatter<'_>, bound: u64, plan: Option<u64>| {
            write!(f, "at least {}", Bytes(bound))?;
            match plan.and_then(|plan| ratio(plan, bound).map(|ratio| (Bytes(plan), ratio))) {
                Some((plan, ratio)) => write!(f, "; a plan needs {plan} ({ratio:.3} of it)"),
                None => Ok(()),
            }
        };
        write!(f, "bound: ")?;
        part(f, self.lower_bound_bytes, self.plan_bytes)?;
        if (self.ordered_lower_bound_bytes, self.ordered_plan_bytes) != (self.lower_bound_bytes, self.plan_bytes) {
            write!(f, "; without waits between streams ")?;
            part(f, self.ordered_lower_bound_bytes, self.ordered_plan_bytes)?;
        }
        Ok(())
    }
}
