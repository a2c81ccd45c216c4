//! What launches need besides their tensors: memory for sums that blocks share, and tickets.

use super::Mlp;
use super::products::LayerLaunches;
use crate::arithmetic::{Arithmetic, FuseMode};
use crate::error::Result;
use crate::tensor::Context;
use kernels::{LinearBackward, LinearForward, SoftmaxLoss};
use vramlab::DeviceBuffer;

impl Mlp {
    /// Address of the tickets; zero if no launch of this model has any.
    pub(super) fn tickets(&self) -> u64 {
        self.tickets.as_ref().map_or(0, |tickets| tickets.addr().get())
    }

    /// Address of the tickets for launches on the stream of updates, which may run at the same time as others.
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
            let both = LinearBackward::of(input, update).map_or(0, |both| both.tickets());
            let tickets = [forward.tickets(), logits.tickets(), input.tickets(), gradient.tickets(), update.tickets()];
            most = tickets.into_iter().fold(most, u64::max).max(both);
        }
    }
    // CAST: a launch has at most 2^31 blocks.
    most as usize
}
