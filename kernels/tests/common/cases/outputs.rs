//! Losses and accuracy.

use kernels::{AdvanceCursor, CountCorrect, CrossEntropyLoss, Element, MeanLoss, SoftmaxCrossEntropy, SoftmaxLoss};

use super::{
    Data, POISON, area, case, exact, gradient_tolerance, input, loss_tolerance, stored_tolerance, sum_tolerance,
    within, within_rows,
};
use crate::common::{Buffer, Case, Expected};

/// Loss and softmax of each row, in `f64`.
fn softmax(logits: &[f32], labels: &[u32], classes: u32) -> (Vec<f64>, Vec<f64>) {
    let (mut losses, mut probabilities) = (Vec::new(), Vec::new());
    for (row, &label) in logits.chunks(classes as usize).zip(labels) {
        // NaN is never the maximum, and makes the sum NaN.
        let max = row.iter().fold(f64::NEG_INFINITY, |max, &x| max.max(x.into()));
        let exponentials: Vec<f64> = row.iter().map(|&x| (f64::from(x) - max).exp()).collect();
        let sum: f64 = exponentials.iter().sum();
        losses.push(sum.ln() + max - f64::from(row[label as usize]));
        probabilities.extend(exponentials.iter().map(|x| x / sum));
    }
    (losses, probabilities)
}

/// The stored `(softmax − onehot) · scale`.
fn gradients(element: Element, probabilities: &[f64], labels: &[u32], classes: u32, scale: f32) -> Vec<(f64, f64)> {
    let gradient = |(i, probability): (usize, &f64)| {
        let (row, class) = (i / classes as usize, i % classes as usize);
        let target = if labels[row] as usize == class { 1.0 } else { 0.0 };
        let gradient = (probability - target) * f64::from(scale);
        (gradient, gradient_tolerance(scale) + stored_tolerance(element, gradient))
    };
    probabilities.iter().enumerate().map(gradient).collect()
}

/// Small f16 values have few bits: training scales its loss so that gradients are not among them.
fn scale(element: Element, rows: u32) -> f32 {
    let loss_scale = if element == Element::F16 { 1024.0 } else { 1.0 };
    loss_scale / rows as f32
}

/// `range` is the range of the logits: with 1000, exponentials overflow unless the maximum is subtracted.
pub(crate) fn softmax_cross_entropy(element: Element, [rows, classes, pitch]: [u32; 3], range: f32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (logits, labels) = (data.floats(area(rows, classes), range), data.below(rows.into(), classes));
    let scale = scale(element, rows);
    let (losses, probabilities) = softmax(&logits, &labels, classes);
    let losses = losses.into_iter().map(|loss| (loss, loss_tolerance(loss))).collect();
    let dlogits = gradients(element, &probabilities, &labels, classes, scale);
    let dlogits = within_rows(element, dlogits, classes, pitch);
    let buffers = vec![input(&logits), input(&labels), within(losses), dlogits];
    case(&format!("{rows}x{classes} pitch {pitch} ±{range}"), buffers, move |at| SoftmaxCrossEntropy {
        rows,
        classes,
        logits: at[0],
        labels: at[1],
        losses: at[2],
        element,
        dlogits: at[3],
        dlogits_pitch: pitch,
        scale,
    })
}

/// Optional outputs of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outputs {
    pub(crate) dlogits: bool,
    pub(crate) correct: bool,
    pub(crate) cursor: bool,
    pub(crate) advance: bool,
}

/// A training step's launch, and an evaluation's.
pub(crate) const TRAINING: Outputs = Outputs { dlogits: true, correct: false, cursor: true, advance: true };
pub(crate) const EVALUATION: Outputs = Outputs { dlogits: false, correct: true, cursor: false, advance: false };
pub(crate) const ALL_BUT_ADVANCE: Outputs = Outputs { dlogits: true, correct: true, cursor: true, advance: false };

/// The slot of a step among others, selected by a cursor.
const STEP: u32 = 2;
const SLOTS: usize = 4;

fn slot(cursor: bool, value: (f64, f64)) -> Buffer {
    let at = if cursor { STEP as usize } else { 0 };
    Buffer { before: vec![POISON; SLOTS * size_of::<f32>()], after: Expected::Slot(at, value) }
}

