//! `experiments fidelity`: the difference between the simulated GPU and the real one, for each cell of one experiment:
//! the time of a training step, the calls in which the host was blocked, and the driver allocations of every step.

pub(crate) mod recorded;

use crate::child::Children;
use crate::repository;
use crate::study::ended;
use crate::study::figures::median;
use crate::study::record::EXPERIMENT;
use crate::table::{percent, table};
use anyhow::{Context, Result, bail};
use clap::Args;
use recorded::{Call, Measured, Recorded};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use terminal::RuntimeFailure;
use terminal::duration;
use terminal::{Cell, Column, Page, command, say};
use vramlab::device::DeviceNameError;
use vramlab::{CudaDriver, DeviceKind, DeviceName};

/// Below this share of blocked host time, the calls in which it was blocked are not significant.
const WORTH_A_LOOK: f64 = 0.05;
/// At least this share of the blocked time must be in the same calls.
const SAME_CALLS: f64 = 0.5;

#[derive(Debug, Args)]
pub(crate) struct FidelityArgs {
    /// Directory for the runs on both devices; existing runs are kept
    #[arg(short, long, value_name = "DIR", default_value = "runs/fidelity")]
    out: PathBuf,
    /// GPU to run on: cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cuda", value_parser = gpu)]
    device: DeviceName,
    /// Profile of the simulated GPU [default: the built-in H200]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Runs recorded on a GPU (a directory that `run` made) instead of new ones
    #[arg(long, value_name = "DIR")]
    measured: Option<PathBuf>,
    /// Runs recorded on a simulated GPU instead of new ones
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
    /// Largest accepted difference of a cell's step time
    #[arg(long, value_name = "PERCENT", default_value = "15%", value_parser = share)]
    tolerance: f64,
    /// Spec that is run
    #[arg(long, value_name = "SPEC", default_value = "fidelity")]
    spec: String,
    /// Print one JSON object with the cells and their calls
    #[arg(long)]
    json: bool,
}

/// Parses a share, written with or without a percent sign.
fn share(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').trim().parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value / 100.0),
        _ => Err("write a percentage that is not negative, as 15%".into()),
    }
}

/// One cell on both devices.
#[derive(Debug, Serialize)]
struct Row {
    /// Values of the `axes`, in their order.
    cell: String,
    /// Time of a training step on the GPU: median over the epochs, the first excluded, then over repeats.
    measured_step_s: f64,
    /// Time of a training step on the simulated device.
    simulated_step_s: f64,
    /// Simulated over measured, minus one.
    difference: f64,
    /// Share of the last epoch, validation included, during which the host was blocked.
    measured_blocked_share: f64,
    simulated_blocked_share: f64,
    /// Sum over kinds of call of the smaller of the two shares of the blocked time; `null` where on both at most 5 %
    /// of the epoch is waiting.
    same_calls: Option<f64>,
    /// Training steps made in both runs.
    steps: u64,
    /// Steps in which the number of driver allocations differs.
    steps_with_other_allocations: u64,
    /// Whether `difference` is within the tolerance, and `same_calls` at least a half.
    within: bool,
    /// Driver calls of the last epoch, validation included, divided by its batches.
    calls: Vec<CallRow>,
}

/// One kind of call in one cell, per batch.
#[derive(Debug, Serialize)]
struct CallRow {
    call: String,
    measured: Call,
    simulated: Call,
}

#[derive(Debug, Serialize)]
struct Report {
    /// Options in which the runs differ, sorted.
    axes: Vec<String>,
    /// `--tolerance` as a fraction.
    tolerance: f64,
    /// Largest difference of a cell.
    worst: f64,
    /// Whether every cell is within the tolerance.
    within: bool,
    /// Each cell on both devices.
    cells: Vec<Row>,
}

fn gpu(text: &str) -> Result<DeviceName, DeviceNameError> {
    DeviceName::among(text, &[DeviceKind::Cuda])
}

