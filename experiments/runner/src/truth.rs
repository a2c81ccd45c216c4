//! `experiments advise-truth`: predictions of `vramlab advise` for the memory that programs would reserve, compared
//! with PyTorch's measurements.
//!
//! A program was run under several settings, and some of these runs were recorded. A recording is replayed under the
//! settings of the other runs, about which the replay knows nothing. Under its own settings nothing is predicted, so
//! there is no such row.

mod measured;
mod pairs;

use crate::repository;
use crate::table::table;
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use measured::Runs;
use pairs::{Key, Pair, predicted, recordings};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use terminal::exit::RuntimeFailure;
use terminal::{Bar, Cell, Column, Page};
use vramlab::Bytes;
use vramlab::input::{TABLE, read_text};
use vramlab::output::{Existing, OutputFile};

/// The committed table.
const KEPT: &str = "results/advise-truth.csv";
/// The command that rewrites it.
const AGAIN: &str = "experiments advise-truth -o experiments/results/advise-truth.csv";

#[derive(Debug, Args)]
pub(crate) struct TruthArgs {
    /// Directories with recordings (PROGRAM.CONFIG.pickle.xz) and PyTorch's statistics of the same runs (PROGRAM.CONFIG.json)
    /// [default: the repository's recordings, whose table is compared with the committed one]
    #[arg(value_name = "FOLDER")]
    folders: Vec<PathBuf>,
    /// Only every third recording, beginning with the N-th, where N counts round after round
    #[arg(long, value_name = "N", conflicts_with = "folders")]
    third: Option<usize>,
    /// Write the table to this file, as CSV, and compare it with nothing
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON array with an object for each pair
    #[arg(long)]
    json: bool,
}

/// Predicts and compares.
pub(crate) fn truth(args: &TruthArgs) -> Result<()> {
    let out = args.out.as_deref().map(|out| OutputFile::create(out, Existing::Replace)).transpose()?;
    let runs = if args.folders.is_empty() { Runs::recorded()? } else { Runs::of_folders(&args.folders)? };
    let mut chosen = recordings(&runs.all);
    if let Some(third) = args.third {
        let count = chosen.len();
        chosen = chosen.into_iter().skip(third % 3).step_by(3).collect();
        if chosen.is_empty() {
            bail!(
                "--third {third}: there {} {count} recording{}; leave it out",
                one_or(count, "is", "are"),
                one_or(count, "", "s")
            );
        }
    }
    let build = build();
    let bar = Bar::new(chosen.len() as u64, "{bar:30} {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
    let mut pairs = Vec::new();
    for run in &chosen {
        bar.message(run.0);
        pairs.extend(predicted(*run, &runs.all, &build)?);
        bar.advance(1);
    }
    bar.clear();
    if pairs.is_empty() {
        let folders: Vec<String> = args.folders.iter().map(|folder| folder.display().to_string()).collect();
        bail!(
            "{}: no program has a history (PROGRAM.CONFIG.pickle.xz) and PyTorch's statistics (PROGRAM.CONFIG.json) of that run and \
             of one under another setting; experiments/pytorch/baselines/record_settings.py records both",
            folders.join(", ")
        );
    }
    let compares = args.folders.is_empty() && out.is_none();
    if let Some(out) = out {
        let mut writer = csv::Writer::from_writer(Vec::new());
        pairs.iter().try_for_each(|pair| writer.serialize(pair))?;
        let text = writer.into_inner().context("cannot write the table")?;
        out.fill(text)?;
    }
    if args.json {
        terminal::print_json(&pairs)?
    } else {
        page(&pairs).print()?
    }
    if !compares {
        return Ok(());
    }
    let committed =
        repository::find(KEPT).ok_or_else(|| anyhow!("experiments/{KEPT} is not here; write it: {AGAIN}"))?;
    compare(&pairs, &read(&committed)?, &chosen.iter().map(|run| run.0).collect())
}

fn one_or(count: usize, one: &'static str, more: &'static str) -> &'static str {
    if count == 1 { one } else { more }
}

/// The commit that this program was built from.
fn build() -> String {
    let built = terminal::built!();
    let short = built.commit.get(..8).unwrap_or(built.commit);
    if built.dirty == "true" { format!("{short}-dirty") } else { short.to_owned() }
}

/// Reads a committed table.
fn read(path: &Path) -> Result<Vec<Pair>> {
    let text = read_text(path, TABLE).with_context(|| path.display().to_string())?;
    let rows = csv::Reader::from_reader(text.as_bytes()).into_deserialize().collect::<Result<Vec<Pair>, _>>();
    rows.map_err(|error| anyhow!("{}: {error}; write it anew: {AGAIN}", path.display()))
}

/// The rows of the given recordings.
fn by_key<'a>(pairs: &'a [Pair], recordings: &BTreeSet<&str>) -> BTreeMap<Key<'a>, &'a Pair> {
    let of_these = pairs.iter().filter(|pair| recordings.contains(pair.recording.as_str()));
    of_these.map(|pair| (pair.key(), pair)).collect()
}

