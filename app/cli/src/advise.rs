//! `vramlab advise`: peak reserved memory of a recorded program under other settings of PyTorch's allocator, and the best setting.

mod conf;
mod evaluate;
mod evidence;
mod first;
mod happened;
mod not_recorded;
mod predict;
mod program;
mod ranks;
mod recorded_run;
mod search;
mod sentences;
mod versions;

use crate::explain::phases::{Phase, phases};
use crate::explain::{self, Pools};
use crate::gpus::Gpus;
use crate::history::{Trace, TraceBuilder};
use crate::host::{self, HostAdvice};
use crate::reading::{ReadArgs, cores, in_parallel, share_of};
use crate::recording::Recording;
use crate::replay::{Bounds, Search};
use anyhow::{Context, Result, bail};
use clap::Args;
use conf::Conf;
use evaluate::{Of, Outcome, Setting, Trial, bound};
use evidence::Evidence;
pub(crate) use first::{First, Replayed, first, replayed};
pub use predict::{Predicted, Predictions, predict};
use recorded_run::{LimitSource, RecordedRun, Retries};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};
use terminal::{Bar, Page, Shard};
use versions::{Allowed, Torch, Versions};
use vramlab::backends::{all, compared};
use vramlab::histories::replay::OutOfMemory;
use vramlab::{Bytes, Selection};

/// Smallest saving, in percent, for which a change is advised.
const WORTH: f64 = 2.0;
/// Number of settings with a search for the minimum memory.
const DETAILED: usize = 6;
/// Rounds that test settings near the best.
const ROUNDS: usize = 2;
/// A limit below this is a typing error: it is less than the smallest segment.
const LEAST_LIMIT: u64 = 2 << 20;

#[derive(Debug, Args)]
pub(crate) struct AdviseArgs {
    /// Recordings: snapshots of torch.cuda.memory._dump_snapshot, plain, .gz or .xz, and the other formats of `convert`
    #[arg(required = true, value_name = "SNAPSHOT")]
    files: Vec<PathBuf>,
    /// Memory that PyTorch may reserve, such as 24GiB [default: inferred from the recording, if memory ran out, the cache was flushed or garbage was collected]
    #[arg(long, value_name = "BYTES")]
    limit: Option<String>,
    /// Test this setting instead of searching, in the syntax of PYTORCH_CUDA_ALLOC_CONF; repeatable
    #[arg(long, value_name = "STRING", allow_hyphen_values = true)]
    conf: Vec<String>,
    /// Exclude a setting from the search, such as expandable_segments; repeatable
    #[arg(long, value_name = "KEY", conflicts_with = "conf")]
    without: Vec<String>,
    /// PyTorch version that will run the program, such as 2.9; settings that it lacks are not advised [default: inferred from the
    /// snapshot]
    #[arg(long, value_name = "VERSION")]
    torch: Option<String>,
    /// Compare with every allocator, not only with the most common
    #[arg(long)]
    all: bool,
    /// Process every N-th recording, starting with the K-th, as one job of a Slurm array
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// GPU to analyse, if the recording contains several [default: one that ran out of memory, else the one with the highest peak]
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Exit with code 3 if memory runs out under every setting [otherwise 0 success, 1 runtime failure, 2 bad input]
    #[arg(long)]
    pub(crate) exit_code: bool,
}

