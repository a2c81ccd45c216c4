//! The network: linear layers with ReLU between, cross-entropy, SGD.
//!
//! Every tensor that an operation produces is allocated through the allocator right before the operation and
//! freed when nothing needs it any more. That is what this program is for; nothing is done in place that a
//! framework would not do in place.
//!
//! [`Arithmetic`] decides which operations a step is made of:
//!
//! | | f32, nothing fused | other types, nothing fused | `epilogue` | `update` |
//! |---|---|---|---|---|
//! | layer | product, bias, ReLU | the same | one | one |
//! | loss | losses with gradient, mean | the same | one | one |
//! | a layer's gradient | product, bias' gradient | the same | one | with the update |
//! | gradient of its input | product, ReLU's gradient | the same | one | one |
//! | update | weights, bias | the same | the same | one |

mod buckets;
mod layer;
mod loss;
mod offload;
mod products;

use crate::arithmetic::{Arithmetic, FuseMode};
use crate::device::Role;
use crate::error::Result;
use crate::settings::{InitMode, OffloadMode};
use crate::tensor::{Context, Matrix};
use chacha20::ChaCha8Rng;
use kernels::Element;
use offload::Offload;
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal, StandardUniform};
use vramlab::DeviceBuffer;

pub(crate) use buckets::{Buckets, USUAL_BUCKET};
pub use products::{LayerLaunches, LayerProducts, products};

/// A linear layer: `y = x · weightᵀ + bias`.
#[derive(Debug)]
pub struct Linear {
    /// `[outputs, inputs]`, as products read them.
    pub weight: Matrix,
    /// The weights in f32 with the same pitch: what is stepped, if it is not `weight` itself. Absent where they are on the host.
    pub master: Option<Matrix>,
    /// `[1, outputs]`, f32.
    pub bias: Matrix,
}

/// Gradients of one layer, f32, multiplied by the loss scale.
#[derive(Debug)]
pub struct LinearGradient {
    /// `[outputs, inputs]`, with the weights' pitch.
    pub weight: Matrix,
    /// `[1, outputs]`.
    pub bias: Matrix,
}

/// The network's weights.
#[derive(Debug)]
pub struct Mlp {
    /// Layers from input to output.
    pub layers: Vec<Linear>,
    arithmetic: Arithmetic,
    /// Master weights on the host.
    offload: Option<Offload>,
    /// Counters by which the blocks of a launch find out which of them is the last; zero between launches. One half for
    /// launches on the stream of updates, one for all others.
    tickets: Option<DeviceBuffer>,
}

/// Widths of a network: inputs, hidden layers, classes.
#[must_use]
pub fn widths(inputs: u32, hidden: u32, layers: u32, classes: u32) -> Vec<u32> {
    let hidden = std::iter::repeat_n(hidden, layers.saturating_sub(1) as usize);
    std::iter::once(inputs).chain(hidden).chain([classes]).collect()
}

/// Bytes of the weights and biases of a network with these widths as they are held: those that products read, with
/// their padding, and master weights.
#[must_use]
pub fn parameter_bytes(widths: &[u32], arithmetic: &Arithmetic) -> u64 {
    let master = if arithmetic.has_master() { Element::F32.bytes() } else { 0 };
    let layer = |pair: &[u32]| {
        let weights = u64::from(arithmetic.pitch(pair[0])).saturating_mul(u64::from(pair[1]));
        let biases = u64::from(pair[1]) * Element::F32.bytes();
        weights.saturating_mul(arithmetic.element().bytes() + master).saturating_add(biases)
    };
    widths.windows(2).map(layer).fold(0, u64::saturating_add)
}

/// Bytes of the optimizer's state: the master weights, with their padding.
#[must_use]
pub fn state_bytes(widths: &[u32], arithmetic: &Arithmetic) -> u64 {
    if !arithmetic.has_master() {
        return 0;
    }
    let layer = |pair: &[u32]| {
        u64::from(arithmetic.pitch(pair[0])).saturating_mul(u64::from(pair[1])).saturating_mul(Element::F32.bytes())
    };
    widths.windows(2).map(layer).fold(0, u64::saturating_add)
}

