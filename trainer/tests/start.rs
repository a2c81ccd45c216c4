//! Start files, read with the format's own reader: they hold what a run begins with, bit by bit.

use crate::common::{digits, iris, train};
use ring::digest::{SHA256, digest};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;
use trainer::arithmetic::{self, FuseMode};
use trainer::data::FileChecksum;
use trainer::mlp::initial_weights;
use trainer::observer::{Observer, Silent};
use trainer::settings::InitMode;
use trainer::{Settings, TrainError, loader, start};

fn write(settings: &Settings, path: &Path) -> trainer::Result<FileChecksum> {
    let observer: Arc<dyn Observer> = Arc::new(Silent);
    start::run(settings, path, &observer)
}

/// A start file in memory.
fn written(settings: &Settings) -> Vec<u8> {
    let test_dir = TempDir::new().unwrap();
    let path = test_dir.path().join("start.safetensors");
    let record = write(settings, &path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let sha256: String = digest(&SHA256, &bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(record.sha256, sha256);
    assert_eq!(std::fs::read_dir(test_dir.path()).unwrap().count(), 1, "nothing but the file is left");
    bytes
}

fn words<T>(bytes: &[u8], read: impl Fn([u8; 4]) -> T) -> Vec<T> {
    bytes.chunks_exact(4).map(|word| read(word.try_into().unwrap())).collect()
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    assert_eq!(tensor.dtype(), Dtype::F32);
    words(tensor.data(), f32::from_le_bytes)
}

fn order(file: &SafeTensors<'_>, epoch: u32) -> Vec<u32> {
    let tensor = file.tensor(&format!("order.{epoch}")).unwrap();
    assert_eq!(tensor.dtype(), Dtype::U32);
    words(tensor.data(), u32::from_le_bytes)
}

fn metadata(bytes: &[u8]) -> HashMap<String, String> {
    SafeTensors::read_metadata(bytes).unwrap().1.metadata().clone().unwrap()
}

#[test]
fn weights_and_orders_are_those_of_the_run() {
    for mode in [InitMode::Normal, InitMode::Xavier, InitMode::Kaiming] {
        let settings = Settings { layers: 3, init: mode, seed: 9, epochs: 3, ..iris() };
        let bytes = written(&settings);
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (layer, (outputs, inputs)) in (0..).zip([(24, 4), (24, 24), (3, 24)]) {
            let name = format!("layers.{layer}.weight");
            assert_eq!(file.tensor(&name).unwrap().shape(), [outputs as usize, inputs as usize]);
            assert_eq!(floats(&file, &name), initial_weights(mode, 9, layer, outputs, inputs));
            assert_eq!(floats(&file, &format!("layers.{layer}.bias")), vec![0.0; outputs as usize]);
        }
        let mut expected = vec![0; 120];
        for epoch in 1..=3 {
            loader::shuffled(9, epoch, &mut expected);
            assert_eq!(order(&file, epoch), expected);
        }
        assert!(file.tensor("order.4").is_err());
        let said = metadata(&bytes);
        let facts =
            [("dataset", "iris"), ("hidden", "24"), ("layers", "3"), ("batch", "25"), ("seed", "9"), ("epochs", "3")];
        for (key, value) in facts {
            assert_eq!(said[key], value, "{key}");
        }
        assert!(!said.contains_key("steps") && !said.contains_key("scale"));
    }
}

#[test]
fn the_first_loss_follows_from_the_file() {
    let test_dir = TempDir::new().unwrap();
    for base in [iris(), digits()] {
        let path = test_dir.path().join(format!("{}.safetensors", base.dataset));
        let finished_run = train(&Settings { save_start: Some(path.clone()), layers: 2, ..base }).finished();
        let bytes = std::fs::read(&path).unwrap();
        let (file, said) = (SafeTensors::deserialize(&bytes).unwrap(), metadata(&bytes));
        assert_eq!(finished_run.json()["start"]["path"], path.to_str().unwrap());
        assert_eq!(finished_run.json()["dataset"]["checksum"], said["checksum"].as_str());

        let number = |key: &str| said[key].parse::<usize>().unwrap();
        let features = number("features");
        let rows: Vec<f64> = match file.tensor("train.features").unwrap() {
            bytes if bytes.dtype() == Dtype::U8 => {
                let (scale, shift) = (said["scale"].parse::<f64>().unwrap(), said["shift"].parse::<f64>().unwrap());
                bytes.data().iter().map(|byte| f64::from(*byte) * scale + shift).collect()
            }
            _ => floats(&file, "train.features").into_iter().map(f64::from).collect(),
        };
        let labels = file.tensor("train.labels").unwrap().data().to_vec();
        let batch = &order(&file, 1)[..number("batch")];
        let total: f64 = batch
            .iter()
            .map(|&row| {
                let row = row as usize;
                let hidden = linear(&file, 0, &rows[row * features..(row + 1) * features]);
                let logits = linear(&file, 1, &hidden.iter().map(|value| value.max(0.0)).collect::<Vec<_>>());
                let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
                sum.ln() - logits[usize::from(labels[row])]
            })
            .sum();
        let (expected, actual) = (total / batch.len() as f64, finished_run.column("loss")[0].parse::<f64>().unwrap());
        assert!((actual / expected - 1.0).abs() < 1e-6, "{}: {actual} instead of {expected}", said["dataset"]);
    }
}

fn linear(file: &SafeTensors<'_>, layer: u32, x: &[f64]) -> Vec<f64> {
    let weight = floats(file, &format!("layers.{layer}.weight"));
    let bias = floats(file, &format!("layers.{layer}.bias"));
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
    weight.chunks_exact(x.len()).zip(bias).map(|(row, bias)| dot(row) + f64::from(bias)).collect()
}

#[test]
fn the_same_settings_give_the_same_file() {
    let test_dir = TempDir::new().unwrap();
    let path = test_dir.path().join("beside.safetensors");
    train(&Settings { save_start: Some(path.clone()), ..iris() }).finished();
    let beside = std::fs::read(&path).unwrap();
    assert_eq!(beside, written(&iris()));
    assert_ne!(beside, written(&Settings { seed: 1, ..iris() }));
    // Weights are f32 there whatever a run makes of them.
    assert_eq!(beside, written(&Settings { dtype: arithmetic::Dtype::F16, fuse: FuseMode::Update, ..iris() }));
}

#[test]
fn there_is_an_order_for_each_epoch_that_is_reached() {
    // 120 rows in batches of 25 are five steps an epoch.
    for (steps, expected) in [(None, 2), (Some(5), 1), (Some(6), 2), (Some(1000), 2)] {
        let bytes = written(&Settings { steps, ..iris() });
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.names().iter().filter(|name| name.starts_with("order.")).count(), expected, "{steps:?}");
    }
}

#[test]
fn a_file_is_replaced_as_a_whole_or_not_at_all() {
    let test_dir = TempDir::new().unwrap();
    let path = test_dir.path().join("start.safetensors");
    std::fs::write(&path, "something else").unwrap();
    write(&iris(), &path).unwrap();
    assert!(SafeTensors::deserialize(&std::fs::read(&path).unwrap()).is_ok());

    for bad in [test_dir.path().to_owned(), test_dir.path().join("nowhere/start.safetensors")] {
        let error = write(&iris(), &bad).unwrap_err();
        assert!(matches!(error, TrainError::Input(_)), "{error}");
        assert!(error.to_string().contains(bad.to_str().unwrap()), "{error}");
    }
    assert_eq!(std::fs::read_dir(test_dir.path()).unwrap().count(), 1, "no part is left");
}
