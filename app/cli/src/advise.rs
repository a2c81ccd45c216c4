//! `vramlab advise`: what a recorded history would have reserved under PyTorch's settings, and which of them mends it.

mod conf;
mod evaluate;
mod evidence;
mod first;
mod not_recorded;
mod program;
mod ranks;
mod recorded_run;
mod search;
mod sentences;
mod versions;

use crate::explain::phases::{Phase, phases};
use crate::gpus::Gpus;
use crate::history::Compiled;
use crate::reading::{ReadArgs, cores, in_parallel, share_of};
use crate::recording::Recording;
use crate::replay::{Bounds, Search};
use anyhow::{Context, Result, bail};
use clap::Args;
use conf::Conf;
use evaluate::{Of, Outcome, Setting, Trial, bound};
use evidence::Evidence;
pub(crate) use first::{First, Replayed, first, replayed};
use recorded_run::{LimitSource, RecordedRun, Retries};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};
use terminal::{Bar, Page, Shard};
use versions::{Allowed, Torch, Versions};
use vramlab::backends::{all, compared};
use vramlab::histories::replay::OutOfMemory;
use vramlab::{Bytes, Selection};

/// A change that saves less, in percent, is not worth it.
const WORTH: f64 = 2.0;
/// Settings that are looked at closely.
const CLOSELY: usize = 6;
/// Rounds in which settings around the best are tried.
const ROUNDS: usize = 2;
/// A limit below this is a slip: the allocator takes no less from a device.
const LEAST_LIMIT: u64 = 2 << 20;

#[derive(Debug, Args)]
pub(crate) struct AdviseArgs {
    /// Histories: snapshots that torch.cuda.memory._dump_snapshot wrote, plain, .gz or .xz, and the other formats of `convert`
    #[arg(required = true, value_name = "SNAPSHOT")]
    files: Vec<PathBuf>,
    /// Memory that PyTorch may reserve, such as 24GiB [default: what the history says, if memory ran out, the cache was released or garbage was collected]
    #[arg(long, value_name = "BYTES")]
    limit: Option<String>,
    /// Settings to look at instead of searching, as PYTORCH_CUDA_ALLOC_CONF has them; may be given several times
    #[arg(long, value_name = "STRING", allow_hyphen_values = true)]
    conf: Vec<String>,
    /// A setting that the search leaves out, such as expandable_segments; may be given several times
    #[arg(long, value_name = "KEY", conflicts_with = "conf")]
    without: Vec<String>,
    /// PyTorch under which the program is to run, such as 2.9: what it does not know is not advised [default: told from what the
    /// snapshot has]
    #[arg(long, value_name = "VERSION")]
    torch: Option<String>,
    /// Compare with every allocator of the list, not only with the most common
    #[arg(long)]
    all: bool,
    /// Look at a share of the histories only: every N-th, beginning with the K-th, as the jobs of a Slurm array do
    #[arg(long, value_name = "K/N")]
    shard: Option<Shard>,
    /// Which GPU's events are looked at, where a history holds several [default: one that ran out of memory, else the one that
    /// reserved most]
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    #[command(flatten)]
    read: ReadArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// End with code 3 where no setting mends a history: under each of them memory runs out [otherwise 0 done, 1 failed while
    /// running, 2 bad input]
    #[arg(long)]
    pub(crate) exit_code: bool,
}

