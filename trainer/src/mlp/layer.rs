//! The operations of one layer: forward, backward and update.

use super::{LayerLaunches, Linear, LinearGradient, Mlp};
use crate::arithmetic::FuseMode;
use crate::device::Role;
use crate::error::Result;
use crate::tensor::{Context, Matrix};
use kernels::{
    AddBias, BiasGradient, Element, Gemm, GemmLayout, LinearBackwardInput, LinearForward, LinearUpdate,
    LinearWeightGradient, Relu, ReluBackward, Sgd,
};
use vramlab::DeviceBuffer;

/// An f32 product that is all of its launch.
fn plain_product(
    context: &Context,
    layout: GemmLayout,
    a: &Matrix,
    b: &Matrix,
    (m, n, k): (u32, u32, u32),
) -> Result<Matrix> {
    let out = context.matrix(m, n)?;
    let gemm = Gemm { layout, m, n, k, a: a.addr(), b: b.addr(), c: out.addr() };
    // SAFETY: the three matrices are live and of these shapes; they are freed on the stream after this launch.
    unsafe { context.device.run(&gemm)? };
    Ok(out)
}

/// Addresses of the gradients of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GradientSlot {
    /// Of the weights, f32 with the weights' pitch.
    pub(super) weight: u64,
    /// Of the bias, f32.
    pub(super) bias: u64,
}

impl Mlp {
    /// A matrix as activations and their gradients are stored.
    pub(super) fn activation(&self, context: &Context, rows: u32, cols: u32) -> Result<Matrix> {
        context.pitched(self.arithmetic.element(), rows, cols, self.arithmetic.pitch(cols))
    }

    /// A layer's launches for this many rows, without addresses.
    fn launches(&self, layer: &Linear, rows: u32) -> LayerLaunches {
        LayerLaunches::new(&self.arithmetic, rows, [layer.weight.cols, layer.weight.rows])
    }

    fn fused(&self) -> bool {
        self.arithmetic.fuse != FuseMode::None
    }

    /// `x · weightᵀ`, if things are fused with the bias, and with ReLU if it is asked for. Logits are f32 without padding.
    fn forward_product(&self, context: &Context, layer: &Linear, x: &Matrix, to: Output) -> Result<Matrix> {
        let (rows, outputs) = (x.rows, layer.weight.rows);
        if self.arithmetic.is_plain() {
            return plain_product(context, GemmLayout::NT, x, &layer.weight, (rows, outputs, x.cols));
        }
        let y = match to {
            Output::Hidden => self.activation(context, rows, outputs)?,
            Output::Logits => context.matrix(rows, outputs)?,
        };
        let mut forward = LinearForward {
            x: x.addr(),
            weight: layer.weight.addr(),
            bias: self.fused().then(|| layer.bias.addr()),
            relu: self.fused() && to == Output::Hidden,
            y: y.addr(),
            y_pitch: y.pitch,
            y_f32: to == Output::Logits,
            tickets: self.tickets(),
            ..self.launches(layer, rows).forward
        };
        let (_workspace, addr) = self.workspace(context, forward.workspace_bytes(), forward.tickets())?;
        forward.workspace = addr;
        // SAFETY: matrices, bias and workspace are live and of these shapes; they are freed on the stream after this
        // launch. The tickets suffice for every launch of the model and are zero between launches.
        unsafe { context.device.run(&forward)? };
        Ok(y)
    }

    /// One layer without its ReLU, of operations of their own.
    fn linear(&self, context: &Context, layer: &Linear, x: &Matrix, to: Output) -> Result<Matrix> {
        let product = self.forward_product(context, layer, x, to)?;
        let (rows, cols) = (product.rows, product.cols);
        let out = context.pitched(product.element, rows, cols, product.pitch)?;
        let add = AddBias {
            element: product.element,
            rows,
            cols,
            pitch: product.pitch,
            x: product.addr(),
            bias: layer.bias.addr(),
            y: out.addr(),
        };
        // SAFETY: all three are live and of these shapes; they are freed on the stream after this launch.
        unsafe { context.device.run(&add)? };
        Ok(out)
    }

