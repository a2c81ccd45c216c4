//! The settings of a run.

use crate::arithmetic::{Arithmetic, Dtype, FuseMode, GemmMode, WeightsMode};
use crate::data::{DataRequest, DatasetName};
use crate::error::Result;
use crate::ranks::{BucketSource, BufferRule, RankAllocator};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, ValueEnum};
use serde::{Serialize, Serializer};
use std::fmt;
use std::path::PathBuf;
use terminal::arguments;
use vramlab::histories::formats::Export;
use vramlab::instruments::NvtxMode;
use vramlab::{Bytes, DeviceKind, DeviceName, ParseBytesError, Selection};

/// When the host waits for the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
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

/// Path of batches to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
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

/// How host memory is pinned, for `--loader pinned` and `--offload`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PinMode {
    /// Each buffer by cudaHostAlloc, kept for the run.
    #[default]
    Plain,
    /// Each buffer as ordinary memory that is touched and registered (cudaHostRegister), kept for the run.
    Registered,
    /// Blocks of the allocator host-exact over cudaHostAlloc, one for each batch.
    Pooled,
}

/// What is kept in pinned host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OffloadMode {
    /// The optimizer's state: the f32 master weights of a bf16 or f16 network, copied to the device for each update and back.
    Optimizer,
}

/// Launch mode of a training step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LaunchMode {
    /// Each operation by itself.
    #[default]
    Eager,
    /// As a CUDA graph, which is captured once.
    Graph,
}

/// Steps that one graph can have.
pub const GRAPH_STEPS: std::ops::RangeInclusive<u32> = 1..=64;
/// Steps of a graph where the number is not given: enough that the gap between two launches is small beside them, few enough
/// that a run can be interrupted soon and that short epochs fill a graph.
const USUAL_GRAPH_STEPS: u32 = 8;

/// Distribution of the initial weights; biases start at zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
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

/// Device to train on.
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

/// As records have it: with the number of the GPU.
impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Named(DeviceName::Cuda(number)) => write!(f, "cuda:{number}"),
            Self::Named(name) => name.fmt(f),
        }
    }
}

impl Serialize for DeviceChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Steps of the whole run, counted from 1 on across epochs, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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

/// Everything that a run was asked to do: the options of the command line, with their defaults and help. A record keeps
/// those that decide what is measured.
#[derive(Clone, Debug, Args, Serialize)]
pub struct Settings {
    /// Allocator, with settings that are not its defaults; `trainer allocators` lists them
    #[arg(long = "alloc", value_name = "NAME[:key=value,...]", default_value_t, value_parser = arguments::allocator(), help_heading = "Allocator")]
    #[serde(rename = "alloc")]
    pub allocator: Selection,
    /// Memory limit, such as 512M: of reserved bytes if the allocator has the setting memory_limit, else of bytes in live blocks
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Allocator")]
    pub memory_limit: Option<u64>,

    /// auto, cuda, cuda:N, sim or sim:PROFILE.json
    #[arg(long, value_name = "DEVICE", default_value_t, help_heading = "Device and data")]
    pub device: DeviceChoice,
    /// Data set; auto is MNIST if it can be had, else generated digits
    #[arg(long, value_enum, default_value_t, help_heading = "Device and data")]
    pub dataset: DatasetName,
    /// Directory with MNIST's four files, plain or .gz [default: MNIST_DIR, then the user cache, then a download]
    #[arg(long, value_name = "DIR", help_heading = "Device and data")]
    #[serde(skip)]
    pub data_dir: Option<PathBuf>,
    /// Never download
    #[arg(long, help_heading = "Device and data")]
    #[serde(skip)]
    pub offline: bool,

