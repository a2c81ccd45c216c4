//! The measurements, as a table for people and as JSON for machines.

use super::cases::Job;
use super::measure::{Sample, Setup};
use crate::study::record::{Machine, provenance};
use serde::{Deserialize, Serialize};
use terminal::arguments::heading;
use terminal::{Cell, Column, Page, SIDE_BY_SIDE, Table, command, digits, say};
use trainer::provenance::Provenance;
use vramlab::{DeviceDescription, Driver, Selection};

/// The scope of a value, for the reader.
const INCLUDED: &str = "an operation is one allocation and one free, a call is one of the two; timed is the loop around \
                        the calls with one look at the clock on either side; sizes and slots are drawn beforehand, a \
                        read of 8 bytes and a slot of the live blocks for each operation are in it; no kernel runs";
/// A case is called noisy if its largest and smallest run differ by more than this share.
const NOISY: f64 = 0.25;

/// One case under one allocator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Case.
    pub(crate) case: String,
    /// Allocator, as `--alloc` names it.
    pub(crate) allocator: String,
    /// `experiments`, or the baseline program.
    pub(crate) program: String,
    /// Device: cuda or null.
    pub(crate) device: String,
    /// Threads.
    pub(crate) threads: u32,
    /// Unit of the values; for a rate more is better, for a time less.
    pub(crate) unit: String,
    /// Median of the repeats.
    pub(crate) median: f64,
    /// Smallest.
    pub(crate) min: f64,
    /// Largest.
    pub(crate) max: f64,
    /// Operations (calls, events) in the timed part of each repeat.
    pub(crate) operations: u64,
    /// The repeats in order.
    pub(crate) samples: Vec<f64>,
}

impl Row {
    /// A row without values yet.
    pub(crate) fn new(job: &Job, setup: &Setup) -> Self {
        Self {
            case: job.case.name(setup.histories()),
            allocator: job.alloc.to_string(),
            program: "experiments".into(),
            device: setup.kind().name().into(),
            threads: job.case.threads(),
            unit: job.case.unit().into(),
            median: f64::NAN,
            min: f64::NAN,
            max: f64::NAN,
            operations: 0,
            samples: Vec::new(),
        }
    }

    /// Adds a repeat.
    pub(crate) fn add(&mut self, sample: Sample) {
        self.operations = sample.operations;
        self.samples.push(sample.value);
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
        (self.min, self.max) = (at(0), at(sorted.len() - 1));
        self.median = f64::midpoint(at((sorted.len() - 1) / 2), at(sorted.len() / 2));
    }

    /// Whether the repeats are further apart than [`NOISY`].
    fn is_noisy(&self) -> bool {
        (self.max - self.min) / self.median > NOISY
    }

    fn is_rate(&self) -> bool {
        self.unit.ends_with("/s")
    }

    /// Ratio to `other`; above 1 is better.
    fn times_better(&self, other: &Row) -> f64 {
        if self.is_rate() { self.median / other.median } else { other.median / self.median }
    }
}

/// A baseline that could not run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Missing {
    /// Its name.
    pub(crate) allocator: String,
    /// Why it could not run.
    pub(crate) reason: String,
    /// How to install it.
    pub(crate) remedy: String,
}

/// All measurements.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema_version: u32,
    code_version: &'static str,
    provenance: Provenance,
    /// The command line, without directories of this machine.
    command: Vec<String>,
    date: String,
    device: DeviceDescription,
    cpu: Option<String>,
    cores: u32,
    repeats: u32,
    included: &'static str,
    /// Figures.
    pub(crate) rows: Vec<Row>,
    /// Requested baselines that are not installed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) missing: Vec<Missing>,
}

