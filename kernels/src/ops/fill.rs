//! Setting a buffer to one value; kernel in `cuda/fill.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, F32, check_sizes, elementwise_blocks, grid, total};
use crate::cuda::{CudaKernels, Kernel, argument};
use crate::error::KernelError;
use crate::host::{HostBuffers, HostMemory};
use crate::operation::{Operation, Work};

/// `out[i] = value`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fill {
    /// Number of elements.
    pub len: u64,
    /// What each becomes.
    pub value: f32,
    /// Address of the output, `f32[len]`, written.
    pub out: u64,
}

impl Operation for Fill {
    fn name(&self) -> &'static str {
        Kernel::Fill.name()
    }

    fn work(&self) -> Work {
        Work {
            kernel: self.name(),
            blocks: elementwise_blocks(self.len),
            iterations: 1,
            bytes: total([(self.len, F32)]),
            flops: 0,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.out, total([(self.len, F32)]))]
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        let blocks = grid(self.name(), self.work().blocks)?;
        let arguments = [argument(&self.out), argument(&self.len), argument(&self.value)];
        // SAFETY: an address, a u64 and an f32, as `fill.cu` declares; the caller vouches for the address.
        unsafe { cuda.launch(Kernel::Fill, blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind this address.
        unsafe { buffers.write::<f32>(self.out, self.len)? }.fill(self.value);
        Ok(())
    }
}
