//! A CUDA program without PyTorch: it runs unchanged, with its memory calls only timed, and served by allocators whose frees wait or do
//! not. The three times divide its cost into the driver's own work, waiting for the device, and the remainder.

use super::TryArgs;
use super::output::{Copied, Expected};
use crate::run::{CudaProcess, Folder, Free, Launch, Output, Runner};
use crate::words::counted;
use anyhow::Result;
use serde::Serialize;
use std::process::ExitStatus;
use terminal::{Cell, Column, Page, Table, arguments, around, command, duration, quoted, say};
use vramlab::{Bytes, Selection};

/// Result of all runs (`--json`).
#[derive(Debug, Serialize)]
struct Compared {
    command: String,
    rounds: u32,
    /// `unchanged`, `driver`, then two for each allocator.
    runs: Vec<Variant>,
    /// One for each allocator.
    parts: Vec<Parts>,
    /// Lines of standard output that differ among unchanged runs, and are not compared.
    varying_lines: usize,
}

/// The runs of one kind.
#[derive(Debug, Serialize)]
struct Variant {
    /// `unchanged`, `driver`, `ALLOCATOR waits` or `ALLOCATOR ordered`.
    name: String,
    /// The allocator; `null` where the driver serves.
    allocator: Option<String>,
    /// What a free does; `null` for an unchanged run.
    free: Option<&'static str>,
    /// Seconds of the whole program, in the order of the rounds.
    wall_s: Vec<f64>,
    median_s: f64,
    /// Longest minus shortest run.
    spread_s: f64,
    /// Exit code of each run; `null` if a signal ended it.
    exit_codes: Vec<Option<i32>>,
    /// Whether exit codes and standard output equal those of the unchanged runs.
    equal: bool,
    /// What differs first, if anything does.
    difference: Option<String>,
    /// Memory calls of the run with the median time; `null` for an unchanged run.
    memory: Option<Memory>,
}

/// Memory calls of one run, of all its processes.
#[derive(Clone, Debug, Serialize)]
struct Memory {
    calls: u64,
    total_ns: u64,
    /// The part of `total_ns` that waited for the device.
    blocked_ns: u64,
    /// Calls of the driver for memory: the program's own where the driver serves, else the allocator's and those that were passed on.
    driver_calls: u64,
    requested_peak_bytes: u64,
    reserved_peak_bytes: Option<u64>,
}

/// Median times, divided.
#[derive(Debug, Serialize)]
struct Parts {
    allocator: String,
    /// `driver` minus `waits`: what the driver's own work costs.
    driver_work_s: f64,
    /// `waits` minus `ordered`: what waiting in frees costs.
    waiting_s: f64,
    /// `ordered`: what is left, the start of CUDA included.
    remainder_s: f64,
    /// Largest spread of the three. Smaller parts are not significant.
    spread_s: f64,
}

/// One run.
struct Run {
    seconds: f64,
    status: ExitStatus,
    output: Vec<u8>,
    memory: Option<Memory>,
}

/// A kind of run.
struct Kind<'a> {
    name: String,
    alloc: Option<&'a Selection>,
    /// `None`: unchanged.
    free: Option<Free>,
}

/// Runs the program in rounds and compares the runs. `first` is the output of the run before, which is not counted.
///
/// # Errors
/// The program cannot be started again, or the result cannot be written.
pub(super) fn compare(
    args: &TryArgs,
    runner: &mut Runner,
    launch: &Launch<'_>,
    folder: &Folder,
    first: Vec<u8>,
) -> Result<()> {
    let allocators = args.allocators("caching")?;
    let kinds = kinds(&allocators);
    let mut runs: Vec<Vec<Run>> = kinds.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        let names: Vec<&str> = kinds.iter().map(|kind| kind.name.as_str()).collect();
        say(&format!("try      round {round} of {}: {}", args.rounds, names.join(", ")));
        let mut order: Vec<usize> = (0..kinds.len()).collect();
        // Drift during a round, such as that of the GPU's clock, affects all kinds equally.
        if round % 2 == 0 {
            order.reverse();
        }
        for at in order {
            let run = run_once(runner, launch, folder, &kinds[at], round)?;
            runs[at].push(run);
        }
    }
    let mut unchanged: Vec<Vec<u8>> = runs[0].iter().map(|run| run.output.clone()).collect();
    if let [_] = unchanged[..] {
        // A single output does not show which lines vary by themselves. The first run was only recorded.
        unchanged.push(first);
    }
    let expected = Expected::of(&unchanged);
    let codes: Vec<Option<i32>> = runs[0].iter().map(|run| run.status.code()).collect();
    let variants: Vec<Variant> =
        kinds.iter().zip(&runs).map(|(kind, runs)| variant(kind, runs, &expected, &codes)).collect();
    let parts = allocators.iter().enumerate().map(|(number, alloc)| parts(alloc, &variants, number)).collect();
    let compared = Compared {
        command: launch.shown(),
        rounds: args.rounds,
        runs: variants,
        parts,
        varying_lines: expected.varying(),
    };
    match args.json {
        true => terminal::print_json(&compared)?,
        false => page(&compared, &allocators).print()?,
    }
    folder.finish(&compared).map(drop)
}