    /// The last layer.
    pub(super) fn logits(&self, context: &Context, layer: &Linear, x: &Matrix) -> Result<Matrix> {
        match self.fused() {
            true => self.forward_product(context, layer, x, Output::Logits),
            false => self.linear(context, layer, x, Output::Logits),
        }
    }

    /// A layer with its ReLU.
    pub(super) fn hidden(&self, context: &Context, layer: &Linear, x: &Matrix) -> Result<Matrix> {
        if self.fused() {
            return self.forward_product(context, layer, x, Output::Hidden);
        }
        // The backward pass of ReLU needs only its output, so its input is freed immediately.
        let linear = self.linear(context, layer, x, Output::Hidden)?;
        let out = self.activation(context, linear.rows, linear.cols)?;
        let relu = Relu { element: linear.element, len: linear.elements(), x: linear.addr(), y: out.addr() };
        // SAFETY: both matrices are live, of one shape, and freed on the stream after this launch.
        unsafe { context.device.run(&relu)? };
        Ok(out)
    }

    /// `dy · weight`, zero where the mask is not positive.
    pub(super) fn input_product(
        &self,
        context: &Context,
        layer: &Linear,
        dy: &Matrix,
        mask: Option<&Matrix>,
    ) -> Result<Matrix> {
        let (rows, inputs) = (dy.rows, layer.weight.cols);
        if self.arithmetic.is_plain() {
            return plain_product(context, GemmLayout::NN, dy, &layer.weight, (rows, inputs, dy.cols));
        }
        let dx = self.activation(context, rows, inputs)?;
        let mut backward = self.backward_input(layer, dy, mask, &dx);
        let (_workspace, addr) = self.workspace(context, backward.workspace_bytes(), backward.tickets())?;
        backward.workspace = addr;
        // SAFETY: as for the forward product; a mask is an activation of dx's shape and pitch.
        unsafe { context.device.run(&backward)? };
        Ok(dx)
    }

    /// The launch of [`input_product`](Self::input_product), without its workspace.
    fn backward_input(&self, layer: &Linear, dy: &Matrix, mask: Option<&Matrix>, dx: &Matrix) -> LinearBackwardInput {
        LinearBackwardInput {
            dy: dy.addr(),
            weight: layer.weight.addr(),
            mask: mask.map(Matrix::addr),
            dx: dx.addr(),
            tickets: self.tickets(),
            ..self.launches(layer, dy.rows).input
        }
    }

    /// The gradient of what went into the ReLU before this layer; `x` is what came out of it.
    pub(super) fn input_gradient(&self, context: &Context, layer: &Linear, dy: Matrix, x: &Matrix) -> Result<Matrix> {
        if self.fused() {
            return self.input_product(context, layer, &dy, Some(x));
        }
        let da = self.input_product(context, layer, &dy, None)?;
        let dz = self.activation(context, x.rows, x.cols)?;
        let relu = ReluBackward { element: x.element, len: x.elements(), y: x.addr(), dy: da.addr(), dx: dz.addr() };
        // SAFETY: all three are live and of one shape; they are freed on the stream after this launch.
        unsafe { context.device.run(&relu)? };
        drop(dy);
        Ok(dz)
    }

