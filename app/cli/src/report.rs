//! `vramlab report`: one page of HTML for histories and runs, which works offline.
//!
//! Of a history it shows where the blocks lay over time, how much was reserved, active and asked for, how the unused part
//! divides up, and what other allocators would have made of the same program. Of a run it shows what its record says: the
//! host's time, driver calls, memory and losses over the steps, latencies. A run that recorded its events has both.

mod data;
mod maps;
mod page;
mod replays;
mod run;
mod source;
mod timeline;

use crate::history::{Devices, PYTORCH};
use crate::reading::ReadArgs;
use crate::recording::Recording;
use crate::replay::{Bounds, Search};
use crate::words::{RECORD, counted};
use anyhow::{Context, Result, bail};
use clap::Args;
use data::{Answers, HistoryData, PageData};
use maps::Replayed;
use page::Numbers;
use replays::ReplaysData;
use run::RunData;
use source::{Input, Source};
use std::path::PathBuf;
use terminal::arguments::{self, Selections};
use terminal::{Bar, Page};
use vramlab::histories::replay::Addresses;
use vramlab::output::{Existing, OutputFile};
use vramlab::{Bytes, DeviceName, Selection};

/// Those that a page compares where none is named: PyTorch's two policies, and three that choose blocks otherwise.
const COMPARED: &str = "caching,pytorch-expandable,rmm-pool,bfc,tlsf";

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Histories (PyTorch snapshots and the other formats of `convert`, plain, .gz or .xz), folders of runs, with a block map
    /// where they were recorded with --trace or --export, and folders of experiments
    #[arg(required = true, value_name = "SNAPSHOT|RUN")]
    inputs: Vec<PathBuf>,
    /// Page to write; one that is there is replaced
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Open it in the browser: the first of BROWSER that starts, else the desktop's own. Where none starts the exit code is 1,
    /// and the page is there all the same
    #[arg(long)]
    open: bool,
    /// Allocators that are compared, with their settings, separated by commas [default: caching, pytorch-expandable,
    /// rmm-pool, bfc, tlsf]; what is not set is as it was recorded
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocators())]
    alloc: Vec<Selections>,
    /// Memory limit of the recording, such as 11900MiB, which tells a retry from empty_cache
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// Which GPU's events are shown, where a history holds several [default: one that ran out of memory, else the one that
    /// reserved most]
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    /// Search for a plan, the least memory that is known to be enough: about a second; `plan` searches longer
    #[arg(long, default_value = "on")]
    plan: Search,
    /// Search for the setting of PyTorch that mends each snapshot, as `advise` does: seconds for 40,000 events
    #[arg(long, default_value = "on")]
    advise: Search,
    #[command(flatten)]
    read: ReadArgs,
}

/// Makes the page.
pub(crate) fn report(args: &ReportArgs) -> Result<()> {
    let out = OutputFile::create(&args.out, Existing::Replace)?;
    let (mut folders, mut replays) = (Vec::new(), Vec::new());
    for path in args.inputs.iter().filter(|path| path.is_dir()) {
        let (trained, replayed) = (run::folders(path)?, replays::read(path)?);
        if trained.is_empty() && replayed.is_empty() {
            bail!("{}: no finished run of a training program or replay in this experiment", path.display());
        }
        folders.extend(trained);
        replays.extend(replayed);
    }
    let runs = run::read(&folders)?;
    let inputs: Vec<Input> = args.inputs.iter().filter_map(|path| Input::of(path)).collect();
    write(args, out, &inputs, &runs, &replays)?;
    if args.open { page::open(&args.out) } else { Ok(()) }
}

