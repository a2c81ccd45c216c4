//! Fused loss of a step, in one launch; kernels in `cuda/softmax_loss.cu`.

use cudarc::driver::sys::CUstream;

use super::accuracy::first_greatest;
use super::loss::{Row, mean};
use super::{F32, U32, area, at_step, check_room, check_sizes, or_null, span, total, typed};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::{HostBuffers, check_range};
use crate::operation::{Definition, Work};
use crate::storage::{Element, Stored, with_stored};

/// Mean cross-entropy, gradient of the logits and number of correct predictions in one launch:
/// [`SoftmaxCrossEntropy`](crate::SoftmaxCrossEntropy), [`MeanLoss`](crate::MeanLoss),
/// [`CountCorrect`](crate::CountCorrect) and [`AdvanceCursor`](crate::AdvanceCursor), but the losses of the rows are
/// not written to memory.
///
/// A label that is not a class is an error on the host; on a GPU it gives NaN for the mean and for the row's gradient,
/// and the row counts as wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SoftmaxLoss {
    /// Type of the gradient; unused without one.
    pub element: Element,
    /// Rows: examples.
    pub rows: u32,
    /// Columns: classes.
    pub classes: u32,
    /// Address of the logits, `f32[rows,classes]`.
    pub logits: u64,
    /// Address of the labels, `u32[rows]`, each below `classes`.
    pub labels: u64,
    /// Address of the gradient of the logits, `[rows,classes]`, written; `None` if it is not needed.
    pub dlogits: Option<u64>,
    /// Elements from one row of the gradient to the next.
    pub dlogits_pitch: u32,
    /// Factor of the gradient: loss scale over rows if the mean of the losses is minimised. The mean itself is not scaled.
    pub scale: f32,
    /// Address of the mean of the losses, `f32[1]`, written; with a cursor, the address for step 0.
    pub loss: u64,
    /// Address of the number of rows whose first class with the largest logit is the label, `u32[1]`, written; `None`
    /// if it is not needed.
    pub correct: Option<u64>,
    /// Address of the number of the step, `u32[1]`, if each step's mean has its own slot of `loss`.
    pub cursor: Option<u64>,
    /// If true, the cursor is advanced by one after its use.
    pub advance: bool,
    /// Address of [`workspace_bytes`](Self::workspace_bytes) bytes for the sums of blocks; unused if that is zero.
    pub workspace: u64,
    /// Address of [`tickets`](Self::tickets) u32 counters, which are zero before and after a launch; unused if there
    /// are none.
    pub tickets: u64,
}

/// Warps per block; each processes one row after another.
const WARPS: u64 = 32;
const THREADS: u32 = 1024;
/// Rows per block: few enough that the blocks of a large batch run in parallel, and enough that a typical batch needs
/// only one.
const BLOCK_ROWS: u64 = 128;
/// Classes that a warp processes in one iteration.
const LANES: u64 = 32;

impl SoftmaxLoss {
    fn kernel(&self) -> Kernel {
        typed(self.element, [Kernel::SoftmaxLoss, Kernel::SoftmaxLossBf16, Kernel::SoftmaxLossF16])
    }

    fn blocks(&self) -> u64 {
        u64::from(self.rows).div_ceil(BLOCK_ROWS)
    }

