//! The number of the step, kept on the device; kernel in `cuda/cursor.cu`.
//!
//! The arguments of a launch in a CUDA graph are frozen, so a graph that is replayed for each step has to find on the
//! device which batch is next and where its loss goes. Operations that can, take the address of such a number as
//! `cursor`.

use cudarc::driver::sys::CUstream;

use super::U32;
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};

/// `cursor[0] += 1`, the last launch of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvanceCursor {
    /// Address of the number of the step, `u32[1]`, read and written.
    pub cursor: u64,
}

impl Definition for AdvanceCursor {
    fn name(&self) -> &'static str {
        Kernel::AdvanceCursor.name()
    }

    fn check(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn work(&self) -> Work {
        Work { kernel: self.name(), blocks: 1, iterations: 1, bytes: 2 * U32, flops: 0 }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.cursor, U32)]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: an address, as `cursor.cu` declares; the caller vouches for it.
        unsafe { cuda.launch(Kernel::AdvanceCursor, 1, 1, stream, arguments![self.cursor]) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let cursor = buffers.write::<u32>(self.cursor, 1)?;
        cursor[0] = cursor[0].wrapping_add(1);
        Ok(())
    }
}