    /// Width of the hidden layers
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = "Training")]
    pub hidden: u32,
    /// Number of linear layers
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = "Training")]
    pub layers: u32,
    /// Rows in a batch
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Training")]
    pub batch: u32,
    /// Passes over the training set
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Training")]
    pub epochs: u32,
    /// Stop after this many steps in all
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub steps: Option<u64>,
    /// Seed of weights, order and generated data
    #[arg(long, value_name = "N", default_value_t = 42, help_heading = "Training")]
    pub seed: u64,
    /// Initial weights
    #[arg(long, value_enum, default_value_t, help_heading = "Training")]
    pub init: InitMode,
    /// How batches reach the device
    #[arg(long, value_enum, default_value_t, help_heading = "Device and data")]
    pub loader: LoaderMode,
    /// How host memory is pinned, for --loader pinned and --offload [default: plain]
    #[arg(long, value_enum, help_heading = "Device and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pin: Option<PinMode>,
    /// What is kept in pinned host memory, with a stream of its own for its copies
    #[arg(long, value_enum, help_heading = "Device and data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadMode>,

    /// Learning rate
    #[arg(
        long = "lr",
        value_name = "RATE",
        default_value_t = 0.1,
        allow_negative_numbers = true,
        help_heading = "Training"
    )]
    #[serde(rename = "lr")]
    pub learning_rate: f32,
    /// Type of activations, their gradients and weights
    #[arg(long, value_enum, default_value_t, help_heading = "Arithmetic")]
    pub dtype: Dtype,
    /// Weights that are stepped; half only with --dtype bf16 or f16
    #[arg(long, value_enum, default_value_t, help_heading = "Arithmetic")]
    pub weights: WeightsMode,
    /// Factor of the gradients until the update [default: 1024 for f16, else 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Arithmetic")]
    pub loss_scale: Option<f32>,
    /// Matrix product [default: tiled for f32, else tensor]; f32 has no other
    #[arg(long, value_enum, help_heading = "Arithmetic")]
    pub gemm: Option<GemmMode>,
    /// Operations that are fused into one launch
    #[arg(long, value_enum, default_value_t, help_heading = "Arithmetic")]
    pub fuse: FuseMode,

    /// How a step is launched; graph needs --loader resident
    #[arg(long, value_enum, default_value_t, help_heading = "Training")]
    pub launch: LaunchMode,
    /// Steps of a graph, for --launch graph: fewer launches [default: 8, and 1 with --sync step]
    #[arg(long, value_name = "N", value_parser = graph_steps_parser(), help_heading = "Training")]
    pub graph_steps: Option<u32>,
    /// Streams: 2 gives weight updates their own (with --fuse update), 3 the loader too, 4 the validation too
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4), help_heading = "Training")]
    pub streams: u32,
    /// When the host waits for the device
    #[arg(long, value_enum, default_value_t, help_heading = "Training")]
    pub sync: SyncMode,

    /// GPUs, each with a process of its own that trains on a part of each batch; not needed under torchrun, Slurm or MPI
    #[arg(long, value_name = "N", help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
    /// Bytes of gradients that are summed together; the first sum takes at most 1 MiB [default: 25MiB]
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket: Option<u64>,
    /// Sum gradients while the backward pass continues [default: on]
    #[arg(long, value_name = "on|off", value_parser = parse_switch, action = clap::ArgAction::Set, help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap: Option<bool>,
    /// Lifetime of the buffers of gradients [default: kept]
    #[arg(long, value_enum, help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub buffers: Option<BufferRule>,
    /// Streams of the sums, each with a communicator: consecutive buckets take turns [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=2), help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comm_streams: Option<u32>,
    /// Source of the buffers of gradients, with --buffers kept [default: allocator]
    #[arg(long, value_enum, help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bucket_source: Option<BucketSource>,
    /// Register the buffers of gradients with NCCL, with --buffers kept [default: off]
    #[arg(long, value_name = "on|off", value_parser = parse_switch, action = clap::ArgAction::Set, help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub register: Option<bool>,
    /// Open mapped memory and pools of each rank to the other GPUs of its machine [default: off]
    #[arg(long, value_name = "on|off", value_parser = parse_switch, action = clap::ArgAction::Set, help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_access: Option<bool>,
    /// Allocator of one rank, where it is not that of --alloc; may be repeated
    #[arg(long, value_name = "RANK=ALLOC", help_heading = "Several GPUs")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rank_alloc: Vec<RankAllocator>,
    /// How long to wait for ranks that do not start or do not answer
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400), help_heading = "Several GPUs")]
    #[serde(skip)]
    pub rank_timeout: u32,

    /// Directory for the run record, new or empty [default: a new one under runs/]
    #[arg(long, value_name = "DIR", help_heading = "Record and instruments")]
    #[serde(skip)]
    pub out: Option<PathBuf>,
    /// Write the start file of this run before training, as `trainer start` does
    #[arg(long, value_name = "FILE", help_heading = "Record and instruments")]
    #[serde(skip)]
    pub save_start: Option<PathBuf>,
    /// NVTX ranges; auto is on when a profiler is attached
    #[arg(long, value_parser = nvtx_parser(), default_value = "auto", value_name = "auto|on|off", help_heading = "Record and instruments")]
    #[serde(serialize_with = "is_on")]
    pub nvtx: NvtxMode,
    /// Tell a memory checker (compute-sanitizer) of each block; auto is on when one is attached
    #[arg(long, value_parser = nvtx_parser(), default_value = "auto", value_name = "auto|on|off", help_heading = "Record and instruments")]
    #[serde(serialize_with = "is_on", default)]
    pub nvtx_memory: NvtxMode,
    /// Steps of the run that a profiler captures, both included, between two waits for the device [default: the whole
    /// training]
    #[arg(long, value_name = "FIRST..LAST", help_heading = "Record and instruments")]
    pub profile_steps: Option<ProfileSteps>,
    /// Latency histograms
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = parse_switch, action = clap::ArgAction::Set, help_heading = "Record and instruments")]
    pub latency: bool,
    /// Write every allocator operation to the record
    #[arg(long, help_heading = "Record and instruments")]
    pub trace: bool,
    /// Write the history in these formats, comma separated; implies --trace
    #[arg(long = "export", value_name = "FORMAT", value_parser = arguments::export(), value_delimiter = ',', help_heading = "Record and instruments")]
    #[serde(rename = "export")]
    pub exports: Vec<Export>,
    /// Check the allocator: overlap, writes after free, leaks (slow)
    #[arg(long, help_heading = "Record and instruments")]
    pub check: bool,
    /// Print each driver allocation and free
    #[arg(long, help_heading = "Record and instruments")]
    #[serde(skip)]
    pub log_driver_calls: bool,
}