/// Makes the missing runs, compares, and fails if a cell is beyond the tolerance.
pub(crate) fn fidelity(args: &FidelityArgs) -> Result<()> {
    let simulated = DeviceName::Sim(args.profile.clone());
    if args.profile.is_some() && args.against.is_some() {
        bail!("--profile is for new runs, and --against names recorded ones; leave one of them out");
    }
    if let Some(recorded) = &args.against {
        let recorded = Recorded::read(recorded)?;
        if args.measured.is_none() {
            of_spec(&recorded, &args.spec)?;
        }
    }
    let mut children = None;
    let (measured, against) = match records(args)? {
        Some((measured, against)) => (measured, against.or_else(|| args.against.clone())),
        None => (folder(args, args.measured.as_deref(), &args.device, &mut children)?, args.against.clone()),
    };
    // Recorded runs are read before the minutes that new ones take.
    let measured = Recorded::read(&measured)?;
    if against.is_none() {
        of_spec(&measured, &args.spec)?;
    }
    let against = Recorded::read(&folder(args, against.as_deref(), &simulated, &mut children)?)?;
    let report = compare(&measured, &against, args.tolerance)?;
    if args.json {
        terminal::print_json(&report)?;
    } else {
        page(&report).print()?;
    }
    verdict(&report)
}

fn verdict(report: &Report) -> Result<()> {
    let beyond: Vec<&Row> = report.cells.iter().filter(|row| !row.within).collect();
    let step_time = beyond.iter().filter(|row| row.difference.abs() > report.tolerance);
    let calls = beyond.iter().filter_map(|row| Some((row, row.same_calls.filter(|share| *share < SAME_CALLS)?)));
    let mut faults = Vec::new();
    if let Some(worst) = step_time.max_by(|a, b| a.difference.abs().total_cmp(&b.difference.abs())) {
        let (difference, tolerance) = (100.0 * worst.difference, 100.0 * report.tolerance);
        faults.push(format!(
            "the step time of '{}' differs by {difference:+.1} %, and {tolerance:.0} % are allowed",
            worst.cell
        ));
    }
    if let Some((worst, share)) = calls.min_by(|a, b| a.1.total_cmp(&b.1)) {
        let (share, least) = (100.0 * share, 100.0 * SAME_CALLS);
        faults.push(format!(
            "{share:.0} % of the waiting of '{}' is in the same calls, less than {least:.0} %",
            worst.cell
        ));
    }
    let (count, all) = (beyond.len(), report.cells.len());
    if faults.is_empty() {
        return Ok(());
    }
    Err(RuntimeFailure::new(format!("{count} of {all} cells are not as measured: {}", faults.join("; "))).into())
}

/// Refuses recorded runs of another spec than that of the new runs.
fn of_spec(recorded: &Recorded, spec: &str) -> Result<()> {
    let stem = Path::new(spec).file_stem().unwrap_or_default().to_string_lossy();
    if recorded.spec != stem {
        bail!("{} is of the spec '{}', and the new runs are of '{stem}'; set --spec", recorded.name, recorded.spec);
    }
    Ok(())
}

/// Without a GPU: runs of the same spec recorded on one, and by default the recorded runs of the simulated device.
/// Prints which.
fn records(args: &FidelityArgs) -> Result<Option<(PathBuf, Option<PathBuf>)>> {
    if args.measured.is_some() || args.device != DeviceName::Cuda(0) || CudaDriver::probe().is_ok() {
        return Ok(None);
    }
    let (Some(stem), Some(results)) = (Path::new(&args.spec).file_stem(), repository::results()?) else {
        return Ok(None);
    };
    let newest = |device: &str| {
        repository::newest(&results, device, Path::new(stem), |folder| folder.join(EXPERIMENT).is_file())
    };
    let Some(measured) = newest(repository::GPU)? else { return Ok(None) };
    say(&format!("note     no GPU here: the measured runs are those of {}", measured.display()));
    let is_default = args.against.is_none() && args.profile.is_none();
    let simulated = if is_default { newest("sim")? } else { None };
    if let Some(folder) = &simulated {
        let folder = folder.display();
        say(&format!("note     the simulated runs are those of {folder}; --against names others"));
    }
    Ok(Some((measured, simulated)))
}

/// The directory of an experiment on one device: the recorded one, or that of a new run.
fn folder(
    args: &FidelityArgs,
    recorded: Option<&Path>,
    device: &DeviceName,
    children: &mut Option<Children>,
) -> Result<PathBuf> {
    if let Some(folder) = recorded {
        return Ok(folder.to_owned());
    }
    let out = args.out.join(device.kind().name());
    // A separate process, so that the runner handles Ctrl-C and progress.
    let mut command = Command::new(repository::this_program()?);
    command.args(["run", &args.spec, "--device", &device.to_string(), "-o"]).arg(&out).stdout(Stdio::null());
    let children = match children {
        Some(children) => children,
        None => children.insert(Children::listen()?),
    };
    let status = children.run(&mut command, &format!("in the runs on {device}; the same command goes on"))?;
    let status = status.context("cannot start the runner")?;
    if !status.success() {
        return Err(ended(status, format!("the runs on {device} failed, as said above")));
    }
    let stem = Path::new(&args.spec).file_stem().unwrap_or_default();
    Ok(out.join(stem))
}

