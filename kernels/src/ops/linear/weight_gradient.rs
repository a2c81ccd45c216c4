//! The gradients of a linear layer's weights and bias; kernels in `cuda/linear.cuh`.

use cudarc::driver::sys::CUstream;

use super::{check_alignment, gradient, linear};
use crate::cuda::{CudaKernels, LinearArguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};
use crate::ops::{F32, U32, area, check_room, or_null, span, total};
use crate::plan::{Choice, Plan, Product};
use crate::storage::{Element, Precision, Stored, with_stored};

/// `dweight = dyᵀ·x · scale` and `dbias = Σ_rows dy · scale`, both f32.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinearWeightGradient {
    /// Storage of dy and x, and precision of the GEMM.
    pub precision: Precision,
    /// Rows of dy and x: examples.
    pub rows: u32,
    /// Columns of x and dweight.
    pub inputs: u32,
    /// Columns of dy, rows of dweight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Factor of both results: one over the loss scale.
    pub scale: f32,
    /// Address of the weights' gradient, `f32[outputs, inputs]`, written.
    pub dweight: u64,
    /// Elements from one row of the gradient to the next.
    pub dweight_pitch: u32,
    /// Address of the bias gradient, `f32[outputs]`, written; `None` if it is not needed.
    pub dbias: Option<u64>,
    /// As in [`LinearForward`](crate::LinearForward).
    pub workspace: u64,
    /// As in [`LinearForward`](crate::LinearForward).
    pub tickets: u64,
}

linear!(LinearWeightGradient, Product::Gradient, |self| (self.outputs, self.inputs, self.rows));

impl LinearWeightGradient {
    fn arguments(&self) -> LinearArguments {
        LinearArguments {
            a: self.dy,
            b: self.x,
            out: self.dweight,
            bias: or_null(self.dbias),
            m: self.outputs,
            n: self.inputs,
            k: self.rows,
            a_pitch: self.dy_pitch,
            b_pitch: self.x_pitch,
            out_pitch: self.dweight_pitch,
            scale: self.scale,
            ..LinearArguments::new(self.workspace, self.tickets)
        }
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let dy = buffers.read::<T>(self.dy, span(self.rows, self.outputs, self.dy_pitch))?;
        let x = buffers.read::<T>(self.x, span(self.rows, self.inputs, self.x_pitch))?;
        let dweight = buffers.write::<f32>(self.dweight, span(self.outputs, self.inputs, self.dweight_pitch))?;
        let dbias = buffers.write_some::<f32>(self.dbias, self.outputs.into())?.unwrap_or_default();
        self.claim_shared(buffers)?;
        let sizes = [self.rows, self.inputs, self.outputs];
        let (gradient, bias_gradient) = gradient(self.precision, sizes, (dy, self.dy_pitch), (x, self.x_pitch));
        let rows = gradient.chunks_exact(self.inputs as usize);
        for (to, from) in dweight.chunks_mut(self.dweight_pitch as usize).zip(rows) {
            for (to, from) in to.iter_mut().zip(from) {
                *to = from * self.scale;
            }
        }
        for (to, from) in dbias.iter_mut().zip(bias_gradient) {
            *to = from * self.scale;
        }
        Ok(())
    }
}

impl Definition for LinearWeightGradient {
    fn name(&self) -> &'static str {
        self.kernel()
    }

    fn check(&self) -> Result<(), KernelError> {
        self.check_shape()?;
        check_room(
            self.name(),
            [
                ("dy_pitch", self.dy_pitch, self.outputs),
                ("x_pitch", self.x_pitch, self.inputs),
                ("dweight_pitch", self.dweight_pitch, self.inputs),
            ],
        )?;
        check_alignment(self.name(), self.element(), &self.arguments())
    }

    fn work(&self) -> Work {
        let (plan, each) = (self.plan(), self.element().bytes());
        let weights = area(self.outputs, self.inputs);
        let biases = if self.dbias.is_some() { self.outputs } else { 0 };
        Work {
            blocks: plan.blocks,
            iterations: plan.iterations,
            bytes: total([
                (area(self.rows, self.outputs), each),
                (area(self.rows, self.inputs), each),
                (weights, F32),
                (biases.into(), F32),
            ]),
            flops: total([(weights, 2 * u64::from(self.rows) + 1), (biases.into(), u64::from(self.rows) + 1)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let elements = span(self.outputs, self.inputs, self.dweight_pitch);
        let mut buffers = vec![
            (self.dy, self.stored_bytes(self.rows, self.outputs, self.dy_pitch)),
            (self.x, self.stored_bytes(self.rows, self.inputs, self.x_pitch)),
            (self.dweight, total([(elements, F32)])),
        ];
        buffers.extend(self.dbias.map(|dbias| (dbias, total([(self.outputs.into(), F32)]))));
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
