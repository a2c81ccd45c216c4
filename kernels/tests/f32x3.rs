//! f32 made from three products of tf32, against f32 multiply-adds: as exact, and as honest about what is not finite. Needs
//! a GPU; says so if there is none.

#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

#[path = "common/gpu.rs"]
mod gpu;
#[path = "../../allocators/device/tests/common/trials.rs"]
mod trials;

use chacha20::ChaCha8Rng;
use gpu::Gpu;
use kernels::{Choice, LinearBackwardInput, LinearForward, LinearWeightGradient, Precision, Product, Tile};
use rand::{RngExt, SeedableRng};
use std::process::ExitCode;
use trials::trials;

/// Rows and columns of C: more than one tile down, not full ones, and rows that begin on 16 bytes.
const M: u32 = 136;
const N: u32 = 148;

/// C = A·B by one of a layer's products. `a` holds A's rows of `k` values, `b` B's columns.
struct Operands {
    m: u32,
    n: u32,
    k: u32,
    a: Vec<f32>,
    b: Vec<f32>,
}

fn transposed(values: &[f32], cols: u32) -> Vec<f32> {
    let cols = cols as usize;
    (0..cols).flat_map(|col| values.iter().skip(col).step_by(cols)).copied().collect()
}

/// Appends on a boundary of 256 bytes.
fn put(image: &mut Vec<u8>, bytes: &[u8]) -> u64 {
    image.resize(image.len().next_multiple_of(256), 0);
    let at = image.len();
    image.extend_from_slice(bytes);
    at as u64
}

impl Operands {
    /// A and B of `k` values that a function gives for each place.
    fn new([m, n, k]: [u32; 3], mut values: impl FnMut(u32) -> Vec<f32>) -> Self {
        Self { m, n, k, a: values(m * k), b: values(n * k) }
    }

    /// Every tile of a product, alone and with blocks that share its sums.
    fn ways(&self) -> impl Iterator<Item = (Product, Choice)> {
        let choices = |product: Product| {
            let choice = move |&tile| [1, 3].map(|splits| (product, Choice { tile, splits }));
            product.tiles().iter().chain(product.warpgroup_tiles(Precision::F32x3)).flat_map(choice)
        };
        Product::ALL.into_iter().flat_map(choices)
    }

    /// C as the GPU computes it.
    fn multiply(&self, gpu: &Gpu, precision: Precision, product: Product, choice: Choice) -> Vec<f32> {
        let Self { m, n, k, a, b } = self;
        let (a, b) = match product {
            Product::Forward => (a.clone(), b.clone()),
            Product::Input => (a.clone(), transposed(b, *k)),
            Product::Gradient | Product::Update => (transposed(a, *k), transposed(b, *k)),
        };
        let image = &mut Vec::new();
        let (first, second) = (put(image, bytemuck::cast_slice(&a)), put(image, bytemuck::cast_slice(&b)));
        let out = put(image, &vec![0; 4 * (m * n) as usize]);
        let tickets = put(image, &[0; 1024]);
        // Three splits of all tiles.
        let workspace = put(image, &vec![0; 16 << 20]);
        let kernels = gpu.kernels.as_ref().unwrap();
        let after = gpu.with_region(image, |base| {
            let [first, second, out, tickets, workspace] =
                [first, second, out, tickets, workspace].map(|offset| base + offset);
            let input = LinearBackwardInput {
                precision,
                rows: *m,
                inputs: *n,
                outputs: *k,
                dy: first,
                dy_pitch: *k,
                weight: second,
                weight_pitch: *n,
                mask: None,
                dx: out,
                dx_pitch: *n,
                workspace,
                tickets,
            };
            // SAFETY: the context is current, and the region is live and as large as the shapes say.
            let outcome = unsafe {
                match product {
                    Product::Forward => LinearForward {
                        precision,
                        rows: *m,
                        inputs: *k,
                        outputs: *n,
                        x: first,
                        x_pitch: *k,
                        weight: second,
                        weight_pitch: *k,
                        bias: None,
                        relu: false,
                        y: out,
                        y_pitch: *n,
                        y_f32: true,
                        workspace,
                        tickets,
                    }
                    .launch_with(choice, kernels, gpu.stream),
                    Product::Input => input.launch_with(choice, kernels, gpu.stream),
                    Product::Gradient | Product::Update => LinearWeightGradient {
                        precision,
                        rows: *k,
                        inputs: *n,
                        outputs: *m,
                        dy: first,
                        dy_pitch: *m,
                        x: second,
                        x_pitch: *n,
                        scale: 1.0,
                        dweight: out,
                        dweight_pitch: *n,
                        dbias: None,
                        workspace,
                        tickets,
                    }
                    .launch_with(choice, kernels, gpu.stream),
                }
            };
            outcome.unwrap();
        });
        after[out as usize..][..4 * (m * n) as usize].chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
    }

    /// C, and the sum of the terms' magnitudes.
    fn exact(&self) -> Vec<(f64, f64)> {
        let k = self.k as usize;
        let dot = |a: &[f32], b: &[f32]| {
            let terms = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            terms.fold((0.0, 0.0), |(sum, magnitude): (f64, f64), term| (sum + term, magnitude + term.abs()))
        };
        let rows = self.a.chunks_exact(k);
        rows.flat_map(|a| self.b.chunks_exact(k).map(move |b| dot(a, b))).collect()
    }
}