/// Host memory that a run on the simulated device cannot do without, in bytes: the weights, beside them the values
/// that the largest layer begins with, and what the layers put out for a batch.
#[must_use]
pub fn least_host_bytes(widths: &[u32], arithmetic: &Arithmetic, batch: u32) -> u64 {
    let of_layer =
        |pair: &[u32]| u64::from(pair[0]).saturating_mul(u64::from(pair[1])).saturating_mul(Element::F32.bytes());
    let largest = widths.windows(2).map(of_layer).max().unwrap_or(0);
    let outputs: u64 = widths.iter().map(|width| u64::from(*width)).sum();
    let activations = outputs.saturating_mul(u64::from(batch)).saturating_mul(arithmetic.element().bytes());
    parameter_bytes(widths, arithmetic).saturating_add(largest).saturating_add(activations)
}

/// The batch of one step.
#[derive(Debug)]
pub struct Batch {
    /// `[rows, features]`, stored as [`Arithmetic`] says.
    pub inputs: Matrix,
    /// Class of each row, u32.
    pub labels: DeviceBuffer,
}

/// Destination of a batch's mean loss: an f32.
#[derive(Clone, Copy, Debug)]
pub struct LossSlot {
    /// Address of the f32, or of that of step 0.
    pub addr: u64,
    /// Address of the step's number, if the device keeps it: the loss is then written that many f32 after `addr`, and
    /// the step adds one to the number.
    pub cursor: Option<u64>,
}

impl LossSlot {
    /// The f32 at this address.
    #[must_use]
    pub fn at(addr: u64) -> Self {
        Self { addr, cursor: None }
    }
}

/// Tensors that the forward pass keeps for the backward pass: the input of each layer, and the logits.
#[derive(Debug)]
struct Activations {
    inputs: Vec<Matrix>,
    logits: Matrix,
}

impl Mlp {
    /// A network with fresh weights, for batches of these numbers of rows.
    ///
    /// # Errors
    /// Errors of the allocator and of copies.
    pub fn new(
        context: &Context,
        widths: &[u32],
        mode: InitMode,
        seed: u64,
        arithmetic: Arithmetic,
        batches: &[u32],
    ) -> Result<Self> {
        Self::with_state(context, widths, (mode, seed), arithmetic, batches, None)
    }

    /// The same, with what is kept in pinned host memory.
    ///
    /// # Errors
    /// Errors of the allocator, of copies and of pinning memory.
    pub(crate) fn with_state(
        context: &Context,
        widths: &[u32],
        (mode, seed): (InitMode, u64),
        arithmetic: Arithmetic,
        batches: &[u32],
        offload: Option<OffloadMode>,
    ) -> Result<Self> {
        let mut layers = Vec::with_capacity(widths.len() - 1);
        let mut state = Vec::new();
        for (number, pair) in (0..).zip(widths.windows(2)) {
            let (inputs, outputs) = (pair[0], pair[1]);
            let pitch = arithmetic.pitch(inputs);
            let weight = context.pitched(arithmetic.element(), outputs, inputs, pitch)?;
            let values = initial_weights(mode, seed, number, outputs, inputs);
            context.write_values(&weight, &values)?;
            let master = if arithmetic.has_master() && offload == Some(OffloadMode::Optimizer) {
                let mut master = Element::F32.pack(&values, inputs, pitch);
                // CAST: elements of a matrix in memory. The update reads and writes the padding of the last row, too.
                master.resize(weight.elements() as usize * size_of::<f32>(), 0);
                state.push(master);
                None
            } else if arithmetic.has_master() {
                let master = context.pitched(Element::F32, outputs, inputs, pitch)?;
                context.write_values(&master, &values)?;
                Some(master)
            } else {
                None
            };
            let bias = context.matrix(1, outputs)?;
            context.write_values(&bias, &vec![0f32; outputs as usize])?;
            layers.push(Linear { weight, master, bias });
        }
        let tickets = match products::most_tickets(widths, &arithmetic, batches) {
            0 => None,
            most => Some(context.upload(&vec![0u32; 2 * most])?),
        };
        let offload = if state.is_empty() { None } else { Some(Offload::new(context, &state)?) };
        Ok(Self { layers, arithmetic, offload, tickets })
    }

    /// Arithmetic of the network.
    #[must_use]
    pub fn arithmetic(&self) -> &Arithmetic {
        &self.arithmetic
    }

