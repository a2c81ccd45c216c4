//! `experiments advise-truth`: what `vramlab advise` says that programs would reserve, beside what PyTorch really did.
//!
//! A program was recorded under several settings, each run with the statistics that PyTorch gave. The history under PyTorch's
//! defaults, without a limit, is replayed under the settings of the other runs. Nothing of these runs is known to the replay.

use crate::table::table;
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use doctor::predict;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use terminal::{Bar, Cell, Column, Page};
use vramlab::Bytes;
use vramlab::output::{Existing, OutputFile};

#[derive(Debug, Args)]
pub(crate) struct TruthArgs {
    /// Folders with histories (PROGRAM.CONFIG.pickle.xz) and PyTorch's statistics of the same runs (PROGRAM.CONFIG.json)
    #[arg(required = true, value_name = "FOLDER")]
    folders: Vec<PathBuf>,
    /// Where the table goes, as CSV
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON array with an object for each run
    #[arg(long)]
    json: bool,
}

/// A run of a program under a setting.
#[derive(Clone, Debug)]
struct Run {
    program: String,
    conf: String,
    limit: Option<u64>,
    peak_reserved: u64,
    out_of_memory: bool,
    retries: u64,
    /// The history beside the statistics.
    history: Option<PathBuf>,
}

/// One pair of program and setting; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
struct Pair {
    /// What ran.
    program: String,
    /// The program's history under PyTorch's defaults and without a limit, from which it is predicted.
    history: String,
    /// Its frees that waited for other streams; timing decides then.
    deferred_frees: u64,
    /// Limit under which it ran.
    limit_bytes: Option<u64>,
    /// Setting under which it ran.
    conf: String,
    /// PyTorch's own statistic; where memory ran out, of then.
    real_peak_reserved_bytes: u64,
    /// The replay's.
    predicted_peak_reserved_bytes: u64,
    /// The difference in percent of the real one, where memory did not run out.
    off_percent: Option<f64>,
    real_out_of_memory: bool,
    /// Whether it does in the replay.
    predicted_out_of_memory: bool,
    real_retries: u64,
    /// Those of the replay.
    predicted_retries: u64,
    /// Place of the setting among those of the same program and limit, as `advise` ranks them, from 1.
    rank: usize,
}

/// Compares each program of the folders.
pub(crate) fn truth(args: &TruthArgs) -> Result<()> {
    let out = args.out.as_deref().map(|out| OutputFile::create(out, Existing::Replace)).transpose()?;
    let mut programs: BTreeMap<String, Vec<Run>> = BTreeMap::new();
    for folder in &args.folders {
        for path in json_files(folder)? {
            if let Some(run) = run_of(&path)? {
                programs.entry(run.program.clone()).or_default().push(run);
            }
        }
    }
    let bar = Bar::new(programs.len() as u64, "{bar:30} {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
    let mut pairs = Vec::new();
    for (program, runs) in &programs {
        bar.message(program);
        let base = runs.iter().find(|run| run.conf.is_empty() && run.limit.is_none() && run.history.is_some());
        if let Some(history) = base.and_then(|run| run.history.as_deref()) {
            compare(history, runs, &mut pairs)?;
        }
        bar.advance(1);
    }
    bar.clear();
    if pairs.is_empty() {
        let folders: Vec<String> = args.folders.iter().map(|folder| folder.display().to_string()).collect();
        bail!(
            "{}: no program has a history under PyTorch's defaults (PROGRAM.pickle.xz) and statistics of the same run beside it \
             (PROGRAM.json); experiments/baselines/record_settings.py records both",
            folders.join(", ")
        );
    }
    if let Some(out) = out {
        let mut writer = csv::Writer::from_writer(Vec::new());
        pairs.iter().try_for_each(|pair| writer.serialize(pair))?;
        let text = writer.into_inner().context("cannot write the table")?;
        out.fill(text)?;
    }
    if args.json { terminal::print_json(&pairs) } else { page(&pairs).print() }
}

/// The JSON files of a folder, sorted by name.
fn json_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot = "name a folder with histories and statistics";
    let entries = std::fs::read_dir(folder).map_err(|error| anyhow!("{}: {error}; {cannot}", folder.display()))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| folder.display().to_string())?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// What a file of statistics says; `None` where it holds something else.