fn kinds(allocators: &[Selection]) -> Vec<Kind<'_>> {
    let mut out = vec![
        Kind { name: "unchanged".to_owned(), alloc: None, free: None },
        Kind { name: Free::Driver.name().to_owned(), alloc: None, free: Some(Free::Driver) },
    ];
    for alloc in allocators {
        out.extend([Free::Waits, Free::Ordered].map(|free| Kind {
            name: format!("{alloc} {}", free.name()),
            alloc: Some(alloc),
            free: Some(free),
        }));
    }
    out
}

/// Runs the program once, in a folder of its own that is empty afterwards. If the user ends the program, this one ends alike.
fn run_once(runner: &mut Runner, launch: &Launch<'_>, folder: &Folder, kind: &Kind<'_>, round: u32) -> Result<Run> {
    let copied = Copied::hidden()?;
    let launch = Launch { alloc: kind.alloc, output: Output::Pipe(copied.writer()), ..*launch };
    let (status, seconds, memory) = match kind.free {
        None => {
            let (status, seconds) = runner.run_unchanged(&launch)?;
            (status, seconds, None)
        }
        Some(free) => {
            runner.set_free(free);
            let name = format!("{}-{round}", kind.name.replace([' ', ':', ',', '='], "-"));
            let directory = Folder::make(Some(&folder.shown.join(name)))?;
            let started = runner.run(&launch, &directory).inspect_err(|_| directory.discard())?;
            let calls = started.calls.as_deref().unwrap_or_default();
            let memory = Memory::of(calls, free);
            super::finish(&directory, &serde_json::json!({"command": launch.shown(), "cuda": calls}));
            (started.status, started.seconds, memory)
        }
    };
    let output = copied.finish();
    if was_ended(status) {
        around::end_alike(status);
    }
    Ok(Run { seconds, status, output, memory })
}

/// Whether a signal ended the program that a user or the system sends, not a fault of the program.
fn was_ended(status: ExitStatus) -> bool {
    #[cfg(unix)]
    {
        use rustix::process::Signal;
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        let from_outside = [Signal::INT, Signal::TERM, Signal::HUP, Signal::KILL].map(Signal::as_raw);
        signal.is_some_and(|signal| from_outside.contains(&signal))
    }
    #[cfg(not(unix))]
    {
        let _ = status;
        false
    }
}

impl Memory {
    fn of(processes: &[CudaProcess], free: Free) -> Option<Self> {
        if processes.is_empty() {
            return None;
        }
        let sum = |of: fn(&CudaProcess) -> u64| processes.iter().map(of).sum();
        let driver_calls = match free {
            Free::Driver => sum(|process| process.count),
            _ => sum(|process| {
                let own: u64 = process.calls.iter().map(|call| call.count - call.served).sum();
                own + process.allocator.as_ref().map_or(0, |allocator| allocator.driver_calls)
            }),
        };
        let reserved = processes.iter().filter_map(|process| Some(process.allocator.as_ref()?.reserved_peak_bytes));
        Some(Self {
            calls: sum(|process| process.count),
            total_ns: sum(|process| process.total_ns),
            blocked_ns: sum(|process| process.blocked_ns),
            driver_calls,
            requested_peak_bytes: processes.iter().map(|process| process.peak_bytes).max().unwrap_or(0),
            // A pool of the driver does not report it.
            reserved_peak_bytes: reserved.max().filter(|bytes| *bytes > 0),
        })
    }
}

fn variant(kind: &Kind<'_>, runs: &[Run], expected: &Expected, codes: &[Option<i32>]) -> Variant {
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by(|a, b| runs[*a].seconds.total_cmp(&runs[*b].seconds));
    let at = |place: usize| order.get(place).map(|run| &runs[*run]);
    let seconds = |run: Option<&Run>| run.map_or(0.0, |run| run.seconds);
    let median = at(runs.len() / 2);
    let differences = runs.iter().find_map(|run| difference(run, expected, codes));
    Variant {
        name: kind.name.clone(),
        allocator: kind.alloc.map(ToString::to_string),
        free: kind.free.map(Free::name),
        wall_s: runs.iter().map(|run| run.seconds).collect(),
        median_s: seconds(median),
        spread_s: seconds(at(runs.len().saturating_sub(1))) - seconds(at(0)),
        exit_codes: runs.iter().map(|run| run.status.code()).collect(),
        equal: differences.is_none(),
        difference: differences,
        memory: median.and_then(|run| run.memory.clone()),
    }
}

