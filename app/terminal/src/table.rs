//! Tables that fit the screen without breaking words.

use crate::escape::{glued, unglued};
use crate::screen::{PIPED, Screen, wrapped};
use comfy_table::{Attribute, CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Width, presets};
use unicode_width::UnicodeWidthStr;

/// Columns of space between two table columns.
const GAP: usize = 2;
/// Minimum width of a wrapping column, unless its longest text is shorter.
const TEXT: usize = 32;
/// Maximum number of subjects next to each other: more are hard to compare and do not fit into 80 columns.
pub const SIDE_BY_SIDE: usize = 4;

/// One column.
#[derive(Clone, Debug)]
pub struct Column {
    title: String,
    right: bool,
    /// Minimum width to which texts may wrap; without, they never wrap.
    wraps: Option<usize>,
    priority: u8,
}

impl Column {
    /// A column of names.
    pub fn left(title: impl AsRef<str>) -> Self {
        Self { title: glued(title.as_ref()), right: false, wraps: None, priority: 0 }
    }

    /// A column of numbers.
    pub fn right(title: impl AsRef<str>) -> Self {
        Self { right: true, ..Self::left(title) }
    }

    /// A column of sentences, which wrap at words.
    pub fn text(title: impl AsRef<str>) -> Self {
        Self { wraps: Some(TEXT), ..Self::left(title) }
    }

    /// On a narrow screen, columns with the highest priority number are omitted first; those with 0 always stay.
    #[must_use]
    pub fn priority(self, priority: u8) -> Self {
        Self { priority, ..self }
    }
}

/// A table cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    bold: bool,
}

impl Cell {
    /// A cell in bold if `bold`.
    pub fn bold_if(bold: bool, text: impl AsRef<str>) -> Self {
        Self { text: glued(text.as_ref()), bold }
    }

    /// A value, or a dash.
    pub fn or_dash(text: Option<impl AsRef<str>>) -> Self {
        text.map_or_else(|| Self::bold_if(false, "-"), |text| Self::bold_if(false, text))
    }
}

impl<T: AsRef<str>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::bold_if(false, text)
    }
}

/// Rows under a header.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

/// The shown columns and their widths.
struct Layout {
    shown: Vec<usize>,
    widths: Vec<usize>,
}

impl Table {
    /// A table without rows.
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        Self { columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    /// Adds a row; missing cells at its end are empty.
    pub fn row<C: Into<Cell>>(&mut self, cells: impl IntoIterator<Item = C>) {
        let mut row: Vec<Cell> = cells.into_iter().map(Into::into).collect();
        row.resize(self.columns.len(), Cell::default());
        self.rows.push(row);
    }

    /// The table for a screen, and the titles of omitted columns.
    #[must_use]
    pub fn show(&self, screen: Screen) -> (String, Vec<String>) {
        let layout = self.layout(screen.width);
        let omitted = (0..self.columns.len()).filter(|at| !layout.shown.contains(at));
        let omitted = omitted.map(|at| unglued(&self.columns[at].title)).collect();
        (self.draw(&layout, screen.styled), omitted)
    }

    /// The width of the widest text of a column, without its title.
    fn contents(&self, column: usize) -> usize {
        self.rows.iter().map(|row| row[column].text.width()).max().unwrap_or(0)
    }

    /// The minimum width of a column without broken words.
    fn least(&self, column: usize) -> usize {
        let word = |text: &str| text.split(' ').map(UnicodeWidthStr::width).max().unwrap_or(0);
        let title = word(&self.columns[column].title);
        let Some(least) = self.columns[column].wraps else { return title.max(self.contents(column)) };
        let longest = self.rows.iter().map(|row| word(&row[column].text)).max().unwrap_or(0);
        title.max(longest).max(least.min(self.contents(column)))
    }

    fn layout(&self, width: Option<usize>) -> Layout {
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        let total = |widths: &[usize]| widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1);
        loop {
            let full = |at: &usize| self.contents(*at).max(self.columns[*at].title.width());
            let full: Vec<usize> = shown.iter().map(full).collect();
            let available = width.unwrap_or(PIPED);
            if total(&full) <= available {
                return Layout { shown, widths: full };
            }
            let mut widths: Vec<usize> = shown.iter().map(|at| self.least(*at)).collect();
            if total(&widths) <= available {
                // Titles are unwrapped from left to right while space remains; sentences get the remainder.
                let mut spare = available - total(&widths);
                let last = |at: &usize| self.columns[shown[*at]].wraps.is_some();
                let mut order: Vec<usize> = (0..shown.len()).collect();
                order.sort_by_key(last);
                for at in order {
                    let more = full[at] - widths[at];
                    if more <= spare || self.columns[shown[at]].wraps.is_some() {
                        widths[at] += more.min(spare);
                        spare -= more.min(spare);
                    }
                }
                return Layout { shown, widths };
            }
            if width.is_none() {
                return Layout { shown, widths };
            }
            let lowest = shown.iter().rev().max_by_key(|at| self.columns[**at].priority).copied();
            match lowest.filter(|at| self.columns[*at].priority > 0) {
                Some(lowest) => shown.retain(|at| *at != lowest),
                None => {
                    // The last resort: shrink the widest column, and break its words.
                    while total(&widths) > available {
                        let Some(widest) = (0..widths.len()).max_by_key(|at| widths[*at]) else { break };
                        if widths[widest] <= 1 {
                            break;
                        }
                        widths[widest] -= 1;
                    }
                    return Layout { shown, widths };
                }
            }
        }
    }

