//! ReLU; kernels in `cuda/relu.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, check_sizes, total, typed, typed_blocks};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};
use crate::storage::{Element, Stored, with_stored};

/// `y = max(x, 0)`; NaN stays NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relu {
    /// Type of both buffers.
    pub element: Element,
    /// Number of elements; for a matrix with a pitch, including the padding between its rows.
    pub len: u64,
    /// Address of the input, `[len]`.
    pub x: u64,
    /// Address of the output, `[len]`, written.
    pub y: u64,
}

impl Relu {
    fn kernel(&self) -> Kernel {
        typed(self.element, [Kernel::Relu, Kernel::ReluBf16, Kernel::ReluF16])
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let x = buffers.read::<T>(self.x, self.len)?;
        let y = buffers.write::<T>(self.y, self.len)?;
        let zero = T::store(0.0);
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if x.load() <= 0.0 { zero } else { x };
        }
        Ok(())
    }
}

impl Definition for Relu {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])
    }

    fn work(&self) -> Work {
        Work {
            blocks: typed_blocks(self.element, 1, self.len),
            iterations: 1,
            bytes: total([(self.len, 2 * self.element.bytes())]),
            flops: self.len,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let bytes = total([(self.len, self.element.bytes())]);
        vec![(self.x, bytes), (self.y, bytes)]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.x, self.y, self.len];
        // SAFETY: two addresses and a u64, as `relu.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(self.kernel(), self.work().blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element, T => self.compute_typed::<T>(buffers))
    }
}

/// `dx = y > 0 ? dy : 0`, the gradient of [`Relu`]'s input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReluBackward {
    /// Type of all three buffers.
    pub element: Element,
    /// Number of elements; for a matrix with a pitch, including the padding between its rows.
    pub len: u64,
    /// Address of [`Relu`]'s *output*, `[len]`; its input need not be stored.
    pub y: u64,
    /// Address of the gradient of the output, `[len]`.
    pub dy: u64,
    /// Address of the gradient of the input, `[len]`, written.
    pub dx: u64,
}

impl ReluBackward {
    fn kernel(&self) -> Kernel {
        typed(self.element, [Kernel::ReluBackward, Kernel::ReluBackwardBf16, Kernel::ReluBackwardF16])
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let y = buffers.read::<T>(self.y, self.len)?;
        let dy = buffers.read::<T>(self.dy, self.len)?;
        let dx = buffers.write::<T>(self.dx, self.len)?;
        let zero = T::store(0.0);
        for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
            *dx = if y.load() > 0.0 { dy } else { zero };
        }
        Ok(())
    }
}

impl Definition for ReluBackward {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])
    }

    fn work(&self) -> Work {
        Work {
            blocks: typed_blocks(self.element, 1, self.len),
            iterations: 1,
            bytes: total([(self.len, 3 * self.element.bytes())]),
            flops: self.len,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let bytes = total([(self.len, self.element.bytes())]);
        vec![(self.y, bytes), (self.dy, bytes), (self.dx, bytes)]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.y, self.dy, self.dx, self.len];
        // SAFETY: three addresses and a u64, as `relu.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(self.kernel(), self.work().blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element, T => self.compute_typed::<T>(buffers))
    }
}