/// Names of the options that decide with what weights and batches a run begins.
pub const BEGINNING: [&str; 10] =
    ["dataset", "data-dir", "offline", "hidden", "layers", "batch", "epochs", "steps", "seed", "init"];

fn bytes(text: &str) -> std::result::Result<u64, ParseBytesError> {
    text.parse().map(|Bytes(bytes)| bytes)
}

fn graph_steps_parser() -> impl TypedValueParser<Value = u32> {
    let (least, most) = GRAPH_STEPS.into_inner();
    clap::value_parser!(u32).range(i64::from(least)..=i64::from(most))
}

fn nvtx_parser() -> impl TypedValueParser<Value = NvtxMode> {
    PossibleValuesParser::new(["auto", "on", "off"]).map(|name| match name.as_str() {
        "on" => NvtxMode::On,
        "off" => NvtxMode::Off,
        _ => NvtxMode::Auto,
    })
}

/// A record says whether there were ranges.
fn is_on<S: Serializer>(mode: &NvtxMode, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_bool(*mode == NvtxMode::On)
}

fn parse_switch(text: &str) -> std::result::Result<bool, &'static str> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("write on or off"),
    }
}

impl Settings {
    /// Steps of a full graph in effect; `None` where steps are not launched as graphs.
    #[must_use]
    pub fn steps_in_graph(&self) -> Option<u32> {
        let usual = if self.sync == SyncMode::Never { USUAL_GRAPH_STEPS } else { 1 };
        (self.launch == LaunchMode::Graph).then(|| self.graph_steps.unwrap_or(usual))
    }

    /// How host memory is pinned; `None` where none is.
    #[must_use]
    pub fn pin_mode(&self) -> Option<PinMode> {
        let pins = self.loader == LoaderMode::Pinned || self.offload.is_some();
        pins.then(|| self.pin.unwrap_or_default())
    }

    /// The data to train on.
    #[must_use]
    pub fn data(&self) -> DataRequest {
        let Self { dataset, seed, offline, .. } = *self;
        DataRequest { name: dataset, data_dir: self.data_dir.clone(), seed, offline }
    }

    /// Arithmetic of the network, with defaults filled in.
    ///
    /// # Errors
    /// Errors of [`Arithmetic::checked`].
    pub fn arithmetic(&self) -> Result<Arithmetic> {
        let usual = Arithmetic::of(self.dtype);
        Arithmetic {
            dtype: self.dtype,
            weights: self.weights,
            loss_scale: self.loss_scale.unwrap_or(usual.loss_scale),
            gemm: self.gemm.unwrap_or(usual.gemm),
            fuse: self.fuse,
        }
        .checked()
    }
}

impl Default for Settings {
    /// Settings of an empty command line.
    fn default() -> Self {
        #[derive(Parser)]
        struct Alone {
            #[command(flatten)]
            settings: Settings,
        }
        Alone::parse_from(["trainer"]).settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The defaults are read from the command line, so it has to take an empty one.
    #[test]
    fn what_is_not_said_is_auto() {
        let settings = Settings::default();
        assert_eq!((settings.device, settings.dataset, settings.steps), (DeviceChoice::Auto, DatasetName::Auto, None));
    }

    #[test]
    fn what_decides_the_beginning_are_options() {
        let command = Settings::augment_args(clap::Command::new("trainer"));
        for name in BEGINNING {
            assert!(command.get_arguments().any(|option| option.get_long() == Some(name)), "{name}");
        }
    }

    #[test]
    fn devices_are_read_as_they_are_written() {
        for text in ["auto", "cuda:0", "cuda:3", "sim", "sim:a.json"] {
            assert_eq!(text.parse::<DeviceChoice>().map(|device| device.to_string()), Ok(text.to_owned()));
        }
        let error = "null".parse::<DeviceChoice>().unwrap_err();
        assert_eq!(error, "'null' is not a device for this: write cuda, cuda:N, sim or sim:PROFILE.json, or auto");
    }
}