/// The answer for one recording; the keys are described in `schema.md`.
#[derive(Debug, Serialize)]
struct Advice {
    trace: String,
    #[serde(flatten)]
    gpus: Gpus,
    events: u64,
    allocations: u64,
    /// Streams that allocate.
    streams: usize,
    /// Why the file is incomplete, if it was truncated.
    cut: Option<String>,
    #[serde(skip)]
    settings_known: bool,
    /// Settings and peaks of the recorded run.
    recorded: RecordedSettings,
    /// Limit on reserved bytes for all comparisons.
    limit_bytes: Option<u64>,
    /// Source of the limit.
    limit_source: Option<LimitSource>,
    /// Cache flushes from which the limit is inferred: their number, and an upper bound on the limit.
    released: Option<Released>,
    /// The advice in one word.
    verdict: Verdict,
    /// Why no setting can be shown to avoid the recorded out-of-memory; `null` where the replay of the current settings has it.
    not_reproduced: Option<String>,
    /// Saving of the first setting, in percent of the recorded peak; 0 if the settings are kept. `null` where the recording does not
    /// show it, and where memory runs out.
    saving_percent: Option<f64>,
    /// Evidence for the answer.
    evidence: Evidence,
    /// PyTorch versions that settings must suit: `--torch`, or the versions that write such a snapshot; `null` where unknown.
    torch: Option<String>,
    /// Minimum memory over all settings.
    needed_bytes: Option<u64>,
    /// The best settings of each kind, or those of `--conf`, best first; settings that run out of memory come last. The price
    /// decides: the mean of the expected peak and of the minimum memory, to which each second in driver calls adds 2 %. Within 0.5 %
    /// of it fewer changes to the current settings and fewer driver calls decide; within 2 % a setting that needs no line of Python
    /// precedes one that does.
    settings: Vec<Setting>,
    /// The best of them without `expandable_segments`, if the first has it; `null` if it has not, or none was tested.
    without_expandable_segments: Option<Setting>,
    /// If the first setting adds `expandable_segments`: the stack frame that rules them out, Windows or CUDA IPC.
    obstacle: Option<String>,
    /// Memory by pool when memory ran out, else at the reserved peak, if the recording names private pools (CUDA graphs, MemPools).
    pools: Option<Pools>,
    /// Phases of the program, split at its outermost annotations, else at its longest pauses; empty without either.
    phases: Vec<Phase>,
    /// Gains of program changes under the recorded settings, the largest saving first. Savings below 2 % of reserved memory, or for
    /// `empty_cache` below a tenth of the driver calls, are left out.
    program_changes: Vec<program::Change>,
    /// Other tested settings.
    also_tried: Vec<Outcome<Of>>,
    /// Allocators that no PyTorch setting selects, for comparison.
    other_allocators: Vec<Outcome<Other>>,
    /// Requests right before which PyTorch released cached memory, where nothing shows whether memory was full or the program called
    /// `empty_cache`; `null` without such.
    unclear_releases: Option<u64>,
    /// Peak requested bytes, refused requests included.
    live_bytes: u64,
    #[serde(flatten)]
    bounds: Bounds,
    /// Pinned host memory; `null` if the recording has none.
    host: Option<HostAdvice>,
    /// Values that no replay shows.
    unknown: Unknown,
    #[serde(skip)]
    run: String,
    /// Whether `--conf` names the settings.
    #[serde(skip)]
    given: bool,
    /// `--limit` as typed.
    #[serde(skip)]
    limit_text: Option<String>,
    /// Whether the recording is a snapshot of PyTorch.
    #[serde(skip)]
    of_pytorch: bool,
}

/// Cache flushes during requests.
#[derive(Debug, Serialize)]
struct Released {
    /// Number of flushes that stack traces show.
    times: u64,
    /// Upper bound on the limit.
    limit_most_bytes: u64,
}

/// Settings and peaks of the recorded run.
#[derive(Debug, Serialize)]
struct RecordedSettings {
    /// `PYTORCH_CUDA_ALLOC_CONF`; empty for PyTorch's defaults.
    conf: Conf,
    peak_reserved_bytes: Option<u64>,
    peak_requested_bytes: Option<u64>,
    /// The replay under the same settings.
    replayed: Outcome<Of>,
    /// Minimum memory under the same settings, as of `settings`.
    smallest_memory_bytes: Option<u64>,
    #[serde(skip)]
    current: Setting,
    /// Deviation of that replay's peak from the recorded peak, a measure of trust in the other values. `null` where the limit
    /// differs or is unknown.
    replayed_off_percent: Option<f64>,
    /// The last out-of-memory event.
    out_of_memory: Option<OutOfMemory>,
}

