//! The record of `experiments register`, and its tables.

use crate::study::record::provenance;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use terminal::provenance::command_line;
use terminal::{Cell, Column, Page, Table, command, duration};
use trainer::provenance::Provenance;
use trainer::ranks::{BufferMemory, CollectiveTime, CommunicatorMemory, KindMeasurement, Mode, Operation};
use vramlab::Bytes;
use vramlab::output::OutputFile;

/// One kind of memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct KindRecord {
    /// The kind.
    pub(crate) kind: BufferMemory,
    /// Why the measurement ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// Results of registering the memory, and times of collectives over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) measurement: Option<KindMeasurement>,
}

/// The last value in the output of a rank, and why there is no later one.
fn last<T: serde::de::DeserializeOwned>(lines: &str, error: Option<String>) -> (Option<T>, Option<String>) {
    let value = lines.lines().rev().find_map(|line| serde_json::from_str(line).ok());
    let error = error.or_else(|| value.is_none().then(|| "rank 0 printed no result".to_owned()));
    (value, error)
}

impl KindRecord {
    /// From the output of rank 0, and why it ended early if it did.
    pub(super) fn new(kind: BufferMemory, lines: &str, error: Option<String>) -> Self {
        let (measurement, error) = last(lines, error);
        Self { kind, error, measurement }
    }
}

/// Device memory of growing numbers of communicators.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Communicators {
    /// Why the measurement ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    /// Memory of rank 0, by number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) memory: Vec<CommunicatorMemory>,
}

impl Communicators {
    /// From the output of rank 0, and why it ended early if it did.
    pub(super) fn new(lines: &str, error: Option<String>) -> Self {
        let (memory, error) = last::<Vec<CommunicatorMemory>>(lines, error);
        Self { error, memory: memory.unwrap_or_default() }
    }
}

/// The record; the keys are described in `analysis/schema.md`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Register {
    schema_version: u32,
    program: &'static str,
    code_version: &'static str,
    /// Commit, build and machine of this program.
    provenance: Provenance,
    /// The command line.
    command: Vec<String>,
    /// Machine and date, in words.
    source: String,
    /// Start of the measurement, UTC.
    started_at: String,
    /// Number of ranks, one a GPU.
    ranks: u32,
    /// Variables of NCCL that were set.
    nccl_variables: BTreeMap<String, String>,
    /// Kinds of memory.
    kinds: Vec<KindRecord>,
    /// Memory of communicators.
    communicators: Communicators,
}

impl Register {
    pub(super) fn new(
        source: String,
        started_at: String,
        ranks: u32,
        kinds: Vec<KindRecord>,
        communicators: Communicators,
    ) -> Self {
        Self {
            schema_version: 1,
            program: "register",
            code_version: env!("CARGO_PKG_VERSION"),
            provenance: provenance(),
            command: command_line(),
            source,
            started_at,
            ranks,
            nccl_variables: std::env::vars().filter(|(name, _)| name.starts_with("NCCL_")).collect(),
            kinds,
            communicators,
        }
    }

