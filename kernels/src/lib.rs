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
//! - Matrices are row-major. Those with an [`Element`] type have a pitch, the elements from one row to the next; what lies
//!   between the columns and the pitch is never used, and may be anything after a launch. All others are `f32` without
//!   padding. Labels and indices are `u32`.
//! - Arithmetic is in `f32`, whatever the element type; storing rounds to nearest, ties to even. Only a [`Precision`] says
//!   otherwise.
//! - Addresses are device addresses (`CUdeviceptr`), aligned to their element. Outputs overlap neither inputs nor each
//!   other; only [`Sgd`], [`LinearUpdate`] and cursors work in place. Every other output is written as a
//!   whole, so it may be uninitialised before.
//! - A cursor is one `u32` on the device, the number of the step: launches whose arguments are frozen in a CUDA graph find by
//!   it their part of the indices and the slot of their loss. One launch of a step advances it.
//! - Sizes are at least one: a shape with a zero is an error, not an empty launch.
//! - [`launch`](Operation::launch) queues on the given stream of the *current* context and never waits.
//! - All kernels are deterministic: sums in a fixed order, no atomics but counters of the blocks that are done. The same
//!   launch gives the same bits on the same device, and the host path gives the same bits whatever the number of threads.
//!   Launches with such counters take a workspace and tickets; tickets are zero before and after.
//! - Bad data: the host path reports a label or index out of range, a GPU cannot; there it gives NaN (see each operation).
//!
//! # How closely a GPU and the host agree
//!
//! | operations | agreement |
//! |---|---|
//! | [`AddBias`], [`Relu`], [`ReluBackward`], [`Sgd`], [`Fill`], [`ConvertElements`], `Gather*` | same bits (of a NaN: a NaN) |
//! | [`CountCorrect`], [`AdvanceCursor`], the count of [`SoftmaxLoss`] | same integers |
//! | [`Gemm`] | each within `4 √k ε Σ\|a b\|` of the exact product |
//! | [`LinearForward`], [`LinearBackwardInput`], [`LinearWeightGradient`], [`LinearUpdate`] | the product likewise, of operands as stored ([`Precision::Tf32`]: as rounded); then one `ε` of the result, and what storing it changes |
//! | [`BiasGradient`], [`MeanLoss`], biases of layers | each within `4 √rows ε Σ\|x\|` of the exact sum (mean: divided by rows) |
//! | [`SoftmaxCrossEntropy`], [`CrossEntropyLoss`] | losses within `2e-6 (1 + \|x\|)`, gradients within `2e-6 scale` and what storing them changes |
//! | [`SoftmaxLoss`] | the mean within the mean of the losses' bounds and that of [`MeanLoss`], gradients as above |
//!
//! with ε = 2⁻²³. Storing a value `x` as bf16 changes it by at most `2⁻⁸ |x|`, as f16 by `2⁻¹¹ |x| + 2⁻²⁵`. `tests/` checks
//! both sides against an `f64` model with these bounds.
//!
//! # The CUDA side
//!
//! `cuda/*.cu` hold the sources and `ptx/*.ptx.xz` what a pinned NVRTC makes of them, compressed; `ptx.sh` recompiles and
//! `ptx.sh --check` tells whether they agree. The PTX is embedded as it is stored, so building needs no CUDA and running needs
//! only the driver (550 or newer) and a GPU of compute capability 7.5 or newer, or what the first line of a source asks for.
//! [`CudaKernels::load`] decompresses it and has the driver compile it for the GPU.

mod cuda;
mod error;
mod host;
mod multiply_add;
mod operation;
mod ops;
mod plan;
mod storage;

pub use cuda::{CudaKernels, kernel_names};
pub use error::KernelError;
pub use host::HostMemory;
pub use operation::{BoxedOperation, Operation, Work};
pub use ops::{
    AddBias, AdvanceCursor, BiasGradient, ConvertElements, CountCorrect, CrossEntropyLoss, Fill, GatherLabels,
    GatherRows, Gemm, GemmLayout, LinearBackwardInput, LinearForward, LinearUpdate, LinearWeightGradient, MeanLoss,
    Relu, ReluBackward, Sgd, SoftmaxCrossEntropy, SoftmaxLoss, SourceElement,
};
pub use plan::{Choice, Product, Tile};
pub use storage::{Element, Precision};
