//! The loss of a batch, its gradient, and how many rows were right.

use super::{LossSlot, Mlp};
use crate::arithmetic::FuseMode;
use crate::error::Result;
use crate::tensor::{Context, Matrix};
use kernels::{AdvanceCursor, CountCorrect, CrossEntropyLoss, MeanLoss, SoftmaxCrossEntropy, SoftmaxLoss};
use vramlab::DeviceBuffer;

/// Batches of more rows take a launch for the rows and one for their mean, which use the whole GPU.
const ROWS_IN_ONE_LAUNCH: u32 = 4096;

impl Mlp {
    fn in_one_launch(&self, rows: u32) -> bool {
        self.arithmetic.fuse != FuseMode::None && rows <= ROWS_IN_ONE_LAUNCH
    }

    /// Writes the mean loss to `loss_slot` and gives the gradient of the logits, multiplied by the loss scale. The gradient is that of
    /// the mean over `whole_rows` rows, of which the batch may be a part.
    pub(super) fn loss(
        &self,
        context: &Context,
        logits: &Matrix,
        labels: &DeviceBuffer,
        loss_slot: LossSlot,
        whole_rows: u32,
    ) -> Result<Matrix> {
        let _range = context.device.range(format_args!("loss"));
        let (rows, classes) = (logits.rows, logits.cols);
        // CAST: a batch's rows are far below 2^24, so the quotient is exact to rounding.
        let scale = self.arithmetic.loss_scale / whole_rows as f32;
        if self.in_one_launch(rows) {
            let dlogits = self.activation(context, rows, classes)?;
            let mut loss = SoftmaxLoss {
                rows,
                classes,
                logits: logits.addr(),
                labels: labels.addr().get(),
                element: dlogits.element,
                dlogits: Some(dlogits.addr()),
                dlogits_pitch: dlogits.pitch,
                scale,
                loss: loss_slot.addr,
                cursor: loss_slot.cursor,
                advance: loss_slot.cursor.is_some(),
                tickets: self.tickets(),
                ..Default::default()
            };
            let (_workspace, addr) = self.workspace(context, loss.workspace_bytes(), loss.tickets())?;
            loss.workspace = addr;
            // SAFETY: all buffers are live and of these shapes; they are freed on the stream after this launch. The
            // caller keeps the slot.
            unsafe { context.device.run(&loss)? };
            return Ok(dlogits);
        }
        let losses = context.matrix(rows, 1)?;
        let dlogits = self.activation(context, rows, classes)?;
        let loss = SoftmaxCrossEntropy {
            rows,
            classes,
            logits: logits.addr(),
            labels: labels.addr().get(),
            losses: losses.addr(),
            element: dlogits.element,
            dlogits: dlogits.addr(),
            dlogits_pitch: dlogits.pitch,
            scale,
        };
        // SAFETY: all buffers are live and of these shapes; they are freed on the stream after this launch.
        unsafe { context.device.run(&loss)? };
        let mean = MeanLoss { rows, losses: losses.addr(), out: loss_slot.addr, cursor: loss_slot.cursor };
        // SAFETY: as above; the caller keeps the slot.
        unsafe { context.device.run(&mean)? };
        if let Some(cursor) = loss_slot.cursor {
            // SAFETY: the caller keeps the cursor, which only launches of this stream read.
            unsafe { context.device.run(&AdvanceCursor { cursor })? };
        }
        Ok(dlogits)
    }

    /// Writes the mean loss to `loss_slot` and the number of rows whose largest logit is their label to `correct_slot`.
    pub(super) fn judge(
        &self,
        context: &Context,
        logits: &Matrix,
        labels: &DeviceBuffer,
        loss_slot: u64,
        correct_slot: u64,
    ) -> Result<()> {
        let (rows, classes) = (logits.rows, logits.cols);
        let (logits, labels) = (logits.addr(), labels.addr().get());
        if self.in_one_launch(rows) {
            let mut loss = SoftmaxLoss {
                rows,
                classes,
                logits,
                labels,
                element: self.arithmetic.element(),
                loss: loss_slot,
                correct: Some(correct_slot),
                tickets: self.tickets(),
                ..Default::default()
            };
            let (_workspace, addr) = self.workspace(context, loss.workspace_bytes(), loss.tickets())?;
            loss.workspace = addr;
            // SAFETY: the buffers are live and of these shapes; they are freed on the stream after this launch. The
            // caller keeps the slots.
            return unsafe { context.device.run(&loss) };
        }
        let losses = context.matrix(rows, 1)?;
        let loss = CrossEntropyLoss { rows, classes, logits, labels, losses: losses.addr() };
        // SAFETY: all buffers are live and of these shapes; they are freed on the stream after these launches. The
        // caller keeps the slots.
        unsafe { context.device.run(&loss)? };
        let mean = MeanLoss { rows, losses: losses.addr(), out: loss_slot, cursor: None };
        // SAFETY: as above.
        unsafe { context.device.run(&mean)? };
        let correct = CountCorrect { rows, classes, logits, labels, out: correct_slot };
        // SAFETY: as above.
        unsafe { context.device.run(&correct) }
    }
}
