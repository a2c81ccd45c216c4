//! The interface between the trainer and the kernels.

use cudarc::driver::sys::CUstream;

use crate::cuda::CudaKernels;
use crate::error::KernelError;
use crate::host::{HostBuffers, HostMemory};

/// Clones operations whose type is not known; implemented for every operation that is `Clone`.
pub trait BoxedOperation {
    /// A copy of the operation.
    fn boxed(&self) -> Box<dyn Operation>;
}

impl<T: Operation + Clone + 'static> BoxedOperation for T {
    fn boxed(&self) -> Box<dyn Operation> {
        Box::new(self.clone())
    }
}

impl Clone for Box<dyn Operation> {
    fn clone(&self) -> Self {
        self.as_ref().boxed()
    }
}

/// One launch: what it computes, what it costs, and how to run it on a GPU or on the host.
pub trait Operation: BoxedOperation + std::fmt::Debug + Send + Sync {
    /// Kernel name, e.g. `gemm_nt_tiled`: the CUDA entry point, the NVTX name and the key in device profiles.
    fn name(&self) -> &'static str;

    /// Geometry and traffic of the launch, for the simulated device's cost model.
    fn work(&self) -> Work;

    /// Addresses and sizes in bytes of the buffers that the launch reads and writes, each once, for the simulated
    /// device's L2 cache. A gather's source is not included, because the rows read depend on its indices.
    fn buffers(&self) -> Vec<(u64, u64)>;

    /// Queues the launch on `stream`; returns without waiting for it.
    ///
    /// # Errors
    ///
    /// [`KernelError::Shape`] for an invalid shape, before anything is queued; [`KernelError::Driver`] if the driver
    /// refuses the launch, which may also report an earlier asynchronous failure.
    ///
    /// # Safety
    ///
    /// `cuda` was loaded in the current context, and `stream` is a stream of it. Until the stream has completed this
    /// launch, every address is valid for its shape on that context's device and aligned to its element, nothing else
    /// writes the inputs or accesses the outputs, and no output overlaps another buffer of the launch.
    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError>;

    /// Runs the CPU reference on host memory; `memory` translates device addresses. Returns after the outputs have been
    /// written.
    ///
    /// # Errors
    ///
    /// Invalid ranges and shapes, including overlapping buffers, are reported before memory is accessed; invalid
    /// indices and labels before anything is computed from them.
    ///
    /// # Safety
    ///
    /// The translated ranges are valid, and nothing else accesses them during the call (reading the inputs is allowed).
    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError>;
}

/// The definition of one of this crate's operations, from which [`Operation`] is implemented.
pub(crate) trait Definition: Clone + std::fmt::Debug + Send + Sync + 'static {
    /// As [`Operation::name`].
    fn name(&self) -> &'static str;

    /// Checks that a launch of this shape is possible.
    ///
    /// # Errors
    ///
    /// [`KernelError::Shape`] if it is not, and [`KernelError::Misaligned`] for addresses that no kernel accepts.
    fn check(&self) -> Result<(), KernelError>;

    /// As [`Operation::work`].
    fn work(&self) -> Work;

    /// As [`Operation::buffers`].
    fn buffers(&self) -> Vec<(u64, u64)>;

    /// Queues the launch after the check.
    ///
    /// # Errors
    ///
    /// As for [`Operation::launch`].
    ///
    /// # Safety
    ///
    /// As for [`Operation::launch`].
    unsafe fn queue(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError>;

    /// Computes the same on host memory after the check.
    ///
    /// # Errors
    ///
    /// As for [`Operation::run_on_host`].
    fn compute(&self, buffers: &mut HostBuffers<'_>) -> Result<(), KernelError>;
}

impl<T: Definition> Operation for T {
    fn name(&self) -> &'static str {
        Definition::name(self)
    }

    fn work(&self) -> Work {
        Definition::work(self)
    }

    fn buffers(&self) -> Vec<(u64, u64)> {
        Definition::buffers(self)
    }

    unsafe fn launch(&self, cuda: &CudaKernels, stream: CUstream) -> Result<(), KernelError> {
        self.check()?;
        // SAFETY: the caller guarantees the addresses.
        unsafe { self.queue(cuda, stream) }
    }

    unsafe fn run_on_host(&self, memory: &dyn HostMemory) -> Result<(), KernelError> {
        self.check()?;
        // SAFETY: the caller guarantees the memory.
        self.compute(&mut unsafe { HostBuffers::new(memory, Definition::name(self)) })
    }
}

/// The work of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Thread blocks of the launch.
    pub blocks: u64,
    /// Iterations of the busiest block's serial main loop, 1 if it has none.
    pub iterations: u64,
    /// Minimum number of bytes read and written: each input and each output once.
    pub bytes: u64,
    /// Floating-point operations; a fused multiply-add counts two, an exponential one.
    pub flops: u64,
}
