//! The operations of a multilayer perceptron: CUDA kernels with their launchers, and a CPU reference.
//!
//! An [`Operation`] is a plain struct that describes one launch: device addresses, sizes, scalars. It returns the
//! launch's cost ([`Operation::work`]), launches itself on a GPU ([`Operation::launch`]), and computes the same on host
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
//! - Matrices are row-major. Matrices with an [`Element`] type have a pitch, the number of elements from one row to the
//!   next. The padding between columns and pitch is never used, and its contents after a launch are unspecified. All other
//!   matrices are `f32` without padding. Labels and indices are `u32`.
//! - Arithmetic is in `f32`, whatever the element type; storing rounds to nearest, ties to even. A [`Precision`] defines
//!   the exceptions.
//! - Addresses are device addresses (`CUdeviceptr`), aligned to their element. Outputs overlap neither inputs nor each
//!   other; only [`Sgd`], [`LinearUpdate`] and cursors work in place. Every other output is written
//!   completely, so it may be uninitialised before.
//! - A cursor is one `u32` on the device, the number of the step. Launches in a CUDA graph have fixed arguments; the cursor
//!   selects their range of the indices and the slot of their loss. One launch of a step advances it.
//! - Sizes are at least one: a shape with a zero is an error, not an empty launch.
//! - [`launch`](Operation::launch) queues on the given stream of the *current* context and never waits.
//! - All kernels are deterministic: sums have a fixed order, and the only atomics count the blocks that have finished. The
//!   same launch gives the same bits on the same device, and the host path gives the same bits whatever the number of
//!   threads. Launches with such counters take a workspace and tickets; tickets are zero before and after.
//! - Bad data: the host path returns an error for a label or index out of range. A GPU cannot; its output is NaN (see each
//!   operation).
//!
//! # How closely a GPU and the host agree
//!
//! | operations | agreement |
//! |---|---|
//! | [`AddBias`], [`Relu`], [`ReluBackward`], [`Sgd`], [`Fill`], [`ConvertElements`], `Gather*` | same bits (of a NaN: a NaN) |
//! | [`CountCorrect`], [`AdvanceCursor`], the count of [`SoftmaxLoss`] | same integers |
//! | [`Gemm`] | each within `4 √k ε Σ\|a b\|` of the exact product |
//! | [`LinearForward`], [`LinearBackwardInput`], [`LinearWeightGradient`], [`LinearUpdate`] | the GEMM likewise, of operands as stored ([`Precision::Tf32`]: as rounded); then one `ε` of the result, and the rounding of its storage |
//! | [`BiasGradient`], [`MeanLoss`], biases of layers | each within `4 √rows ε Σ\|x\|` of the exact sum (mean: divided by rows) |
//! | [`SoftmaxCrossEntropy`], [`CrossEntropyLoss`] | losses within `2e-6 (1 + \|x\|)`, gradients within `2e-6 scale` and the rounding of their storage |
//! | [`SoftmaxLoss`] | the mean within the mean of the losses' bounds and that of [`MeanLoss`], gradients as above |
//!
//! with ε = 2⁻²³. Storing a value `x` as bf16 changes it by at most `2⁻⁸ |x|`, as f16 by `2⁻¹¹ |x| + 2⁻²⁵`. `tests/` checks
//! both sides against an `f64` model with these bounds.
//!
//! # The CUDA side
//!
//! `cuda/*.cu` are the sources, and `ptx/*.ptx.xz` is the PTX that a pinned NVRTC compiles from them, compressed.
//! `ptx.sh` recompiles, and `ptx.sh --check` fails if they differ. The PTX is embedded as stored, so building needs no
//! CUDA. Running needs only the driver (550 or newer) and a GPU of compute capability 7.5 or newer, or of the
//! architecture in a source's `// module` line. [`CudaKernels::load`] decompresses the PTX, and the driver compiles it
//! for the GPU.

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
