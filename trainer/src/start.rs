//! Start files: what a run begins with, for programs that are to do the same work.
//!
//! A start file is in the [safetensors] format: eight bytes with the header's length, a JSON header, then raw
//! little-endian values. `analysis/schema.md` lists its tensors and metadata. Other frameworks read it without this
//! program, so a network that is trained in PyTorch from it sees the same weights and the same batches, number by number.
//!
//! [safetensors]: https://github.com/huggingface/safetensors#format

use crate::data::{Dataset, DatasetName, Features, FileChecksum, Hashed, Split, hex};
use crate::error::{Result, TrainError};
use crate::mlp::initial_weights;
use crate::observer::Observer;
use crate::settings::Settings;
use crate::{check, data, loader};
use serde_json::{Map, Value, json};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use vramlab::output::{Existing, OutputError, OutputFile};

/// Version of the tensors and metadata in a start file; raised when one changes its meaning or goes away.
pub const VERSION: u32 = 1;

/// Source of a tensor's values. Weights are drawn and orders shuffled one at a time, when they are written.
#[derive(Clone, Copy, Debug)]
enum Values<'a> {
    Weights { layer: u32, outputs: u32, inputs: u32 },
    Zeros(u32),
    Order { epoch: u32, rows: usize },
    Floats(&'a [f32]),
    Bytes(&'a [u8]),
}

#[derive(Debug)]
struct Tensor<'a> {
    name: String,
    shape: Vec<usize>,
    values: Values<'a>,
}

impl Tensor<'_> {
    fn dtype(&self) -> &'static str {
        match self.values {
            Values::Weights { .. } | Values::Zeros(_) | Values::Floats(_) => "F32",
            Values::Order { .. } => "U32",
            Values::Bytes(_) => "U8",
        }
    }

    fn bytes(&self) -> usize {
        let width = if matches!(self.values, Values::Bytes(_)) { 1 } else { 4 };
        self.shape.iter().product::<usize>() * width
    }

    fn write(&self, settings: &Settings, out: &mut impl Write) -> io::Result<()> {
        let floats = |values: &[f32], out: &mut dyn Write| -> io::Result<()> {
            values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
        };
        match self.values {
            Values::Weights { layer, outputs, inputs } => {
                floats(&initial_weights(settings.init, settings.seed, layer, outputs, inputs), out)
            }
            Values::Zeros(count) => (0..count).try_for_each(|_| out.write_all(&0f32.to_le_bytes())),
            Values::Order { epoch, rows } => {
                let mut order = vec![0; rows];
                loader::shuffled(settings.seed, epoch, &mut order);
                order.iter().try_for_each(|row| out.write_all(&row.to_le_bytes()))
            }
            Values::Floats(values) => floats(values, out),
            Values::Bytes(values) => out.write_all(values),
        }
    }
}

/// Loads the data that the settings ask for and writes the start file of such a run to `path`. Nothing is trained and no
/// device is opened.
///
/// # Errors
/// Errors of invalid settings, of [`begin()`], of loading the data, and of [`write()`].
pub fn run(settings: &Settings, path: &Path, observer: &Arc<dyn Observer>) -> Result<FileChecksum> {
    check::settings(settings)?;
    let file = begin(path)?;
    let dataset = data::load(&settings.data(), observer.as_ref())?;
    observer.dataset(&dataset);
    write(file, settings, &dataset)
}

/// Begins a start file. A regular file that is there is replaced when the new one is whole.
///
/// # Errors
/// [`TrainError::Input`] when the file cannot be created, with the reason from [`vramlab::output`].
pub fn begin(path: &Path) -> Result<OutputFile> {
    OutputFile::create(path, Existing::Replace).map_err(unwritten)
}

/// Writes the start file of a run with these settings on this data. Weights are drawn a layer at a time, so memory is needed
/// for the largest layer only.
///
/// # Errors
/// [`TrainError::Input`] when another program writes it too, [`TrainError::Start`] when it cannot be written to its end; a
/// disk without room for all of it is reported before the first byte.
pub fn write(mut file: OutputFile, settings: &Settings, dataset: &Dataset) -> Result<FileChecksum> {
    let path = file.path().to_owned();
    let tensors = tensors(settings, dataset)?;
    let header = header(settings, dataset, &tensors);
    let values: u64 = tensors.iter().map(|tensor| tensor.bytes() as u64).sum();
    file.expect(header.len() as u64 + values).map_err(unwritten)?;
    // Values come four bytes at a time; they are hashed and written in large pieces.
    let mut out = BufWriter::with_capacity(1 << 20, Hashed::new(&mut file));
    let written = out
        .write_all(&header)
        .and_then(|()| tensors.iter().try_for_each(|tensor| tensor.write(settings, &mut out)))
        .and_then(|()| out.flush());
    // After a failure, discards the buffer, which would otherwise be written on drop.
    let digest = out.into_parts().0.hash.finish();
    written.map_err(|error| unwritten(file.failed(error)))?;
    file.finish().map_err(unwritten)?;
    Ok(FileChecksum { path: path.display().to_string(), sha256: hex(digest.as_ref()) })
}

