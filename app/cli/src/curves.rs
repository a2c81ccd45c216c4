//! GPU memory over time, which `vramlab run` samples and writes next to the snapshots.

use serde::{Deserialize, Serialize};
use std::path::Path;
use vramlab::input::{TABLE, read_text};

/// The ending of the files' names.
pub(crate) const ENDING: &str = ".device.json";

/// Memory of a process's GPUs while it ran.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Curves {
    pub(crate) pid: u32,
    pub(crate) gpus: Vec<Curve>,
}

/// Memory of one GPU over time, as the driver counts it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Curve {
    /// PyTorch's device index.
    pub(crate) index: u32,
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) total_bytes: u64,
    /// Times of the samples since 1970, like the events' times.
    pub(crate) time_ns: Vec<u64>,
    /// Memory used by all processes.
    pub(crate) used_bytes: Vec<u64>,
    /// Memory used by this process; `null` if the driver does not report it.
    pub(crate) process_bytes: Option<Vec<u64>>,
    /// Memory that NCCL allocated in this process; `null` if it allocated none, or its calls were not recorded with call stacks.
    #[serde(default)]
    pub(crate) nccl_bytes: Option<Vec<u64>>,
}

/// The samples of a GPU for a snapshot: from `NAME.device.json` for `NAME.pickle` and `NAME.WHY-N.pickle`.
pub(crate) fn curve(snapshot: &Path, gpu: u16) -> Option<Curve> {
    let name = snapshot.file_name()?.to_str()?;
    let stem = name.split_once('.')?.0;
    let text = read_text(&snapshot.with_file_name(format!("{stem}{ENDING}")), TABLE).ok()?;
    let curves: Curves = serde_json::from_str(&text).ok()?;
    let curve = curves.gpus.into_iter().find(|curve| curve.index == u32::from(gpu))?;
    (curve.time_ns.len() == curve.used_bytes.len()).then_some(curve)
}
