//! A program that uses PyTorch: runs under its current settings, under the advised ones, and under allocators, with predictions beside
//! measurements.

use super::TryArgs;
use crate::advise::First;
use crate::run::{Folder, Launch, Runner, Started, advice_for, missing_allocator, replay, report_problem};
use crate::words::counted;
use anyhow::Result;
use serde::Serialize;
use std::path::{Path, PathBuf};
use terminal::{Cell, Column, Page, Table, arguments, around, command, duration, quoted, say};
use vramlab::Bytes;

/// Result of all runs.
#[derive(Debug, Serialize)]
struct Tried {
    command: String,
    /// Under the current settings, under the advised ones if there are any, and under the allocator.
    runs: Vec<Run>,
    /// Advice from the first run; `null` if its snapshot allowed none.
    advice: Option<First>,
}

/// One run.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    /// `as it is`, `advised` or `allocator`.
    name: &'static str,
    /// `PYTORCH_CUDA_ALLOC_CONF`, if it was changed for this run.
    conf: Option<String>,
    /// Allocator under PyTorch.
    allocator: Option<String>,
    /// Exit code of the program; `null` if a signal ended it.
    exit_code: Option<i32>,
    predicted_reserved_bytes: Option<u64>,
    /// Peak of the process with the highest peak.
    reserved_bytes: Option<u64>,
    active_bytes: Option<u64>,
    /// Median time between two steps of the optimizer.
    step_ns: Option<u64>,
    steps: usize,
    wall_s: f64,
    predicted_driver_calls: Option<u64>,
    /// Counted by the allocator, else by a replay of the recording.
    driver_calls: Option<u64>,
    out_of_memory: u64,
    pub(super) folder: PathBuf,
}

/// Runs the program under the advised settings and under the allocators, and compares the runs with the first one.
///
/// # Errors
/// The program cannot be started again, or the result cannot be written.
pub(super) fn compare(
    args: &TryArgs,
    runner: &Runner,
    launch: &Launch<'_>,
    folder: &Folder,
    as_it_is: Run,
    snapshot: &Path,
) -> Result<()> {
    let limit = launch.limit;
    let advice = match advice_for(snapshot, limit) {
        Ok(advice) => Some(advice),
        Err(error) => {
            say(&format!("try      no advice: {error}"));
            None
        }
    };
    let mut runs = vec![Run {
        predicted_reserved_bytes: None,
        driver_calls: advice.as_ref().and_then(|advice| advice.recorded_driver_calls),
        ..as_it_is
    }];
    if let Some((advice, conf)) = advice.as_ref().and_then(|advice| Some((advice, advice.conf.as_deref()?))) {
        say(&format!("try      PYTORCH_CUDA_ALLOC_CONF={conf}"));
        let launch = Launch { conf: Some(conf), ..*launch };
        let (run, started) = run_once(runner, &launch, folder, "advised")?;
        let again = self::snapshot(&started, &run.folder).map(|file| replay(&file, limit, None));
        let again = again.and_then(|replayed| replayed.ok().flatten());
        runs.push(Run {
            conf: Some(conf.to_owned()),
            predicted_reserved_bytes: advice.predicted_reserved_bytes,
            predicted_driver_calls: advice.predicted_driver_calls,
            driver_calls: again.map(|replayed| replayed.driver_calls),
            ..run
        });
    }
    let allocators = args.allocators("remap")?;
    for (number, alloc) in allocators.iter().enumerate() {
        say(&format!("try      {alloc}"));
        let under = Launch { alloc: Some(alloc), ..*launch };
        let name = if number == 0 { "allocator".to_owned() } else { format!("allocator-{}", number + 1) };
        let (run, started) = run_once(runner, &under, folder, &name)?;
        if let Some(line) = missing_allocator(&alloc.to_string(), &started.processes) {
            report_problem(line);
        }
        let predicted = replay(snapshot, limit, Some(alloc)).ok().flatten();
        runs.push(Run {
            name: "allocator",
            allocator: Some(alloc.to_string()),
            predicted_reserved_bytes: predicted.map(|replayed| replayed.reserved_bytes),
            predicted_driver_calls: predicted.map(|replayed| replayed.driver_calls),
            driver_calls: worst(&started).and_then(|process| process.driver_calls()),
            ..run
        });
    }
    let tried = Tried { command: launch.shown(), runs, advice };
    match args.json {
        true => terminal::print_json(&tried)?,
        false => page(&tried, snapshot).print()?,
    }
    folder.finish(&tried).map(drop)
}