    /// Whether all columns fit on the screen without broken words.
    pub(crate) fn fits(&self, width: Option<usize>) -> bool {
        let least: usize = (0..self.columns.len()).map(|at| self.least(at)).sum();
        width.is_none_or(|width| least + GAP * self.columns.len().saturating_sub(1) <= width)
    }

    fn draw(&self, layout: &Layout, styled: bool) -> String {
        let mut table = comfy_table::Table::new();
        // One line under the header; lines between rows would double the length of the table.
        let style = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());
        table.load_style(style).set_content_arrangement(ContentArrangement::Disabled);
        let cell = |text: &str, bold: bool, width: usize| {
            let cell = comfy_table::Cell::new(unglued(&wrapped(text, Some(width), 0)));
            if bold { cell.add_attribute(Attribute::Bold) } else { cell }
        };
        let places = || layout.shown.iter().zip(&layout.widths);
        table.set_header(places().map(|(at, width)| cell(&self.columns[*at].title, true, *width)));
        for row in &self.rows {
            table.add_row(places().map(|(at, width)| cell(&row[*at].text, row[*at].bold, *width)));
        }
        for ((number, column), (at, width)) in table.column_iter_mut().enumerate().zip(places()) {
            // The style adds one column of space.
            let gap = if number == 0 { 0 } else { GAP - 1 };
            // CAST: a screen's width and a gap of two.
            column.set_padding((gap as u16, 0));
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed((width + gap) as u16)));
            if self.columns[*at].right {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        if styled {
            table.enforce_styling()
        } else {
            table.force_no_tty()
        };
        let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
        lines.join("\n")
    }
}

/// A comparison of subjects, such as allocators: one column for each, one row for each metric.
#[derive(Clone, Debug)]
pub struct Comparison {
    corner: String,
    subjects: Vec<String>,
    metrics: Vec<(String, Vec<Cell>)>,
}

impl Comparison {
    /// A comparison without metrics; `corner` is the title of the metrics' names.
    pub fn new<S: AsRef<str>>(corner: &str, subjects: impl IntoIterator<Item = S>) -> Self {
        let subjects = subjects.into_iter().map(|subject| subject.as_ref().to_owned()).collect();
        Self { corner: corner.to_owned(), subjects, metrics: Vec::new() }
    }

    /// Adds a metric with a cell for each subject.
    pub fn metric<C: Into<Cell>>(&mut self, name: impl AsRef<str>, cells: impl IntoIterator<Item = C>) {
        let mut cells: Vec<Cell> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.subjects.len(), Cell::default());
        self.metrics.push((name.as_ref().to_owned(), cells));
    }

    /// Adds a metric whose smallest value is shown in bold if the values differ. Cells without a value are not ranked.
    pub fn ranked<C: AsRef<str>>(&mut self, name: impl AsRef<str>, cells: impl IntoIterator<Item = (C, Option<f64>)>) {
        let cells: Vec<(C, Option<f64>)> = cells.into_iter().collect();
        let values = || cells.iter().filter_map(|(_, value)| *value).filter(|value| value.is_finite());
        let best = values().fold(f64::INFINITY, f64::min);
        let differ = values().any(|value| value != best);
        let cell = |(text, value): &(C, Option<f64>)| Cell::bold_if(differ && *value == Some(best), text);
        self.metric(name, cells.iter().map(cell).collect::<Vec<Cell>>());
    }

    /// The tables for a screen, each with as many subjects as fit, at most four.
    #[must_use]
    pub fn show(&self, screen: Screen) -> String {
        let mut tables: Vec<String> = Vec::new();
        let mut from = 0;
        while from < self.subjects.len() {
            let left = self.subjects.len() - from;
            let mut count = left.min(SIDE_BY_SIDE);
            let mut table = self.part(from, count);
            while count > 1 && !table.fits(screen.width) {
                count -= 1;
                table = self.part(from, count);
            }
            tables.push(table.show(screen).0);
            from += count;
        }
        tables.join("\n\n")
    }

    fn part(&self, from: usize, count: usize) -> Table {
        let wraps = |column: Column| Column { wraps: Some(0), ..column };
        let subjects = self.subjects[from..from + count].iter().map(|subject| wraps(Column::right(subject)));
        let mut table = Table::new(std::iter::once(wraps(Column::left(&self.corner))).chain(subjects));
        for (name, cells) in &self.metrics {
            table.row(std::iter::once(Cell::from(name)).chain(cells[from..from + count].iter().cloned()));
        }
        table
    }
}

impl From<&Cell> for Cell {
    fn from(cell: &Cell) -> Self {
        cell.clone()
    }
}
