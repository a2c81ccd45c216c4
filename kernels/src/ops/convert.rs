//! From one element type to another; kernels in `cuda/convert.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, check_sizes, grid, total, typed_blocks};
use crate::cuda::{CudaKernels, Kernel, argument};
use crate::error::KernelError;
use crate::host::{HostBuffers, HostMemory};
use crate::operation::{Operation, Work};
use crate::precision::Element;
use crate::storage::{Stored, with_stored};

/// `y = x` in another type: from f32 to a half, to nearest with ties to even, or from a half to f32, exactly.
///
/// A NaN stays a NaN, but not always with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertElements {
    /// Number of elements; of a matrix with a pitch, those between its rows count too.
    pub len: u64,
    /// Type of `x`. One of `from` and `to` is f32, the other a half.
    pub from: Element,
    /// Type of `y`.
    pub to: Element,
    /// Address of the input, `[len]`.
    pub x: u64,
    /// Address of the output, `[len]`, written.
    pub y: u64,
}

/// What a conversion that there is none of calls itself in errors.
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

    fn check(&self) -> Result<Kernel, KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        self.kernel().ok_or_else(|| KernelError::Shape {
            operation: self.name(),
            what: format!("there is no conversion from {:?} to {:?}", self.from, self.to),
        })
    }

    /// # Safety
    ///
    /// As for [`Operation::run_on_host`].
    unsafe fn run_typed<From: Stored, To: Stored>(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        let mut buffers = HostBuffers::new(memory, self.name());
        // SAFETY: the caller vouches for the memory behind these addresses.
        let (x, y) = unsafe { (buffers.read::<From>(self.x, self.len)?, buffers.write::<To>(self.y, self.len)?) };
        for (y, x) in y.iter_mut().zip(x) {
            *y = To::store(x.load());
        }
        Ok(())
    }
}

impl Operation for ConvertElements {
    fn name(&self) -> &'static str {
        self.kernel().map_or(NO_CONVERSION, Kernel::name)
    }

    fn work(&self) -> Work {
        Work {
            kernel: self.name(),
            blocks: typed_blocks(Element::F16, 1, self.len),
            iterations: 1,
            bytes: total([(self.len, self.from.bytes() + self.to.bytes())]),
            flops: 0,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        vec![(self.x, total([(self.len, self.from.bytes())])), (self.y, total([(self.len, self.to.bytes())]))]
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let kernel = self.check()?;
        let blocks = grid(self.name(), self.work().blocks)?;
        let arguments = [argument(&self.x), argument(&self.y), argument(&self.len)];
        // SAFETY: two addresses and a u64, as `convert.cu` declares; the caller vouches for the addresses.
        unsafe { cuda.launch(kernel, blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        // SAFETY: the caller vouches for the memory.
        with_stored!(self.from, From => with_stored!(self.to, To => unsafe { self.run_typed::<From, To>(memory) }))
    }
}
