//! Types, loss scales and fusion: what they may change in the losses, in memory and in the record, and what not.

use crate::common::{arms, digits, iris, train};
use kernels::{LinearBackwardInput, LinearForward, LinearWeightGradient};
use trainer::Settings;
use trainer::arithmetic::{Arithmetic, Dtype, FuseMode, WeightsMode};
use trainer::mlp::LayerLaunches;
use trainer::settings::{LaunchMode, LoaderMode, SyncMode};
use vramlab::backends::naive;
use vramlab::histories::formats::Export;

const DTYPES: [Dtype; 4] = [Dtype::F32, Dtype::Tf32, Dtype::Bf16, Dtype::F16];
const FUSIONS: [FuseMode; 3] = [FuseMode::None, FuseMode::Epilogue, FuseMode::Update];

/// Every type with every kind of weights that it may have.
fn types(base: &Settings) -> Vec<(String, Settings)> {
    let mut out = Vec::new();
    for dtype in DTYPES {
        for weights in [WeightsMode::Master, WeightsMode::Half] {
            let settings = Settings { dtype, weights, ..base.clone() };
            if settings.arithmetic().is_ok() {
                out.push((format!("{dtype:?} {weights:?}"), settings));
            }
        }
    }
    assert_eq!(out.len(), 6);
    out
}

/// Types with everything that may be fused.
fn combinations(base: &Settings) -> Vec<(String, Settings)> {
    let fused = |(name, settings): (String, Settings)| {
        FUSIONS.map(|fuse| (format!("{name} {fuse:?}"), Settings { fuse, ..settings.clone() }))
    };
    types(base).into_iter().flat_map(fused).collect()
}

/// The losses of a run as text, which stands for their bits.
fn losses(settings: &Settings) -> Vec<String> {
    let losses = train(settings).finished().column("loss");
    assert!(losses.iter().all(|loss| loss.parse::<f32>().unwrap().is_finite()), "{losses:?}");
    losses
}

fn numbers(settings: &Settings) -> Vec<f64> {
    losses(settings).iter().map(|loss| loss.parse().unwrap()).collect()
}

/// Greatest distance of two runs' losses, relative to the first's.
fn apart(first: &[f64], second: &[f64]) -> f64 {
    assert_eq!(first.len(), second.len());
    first.iter().zip(second).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max)
}

#[test]
fn allocators_do_not_change_the_losses() {
    for (name, settings) in combinations(&iris()) {
        let mut expected: Option<Vec<String>> = None;
        for (arm, settings) in arms(&settings) {
            let losses = losses(&settings);
            assert_eq!(losses.len(), 10, "{name}, {arm}");
            assert!(
                losses.windows(2).all(|pair| pair[0] != pair[1]),
                "{name}, {arm}: the loss should move: {losses:?}"
            );
            assert_eq!(&losses, expected.get_or_insert_with(|| losses.clone()), "{name}, {arm}");
        }
    }
}

#[test]
fn loaders_and_waiting_do_not_change_the_losses() {
    for (name, settings) in combinations(&iris()) {
        let expected = losses(&settings);
        for loader in [LoaderMode::Copy, LoaderMode::Pinned] {
            assert_eq!(losses(&Settings { loader, ..settings.clone() }), expected, "{name}, {loader:?}");
        }
        for sync in [SyncMode::Step, SyncMode::Op] {
            assert_eq!(losses(&Settings { sync, ..settings.clone() }), expected, "{name}, {sync:?}");
        }
    }
}

#[test]
fn the_checker_finds_nothing_and_changes_nothing() {
    for (name, settings) in combinations(&iris()) {
        for loader in [LoaderMode::Copy, LoaderMode::Resident] {
            let settings = Settings { loader, ..settings.clone() };
            let run = train(&Settings { check: true, ..settings.clone() }).finished();
            let report = run.outcome.summary.check.as_ref().unwrap();
            assert!(report.is_clean(), "{name}, {loader:?}: {report:?}");
            // It fills freed memory, so a value that is read before it was written shows.
            assert_eq!(run.column("loss"), losses(&settings), "{name}, {loader:?}");
        }
    }
}

