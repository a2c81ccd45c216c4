//! Settings to test: a coarse grid, then settings near the best of each kind; and their ranking.

use super::conf::Conf;
use super::evaluate::{Of, Outcome, Setting};
use vramlab::backends::CachingSettings;
use vramlab::policy::size::torch::Divisions;

const MIB: u64 = 1 << 20;

/// Prices that differ by less count as equal: then fewer changes and fewer driver calls decide.
const EQUAL: f64 = 0.005;
/// The weight of one second in driver calls, as a share of the memory.
const SECOND: f64 = 0.02;
/// A setting may cost this much more than one that needs a line of Python, and still precede it.
const WITHOUT_PYTHON: f64 = 0.02;

/// Values of `max_split_size_mb`.
const SPLITS: [u64; 6] = [32, 64, 128, 256, 512, 1024];
/// Values of `roundup_power2_divisions`.
const DIVISIONS: [u64; 4] = [2, 4, 8, 16];
/// Values of `garbage_collection_threshold`.
const THRESHOLDS: [f64; 3] = [0.6, 0.8, 0.9];

fn divided(settings: CachingSettings, count: u64) -> CachingSettings {
    CachingSettings { roundup_power2_divisions: Divisions::uniform(count), ..settings }
}

fn split(settings: CachingSettings, mib: u64) -> CachingSettings {
    CachingSettings { max_split_size: Some(mib * MIB), ..settings }
}

/// The coarse grid, the recorded setting first. PyTorch collects garbage only under a limit.
pub(super) fn grid(recorded: &Conf, limited: bool) -> Vec<Conf> {
    let plain = CachingSettings::default();
    let mut out = vec![recorded.clone(), Conf::torch()];
    for expandable in [false, true] {
        out.push(Conf::of(expandable, plain));
        out.extend(DIVISIONS.map(|count| Conf::of(expandable, divided(plain, count))));
    }
    for mib in SPLITS {
        let split = split(plain, mib);
        out.push(Conf::of(false, split));
        out.extend([4, 8].map(|count| Conf::of(false, divided(split, count))));
        out.push(Conf::of(false, CachingSettings { max_non_split_rounding: mib.max(64) * MIB, ..split }));
    }
    if limited {
        for garbage_collection_threshold in THRESHOLDS {
            let collects = CachingSettings { garbage_collection_threshold, ..plain };
            out.push(Conf::of(false, collects));
            out.extend([128, 512].map(|mib| Conf::of(false, split(collects, mib))));
            out.push(Conf::of(false, divided(collects, 8)));
        }
    }
    let mut distinct = Vec::new();
    new_ones(out, &mut distinct);
    distinct
}

/// Settings that differ from a setting in one value.
pub(super) fn around(conf: &Conf, limited: bool) -> Vec<Conf> {
    let now = conf.settings;
    let mut out = Vec::new();
    let mut with = |settings| out.push(Conf::of(conf.expandable, settings));
    let counts = now.roundup_power2_divisions.0;
    if let Some(&count) = counts.iter().find(|count| **count > 1) {
        with(divided(now, 0));
        with(divided(now, count * 2));
        if count > 2 {
            with(divided(now, count / 2));
        }
        // Round only larger requests, or only smaller ones.
        for at in [2, 4, 6, 8] {
            for above in [true, false] {
                let mut list = [0; 16];
                let rounded = if above { &mut list[at..] } else { &mut list[..at] };
                rounded.fill(count);
                with(CachingSettings { roundup_power2_divisions: Divisions(list), ..now });
            }
        }
    } else {
        DIVISIONS.iter().for_each(|count| with(divided(now, *count)));
    }
    // Expandable segments ignore the other settings.
    if !conf.expandable {
        if let Some(bytes) = now.max_split_size {
            for (up, down) in [(2, 1), (1, 2), (3, 2), (2, 3)] {
                with(split(now, (bytes / MIB * up / down).max(20)));
            }
            for factor in [2, 8] {
                with(CachingSettings { max_non_split_rounding: now.max_non_split_rounding * factor, ..now });
            }
        }
        if limited {
            let threshold = now.garbage_collection_threshold;
            let near = if threshold > 0.0 { vec![threshold - 0.1, threshold + 0.05] } else { THRESHOLDS.to_vec() };
            for threshold in near.into_iter().filter(|threshold| (0.25..1.0).contains(threshold)) {
                // Two digits are enough.
                let garbage_collection_threshold = (threshold * 100.0).round() / 100.0;
                with(CachingSettings { garbage_collection_threshold, ..now });
            }
        }
    }
    out
}

