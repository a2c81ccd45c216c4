//! Softmax cross-entropy; kernels in `cuda/loss.cu`.

use cudarc::driver::sys::CUstream;

use super::{
    F32, ROWS_PER_BLOCK, U32, WARP_PER_ROW_THREADS, area, at_step, check_room, check_sizes, or_null, span, step, total,
    typed,
};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::{HostBuffers, check_range};
use crate::operation::{Definition, Work};
use crate::storage::{Element, Stored, with_stored};

/// Classes that a warp processes in one iteration.
const LANES: u64 = 32;

/// `losses[r] = ln Σ_c e^x[r,c] − x[r,label[r]]` and `dlogits = (softmax(x) − onehot(label)) · scale`.
///
/// The row's maximum is subtracted first, so nothing overflows. A label that is not a class is an error on the host; on
/// a GPU it gives NaN for the row's loss and for its gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxCrossEntropy {
    /// Rows: examples.
    pub rows: u32,
    /// Columns: classes.
    pub classes: u32,
    /// Address of the logits, `f32[rows,classes]`.
    pub logits: u64,
    /// Address of the labels, `u32[rows]`, each below `classes`.
    pub labels: u64,
    /// Address of the losses, `f32[rows]`, written.
    pub losses: u64,
    /// Type of the gradient.
    pub element: Element,
    /// Address of the gradient of the logits, `[rows,classes]`, written.
    pub dlogits: u64,
    /// Elements from one row of the gradient to the next.
    pub dlogits_pitch: u32,
    /// Factor of the gradient: 1/rows if the mean of the losses is minimised.
    pub scale: f32,
}

impl SoftmaxCrossEntropy {
    fn kernel(&self) -> Kernel {
        let kernels = [Kernel::SoftmaxCrossEntropy, Kernel::SoftmaxCrossEntropyBf16, Kernel::SoftmaxCrossEntropyF16];
        typed(self.element, kernels)
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let logits = buffers.read::<f32>(self.logits, area(self.rows, self.classes))?;
        let labels = buffers.read::<u32>(self.labels, self.rows.into())?;
        let losses = buffers.write::<f32>(self.losses, self.rows.into())?;
        let dlogits = buffers.write::<T>(self.dlogits, span(self.rows, self.classes, self.dlogits_pitch))?;
        check_range(self.name(), "label", labels, self.classes)?;
        let rows = logits.chunks_exact(self.classes as usize).zip(dlogits.chunks_mut(self.dlogits_pitch as usize));
        for (((x, gradient), &label), loss) in rows.zip(labels).zip(losses) {
            let row = Row::new(x);
            *loss = row.loss(x[label as usize]);
            row.gradient(x, label, self.scale, gradient);
        }
        Ok(())
    }
}

impl Definition for SoftmaxCrossEntropy {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("classes", self.classes.into())])?;
        check_room(self.name(), [("dlogits_pitch", self.dlogits_pitch, self.classes)])
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.classes);
        // With up to 16 classes, half a warp processes a row.
        let rows_per_block = if 2 * u64::from(self.classes) <= LANES { 2 * ROWS_PER_BLOCK } else { ROWS_PER_BLOCK };
        Work {
            blocks: u64::from(self.rows).div_ceil(rows_per_block),
            iterations: u64::from(self.classes).div_ceil(LANES),
            bytes: total([(elements, F32 + self.element.bytes()), (self.rows.into(), U32 + F32)]),
            // Maximum, subtraction, exponential and sum; then subtraction, exponential, division, onehot and scale.
            flops: total([(elements, 9), (self.rows.into(), 3)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = area(self.rows, self.classes);
        vec![
            (self.logits, total([(elements, F32)])),
            (self.labels, total([(self.rows.into(), U32)])),
            (self.losses, total([(self.rows.into(), F32)])),
            (self.dlogits, total([(span(self.rows, self.classes, self.dlogits_pitch), self.element.bytes())])),
        ]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![
            self.logits,
            self.labels,
            self.losses,
            self.dlogits,
            self.rows,
            self.classes,
            self.dlogits_pitch,
            self.scale.to_bits()
        ];
        // SAFETY: four addresses, three u32 and an f32, as `loss.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(self.kernel(), self.work().blocks, WARP_PER_ROW_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element, T => self.compute_typed::<T>(buffers))
    }
}

/// [`SoftmaxCrossEntropy`] without the gradient, for evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossEntropyLoss {
    /// Rows: examples.
    pub rows: u32,
    /// Columns: classes.
    pub classes: u32,
    /// Address of the logits, `f32[rows,classes]`.
    pub logits: u64,
    /// Address of the labels, `u32[rows]`, each below `classes`.
    pub labels: u64,
    /// Address of the losses, `f32[rows]`, written.
    pub losses: u64,
}