/// Fusion may change a rounding to the type after the product, and the order of f32 sums. A rounding is 2⁻²⁴ of a
/// value in f32, 2⁻⁹ in bf16, 2⁻¹² in f16; tf32 rounds operands only, which are the same. The bounds are relative, over 20
/// steps of a rate at which differences do not grow.
#[test]
fn fusion_changes_the_losses_by_roundings_only() {
    for (name, settings) in types(&Settings { steps: Some(20), learning_rate: 0.01, ..digits() }) {
        let bound = match settings.dtype {
            Dtype::F32 => 1e-5,
            Dtype::Tf32 => 1e-4,
            Dtype::Bf16 => 2e-3,
            Dtype::F16 => 5e-4,
        };
        let plain = numbers(&settings);
        assert!(plain[19] < 0.98 * plain[0], "{name}: it should train: {plain:?}");
        for fuse in [FuseMode::Epilogue, FuseMode::Update] {
            let apart = apart(&plain, &numbers(&Settings { fuse, ..settings.clone() }));
            println!("{name} {fuse:?}: {apart:.1e} apart");
            assert!(apart < bound, "{name} {fuse:?}: {apart:.1e}, bound {bound:.0e}");
        }
    }
}

/// Maximum difference of the types from f32: the first loss precedes any update, so it has only the roundings of one
/// forward pass.
#[test]
fn the_first_loss_is_that_of_f32_to_rounding() {
    let base = Settings { steps: Some(1), ..digits() };
    let expected = numbers(&base)[0];
    for (name, settings) in combinations(&base) {
        let bound = match settings.dtype {
            Dtype::F32 => 1e-6,
            Dtype::Tf32 | Dtype::F16 => 1e-3,
            Dtype::Bf16 => 1e-2,
        };
        let actual = numbers(&settings)[0];
        println!("{name}: {:.1e}", (actual / expected - 1.0).abs());
        assert!((actual / expected - 1.0).abs() < bound, "{name}: {actual} instead of {expected}");
        if settings.dtype != Dtype::F32 {
            assert_ne!(actual, expected, "{name}: it should not have been computed in f32");
        }
    }
}

#[test]
fn the_loss_scale_leaves_the_steps_alone() {
    // A power of two moves exponents only, unless something underflows or overflows.
    let base = Settings { dtype: Dtype::Bf16, ..iris() };
    for fuse in FUSIONS {
        let base = Settings { fuse, ..base.clone() };
        let expected = losses(&base);
        for scale in [0.25, 1024.0] {
            assert_eq!(losses(&Settings { loss_scale: Some(scale), ..base.clone() }), expected, "{fuse:?}, {scale}");
        }
    }
    // In f16 a gradient below 2⁻²⁵ is zero, so with too small a scale nothing is learnt.
    let base = Settings { dtype: Dtype::F16, ..iris() };
    let validated = |settings: &Settings| {
        let run = train(settings).finished();
        run.outcome.summary.epochs.iter().map(|epoch| epoch.val_loss).collect::<Vec<f64>>()
    };
    let (usual, vanished) = (validated(&base), validated(&Settings { loss_scale: Some(1e-8), ..base.clone() }));
    assert!(usual[1] < usual[0] && vanished[1] == vanished[0], "{usual:?} {vanished:?}");
}

#[test]
fn halves_learn_the_digits_as_f32_does() {
    let base = Settings { epochs: 3, steps: None, hidden: 64, ..digits() };
    let accuracy = |settings: &Settings| {
        let run = train(settings).finished();
        run.outcome.summary.epochs.last().unwrap().val_accuracy
    };
    let expected = accuracy(&base);
    assert!(expected > 0.95, "{expected}");
    for (name, settings) in types(&Settings { fuse: FuseMode::Update, ..base }) {
        let actual = accuracy(&settings);
        println!("{name}: {actual}, f32 {expected}");
        assert!(actual > expected - 0.01, "{name}: {actual} instead of {expected}");
    }
}

