//! The operations on random data, with results computed in `f64` and their tolerances, which are defined here. The
//! crate's documentation repeats them.

mod gather;
mod layers;
mod linear;
mod outputs;

use std::sync::OnceLock;

use bytemuck::Pod;
use chacha20::ChaCha8Rng;
use kernels::{Choice, Element, GemmLayout, Operation, Precision, Product, Tile};
use rand::{RngExt, SeedableRng};

pub(crate) use gather::{Selection, gather_labels, gather_rows_f32, gather_rows_u8};
pub(crate) use layers::{add_bias, bias_gradient, convert, fill, gemm, relu, relu_backward, sgd};
pub(crate) use linear::{backward_input, choices, forward, update, weight_gradient};
pub(crate) use outputs::{
    ALL_BUT_ADVANCE, EVALUATION, TRAINING, advance_cursor, count_correct, cross_entropy_loss, mean_loss,
    softmax_cross_entropy, softmax_loss,
};

use super::{Buffer, Build, Case, Expected, POISON, encode};

/// Maximum error of a sum of `count` products, given the sum of their magnitudes. Rounding errors of random sign grow
/// as the square root of the count; the factor is a safety margin.
fn sum_tolerance(count: u32, magnitude: f64) -> f64 {
    4.0 * f64::from(count).sqrt() * f64::from(f32::EPSILON) * magnitude
}

/// Maximum error of a loss.
fn loss_tolerance(loss: f64) -> f64 {
    2e-6 * (1.0 + loss.abs())
}

/// Maximum error of a gradient of the logits.
fn gradient_tolerance(scale: f32) -> f64 {
    2e-6 * f64::from(scale.abs())
}

/// Maximum error of storing a value: half a unit in the last of 8 or 11 significant bits; f16 ends at 2⁻²⁴.
fn stored_tolerance(element: Element, value: f64) -> f64 {
    match element {
        Element::F32 => 0.0,
        Element::Bf16 => value.abs() * 2.0_f64.powi(-8),
        Element::F16 => value.abs() * 2.0_f64.powi(-11) + 2.0_f64.powi(-25),
    }
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
    let cols = values.len() as u32;
    within_rows(Element::F32, values, cols, cols)
}

/// The values after storage.
fn rounded(element: Element, values: Vec<f32>) -> Vec<f32> {
    match element {
        Element::F32 => values,
        Element::Bf16 => values.into_iter().map(|value| half::bf16::from_f32(value).to_f32()).collect(),
        Element::F16 => values.into_iter().map(|value| half::f16::from_f32(value).to_f32()).collect(),
    }
}

/// Rows in memory, with poison in the padding between them.
fn input_rows(element: Element, values: &[f32], cols: u32, pitch: u32) -> Buffer {
    let size = element.bytes() as usize;
    let mut before = Vec::new();
    for (row, values) in values.chunks(cols as usize).enumerate() {
        before.resize(row * pitch as usize * size, POISON);
        values.iter().for_each(|&value| encode(element, value, &mut before));
    }
    Buffer { before, after: Expected::Unchanged }
}

/// Output rows, poisoned beforehand.
fn within_rows(element: Element, values: Vec<(f64, f64)>, cols: u32, pitch: u32) -> Buffer {
    let (cols, pitch) = (cols as usize, pitch as usize);
    let elements = (values.len() / cols - 1) * pitch + cols;
    let before = vec![POISON; elements * element.bytes() as usize];
    Buffer { before, after: Expected::Rows { element, cols, pitch, values } }
}

/// An output with the exact bits of these values.
fn exact_rows(element: Element, values: &[f32], cols: u32, pitch: u32) -> Buffer {
    within_rows(element, values.iter().map(|&value| (value.into(), 0.0)).collect(), cols, pitch)
}

fn case<O: Operation + 'static>(
    shape: &str,
    buffers: Vec<Buffer>,
    build: impl Fn(&[u64]) -> O + Send + Sync + 'static,
) -> Case {
    let name = build(&vec![0; buffers.len()]).name();
    let build: Build = Box::new(move |at| Box::new(build(at)));
    Case { label: format!("{name} {shape}"), buffers, selected: Vec::new(), build }
}

fn area(rows: u32, cols: u32) -> u64 {
    u64::from(rows) * u64::from(cols)
}

pub(crate) const LAYOUTS: [GemmLayout; 3] = [GemmLayout::NN, GemmLayout::NT, GemmLayout::TN];

/// m, n, k: all one, thin, wide, multiples of tiles and one more; the last two use the `tiled` kernel.
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
/// Rows, columns, and the additional elements of a pitch.
const MATRICES: [[u32; 3]; 7] =
    [[1, 1, 0], [1, 784, 0], [61, 1, 8], [33, 10, 0], [64, 785, 0], [61, 16, 3], [1025, 33, 8]];
