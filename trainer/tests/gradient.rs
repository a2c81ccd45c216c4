//! The whole gradient of a small network against finite differences of an independent forward pass in f64.

use chacha20::ChaCha8Rng;
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use trainer::arithmetic::{Arithmetic, Dtype, FuseMode, WeightsMode};
use trainer::device::Device;
use trainer::mlp::{Batch, Linear, LossSlot, Mlp};
use trainer::settings::{DeviceChoice, InitMode, SyncMode};
use trainer::tensor::{Context, Matrix};
use vramlab::backends::{self, caching};
use vramlab::instruments::NvtxMode;
use vramlab::instruments::nvtx::Ranges;
use vramlab::{Backend, DeviceName, Memory, Selection};

const ROWS: usize = 6;
/// Step of the central differences. Their error is about STEP², and that of the f64 losses 1e-16 / STEP.
const STEP: f64 = 1e-5;
/// Every element may be off by this much of its tensor's norm: a few roundings of f32 (6e-8 each). Here it is 1e-7
/// at worst; another order of the sums in another processor's matrix product may add to it.
const TOLERANCE: f64 = 1e-6;
/// No hidden value comes closer to ReLU's kink than this, so no step of the differences crosses it.
const FROM_KINK: f64 = 20.0 * STEP;

/// A layer as the reference sees it: weights `[outputs, inputs]` row by row, then biases.
#[derive(Clone)]
struct Layer {
    weight: Vec<f64>,
    bias: Vec<f64>,
}

/// Logits of one row, and the smallest distance of a hidden value from zero.
fn logits(layers: &[Layer], row: &[f64]) -> (Vec<f64>, f64) {
    let (mut values, mut distance) = (row.to_vec(), f64::INFINITY);
    for (number, layer) in layers.iter().enumerate() {
        let outputs = layer.bias.iter().zip(layer.weight.chunks(values.len()));
        let mut next: Vec<f64> = outputs
            .map(|(bias, weights)| bias + weights.iter().zip(&values).map(|(w, x)| w * x).sum::<f64>())
            .collect();
        if number + 1 < layers.len() {
            for value in &mut next {
                distance = distance.min(value.abs());
                *value = value.max(0.0);
            }
        }
        values = next;
    }
    (values, distance)
}

/// Mean cross-entropy over the rows.
fn loss(layers: &[Layer], inputs: &[f64], labels: &[u32]) -> f64 {
    let width = inputs.len() / labels.len();
    let of_row = |(row, label): (&[f64], &u32)| {
        let (logits, _) = logits(layers, row);
        logits.iter().map(|logit| logit.exp()).sum::<f64>().ln() - logits[*label as usize]
    };
    inputs.chunks(width).zip(labels).map(of_row).sum::<f64>() / labels.len() as f64
}

fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| Distribution::<f32>::sample(&StandardNormal, &mut rng)).collect()
}

struct Setup {
    context: Context,
    model: Mlp,
    inputs: Vec<f32>,
    labels: Vec<u32>,
}

impl Setup {
    fn new(widths: &[u32], kind: &'static Backend, arithmetic: Arithmetic) -> Self {
        let device = Device::open(
            &DeviceChoice::Named(DeviceName::Sim(None)),
            SyncMode::Never,
            Ranges::new(NvtxMode::Off),
            None,
        )
        .unwrap();
        let allocator = Selection::of(kind).build(&device.driver()).unwrap();
        let context = Context { memory: Memory::new(allocator), device };
        let model = Mlp::new(&context, widths, InitMode::Kaiming, 11, arithmetic, &[ROWS as u32]).unwrap();
        // Biases start at zero, where a gradient that forgets them would look right.
        for (layer, seed) in model.layers.iter().zip(100..) {
            context.write_values(&layer.bias, &normal(seed, layer.bias.cols as usize)).unwrap();
        }
        // Inputs are rounded to the element type.
        let inputs: Vec<f32> = normal(7, ROWS * widths[0] as usize);
        let inputs = inputs.into_iter().map(|value| arithmetic.element().round(value)).collect();
        // Classes that occur twice, once and never.
        let labels = vec![0, 3, 1, 3, 2, 0];
        Self { context, model, inputs, labels }
    }

