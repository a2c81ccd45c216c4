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
    let chosen = recordings(&runs.all);
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
    compare(&pairs, &read(&committed)?)
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

/// Compares the new rows with the committed table.
///
/// # Errors
///
/// A row differs, or is in only one of the two.
fn compare(made: &[Pair], kept: &[Pair]) -> Result<()> {
    let [made, kept] =
        [made, kept].map(|pairs| pairs.iter().map(|pair| (pair.key(), pair)).collect::<BTreeMap<_, _>>());
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
    let difference = match (made.get(key), kept.get(key)) {
        (Some(one), Some(other)) => changed_columns(one, other)?,
        (Some(_), None) => "no such pair there".to_owned(),
        (None, _) => "no such pair now".to_owned(),
    };
    let (recording, limit, conf) = key;
    let limit = limit.map_or(String::new(), |limit| format!(" in {}", Bytes(limit)));
    let conf = if conf.is_empty() { "the defaults" } else { *conf };
    Err(RuntimeFailure::new(format!(
        "{} of {} pairs are not as experiments/{KEPT} has them, first {recording} under {conf}{limit}: \
         {difference}; if that is meant: {AGAIN}",
        different.len(),
        keys.len()
    ))
    .into())
}

/// The columns in which two rows differ, with both values.
fn changed_columns(now: &Pair, there: &Pair) -> Result<String> {
    let (now, there) = (serde_json::to_value(now)?, serde_json::to_value(there)?);
    let names = now.as_object().into_iter().flat_map(|row| row.keys());
    let changed = names.filter(|name| *name != "build" && now[name.as_str()] != there[name.as_str()]);
    let words: Vec<String> = changed.map(|name| format!("{name} {} now, {} there", now[name], there[name])).collect();
    Ok(words.join(", "))
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
    summary(pairs).into_iter().for_each(|line| page.line(line));
    page
}

/// The counts of right predictions, a line for each kind of pair.
fn summary(pairs: &[Pair]) -> Vec<String> {
    let mut lines = Vec::new();
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
        let programs: BTreeSet<&str> = kind.iter().map(|pair| pair.program.as_str()).collect();
        if !off.is_empty() {
            lines.push(format!(
                "{words}: {} of {} right to the byte, {} within 1 %, the worst {worst:.1} % off; {} program{}.",
                off.iter().filter(|off| **off == 0.0).count(),
                off.len(),
                within(1.0),
                programs.len(),
                if programs.len() == 1 { "" } else { "s" }
            ));
        }
    }
    let limited: Vec<&Pair> = pairs.iter().filter(|pair| pair.limit_bytes.is_some()).collect();
    if !limited.is_empty() {
        let count = |is: &dyn Fn(&Pair) -> bool| limited.iter().filter(|pair| is(pair)).count();
        lines.push(format!(
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
    lines.push(format!("The first choice is right {right} times of {}.", choices.len()));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A pair with some values changed.
    fn pair(changes: Value) -> Pair {
        let mut values = json!({
            "program": "a", "set": "known", "recording": "a.default", "recorded_conf": "", "deferred_frees": 0,
            "private_pools": 0, "conf": "b", "limit_bytes": null, "real_peak_reserved_bytes": 100,
            "predicted_peak_reserved_bytes": 100, "off_percent": 0.0, "first_off_percent": null,
            "real_out_of_memory": false, "predicted_out_of_memory": false, "real_retries": 0, "predicted_retries": 0,
            "rank": 1, "first_choice_right": null, "build": "01234567",
        });
        let changes = changes.as_object().unwrap().clone();
        values.as_object_mut().unwrap().extend(changes);
        serde_json::from_value(values).unwrap()
    }

    #[test]
    fn the_summary_counts_each_kind_of_pair_and_each_choice_once() {
        let pairs = [
            pair(json!({"set": "heldout", "off_percent": -1.0})),
            pair(json!({"set": "heldout", "off_percent": 1.01, "limit_bytes": 5, "program": "b"})),
            pair(json!({})),
            // Memory ran out: no difference to count.
            pair(json!({"off_percent": null, "limit_bytes": 7, "real_out_of_memory": true, "real_retries": 2})),
            pair(json!({"off_percent": 0.5, "private_pools": 1})),
            pair(json!({"off_percent": -3.0, "deferred_frees": 1})),
            // Two pairs of one recording and limit are of one choice.
            pair(json!({"limit_bytes": 9, "first_choice_right": true})),
            pair(json!({"limit_bytes": 9, "first_choice_right": true, "conf": "c"})),
            pair(json!({"limit_bytes": 8, "first_choice_right": false})),
        ];
        assert_eq!(
            summary(&pairs),
            [
                "Held out: 0 of 2 right to the byte, 1 within 1 %, the worst 1.0 % off; 2 programs.",
                "Known, easy: 1 of 1 right to the byte, 1 within 1 %, the worst 0.0 % off; 1 program.",
                "Known, hard (a limit, private pools, or frees that wait for other streams): 3 of 5 right to the byte, 4 within \
                 1 %, the worst 3.0 % off; 1 program.",
                "Under a limit: whether memory runs out is right in 4 of 5 (1 did), the number of retries in 4.",
                "The first choice is right 1 times of 2.",
            ]
        );
    }

    #[test]
    fn kinds_without_pairs_have_no_line() {
        let lines = summary(&[pair(json!({}))]);
        assert!(lines.len() == 2 && lines[0].starts_with("Known, easy: "), "{lines:?}");
        assert_eq!(lines[1], "The first choice is right 0 times of 0.");
    }
}