/// The advice in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// The first setting is better than the current ones.
    Change,
    /// The current settings are as good as any, or nearly.
    Keep,
    /// More was reserved before recording started than the first setting needs afterwards; its earlier demand is unknown. Or memory
    /// ran out in the recording and not in the replay of the current settings (`not_reproduced`).
    #[serde(rename = "not-said")]
    Inconclusive,
    /// Memory runs out under every setting, or the limit is exceeded.
    OutOfMemory,
    /// The snapshot has no events, so nothing can be compared.
    NotRecorded,
}

/// Values that no replay shows.
#[derive(Debug, Serialize)]
struct Unknown {
    /// Deferred frees: their completion depends on timing.
    deferred_frees: u64,
    /// Blocks that were active before recording started.
    prologue_allocations: u64,
    /// Bytes of segments that were reserved before recording started.
    prologue_reserved_bytes: u64,
    /// Blocks from before recording started whose size is unknown.
    undetermined_blocks: u64,
    /// Free bytes of the device when memory ran out.
    device_free_bytes: Option<u64>,
    /// Whether garbage was collected under an unknown memory limit.
    limit: bool,
    /// Events whose action is unknown; `null` if there are none.
    events: Option<String>,
}

/// An allocator other than PyTorch's.
#[derive(Clone, Debug, Serialize)]
struct Other {
    /// As `--alloc` of `replay` names it.
    alloc: Selection,
}

/// Template of the progress bar.
const FORM: &str = "{bar:30} {msg} {pos}/{len} [{elapsed} left {eta}]";

/// Prints the advice for each file. Returns whether some setting avoids running out of memory in each.
pub(crate) fn advise(args: &AdviseArgs) -> Result<bool> {
    let request = Request::new(args)?;
    let limit = args.limit.as_deref().map(limit_of).transpose()?;
    let files = share_of(&args.files, args.shard)?;
    let mut page = Page::stdout();
    let fits = match (files.as_slice(), args.shard) {
        ([file], None) => {
            let (recording, builder) = read(file, args)?;
            if recording.events.is_empty() {
                return not_recorded::answer(file, &recording, args, limit).map(|()| true);
            }
            let advice = of(file, (&recording, builder), args, limit, &request)?;
            let fits = advice.verdict != Verdict::OutOfMemory;
            if args.json {
                return terminal::print_json(&advice).map(|()| fits);
            }
            sentences::report(&advice, args.all, &mut page);
            sentences::end(&advice, &mut page);
            fits
        }
        (files, _) => {
            let ranks = ranks::advise_all(files, args, limit, &request)?;
            let fits = ranks.fits();
            if args.json {
                return terminal::print_json(&ranks).map(|()| fits);
            }
            ranks::report(&ranks, args.all, &mut page);
            fits
        }
    };
    page.print().map(|()| fits)
}

/// The answer for one recording as in `--json`, with the sentences of the screen, for the page of `report`.
///
/// # Errors
/// As those of the command.
pub(crate) fn answer(file: &Path, recording: &Recording, limit: Option<u64>) -> Result<Value> {
    let run = RecordedRun::new(limit, recording, recording.builder()?)?;
    let advice = advice(file, &run, &Request::default(), false, recording)?;
    let mut out = serde_json::to_value(&advice)?;
    out["kept"] = sentences::kept(&advice).into();
    out["happened"] = happened::recorded_run(&advice).into();
    out["bound"] = sentences::bounds(&advice).into();
    out["not_known"] = sentences::unknown(&advice).into();
    out["changes"] = sentences::changes(&advice).into();
    Ok(out)
}

/// The settings of the command line.
fn confs(texts: &[String]) -> Result<Vec<Conf>> {
    let mut out: Vec<Conf> = Vec::new();
    for text in texts {
        let conf: Conf = text.parse().with_context(|| format!("--conf {text:?}"))?;
        if out.iter().any(|other| other.text() == conf.text()) {
            bail!("--conf {text:?} is given twice");
        }
        out.push(conf);
    }
    Ok(out)
}

fn limit_of(text: &str) -> Result<u64> {
    limit(text).with_context(|| format!("--limit {text}"))
}

