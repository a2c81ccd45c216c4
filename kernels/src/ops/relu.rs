//! Rectifier; kernels in `cuda/relu.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, F32, check_sizes, elementwise_blocks, grid, total};
use crate::cuda::{CudaKernels, Kernel, argument};
use crate::error::KernelError;
use crate::host::{HostBuffers, HostMemory};
use crate::operation::{Operation, Work};

/// `y = max(x, 0)`; NaN stays NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relu {
    /// Number of elements.
    pub len: u64,
    /// Address of the input, `f32[len]`.
    pub x: u64,
    /// Address of the output, `f32[len]`, written.
    pub y: u64,
}

impl Operation for Relu {
    fn name(&self) -> &'static str {
        Kernel::Relu.name()
    }

    fn work(&self) -> Work {
        Work {
            kernel: self.name(),
            blocks: elementwise_blocks(self.len),
            iterations: 1,
            bytes: total([(self.len, 2 * F32)]),
            flops: self.len,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.x, total([(self.len, F32)])), (self.y, total([(self.len, F32)]))]
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        let blocks = grid(self.name(), self.work().blocks)?;
        let arguments = [argument(&self.x), argument(&self.y), argument(&self.len)];
        // SAFETY: two addresses and a u64, as `relu.cu` declares; the caller vouches for the addresses.
        unsafe { cuda.launch(Kernel::Relu, blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (x, y) = unsafe { (buffers.read::<f32>(self.x, self.len)?, buffers.write::<f32>(self.y, self.len)?) };
        for (y, &x) in y.iter_mut().zip(x) {
            *y = if x <= 0.0 { 0.0 } else { x };
        }
        Ok(())
    }
}

/// `dx = y > 0 ? dy : 0`, the gradient of [`Relu`]'s input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReluBackward {
    /// Number of elements.
    pub len: u64,
    /// Address of [`Relu`]'s *output*, `f32[len]`: its input need not be kept.
    pub y: u64,
    /// Address of the gradient of the output, `f32[len]`.
    pub dy: u64,
    /// Address of the gradient of the input, `f32[len]`, written.
    pub dx: u64,
}

impl Operation for ReluBackward {
    fn name(&self) -> &'static str {
        Kernel::ReluBackward.name()
    }

    fn work(&self) -> Work {
        Work {
            kernel: self.name(),
            blocks: elementwise_blocks(self.len),
            iterations: 1,
            bytes: total([(self.len, 3 * F32)]),
            flops: self.len,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![
            (self.y, total([(self.len, F32)])),
            (self.dy, total([(self.len, F32)])),
            (self.dx, total([(self.len, F32)])),
        ]
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        let blocks = grid(self.name(), self.work().blocks)?;
        let arguments = [argument(&self.y), argument(&self.dy), argument(&self.dx), argument(&self.len)];
        // SAFETY: three addresses and a u64, as `relu.cu` declares; the caller vouches for the addresses.
        unsafe { cuda.launch(Kernel::ReluBackward, blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (y, dy, dx) = unsafe {
            (
                buffers.read::<f32>(self.y, self.len)?,
                buffers.read::<f32>(self.dy, self.len)?,
                buffers.write::<f32>(self.dx, self.len)?,
            )
        };
        for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
            *dx = if y > 0.0 { dy } else { 0.0 };
        }
        Ok(())
    }
}
