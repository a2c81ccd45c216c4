//! `experiments list`: the available specs.

use super::plan::plan;
use super::spec::{self, Source};
use crate::table::table;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};
use terminal::{Cell, Column, Page, command, quoted};
use vramlab::DeviceKind;

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Directory of the specs [default: experiments/specs]
    #[arg(long, value_name = "DIR")]
    specs: Option<PathBuf>,
    /// Print one JSON array with an object for each spec
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    question: String,
    devices: Vec<DeviceKind>,
    programs: Vec<&'static str>,
    repeats: u32,
    /// Number of runs on a GPU; absent where the spec does not allow it.
    #[serde(skip_serializing_if = "Option::is_none")]
    runs_cuda: Option<usize>,
    /// Number of runs on the simulated GPU; absent where the spec does not allow it.
    #[serde(skip_serializing_if = "Option::is_none")]
    runs_sim: Option<usize>,
}

/// Prints the specs with their questions and numbers of runs.
pub(crate) fn list(args: &ListArgs) -> Result<()> {
    let folder = spec::folder(args.specs.as_deref())?;
    let mut rows = Vec::new();
    for name in spec::names(&folder)? {
        let source = Source::read(&folder.join(format!("{name}.toml")))?;
        let runs =
            |kind| source.spec.devices.contains(&kind).then(|| plan(&source, kind).map(|runs| runs.len())).transpose();
        let arms = [DeviceKind::Cuda, DeviceKind::Sim].map(|kind| source.spec.arms_on(kind)).concat();
        let mut programs: Vec<&str> = arms.iter().map(|arm| arm.program.name()).collect();
        programs.sort_unstable();
        programs.dedup();
        rows.push(Row {
            runs_cuda: runs(DeviceKind::Cuda)?,
            runs_sim: runs(DeviceKind::Sim)?,
            name,
            question: source.spec.question.clone(),
            devices: source.spec.devices.clone(),
            programs,
            repeats: source.spec.repeats,
        });
    }
    if args.json {
        return terminal::print_json(&rows);
    }
    page(&rows, args.specs.as_deref()).print()
}

fn page(rows: &[Row], folder: Option<&Path>) -> Page {
    let count = |count: Option<usize>| Cell::or_dash(count.map(|count| count.to_string()));
    let table = table(
        rows,
        &[
            (Column::left("spec"), &|row| Cell::from(&row.name)),
            (Column::right("cuda runs"), &|row| count(row.runs_cuda)),
            (Column::right("sim runs"), &|row| count(row.runs_sim)),
            (Column::text("question"), &|row| Cell::from(&row.question)),
        ],
    );
    let mut page = Page::stdout();
    page.table(&table);
    let on_sim = || rows.iter().filter_map(|row| Some((row.runs_sim?, row)));
    let word = if rows.len() == 1 { "question" } else { "questions" };
    let title = format!("{} {word}, {} of which the simulated GPU answers.", rows.len(), on_sim().count());
    let named = |name: &str| match folder {
        Some(folder) => format!("run {} --specs {}", quoted(name), quoted(&folder.to_string_lossy())),
        None => format!("run {}", quoted(name)),
    };
    // The fastest to answer without a GPU; if none can be, the first.
    let first = on_sim().min_by_key(|(runs, _)| *runs).map(|(_, row)| format!("{} --device sim", named(&row.name)));
    match first.or_else(|| rows.first().map(|row| named(&row.name))) {
        Some(next) => page.end(title, &command("experiments", &next)),
        None => page.title("This directory has no specs."),
    }
    page
}
