//! Checks of the settings before a run begins.

use crate::arithmetic::{Arithmetic, FuseMode};
use crate::data::Dataset;
use crate::error::{Result, TrainError};
use crate::mlp;
use crate::ranks::{self, BucketSource, BufferRule};
use crate::settings::{GRAPH_STEPS, LaunchMode, LoaderMode, Settings, SyncMode};
use vramlab::backends::{self, GraphCapture};
use vramlab::{Bytes, HostRoom, Selection};

/// More layers than any network has, and few enough that their widths can be listed.
const MOST_LAYERS: u32 = 1 << 16;

/// Checks that need only the settings.
pub(crate) fn settings(settings: &Settings) -> Result<()> {
    let positive = [
        ("--hidden", settings.hidden),
        ("--layers", settings.layers),
        ("--batch", settings.batch),
        ("--epochs", settings.epochs),
    ];
    for (option, value) in positive {
        if value == 0 {
            return Err(TrainError::Input(format!("{option} must be at least 1")));
        }
    }
    if settings.layers > MOST_LAYERS {
        return Err(TrainError::Input(format!("--layers must be at most {MOST_LAYERS}, found {}", settings.layers)));
    }
    if settings.steps == Some(0) {
        return Err(TrainError::Input("--steps must be at least 1".into()));
    }
    if !settings.learning_rate.is_finite() || settings.learning_rate <= 0.0 {
        return Err(TrainError::Input(format!("--lr must be a positive number, found {}", settings.learning_rate)));
    }
    launch(settings)?;
    pinning(settings)?;
    let Arithmetic { loss_scale, .. } = settings.arithmetic()?;
    // All data have at least one feature and one class.
    tensors(settings, 1, 1)?;
    if !(settings.learning_rate / loss_scale).is_finite() {
        return Err(TrainError::Input(format!(
            "--loss-scale {loss_scale:e} is too small: updates divide --lr {} by it",
            settings.learning_rate
        )));
    }
    Ok(())
}

/// Checks of the settings of several ranks.
pub(crate) fn ranks(settings: &Settings, size: u32) -> Result<()> {
    ranks::check_batches(settings, size, None)?;
    if settings.fuse == FuseMode::Update {
        return Err(TrainError::Input(
            "--fuse update steps a layer without writing its gradient, which ranks have to sum; use --fuse epilogue"
                .into(),
        ));
    }
    if settings.offload.is_some() {
        return Err(TrainError::Input("--offload optimizer is for one GPU; leave it out, or --gpus".into()));
    }
    if settings.bucket == Some(0) {
        return Err(TrainError::Input("--bucket must be at least 1 byte".into()));
    }
    let given = [
        ("--bucket-source nccl", settings.bucket_source == Some(BucketSource::Nccl)),
        ("--register on", settings.register == Some(true)),
    ];
    let rule = settings.buffers.unwrap_or_default();
    if let Some((option, _)) = given.into_iter().find(|(_, given)| *given && rule != BufferRule::Kept) {
        return Err(TrainError::Input(format!(
            "{option} is for buffers that stay: mapping and registering take longer than a step; use --buffers kept instead of {rule}"
        )));
    }
    if let Some(chosen) = settings.rank_alloc.iter().find(|chosen| chosen.rank >= size) {
        return Err(TrainError::Input(format!(
            "--rank-alloc {}={}: ranks are numbered from 0 to {}",
            chosen.rank,
            chosen.allocator,
            size - 1
        )));
    }
    Ok(())
}

/// Widths of the network for this data.
pub(crate) fn network(settings: &Settings, dataset: &Dataset) -> Result<Vec<u32>> {
    let size =
        |value: usize| u32::try_from(value).map_err(|_| TrainError::Input(format!("{value} is too wide a layer")));
    tensors(settings, size(dataset.features)?, size(dataset.classes)?)
}

/// Widths of a network of which no tensor is too large.
fn tensors(settings: &Settings, features: u32, classes: u32) -> Result<Vec<u32>> {
    let widths = mlp::widths(features, settings.hidden, settings.layers, classes);
    const MOST: u64 = 1 << 31;
    // With the padding that a row may have.
    let padded = |width: u32| match settings.arithmetic() {
        Ok(arithmetic) if arithmetic.is_plain() => u64::from(width),
        _ => u64::from(width).next_multiple_of(8),
    };
    let largest = widths.windows(2).map(|pair| padded(pair[0]) * u64::from(pair[1])).max().unwrap_or(0);
    let rows = u64::from(settings.batch) * padded(widths.iter().copied().max().unwrap_or(0));
    if largest >= MOST || rows >= MOST {
        return Err(TrainError::Input(
            "a tensor would have more than 2^31 values: lower --hidden or --batch".to_owned(),
        ));
    }
    Ok(widths)
}

/// Checks the host memory of a simulated run before it allocates any.
pub(crate) fn host_memory(least: u64, room: Option<HostRoom>) -> Result<()> {
    let Some(room) = room.filter(|room| room.bytes < least) else { return Ok(()) };
    Err(TrainError::Input(format!(
        "this network on the simulated GPU needs at least {} of this machine's memory, and there are {room}: lower --hidden, \
         --layers or --batch, or use a GPU",
        Bytes(least)
    )))
}