#[test]
fn odd_shapes_train() {
    let odd = Settings { hidden: 61, batch: 61, steps: Some(6), learning_rate: 0.01, ..digits() };
    let shapes = [
        odd,
        Settings { layers: 1, batch: 61, hidden: 61, ..iris() },
        Settings { layers: 12, batch: 61, hidden: 61, learning_rate: 0.01, ..iris() },
        Settings { batch: 1, hidden: 61, steps: Some(40), ..iris() },
        Settings { hidden: 1, layers: 2, batch: 3, ..iris() },
        // The last batch of an epoch has one row.
        Settings { batch: 7, hidden: 9, ..iris() },
    ];
    for shape in shapes {
        for (name, settings) in combinations(&shape) {
            let run = train(&settings).finished();
            let (layers, batch) = (settings.layers, settings.batch);
            assert!(!run.column("loss").is_empty(), "{name}, {layers} layers, batch {batch}");
            let epoch = run.outcome.summary.epochs.last().unwrap();
            assert!(epoch.val_loss.is_finite() && (0.0..=1.0).contains(&epoch.val_accuracy), "{name}");
        }
    }
}

/// The loss takes one block for a small batch, several that share a sum for a larger one, and above 4,096 rows the launches
/// that it has without fusion.
#[test]
fn large_batches_train_too() {
    for dtype in DTYPES {
        for batch in [300, 5000] {
            let base = Settings { batch, hidden: 16, steps: Some(2), learning_rate: 0.01, dtype, ..digits() };
            let plain = train(&base).finished();
            for fuse in [FuseMode::Epilogue, FuseMode::Update] {
                let fused = train(&Settings { fuse, check: true, ..base.clone() }).finished();
                let losses = [&plain, &fused]
                    .map(|run| run.column("loss").iter().map(|loss| loss.parse::<f64>().unwrap()).collect::<Vec<_>>());
                assert!(apart(&losses[0], &losses[1]) < 2e-3, "{dtype:?} {fuse:?}, batch {batch}: {losses:?}");
                let accuracies = [&plain, &fused].map(|run| run.outcome.summary.epochs[0].val_accuracy);
                assert!((accuracies[0] - accuracies[1]).abs() < 0.01, "{dtype:?} {fuse:?}: {accuracies:?}");
            }
        }
    }
}

/// Launches of a network's step that have a workspace. How many do depends on their shapes.
fn workspaces(arithmetic: &Arithmetic, widths: &[u32], rows: u32) -> u64 {
    let fused = arithmetic.fuse != FuseMode::None;
    let mut count = 0;
    for (number, pair) in widths.windows(2).enumerate() {
        let last = number + 2 == widths.len();
        let LayerLaunches { forward, input, gradient, update } =
            LayerLaunches::new(arithmetic, rows, [pair[0], pair[1]]);
        let y_pitch = if last { forward.outputs } else { forward.y_pitch };
        let (bias, relu) = (fused.then_some(0), fused && !last);
        let forward = LinearForward { bias, relu, y_pitch, y_f32: last, ..forward };
        let input = LinearBackwardInput { mask: fused.then_some(0), ..input };
        let gradient = LinearWeightGradient { dbias: fused.then_some(0), ..gradient };
        let steps = arithmetic.fuse == FuseMode::Update;
        let weight = if steps { update.workspace_bytes() } else { gradient.workspace_bytes() };
        let input = if number > 0 { input.workspace_bytes() } else { 0 };
        count += [forward.workspace_bytes(), input, weight].iter().filter(|bytes| **bytes > 0).count() as u64;
    }
    count
}

/// Updates in the gradients' launches, as one graph and on a stream of their own, change no loss of a wide layer.
#[test]
fn updates_of_wide_layers_change_no_loss() {
    let base =
        Settings { hidden: 520, batch: 31, layers: 2, epochs: 1, steps: Some(2), fuse: FuseMode::Update, ..digits() };
    for (name, settings) in types(&base) {
        let stepped = losses(&settings);
        let apart = Settings { fuse: FuseMode::Epilogue, ..settings.clone() };
        assert_eq!(stepped, losses(&apart), "{name}");
        for (launch, streams) in [(LaunchMode::Graph, 1), (LaunchMode::Graph, 2)] {
            let other = Settings { launch, streams, ..settings.clone() };
            assert_eq!(losses(&other), stepped, "{name}, {launch:?}, {streams} streams");
        }
    }
}

