//! Several recordings, such as the ranks of a job: one setting for all of them, and the outliers.

use super::conf::Conf;
use super::evaluate::{Of, Outcome, Setting, bound};
use super::recorded_run::RecordedRun;
use super::sentences::at_least;
use super::{Advice, AdviseArgs, Request, search};
use crate::gpus::Gpus;
use crate::reading::{Unread, each};
use crate::words::size;
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use terminal::{Cell, Column, Page, Table};

/// Number of settings with a search for the minimum memory, on every rank.
const DETAILED: usize = 3;
/// Maximum number of rows of the table.
const SHOWN: usize = 8;

/// The answer for all recordings; the keys are described in `schema.md`.
#[derive(Debug, Serialize)]
pub(super) struct Ranks {
    /// The recordings: first those that ran out of memory, then by the distance of their peak from the median.
    ranks: Vec<Rank>,
    unread: Vec<Unread>,
    /// Each setting with its largest values over all recordings.
    settings: Vec<ForAll>,
    /// The full answer for the recording that needs most.
    worst: Advice,
}

impl Ranks {
    /// Whether some setting runs every recording within the limit.
    pub(super) fn fits(&self) -> bool {
        self.settings.iter().any(|setting| !setting.out_of_memory && !setting.over_limit)
    }
}

/// One recording.
#[derive(Debug, Serialize)]
struct Rank {
    trace: String,
    #[serde(flatten)]
    gpus: Gpus,
    /// Recorded peak of reserved bytes.
    recorded_peak_reserved_bytes: Option<u64>,
    /// Peak requested bytes.
    live_bytes: u64,
    /// Whether the recorded program ran out of memory.
    ran_out_of_memory: bool,
    /// Limit on reserved bytes.
    limit_bytes: Option<u64>,
    /// The settings for all ranks, in their order.
    settings: Vec<Setting>,
}

impl Rank {
    /// Recorded peak, or that of the replay under the first setting.
    fn reserved(&self) -> u64 {
        let replayed = self.settings.first().map_or(0, |setting| setting.outcome.peak_reserved_bytes);
        self.recorded_peak_reserved_bytes.unwrap_or(replayed)
    }
}

/// A setting for all ranks, with the largest values of any rank.
#[derive(Debug, Serialize)]
struct ForAll {
    /// From 1.
    rank: usize,
    /// Value of `PYTORCH_CUDA_ALLOC_CONF`.
    conf: Conf,
    /// Shell line that sets it.
    export: String,
    peak_reserved_bytes: u64,
    /// Minimum memory in which every recording runs.
    smallest_memory_bytes: Option<u64>,
    /// Whether a request of any recording fails.
    out_of_memory: bool,
    /// Whether a rank exceeds `--limit`.
    over_limit: bool,
    /// The recording that needs most under it.
    worst: String,
}

/// Outcomes of a recording under all settings.
struct Survey {
    file: PathBuf,
    recorded: Conf,
    outcomes: Vec<Outcome<Of>>,
}

/// Processes every file twice: under all settings, then the best settings for all in detail. Memory holds at most one recording
/// per thread, and fewer large ones.
pub(super) fn advise_all(files: &[PathBuf], args: &AdviseArgs, limit: Option<u64>, request: &Request) -> Result<Ranks> {
    let requested = &request.confs;
    let load = |file: &Path| RecordedRun::read(file, args.gpu, limit, &args.read);
    let (surveys, unread) = each("recordings", files, |file| {
        let run = load(file)?;
        let trial = run.trial(file)?;
        let versions = request.versions(&run)?;
        let mut confs = requested.clone();
        if requested.is_empty() {
            confs = search::grid(&Conf::torch(), trial.limit.is_some());
            confs.extend((!confs.iter().any(|conf| conf.acts_as(&run.conf))).then(|| run.conf.clone()));
            confs.retain(|conf| request.allowed(versions).permits(conf));
        }
        let outcomes = confs.iter().map(|conf| trial.run(conf)).collect::<Result<_>>()?;
        Ok(Survey { file: file.to_owned(), outcomes, recorded: run.conf })
    })?;
    let chosen = for_all(&surveys, if requested.is_empty() { DETAILED } else { requested.len() });
    let readable: Vec<PathBuf> = surveys.into_iter().map(|survey| survey.file).collect();
    let (mut ranks, _) = each("recordings, in detail", &readable, |file| {
        let run = load(file)?;
        let trial = run.trial(file)?;
        let detailed = |(at, conf): (usize, &Conf)| {
            let setting = trial.detailed(trial.run(conf)?)?;
            Ok(Setting { rank: at + 1, ..setting })
        };
        Ok(Rank {
            trace: file.display().to_string(),
            gpus: run.trace.gpus.clone(),
            recorded_peak_reserved_bytes: run.trace.recorded_peaks.map(|peaks| peaks.reserved),
            live_bytes: bound(&run.trace.history),
            ran_out_of_memory: run.out_of_memory().is_some(),
            limit_bytes: run.limit.map(|(limit, _)| limit),
            settings: chosen.iter().enumerate().map(detailed).collect::<Result<_>>()?,
        })
    })?;
    let settings = (0..chosen.len()).map(|at| worst_of(&ranks, at)).collect();
    outliers_first(&mut ranks);
    let worst = ranks.iter().max_by_key(|rank| {
        let first = rank.settings.first();
        (rank.ran_out_of_memory, first.map(|first| first.outcome.out_of_memory), rank.reserved())
    });
    let worst = worst.map_or(readable[0].clone(), |rank| PathBuf::from(&rank.trace));
    let (recording, builder) = super::read(&worst, args)?;
    let worst = super::of(&worst, (&recording, builder), args, limit, request)?;
    Ok(Ranks { settings, worst, ranks, unread })
}

