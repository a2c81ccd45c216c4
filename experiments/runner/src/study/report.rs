//! The table at the end of an experiment: one row for each cell.

use super::figures::{self, Figures, Measure, NOISY, median, outliers, spread};
use super::plan::Run;
use super::record::Planned;
use super::record::RunStatus;
use crate::table::percent;
use anyhow::Result;
use serde::Serialize;
use std::path::{Path, PathBuf};
use terminal::{Cell as Text, Column, Page, command, quoted, seconds};
use vramlab::Bytes;

/// One cell of the matrix, over its repeats.
#[derive(Debug, Serialize)]
pub(crate) struct Cell {
    pub(crate) experiment: String,
    /// Number of the combination of variant and options.
    pub(crate) cell: usize,
    /// Words that distinguish it from other cells.
    pub(crate) label: String,
    /// Column names of the label's words.
    #[serde(skip)]
    pub(crate) title: String,
    pub(crate) program: &'static str,
    /// Options and allocator settings.
    pub(crate) options: serde_json::Map<String, serde_json::Value>,
    pub(crate) planned: usize,
    pub(crate) done: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
    /// Name of the main value: `step_time` or `simulated_time` in seconds, `operation_time` in seconds per operation,
    /// `capacity` in bytes.
    pub(crate) measure: Option<Measure>,
    /// Median of the main value over the repeats; the following values are medians too.
    pub(crate) median: Option<f64>,
    /// Deviation of the repeats over their median: 1.4826 times the median distance from the median; for two or three
    /// repeats, half of the range.
    pub(crate) spread: Option<f64>,
    /// Share of the last epoch, validation included, during which the host was blocked.
    pub(crate) blocked_share: Option<f64>,
    /// Driver calls per batch of that epoch; for a recording: the total.
    pub(crate) driver_calls: Option<f64>,
    pub(crate) peak_reserved_bytes: Option<f64>,
    /// Peak of active over peak of reserved.
    pub(crate) utilisation: Option<f64>,
    pub(crate) train_loss: Option<f64>,
    /// Runs more than five spreads and 10 % away.
    pub(crate) outliers: Vec<String>,
}

/// Computes the cells of a plan from the runs that exist.
pub(crate) fn cells(planned: &Planned, status: impl Fn(&Run) -> Option<RunStatus>) -> Result<Vec<Cell>> {
    let (runs, named) = (&planned.runs, !planned.source.spec.arms.is_empty());
    let count = runs.iter().map(|run| run.cell + 1).max().unwrap_or(0);
    let mut out = Vec::new();
    for cell in 0..count {
        let mine: Vec<&Run> = runs.iter().filter(|run| run.cell == cell).collect();
        let Some(first) = mine.first() else { continue };
        let with = |wanted: RunStatus| mine.iter().filter(|run| status(run) == Some(wanted)).count();
        let mut finished: Vec<(&str, Figures)> = Vec::new();
        for run in mine.iter().filter(|run| status(run) == Some(RunStatus::Done)) {
            finished.extend(figures::of_folder(&planned.run_folder(run))?.map(|figures| (run.id.as_str(), figures)));
        }
        let values: Vec<f64> = finished.iter().map(|(_, figures)| figures.value).collect();
        let of = |pick: fn(&Figures) -> Option<f64>| {
            let all: Vec<f64> = finished.iter().filter_map(|(_, figures)| pick(figures)).collect();
            (!all.is_empty()).then(|| median(&all))
        };
        out.push(Cell {
            experiment: planned.source.spec.name.clone(),
            cell,
            label: first.label(named),
            title: [if named { vec!["arm".to_owned()] } else { Vec::new() }, first.axes.clone()].concat().join(" "),
            program: first.program.name(),
            options: first.options_json(),
            planned: mine.len(),
            done: with(RunStatus::Done),
            failed: with(RunStatus::Failed),
            skipped: with(RunStatus::Skipped),
            measure: finished.first().map(|(_, figures)| figures.measure),
            median: (!values.is_empty()).then(|| median(&values)),
            spread: spread(&values),
            blocked_share: of(|figures| figures.blocked_share),
            driver_calls: of(|figures| figures.driver_calls),
            peak_reserved_bytes: of(|figures| figures.peak_reserved_bytes),
            utilisation: of(|figures| figures.utilisation),
            train_loss: of(|figures| figures.train_loss),
            outliers: outliers(&values).into_iter().map(|at| finished[at].0.to_owned()).collect(),
        });
    }
    Ok(out)
}

fn bytes(value: f64) -> String {
    // CAST: a display value; sizes of a device are exact in an f64.
    Bytes(value as u64).to_string()
}

