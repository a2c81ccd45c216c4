//! Several histories at once, as of the ranks of a job: one setting for all of them, and which rank is unlike the others.

use super::conf::Conf;
use super::evaluate::{Of, Outcome, Setting, bound};
use super::recorded_run::RecordedRun;
use super::sentences::at_least;
use super::{Advice, AdviseArgs, Asked, search};
use crate::gpus::Gpus;
use crate::reading::{Unread, each};
use crate::words::size;
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use terminal::{Cell, Column, Page, Table};

/// Settings that are looked at closely on every rank.
const CLOSELY: usize = 3;
/// Rows of the table.
const SHOWN: usize = 8;

/// What is said of all; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
pub(super) struct Ranks {
    /// The histories: those in which memory ran out first, then by how far their peak is from the median.
    ranks: Vec<Rank>,
    unread: Vec<Unread>,
    /// Each setting with the largest figures of all histories.
    settings: Vec<ForAll>,
    /// The history that needs most, in full.
    worst: Advice,
}

impl Ranks {
    /// Whether every history runs under some setting.
    pub(super) fn mends(&self) -> bool {
        self.settings.iter().any(|setting| !setting.out_of_memory && !setting.over_limit)
    }
}

/// One history.
#[derive(Debug, Serialize)]
struct Rank {
    trace: String,
    #[serde(flatten)]
    gpus: Gpus,
    /// Most bytes that the recording program held from the device.
    recorded_peak_reserved_bytes: Option<u64>,
    /// Most bytes asked for at once.
    live_bytes: u64,
    /// Whether a request was refused when it was recorded.
    ran_out_of_memory: bool,
    /// Most bytes that may be reserved.
    limit_bytes: Option<u64>,
    /// The settings for all, in their order.
    settings: Vec<Setting>,
}

impl Rank {
    /// What it had reserved, or would have.
    fn reserved(&self) -> u64 {
        let replayed = self.settings.first().map_or(0, |setting| setting.outcome.peak_reserved_bytes);
        self.recorded_peak_reserved_bytes.unwrap_or(replayed)
    }
}

/// A setting under which all ranks run: the worst of their figures.
#[derive(Debug, Serialize)]
struct ForAll {
    /// From 1.
    rank: usize,
    /// What `PYTORCH_CUDA_ALLOC_CONF` is set to.
    conf: Conf,
    /// The line of a shell that sets it.
    export: String,
    peak_reserved_bytes: u64,
    /// The least limit under which every history runs.
    smallest_memory_bytes: Option<u64>,
    /// Whether a request of any history is refused.
    out_of_memory: bool,
    /// On some rank more is reserved than the limit that was given.
    over_limit: bool,
    /// The history that needs most under it.
    worst: String,
}

/// The first look at a history.
struct First {
    file: PathBuf,
    recorded: Conf,
    outcomes: Vec<Outcome<Of>>,
}