fn compare(measured: &Recorded, simulated: &Recorded, tolerance: f64) -> Result<Report> {
    let mut rows = Vec::new();
    for (label, real) in &measured.cells {
        let Some(other) = simulated.cells.get(label) else {
            bail!("{} has no finished run of '{label}', {} has", simulated.name, measured.name);
        };
        rows.push(row(label, real, other, tolerance));
    }
    if let Some(label) = simulated.cells.keys().find(|label| !measured.cells.contains_key(*label)) {
        bail!("{} has no finished run of '{label}', {} has", measured.name, simulated.name);
    }
    let worst = rows.iter().map(|row| row.difference.abs()).fold(0.0, f64::max);
    Ok(Report { axes: measured.axes.clone(), tolerance, worst, within: rows.iter().all(|row| row.within), cells: rows })
}

fn row(label: &str, real: &[Measured], other: &[Measured], tolerance: f64) -> Row {
    let step = |runs: &[Measured]| median(&runs.iter().map(|run| run.step_s).collect::<Vec<f64>>());
    let (measured, simulated) = (step(real), step(other));
    let difference = simulated / measured - 1.0;
    let calls = calls(real, other);
    let blocked = |of: fn(&CallRow) -> &Call| calls.iter().map(|row| of(row).blocked_s).sum::<f64>();
    let (measured_blocked, simulated_blocked) = (blocked(|row| &row.measured), blocked(|row| &row.simulated));
    let of_epoch = |runs: &[Measured]| median(&runs.iter().map(|run| run.blocked_share).collect::<Vec<f64>>());
    let (measured_share, simulated_share) = (of_epoch(real), of_epoch(other));
    let worth = measured_share.max(simulated_share) > WORTH_A_LOOK;
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let same_calls = worth.then(|| {
        let both = |row: &CallRow| {
            share(row.measured.blocked_s, measured_blocked).min(share(row.simulated.blocked_s, simulated_blocked))
        };
        calls.iter().map(both).sum::<f64>()
    });
    let (steps, differing) = steps_apart(real, other);
    Row {
        cell: label.to_owned(),
        measured_step_s: measured,
        simulated_step_s: simulated,
        difference,
        measured_blocked_share: measured_share,
        simulated_blocked_share: simulated_share,
        same_calls,
        steps,
        steps_with_other_allocations: differing,
        within: difference.abs() <= tolerance && same_calls.is_none_or(|share| share >= SAME_CALLS),
        calls,
    }
}

/// Each kind of call that occurs, as the median over the repeats.
fn calls(real: &[Measured], other: &[Measured]) -> Vec<CallRow> {
    let mut names: Vec<&String> = real.iter().chain(other).flat_map(|run| run.calls.keys()).collect();
    names.sort();
    names.dedup();
    let of = |runs: &[Measured], name: &str| {
        let all: Vec<Call> = runs.iter().map(|run| run.calls.get(name).cloned().unwrap_or_default()).collect();
        let middle = |pick: fn(&Call) -> f64| median(&all.iter().map(pick).collect::<Vec<f64>>());
        Call {
            count: middle(|call| call.count),
            total_s: middle(|call| call.total_s),
            blocked_s: middle(|call| call.blocked_s),
        }
    };
    let row = |name: &String| CallRow { call: name.clone(), measured: of(real, name), simulated: of(other, name) };
    names.into_iter().map(row).collect()
}

/// Steps made in the first runs of both, and the number of them whose driver allocations differ.
fn steps_apart(real: &[Measured], other: &[Measured]) -> (u64, u64) {
    let (Some(real), Some(other)) = (real.first(), other.first()) else { return (0, 0) };
    let theirs: BTreeMap<(u64, u64), u64> = other.allocations.iter().copied().collect();
    let both = real.allocations.iter().filter_map(|(step, count)| Some((*count, *theirs.get(step)?)));
    both.fold((0, 0), |(steps, apart), (a, b)| (steps + 1, apart + u64::from(a != b)))
}

fn most(calls: &[CallRow], of: fn(&CallRow) -> &Call) -> String {
    let longest = calls.iter().max_by(|a, b| of(a).blocked_s.total_cmp(&of(b).blocked_s));
    longest.filter(|row| of(row).blocked_s > 0.0).map_or_else(|| "-".to_owned(), |row| row.call.clone())
}

