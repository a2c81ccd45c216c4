//! The operations on random data, with results computed in `f64` and the tolerance of each, stated here and only here.
//! The crate's documentation repeats them.

mod gather;
mod layers;
mod outputs;

use std::sync::OnceLock;

use bytemuck::Pod;
use kernels::{GemmAlgorithm, GemmLayout, Operation};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub(crate) use gather::{gather_labels, gather_rows_f32, gather_rows_u8};
pub(crate) use layers::{add_bias, bias_gradient, fill, gemm, relu, relu_backward, sgd};
pub(crate) use outputs::{argmax, count_correct, cross_entropy_loss, mean_loss, softmax_cross_entropy};

use super::{Buffer, Case, Expected, POISON};

/// How far a sum of `count` products may be from the exact one, given the sum of their magnitudes. Rounding errors of
/// random sign grow as the square root; the factor leaves room for bad luck.
fn sum_tolerance(count: u32, magnitude: f64) -> f64 {
    4.0 * f64::from(count).sqrt() * f64::from(f32::EPSILON) * magnitude
}

/// Losses.
fn loss_tolerance(loss: f64) -> f64 {
    2e-6 * (1.0 + loss.abs())
}

/// Gradients of the logits.
fn gradient_tolerance(scale: f32) -> f64 {
    2e-6 * f64::from(scale.abs())
}

/// Random data of a case.
struct Data(ChaCha8Rng);

impl Data {
    fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    fn floats(&mut self, count: u64, range: f32) -> Vec<f32> {
        (0..count).map(|_| self.0.random_range(-range..range)).collect()
    }

    fn below(&mut self, count: u64, limit: u32) -> Vec<u32> {
        (0..count).map(|_| self.0.random_range(0..limit)).collect()
    }

    fn bytes(&mut self, count: u64) -> Vec<u8> {
        (0..count).map(|_| self.0.random_range(0..=u8::MAX)).collect()
    }
}

fn input<T: Pod>(values: &[T]) -> Buffer {
    Buffer { before: bytemuck::cast_slice(values).to_vec(), after: Expected::Unchanged }
}

/// An output of 4-byte elements, poisoned beforehand.
fn exact<T: Pod>(values: &[T]) -> Buffer {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    Buffer { before: vec![POISON; bytes.len()], after: Expected::Exact(bytes.to_vec()) }
}

fn within(values: Vec<(f64, f64)>) -> Buffer {
    Buffer { before: vec![POISON; values.len() * size_of::<f32>()], after: Expected::Within(values) }
}

fn case<O: Operation + 'static>(
    shape: &str,
    buffers: Vec<Buffer>,
    build: impl Fn(&[u64]) -> O + Send + Sync + 'static,
) -> Case {
    let name = build(&vec![0; buffers.len()]).name();
    Case { label: format!("{name} {shape}"), buffers, build: Box::new(move |at| Box::new(build(at))) }
}

fn area(rows: u32, cols: u32) -> u64 {
    u64::from(rows) * u64::from(cols)
}

pub(crate) const LAYOUTS: [GemmLayout; 3] = [GemmLayout::NN, GemmLayout::NT, GemmLayout::TN];
pub(crate) const ALGORITHMS: [GemmAlgorithm; 2] = [GemmAlgorithm::Naive, GemmAlgorithm::Tiled];

/// m, n, k: nothing but ones, thin, fat, multiples of tiles and one off them; the last two take the `tiled` kernel.
const PRODUCTS: [[u32; 3]; 10] = [
    [1, 1, 1],
    [61, 784, 10],
    [33, 65, 17],
    [64, 10, 784],
    [10, 784, 64],
    [16, 32, 128],
    [17, 33, 129],
    [64, 784, 784],
    [784, 784, 33],
    [641, 643, 37],
];
const MATRICES: [[u32; 2]; 6] = [[1, 1], [1, 784], [61, 1], [33, 10], [64, 785], [1025, 33]];
const CLASSES: [[u32; 2]; 6] = [[1, 1], [61, 10], [64, 3], [1, 31], [33, 33], [1027, 100]];
const LENGTHS: [u64; 6] = [1, 31, 255, 256, 257, 50_177];

/// Every operation on shapes that are no multiple of anything. Made once, since the models take seconds.
pub(crate) fn all() -> &'static [Case] {
    static CASES: OnceLock<Vec<Case>> = OnceLock::new();
    CASES.get_or_init(make_all)
}

fn make_all() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in PRODUCTS {
        for layout in LAYOUTS {
            cases.extend(ALGORITHMS.map(|algorithm| gemm(layout, algorithm, shape, 1)));
        }
    }
    for [rows, cols] in MATRICES {
        cases.push(add_bias(rows, cols, 2));
        cases.push(bias_gradient(rows, cols, 3));
        cases.push(gather_rows_u8(rows, cols, 7, 4));
        cases.push(gather_rows_f32(rows, cols, 7, 5));
        cases.push(gather_labels(rows, 257, 6));
    }
    for [rows, classes] in CLASSES {
        for range in [1.0, 10.0, 1000.0] {
            cases.push(softmax_cross_entropy(rows, classes, range, 7));
            cases.push(cross_entropy_loss(rows, classes, range, 8));
        }
        cases.push(argmax(rows, classes, 9));
        cases.push(count_correct(rows, classes, 10));
        cases.push(mean_loss(rows, 11));
    }
    for len in LENGTHS {
        cases.push(relu(len, 12));
        cases.push(relu_backward(len, 13));
        cases.push(sgd(len, 14));
        cases.push(fill(len));
    }
    cases
}