#[test]
fn the_record_says_which_kernels_multiply() {
    for (name, settings) in combinations(&iris()) {
        let run = train(&Settings { exports: vec![Export::Perfetto], ..settings.clone() }).finished();
        let calls = std::fs::read_to_string(run.path().join("driver_calls.jsonl")).unwrap();
        let json = run.json();
        let layers: Vec<_> =
            json["products"].as_array().unwrap().iter().map(|layer| layer.as_object().unwrap()).collect();
        assert_eq!(layers.len(), settings.layers as usize, "{name}");
        for (number, layer) in layers.into_iter().enumerate() {
            assert_eq!(layer.contains_key("input"), number > 0, "{name}");
            for kernel in layer.values() {
                assert!(calls.contains(&kernel.to_string()), "{name}: {kernel} was not launched");
            }
        }
    }
}

/// Allocations of a step, counted by hand, from the record.
#[test]
fn fusion_takes_fewer_tensors() {
    let with = |layers, base| {
        let (allocator, loader) = (&naive::BACKEND, LoaderMode::Copy);
        Settings { allocator: allocator.into(), loader, layers, epochs: 1, steps: Some(2), ..base }
    };
    let shapes = [1, 2, 3, 5].map(|layers| (4, 3, with(layers, iris())));
    // Wide enough that blocks share sums.
    for (features, classes, base) in
        shapes.into_iter().chain([(784, 10, with(3, Settings { hidden: 256, ..digits() }))])
    {
        for (name, settings) in combinations(&base) {
            let layers = settings.layers;
            let counts = train(&settings).finished().column("driver_allocations");
            let n = u64::from(layers);
            // Inputs and labels; then in each layer the output, the gradients of its weights and bias, and, but for the
            // first, of its input. Fused: and the gradient of the logits. Else: one more for the bias, one for each ReLU,
            // one for its gradient, and the losses.
            let tensors = match settings.fuse {
                FuseMode::None => 2 + 2 * n + (n - 1) + 2 + 2 * n + 2 * (n - 1),
                FuseMode::Epilogue => 2 + n + 1 + 2 * n + (n - 1),
                FuseMode::Update => 2 + n + 1 + (n - 1),
            };
            let arithmetic: Arithmetic = settings.arithmetic().unwrap();
            let widths: Vec<u32> = trainer::mlp::widths(features, settings.hidden, layers, classes);
            let more = if arithmetic.is_plain() { 0 } else { workspaces(&arithmetic, &widths, settings.batch) };
            println!("{name}, {layers} layers: {tensors} tensors and {more} workspaces");
            assert_eq!(counts, vec![(tensors + more).to_string(); 2], "{name}, {layers} layers");
        }
    }
}

/// Weights that products read with their pitch, master weights, biases.
#[test]
fn weights_are_counted_as_they_are_held() {
    let expected = |width: [u64; 3], bytes: u64, biases: u64| {
        let [first, hidden, classes] = [width[0] * 61, width[1] * 61, width[2] * 3];
        (first + hidden + classes) * bytes + 4 * biases
    };
    for (dtype, weights, fuse, bytes) in [
        (Dtype::F32, WeightsMode::Master, FuseMode::None, expected([4, 61, 61], 4, 125)),
        (Dtype::F32, WeightsMode::Master, FuseMode::Update, expected([4, 64, 64], 4, 125)),
        (Dtype::Tf32, WeightsMode::Master, FuseMode::None, expected([4, 64, 64], 4, 125)),
        (Dtype::Bf16, WeightsMode::Master, FuseMode::None, expected([8, 64, 64], 6, 125)),
        (Dtype::F16, WeightsMode::Half, FuseMode::Update, expected([8, 64, 64], 2, 125)),
    ] {
        let settings = Settings { dtype, weights, fuse, hidden: 61, ..iris() };
        let run = train(&settings).finished();
        assert_eq!(run.outcome.summary.parameter_bytes, bytes, "{dtype:?} {weights:?} {fuse:?}");
        assert_eq!(run.json()["settings"]["dtype"], format!("{dtype:?}").to_lowercase());
    }
}