/// Errors of C's elements relative to the sum of the terms' magnitudes, in units of ε: root mean square, and largest.
fn errors(found: &[f32], exact: &[(f64, f64)]) -> (f64, f64) {
    let error = |(found, (exact, magnitude)): (&f32, &(f64, f64))| (f64::from(*found) - exact) / magnitude;
    let errors = || found.iter().zip(exact).map(error).map(|error| (error / f64::from(f32::EPSILON)).abs());
    // Written so that NaN shows.
    let largest = errors().fold(0.0, |largest: f64, error| if error <= largest { largest } else { error });
    ((errors().map(|error| error * error).sum::<f64>() / found.len() as f64).sqrt(), largest)
}

/// Either no more than twice as far off as multiply-adds in f32, or within what the split alone may cost.
///
/// An operand loses at most ε, and of a product at most 2 ε is left out: 4 ε in all where everything is at its worst, one
/// more where the sum is cut off, and less than ε in the root mean square. With few terms multiply-adds round so seldom that this is the larger one; with many
/// their roundings outgrow it. Sums that tensor cores cut off over all of k would fail: of positive terms they are tens of ε
/// off.
fn three_products_of_tf32_are_as_exact_as_multiply_adds() {
    let gpu = Gpu::new();
    let mut random = ChaCha8Rng::seed_from_u64(11);
    let shapes = [8, 60, 784, 4096].map(|k| [M, N, k]);
    for shape in shapes {
        let k = shape[2];
        for (kind, least, powers) in [("mixed signs", -1.0, 0), ("positive", 0.0, 0), ("wide", -1.0, 20)] {
            let values = |count: u32| -> Vec<f32> {
                let one = |_| random.random_range(least..1.0_f32) * 2.0_f32.powi(random.random_range(-powers..=powers));
                (0..count).map(one).collect()
            };
            let operands = Operands::new(shape, values);
            let exact = operands.exact();
            for (product, way) in operands.ways() {
                let of = |precision, way| errors(&operands.multiply(&gpu, precision, product, way), &exact);
                // Multiply-adds have no tile with warpgroups, but one of the same size.
                let plain = if way.tile.needs_warpgroups() { Choice { tile: Tile::Wide, ..way } } else { way };
                let (plain, three) = (of(Precision::F32, plain), of(Precision::F32x3, way));
                let label = format!("{product:?} {way:?}, k {k}, {kind}");
                println!("{label}: f32 {:.3} ε, at most {:.3}; f32x3 {:.3}, {:.3}", plain.0, plain.1, three.0, three.1);
                assert!(three.0 <= (2.0 * plain.0).max(1.0), "{label}: {} ε, multiply-adds {}", three.0, plain.0);
                assert!(three.1 <= (2.0 * plain.1).max(5.0), "{label}: {} ε, multiply-adds {}", three.1, plain.1);
            }
        }
    }
}

/// Where an operand is infinite or no number, C is what f32 makes of it, whatever the other operand's small part is: zero,
/// or of the other sign. All other elements are untouched by it.
fn what_is_not_finite_stays_so_and_stays_where_it_is() {
    let gpu = Gpu::new();
    // 1 and 2 have no small part; that of 1 + 2⁻¹² + 2⁻²⁰ is positive, that of 1 + 3·2⁻¹² negative.
    let values = [1.0, -2.0, 1.0 + 2.0_f32.powi(-12) + 2.0_f32.powi(-20), -1.0 - 3.0 * 2.0_f32.powi(-12)];
    for [m, n, k] in [[M, N, 64], [32, N, 64], [M, N, 32]] {
        let filled = |count: u32| (0..count).map(|at| values[(at * 7 + at / k) as usize % 4]).collect::<Vec<f32>>();
        let mut operands = Operands::new([m, n, k], filled);
        let mut odd = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::INFINITY].into_iter().cycle();
        // In some rows of A and columns of B, at some step of k; the last row of A has two infinities of unlike sign.
        for row in [0, 9, 17, 20, m - 1] {
            operands.a[(row * k + row % k) as usize] = odd.next().unwrap();
        }
        operands.a[((m - 1) * k + 1) as usize] = f32::NEG_INFINITY;
        for col in [3, 64, 147] {
            operands.b[(col * k + 5) as usize] = odd.next().unwrap();
        }
        // Zero times infinity.
        operands.b[(20 * k + 9) as usize] = 0.0;
        let exact = operands.exact();
        let odd_ones = exact.iter().filter(|(sum, _)| !sum.is_finite()).count();
        assert!(exact.iter().any(|(sum, _)| sum.is_nan()) && exact.iter().any(|(sum, _)| sum.is_infinite()));
        assert!(odd_ones < exact.len() / 4, "most are finite");
        for (product, way) in operands.ways() {
            let found = operands.multiply(&gpu, Precision::F32x3, product, way);
            for (at, (found, (exact, magnitude))) in found.iter().zip(&exact).enumerate() {
                let (row, col) = (at as u32 / n, at as u32 % n);
                let place = format!("{product:?} {way:?}: C[{row}, {col}] is {found}, not {exact}");
                if exact.is_finite() {
                    let off = (f64::from(*found) - exact).abs();
                    assert!(off <= 36.0 * f64::from(f32::EPSILON) * magnitude, "{place}");
                } else {
                    assert!(f64::from(*found) == *exact || (found.is_nan() && exact.is_nan()), "{place}");
                }
            }
        }
    }
}

fn main() -> ExitCode {
    let gpu = Gpu::missing();
    trials::run(trials! {
        gpu.as_deref() =>
            three_products_of_tf32_are_as_exact_as_multiply_adds
            what_is_not_finite_stays_so_and_stays_where_it_is;
    })
}