fn page(report: &Report) -> Page {
    // CAST: display values.
    let time = |seconds: f64| duration((seconds * 1e9).round() as u64);
    let cell = |row: &Row, text: String| Cell::bold_if(!row.within, text);
    let table = table(
        &report.cells,
        &[
            (Column::left(report.axes.join(" ")), &|row| cell(row, row.cell.clone())),
            (Column::right("measured step"), &|row| cell(row, time(row.measured_step_s))),
            (Column::right("simulated step"), &|row| cell(row, time(row.simulated_step_s))),
            (Column::right("difference"), &|row| cell(row, format!("{:+.1} %", 100.0 * row.difference))),
            (Column::right("blocked measured").priority(4), &|row| cell(row, percent(row.measured_blocked_share, 0))),
            (Column::right("blocked simulated").priority(3), &|row| cell(row, percent(row.simulated_blocked_share, 0))),
            (Column::right("most in, measured").priority(6), &|row| cell(row, most(&row.calls, |row| &row.measured))),
            (Column::right("most in, simulated").priority(5), &|row| cell(row, most(&row.calls, |row| &row.simulated))),
            (Column::right("in the same calls").priority(1), &|row| {
                cell(row, row.same_calls.map_or_else(|| "-".to_owned(), |share| percent(share, 0)))
            }),
            (Column::right("steps with other allocations").priority(2), &|row| {
                cell(row, format!("{} of {}", row.steps_with_other_allocations, row.steps))
            }),
        ],
    );
    let mut page = Page::stdout();
    page.table(&table);
    page.note("step: a training step, median over epochs without the first and over repeats");
    page.note("blocked: share of the last epoch's time");
    page.note(format!(
        "in the same calls: the sum over kinds of call of the smaller share, where more than {:.0} % is waiting",
        100.0 * WORTH_A_LOOK
    ));
    page.note(format!(
        "allowed: {:.0} % of the step time, and at least {:.0} % in the same calls",
        100.0 * report.tolerance,
        100.0 * SAME_CALLS
    ));
    let within = report.cells.iter().filter(|row| row.within).count();
    let title = format!(
        "{within} of {} cells are as measured; the largest difference of a step's time is {:.1} %.",
        report.cells.len(),
        100.0 * report.worst
    );
    page.end(title, &command("experiments", "compare --device sim"));
    page
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    fn run(step_us: f64, blocked_us: &[(&str, f64)]) -> Measured {
        let call = |us: f64| Call { count: 1.0, total_s: us / 1e6, blocked_s: us / 1e6 };
        Measured {
            step_s: step_us / 1e6,
            blocked_share: blocked_us.iter().map(|(_, us)| us).sum::<f64>() / step_us,
            calls: blocked_us.iter().map(|(name, us)| ((*name).to_owned(), call(*us))).collect(),
            epochs: Vec::new(),
            allocations: vec![((1, 1), 5), ((1, 2), 0)],
        }
    }

    #[test]
    fn a_cell_is_within_when_its_time_and_its_calls_are() {
        let real = [run(100.0, &[("mem_free", 40.0), ("kernel_launch", 10.0)])];
        let same = row("a", &real, &real, 0.15);
        assert!(same.within && same.difference == 0.0 && same.same_calls == Some(1.0));
        assert_eq!((same.steps, same.steps_with_other_allocations), (2, 0));
        let slower = row("a", &real, &[run(116.0, &[("mem_free", 40.0)])], 0.15);
        assert!(!slower.within && (slower.difference - 0.16).abs() < 1e-9);
        // The same duration, but the waiting is elsewhere.
        let elsewhere = row("a", &real, &[run(100.0, &[("mem_alloc", 40.0), ("kernel_launch", 10.0)])], 0.15);
        assert!(!elsewhere.within && (elsewhere.same_calls.unwrap() - 0.2).abs() < 1e-9, "{elsewhere:?}");
        assert!(!row("a", &real, &[run(100.0, &[])], 0.15).within, "no waiting at all is not the same");
        // A cell without waiting cannot wait in the wrong call.
        let busy = row("a", &[run(100.0, &[("mem_free", 1.0)])], &[run(100.0, &[])], 0.15);
        assert!(busy.within && busy.same_calls.is_none());
    }

    #[test]
    fn percentages() {
        assert_eq!(["15%", "15", "0 %"].map(|text| share(text).unwrap()), [0.15, 0.15, 0.0]);
        assert!(["", "-1%", "many", "inf"].iter().all(|text| share(text).is_err()));
    }
}
