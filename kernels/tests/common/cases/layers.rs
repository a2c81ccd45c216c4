//! The operations of a layer and of its update, one by one.

use kernels::{AddBias, BiasGradient, ConvertElements, Element, Fill, Gemm, GemmLayout, Relu, ReluBackward, Sgd};

use super::{Data, area, case, exact, exact_rows, input, input_rows, rounded, stored_tolerance, sum_tolerance, within};
use crate::common::{Buffer, Case};

pub(crate) fn gemm(layout: GemmLayout, [m, n, k]: [u32; 3], seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (a, b) = (data.floats(area(m, k), 1.0), data.floats(area(k, n), 1.0));
    let mut c = Vec::new();
    for i in 0..m as usize {
        for j in 0..n as usize {
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for p in 0..k as usize {
                let (m, n, k) = (m as usize, n as usize, k as usize);
                let (a_at, b_at) = match layout {
                    GemmLayout::NN => (i * k + p, p * n + j),
                    GemmLayout::NT => (i * k + p, j * k + p),
                    GemmLayout::TN => (p * m + i, p * n + j),
                };
                let product = f64::from(a[a_at]) * f64::from(b[b_at]);
                sum += product;
                magnitude += product.abs();
            }
            c.push((sum, sum_tolerance(k, magnitude)));
        }
    }
    case(&format!("{m}x{n}x{k}"), vec![input(&a), input(&b), within(c)], move |at| Gemm {
        layout,
        m,
        n,
        k,
        a: at[0],
        b: at[1],
        c: at[2],
    })
}

pub(crate) fn add_bias(element: Element, [rows, cols, pitch]: [u32; 3], seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (x, bias) = (rounded(element, data.floats(area(rows, cols), 3.0)), data.floats(cols.into(), 1.0));
    let y: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + bias[i % cols as usize]).collect();
    let y = exact_rows(element, &rounded(element, y), cols, pitch);
    let buffers = vec![input_rows(element, &x, cols, pitch), input(&bias), y];
    case(&format!("{rows}x{cols} pitch {pitch}"), buffers, move |at| AddBias {
        element,
        rows,
        cols,
        pitch,
        x: at[0],
        bias: at[1],
        y: at[2],
    })
}

pub(crate) fn bias_gradient(element: Element, [rows, cols, pitch]: [u32; 3], seed: u64) -> Case {
    let dy = rounded(element, Data::new(seed).floats(area(rows, cols), 1.0));
    let db = (0..cols as usize).map(|col| {
        let column = || dy.iter().skip(col).step_by(cols as usize).map(|&value| f64::from(value));
        (column().sum(), sum_tolerance(rows, column().map(f64::abs).sum()))
    });
    let buffers = vec![input_rows(element, &dy, cols, pitch), within(db.collect())];
    case(&format!("{rows}x{cols} pitch {pitch}"), buffers, move |at| BiasGradient {
        element,
        rows,
        cols,
        pitch,
        dy: at[0],
        db: at[1],
    })
}

/// Values that break comparisons with zero.
const ODD: [f32; 6] = [-0.0, 0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, -f32::MIN_POSITIVE];

pub(crate) fn relu(element: Element, len: u64, seed: u64) -> Case {
    let mut x = Data::new(seed).floats(len, 1.0);
    x.iter_mut().zip(ODD).for_each(|(x, odd)| *x = odd);
    let x = rounded(element, x);
    let y: Vec<f32> = x.iter().map(|&x| if x > 0.0 { x } else { 0.0 }).collect();
    let cols = len as u32;
    let buffers = vec![input_rows(element, &x, cols, cols), exact_rows(element, &y, cols, cols)];
    case(&len.to_string(), buffers, move |at| Relu { element, len, x: at[0], y: at[1] })
}

pub(crate) fn relu_backward(element: Element, len: u64, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let mut y: Vec<f32> = data.floats(len, 1.0).iter().map(|x| x.max(0.0)).collect();
    y.iter_mut().zip(ODD).for_each(|(y, odd)| *y = odd);
    let (y, dy) = (rounded(element, y), rounded(element, data.floats(len, 1.0)));
    let dx: Vec<f32> = y.iter().zip(&dy).map(|(&y, &dy)| if y > 0.0 { dy } else { 0.0 }).collect();
    let cols = len as u32;
    let values = |values: &[f32]| input_rows(element, values, cols, cols);
    let buffers = vec![values(&y), values(&dy), exact_rows(element, &dx, cols, cols)];
    case(&len.to_string(), buffers, move |at| ReluBackward { element, len, y: at[0], dy: at[1], dx: at[2] })
}

/// The updates are of the order of the last place of a 16-bit weight, so that some are lost without master weights.
pub(crate) fn sgd(element: Element, master: bool, len: u64, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let gradient = data.floats(len, 1.0);
    let master_weights = data.floats(len, 1.0);
    let weights = rounded(element, master_weights.clone());
    let learning_rate = 0.037;
    let step = |from: &[f32]| -> Vec<f32> {
        gradient.iter().zip(from).map(|(&slope, &weight)| slope.mul_add(-learning_rate, weight)).collect()
    };
    let after = step(if master { &master_weights } else { &weights });
    let cols = len as u32;
    let in_place = |element: Element, before: &[f32], after: &[f32]| Buffer {
        before: input_rows(element, before, cols, cols).before,
        ..exact_rows(element, after, cols, cols)
    };
    let mut buffers = vec![input(&gradient), in_place(element, &weights, &rounded(element, after.clone()))];
    if master {
        buffers.push(in_place(Element::F32, &master_weights, &after));
    }
    let shape = if master { format!("{len} with master weights") } else { len.to_string() };
    case(&shape, buffers, move |at| Sgd {
        element,
        len,
        learning_rate,
        gradient: at[0],
        weights: at[1],
        master: master.then(|| at[2]),
    })
}

/// Values of both signs and many magnitudes: ties, subnormals, and values outside the range of f16.
pub(crate) fn convert(from: Element, to: Element, len: u64, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let powers = data.below(len, 60);
    let mut x: Vec<f32> =
        data.floats(len, 1.0).iter().zip(powers).map(|(x, power)| x * 2.0_f32.powi(power as i32 - 35)).collect();
    let odd = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.0 / 2048.0, 65_519.0, 65_520.0, f32::MAX, f32::NAN];
    x.iter_mut().rev().zip(odd.into_iter().chain(ODD)).for_each(|(x, odd)| *x = odd);
    let x = rounded(from, x);
    let y = rounded(to, x.clone());
    let cols = len as u32;
    let buffers = vec![input_rows(from, &x, cols, cols), exact_rows(to, &y, cols, cols)];
    for (x, y) in x.iter().zip(&y).filter(|(x, y)| x.is_finite() && y.is_finite()) {
        let error = (f64::from(*x) - f64::from(*y)).abs();
        assert!(error <= stored_tolerance(to, (*x).into()), "{x} became {y}");
    }
    case(&len.to_string(), buffers, move |at| ConvertElements { len, from, to, x: at[0], y: at[1] })
}

pub(crate) fn fill(len: u64) -> Case {
    let value = 0.1;
    case(&len.to_string(), vec![exact(&vec![value; len as usize])], move |at| Fill { len, value, out: at[0] })
}
