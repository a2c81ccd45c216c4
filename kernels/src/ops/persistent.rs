//! Many steps in one launch; kernels in `cuda/persistent.cuh`.

use std::collections::BTreeSet;
use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use crate::cuda::{Cooperation, CudaKernels, MOST_PHASES, PersistentLaunch, no_persistent_kernel, persistent_name};
use crate::error::KernelError;
use crate::host::HostMemory;
use crate::operation::{Operation, Work};
use crate::phase::{Phase, groups};
use crate::precision::Precision;

/// The operations of a training step, done several times by one launch: a kernel whose blocks stay on the GPU and meet where
/// an operation needs what another has written. Each operation gives the same bits as by itself in the tiles that every GPU
/// has ([`CudaKernels::without_warpgroups`]).
///
/// A step's operations find out by a cursor how far the steps are; one of them advances it. They can be those of which
/// [`Operation::phases`] tells: `Gather*`, [`SoftmaxLoss`](crate::SoftmaxLoss) without a count, and the linear layers'
/// products with tiles for few examples.
///
/// Cost: on the host one launch, whatever the number of steps; on the GPU a barrier for each group of operations that do not
/// depend on each other, instead of a launch for each operation.
#[derive(Clone, Debug)]
pub struct PersistentSteps {
    steps: u32,
    precision: Precision,
    operations: Arc<[Box<dyn Operation>]>,
    groups: Arc<[Vec<Phase>]>,
    memory: u64,
}

/// Bytes at the start of the memory that hold the word by which blocks meet, apart from what else is written.
const MEETING_BYTES: u64 = 128;

impl PersistentSteps {
    /// Memory for what phases of a loss hand on.
    pub(crate) const SCRATCH_BYTES: u64 = 4096;

    /// Bytes of device memory that a launch needs besides that of its operations: zeros before the first launch, left to the
    /// launches afterwards.
    pub const MEMORY_BYTES: u64 = MEETING_BYTES + Self::SCRATCH_BYTES;

    /// `steps` times these operations. `memory` is the address of [`MEMORY_BYTES`](Self::MEMORY_BYTES) bytes that no launch
    /// beside this one uses, aligned to 128 bytes.
    ///
    /// # Errors
    ///
    /// [`KernelError::NotPersistent`] if this precision has no kernel ([`Precision::is_persistent`]), if an operation has no
    /// place in it, or if there are too many.
    pub fn new(
        precision: Precision,
        operations: Vec<Box<dyn Operation>>,
        steps: u32,
        memory: u64,
    ) -> Result<Self, KernelError> {
        if !precision.is_persistent() {
            return Err(no_persistent_kernel(precision));
        }
        let scratch = memory.saturating_add(MEETING_BYTES);
        let mut phases = Vec::new();
        for operation in &operations {
            let own = operation.phases(scratch);
            let suited = own.filter(|own| own.iter().all(|phase| phase.suits(precision)));
            phases.extend(suited.ok_or_else(|| KernelError::NotPersistent {
                operation: operation.name(),
                what: format!("is no part of {}", persistent_name(precision)),
            })?);
        }
        let operation = persistent_name(precision);
        if phases.is_empty() || steps == 0 {
            return Err(KernelError::NotPersistent { operation, what: "there is nothing to do".to_owned() });
        }
        if phases.len() > MOST_PHASES {
            let what = format!("a step has {} phases, and can have {MOST_PHASES}: too many layers", phases.len());
            return Err(KernelError::NotPersistent { operation, what });
        }
        Ok(Self { steps, precision, operations: operations.into(), groups: groups(phases).into(), memory })
    }

    /// The same with another number of steps, at least one. Cheap: what is repeated is shared.
    #[must_use]
    pub fn with_steps(&self, steps: u32) -> Self {
        Self { steps: steps.max(1), ..self.clone() }
    }

    /// Steps of a launch.
    #[must_use]
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Times that the blocks meet in a step.
    #[must_use]
    pub fn meetings(&self) -> usize {
        self.groups.len()
    }

    /// Queues the launch with its blocks meeting in this way, for measuring; [`launch`](Operation::launch) chooses by the
    /// shape of the work.
    ///
    /// # Errors
    ///
    /// As for [`launch`](Operation::launch); [`KernelError::NotPersistent`] for a cluster where the GPU has no room for one.
    ///
    /// # Safety
    ///
    /// As for [`launch`](Operation::launch).
    pub unsafe fn launch_as(
        &self,
        how: Option<Cooperation>,
        cuda: &CudaKernels,
        stream: CUstream,
    ) -> Result<(), KernelError> {
        let Self { steps, precision, memory: meeting, .. } = *self;
        let launch = PersistentLaunch { precision, groups: &self.groups, steps, meeting };
        // SAFETY: the caller vouches for the addresses, those of all operations included.
        unsafe { cuda.launch_persistent(&launch, how, stream) }
    }
}

impl Operation for PersistentSteps {
    fn name(&self) -> &'static str {
        persistent_name(self.precision)
    }

    /// Blocks are the items of the largest group. Groups follow each other, and their operations stand side by side.
    fn work(&self) -> Work {
        let items = |group: &Vec<Phase>| group.iter().map(|phase| u64::from(phase.items)).sum();
        let trips = |group: &Vec<Phase>| group.iter().map(|phase| phase.iterations).max().unwrap_or(1);
        let steps = u64::from(self.steps);
        let sum = |of: fn(&Work) -> u64| {
            self.operations.iter().fold(0_u64, |sum, operation| sum.saturating_add(of(&operation.work())))
        };
        Work {
            kernel: self.name(),
            blocks: self.groups.iter().map(items).max().unwrap_or(1),
            iterations: steps * self.groups.iter().map(trips).sum::<u64>(),
            bytes: steps.saturating_mul(sum(|work| work.bytes)),
            flops: steps.saturating_mul(sum(|work| work.flops)),
        }
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        let mut seen = BTreeSet::new();
        let all = self.operations.iter().flat_map(|operation| operation.buffers());
        all.chain([(self.memory, Self::MEMORY_BYTES)]).filter(|buffer| seen.insert(*buffer)).collect()
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.launch_as(None, cuda, stream) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        for _ in 0..self.steps {
            for operation in self.operations.iter() {
                // SAFETY: the caller vouches for the memory.
                unsafe { operation.run_on_host(memory) }?;
            }
        }
        Ok(())
    }
}