fn run_of(path: &Path) -> Result<Option<Run>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let facts: Value = serde_json::from_str(&text)
        .map_err(|error| anyhow!("{}: it is no JSON ({error}); record it anew, or move it away", path.display()))?;
    let number = |key: &str| facts.get(key).or_else(|| facts.get("stats")?.get(key)).and_then(Value::as_u64);
    let Some(peak_reserved) = number("reserved_bytes.all.peak") else { return Ok(None) };
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let config = facts.get("config").and_then(Value::as_str).unwrap_or("default");
    // Some name the setting by the run's name only.
    let names_setting = |part: &str| part == config || ["default", "expandable"].contains(&part);
    let program: Vec<&str> = stem.split('.').filter(|part| !names_setting(part)).collect();
    let named = facts.get("conf").and_then(Value::as_str);
    let conf = named.unwrap_or(if config.starts_with("expandable") { "expandable_segments:True" } else { "" });
    // PyTorch is given the limit as a share of the memory and cuts the product to whole bytes.
    let limit = facts.get("limit_mib").and_then(Value::as_f64).filter(|mib| *mib > 0.0).and_then(|mib| {
        let total = facts.get("total_memory").and_then(Value::as_f64)?;
        // CAST: bytes of a device; the fraction is dropped, as PyTorch does.
        Some((mib * (1_u64 << 20) as f64 / total * total) as u64)
    });
    let names = [stem.clone(), program.join(".")];
    let mut histories = names.iter().map(|name| path.with_file_name(format!("{name}.pickle.xz")));
    Ok(Some(Run {
        program: program.join("."),
        conf: conf.to_owned(),
        limit,
        peak_reserved,
        // A program may catch the error and go on.
        out_of_memory: facts.get("oom").is_some_and(|oom| !oom.is_null())
            || number("num_ooms").is_some_and(|ooms| ooms > 0),
        retries: number("num_alloc_retries").unwrap_or(0),
        history: histories.find(|path| path.is_file()),
    }))
}

/// Replays a history under the settings of all runs, limit by limit.
fn compare(history: &Path, runs: &[Run], pairs: &mut Vec<Pair>) -> Result<()> {
    let mut limits: Vec<Option<u64>> = runs.iter().map(|run| run.limit).collect();
    limits.sort_unstable();
    limits.dedup();
    for limit in limits {
        let of_limit: Vec<&Run> = runs.iter().filter(|run| run.limit == limit).collect();
        let mut confs: Vec<String> = of_limit.iter().map(|run| run.conf.trim().to_owned()).collect();
        confs.sort_unstable();
        confs.dedup();
        let (predicted, deferred_frees) = predict(history, limit, &confs)?;
        for (rank, one) in (1..).zip(&predicted) {
            for run in of_limit.iter().filter(|run| run.conf.trim() == one.conf) {
                // CAST: bytes of a device, below 2^53.
                let off = 100.0 * (one.peak_reserved_bytes as f64 / run.peak_reserved.max(1) as f64 - 1.0);
                pairs.push(Pair {
                    program: run.program.clone(),
                    history: history.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
                    deferred_frees,
                    limit_bytes: limit,
                    conf: run.conf.clone(),
                    real_peak_reserved_bytes: run.peak_reserved,
                    predicted_peak_reserved_bytes: one.peak_reserved_bytes,
                    off_percent: (!run.out_of_memory && !one.out_of_memory).then_some((off * 1000.0).round() / 1000.0),
                    real_out_of_memory: run.out_of_memory,
                    predicted_out_of_memory: one.out_of_memory,
                    real_retries: run.retries,
                    predicted_retries: one.num_alloc_retries,
                    rank,
                });
            }
        }
    }
    Ok(())
}

fn page(pairs: &[Pair]) -> Page {
    let shown =
        |bytes: u64, ran_out: bool| Cell::from(if ran_out { "ran out".to_owned() } else { Bytes(bytes).to_string() });
    let table = table(
        pairs,
        &[
            (Column::left("program"), &|pair| Cell::from(&pair.program)),
            (Column::text("setting"), &|pair| Cell::from(if pair.conf.is_empty() { "defaults" } else { &pair.conf })),
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
    let within = |percent: f64, waits: bool| {
        let of: Vec<f64> = pairs
            .iter()
            .filter(|pair| (pair.deferred_frees > 0) == waits)
            .filter_map(|pair| pair.off_percent)
            .collect();
        (of.iter().filter(|off| off.abs() <= percent).count(), of.len())
    };
    page.gap();
    let ((near, alone), (close, several)) = (within(1.0, false), within(5.0, true));
    page.line(format!("{near} of {alone} predictions are within 1 % where no free waited for another stream;"));
    page.line(format!("{close} of {several} within 5 % where some did."));
    let right = pairs.iter().filter(|pair| pair.real_out_of_memory == pair.predicted_out_of_memory).count();
    page.line(format!("Whether memory runs out is right in {right} of {}.", pairs.len()));
    page
}
