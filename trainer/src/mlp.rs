//! The network: linear layers with ReLU between, cross-entropy, SGD.
//!
//! Every tensor that an operation produces is allocated through the allocator right before the operation and
//! freed when nothing needs it any more. That is what this program is for; nothing is done in place that a
//! framework would not do in place.

use crate::error::Result;
use crate::init;
use crate::settings::{GemmMode, InitMode};
use crate::tensor::{Context, Matrix};
use allocators::DeviceBuffer;
use kernels::{
    AddBias, BiasGradient, CountCorrect, CrossEntropyLoss, Element, Gemm, GemmLayout, MeanLoss, Relu, ReluBackward,
    Sgd, SoftmaxCrossEntropy,
};

/// A linear layer: `y = x · weightᵀ + bias`.
#[derive(Debug)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: Matrix,
    /// `[1, outputs]`.
    pub bias: Matrix,
}

/// Gradients of one layer.
#[derive(Debug)]
pub struct LinearGradient {
    /// `[outputs, inputs]`.
    pub weight: Matrix,
    /// `[1, outputs]`.
    pub bias: Matrix,
}

/// The network's weights.
#[derive(Debug)]
pub struct Mlp {
    /// Layers from input to output.
    pub layers: Vec<Linear>,
    gemm: GemmMode,
}

/// Widths of a network: inputs, hidden layers, classes.
#[must_use]
pub fn widths(inputs: u32, hidden: u32, layers: u32, classes: u32) -> Vec<u32> {
    let hidden = std::iter::repeat_n(hidden, layers.saturating_sub(1) as usize);
    std::iter::once(inputs).chain(hidden).chain([classes]).collect()
}

/// Bytes of the weights of a network with these widths.
#[must_use]
pub fn parameter_bytes(widths: &[u32]) -> u64 {
    let layer = |pair: &[u32]| (u64::from(pair[0]) + 1).saturating_mul(u64::from(pair[1])).saturating_mul(4);
    widths.windows(2).map(layer).fold(0, u64::saturating_add)
}

/// The batch of one step.
#[derive(Debug)]
pub struct Batch {
    /// `[rows, features]`.
    pub inputs: Matrix,
    /// Class of each row, u32.
    pub labels: DeviceBuffer,
}

/// What the forward pass leaves for the backward pass: the input of each layer, and the logits.
#[derive(Debug)]
struct Activations {
    inputs: Vec<Matrix>,
    logits: Matrix,
}

impl Mlp {
    /// A network with fresh weights.
    ///
    /// # Errors
    /// Those of the allocator and of copies.
    pub fn new(context: &Context, widths: &[u32], mode: InitMode, seed: u64, gemm: GemmMode) -> Result<Self> {
        let mut layers = Vec::with_capacity(widths.len() - 1);
        for (number, pair) in (0..).zip(widths.windows(2)) {
            let (inputs, outputs) = (pair[0], pair[1]);
            let weight = context.matrix(outputs, inputs)?;
            context.write(&weight.buffer, &init::weights(mode, seed, number, outputs, inputs))?;
            let bias = context.matrix(1, outputs)?;
            context.write(&bias.buffer, &vec![0f32; outputs as usize])?;
            layers.push(Linear { weight, bias });
        }
        Ok(Self { layers, gemm })
    }

    fn product(
        &self,
        context: &Context,
        layout: GemmLayout,
        a: &Matrix,
        b: &Matrix,
        (m, n, k): (u32, u32, u32),
    ) -> Result<Matrix> {
        let out = context.matrix(m, n)?;
        let gemm = Gemm { layout, algorithm: self.gemm.into(), m, n, k, a: a.addr(), b: b.addr(), c: out.addr() };
        // SAFETY: the three matrices are live and of these shapes; they are freed on the stream after this launch.
        unsafe { context.device.run(&gemm)? };
        Ok(out)
    }

    /// One layer without its ReLU.
    fn linear(&self, context: &Context, layer: &Linear, x: &Matrix) -> Result<Matrix> {
        let (rows, outputs) = (x.rows, layer.weight.rows);
        let product = self.product(context, GemmLayout::NT, x, &layer.weight, (rows, outputs, x.cols))?;
        let out = context.matrix(rows, outputs)?;
        let add = AddBias {
            element: Element::F32,
            rows,
            cols: outputs,
            pitch: outputs,
            x: product.addr(),
            bias: layer.bias.addr(),
            y: out.addr(),
        };
        // SAFETY: as above.
        unsafe { context.device.run(&add)? };
        Ok(out)
    }

    fn relu(context: &Context, x: &Matrix) -> Result<Matrix> {
        let out = context.matrix(x.rows, x.cols)?;
        let relu = Relu { element: Element::F32, len: x.len(), x: x.addr(), y: out.addr() };
        // SAFETY: both matrices are live, of one shape, and freed on the stream after this launch.
        unsafe { context.device.run(&relu)? };
        Ok(out)
    }

    fn forward(&self, context: &Context, inputs: Matrix) -> Result<Activations> {
        let _range = context.device.range(format_args!("forward"));
        let mut kept = vec![inputs];
        let last = self.layers.len() - 1;
        for (number, layer) in self.layers.iter().enumerate() {
            let _range = context.device.range(format_args!("layer {}", number + 1));
            let linear = self.linear(context, layer, &kept[number])?;
            if number == last {
                return Ok(Activations { inputs: kept, logits: linear });
            }
            // The backward pass of ReLU needs its output only, so its input goes right away.
            kept.push(Self::relu(context, &linear)?);
        }
        unreachable!("a network has at least one layer")
    }