    fn batch(&self) -> Batch {
        let (arithmetic, width) = (self.model.arithmetic(), (self.inputs.len() / ROWS) as u32);
        let pitch = arithmetic.pitch(width);
        let inputs = self.context.pitched(arithmetic.element(), ROWS as u32, width, pitch).unwrap();
        self.context.write_values(&inputs, &self.inputs).unwrap();
        Batch { inputs, labels: self.context.upload(&self.labels).unwrap() }
    }

    fn read(&self, matrix: &Matrix) -> Vec<f32> {
        self.context.read_values(matrix).unwrap()
    }

    fn layers(&self) -> Vec<Layer> {
        let wide = |matrix: &Matrix| self.read(matrix).into_iter().map(f64::from).collect();
        let layers = self.model.layers.iter();
        layers.map(|layer| Layer { weight: wide(&layer.weight), bias: wide(&layer.bias) }).collect()
    }

    fn inputs(&self) -> Vec<f64> {
        self.inputs.iter().copied().map(f64::from).collect()
    }
}

/// Central differences of the loss over the parameters that `pick` gives, all of one tensor.
fn differences(setup: &Setup, pick: impl Fn(&mut [Layer]) -> &mut Vec<f64>) -> Vec<f64> {
    let (mut layers, inputs) = (setup.layers(), setup.inputs());
    let count = pick(&mut layers).len();
    let mut at = |index: usize, change: f64| {
        let kept = pick(&mut layers)[index];
        pick(&mut layers)[index] = kept + change;
        let loss = loss(&layers, &inputs, &setup.labels);
        pick(&mut layers)[index] = kept;
        loss
    };
    (0..count).map(|index| (at(index, STEP) - at(index, -STEP)) / (2.0 * STEP)).collect()
}

/// Largest error of an element, in norms of the tensor.
fn worst(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let norm = expected.iter().map(|value| value * value).sum::<f64>().sqrt();
    assert!(norm > 1e-3, "a gradient that vanishes proves nothing");
    actual.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max) / norm
}

/// Maximum errors: of the loss relative to itself, and of each element of a gradient in norms of its tensor.
#[derive(Clone, Copy)]
struct Bounds {
    loss: f64,
    gradient: f64,
}

const F32: Bounds = Bounds { loss: 1e-6, gradient: TOLERANCE };

/// Some roundings of activations and of their gradients: to 11 bits of significand in tf32 and f16 (2⁻¹² each), to 8 in bf16
/// (2⁻⁹ each).
fn bounds(dtype: Dtype) -> Bounds {
    match dtype {
        Dtype::F32 => F32,
        Dtype::Tf32 | Dtype::F16 => Bounds { loss: 1e-3, gradient: 2e-3 },
        Dtype::Bf16 => Bounds { loss: 8e-3, gradient: 1.6e-2 },
    }
}

fn check(widths: &[u32], kind: &'static Backend, arithmetic: Arithmetic) {
    let setup = Setup::new(widths, kind, arithmetic);
    let (layers, inputs) = (setup.layers(), setup.inputs());
    let distance = inputs.chunks(widths[0] as usize).map(|row| logits(&layers, row).1).fold(f64::INFINITY, f64::min);
    assert!(distance > FROM_KINK, "a hidden value is {distance} from ReLU's kink: choose another seed");

    let bounds = bounds(arithmetic.dtype);
    let slot = setup.context.allocate::<f32>(1).unwrap();
    let gradients = setup.model.gradients(&setup.context, setup.batch(), LossSlot::at(slot.addr().get())).unwrap();
    let actual = setup.context.read::<f32>(&slot, 1).unwrap()[0];
    let expected = loss(&layers, &inputs, &setup.labels);
    assert!((f64::from(actual) / expected - 1.0).abs() < bounds.loss, "loss {actual} instead of {expected}");

    assert_eq!(gradients.len(), widths.len() - 1);
    for (number, gradient) in gradients.iter().enumerate() {
        assert_eq!((gradient.weight.rows, gradient.weight.cols), (widths[number + 1], widths[number]));
        let unscaled = |matrix: &Matrix| -> Vec<f32> {
            setup.read(matrix).into_iter().map(|value| value / arithmetic.loss_scale).collect()
        };
        let weight = worst(&unscaled(&gradient.weight), &differences(&setup, |layers| &mut layers[number].weight));
        let bias = worst(&unscaled(&gradient.bias), &differences(&setup, |layers| &mut layers[number].bias));
        println!("{widths:?} {kind} {arithmetic:?}, layer {number}: weights off by {weight:.1e}, biases by {bias:.1e}");
        assert!(weight < bounds.gradient && bias < bounds.gradient, "layer {number}: {weight} and {bias} of the norm");
    }
}