    fn forward(&self, context: &Context, inputs: Matrix) -> Result<Activations> {
        let _range = context.device.range(format_args!("forward"));
        let mut kept = vec![inputs];
        let last = self.layers.len() - 1;
        for (number, layer) in self.layers.iter().enumerate() {
            let _range = context.device.range(format_args!("layer {}", number + 1));
            let x = &kept[number];
            if number == last {
                let logits = self.logits(context, layer, x)?;
                return Ok(Activations { inputs: kept, logits });
            }
            let y = self.hidden(context, layer, x)?;
            kept.push(y);
        }
        unreachable!("a network has at least one layer")
    }

    /// Forward pass and loss: the input of each layer, and the gradient of the logits.
    fn forward_and_loss(&self, context: &Context, batch: Batch, loss_slot: LossSlot) -> Result<(Vec<Matrix>, Matrix)> {
        let rows = batch.inputs.rows;
        self.forward_and_loss_of_part(context, batch, loss_slot, rows)
    }

    /// The same for a part of a batch of `whole_rows` rows, whose gradients are summed with those of the other parts.
    fn forward_and_loss_of_part(
        &self,
        context: &Context,
        batch: Batch,
        loss_slot: LossSlot,
        whole_rows: u32,
    ) -> Result<(Vec<Matrix>, Matrix)> {
        let Batch { inputs, labels } = batch;
        let Activations { inputs, logits } = self.forward(context, inputs)?;
        let dlogits = self.loss(context, &logits, &labels, loss_slot, whole_rows)?;
        Ok((inputs, dlogits))
    }

    fn backward(&self, context: &Context, mut inputs: Vec<Matrix>, dlogits: Matrix) -> Result<Vec<LinearGradient>> {
        let _range = context.device.range(format_args!("backward"));
        let mut gradients = Vec::with_capacity(self.layers.len());
        let mut dy = dlogits;
        for (number, layer) in self.layers.iter().enumerate().rev() {
            let _range = context.device.range(format_args!("layer {}", number + 1));
            let x = inputs.pop().expect("each layer kept its input");
            gradients.push(self.gradient(context, layer, &dy, &x)?);
            if number > 0 {
                dy = self.input_gradient(context, layer, dy, &x)?;
            }
        }
        gradients.reverse();
        Ok(gradients)
    }

    /// Backward pass and update in one: a layer is stepped when the gradient of its input has been taken. With a stream
    /// for updates, they go beside the rest of the backward pass.
    fn descend(&self, context: &Context, mut inputs: Vec<Matrix>, dlogits: Matrix, learning_rate: f32) -> Result<()> {
        let _range = context.device.range(format_args!("backward"));
        let device = &context.device;
        let apart = device.stream_of(Role::Update) != device.stream();
        // Tensors that updates on another stream read, kept until the streams are synchronized.
        let mut used = Vec::new();
        let mut dy = dlogits;
        for (number, layer) in self.layers.iter().enumerate().rev() {
            let _range = context.device.range(format_args!("layer {}", number + 1));
            let x = inputs.pop().expect("each layer kept its input");
            // The weights of before the step.
            let dx = if number > 0 { Some(self.input_product(context, layer, &dy, Some(&x))?) } else { None };
            if apart {
                device.order_streams(device.stream(), device.stream_of(Role::Update))?;
            }
            let workspace = self.step_layer(context, number, &dy, &x, learning_rate)?;
            if apart {
                used.push((workspace, x, dx.map(|dx| std::mem::replace(&mut dy, dx))));
            } else if let Some(dx) = dx {
                dy = dx;
            }
        }
        if apart {
            device.order_streams(device.stream_of(Role::Update), device.stream())?;
        }
        drop((used, dy));
        Ok(())
    }

    /// Forward and backward pass of one batch; the mean loss goes to `loss_slot`.
    ///
    /// # Errors
    /// Errors of the allocator and of launches.
    pub fn gradients(&self, context: &Context, batch: Batch, loss_slot: LossSlot) -> Result<Vec<LinearGradient>> {
        let (inputs, dlogits) = self.forward_and_loss(context, batch, loss_slot)?;
        self.backward(context, inputs, dlogits)
    }

