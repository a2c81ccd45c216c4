//! What calibration measured, as tables for people and JSON for machines.

use super::kernels::KernelRate;
use super::measure::{Condition, Measurement};
use anyhow::Result;
use serde::Serialize;
use std::path::Path;
use terminal::duration;
use terminal::{Column, Page, Table, command, quoted};
use vramlab::output::{self, Existing};
use vramlab::{Bytes, DeviceDescription};

/// Measurements of one device; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
pub(crate) struct Measurements {
    pub(crate) schema_version: u32,
    pub(crate) code_version: &'static str,
    /// Where the profile's figures come from, in words.
    pub(crate) source: String,
    pub(crate) started_at: String,
    /// The device that was measured.
    pub(crate) device: DeviceDescription,
    /// `virtual` or `monotonic`, as in the run record.
    pub(crate) clock: &'static str,
    /// Host time.
    pub(crate) calls: Vec<Measurement>,
    /// Device time.
    pub(crate) kernels: Vec<KernelRate>,
}

impl Measurements {
    /// Writes them as JSON.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        Ok(output::write(path, Existing::Replace, text)?)
    }

    /// Both tables, what they say, and the run that uses the profile.
    pub(crate) fn page(&self, profile: &Path) -> Page {
        let mut page = Page::stdout();
        let mut calls = Table::new([
            Column::left("call"),
            Column::left("when"),
            Column::right("size"),
            Column::right("p50"),
            Column::right("p90").priority(3),
            Column::right("p99"),
            Column::right("max").priority(1),
            Column::right("samples").priority(2),
        ]);
        for row in &self.calls {
            calls.row([
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
        let mut kernels = Table::new([
            Column::left("kernel"),
            Column::left("shape"),
            Column::right("time"),
            Column::right("GB/s"),
            Column::right("GFLOP/s"),
        ]);
        for row in &self.kernels {
            kernels.row([
                row.kernel.to_owned(),
                row.shape.clone(),
                // CAST: a display value.
                duration(row.median_ns.round() as u64),
                format!("{:.0}", row.gb_per_s),
                row.gflop_per_s.map_or_else(String::new, |rate| format!("{rate:.0}")),
            ]);
        }
        let name = &self.device.name;
        page.line(format!("{name}: host time of driver calls"));
        page.table(&calls);
        page.title(format!("{name}: device time of kernels"));
        page.table(&kernels);
        let next = format!("--device sim:{} --alloc naive", quoted(&profile.to_string_lossy()));
        page.end(self.found(profile), &command("trainer", &next));
        page
    }

    /// What a free costs beside what an allocation costs, idle and behind a kernel: why allocators cache.
    fn found(&self, profile: &Path) -> String {
        let of = |call: &str, condition: Condition| {
            let mine = self.calls.iter().filter(|row| row.call == call && row.condition == condition);
            mine.min_by_key(|row| row.bytes).map(|row| duration(row.p50_ns))
        };
        let written = format!("The profile went to {}", profile.display());
        match (of("mem_free", Condition::IdleInPage), of("mem_free", Condition::Busy)) {
            (Some(idle), Some(busy)) => {
                format!("{written}: a free takes {idle} on the idle device and {busy} behind a running kernel.")
            }
            _ => format!("{written}."),
        }
    }
}
