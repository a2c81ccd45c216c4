//! Setting a buffer to one value; kernel in `cuda/fill.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, F32, check_sizes, elementwise_blocks, total};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};

/// `out[i] = value`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fill {
    /// Number of elements.
    pub len: u64,
    /// The value written.
    pub value: f32,
    /// Address of the output, `f32[len]`, written.
    pub out: u64,
}

impl Definition for Fill {
    fn name(&self) -> &'static str {
        Kernel::Fill.name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])
    }

    fn work(&self) -> Work {
        Work { blocks: elementwise_blocks(self.len), iterations: 1, bytes: total([(self.len, F32)]), flops: 0 }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.out, total([(self.len, F32)]))]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.out, self.len, self.value.to_bits()];
        // SAFETY: an address, a u64 and an f32, as `fill.cu` declares; the caller guarantees the address.
        unsafe { cuda.launch(Kernel::Fill, self.work().blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        buffers.write::<f32>(self.out, self.len)?.fill(self.value);
        Ok(())
    }
}