/// Compares the new rows of some recordings with the committed table.
///
/// # Errors
///
/// A row differs, or is in only one of the two.
fn compare(made: &[Pair], kept: &[Pair], recordings: &BTreeSet<&str>) -> Result<()> {
    let (made, kept) = (by_key(made, recordings), by_key(kept, recordings));
    let keys: BTreeSet<Key<'_>> = made.keys().chain(kept.keys()).copied().collect();
    let differs = |key: &Key<'_>| match (made.get(key), kept.get(key)) {
        (Some(one), Some(other)) => !one.agrees(other),
        _ => true,
    };
    let different: Vec<Key<'_>> = keys.iter().copied().filter(differs).collect();
    let Some(key) = different.first() else {
        terminal::say(&format!("{} pairs are as experiments/{KEPT} has them.", made.len()));
        return Ok(());
    };
    let says = |pairs: &BTreeMap<Key<'_>, &Pair>| match pairs.get(key) {
        Some(pair) if pair.predicted_out_of_memory => {
            format!("out of memory at {}", pair.predicted_peak_reserved_bytes)
        }
        Some(pair) => format!(
            "{} predicted for {} bytes, {} retries, place {}",
            pair.predicted_peak_reserved_bytes, pair.real_peak_reserved_bytes, pair.predicted_retries, pair.rank
        ),
        None => "no such pair".to_owned(),
    };
    let (recording, limit, conf) = key;
    let limit = limit.map_or(String::new(), |limit| format!(" in {}", Bytes(limit)));
    let conf = if conf.is_empty() { "the defaults" } else { *conf };
    Err(RuntimeFailure::new(format!(
        "{} of {} pairs are not as experiments/{KEPT} has them, first {recording} under {conf}{limit}: {} now, {} there; if that is \
         meant: {AGAIN}",
        different.len(),
        keys.len(),
        says(&made),
        says(&kept)
    ))
    .into())
}

fn page(pairs: &[Pair]) -> Page {
    let shown =
        |bytes: u64, ran_out: bool| Cell::from(if ran_out { "ran out".to_owned() } else { Bytes(bytes).to_string() });
    let words = |conf: &str| if conf.is_empty() { "defaults".to_owned() } else { conf.to_owned() };
    let table = table(
        pairs,
        &[
            (Column::left("recording"), &|pair| Cell::from(&pair.recording)),
            (Column::text("setting"), &|pair| Cell::from(words(&pair.conf))),
            (Column::right("limit").priority(2), &|pair| Cell::or_dash(pair.limit_bytes.map(|l| Bytes(l).to_string()))),
            (Column::right("real"), &|pair| shown(pair.real_peak_reserved_bytes, pair.real_out_of_memory)),
            (Column::right("predicted"), &|pair| {
                shown(pair.predicted_peak_reserved_bytes, pair.predicted_out_of_memory)
            }),
            (Column::right("off"), &|pair| Cell::or_dash(pair.off_percent.map(|off| format!("{off:.2} %")))),
            (Column::right("rank").priority(1), &|pair| Cell::from(pair.rank.to_string())),
        ],
    );
    let mut page = Page::stdout();
    page.table(&table);
    page.gap();
    let (held_out, known): (Vec<&Pair>, Vec<&Pair>) = pairs.iter().partition(|pair| pair.set == "heldout");
    let (hard, easy): (Vec<&Pair>, Vec<&Pair>) = known.into_iter().partition(|pair| pair.is_hard());
    for (words, kind) in [
        ("Held out", held_out),
        ("Known, easy", easy),
        ("Known, hard (a limit, private pools, or frees that wait for other streams)", hard),
    ] {
        let off: Vec<f64> = kind.iter().filter_map(|pair| pair.off_percent).collect();
        let within = |percent: f64| off.iter().filter(|off| off.abs() <= percent).count();
        let worst = off.iter().map(|off| off.abs()).fold(0.0, f64::max);
        if !off.is_empty() {
            page.line(format!(
                "{words}: {} of {} right to the byte, {} within 1 %, the worst {worst:.1} % off.",
                off.iter().filter(|off| **off == 0.0).count(),
                off.len(),
                within(1.0)
            ));
        }
    }
    let limited: Vec<&Pair> = pairs.iter().filter(|pair| pair.limit_bytes.is_some()).collect();
    if !limited.is_empty() {
        let count = |is: &dyn Fn(&Pair) -> bool| limited.iter().filter(|pair| is(pair)).count();
        page.line(format!(
            "Under a limit: whether memory runs out is right in {} of {} ({} did), the number of retries in {}.",
            count(&|pair| pair.real_out_of_memory == pair.predicted_out_of_memory),
            limited.len(),
            count(&|pair| pair.real_out_of_memory),
            count(&|pair| pair.real_retries == pair.predicted_retries)
        ));
    }
    let choices: BTreeMap<_, bool> =
        pairs.iter().filter_map(|pair| Some(((&pair.recording, pair.limit_bytes), pair.first_choice_right?))).collect();
    let right = choices.values().filter(|right| **right).count();
    page.line(format!("The first choice is right {right} times of {}.", choices.len()));
    page
}