/// Looks at every file twice: under all settings, then closely under those that are best for all. No more histories are in
/// memory at a time than there are threads, and of large ones fewer.
pub(super) fn of(files: &[PathBuf], args: &AdviseArgs, limit: Option<u64>, asked: &Asked) -> Result<Ranks> {
    let given = &asked.confs;
    let load = |file: &Path| RecordedRun::read(file, args.gpu, limit, &args.read);
    let (firsts, unread) = each("histories", files, |file| {
        let happened = load(file)?;
        let trial = happened.trial(file)?;
        let versions = asked.versions(&happened)?;
        let mut confs = given.clone();
        if given.is_empty() {
            confs = search::grid(&Conf::torch(), trial.limit.is_some());
            confs.extend((!confs.iter().any(|conf| conf.acts_as(&happened.conf))).then(|| happened.conf.clone()));
            confs.retain(|conf| asked.allowed(versions).permits(conf));
        }
        let outcomes = confs.iter().map(|conf| trial.run(conf)).collect::<Result<_>>()?;
        Ok(First { file: file.to_owned(), outcomes, recorded: happened.conf })
    })?;
    let chosen = for_all(&firsts, if given.is_empty() { CLOSELY } else { given.len() });
    let readable: Vec<PathBuf> = firsts.into_iter().map(|first| first.file).collect();
    let (mut ranks, _) = each("histories again", &readable, |file| {
        let happened = load(file)?;
        let trial = happened.trial(file)?;
        let closely = |(at, conf): (usize, &Conf)| {
            let setting = trial.closely(trial.run(conf)?)?;
            Ok(Setting { rank: at + 1, ..setting })
        };
        Ok(Rank {
            trace: file.display().to_string(),
            gpus: happened.recorded.gpus.clone(),
            recorded_peak_reserved_bytes: happened.recorded.as_recorded.map(|told| told.reserved),
            live_bytes: bound(&happened.recorded.history),
            ran_out_of_memory: happened.out_of_memory().is_some(),
            limit_bytes: happened.limit.map(|(limit, _)| limit),
            settings: chosen.iter().enumerate().map(closely).collect::<Result<_>>()?,
        })
    })?;
    let settings = (0..chosen.len()).map(|at| worst_of(&ranks, at)).collect();
    outliers_first(&mut ranks);
    let worst = ranks.iter().max_by_key(|rank| {
        let first = rank.settings.first();
        (rank.ran_out_of_memory, first.map(|first| first.outcome.out_of_memory), rank.reserved())
    });
    let worst = worst.map_or(readable[0].clone(), |rank| PathBuf::from(&rank.trace));
    let worst = super::of(&worst, &super::read(&worst, args)?, args, limit, asked)?;
    Ok(Ranks { settings, worst, ranks, unread })
}

/// The settings that are best for all: each is as good as it is on the rank that needs most.
fn for_all(firsts: &[First], most: usize) -> Vec<Conf> {
    let Some(one) = firsts.first() else { return Vec::new() };
    let on =
        |first: &First, conf: &Conf| first.outcomes.iter().find(|other| other.of.conf.text() == conf.text()).cloned();
    let mut worst: Vec<Outcome<Of>> = Vec::new();
    for outcome in &one.outcomes {
        let everywhere: Option<Vec<Outcome<Of>>> = firsts.iter().map(|first| on(first, &outcome.of.conf)).collect();
        // A setting that some rank was not tried under is that of one rank alone.
        let key =
            |outcome: &Outcome<Of>| (outcome.out_of_memory, outcome.over_limit, outcome.expected_peak_reserved_bytes);
        worst.extend(everywhere.and_then(|all| all.into_iter().max_by_key(key)));
    }
    search::rank(&mut worst, &one.recorded);
    search::distinct(&worst, most).into_iter().map(|outcome| outcome.of.conf).collect()
}

fn worst_of(ranks: &[Rank], at: usize) -> ForAll {
    let each = || ranks.iter().map(|rank| (rank, &rank.settings[at]));
    let key = |(_, setting): &(&Rank, &Setting)| (setting.outcome.out_of_memory, setting.outcome.peak_reserved_bytes);
    let (worst, first) = each().max_by_key(key).unwrap_or((&ranks[0], &ranks[0].settings[at]));
    let least: Option<Vec<u64>> = each().map(|(_, setting)| setting.smallest_memory_bytes).collect();
    ForAll {
        rank: at + 1,
        conf: first.conf().clone(),
        export: first.export.clone(),
        peak_reserved_bytes: each().map(|(_, setting)| setting.outcome.peak_reserved_bytes).max().unwrap_or(0),
        smallest_memory_bytes: least.and_then(|least| least.into_iter().max()),
        out_of_memory: each().any(|(_, setting)| setting.outcome.out_of_memory),
        over_limit: each().any(|(_, setting)| setting.outcome.over_limit),
        worst: worst.trace.clone(),
    }
}

/// Ranks that ran out of memory first, then those whose peak is farthest from the median.
fn outliers_first(ranks: &mut [Rank]) {
    let mut peaks: Vec<u64> = ranks.iter().map(Rank::reserved).collect();
    peaks.sort_unstable();
    let median = peaks.get(peaks.len() / 2).copied().unwrap_or(0);
    ranks.sort_by_key(|rank| (!rank.ran_out_of_memory, std::cmp::Reverse(rank.reserved().abs_diff(median))));
}