/// What is said of one history; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
struct Advice {
    trace: String,
    #[serde(flatten)]
    gpus: Gpus,
    events: u64,
    allocations: u64,
    /// Streams that allocate.
    streams: usize,
    /// What is missing of a file that was cut short.
    cut: Option<String>,
    #[serde(skip)]
    settings_known: bool,
    /// What the recording program had.
    recorded: AsItRan,
    /// Most bytes that may be reserved in all that follows.
    limit_bytes: Option<u64>,
    /// How that is known.
    limit_source: Option<LimitSource>,
    /// Where the limit is told from releases of the cache: how many, and the most that it can have been.
    released: Option<Released>,
    /// What is to be done.
    verdict: Verdict,
    /// What the first of the settings saves, in percent of the peak that was recorded; 0 where nothing is to be changed. `null` where
    /// the recording does not say, and where memory runs out.
    saving_percent: Option<f64>,
    /// What the answer rests on.
    evidence: Evidence,
    /// The versions of PyTorch that settings are for: `--torch`, or those that write such a snapshot; `null` where nothing
    /// tells them.
    torch: Option<String>,
    /// Least memory in which any setting runs.
    needed_bytes: Option<u64>,
    /// The best settings of each kind, or those of `--conf`, best first; those that run out of memory come last. The
    /// expected peak decides, and within 0.5 % of it the fewer changes to what ran and the fewer driver calls; within 2 % a
    /// setting that needs no line of Python comes before one that does.
    settings: Vec<Setting>,
    /// The best of them without `expandable_segments`, where the first has it; `null` where it has not, or none was tried.
    without_expandable_segments: Option<Setting>,
    /// Where the first setting has `expandable_segments` and what ran had not: what a stack frame shows against them, Windows
    /// or CUDA IPC.
    obstacle: Option<String>,
    /// Phases that the program's outermost annotations part, else its longest pauses; none where nothing parts it.
    phases: Vec<Phase>,
    /// What a change of the program would gain under the recorded settings, the one that saves most first. Under 2 % of reserved
    /// memory, or of `empty_cache` under a tenth of the driver calls, nothing is said.
    program_changes: Vec<program::Change>,
    /// What else was tried.
    also_tried: Vec<Outcome<Of>>,
    /// Allocators that no setting of PyTorch's selects, for comparison.
    other_allocators: Vec<Outcome<Other>>,
    /// Most bytes asked for at once, what was refused included.
    live_bytes: u64,
    #[serde(flatten)]
    bounds: Bounds,
    /// What no replay can tell.
    unknown: Unknown,
    #[serde(skip)]
    happened: String,
}

/// Releases of the cache during requests.
#[derive(Debug, Serialize)]
struct Released {
    /// How many stacks show.
    times: u64,
    /// The most that the limit can have been.
    limit_most_bytes: u64,
}

/// What the recording program had.
#[derive(Debug, Serialize)]
struct AsItRan {
    /// Its settings; empty: PyTorch's defaults.
    conf: Conf,
    peak_reserved_bytes: Option<u64>,
    peak_requested_bytes: Option<u64>,
    /// The replay under the same settings.
    replayed: Outcome<Of>,
    /// How far the peak of that is from the recorded one: how far the other figures can be trusted. `null` where the
    /// limit is another one or not known.
    replayed_off_percent: Option<f64>,
    /// The last request that was refused.
    out_of_memory: Option<OutOfMemory>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// The first setting is better than what ran.
    Change,
    /// What ran is as good as any, or so nearly that a change is not worth it.
    Keep,
    /// The recording does not say: before it began more was reserved than the first setting needs in what was recorded, and how
    /// much that setting would have needed by then is not known.
    NotSaid,
    /// Memory runs out under every setting, or more is reserved than there is.
    OutOfMemory,
    /// The snapshot has no events, so that nothing can be compared.
    NotRecorded,
}

/// What no replay can tell.
#[derive(Debug, Serialize)]
struct Unknown {
    /// Frees that waited for other streams: when these were done depends on timing.
    deferred_frees: u64,
    /// Blocks that were in use before the first event.
    prologue_allocations: u64,
    /// Bytes of segments that were held before the first event.
    prologue_reserved_bytes: u64,
    /// Blocks from before the first event whose size the history does not tell.
    undetermined_blocks: u64,
    /// Bytes free on the device when memory ran out.
    device_free_bytes: Option<u64>,
    /// Whether garbage was collected under a memory limit that the history does not tell.
    limit: bool,
}

/// An allocator other than PyTorch's.
#[derive(Clone, Debug, Serialize)]
struct Other {
    /// As `--alloc` of `replay` names it.
    alloc: Selection,
}

/// The search's way, drawn on standard error.
const FORM: &str = "{bar:30} {msg} {pos}/{len} [{elapsed} left {eta}]";

