//! `vramlab report`: one offline HTML page about recordings and runs.
//!
//! For a recording it shows the addresses of the blocks over time, reserved, active and requested memory, the reserved-memory
//! breakdown, and replays under other allocators. For a run it shows the host's time, driver calls, memory and losses over the
//! steps, and latencies, all from its record. A run that recorded its events has both.

mod data;
mod maps;
mod page;
mod replays;
mod run;
mod source;
mod timeline;

use crate::history::{Devices, PYTORCH};
use crate::nsight;
use crate::output;
use crate::reading::{ReadArgs, cores, in_parallel};
use crate::recording::Recording;
use crate::replay::{Bounds, Search};
use crate::words::{RECORD, counted};
use anyhow::{Context, Result, bail};
use clap::Args;
use data::{Answers, HistoryData, PageData, Recorded};
use maps::Replayed;
use page::Numbers;
use replays::ReplaysData;
use run::RunData;
use source::{Input, Source};
use std::path::PathBuf;
use terminal::arguments::{self, Selections};
use terminal::{Bar, Page};
use vramlab::histories::replay::Addresses;
use vramlab::output::OutputFile;
use vramlab::{Bytes, DeviceName, Selection};

/// Default allocators of the comparison: PyTorch's two policies, three with other block choices, and `remap`.
const COMPARED: &str = "caching,pytorch-expandable,rmm-pool,bfc,tlsf,remap";

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Recordings (PyTorch snapshots or other formats that `convert` reads; plain, .gz or .xz), and directories of runs or
    /// experiments; a run recorded with --trace or --export also has a block map. A capture of Nsight Systems has a page of its own
    #[arg(required = true, value_name = "SNAPSHOT|RUN")]
    inputs: Vec<PathBuf>,
    /// Output file (written atomically; replaces an existing file)
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Open the page in the first browser of BROWSER that starts, else in the desktop's; exit with 1 if none starts
    #[arg(long)]
    open: bool,
    /// Allocators to compare, with settings, separated by commas; settings not given are the recorded ones [default: caching,
    /// pytorch-expandable, rmm-pool, bfc, tlsf, remap]
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocators())]
    alloc: Vec<Selections>,
    /// Memory limit of the recorded program, such as 11900MiB; distinguishes a retry from empty_cache
    #[arg(long, value_name = "BYTES")]
    limit: Option<Bytes>,
    /// Show this GPU's events [default: one that ran out of memory, else the one with the highest reserved peak]
    #[arg(long, value_name = "N")]
    gpu: Option<u16>,
    /// Search for an offline placement, an upper bound on the memory needed: about a second; `plan` searches longer
    #[arg(long, default_value = "on")]
    plan: Search,
    /// Search for the best PyTorch settings for each snapshot, as `advise` does: seconds for 40,000 events
    #[arg(long, default_value = "on")]
    advise: Search,
    #[command(flatten)]
    read: ReadArgs,
}

/// Writes the page.
pub(crate) fn report(args: &ReportArgs) -> Result<()> {
    let out = output::replacing(&args.out, &args.inputs)?;
    if let Some(capture) = args.inputs.iter().find(|path| nsight::Format::new(path).is_some()) {
        if args.inputs.len() > 1 || !args.alloc.is_empty() || args.limit.is_some() || args.gpu.is_some() {
            let capture = capture.display();
            bail!(
                "{capture}: a capture has a page of its own; write it without other inputs, --alloc, --limit and --gpu"
            );
        }
        nsight::report(capture, out)?;
        return finish(args);
    }
    let (mut directories, mut replays) = (Vec::new(), Vec::new());
    for path in args.inputs.iter().filter(|path| path.is_dir()) {
        let (trained, replayed) = (run::directories(path)?, replays::read(path)?);
        if trained.is_empty() && replayed.is_empty() {
            bail!("{}: the experiment has no finished training run or replay", path.display());
        }
        directories.extend(trained);
        replays.extend(replayed);
    }
    let runs = run::read(&directories)?;
    let inputs: Vec<Input> = args.inputs.iter().filter_map(|path| Input::new(path)).collect();
    write(args, out, &inputs, &runs, &replays)?;
    finish(args)
}

