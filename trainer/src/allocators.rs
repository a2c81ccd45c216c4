//! `trainer allocators`: what allocators there are, what they can do, and their settings.

use serde::Serialize;
use terminal::{Cell, Column, Page, Table, command};
use vramlab::backends::{GraphCapture, Needs, StreamUse};
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

/// The list for people: a line or two for each.
pub(crate) fn show(backends: &[&'static Backend], page: &mut Page) {
    let titles = ["streams", "graphs", "needs"].map(Column::left);
    let columns = [Column::left("allocator"), Column::text("what it does")].into_iter().chain(titles);
    let mut table = Table::new(columns);
    for backend in backends {
        let can = backend.capabilities;
        let streams = if can.streams == StreamUse::Any { "any" } else { "own" };
        let graphs = if can.graph_capture == GraphCapture::Refused { "-" } else { "yes" };
        let needs = match can.needs {
            Needs::Nothing => "-",
            Needs::Pools => "pools",
            Needs::Vmm => "VMM",
        };
        table.row([backend.name, backend.summary, streams, graphs, needs]);
    }
    page.table(&table);
    page.note(
        "streams: whether freed memory serves its own stream or any; graphs: whether it serves CUDA graph captures; needs: \
         stream-ordered pools or virtual memory management",
    );
    page.next(&command("trainer", &format!("allocators {}", backends.last().map_or("", |backend| backend.name))));
}

/// All that there is to say of some.
pub(crate) fn show_all(backends: &[&'static Backend], page: &mut Page) {
    let rows = rows(backends);
    for row in &rows {
        page.title(format!("{}: {}", row.name, row.summary));
        page.note(row.capabilities.describe().join("; "));
        if row.settings.is_empty() {
            continue;
        }
        let columns = [Column::left("setting"), Column::left("default"), Column::text("takes")];
        let mut table = Table::new(columns.into_iter().chain([Column::text("what it does")]));
        for setting in &row.settings {
            table.row([setting.name, &setting.default, &setting.takes, &setting.help].map(Cell::from));
        }
        page.gap();
        page.table(&table);
    }
    if let Some((row, setting)) = rows.iter().find_map(|row| row.settings.first().map(|setting| (row, setting))) {
        page.next(&command("trainer", &format!("--alloc {}:{}={}", row.name, setting.name, setting.default)));
    }
}
