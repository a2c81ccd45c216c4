//! How kernels run on a device: on the GPU, or on the host for the simulated one. What a [`Driver`] is for memory, streams and
//! events, an executor is for launches.

use crate::arithmetic::Arithmetic;
use crate::error::Result;
use kernels::{CudaKernels, Operation};
use std::fmt;
use std::sync::Arc;
use vramlab::instruments::nvtx::Ranges;
use vramlab::{Driver, IdleCosts, MeteredDriver, StreamId};

/// Runs kernels on the streams of one driver. [`Device`](super::Device) counts and times the launches.
pub(super) trait Executor: fmt::Debug + Send + Sync {
    /// Queues an operation.
    ///
    /// # Errors
    /// [`TrainError::Kernel`](crate::TrainError::Kernel) for shapes or addresses that cannot be,
    /// [`TrainError::Driver`](crate::TrainError::Driver) when the driver refuses.
    ///
    /// # Safety
    /// Every address in the operation is valid for its shape until the stream has passed it, and no output overlaps another
    /// buffer of it. The stream is one of this executor's driver.
    unsafe fn launch(&self, operation: &dyn Operation, stream: StreamId) -> Result<()>;

    /// The host's own work after a call to the driver and before the next, where the device's clock is a model of it too.
    /// Called outside of what is measured of a call.
    fn between_calls(&self) {}

    /// Has the kernels of linear layers ready, which cannot be loaded while a stream is captured.
    ///
    /// # Errors
    /// Those of loading them.
    fn prepare(&self, _arithmetic: &Arithmetic) -> Result<()> {
        Ok(())
    }

    /// What is launched from now on belongs to a graph, and does not run. A driver that captures does this itself.
    fn begin_graph(&self) {}

    /// Ends that; what a launch of the graph has to compute on the host.
    fn end_graph(&self) -> Vec<Box<dyn Operation>> {
        Vec::new()
    }

    /// Computes what [`end_graph`](Self::end_graph) gave: call it after each launch of that graph.
    ///
    /// # Errors
    /// Those of the operations.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch), of every operation.
    unsafe fn run_graph(&self, _operations: &[Box<dyn Operation>]) -> Result<()> {
        Ok(())
    }

    /// The kernels, where they run on a GPU.
    fn kernels(&self) -> Option<&CudaKernels> {
        None
    }

    /// Device time in kernels and copies so far; `None` on a device that cannot tell.
    fn busy_ns(&self) -> Option<u64> {
        None
    }

    /// Names a stream on a profiler's timeline, if a profiler can see it.
    ///
    /// # Safety
    /// The stream is a live one of this executor's driver.
    unsafe fn name_stream(&self, _ranges: Ranges, _stream: StreamId, _name: &str) {}

    /// Starts or stops what a profiler captures, if a profiler can see the device.
    fn profile(&self, _on: bool) {}
}

/// What a device is made of.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) executor: Arc<dyn Executor>,
    /// What allocators and copies call.
    pub(super) driver: Arc<dyn Driver>,
    /// The meter of that driver's calls; launches are counted by it too.
    pub(super) meter: Arc<MeteredDriver>,
    /// The first stream.
    pub(super) stream: StreamId,
    /// What calls cost on the idle device, if that was measured.
    pub(super) idle: Option<IdleCosts>,
}
