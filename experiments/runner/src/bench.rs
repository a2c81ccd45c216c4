//! `experiments bench`: the host time of an allocator call, in loops that do nothing else.
//!
//! Runs are interleaved (each repeat runs every allocator in turn, those of other projects included), each on a fresh
//! allocator; the report quotes the median of the repeats with the minimum and maximum. No kernel runs; on a GPU the streams and the memory are real.

mod baselines;
mod cases;
mod measure;
mod report;

use anyhow::{Context, Result, anyhow, bail};
use baselines::Baselines;
use cases::{Case, Job};
use clap::Args;
use measure::Setup;
use report::{Report, Row};
use std::path::PathBuf;
use std::sync::Arc;
use terminal::arguments::{self, Selections};
use terminal::{Bar, RuntimeFailure, say};
use vramlab::device::{CudaUnavailable, DeviceNameError};
use vramlab::{CudaDriver, DeviceKind, DeviceName, Driver, NullDriver, Selection};

/// Options of `experiments bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Device of the allocators: null (calls cost nothing: the allocator's own bookkeeping), cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "null", value_parser = device)]
    device: DeviceName,
    /// Allocators with their settings, separated by commas [default: those that place blocks differently; "all" is every one]
    #[arg(long, value_name = "NAME[:key=value,...]", value_parser = arguments::allocators())]
    alloc: Vec<Selections>,
    /// Only cases that begin with this, such as `history` or `mixed/64`; several separated by commas
    #[arg(long, value_name = "PATTERN", value_delimiter = ',')]
    case: Vec<String>,
    /// Recordings whose allocations and frees are timed; several separated by commas [default: those of the
    /// sources]
    #[arg(long, value_name = "FILE", value_delimiter = ',')]
    history: Vec<PathBuf>,
    /// Numbers of threads of the cases `threads` and `shared`
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8,16",
          value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Vec<u32>,
    /// Number of times that each case is run
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeats: u32,
    /// Print the values as one JSON document
    #[arg(long)]
    json: bool,
    /// Also run PyTorch's, RMM's and the driver's own allocators, if installed
    #[arg(long)]
    baselines: bool,
    /// Directory of the baseline programs [default: the one in the sources]
    #[arg(long, value_name = "DIR", requires = "baselines")]
    baselines_dir: Option<PathBuf>,
}

fn device(text: &str) -> Result<DeviceName, DeviceNameError> {
    DeviceName::among(text, &[DeviceKind::Null, DeviceKind::Cuda])
}

/// Runs the cases and prints the table.
pub(crate) fn bench(args: &BenchArgs) -> Result<()> {
    let chosen = arguments::chosen(&args.alloc);
    chosen.iter().try_for_each(Selection::check)?;
    let histories = cases::read_histories(&args.history)?;
    let groups = cases::groups(&chosen, &args.threads, &histories, &args.case)?;
    if args.baselines && args.device != DeviceName::Cuda(0) {
        bail!("the baselines need the first GPU, and figures of different devices do not compare: add --device cuda");
    }
    let baselines = args.baselines.then(|| baselines::find(args.baselines_dir.as_deref())).transpose()?;
    let driver: Arc<dyn Driver> = match args.device {
        DeviceName::Cuda(number) => Arc::new(CudaDriver::new(number).map_err(|error| no_gpu(&error, args.baselines))?),
        DeviceName::Null | DeviceName::Sim(_) => Arc::new(NullDriver::new(1 << 46)),
    };
    let most = groups.iter().flatten().map(|job| job.case.threads()).max().unwrap_or(1);
    let mut report = Report::new(driver.as_ref(), args.repeats);
    let setup = Setup::new(&driver, most, histories).map_err(failed)?;
    let mut others = match baselines {
        Some(folder) => {
            let mut cases: Vec<Case> = groups.iter().flatten().map(|job| job.case).collect();
            cases.dedup();
            Baselines::new(&folder, &cases, setup.histories()).map_err(failed)?
        }
        None => None,
    };
    measure_all(&setup, &groups, args.repeats, others.as_mut(), &mut report).map_err(failed)?;
    report.warn();
    if args.json { terminal::print_json(&report) } else { report.page().print() }
}

/// The error without a GPU. The driver's advice is for programs that take the simulated device, which has no times of the
/// host.
fn no_gpu(error: &CudaUnavailable, baselines: bool) -> anyhow::Error {
    let device = if baselines { "--device null, without --baselines" } else { "--device null" };
    anyhow!("cannot measure on a GPU: {}", error.to_string().replace("--device sim", device))
}

/// A failed measurement is not a fault of the command line.
fn failed(error: anyhow::Error) -> anyhow::Error {
    RuntimeFailure::new(format!("{error:#}")).into()
}

fn measure_all(
    setup: &Setup,
    groups: &[Vec<Job>],
    repeats: u32,
    mut others: Option<&mut Baselines>,
    report: &mut Report,
) -> Result<()> {
    let jobs = groups.iter().map(|group| group.len() as u64).sum::<u64>();
    let bar = Bar::new(jobs * u64::from(repeats), "{bar:30} run {pos}/{len} {wide_msg} [{elapsed} left {eta}]");
    let mut rows: Vec<Vec<Row>> =
        groups.iter().map(|group| group.iter().map(|job| Row::new(job, setup)).collect()).collect();
    let all: Vec<(usize, usize)> =
        groups.iter().enumerate().flat_map(|(group, jobs)| (0..jobs.len()).map(move |at| (group, at))).collect();
    for repeat in 0..repeats {
        // The baselines in each repeat, before and after the others in turn.
        if let Some(others) = others.as_mut().filter(|_| repeat % 2 == 1) {
            others.repeat()?;
        }
        for step in 0..all.len() {
            // Forward and backward in turn, so that neither a drift of the machine nor a phase in which another
            // program uses it affects one case only.
            let (group, at) = all[if repeat % 2 == 0 { step } else { all.len() - 1 - step }];
            let job = &groups[group][at];
            let name = job.case.name(setup.histories());
            bar.message(format!("{name} {}", job.alloc));
            let sample = measure::measure(setup, job).with_context(|| format!("{name} under '{}'", job.alloc))?;
            rows[group][at].add(sample);
            bar.advance(1);
            if repeat + 1 == repeats && !bar.is_drawn() {
                say(&format!("done     {name} {}", job.alloc));
            }
        }
        if let Some(others) = others.as_mut().filter(|_| repeat % 2 == 0) {
            others.repeat()?;
        }
        if repeat + 1 < repeats && !bar.is_drawn() {
            say(&format!("repeat   {} of {repeats} done", repeat + 1));
        }
    }
    report.rows.extend(rows.into_iter().flatten());
    if let Some(others) = others {
        report.rows.append(&mut others.rows);
        report.missing.append(&mut others.missing);
    }
    bar.clear();
    Ok(())
}
