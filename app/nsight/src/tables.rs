//! The tables of an export: which there are, with which columns, and their rows.

use rusqlite::types::ValueRef;
use rusqlite::{Connection, OptionalExtension, Row, Statement};
use std::collections::{HashMap, HashSet};

/// Later than any time of a capture; what lies beyond is damage, and differences of what lies below cannot overflow.
const LATEST: i64 = 1 << 60;

/// The tables and columns of an open export.
pub(crate) struct Tables<'c> {
    pub(crate) connection: &'c Connection,
    columns: HashMap<String, HashSet<String>>,
}

impl<'c> Tables<'c> {
    /// Reads the schema.
    pub(crate) fn new(connection: &'c Connection) -> rusqlite::Result<Self> {
        let mut columns: HashMap<String, HashSet<String>> = HashMap::new();
        let mut statement = connection.prepare(
            "SELECT tables.name, columns.name FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns \
             WHERE tables.type IN ('table', 'view')",
        )?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            if let (Some(table), Some(column)) = (text(row, 0), text(row, 1)) {
                columns.entry(table).or_default().insert(column);
            }
        }
        Ok(Self { connection, columns })
    }

    pub(crate) fn contains(&self, table: &str) -> bool {
        self.columns.contains_key(table)
    }

    pub(crate) fn has(&self, table: &str, column: &str) -> bool {
        self.columns.get(table).is_some_and(|columns| columns.contains(column))
    }

    /// SQL of the first of these columns that the table has, or of no value.
    pub(crate) fn first(&self, table: &str, columns: &[&str]) -> String {
        let column = columns.iter().find(|column| self.has(table, column));
        column.map_or("NULL".to_owned(), |column| format!("\"{column}\""))
    }

    /// SQL of the process that a record belongs to.
    pub(crate) fn process(&self, table: &str) -> String {
        let column = ["globalPid", "globalTid"].into_iter().find(|column| self.has(table, column));
        column.map_or("0".to_owned(), |column| format!("\"{column}\" >> 24"))
    }

    /// Calls `each` with every row of `SELECT values FROM table rest`. Row order is never relied on.
    pub(crate) fn each(
        &self,
        table: &str,
        values: &[&str],
        rest: &str,
        mut each: impl FnMut(&Row<'_>),
    ) -> rusqlite::Result<()> {
        let sql = format!("SELECT {} FROM \"{table}\" {rest}", values.join(", "));
        let mut statement = self.connection.prepare(&sql)?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            each(row);
        }
        Ok(())
    }
}

/// A whole number; anything else is absent.
pub(crate) fn integer(row: &Row<'_>, column: usize) -> Option<i64> {
    match row.get_ref(column) {
        Ok(ValueRef::Integer(value)) => Some(value),
        _ => None,
    }
}

/// A text; anything else is absent.
pub(crate) fn text(row: &Row<'_>, column: usize) -> Option<String> {
    match row.get_ref(column) {
        Ok(ValueRef::Text(bytes)) => Some(String::from_utf8_lossy(bytes).into_owned()),
        _ => None,
    }
}

/// Bytes; anything else is absent.
pub(crate) fn blob<'r>(row: &'r Row<'_>, column: usize) -> Option<&'r [u8]> {
    match row.get_ref(column) {
        Ok(ValueRef::Blob(bytes)) => Some(bytes),
        _ => None,
    }
}

/// Start and end, if both were collected: a profiler that ran out of buffers leaves zeros, or an end before the start.
pub(crate) fn interval(row: &Row<'_>, start: usize, end: usize) -> Option<(i64, i64)> {
    let (start, end) = (integer(row, start)?, integer(row, end)?);
    let collected = start <= end && (-LATEST..LATEST).contains(&start) && end < LATEST && (start, end) != (0, 0);
    collected.then_some((start, end))
}

/// The table of strings, each read once.
pub(crate) struct Strings<'c> {
    statement: Option<Statement<'c>>,
    known: HashMap<i64, Option<String>>,
}

impl<'c> Strings<'c> {
    pub(crate) fn new(tables: &Tables<'c>) -> rusqlite::Result<Self> {
        let statement = if tables.has("StringIds", "id") && tables.has("StringIds", "value") {
            Some(tables.connection.prepare("SELECT value FROM StringIds WHERE id = ?1")?)
        } else {
            None
        };
        Ok(Self { statement, known: HashMap::new() })
    }

    /// Whether the export has the table.
    pub(crate) fn present(&self) -> bool {
        self.statement.is_some()
    }

    pub(crate) fn get(&mut self, id: i64) -> Option<&str> {
        if !self.known.contains_key(&id) {
            let statement = self.statement.as_mut()?;
            let value = statement.query_row([id], |row| Ok(text(row, 0))).optional().ok().flatten().flatten();
            self.known.insert(id, value);
        }
        self.known.get(&id)?.as_deref()
    }
}
