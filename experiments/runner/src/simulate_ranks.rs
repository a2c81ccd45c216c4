//! `experiments simulate-ranks`: the step of more ranks than were measured, by a model.
//!
//! Every rank waits in each sum of gradients for the last one, so a step of N ranks takes the longest of their N steps, and a sum over
//! N ranks takes longer than one over fewer. [`model`] has both rules and its assumptions. Records of real or of simulated ranks are
//! the input; where a record has what the model predicts, both are printed next to each other.

mod input;
mod model;

use crate::profile;
use anyhow::{Result, bail};
use clap::Args;
use input::{Configuration, Runs};
use model::{Group, Step};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use terminal::{Cell, Column, Page, Table, command, seconds};
use vramlab::Profile;

#[derive(Debug, Args)]
pub(crate) struct SimulateRanksArgs {
    /// Records of several ranks: files with a run in each line, or directories with records of `trainer --gpus`
    #[arg(required = true, value_name = "RECORD")]
    records: Vec<PathBuf>,
    /// Numbers of ranks to predict
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "8,64,1024",
          value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    ranks: Vec<u32>,
    /// Allocator of the other ranks where only one has another
    #[arg(long, value_name = "NAME", default_value = "caching")]
    baseline: String,
    /// Profile with the links between GPUs [default: the built-in H200]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Print the predictions as one JSON document
    #[arg(long)]
    json: bool,
}

/// Ranks that have the allocator of a prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Holders {
    All,
    One,
}

/// The predicted step of a number of ranks.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    configuration: Configuration,
    alloc: String,
    /// Ranks that have this allocator; the others have the baseline.
    on: Holders,
    ranks: u32,
    /// Ranks of the records that the prediction is from.
    measured_ranks: u32,
    step_s: f64,
    /// Predicted step when all ranks have the baseline; absent where it was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline_step_s: Option<f64>,
    /// Number of GPUs whose time is lost, compared with the baseline.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost_gpus: Option<f64>,
}

/// A prediction of a step that was measured.
#[derive(Clone, Debug, Serialize)]
struct Check {
    configuration: Configuration,
    /// Allocators of the ranks.
    allocs: Vec<String>,
    ranks: u32,
    /// Ranks of the records that the prediction is from.
    from_ranks: u32,
    predicted_s: f64,
    measured_s: f64,
}

/// The output.
#[derive(Debug, Serialize)]
struct Report {
    schema_version: u32,
    /// The assumptions of each prediction.
    model: &'static str,
    baseline: String,
    plans: Vec<Plan>,
    checks: Vec<Check>,
}

/// Reads the records and prints the predictions.
pub(crate) fn simulate_ranks(args: &SimulateRanksArgs) -> Result<()> {
    let measured = input::read(&args.records)?;
    if measured.is_empty() {
        bail!(
            "no complete run of several ranks and more than {} epochs in these records; make one by `trainer --gpus 2 --out \
             DIRECTORY`",
            input::WARM_UP
        );
    }
    let allocs: BTreeSet<&str> = measured.iter().flat_map(|run| &run.allocs).map(String::as_str).collect();
    if !allocs.contains(args.baseline.as_str()) {
        let allocs: Vec<&str> = allocs.into_iter().collect();
        bail!("--baseline {}: no rank of these records has it; write one of {}", args.baseline, allocs.join(", "));
    }
    let report = report(&measured, &profile::read(args.profile.as_deref())?, &args.ranks, &args.baseline);
    if args.json { terminal::print_json(&report) } else { page(&report, args).print() }
}

/// Runs of one configuration with one allocator on all ranks, by number of ranks.
type Uniform<'a> = BTreeMap<(&'a Configuration, &'a str), BTreeMap<u32, &'a Runs>>;