fn write(
    args: &ReportArgs,
    out: OutputFile,
    inputs: &[Input],
    runs: &[RunData],
    replays: &[ReplaysData],
) -> Result<()> {
    let chosen = match args.alloc.is_empty() {
        true => vramlab::backends::parse_list(COMPARED)?,
        false => arguments::chosen(&args.alloc),
    };
    chosen.iter().try_for_each(Selection::check)?;
    let devices = Devices::open(&DeviceName::Sim(None))?;
    let mut numbers = Numbers::default();
    let (mut histories, mut lines, mut without_events) = (Vec::new(), Vec::new(), false);
    let limit = args.limit.map(|limit| limit.0);
    for input in inputs {
        let recording = Recording::read(&input.file, args.gpu, limit, &args.read)?;
        lines.extend(recording.gpus.lines().into_iter().map(|line| format!("{}: {line}", input.file.display())));
        without_events |= recording.events.is_empty();
        // `advise` and `explain` show their own progress.
        let answers = answers(input, &recording, args);
        let source = Source::of(input, &recording, limit)?;
        drop(recording);
        let bar = Bar::new(chosen.len() as u64 + 2, "{bar:30} report {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
        histories.push(shown(source, &chosen, &devices, args, &bar, answers, &mut numbers)?);
        bar.clear();
    }
    let names = histories.iter().map(|history| &history.name);
    let eventless = runs.iter().filter(|run| !histories.iter().any(|history| history.name == run.folder));
    let names = names.chain(eventless.map(|run| &run.name)).chain(replays.iter().map(|arm| &arm.name));
    let names: Vec<&str> = names.map(String::as_str).collect();
    let title = format!("GPU memory: {}", names.join(", "));
    let replayed: Vec<&HistoryData> = histories.iter().filter(|history| history.recorded).collect();
    let events: u64 = replayed.iter().map(|history| history.events).sum();
    let document = page::document(&title, &PageData { title: &title, runs, replays, histories: &histories }, &numbers)?;
    out.fill(&document)?;
    if without_events {
        let [before, after] = RECORD;
        lines.push(format!("To record events, call {before} before the work, and {after} after it"));
    }
    let mut page = Page::stdout();
    let some = |count: usize, noun| if count == 1 { format!("one {noun}") } else { counted(count as u64, noun) };
    let mut shown = Vec::new();
    if !runs.is_empty() {
        shown.push(some(runs.len(), "run"));
    }
    if let count @ 1.. = replays.iter().map(|arm| arm.rows.len()).sum() {
        shown.push(some(count, "replay"));
    }
    if !replayed.is_empty() {
        let each = if replayed.len() == 1 { "replayed" } else { "each replayed" };
        let (of, under) = (some(replayed.len(), "history"), some(chosen.len(), "allocator"));
        shown.push(format!("{events} events of {of}, {each} under {under}"));
    }
    if let held @ 1.. = histories.len() - replayed.len() {
        shown.push(format!("what was held in {} without events", some(held, "snapshot")));
    }
    let size = Bytes(document.len() as u64);
    page.line(format!("{}: {}; the page has {size}.", args.out.display(), shown.join(", ")));
    lines.iter().for_each(|line| page.note(line));
    if !args.open {
        page.line(format!("Next: open {} in a browser", terminal::quoted(&args.out.to_string_lossy())));
    }
    page.print()
}

/// What the commands for questions say of an input.
fn answers(input: &Input, recording: &Recording, args: &ReportArgs) -> Answers {
    // PyTorch's settings say nothing of a run that had another allocator, and nothing is replayed without events.
    let asked = input.run.is_none() && args.advise == Search::On && !recording.events.is_empty();
    let advise = asked.then(|| crate::advise::answer(&input.file, recording, args.limit.map(|limit| limit.0)).into());
    let explain = Some(crate::explain::answer(&input.file, recording).into());
    Answers { advise, explain }
}

/// Everything about one history.
fn shown(
    source: Source,
    chosen: &[Selection],
    devices: &Devices,
    args: &ReportArgs,
    bar: &Bar,
    answers: Answers,
    numbers: &mut Numbers,
) -> Result<HistoryData> {
    let name = source.name.clone();
    bar.message(format!("{name}: how its requests were served"));
    let served = as_it_was(&source, devices)?;
    bar.advance(1);
    let planning = |found: &str| bar.message(format!("planning {name}: {found}"));
    let bounds = source.compiled.as_ref().map(|compiled| Bounds::of(compiled, args.plan, planning));
    let bounds = bounds.transpose().with_context(|| name.clone())?;
    bar.advance(1);
    let mut others = Vec::new();
    for selection in chosen {
        bar.message(format!("{name} under {selection}"));
        let replayed = maps::replayed(&source, selection, devices, Addresses::Own)?;
        others.extend(replayed.map(|replayed| (selection.clone(), replayed)));
        bar.advance(1);
    }
    bar.message(format!("{name}: packing"));
    data::history(source, served.as_ref(), bounds, &others, answers, numbers).with_context(|| name)
}

/// The replay that puts every block where it was recorded, if there is one; else one whose ledger stands for it.
fn as_it_was(source: &Source, devices: &Devices) -> Result<Option<Replayed>> {
    let mut own: Vec<Selection> = source.allocator.iter().cloned().collect();
    own.extend(vramlab::backends::parse_list(PYTORCH)?);
    for candidate in &own {
        if let Some(found) = maps::replayed(source, candidate, devices, Addresses::Recorded)?
            && found.as_recorded
        {
            return Ok(Some(found));
        }
    }
    maps::replayed(source, &own[0], devices, Addresses::Own)
}
