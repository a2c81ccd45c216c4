//! The whole way back through a linear layer; kernels in `cuda/streamed_backward.cuh` and `cuda/streamed_backward_f32.cuh`.

use cudarc::driver::sys::CUstream;

use super::{LinearBackwardInput, LinearUpdate};
use crate::cuda::{CudaKernels, LinearArguments, backward_name};
use crate::error::KernelError;
use crate::host::{HostBuffers, HostMemory};
use crate::operation::{self, Operation, Work};
use crate::ops::{U32, area, total};
use crate::plan::BackwardPlan;

/// [`LinearBackwardInput`], and then [`LinearUpdate`], in one kernel that reads each weight once: what few examples take
/// through a large layer is the time to read its weights. On a GPU without warpgroups it is one after the other.
///
/// The sums have another order than those of [`LinearBackwardInput`] by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearBackward {
    /// The gradient of the layer's input, of the weights of before the step. Its workspace and tickets are those of the
    /// launch: as large as [`workspace_bytes`](Self::workspace_bytes) and [`tickets`](Self::tickets) say.
    pub input: LinearBackwardInput,
    /// The step, with the same dy and weights, and with workspace and tickets of its own.
    pub update: LinearUpdate,
}

impl LinearBackward {
    /// One launch for both, if it is faster than two: on tensor cores without master weights, for few examples, and rows of
    /// weights that end on 16 bytes, from 512 inputs on.
    #[must_use]
    pub fn of(input: LinearBackwardInput, update: LinearUpdate) -> Option<Self> {
        let pays = BackwardPlan::pays(input.precision, input.rows, input.inputs, input.outputs);
        let both = Self { input, update };
        (pays && both.plan().is_some()).then_some(both)
    }

    fn plan(&self) -> Option<BackwardPlan> {
        if self.update.master.is_some() {
            return None;
        }
        BackwardPlan::of(self.input.precision, self.input.rows, self.input.inputs, self.input.outputs)
    }

    /// Whether a launch on this GPU is one kernel; without a GPU it is.
    ///
    /// # Errors
    ///
    /// As for [`CudaKernels::prepare`].
    pub fn is_one_kernel_on(&self, cuda: Option<&CudaKernels>) -> Result<bool, KernelError> {
        cuda.map_or(Ok(true), |cuda| cuda.has_backward(self.input.precision))
    }

    /// Bytes of memory behind the input's `workspace`.
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        self.plan().map_or(0, |plan| plan.workspace_bytes()).max(self.input.workspace_bytes())
    }

    /// Counters behind the input's `tickets`.
    #[must_use]
    pub fn tickets(&self) -> u64 {
        self.plan().map_or(0, |plan| plan.tickets()).max(self.input.tickets())
    }

    /// Workspace and tickets of the launch, as far as there are any.
    fn shared_buffers(&self) -> impl Iterator<Item = (u64, u64)> {
        let both = [(self.input.workspace, self.workspace_bytes()), (self.input.tickets, self.tickets() * U32)];
        both.into_iter().filter(|(_, bytes)| *bytes > 0)
    }

    fn check(&self) -> Result<BackwardPlan, KernelError> {
        let Self { input, update } = self;
        operation::Definition::check(input)?;
        operation::Definition::check(update)?;
        let refused = |what: &str| KernelError::Shape { operation: self.name(), what: what.to_owned() };
        let sizes = [
            (input.rows, update.rows),
            (input.inputs, update.inputs),
            (input.outputs, update.outputs),
            (input.dy_pitch, update.dy_pitch),
            (input.weight_pitch, update.weight_pitch),
        ];
        let addresses = [(input.dy, update.dy), (input.weight, update.weight)];
        let same = sizes.iter().all(|(one, other)| one == other) && addresses.iter().all(|(one, other)| one == other);
        if !same || input.precision != update.precision {
            return Err(refused("both products take the same layer and the same dy"));
        }
        self.plan().ok_or_else(|| {
            refused(
                "for tensor cores without master weights, at most 32 examples (64 in half types), and rows of 16 bytes",
            )
        })
    }
}

impl Operation for LinearBackward {
    fn name(&self) -> &'static str {
        backward_name(self.input.precision).unwrap_or(self.input.name())
    }

    fn work(&self) -> Work {
        let (input, update) = (self.input.work(), self.update.work());
        // The weights are read once, and dy too.
        let each = self.input.precision.element().bytes();
        let weights = area(self.input.outputs, self.input.inputs);
        let again = total([(weights, each), (area(self.input.rows, self.input.outputs), each)]);
        let plan = self.plan();
        Work {
            blocks: plan.map_or(input.blocks, |plan| plan.blocks()),
            iterations: plan.map_or(input.iterations, |plan| plan.iterations),
            bytes: (input.bytes + update.bytes).saturating_sub(again),
            flops: input.flops + update.flops,
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let mut buffers: Vec<(u64, u64)> = self.shared_buffers().collect();
        for (addr, bytes) in self.input.buffers().into_iter().chain(self.update.buffers()) {
            if buffers.iter().all(|(known, _)| *known != addr) {
                buffers.push((addr, bytes));
            }
        }
        buffers
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        let plan = self.check()?;
        let Self { input, update } = self;
        let arguments = LinearArguments { bias: update.bias, scale: update.rate, ..input.arguments() };
        // SAFETY: the caller vouches for the addresses; the stream keeps the order of the two.
        unsafe {
            if cuda.launch_backward(&plan, stream, input.precision, &arguments, (update.x, update.x_pitch))? {
                return Ok(());
            }
            input.launch(cuda, stream)?;
            update.launch(cuda, stream)
        }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        // SAFETY: the caller vouches for the memory.
        unsafe {
            super::claim_shared(&mut HostBuffers::new(memory, self.name()), self.shared_buffers())?;
            self.input.run_on_host(memory)?;
            self.update.run_on_host(memory)
        }
    }
}
