//! Losses and accuracy.

use kernels::{Argmax, CountCorrect, CrossEntropyLoss, MeanLoss, SoftmaxCrossEntropy};

use super::{Data, area, case, exact, gradient_tolerance, input, loss_tolerance, sum_tolerance, within};
use crate::common::Case;

/// Loss and softmax of each row, in `f64`.
fn softmax(logits: &[f32], labels: &[u32], classes: u32) -> (Vec<f64>, Vec<f64>) {
    let (mut losses, mut probabilities) = (Vec::new(), Vec::new());
    for (row, &label) in logits.chunks(classes as usize).zip(labels) {
        let max = row.iter().fold(f64::NEG_INFINITY, |max, &x| max.max(x.into()));
        let exponentials: Vec<f64> = row.iter().map(|&x| (f64::from(x) - max).exp()).collect();
        let sum: f64 = exponentials.iter().sum();
        losses.push(sum.ln() + max - f64::from(row[label as usize]));
        probabilities.extend(exponentials.iter().map(|x| x / sum));
    }
    (losses, probabilities)
}

/// `range` is that of the logits: with 1000, exponentials that are not taken relative to the maximum overflow.
pub(crate) fn softmax_cross_entropy(rows: u32, classes: u32, range: f32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (logits, labels) = (data.floats(area(rows, classes), range), data.below(rows.into(), classes));
    let scale = 1.0 / rows as f32;
    let (losses, probabilities) = softmax(&logits, &labels, classes);
    let losses = losses.into_iter().map(|loss| (loss, loss_tolerance(loss))).collect();
    let gradients = probabilities.iter().enumerate().map(|(i, probability)| {
        let (row, class) = (i / classes as usize, i % classes as usize);
        let target = if labels[row] as usize == class { 1.0 } else { 0.0 };
        ((probability - target) * f64::from(scale), gradient_tolerance(scale))
    });
    let buffers = vec![input(&logits), input(&labels), within(losses), within(gradients.collect())];
    case(&format!("{rows}x{classes} ±{range}"), buffers, move |at| SoftmaxCrossEntropy {
        rows,
        classes,
        logits: at[0],
        labels: at[1],
        losses: at[2],
        dlogits: at[3],
        scale,
    })
}

pub(crate) fn cross_entropy_loss(rows: u32, classes: u32, range: f32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (logits, labels) = (data.floats(area(rows, classes), range), data.below(rows.into(), classes));
    let (losses, _) = softmax(&logits, &labels, classes);
    let losses = losses.into_iter().map(|loss| (loss, loss_tolerance(loss))).collect();
    let buffers = vec![input(&logits), input(&labels), within(losses)];
    case(&format!("{rows}x{classes} ±{range}"), buffers, move |at| CrossEntropyLoss {
        rows,
        classes,
        logits: at[0],
        labels: at[1],
        losses: at[2],
    })
}

pub(crate) fn mean_loss(rows: u32, seed: u64) -> Case {
    let losses = Data::new(seed).floats(rows.into(), 3.0);
    let sum: f64 = losses.iter().map(|&loss| f64::from(loss)).sum();
    let magnitude: f64 = losses.iter().map(|&loss| f64::from(loss).abs()).sum();
    let mean = (sum / f64::from(rows), sum_tolerance(rows, magnitude) / f64::from(rows));
    case(&rows.to_string(), vec![input(&losses), within(vec![mean])], move |at| MeanLoss {
        rows,
        losses: at[0],
        out: at[1],
    })
}

/// Logits with many ties, where the first has to win, and some NaN, which never may.
fn logits_with_ties(data: &mut Data, rows: u32, classes: u32) -> (Vec<f32>, Vec<u32>) {
    let logits: Vec<f32> = data
        .below(area(rows, classes), 9)
        .into_iter()
        .map(|value| match value {
            8 => f32::NAN,
            7 => f32::NEG_INFINITY,
            value => value as f32,
        })
        .collect();
    let greatest = logits.chunks(classes as usize).map(|row| {
        let number = |class: &usize| {
            if row[*class].is_nan() { f32::NEG_INFINITY } else { row[*class] }
        };
        (0..row.len()).rev().max_by(|x, y| number(x).total_cmp(&number(y))).unwrap_or_default() as u32
    });
    let greatest = greatest.collect();
    (logits, greatest)
}

pub(crate) fn argmax(rows: u32, classes: u32, seed: u64) -> Case {
    let (logits, greatest) = logits_with_ties(&mut Data::new(seed), rows, classes);
    case(&format!("{rows}x{classes}"), vec![input(&logits), exact(&greatest)], move |at| Argmax {
        rows,
        classes,
        logits: at[0],
        predictions: at[1],
    })
}

pub(crate) fn count_correct(rows: u32, classes: u32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (logits, greatest) = logits_with_ties(&mut data, rows, classes);
    // About half of the labels are right.
    let mut labels = data.below(rows.into(), classes);
    labels.iter_mut().zip(&greatest).step_by(2).for_each(|(label, greatest)| *label = *greatest);
    let correct = labels.iter().zip(&greatest).filter(|(label, greatest)| label == greatest).count() as u32;
    let buffers = vec![input(&logits), input(&labels), exact(&[correct])];
    case(&format!("{rows}x{classes}"), buffers, move |at| CountCorrect {
        rows,
        classes,
        logits: at[0],
        labels: at[1],
        out: at[2],
    })
}