/// Answers for each file; whether some setting runs each.
pub(crate) fn advise(args: &AdviseArgs) -> Result<bool> {
    let asked = Asked::of(args)?;
    let limit = args.limit.as_deref().map(limit_of).transpose()?;
    let files = share_of(&args.files, args.shard);
    let mut page = Page::stdout();
    let mends = match (files.as_slice(), args.shard) {
        ([], Some(shard)) => {
            let are = if args.files.len() == 1 { "is" } else { "are" };
            let histories = crate::words::counted(args.files.len() as u64, "history");
            bail!("--shard {shard}: there {are} {histories}; none is left for this share")
        }
        ([file], None) => {
            let recording = read(file, args)?;
            if recording.events.is_empty() {
                return not_recorded::answer(file, &recording, args, limit).map(|()| true);
            }
            let advice = of(file, &recording, args, limit, &asked)?;
            let mends = advice.verdict != Verdict::OutOfMemory;
            if args.json {
                return terminal::print_json(&advice).map(|()| mends);
            }
            sentences::report(&advice, args.all, &mut page);
            sentences::end(&advice, &mut page);
            mends
        }
        (files, _) => {
            let found = ranks::of(files, args, limit, &asked)?;
            let mends = found.mends();
            if args.json {
                return terminal::print_json(&found).map(|()| mends);
            }
            ranks::report(&found, args.all, &mut page);
            mends
        }
    };
    page.print().map(|()| mends)
}

/// The answer for one history as `--json` has it, with the sentences of the screen, for the page of `report`.
///
/// # Errors
/// As those of the command.
pub(crate) fn answer(file: &Path, recording: &Recording, limit: Option<u64>) -> Result<Value> {
    let happened = RecordedRun::of(limit, recording)?;
    let advice = advice(file, &happened, &Asked::default(), false, recording)?;
    let mut out = serde_json::to_value(&advice)?;
    out["happened"] = sentences::happened(&advice).into();
    out["bound"] = sentences::least(&advice).into();
    out["not_known"] = sentences::unknown(&advice).into();
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
/// A text that says none, or less than an allocator can take.
pub(crate) fn limit(text: &str) -> Result<u64> {
    let Bytes(bytes) = text.parse()?;
    if bytes < LEAST_LIMIT {
        bail!("that is {}, less than an allocator can take; write a unit, such as 24GiB", Bytes(bytes));
    }
    Ok(bytes)
}

/// A setting's figures for a comparison with what really happened.
#[derive(Debug)]
pub struct Predicted {
    /// The setting, as `PYTORCH_CUDA_ALLOC_CONF` has it.
    pub conf: String,
    /// Peak of reserved memory.
    pub peak_reserved_bytes: u64,
    /// Whether a request fails.
    pub out_of_memory: bool,
    /// Times at which the cache is emptied before a request can be served.
    pub num_alloc_retries: u64,
}

/// What a history would do under settings, and what of it no replay can tell.
#[derive(Debug)]
pub struct Predictions {
    /// The best first.
    pub settings: Vec<Predicted>,
    /// Frees that waited for other streams.
    pub deferred_frees: u64,
    /// Private pools, of CUDA graphs and of `MemPool`.
    pub private_pools: u64,
}

/// What a history would do under settings.
///
/// # Errors
/// Those of reading the history, and of settings that are none.
pub fn predict(file: &Path, limit: Option<u64>, confs: &[String]) -> Result<Predictions> {
    let happened = RecordedRun::read(file, None, limit, &ReadArgs::default())?;
    // As under a limit of PyTorch's, which expandable segments may pass.
    let trial = Trial::new(file, &happened.recorded.history, limit, false)?;
    let confs = self::confs(confs)?;
    let mut outcomes = in_parallel(cores(), &confs, |conf| trial.run(conf))?;
    search::rank(&mut outcomes, &happened.conf);
    let settings = outcomes.into_iter().map(|outcome| Predicted {
        conf: outcome.of.conf.text().to_owned(),
        peak_reserved_bytes: outcome.peak_reserved_bytes,
        out_of_memory: outcome.out_of_memory,
        num_alloc_retries: outcome.num_alloc_retries,
    });
    let history = &happened.recorded.history;
    let (deferred_frees, private_pools) = (history.deferred_frees(), history.private_pools());
    Ok(Predictions { settings: settings.collect(), deferred_frees, private_pools })
}

/// Reads one history.
fn read(file: &Path, args: &AdviseArgs) -> Result<Recording> {
    let bar = Bar::new(None, "{spinner} {wide_msg} [{elapsed}]");
    bar.message(format!("reading {}", file.display()));
    let recording = Recording::read(file, args.gpu, None, &args.read)?;
    bar.clear();
    Ok(recording)
}

/// Says everything of one history.
fn of(file: &Path, recording: &Recording, args: &AdviseArgs, limit: Option<u64>, asked: &Asked) -> Result<Advice> {
    advice(file, &RecordedRun::of(limit, recording)?, asked, args.all, recording)
}

/// What is to be answered.
#[derive(Debug, Default)]
struct Asked {
    /// Settings to look at instead of searching.
    confs: Vec<Conf>,
    /// What the search leaves out.
    without: Vec<String>,
    torch: Option<Torch>,
}

impl Asked {
    fn of(args: &AdviseArgs) -> Result<Self> {
        args.without
            .iter()
            .try_for_each(|key| versions::check_name(key).with_context(|| format!("--without {key}")))?;
        let torch = args.torch.as_deref().map(|text| text.parse().with_context(|| format!("--torch {text}")));
        Ok(Self { confs: confs(&args.conf)?, without: args.without.clone(), torch: torch.transpose()? })
    }

    /// The versions that a history's settings are for.
    ///
    /// # Errors
    /// None of them knows what a given setting names.
    fn versions(&self, happened: &RecordedRun) -> Result<Versions> {
        let Compiled { keys, allocator_settings, cut, .. } = &happened.recorded;
        let versions = self.torch.map_or_else(|| Versions::told(*keys, allocator_settings, *cut), Versions::given);
        self.confs.iter().try_for_each(|conf| versions.check(conf))?;
        Ok(versions)
    }

    fn allowed(&self, versions: Versions) -> Allowed<'_> {
        Allowed { versions, without: &self.without }
    }
}