/// A memory limit.
///
/// # Errors
/// The text is not a size, or below the smallest segment.
pub(crate) fn limit(text: &str) -> Result<u64> {
    let Bytes(bytes) = text.parse()?;
    if bytes < LEAST_LIMIT {
        bail!("{} is less than one segment; write a unit, such as 24GiB", Bytes(bytes));
    }
    Ok(bytes)
}

/// Reads one recording.
fn read(file: &Path, args: &AdviseArgs) -> Result<(Recording, TraceBuilder)> {
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    bar.message(format!("reading {}", file.display()));
    let recording = Recording::read_to_replay(file, args.gpu, None, &args.read)?;
    bar.clear();
    Ok(recording)
}

/// The advice for one recording.
fn of(
    file: &Path,
    (recording, builder): (&Recording, TraceBuilder),
    args: &AdviseArgs,
    limit: Option<u64>,
    request: &Request,
) -> Result<Advice> {
    advice(file, &RecordedRun::new(limit, recording, builder)?, request, args.all, recording)
}

/// Options of the command line.
#[derive(Debug, Default)]
struct Request {
    /// Settings to test instead of searching.
    confs: Vec<Conf>,
    /// Settings that the search excludes.
    without: Vec<String>,
    torch: Option<Torch>,
    /// `--limit` as typed.
    limit_text: Option<String>,
}

impl Request {
    fn new(args: &AdviseArgs) -> Result<Self> {
        args.without
            .iter()
            .try_for_each(|key| versions::check_name(key).with_context(|| format!("--without {key}")))?;
        let torch = args.torch.as_deref().map(|text| text.parse().with_context(|| format!("--torch {text}")));
        let (without, limit_text) = (args.without.clone(), args.limit.clone());
        Ok(Self { confs: confs(&args.conf)?, without, torch: torch.transpose()?, limit_text })
    }

    /// PyTorch versions that settings must suit.
    ///
    /// # Errors
    /// None of them has one of the requested settings.
    fn versions(&self, run: &RecordedRun) -> Result<Versions> {
        let Trace { keys, allocator_settings, cut, .. } = &run.trace;
        let versions = self.torch.map_or_else(|| Versions::inferred(*keys, allocator_settings, *cut), Versions::given);
        self.confs.iter().try_for_each(|conf| versions.check(conf))?;
        Ok(versions)
    }

    fn allowed(&self, versions: Versions) -> Allowed<'_> {
        Allowed { versions, without: &self.without }
    }
}