/// Runs the program once, in its own directory. If a signal ends the program, this one ends alike.
pub(super) fn run_once(runner: &Runner, launch: &Launch<'_>, folder: &Folder, name: &str) -> Result<(Run, Started)> {
    let directory = Folder::make(Some(&folder.shown.join(name.replace(' ', "-"))))?;
    let started = runner.run(launch, &directory).inspect_err(|_| directory.discard())?;
    super::finish(
        &directory,
        &serde_json::json!({"command": launch.shown(), "processes": started.processes, "cuda": started.calls.as_deref().unwrap_or_default()}),
    );
    if started.status.code().is_none() {
        around::end_alike(started.status);
    }
    let process = worst(&started);
    let mut steps: Vec<u64> = process.map(|process| process.step_ns.clone()).unwrap_or_default();
    steps.sort_unstable();
    let name = if name == "advised" { "advised" } else { "as it is" };
    let run = Run {
        name,
        conf: None,
        allocator: None,
        exit_code: started.status.code(),
        predicted_reserved_bytes: None,
        reserved_bytes: process.and_then(|process| process.peak("reserved_bytes")),
        active_bytes: process.and_then(|process| process.peak("active_bytes")),
        step_ns: steps.get(steps.len() / 2).copied(),
        steps: steps.len(),
        wall_s: started.seconds,
        predicted_driver_calls: None,
        driver_calls: None,
        out_of_memory: started.processes.iter().map(|process| process.count("num_ooms")).sum(),
        folder: directory.shown.clone(),
    };
    Ok((run, started))
}

/// The process with the highest recorded peak.
fn worst(started: &Started) -> Option<&crate::run::Process> {
    started.processes.iter().max_by_key(|process| (process.best().is_some(), process.peak("reserved_bytes")))
}

pub(super) fn snapshot(started: &Started, folder: &Path) -> Option<PathBuf> {
    worst(started)?.best().map(|snapshot| folder.join(&snapshot.file))
}

fn page(tried: &Tried, snapshot: &Path) -> Page {
    let mut page = Page::stdout();
    page.title(format!("{}: predicted and measured", tried.command));
    page.table(&table(tried));
    let stepped = tried.runs.iter().any(|run| run.step_ns.is_some());
    page.note(match stepped {
        true => "step: median time between two optimizer steps",
        false => "No optimizer step was recorded; only the program's total time is known.",
    });
    for run in tried.runs.iter().filter(|run| run.out_of_memory > 0) {
        page.note(format!("{} ran out of memory {}.", shown(run), counted(run.out_of_memory, "time")));
    }
    match &tried.advice {
        Some(advice) if advice.conf.is_none() => {
            page.note(format!("No second setting was tried: {}.", advice.sentence))
        }
        _ => {}
    }
    page.gap();
    page.next(&command("vramlab", &format!("explain {}", quoted(&snapshot.to_string_lossy()))));
    page
}

fn shown(run: &Run) -> String {
    match (&run.conf, &run.allocator) {
        (Some(conf), _) => arguments::heading(conf),
        (_, Some(allocator)) => arguments::heading(allocator),
        _ => run.name.to_owned(),
    }
}

fn table(tried: &Tried) -> Table {
    let mut table = Table::new([
        Column::text("run"),
        Column::right("reserved, predicted"),
        Column::right("measured"),
        Column::right("step"),
        Column::right("program").priority(2),
        Column::right("driver calls, predicted").priority(1),
        Column::right("counted").priority(1),
        Column::right("exit code").priority(3),
    ]);
    let bytes = |bytes: Option<u64>| Cell::or_dash(bytes.map(|bytes| Bytes(bytes).to_string()));
    let number = |number: Option<u64>| Cell::or_dash(number.map(|number| number.to_string()));
    for run in &tried.runs {
        table.row([
            Cell::from(shown(run)),
            bytes(run.predicted_reserved_bytes),
            bytes(run.reserved_bytes),
            Cell::or_dash(run.step_ns.map(duration)),
            // CAST: seconds to nanoseconds, for display.
            Cell::from(duration((run.wall_s * 1e9) as u64)),
            number(run.predicted_driver_calls),
            number(run.driver_calls),
            Cell::or_dash(run.exit_code.map(|code| code.to_string())),
        ]);
    }
    table
}