impl Definition for CrossEntropyLoss {
    fn name(&self) -> &'static str {
        Kernel::CrossEntropyLoss.name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("classes", self.classes.into())])
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.classes);
        Work {
            blocks: u64::from(self.rows).div_ceil(ROWS_PER_BLOCK),
            iterations: u64::from(self.classes).div_ceil(LANES),
            bytes: total([(elements, F32), (self.rows.into(), U32 + F32)]),
            flops: total([(elements, 4), (self.rows.into(), 3)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = area(self.rows, self.classes);
        vec![
            (self.logits, total([(elements, F32)])),
            (self.labels, total([(self.rows.into(), U32)])),
            (self.losses, total([(self.rows.into(), F32)])),
        ]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.logits, self.labels, self.losses, self.rows, self.classes];
        // SAFETY: three addresses and two u32, as `loss.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(Kernel::CrossEntropyLoss, self.work().blocks, WARP_PER_ROW_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let logits = buffers.read::<f32>(self.logits, area(self.rows, self.classes))?;
        let labels = buffers.read::<u32>(self.labels, self.rows.into())?;
        let losses = buffers.write::<f32>(self.losses, self.rows.into())?;
        check_range(self.name(), "label", labels, self.classes)?;
        for ((x, &label), loss) in logits.chunks_exact(self.classes as usize).zip(labels).zip(losses) {
            *loss = Row::new(x).loss(x[label as usize]);
        }
        Ok(())
    }
}

/// `out[0]` = mean of the losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeanLoss {
    /// Number of losses.
    pub rows: u32,
    /// Address of the losses, `f32[rows]`.
    pub losses: u64,
    /// Address of the mean, `f32[1]`, written; with a cursor, the address for step 0.
    pub out: u64,
    /// Address of the number of the step, `u32[1]`, if each step's mean has its own slot of `out`.
    pub cursor: Option<u64>,
}

const MEAN_THREADS: u32 = 256;

impl Definition for MeanLoss {
    fn name(&self) -> &'static str {
        Kernel::MeanLoss.name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into())])
    }

    fn work(&self) -> Work {
        Work {
            blocks: 1,
            iterations: u64::from(self.rows).div_ceil(MEAN_THREADS.into()),
            bytes: total([(self.rows.into(), F32), (1, F32)]),
            flops: self.rows.into(),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        // With a cursor, the mean's address depends on it.
        vec![
            (self.losses, total([(self.rows.into(), F32)])),
            self.cursor.map_or((self.out, F32), |cursor| (cursor, U32)),
        ]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.losses, self.out, or_null(self.cursor), self.rows];
        // SAFETY: three addresses and a u32, as `loss.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(Kernel::MeanLoss, 1, MEAN_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let losses = buffers.read::<f32>(self.losses, self.rows.into())?;
        let step = step(buffers, self.cursor)?;
        let out = buffers.write::<f32>(at_step(self.name(), self.out, F32, step)?, 1)?;
        out[0] = mean(losses.iter().copied());
        Ok(())
    }
}

/// Computed in `f64`, so the number of losses does not affect the rounding.
pub(super) fn mean(losses: impl ExactSizeIterator<Item = f32>) -> f32 {
    let rows = losses.len();
    let sum: f64 = losses.map(f64::from).sum();
    // CAST: the number of rows is exact in an f64; the mean is rounded once.
    (sum / rows as f64) as f32
}

/// Values from which the host computes a row's loss and gradient.
pub(super) struct Row {
    max: f32,
    /// Sum of e^(x − max), in `f64`, which leaves only the exponentials' rounding.
    sum: f64,
}

impl Row {
    pub(super) fn new(x: &[f32]) -> Self {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        Self { max, sum: x.iter().map(|x| f64::from((x - max).exp())).sum() }
    }

    pub(super) fn loss(&self, x: f32) -> f32 {
        (self.sum.ln() - f64::from(x - self.max)) as f32
    }

    fn probability(&self, x: f32) -> f32 {
        (f64::from((x - self.max).exp()) / self.sum) as f32
    }

    /// `(softmax(x) − onehot(label)) · scale`, rounded to the type of `gradient`, which may be longer than `x`.
    pub(super) fn gradient<T: Stored>(&self, x: &[f32], label: u32, scale: f32, gradient: &mut [T]) {
        for (class, (gradient, &x)) in (0..).zip(gradient.iter_mut().zip(x)) {
            let target = if class == label { 1.0 } else { 0.0 };
            *gradient = T::store((self.probability(x) - target) * scale);
        }
    }
}