    /// One step of gradient descent with gradients that were taken before; they are freed.
    ///
    /// # Errors
    /// Errors of launches.
    pub fn update(&self, context: &Context, gradients: Vec<LinearGradient>, learning_rate: f32) -> Result<()> {
        let _range = context.device.range(format_args!("update"));
        for (number, gradient) in gradients.into_iter().enumerate() {
            self.update_layer(context, number, &gradient, learning_rate)?;
        }
        Ok(())
    }

    /// All of one training step: forward pass, loss, backward pass, update. The mean loss from before the update goes to
    /// `loss_slot`.
    ///
    /// # Errors
    /// Errors of the allocator and of launches.
    pub fn step(&self, context: &Context, batch: Batch, loss_slot: LossSlot, learning_rate: f32) -> Result<()> {
        self.begin_offload(context, self.arithmetic.fuse == FuseMode::Update)?;
        if self.arithmetic.fuse == FuseMode::Update {
            let (inputs, dlogits) = self.forward_and_loss(context, batch, loss_slot)?;
            return self.descend(context, inputs, dlogits, learning_rate);
        }
        let gradients = self.gradients(context, batch, loss_slot)?;
        self.update(context, gradients, learning_rate)
    }

    /// Forward pass of one batch; the mean loss goes to `loss_slot` (one f32), the number of rows whose largest logit
    /// is their label to `correct_slot` (one u32).
    ///
    /// # Errors
    /// Errors of the allocator and of launches.
    pub fn evaluate(&self, context: &Context, batch: Batch, loss_slot: u64, correct_slot: u64) -> Result<()> {
        let Batch { inputs, labels } = batch;
        // Tensors for a backward pass are freed immediately.
        let Activations { logits, .. } = self.forward(context, inputs)?;
        self.judge(context, &logits, &labels, loss_slot, correct_slot)
    }
}

const NORMAL_DEVIATION: f64 = 0.05;

/// Weights of one layer, `[outputs, inputs]` row by row. The same seed and layer give the same bits.
#[must_use]
pub fn initial_weights(mode: InitMode, seed: u64, layer: u32, outputs: u32, inputs: u32) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Streams of one generator never overlap, so each layer has numbers of its own.
    rng.set_stream(1 + u64::from(layer));
    let count = outputs as usize * inputs as usize;
    let normal = |rng: &mut ChaCha8Rng, deviation: f64| -> Vec<f32> {
        // CAST: weights are kept in f32.
        (0..count).map(|_| (deviation * Distribution::<f64>::sample(&StandardNormal, rng)) as f32).collect()
    };
    match mode {
        InitMode::Normal => normal(&mut rng, NORMAL_DEVIATION),
        InitMode::Kaiming => normal(&mut rng, (2.0 / f64::from(inputs)).sqrt()),
        InitMode::Xavier => {
            let bound = (6.0 / (f64::from(inputs) + f64::from(outputs))).sqrt();
            // CAST: weights are kept in f32.
            let sample = |rng: &mut ChaCha8Rng| -> f64 { StandardUniform.sample(rng) };
            (0..count).map(|_| (bound * (2.0 * sample(&mut rng) - 1.0)) as f32).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: &[f32]) -> (f64, f64) {
        let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / values.len() as f64;
        (mean, variance.sqrt())
    }

    #[test]
    fn deviations_are_those_of_the_papers() {
        let (inputs, outputs) = (300, 200);
        let xavier = (2.0 / f64::from(inputs + outputs)).sqrt();
        let kaiming = (2.0 / f64::from(inputs)).sqrt();
        for (mode, expected) in [(InitMode::Normal, 0.05), (InitMode::Xavier, xavier), (InitMode::Kaiming, kaiming)] {
            let (mean, deviation) = moments(&initial_weights(mode, 7, 0, outputs, inputs));
            assert!(mean.abs() < 0.02 * expected, "{mode:?}: mean {mean}");
            assert!((deviation / expected - 1.0).abs() < 0.02, "{mode:?}: {deviation} instead of {expected}");
        }
    }

    #[test]
    fn seeds_and_layers_differ_and_repeat() {
        let draw = |seed, layer| initial_weights(InitMode::Kaiming, seed, layer, 4, 4);
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_ne!(draw(1, 0), draw(2, 0));
        assert_ne!(draw(1, 0), draw(1, 1));
    }
}