    /// Bytes of workspace for the sums of the blocks; zero if there is only one block.
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        if self.blocks() > 1 { self.blocks() * (F32 + U32) } else { 0 }
    }

    /// Number of counters with which the launch determines its last block; zero or one.
    #[must_use]
    pub fn tickets(&self) -> u64 {
        u64::from(self.blocks() > 1)
    }

    /// Number of elements from the first to the last of the gradient.
    fn gradient_elements(&self) -> u64 {
        span(self.rows, self.classes, self.dlogits_pitch)
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let logits = buffers.read::<f32>(self.logits, area(self.rows, self.classes))?;
        let labels = buffers.read::<u32>(self.labels, self.rows.into())?;
        let mut gradient = buffers.write_some::<T>(self.dlogits, self.gradient_elements())?.unwrap_or_default();
        let mut cursor = buffers.write_some::<u32>(self.cursor, 1)?.map(|cursor| &mut cursor[0]);
        let step = cursor.as_deref().map_or(0, |&step| step.into());
        let loss = buffers.write::<f32>(at_step(self.name(), self.loss, F32, step)?, 1)?;
        let correct = buffers.write_some::<u32>(self.correct, 1)?;
        if self.tickets() > 0 {
            // The host does not use these, but must report overlaps.
            buffers.write::<u32>(self.workspace, self.workspace_bytes() / U32)?;
            buffers.write::<u32>(self.tickets, self.tickets())?;
        }
        check_range(self.name(), "label", labels, self.classes)?;
        let rows = || logits.chunks_exact(self.classes as usize).zip(labels);
        let mut losses = Vec::with_capacity(labels.len());
        for (x, &label) in rows() {
            let row = Row::new(x);
            losses.push(row.loss(x[label as usize]));
            // Not `chunks_mut`, because the gradient may be empty.
            let row_gradient;
            (row_gradient, gradient) = gradient.split_at_mut(gradient.len().min(self.dlogits_pitch as usize));
            row.gradient(x, label, self.scale, row_gradient);
        }
        loss[0] = mean(losses.into_iter());
        if let Some(correct) = correct {
            correct[0] = rows().map(|(x, &label)| u32::from(first_greatest(x) == label)).sum();
        }
        if self.advance
            && let Some(cursor) = &mut cursor
        {
            **cursor = cursor.wrapping_add(1);
        }
        Ok(())
    }
}

impl Definition for SoftmaxLoss {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("classes", self.classes.into())])?;
        if self.dlogits.is_some() {
            check_room(self.name(), [("dlogits_pitch", self.dlogits_pitch, self.classes)])?;
        }
        if self.advance && self.cursor.is_none() {
            let what = "advance needs a cursor".to_owned();
            return Err(KernelError::Shape { operation: self.name(), what });
        }
        Ok(())
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.classes);
        let gradient = if self.dlogits.is_some() { self.element.bytes() } else { 0 };
        // Maximum, subtraction, exponential and sum; then subtraction, exponential, division, onehot and scale.
        let each = if self.dlogits.is_some() { 9 } else { 4 };
        let rows_of_a_warp = u64::from(self.rows).min(BLOCK_ROWS).div_ceil(WARPS);
        Work {
            blocks: self.blocks(),
            iterations: rows_of_a_warp * u64::from(self.classes).div_ceil(LANES),
            bytes: total([(elements, F32 + gradient), (self.rows.into(), U32), (1, F32)]),
            flops: total([(elements, each), (self.rows.into(), 4)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = area(self.rows, self.classes);
        let mut buffers =
            vec![(self.logits, total([(elements, F32)])), (self.labels, total([(self.rows.into(), U32)]))];
        let gradient_bytes = total([(self.gradient_elements(), self.element.bytes())]);
        buffers.extend(self.dlogits.map(|dlogits| (dlogits, gradient_bytes)));
        // With a cursor, the mean's address depends on it.
        buffers.push(self.cursor.map_or((self.loss, F32), |cursor| (cursor, U32)));
        buffers.extend(self.correct.map(|correct| (correct, U32)));
        if self.tickets() > 0 {
            buffers.extend([(self.workspace, self.workspace_bytes()), (self.tickets, self.tickets() * U32)]);
        }
        buffers
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![
            self.logits,
            self.labels,
            or_null(self.dlogits),
            self.loss,
            or_null(self.correct),
            or_null(self.cursor),
            self.workspace,
            self.tickets,
            self.rows,
            self.classes,
            self.dlogits_pitch,
            self.advance,
            self.scale.to_bits()
        ];
        // SAFETY: eight addresses, four u32 and an f32, as `softmax_loss.cu` declares; the caller guarantees the
        // addresses.
        unsafe { cuda.launch(self.kernel(), self.work().blocks, THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element, T => self.compute_typed::<T>(buffers))
    }
}
