//! The kernels of a layer's GEMMs, for the record: they depend on shapes and on the GPU.

use super::Mlp;
use crate::arithmetic::{Arithmetic, FuseMode};
use crate::error::Result;
use crate::tensor::Context;
use kernels::{
    CudaKernels, Gemm, GemmLayout, LinearBackwardInput, LinearForward, LinearUpdate, LinearWeightGradient, Operation,
    SoftmaxLoss,
};
use serde::Serialize;
use vramlab::DeviceBuffer;

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

/// The kernels of all layers' GEMMs of a network with these widths, for batches of this many rows on this GPU; without
/// a GPU, the simulated kernels.
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
    /// The launches for this many rows, and a layer with these inputs and outputs.
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

impl Mlp {
    /// Address of the tickets; zero if no launch of this model has any.
    pub(super) fn tickets(&self) -> u64 {
        self.tickets.as_ref().map_or(0, |tickets| tickets.addr().get())
    }

    /// Address of the tickets for launches on the stream of updates, which may run at the same time as others.
    pub(super) fn update_tickets(&self) -> u64 {
        self.tickets.as_ref().map_or(0, |tickets| tickets.addr().get() + tickets.bytes() / 2)
    }

    /// Memory for one launch with this many tickets, and its address; no memory and a meaningless address if none is
    /// needed.
    ///
    /// # Panics
    /// When the model has fewer tickets, because it was made for batches of other sizes.
    pub(super) fn workspace(&self, context: &Context, bytes: u64, tickets: u64) -> Result<(Option<DeviceBuffer>, u64)> {
        let held = self.tickets.as_ref().map_or(0, DeviceBuffer::bytes);
        assert!(8 * tickets <= held, "a batch should be of a size that the model was made for");
        if bytes == 0 {
            return Ok((None, 0));
        }
        // CAST: far below the address space.
        let buffer = context.allocate::<u8>(bytes as usize)?;
        let addr = buffer.addr().get();
        Ok((Some(buffer), addr))
    }
}

/// Tickets of the launch that needs the most, for a network with these widths and batches of these numbers of rows.
pub(super) fn most_tickets(widths: &[u32], arithmetic: &Arithmetic, batches: &[u32]) -> usize {
    if arithmetic.is_plain() {
        return 0;
    }
    let mut most = 0;
    for &rows in batches {
        if arithmetic.fuse != FuseMode::None {
            let classes = widths.last().copied().unwrap_or(1);
            let loss = SoftmaxLoss { rows, classes, ..Default::default() };
            most = most.max(loss.tickets());
        }
        for pair in widths.windows(2) {
            let LayerLaunches { forward, input, gradient, update } =
                LayerLaunches::new(arithmetic, rows, [pair[0], pair[1]]);
            let logits = LinearForward { y_f32: true, ..forward };
            let tickets = [forward.tickets(), logits.tickets(), input.tickets(), gradient.tickets(), update.tickets()];
            most = tickets.into_iter().fold(most, u64::max);
        }
    }
    // CAST: a launch has at most 2^31 blocks.
    most as usize
}
