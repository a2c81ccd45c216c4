//! What launches need besides their tensors: memory for sums that blocks share, and tickets.

use super::Mlp;
use crate::arithmetic::{Arithmetic, FuseMode};
use crate::error::Result;
use crate::tensor::Context;
use allocators::DeviceBuffer;
use kernels::{LinearBackward, LinearBackwardInput, LinearForward, LinearUpdate, LinearWeightGradient, SoftmaxLoss};

impl Mlp {
    /// Address of the tickets; zero if no launch of this model has any.
    pub(super) fn tickets(&self) -> u64 {
        self.tickets.as_ref().map_or(0, |tickets| tickets.addr().get())
    }

    /// The same for launches on the stream of updates, which may run at the same time as others.
    pub(super) fn update_tickets(&self) -> u64 {
        self.tickets.as_ref().map_or(0, |tickets| tickets.addr().get() + tickets.bytes() / 2)
    }

    /// Memory for one launch with so many tickets, and its address; none, and an address that means nothing, where none is
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
    if arithmetic.plain().is_some() {
        return 0;
    }
    let (engine, precision) = (arithmetic.engine(), arithmetic.precision());
    let mut most = 0;
    for &rows in batches {
        if arithmetic.fuse != FuseMode::None {
            let loss = SoftmaxLoss {
                element: arithmetic.element(),
                rows,
                classes: widths.last().copied().unwrap_or(1),
                logits: 0,
                labels: 0,
                dlogits: None,
                dlogits_pitch: 0,
                scale: 1.0,
                loss: 0,
                correct: None,
                cursor: None,
                advance: false,
                workspace: 0,
                tickets: 0,
            };
            most = most.max(loss.tickets());
        }
        for pair in widths.windows(2) {
            let (inputs, outputs) = (pair[0], pair[1]);
            let (x_pitch, y_pitch) = (arithmetic.pitch(inputs), arithmetic.pitch(outputs));
            for y_f32 in [false, true] {
                let forward = LinearForward {
                    engine,
                    precision,
                    rows,
                    inputs,
                    outputs,
                    x: 0,
                    x_pitch,
                    weight: 0,
                    weight_pitch: x_pitch,
                    bias: None,
                    relu: false,
                    y: 0,
                    y_pitch,
                    y_f32,
                    workspace: 0,
                    tickets: 0,
                };
                most = most.max(forward.tickets());
            }
            let backward = LinearBackwardInput {
                engine,
                precision,
                rows,
                inputs,
                outputs,
                dy: 0,
                dy_pitch: y_pitch,
                weight: 0,
                weight_pitch: x_pitch,
                mask: None,
                dx: 0,
                dx_pitch: x_pitch,
                workspace: 0,
                tickets: 0,
            };
            let gradient = LinearWeightGradient {
                engine,
                precision,
                rows,
                inputs,
                outputs,
                dy: 0,
                dy_pitch: y_pitch,
                x: 0,
                x_pitch,
                scale: 1.0,
                dweight: 0,
                dweight_pitch: x_pitch,
                dbias: None,
                workspace: 0,
                tickets: 0,
            };
            let update = LinearUpdate {
                engine,
                precision,
                rows,
                inputs,
                outputs,
                dy: 0,
                dy_pitch: y_pitch,
                x: 0,
                x_pitch,
                rate: 0.0,
                weight: 0,
                weight_pitch: x_pitch,
                master: None,
                bias: 0,
                workspace: 0,
                tickets: 0,
            };
            let both = LinearBackward::of(backward, update).map_or(0, |both| both.tickets());
            most = most.max(backward.tickets()).max(gradient.tickets()).max(update.tickets()).max(both);
        }
    }
    // CAST: a launch has at most 2^31 blocks.
    most as usize
}
