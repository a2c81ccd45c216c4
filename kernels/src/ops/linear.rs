//! A linear layer's three products with what comes before and after them; kernels in `cuda/linear.cuh`.
//!
//! Matrices have a pitch ([`Element::pitch`](crate::Element::pitch)): elements from one row to the next. Biases,
//! gradients and master weights are f32 whatever the precision.

use crate::precision::Precision;

/// `y = x·weightᵀ (+ bias) (then ReLU)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearForward {
    /// Storage of x and weight, and how products are computed.
    pub precision: Precision,
    /// Rows of x and y: examples.
    pub rows: u32,
    /// Columns of x and weight.
    pub inputs: u32,
    /// Rows of weight, columns of y.
    pub outputs: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Address of the weights, `[outputs, inputs]`.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the bias, `f32[outputs]`, if it is to be added.
    pub bias: Option<u64>,
    /// Whether negative results become zero.
    pub relu: bool,
    /// Address of y, `[rows, outputs]`, written.
    pub y: u64,
    /// Elements from one row of y to the next.
    pub y_pitch: u32,
    /// Whether y is f32 whatever the precision: logits.
    pub y_f32: bool,
    /// Address of [`workspace_bytes`](Self::workspace_bytes) bytes for sums that blocks share; any value if that is zero.
    pub workspace: u64,
    /// Address of [`tickets`](Self::tickets) u32 that are zero, and are zero again when the launch is done.
    pub tickets: u64,
}

/// `dx = dy·weight`, zero where the layer's input was not positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearBackwardInput {
    /// Storage of dy, weight, mask and dx, and how products are computed.
    pub precision: Precision,
    /// Rows of dy and dx: examples.
    pub rows: u32,
    /// Columns of weight and dx.
    pub inputs: u32,
    /// Columns of dy, rows of weight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of the weights, `[outputs, inputs]`.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the output of the ReLU before this layer, `[rows, inputs]` with dx's pitch: where it is not positive dx
    /// is zero.
    pub mask: Option<u64>,
    /// Address of dx, `[rows, inputs]`, written.
    pub dx: u64,
    /// Elements from one row of dx to the next.
    pub dx_pitch: u32,
    /// As in [`LinearForward`].
    pub workspace: u64,
    /// As in [`LinearForward`].
    pub tickets: u64,
}

/// `dweight = dyᵀ·x · scale` and `dbias = Σ_rows dy · scale`, both f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearWeightGradient {
    /// Storage of dy and x, and how products are computed.
    pub precision: Precision,
    /// Rows of dy and x: examples.
    pub rows: u32,
    /// Columns of x and dweight.
    pub inputs: u32,
    /// Columns of dy, rows of dweight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Factor of both results: one over the loss scale.
    pub scale: f32,
    /// Address of the weights' gradient, `f32[outputs, inputs]`, written.
    pub dweight: u64,
    /// Elements from one row of the gradient to the next.
    pub dweight_pitch: u32,
    /// Address of the bias' gradient, `f32[outputs]`, written, if it is wanted.
    pub dbias: Option<u64>,
    /// As in [`LinearForward`].
    pub workspace: u64,
    /// As in [`LinearForward`].
    pub tickets: u64,
}

/// `weight -= rate · dyᵀ·x` and `bias -= rate · Σ_rows dy`: a gradient that is never written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearUpdate {
    /// Storage of dy, x and weight, and how products are computed.
    pub precision: Precision,
    /// Rows of dy and x: examples.
    pub rows: u32,
    /// Columns of x and weight.
    pub inputs: u32,
    /// Columns of dy, rows of weight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Learning rate over loss scale.
    pub rate: f32,
    /// Address of the weights, `[outputs, inputs]`, read (without a master) and written.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the master weights, `f32[outputs, inputs]` with the weights' pitch, read and written: the weights become
    /// their rounding. Only for halves.
    pub master: Option<u64>,
    /// Address of the bias, `f32[outputs]`, read and written.
    pub bias: u64,
    /// As in [`LinearForward`].
    pub workspace: u64,
    /// As in [`LinearForward`].
    pub tickets: u64,
}
