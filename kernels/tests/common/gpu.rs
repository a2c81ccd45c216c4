//! A GPU for tests, if there is one.

use std::ffi::c_int;

use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};
use kernels::{CudaKernels, KernelError, Operation};

/// Only one test uses the GPU at a time. While a thread captures a stream, the driver refuses other threads'
/// allocations, and their calls can invalidate the capture.
static GPU_LOCK: Mutex<()> = Mutex::new(());

/// The first GPU's primary context, current on this thread, with the kernels loaded; only one exists at a time.
pub(crate) struct Gpu {
    device: c_int,
    pub(crate) stream: sys::CUstream,
    /// `None` only during the drop: modules must be unloaded before their context is released.
    pub(crate) kernels: Option<CudaKernels>,
    _lock: MutexGuard<'static, ()>,
}

/// The reason that no GPU can be used, if any.
fn no_gpu() -> Option<String> {
    // SAFETY: only tries to open the library. It must be the first call: cudarc panics without the library.
    if !unsafe { sys::is_culib_present() } {
        return Some("no CUDA driver".into());
    }
    let is_present = result::init().is_ok() && result::device::get_count().is_ok_and(|count| count > 0);
    (!is_present).then(|| "no CUDA device".into())
}

impl Gpu {
    /// The reason that tests cannot run: there is no GPU.
    #[allow(dead_code, reason = "for some tests")]
    pub(crate) fn missing() -> Option<String> {
        no_gpu()
    }

    /// Panics without a GPU.
    pub(crate) fn new() -> Self {
        assert_eq!(no_gpu(), None, "this test needs a GPU");
        // A test that failed has released its own context.
        let lock = GPU_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let device = result::device::get(0).unwrap();
        // SAFETY: the device exists; the context is released in `drop`.
        unsafe { result::ctx::set_current(result::primary_ctx::retain(device).unwrap()) }.unwrap();
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Self { device, stream, kernels: Some(CudaKernels::load().unwrap()), _lock: lock }
    }

    /// A GPU that uses only the tiles for all GPUs.
    #[allow(dead_code, reason = "for some tests")]
    pub(crate) fn without_warpgroups() -> Self {
        let mut gpu = Self::new();
        gpu.kernels = gpu.kernels.take().map(CudaKernels::without_warpgroups);
        gpu
    }

    #[allow(dead_code, reason = "for some tests")]
    pub(crate) fn launch(&self, operation: &dyn Operation) -> Result<(), KernelError> {
        // SAFETY: the context is current, and callers pass operations on their own live memory.
        unsafe { operation.launch(self.kernels.as_ref().unwrap(), self.stream) }
    }

    /// Uploads `image`, runs `work` with its address, and downloads it.
    pub(crate) fn with_region(&self, image: &[u8], work: impl FnOnce(u64)) -> Vec<u8> {
        let mut after = vec![0; image.len()];
        // SAFETY: the region is as long as `image` and `after`, and is freed after the stream's work on it has
        // completed.
        unsafe {
            let region = result::malloc_sync(image.len()).unwrap();
            result::memcpy_htod_sync(region, image).unwrap();
            // The copy returns once its source is staged; the stream does not wait for the remainder of the copy.
            result::ctx::synchronize().unwrap();
            work(region);
            result::stream::synchronize(self.stream).unwrap();
            result::memcpy_dtoh_sync(&mut after, region).unwrap();
            result::free_sync(region).unwrap();
        }
        after
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        drop(self.kernels.take());
        // SAFETY: both were created in `new`, and no work is queued any more.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