/// The best settings for all ranks, each judged by the rank that needs most under it.
fn for_all(surveys: &[Survey], count: usize) -> Vec<Conf> {
    let Some(first) = surveys.first() else { return Vec::new() };
    let on = |survey: &Survey, conf: &Conf| {
        survey.outcomes.iter().find(|other| other.of.conf.text() == conf.text()).cloned()
    };
    let mut worst: Vec<Outcome<Of>> = Vec::new();
    for outcome in &first.outcomes {
        let everywhere: Option<Vec<Outcome<Of>>> = surveys.iter().map(|survey| on(survey, &outcome.of.conf)).collect();
        // A setting that some rank did not test is the recorded setting of another rank.
        let key =
            |outcome: &Outcome<Of>| (outcome.out_of_memory, outcome.over_limit, outcome.expected_peak_reserved_bytes);
        worst.extend(everywhere.and_then(|all| all.into_iter().max_by_key(key)));
    }
    search::rank(&mut worst, &first.recorded);
    search::distinct(&worst, count).into_iter().map(|outcome| outcome.of.conf).collect()
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

/// The part of a path that distinguishes it: the file name, or if several are equal, the path below the common directories.
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

/// Adds a table of the ranks, then the full answer for the worst.
pub(super) fn report(answer: &Ranks, all: bool, page: &mut Page) {
    let mut table = Table::new([
        Column::text("recording"),
        Column::left("memory"),
        Column::right("reserved"),
        Column::right("requested").priority(2),
        Column::right("setting 1"),
        Column::right("minimum memory").priority(1),
    ]);
    let all_traces: Vec<&str> = answer.ranks.iter().map(|rank| rank.trace.as_str()).collect();
    for rank in answer.ranks.iter().take(SHOWN) {
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
                if first.outcome.out_of_memory { format!("{reserved} (out of memory)") } else { reserved }
            })),
            Cell::or_dash(first.and_then(|first| first.smallest_memory_bytes).map(at_least)),
        ]);
    }
    match answer.ranks.len() {
        1 => page.line("1 recording"),
        count => page.line(format!("{count} recordings, outliers first")),
    }
    page.gap();
    page.table(&table);
    if let more @ 1.. = answer.ranks.len().saturating_sub(SHOWN) {
        page.note(format!("{more} more are nearer to the median; --json lists all"));
    }
    for setting in &answer.settings {
        page.title(format!("{}. {}", setting.rank, setting.conf.shown()));
        page.verbatim(&setting.conf.export());
        if let Some(python) = setting.conf.python(answer.worst.limit_bytes) {
            page.labelled("", 2, &python);
        }
        let runs = match (setting.out_of_memory, setting.smallest_memory_bytes.map(at_least)) {
            (true, Some(least)) => format!("out of memory; minimum memory for all ranks {least}"),
            (true, None) => "out of memory".to_owned(),
            (false, Some(least)) if setting.over_limit => {
                format!("above the limit; minimum memory for all ranks {least}")
            }
            (false, Some(least)) => format!("minimum memory for all ranks {least}"),
            (false, None) => "no rank runs out of memory".to_owned(),
        };
        page.labelled(
            "",
            2,
            &format!(
                "peak reserved {} ({}); {runs}",
                size(setting.peak_reserved_bytes),
                name(&setting.worst, &all_traces)
            ),
        );
    }
    super::sentences::report(&answer.worst, all, page);
    super::sentences::end(&answer.worst, page);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_distinguish_the_recordings() {
        let same = ["job/0/snap.pickle", "job/1/snap.pickle", "job/1/b/snap.pickle"];
        let names: Vec<String> = same.iter().map(|trace| name(trace, &same)).collect();
        assert_eq!(names, ["0/snap.pickle", "1/snap.pickle", "1/b/snap.pickle"]);
        let other = ["job/0/a.pickle", "job/1/b.pickle"];
        assert_eq!(name(other[1], &other), "b.pickle");
        assert_eq!(name("snap.pickle", &["snap.pickle", "snap.pickle"]), "snap.pickle", "given twice");
    }
}
