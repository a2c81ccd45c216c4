//! Which kernel makes a linear layer's product on a GPU, and its grid.

use std::ffi::c_void;

use cudarc::driver::sys::CUstream;

use crate::cuda::CudaKernels;
use crate::error::KernelError;
use crate::precision::Precision;

/// The products of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    /// [`LinearForward`](crate::LinearForward): m = rows, n = outputs, k = inputs.
    Forward,
    /// [`LinearBackwardInput`](crate::LinearBackwardInput): m = rows, n = inputs, k = outputs.
    Input,
    /// [`LinearWeightGradient`](crate::LinearWeightGradient): m = outputs, n = inputs, k = rows.
    Gradient,
    /// [`LinearUpdate`](crate::LinearUpdate): as for the gradient.
    Update,
}

impl Product {
    /// Names of the kernels, in the order of [`Precision::ALL`].
    const fn names(self) -> [&'static str; 5] {
        match self {
            Product::Forward => [
                "linear_forward_f32",
                "linear_forward_tf32",
                "linear_forward_bf16",
                "linear_forward_f16",
                "linear_forward_f16acc",
            ],
            Product::Input => [
                "linear_input_f32",
                "linear_input_tf32",
                "linear_input_bf16",
                "linear_input_f16",
                "linear_input_f16acc",
            ],
            Product::Gradient => [
                "linear_gradient_f32",
                "linear_gradient_tf32",
                "linear_gradient_bf16",
                "linear_gradient_f16",
                "linear_gradient_f16acc",
            ],
            Product::Update => [
                "linear_update_f32",
                "linear_update_tf32",
                "linear_update_bf16",
                "linear_update_f16",
                "linear_update_f16acc",
            ],
        }
    }
}

/// How one product is launched.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "the launch takes these")]
pub(crate) struct Plan {
    /// Name of the kernel.
    pub(crate) kernel: &'static str,
    /// Thread blocks.
    pub(crate) blocks: u64,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
    /// Trips of a block's main loop.
    pub(crate) iterations: u64,
    /// Blocks that share the sum of one tile.
    pub(crate) splits: u32,
    /// Memory for sums that blocks share; a multiple of 4.
    pub(crate) workspace_bytes: u64,
    /// Counters of blocks that are done, u32 each.
    pub(crate) tickets: u64,
}

/// Side of a block's tile, and the steps of k in one trip of its loop.
const TILE: u64 = 64;
const DEPTH: u64 = 32;

impl Plan {
    pub(crate) fn of(product: Product, precision: Precision, m: u32, n: u32, k: u32) -> Self {
        Self {
            // CAST: the order of declaration is that of `Precision::ALL`.
            kernel: product.names()[precision as usize],
            blocks: u64::from(m).div_ceil(TILE) * u64::from(n).div_ceil(TILE),
            threads: 128,
            shared_bytes: 0,
            iterations: u64::from(k).div_ceil(DEPTH),
            splits: 1,
            workspace_bytes: 0,
            tickets: 0,
        }
    }

    /// Queues the launch.
    ///
    /// # Safety
    ///
    /// `arguments` point at values of the types of the kernel's parameters, in order; and what
    /// [`Operation::launch`](crate::Operation::launch) asks holds for the addresses among them.
    pub(crate) unsafe fn launch<const N: usize>(
        &self,
        _cuda: &CudaKernels,
        _stream: CUstream,
        _arguments: [*mut c_void; N],
    ) -> Result<(), KernelError> {
        Err(KernelError::NoPtx { kernel: self.kernel })
    }
}