/// Opens the page, or prints how to.
fn finish(args: &ReportArgs) -> Result<()> {
    if args.open {
        return page::open(&args.out);
    }
    let mut page = Page::stdout();
    page.line(format!("Next: open {} in a browser", terminal::quoted(&args.out.to_string_lossy())));
    page.print()
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
        let source = Source::new(input, &recording, limit)?;
        // A recording that is too large is refused before its replays, which can take minutes.
        let name = source.name.clone();
        let recorded = data::recorded(source, &mut numbers).context(name)?;
        // `advise` and `explain` draw their own progress bars.
        let answers = answers(input, &recording, args);
        drop(recording);
        let bar = Bar::new(chosen.len() as u64 + 2, "{bar:30} report {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
        histories.push(history_data(recorded, &chosen, &devices, args, &bar, answers, &mut numbers)?);
        bar.clear();
    }
    let names = histories.iter().map(|history| &history.name);
    let eventless = runs.iter().filter(|run| !histories.iter().any(|history| history.name == run.folder));
    let names = names.chain(eventless.map(|run| &run.name)).chain(replays.iter().map(|variant| &variant.name));
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
    let count = |count: usize, noun| counted(count as u64, noun);
    let mut contents = Vec::new();
    if !runs.is_empty() {
        contents.push(count(runs.len(), "run"));
    }
    if let rows @ 1.. = replays.iter().map(|variant| variant.rows.len()).sum() {
        contents.push(count(rows, "replay"));
    }
    if !replayed.is_empty() {
        let each = if replayed.len() == 1 { "replayed" } else { "each replayed" };
        let (recordings, allocators) = (count(replayed.len(), "recording"), count(chosen.len(), "allocator"));
        contents.push(format!("{events} events of {recordings}, {each} under {allocators}"));
    }
    if let snapshots @ 1.. = histories.len() - replayed.len() {
        contents.push(format!("{} without events", count(snapshots, "snapshot")));
    }
    let size = Bytes(document.len() as u64);
    page.line(format!("{}: {}; page size {size}.", args.out.display(), contents.join(", ")));
    lines.iter().for_each(|line| page.note(line));
    page.print()
}

/// The answers of `advise` and `explain` for an input.
fn answers(input: &Input, recording: &Recording, args: &ReportArgs) -> Answers {
    // PyTorch's settings do not apply to a run under another allocator, and a replay needs events.
    let advised = input.run.is_none() && args.advise == Search::On && !recording.events.is_empty();
    let advise = advised.then(|| crate::advise::answer(&input.file, recording, args.limit.map(|limit| limit.0)).into());
    let explain = Some(crate::explain::answer(&input.file, recording).into());
    Answers { advise, explain }
}

/// The page's data about one recording.
fn history_data(
    recorded: Recorded,
    chosen: &[Selection],
    devices: &Devices,
    args: &ReportArgs,
    bar: &Bar,
    answers: Answers,
    numbers: &mut Numbers,
) -> Result<HistoryData> {
    let source = &recorded.source;
    let name = source.name.clone();
    bar.message(format!("{name}: reproducing the recording"));
    let served = reproduce(source, devices)?;
    bar.advance(1);
    let planning = |progress: &str| bar.message(format!("planning {name}: {progress}"));
    let bounds = source.compiled.as_ref().map(|compiled| Bounds::of(compiled, args.plan, planning));
    let bounds = bounds.transpose().with_context(|| name.clone())?;
    bar.advance(1);
    let others = in_parallel(cores(), chosen, |selection| {
        bar.message(format!("{name} under {selection}"));
        let replayed = maps::replayed(source, selection, devices, Addresses::Own)?;
        bar.advance(1);
        Ok(replayed.map(|replayed| (selection.clone(), replayed)))
    })?;
    let others: Vec<(Selection, Replayed)> = others.into_iter().flatten().collect();
    bar.message(format!("{name}: packing"));
    data::history(recorded, served.as_ref(), bounds, &others, answers, numbers).with_context(|| name)
}

/// The replay that matches every recorded block address; without one, a replay whose breakdown approximates the recording's.
fn reproduce(source: &Source, devices: &Devices) -> Result<Option<Replayed>> {
    let mut candidates: Vec<Selection> = source.allocator.iter().cloned().collect();
    candidates.extend(vramlab::backends::parse_list(PYTORCH)?);
    for candidate in &candidates {
        if let Some(replay) = maps::replayed(source, candidate, devices, Addresses::Recorded)?
            && replay.as_recorded
        {
            return Ok(Some(replay));
        }
    }
    maps::replayed(source, &candidates[0], devices, Addresses::Own)
}