    pub(super) fn write(&self, out: OutputFile) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        Ok(out.fill(text)?)
    }

    /// What was registered, and the times of the largest collectives.
    pub(super) fn page(&self) -> Page {
        let mut page = Page::stdout();
        page.title(format!("{} ranks: memory that NCCL registers", self.ranks));
        page.table(&self.registrations());
        page.note("ok: NCCL returned a handle, and a sum over the memory was correct; -: it accepted the memory and registered nothing");
        page.title("Device time of the largest collectives, in the modes that NCCL registered");
        page.table(&self.times());
        page.note("blocks: of the kernel in a graph, in which NCCL registers memory by itself unless NCCL_GRAPH_REGISTER is 0");
        page.title("Device memory of communicators");
        page.table(&self.memory());
        for kind in &self.kinds {
            if let Some(error) = &kind.error {
                page.note(format!("{}: {error}", kind.kind));
            }
        }
        if let Some(error) = &self.communicators.error {
            page.note(format!("communicators: {error}"));
        }
        page.end(self.found(), &command("trainer", "--gpus 2 --bucket-source nccl --register on"));
        page
    }

    fn registrations(&self) -> Table {
        let mut table = Table::new([
            Column::left("memory"),
            Column::left("register"),
            Column::left("window"),
            Column::right("call"),
        ]);
        for KindRecord { kind, measurement, .. } in &self.kinds {
            let of = |mode: Mode| {
                let results = measurement.iter().flat_map(|measured| &measured.registrations);
                results.into_iter().find(|result| result.mode == mode)
            };
            let verdict = |mode: Mode| match of(mode) {
                None => Cell::from("not measured"),
                Some(result) if result.error.is_some() => Cell::from("refused"),
                Some(result) if !result.registered => Cell::from("-"),
                Some(result) if result.correct == Some(false) => Cell::from("wrong sums"),
                Some(_) => Cell::from("ok"),
            };
            table.row([
                Cell::from(kind.name()),
                verdict(Mode::Register),
                verdict(Mode::Window),
                Cell::or_dash(of(Mode::Register).map(|result| duration(result.call_ns))),
            ]);
        }
        table
    }

    fn times(&self) -> Table {
        let mut table = Table::new([
            Column::left("memory"),
            Column::left("collective"),
            Column::left("mode"),
            Column::right("size"),
            Column::right("eager"),
            Column::right("graph"),
            Column::right("blocks").priority(1),
        ]);
        for (kind, measured) in self.measured() {
            let Some(largest) = measured.times.iter().map(|time| time.time.bytes).max() else { continue };
            for operation in Operation::ALL {
                for mode in Mode::ALL {
                    let [eager, graph] = ["eager", "graph"].map(|launch| {
                        let is_it = |time: &&CollectiveTime| {
                            (time.operation, time.mode, time.time.bytes) == (operation, mode, largest)
                                && time.launch == launch
                        };
                        measured.times.iter().find(is_it)
                    });
                    let Some(eager) = eager else { continue };
                    table.row([
                        Cell::from(kind.name()),
                        Cell::from(operation.name()),
                        Cell::from(mode.name()),
                        Cell::from(Bytes(largest).to_string()),
                        Cell::from(duration(eager.time.p50_ns)),
                        Cell::or_dash(graph.map(|graph| duration(graph.time.p50_ns))),
                        Cell::or_dash(graph.and_then(|graph| graph.blocks).map(|blocks| blocks.to_string())),
                    ]);
                }
            }
        }
        table
    }

    fn measured(&self) -> impl Iterator<Item = (BufferMemory, &KindMeasurement)> {
        self.kinds.iter().filter_map(|kind| Some((kind.kind, kind.measurement.as_ref()?)))
    }

    fn memory(&self) -> Table {
        let columns =
            [Column::right("communicators"), Column::right("device memory"), Column::right("counted by NCCL")];
        let mut table = Table::new(columns);
        for memory in &self.communicators.memory {
            table.row([
                Cell::from(memory.count.to_string()),
                Cell::from(Bytes(memory.device_bytes).to_string()),
                Cell::or_dash(memory.counted_bytes.map(|bytes| Bytes(bytes).to_string())),
            ]);
        }
        table
    }

    /// The numbers of kinds that NCCL registers.
    fn found(&self) -> String {
        let count = |mode: Mode| {
            let registers = |measured: &KindMeasurement| {
                measured.registrations.iter().any(|result| result.mode == mode && result.registered)
            };
            self.measured().filter(|(_, measured)| registers(measured)).count()
        };
        format!(
            "NCCL registers {} of {} kinds of memory, and {} as a symmetric window",
            count(Mode::Register),
            self.kinds.len(),
            count(Mode::Window)
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    const MEASURED: &str = r#"{"nccl": "2.28.9", "gpu": "NVIDIA H200",
        "registrations": [
            {"mode": "none", "registered": false, "call_ns": 10, "correct": true},
            {"mode": "register", "registered": true, "call_ns": 2500, "correct": true},
            {"mode": "window", "registered": false, "error": "ncclCommWindowRegister: invalid usage", "call_ns": 9}],
        "times": [
            {"operation": "all-reduce", "mode": "none", "launch": "eager", "ranks": 2, "bytes": 1048576, "samples": 5,
             "min_ns": 9000, "p50_ns": 10000, "max_ns": 11000},
            {"operation": "all-reduce", "mode": "none", "launch": "graph", "blocks": 24, "ranks": 2, "bytes": 1048576,
             "samples": 5, "min_ns": 8000, "p50_ns": 9000, "max_ns": 9900}]}"#;

    fn record() -> Register {
        let kinds = vec![
            KindRecord::new(BufferMemory::Nccl, &MEASURED.replace('\n', " "), None),
            KindRecord::new(BufferMemory::Pinned, "", Some("no further result within 60 s".to_owned())),
            // A line that was cut off, behind an earlier one.
            KindRecord::new(
                BufferMemory::Pool,
                &format!("{}\n{{\"nccl", MEASURED.replace('\n', " ")),
                Some("rank 1: signal 9".into()),
            ),
            KindRecord::new(BufferMemory::Mapped, "{", None),
        ];
        let memory = r#"[{"count": 1, "device_bytes": 300000000}, {"count": 8, "device_bytes": 900000000}]"#;
        let communicators = Communicators::new(memory, None);
        Register::new("test".into(), "2026-01-01T00:00:00Z".into(), 2, kinds, communicators)
    }

    #[test]
    fn a_record_has_measurements_and_reasons_and_is_read_back() {
        let written = serde_json::to_value(record()).unwrap();
        let kinds: Vec<KindRecord> = serde_json::from_value(written["kinds"].clone()).unwrap();
        assert_eq!(kinds[0].measurement.as_ref().unwrap().times[1].blocks, Some(24));
        assert_eq!(kinds[1].error.as_deref(), Some("no further result within 60 s"));
        assert!(kinds[2].measurement.is_some() && kinds[2].error.is_some());
        assert_eq!(kinds[3].error.as_deref(), Some("rank 0 printed no result"));
        assert_eq!(written["communicators"]["memory"][1]["count"], 8);
    }

    #[test]
    fn the_result_counts_registered_kinds() {
        assert_eq!(record().found(), "NCCL registers 2 of 4 kinds of memory, and 0 as a symmetric window");
    }
}
