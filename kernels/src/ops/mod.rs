//! The operations, one file a family, as in `cuda/`.

mod accuracy;
mod bias;
mod fill;
mod gather;
mod gemm;
mod linear;
mod loss;
mod relu;
mod sgd;

pub use accuracy::{Argmax, CountCorrect};
pub use bias::{AddBias, BiasGradient};
pub use fill::Fill;
pub use gather::{GatherLabels, GatherRowsF32, GatherRowsU8};
pub use gemm::{Gemm, GemmAlgorithm, GemmLayout};
pub use linear::{LinearBackwardInput, LinearForward, LinearUpdate, LinearWeightGradient};
pub use loss::{CrossEntropyLoss, MeanLoss, SoftmaxCrossEntropy};
pub use relu::{Relu, ReluBackward};
pub use sgd::Sgd;

use crate::error::KernelError;

/// Threads in a block of the kernels that give each element a thread.
const ELEMENTWISE_THREADS: u32 = 256;

/// Rows in a block of the kernels that give each row a warp.
const ROWS_PER_BLOCK: u64 = 4;
const WARP_PER_ROW_THREADS: u32 = 128;

/// CUDA's limit on the first dimension of a grid.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

const F32: u64 = size_of::<f32>() as u64;
const U32: u64 = size_of::<u32>() as u64;

fn elementwise_blocks(len: u64) -> u64 {
    len.div_ceil(ELEMENTWISE_THREADS.into())
}

/// Elements of a matrix; two 32-bit sizes cannot overflow 64 bits.
fn area(rows: u32, cols: u32) -> u64 {
    u64::from(rows) * u64::from(cols)
}

/// Sums of traffic and arithmetic saturate: the cost of an impossible shape is of no interest, but must not panic.
fn total<const N: usize>(terms: [(u64, u64); N]) -> u64 {
    terms.into_iter().fold(0, |sum, (count, each)| sum.saturating_add(count.saturating_mul(each)))
}

/// Refuses sizes of zero.
fn check_sizes<const N: usize>(operation: &'static str, sizes: [(&str, u64); N]) -> Result<(), KernelError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((name, _)) => Err(KernelError::Shape { operation, what: format!("{name} is zero") }),
    }
}

/// The grid of a launch, if CUDA can have it.
fn grid(operation: &'static str, blocks: u64) -> Result<u32, KernelError> {
    u32::try_from(blocks).ok().filter(|_| blocks <= MOST_BLOCKS).ok_or_else(|| KernelError::Shape {
        operation,
        what: format!("{blocks} thread blocks are more than CUDA's {MOST_BLOCKS}"),
    })
}