    /// Gradients of a layer's weights and bias.
    pub(super) fn gradient(
        &self,
        context: &Context,
        layer: &Linear,
        dy: &Matrix,
        x: &Matrix,
    ) -> Result<LinearGradient> {
        let weight = context.pitched(Element::F32, dy.cols, x.cols, layer.weight.pitch)?;
        let early = if self.fused() { Some(context.matrix(1, dy.cols)?) } else { None };
        let at = weight.addr();
        // SAFETY: both are live and of these shapes; they are freed on the stream after this launch.
        unsafe { self.weight_gradient(context, layer, dy, x, at, early.as_ref().map(Matrix::addr))? };
        let bias = match early {
            Some(bias) => bias,
            None => {
                let bias = context.matrix(1, dy.cols)?;
                // SAFETY: as above.
                unsafe { Self::bias_gradient(context, dy, bias.addr())? };
                bias
            }
        };
        Ok(LinearGradient { weight, bias })
    }

    /// Writes the gradients of a layer's weights and bias to a slot.
    ///
    /// # Safety
    /// The slot is live, of the layer's shapes, and is freed on the stream after these launches.
    pub(super) unsafe fn gradient_to(
        &self,
        context: &Context,
        layer: &Linear,
        dy: &Matrix,
        x: &Matrix,
        slot: GradientSlot,
    ) -> Result<()> {
        let early = self.fused().then_some(slot.bias);
        // SAFETY: passed on.
        unsafe { self.weight_gradient(context, layer, dy, x, slot.weight, early)? };
        if early.is_none() {
            // SAFETY: passed on.
            unsafe { Self::bias_gradient(context, dy, slot.bias)? };
        }
        Ok(())
    }

    /// Writes the gradient of a layer's weights, and of its bias where they are fused.
    ///
    /// # Safety
    /// The addresses are of live memory of the layer's shapes, which is freed on the stream after this launch.
    unsafe fn weight_gradient(
        &self,
        context: &Context,
        layer: &Linear,
        dy: &Matrix,
        x: &Matrix,
        dweight: u64,
        dbias: Option<u64>,
    ) -> Result<()> {
        let (rows, inputs, outputs) = (dy.rows, x.cols, dy.cols);
        if self.arithmetic.is_plain() {
            let gemm =
                Gemm { layout: GemmLayout::TN, m: outputs, n: inputs, k: rows, a: dy.addr(), b: x.addr(), c: dweight };
            // SAFETY: the caller vouches for the result; the two matrices are live and of these shapes, and are freed on the
            // stream after this launch.
            return unsafe { context.device.run(&gemm) };
        }
        // Not divided by the loss scale: the update does that.
        let mut gradient = LinearWeightGradient {
            dy: dy.addr(),
            x: x.addr(),
            dweight,
            dbias,
            tickets: self.tickets(),
            ..self.launches(layer, rows).gradient
        };
        let (_workspace, addr) = self.workspace(context, gradient.workspace_bytes(), gradient.tickets())?;
        gradient.workspace = addr;
        // SAFETY: as for the forward product; the caller vouches for the result.
        unsafe { context.device.run(&gradient) }
    }

    /// Writes the gradient of a layer's bias.
    ///
    /// # Safety
    /// The address is of live memory for `dy.cols` f32, which is freed on the stream after this launch.
    unsafe fn bias_gradient(context: &Context, dy: &Matrix, db: u64) -> Result<()> {
        let sum =
            BiasGradient { element: dy.element, rows: dy.rows, cols: dy.cols, pitch: dy.pitch, dy: dy.addr(), db };
        // SAFETY: the caller vouches for the result; `dy` is live and freed on the stream after this launch.
        unsafe { context.device.run(&sum) }
    }

    /// The step for gradients that are multiplied by the loss scale.
    fn rate(&self, learning_rate: f32) -> f32 {
        learning_rate / self.arithmetic.loss_scale
    }

