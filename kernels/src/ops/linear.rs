//! A linear layer's three products with what comes before and after them; kernels in `cuda/linear.cuh`.
//!
//! Matrices have a pitch ([`Element::pitch`](crate::Element::pitch)): elements from one row to the next. Biases,
//! gradients and master weights are f32 whatever the precision. Matrices begin on a multiple of 16 bytes, and may be read up
//! to the pitch of their last row. What lies between the columns and the pitch is never read as
//! a number, and a launch may leave anything there.

mod backward_input;
mod forward;
mod update;
mod weight_gradient;

pub use backward_input::LinearBackwardInput;
pub use forward::LinearForward;
pub use update::LinearUpdate;
pub use weight_gradient::LinearWeightGradient;

use super::bias::sum_rows;
use super::{GemmLayout, U32, check_sizes, gemm};
use crate::cuda::LinearArguments;
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::storage::{Element, Operand, Precision, Stored};

/// The tile arithmetic of the kernels is in 32 bits.
const LARGEST: u32 = i32::MAX as u32;

/// The common part of the four operations: their plan, and the checks of their sizes.
macro_rules! linear {
    ($operation:ident, $product:expr, |$self:ident| ($m:expr, $n:expr, $k:expr)) => {
        impl $operation {
            /// Launch configuration of the kernel.
            fn plan(&$self) -> Plan {
                Plan::of($product, $self.precision, $m, $n, $k)
            }

            fn kernel(&$self) -> &'static str {
                $self.plan().kernel()
            }

            /// Name of the kernel that a launch on this GPU takes: GPUs lack some, and the planned one may not fit. Without a
            /// GPU, that of the planned one, as in [`Operation::name`](crate::Operation::name).
            ///
            /// # Errors
            ///
            /// As for [`CudaKernels::prepare`].
            pub fn kernel_on(&$self, cuda: Option<&CudaKernels>) -> Result<&'static str, KernelError> {
                match cuda {
                    Some(cuda) => cuda.kernel_of(&$self.plan(), [$m, $n, $k]),
                    None => Ok($self.kernel()),
                }
            }

            /// Bytes of memory that the blocks of the launch need to add up their sums; zero if none share a sum.
            #[must_use]
            pub fn workspace_bytes(&self) -> u64 {
                self.plan().workspace_bytes
            }

            /// Counters that the launch needs to find out which of its blocks is the last to add to a tile.
            #[must_use]
            pub fn tickets(&self) -> u64 {
                self.plan().tickets
            }

            /// Ways to compute this product that are worth measuring.
            #[must_use]
            pub fn candidates(&$self) -> Vec<Choice> {
                Plan::candidates($product, $self.precision, [$m, $n, $k])
            }

            /// Memory and counters that a launch with this choice needs: bytes, and u32.
            #[must_use]
            pub fn needs_with(&$self, choice: Choice) -> (u64, u64) {
                let plan = Plan::with($product, $self.precision, [$m, $n, $k], choice);
                (plan.workspace_bytes, plan.tickets)
            }

            /// Queues the launch with this choice instead of the planned one, for measuring.
            ///
            /// # Errors
            ///
            /// As for [`Operation::launch`](crate::Operation::launch).
            ///
            /// # Safety
            ///
            /// As for [`Operation::launch`](crate::Operation::launch); workspace and tickets are as large as [`needs_with`](Self::needs_with) says.
            pub unsafe fn launch_with(
                &$self,
                choice: Choice,
                cuda: &CudaKernels,
                stream: CUstream,
            ) -> Result<(), KernelError> {
                $self.check()?;
                let plan = Plan::with($product, $self.precision, [$m, $n, $k], choice);
                // SAFETY: the caller vouches for the addresses.
                unsafe { cuda.launch_linear(&plan, stream, &$self.arguments()) }
            }

            fn element(&self) -> Element {
                self.precision.element()
            }

            fn check_shape(&self) -> Result<(), KernelError> {
                super::check_layer(self.name(), self.rows, self.inputs, self.outputs)
            }

            /// Bytes of a matrix of stored elements, from its first to its last.
            fn stored_bytes(&self, rows: u32, cols: u32, pitch: u32) -> u64 {
                total([(span(rows, cols, pitch), self.element().bytes())])
            }

            /// Workspace and tickets, as far as there are any.
            fn shared_buffers(&self) -> impl Iterator<Item = (u64, u64)> {
                let both = [(self.workspace, self.workspace_bytes()), (self.tickets, self.tickets() * U32)];
                both.into_iter().filter(|(_, bytes)| *bytes > 0)
            }

            /// Claims workspace and tickets: the host needs neither, but an overlap has to come out.
            fn claim_shared(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
                super::claim_shared(buffers, self.shared_buffers())
            }
        }
    };
}

