//! Calibration results, as tables for people and JSON for machines.

use super::kernels::KernelRate;
use super::measure::{Condition, Measurement};
use crate::table::table;
use anyhow::Result;
use serde::Serialize;
use std::path::Path;
use terminal::duration;
use terminal::{Cell, Column, Page, command, quoted};
use trainer::provenance::Provenance;
use trainer::ranks::SumTime;
use vramlab::device::sim::LinkCosts;
use vramlab::output::OutputFile;
use vramlab::{Bytes, DeviceDescription};

/// Measurements of one device; the keys are described in `analysis/schema.md`.
#[derive(Debug, Serialize)]
pub(crate) struct Measurements {
    pub(crate) schema_version: u32,
    pub(crate) code_version: &'static str,
    /// Commit, build and machine of this program.
    pub(crate) provenance: Provenance,
    /// The command line, without directories of this machine.
    pub(crate) command: Vec<String>,
    /// Source of the profile's values, in words.
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
    /// Device time of all-reduces, where links between GPUs were measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) links: Vec<SumTime>,
}

impl Measurements {
    /// Writes the measurements as JSON.
    pub(crate) fn write(&self, out: OutputFile) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        Ok(out.fill(text)?)
    }

    /// The tables, a summary, and the command that uses the profile, whose links are `links`.
    pub(crate) fn page(&self, profile: &Path, links: LinkCosts) -> Page {
        let mut page = Page::stdout();
        let time = |ns: u64| Cell::from(duration(ns));
        let calls = table(
            &self.calls,
            &[
                (Column::left("call"), &|row| Cell::from(row.call)),
                (Column::left("when"), &|row| Cell::from(row.condition.text())),
                (Column::right("size"), &|row| {
                    row.bytes.map_or_else(Cell::default, |bytes| Cell::from(Bytes(bytes).to_string()))
                }),
                (Column::right("p50"), &|row| time(row.p50_ns)),
                (Column::right("p90").priority(3), &|row| time(row.p90_ns)),
                (Column::right("p99"), &|row| time(row.p99_ns)),
                (Column::right("max").priority(1), &|row| time(row.max_ns)),
                (Column::right("samples").priority(2), &|row| Cell::from(row.samples.to_string())),
            ],
        );
        let rate = |rate: f64| Cell::from(format!("{rate:.0}"));
        let kernels = table(
            &self.kernels,
            &[
                (Column::left("kernel"), &|row| Cell::from(row.kernel)),
                (Column::left("shape"), &|row| Cell::from(&row.shape)),
                // CAST: a display value.
                (Column::right("time"), &|row| time(row.median_ns.round() as u64)),
                (Column::right("GB/s"), &|row| rate(row.gb_per_s)),
                (Column::right("GFLOP/s"), &|row| row.gflop_per_s.map_or_else(Cell::default, rate)),
            ],
        );
        let name = &self.device.name;
        if !self.calls.is_empty() {
            page.line(format!("{name}: host time of driver calls"));
            page.table(&calls);
            page.title(format!("{name}: device time of kernels"));
            page.table(&kernels);
        }
        if !self.links.is_empty() {
            page.title(format!("{name}: device time of all-reduces"));
            page.table(&super::links::table(&self.links, links));
        }
        let next = format!("--device sim:{} --alloc naive", quoted(&profile.to_string_lossy()));
        page.end(self.found(profile), &command("trainer", &next));
        page
    }

    /// Cost of a free compared with an allocation, idle and behind a kernel: the reason why allocators cache.
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
