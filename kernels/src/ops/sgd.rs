//! Stochastic gradient descent; kernel in `cuda/sgd.cu`.

use cudarc::driver::sys::CUstream;

use super::{ELEMENTWISE_THREADS, F32, check_sizes, or_null, total, typed, typed_blocks};
use crate::cuda::{CudaKernels, Kernel, arguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::multiply_add::descend;
use crate::operation::{Definition, Work};
use crate::storage::{Element, Stored, with_stored};

/// `weights −= learning_rate · gradient`, in place, with a fused multiply-add.
///
/// 16-bit weights are updated in f32 and rounded: an update below half a unit in their last place is lost. With f32
/// master weights, the update applies to these, and the weights are set to their rounded values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Type of the weights.
    pub element: Element,
    /// Number of weights; for a matrix with a pitch, including the padding between its rows.
    pub len: u64,
    /// Factor of the negative gradient.
    pub learning_rate: f32,
    /// Address of the gradient, `f32[len]`.
    pub gradient: u64,
    /// Address of the weights, `[len]`, read (without master weights) and written.
    pub weights: u64,
    /// Address of the master weights, `f32[len]`, read and written. Only for 16-bit weights.
    pub master: Option<u64>,
}

impl Sgd {
    fn kernel(&self) -> Kernel {
        typed(self.element, [Kernel::Sgd, Kernel::SgdBf16, Kernel::SgdF16])
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let gradient = buffers.read::<f32>(self.gradient, self.len)?;
        let weights = buffers.write::<T>(self.weights, self.len)?;
        let master = buffers.write_some::<f32>(self.master, self.len)?;
        step_weights(weights, master, gradient, self.learning_rate);
        Ok(())
    }
}

/// Returns an error for master weights of f32 weights, which would only be a copy of them.
pub(super) fn check_master(operation: &'static str, element: Element, master: Option<u64>) -> Result<(), KernelError> {
    if element == Element::F32 && master.is_some() {
        return Err(KernelError::Shape { operation, what: "f32 weights cannot have master weights".to_owned() });
    }
    Ok(())
}

/// Updates all weights, or their master weights.
pub(super) fn step_weights<T: Stored>(weights: &mut [T], master: Option<&mut [f32]>, gradient: &[f32], rate: f32) {
    if let Some(master) = master {
        descend(master, gradient, rate);
        T::store_all(master, weights);
        return;
    }
    // In chunks that fit in the processor's cache.
    let mut chunk = [0.0; 1024];
    for (weights, gradient) in weights.chunks_mut(chunk.len()).zip(gradient.chunks(chunk.len())) {
        let chunk = &mut chunk[..weights.len()];
        T::load_all(weights, chunk);
        descend(chunk, gradient, rate);
        T::store_all(chunk, weights);
    }
}

impl Definition for Sgd {
    fn name(&self) -> &'static str {
        self.kernel().name()
    }

    fn check(&self) -> Result<(), KernelError> {
        check_sizes(self.name(), [("len", self.len)])?;
        check_master(self.name(), self.element, self.master)
    }

    fn work(&self) -> Work {
        let weights = self.element.bytes();
        // Weights are read and written; or master weights are, and weights only written.
        let each = if self.master.is_some() { 2 * F32 + weights } else { 2 * weights };
        Work {
            blocks: typed_blocks(self.element, 1, self.len),
            iterations: 1,
            bytes: total([(self.len, F32 + each)]),
            flops: total([(self.len, 2)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let floats = total([(self.len, F32)]);
        let mut buffers = vec![(self.gradient, floats), (self.weights, total([(self.len, self.element.bytes())]))];
        buffers.extend(self.master.map(|master| (master, floats)));
        buffers
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let (kernel, blocks) = (self.kernel(), self.work().blocks);
        if self.element == Element::F32 {
            let arguments = arguments![self.gradient, self.weights, self.len, self.learning_rate.to_bits()];
            // SAFETY: two addresses, a u64 and an f32, as `sgd.cu` declares; the caller guarantees the addresses.
            return unsafe { cuda.launch(kernel, blocks, ELEMENTWISE_THREADS, stream, arguments) };
        }
        let arguments =
            arguments![self.gradient, self.weights, or_null(self.master), self.len, self.learning_rate.to_bits()];
        // SAFETY: three addresses, a u64 and an f32, as `sgd.cu` declares; the caller guarantees the addresses.
        unsafe { cuda.launch(kernel, blocks, ELEMENTWISE_THREADS, stream, arguments) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element, T => self.compute_typed::<T>(buffers))
    }
}
