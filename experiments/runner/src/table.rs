//! Tables of rows of one type.

use terminal::{Cell, Column, Table};

/// A column, and the function for its cells.
pub(crate) type Figure<'a, R> = (Column, &'a dyn Fn(&R) -> Cell);

/// A table with a line for each row.
pub(crate) fn table<'a, R: 'a>(rows: impl IntoIterator<Item = &'a R>, figures: &[Figure<'_, R>]) -> Table {
    let mut table = Table::new(figures.iter().map(|(column, _)| column.clone()));
    for row in rows {
        table.row(figures.iter().map(|(_, of)| of(row)));
    }
    table
}

/// A share as a percentage with `digits` decimals.
pub(crate) fn percent(share: f64, digits: usize) -> String {
    format!("{:.digits$} %", 100.0 * share)
}
