//! `experiments fit-program`: the program's own host time for each driver call, from recorded runs of the trainer.
//!
//! Where the host is the bottleneck, an epoch lasts as long as its driver calls and the trainer's work between them.
//! The remainder of the epoch after subtracting every call at the profile's cost, divided by the number of calls, is
//! the program's time per call. Calls whose cost does not depend on a size are subtracted at the profile's cost plus
//! their blocked time; all others at their measured time. So the result contains both the trainer's code and the extra
//! time of calls between other work, compared with a loop. The trainer does less around a call for memory than around
//! a launch. Cells that differ in their share of such calls separate the two:
//! [`Profile::program_ns_per_call`](vramlab::Profile::program_ns_per_call) and
//! [`Profile::program_ns_per_memory_call`](vramlab::Profile::program_ns_per_memory_call) fit the cells best, by the
//! sum of squares. Cells that do not differ give one value for all calls.

use crate::fidelity::recorded::{Call, Epoch, Measured, Recorded};
use crate::profile;
use crate::study::figures::median;
use crate::table::{percent, table};
use anyhow::{Result, bail};
use clap::Args;
use std::collections::BTreeMap;
use std::path::PathBuf;
use terminal::{Cell, Column, Page, command, quoted};
use vramlab::output::{Existing, OutputFile};
use vramlab::{CallKind, Profile};

/// A cell is host-bound if the host was blocked for less than this share of the time.
const HOST_BOUND: f64 = 0.1;
/// If the shares of memory calls deviate less than this, cells cannot separate the two values.
const APART: f64 = 0.1;

#[derive(Debug, Args)]
pub(crate) struct ProgramArgs {
    /// Runs recorded on a GPU: the directory of an experiment, such as `experiments run fidelity --device cuda` makes
    measured: PathBuf,
    /// Profile calibrated on the same machine, which supplies all other costs [default: the built-in H200]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Write the new profile to this file
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
}

/// One host-bound cell, nanoseconds per call.
#[derive(Debug)]
struct Row {
    cell: String,
    blocked_share: f64,
    /// Between calls: the epoch less the time in all calls.
    between: f64,
    /// Time in excess of the profile's cost of the calls.
    beyond: f64,
    /// Share of the calls that allocate or free memory.
    memory: f64,
}

/// The program's host time per call, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Program {
    /// For a call that allocates or frees memory; absent: as for the others.
    memory_call: Option<u64>,
    call: u64,
}

/// Fits, writes the profile and prints each cell's contribution.
pub(crate) fn fit_program(args: &ProgramArgs) -> Result<()> {
    let mut base = profile::read(args.profile.as_deref())?;
    let recorded = Recorded::read(&args.measured)?;
    let rows = host_bound(&recorded.cells, &base);
    if rows.is_empty() {
        bail!(
            "{}: in every cell the host was blocked for more than {:.0} % of the time; record narrower layers",
            recorded.name,
            100.0 * HOST_BOUND
        );
    }
    let program = program(&rows);
    (base.program_ns_per_call, base.program_ns_per_memory_call) = (program.call, program.memory_call);
    profile::write(&base, OutputFile::create(&args.out, Existing::Replace)?)?;
    let mut page = page(&rows, program);
    let next = format!("fidelity --profile {}", quoted(&args.out.to_string_lossy()));
    page.next(&command("experiments", &next));
    page.print()
}

/// The line through the cells' shares of memory calls: its ends are the times of a program without such calls and of
/// one with no others. Every cell has the same weight. Negative times, from calls that were faster than in the
/// profile, become zero.
fn program(rows: &[Row]) -> Program {
    // CAST: nanoseconds far below 2^53.
    let rounded = |ns: f64| ns.round().max(0.0) as u64;
    // CAST: a count of cells.
    let mean = |of: &dyn Fn(&Row) -> f64| rows.iter().map(of).sum::<f64>() / rows.len() as f64;
    let (share, beyond) = (mean(&|row| row.memory), mean(&|row| row.beyond));
    let spread = mean(&|row| (row.memory - share).powi(2));
    if spread.sqrt() < APART {
        return Program { call: rounded(beyond), memory_call: None };
    }
    let slope = mean(&|row| (row.memory - share) * (row.beyond - beyond)) / spread;
    let at = |memory: f64| rounded(beyond + slope * (memory - share));
    Program { call: at(0.0), memory_call: Some(at(1.0)) }
}

