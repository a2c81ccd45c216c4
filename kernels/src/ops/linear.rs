//! A linear layer's three GEMMs, fused with the layer's other operations; kernels in `cuda/linear.cuh`.
//!
//! Matrices have a pitch ([`Element::pitch`](crate::Element::pitch)), the number of elements from one row to the next.
//! Biases, gradients and master weights are f32, whatever the precision. Matrices are aligned to 16 bytes, and may be
//! read up to the pitch of their last row. The values of the padding between columns and pitch are never used, and a
//! launch may overwrite them.

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
                Plan::new($product, $self.precision, $m, $n, $k)
            }

            fn kernel(&$self) -> &'static str {
                $self.plan().kernel()
            }

            /// Name of the kernel that a launch uses on this GPU, which may lack the planned kernel or its shared
            /// memory. Without a GPU, the name of the planned kernel, as in
            /// [`Operation::name`](crate::Operation::name).
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

            /// Bytes of workspace for the sums of split-k; zero if `splits` is 1.
            #[must_use]
            pub fn workspace_bytes(&self) -> u64 {
                self.plan().workspace_bytes
            }

            /// Number of counters for split-k, with which the launch determines the last block of each tile.
            #[must_use]
            pub fn tickets(&self) -> u64 {
                self.plan().tickets
            }

            /// Choices worth measuring for this GEMM.
            #[must_use]
            pub fn candidates(&$self) -> Vec<Choice> {
                Plan::candidates($product, $self.precision, [$m, $n, $k])
            }

            /// Bytes of workspace, and number of u32 counters, for a launch with this choice.
            #[must_use]
            pub fn needs_with(&$self, choice: Choice) -> (u64, u64) {
                let plan = Plan::with($product, $self.precision, [$m, $n, $k], choice);
                (plan.workspace_bytes, plan.tickets)
            }

            /// Queues the launch with this choice instead of the planned one, for measurements.
            ///
            /// # Errors
            ///
            /// As for [`Operation::launch`](crate::Operation::launch).
            ///
            /// # Safety
            ///
            /// As for [`Operation::launch`](crate::Operation::launch); workspace and tickets
            /// have the sizes that [`needs_with`](Self::needs_with) returns.
            pub unsafe fn launch_with(
                &$self,
                choice: Choice,
                cuda: &CudaKernels,
                stream: CUstream,
            ) -> Result<(), KernelError> {
                $self.check()?;
                let plan = Plan::with($product, $self.precision, [$m, $n, $k], choice);
                // SAFETY: the caller guarantees the addresses.
                unsafe { cuda.launch_linear(&plan, stream, &$self.arguments()) }
            }

            fn element(&self) -> Element {
                self.precision.element()
            }

            fn check_shape(&self) -> Result<(), KernelError> {
                super::check_layer(self.name(), self.rows, self.inputs, self.outputs)
            }

            /// Bytes from the first to the last element of a matrix.
            fn stored_bytes(&self, rows: u32, cols: u32, pitch: u32) -> u64 {
                total([(span(rows, cols, pitch), self.element().bytes())])
            }

            /// Workspace and tickets, unless they are empty.
            fn shared_buffers(&self) -> impl Iterator<Item = (u64, u64)> {
                let both = [(self.workspace, self.workspace_bytes()), (self.tickets, self.tickets() * U32)];
                both.into_iter().filter(|(_, bytes)| *bytes > 0)
            }

            /// Claims workspace and tickets: the host does not use them, but must report overlaps.
            fn claim_shared(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
                super::claim_shared(buffers, self.shared_buffers())
            }
        }
    };
}

use linear;

/// Bytes that the kernels read and write per access.
const ACCESS_BYTES: u64 = 16;

/// Matrices must be aligned to 16 bytes. Rows of operands, and rows of outputs that are read back or updated, must be a
/// multiple of 16 bytes long.
fn check_alignment(operation: &'static str, element: Element, arguments: &LinearArguments) -> Result<(), KernelError> {
    let LinearArguments { a, b, out, mask, master, workspace, .. } = *arguments;
    if let Some(&addr) = [a, b, out, mask, master, workspace].iter().find(|addr| !addr.is_multiple_of(ACCESS_BYTES)) {
        return Err(KernelError::Misaligned { operation, addr, alignment: ACCESS_BYTES });
    }
    let reads_back = mask != 0 || arguments.flags & LinearArguments::STEP != 0;
    let pitches = [Some(arguments.a_pitch), Some(arguments.b_pitch), reads_back.then_some(arguments.out_pitch)];
    match pitches
        .into_iter()
        .flatten()
        .find(|pitch| !(u64::from(*pitch) * element.bytes()).is_multiple_of(ACCESS_BYTES))
    {
        None => Ok(()),
        Some(pitch) => Err(KernelError::Shape {
            operation,
            what: format!("a row of {pitch} elements is not a multiple of {ACCESS_BYTES} bytes"),
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

/// `op(a)·op(b)`, dense `[m, n]`: the host's computation for every precision, with sums in f32.
fn product(shape: [u32; 3], layout: GemmLayout, a: &Operand<'_>, b: &Operand<'_>) -> Vec<f32> {
    let [m, n, k] = shape.map(|size| size as usize);
    let mut c = vec![0.0; m * n];
    gemm::product(layout, [m, n, k], (&a.values, a.pitch), (&b.values, b.pitch), &mut c);
    c
}

/// `dyᵀ·x`, dense `[outputs, inputs]`, and the sums of dy's columns, for dy and x with their pitches.
fn gradient<T: Stored>(
    precision: Precision,
    [rows, inputs, outputs]: [u32; 3],
    (dy, dy_pitch): (&[T], u32),
    (x, x_pitch): (&[T], u32),
) -> (Vec<f32>, Vec<f32>) {
    // The bias gradient is not part of the GEMM, so its terms are not rounded as operands are.
    let mut bias = vec![0.0; outputs as usize];
    sum_rows(dy, dy_pitch, &mut bias);
    let dy = Operand::new(dy, outputs, dy_pitch, precision);
    let x = Operand::new(x, inputs, x_pitch, precision);
    (product([outputs, inputs, rows], GemmLayout::TN, &dy, &x), bias)
}