const CLASSES: [[u32; 2]; 6] = [[1, 1], [61, 10], [64, 3], [1, 31], [33, 33], [1027, 100]];
const LENGTHS: [u64; 8] = [1, 8, 31, 255, 256, 257, 2049, 50_177];
/// Rows, inputs, outputs: all one, thin, wide, multiples of tiles and one more, and the shapes of the experiments.
const LAYERS: [[u32; 3]; 11] = [
    [1, 1, 1],
    [1, 33, 1],
    [2, 1, 7],
    [8, 8, 8],
    [61, 785, 10],
    [64, 10, 100],
    [33, 65, 17],
    [130, 128, 64],
    [64, 129, 257],
    [500, 40, 61],
    LARGEST,
];
const LARGEST: [u32; 3] = [64, 784, 784];
/// More than one tile of most kernels in each direction with partial last tiles, and several iterations of every main
/// loop.
const UNEVEN: [u32; 3] = [137, 161, 149];
const ELEMENTS: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];

/// Every operation on shapes that are not a multiple of any tile. Built once, because the models take seconds.
pub(crate) fn all() -> &'static [Case] {
    static CASES: OnceLock<Vec<Case>> = OnceLock::new();
    CASES.get_or_init(|| [without_element_types(), typed(), losses(), layers()].into_iter().flatten().collect())
}

/// Operations without element types.
fn without_element_types() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in PRODUCTS {
        for layout in LAYOUTS {
            cases.push(gemm(layout, shape, 1));
        }
    }
    for [rows, _, _] in MATRICES {
        cases.extend([false, true].map(|cursor| gather_labels(Selection { rows, source_rows: 257, cursor }, 6)));
    }
    for [rows, classes] in CLASSES {
        for range in [1.0, 10.0, 1000.0] {
            cases.push(cross_entropy_loss(rows, classes, range, 8));
        }
        cases.push(count_correct(rows, classes, 10));
        cases.extend([false, true].map(|cursor| mean_loss(rows, cursor, 11)));
    }
    cases.extend(LENGTHS.map(fill));
    cases.push(advance_cursor());
    cases
}

/// Operations with an element type, for each type.
fn typed() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in ELEMENTS {
        for [rows, cols, more] in MATRICES {
            // Dense, as is usual for f32; and with a pitch, as is usual for 16-bit types.
            for pitch in [cols, element.pitch(cols) + more] {
                let shape = [rows, cols, pitch];
                cases.push(add_bias(element, shape, 2));
                cases.push(bias_gradient(element, shape, 3));
                for cursor in [false, true] {
                    let selection = Selection { rows, source_rows: 7, cursor };
                    cases.push(gather_rows_u8(element, selection, [cols, pitch], 4));
                    cases.push(gather_rows_f32(element, selection, [cols, pitch], 5));
                }
            }
        }
        for len in LENGTHS {
            cases.push(relu(element, len, 12));
            cases.push(relu_backward(element, len, 13));
            cases.push(sgd(element, false, len, 14));
            if element != Element::F32 {
                cases.push(sgd(element, true, len, 14));
                cases.push(convert(element, Element::F32, len, 15));
                cases.push(convert(Element::F32, element, len, 16));
            }
        }
    }
    cases
}

fn losses() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in ELEMENTS {
        for [rows, classes] in CLASSES {
            for pitch in [classes, element.pitch(classes)] {
                let shape = [rows, classes, pitch];
                cases.extend([1.0, 10.0, 1000.0].map(|range| softmax_cross_entropy(element, shape, range, 7)));
                for outputs in [TRAINING, EVALUATION, ALL_BUT_ADVANCE] {
                    cases.extend([true, false].map(|numbers| softmax_loss(element, shape, (outputs, numbers), 17)));
                }
            }
        }
    }
    cases
}

/// Shapes of updates that stream: with 32 and with 64 steps of k in a stage, and with complete and partial tiles.
const STREAMED: [[u32; 3]; 2] = [[29, 264, 130], [61, 136, 300]];

/// The linear layers' launches: several shapes with their planned kernels, and every kernel on one shape.
fn layers() -> Vec<Case> {
    let mut cases = Vec::new();
    for precision in Precision::ALL {
        for shape in LAYERS {
            // The models of the largest shape take longest.
            let variants = if shape == LARGEST { 1 } else { 2 };
            for variant in 0..variants {
                cases.push(forward(precision, shape, variant, None));
                cases.push(backward_input(precision, shape, variant, None));
                cases.push(weight_gradient(precision, shape, variant, None));
                cases.push(update(precision, shape, variant, None));
            }
        }
        for variant in 0..2 {
            for choice in choices(Product::Forward, precision).into_iter().map(Some) {
                cases.push(forward(precision, UNEVEN, variant, choice));
            }
            for choice in choices(Product::Input, precision).into_iter().map(Some) {
                cases.push(backward_input(precision, UNEVEN, variant, choice));
            }
            for choice in choices(Product::Gradient, precision).into_iter().map(Some) {
                cases.push(weight_gradient(precision, UNEVEN, variant, choice));
                cases.push(update(precision, UNEVEN, variant, choice));
            }
            // Without master weights, and with rows that are a multiple of 16 bytes.
            let streamed = Choice { tile: Tile::Streamed, splits: 1 };
            if variant == 0 && Product::Update.warpgroup_tiles(precision).contains(&streamed.tile) {
                cases.extend(STREAMED.map(|shape| update(precision, shape, variant, Some(streamed))));
            }
        }
    }
    cases
}
