//! `trainer allocators`: what allocators there are, what they can do, and their settings.

use serde::Serialize;
use terminal::{Cell, Column, Page, Table, command};
use vramlab::{Backend, Capabilities};

#[derive(Debug, Serialize)]
pub(crate) struct Row {
    name: &'static str,
    summary: &'static str,
    capabilities: Capabilities,
    settings: Vec<Setting>,
}

#[derive(Debug, Serialize)]
struct Setting {
    name: &'static str,
    default: String,
    takes: String,
    help: String,
}

/// The list as it is printed in JSON, one object for each.
pub(crate) fn rows(backends: &[&'static Backend]) -> Vec<Row> {
    let setting = |setting: vramlab::settings::Setting| Setting {
        name: setting.name,
        default: setting.value,
        takes: setting.takes,
        help: setting.help,
    };
    let row = |backend: &&'static Backend| Row {
        name: backend.name,
        summary: backend.summary,
        capabilities: backend.capabilities,
        settings: backend.settings().into_iter().map(setting).collect(),
    };
    backends.iter().map(row).collect()
}

/// The list for people.
pub(crate) fn show(backends: &[&'static Backend], page: &mut Page) {
    let rows = rows(backends);
    let mut table =
        Table::new([Column::left("allocator"), Column::text("what it does"), Column::text("what it can do")]);
    for row in &rows {
        let can = row.capabilities.describe().join("; ");
        table.row([row.name, row.summary, &can].map(Cell::from));
    }
    page.table(&table);
    let mut table = Table::new([
        Column::left("setting of"),
        Column::left(""),
        Column::left("default"),
        Column::text("takes"),
        Column::text("what it does"),
    ]);
    for row in rows.iter().filter(|row| !row.settings.is_empty()) {
        for (number, setting) in row.settings.iter().enumerate() {
            let name = if number == 0 { row.name } else { "" };
            table.row([name, setting.name, &setting.default, &setting.takes, &setting.help].map(Cell::from));
        }
    }
    if rows.iter().any(|row| !row.settings.is_empty()) {
        page.gap();
        page.table(&table);
    }
    if let Some((row, setting)) = rows.iter().find_map(|row| row.settings.first().map(|setting| (row, setting))) {
        page.next(&command("trainer", &format!("--alloc {}:{}={}", row.name, setting.name, setting.default)));
    }
}