fn advice(file: &Path, run: &RecordedRun, request: &Request, all: bool, recording: &Recording) -> Result<Advice> {
    let history = &run.trace.history;
    let trial = run.trial(file)?;
    let recorded = &run.conf;
    let versions = request.versions(run)?;
    let (bounds, comparison) = std::thread::scope(|scope| {
        let bounds = scope.spawn(|| Bounds::with_refused(&run.trace, Search::On));
        let comparison = compare(&trial, recorded, request, versions, all);
        (bounds.join(), comparison)
    });
    // The panic hook has printed the message.
    let bounds = bounds.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let bounds = bounds.with_context(|| file.display().to_string())?;
    let Comparison { current, settings, also_tried, others } = comparison?;
    let replayed = current.outcome.clone();
    let outcomes = settings.iter().map(|setting| &setting.outcome).chain(&also_tried).chain([&replayed]);
    outcomes.into_iter().try_for_each(|outcome| outcome.check(file, Some(&bounds)))?;
    others.iter().try_for_each(|outcome| outcome.check(file, None))?;
    let runs = settings.first().filter(|first| first.outcome.runs());
    let evidence = Evidence::new(run, &trial, &replayed)?;
    let program_changes = program::changes(recording, run, &trial, &evidence, &replayed)?;
    let same = |first: &Setting| first.conf().acts_as(recorded);
    // A run that ran out of memory has no peak to compare with.
    let comparable = !replayed.out_of_memory && run.out_of_memory().is_none();
    let saving = runs.filter(|_| comparable).and_then(|first| {
        let saving = evidence.saving(first.outcome.peak_reserved_bytes)?;
        Some(if same(first) { 0.0 } else { saving })
    });
    let conclusive = |first: &Setting| match comparable {
        true => saving.is_some() || evidence.before.reserved_bytes == 0,
        false => evidence.reaches(first.outcome.peak_reserved_bytes),
    };
    let not_reproduced = not_reproduced(run, &replayed);
    let verdict = match runs {
        None => Verdict::OutOfMemory,
        Some(_) if not_reproduced.is_some() => Verdict::Inconclusive,
        Some(first) if same(first) => Verdict::Keep,
        Some(first) if !conclusive(first) => Verdict::Inconclusive,
        Some(first)
            if saving.is_some_and(|saving| !evidence.is_worth_it(first.outcome.peak_reserved_bytes, saving)) =>
        {
            Verdict::Keep
        }
        Some(_) => Verdict::Change,
    };
    let expandable = settings.first().is_some_and(|first| first.conf().expandable);
    let without = settings.iter().find(|setting| expandable && !setting.conf().expandable).cloned();
    Ok(Advice {
        trace: file.display().to_string(),
        gpus: run.trace.gpus.clone(),
        events: history.events(),
        allocations: history.allocations(),
        streams: history.streams().len(),
        cut: run.trace.cut.map(|cut| cut.to_string()),
        settings_known: run.settings_known(),
        recorded: RecordedSettings {
            conf: recorded.clone(),
            peak_reserved_bytes: run.trace.recorded_peaks.map(|peaks| peaks.reserved),
            peak_requested_bytes: run.trace.recorded_peaks.map(|peaks| peaks.requested),
            replayed_off_percent: run.trace.recorded_peaks.filter(|_| run.repeats).map(|peaks| {
                // CAST: bytes of a device, below 2^53.
                100.0 * (replayed.peak_reserved_bytes as f64 / peaks.reserved.max(1) as f64 - 1.0)
            }),
            replayed,
            smallest_memory_bytes: current.smallest_memory_bytes,
            current,
            out_of_memory: run.out_of_memory().cloned(),
        },
        limit_bytes: run.limit.map(|(limit, _)| limit),
        limit_source: run.limit.map(|(_, source)| source),
        released: run.retries.map(|Retries { count, most, .. }| Released { times: count, limit_most_bytes: most }),
        verdict,
        not_reproduced,
        saving_percent: saving,
        evidence,
        needed_bytes: settings.iter().filter_map(|setting| setting.smallest_memory_bytes).min(),
        torch: versions.are_known().then(|| versions.to_string()),
        without_expandable_segments: without,
        obstacle: (expandable && !recorded.expandable)
            .then(|| versions::obstacle(&recording.origins))
            .flatten()
            .map(|obstacle| obstacle.to_string()),
        settings,
        program_changes,
        pools: explain::pools(recording)?,
        phases: phases(recording)?,
        also_tried,
        other_allocators: others,
        unclear_releases: run.unclear_releases,
        live_bytes: bound(history),
        bounds,
        host: host::advice(recording, request.torch.and_then(Torch::host_release))?,
        unknown: Unknown {
            deferred_frees: history.deferred_frees(),
            prologue_allocations: history.prologue_allocations(),
            prologue_reserved_bytes: history.prologue_segments().1,
            undetermined_blocks: history.undetermined_blocks(),
            device_free_bytes: run.out_of_memory().and_then(|last| last.device_free_bytes),
            limit: run.limit_missing,
            events: recording.summary.unknown_events(),
        },
        run: run.to_string(),
        given: !request.confs.is_empty(),
        limit_text: request.limit_text.clone(),
        of_pytorch: recording.summary.format.is_snapshot(),
    })
}

/// Why no setting can be shown to avoid the recorded out-of-memory: the replay under the recorded settings does not have it. In more
/// memory that was asked for it need not.
fn not_reproduced(run: &RecordedRun, replayed: &Outcome<Of>) -> Option<String> {
    let is_recorded = run.limit.is_none_or(|(_, source)| source != LimitSource::Given);
    (is_recorded && run.out_of_memory().is_some() && replayed.runs()).then(|| {
        let within = run.limit.map_or("without a limit".to_owned(), |(limit, _)| format!("within {}", Bytes(limit)));
        format!(
            "memory ran out in the recording, but the replay of the current settings {within} does not run out, so it cannot show \
             which setting avoids that"
        )
    })
}