/// As much of a path as tells it from the others: the file's name, or where some are the same, what follows the folders that
/// all have in common.
fn name(trace: &str, all: &[&str]) -> String {
    let file = |trace: &str| Path::new(trace).file_name().map(|name| name.to_string_lossy().into_owned());
    let names: Vec<Option<String>> = all.iter().map(|trace| file(trace)).collect();
    let distinct: BTreeSet<&Option<String>> = names.iter().collect();
    if distinct.len() == names.len() {
        return file(trace).unwrap_or_else(|| trace.to_owned());
    }
    let parts: Vec<Component<'_>> = Path::new(trace).components().collect();
    let common = |at: usize| all.iter().all(|other| Path::new(other).components().nth(at) == parts.get(at).copied());
    let start = (0..parts.len() - 1).find(|at| !common(*at)).unwrap_or(parts.len() - 1);
    parts[start..].iter().collect::<PathBuf>().display().to_string()
}

/// The table over the ranks, then the worst in full.
pub(super) fn report(found: &Ranks, all: bool, page: &mut Page) {
    let mut table = Table::new([
        Column::text("history"),
        Column::left("memory"),
        Column::right("reserved"),
        Column::right("asked for").priority(2),
        Column::right("under 1"),
        Column::right("runs in").priority(1),
    ]);
    let all_traces: Vec<&str> = found.ranks.iter().map(|rank| rank.trace.as_str()).collect();
    for rank in found.ranks.iter().take(SHOWN) {
        let first = rank.settings.first();
        let name = rank.gpus.named(&name(&rank.trace, &all_traces));
        let state = if rank.ran_out_of_memory { "ran out" } else { "sufficed" };
        table.row([
            Cell::from(name),
            Cell::bold_if(rank.ran_out_of_memory, state),
            Cell::or_dash(rank.recorded_peak_reserved_bytes.map(size)),
            Cell::from(size(rank.live_bytes)),
            Cell::or_dash(first.map(|first| {
                let reserved = size(first.outcome.peak_reserved_bytes);
                if first.outcome.out_of_memory { format!("{reserved} (runs out)") } else { reserved }
            })),
            Cell::or_dash(first.and_then(|first| first.smallest_memory_bytes).map(at_least)),
        ]);
    }
    match found.ranks.len() {
        1 => page.line("1 history"),
        count => page.line(format!("{count} histories, those least like the others first")),
    }
    page.gap();
    page.table(&table);
    if let more @ 1.. = found.ranks.len().saturating_sub(SHOWN) {
        page.note(format!("{more} more are nearer to the median; --json has all"));
    }
    for setting in &found.settings {
        page.title(format!("{}. {}", setting.rank, setting.conf.shown()));
        let lines = setting.conf.export_lines().into_iter().chain(setting.conf.python(found.worst.limit_bytes));
        lines.for_each(|line| page.labelled("", 2, &line));
        let runs = match (setting.out_of_memory, setting.smallest_memory_bytes.map(at_least)) {
            (true, Some(least)) => format!("runs out of memory; every rank would run in {least}"),
            (true, None) => "runs out of memory".to_owned(),
            (false, Some(least)) if setting.over_limit => format!("that is over the limit; every rank runs in {least}"),
            (false, Some(least)) => format!("every rank runs in {least} or more"),
            (false, None) => "every rank runs".to_owned(),
        };
        page.labelled(
            "",
            2,
            &format!(
                "reserves {} at most ({}); {runs}",
                size(setting.peak_reserved_bytes),
                name(&setting.worst, &all_traces)
            ),
        );
    }
    super::sentences::report(&found.worst, all, page);
    super::sentences::end(&found.worst, page);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_a_history_from_the_others() {
        let same = ["job/0/snap.pickle", "job/1/snap.pickle", "job/1/b/snap.pickle"];
        let names: Vec<String> = same.iter().map(|trace| name(trace, &same)).collect();
        assert_eq!(names, ["0/snap.pickle", "1/snap.pickle", "1/b/snap.pickle"]);
        let other = ["job/0/a.pickle", "job/1/b.pickle"];
        assert_eq!(name(other[1], &other), "b.pickle");
        assert_eq!(name("snap.pickle", &["snap.pickle", "snap.pickle"]), "snap.pickle", "given twice");
    }
}