use linear;

/// Bytes that the kernels read and write per access.
const AT_ONCE: u64 = 16;

/// Matrices begin on 16 bytes, and rows of operands, and of what is read back or stepped, are a multiple of them long.
fn check_alignment(operation: &'static str, element: Element, arguments: &LinearArguments) -> Result<(), KernelError> {
    let LinearArguments { a, b, out, mask, master, workspace, .. } = *arguments;
    if let Some(&addr) = [a, b, out, mask, master, workspace].iter().find(|addr| !addr.is_multiple_of(AT_ONCE)) {
        return Err(KernelError::Misaligned { operation, addr, alignment: AT_ONCE });
    }
    let reads_back = mask != 0 || arguments.flags & LinearArguments::STEP != 0;
    let pitches = [Some(arguments.a_pitch), Some(arguments.b_pitch), reads_back.then_some(arguments.out_pitch)];
    match pitches.into_iter().flatten().find(|pitch| !(u64::from(*pitch) * element.bytes()).is_multiple_of(AT_ONCE)) {
        None => Ok(()),
        Some(pitch) => Err(KernelError::Shape {
            operation,
            what: format!("a row of {pitch} elements is no multiple of {AT_ONCE} bytes"),
        }),
    }
}

fn check_layer(operation: &'static str, rows: u32, inputs: u32, outputs: u32) -> Result<(), KernelError> {
    let sizes = [("rows", rows), ("inputs", inputs), ("outputs", outputs)];
    check_sizes(operation, sizes.map(|(name, size)| (name, size.into())))?;
    match sizes.iter().find(|(_, size)| *size > LARGEST) {
        None => Ok(()),
        Some((name, size)) => Err(KernelError::Shape { operation, what: format!("{name} is {size}, above {LARGEST}") }),
    }
}

fn claim_shared(
    buffers: &mut HostBuffers<'_>,
    mut shared: impl Iterator<Item = (u64, u64)>,
) -> Result<(), KernelError> {
    shared.try_for_each(|(addr, bytes)| buffers.write::<u32>(addr, bytes / U32).map(|_| ()))
}

/// `op(a)·op(b)`, dense `[m, n]`: what the host computes for every precision, with sums in f32.
fn product(shape: [u32; 3], layout: GemmLayout, a: &Operand<'_>, b: &Operand<'_>) -> Vec<f32> {
    let [m, n, k] = shape.map(|size| size as usize);
    let mut c = vec![0.0; m * n];
    gemm::product(layout, [m, n, k], (&a.values, a.pitch), (&b.values, b.pitch), &mut c);
    c
}

/// `dyᵀ·x`, dense `[outputs, inputs]`, and the sums of dy's columns; of dy and x with their pitches.
fn gradient<T: Stored>(
    precision: Precision,
    [rows, inputs, outputs]: [u32; 3],
    (dy, dy_pitch): (&[T], u32),
    (x, x_pitch): (&[T], u32),
) -> (Vec<f32>, Vec<f32>) {
    // The bias takes no part in the product, so its terms are not rounded as operands are.
    let mut bias = vec![0.0; outputs as usize];
    sum_rows(dy, dy_pitch, &mut bias);
    let dy = Operand::of(dy, outputs, dy_pitch, precision);
    let x = Operand::of(x, inputs, x_pitch, precision);
    (product([outputs, inputs, rows], GemmLayout::TN, &dy, &x), bias)
}