const DTYPES: [Dtype; 4] = [Dtype::F32, Dtype::Tf32, Dtype::Bf16, Dtype::F16];

/// Every type with its product.
fn usual() -> [Arithmetic; 4] {
    DTYPES.map(Arithmetic::of)
}

#[test]
fn gradients_are_those_of_finite_differences() {
    for widths in [&[7, 5][..], &[7, 9, 5], &[7, 9, 8, 5], &[3, 6, 6, 6, 4]] {
        check(widths, &caching::BACKEND, Arithmetic::default());
    }
}

#[test]
fn gradients_of_every_type_are_those_of_finite_differences() {
    for widths in [&[7, 5][..], &[7, 9, 5], &[7, 9, 8, 5]] {
        for arithmetic in usual() {
            for fuse in [FuseMode::None, FuseMode::Epilogue] {
                check(widths, &caching::BACKEND, Arithmetic { fuse, ..arithmetic });
            }
        }
    }
}

#[test]
fn gradients_are_the_same_under_every_allocator() {
    for kind in backends::all() {
        check(&[7, 9, 8, 5], kind, Arithmetic::default());
    }
}

/// The gradient that an update is made of is never written. What it did to the weights must be the gradient all the same,
/// of the weights as they were before the step in every layer.
#[test]
fn a_fused_update_goes_against_the_gradient() {
    let widths = [7, 9, 8, 5];
    for arithmetic in usual() {
        let (arithmetic, dtype) = (Arithmetic { fuse: FuseMode::Update, ..arithmetic }, arithmetic.dtype);
        let setup = Setup::new(&widths, &caching::BACKEND, arithmetic);
        let slot = setup.context.allocate::<f32>(1).unwrap();
        let stepped =
            |layer: &Linear| [setup.read(layer.master.as_ref().unwrap_or(&layer.weight)), setup.read(&layer.bias)];
        let before: Vec<_> = setup.model.layers.iter().map(stepped).collect();
        let expected: Vec<_> = (0..widths.len() - 1)
            .map(|number| {
                let weight = differences(&setup, |layers| &mut layers[number].weight);
                [weight, differences(&setup, |layers| &mut layers[number].bias)]
            })
            .collect();
        let rate = 0.5f32;
        setup.model.step(&setup.context, setup.batch(), LossSlot::at(slot.addr().get()), rate).unwrap();
        for (number, layer) in setup.model.layers.iter().enumerate() {
            for ((before, after), expected) in before[number].iter().zip(stepped(layer)).zip(&expected[number]) {
                let step = before.iter().zip(after).map(|(before, after)| (before - after) / rate).collect::<Vec<_>>();
                let off = worst(&step, expected);
                println!("{dtype:?}, layer {number}: off by {off:.1e}");
                assert!(off < bounds(dtype).gradient, "{dtype:?}, layer {number}: {off} of the norm");
            }
            if let Some(master) = &layer.master {
                let rounded = setup.read(master).into_iter().map(|value| layer.weight.element.round(value));
                assert_eq!(rounded.collect::<Vec<_>>(), setup.read(&layer.weight), "{dtype:?}, layer {number}");
            }
        }
    }
}

#[test]
fn a_step_goes_against_the_gradient_to_the_bit() {
    for kind in backends::all() {
        for rate in [0.1f32, 0.37, 1e-3] {
            for arithmetic in usual() {
                check_step(kind, rate, arithmetic);
                check_step(kind, rate, Arithmetic { fuse: FuseMode::Epilogue, ..arithmetic });
            }
            for dtype in [Dtype::Bf16, Dtype::F16] {
                check_step(kind, rate, Arithmetic { weights: WeightsMode::Half, ..Arithmetic::of(dtype) });
            }
        }
    }
}