fn unwritten(error: OutputError) -> TrainError {
    if error.problem.is_refusal() {
        TrainError::Input(format!("no start file can be written: {error}"))
    } else {
        TrainError::Start(error)
    }
}

/// Tensors in the order in which they lie in the file: those of four bytes a value first, so that all are aligned.
fn tensors<'a>(settings: &Settings, dataset: &'a Dataset) -> Result<Vec<Tensor<'a>>> {
    let widths = check::network(settings, dataset)?;
    let mut out = Vec::new();
    for (layer, pair) in (0..).zip(widths.windows(2)) {
        let (inputs, outputs) = (pair[0], pair[1]);
        out.push(Tensor {
            name: format!("layers.{layer}.weight"),
            shape: vec![outputs as usize, inputs as usize],
            values: Values::Weights { layer, outputs, inputs },
        });
        out.push(Tensor {
            name: format!("layers.{layer}.bias"),
            shape: vec![outputs as usize],
            values: Values::Zeros(outputs),
        });
    }
    let rows = dataset.train.rows;
    out.extend((1..=epochs(settings, dataset)).map(|epoch| Tensor {
        name: format!("order.{epoch}"),
        shape: vec![rows],
        values: Values::Order { epoch, rows },
    }));
    // MNIST is large and lies in files that everyone has; the others are made by this program.
    if dataset.name != DatasetName::Mnist {
        let splits = [("train", &dataset.train), ("validation", &dataset.validation)];
        out.extend(splits.iter().map(|(name, split)| features(name, split, dataset.features)));
        out.extend(splits.iter().map(|(name, split)| Tensor {
            name: format!("{name}.labels"),
            shape: vec![split.rows],
            values: Values::Bytes(&split.labels),
        }));
    }
    Ok(out)
}

fn features<'a>(name: &str, split: &'a Split, width: usize) -> Tensor<'a> {
    let values = match &split.features {
        Features::U8 { bytes, .. } => Values::Bytes(bytes),
        Features::F32(values) => Values::Floats(values),
    };
    Tensor { name: format!("{name}.features"), shape: vec![split.rows, width], values }
}

/// Epochs of which the run sees at least one step.
fn epochs(settings: &Settings, dataset: &Dataset) -> u32 {
    let in_epoch = dataset.train.rows.div_ceil(settings.batch as usize) as u64;
    let needed = settings.steps.map_or(u64::MAX, |steps| steps.div_ceil(in_epoch.max(1)));
    settings.epochs.min(u32::try_from(needed).unwrap_or(u32::MAX))
}

/// The header with its length before it, padded to a multiple of eight.
fn header(settings: &Settings, dataset: &Dataset, tensors: &[Tensor<'_>]) -> Vec<u8> {
    let mut entries = Map::new();
    // The format has text only for metadata.
    let mut metadata = Map::new();
    let mut say = |key: &str, value: String| {
        metadata.insert(key.into(), Value::String(value));
    };
    say("format", "trainer start".into());
    say("schema_version", VERSION.to_string());
    say("code_version", env!("CARGO_PKG_VERSION").into());
    say("dataset", dataset.name.to_string());
    say("source", dataset.source.clone());
    say("checksum", dataset.checksum.clone());
    say("files", json!(dataset.files).to_string());
    say("features", dataset.features.to_string());
    say("classes", dataset.classes.to_string());
    say("train_rows", dataset.train.rows.to_string());
    say("validation_rows", dataset.validation.rows.to_string());
    if let Features::U8 { scale, shift, .. } = dataset.train.features {
        say("scale", scale.to_string());
        say("shift", shift.to_string());
    }
    say("hidden", settings.hidden.to_string());
    say("layers", settings.layers.to_string());
    say("batch", settings.batch.to_string());
    say("epochs", settings.epochs.to_string());
    if let Some(steps) = settings.steps {
        say("steps", steps.to_string());
    }
    say("seed", settings.seed.to_string());
    say("init", json!(settings.init).as_str().unwrap_or_default().into());
    entries.insert("__metadata__".into(), Value::Object(metadata));
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes();
        let entry = json!({ "dtype": tensor.dtype(), "shape": tensor.shape, "data_offsets": [at, end] });
        entries.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.append(&mut text);
    out
}
