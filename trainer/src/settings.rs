//! What a run was asked to do.

use crate::arithmetic::{Accumulate, Arithmetic, Dtype, FuseMode, GemmMode, WeightsMode};
use crate::data::DatasetName;
use crate::error::Result;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use vramlab::histories::trace::Export;
use vramlab::instruments::NvtxMode;
use vramlab::{DeviceKind, DeviceName, Selection};

/// When the host waits for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SyncMode {
    /// Only where results are read, once an epoch.
    #[default]
    Never,
    /// After each training step.
    Step,
    /// After each operation.
    Op,
}

/// How batches reach the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoaderMode {
    /// Assembled on the host and copied from pageable memory.
    Copy,
    /// Assembled in page-locked buffers and copied asynchronously.
    Pinned,
    /// The data set lives on the device; a kernel gathers each batch.
    #[default]
    Resident,
}

/// How a training step is launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LaunchMode {
    /// Each operation by itself.
    #[default]
    Eager,
    /// As a CUDA graph, which is captured once.
    Graph,
    /// Many steps as one kernel, whose blocks stay on the device; for small nets.
    Persistent,
}

/// Steps that one graph can have.
pub const GRAPH_STEPS: std::ops::RangeInclusive<u32> = 1..=64;
/// Steps of a graph where the number is not given: enough that the gap between two launches is small beside them, few enough
/// that a run can be interrupted soon and that short epochs fill a graph.
const USUAL_GRAPH_STEPS: u32 = 8;

/// Distribution of the initial weights; biases start at zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InitMode {
    /// Normal with standard deviation 0.05, whatever the width.
    Normal,
    /// Uniform within sqrt(6 / (inputs + outputs)).
    Xavier,
    /// Normal with standard deviation sqrt(2 / inputs), which suits ReLU.
    #[default]
    Kaiming,
}

/// Which device to train on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if there is one, else the simulated one.
    #[default]
    Auto,
    /// This one.
    Named(DeviceName),
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let name = DeviceName::among(text, &[DeviceKind::Cuda, DeviceKind::Sim]);
        name.map(Self::Named).map_err(|error| format!("{error}, or auto"))
    }
}

/// Steps of the whole run, counted from 1 on across epochs, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileSteps {
    /// First step.
    pub first: u64,
    /// Last step.
    pub last: u64,
}

impl std::str::FromStr for ProfileSteps {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let number = |part: &str| part.trim().parse::<u64>().ok();
        match text.split_once("..").map(|(first, last)| (number(first), number(last))) {
            Some((Some(first), Some(last))) if 1 <= first && first <= last => Ok(Self { first, last }),
            _ => Err(format!("'{text}' is no range of steps: write FIRST..LAST, such as 200..260, counted from 1")),
        }
    }
}

/// Everything that a run was asked to do.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Allocator.
    pub allocator: Selection,
    /// Most bytes that it may take.
    pub memory_limit: Option<u64>,
    /// Device.
    pub device: DeviceChoice,
    /// Data set.
    pub dataset: DatasetName,
    /// Where MNIST's files are.
    pub data_dir: Option<PathBuf>,
    /// Whether nothing may be downloaded.
    pub offline: bool,
    /// Width of the hidden layers.
    pub hidden: u32,
    /// Number of linear layers.
    pub layers: u32,
    /// Rows in a batch.
    pub batch: u32,
    /// Passes over the training set.
    pub epochs: u32,
    /// Stop after this many steps in all.
    pub steps: Option<u64>,
    /// Learning rate.
    pub learning_rate: f32,
    /// Seed of everything random.
    pub seed: u64,
    /// When the host waits.
    pub sync: SyncMode,
    /// How batches reach the device.
    pub loader: LoaderMode,
    /// Initial weights.
    pub init: InitMode,
    /// Type of the values.
    pub dtype: Dtype,
    /// Type of sums on tensor cores.
    pub accumulate: Accumulate,
    /// Which weights are stepped.
    pub weights: WeightsMode,
    /// Factor of the gradients until the update; `None`: what suits the type.
    pub loss_scale: Option<f32>,
    /// Matrix product; `None`: what suits the type.
    pub gemm: Option<GemmMode>,
    /// What is fused into one launch.
    pub fuse: FuseMode,
    /// How a step is launched.
    pub launch: LaunchMode,
    /// Steps of a graph, for `launch` as graphs; `None`: what suits.
    pub graph_steps: Option<u32>,
    /// Streams: 1 to 4.
    pub streams: u32,
    /// Where the run record goes; `None`: a new directory under `runs/`.
    pub out: Option<PathBuf>,
    /// Where a start file is written before training.
    pub save_start: Option<PathBuf>,
    /// NVTX ranges.
    pub nvtx: NvtxMode,
    /// Steps that a profiler captures; `None`: the whole training.
    pub profile_steps: Option<ProfileSteps>,
    /// Whether latency histograms are recorded.
    pub latency: bool,
    /// Whether every allocator operation is written to the record.
    pub trace: bool,
    /// Formats in which the history is written to the record at the end; any of them implies `trace`.
    pub exports: Vec<Export>,
    /// Whether the checker watches the allocator.
    pub check: bool,
    /// Whether driver allocations are printed as they happen.
    pub log_driver_calls: bool,
}

impl Settings {
    /// Steps of a full graph in effect; `None` where steps are not launched as graphs.
    #[must_use]
    pub fn steps_in_graph(&self) -> Option<u32> {
        let usual = if self.sync == SyncMode::Never { USUAL_GRAPH_STEPS } else { 1 };
        (self.launch == LaunchMode::Graph).then(|| self.graph_steps.unwrap_or(usual))
    }

    /// How the network computes, with what was not said filled in.
    ///
    /// # Errors
    /// Those of [`Arithmetic::checked`].
    pub fn arithmetic(&self) -> Result<Arithmetic> {
        let usual = Arithmetic::of(self.dtype);
        Arithmetic {
            dtype: self.dtype,
            accumulate: self.accumulate,
            weights: self.weights,
            loss_scale: self.loss_scale.unwrap_or(usual.loss_scale),
            gemm: self.gemm.unwrap_or(usual.gemm),
            fuse: self.fuse,
        }
        .checked()
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            allocator: Selection::default(),
            memory_limit: None,
            device: DeviceChoice::Auto,
            dataset: DatasetName::Auto,
            data_dir: None,
            offline: false,
            hidden: 256,
            layers: 3,
            batch: 64,
            epochs: 8,
            steps: None,
            learning_rate: 0.1,
            seed: 42,
            sync: SyncMode::default(),
            loader: LoaderMode::default(),
            init: InitMode::default(),
            dtype: Dtype::default(),
            accumulate: Accumulate::default(),
            weights: WeightsMode::default(),
            loss_scale: None,
            gemm: None,
            fuse: FuseMode::default(),
            launch: LaunchMode::default(),
            graph_steps: None,
            streams: 1,
            out: None,
            save_start: None,
            nvtx: NvtxMode::default(),
            profile_steps: None,
            latency: true,
            trace: false,
            exports: Vec::new(),
            check: false,
            log_driver_calls: false,
        }
    }
}
