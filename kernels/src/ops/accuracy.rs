//! Number of correct predictions; kernel in `cuda/accuracy.cu`.

use cudarc::driver::sys::CUstream;

use super::{F32, U32, area, check_sizes, total};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::{HostBuffers, check_range};
use crate::operation::{Definition, Work};

/// `out[0]` = number of rows whose label is the first class with the largest logit. NaN is never the maximum; a row
/// with only NaN and −∞ gives class 0.
///
/// A label that is not a class is an error on the host; on a GPU the row counts as wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountCorrect {
    /// Rows: examples.
    pub rows: u32,
    /// Columns: classes.
    pub classes: u32,
    /// Address of the logits, `f32[rows,classes]`.
    pub logits: u64,
    /// Address of the labels, `u32[rows]`, each below `classes`.
    pub labels: u64,
    /// Address of the count, `u32[1]`, written.
    pub out: u64,
}

const COUNT_THREADS: u32 = 1024;

impl Definition for CountCorrect {
    fn name(&self) -> &'static str {
        Kernel::CountCorrect.name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("classes", self.classes.into())])
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.classes);
        Work {
            blocks: 1,
            iterations: u64::from(self.rows).div_ceil(COUNT_THREADS.into()) * u64::from(self.classes),
            bytes: total([(elements, F32), (self.rows.into(), U32), (1, U32)]),
            flops: elements,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = area(self.rows, self.classes);
        vec![
            (self.logits, total([(elements, F32)])),
            (self.labels, total([(self.rows.into(), U32)])),
            (self.out, total([(1, U32)])),
        ]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.logits, self.labels, self.out, self.rows, self.classes];
        // SAFETY: three addresses and two u32, as `accuracy.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(Kernel::CountCorrect, 1, COUNT_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let logits = buffers.read::<f32>(self.logits, area(self.rows, self.classes))?;
        let labels = buffers.read::<u32>(self.labels, self.rows.into())?;
        let out = buffers.write::<u32>(self.out, 1)?;
        check_range(self.name(), "label", labels, self.classes)?;
        let rows = logits.chunks_exact(self.classes as usize).zip(labels);
        out[0] = rows.map(|(row, &label)| u32::from(first_greatest(row) == label)).sum();
        Ok(())
    }
}

pub(super) fn first_greatest(row: &[f32]) -> u32 {
    let mut best = f32::NEG_INFINITY;
    let mut best_class = 0;
    for (class, &value) in (0..).zip(row) {
        if value > best {
            best = value;
            best_class = class;
        }
    }
    best_class
}
