//! A GPU: kernels are launched through the CUDA driver.

use super::{Executor, Parts};
use crate::arithmetic::Arithmetic;
use crate::error::Result;
use kernels::{CudaKernels, Fill, Operation};
use std::sync::Arc;
use vramlab::device::CallObserver;
use vramlab::instruments::nvtx::Ranges;
use vramlab::{CudaDriver, Driver, IdleCosts, MeteredDriver, StreamId};

/// Launches kernels on a GPU.
#[derive(Debug)]
struct CudaExecutor {
    /// Dropped before the driver, whose context holds them.
    kernels: CudaKernels,
    driver: Arc<CudaDriver>,
}

/// Opens the GPU of this number and measures what calls cost on it while it is idle.
///
/// # Errors
/// Errors of the driver and of loading the kernels.
pub(super) fn open(number: usize, observer: Option<CallObserver>) -> Result<Parts> {
    let driver = Arc::new(CudaDriver::new(number)?);
    driver.bind_to_thread()?;
    let kernels = CudaKernels::load()?;
    let stream = driver.stream_create()?;
    let mut idle = IdleCosts::measure(driver.as_ref(), stream)?;
    idle.kernel_launch = launch_cost(&driver, &kernels, stream)?;
    let bare = Arc::clone(&driver) as Arc<dyn Driver>;
    let meter = Arc::new(MeteredDriver::new(bare, Some(idle.clone()), observer));
    Ok(Parts {
        executor: Arc::new(CudaExecutor { kernels, driver }),
        driver: Arc::clone(&meter) as Arc<dyn Driver>,
        meter,
        stream,
        idle: Some(idle),
    })
}

impl Executor for CudaExecutor {
    unsafe fn launch(&self, operation: &dyn Operation, stream: StreamId) -> Result<()> {
        // SAFETY: the kernels were loaded in the context that this driver's streams belong to; the caller keeps the addresses
        // valid.
        Ok(unsafe { operation.launch(&self.kernels, self.driver.raw_stream(stream)?) }?)
    }

    fn prepare(&self, arithmetic: &Arithmetic) -> Result<()> {
        if !arithmetic.is_plain() {
            self.kernels.prepare(arithmetic.precision())?;
        }
        Ok(())
    }

    fn kernels(&self) -> Option<&CudaKernels> {
        Some(&self.kernels)
    }

    unsafe fn name_stream(&self, ranges: Ranges, stream: StreamId, name: &str) {
        // SAFETY: the caller vouches that it is a live stream of this driver, which is CUDA's.
        unsafe { ranges.name_stream(stream, name) };
    }

    fn profile(&self, on: bool) {
        // Without a profiler these calls do nothing, and with one a failure only widens its capture.
        let _ = if on { self.driver.profiler_start() } else { self.driver.profiler_stop() };
    }
}

/// Host cost of a launch into an empty queue: the median of some.
fn launch_cost(driver: &Arc<CudaDriver>, kernels: &CudaKernels, stream: StreamId) -> Result<u64> {
    const LAUNCHES: usize = 101;
    let target = driver.mem_alloc(256)?;
    let fill = Fill { len: 1, value: 0.0, out: target.get() };
    let clock = driver.clock();
    let timed = |_| -> Result<u64> {
        let start = clock.now_ns();
        // SAFETY: the kernels belong to this driver's context; the target holds the one value and is freed below,
        // after the synchronise.
        unsafe { fill.launch(kernels, driver.raw_stream(stream)?) }?;
        Ok(clock.now_ns() - start)
    };
    let mut times = (0..LAUNCHES).map(timed).collect::<Result<Vec<u64>>>()?;
    driver.stream_synchronize(stream)?;
    // SAFETY: allocated above, freed once, and its work is done.
    unsafe { driver.mem_free(target)? };
    times.sort_unstable();
    Ok(times[LAUNCHES / 2])
}