impl Report {
    /// A report without rows.
    pub(crate) fn new(driver: &dyn Driver, repeats: u32) -> Self {
        let Machine { cpu, cores, .. } = Machine::now();
        Self {
            schema_version: 1,
            code_version: env!("CARGO_PKG_VERSION"),
            provenance: provenance(),
            command: terminal::provenance::command_line(),
            date: trainer::provenance::now(),
            device: driver.describe(),
            cpu,
            cores,
            repeats,
            included: INCLUDED,
            rows: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// Prints on stderr what makes values larger than they need be, which of them scatter and which baselines are missing.
    pub(crate) fn warn(&self) {
        if cfg!(debug_assertions) {
            say("warning: these loops were built without optimisation: take the figures from a build with --release");
        }
        let noisy: Vec<String> = self
            .rows
            .iter()
            .filter(|row| row.is_noisy())
            .map(|row| format!("{} {}", row.case, row.allocator))
            .collect();
        if !noisy.is_empty() {
            say(&format!(
                "warning: the repeats differ by more than {:.0} % of their median in {}; close other programs, or take \
                 more --repeats",
                100.0 * NOISY,
                noisy.join(", ")
            ));
        }
        for missing in &self.missing {
            say(&format!("warning: {} was not run: {}; {}", missing.allocator, missing.reason, missing.remedy));
        }
    }

    /// The values for people: cases down, allocators across.
    pub(crate) fn page(&self) -> Page {
        let mut page = Page::stdout();
        page.line(format!(
            "{}, {}, {} cores; median of {} runs (smallest to largest)",
            self.device.name,
            self.cpu.as_deref().unwrap_or("unknown processor"),
            self.cores,
            self.repeats
        ));
        for (unit, title) in [
            (
                "ns/operation",
                "time, ns for one allocation and its free; less is better (`pair` gives out the same block again each time)",
            ),
            (
                "million operations/s",
                "threads on their own streams, and sharing one (`shared`), million operations a second in total; more is \
                 better",
            ),
        ] {
            let rows: Vec<&Row> = self.rows.iter().filter(|row| row.unit == unit).collect();
            if !rows.is_empty() {
                page.title(title);
                side_by_side(&rows, &mut page);
            }
        }
        self.instruments(&mut page);
        page.gap();
        page.note(self.included);
        page.end(self.found(), &command("experiments", "compare"));
        page
    }

    /// The allocator that is the fastest in the most cases.
    fn found(&self) -> String {
        let cases = distinct(self.rows.iter().map(|row| (row.case.as_str(), row.threads)));
        let quickest = |case: &(&str, u32)| {
            let of: Vec<&Row> = self.rows.iter().filter(|row| (row.case.as_str(), row.threads) == *case).collect();
            best(&of).filter(|_| of.len() > 1).map(|row| row.allocator.as_str())
        };
        let wins: Vec<&str> = cases.iter().filter_map(quickest).collect();
        let count = |name: &str| wins.iter().filter(|won| **won == name).count();
        match (distinct(wins.iter().copied()).into_iter().max_by_key(|name| count(name)), self.rows.first()) {
            (Some(name), _) => format!("{name} is the quickest in {} of {} cases.", count(name), wins.len()),
            (None, Some(row)) => {
                format!("{} takes {} {} in '{}'.", row.allocator, digits(row.median), row.unit, row.case)
            }
            (None, None) => "There was nothing to measure.".to_owned(),
        }
    }

    fn instruments(&self, page: &mut Page) {
        let rows: Vec<&Row> =
            self.rows.iter().filter(|row| matches!(row.unit.as_str(), "ns/call" | "million events/s")).collect();
        let Some(first) = rows.first() else { return };
        let mut table = Table::new([
            Column::left("case"),
            Column::right("threads"),
            Column::right("figure"),
            Column::right(""),
            Column::right("added ns per call"),
        ]);
        for row in &rows {
            let bare = rows.iter().find(|bare| {
                bare.case.starts_with("instrument/bare/") && bare.threads == row.threads && bare.case != row.case
            });
            let added = bare.filter(|_| !row.is_rate()).map(|bare| format!("{:+.1}", row.median - bare.median));
            table.row([
                row.case.clone(),
                row.threads.to_string(),
                figure(row),
                row.unit.clone(),
                added.unwrap_or_default(),
            ]);
        }
        page.title(format!(
            "instruments around '{}', pairs of 4 KiB; several threads have an allocator each and share the instrument",
            first.allocator
        ));
        page.table(&table);
    }
}

/// Each item once, in order of first occurrence.
fn distinct<T: Copy + PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut out = Vec::new();
    for item in items {
        if !out.contains(&item) {
            out.push(item);
        }
    }
    out
}

/// The best of one case's rows.
fn best<'a>(rows: &[&'a Row]) -> Option<&'a Row> {
    rows.iter().copied().reduce(|best, row| if best.times_better(row) >= 1.0 { best } else { row })
}