/// The table of an experiment.
pub(crate) fn table(name: &str, question: &str, cells: &[Cell]) -> Page {
    let mut measures: Vec<Measure> = cells.iter().filter_map(|cell| cell.measure).collect();
    measures.dedup();
    let title = if let [measure] = measures.as_slice() { measure.title() } else { "median" };
    let mut labels: Vec<&str> = cells.iter().map(|cell| cell.title.as_str()).collect();
    labels.dedup();
    let label = if let [label] = labels.as_slice() { label } else { "arm" };
    let main = |cell: &Cell| {
        cell.median.zip(cell.measure).map(|(value, measure)| match measure {
            Measure::Capacity => bytes(value),
            _ => seconds(value),
        })
    };
    let runs = |cell: &Cell| {
        let others = [(cell.failed, "failed"), (cell.skipped, "skipped")].into_iter().filter(|(count, _)| *count > 0);
        let others: String = others.map(|(count, what)| format!(" {count} {what}")).collect();
        format!("{}/{}{others}", cell.done, cell.planned)
    };
    let share = |share: Option<f64>, digits: usize| Text::or_dash(share.map(|share| percent(share, digits)));
    let table = crate::table::table(
        cells,
        &[
            (Column::left(label), &|cell| Text::from(&cell.label)),
            (Column::right(title), &|cell| Text::or_dash(main(cell))),
            (Column::right("spread").priority(1), &|cell| share(cell.spread, 1)),
            (Column::right("host blocked").priority(3), &|cell| share(cell.blocked_share, 0)),
            (Column::right("driver calls").priority(4), &|cell| {
                Text::or_dash(cell.driver_calls.map(|calls| format!("{calls:.1}")))
            }),
            (Column::right("peak reserved").priority(2), &|cell| Text::or_dash(cell.peak_reserved_bytes.map(bytes))),
            (Column::right("utilisation").priority(5), &|cell| share(cell.utilisation, 1)),
            (Column::right("runs"), &|cell| Text::from(runs(cell))),
        ],
    );
    let mut page = Page::stdout();
    page.line(format!("{name}: {question}"));
    page.table(&table);
    if measures.contains(&Measure::StepTime) {
        page.note("host blocked: of the last epoch; driver calls: a batch of it; both with the validation");
    }
    page
}

/// Warnings for the reader of the table, one line each.
pub(crate) fn warnings(cells: &[Cell]) -> Vec<String> {
    let mut out = Vec::new();
    for cell in cells {
        if let Some(spread) = cell.spread.filter(|spread| *spread > NOISY) {
            out.push(format!(
                "{}: the repeats of {} spread by {:.0} %; run it on a quieter machine or with more repeats",
                cell.experiment,
                cell.label,
                100.0 * spread
            ));
        }
        for id in &cell.outliers {
            out.push(format!("{}: {id} stands out from the other repeats", cell.experiment));
        }
    }
    out
}

/// A summary of the runs, the location of their records, and the next command.
pub(crate) fn closing(cells: &[Cell], out: &Path) -> Page {
    let sum = |of: fn(&Cell) -> usize| cells.iter().map(of).sum::<usize>();
    let (planned, done, failed, skipped) =
        (sum(|cell| cell.planned), sum(|cell| cell.done), sum(|cell| cell.failed), sum(|cell| cell.skipped));
    let mut names: Vec<&str> = cells.iter().map(|cell| cell.experiment.as_str()).collect();
    names.dedup();
    let out = shown(out);
    let (what, folder) = match names.as_slice() {
        [name] => ((*name).to_owned(), out.join(name)),
        names => (format!("{} experiments", names.len()), out.clone()),
    };
    let open = tally([(failed, "failed"), (skipped, "skipped"), (planned - done - failed - skipped, "left")]);
    let title = format!("{done} of {planned} runs of {what} are done{open}; the records are in {}.", folder.display());
    let next = if done == planned {
        names.first().map_or_else(String::new, |name| drawing(&out.join(name)))
    } else {
        command("experiments", &format!("status {}", quoted(&folder.to_string_lossy())))
    };
    let mut page = Page::stdout();
    // After the tables.
    page.line("");
    page.line(title);
    page.next(&next);
    page
}

/// Number of runs in each state that occurs: `, 2 failed, 1 left`.
pub(crate) fn tally<const N: usize>(counts: [(usize, &str); N]) -> String {
    counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!(", {count} {what}")).collect()
}

/// The command that plots an experiment.
pub(crate) fn drawing(folder: &Path) -> String {
    format!("vramlab report {}", quoted(&folder.to_string_lossy()))
}

/// A path relative to the current directory, as a user would type it.
fn shown(path: &Path) -> PathBuf {
    let here = std::env::current_dir().ok();
    let below = here.and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    below.filter(|below| !below.as_os_str().is_empty()).unwrap_or_else(|| path.to_owned())
}