    /// Steps the layer of this number along its gradient.
    pub(super) fn update_layer(
        &self,
        context: &Context,
        number: usize,
        gradient: &LinearGradient,
        learning_rate: f32,
    ) -> Result<()> {
        let layer = &self.layers[number];
        let slot = GradientSlot { weight: gradient.weight.addr(), bias: gradient.bias.addr() };
        let stream = context.device.stream();
        let fetched = self.offload.as_ref().map(|offload| offload.take(context, number, stream)).transpose()?;
        let master = fetched.as_ref().map(|master| master.addr().get()).or(layer.master.as_ref().map(Matrix::addr));
        // SAFETY: the gradient is live, of the layer's shapes and pitch, and is freed on the stream after these launches. State from
        // the host is of the weights' shape and pitch, and what frees it waits for these launches.
        unsafe { self.update_with(context, layer, master, slot, learning_rate)? };
        match (&self.offload, fetched) {
            (Some(offload), Some(master)) => offload.put_back(context, number, master, stream),
            _ => Ok(()),
        }
    }

    /// Steps a layer along the gradient in a slot.
    ///
    /// # Safety
    /// The slot is live, of the layer's shapes and pitch, and is freed on the stream after these launches.
    pub(super) unsafe fn update_from(
        &self,
        context: &Context,
        layer: &Linear,
        slot: GradientSlot,
        learning_rate: f32,
    ) -> Result<()> {
        // SAFETY: passed on; the master weights are the layer's own.
        unsafe { self.update_with(context, layer, layer.master.as_ref().map(Matrix::addr), slot, learning_rate) }
    }

    /// The same with master weights at an address.
    ///
    /// # Safety
    /// As for [`update_from`](Self::update_from), of the slot and of the master weights.
    unsafe fn update_with(
        &self,
        context: &Context,
        layer: &Linear,
        master: Option<u64>,
        slot: GradientSlot,
        learning_rate: f32,
    ) -> Result<()> {
        let pairs = [(&layer.weight, master, slot.weight), (&layer.bias, None, slot.bias)];
        for (weights, master, gradient) in pairs {
            let sgd = Sgd {
                element: weights.element,
                len: weights.elements(),
                learning_rate: self.rate(learning_rate),
                gradient,
                weights: weights.addr(),
                master,
            };
            // SAFETY: the weights are live and of one shape and pitch; the caller vouches for the gradient.
            unsafe { context.device.run(&sgd)? };
        }
        Ok(())
    }

    /// Steps a layer along a gradient that is never written, on the stream of updates. The workspace must be kept until that
    /// stream has passed the launch.
    pub(super) fn step_layer(
        &self,
        context: &Context,
        number: usize,
        dy: &Matrix,
        x: &Matrix,
        learning_rate: f32,
    ) -> Result<Option<DeviceBuffer>> {
        let mut update = self.update_by(&self.layers[number], dy, x, learning_rate);
        let (workspace, addr) = self.workspace(context, update.workspace_bytes(), update.tickets())?;
        update.workspace = addr;
        let _on = context.device.on(Role::Update);
        let stream = context.device.stream();
        let fetched = self.offload.as_ref().map(|offload| offload.take(context, number, stream)).transpose()?;
        if let Some(master) = &fetched {
            update.master = Some(master.addr().get());
        }
        // SAFETY: as for the forward product; nothing else that is queued before this launch's end reads the weights. The
        // caller keeps all that the launch reads, if its stream is another.
        unsafe { context.device.run(&update)? };
        if let (Some(offload), Some(master)) = (&self.offload, fetched) {
            offload.put_back(context, number, master, stream)?;
        }
        Ok(workspace)
    }

    /// The launch of [`step_layer`](Self::step_layer), without its workspace.
    fn update_by(&self, layer: &Linear, dy: &Matrix, x: &Matrix, learning_rate: f32) -> LinearUpdate {
        LinearUpdate {
            dy: dy.addr(),
            x: x.addr(),
            rate: self.rate(learning_rate),
            weight: layer.weight.addr(),
            master: layer.master.as_ref().map(Matrix::addr),
            bias: layer.bias.addr(),
            tickets: self.update_tickets(),
            ..self.launches(layer, dy.rows).update
        }
    }
}

/// Destination of a layer's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Hidden,
    Logits,
}