/// Cases down, allocators across, the best of each case in bold; with baselines, also how the project's best compares
/// to the baselines' best. A screen shows four allocators at a time, and the ranges only where there is room.
fn side_by_side(rows: &[&Row], page: &mut Page) {
    let names = distinct(rows.iter().map(|row| row.allocator.as_str()));
    let cases = distinct(rows.iter().map(|row| row.case.as_str()));
    let baselines = rows.iter().any(|row| row.program != "experiments");
    for names in names.chunks(SIDE_BY_SIDE) {
        let with_ranges = table(rows, &cases, names, false, figure);
        let narrow = baselines || !page.fits(&with_ranges);
        let shown = |row: &Row| if narrow { median(row) } else { figure(row) };
        page.table(&table(rows, &cases, names, baselines, shown));
        if narrow {
            page.note("medians; --json has the ranges");
        }
        if rows.iter().any(|row| names.contains(&row.allocator.as_str()) && row.is_noisy()) {
            page.note(format!("~: the repeats are more than {:.0} % of their median apart", 100.0 * NOISY));
        }
    }
}

fn table(rows: &[&Row], cases: &[&str], names: &[&str], baselines: bool, shown: impl Fn(&Row) -> String) -> Table {
    let columns = std::iter::once(Column::left("case")).chain(names.iter().map(|name| Column::right(heading(name))));
    let mut table = Table::new(
        columns.chain(baselines.then(|| Column::right(format!("{} to the best baseline", Selection::default())))),
    );
    for case in cases {
        let of: Vec<&Row> = rows.iter().copied().filter(|row| row.case == *case).collect();
        let first = best(&of);
        let mut line = vec![Cell::from(case)];
        for name in names {
            let row = of.iter().find(|row| row.allocator == *name);
            let is_best = row.zip(first).is_some_and(|(row, best)| of.len() > 1 && row.allocator == best.allocator);
            line.push(Cell::bold_if(is_best, row.map(|row| shown(row)).unwrap_or_default()));
        }
        if baselines {
            let ours = of.iter().find(|row| row.allocator == Selection::default().name());
            let theirs: Vec<&Row> = of.iter().copied().filter(|row| row.program != "experiments").collect();
            let ratio = ours
                .zip(best(&theirs))
                .map(|(ours, theirs)| format!("{:.2} x ({})", ours.times_better(theirs), theirs.allocator));
            line.push(Cell::from(ratio.unwrap_or_default()));
        }
        table.row(line);
    }
    table
}

/// About three digits, marked if the repeats scatter.
fn median(row: &Row) -> String {
    format!("{}{}", if row.is_noisy() { "~" } else { "" }, digits(row.median))
}

/// As [`median`], with the range.
fn figure(row: &Row) -> String {
    format!("{} ({}-{})", median(row), digits(row.min), digits(row.max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cases::Case;
    use std::sync::Arc;
    use vramlab::{Driver, NullDriver};

    fn row(values: &[f64], case: Case) -> Row {
        let driver: Arc<dyn Driver> = Arc::new(NullDriver::new(1 << 30));
        let setup = Setup::new(&driver, 1, Vec::new()).unwrap();
        let mut row = Row::new(&Job { case, alloc: Selection::default() }, &setup);
        for value in values {
            row.add(Sample { value: *value, operations: 10 });
        }
        row
    }

    #[test]
    fn medians_and_ratios() {
        let (fast, slow) = (row(&[3.0, 1.0, 2.0], Case::Pair { bytes: 1 }), row(&[4.0, 6.0], Case::Pair { bytes: 1 }));
        assert_eq!((fast.min, fast.median, fast.max), (1.0, 2.0, 3.0));
        assert_eq!(slow.median, 5.0);
        assert_eq!(figure(&row(&[100.0, 110.0], Case::Pair { bytes: 1 })), "105 (100-110)");
        assert_eq!(figure(&row(&[100.0, 140.0], Case::Pair { bytes: 1 })), "~120 (100-140)");
        assert_eq!(fast.times_better(&slow), 2.5);
        let (much, little) = (row(&[8.0], Case::Threads { threads: 1 }), row(&[2.0], Case::Threads { threads: 1 }));
        assert_eq!(much.times_better(&little), 4.0);
    }
}