/// Says everything of one history.
fn advice(file: &Path, happened: &RecordedRun, asked: &Asked, all: bool, recording: &Recording) -> Result<Advice> {
    let history = &happened.recorded.history;
    let trial = happened.trial(file)?;
    let recorded = &happened.conf;
    let versions = asked.versions(happened)?;
    let (bounds, found) = std::thread::scope(|scope| {
        let bounds = scope.spawn(|| Bounds::of(&happened.recorded, Search::On, |_| {}));
        let found = compare(&trial, recorded, asked, versions, all);
        (bounds.join(), found)
    });
    // A panic there has been reported.
    let bounds = bounds.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let bounds = bounds.with_context(|| file.display().to_string())?;
    let Found { replayed, settings, also_tried, others } = found?;
    let tried = settings.iter().map(|setting| &setting.outcome).chain(&also_tried).chain([&replayed]);
    tried.into_iter().try_for_each(|outcome| outcome.check(file, Some(&bounds)))?;
    others.iter().try_for_each(|outcome| outcome.check(file, None))?;
    let runs = settings.first().filter(|first| first.outcome.runs());
    let evidence = Evidence::of(happened, &trial, &replayed)?;
    let program_changes = program::changes(recording, happened, &trial, &evidence, &replayed)?;
    let same = |first: &Setting| first.conf().acts_as(recorded);
    // What ran out of memory has no peak to be compared with.
    let compares = !replayed.out_of_memory && happened.out_of_memory().is_none();
    let saving = runs.filter(|_| compares).and_then(|first| {
        let saving = evidence.saving(first.outcome.peak_reserved_bytes)?;
        Some(if same(first) { 0.0 } else { saving })
    });
    let told = |first: &Setting| match compares {
        true => saving.is_some() || evidence.before.reserved_bytes == 0,
        false => evidence.reaches(first.outcome.peak_reserved_bytes),
    };
    let verdict = match runs {
        None => Verdict::OutOfMemory,
        Some(first) if same(first) => Verdict::Keep,
        Some(first) if !told(first) => Verdict::NotSaid,
        Some(_) if saving.is_some_and(|saving| saving < WORTH) => Verdict::Keep,
        Some(_) => Verdict::Change,
    };
    let expandable = settings.first().is_some_and(|first| first.conf().expandable);
    let without = settings.iter().find(|setting| expandable && !setting.conf().expandable).cloned();
    Ok(Advice {
        trace: file.display().to_string(),
        gpus: happened.recorded.gpus.clone(),
        events: history.events(),
        allocations: history.allocations(),
        streams: history.streams().len(),
        cut: happened.recorded.cut.map(|cut| cut.to_string()),
        settings_known: happened.recorded.cut.is_none_or(|cut| cut.settings_known),
        recorded: AsItRan {
            conf: recorded.clone(),
            peak_reserved_bytes: happened.recorded.as_recorded.map(|told| told.reserved),
            peak_requested_bytes: happened.recorded.as_recorded.map(|told| told.requested),
            replayed_off_percent: happened.recorded.as_recorded.filter(|_| happened.repeats).map(|told| {
                // CAST: bytes of a device, below 2^53.
                100.0 * (replayed.peak_reserved_bytes as f64 / told.reserved.max(1) as f64 - 1.0)
            }),
            replayed,
            out_of_memory: happened.out_of_memory().cloned(),
        },
        limit_bytes: happened.limit.map(|(limit, _)| limit),
        limit_source: happened.limit.map(|(_, source)| source),
        released: happened.retries.map(|Retries { count, most, .. }| Released { times: count, limit_most_bytes: most }),
        verdict,
        saving_percent: saving,
        evidence,
        needed_bytes: settings.iter().filter_map(|setting| setting.smallest_memory_bytes).min(),
        torch: versions.are_told().then(|| versions.to_string()),
        without_expandable_segments: without,
        obstacle: (expandable && !recorded.expandable)
            .then(|| versions::shown(&recording.origins))
            .flatten()
            .map(|obstacle| obstacle.to_string()),
        settings,
        program_changes,
        phases: phases(recording)?,
        also_tried,
        other_allocators: others,
        live_bytes: bound(history),
        bounds,
        unknown: Unknown {
            deferred_frees: history.deferred_frees(),
            prologue_allocations: history.prologue_allocations(),
            prologue_reserved_bytes: history.prologue_segments().1,
            undetermined_blocks: history.undetermined_blocks(),
            device_free_bytes: happened.out_of_memory().and_then(|last| last.device_free_bytes),
            limit: happened.limit_missing,
        },
        happened: happened.to_string(),
    })
}

