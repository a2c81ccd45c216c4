//! The operations of a multilayer perceptron: CUDA kernels with their launchers, and a CPU reference.
//!
//! An [`Operation`] is a plain struct that describes one launch: device addresses, sizes, scalars. It can say what the
//! launch costs ([`Operation::work`]), run it on a GPU ([`Operation::launch`]), and compute the same thing on host
//! memory ([`Operation::run_on_host`]). Nothing in this crate allocates device memory.
//!
//! ```
//! use kernels::{Element, Operation, Relu};
//!
//! let relu = Relu { element: Element::F32, len: 1000, x: 0x7000_0000, y: 0x7000_1000 };
//! assert_eq!(relu.name(), "relu");
//! assert_eq!(relu.work().bytes, 8000);
//! ```
//!
//! # Conventions
//!
//! - Matrices are row-major `f32` without padding. Labels and indices are `u32`.
//! - Addresses are device addresses (`CUdeviceptr`), aligned to their element. Outputs overlap neither inputs nor each
//!   other; only [`Sgd`] works in place. Every output is written as a whole, so it may be uninitialised before.
//! - Sizes are at least one: a shape with a zero is an error, not an empty launch.
//! - [`launch`](Operation::launch) queues on the given stream of the *current* context and never waits.
//! - All kernels are deterministic: no atomics, sums in a fixed order. The same launch gives the same bits on the same
//!   device, and the host path gives the same bits whatever the number of threads.
//! - Bad data: the host path reports a label or index out of range, a GPU cannot; there it gives NaN (see each operation).
//!
//! # How closely a GPU and the host agree
//!
//! | operations | agreement |
//! |---|---|
//! | [`AddBias`], [`Relu`], [`ReluBackward`], [`Sgd`], [`Fill`], `Gather*` | same bits |
//! | [`Argmax`], [`CountCorrect`] | same integers |
//! | [`Gemm`] | each within `4 √k ε Σ\|a b\|` of the exact product |
//! | [`BiasGradient`], [`MeanLoss`] | each within `4 √rows ε Σ\|x\|` of the exact sum (mean: divided by rows) |
//! | [`SoftmaxCrossEntropy`], [`CrossEntropyLoss`] | losses within `2e-6 (1 + \|x\|)`, gradients within `2e-6 scale` |
//!
//! with ε = 2⁻²³. `tests/` checks both sides against an `f64` model with these bounds.
//!
//! # The CUDA side
//!
//! `cuda/*.cu` hold the sources and `ptx/*.ptx` what a pinned NVRTC makes of them; `ptx.sh` recompiles and `ptx.sh
//! --check` tells whether they agree. The PTX is embedded, so building needs no CUDA and running needs only the driver
//! (550 or newer) and a GPU of compute capability 7.5 or newer. [`CudaKernels::load`] has the driver compile it for
//! the GPU.

mod cuda;
mod error;
mod fused;
mod host;
mod operation;
mod ops;
mod plan;
mod precision;
mod storage;

pub use cuda::{CudaKernels, kernel_names};
pub use error::KernelError;
pub use host::HostMemory;
pub use operation::{Operation, Work};
pub use ops::{
    AddBias, AdvanceCursor, Argmax, BiasGradient, ConvertElements, CountCorrect, CrossEntropyLoss, Fill, GatherLabels,
    GatherRowsF32, GatherRowsU8, Gemm, GemmAlgorithm, GemmLayout, LinearBackwardInput, LinearForward, LinearUpdate,
    LinearWeightGradient, MeanLoss, Relu, ReluBackward, Sgd, SoftmaxCrossEntropy, SoftmaxLoss,
};
pub use precision::{Element, Precision};
