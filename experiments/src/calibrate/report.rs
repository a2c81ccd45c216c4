//! What calibration measured, as tables for people and JSON for machines.

use super::kernels::KernelRate;
use super::measure::Measurement;
use allocators::output::{self, Existing};
use allocators::{Bytes, DeviceDescription};
use anyhow::Result;
use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, presets};
use serde::Serialize;
use std::path::Path;
use trainer::report::duration;

/// Measurements of one device; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
pub(crate) struct Measurements {
    pub(crate) schema_version: u32,
    pub(crate) code_version: &'static str,
    pub(crate) source: String,
    pub(crate) started_at: String,
    pub(crate) device: DeviceDescription,
    /// `virtual` or `monotonic`, as in the run record.
    pub(crate) clock: &'static str,
    /// Host time.
    pub(crate) calls: Vec<Measurement>,
    /// Device time.
    pub(crate) kernels: Vec<KernelRate>,
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.force_no_tty();
    let style = presets::UTF8_HORIZONTAL_ONLY.row_separator(LineStyle::none());
    table.load_style(style).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(header);
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

impl Measurements {
    /// Writes them as JSON.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        Ok(output::write(path, Existing::Replace, text)?)
    }

    /// Both tables.
    pub(crate) fn tables(&self) -> String {
        let mut calls = table(&["call", "when", "size", "p50", "p90", "p99", "max", "samples"]);
        for row in &self.calls {
            calls.add_row([
                row.call.to_owned(),
                row.condition.text().to_owned(),
                row.bytes.map_or_else(String::new, |bytes| Bytes(bytes).to_string()),
                duration(row.p50_ns),
                duration(row.p90_ns),
                duration(row.p99_ns),
                duration(row.max_ns),
                row.samples.to_string(),
            ]);
        }
        let mut kernels = table(&["kernel", "shape", "time", "GB/s", "GFLOP/s"]);
        for row in &self.kernels {
            kernels.add_row([
                row.kernel.to_owned(),
                row.shape.clone(),
                // CAST: a display value.
                duration(row.median_ns.round() as u64),
                format!("{:.0}", row.gb_per_s),
                row.gflop_per_s.map_or_else(String::new, |rate| format!("{rate:.0}")),
            ]);
        }
        let name = &self.device.name;
        format!("{name}: host time of driver calls\n{calls}\n{name}: device time of kernels\n{kernels}")
    }
}