/// Checks the host memory that a run pins before it pins any: pinned memory is never swapped out.
pub(crate) fn pinned_memory(bytes: u64, room: Option<HostRoom>) -> Result<()> {
    let Some(room) = room.filter(|room| room.bytes < bytes) else { return Ok(()) };
    Err(TrainError::Input(format!(
        "--offload optimizer pins {} of this machine's memory, and there are {room}: lower --hidden or --layers, or leave it out",
        Bytes(bytes)
    )))
}

/// Checks the settings of pinned memory.
fn pinning(settings: &Settings) -> Result<()> {
    let problem = if settings.pin.is_some() && settings.pin_mode().is_none() {
        "--pin is for host memory, and nothing pins any: add --loader pinned or --offload optimizer, or leave it out"
    } else if settings.offload.is_none() {
        return Ok(());
    } else if !settings.arithmetic()?.has_master() {
        "--offload optimizer moves the f32 master weights, the only state that SGD has: add --dtype bf16 or f16, with --weights master"
    } else if settings.launch == LaunchMode::Graph {
        "--offload optimizer copies state in each step; use --launch eager"
    } else {
        return Ok(());
    };
    Err(TrainError::Input(problem.to_owned()))
}

/// Checks the settings of a step's launch.
fn launch(settings: &Settings) -> Result<()> {
    let Settings { launch, loader, sync, graph_steps, .. } = *settings;
    graph_steps_of(graph_steps, launch, sync)?;
    if launch == LaunchMode::Eager {
        return Ok(());
    }
    let problem = if loader != LoaderMode::Resident {
        "--launch graph needs --loader resident: it picks its batches on the device".to_owned()
    } else if sync == SyncMode::Op {
        "--launch graph has no launch for each operation: use --sync step instead of op".to_owned()
    } else if !serves_captures(&settings.allocator) {
        let all = backends::all().into_iter().map(Selection::of);
        let able: Vec<&str> = all.filter(serves_captures).map(|one| one.name()).collect();
        let name = settings.allocator.name();
        format!(
            "--launch graph needs an allocator that serves captures, which '{name}' does not: use {}",
            able.join(", ")
        )
    } else {
        return Ok(());
    };
    Err(TrainError::Input(problem))
}

fn serves_captures(allocator: &Selection) -> bool {
    allocator.capabilities().graph_capture != GraphCapture::Refused
}

fn graph_steps_of(steps: Option<u32>, launch: LaunchMode, sync: SyncMode) -> Result<()> {
    let Some(steps) = steps else { return Ok(()) };
    let problem = if !GRAPH_STEPS.contains(&steps) {
        format!("--graph-steps lies between {} and {}, found {steps}", GRAPH_STEPS.start(), GRAPH_STEPS.end())
    } else if launch != LaunchMode::Graph {
        "--graph-steps is for --launch graph: add that, or leave it out".to_owned()
    } else if sync == SyncMode::Step && steps > 1 {
        format!("--sync step waits for each step: use --graph-steps 1 instead of {steps}, or --sync never")
    } else {
        return Ok(());
    };
    Err(TrainError::Input(problem))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::Backend;
    use vramlab::backends::{Capabilities, naive};

    #[test]
    fn state_on_the_host_is_for_one_gpu_with_room_for_it() {
        use crate::arithmetic::Dtype;
        use crate::settings::OffloadMode;
        use vramlab::device::sim::HostBound;
        let offload = Some(OffloadMode::Optimizer);
        let offloaded = Settings { offload, dtype: Dtype::Bf16, ..Settings::default() };
        settings(&offloaded).unwrap();
        let error = ranks(&offloaded, 2).unwrap_err();
        assert!(error.to_string().contains("--offload optimizer is for one GPU"), "{error}");
        let room = HostRoom { bytes: 1 << 20, bound: HostBound::ControlGroup };
        pinned_memory(1 << 20, Some(room)).unwrap();
        let error = pinned_memory(1 << 30, Some(room)).unwrap_err();
        assert_eq!(error.exit_code(), terminal::exit::BAD_INPUT);
        assert!(error.to_string().contains("1 GiB") && error.to_string().contains("control group"), "{error}");
    }

    #[test]
    fn a_graph_needs_an_allocator_that_serves_captures() {
        static EAGER: Backend = Backend {
            name: "eager-only",
            capabilities: Capabilities { graph_capture: GraphCapture::Refused, ..naive::BACKEND.capabilities },
            ..naive::BACKEND
        };
        for (allocator, refused) in [(&naive::BACKEND, false), (&EAGER, true)] {
            let settings = Settings { launch: LaunchMode::Graph, allocator: allocator.into(), ..Settings::default() };
            let message = launch(&settings).err().map(|error| error.to_string());
            let said =
                message.as_ref().is_some_and(|text| text.contains("'eager-only'") && text.contains("use naive, "));
            assert_eq!((message.is_some(), said), (refused, refused), "{message:?}");
            launch(&Settings { launch: LaunchMode::Eager, ..settings }).unwrap();
        }
    }
}