/// Adds to `tried` those of `confs` that act differently from all in it, and returns them.
pub(super) fn new_ones(confs: Vec<Conf>, tried: &mut Vec<Conf>) -> Vec<Conf> {
    let mut fresh = Vec::new();
    for conf in confs {
        if !tried.iter().any(|other| other.acts_as(&conf)) {
            tried.push(conf.clone());
            fresh.push(conf);
        }
    }
    fresh
}

/// A setting with the figures that its rank follows from.
pub(super) trait Ranked {
    /// Its replay.
    fn outcome(&self) -> &Outcome<Of>;

    /// Minimum memory, if it was searched.
    fn smallest_memory_bytes(&self) -> Option<u64> {
        None
    }

    /// The price of a setting under which the program runs; the cheapest is the best. It is the mean of the expected peak of reserved
    /// memory (what other programs on the GPU cannot have) and of the minimum memory (what the GPU must have), and each second in
    /// driver calls adds 2 %. Where the minimum memory was not searched, the peak stands for it.
    fn price(&self) -> f64 {
        let outcome = self.outcome();
        let peak = outcome.expected_peak_reserved_bytes;
        // CAST: bytes of a device, below 2^53.
        let memory = (peak as f64 + self.smallest_memory_bytes().unwrap_or(peak) as f64) / 2.0;
        memory * (1.0 + SECOND * outcome.simulated_s.unwrap_or(0.0))
    }

    /// Whether the setting is better than another, by more than prices are exact: the program runs only under it, or its price is
    /// lower, or it needs less memory where the program runs under neither.
    fn is_better_than(&self, other: &impl Ranked) -> bool {
        let least = |setting: Option<u64>| setting.unwrap_or(u64::MAX);
        match (self.outcome().runs(), other.outcome().runs()) {
            (true, true) => {
                let limited = |setting: &Outcome<Of>| setting.of.conf.needs_limit();
                let python = limited(self.outcome()) && !limited(other.outcome());
                let margin = EQUAL + if python { WITHOUT_PYTHON } else { 0.0 };
                self.price() < other.price() * (1.0 - margin)
            }
            (false, false) => least(self.smallest_memory_bytes()) < least(other.smallest_memory_bytes()),
            (runs, _) => runs,
        }
    }
}

impl Ranked for Outcome<Of> {
    fn outcome(&self) -> &Outcome<Of> {
        self
    }
}

impl Ranked for Setting {
    fn outcome(&self) -> &Outcome<Of> {
        &self.outcome
    }

    fn smallest_memory_bytes(&self) -> Option<u64> {
        self.smallest_memory_bytes
    }
}

/// Sorts the best first. Settings that run out of memory come last, preceded by those that exceed the limit. Among the others
/// the [price](Ranked::price) decides; for equal prices the number of changes to the `recorded` setting and the number of driver
/// calls.
pub(super) fn rank<T: Ranked>(settings: &mut Vec<T>, recorded: &Conf) {
    let mut remaining = std::mem::take(settings);
    while !remaining.is_empty() {
        let over = remaining.iter().all(|setting| !setting.outcome().runs());
        let fits = |setting: &T| !setting.outcome().out_of_memory && setting.outcome().over_limit == over;
        let runs: Vec<&T> = remaining.iter().filter(|setting| fits(setting)).collect();
        let next = if runs.is_empty() {
            // A later failure indicates that the setting needs less.
            let reached =
                |outcome: &Outcome<Of>| outcome.first_failure.as_ref().map_or(0, |failure| failure.allocation);
            let key = |outcome: &Outcome<Of>| (std::cmp::Reverse(reached(outcome)), outcome.of.conf.changes());
            (0..remaining.len()).min_by_key(|at| key(remaining[*at].outcome()))
        } else {
            let near = |price: f64, least: f64, share: f64| price <= least * (1.0 + share);
            let least_of = |prices: &mut dyn Iterator<Item = f64>| prices.min_by(f64::total_cmp);
            // A program that ran under such a setting has the line of Python already.
            let without_python = |setting: &T| recorded.needs_limit() || !setting.outcome().of.conf.needs_limit();
            let least = least_of(&mut runs.iter().map(|setting| setting.price())).unwrap_or(0.0);
            let plain = runs.iter().filter(|setting| without_python(setting));
            let least_without_python = least_of(&mut plain.map(|setting| setting.price()));
            let least_without_python = least_without_python.filter(|price| near(*price, least, WITHOUT_PYTHON));
            let good = |setting: &T| {
                fits(setting)
                    && match least_without_python {
                        Some(least) => without_python(setting) && near(setting.price(), least, EQUAL),
                        None => near(setting.price(), least, EQUAL),
                    }
            };
            let cost = |setting: &T| {
                let conf = &setting.outcome().of.conf;
                (!conf.acts_as(recorded), conf.changes(), setting.outcome().calls())
            };
            (0..remaining.len()).filter(|at| good(&remaining[*at])).min_by_key(|at| cost(&remaining[*at]))
        };
        // `next` is never `None`: settings that run have a minimum, and otherwise all are candidates.
        settings.push(remaining.remove(next.unwrap_or(0)));
    }
}

