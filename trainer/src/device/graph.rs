//! Training steps as graphs: captured once, launched many times.

use super::{Device, Engine, SimView};
use crate::arithmetic::Arithmetic;
use crate::error::Result;
use allocators::{Capture, Graph, Memory};
use kernels::Operation;
use std::sync::Arc;

/// Work that was captured, with the memory that it uses.
#[derive(Debug)]
pub struct StepGraph {
    graph: Graph,
    /// What a launch computes, where the host does.
    operations: Vec<Box<dyn Operation>>,
}

impl StepGraph {
    /// Waits for the last launch and gives up the memory.
    ///
    /// # Errors
    /// Those of the driver and of the allocator.
    pub fn release(self) -> Result<()> {
        Ok(self.graph.release()?)
    }
}

impl Device {
    /// Captures the work that `queue` queues on the stream that is under way; nothing of it runs. All buffers that it
    /// allocates are gone when it returns.
    ///
    /// # Errors
    /// Those of the driver and of the allocator, and of `queue`.
    pub fn capture(&self, memory: &Arc<Memory>, queue: impl FnOnce() -> Result<()>) -> Result<StepGraph> {
        let _range = self.range(format_args!("capture"));
        let driver = self.driver();
        let capture = Capture::begin(memory, &driver, self.stream())?;
        *self.recorded() = matches!(self.engine, Engine::Sim(_)).then(Vec::new);
        let queued = queue();
        let operations = self.recorded().take().unwrap_or_default();
        queued?;
        Ok(StepGraph { graph: capture.end()?, operations })
    }

    /// Queues captured work on the stream that is under way.
    ///
    /// # Errors
    /// Those of the driver, and on the simulated device of the operations.
    pub fn launch(&self, step: &mut StepGraph) -> Result<()> {
        step.graph.launch(self.stream())?;
        if let Engine::Sim(driver) = &self.engine {
            for operation in &step.operations {
                // SAFETY: the memory is pinned as long as the graph lives; buffers from outside are live by the contract
                // of the capture. This device computes on the calling thread alone.
                unsafe { operation.run_on_host(&SimView(driver)) }?;
            }
        }
        Ok(())
    }

    /// Has the kernels of linear layers ready, which cannot be loaded while a stream is captured.
    ///
    /// # Errors
    /// Those of loading them; [`KernelError::NoCublasLt`](kernels::KernelError::NoCublasLt) for a library that is not there.
    pub(crate) fn prepare(&self, arithmetic: &Arithmetic) -> Result<()> {
        let Some(kernels) = self.kernels() else { return Ok(()) };
        match arithmetic.engine() {
            _ if arithmetic.plain().is_some() => Ok(()),
            kernels::Engine::Own => Ok(kernels.prepare(arithmetic.precision())?),
            kernels::Engine::CublasLt => Ok(kernels.prepare_cublaslt(arithmetic.precision())?),
        }
    }
}