/// Results of the replays.
#[derive(Debug)]
struct Comparison {
    /// The recorded settings.
    current: Setting,
    settings: Vec<Setting>,
    also_tried: Vec<Outcome<Of>>,
    others: Vec<Outcome<Other>>,
}

/// Does `work` for each item, with a progress bar if there are any.
fn for_each<T: Sync, R: Send>(items: &[T], message: &str, work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    if items.is_empty() {
        return Ok(Vec::new());
    }
    let bar = Bar::new(items.len() as u64, FORM);
    bar.message(message);
    let results = in_parallel(cores(), items, |item| {
        let result = work(item);
        bar.advance(1);
        result
    });
    bar.clear();
    results
}

/// Replays under the settings of the command line, or searches for the best ones.
fn compare(
    trial: &Trial,
    recorded: &Conf,
    request: &Request,
    versions: Versions,
    all_others: bool,
) -> Result<Comparison> {
    let limited = trial.limit.is_some();
    let permitted = |mut confs: Vec<Conf>| {
        confs.retain(|conf| request.allowed(versions).permits(conf));
        confs
    };
    let run = |confs: &[Conf], message: &str| for_each(confs, message, |conf| trial.run(conf));
    let (mut outcomes, detailed) = if request.confs.is_empty() {
        let mut tried = permitted(search::grid(recorded, limited));
        let mut outcomes = run(&tried, "settings")?;
        for _ in 0..ROUNDS {
            search::rank(&mut outcomes, recorded);
            let best = |expandable| outcomes.iter().find(|outcome| outcome.of.conf.expandable == expandable);
            let near = [best(false), best(true)].into_iter().flatten();
            let near = near.flat_map(|outcome| search::around(&outcome.of.conf, limited)).collect();
            let fresh = search::new_ones(permitted(near), &mut tried);
            outcomes.extend(run(&fresh, "settings around the best")?);
        }
        search::rank(&mut outcomes, recorded);
        (outcomes.clone(), search::finalists(&outcomes, DETAILED))
    } else {
        let mut outcomes = run(&request.confs, "settings")?;
        search::rank(&mut outcomes, recorded);
        (outcomes.clone(), outcomes)
    };
    let replayed = match outcomes.iter().find(|outcome| outcome.of.conf.acts_as(recorded)) {
        Some(outcome) => outcome.clone(),
        None => trial.run(recorded)?,
    };
    let is_current = |outcome: &Outcome<Of>| outcome.of.conf.acts_as(recorded);
    let tested = detailed.iter().any(is_current);
    let detailed: Vec<Outcome<Of>> = detailed.into_iter().chain((!tested).then_some(replayed)).collect();
    let mut settings = for_each(&detailed, "minimum memory", |outcome| trial.detailed(outcome.clone()))?;
    // The recorded settings are last if they are not among the best.
    let at = settings.iter().position(|setting| is_current(&setting.outcome)).unwrap_or(settings.len() - 1);
    let current = if tested { settings[at].clone() } else { settings.remove(at) };
    search::rank(&mut settings, recorded);
    if settings.iter().all(|setting| !setting.outcome.runs()) {
        settings.sort_by_key(|setting| setting.smallest_memory_bytes.unwrap_or(u64::MAX));
    }
    for (at, setting) in settings.iter_mut().enumerate() {
        setting.rank = at + 1;
    }
    outcomes.retain(|outcome| !settings.iter().any(|setting| setting.conf().text() == outcome.of.conf.text()));
    let others = if all_others { all() } else { compared() };
    let others: Vec<Selection> =
        others.into_iter().map(Selection::of).filter(|alloc| !alloc.capabilities().follows_pytorch).collect();
    let others = in_parallel(cores(), &others, |alloc| trial.under(Other { alloc: alloc.clone() }, alloc))?;
    Ok(Comparison { current, settings, also_tried: outcomes, others })
}