fn check_step(kind: &'static Backend, rate: f32, arithmetic: Arithmetic) {
    let setup = Setup::new(&[7, 9, 8, 5], kind, arithmetic);
    let slot = setup.context.allocate::<f32>(1).unwrap();
    let gradients = setup.model.gradients(&setup.context, setup.batch(), LossSlot::at(slot.addr().get())).unwrap();
    // The loss scales are powers of two, so this is exact.
    let scaled = rate / arithmetic.loss_scale;
    let mut expected = Vec::new();
    for (layer, gradient) in setup.model.layers.iter().zip(&gradients) {
        let stepped = layer.master.as_ref().unwrap_or(&layer.weight);
        for (weights, gradient) in [(stepped, &gradient.weight), (&layer.bias, &gradient.bias)] {
            let pairs = setup.read(weights).into_iter().zip(setup.read(gradient));
            let step = |(weight, gradient): (f32, f32)| (-scaled).mul_add(gradient, weight);
            expected.push(pairs.map(step).collect::<Vec<f32>>());
        }
    }
    setup.model.update(&setup.context, gradients, rate).unwrap();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
    let layers = setup.model.layers.iter().flat_map(|layer| [(&layer.weight, &layer.master), (&layer.bias, &None)]);
    for ((matrix, master), expected) in layers.zip(expected) {
        let rounded = expected.iter().map(|value| matrix.element.round(*value)).collect();
        assert_eq!(bits(setup.read(matrix)), bits(rounded), "{kind}, rate {rate}, {arithmetic:?}");
        if let Some(master) = master {
            assert_eq!(bits(setup.read(master)), bits(expected), "{kind}, rate {rate}, {arithmetic:?}");
        }
    }
}

#[test]
fn a_small_step_lowers_the_loss_as_the_gradient_says() {
    let setup = Setup::new(&[7, 9, 8, 5], &caching::BACKEND, Arithmetic::default());
    let slot = setup.context.allocate::<f32>(1).unwrap();
    let before = loss(&setup.layers(), &setup.inputs(), &setup.labels);
    let gradients = setup.model.gradients(&setup.context, setup.batch(), LossSlot::at(slot.addr().get())).unwrap();
    let squared: f64 = gradients
        .iter()
        .flat_map(|gradient| [&gradient.weight, &gradient.bias])
        .flat_map(|matrix| setup.read(matrix))
        .map(|value| f64::from(value).powi(2))
        .sum();
    let rate = 1e-4;
    setup.model.update(&setup.context, gradients, rate).unwrap();
    let after = loss(&setup.layers(), &setup.inputs(), &setup.labels);
    let predicted = f64::from(rate) * squared;
    assert!(((before - after) / predicted - 1.0).abs() < 0.02, "{} instead of {predicted}", before - after);
}

#[test]
fn evaluation_agrees_with_the_reference() {
    for arithmetic in usual() {
        for fuse in [FuseMode::None, FuseMode::Epilogue, FuseMode::Update] {
            check_evaluation(Arithmetic { fuse, ..arithmetic });
        }
    }
}

fn check_evaluation(arithmetic: Arithmetic) {
    let setup = Setup::new(&[7, 9, 8, 5], &caching::BACKEND, arithmetic);
    let (losses, correct) = (setup.context.allocate::<f32>(1).unwrap(), setup.context.allocate::<u32>(1).unwrap());
    setup.model.evaluate(&setup.context, setup.batch(), losses.addr().get(), correct.addr().get()).unwrap();
    let (layers, inputs) = (setup.layers(), setup.inputs());
    let actual = f64::from(setup.context.read::<f32>(&losses, 1).unwrap()[0]);
    let bound = bounds(arithmetic.dtype).loss;
    assert!((actual / loss(&layers, &inputs, &setup.labels) - 1.0).abs() < bound, "{arithmetic:?}");
    let right = |(row, label): &(&[f64], &u32)| {
        let (logits, _) = logits(&layers, row);
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        best == **label as usize
    };
    let expected = inputs.chunks(7).zip(&setup.labels).filter(right).count();
    assert_eq!(setup.context.read::<u32>(&correct, 1).unwrap(), [expected as u32], "{arithmetic:?}");
}
