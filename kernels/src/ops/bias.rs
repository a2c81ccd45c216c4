//! A layer's bias; kernels in `cuda/bias.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, F32, area, check_room, check_sizes, span, total, typed, typed_blocks};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};
use crate::storage::{Element, Stored, with_stored};

/// `y[r,c] = x[r,c] + bias[c]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddBias {
    /// Type of `x` and `y`.
    pub element: Element,
    /// Rows of `x` and `y`.
    pub rows: u32,
    /// Columns of `x` and `y`, elements of `bias`.
    pub cols: u32,
    /// Elements from one row of `x` and `y` to the next.
    pub pitch: u32,
    /// Address of the input, `[rows,cols]`.
    pub x: u64,
    /// Address of the bias, `f32[cols]`.
    pub bias: u64,
    /// Address of the output, `[rows,cols]`, written.
    pub y: u64,
}

impl AddBias {
    fn kernel(&self) -> Kernel {
        typed(self.element, [Kernel::AddBias, Kernel::AddBiasBf16, Kernel::AddBiasF16])
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let elements = span(self.rows, self.cols, self.pitch);
        let x = buffers.read::<T>(self.x, elements)?;
        let bias = buffers.read::<f32>(self.bias, self.cols.into())?;
        let y = buffers.write::<T>(self.y, elements)?;
        let pitch = self.pitch as usize;
        for (y, x) in y.chunks_mut(pitch).zip(x.chunks(pitch)) {
            for ((y, x), bias) in y.iter_mut().zip(x).zip(bias) {
                *y = T::store(x.load() + bias);
            }
        }
        Ok(())
    }
}

impl Definition for AddBias {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("cols", self.cols.into())])?;
        check_room(self.name(), [("pitch", self.pitch, self.cols)])
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.cols);
        Work {
            blocks: typed_blocks(self.element, self.rows.into(), self.cols.into()),
            iterations: 1,
            bytes: total([(elements, 2 * self.element.bytes()), (self.cols.into(), F32)]),
            flops: elements,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let bytes = total([(span(self.rows, self.cols, self.pitch), self.element.bytes())]);
        vec![(self.x, bytes), (self.bias, total([(self.cols.into(), F32)])), (self.y, bytes)]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.x, self.bias, self.y, self.rows, self.cols, self.pitch];
        // SAFETY: three addresses and three u32, as `bias.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(self.kernel(), self.work().blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element, T => self.compute_typed::<T>(buffers))
    }
}

/// `db[c] = Σ_r dy[r,c]`, the gradient of [`AddBias`]' bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BiasGradient {
    /// Type of `dy`.
    pub element: Element,
    /// Rows of `dy`.
    pub rows: u32,
    /// Columns of `dy`, elements of `db`.
    pub cols: u32,
    /// Elements from one row of `dy` to the next.
    pub pitch: u32,
    /// Address of the gradient of the layer's output, `[rows,cols]`.
    pub dy: u64,
    /// Address of the gradient of the bias, `f32[cols]`, written.
    pub db: u64,
}

/// A block processes this number of columns, and this number of warps divides the rows.
const BLOCK_COLS: u64 = 32;
const PARTITIONS: u64 = 8;
const BIAS_GRADIENT_THREADS: u32 = (BLOCK_COLS * PARTITIONS) as u32;

impl BiasGradient {
    fn kernel(&self) -> Kernel {
        typed(self.element, [Kernel::BiasGradient, Kernel::BiasGradientBf16, Kernel::BiasGradientF16])
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let dy = buffers.read::<T>(self.dy, span(self.rows, self.cols, self.pitch))?;
        sum_rows(dy, self.pitch, buffers.write::<f32>(self.db, self.cols.into())?);
        Ok(())
    }
}

impl Definition for BiasGradient {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("rows", self.rows.into()), ("cols", self.cols.into())])?;
        check_room(self.name(), [("pitch", self.pitch, self.cols)])
    }

    fn work(&self) -> Work {
        let elements = area(self.rows, self.cols);
        Work {
            blocks: u64::from(self.cols).div_ceil(BLOCK_COLS),
            iterations: u64::from(self.rows).div_ceil(PARTITIONS),
            bytes: total([(elements, self.element.bytes()), (self.cols.into(), F32)]),
            flops: elements,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = span(self.rows, self.cols, self.pitch);
        vec![(self.dy, total([(elements, self.element.bytes())])), (self.db, total([(self.cols.into(), F32)]))]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.dy, self.db, self.rows, self.cols, self.pitch];
        // SAFETY: two addresses and three u32, as `bias.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(self.kernel(), self.work().blocks, BIAS_GRADIENT_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element, T => self.compute_typed::<T>(buffers))
    }
}

/// Sums of the columns, row after row, so that the inner loop runs along memory and vectorises.
pub(super) fn sum_rows<T: Stored>(matrix: &[T], pitch: u32, sums: &mut [f32]) {
    sums.fill(0.0);
    for row in matrix.chunks(pitch as usize) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += value.load();
        }
    }
}
