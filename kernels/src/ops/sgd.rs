//! Stochastic gradient descent; kernel in `cuda/sgd.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, F32, check_sizes, elementwise_blocks, grid, total};
use crate::cuda::{CudaKernels, Kernel, argument};
use crate::error::KernelError;
use crate::fused::descend;
use crate::host::{HostBuffers, HostMemory};
use crate::operation::{Operation, Work};

/// `weights −= learning_rate · gradient`, in place, with a fused multiply-add.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Number of weights.
    pub len: u64,
    /// Step along the negative gradient.
    pub learning_rate: f32,
    /// Address of the gradient, `f32[len]`.
    pub gradient: u64,
    /// Address of the weights, `f32[len]`, read and written.
    pub weights: u64,
}

impl Operation for Sgd {
    fn name(&self) -> &'static str {
        Kernel::Sgd.name()
    }

    fn work(&self) -> Work {
        Work {
            kernel: self.name(),
            blocks: elementwise_blocks(self.len),
            iterations: 1,
            bytes: total([(self.len, 3 * F32)]),
            flops: total([(self.len, 2)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.gradient, total([(self.len, F32)])), (self.weights, total([(self.len, F32)]))]
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        let blocks = grid(self.name(), self.work().blocks)?;
        let arguments =
            [argument(&self.gradient), argument(&self.weights), argument(&self.len), argument(&self.learning_rate)];
        // SAFETY: two addresses, a u64 and an f32, as `sgd.cu` declares; the caller vouches for the addresses.
        unsafe { cuda.launch(Kernel::Sgd, blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (gradient, weights) =
            unsafe { (buffers.read::<f32>(self.gradient, self.len)?, buffers.write::<f32>(self.weights, self.len)?) };
        descend(weights, gradient, self.learning_rate);
        Ok(())
    }
}