/// The best of the ranking, and the next ones of other kinds: at most `count`.
pub(super) fn distinct(ranked: &[Outcome<Of>], count: usize) -> Vec<Outcome<Of>> {
    let keys = |conf: &Conf| {
        let now = &conf.settings;
        let rounds = now.roundup_power2_divisions != Divisions::default();
        (
            conf.malloc_async,
            conf.expandable,
            now.max_split_size.is_some(),
            now.garbage_collection_threshold > 0.0,
            rounds,
        )
    };
    let mut out: Vec<Outcome<Of>> = Vec::new();
    for outcome in ranked {
        if out.len() < count && !out.iter().any(|chosen| keys(&chosen.of.conf) == keys(&outcome.of.conf)) {
            out.push(outcome.clone());
        }
    }
    out
}

/// The settings whose minimum memory is worth a search: the best of each kind, at most `count`, and plain expandable segments.
pub(super) fn finalists(ranked: &[Outcome<Of>], count: usize) -> Vec<Outcome<Of>> {
    let mut out = distinct(ranked, count);
    let plain = Conf::of(true, CachingSettings::default());
    if !out.iter().any(|outcome| outcome.of.conf.acts_as(&plain)) {
        out.extend(ranked.iter().find(|outcome| outcome.of.conf.acts_as(&plain)).cloned());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Failure;
    use std::collections::BTreeMap;

    fn outcome(conf: &str, peak: u64, fails_at: u64, calls: u64) -> Outcome<Of> {
        Outcome {
            of: Of { conf: conf.parse().unwrap() },
            peak_reserved_bytes: peak,
            expected_peak_reserved_bytes: peak,
            peak_active_bytes: 0,
            out_of_memory: fails_at > 0,
            over_limit: false,
            first_failure: (fails_at > 0).then(|| Failure { allocation: fails_at, error: String::new() }),
            num_alloc_retries: 0,
            driver_calls: BTreeMap::from([("mem_alloc", calls)]),
            simulated_s: None,
        }
    }

    fn order(outcomes: &[Outcome<Of>]) -> Vec<&str> {
        outcomes.iter().map(|outcome| outcome.of.conf.text()).collect()
    }

    #[test]
    fn rank_puts_the_lowest_peak_first_within_half_a_percent() {
        let list = [
            outcome("max_split_size_mb:32", 900, 2, 1),
            outcome("roundup_power2_divisions:4", 1000, 0, 10),
            outcome("expandable_segments:True,roundup_power2_divisions:8", 999, 0, 5),
            outcome("expandable_segments:True", 1003, 0, 50),
            outcome("", 1100, 0, 1),
            outcome("max_split_size_mb:64", 1100, 1, 1),
        ];
        let mut ranked = list.to_vec();
        rank(&mut ranked, &Conf::torch());
        let fewer_calls = "roundup_power2_divisions:4";
        assert_eq!(order(&ranked)[..2], [fewer_calls, "expandable_segments:True"]);
        assert_eq!(order(&ranked)[3..], ["", "max_split_size_mb:32", "max_split_size_mb:64"]);
        // An equally good recorded setting is kept.
        let mut ranked = list.to_vec();
        rank(&mut ranked, &"expandable_segments:True".parse().unwrap());
        assert_eq!(order(&ranked)[0], "expandable_segments:True");
    }

    fn setting(conf: &str, peak: u64, least: u64, seconds: f64) -> Setting {
        let outcome = Outcome { simulated_s: Some(seconds), ..outcome(conf, peak, 0, 1) };
        let (export, python) = (String::new(), None);
        let instant_peak_reserved_bytes = peak;
        Setting { rank: 0, outcome, smallest_memory_bytes: Some(least), instant_peak_reserved_bytes, export, python }
    }

    #[test]
    fn rank_weighs_peak_minimum_memory_and_driver_time() {
        let ranked = |list: &[Setting]| {
            let mut list = list.to_vec();
            rank(&mut list, &Conf::torch());
            list.iter().map(|setting| setting.conf().text().to_owned()).collect::<Vec<_>>()
        };
        let (now, split, expandable) = ("", "max_split_size_mb:32", "expandable_segments:True");
        // A lower peak that needs a larger GPU is not better.
        let needs_more = [setting(split, 601, 601, 0.1), setting(now, 620, 524, 0.1)];
        assert_eq!(ranked(&needs_more), [now, split]);
        assert!(!needs_more[0].is_better_than(&needs_more[1]) && needs_more[1].is_better_than(&needs_more[0]));
        // Seconds of driver calls cost more than a little memory.
        let slow = [setting(split, 1000, 1000, 8.9), setting(expandable, 1020, 1010, 0.05)];
        assert_eq!(ranked(&slow), [expandable, split]);
        // What is worse in nothing is never behind.
        let dominated = [setting(split, 1000, 990, 0.05), setting(expandable, 1000, 950, 0.05)];
        assert_eq!(ranked(&dominated), [expandable, split]);
    }

    #[test]
    fn rank_prefers_settings_without_python_within_2_percent() {
        let collects = "garbage_collection_threshold:0.8";
        let near =
            [outcome(collects, 1000, 0, 1), outcome("max_split_size_mb:64", 1019, 0, 1), outcome("", 1100, 0, 1)];
        let ranked = |list: &[Outcome<Of>], recorded: &str| {
            let mut ranked = list.to_vec();
            rank(&mut ranked, &recorded.parse().unwrap());
            order(&ranked).iter().map(|conf| (*conf).to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(ranked(&near, ""), ["max_split_size_mb:64", collects, ""]);
        // That program sets its limit already.
        assert_eq!(ranked(&near, "garbage_collection_threshold:0.6")[0], collects);
        let far = [outcome(collects, 1000, 0, 1), outcome("max_split_size_mb:64", 1021, 0, 1)];
        assert_eq!(ranked(&far, "")[0], collects);
    }

    #[test]
    fn rank_puts_settings_over_the_limit_behind_those_within() {
        let over = |conf, peak| Outcome { over_limit: true, ..outcome(conf, peak, 0, 1) };
        let mut ranked = vec![
            outcome("max_split_size_mb:32", 900, 2, 1),
            over("expandable_segments:True", 901),
            outcome("", 1000, 0, 1),
            over("expandable_segments:True,roundup_power2_divisions:4", 950),
        ];
        rank(&mut ranked, &Conf::torch());
        let expected = [
            "",
            "expandable_segments:True",
            "expandable_segments:True,roundup_power2_divisions:4",
            "max_split_size_mb:32",
        ];
        assert_eq!(order(&ranked), expected);
    }

    #[test]
    fn grid_has_no_duplicates_and_collects_only_under_a_limit() {
        for limited in [false, true] {
            let mut tried = grid(&Conf::torch(), limited);
            for (at, conf) in tried.iter().enumerate() {
                assert!(!tried[..at].iter().any(|other| other.acts_as(conf)), "{}", conf.text());
                assert!(limited || !conf.needs_limit());
                // Every proposal can be exported.
                assert!(conf.text().parse::<Conf>().unwrap().acts_as(conf), "{}", conf.text());
            }
            for conf in tried.clone() {
                let near = new_ones(around(&conf, limited), &mut tried);
                assert!(near.iter().all(|conf| conf.text().parse::<Conf>().unwrap().acts_as(conf)));
                assert!(limited || !near.iter().any(Conf::needs_limit));
            }
        }
    }

    #[test]
    fn distinct_returns_settings_of_different_kinds() {
        let ranked = [
            "roundup_power2_divisions:4",
            "roundup_power2_divisions:8",
            "max_split_size_mb:32",
            "",
            "expandable_segments:True",
        ]
        .map(|conf| outcome(conf, 1, 0, 0));
        assert_eq!(order(&distinct(&ranked, 3)), ["roundup_power2_divisions:4", "max_split_size_mb:32", ""]);
    }
}
