//! The SGD update of a linear layer, whose gradient stays in registers; kernels in `cuda/linear.cuh`.

use cudarc::driver::sys::CUstream;

use super::{check_alignment, gradient, linear};
use crate::cuda::{CudaKernels, LinearArguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::multiply_add::descend;
use crate::operation::{Definition, Work};
use crate::ops::sgd::{check_master, step_weights};
use crate::ops::{F32, U32, area, check_room, or_null, span, total};
use crate::plan::{Choice, Plan, Product};
use crate::storage::{Element, Precision, Stored, with_stored};

/// `weight -= rate · dyᵀ·x` and `bias -= rate · Σ_rows dy`, without writing the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinearUpdate {
    /// Storage of dy, x and weight, and precision of the GEMM.
    pub precision: Precision,
    /// Rows of dy and x: examples.
    pub rows: u32,
    /// Columns of x and weight.
    pub inputs: u32,
    /// Columns of dy, rows of weight.
    pub outputs: u32,
    /// Address of dy, `[rows, outputs]`.
    pub dy: u64,
    /// Elements from one row of dy to the next.
    pub dy_pitch: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Learning rate over loss scale.
    pub rate: f32,
    /// Address of the weights, `[outputs, inputs]`, read (without a master) and written.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the master weights, `f32[outputs, inputs]` with the weights' pitch, read and written; the weights are
    /// set to their rounded values. Only for 16-bit weights.
    pub master: Option<u64>,
    /// Address of the bias, `f32[outputs]`, read and written.
    pub bias: u64,
    /// As in [`LinearForward`](crate::LinearForward).
    pub workspace: u64,
    /// As in [`LinearForward`](crate::LinearForward).
    pub tickets: u64,
}

linear!(LinearUpdate, self.product(), |self| (self.outputs, self.inputs, self.rows));

impl LinearUpdate {
    /// With master weights it uses the gradient's kernel, which then writes more.
    fn product(&self) -> Product {
        if self.master.is_some() { Product::Gradient } else { Product::Update }
    }

    fn arguments(&self) -> LinearArguments {
        LinearArguments {
            a: self.dy,
            b: self.x,
            out: self.weight,
            master: or_null(self.master),
            bias: self.bias,
            m: self.outputs,
            n: self.inputs,
            k: self.rows,
            a_pitch: self.dy_pitch,
            b_pitch: self.x_pitch,
            out_pitch: self.weight_pitch,
            flags: LinearArguments::STEP,
            scale: self.rate,
            ..LinearArguments::new(self.workspace, self.tickets)
        }
    }

    fn compute_typed<T: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let weights = span(self.outputs, self.inputs, self.weight_pitch);
        let dy = buffers.read::<T>(self.dy, span(self.rows, self.outputs, self.dy_pitch))?;
        let x = buffers.read::<T>(self.x, span(self.rows, self.inputs, self.x_pitch))?;
        let weight = buffers.write::<T>(self.weight, weights)?;
        let mut master = buffers.write_some::<f32>(self.master, weights)?;
        let bias = buffers.write::<f32>(self.bias, self.outputs.into())?;
        self.claim_shared(buffers)?;
        let sizes = [self.rows, self.inputs, self.outputs];
        let (gradient, bias_gradient) = gradient(self.precision, sizes, (dy, self.dy_pitch), (x, self.x_pitch));
        let (inputs, pitch) = (self.inputs as usize, self.weight_pitch as usize);
        for (row, gradient) in gradient.chunks_exact(inputs).enumerate() {
            let here = row * pitch..row * pitch + inputs;
            let master = master.as_deref_mut().map(|master| &mut master[here.clone()]);
            step_weights(&mut weight[here], master, gradient, self.rate);
        }
        descend(bias, &bias_gradient, self.rate);
        Ok(())
    }
}

impl Definition for LinearUpdate {
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
                ("weight_pitch", self.weight_pitch, self.inputs),
            ],
        )?;
        check_alignment(self.name(), self.element(), &self.arguments())?;
        check_master(self.name(), self.element(), self.master)
    }

    fn work(&self) -> Work {
        let (plan, each) = (self.plan(), self.element().bytes());
        let weights = area(self.outputs, self.inputs);
        // Weights are read and written; or master weights are, and weights only written.
        let step = if self.master.is_some() { 2 * F32 + each } else { 2 * each };
        Work {
            blocks: plan.blocks,
            iterations: plan.iterations,
            bytes: total([
                (area(self.rows, self.outputs), each),
                (area(self.rows, self.inputs), each),
                (weights, step),
                (self.outputs.into(), 2 * F32),
            ]),
            flops: total([(weights, 2 * u64::from(self.rows) + 2), (self.outputs.into(), u64::from(self.rows) + 2)]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let weights = span(self.outputs, self.inputs, self.weight_pitch);
        let mut buffers = vec![
            (self.dy, self.stored_bytes(self.rows, self.outputs, self.dy_pitch)),
            (self.x, self.stored_bytes(self.rows, self.inputs, self.x_pitch)),
            (self.weight, total([(weights, self.element().bytes())])),
        ];
        buffers.extend(self.master.map(|master| (master, total([(weights, F32)]))));
        buffers.push((self.bias, total([(self.outputs.into(), F32)])));
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