fn report(measured: &[Runs], profile: &Profile, ranks: &[u32], baseline: &str) -> Report {
    let mut uniform: Uniform<'_> = BTreeMap::new();
    for run in measured {
        if let Some(alloc) = run.one_allocator() {
            uniform.entry((&run.configuration, alloc)).or_default().insert(run.ranks(), run);
        }
    }
    let smallest = |configuration, alloc| -> Option<&Runs> {
        uniform.get(&(configuration, alloc)).and_then(|by_ranks| by_ranks.values().next().copied())
    };
    // Runs in which one rank has an allocator and all others have the baseline, with the fewest ranks.
    let mixed = |configuration: &Configuration, alloc: &str| -> Option<&Runs> {
        let is_mixed = |run: &&Runs| {
            let holders = run.allocs.iter().filter(|of| *of == alloc).count();
            let others = run.allocs.iter().filter(|of| *of == baseline).count();
            run.configuration == *configuration && (holders, holders + others) == (1, run.allocs.len())
        };
        measured.iter().filter(is_mixed).min_by_key(|run| run.ranks()).filter(|_| alloc != baseline)
    };
    // One rank of `count` has the allocator: as measured, with further ranks of the baseline, or from runs with one allocator.
    let one_of = |configuration: &Configuration, alloc: &str, count: u32| -> Option<Vec<Group<'_>>> {
        let base = uniform.get(&(configuration, baseline))?.values().next().copied()?;
        if let Some(run) = mixed(configuration, alloc).filter(|run| run.ranks() < count) {
            return Some(vec![Group::new(run, run.ranks()), Group::new(base, count - run.ranks())]);
        }
        let run = uniform.get(&(configuration, alloc))?.get(&base.ranks()).copied().filter(|_| alloc != baseline)?;
        Some(vec![Group::new(run, 1), Group::new(base, count - 1)])
    };
    let mut plans = Vec::new();
    for ((configuration, alloc), by_ranks) in &uniform {
        let Some(run) = by_ranks.values().next() else { continue };
        let base = smallest(configuration, baseline).filter(|base| base.ranks() == run.ranks());
        for &count in ranks.iter().filter(|count| **count > run.ranks()) {
            let links = &profile.links;
            let of_base = base.map(|base| Step::new(links, count, &[Group::new(base, count)]).seconds());
            let all = Some((Holders::All, vec![Group::new(run, count)]));
            let one = one_of(configuration, alloc, count).map(|groups| (Holders::One, groups));
            for (on, groups) in all.into_iter().chain(one) {
                let step_s = Step::new(links, count, &groups).seconds();
                let lost_gpus = of_base.map(|base| f64::from(count) * (1.0 - base / step_s).max(0.0));
                plans.push(Plan {
                    configuration: (*configuration).clone(),
                    alloc: (*alloc).to_owned(),
                    on,
                    ranks: count,
                    measured_ranks: run.ranks(),
                    step_s,
                    baseline_step_s: of_base,
                    lost_gpus,
                });
            }
        }
    }
    let mut checks = Vec::new();
    for run in measured {
        let count = run.ranks();
        let groups = match run.one_allocator() {
            // Fewer ranks predict more.
            Some(alloc) => smallest(&run.configuration, alloc)
                .filter(|source| source.ranks() < count)
                .map(|source| vec![Group::new(source, count)]),
            None => {
                let holder = run.allocs.iter().find(|alloc| *alloc != baseline);
                holder
                    .filter(|holder| {
                        let of_holder = run.allocs.iter().filter(|alloc| alloc == holder).count();
                        of_holder == 1 && run.allocs.iter().all(|alloc| alloc == *holder || alloc == baseline)
                    })
                    .and_then(|holder| one_of(&run.configuration, holder, count))
            }
        };
        if let Some(groups) = groups {
            checks.push(Check {
                configuration: run.configuration.clone(),
                allocs: run.allocs.clone(),
                ranks: count,
                from_ranks: groups.iter().map(|group| group.run.ranks()).max().unwrap_or(count),
                predicted_s: Step::new(&profile.links, count, &groups).seconds(),
                measured_s: model::mean(&run.steps_s),
            });
        }
    }
    Report { schema_version: 1, model: model::ASSUMPTIONS, baseline: baseline.to_owned(), plans, checks }
}

fn page(report: &Report, args: &SimulateRanksArgs) -> Page {
    let mut page = Page::stdout();
    page.line("Predicted steps: a model, not a measurement");
    page.note(report.model);
    let mut configurations: Vec<&Configuration> = report.plans.iter().map(|plan| &plan.configuration).collect();
    configurations.dedup();
    let (compared, others): (Vec<_>, Vec<_>) = configurations.into_iter().partition(|configuration| {
        let mut plans = report.plans.iter().filter(|plan| plan.configuration == **configuration);
        plans.any(|plan| plan.on == Holders::One)
    });
    for configuration in &compared {
        page.title(configuration.to_string());
        page.table(&plan_table(report, configuration));
    }
    if !others.is_empty() {
        let (count, plural) = (others.len(), if others.len() == 1 { "" } else { "s" });
        page.note(format!(
            "{count} configuration{plural} without '{}' or without another allocator are only in --json",
            report.baseline
        ));
    }
    if !report.checks.is_empty() {
        page.title("Predictions of steps that were measured");
        page.table(&check_table(&report.checks));
    }
    let (least, most) = report.checks.iter().fold((f64::INFINITY, 0.0f64), |(least, most), check| {
        let ratio = check.predicted_s / check.measured_s;
        (least.min(ratio), most.max(ratio))
    });
    let result = if report.checks.is_empty() {
        "The records have no step that the model could be compared with.".to_owned()
    } else {
        let (count, plural) = (report.checks.len(), if report.checks.len() == 1 { "" } else { "s" });
        format!("Predicted over measured: {least:.2} to {most:.2} in {count} check{plural}.")
    };
    let records: Vec<String> = args.records.iter().map(|path| terminal::quoted(&path.to_string_lossy())).collect();
    page.end(result, &command("experiments", &format!("simulate-ranks {} --json", records.join(" "))));
    page
}

fn plan_table(report: &Report, configuration: &Configuration) -> Table {
    let mut table = Table::new([
        Column::left("allocator"),
        Column::left("on"),
        Column::right("ranks"),
        Column::right("step"),
        Column::right("over baseline"),
        Column::right("GPUs lost"),
    ]);
    for plan in report.plans.iter().filter(|plan| plan.configuration == *configuration) {
        let on = match plan.on {
            Holders::All => "all ranks",
            Holders::One => "one rank",
        };
        let ratio = plan.baseline_step_s.map(|base| format!("{:.2}", plan.step_s / base));
        table.row([
            Cell::from(&plan.alloc),
            Cell::from(on),
            Cell::from(plan.ranks.to_string()),
            Cell::from(seconds(plan.step_s)),
            Cell::or_dash(ratio),
            Cell::or_dash(plan.lost_gpus.map(|gpus| format!("{gpus:.1}"))),
        ]);
    }
    table
}

fn check_table(checks: &[Check]) -> Table {
    let mut table = Table::new([
        Column::left("allocators"),
        Column::right("ranks"),
        Column::right("from"),
        Column::right("predicted"),
        Column::right("measured"),
        Column::right("ratio"),
        Column::text("configuration").priority(1),
    ]);
    for check in checks {
        table.row([
            Cell::from(check.allocs.join(", ")),
            Cell::from(check.ranks.to_string()),
            Cell::from(check.from_ranks.to_string()),
            Cell::from(seconds(check.predicted_s)),
            Cell::from(seconds(check.measured_s)),
            Cell::from(format!("{:.2}", check.predicted_s / check.measured_s)),
            Cell::from(check.configuration.to_string()),
        ]);
    }
    table
}
