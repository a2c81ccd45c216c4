//! What a layer is made of, and its update.

use kernels::{AddBias, BiasGradient, Fill, Gemm, GemmAlgorithm, GemmLayout, Relu, ReluBackward, Sgd};

use super::{Data, area, case, exact, input, sum_tolerance, within};
use crate::common::{Buffer, Case};

pub(crate) fn gemm(layout: GemmLayout, algorithm: GemmAlgorithm, [m, n, k]: [u32; 3], seed: u64) -> Case {
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
        algorithm,
        m,
        n,
        k,
        a: at[0],
        b: at[1],
        c: at[2],
    })
}

pub(crate) fn add_bias(rows: u32, cols: u32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (x, bias) = (data.floats(area(rows, cols), 3.0), data.floats(cols.into(), 1.0));
    let y: Vec<f32> = x.iter().enumerate().map(|(i, x)| x + bias[i % cols as usize]).collect();
    case(&format!("{rows}x{cols}"), vec![input(&x), input(&bias), exact(&y)], move |at| AddBias {
        rows,
        cols,
        x: at[0],
        bias: at[1],
        y: at[2],
    })
}

pub(crate) fn bias_gradient(rows: u32, cols: u32, seed: u64) -> Case {
    let dy = Data::new(seed).floats(area(rows, cols), 1.0);
    let db = (0..cols as usize).map(|col| {
        let column = || dy.iter().skip(col).step_by(cols as usize).map(|&value| f64::from(value));
        (column().sum(), sum_tolerance(rows, column().map(f64::abs).sum()))
    });
    case(&format!("{rows}x{cols}"), vec![input(&dy), within(db.collect())], move |at| BiasGradient {
        rows,
        cols,
        dy: at[0],
        db: at[1],
    })
}

pub(crate) fn relu(len: u64, seed: u64) -> Case {
    let mut x = Data::new(seed).floats(len, 1.0);
    let odd = [-0.0, 0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, -f32::MIN_POSITIVE];
    x.iter_mut().zip(odd).for_each(|(x, odd)| *x = odd);
    let y: Vec<f32> = x.iter().map(|&x| if x > 0.0 { x } else { 0.0 }).collect();
    case(&len.to_string(), vec![input(&x), exact(&y)], move |at| Relu { len, x: at[0], y: at[1] })
}

pub(crate) fn relu_backward(len: u64, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let y: Vec<f32> = data.floats(len, 1.0).iter().map(|x| x.max(0.0)).collect();
    let dy = data.floats(len, 1.0);
    let dx: Vec<f32> = y.iter().zip(&dy).map(|(&y, &dy)| if y > 0.0 { dy } else { 0.0 }).collect();
    case(&len.to_string(), vec![input(&y), input(&dy), exact(&dx)], move |at| ReluBackward {
        len,
        y: at[0],
        dy: at[1],
        dx: at[2],
    })
}

pub(crate) fn sgd(len: u64, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (gradient, weights) = (data.floats(len, 1.0), data.floats(len, 1.0));
    let learning_rate = 0.037;
    let after: Vec<f32> = gradient.iter().zip(&weights).map(|(&g, &w)| g.mul_add(-learning_rate, w)).collect();
    let in_place = Buffer { after: exact(&after).after, ..input(&weights) };
    case(&len.to_string(), vec![input(&gradient), in_place], move |at| Sgd {
        len,
        learning_rate,
        gradient: at[0],
        weights: at[1],
    })
}

pub(crate) fn fill(len: u64) -> Case {
    let value = 0.1;
    case(&len.to_string(), vec![exact(&vec![value; len as usize])], move |at| Fill { len, value, out: at[0] })
}