/// What replays found.
#[derive(Debug)]
struct Found {
    replayed: Outcome<Of>,
    settings: Vec<Setting>,
    also_tried: Vec<Outcome<Of>>,
    others: Vec<Outcome<Other>>,
}

/// Does `work` for each item, with a bar that says what it is.
fn of_all<T: Sync, R: Send>(items: &[T], what: &str, work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let bar = Bar::new(items.len() as u64, FORM);
    bar.message(what);
    let done = in_parallel(cores(), items, |item| {
        let done = work(item);
        bar.advance(1);
        done
    });
    bar.clear();
    done
}

/// Replays under the settings of the command line, or under those of a search.
fn compare(trial: &Trial, recorded: &Conf, asked: &Asked, versions: Versions, all_others: bool) -> Result<Found> {
    let limited = trial.limit.is_some();
    let permitted = |mut confs: Vec<Conf>| {
        confs.retain(|conf| asked.allowed(versions).permits(conf));
        confs
    };
    let run = |confs: &[Conf], message: &str| of_all(confs, message, |conf| trial.run(conf));
    let (mut outcomes, close) = if asked.confs.is_empty() {
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
        (outcomes.clone(), search::distinct(&outcomes, CLOSELY))
    } else {
        let mut outcomes = run(&asked.confs, "settings")?;
        search::rank(&mut outcomes, recorded);
        (outcomes.clone(), outcomes)
    };
    let replayed = match outcomes.iter().find(|outcome| outcome.of.conf.acts_as(recorded)) {
        Some(outcome) => outcome.clone(),
        None => trial.run(recorded)?,
    };
    let mut settings = of_all(&close, "smallest memory", |outcome| trial.closely(outcome.clone()))?;
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
    Ok(Found { replayed, settings, also_tried: outcomes, others })
}
