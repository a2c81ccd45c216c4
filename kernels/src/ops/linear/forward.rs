//! A linear layer's output; kernels in `cuda/linear.cuh`.

use cudarc::driver::sys::CUstream;

use super::{check_alignment, linear, product};
use crate::cuda::{CudaKernels, LinearArguments};
use crate::error::KernelError;
use crate::host::HostBuffers;
use crate::operation::{Definition, Work};
use crate::ops::{F32, GemmLayout, U32, area, check_room, or_null, span, total};
use crate::plan::{Choice, Plan, Product};
use crate::storage::{Element, Operand, Precision, Stored, with_stored};

/// `y = x·weightᵀ (+ bias) (then ReLU)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinearForward {
    /// Storage of x and weight, and precision of the GEMM.
    pub precision: Precision,
    /// Rows of x and y: examples.
    pub rows: u32,
    /// Columns of x and weight.
    pub inputs: u32,
    /// Rows of weight, columns of y.
    pub outputs: u32,
    /// Address of x, `[rows, inputs]`.
    pub x: u64,
    /// Elements from one row of x to the next.
    pub x_pitch: u32,
    /// Address of the weights, `[outputs, inputs]`.
    pub weight: u64,
    /// Elements from one row of the weights to the next.
    pub weight_pitch: u32,
    /// Address of the bias, `f32[outputs]`, if it is to be added.
    pub bias: Option<u64>,
    /// If true, negative results become zero. NaN stays NaN.
    pub relu: bool,
    /// Address of y, `[rows, outputs]`, written.
    pub y: u64,
    /// Elements from one row of y to the next.
    pub y_pitch: u32,
    /// If true, y is f32, whatever the precision: for logits.
    pub y_f32: bool,
    /// Address of [`workspace_bytes`](Self::workspace_bytes) bytes for the sums of split-k; unused if that is zero.
    pub workspace: u64,
    /// Address of [`tickets`](Self::tickets) u32 counters, which are zero before and after a launch.
    pub tickets: u64,
}

linear!(LinearForward, Product::Forward, |self| (self.rows, self.outputs, self.inputs));

impl LinearForward {
    fn y_element(&self) -> Element {
        if self.y_f32 { Element::F32 } else { self.element() }
    }

    fn arguments(&self) -> LinearArguments {
        let relu = if self.relu { LinearArguments::RELU } else { 0 };
        let y_f32 = if self.y_f32 { LinearArguments::OUT_F32 } else { 0 };
        LinearArguments {
            a: self.x,
            b: self.weight,
            out: self.y,
            bias: or_null(self.bias),
            m: self.rows,
            n: self.outputs,
            k: self.inputs,
            a_pitch: self.x_pitch,
            b_pitch: self.weight_pitch,
            out_pitch: self.y_pitch,
            flags: relu | y_f32,
            ..LinearArguments::new(self.workspace, self.tickets)
        }
    }

    fn compute_typed<T: Stored, Y: Stored>(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        let x = buffers.read::<T>(self.x, span(self.rows, self.inputs, self.x_pitch))?;
        let weight = buffers.read::<T>(self.weight, span(self.outputs, self.inputs, self.weight_pitch))?;
        let bias: &[f32] = self.bias.map_or(Ok(Default::default()), |bias| buffers.read(bias, self.outputs.into()))?;
        let y = buffers.write::<Y>(self.y, span(self.rows, self.outputs, self.y_pitch))?;
        self.claim_shared(buffers)?;
        let x = Operand::new(x, self.inputs, self.x_pitch, self.precision);
        let weight = Operand::new(weight, self.inputs, self.weight_pitch, self.precision);
        let mut sums = product([self.rows, self.outputs, self.inputs], GemmLayout::NT, &x, &weight);
        let outputs = self.outputs as usize;
        for (y, sums) in y.chunks_mut(self.y_pitch as usize).zip(sums.chunks_exact_mut(outputs)) {
            for (sum, bias) in sums.iter_mut().zip(bias) {
                *sum += bias;
            }
            if self.relu {
                // NaN stays NaN.
                sums.iter_mut().filter(|sum| **sum <= 0.0).for_each(|sum| *sum = 0.0);
            }
            Y::store_all(sums, &mut y[..outputs]);
        }
        Ok(())
    }
}

impl Definition for LinearForward {
    fn name(&self) -> &'static str {
        self.kernel()
    }

    fn check(&self) -> Result<(), KernelError> {
        self.check_shape()?;
        check_room(
            self.name(),
            [
                ("x_pitch", self.x_pitch, self.inputs),
                ("weight_pitch", self.weight_pitch, self.inputs),
                ("y_pitch", self.y_pitch, self.outputs),
            ],
        )?;
        check_alignment(self.name(), self.element(), &self.arguments())
    }

    fn work(&self) -> Work {
        let (plan, each) = (self.plan(), self.element().bytes());
        let outputs = area(self.rows, self.outputs);
        let bias = if self.bias.is_some() { self.outputs } else { 0 };
        Work {
            blocks: plan.blocks,
            iterations: plan.iterations,
            bytes: total([
                (area(self.rows, self.inputs), each),
                (area(self.outputs, self.inputs), each),
                (bias.into(), F32),
                (outputs, self.y_element().bytes()),
            ]),
            flops: total([
                (outputs, 2 * u64::from(self.inputs)),
                (outputs, u64::from(self.bias.is_some()) + u64::from(self.relu)),
            ]),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let mut buffers = vec![
            (self.x, self.stored_bytes(self.rows, self.inputs, self.x_pitch)),
            (self.weight, self.stored_bytes(self.outputs, self.inputs, self.weight_pitch)),
        ];
        buffers.extend(self.bias.map(|bias| (bias, total([(self.outputs.into(), F32)]))));
        let elements = span(self.rows, self.outputs, self.y_pitch);
        buffers.push((self.y, total([(elements, self.y_element().bytes())])));
        buffers.extend(self.shared_buffers());
        buffers
    }

    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: the caller guarantees the addresses.
        unsafe { cuda.launch_linear(&self.plan(), stream, &self.arguments()) }
    }

    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError> {
        with_stored!(self.element(), T => match self.y_f32 {
            true => self.compute_typed::<T, f32>(buffers),
            false => self.compute_typed::<T, T>(buffers),
        })
    }
}
