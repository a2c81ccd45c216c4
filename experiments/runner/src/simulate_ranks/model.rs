//! The model: the longest of several steps, and the growth of sums with the number of ranks.
//!
//! A measured step of n ranks is the longest of n independent steps, so its distribution function is the n-th power of that of one
//! rank. A step of N ranks therefore has F(x)^(N / n), and with several allocators the product of such powers. Its mean is exact for
//! the measured steps: no random number is drawn. The part of the sums that the backward pass does not hide grows by the all-reduce
//! of the profile's links: of the last bucket, or of all buckets without overlap.

use super::input::Runs;
use vramlab::device::sim::LinkCosts;

/// The assumptions, for the output.
pub(super) const ASSUMPTIONS: &str = "Each rank keeps its rows, so the whole batch grows with the ranks. The steps of ranks are \
    independent and as long as the measured means of an epoch or a run; every sum waits for the last rank. One rank with another allocator is as in runs with \
    one such rank, if the records have them. Sums grow by the profile's links, as one ring over \
    all ranks: there is no slower network between hosts.";

/// Ranks that behave as those of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group<'a> {
    pub(super) run: &'a Runs,
    /// The power of the distribution function of the measured steps.
    power: f64,
}

impl<'a> Group<'a> {
    /// This number of ranks with the allocator of a run, which all of its ranks have.
    pub(super) fn new(run: &'a Runs, ranks: u32) -> Self {
        Self { run, power: f64::from(ranks) / f64::from(run.ranks()) }
    }

    /// Share of the measured steps of at most `seconds`, for the ranks of the group.
    fn at_most(&self, seconds: f64) -> f64 {
        // CAST: numbers of steps.
        let count = self.run.steps_s.iter().filter(|step| **step <= seconds).count() as f64;
        (count / self.run.steps_s.len() as f64).powf(self.power)
    }
}

/// A predicted step.
#[derive(Debug)]
pub(super) struct Step {
    /// Mean of the longest step of the ranks, with sums over as many ranks as were measured.
    longest_s: f64,
    /// Growth of the sums.
    sums_s: f64,
}

impl Step {
    /// The step of `count` ranks in these groups.
    pub(super) fn new(links: &LinkCosts, count: u32, groups: &[Group<'_>]) -> Self {
        let mut values: Vec<f64> = groups.iter().flat_map(|group| group.run.steps_s.iter().copied()).collect();
        values.sort_unstable_by(f64::total_cmp);
        values.dedup();
        let (mut longest_s, mut below) = (0.0, 0.0);
        for value in values {
            let at_most: f64 = groups.iter().map(|group| group.at_most(value)).product();
            longest_s += value * (at_most - below);
            below = at_most;
        }
        let growth = groups.iter().map(|group| growth_ns(links, group.run, count)).max();
        // CAST: nanoseconds of a sum.
        Self { longest_s, sums_s: growth.unwrap_or_default() as f64 / 1e9 }
    }

    pub(super) fn seconds(&self) -> f64 {
        self.longest_s + self.sums_s
    }
}

/// Growth of the sums that a step waits for, from the measured ranks to `count`.
fn growth_ns(links: &LinkCosts, run: &Runs, count: u32) -> u64 {
    let buckets = &run.configuration.bucket_bytes;
    let exposed = if run.configuration.overlap { buckets.len().saturating_sub(1) } else { 0 };
    let growth = |bytes: &u64| {
        let before = links.all_reduce_ns(run.ranks().into(), *bytes);
        links.all_reduce_ns(count.into(), *bytes).saturating_sub(before)
    };
    buckets.iter().skip(exposed).map(growth).sum()
}

/// The mean of steps.
pub(super) fn mean(steps_s: &[f64]) -> f64 {
    // CAST: a number of steps.
    steps_s.iter().sum::<f64>() / steps_s.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::super::input::Configuration;
    use super::*;

    fn run(ranks: usize, steps_s: &[f64], overlap: bool) -> Runs {
        let mut configuration = Configuration::default();
        (configuration.overlap, configuration.bucket_bytes) = (overlap, vec![1 << 20, 8 << 20]);
        Runs { configuration, allocs: vec!["a".into(); ranks], steps_s: steps_s.to_vec() }
    }

    /// Links without cost.
    fn no_links() -> LinkCosts {
        LinkCosts { base_ns: 0, hop_ns: 0, bytes_per_ns: f64::MAX }
    }

    fn seconds(links: &LinkCosts, groups: &[(&Runs, u32)]) -> f64 {
        let count = groups.iter().map(|(_, ranks)| ranks).sum();
        let groups: Vec<Group<'_>> = groups.iter().map(|(run, ranks)| Group::new(run, *ranks)).collect();
        Step::new(links, count, &groups).seconds()
    }

    #[test]
    fn equal_steps_stay_as_they_are() {
        let run = run(2, &[0.25; 10], true);
        for ranks in [2, 8, 1024] {
            assert!((seconds(&no_links(), &[(&run, ranks)]) - 0.25).abs() < 1e-12);
        }
    }

    #[test]
    fn more_ranks_approach_the_longest_step() {
        let run = run(2, &[1.0, 2.0], true);
        let step = |ranks| seconds(&no_links(), &[(&run, ranks)]);
        assert!((step(2) - 1.5).abs() < 1e-12, "the measured mean");
        // Of four ranks half as many steps are short: 1/4.
        assert!((step(4) - 1.75).abs() < 1e-12);
        assert!(step(8) > step(4) && step(1024) > 1.999 && step(1024) <= 2.0);
    }

    #[test]
    fn one_slow_rank_costs_as_much_as_all() {
        let (slow, fast) = (run(2, &[3.0; 4], true), run(2, &[1.0, 1.5], true));
        let one = seconds(&no_links(), &[(&slow, 1), (&fast, 63)]);
        assert!((one - seconds(&no_links(), &[(&slow, 64)])).abs() < 1e-12);
    }

    #[test]
    fn sums_grow_by_the_links() {
        let links = LinkCosts { base_ns: 5, hop_ns: 1_000, bytes_per_ns: 1.0 };
        let grown = |overlap| {
            let run = run(2, &[1.0; 3], overlap);
            seconds(&links, &[(&run, 4)]) - 1.0
        };
        let of = |bytes| (links.all_reduce_ns(4, bytes) - links.all_reduce_ns(2, bytes)) as f64 / 1e9;
        assert!((grown(true) - of(8 << 20)).abs() < 1e-9, "the last bucket is not hidden");
        assert!((grown(false) - of(8 << 20) - of(1 << 20)).abs() < 1e-9);
    }
}
