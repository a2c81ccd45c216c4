//! The operations; each file has one family, as in `cuda/`.

mod accuracy;
mod bias;
mod convert;
mod fill;
mod gather;
mod gemm;
mod linear;
mod loss;
mod relu;
mod sgd;
mod softmax_loss;

use crate::cuda::Kernel;
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::storage::Element;

pub use accuracy::CountCorrect;
pub use bias::{AddBias, BiasGradient};
pub use convert::ConvertElements;
pub use fill::Fill;
pub use gather::{AdvanceCursor, GatherLabels, GatherRows, SourceElement};
pub use gemm::{Gemm, GemmLayout};
pub use linear::{LinearBackwardInput, LinearForward, LinearUpdate, LinearWeightGradient};
pub use loss::{CrossEntropyLoss, MeanLoss, SoftmaxCrossEntropy};
pub use relu::{Relu, ReluBackward};
pub use sgd::Sgd;
pub use softmax_loss::SoftmaxLoss;

/// Threads per block of the kernels with one thread for each element.
const ELEMENTWISE_THREADS: u32 = 256;

/// Rows per block of the kernels with one warp for each row.
const ROWS_PER_BLOCK: u64 = 4;
const WARP_PER_ROW_THREADS: u32 = 128;

const F32: u64 = size_of::<f32>() as u64;
const U32: u64 = size_of::<u32>() as u64;

fn elementwise_blocks(len: u64) -> u64 {
    len.div_ceil(ELEMENTWISE_THREADS.into())
}

/// Bytes per access of a thread, in kernels whose matrices have an element type.
const GROUP_BYTES: u64 = 16;

/// Number of 16-byte groups in `rows` rows of `cols` elements; no group crosses the end of a row.
fn groups(element: Element, rows: u64, cols: u64) -> u64 {
    rows.saturating_mul(cols.div_ceil(GROUP_BYTES / element.bytes()))
}

/// Blocks of a kernel with one thread for each group.
fn typed_blocks(element: Element, rows: u64, cols: u64) -> u64 {
    elementwise_blocks(groups(element, rows, cols))
}

/// The kernel for an element type.
fn typed(element: Element, [f32, bf16, f16]: [Kernel; 3]) -> Kernel {
    match element {
        Element::F32 => f32,
        Element::Bf16 => bf16,
        Element::F16 => f16,
    }
}

/// Number of elements of a matrix; the product of two 32-bit sizes fits in 64 bits.
fn area(rows: u32, cols: u32) -> u64 {
    u64::from(rows) * u64::from(cols)
}

/// Number of elements from the first to the last of a matrix with `pitch` elements from one row to the next.
fn span(rows: u32, cols: u32, pitch: u32) -> u64 {
    area(rows.saturating_sub(1), pitch) + u64::from(cols)
}

/// Sum of products, for traffic and arithmetic. It saturates, because the cost of an invalid shape does not matter but
/// must not panic.
fn total<const N: usize>(terms: [(u64, u64); N]) -> u64 {
    terms.into_iter().fold(0, |sum, (count, each)| sum.saturating_add(count.saturating_mul(each)))
}

/// Returns an error for a size of zero.
fn check_sizes<const N: usize>(operation: &'static str, sizes: [(&str, u64); N]) -> Result<(), KernelError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((name, _)) => Err(KernelError::Shape { operation, what: format!("{name} is zero") }),
    }
}

/// Returns an error if a pitch, or the step of a batch, is less than the required size.
fn check_room<const N: usize>(operation: &'static str, sizes: [(&str, u32, u32); N]) -> Result<(), KernelError> {
    match sizes.iter().find(|(_, size, required)| size < required) {
        None => Ok(()),
        Some((name, size, required)) => {
            Err(KernelError::Shape { operation, what: format!("{name} is {size}, below {required}") })
        }
    }
}

/// The number of the step, read from the cursor.
fn step(buffers: &mut HostBuffers<'_>, cursor: Option<u64>) -> Result<u64, KernelError> {
    cursor.map_or(Ok(0), |cursor| Ok(buffers.read::<u32>(cursor, 1)?[0].into()))
}

/// The address for step number `step`, if each step has `stride` bytes.
fn at_step(operation: &'static str, addr: u64, stride: u64, step: u64) -> Result<u64, KernelError> {
    stride.checked_mul(step).and_then(|offset| addr.checked_add(offset)).ok_or_else(|| KernelError::Shape {
        operation,
        what: format!("step {step} of {stride} bytes from {addr:#x} does not fit in the address space"),
    })
}

/// An optional address as a kernel parameter: zero if `None`.
fn or_null(addr: Option<u64>) -> u64 {
    addr.unwrap_or(0)
}