    fn backward(&self, context: &Context, mut inputs: Vec<Matrix>, dlogits: Matrix) -> Result<Vec<LinearGradient>> {
        let _range = context.device.range(format_args!("backward"));
        let mut gradients = Vec::with_capacity(self.layers.len());
        let mut dy = dlogits;
        for (number, layer) in self.layers.iter().enumerate().rev() {
            let _range = context.device.range(format_args!("layer {}", number + 1));
            let x = inputs.pop().expect("each layer kept its input");
            let (rows, outputs, width) = (dy.rows, layer.weight.rows, layer.weight.cols);
            let weight = self.product(context, GemmLayout::TN, &dy, &x, (outputs, width, rows))?;
            let bias = context.matrix(1, outputs)?;
            let sum = BiasGradient {
                element: Element::F32,
                rows,
                cols: outputs,
                pitch: outputs,
                dy: dy.addr(),
                db: bias.addr(),
            };
            // SAFETY: both are live and of these shapes; they are freed on the stream after this launch.
            unsafe { context.device.run(&sum)? };
            gradients.push(LinearGradient { weight, bias });
            if number > 0 {
                let da = self.product(context, GemmLayout::NN, &dy, &layer.weight, (rows, width, outputs))?;
                let dz = context.matrix(rows, width)?;
                let relu =
                    ReluBackward { element: Element::F32, len: x.len(), y: x.addr(), dy: da.addr(), dx: dz.addr() };
                // SAFETY: as above; all three are of one shape.
                unsafe { context.device.run(&relu)? };
                dy = dz;
            }
        }
        gradients.reverse();
        Ok(gradients)
    }

    /// Forward and backward pass of one batch; the mean loss goes to `loss_slot`, the address of one f32.
    ///
    /// # Errors
    /// Those of the allocator and of launches.
    pub fn gradients(&self, context: &Context, batch: Batch, loss_slot: u64) -> Result<Vec<LinearGradient>> {
        let Batch { inputs, labels } = batch;
        let Activations { inputs, logits } = self.forward(context, inputs)?;
        let (rows, classes) = (logits.rows, logits.cols);
        let dlogits = {
            let _range = context.device.range(format_args!("loss"));
            let losses = context.matrix(rows, 1)?;
            let dlogits = context.matrix(rows, classes)?;
            let loss = SoftmaxCrossEntropy {
                rows,
                classes,
                logits: logits.addr(),
                labels: labels.addr().get(),
                losses: losses.addr(),
                element: Element::F32,
                dlogits: dlogits.addr(),
                dlogits_pitch: classes,
                // CAST: a batch's rows are far below 2^24, so the quotient is exact to rounding.
                scale: 1.0 / rows as f32,
            };
            // SAFETY: all buffers are live and of these shapes; they are freed on the stream after this launch.
            unsafe { context.device.run(&loss)? };
            let mean = MeanLoss { rows, losses: losses.addr(), out: loss_slot, cursor: None };
            // SAFETY: as above; the caller keeps the slot.
            unsafe { context.device.run(&mean)? };
            dlogits
        };
        drop((logits, labels));
        self.backward(context, inputs, dlogits)
    }

    /// One step of gradient descent; the gradients are freed.
    ///
    /// # Errors
    /// Those of launches.
    pub fn update(&self, context: &Context, gradients: Vec<LinearGradient>, learning_rate: f32) -> Result<()> {
        let _range = context.device.range(format_args!("update"));
        for (layer, gradient) in self.layers.iter().zip(gradients) {
            for (weights, gradient) in [(&layer.weight, &gradient.weight), (&layer.bias, &gradient.bias)] {
                let sgd = Sgd {
                    element: Element::F32,
                    len: weights.len(),
                    learning_rate,
                    gradient: gradient.addr(),
                    weights: weights.addr(),
                    master: None,
                };
                // SAFETY: both are live and of one shape; they are freed on the stream after this launch.
                unsafe { context.device.run(&sgd)? };
            }
        }
        Ok(())
    }

    /// Forward pass of one batch; the mean loss goes to `loss_slot` (one f32), the number of rows whose largest logit
    /// is their label to `correct_slot` (one u32).
    ///
    /// # Errors
    /// Those of the allocator and of launches.
    pub fn evaluate(&self, context: &Context, batch: Batch, loss_slot: u64, correct_slot: u64) -> Result<()> {
        let Batch { inputs, labels } = batch;
        let Activations { logits, .. } = self.forward(context, inputs)?;
        let (rows, classes) = (logits.rows, logits.cols);
        let losses = context.matrix(rows, 1)?;
        let (logits_addr, labels_addr) = (logits.addr(), labels.addr().get());
        let loss = CrossEntropyLoss { rows, classes, logits: logits_addr, labels: labels_addr, losses: losses.addr() };
        // SAFETY: all buffers are live and of these shapes; they are freed on the stream after these launches. The
        // caller keeps the slots.
        unsafe { context.device.run(&loss)? };
        let mean = MeanLoss { rows, losses: losses.addr(), out: loss_slot, cursor: None };
        // SAFETY: as above.
        unsafe { context.device.run(&mean)? };
        let correct = CountCorrect { rows, classes, logits: logits_addr, labels: labels_addr, out: correct_slot };
        // SAFETY: as above.
        unsafe { context.device.run(&correct) }
    }
}
