//! Conversion between element types; kernels in `cuda/convert.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, check_sizes, total, typed_blocks};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};
use crate::storage::{Element, Stored, with_stored};

/// `y = x` in another type: from f32 to bf16 or f16, to nearest with ties to even; or from these to f32, exactly.
///
/// A NaN stays a NaN, but not always with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertElements {
    /// Number of elements; for a matrix with a pitch, including the padding between its rows.
    pub len: u64,
    /// Type of `x`. One of `from` and `to` is f32, and the other bf16 or f16.
    pub from: Element,
    /// Type of `y`.
    pub to: Element,
    /// Address of the input, `[len]`.
    pub x: u64,
    /// Address of the output, `[len]`, written.
    pub y: u64,
}

/// Name of an unsupported conversion in errors.
const NO_CONVERSION: &str = "convert";

impl ConvertElements {
    fn kernel(&self) -> Option<Kernel> {
        match (self.from, self.to) {
            (Element::F32, Element::Bf16) => Some(Kernel::ConvertF32Bf16),
            (Element::F32, Element::F16) => Some(Kernel::ConvertF32F16),
            (Element::Bf16, Element::F32) => Some(Kernel::ConvertBf16F32),
            (Element::F16, Element::F32) => Some(Kernel::ConvertF16F32),
            _ => None,
        }
    }

    fn conversion(&self) -> Result<Kernel, KernelError> {
        self.kernel().ok_or_else(|| KernelError::Shape {
            operation: self.name(),
            what: format!("conversion from {:?} to {:?} is not supported; one type must be F32", self.from, self.to),
        })
    }

    fn compute_typed<From: Stored, To: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let x = buffers.read::<From>(self.x, self.len)?;
        let y = buffers.write::<To>(self.y, self.len)?;
        for (y, x) in y.iter_mut().zip(x) {
            *y = To::store(x.load());
        }
        Ok(())
    }
}

impl Definition for ConvertElements {
    fn name(&self) -> &'static str {
        self.kernel().map_or(NO_CONVERSION, Kernel::name)
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        self.conversion().map(|_| ())
    }

    fn work(&self) -> Work {
        Work {
            blocks: typed_blocks(Element::F16, 1, self.len),
            iterations: 1,
            bytes: total([(self.len, self.from.bytes() + self.to.bytes())]),
            flops: 0,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.x, total([(self.len, self.from.bytes())])), (self.y, total([(self.len, self.to.bytes())]))]
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let arguments = arguments![self.x, self.y, self.len];
        // SAFETY: two addresses and a u64, as `convert.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(self.conversion()?, self.work().blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.from, From => with_stored!(self.to, To => self.compute_typed::<From, To>(buffers)))
    }
}
