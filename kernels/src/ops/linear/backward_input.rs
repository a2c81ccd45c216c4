//! The gradient of a linear layer's input; kernels in `cuda/linear.cuh`.

use cudarc::driver::sys::CUstream;

use super::{check_alignment, linear, product};
use crate::cuda::{CudaKernels, LinearArguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};
use crate::ops::{GemmLayout, U32, area, check_room, or_null, span, total};
use crate::plan::{Choice, Plan, Product};
use crate::storage::{Element, Operand, Precision, Stored, with_stored};

/// `dx = dy·weight`, zero where the layer's input was not positive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearBackwardInput {
    /// Storage of dy, weight, mask and dx, and precision of the GEMM.
    pub precision: Precision,
    /// Rows of dy and dx: examples.
    pub rows: u32,
    /// Columns of weight and dx.
    pub inputs: u32,
    /// Columns of dy, rows of weight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of the weights, `[outputs, inputs]`.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the output of the ReLU before this layer, `[rows, inputs]` with dx's pitch: dx is zero where it is
    /// not positive.
    pub mask: Option<u64>,
    /// Address of dx, `[rows, inputs]`, written.
    pub dx: u64,
    /// Elements from one row of dx to the next.
    pub dx_pitch: u32,
    /// As in [`LinearForward`](crate::LinearForward).
    pub workspace: u64,
    /// As in [`LinearForward`](crate::LinearForward).
    pub tickets: u64,
}

linear!(LinearBackwardInput, Product::Input, |self| (self.rows, self.inputs, self.outputs));

impl LinearBackwardInput {
    pub(crate) fn arguments(&self) -> LinearArguments {
        LinearArguments {
            a: self.dy,
            b: self.weight,
            out: self.dx,
            mask: or_null(self.mask),
            m: self.rows,
            n: self.inputs,
            k: self.outputs,
            a_pitch: self.dy_pitch,
            b_pitch: self.weight_pitch,
            out_pitch: self.dx_pitch,
            ..LinearArguments::new(self.workspace, self.tickets)
        }
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let elements = span(self.rows, self.inputs, self.dx_pitch);
        let dy = buffers.read::<T>(self.dy, span(self.rows, self.outputs, self.dy_pitch))?;
        let weight = buffers.read::<T>(self.weight, span(self.outputs, self.inputs, self.weight_pitch))?;
        let mask = self.mask.map(|mask| buffers.read::<T>(mask, elements)).transpose()?;
        let dx = buffers.write::<T>(self.dx, elements)?;
        self.claim_shared(buffers)?;
        let dy = Operand::new(dy, self.outputs, self.dy_pitch, self.precision);
        let weight = Operand::new(weight, self.inputs, self.weight_pitch, self.precision);
        let mut sums = product([self.rows, self.inputs, self.outputs], GemmLayout::NN, &dy, &weight);
        let (inputs, pitch) = (self.inputs as usize, self.dx_pitch as usize);
        if let Some(mask) = mask {
            for (sums, mask) in sums.chunks_exact_mut(inputs).zip(mask.chunks(pitch)) {
                for (sum, mask) in sums.iter_mut().zip(mask) {
                    *sum = if mask.load() > 0.0 { *sum } else { 0.0 };
                }
            }
        }
        for (dx, sums) in dx.chunks_mut(pitch).zip(sums.chunks_exact(inputs)) {
            T::store_all(sums, &mut dx[..inputs]);
        }
        Ok(())
    }
}

impl Definition for LinearBackwardInput {
    fn name(&self) -> &'static str {
        self.kernel()
    }

    fn check(&self) -> Result<(), KernelError> {
        self.check_shape()?;
        check_room(
            self.name(),
            [
                ("dy_pitch", self.dy_pitch, self.outputs),
                ("weight_pitch", self.weight_pitch, self.inputs),
                ("dx_pitch", self.dx_pitch, self.inputs),
            ],
        )?;
        check_alignment(self.name(), self.element(), &self.arguments())
    }

    fn work(&self) -> Work {
        let (plan, each) = (self.plan(), self.element().bytes());
        let masks = u64::from(self.mask.is_some());
        let inputs = area(self.rows, self.inputs);
        Work {
            blocks: plan.blocks,
            iterations: plan.iterations,
            bytes: total([
                (area(self.rows, self.outputs), each),
                (area(self.outputs, self.inputs), each),
                (inputs, (1 + masks) * each),
            ]),
            flops: total([(inputs, 2 * u64::from(self.outputs) + masks)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let mut buffers = vec![
            (self.dy, self.stored_bytes(self.rows, self.outputs, self.dy_pitch)),
            (self.weight, self.stored_bytes(self.outputs, self.inputs, self.weight_pitch)),
        ];
        let bytes = self.stored_bytes(self.rows, self.inputs, self.dx_pitch);
        buffers.extend(self.mask.map(|mask| (mask, bytes)));
        buffers.push((self.dx, bytes));
        buffers.extend(self.shared_buffers());
        buffers
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: the caller guarantees the addresses.
        unsafe { cuda.launch_linear(&self.plan(), stream, &self.arguments()) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element(), T => self.compute_typed::<T>(buffers))
    }
}