fn host_bound(cells: &BTreeMap<String, Vec<Measured>>, profile: &Profile) -> Vec<Row> {
    let row = |(cell, runs): (&String, &Vec<Measured>)| {
        let over = |of: &dyn Fn(&Epoch) -> f64| {
            let run = |run: &Measured| median(&run.epochs.iter().map(of).collect::<Vec<f64>>());
            median(&runs.iter().filter(|run| !run.epochs.is_empty()).map(run).collect::<Vec<f64>>())
        };
        let sum = |epoch: &Epoch, of: &dyn Fn(&str, &Call) -> f64| {
            epoch.calls.iter().map(|(name, call)| of(name, call)).sum::<f64>()
        };
        let a_call = |epoch: &Epoch, in_calls_s: f64| {
            1e9 * (epoch.wall_s - in_calls_s) / sum(epoch, &|_, call| call.count).max(1.0)
        };
        Row {
            cell: cell.clone(),
            blocked_share: over(&|epoch| sum(epoch, &|_, call| call.blocked_s) / epoch.wall_s),
            between: over(&|epoch| a_call(epoch, sum(epoch, &|_, call| call.total_s))),
            beyond: over(&|epoch| a_call(epoch, sum(epoch, &|name, call| charged_s(profile, name, call)))),
            memory: over(&|epoch| {
                sum(epoch, &|name, call| if moves_memory(name) { call.count } else { 0.0 })
                    / sum(epoch, &|_, call| call.count).max(1.0)
            }),
        }
    };
    cells
        .iter()
        .filter(|(_, runs)| runs.iter().any(|run| !run.epochs.is_empty()))
        .map(row)
        .filter(|row| row.blocked_share < HOST_BOUND)
        .collect()
}

fn moves_memory(name: &str) -> bool {
    CallKind::ALL.iter().any(|kind| kind.name() == name && kind.moves_memory())
}

/// Seconds that the simulated device would charge for these calls.
fn charged_s(profile: &Profile, name: &str, call: &Call) -> f64 {
    let (queues, pool) = (&profile.queues, profile.pool.as_ref());
    let each = match name {
        "kernel_launch" => Some(queues.launch_ns),
        "mem_alloc_async" => pool.map(|pool| pool.alloc_ns),
        "mem_free_async" => pool.map(|pool| pool.free_ns),
        _ => None,
    };
    // CAST: nanoseconds of one call, far below 2^53.
    each.map_or(call.total_s, |ns| call.count * ns as f64 / 1e9 + call.blocked_s)
}

fn page(rows: &[Row], program: Program) -> Page {
    let table = table(
        rows,
        &[
            (Column::left("host-bound cell"), &|row| Cell::from(&row.cell)),
            (Column::right("blocked"), &|row| Cell::from(percent(row.blocked_share, 0))),
            (Column::right("calls for memory"), &|row| Cell::from(percent(row.memory, 0))),
            (Column::right("between calls, ns"), &|row| Cell::from(format!("{:.0}", row.between))),
            (Column::right("beyond the profile, ns"), &|row| Cell::from(format!("{:.0}", row.beyond))),
        ],
    );
    let mut page = Page::stdout();
    page.table(&table);
    page.note("medians over epochs and repeats");
    page.title(match program.memory_call {
        Some(memory) => format!(
            "program_ns_per_call: {}, program_ns_per_memory_call: {memory}, which miss the last column least.",
            program.call
        ),
        None => format!("program_ns_per_call: {}, the mean of the last column.", program.call),
    });
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(launch_ns: f64, between_ns: f64, blocked_share: f64) -> Measured {
        let wall_s = 1000.0 * (launch_ns + between_ns) / 1e9;
        let blocked_s = blocked_share * wall_s;
        let call = Call { count: 1000.0, total_s: 1000.0 * launch_ns / 1e9 + blocked_s, blocked_s };
        let calls = BTreeMap::from([("kernel_launch".to_owned(), call)]);
        let epoch = Epoch { wall_s: wall_s + blocked_s, calls };
        let (step_s, blocked_share) = (wall_s, blocked_share);
        Measured { step_s, blocked_share, calls: BTreeMap::new(), epochs: vec![epoch], allocations: Vec::new() }
    }

    #[test]
    fn what_is_beyond_the_profile_is_the_programs() {
        let profile = Profile::h200();
        let launch = profile.queues.launch_ns as f64;
        let cells = BTreeMap::from([
            ("quick".to_owned(), vec![run(launch, 300.0, 0.0), run(launch, 500.0, 0.0), run(launch, 400.0, 0.05)]),
            ("slow calls".to_owned(), vec![run(launch + 200.0, 600.0, 0.01)]),
            ("waits".to_owned(), vec![run(launch, 9000.0, 0.5)]),
        ]);
        let rows = host_bound(&cells, &profile);
        let fitted: Vec<(&str, f64, f64)> =
            rows.iter().map(|row| (row.cell.as_str(), row.between.round(), row.beyond.round())).collect();
        assert_eq!(fitted, [("quick", 400.0, 400.0), ("slow calls", 600.0, 800.0)]);
        assert_eq!(program(&rows), Program { call: 600, memory_call: None });
    }

    #[test]
    fn cells_with_and_without_calls_for_memory_tell_what_these_take() {
        let row =
            |memory: f64, beyond: f64| Row { cell: String::new(), blocked_share: 0.0, between: 0.0, beyond, memory };
        // A program that takes 600 ns around a launch and 200 around a call for memory, with scatter that averages
        // out.
        let rows = [row(0.0, 620.0), row(0.0, 580.0), row(0.6, 350.0), row(0.6, 370.0)];
        assert_eq!(program(&rows), Program { call: 600, memory_call: Some(200) });
        // Neither time is negative.
        assert_eq!(program(&[row(0.0, 500.0), row(0.5, 100.0)]), Program { call: 500, memory_call: Some(0) });
        // Cells that do not differ give one value.
        assert_eq!(program(&[row(0.6, 300.0), row(0.65, 400.0)]), Program { call: 350, memory_call: None });
    }
}