/// With ties, to test that the first class wins; and, unless `numbers`, with NaN and infinite logits.
pub(crate) fn softmax_loss(
    element: Element,
    [rows, classes, pitch]: [u32; 3],
    (outputs, numbers): (Outputs, bool),
    seed: u64,
) -> Case {
    let mut data = Data::new(seed);
    let (mut logits, _) = logits_with_ties(&mut data, rows, classes);
    if numbers {
        logits.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 6.0);
    }
    let (greatest, labels) = (greatest(&logits, classes), data.below(rows.into(), classes));
    let correct = labels.iter().zip(&greatest).filter(|(label, greatest)| label == greatest).count() as u32;
    let scale = scale(element, rows);
    let (losses, probabilities) = softmax(&logits, &labels, classes);
    let mean = losses.iter().sum::<f64>() / f64::from(rows);
    let allowed = losses.iter().map(|&loss| loss_tolerance(loss)).sum::<f64>() / f64::from(rows)
        + sum_tolerance(rows, losses.iter().map(|loss| loss.abs()).sum()) / f64::from(rows);
    let dlogits = gradients(element, &probabilities, &labels, classes, scale);
    let build = move |at: &[u64]| SoftmaxLoss {
        element,
        rows,
        classes,
        logits: at[0],
        labels: at[1],
        dlogits: outputs.dlogits.then(|| at[2]),
        dlogits_pitch: pitch,
        scale,
        loss: at[3],
        correct: outputs.correct.then(|| at[4]),
        cursor: outputs.cursor.then(|| at[5]),
        advance: outputs.advance,
        workspace: at[6],
        tickets: at[7],
    };
    let shape = build(&[0; 8]);
    let unused = |buffer: Buffer, used: bool| if used { buffer } else { input(&buffer.before) };
    let cursor = Buffer { before: input(&[STEP]).before, after: exact(&[STEP + 1]).after };
    let workspace = vec![POISON; shape.workspace_bytes() as usize];
    let buffers = vec![
        input(&logits),
        input(&labels),
        unused(within_rows(element, dlogits, classes, pitch), outputs.dlogits),
        slot(outputs.cursor, (mean, allowed)),
        unused(exact(&[correct]), outputs.correct),
        unused(cursor, outputs.advance),
        Buffer { before: workspace, after: Expected::Anything },
        input(&vec![0_u32; shape.tickets() as usize]),
    ];
    let case = case(&format!("{rows}x{classes} pitch {pitch} {outputs:?}, numbers: {numbers}"), buffers, build);
    Case { selected: if outputs.cursor { vec![3] } else { Vec::new() }, ..case }
}

pub(crate) fn advance_cursor() -> Case {
    let cursor = Buffer { before: input(&[STEP]).before, after: exact(&[STEP + 1]).after };
    case("", vec![cursor], |at| AdvanceCursor { cursor: at[0] })
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

pub(crate) fn mean_loss(rows: u32, cursor: bool, seed: u64) -> Case {
    let losses = Data::new(seed).floats(rows.into(), 3.0);
    let sum: f64 = losses.iter().map(|&loss| f64::from(loss)).sum();
    let magnitude: f64 = losses.iter().map(|&loss| f64::from(loss).abs()).sum();
    let mean = (sum / f64::from(rows), sum_tolerance(rows, magnitude) / f64::from(rows));
    let buffers = vec![input(&losses), slot(cursor, mean), input(&[STEP])];
    let shape = if cursor { format!("{rows} at a cursor") } else { rows.to_string() };
    let case =
        case(&shape, buffers, move |at| MeanLoss { rows, losses: at[0], out: at[1], cursor: cursor.then(|| at[2]) });
    Case { selected: if cursor { vec![1] } else { Vec::new() }, ..case }
}

/// Logits with many ties, of which the first must win, and some NaN, which must not win.
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
    let greatest = greatest(&logits, classes);
    (logits, greatest)
}

fn greatest(logits: &[f32], classes: u32) -> Vec<u32> {
    let of_row = |row: &[f32]| {
        let number = |class: &usize| {
            if row[*class].is_nan() { f32::NEG_INFINITY } else { row[*class] }
        };
        (0..row.len()).rev().max_by(|x, y| number(x).total_cmp(&number(y))).unwrap_or_default() as u32
    };
    logits.chunks(classes as usize).map(of_row).collect()
}

pub(crate) fn count_correct(rows: u32, classes: u32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (logits, greatest) = logits_with_ties(&mut data, rows, classes);
    // About half of the labels are correct.
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