/// The first difference from the unchanged runs.
fn difference(run: &Run, expected: &Expected, codes: &[Option<i32>]) -> Option<String> {
    if !codes.contains(&run.status.code()) {
        return Some(run.status.to_string());
    }
    expected.difference(&run.output).map(|line| format!("line {line} of the output"))
}

fn parts(alloc: &Selection, variants: &[Variant], number: usize) -> Parts {
    let [driver, waits, ordered] = [1, 2 + 2 * number, 3 + 2 * number].map(|at| &variants[at]);
    Parts {
        allocator: alloc.to_string(),
        driver_work_s: driver.median_s - waits.median_s,
        waiting_s: waits.median_s - ordered.median_s,
        remainder_s: ordered.median_s,
        spread_s: [driver, waits, ordered].iter().map(|variant| variant.spread_s).fold(0.0, f64::max),
    }
}

fn page(compared: &Compared, allocators: &[Selection]) -> Page {
    let mut page = Page::stdout();
    page.title(format!("{}: {}", compared.command, counted(u64::from(compared.rounds), "round")));
    page.table(&table(compared));
    for parts in &compared.parts {
        page.note(sentence(parts, compared.runs[1].median_s));
    }
    if compared.varying_lines > 0 {
        let lines = counted(compared.varying_lines as u64, "line");
        page.note(format!("{lines} of the output differ between unchanged runs, too, and were not compared."));
    }
    for run in &compared.runs {
        if let Some(difference) = &run.difference {
            page.note(format!("{} differs from the unchanged program: {difference}.", heading(run)));
        }
    }
    page.gap();
    if let Some(alloc) = allocators.first() {
        let alloc = quoted(&alloc.to_string());
        page.next(&command("vramlab", &format!("run --alloc {alloc} -- {}", compared.command)));
    }
    page
}

/// The three parts in words.
fn sentence(parts: &Parts, driver_s: f64) -> String {
    let part = |seconds: f64, what: &str| match seconds.abs() <= parts.spread_s {
        true => format!("{what}: no more than runs differ"),
        false if seconds < 0.0 => format!("{what}: {} longer", time(-seconds)),
        false => format!("{what}: {}", time(seconds)),
    };
    format!(
        "Of {} under the driver, by {}: {}; {}; the remainder: {}. Runs of one kind differ by up to {}.",
        time(driver_s),
        parts.allocator,
        part(parts.driver_work_s, "the driver's own work"),
        part(parts.waiting_s, "waiting in frees"),
        time(parts.remainder_s),
        time(parts.spread_s),
    )
}

fn time(seconds: f64) -> String {
    // CAST: seconds to nanoseconds, for display.
    duration((seconds * 1e9) as u64)
}

fn heading(run: &Variant) -> String {
    match (&run.allocator, run.free) {
        (Some(allocator), Some(free)) => format!("{}, {free}", arguments::heading(allocator)),
        _ => run.name.clone(),
    }
}

fn table(compared: &Compared) -> Table {
    let mut table = Table::new([
        Column::text("run"),
        Column::right("program"),
        Column::right("range").priority(1),
        Column::right("in memory calls"),
        Column::right("of it waiting"),
        Column::right("driver calls").priority(1),
        Column::right("reserved").priority(3),
        Column::text("output"),
    ]);
    for run in &compared.runs {
        let memory = run.memory.as_ref();
        let shortest = run.wall_s.iter().copied().fold(f64::INFINITY, f64::min);
        let longest = run.wall_s.iter().copied().fold(0.0, f64::max);
        table.row([
            Cell::from(heading(run)),
            Cell::from(time(run.median_s)),
            Cell::from(format!("{} to {}", time(shortest), time(longest))),
            Cell::or_dash(memory.map(|memory| duration(memory.total_ns))),
            Cell::or_dash(memory.map(|memory| duration(memory.blocked_ns))),
            Cell::or_dash(memory.map(|memory| memory.driver_calls.to_string())),
            Cell::or_dash(memory.and_then(|memory| memory.reserved_peak_bytes).map(|bytes| Bytes(bytes).to_string())),
            Cell::from(if run.equal { "equal" } else { "DIFFERENT" }),
        ]);
    }
    table
}
