//! Which kernels a layer's products are, for the record: they depend on shapes and on the GPU.

use crate::arithmetic::{Arithmetic, FuseMode};
use crate::error::Result;
use kernels::{
    CudaKernels, Gemm, GemmLayout, LinearBackward, LinearBackwardInput, LinearForward, LinearUpdate,
    LinearWeightGradient, Operation,
};
use serde::Serialize;

/// The kernels of one layer's products, by their entry points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerProducts {
    /// The layer's output.
    pub forward: &'static str,
    /// The gradient of the layer's input, which the first layer does not need.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input: Option<&'static str>,
    /// The gradient of the weights, or their update.
    pub weight: &'static str,
}

/// The kernels of all layers' products of a network with these widths, for batches of so many rows on this GPU; without one,
/// those that are simulated.
///
/// # Errors
/// As for [`CudaKernels::prepare`].
pub fn products(
    widths: &[u32],
    arithmetic: &Arithmetic,
    rows: u32,
    cuda: Option<&CudaKernels>,
) -> Result<Vec<LayerProducts>> {
    let of_layer = |(number, pair): (usize, &[u32])| {
        let (inputs, outputs) = (pair[0], pair[1]);
        if arithmetic.is_plain() {
            let gemm = |layout, m, n, k| Gemm { layout, m, n, k, a: 0, b: 0, c: 0 }.name();
            return Ok(LayerProducts {
                forward: gemm(GemmLayout::NT, rows, outputs, inputs),
                input: (number > 0).then(|| gemm(GemmLayout::NN, rows, inputs, outputs)),
                weight: gemm(GemmLayout::TN, outputs, inputs, rows),
            });
        }
        let LayerLaunches { forward, input, gradient, update } =
            LayerLaunches::new(arithmetic, rows, [inputs, outputs]);
        let forward = forward.kernel_on(cuda)?;
        let steps = arithmetic.fuse == FuseMode::Update;
        let both = LinearBackward::of(input, update).filter(|_| steps && number > 0);
        if let Some(both) = both
            && both.is_one_kernel_on(cuda)?
        {
            return Ok(LayerProducts { forward, input: Some(both.name()), weight: both.name() });
        }
        Ok(LayerProducts {
            forward,
            input: if number > 0 { Some(input.kernel_on(cuda)?) } else { None },
            weight: if steps { update.kernel_on(cuda)? } else { gradient.kernel_on(cuda)? },
        })
    };
    widths.windows(2).enumerate().map(of_layer).collect()
}

/// A layer's launches without addresses: what depends on their shapes alone can be asked of them.
#[derive(Clone, Copy, Debug)]
pub struct LayerLaunches {
    /// The layer's output as that of a hidden layer is stored, with nothing fused.
    pub forward: LinearForward,
    /// The gradient of its input, without a mask.
    pub input: LinearBackwardInput,
    /// The gradient of its weights, without that of the bias.
    pub gradient: LinearWeightGradient,
    /// The update of its weights, and of masters if it has them.
    pub update: LinearUpdate,
}

impl LayerLaunches {
    /// For so many rows, and a layer with these inputs and outputs.
    #[must_use]
    pub fn new(arithmetic: &Arithmetic, rows: u32, [inputs, outputs]: [u32; 2]) -> Self {
        let precision = arithmetic.precision();
        let (x_pitch, y_pitch) = (arithmetic.pitch(inputs), arithmetic.pitch(outputs));
        let master = arithmetic.has_master().then_some(0);
        Self {
            forward: LinearForward {
                precision,
                rows,
                inputs,
                outputs,
                x_pitch,
                weight_pitch: x_pitch,
                y_pitch,
                ..Default::default()
            },
            input: LinearBackwardInput {
                precision,
                rows,
                inputs,
                outputs,
                dy_pitch: y_pitch,
                weight_pitch: x_pitch,
                dx_pitch: x_pitch,
                ..Default::default()
            },
            gradient: LinearWeightGradient {
                precision,
                rows,
                inputs,
                outputs,
                dy_pitch: y_pitch,
                x_pitch,
                scale: 1.0,
                dweight_pitch: x_pitch,
                ..Default::default()
            },
            update: LinearUpdate {
                precision,
                rows,
                inputs,
                outputs,
                dy_pitch: y_pitch,
                x_pitch,
                weight_pitch: x_pitch,
                master,
                ..Default::default()
            },
        }
    }
}
